"""Holders of erased keys: objects that may hold a key, and what must happen until a live segment no longer holds it. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from compactor.config.settings import CleanerSettings
from compactor.control.state import PartitionState
from compactor.model.base import ReasonOrEmpty
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import assess_round
from compactor.views.search import FoundRecord
from compactor.views.time_formats import format_duration

ANY_KEY = -1
"""Key number of an object that could not be read and may hold any of the keys."""
READ_ONLY = "its tier is only read: nothing is compacted there"


class KeyHoldingObjectState(StrEnum):
    """State of an object that contains a record key or its hash, for example live or waiting for deletion."""

    LIVE = "live"
    REPLACED = "replaced"
    UNDONE = "undone"
    RETIRING = "retiring"
    OPEN_ROUND = "open round"
    IMPORTING = "importing"
    ORPHAN = "orphan"
    BROKERS = "brokers"
    OLD_VERSION = "old version"
    GENERATION = "generation"
    TABLE = "table"
    SIDECAR = "sidecar"
    SCRATCH = "scratch"
    UPLOAD = "unfinished upload"
    FORMER_TOPIC = "former topic"


@dataclass(frozen=True)
class ObjectHoldingRecordKey:
    """An object that contains a record or hash of a record key, or may contain one.

    key: index of the record key in KeySearchRequest's keys; ANY_KEY if it may be any of them.
    what: value (the latest one), tombstone, superseded, aborted, undecided, record (in a segment that readers do not get), keyed hash, or
        unknown.
    waits_for: what must happen before the object is deleted.
    until_ms: earliest time at which it can be deleted, in milliseconds; None if no time is known.
    sha256: recorded digest of the segment's log; empty if none was recorded.
    run_id: the round that replaced or wrote the segment.
    """

    partition: str
    object: str
    state: KeyHoldingObjectState
    key: int
    what: str
    waits_for: str
    until_ms: int | None = None
    segment: str = ""
    records: int = 0
    first_offset: int = -1
    last_offset: int = -1
    bytes: int = 0
    sha256: str = ""
    run_id: str = ""

    @property
    def has_found_record(self) -> bool:
        """Return whether a record with the key was found in the object."""
        return self.records > 0


@dataclass(frozen=True)
class UnsearchedKeyLocation:
    """A place where a record of the keys may also be but where it was not searched for, and the reason why not."""

    what: str
    why: str


@dataclass(frozen=True)
class KeyRemovalRound:
    """A round after which readers no longer get a record of a key.

    at_ms: publication time by the store's clock.
    """

    partition: str
    run_id: str
    at_ms: int


@dataclass(frozen=True)
class PartitionKeySearchResult:
    """Objects of one partition that contain the keys, as of position ``slot`` of its control log.

    removals: by the key's number, rounds after which readers no longer get records of the key.
    movable: ids of live segments that a round that is forced now would change: it would remove a key from them, or give a tombstone of a
        key its delete horizon.
    filtered: number of live segments that were not read because their Bloom filter has none of the keys.
    """

    partition: TopicPartition
    slot: int
    holders: tuple[ObjectHoldingRecordKey, ...]
    removals: Mapping[int, tuple[KeyRemovalRound, ...]]
    movable: frozenset[str]
    not_covered: tuple[UnsearchedKeyLocation, ...]
    segments: int
    filtered: int
    bytes: int = 0


@dataclass
class KeyRecordsInSegment:
    """Records of one key in one segment.

    newest: the record with the highest offset, whether committed or not.
    latest: the committed record with the highest offset; None if there is none.
    """

    segment: RemoteLogSegmentMetadata
    key: int
    newest: FoundRecord
    latest: FoundRecord | None = None
    records: int = 0
    first_offset: int = -1


def group_records_by_segment_and_key(records: Iterable[FoundRecord], keys: Sequence[bytes]) -> list[KeyRecordsInSegment]:
    """Return the records grouped by segment and key. The groups are in the order of their first records.

    :param records: records of the keys, newest first.
    """
    numbers = {key: number for number, key in enumerate(keys)}
    found: dict[tuple[str, int], KeyRecordsInSegment] = {}
    for one in records:
        if one.key is not None and not one.control:
            key = numbers[one.key]
            entry = found.setdefault((one.segment.id, key), KeyRecordsInSegment(one.segment, key, one))
            entry.records += 1
            entry.first_offset = one.offset
            if entry.latest is None and one.sets_value_of_key:
                entry.latest = one
    return list(found.values())


def newest_committed_record_by_key_number(key_records: Iterable[KeyRecordsInSegment]) -> Mapping[int, FoundRecord]:
    """Return the newest committed record of each key, by key number.

    :param key_records: records by segment, newest segment first.
    """
    latest: dict[int, FoundRecord] = {}
    for one in key_records:
        if one.latest is not None:
            latest.setdefault(one.key, one.latest)
    return latest


@dataclass(frozen=True)
class KeyStatusInSegment:
    """Kind of the records that a live segment has of a key, and what must happen to remove them.

    what: value (the latest one), tombstone, superseded, aborted or undecided.
    until_ms: earliest time at which they can be removed, in milliseconds; None if no time is known.
    movable: whether a round that is forced now would remove them, or give a tombstone its delete horizon.
    """

    what: str
    waits_for: str
    until_ms: int | None = None
    movable: bool = False


@dataclass(frozen=True)
class ErasureRules:
    """Rules that determine when the cleaner removes the records of a key, for one state of the partition.

    end: first offset that a round would not clean.
    compacts: whether the tier can be compacted at all.
    """

    state: PartitionState
    cleaner: CleanerSettings
    now_ms: int
    end: int
    compacts: bool

    @staticmethod
    def erasure_rules_for_partition_state(
        state: PartitionState, cleaner: CleanerSettings, now_ms: int, *, is_tier_compactable: bool
    ) -> ErasureRules:
        """Return the rules for a state of the partition.

        :param is_tier_compactable: whether the tier can be compacted at all.
        """
        return ErasureRules(state, cleaner, now_ms, assess_round(state, cleaner, now_ms, force=True).end, is_tier_compactable)

    def key_status_in_segment(self, key_records: KeyRecordsInSegment, latest: FoundRecord | None) -> KeyStatusInSegment:
        """Return what kind of record a segment has of a key, and what must happen to remove the record.

        :param key_records: the records of the key in the segment.
        :param latest: the newest committed record of the key in the partition; None if there is none.
        """
        here = latest if latest is not None and latest.segment.id == key_records.segment.id else None
        if here is not None and not here.is_tombstone:
            return KeyStatusInSegment("value", "a tombstone of the key: this is its latest value")
        what = "tombstone" if here is not None else {"abort": "aborted", "open": "undecided"}.get(key_records.newest.outcome, "superseded")
        if not self.compacts:
            return KeyStatusInSegment(what, READ_ONLY)
        if reason := self._reason_segment_is_not_cleaned(key_records.segment):
            return KeyStatusInSegment(what, reason)
        if here is not None:
            return self._tombstone_status(here)
        if what == "undecided":
            return KeyStatusInSegment(what, "the end of its transaction, and a round after that")
        return KeyStatusInSegment(what, f"the next round{self._quarantine_note_or_empty()}, and grace after it", movable=True)

    def _tombstone_status(self, tombstone: FoundRecord) -> KeyStatusInSegment:
        after = f"a round{self._quarantine_note_or_empty()}, and grace after it"
        if tombstone.horizon_ms is None:
            ahead = format_duration(self.cleaner.delete_retention_ms)
            more = f"a round, which gives it a delete horizon (delete_retention_ms, {ahead} ahead)"
            return KeyStatusInSegment("tombstone", f"{more}; then {after}", self.now_ms + self.cleaner.delete_retention_ms, movable=True)
        passed = tombstone.horizon_ms <= self.now_ms
        text = "its delete horizon has passed; " if passed else "its delete horizon, so that slow readers see it; then "
        return KeyStatusInSegment("tombstone", text + after, None if passed else tombstone.horizon_ms, movable=passed)

    def _reason_segment_is_not_cleaned(self, segment: RemoteLogSegmentMetadata) -> ReasonOrEmpty:
        """Return why no round cleans this segment now, or an empty string."""
        state = self.state
        if segment.start_offset < self.end:
            return ""
        if state.mirrored and segment.id == state.live[-1].id:
            return "the next segment of its partition, because the newest one is not cleaned"
        undecided = state.live[-1].open_txn_offset
        if 0 <= undecided <= segment.end_offset:
            return f"the end of the transaction that is open since offset {undecided}"
        return f"min_compaction_lag_ms ({format_duration(self.cleaner.min_compaction_lag_ms)})"

    def _quarantine_note_or_empty(self) -> str:
        why = self.state.quarantine
        return f" (the partition is quarantined: {why.reason})" if why else ""
