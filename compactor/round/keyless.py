"""Records without a key in a round's dirty range: what is known of them without reading, and what the run history says of them."""

from __future__ import annotations

from compactor.config.settings import CleanerSettings
from compactor.control.state import PartitionState
from compactor.control.summary import PartitionSummary
from compactor.model.keyless import KeylessRecords, KeylessRecordsRefused
from compactor.round.ports import Stats


def raise_if_known_keyless_records_are_refused(state: PartitionState, cleaner: CleanerSettings, end: int) -> None:
    """Raise KeylessRecordsRefused if an earlier round was refused for records without a key of which at least the newest is still in the
    dirty range, which ends before offset ``end``. A blocked partition is not read again and again.
    """
    known = known_refused_keyless_records(state, cleaner, end)
    if known is not None:
        raise KeylessRecordsRefused(state.topic, known)


def known_refused_keyless_records(state: PartitionState | PartitionSummary, cleaner: CleanerSettings, end: int) -> KeylessRecords | None:
    """Return the records without a key for which the next round over offsets below ``end`` will be refused, as an earlier round has counted
    them; None if none are known.
    """
    keyless = state.quarantine.keyless if state.quarantine else None
    refused = cleaner.keyless_records == "refuse" and keyless is not None and state.first_dirty_offset <= keyless.last_offset < end
    return keyless if refused else None


def keyless_stats_for_run_history(keyless: KeylessRecords) -> Stats:
    """Return how many records of the round's dirty range had no key, of how many, as figures for the run history; none if all had one."""
    return {"keyless_records": keyless.count, "records_dirty": keyless.records} if keyless.count else {}
