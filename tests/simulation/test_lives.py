"""Whole lives: retention, truncation, topics created again, rounds, undo, daemons and readers. ``--lives --seeds 1000`` runs more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.life_mutations import LIFE_MUTATIONS, life_bites
from tests.simulation.lives import run_life

LIVES = 12
NOTICED = (
    "nobody is asked who the topic is",
    "superseded topics come back, and nobody is asked",
    "restored topics are not adopted",
    "readers do not know the log start",
)
"""Mutations that one of the first lives notices; ``--lives --drop all`` tries the rarer ones, too."""
WINDOW = 60


def test_each_incarnation_holds_one_topic_and_readers_get_what_is_theirs() -> None:
    counts: Counter[str] = Counter()
    for seed in range(LIVES):
        outcome = run_life(seed)
        assert not outcome.violations, f"python -m tests.simulation --lives --trace {seed}"
        counts.update(outcome.counts)
    kinds = ("incarnation_opened", "log_start_raised", "round_published", "retired")
    assert min(counts[kind] for kind in kinds) > 0, counts


@pytest.mark.parametrize("name", NOTICED)
def test_missing_rule_is_noticed_by_a_life(name: str) -> None:
    assert next(life_bites(LIFE_MUTATIONS[name], range(WINDOW)), None) is not None
