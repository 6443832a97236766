"""When something may be deleted."""

from __future__ import annotations

import pytest

from compactor.control.grace import keep_ms, retire_ms, stale_ms
from compactor.control.ports import Retention
from compactor.control.summary import ImportSummary, WaitingSummary

RETENTION = Retention(grace_ms=600, undo_window_ms=900, orphan_age_ms=5_000)


def group(*, undone: bool = False, slot: int = 7) -> WaitingSummary:
    return WaitingSummary(slot=slot, since_ms=None, run_id="r", undone=undone, segments=1, size_bytes=10)


@pytest.mark.parametrize(
    ("undone", "grace_ms", "undo_window_ms", "kept_ms"),
    [(False, 600, 900, 900), (False, 600, 100, 600), (True, 600, 900, 600), (False, 0, 0, 0), (True, 0, 900, 0)],
)
def test_the_longer_of_grace_and_undo_window_counts_but_what_was_undone_needs_no_window(
    undone: bool, grace_ms: int, undo_window_ms: int, kept_ms: int
) -> None:
    assert keep_ms(group(undone=undone), Retention(grace_ms, undo_window_ms)) == kept_ms


def test_a_group_waits_from_the_time_of_its_own_slot() -> None:
    assert retire_ms(group(), RETENTION, {7: 1_000, 8: 5}, 99_999) == 1_900
    assert retire_ms(group(undone=True), RETENTION, {7: 1_000, 8: 5}, 99_999) == 1_600


def test_a_slot_whose_time_is_not_known_counts_from_now() -> None:
    assert retire_ms(group(), RETENTION, {8: 1_000}, 99_999) == 100_899
    assert stale_ms(ImportSummary(slot=7, since_ms=None), RETENTION, {}, 99_999) == 104_999


def test_an_import_is_stale_by_the_age_of_orphans() -> None:
    assert stale_ms(ImportSummary(slot=7, since_ms=None), RETENTION, {7: 1_000}, 99_999) == 6_000
