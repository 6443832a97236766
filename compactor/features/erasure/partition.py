"""Search of one partition for the objects that hold a key. Reads only.

Order: fold < live and replaced segments < LIST < segments that the fold does not know < old versions. Keys are searched in the records of
    every segment whose object exists. An object that cannot be read may hold any key. The answer is as of the fold: later imports are not
    covered, and segments that a later round writes contain only records of segments that are covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from bloom.filter import hash_keys, siphash_key_halves
from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.adapters.stores.s3 import old_version_stores
from compactor.bootstrap import open_tier
from compactor.config.settings import CleanerSettings
from compactor.config.units import format_duration
from compactor.constants import LeaderEpoch, Offset, TimestampMs
from compactor.control import log_start as grace, ordering
from compactor.control.logs import PartitionLog, retry_if_object_missing
from compactor.control.mirror import segment_from_broker_record
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound, Refused
from compactor.kernels.common import Hashes
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.round.drive import scratch_key_prefix
from compactor.round.plan import assess_round
from compactor.tier.ports import ListedObject
from compactor.tier.sidecars import segment_id_in_key, sidecar_key_prefix
from compactor.upkeep.retire import grace_starts_ms
from compactor.views.dump import FoundRecord, RecordSearch

# ---- holders of keys, and what must happen until a live segment no longer holds one. Pure functions. ---------------------------


ANY_KEY = -1
"""Key number of an object that could not be read and may hold any of the keys."""
READ_ONLY = "its tier is only read: nothing is compacted there"


class KeyHoldingObjectState(StrEnum):
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
    """An object that contains a record or hash of a record key, or may.

    key: index in KeySearchRequest's keys; ANY_KEY if any.
    what: value (the latest), tombstone, superseded, aborted, undecided, record (in a segment that readers do not get), keyed hash, unknown.
    until_ms: earliest time at which it can be deleted; None if no time is known.
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
        return self.records > 0


@dataclass(frozen=True)
class UnsearchedKeyLocation:
    """A place that was not searched, and why not."""

    what: str
    why: str


@dataclass(frozen=True)
class KeyRemovalRound:
    """Round after which readers no longer get a key's record. at_ms: publication time by the store's clock."""

    partition: str
    run_id: str
    at_ms: int


@dataclass(frozen=True)
class PartitionKeySearchResult:
    """Objects of one partition that contain the keys, as of position ``slot`` of its control log.

    movable: live segments from which a round that is forced now would remove a key, or where it would set a tombstone's delete horizon.
    filtered: number of live segments that were skipped by their Bloom filters.
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
    """Records of one key in one segment. newest: committed or not. latest: committed."""

    segment: RemoteLogSegmentMetadata
    key: int
    newest: FoundRecord
    latest: FoundRecord | None = None
    records: int = 0
    first_offset: int = -1


def group_found_records(records: Iterable[FoundRecord], keys: Sequence[bytes]) -> list[KeyRecordsInSegment]:
    """Records (newest first) by segment and key, in the order of the groups' first records."""
    numbers = {key: number for number, key in enumerate(keys)}
    found: dict[tuple[str, int], KeyRecordsInSegment] = {}
    for one in records:
        if one.key is not None and not one.control:
            key = numbers[one.key]
            entry = found.setdefault((one.segment.id, key), KeyRecordsInSegment(one.segment, key, one))
            entry.records += 1
            entry.first_offset = one.offset
            if entry.latest is None and one.sets_value:
                entry.latest = one
    return list(found.values())


def newest_committed_records(key_records: Iterable[KeyRecordsInSegment]) -> Mapping[int, FoundRecord]:
    """Segments are given newest first."""
    latest: dict[int, FoundRecord] = {}
    for one in key_records:
        if one.latest is not None:
            latest.setdefault(one.key, one.latest)
    return latest


@dataclass(frozen=True)
class KeyStatusInSegment:
    """Kind of a segment's records of a key, and the condition of their removal.

    what: as in ObjectHoldingRecordKey.
    until_ms: earliest time at which they can be removed; None if no time is known.
    movable: whether a round that is forced now would remove them, or set a tombstone's delete horizon.
    """

    what: str
    waits_for: str
    until_ms: int | None = None
    movable: bool = False


