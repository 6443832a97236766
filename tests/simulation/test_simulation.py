"""Random schedules of the real code: none may end in a violation. ``make simulate SEEDS=100000`` runs many more."""

from __future__ import annotations

from collections import Counter

from tests.simulation.schedule import run_schedule

SCHEDULES = 600


def test_random_schedules_end_without_a_violation() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        outcome = run_schedule(seed)
        assert not outcome.violations, f"python -m tests.simulation --trace {seed}"
        counts.update(outcome.counts)
    # The schedules are about something: everything that can be in a log was in some of them.
    assert all(counts[kind] > SCHEDULES / 50 for kind in counts)
    assert len(counts) == 16


def test_a_seed_gives_one_schedule() -> None:
    assert run_schedule(7, trace=True) == run_schedule(7, trace=True)
