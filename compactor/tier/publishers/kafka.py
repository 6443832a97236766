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
from compactor.metadata_topic import rules, turns
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
from compactor.metadata_topic.ports import MetadataTopic
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.plan import Replacement
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from compactor.tier.names import TopicIdOf
from compactor.tier.ports import Announced, SegmentRef, Wait

_S = SegmentState
READ_BACK_S = 30.0
_DELETING = (None, _S.DELETE_SEGMENT_STARTED, _S.DELETE_SEGMENT_FINISHED)


class KafkaPublisher:
    """SegmentPublisher. Usable by several threads, each with partitions of its own.

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
        self._appending = threading.Lock()
        self._turns = turns.Turns()

    def permit(self, name: TopicPartition) -> None:
        self._conditions(name)

    def admit(self, name: TopicPartition, records: int, per_hour: int) -> Wait | None:
        if not per_hour:
            return None
        with self._appending:
            self._folded(name)  # in here: what others have appended is no longer reserved, so it has to be read
            self._turns, turn = turns.asked(self._turns, self._followed.ours(), name, records, per_hour, self._clock_ms())
        return Wait(turn.until_ms, turn.records, turn.ahead) if turn.until_ms else None

    def forgo(self, name: TopicPartition, *, due: bool) -> None:
        with self._appending:
            self._turns = turns.forgone(self._turns, name, due=due)

    def begin(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> None:
        """COPY_SEGMENT_STARTED, unless it stands already."""
        self._conditions(name)
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
        *,
        backwards: bool = False,
        resumed: bool = False,
    ) -> None:
        """Groups ascend, each is switched before the next one begins. Where the broker has deleted what a group replaces, it is cut off.

        So are those behind it: what is left of its sources may hold values whose tombstones the later groups have dropped. ``backwards``:
        values come back, and those that delete them have to be there before; what is cut off are those before it, then.
        """
        self._conditions(name)
        ordered = sorted(replacements, key=lambda each: each.segment.start_offset)
        if backwards:
            ordered.reverse()
        if not resumed:
            self._rehearse(name, ordered)
        begun()
        self._forestall(name, ordered)
        cut: list[str] = []
        for new in ordered:
            if not self._switched(name, new, give_up=bool(cut)):
                cut.append(new.segment.id)
        record(cut)
        with self._appending:
            left = sum(len(new.sources) for new in ordered if new.segment.id not in cut)
            self._turns = turns.published(self._turns, name, left, self._clock_ms())

    def restore(
        self, name: TopicPartition, restored: Sequence[RemoteLogSegmentMetadata], gone: Sequence[SegmentRef], record: Callable[[], None]
    ) -> None:
        raise UsageError(
            "brokers cannot be given back segments whose deletion has begun",
            hint="`undo` copies them under new ids, until `retire` deletes them",
        )

    def withdraw(self, name: TopicPartition, segments: Sequence[Announced], *, late: bool = False) -> None:
        """DELETE_SEGMENT_STARTED; with ``late`` also of those that were never introduced, so that brokers drop what still comes."""
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
        where, cache = self._folded(name)
        known = [cache.segments.get(uuid_bytes(segment.id)) for segment in segments]
        going = [one for one in known if one is not None and one.state is _S.DELETE_SEGMENT_STARTED]
        self._say(where, cache, [self._update(one, _S.DELETE_SEGMENT_FINISHED) for one in going])

    def strays(self, name: TopicPartition, known: Collection[str]) -> Sequence[Announced] | None:
        _, cache = self._folded(name)
        return [_announced(one) for one in _strays(cache, known)]

    def cut_off(self, name: TopicPartition, live: Sequence[SegmentRef], known: Collection[str]) -> int:
        where, cache = self._folded(name)
        back = [cache.segments.get(uuid_bytes(segment.id)) for segment in live]
        ours = [one for one in back if one is not None and one.state in rules.READABLE]
        late = rules.intruders(cache, told_lineage(cache), ours, known)
        if not late and not any(one.state in rules.OPEN for one in _strays(cache, known, displacing=True)):
            return 0
        for one in ours:
            if not rules.effective(cache, one):
                self._conditions(name)
                self._finish(where, one)
                where, cache = self._folded(name)
        strays = [one for one in _strays(cache, known) if one.state in rules.OPEN]
        going = sorted((*strays, *late), key=lambda one: one.start_offset)
        self._say(where, cache, [self._update(one, _S.DELETE_SEGMENT_STARTED) for one in going])
        return len(going)

    def _rehearse(self, name: TopicPartition, replacements: Sequence[Replacement]) -> None:
        """Raises Refused where a rule will stand against one of the records: before the round has begun, as there is no way back."""
        _, cache = self._folded(name)
        lineage, news = told_lineage(cache), [cache.segments.get(uuid_bytes(new.segment.id)) for new in replacements]
        sources = [cache.segments.get(uuid_bytes(source)) for new in replacements for source in new.sources]
        here = [one for one in news if one is not None and one.state is _S.COPY_SEGMENT_STARTED]
        if len(here) < len(news) or any(one is None or one.state not in rules.READABLE for one in sources):
            return  # groups will be cut off
        last = max((new.segment.end_offset for new in replacements), default=-1)
        trial = rules.Trial(cache)

        def say(records: Sequence[MetadataRecord]) -> None:
            for record in records:
                why = rules.refusal(trial.cache, lineage, record)
                if why:
                    raise _refused(name, why)
                trial.apply(record)

        def finish(segment: RemoteLogSegmentMetadataRecord) -> None:
            for marker in rules.markers(trial.cache, lineage, segment, self._clock_ms()):
                say(marker.records(self._clock_ms()))
            say([self._update(segment, _S.COPY_SEGMENT_FINISHED)])

        for hidden in rules.hidden(cache, lineage, last):
            finish(hidden)
        for new, made in zip(replacements, here, strict=True):
            finish(made)
            left = {one.segment_id: one for one in rules.redundant(trial.cache, lineage, made)}
            left |= {uuid_bytes(source): trial.cache.segments[uuid_bytes(source)] for source in new.sources}
            ascending = sorted((one for one in left.values() if one.state in rules.OPEN), key=lambda one: one.start_offset)
            say([self._update(one, _S.DELETE_SEGMENT_STARTED) for one in ascending])

    def _forestall(self, name: TopicPartition, replacements: Sequence[Replacement]) -> None:
        """Copies that earlier leaders have begun of what is about to be replaced must not come to their end.

        And each segment must be found from its own start on before the one before it is replaced by one that ends there.
        """
        where, cache = self._folded(name)
        last = max((new.segment.end_offset for new in replacements), default=-1)
        copies = rules.in_flight(cache, told_lineage(cache), last)
        self._say(where, cache, [self._update(one, _S.DELETE_SEGMENT_STARTED) for one in copies])
        for one in rules.hidden(cache, told_lineage(cache), last):
            _, cache = self._folded_as(where)
            # Brokers have tiered since the rehearsal where a rule stands against it: the group before it will not be switched, then.
            if not rules.finish_refusal(cache, told_lineage(cache), one, self._clock_ms()):
                self._finish(where, one)

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
            also = [one.segment_id for one in rules.redundant(cache, told_lineage(cache), known)]
            deleted = any(source is None or source.state not in rules.READABLE for source in here)
            if give_up or deleted or rules.sources_refusal(cache, told_lineage(cache), known, [*sources, *also]):
                return self._gives_way(where, cache, known)
        if known.state is _S.COPY_SEGMENT_STARTED or not rules.effective(cache, known):
            if rules.finish_refusal(cache, told_lineage(cache), known, self._clock_ms()):
                return self._gives_way(where, cache, known)
            self._finish(where, known)
            where, cache = self._folded(name)
            found = cache.segments.get(raw_id)
            if found is None or found.state in _DELETING:
                return False
            if not rules.effective(cache, found):
                raise _refused(name, f"look: segment {new.segment.id} does not count after COPY_SEGMENT_FINISHED")
            known = found
        if rules.hides(cache, told_lineage(cache), known):
            return self._gives_way(where, cache, known)
        left = {source: cache.segments[source] for source in sources if source in cache.segments}
        left |= {one.segment_id: one for one in rules.redundant(cache, told_lineage(cache), known)}
        ascending = sorted((one for one in left.values() if one.state in rules.OPEN), key=lambda one: one.start_offset)
        self._say(where, cache, [self._update(one, _S.DELETE_SEGMENT_STARTED) for one in ascending])
        return True

    def _gives_way(self, where: TopicIdPartition, cache: RemoteLogMetadataCache, new: RemoteLogSegmentMetadataRecord) -> bool:
        """Its group is cut off: what brokers have deleted or tiered since the round began counts."""
        self._say(where, cache, [self._update(new, _S.DELETE_SEGMENT_STARTED)])
        return False

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
        number = self._followed.number(where.topic_id, where.partition)
        with self._appending:
            for record in records:
                offset = self._topic.append(number, encode(record))
            ends = sum(isinstance(one, RemoteLogSegmentMetadataUpdateRecord) and one.state is _S.DELETE_SEGMENT_FINISHED for one in records)
            self._turns = turns.spoken(self._turns, where.name, len(records) - ends, ends, self._clock_ms())
        deadline = time.monotonic() + READ_BACK_S
        while offset >= 0 and self._folded_as(where)[1].applied < offset:
            if time.monotonic() > deadline:
                raise Unavailable(f"{self._topic.name}-{number}: offset {offset} was appended and is not read", hint="Run again to go on")

    def _folded(self, name: TopicPartition) -> tuple[TopicIdPartition, RemoteLogMetadataCache]:
        return self._folded_as(TopicIdPartition(uuid_bytes(self._topic_id(name)), name.topic, name.partition))

    def _folded_as(self, where: TopicIdPartition) -> tuple[TopicIdPartition, RemoteLogMetadataCache]:
        """As the topic has it now. Raises Unavailable where it is not read to its end in time, BadData where brokers stopped."""
        progress = self._followed.catch_up(READ_BACK_S)
        number = self._followed.number(where.topic_id, where.partition)
        if progress.behind.get(number, 0) > 0:
            said = f"partition {number} of {self._topic.name} is not read to its end within {READ_BACK_S:g} s"
            raise Unavailable(said, hint="Run again to go on")
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
