"""A log of symbols, and a cleaner for it that is small enough to be right: Kafka's rules for keys and tombstones.

A segment's content is a JSON list of ``[offset, key, value, horizon]``; value None is a tombstone, horizon None not set yet.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from typing_extensions import override

from checkpoint import lineage
from compactor.constants import CompactorEpoch, LeaderEpoch, Offset, TimestampMs
from compactor.control.ports import EnvironmentPorts
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState, RoundIntent
from compactor.errors import AlreadyExists
from compactor.model.ids import TopicPartition
from compactor.model.plan import CleanerPolicy, CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask, SkippedSegment
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.round.ports import Job, Session
from tests.simulation.world import RETENTION_MS
from tests.support.keys import object_key

Row = tuple[int, str, int | None, int | None]
Rows = tuple[Row, ...]
NAME = TopicPartition("t", 0)
NEIGHBOUR = TopicPartition("t-0", 0)
"""Its name begins with that of the other one."""
POLICY = CleanerPolicy(delete_retention_ms=RETENTION_MS)
KEYS = "abcd"


def broker_log(rng: random.Random, segments: int) -> list[Rows]:
    """What the broker wrote: sealed segments of one to three records."""
    log: list[Rows] = []
    offset = 0
    for _ in range(segments):
        rows: list[Row] = []
        for _ in range(rng.randint(1, 3)):
            rows.append((offset, rng.choice(KEYS), None if rng.random() < 0.35 else offset, None))
            offset += 1
        log.append(tuple(rows))
    return log


class Broker:
    """The log as its broker has it now: segments with the leader epoch that wrote them. An unclean election discards its end."""

    def __init__(self, segments: Sequence[Rows], epoch_segments: int) -> None:
        self.segments = [(rows, number // epoch_segments) for number, rows in enumerate(segments)]

    @property
    def end(self) -> int:
        """First offset that is not written yet."""
        return self.segments[-1][0][-1][0] + 1

    def lineage(self, end: int) -> tuple[EpochEntry, ...]:
        """Its leader-epoch-checkpoint up to an exclusive end."""
        starts: dict[int, int] = {}
        for rows, epoch in self.segments:
            starts.setdefault(epoch, rows[0][0])
        return tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in starts.items() if start < end)

    def between(self, start: int, end: int) -> Rows:
        """The rows from start to end, both inclusive."""
        return tuple(row for rows, _ in self.segments for row in rows if start <= row[0] <= end)

    def elect(self, rng: random.Random, lowest: int) -> None:
        """A replica that lacked the end becomes leader and goes on from there, in a new epoch and with other values."""
        cut = rng.randint(min(lowest, self.end - 1), self.end - 1)
        kept = [(tuple(row for row in rows if row[0] < cut), epoch) for rows, epoch in self.segments]
        epoch = kept[-1][1] + 1
        self.segments = [(rows, old) for rows, old in kept if rows]
        for _ in range(rng.randint(1, 3)):
            rows = []
            for _ in range(rng.randint(1, 3)):
                rows.append((cut, rng.choice(KEYS), None if rng.random() < 0.35 else epoch * 1000 + cut, None))
                cut += 1
            self.segments.append((tuple(rows), epoch))


def encode(rows: Iterable[Row]) -> bytes:
    return json.dumps(list(rows)).encode()


def decode(data: bytes) -> Rows:
    return tuple((row[0], row[1], row[2], row[3]) for row in json.loads(data))


def view(rows: Iterable[Row]) -> dict[str, int]:
    """The value of each key after reading these records in order."""
    values: dict[str, int] = {}
    for _, key, value, _ in rows:
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    return values


def describe(segment_id: str, start: int, end: int, data: bytes, epochs: Sequence[EpochEntry]) -> RemoteLogSegmentMetadata:
    file = SegmentFile(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return RemoteLogSegmentMetadata(
        id=segment_id,
        start_offset=Offset(start),
        end_offset=Offset(end),
        size_bytes=len(data),
        max_timestamp_ms=TimestampMs(-1),
        mtime_ms=0,
        leader_epochs=tuple(epochs),
        files={"log": file},
    )


def upload(ports: EnvironmentPorts, segment: RemoteLogSegmentMetadata, data: bytes, name: TopicPartition = NAME) -> bool:
    """Creates the object; False where another one has the name (I7)."""
    key = object_key(name, segment)
    try:
        ports.data.create(key, data, {"sha256": segment.files["log"].sha256})
    except AlreadyExists:
        return ports.data.get(key) == data
    return True


Planner = Callable[[PartitionState, int, int, Callable[[], str]], CompactionPlan | None]
"""(state, now_ms, leader epoch, new id) -> the plan, or None where nothing is due."""


class SymbolicPlanner:
    """Planner. ``contents`` (segment id -> rows) stands in for the sidecars. Which segments it groups depends on the epoch."""

    def __init__(self, contents: Mapping[str, Rows], *, skips: bool = True) -> None:
        self.contents = contents
        self.skips = skips

    def __call__(self, state: PartitionState, now_ms: int, leader_epoch: int, new_id: Callable[[], str]) -> CompactionPlan | None:
        first_dirty = state.first_dirty_offset
        live = list(state.live)
        if leader_epoch % 4 == 1 and len(live) > 1 and live[-1].start_offset > first_dirty:
            live.pop()  # as if min.compaction.lag.ms held it back
        if not live:
            return None
        end = live[-1].end_offset + 1
        dirty_keys = {row[1] for segment in live for row in self.contents[segment.id] if row[0] >= first_dirty}
        skipped = [
            segment
            for segment in live
            if self.skips
            and segment.end_offset < first_dirty
            and all(row[1] not in dirty_keys and not _due(row, now_ms) for row in self.contents[segment.id])
        ]
        work = [segment for segment in live if segment not in skipped]
        if end <= first_dirty and not any(_due(row, now_ms) for segment in work for row in self.contents[segment.id]):
            return None
        return CompactionPlan(
            run_id=new_id(),
            topic=state.topic,
            partition=state.partition,
            leader_epoch=CompactorEpoch(leader_epoch),
            now_ms=TimestampMs(now_ms),
            first_dirty_offset=Offset(first_dirty),
            end_offset=Offset(end),
            next_dirty_offset=Offset(max(end, first_dirty)),
            high_watermark=end,
            legacy_horizon_ms=0,
            vector=state.vector,
            policy=POLICY,
            map_engine="memory",
            fingerprint="symbolic",
            producers=(),
            tasks=tuple(
                CompactionTask(
                    group=number,
                    sources=tuple(segment.id for segment in group),
                    new_segment_id=new_id(),
                    start_offset=group[0].start_offset,
                    end_offset=group[-1].end_offset,
                    leader_epochs=lineage.merge_segment_lineages([segment.leader_epochs for segment in group]),
                    mtime_ms=0,
                )
                for number, group in enumerate(_groups(work, 1 + leader_epoch % 3))
            ),
            skipped=tuple(SkippedSegment(id=segment.id, reason="no dirty key") for segment in skipped),
        )


Worker = Callable[[CompactionPlan, Sequence[CompactionTask], Any], Iterable[CompactionReceipt | CompactionFailure]]


class SymbolicJob(Job[PartitionState]):
    """Job over symbols: the facts are the state, the planner and the worker those that are given."""

    def __init__(
        self,
        ports: EnvironmentPorts,
        now_ms: int,
        planner: Planner,
        worker: Worker,
        resumable: Callable[[CompactionPlan], str] = lambda plan: "",
        expires: Callable[[PartitionState], int | None] = lambda state: None,
    ) -> None:
        self._ports = ports
        self._now_ms = now_ms
        self._planner = planner
        self._worker = worker
        self._resumable = resumable
        self._expires = expires

    @override
    def log_start(self, state: PartitionState) -> int | None:
        return self._expires(state)

    @override
    def is_due(self, state: PartitionState) -> bool:
        if self._expires(state) is not None:
            return True
        return self._planner(state, self._now_ms, state.next_compactor_epoch, self._ports.new_id) is not None

    @override
    def resumption_problem(self, intent: RoundIntent) -> str:
        return self._resumable(intent.plan)

    @override
    @contextmanager
    def gather(self, session: Session) -> Iterator[PartitionState]:
        yield session.state

    @override
    def plan(self, facts: PartitionState, leader_epoch: int, new_id: Callable[[], str]) -> CompactionPlan | None:
        return self._planner(facts, self._now_ms, leader_epoch, new_id)

    @override
    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, facts: PartitionState | None
    ) -> Iterable[CompactionReceipt | CompactionFailure]:
        return self._worker(plan, tasks, session)


class SymbolicWorker:
    """Worker: two passes over symbols, with real store calls. ``fails`` makes it give up a task, as bad data would."""

    def __init__(self, ports: EnvironmentPorts, *, keeps_survivors: bool = False, fails: Callable[[], bool] = lambda: False) -> None:
        self.ports = ports
        self.keeps_survivors = keeps_survivors
        self.fails = fails

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        by_id = session.state.live_segments_by_id()
        latest = self._pass_one(plan, session, by_id)
        for task in tasks:
            if self.fails():
                yield CompactionFailure(run_id=plan.run_id, group=task.group, kind="bad data", message="made up")
                return
            name = session.state.topic_partition
            rows = chain.from_iterable(self._rows(name, by_id[source]) for source in task.sources)
            kept = [row for row in (clean(row, latest, plan) for row in rows) if row]
            data = encode(kept)
            segment = describe(task.new_segment_id, task.start_offset, task.end_offset, data, task.leader_epochs)
            if not upload(self.ports, segment, data, name):
                yield CompactionFailure(run_id=plan.run_id, group=task.group, kind="digest", message="another object has the name")
                return
            yield CompactionReceipt(
                run_id=plan.run_id,
                group=task.group,
                segment=segment,
                records_read=0,
                records_kept=len(kept),
                bytes_read=0,
                bytes_written=len(data),
            )

    def _pass_one(self, plan: CompactionPlan, session: Session, by_id: Mapping[str, RemoteLogSegmentMetadata]) -> dict[str, int]:
        """Key -> its last offset in the dirty range; kept as a scratch object where survivors are kept."""
        for item in session.earlier_scan_results:
            found: dict[str, int] = json.loads(self.ports.control.get(item.key))
            return found
        latest: dict[str, int] = {}
        for source in plan.source_segment_ids:
            if by_id[source].end_offset >= plan.first_dirty_offset:
                rows = self._rows(session.state.topic_partition, by_id[source])
                latest |= {key: offset for offset, key, _, _ in rows if offset >= plan.first_dirty_offset}
        if self.keeps_survivors:
            data = json.dumps(latest).encode()
            key = session.scratch_object_key("map")
            try:
                self.ports.control.create(key, data)
            except AlreadyExists:
                pass
            session.record_scan_results([ScratchObject(key=key, size=len(data), sha256=hashlib.sha256(data).hexdigest())])
        return latest

    def _rows(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> Rows:
        return decode(self.ports.data.get(object_key(name, segment)))


def clean(row: Row, latest: Mapping[str, int], plan: CompactionPlan) -> Row | None:
    """The record as the round leaves it, or None."""
    offset, key, value, horizon = row
    if offset < latest.get(key, -1) or _due(row, plan.now_ms):
        return None
    if value is None and horizon is None:
        return offset, key, value, plan.now_ms + plan.policy.delete_retention_ms
    return row


def _due(row: Row, now_ms: int) -> bool:
    return row[2] is None and row[3] is not None and row[3] <= now_ms


def _groups(segments: Sequence[RemoteLogSegmentMetadata], size: int) -> Iterator[list[RemoteLogSegmentMetadata]]:
    """Neighbours, at most ``size`` of them; a gap (a skipped segment) ends a group."""
    group: list[RemoteLogSegmentMetadata] = []
    for segment in segments:
        if group and (len(group) >= size or segment.start_offset != group[-1].end_offset + 1):
            yield group
            group = []
        group.append(segment)
    if group:
        yield group