@dataclass(frozen=True)
class ErasureRules:
    """Rules by which the cleaner removes records of a key. end: first offset that a round would not clean. compacts: whether the tier can
    be compacted at all.
    """

    state: PartitionState
    cleaner: CleanerSettings
    now_ms: int
    end: int
    compacts: bool

    @staticmethod
    def for_partition_state(state: PartitionState, cleaner: CleanerSettings, now_ms: int, *, is_tier_compactable: bool) -> ErasureRules:
        return ErasureRules(state, cleaner, now_ms, assess_round(state, cleaner, now_ms, force=True).end, is_tier_compactable)

    def key_status_in_segment(self, key_records: KeyRecordsInSegment, latest: FoundRecord | None) -> KeyStatusInSegment:
        """Parameter ``latest``: the newest committed record of the key in the partition."""
        here = latest if latest is not None and latest.segment.id == key_records.segment.id else None
        if here is not None and not here.is_tombstone:
            return KeyStatusInSegment("value", "a tombstone of the key: this is its latest value")
        what = "tombstone" if here is not None else {"abort": "aborted", "open": "undecided"}.get(key_records.newest.outcome, "superseded")
        if not self.compacts:
            return KeyStatusInSegment(what, READ_ONLY)
        if reason := self._uncleaned_reason(key_records.segment):
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

    def _uncleaned_reason(self, segment: RemoteLogSegmentMetadata) -> str:
        """Return why no round cleans this segment now; empty: one does."""
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


MAX_POSITION = 2**62
NEXT_RETIRE = "the next `retire`"
NEW_FILTER = "`bloom rebuild`, or a round that reads the whole segment"
RECORD = "record"
CUT_OFF = "a round over its segment, of which this part is not read, and grace after it"

StateAndWhatItWaitsFor = tuple[KeyHoldingObjectState, str, int | None]
"""State of an object, what must happen before it is deleted, and the earliest time of that in milliseconds, if known."""


@dataclass(frozen=True)
class KeySearchRequest:
    """Keys to search for. by_filters: skip live segments by their Bloom filters. on_bytes: receives the size of each read segment."""

    keys: tuple[bytes, ...]
    now_ms: int
    by_filters: bool = False
    on_bytes: Callable[[int], None] = lambda size: None


def survey_partition(tier: Tier, partition: TopicPartition, request: KeySearchRequest) -> PartitionKeySearchResult:
    """Raises StoreError, OutOfBudget; BadData if the control log or the brokers' metadata is damaged, or a live object is missing."""

    def search_current_state() -> PartitionKeySearchResult:
        log = tier.open_partition_log(partition)
        return _KeySearch(tier, log, log.refresh_and_check_gaps(), request).search_partition_for_keys()

    return retry_if_object_missing(partition, search_current_state)


