"""Control logs written record by record, also such records as no well-behaved process writes: what the viewer is shown in tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from checkpoint.lineage import EpochEntry
from checkpoint.offsets import CleanerOffset
from compactor.constants import CompactorEpoch, LeaderEpoch, Offset, TimestampMs
from compactor.control import records as r
from compactor.control.logs import PartitionLog, open_partition_log
from compactor.control.ports import EnvironmentPorts
from compactor.control.state import PartitionState
from compactor.model.ids import TopicPartition
from compactor.model.plan import CleanerPolicy, CompactionPlan, CompactionReceipt, CompactionTask, Replacement
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.storage.wrappers import RequestCounters
from tests.support.memory_store import Clock, MemoryStore, ports_on
from tests.support.segments import make_segment

ORDERS = TopicPartition("orders", 0)
LINEAGE = (EpochEntry(LeaderEpoch(0), Offset(0)),)


def vector(*entries: tuple[int, int]) -> tuple[CleanerOffset, ...]:
    return tuple(CleanerOffset(CompactorEpoch(epoch), Offset(offset)) for epoch, offset in entries)


def segment(segment_id: str, start: int, end: int) -> RemoteLogSegmentMetadata:
    return make_segment(segment_id, start, end, leader_epochs=LINEAGE)


@dataclass
class Author:
    """One process that writes into the log, with or without the right to. ``epoch``: the one that it believes to have."""

    ports: EnvironmentPorts
    log: PartitionLog
    epoch: int = -1

    def append(self, body: Any) -> PartitionState:
        """Appends behind the tail, whatever the rules say."""
        written: list[Any] = []

        def decide(state: PartitionState) -> Any:
            if written and state.slot >= written[0]:
                return None
            written[:] = [state.slot + 1]
            return body

        self.log.refresh()
        return self.log.append_due_records(decide)

    def lead(self) -> PartitionState:
        self.epoch = self.log.refresh().next_compactor_epoch
        return self.append(r.LeadershipAcquired(leader_epoch=self.epoch, holder=self.ports.holder, ttl_ms=1_000))

    def release(self) -> PartitionState:
        return self.append(r.LeadershipReleased(leader_epoch=CompactorEpoch(self.epoch)))

    def announce(self, run_id: str, sources: list[str], next_dirty: int) -> CompactionPlan:
        state = self.log.refresh()
        members = [found for found in state.live if found.id in sources]
        task = CompactionTask(
            group=0,
            sources=tuple(sources),
            new_segment_id=f"{run_id}-out",
            start_offset=members[0].start_offset,
            end_offset=members[-1].end_offset,
            leader_epochs=LINEAGE,
            mtime_ms=1,
        )
        plan = CompactionPlan(
            run_id=run_id,
            topic=ORDERS.topic,
            partition=ORDERS.partition,
            leader_epoch=CompactorEpoch(self.epoch),
            now_ms=TimestampMs(self.ports.clock_ms()),
            first_dirty_offset=Offset(state.first_dirty_offset),
            end_offset=Offset(next_dirty),
            next_dirty_offset=Offset(next_dirty),
            high_watermark=state.end_offset + 1,
            legacy_horizon_ms=0,
            vector=state.vector,
            policy=CleanerPolicy(),
            map_engine="memory",
            fingerprint="test",
            producers=(),
            tasks=(task,),
        )
        self.append(r.PlanAnnounced(leader_epoch=CompactorEpoch(self.epoch), plan=plan))
        return plan

    def finish(self, plan: CompactionPlan, published: tuple[CleanerOffset, ...]) -> PartitionState:
        """Receipt and publication. ``published``: the vector that it claims."""
        task = plan.tasks[0]
        made = segment(task.new_segment_id, task.start_offset, task.end_offset)
        receipt = CompactionReceipt(
            run_id=plan.run_id, group=0, segment=made, records_read=10, records_kept=5, bytes_read=100, bytes_written=100
        )
        before = self.log.refresh().vector
        self.append(r.ReceiptsAdded(leader_epoch=CompactorEpoch(self.epoch), receipts=(receipt,)))
        return self.append(
            r.RoundPublished(
                leader_epoch=CompactorEpoch(self.epoch),
                run_id=plan.run_id,
                replacements=(Replacement(sources=task.sources, segment=made),),
                vector_before=before,
                vector=published,
            )
        )

    def publish(self, run_id: str, sources: list[str], *published: tuple[int, int]) -> PartitionState:
        plan = self.announce(run_id, sources, published[-1][1])
        state = self.finish(plan, vector(*published))
        return (
            state
            if state.find_run(run_id) is None
            else self.append(r.RunEnded(leader_epoch=CompactorEpoch(self.epoch), run_id=run_id, status="cleaned"))
        )


@dataclass
class Crafted:
    """One partition's control log in memory; a second passes with each record's author."""

    clock: Clock = field(default_factory=Clock)
    counters: RequestCounters = field(default_factory=RequestCounters)

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock, self.counters)

    def author(self, holder: str) -> Author:
        ports = ports_on(self.store, self.clock, holder)
        return Author(ports, open_partition_log(ports, ORDERS))

    def log(self) -> PartitionLog:
        """As somebody reads it who has just come."""
        log = self.author("reader").log
        log.refresh()
        return log

    def import_segments(self, *bounds: tuple[int, int]) -> list[str]:
        author = self.author("importer")
        ids = [f"in-{start}" for start, _ in bounds]
        author.append(r.SegmentIdsRegistered(import_id=f"import-{ids[0]}", ids=tuple(ids), holder="importer"))
        made = tuple(segment(name, start, end) for name, (start, end) in zip(ids, bounds, strict=True))
        author.append(r.SegmentsTiered(import_id=f"import-{ids[0]}", segments=made, lineage=LINEAGE))
        return ids


def kip_table() -> tuple[Crafted, Author, Author]:
    """KIP-1272's table: A (epoch 0) publishes 100; B takes over as epoch 1 and publishes {0:100, 1:155}; A comes back with {0:123}."""
    crafted = Crafted()
    first, second, third = crafted.import_segments((0, 99), (100, 122), (123, 154))
    a, b = crafted.author("host-a:1"), crafted.author("host-b:2")
    a.lead()
    a.publish("run-a", [first], (0, 100))
    crafted.clock.now_ms += 60_000
    b.lead()
    b.publish("run-b", [second, third], (0, 100), (1, 155))
    crafted.clock.now_ms += 60_000
    late = segment("late", 0, 122)
    replacement = Replacement(sources=("run-a-out", second), segment=late)
    a.append(
        r.RoundPublished(
            leader_epoch=CompactorEpoch(0),
            run_id="run-late",
            replacements=(replacement,),
            vector_before=vector((0, 100)),
            vector=vector((0, 123)),
        )
    )
    return crafted, a, b
