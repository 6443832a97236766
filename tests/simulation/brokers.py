"""The simulation of tiers that brokers write: the real publisher and control log over a metadata topic in memory, under replicas that tier.

What a process appends is refused, stands and is not acknowledged, or lands later, within the producer's delivery timeout. A process may
stop for long at any other request and go on as a zombie. After every record of the topic, as any broker may have it last: no offset
without a segment, the values that producers wrote, also between two steps of a broker; no object deleted that a broker can still read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from greenlet import getcurrent
from typing_extensions import override

from checkpoint.offsets import first_dirty_offset_in
from compactor.adapters.brokers import chain as rules
from compactor.adapters.brokers.cache import FoldedMetadataStore, RemoteLogMetadataCache, last_offset_of_epoch
from compactor.adapters.brokers.chain import chained_read_ranges, lineage_from_segments, offset_gaps, segment_read_ranges
from compactor.adapters.brokers.codec import decode_record
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.brokers.publisher import MetadataTopicSegmentPublisher
from compactor.adapters.brokers.topic import PollResult
from compactor.config.settings import CleanerSettings
from compactor.constants import CompactorEpoch, LeaderEpoch
from compactor.control.logs import PartitionLog, open_partition_log
from compactor.control.ports import EnvironmentPorts, ObjectRetention
from compactor.control.records import RoundPublished
from compactor.control.state import PartitionState
from compactor.errors import BadData, Fenced, OutOfBudget, Refused, StoreError, Unavailable, UsageError
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition, encode_segment_id
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.remote_log import (
    BrokerView,
    MetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    RemotePartitionDeleteMetadataRecord,
    SegmentReadRange,
    TopicIdPartition,
    epoch_start_offsets,
    uuid_text,
)
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile, SegmentState
from compactor.records.producers import ProducerStates, format_producer_snapshot
from compactor.round.drive import run_round
from compactor.round.plan import PlanInputs, assess_round, plan_round
from compactor.round.ports import Session
from compactor.tier.plain import NativeLayout
from compactor.upkeep.retire import WITHDRAWAL, retire_partition
from tests.read_checker import FoundRecord, PartitionHistory, Read, SentRecord, judge_read
from tests.simulation import symbolic
from tests.simulation.actors import LEASE
from tests.simulation.memory_topic import MemoryMetadataTopic, MemoryTopicLog
from tests.simulation.oracle import Oracle
from tests.simulation.symbolic import KEYS, NAME, Row, Rows, SymbolicJob
from tests.simulation.world import GRACE_MS, ORPHAN_AGE_MS, RETENTION_MS, UNDO_WINDOW_MS, Crash, Process, SimStore, Stored, World
from tests.support.kafka_publishing import KeptNowhere
from tests.support.replicas import Copy, Record, Replica, Replicas

S = SegmentState
WHERE = TopicIdPartition(b"topic-id-of-16-b", NAME.topic, NAME.partition)
LATE_MS = 300
"""A producer's delivery timeout: what is on its way lands within it, or never."""
LAG_MS = 400
"""How far a broker may be behind; less than grace."""
KEPT = ObjectRetention(grace_ms=GRACE_MS, undo_window_ms=UNDO_WINDOW_MS, orphan_age_ms=ORPHAN_AGE_MS)
_SNAPSHOT = format_producer_snapshot(ProducerStates.empty_producer_states())


def row_of(record: Record) -> Row:
    """A record of a replica, with key and value."""
    offset, _, which = record
    dice = random.Random(which)
    return offset, dice.choice(KEYS), None if dice.random() < 0.4 else which, None


def sent(row: Row) -> tuple[int, SentRecord]:
    """A row as the judge of reads has it: its offset, and what was sent."""
    offset, key, value, _ = row
    return offset, SentRecord(key, value, offset)


