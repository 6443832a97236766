"""Random lives of brokers' directories: the tier always holds a prefix of one leader's log. ``--way-in --seeds 1000`` runs more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.way_in import run_way_in
from tests.simulation.way_in_mutations import WAY_IN_MUTATIONS, way_in_bites

LIVES = 40
NOTICED = {
    "content and topic id are not compared": 2,
    "content is not compared": 2,
    "gaps are accepted": 6,
    "staged files are not taken": 187,
}
"""Mutation -> a seed that notices it, or one of the seeds after it."""
SEEDS_TRIED = 40


def test_tier_always_holds_a_prefix_of_the_leaders_log() -> None:
    counts: Counter[str] = Counter()
    for seed in (*range(LIVES), 57):  # the last one truncates the log
        outcome = run_way_in(seed)
        assert not outcome.violations, f"python -m tests.simulation --way-in --trace {seed}"
        counts.update(outcome.counts)
    assert counts["segments_tiered"] > LIVES
    assert min(counts[kind] for kind in ("tail_truncated", "round_published", "retired")) > 0


@pytest.mark.parametrize("name", NOTICED)
def test_missing_rule_is_noticed(name: str) -> None:
    first = NOTICED[name]
    assert next(way_in_bites(WAY_IN_MUTATIONS[name], range(first, first + SEEDS_TRIED)), None) is not None
