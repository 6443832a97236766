"""When something may be deleted."""

from __future__ import annotations

import pytest

from compactor.control.log_start import earliest_deletion_time_ms, grace_period_ms, import_abandoned_at_ms
from compactor.control.ports import ObjectRetention
from compactor.control.summary import GroupAwaitingDeletionSummary, ImportSummary

RETENTION = ObjectRetention(grace_ms=600, undo_window_ms=900, orphan_age_ms=5_000)


def group(
    *, undone: bool = False, slot: int = 7, grace_ms: int | None = None, undo_window_ms: int | None = None
) -> GroupAwaitingDeletionSummary:
    return GroupAwaitingDeletionSummary(
        slot=slot, since_ms=None, run_id="r", undone=undone, segments=1, size_bytes=10, grace_ms=grace_ms, undo_window_ms=undo_window_ms
    )


@pytest.mark.parametrize(
    ("undone", "grace_ms", "undo_window_ms", "kept_ms"),
    [(False, 600, 900, 900), (False, 600, 100, 600), (True, 600, 900, 600), (False, 0, 0, 0), (True, 0, 900, 0)],
)
def test_the_longer_of_grace_and_undo_window_counts_but_what_was_undone_needs_no_window(
    undone: bool, grace_ms: int, undo_window_ms: int, kept_ms: int
) -> None:
    assert grace_period_ms(group(undone=undone), ObjectRetention(grace_ms, undo_window_ms)) == kept_ms


def test_a_group_waits_from_the_time_of_its_own_slot() -> None:
    assert earliest_deletion_time_ms(group(), RETENTION, {7: 1_000, 8: 5}, 99_999) == 1_900
    assert earliest_deletion_time_ms(group(undone=True), RETENTION, {7: 1_000, 8: 5}, 99_999) == 1_600


def test_a_slot_whose_time_is_not_known_counts_from_now() -> None:
    assert earliest_deletion_time_ms(group(), RETENTION, {8: 1_000}, 99_999) == 100_899
    assert import_abandoned_at_ms(ImportSummary(slot=7, since_ms=None), RETENTION, {}, 99_999) == 104_999


def test_an_import_is_stale_by_the_age_of_orphans() -> None:
    assert import_abandoned_at_ms(ImportSummary(slot=7, since_ms=None), RETENTION, {7: 1_000}, 99_999) == 6_000


@pytest.mark.parametrize(
    ("recorded", "kept_ms"),
    [((None, None), 900), ((0, 0), 900), ((5_000, 0), 5_000), ((0, 7_000), 7_000), ((5_000, 7_000), 7_000)],
)
def test_what_was_recorded_at_publication_is_kept_by_everybody(recorded: tuple[int | None, int | None], kept_ms: int) -> None:
    waits = group(grace_ms=recorded[0], undo_window_ms=recorded[1])
    assert grace_period_ms(waits, RETENTION) == kept_ms
    assert grace_period_ms(waits, ObjectRetention(0, 0)) == max(recorded[0] or 0, recorded[1] or 0), (
        "zero is at once only where zero was recorded"
    )


def test_an_undone_rounds_outputs_are_kept_for_the_recorded_grace() -> None:
    assert grace_period_ms(group(undone=True, grace_ms=5_000, undo_window_ms=9_000), ObjectRetention(0, 0)) == 5_000
