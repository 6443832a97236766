"""Offsets that brokers themselves have made unreadable, found by replaying the metadata topic as Kafka's own formatter prints it.

Brokers find a remote segment by leader epoch and start offset. If two leaders copy a segment from the same start offset, the later copy
hides the former in that epoch, even if it ends earlier (Kafka's RemoteLogLeaderEpochState.handleSegmentWithCopySegmentFinishedState).
Consumers are out of range between the two ends until the segments expire.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from typing_extensions import override

from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset
from compactor.model.ids import COMPACTOR_BROKER_ID
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord, RemoteLogSegmentMetadataUpdateRecord, TopicIdPartition, uuid_bytes
from compactor.model.segment import SegmentState
from tests.plain_metadata_cache import PlainCache

_ABOUT = re.compile(r"RemoteLogSegmentId\{topicIdPartition=([^:]+):(.+)-(\d+), id=([^}]+)\}")
_BOUNDS = re.compile(r"startOffset=(\d+), endOffset=(\d+)")
_EPOCHS = re.compile(r"segmentLeaderEpochs=\{([^}]*)\}")
_EVENT = re.compile(r"eventTimestampMs=(\d+)")
_STATE = re.compile(r"state=([A-Z_]+)")
_BROKER = re.compile(r"brokerId=(\d+)")
_Record = RemoteLogSegmentMetadataRecord | RemoteLogSegmentMetadataUpdateRecord


@dataclass(frozen=True)
class BrokerHole:
    """Offsets [first, last] of a leader epoch that one copy of brokers has and another copy hides. hidden, hiding: segment ids."""

    where: str
    epoch: int
    first: int
    last: int
    hidden: str
    hiding: str

    @override
    def __str__(self) -> str:
        return f"{self.where}, offsets {self.first} to {self.last}: brokers copied {self.hidden}, and hid it with {self.hiding}"


class MetadataReplay:
    """Records about segments in the metadata topic. lines: as the formatter prints them, those of one partition in their order."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._records: dict[str, list[_Record]] = defaultdict(list)
        for record in map(_parse, lines):
            if record is None:
                continue
            self._records[f"{record.partition.topic}-{record.partition.partition}"].append(record)

    def broker_hole(self, where: str, offset: int, at_ms: int) -> BrokerHole | None:
        """Return the hole in which the offset lay at that time, None if it lay in none that brokers alone had made.

        Records of a compactor are not replayed, so that no hole follows from them. If a compactor had begun any segment within the
        range of the hidden one, the hole counts as the compactor's.

        where: topic-partition. Of a topic that was created again, the newest incarnation at that time counts.
        """
        replayed: dict[TopicIdPartition, PlainCache] = {}
        begun_ms: dict[TopicIdPartition, int] = {}
        ours: list[RemoteLogSegmentMetadataRecord] = []
        for record in self._records.get(where, ()):
            if record.event_timestamp_ms > at_ms:
                continue
            begun_ms.setdefault(record.partition, record.event_timestamp_ms)
            if record.broker_id != COMPACTOR_BROKER_ID:
                replayed.setdefault(record.partition, PlainCache()).apply(record)
            elif isinstance(record, RemoteLogSegmentMetadataRecord):
                ours.append(record)
        if not replayed:
            return None
        newest = max(replayed, key=lambda partition: begun_ms[partition])
        for hidden, hole in _holes_at(replayed[newest], where, offset):
            if not any(
                one.partition == newest and one.start_offset <= hidden.end_offset and hidden.start_offset <= one.end_offset for one in ours
            ):
                return hole
        return None


def _holes_at(cache: PlainCache, where: str, offset: int) -> Iterator[tuple[RemoteLogSegmentMetadataRecord, BrokerHole]]:
    """Yield each segment that holds the offset and is hidden by one with the same start that ends before it, if no epoch reads it."""
    if any(cache.lookup(epoch, offset) is not None for epoch in cache.epochs):
        return
    for hidden in cache.metadata.values():
        if hidden.state is not SegmentState.COPY_SEGMENT_FINISHED:
            continue
        for entry in hidden.leader_epochs:
            epoch, start = entry.epoch, entry.start_offset
            starts = cache.epochs[epoch].offset_to_id
            hiding = cache.metadata.get(starts.get(start, b""))
            last = min([cache.end_in(hidden, epoch), *(other - 1 for other in starts if other > start)])
            if hiding is not None and start <= offset <= last and cache.end_in(hiding, epoch) < offset:
                yield hidden, BrokerHole(where, epoch, cache.end_in(hiding, epoch) + 1, last, hidden.id, hiding.id)


def _parse(line: str) -> _Record | None:
    """Return the record that a line shows, None if it is not about a segment."""
    about, state, broker, event = (shape.search(line) for shape in (_ABOUT, _STATE, _BROKER, _EVENT))
    if about is None or state is None or broker is None or event is None:
        return None
    partition = TopicIdPartition(uuid_bytes(about[1]), about[2], int(about[3]))
    raw_id, broker_id, event_ms = uuid_bytes(about[4]), int(broker[1]), int(event[1])
    bounds, epochs = _BOUNDS.search(line), _EPOCHS.search(line)
    if bounds is None or epochs is None:
        return RemoteLogSegmentMetadataUpdateRecord(partition, raw_id, broker_id, event_ms, SegmentState(state[1]))
    named = tuple(EpochEntry(LeaderEpoch(int(each)), Offset(int(start))) for each, start in re.findall(r"(\d+)=(\d+)", epochs[1]))
    return RemoteLogSegmentMetadataRecord(partition, raw_id, int(bounds[1]), int(bounds[2]), broker_id, -1, event_ms, named, 0)
