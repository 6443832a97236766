"""Publisher for broker-managed tiers: switches readers by records in ``__remote_log_metadata`` (docs/broker-protocol.md).

The next record is always derived from the folded topic, never from memory, so that another compactor can continue after a crash. Every
record is checked by the rules in ``chain``, and read back.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers import chain as rules
from compactor.adapters.brokers.cache import RemoteLogMetadataCache
from compactor.adapters.brokers.chain import lineage_from_segments, segment_read_ranges
from compactor.adapters.brokers.codec import encode_record
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.brokers.topic import MetadataTokenBucket, MetadataTopic
from compactor.constants import LeaderEpoch, Offset
from compactor.errors import Refused, Unavailable, UsageError
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.plan import Replacement
from compactor.model.remote_log import (
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    TopicIdPartition,
    epoch_start_offsets,
    uuid_bytes,
)
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from compactor.tier.contents import TopicIdOfPartition
from compactor.tier.ports import AnnouncedSegment, MetadataRecordRateLimitDelay, SegmentRef

_S = SegmentState
READ_BACK_TIMEOUT_S = 30.0
_DELETED_STATES = (None, _S.DELETE_SEGMENT_STARTED, _S.DELETE_SEGMENT_FINISHED)


class _ReaderSwitchOutcome(Enum):
    """Outcome of switching readers to one group's new segment.

    CUT_OFF: the new segment was withdrawn, and those of the following groups.
    EXPIRED: brokers have expired all of the group's sources; the following groups may still be switched.
    """

    SWITCHED = 1
    CUT_OFF = 2
    EXPIRED = 3


class MetadataTopicSegmentPublisher:
    """SegmentPublisher that appends to the metadata topic. Thread-safe if each thread has partitions of its own.

    :param require_allowed: raises Refused if a partition's readers may not be switched. Called before each step.
    :param require_suitable_cluster: raises Refused if the cluster rules out any record. Called before each record.
    """

    def __init__(
        self,
        followed: FoldingMetadataTopicReader,
        topic: MetadataTopic,
        current_topic_id: TopicIdOfPartition,
        *,
        clock_ms: Callable[[], int],
        require_allowed: Callable[[TopicPartition], None] = lambda name: None,
        require_suitable_cluster: Callable[[], None] = lambda: None,
        max_delivery_delay_ms: int = 30_000,
    ) -> None:
        self.max_delivery_delay_ms = max_delivery_delay_ms
        self._followed = followed
        self._topic = topic
        self._topic_id = current_topic_id
        self._clock_ms = clock_ms
        self._require_allowed = require_allowed
        self._require_suitable_cluster = require_suitable_cluster
        self._appending = threading.Lock()
        self._bucket = MetadataTokenBucket()

    def check_publishing_allowed(self, partition: TopicPartition) -> None:
        self._require_allowed(partition)

    def check_deletion_allowed(self) -> None:
        self._require_suitable_cluster()

    def reserve_metadata_records(
        self, partition: TopicPartition, record_count: int, max_records_per_hour: int
    ) -> MetadataRecordRateLimitDelay | None:
        """Reserve records of the hourly limit (0: none). None if the round is admitted, else until when it has to wait."""
        if not max_records_per_hour:
            return None
        with self._appending:
            self._read_newest_metadata(
                partition
            )  # under the lock: records that others have appended are not reserved any more, so they have to be read
            self._bucket, wait = self._bucket.after_admission(
                self._followed.compactor_records_by_minute(), partition, record_count, max_records_per_hour, self._clock_ms()
            )
        return wait

    def release_reserved_metadata_records(self, partition: TopicPartition) -> None:
        with self._appending:
            self._bucket = self._bucket.after_round_ended(partition)

    def announce_segment(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> None:
        """Append COPY_SEGMENT_STARTED, unless an equal one is there. Raises Refused if a rule forbids it."""
        self._require_allowed(partition)
        where, cache = self._read_newest_metadata(partition)
        record = self._build_copy_started_record(where, segment)
        known = cache.segments.get(record.segment_id)
        if known is None and record.segment_id not in cache.finished:
            why = rules.replacement_refusal(cache, lineage_from_segments(cache), record)
            if why:
                raise _forbidden_record_error(partition, why)
            self._append_checked(where, cache, [record])
        elif known is None or known.state is not _S.COPY_SEGMENT_STARTED or _immutable_fields(known) != _immutable_fields(record):
            message = "was cut off" if known is None or known.state in _DELETED_STATES else "was introduced with other figures"
            raise _forbidden_record_error(partition, f"segment {segment.id} {message}")

    def publish_replacements(
        self,
        partition: TopicPartition,
        replacements: Sequence[Replacement],
        record_begun: Callable[[], None],
        record_published: Callable[[Collection[str]], None],
        *,
        select_expired: Callable[[Collection[str]], Collection[str]] = lambda sources: (),
        last_group_first: bool = False,
        is_begun_recorded: bool = False,
    ) -> None:
        """Switch readers group by group, ascending by offset.

        1. If brokers have deleted sources of a group, its new segment is withdrawn, and those of the groups after it: its remaining sources
           may hold values whose tombstones later groups removed.
        2. If all sources of a group have expired, the group is withdrawn and later groups are switched all the same; if only some have, it
           is switched as if they were still there. No value of an expired segment can come back.

        :param record_begun: called once, before the first record is appended.
        :param record_published: called at the end, with the ids of the new segments that were not published.
        :param last_group_first: descending, because the round restores values. A withdrawn group then withdraws those with lower offsets.
        :param is_begun_recorded: whether an earlier attempt has begun, so that the records are not rehearsed.
        """
        self._require_allowed(partition)
        ordered = sorted(replacements, key=lambda each: each.segment.start_offset)
        if last_group_first:
            ordered.reverse()
        if not is_begun_recorded:
            self._rehearse_publication(partition, ordered)
        record_begun()
        self._prepare_range(partition, ordered)
        cut: list[str] = []
        gone: list[str] = []
        for new in ordered:
            outcome = self._switch_readers(partition, new, select_expired, must_withdraw=bool(cut))
            if outcome is not _ReaderSwitchOutcome.SWITCHED:
                (cut if outcome is _ReaderSwitchOutcome.CUT_OFF else gone).append(new.segment.id)
        record_published([*cut, *gone])
        with self._appending:
            left = sum(len(new.sources) for new in ordered if new.segment.id not in {*cut, *gone})
            self._bucket = self._bucket.after_publication(partition, left, self._clock_ms())

    def restore_segments(
        self,
        partition: TopicPartition,
        restored: Sequence[RemoteLogSegmentMetadata],
        withdrawn: Sequence[SegmentRef],
        record_undone: Callable[[], None],
    ) -> None:
        """Raise UsageError: brokers cannot take back segments whose deletion has begun."""
        raise UsageError(
            "brokers never take up segments again whose deletion has begun",
            hint="`undo` copies them under new ids, until `retire` deletes them",
        )

    def withdraw_segments(
        self, partition: TopicPartition, segments: Sequence[AnnouncedSegment], *, include_unannounced: bool = False
    ) -> None:
        """Append DELETE_SEGMENT_STARTED where deletion has not begun; if ``include_unannounced``, also for segments never introduced, so
        that brokers ignore late introductions.
        """
        where, cache = self._read_newest_metadata(partition)
        records: list[MetadataRecord] = []
        for segment in segments:
            raw_id = uuid_bytes(segment.id)
            known = cache.segments.get(raw_id)
            if known is not None and known.state in rules.UNDELETED_STATES:
                records.append(self._state_change_record(known, _S.DELETE_SEGMENT_STARTED))
            elif known is None and include_unannounced and raw_id not in cache.finished:
                made = self._unstored_copy_started(where, segment)
                records += [made, self._state_change_record(made, _S.DELETE_SEGMENT_STARTED)]
        self._append_checked(where, cache, records)

    def record_finished_segment_deletion(self, partition: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        where, cache = self._read_newest_metadata(partition)
        known = [cache.segments.get(uuid_bytes(segment.id)) for segment in segments]
        going = [one for one in known if one is not None and one.state is _S.DELETE_SEGMENT_STARTED]
        self._append_checked(where, cache, [self._state_change_record(one, _S.DELETE_SEGMENT_FINISHED) for one in going])

    def find_deleted_segments(self, partition: TopicPartition, segment_ids: Collection[str]) -> frozenset[str]:
        """Ids of segments that brokers delete or have deleted, after reading the topic to its end."""
        _, cache = self._read_newest_metadata(partition)
        return frozenset(one for one in segment_ids if _is_deleted_by_broker(cache, uuid_bytes(one)))

    def find_unknown_segments(self, partition: TopicPartition, recorded_ids: Collection[str]) -> Sequence[AnnouncedSegment]:
        """Compactors' segments that the control log lacks and readers do not use."""
        _, cache = self._read_newest_metadata(partition)
        return [_announced_segment_from_record(one) for one in _unrecorded_segments(cache, recorded_ids)]

    def withdraw_unknown_segments(self, partition: TopicPartition, live: Sequence[SegmentRef], recorded_ids: Collection[str]) -> int:
        """Begin the deletion of segments that the control log does not name, and return their number: those that compactors wrote and no
        reader uses, and brokers' copies within compacted segments. Hidden live segments are finished again first.
        """
        where, cache = self._read_newest_metadata(partition)
        back = [cache.segments.get(uuid_bytes(segment.id)) for segment in live]
        ours = [one for one in back if one is not None and one.state in rules.READABLE_STATES]
        late = rules.unrecorded_broker_copies(cache, lineage_from_segments(cache), ours, recorded_ids)
        if not late and not any(
            one.state in rules.UNDELETED_STATES for one in _unrecorded_segments(cache, recorded_ids, include_readable=True)
        ):
            return 0
        for one in ours:
            if not rules.is_found_by_lookups(cache, one):
                self._require_allowed(partition)
                self._append_copy_finished_record(where, one)
                where, cache = self._read_newest_metadata(partition)
        strays = [one for one in _unrecorded_segments(cache, recorded_ids) if one.state in rules.UNDELETED_STATES]
        going = sorted((*strays, *late), key=lambda one: one.start_offset)
        self._append_checked(where, cache, [self._state_change_record(one, _S.DELETE_SEGMENT_STARTED) for one in going])
        return len(going)

    def _rehearse_publication(self, partition: TopicPartition, replacements: Sequence[Replacement]) -> None:
        # Try all records of a publication on a copy of the folded metadata before the first is appended. Raises Refused if a rule forbids
        # one.
        _, cache = self._read_newest_metadata(partition)
        lineage, news = lineage_from_segments(cache), [cache.segments.get(uuid_bytes(new.segment.id)) for new in replacements]
        sources = [cache.segments.get(uuid_bytes(source)) for new in replacements for source in new.sources]
        here = [one for one in news if one is not None and one.state is _S.COPY_SEGMENT_STARTED]
        if len(here) < len(news) or any(one is None or one.state not in rules.READABLE_STATES for one in sources):
            return  # groups will be cut off
        last = max((new.segment.end_offset for new in replacements), default=-1)
        trial = rules.CopyOnWriteMetadataCache(cache)

        def rehearse_records(records: Sequence[MetadataRecord]) -> None:
            for record in records:
                why = rules.record_refusal(trial.cache, lineage, record)
                if why:
                    raise _forbidden_record_error(partition, why)
                trial.apply_record(record)

        def rehearse_finish(segment: RemoteLogSegmentMetadataRecord) -> None:
            for marker in rules.markers_before_finish(trial.cache, lineage, segment, self._clock_ms()):
                rehearse_records(marker.marker_records(self._clock_ms()))
            rehearse_records([self._state_change_record(segment, _S.COPY_SEGMENT_FINISHED)])

        for hidden in rules.hidden_segments(cache, lineage, last):
            rehearse_finish(hidden)
        for new, made in zip(replacements, here, strict=True):
            rehearse_finish(made)
            left = {one.segment_id: one for one in rules.segments_within(trial.cache, lineage, made)}
            left |= {uuid_bytes(source): trial.cache.segments[uuid_bytes(source)] for source in new.sources}
            ascending = sorted((one for one in left.values() if one.state in rules.UNDELETED_STATES), key=lambda one: one.start_offset)
            rehearse_records([self._state_change_record(one, _S.DELETE_SEGMENT_STARTED) for one in ascending])

    def _prepare_range(self, partition: TopicPartition, replacements: Sequence[Replacement]) -> None:
        """Prepare the range to be replaced.

        1. Delete unfinished copies of earlier leaders: finished later, they would bring back values whose tombstones were removed.
        2. Finish hidden segments again, before the segment below them is replaced by one that ends at their start.
        """
        where, cache = self._read_newest_metadata(partition)
        last = max((new.segment.end_offset for new in replacements), default=-1)
        copies = rules.unfinished_broker_copies(cache, lineage_from_segments(cache), last)
        self._append_checked(where, cache, [self._state_change_record(one, _S.DELETE_SEGMENT_STARTED) for one in copies])
        for one in rules.hidden_segments(cache, lineage_from_segments(cache), last):
            _, cache = self._read_newest_by_id(where)
            # Brokers have tiered since the rehearsal where a rule stands against it: the group before it will not be switched, then.
            if not rules.finish_refusal(cache, lineage_from_segments(cache), one, self._clock_ms()):
                self._append_copy_finished_record(where, one)

    def _switch_readers(
        self,
        partition: TopicPartition,
        replacement: Replacement,
        select_expired: Callable[[Collection[str]], Collection[str]],
        *,
        must_withdraw: bool,
    ) -> _ReaderSwitchOutcome:
        """Append COPY_SEGMENT_FINISHED, verify lookups, and append DELETE_SEGMENT_STARTED for the sources."""
        where, cache = self._read_newest_metadata(partition)
        raw_id = uuid_bytes(replacement.segment.id)
        sources = [uuid_bytes(source) for source in replacement.sources]
        known = cache.segments.get(raw_id)
        if known is None or known.state in _DELETED_STATES or known.state is _S.COPY_SEGMENT_STARTED:
            missing = [one for one in replacement.sources if not _is_segment_readable(cache, uuid_bytes(one))]
            is_gone = known is None or known.state in _DELETED_STATES
            # A group that was switched before has expired with its new segment; its sources were then deleted by this program.
            asked = [*missing, replacement.segment.id] if is_gone and len(missing) == len(replacement.sources) else missing
            explained = select_expired(asked) if asked else ()
            if replacement.segment.id in explained or all(source in explained for source in replacement.sources):
                return self._withdraw_expired(partition, raw_id)
            if known is None or is_gone:
                return _ReaderSwitchOutcome.CUT_OFF
            where, cache = self._read_newest_metadata(partition)  # asking about expired segments took time
            deleted = [one for one in replacement.sources if one not in explained and not _is_segment_readable(cache, uuid_bytes(one))]
            also = [one.segment_id for one in rules.segments_within(cache, lineage_from_segments(cache), known)]
            if must_withdraw or deleted or rules.source_deletion_refusal(cache, lineage_from_segments(cache), known, [*sources, *also]):
                return self._withdraw_replacement(where, cache, known)
        if known.state is _S.COPY_SEGMENT_STARTED or not rules.is_found_by_lookups(cache, known):
            if rules.finish_refusal(cache, lineage_from_segments(cache), known, self._clock_ms()):
                return self._withdraw_replacement(where, cache, known)
            self._append_copy_finished_record(where, known)
            where, cache = self._read_newest_metadata(partition)
            found = cache.segments.get(raw_id)
            if found is None or found.state in _DELETED_STATES:
                return _ReaderSwitchOutcome.CUT_OFF
            if not rules.is_found_by_lookups(cache, found):
                raise _forbidden_record_error(
                    partition, f"look: segment {replacement.segment.id} does not count after COPY_SEGMENT_FINISHED"
                )
            known = found
        if rules.is_hiding_other_segments(cache, lineage_from_segments(cache), known):
            return self._withdraw_replacement(where, cache, known)
        left = {source: cache.segments[source] for source in sources if source in cache.segments}
        left |= {one.segment_id: one for one in rules.segments_within(cache, lineage_from_segments(cache), known)}
        ascending = sorted((one for one in left.values() if one.state in rules.UNDELETED_STATES), key=lambda one: one.start_offset)
        self._append_checked(where, cache, [self._state_change_record(one, _S.DELETE_SEGMENT_STARTED) for one in ascending])
        return _ReaderSwitchOutcome.SWITCHED

    def _withdraw_replacement(
        self, partition: TopicIdPartition, cache: RemoteLogMetadataCache, segment: RemoteLogSegmentMetadataRecord
    ) -> _ReaderSwitchOutcome:
        self._append_checked(partition, cache, [self._state_change_record(segment, _S.DELETE_SEGMENT_STARTED)])
        return _ReaderSwitchOutcome.CUT_OFF

    def _withdraw_expired(self, partition: TopicPartition, raw_id: bytes) -> _ReaderSwitchOutcome:
        where, cache = self._read_newest_metadata(partition)
        known = cache.segments.get(raw_id)
        if known is not None and known.state in rules.UNDELETED_STATES:
            self._append_checked(where, cache, [self._state_change_record(known, _S.DELETE_SEGMENT_STARTED)])
        return _ReaderSwitchOutcome.EXPIRED

    def _append_copy_finished_record(self, partition: TopicIdPartition, segment: RemoteLogSegmentMetadataRecord) -> None:
        _, cache = self._read_newest_by_id(partition)
        for marker in rules.markers_before_finish(cache, lineage_from_segments(cache), segment, self._clock_ms()):
            self._append_checked(partition, cache, marker.marker_records(self._clock_ms()))
            _, cache = self._read_newest_by_id(partition)
        self._append_checked(partition, cache, [self._state_change_record(segment, _S.COPY_SEGMENT_FINISHED)])

    def _append_checked(self, partition: TopicIdPartition, cache: RemoteLogMetadataCache, records: Sequence[MetadataRecord]) -> None:
        if records:
            self._require_suitable_cluster()
        trial, offset = rules.CopyOnWriteMetadataCache(cache), -1
        lineage = lineage_from_segments(cache)
        for record in records:
            why = rules.record_refusal(trial.cache, lineage, record)
            if why:
                raise _forbidden_record_error(partition.topic_partition, why)
            trial.apply_record(record)
        number = self._followed.metadata_partition_number(partition.topic_id, partition.partition)
        with self._appending:
            for record in records:
                offset = self._topic.append(number, encode_record(record))
            ends = sum(isinstance(one, RemoteLogSegmentMetadataUpdateRecord) and one.state is _S.DELETE_SEGMENT_FINISHED for one in records)
            self._bucket = self._bucket.after_append(partition.topic_partition, len(records) - ends, ends, self._clock_ms())
        deadline = time.monotonic() + READ_BACK_TIMEOUT_S
        while offset >= 0 and self._read_newest_by_id(partition)[1].applied < offset:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self._topic.name}-{number}: offset {offset} was appended and is not read", hint="Run the command again to continue"
                )

    def _read_newest_metadata(self, partition: TopicPartition) -> tuple[TopicIdPartition, RemoteLogMetadataCache]:
        return self._read_newest_by_id(TopicIdPartition(uuid_bytes(self._topic_id(partition)), partition.topic, partition.partition))

    def _read_newest_by_id(self, partition: TopicIdPartition) -> tuple[TopicIdPartition, RemoteLogMetadataCache]:
        """Raises Unavailable if the topic's end is not reached within READ_BACK_TIMEOUT_S."""
        progress = self._followed.fold_to_end(READ_BACK_TIMEOUT_S)
        number = self._followed.metadata_partition_number(partition.topic_id, partition.partition)
        if progress.unread.get(number, 0) > 0:
            message = f"partition {number} of {self._topic.name} is not read to its end within {READ_BACK_TIMEOUT_S:g} s"
            raise Unavailable(message, hint="Run the command again to continue")
        found = self._followed.partition_metadata_from_records(partition.topic_id, partition.partition)
        return partition, found.cache if found is not None else RemoteLogMetadataCache(partition)

    def _build_copy_started_record(self, partition: TopicIdPartition, segment: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadataRecord:
        return RemoteLogSegmentMetadataRecord(
            partition,
            uuid_bytes(segment.id),
            segment.start_offset,
            segment.end_offset,
            COMPACTOR_BROKER_ID,
            segment.max_timestamp_ms,
            self._clock_ms(),
            segment.leader_epochs,
            segment.size_bytes,
            base64.b64decode(segment.custom_metadata) if segment.custom_metadata else None,
            txn_index_empty="txnindex" not in segment.files,
        )

    def _unstored_copy_started(self, partition: TopicIdPartition, segment: AnnouncedSegment) -> RemoteLogSegmentMetadataRecord:
        now = self._clock_ms()
        place = (segment.start_offset, segment.end_offset)
        return RemoteLogSegmentMetadataRecord(
            partition, uuid_bytes(segment.id), *place, COMPACTOR_BROKER_ID, -1, now, segment.leader_epochs, 1
        )

    def _state_change_record(self, segment: RemoteLogSegmentMetadataRecord, state: SegmentState) -> RemoteLogSegmentMetadataUpdateRecord:
        return RemoteLogSegmentMetadataUpdateRecord(
            segment.partition, segment.segment_id, COMPACTOR_BROKER_ID, self._clock_ms(), state, segment.custom_metadata
        )


def _unrecorded_segments(
    cache: RemoteLogMetadataCache, recorded_ids: Collection[str], *, include_readable: bool = False
) -> list[RemoteLogSegmentMetadataRecord]:
    read = set() if include_readable else {link.segment.segment_id for link in segment_read_ranges(cache, lineage_from_segments(cache))}
    found = (one for one in cache.segments.values() if one.broker_id == COMPACTOR_BROKER_ID and one.id not in recorded_ids)
    return [one for one in found if one.segment_id not in read]


def _announced_segment_from_record(segment: RemoteLogSegmentMetadataRecord) -> AnnouncedSegment:
    epochs = tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in epoch_start_offsets(segment))
    since = segment.event_timestamp_ms if segment.state is _S.DELETE_SEGMENT_STARTED else -1
    return AnnouncedSegment(segment.id, segment.start_offset, segment.end_offset, epochs, since)


def _is_segment_readable(cache: RemoteLogMetadataCache, raw_id: bytes) -> bool:
    known = cache.segments.get(raw_id)
    return known is not None and known.state in rules.READABLE_STATES


def _is_deleted_by_broker(cache: RemoteLogMetadataCache, raw_id: bytes) -> bool:
    known = cache.segments.get(raw_id)
    if known is None:
        return raw_id in cache.finished
    return known.state is _S.DELETE_SEGMENT_STARTED and known.broker_id != COMPACTOR_BROKER_ID


def _immutable_fields(segment: RemoteLogSegmentMetadataRecord) -> tuple[object, ...]:
    offsets = (segment.start_offset, segment.end_offset, tuple(segment.leader_epochs))
    return (*offsets, segment.max_timestamp_ms, segment.size_bytes, segment.custom_metadata)


def _forbidden_record_error(partition: TopicPartition, rule: str) -> Refused:
    return Refused(
        f"{partition}: nothing more is written into the metadata topic: {rule}",
        hint="Brokers serve the same segments as before; run the command again",
    )