@dataclass
class _KeySearch:
    tier: Tier
    log: PartitionLog
    state: PartitionState
    question: KeySearchRequest
    holders: list[ObjectHoldingRecordKey] = field(default_factory=list)
    removals: dict[int, dict[str, KeyRemovalRound]] = field(default_factory=dict)
    not_covered: list[UnsearchedKeyLocation] = field(default_factory=list)
    movable: set[str] = field(default_factory=set)
    segments: int = 0
    bytes: int = 0

    @property
    def partition(self) -> TopicPartition:
        return self.state.topic_partition

    def search_partition_for_keys(self) -> PartitionKeySearchResult:
        filtered = self._search_live_segments()
        self._search_replaced_segments(grace_starts_ms(self.tier.ports, self.log) if self.state.waiting else {})
        self._search_unknown_objects(list(self.tier.ports.layout.list_objects(self.partition)))
        self._search_old_object_versions()
        self._search_key_hashes()
        self._add_untiered_records()
        return PartitionKeySearchResult(
            partition=self.partition,
            slot=self.state.slot,
            holders=tuple(self.holders),
            removals={key: tuple(found.values()) for key, found in self.removals.items()},
            movable=frozenset(self.movable),
            not_covered=tuple(self.not_covered),
            segments=self.segments,
            filtered=filtered,
            bytes=self.bytes,
        )

    # --- segments that the fold names ---

    def _search_live_segments(self) -> int:
        """Newest first, because later markers decide about transactions. Return how many segments their filters have ruled out."""
        searcher = self._create_searcher(self.tier)
        ruled_out = self._ids_ruled_out()
        found: list[KeyRecordsInSegment] = []
        for segment in reversed(self.state.live):
            if segment.id in ruled_out:
                continue
            try:
                found += group_found_records(searcher.find_records([segment], keys=self.question.keys), self.question.keys)
            except BadData as error:
                self._search_segment(self.tier, segment, KeyHoldingObjectState.LIVE, f"the next round ({error.cause})")
        latest = newest_committed_records(found)
        cleaner = self.tier.cleaner_settings_for_topic(self.partition.topic)
        rules = ErasureRules.for_partition_state(self.state, cleaner, self.question.now_ms, is_tier_compactable=self.tier.kind.compacts)
        for one in found:
            status = rules.key_status_in_segment(one, latest.get(one.key))
            if status.movable:
                self.movable.add(one.segment.id)
            self._add_segment_holder(one.segment, KeyHoldingObjectState.LIVE, status.what, status.waits_for, status.until_ms, records=one)
        self._search_unread_parts(rules)
        return len(ruled_out)

    def _search_unread_parts(self, rules: ErasureRules) -> None:
        """Search the records after a segment's end offset, which brokers read from the next segment."""
        seen = {(holder.segment, holder.key) for holder in self.holders}
        for segment in self.state.live:
            if segment.has_unread_tail:
                before, movable = len(self.holders), rules.compacts and segment.start_offset < rules.end
                self._search_segment(self.tier, segment, KeyHoldingObjectState.LIVE, CUT_OFF)
                self.holders[before:] = [one for one in self.holders[before:] if (segment.id, one.key) not in seen]
                self.movable |= {segment.id} if movable and len(self.holders) > before else set()

    def _ids_ruled_out(self) -> set[str]:
        """Live segments whose Bloom filter has none of the keys; filters have no false negatives."""
        if not self.question.by_filters or not self.tier.kind.compacts:
            return set()
        sidecars = self.tier.open_sidecar_store(self.partition)
        hashes = hash_filter_keys(self.question.keys, sidecars.hash_key)
        met, _ = sidecars.find_possible_segments([segment.id for segment in self.state.live], lambda: [hashes])
        return {segment.id for segment in self.state.live if segment.id not in met}

    def _search_replaced_segments(self, record_time_ms_by_slot: Mapping[int, int]) -> None:
        now, retention = self.question.now_ms, self.tier.retention
        for group in self.state.waiting:
            state = KeyHoldingObjectState.UNDONE if group.undone else KeyHoldingObjectState.REPLACED
            until = grace.earliest_deletion_time_ms(group, retention, record_time_ms_by_slot, now)
            waits_for = NEXT_RETIRE if until <= now else f"its grace, then {NEXT_RETIRE[4:]}"
            for segment in group.segments:
                for one in self._search_segment(self.tier, segment, state, waits_for, until, group.run_id):
                    if not group.undone:
                        removal = KeyRemovalRound(str(self.partition), group.run_id, record_time_ms_by_slot.get(group.slot, now))
                        self.removals.setdefault(one.key, {})[group.run_id] = removal
        for segment in self.state.retiring:
            self._search_segment(self.tier, segment, KeyHoldingObjectState.RETIRING, NEXT_RETIRE)
        if self.state.intent is not None:
            run_id = self.state.intent.plan.run_id
            for receipt in self.state.intent.receipts:
                self._search_segment(self.tier, receipt.segment, KeyHoldingObjectState.OPEN_ROUND, f"the end of run {run_id}", None, run_id)

    # --- segments that the fold does not know ---

    def _search_unknown_objects(self, listed: Sequence[ListedObject]) -> None:
        state = self.state
        known = {segment.id for segment in (*state.live, *state.retiring)}
        known |= {receipt.segment.id for receipt in state.intent.receipts} if state.intent else set()
        known |= {segment.id for group in state.waiting for segment in group.segments}
        theirs = {record.id: segment_from_broker_record(record) for record in self.tier.metadata.broker_segment_records(self.partition)}
        for item in listed:
            if item.kind == "log" and item.segment_id not in known:
                why, waits_for, until = self._unknown_object_state(item, theirs)
                segment = theirs.get(item.segment_id) or _segment_metadata_of_object(item)
                self._search_segment(self.tier, segment, why, waits_for, until, object_name=item.key)
        strangers = [item.key for item in listed if not item.segment_id]
        if strangers and self.tier.kind.compacts:
            what = f"{len(strangers)} objects among those of {self.partition}, {strangers[0]} for one"
            self.not_covered.append(UnsearchedKeyLocation(what, "they do not have the name of a segment, so that their content is unknown"))

    def _unknown_object_state(
        self, unknown_object: ListedObject, broker_segments: Mapping[str, RemoteLogSegmentMetadata]
    ) -> StateAndWhatItWaitsFor:
        """State, the condition of deletion, and its earliest time (None if unknown)."""
        state, identity = self.state, unknown_object.segment_id
        if any(identity in entry.ids for entry in state.registrations.values()):
            return KeyHoldingObjectState.IMPORTING, "the end of its import, which makes it live, or orphan_age_ms and `retire`", None
        if identity in ordering.protected_segment_ids(state):
            return KeyHoldingObjectState.OPEN_ROUND, "the end of the open round, then `retire`", None
        if identity in broker_segments:
            return KeyHoldingObjectState.BROKERS, "the brokers, which copy or delete it", None
        if self.tier.kind.is_broker_managed:
            return KeyHoldingObjectState.ORPHAN, "`orphans find` and `orphans purge`: no metadata names it", None
        if identity in state.voided:
            return KeyHoldingObjectState.ORPHAN, NEXT_RETIRE, None
        until = unknown_object.modified_ms + self.tier.retention.orphan_age_ms
        return KeyHoldingObjectState.ORPHAN, "orphan_age_ms, then `retire`: its control log does not know it", until

    def _search_old_object_versions(self) -> None:
        folder = self.tier.ports.layout.partition_folder(self.partition)
        try:
            found = old_version_stores(open_tier(self.tier.settings).ports.data, folder)
        except Refused as error:
            why = f"these credentials may not ask (s3:ListBucketVersions): {error.message}"
            self.not_covered.append(UnsearchedKeyLocation(f"old versions of the objects of {self.partition}", why))
            return
        for layer in found:
            shadow = self.tier.with_stores(data=layer)
            for item in shadow.ports.layout.list_objects(self.partition):
                if item.kind == "log":
                    version = layer.versions[item.key].version
                    waits_for = f"the bucket: a lifecycle rule NoncurrentVersionExpiration, or who deletes version {version}"
                    place = f"{item.key} (version {version})"
                    self._search_segment(
                        shadow, _segment_metadata_of_object(item), KeyHoldingObjectState.OLD_VERSION, waits_for, object_name=place
                    )

    # --- what lies beside the segments ---

    def _search_key_hashes(self) -> None:
        control, state = self.tier.ports.control, self.state
        holding = {holder.segment: holder for holder in self.holders if holder.has_found_record}
        known = ordering.possible_segment_ids(state)
        sidecars = self.tier.open_sidecar_store(self.partition)
        listed = list(control.list(sidecar_key_prefix(self.log.prefix)))
        inherited = self._ids_inheriting_filter({segment_id_in_key(info.key) for info in listed} & known - holding.keys())
        for info in listed:
            segment_id = segment_id_in_key(info.key)
            if segment_id in holding:
                self._add_hash_holder(
                    info.key, info.size, KeyHoldingObjectState.SIDECAR, holding[segment_id].waits_for, holding[segment_id].until_ms
                )
            elif segment_id and segment_id not in known and self._filter_may_contain_keys(segment_id):
                self._add_hash_holder(info.key, info.size, KeyHoldingObjectState.SIDECAR, NEXT_RETIRE)
            elif (
                segment_id in inherited
                and info.key == sidecars.sidecar_object_key(segment_id)
                and self._filter_may_contain_keys(segment_id)
            ):
                self._add_hash_holder(info.key, info.size, KeyHoldingObjectState.SIDECAR, NEW_FILTER)
        for info in control.list(scratch_key_prefix(self.log)):
            self._add_hash_holder(
                info.key, info.size, KeyHoldingObjectState.SCRATCH, "the end of its run, then `retire`" if state.intent else NEXT_RETIRE
            )

    def _ids_inheriting_filter(self, segment_ids: AbstractSet[str]) -> set[str]:
        """Segments whose filter was taken over from their sources, so that it may contain keys that they no longer have."""
        heads = self.tier.open_sidecar_store(self.partition).load_sidecar_heads(sorted(segment_ids))
        return {name for name, head in heads.items() if head.sidecar is not None and head.sidecar.inherited}

    def _filter_may_contain_keys(self, segment_id: str) -> bool:
        sidecars = self.tier.open_sidecar_store(self.partition)
        whole = sidecars.load_sidecar(segment_id)
        if whole is None:
            return True
        return whole.filter is not None and bool(
            whole.filter.flag_possible_keys(hash_filter_keys(self.question.keys, sidecars.hash_key)).any()
        )

    def _add_untiered_records(self) -> None:
        held = f"hold from offset {self.state.end_offset + 1} on, and"
        if self.tier.kind.is_broker_managed:
            what = f"{self.partition}: what its brokers {held} have not uploaded"
        else:
            what = f"what the brokers of {self.partition} {held} no import has copied yet"
        self.not_covered.append(UnsearchedKeyLocation(what, "only the brokers' own logs have it"))

    # --- searching one segment ---

    def _search_segment(
        self,
        tier: Tier,
        segment: RemoteLogSegmentMetadata,
        state: KeyHoldingObjectState,
        waits_for: str,
        until_ms: int | None = None,
        run_id: str = "",
        object_name: str = "",
    ) -> list[KeyRecordsInSegment]:
        """Search also open and aborted transactions and what lies after the segment's end. Add the segment to the result if it has records,
        and return these by key.
        """
        try:
            whole = segment.model_copy(update={"end_offset": MAX_POSITION})
            found = group_found_records(self._create_searcher(tier).find_records([whole], keys=self.question.keys), self.question.keys)
        except NotFound:
            return []
        except BadData as error:
            what = f"{waits_for} (it cannot be read: {error.message})"
            self._add_segment_holder(segment, state, "unknown", what, until_ms, run_id, object_name)
            return []
        for one in found:
            self._add_segment_holder(segment, state, RECORD, waits_for, until_ms, run_id, object_name, one)
        return found

    def _add_segment_holder(
        self,
        segment: RemoteLogSegmentMetadata,
        state: KeyHoldingObjectState,
        content: str,
        waits_for: str,
        until_ms: int | None,
        run_id: str = "",
        object_name: str = "",
        records: KeyRecordsInSegment | None = None,
    ) -> None:
        log = segment.files.get("log")
        found = (records.key, records.records, records.first_offset, records.newest.offset) if records else (ANY_KEY, 0, -1, -1)
        key, count, first, last = found
        object_name = object_name or self.tier.ports.layout.object_name(self.partition, segment, "log")
        self.holders.append(
            ObjectHoldingRecordKey(
                str(self.partition), object_name, state, key, content, waits_for, until_ms, segment.id, count, first, last,
                segment.size_bytes, log.sha256 if log else "", run_id,
            )
        )  # fmt: skip

    def _add_hash_holder(
        self, object_key: str, size: int, state: KeyHoldingObjectState, waits_for: str, until_ms: int | None = None
    ) -> None:
        self.holders.append(
            ObjectHoldingRecordKey(
                str(self.partition), f"control: {object_key}", state, ANY_KEY, "keyed hash", waits_for, until_ms, bytes=size
            )
        )

    def _create_searcher(self, tier: Tier) -> RecordSearch:
        return RecordSearch(tier, self.partition, self._report_bytes_read, "erasure")

    def _report_bytes_read(self, size: int) -> None:
        self.segments += 1
        self.bytes += size
        self.question.on_bytes(size)


def hash_filter_keys(keys: Sequence[bytes], hash_key: bytes) -> Hashes:
    lengths = np.array([len(key) for key in keys], np.int32)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths[:-1], dtype=np.int64)))
    out = np.empty((len(keys), 2), np.uint64)
    hash_keys(np.frombuffer(b"".join(keys) + bytes(8), np.uint8), starts, lengths, *siphash_key_halves(hash_key), out)
    return out


def _segment_metadata_of_object(log_object: ListedObject) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        id=log_object.segment_id,
        start_offset=Offset(log_object.start_offset),
        end_offset=Offset(MAX_POSITION),
        size_bytes=log_object.size,
        max_timestamp_ms=TimestampMs(-1),
        mtime_ms=log_object.modified_ms,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(max(0, log_object.start_offset))),),
        files={"log": SegmentFile(size=log_object.size)},
    )
