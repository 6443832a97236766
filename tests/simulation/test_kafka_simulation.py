"""Random schedules of tiers that brokers write: none may end in a violation, and each rule of the protocol that is dropped is noticed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.kafka_schedule import EXPIRY_MUTATIONS, KAFKA_MUTATIONS, kafka_bites, run_kafka_schedule

SCHEDULES = 30
NOTICED = {
    "R3": 0, "R3b": 3, "R8": 0, "ascending": 51, "publish begun": 1, "look": 0, "behind": 51, "grace": 0, "cut off": 2, "wait": 42,
    "in flight": 4,
}  # fmt: skip
"""From which seed on it does not take long."""
NOTICED_WHILE_EXPIRING = {"expired without log start": 1, "the present log start counts": 8}
WINDOW = 60


def test_random_schedules_under_brokers_end_without_a_violation() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        outcome = run_kafka_schedule(seed)
        assert not outcome.violations, f"python -m tests.simulation --brokers --trace {seed}"
        counts.update(outcome.counts)
    for kind in ("segments_mirrored", "publish_begun", "round_published", "intent_undone", "retired", "dropped"):
        assert counts[kind] > SCHEDULES / 50, kind


def test_random_schedules_while_brokers_expire_segments_end_without_a_violation() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        outcome = run_kafka_schedule(seed, expires=True)
        assert not outcome.violations, f"python -m tests.simulation --brokers --trace {seed}"
        counts.update(outcome.counts)
    for kind in ("broker_log_start_seen", "publish_begun", "round_published", "intent_undone", "retired"):
        assert counts[kind] > SCHEDULES / 50, kind


def test_a_seed_gives_one_schedule_under_brokers() -> None:
    assert run_kafka_schedule(7, trace=True) == run_kafka_schedule(7, trace=True)


@pytest.mark.parametrize("name", NOTICED)
def test_a_missing_rule_of_the_protocol_is_noticed(name: str) -> None:
    seeds = range(NOTICED[name], NOTICED[name] + WINDOW)
    assert next(kafka_bites(KAFKA_MUTATIONS[name], seeds), None) is not None


@pytest.mark.parametrize("name", NOTICED_WHILE_EXPIRING)
def test_a_missing_rule_about_expired_segments_is_noticed(name: str) -> None:
    seeds = range(NOTICED_WHILE_EXPIRING[name], NOTICED_WHILE_EXPIRING[name] + WINDOW)
    assert next(kafka_bites(EXPIRY_MUTATIONS[name], seeds, expires=True), None) is not None