class BrokersLayout(NativeLayout):
    """As the brokers' plug-in would have it: metadata does not say which files there are. Producer states are the same everywhere."""

    def __init__(self, store: SimStore) -> None:
        super().__init__(store)
        self._objects = store

    @override
    def segment_files(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        if segment.files:
            return segment.files
        size = self._objects.head(self.object_name(name, segment, "log")).size
        return {"log": SegmentFile(size=size), "snapshot": SegmentFile(size=len(_SNAPSHOT))}

    @override
    def read_file(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, start: int = 0, length: int | None = None
    ) -> bytes:
        return _SNAPSHOT if kind == "snapshot" else super().read_file(name, segment, kind, start, length)


class SimTopic(MemoryMetadataTopic):
    """The metadata topic as one process reaches it."""

    def __init__(self, sim: Simulated) -> None:
        super().__init__(sim.topic)
        self._sim = sim

    @override
    def poll(self, limit: int, timeout_s: float) -> PollResult:
        return self._sim.world.call("poll", lambda: super(SimTopic, self).poll(limit, timeout_s), changes=False)

    @override
    def append(self, partition: int, value: bytes) -> int:
        """At once: who stops between his last look and this is taken for one whose record is on its way (LATE_MS)."""
        sim, world = self._sim, self._sim.world
        process = world.owners.get(getcurrent())
        if process is None:
            return sim.written(partition, value)
        dice, faults = world.rng.random(), world.faults
        if dice < faults.crash * 8:
            if world.rng.random() < 0.6:
                sim.lands(partition, value)
            process.dead = True
            raise Crash
        if dice < faults.crash * 8 + faults.throttle:
            raise Unavailable("no broker answers")
        if dice < faults.crash * 8 + faults.throttle + faults.lost:
            sim.lands(partition, value)
            raise Unavailable("the answer to an append was lost")
        return sim.written(partition, value)


class SimReplicas(Replicas):
    """Brokers of the simulation: what they say goes into the topic at once, what they copy into the store."""

    def __init__(self, sim: Simulated, rng: random.Random) -> None:
        super().__init__(rng, WHERE, unclean=0, zombies=0.4)
        self.sim = sim
        self.cache = sim.cache
        self.alone = RemoteLogMetadataCache(WHERE)
        """What there were without compactors."""

    @override
    def begin(self, log: Replica, base: int, end: int) -> Copy:
        copy = super().begin(log, base, end)
        rows = [row_of(record) for record in self.contents[copy.start.segment_id]]
        key = self.sim.key(copy.start.segment_id, base)
        data = symbolic.encode(rows)
        self.sim.world.data.objects[key] = Stored(data, int(self.sim.world.now_ms))
        self.sim.oracle.data_created(key, data)
        return copy

    @override
    def finish(self, copy: Copy) -> None:
        """Unless brokers would leave a hole without any compaction, too: a late copy may do that."""
        update = RemoteLogSegmentMetadataUpdateRecord(WHERE, copy.start.segment_id, 1, 6, S.COPY_SEGMENT_FINISHED)
        trial = self.alone.copy()
        trial.apply_record(update, trial.applied + 1)
        before, after = (segment_read_ranges(cache, self.leader.lineage()) for cache in (self.alone, trial))
        left = [link for link in after if link.last >= self.sim.start]
        begins = not left or left[0].first <= self.sim.start or any(link.first > self.sim.start for link in before[:1])
        whole = not offset_gaps(left) and begins and after[-1].last >= before[-1].last if before else True
        if whole and copy.start.segment_id in trial.segments:
            super().finish(copy)

    @override
    def say(self, record: MetadataRecord) -> None:
        self.alone.apply_record(record, self.alone.applied + 1)
        self.sim.topic.write([record])
        self.sim.happened(record)

    def delete_records(self) -> None:
        """Up to a segment's end. What the leader finds below is deleted, whatever its state."""
        ends = [link.last + 1 for link in self.sim.links()[:-2]]
        if not ends:
            return
        self.sim.raise_start(self.rng.choice(ends))
        going = [one for one in self.cache.list_segments() if one.end_offset < self.sim.start and one.state in rules.UNDELETED_STATES]
        for one in sorted(going, key=lambda one: one.start_offset):
            for state in (S.DELETE_SEGMENT_STARTED, S.DELETE_SEGMENT_FINISHED):
                self.say(RemoteLogSegmentMetadataUpdateRecord(WHERE, one.segment_id, 1, 0, state))
                self.sim.world.data.objects.pop(self.sim.key(one.segment_id, one.start_offset), None)

    def expire(self, dice: random.Random) -> None:
        """A part of what RemoteLogManager's expiration does: the log start rises, in memory, and what lies below is deleted one by one.

        A new leader may start lower, and begins again: it deletes what its predecessor had only begun to delete.
        """
        sim, which = self.sim, dice.random()
        if which < 0.35:
            ends = [link.last + 1 for link in sim.links()[:-2] if link.last >= sim.low]
            if ends:
                sim.raise_start(dice.choice(ends[:2]))
        elif which < 0.5:
            sim.low = dice.choice((sim.lowest, sim.low))
            sim.world.note(f"a new leader starts at {sim.low}")
        else:
            self.delete_expired(dice.randint(1, 4))

    def delete_expired(self, most: int) -> None:
        """Some of what lies below the leader's log start, in its order: what readers find first, where two segments begin together."""
        found = {link.segment.segment_id for link in self.sim.links()}
        going = [one for one in self.cache.list_segments() if one.end_offset < self.sim.low]
        for one in sorted(going, key=lambda one: (one.start_offset, one.segment_id not in found))[:most]:
            if one.state is not S.DELETE_SEGMENT_STARTED:
                self.say(RemoteLogSegmentMetadataUpdateRecord(WHERE, one.segment_id, 1, 0, S.DELETE_SEGMENT_STARTED))
                if self.rng.random() < 0.3:
                    return  # its leader is stopped here
            self.sim.world.data.objects.pop(self.sim.key(one.segment_id, one.start_offset), None)
            self.say(RemoteLogSegmentMetadataUpdateRecord(WHERE, one.segment_id, 1, 0, S.DELETE_SEGMENT_FINISHED))

    def delete_started(self) -> None:
        """A segment of a compactor whose COPY_SEGMENT_FINISHED they have not seen: brokers delete what they take for leftovers."""
        started = [
            one for one in self.cache.list_segments() if one.broker_id == COMPACTOR_BROKER_ID and one.state is S.COPY_SEGMENT_STARTED
        ]
        if not started:
            return
        one = self.rng.choice(started)
        for state in (S.DELETE_SEGMENT_STARTED, S.DELETE_SEGMENT_FINISHED):
            self.say(RemoteLogSegmentMetadataUpdateRecord(WHERE, one.segment_id, 1, 0, state))
        self.sim.world.data.objects.pop(self.sim.key(one.segment_id, one.start_offset), None)


class BrokersOracle(Oracle):
    """The judge of the control log, where brokers say what is live."""

    def __init__(self, sim: Simulated) -> None:
        super().__init__(sim.world, [])
        self.sim = sim

    @override
    def check_view(self) -> None:
        """Asked of the topic instead."""

    @override
    def check_step(self, before: PartitionState, record: object) -> None:
        super().check_step(before, record)
        body = getattr(record, "body", None)
        if isinstance(body, RoundPublished) and not body.cut_off:
            clean = range(self.sim.start, first_dirty_offset_in(self.state.vector))
            below = [row[1] for row in self.sim.rows(self.state.live) if row[0] in clean]
            if len(set(below)) != len(below):
                self.world.violate("a key occurs twice below the cleaner offset")

    @override
    def data_deleted(self, key: str) -> None:
        if not key.endswith(".log"):
            return
        super().data_deleted(key)
        self.sim.deleted(key.rpartition("/")[2][21:43])


class Simulated:
    """One partition: its replicas, the topic, and what readers must find after each of its records."""

    """
    start: highest log start that a leader ever had: every offset from it on must be found.
    low: log start of the present leader, of which readers may begin. lowest: the first one that is not deleted everywhere.
    expiring: decides what expires, and when; None if nothing does.
    """

    def __init__(self, world: World, *, expires: bool = False) -> None:
        self.world = world
        self.expiring = random.Random(f"expiry of {world.rng.random()}") if expires else None
        self.low = self.lowest = 0
        self.topic = MemoryTopicLog()
        self.cache = RemoteLogMetadataCache(WHERE)
        self.oracle = BrokersOracle(self)
        self.start = 0
        self.dropped = 0
        self.refused = ""
        self.raced = False
        self.read_until: dict[str, float] = {}
        self.reading: set[str] = set()
        self.replicas = SimReplicas(self, random.Random(f"replicas of {world.rng.random()}"))

    def key(self, raw_id: bytes, start: int) -> str:
        return f"{NAME}/{start:020d}-{encode_segment_id(raw_id)}.log"

    def raise_start(self, offset: int) -> None:
        """The leader's log start rises to this offset, if it is not there already. Its followers have not heard of it yet."""
        self.lowest, self.low = self.low, max(self.low, offset)
        self.start = max(self.start, self.low)
        self.world.note(f"records below {self.low} are deleted")

    # --- the topic ---

    def written(self, partition: int, value: bytes) -> int:
        offset = self.topic.put(partition, value)
        self.happened(decode_record(value))
        return offset

    def lands(self, partition: int, value: bytes) -> None:
        """Now, or within the producer's timeout."""
        if self.world.rng.random() < 0.5:
            self.written(partition, value)
        else:
            looked = self.cache.applied
            self.world.push(self.world.now_ms + self.world.rng.random() * LATE_MS, lambda: self.late(partition, value, looked))

    def late(self, partition: int, value: bytes, looked: int) -> None:
        """It was on its way: no rule was asked about what brokers said since its writer looked. A hole stays until the next run."""
        self.raced |= self.cache.applied > looked
        self.written(partition, value)

    def happened(self, record: MetadataRecord) -> None:
        """A broker applies it: between its steps, and afterwards."""
        assert not isinstance(record, RemotePartitionDeleteMetadataRecord)
        self.world.note(f"{record.broker_id}: {record.state} {encode_segment_id(record.segment_id)}")
        ours = record.broker_id == COMPACTOR_BROKER_ID
        if ours and record.state is S.COPY_SEGMENT_FINISHED:
            self.between_steps(record.segment_id)
        try:
            self.dropped += self.cache.apply_record(record, self.cache.applied + 1) is not None
        except BadData as error:
            self.world.violate(f"brokers stop reading: {error}")
        self.readers(f"after {record.state} of {encode_segment_id(record.segment_id)}")

    def between_steps(self, raw_id: bytes) -> None:
        """RemoteLogLeaderEpochState takes superseded entries away before it puts the new one: who looks then finds nothing (R8)."""
        segment = self.cache.segments.get(raw_id)
        if segment is None or segment.state in (S.DELETE_SEGMENT_STARTED, S.DELETE_SEGMENT_FINISHED):
            return
        lineage = {entry.epoch for entry in self.replicas.leader.lineage()}
        for epoch, begin in epoch_start_offsets(segment):
            state = self.cache.epochs[epoch]
            highest = -1 if state.highest is None else state.highest
            if (
                epoch in lineage
                and state.starts
                and state.starts[-1] >= begin
                and highest <= last_offset_of_epoch(segment, LeaderEpoch(epoch))
            ):
                self.world.violate(f"R8: readers of leader epoch {epoch} find nothing while {segment.id} supersedes its end")

    def links(self) -> list[SegmentReadRange]:
        return segment_read_ranges(self.cache, self.replicas.leader.lineage())

    def readers(self, when: str) -> None:
        links, begin = [link for link in self.links() if link.last >= self.start], self.start
        for link in reversed([link for link in self.links() if self.low <= link.last < self.start]):
            if link.last + 1 < begin or (links and links[0].first <= link.first):
                break  # brokers answer OFFSET_OUT_OF_RANGE below
            links, begin = [link, *links], max(link.first, self.low)
        at, rows = begin, []
        for link in links:
            if link.first > at:
                if not self.raced:
                    self.world.violate(f"{when}: offset {at} has no segment")
                return
            at = link.last + 1
            held = self.oracle.contents.get(link.segment.id)
            if held is None or self.key(link.segment.segment_id, link.segment.start_offset) not in self.world.data.objects:
                self.world.violate(f"{when}: segment {link.segment.id} is read and has no object")
                return
            rows += [row for row in held if max(link.first, begin) <= row[0] <= link.last]
        self.raced = False
        history = PartitionHistory.of(map(sent, map(row_of, self.replicas.leader.log[begin:at])))
        for wrong in judge_read(history, Read(begin, at, [FoundRecord(*sent(row)) for row in rows], cleaned_below=at)):
            self.world.violate(f"{when}: {wrong.kind}: {wrong.text}")
        found = {link.segment.id for link in links}
        self.read_until |= dict.fromkeys(self.reading - found, self.world.now_ms)
        self.reading = found

    def deleted(self, name: str) -> None:
        if name in self.reading:
            self.world.violate(f"{name} was deleted, and brokers read it")
        if self.world.now_ms - self.read_until.get(name, float("-inf")) < LAG_MS:
            self.world.violate(f"{name} was deleted while a broker that is behind may read it")

    def rows(self, live: Sequence[RemoteLogSegmentMetadata]) -> list[Row]:
        return [row for segment in live for row in rows_of(self.oracle.contents[segment.id], segment)]

    # --- processes ---

    def ports(self, process: Process) -> EnvironmentPorts:
        followed = FoldingMetadataTopicReader(SimTopic(self), FoldedMetadataStore(KeptNowhere()), clock_ms=lambda: int(self.world.now_ms))
        plain = self.world.ports(process)

        def view(name: TopicPartition) -> BrokerView:
            followed.fold_to_end(30)
            found = followed.partition_metadata_from_records(WHERE.topic_id, WHERE.partition)
            if found is None:
                return BrokerView((), ())
            lineage = lineage_from_segments(found.cache)
            return BrokerView(chained_read_ranges(segment_read_ranges(found.cache, lineage), lineage), lineage, found.cache.applied)

        publisher = MetadataTopicSegmentPublisher(
            followed,
            SimTopic(self),
            lambda name: uuid_text(WHERE.topic_id),
            clock_ms=lambda: int(self.world.now_ms),
            max_delivery_delay_ms=LATE_MS,
        )

        def log_start(name: TopicPartition) -> int:
            return self.world.call("list offsets", lambda: self.low, changes=False)

        layout = BrokersLayout(self.world.data)
        return replace(plain, layout=layout, publisher=publisher, brokers=view, broker_log_start=log_start, retention=KEPT)

    def broker_step(self) -> None:
        """Now and then, as long as the schedule lasts."""
        replicas, rng = self.replicas, self.replicas.rng
        if self.expiring is not None and self.expiring.random() < 0.4:
            replicas.expire(self.expiring)
        dice = rng.random()
        if dice < 0.1:
            replicas.elect()
        elif dice < 0.14:
            replicas.delete_records()
        elif dice < 0.3 and replicas.copies:
            replicas.finish(replicas.copies.pop(rng.randrange(len(replicas.copies))))
        elif dice < 0.34:
            replicas.delete_started()
        elif dice < 0.67:
            replicas.produce(rng.randint(1, 4))
        else:
            replicas.tier(slow=rng.random() < replicas.zombies)
        self.world.push(self.world.now_ms + rng.random() * 250, self.broker_step)

    def compacting(self, name: str, holder: str) -> Callable[[EnvironmentPorts], None]:
        """A process that runs and retires again and again, and is started anew after a crash."""
        world = self.world

        def run(plain: EnvironmentPorts) -> None:
            ports = self.ports(world.owners[getcurrent()])
            log = open_partition_log(ports, NAME)
            try:
                while True:
                    try:
                        if world.rng.random() < 0.7:
                            run_round(ports, log, LEASE, self.work(ports, world.rng))
                        else:
                            retire_partition(
                                ports, log, LEASE, KEPT, job=self.work(ports, world.rng) if world.rng.random() < 0.6 else WITHDRAWAL
                            )
                    except StoreError:
                        log = open_partition_log(ports, NAME)
                    except (Fenced, UsageError, BadData, OutOfBudget):
                        pass
                    ports.sleep(world.rng.choice((0.02, 0.2, 0.7)))
            finally:
                world.push(
                    world.now_ms + world.rng.choice((30, 500, 1500)),
                    lambda: void(world.spawn(name, self.compacting(name, holder), holder)),
                )

        return run

    def work(self, ports: EnvironmentPorts, rng: random.Random, *, fails: float = 0.03) -> SymbolicJob:
        cleaner = CleanerSettings(
            min_cleanable_dirty_ratio=0.0, delete_retention_ms=RETENTION_MS, segment_bytes=rng.choice((60, 200, 600)), bloom=False
        )
        return SymbolicJob(ports, ports.clock_ms(), planner(cleaner), Worker(ports, lambda: rng.random() < fails))

    def settle(self) -> None:
        """The end: brokers have come to their ends, one compactor is left, nothing goes wrong any more."""
        replicas = self.replicas
        while replicas.copies:
            replicas.finish(replicas.copies.pop())
        if self.expiring is not None:
            self.raise_start(self.start)
            while any(one.end_offset < self.low for one in self.cache.list_segments()):
                replicas.delete_expired(100)
        for _ in range(4):
            replicas.produce(3)
            replicas.tier(slow=False)
        ports = self.ports(Process("last", "last"))
        log = open_partition_log(ports, NAME)
        for _ in range(12):
            for _ in range(20):
                self.world.wait(ORPHAN_AGE_MS / 20)
            try:
                done = run_round(ports, log, LEASE, self.work(ports, random.Random(1), fails=0))
            except Refused as error:  # overlaps that no order of records can take apart: told before anything is switched
                self.refused = str(error)
                intent = log.refresh().intent
                if intent is not None and intent.begun_slot:
                    self.world.violate(f"a round that has begun is refused: {error}")
                return
            if done.status == "quarantined" and "the segments that brokers read are not a complete log" in done.reason:
                self.refused = done.reason  # they deleted records, and with them what they found below by another leader epoch
                return
            retire_partition(ports, log, LEASE, KEPT, job=self.work(ports, random.Random(1), fails=0))
            if done.status == "nothing_to_do" and not log.state.waiting and not self.left():
                break
        self.check_end(log)

    def left(self) -> list[str]:
        """What compactors have said of segments that readers do not find."""
        read = {link.segment.segment_id for link in self.links()}
        return [one.id for one in self.cache.list_segments() if one.broker_id == COMPACTOR_BROKER_ID and one.segment_id not in read]

    def check_end(self, log: PartitionLog) -> None:
        state, self.raced = self.oracle.state, False
        self.readers("at the end")
        open_ = [name for name in ("intent", "waiting", "retiring") if getattr(state, name)]
        if open_ or self.left():
            self.world.violate(f"the end leaves {', '.join([*open_, *self.left()])}")
        known = {one.id for one in self.cache.list_segments()} | {encode_segment_id(raw_id) for raw_id in self.cache.finished}
        orphans = {key for key in self.world.data.objects if key.rpartition("/")[2][21:43] not in known}
        if orphans:  # a zombie's upload under an id that is finished is what `orphans` is for
            self.world.violate(f"orphans stay: {sorted(orphans)}")
        newest = self.links()[-1].segment.start_offset
        if first_dirty_offset_in(log.state.vector) != newest:
            self.world.violate(f"clean is up to {first_dirty_offset_in(log.state.vector)}, and not up to {newest}")


def planner(cleaner: CleanerSettings) -> symbolic.Planner:
    """The real one, without filters."""

    def plan(state: PartitionState, now_ms: int, leader_epoch: int, new_id: Callable[[], str]) -> CompactionPlan | None:
        found = assess_round(state, cleaner, now_ms)
        if not found.due:
            return None
        return plan_round(PlanInputs(state, found, cleaner, now_ms, (), "symbolic", "memory"), CompactorEpoch(leader_epoch), new_id)

    return plan


def rows_of(rows: Rows, segment: RemoteLogSegmentMetadata) -> Rows:
    """As far as it is read."""
    return tuple(row for row in rows if row[0] <= segment.end_offset)


class Worker:
    """Two passes over symbols; each new segment is told to the publisher before its object is created."""

    def __init__(self, ports: EnvironmentPorts, fails: Callable[[], bool]) -> None:
        self.ports = ports
        self.fails = fails

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        name, by_id = session.state.topic_partition, session.state.live_segments_by_id()
        latest: dict[str, int] = {}
        for source in plan.source_segment_ids:
            if source in by_id and by_id[source].end_offset >= plan.first_dirty_offset:
                latest |= {key: offset for offset, key, _, _ in self._rows(name, by_id[source]) if offset >= plan.first_dirty_offset}
        for task in tasks:
            if self.fails():
                yield CompactionFailure(run_id=plan.run_id, group=task.group, kind="bad data", message="made up")
                return
            rows = [row for source in task.sources for row in self._rows(name, by_id[source])]
            kept = [row for row in (symbolic.clean(row, latest, plan) for row in rows) if row]
            data = symbolic.encode(kept)
            horizons = [row[3] for row in kept if row[3] is not None]
            place = (task.new_segment_id, task.start_offset, task.end_offset)
            segment = symbolic.describe(*place, data, task.leader_epochs).model_copy(update={"due_ms": min(horizons, default=-1)})
            self.ports.publisher.announce_segment(name, segment)
            problem = self.ports.layout.upload_segment(name, segment, {"log": data})
            if problem:
                yield CompactionFailure(run_id=plan.run_id, group=task.group, kind="upload", message=problem)
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

    def _rows(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> Rows:
        data = self.ports.layout.read_file(name, segment, "log")
        return rows_of(symbolic.decode(data), segment)


def void(_: object) -> None:
    return None
