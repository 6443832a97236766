"""Sees everything at the instant it happens, and says what must never be: the invariants of the simulation.

It keeps its own fold of the records that really are in the log (the first creation of each slot, in order). What a process
believes must be one of those states; what a reader sees must be what the broker wrote; what is deleted must be dead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from checkpoint.offsets import first_dirty_offset_in
from compactor.control import logs, records
from compactor.control.records import (
    ImportVoided,
    LeadershipAcquired,
    LogStartRaised,
    PartitionRecord,
    RoundPublished,
    SegmentDeletionBegun,
    SegmentsTiered,
    TailTruncated,
)
from compactor.control.state import PartitionState
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.upkeep.retire import PendingDeletions
from tests.simulation.symbolic import NAME, Row, Rows, decode, view
from tests.simulation.world import GRACE_MS, ORPHAN_AGE_MS, UNDO_WINDOW_MS, World
from tests.support.keys import object_key

Fingerprint = tuple[Any, ...]


class Oracle:
    def __init__(self, world: World, broker: Sequence[Rows], name: TopicPartition = NAME) -> None:
        self.world = world
        self.name = name
        self.log = f"partitions/{name}/log/"
        self.rows: list[Row] = [row for segment in broker for row in segment]
        self.state = PartitionState(topic=name.topic, partition=name.partition, incarnation=name.incarnation)
        self.fingerprints: dict[int, Fingerprint] = {0: fingerprint(self.state)}
        self.times: dict[int, float] = {}
        self.contents: dict[str, Rows] = {}
        self.bytes: dict[str, bytes] = {}
        self.leaders: dict[int, str] = {}
        self.counts: dict[str, int] = {}
        self.promised: dict[str, Rows] = {}
        """What importers read of the broker, by segment id."""
        self.truncated = 0
        self.log_start = 0
        world.control.on_create.append(self.control_created)
        world.data.on_create.append(self.data_created)
        world.data.on_delete.append(self.data_deleted)
        world.control.on_put.append(self.heartbeat_put)
        self.signs: dict[int, list[float]] = {}
        self.asked: dict[str, float] = {}

    def truth(self, end_offset: int, log_start: int) -> dict[str, int]:
        """The value of each key as the broker wrote it, from one offset to another, both inclusive."""
        return view(row for row in self.rows if log_start <= row[0] <= end_offset)

    # --- what happens to the stores ---

    def control_created(self, key: str, data: bytes) -> None:
        """A record counts as written when its slot is created for the first time, directly behind the tail."""
        if not key.startswith(self.log) or int(key[len(self.log) : len(self.log) + 20]) != self.state.slot + 1:
            return
        record = records.decode_checksummed_json(PartitionRecord, data, key)
        before, self.state = self.state, logs.fold_partition_record(self.state, record)
        self.times[record.slot] = int(self.world.now_ms)
        self.fingerprints[record.slot] = fingerprint(self.state)
        counted = len(self.state.fenced) == len(before.fenced)
        self.world.note(f"slot {record.slot}: {record.body.type} {'counts' if counted else self.state.fenced[-1].reason}")
        self.counts[record.body.type] = self.counts.get(record.body.type, 0) + counted
        if counted:
            if isinstance(record.body, LeadershipAcquired):
                self.check_lease(before, record)
                self.signs[record.body.leader_epoch] = [self.world.now_ms]
            self.check_step(before, record)
            self.check_view()

    def heartbeat_put(self, key: str) -> None:
        prefix = f"partitions/{self.name}/heartbeat/"
        if key.startswith(prefix):
            self.signs.setdefault(int(key.removeprefix(prefix)[:20]), []).append(self.world.now_ms)

    def check_lease(self, before: PartitionState, record: Any) -> None:
        """A leader is replaced only if it was silent for its ttl at some moment since its successor began to ask."""
        leader, began = before.leader, self.asked.get(record.incarnation)
        if leader is None or leader.released or leader.incarnation == record.incarnation or began is None:
            return
        signs = self.signs[leader.epoch]
        silent = zip(signs, [*signs[1:], self.world.now_ms + 1], strict=True)
        if not any(sign + leader.ttl_ms < until and began <= until and sign + leader.ttl_ms <= self.world.now_ms for sign, until in silent):
            self.world.violate(f"epoch {leader.epoch} was taken over while it was alive")

    def data_created(self, key: str, data: bytes) -> None:
        if not key.startswith(f"{self.name}/"):
            return  # another's, or whose the tier is
        name = _id(key)
        if self.bytes.setdefault(name, data) != data:
            self.world.violate(f"{key} was created with other bytes than before")
        self.contents[name] = decode(data)

    def data_deleted(self, key: str) -> None:
        if not key.startswith(f"{self.name}/"):
            return
        state, name = self.state, _id(key)
        if any(segment.id == name for segment in state.live):
            self.world.violate(f"{key} was deleted while live")
        if any(segment.id == name for group in state.waiting for segment in group.segments):
            self.world.violate(f"{key} was deleted while in grace")
        if any(name in entry.ids for entry in state.registrations.values()):
            self.world.violate(f"{key} was deleted while registered")
        if state.intent and any(task.new_segment_id == name for task in state.intent.plan.tasks):
            self.world.violate(f"{key} was deleted while its intent is open")

    # --- what processes believe ---

    def surveyed(self, found: PendingDeletions, state: PartitionState) -> None:
        """What is announced is known to whoever has folded the announcement, whoever leads."""
        announced = {task.new_segment_id for task in state.intent.plan.tasks} if state.intent else set()
        if announced.intersection(item.segment_id for item in (*found.orphans, *found.young)):
            self.world.violate("a sweep takes what an open intent has announced for unknown")

    def believed(self, state: PartitionState, tail_before: int) -> None:
        if self.fingerprints.get(state.slot) != fingerprint(state):
            self.world.violate(f"a process believes a state at slot {state.slot} that the log never had")
        if state.slot < tail_before:
            self.world.violate(f"a fold ended at slot {state.slot}, though slot {tail_before} was written before it began")

    def led(self, epoch: int, incarnation: str) -> None:
        if self.leaders.setdefault(epoch, incarnation) != incarnation:
            self.world.violate(f"two processes lead with epoch {epoch}")

    # --- what must hold of every state ---

    def check_step(self, before: PartitionState, record: Any) -> None:
        """Vector and grace: what may change, and when. What the broker has written, as far as the tier knows by now."""
        body, state = record.body, self.state
        if isinstance(body, SegmentsTiered):
            self.arrived(body.segments)
        if isinstance(body, TailTruncated):
            self.truncated += 1
            self.rows = [row for segment in before.live for row in self.contents[segment.id] if row[0] < body.offset]
            self.rows += [row for segment in body.segments for row in self.contents[segment.id]]
            if first_dirty_offset_in(state.vector) > body.offset:
                self.world.violate("offsets that the broker has discarded count as clean")
        if isinstance(body, LogStartRaised):
            self.raised(before, body)
        back = [s.id for s in state.live if s.end_offset < self.log_start and s not in before.live]
        if back and not isinstance(body, RoundPublished):
            self.world.violate(f"{body.type} brought back segment {back[0]}, whose records were deleted")
        if isinstance(body, TailTruncated) and self.log_start and body.offset <= self.log_start:
            self.world.violate(f"the log was cut at {body.offset}, and its records below {self.log_start} were deleted")
        if (state.log_start_offset or 0) != self.log_start:
            self.world.violate(f"{body.type} moved the log start from {self.log_start} to {state.log_start_offset}")
        moved = first_dirty_offset_in(state.vector) > first_dirty_offset_in(before.vector)
        if moved and not isinstance(body, RoundPublished):
            self.world.violate(f"{body.type} advanced the cleaner offset")
        if isinstance(body, ImportVoided) and self.world.now_ms - self.times[before.registrations[body.import_id].slot] < ORPHAN_AGE_MS - 1:
            self.world.violate(f"import {body.import_id} was voided before anybody could take it for abandoned")
        if isinstance(body, SegmentDeletionBegun):
            for group in before.waiting:
                keep = GRACE_MS if group.undone else max(GRACE_MS, UNDO_WINDOW_MS)
                if group.segments and group not in state.waiting and self.world.now_ms - self.times[group.slot] < keep - 1:
                    self.world.violate(f"what run {group.run_id} left was retired before its grace was over")

    def raised(self, before: PartitionState, body: LogStartRaised) -> None:
        """Whole segments go from the front, all records of them lie below the new start, and the end of the log stays where it is."""
        state = self.state
        removed = before.live[: len(before.live) - len(state.live)]
        if body.offset < self.log_start or body.offset > before.end_offset + 1:
            self.world.violate(f"the log start {self.log_start} became {body.offset} in a log that ends at {before.end_offset}")
        if before.intent is not None:
            self.world.violate("the log start was raised while a round was open")
        if not state.live or removed + state.live != before.live or state.end_offset != before.end_offset:
            self.world.violate("raising the log start took away another part of the log than its beginning")
        for segment in removed:
            if any(row[0] >= body.offset for row in self.contents[segment.id]) or segment.end_offset >= body.offset:
                self.world.violate(f"segment {segment.id} was removed, and readers still had records of it")
        self.log_start = body.offset

    def arrived(self, segments: Sequence[RemoteLogSegmentMetadata]) -> None:
        """What came in is what the importer read, and lies there as it was recorded."""
        for segment in segments:
            if segment.id in self.promised:
                self.rows = [row for row in self.rows if row[0] < segment.start_offset] + list(self.promised[segment.id])
            data = self.bytes.get(segment.id, b"")
            if hashlib.sha256(data).hexdigest() != segment.files["log"].sha256:
                self.world.violate(f"segment {segment.id} came in, and its object is another than was recorded")

    def check_view(self) -> None:
        """Live segments without a gap, all objects there, the broker's values, and nothing dirty below the cleaner offset."""
        state = self.state
        for earlier, later in pairwise(state.live):
            if later.start_offset != earlier.end_offset + 1:
                self.world.violate(f"offset {earlier.end_offset + 1} is not covered")
        rows: list[Row] = []
        for segment in state.live:
            if object_key(self.name, segment) not in self.world.data.objects:
                self.world.violate(f"live segment {segment.id} has no object")
                return
            rows.extend(self.contents[segment.id])
        seen = view(row for row in rows if row[0] >= self.log_start)
        truth = self.truth(state.end_offset, self.log_start)
        if seen != truth:
            self.world.violate(f"the view from {self.log_start} to {state.end_offset} is {seen}, the broker wrote {truth}")
        below = [row[1] for row in rows if self.log_start <= row[0] < first_dirty_offset_in(state.vector)]
        if len(set(below)) != len(below):
            self.world.violate("a key occurs twice below the cleaner offset")

    def check_end(self) -> None:
        """After the end phase: nothing is open, nothing is left over."""
        state = self.state
        left = [name for name in ("intent", "waiting", "retiring", "registrations") if getattr(state, name)]
        if left:
            self.world.violate(f"the end phase leaves {', '.join(left)}")
        unfinished = [run.run_id for run in state.runs if run.status in ("running", "published")]
        if len(unfinished) > sum(1 for run in state.runs if run.status == "published"):
            self.world.violate(f"run {unfinished[0]} never finished")
        expected = {object_key(self.name, segment) for segment in state.live}
        orphans = sorted(key for key in set(self.world.data.objects) - expected if key.startswith(f"{self.name}/"))
        if state.leader and not state.leader.released and state.leader.holder == "last":
            self.world.violate("leadership was not given back")
        if orphans:
            self.world.violate(f"orphans stay: {orphans}")
        scratch = [key for key in self.world.control.objects if key.startswith(f"partitions/{self.name}/scratch/")]
        if scratch:
            self.world.violate(f"scratch stays: {scratch}")
        if state.end_offset + 1 != max(first_dirty_offset_in(state.vector), self.log_start) and state.live:
            self.world.violate("the end phase leaves something dirty")


def fingerprint(state: PartitionState) -> Fingerprint:
    """Enough of a state to tell it from any other."""
    leader, intent = state.leader, state.intent
    return (
        tuple(segment.id for segment in state.live),
        state.vector,
        leader and (leader.epoch, leader.incarnation, leader.released),
        intent and (intent.plan.run_id, len(intent.receipts), intent.survivors),
        tuple(group.slot for group in state.waiting),
        tuple(segment.id for segment in state.retiring),
        tuple(state.registrations),
        state.published,
        len(state.fenced),
        state.log_start_offset,
    )


def _id(key: str) -> str:
    return key.rpartition("/")[2][21:43]
