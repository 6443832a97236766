"""With brokers: readers are switched by records in ``__remote_log_metadata``, one after the other (docs/broker-protocol.md).

What to say next is read from the fold of the topic each time, never remembered: whoever takes over after a crash asks for the same and
goes on where it ended. Every record is asked about first (compactor.metadata_topic.rules) and read back afterwards by our own consumer.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Collection, Sequence

from checkpoint.lineage import EpochEntry
from compactor.errors import Refused, Unavailable, UsageError
from compactor.metadata_topic import rules
from compactor.metadata_topic.cache import RemoteLogMetadataCache, epoch_starts
from compactor.metadata_topic.chain import chain, told_lineage
from compactor.metadata_topic.codec import (
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    TopicIdPartition,
    encode,
    uuid_bytes,
)
from compactor.metadata_topic.follow import FollowedTopic
from compactor.metadata_topic.partitioner import metadata_partition
from compactor.metadata_topic.ports import MetadataTopic
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.plan import Replacement
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from compactor.tier.names import TopicIdOf
from compactor.tier.ports import Announced, SegmentRef

_S = SegmentState
READ_BACK_S = 30.0
_DELETING = (None, _S.DELETE_SEGMENT_STARTED, _S.DELETE_SEGMENT_FINISHED)


class KafkaPublisher:
    """SegmentPublisher. Usable by several threads.

    :param topic: appended to; ``followed`` reads it.
    :param topic_id: of the partitions' topics, as the cluster has them now.
    :param conditions: raises Refused where nothing may be written (compactor.tier.conditions). Asked before each step.
    :param late_ms: a producer's delivery.timeout.ms.
    """

    def __init__(
        self,
        followed: FollowedTopic,
        topic: MetadataTopic,
        topic_id: TopicIdOf,
        *,
        clock_ms: Callable[[], int],
        conditions: Callable[[TopicPartition], None] = lambda name: None,
        late_ms: int = 30_000,
    ) -> None:
        self.late_ms = late_ms
        self._followed = followed
        self._topic = topic
        self._topic_id = topic_id
        self._clock_ms = clock_ms
        self._conditions = conditions
        self._lock = threading.RLock()

    def permit(self, name: TopicPartition) -> None:
        self._conditions(name)

    def begin(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> None:
        """COPY_SEGMENT_STARTED, unless it stands already."""
        self._conditions(name)
        with self._lock:
            where, cache = self._folded(name)
            record = self._introduction(where, segment)
            known = cache.segments.get(record.segment_id)
            if known is None and record.segment_id not in cache.finished:
                why = rules.replacement_refusal(cache, told_lineage(cache), record)
                if why:
                    raise _refused(name, why)
                self._say(where, cache, [record])
            elif known is None or known.state is not _S.COPY_SEGMENT_STARTED or _final(known) != _final(record):
                said = "was cut off" if known is None or known.state in _DELETING else "was introduced with other figures"
                raise _refused(name, f"segment {segment.id} {said}")

    def publish(
        self,
        name: TopicPartition,
        replacements: Sequence[Replacement],
        begun: Callable[[], None],
        record: Callable[[Collection[str]], None],
    ) -> None:
        """Groups ascend, each is switched before the next one begins. Where the broker has deleted what a group replaces, it is cut off.

        So are those behind it: what is left of its sources may hold values whose tombstones the later groups have dropped.
        """
        self._conditions(name)
        begun()
        ordered = sorted(replacements, key=lambda each: each.segment.start_offset)
        with self._lock:
            cut: list[str] = []
            for new in ordered:
                if not self._switched(name, new, give_up=bool(cut)):
                    cut.append(new.segment.id)
        record(cut)

    def restore(
        self, name: TopicPartition, restored: Sequence[RemoteLogSegmentMetadata], gone: Sequence[SegmentRef], record: Callable[[], None]
    ) -> None:
        raise UsageError(
            "brokers cannot be given back segments whose deletion has begun",
            hint="Until `retire` deletes them the replaced objects are there: copy them under new ids, or export them",
        )

    def withdraw(self, name: TopicPartition, segments: Sequence[Announced], *, late: bool = False) -> None:
        """DELETE_SEGMENT_STARTED; with ``late`` also of those that were never introduced, so that brokers drop what still comes."""
        with self._lock:
            where, cache = self._folded(name)
            records: list[MetadataRecord] = []
            for segment in segments:
                raw_id = uuid_bytes(segment.id)
                known = cache.segments.get(raw_id)
                if known is not None and known.state in rules.OPEN:
                    records.append(self._update(known, _S.DELETE_SEGMENT_STARTED))
                elif known is None and late and raw_id not in cache.finished:
                    made = self._placeholder(where, segment)
                    records += [made, self._update(made, _S.DELETE_SEGMENT_STARTED)]
            self._say(where, cache, records)

    def deleted(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        with self._lock:
            where, cache = self._folded(name)
            known = [cache.segments.get(uuid_bytes(segment.id)) for segment in segments]
            going = [one for one in known if one is not None and one.state is _S.DELETE_SEGMENT_STARTED]
            self._say(where, cache, [self._update(one, _S.DELETE_SEGMENT_FINISHED) for one in going])

    def strays(self, name: TopicPartition, known: Collection[str]) -> Sequence[Announced] | None:
        with self._lock:
            _, cache = self._folded(name)
            return [_announced(one) for one in _strays(cache, known)]

    def cut_off(self, name: TopicPartition, live: Sequence[SegmentRef], known: Collection[str]) -> int:
        with self._lock:
            where, cache = self._folded(name)
            if not any(one.state in rules.OPEN for one in _strays(cache, known, displacing=True)):
                return 0
            back = [cache.segments.get(uuid_bytes(segment.id)) for segment in live]
            displaced = [one for one in back if one is not None and one.state in rules.READABLE and not rules.effective(cache, one)]
            for one in displaced:
                self._conditions(name)
                self._finish(where, one)
            where, cache = self._folded(name)
            strays = [one for one in _strays(cache, known) if one.state in rules.OPEN]
            self._say(where, cache, [self._update(one, _S.DELETE_SEGMENT_STARTED) for one in strays])
            return len(strays)

    def _switched(self, name: TopicPartition, new: Replacement, *, give_up: bool) -> bool:
        """COPY_SEGMENT_FINISHED, look, DELETE_SEGMENT_STARTED of the sources; False where the group is cut off."""
        where, cache = self._folded(name)
        raw_id = uuid_bytes(new.segment.id)
        sources = [uuid_bytes(source) for source in new.sources]
        known = cache.segments.get(raw_id)
        if known is None or known.state in _DELETING:
            return False
        if known.state is _S.COPY_SEGMENT_STARTED:
            here = [cache.segments.get(source) for source in sources]
            if give_up or any(source is None or source.state not in rules.READABLE for source in here):
                self._say(where, cache, [self._update(known, _S.DELETE_SEGMENT_STARTED)])
                return False
            why = rules.sources_refusal(cache, told_lineage(cache), known, sources)
            if why:
                raise _refused(name, why)
        if known.state is _S.COPY_SEGMENT_STARTED or not rules.effective(cache, known):
            self._finish(where, known)
            where, cache = self._folded(name)
            found = cache.segments.get(raw_id)
            if found is None or found.state in _DELETING:
                return False
            if not rules.effective(cache, found):
                raise _refused(name, f"look: segment {new.segment.id} does not count after COPY_SEGMENT_FINISHED")
        left = {source: cache.segments[source] for source in sources if source in cache.segments}
        left |= {one.segment_id: one for one in rules.shadowed(cache, known) if one.broker_id != COMPACTOR_BROKER_ID}
        ascending = sorted((one for one in left.values() if one.state in rules.OPEN), key=lambda one: one.start_offset)
        self._say(where, cache, [self._update(one, _S.DELETE_SEGMENT_STARTED) for one in ascending])
        return True

    def _finish(self, where: TopicIdPartition, segment: RemoteLogSegmentMetadataRecord) -> None:
        """COPY_SEGMENT_FINISHED, after the ceiling markers that it needs."""
        _, cache = self._folded_as(where)
        for marker in rules.markers(cache, told_lineage(cache), segment, self._clock_ms()):
            self._say(where, cache, marker.records(self._clock_ms()))
            _, cache = self._folded_as(where)
        self._say(where, cache, [self._update(segment, _S.COPY_SEGMENT_FINISHED)])

    def _say(self, where: TopicIdPartition, cache: RemoteLogMetadataCache, records: Sequence[MetadataRecord]) -> None:
        """Appends records whose order alone matters, each only if no rule stands against it, and reads the last one back."""
        trial, offset = rules.Trial(cache), -1
        lineage = told_lineage(cache)
        for record in records:
            why = rules.refusal(trial.cache, lineage, record)
            if why:
                raise _refused(where.name, why)
            trial.apply(record)
        number = metadata_partition(where.topic_id, where.partition, self._topic.identity().partitions) if records else -1
        for record in records:
            offset = self._topic.append(number, encode(record))
        deadline = time.monotonic() + READ_BACK_S
        while offset >= 0 and self._folded_as(where)[1].applied < offset:
            if time.monotonic() > deadline:
                raise Unavailable(f"{self._topic.name}-{number}: offset {offset} was appended and is not read", hint="Run again to go on")

    def _folded(self, name: TopicPartition) -> tuple[TopicIdPartition, RemoteLogMetadataCache]:
        return self._folded_as(TopicIdPartition(uuid_bytes(self._topic_id(name)), name.topic, name.partition))

    def _folded_as(self, where: TopicIdPartition) -> tuple[TopicIdPartition, RemoteLogMetadataCache]:
        """As the topic has it now. Raises Unavailable where it is not read to its end in time, BadData where brokers stopped."""
        progress = self._followed.catch_up(READ_BACK_S)
        if any(left > 0 for left in progress.behind.values()):
            raise Unavailable(f"{self._topic.name} is not read to its end within {READ_BACK_S:g} s", hint="Run again to go on")
        found = self._followed.partition(where.topic_id, where.partition)
        return where, found.cache if found is not None else RemoteLogMetadataCache(where)

    def _introduction(self, where: TopicIdPartition, segment: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadataRecord:
        return RemoteLogSegmentMetadataRecord(
            where,
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

    def _placeholder(self, where: TopicIdPartition, segment: Announced) -> RemoteLogSegmentMetadataRecord:
        """Of a segment that will never have an object."""
        now = self._clock_ms()
        place = (segment.start_offset, segment.end_offset)
        return RemoteLogSegmentMetadataRecord(where, uuid_bytes(segment.id), *place, COMPACTOR_BROKER_ID, -1, now, segment.leader_epochs, 1)

    def _update(self, segment: RemoteLogSegmentMetadataRecord, state: SegmentState) -> RemoteLogSegmentMetadataUpdateRecord:
        return RemoteLogSegmentMetadataUpdateRecord(
            segment.partition, segment.segment_id, COMPACTOR_BROKER_ID, self._clock_ms(), state, segment.custom_metadata
        )


def _strays(cache: RemoteLogMetadataCache, known: Collection[str], *, displacing: bool = False) -> list[RemoteLogSegmentMetadataRecord]:
    """Without what readers read, as that is live, whoever wrote it; ``displacing``: with that."""
    read = set() if displacing else {link.segment.segment_id for link in chain(cache, told_lineage(cache))}
    found = (one for one in cache.segments.values() if one.broker_id == COMPACTOR_BROKER_ID and one.id not in known)
    return [one for one in found if one.segment_id not in read]


def _announced(segment: RemoteLogSegmentMetadataRecord) -> Announced:
    epochs = tuple(EpochEntry(epoch, start) for epoch, start in epoch_starts(segment))
    since = segment.event_timestamp_ms if segment.state is _S.DELETE_SEGMENT_STARTED else -1
    return Announced(segment.id, segment.start_offset, segment.end_offset, epochs, since)


def _final(segment: RemoteLogSegmentMetadataRecord) -> tuple[object, ...]:
    """What no update can change."""
    offsets = (segment.start_offset, segment.end_offset, tuple(segment.leader_epochs))
    return (*offsets, segment.max_timestamp_ms, segment.size_bytes, segment.custom_metadata)


def _refused(name: TopicPartition, why: str) -> Refused:
    return Refused(f"{name}: nothing more is written into the metadata topic: {why}", hint="Brokers serve what they served; run again")
