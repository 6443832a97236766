"""Random schedules of tiers that brokers write: none may end in a violation, and each rule of the protocol that is dropped is noticed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.kafka_schedule import KAFKA_MUTATIONS, kafka_bites, run_kafka_schedule

SCHEDULES = 30
NOTICED = {
    "R3": 0, "R3b": 3, "R8": 0, "ascending": 51, "publish begun": 7, "look": 0, "behind": 51, "grace": 0, "cut off": 2, "wait": 42,
    "in flight": 4,
}  # fmt: skip
"""From which seed on it does not take long."""
WINDOW = 60


def test_random_schedules_under_brokers_end_without_a_violation() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        outcome = run_kafka_schedule(seed)
        assert not outcome.violations, f"python -m tests.simulation --brokers --trace {seed}"
        counts.update(outcome.counts)
    for kind in ("segments_mirrored", "publish_begun", "round_published", "intent_undone", "retired", "dropped"):
        assert counts[kind] > SCHEDULES / 50, kind


def test_a_seed_gives_one_schedule_under_brokers() -> None:
    assert run_kafka_schedule(7, trace=True) == run_kafka_schedule(7, trace=True)


@pytest.mark.parametrize("name", NOTICED)
def test_a_missing_rule_of_the_protocol_is_noticed(name: str) -> None:
    seeds = range(NOTICED[name], NOTICED[name] + WINDOW)
    assert next(kafka_bites(KAFKA_MUTATIONS[name], seeds), None) is not None
