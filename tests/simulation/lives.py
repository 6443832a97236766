"""A whole life: a topic whose brokers delete and create it again, under retention, truncation, rounds, undo, several daemons and readers.

The brokers' directories and the processes are those of the way in. Here a cluster answers questions about topic ids, sometimes falsely for
a while, and the tier keeps one log per incarnation of the topic, expires segments and deletes topics that its cluster has deleted.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from greenlet import getcurrent
from typing_extensions import override

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.constants import TopicId
from compactor.control import incarnations
from compactor.control.publication import undo_round
from compactor.control.records import IncarnationOpened, LogStartRaised, PartitionDeleted, RoundPublished, SegmentsTiered, TailTruncated
from compactor.control.state import PartitionState
from compactor.features.consumer.sources import ConsumerOptions
from compactor.features.consumer.tiered import TieredConsumer
from compactor.features.imports import staged_files
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.features.imports.incarnations import TopicRecreationConfirmationSources, record_cluster_of_topics
from compactor.model.ids import encode_segment_id, partition_of_incarnation
from compactor.model.remote_log import ClusterTopicIds, ExistingAndMissingTopicIds
from compactor.read.records import Place
from compactor.upkeep import retire as deleted_topics
from compactor.upkeep.orphans import delete_records
from compactor.upkeep.retire import delete_missing_topics, retire_partition
from tests.simulation.actors import LEASE, RETENTION
from tests.simulation.directories import DELETED, Directories, DiskReplica
from tests.simulation.schedule import ZOMBIES, Outcome, watched
from tests.simulation.symbolic import NAME
from tests.simulation.way_in import CALM, MEMORY, SETTINGS, excuse_of, finish
from tests.simulation.way_in_actors import BEGINNING, PASSING, Side, WayIn, in_one_thread, said
from tests.simulation.way_in_oracle import Source, WayInOracle, number
from tests.simulation.world import NO_FAULTS, ORPHAN_AGE_MS, RETENTION_MS, Faults, Process, World

STEPS = 1_500
MOST_TOPICS = 5
CONFIRMATION_MS = 3_000
KEPT_MS = 600
"""How long a deleted topic is kept, by the settings."""
LIE_MS = 1_500
"""How long the cluster falsely says that a topic does not exist: less than CONFIRMATION_MS."""
LANDED_MS = 10_000
"""After this time nothing is on its way any more that a process has sent or decided."""
CLUSTER, OTHER_CLUSTER = "cluster", "other"


class LifeDirectories(Directories):
    """Directories of brokers that delete their topic, create it again, and restore it from a backup under another topic id.

    stale: replicas of deleted topics, whose directories are still there.
    gone: ids of the topics that do not exist any more.
    """

    def __init__(self, world: World, root: Path) -> None:
        self.stale: list[DiskReplica] = []
        self.gone: set[str] = set()
        self.ids = world.hazards
        super().__init__(world.rng, root, cleaned=False)

    @override
    def create(self) -> None:
        if self.incarnation >= MOST_TOPICS:
            return
        former = {disk.number: disk for disk in self.disks}
        super().create()
        for disk in former.values():
            moved = disk.folder.with_name(f"{NAME}.{self.incarnation - 1:032x}-delete")
            if moved.exists():
                self.stale.append(replace(disk, folder=moved))
        self._rename()

    def restore(self) -> str:
        """Restore the topic from a backup: its records are the same, and its id is another one."""
        self._rename()
        return f"the topic was restored, with id {self.topic_id}"

    @override
    def happen(self) -> str:
        dice = self.rng.random()
        if dice < 0.06 and self.incarnation < MOST_TOPICS:
            self.create()
            return f"the topic was deleted and created again, with id {self.topic_id}"
        return self.restore() if dice < 0.08 else super().happen()

    @override
    def write(self) -> None:
        """Bring the directories up to date. Files staged for deletion go at once: they are the way in's."""
        super().write()
        for disk in self.disks:
            disk.version += bool(disk.staged)
            disk.staged = {}
            for path in disk.folder.glob(f"*{DELETED}"):
                path.unlink()

    def _rename(self) -> None:
        if self.topic_id:
            self.gone.add(self.topic_id)
        self.topic_id = TopicId(encode_segment_id(self.ids.randbytes(16)))
        for disk in self.disks:
            disk.topic_id, disk.shape = self.topic_id, ()


class LifeOracle(WayInOracle):
    """The judge of one incarnation's log."""

    def __init__(self, life: Life, world: World, brokers: LifeDirectories, ordinal: int) -> None:
        super().__init__(world, world.control, world.data, brokers, partition_of_incarnation(NAME.topic, NAME.partition, ordinal))
        self.life = life

    @override
    def check_step(self, before: PartitionState, record: Any) -> None:
        body, state = record.body, self.state
        if isinstance(body, PartitionDeleted):
            self.life.check_deletion(body)
            self.log_start = 0
        if isinstance(body, IncarnationOpened):
            self.life.check_opening(self)
        if isinstance(body, SegmentsTiered) and body.log_start_offset is not None:
            self.log_start = body.log_start_offset
        super().check_step(before, record)
        back = [segment.id for segment in state.live if segment.end_offset < self.log_start and segment not in before.live]
        if back and not isinstance(body, RoundPublished | LogStartRaised):
            self.world.violate(f"{body.type} brought back segment {back[0]}, whose records were deleted")
        if isinstance(body, TailTruncated) and self.log_start and body.offset <= self.log_start:
            self.world.violate(f"the log was cut at {body.offset}, and its records below {self.log_start} were deleted")
        if (state.log_start_offset or 0) != self.log_start:
            self.world.violate(f"{body.type} moved the log start from {self.log_start} to {state.log_start_offset}")
        self.life.check_order()

    def topics(self) -> set[int]:
        """Return of which of the brokers' topics there are records, by their ordinal."""
        return {self.brokers.known[number(row)].incarnation for segment in self.state.live for row in self.contents[segment.id]}

    def readable(self) -> dict[int, int]:
        """Return offset -> number of all records that readers get."""
        rows = (row for segment in self.state.live for row in self.contents[segment.id])
        return {row[0]: number(row) for row in rows if row[0] >= self.log_start}

    def check_leftovers(self) -> None:
        """Check that only the objects of live segments are left."""
        left = [name for name in ("intent", "waiting", "retiring", "registrations") if getattr(self.state, name)]
        live = {segment.id for segment in self.state.live}
        objects = [key for key in self.world.data.objects if key.startswith(f"{self.name}/") and key.rpartition("/")[2][21:43] not in live]
        if left or objects:
            self.world.violate(f"the end leaves {', '.join([*left, *objects])} of {self.name}")


@dataclass
class LifeSide(Side):
    """The tier, with a judge per incarnation. ``oracle`` is that of the latest one that was ever written to."""

    oracles: list[LifeOracle] = field(default_factory=list)

    @override
    def __getattribute__(self, name: str) -> Any:
        if name == "oracle":
            oracles: list[LifeOracle] = object.__getattribute__(self, "oracles")
            return next((each for each in reversed(oracles) if each.state.topic_id), oracles[0])
        return object.__getattribute__(self, name)


@dataclass
class Run:
    """What a reader was handed out since it was last told something: offset -> number."""

    received: dict[int, int] = field(default_factory=dict)
    place: Place = BEGINNING
    told: list[str] = field(default_factory=list)


class Life(WayIn):
    """What the processes of a life share.

    lying: until when the cluster says falsely of a topic id that it does not exist.
    lied: when the cluster last began to do so; the number of times.
    asked: when a daemon has last asked the cluster and recorded the answers.
    """

    def __init__(self, world: World, brokers: LifeDirectories, folder: Path) -> None:
        limits = {"cleanup_policy": "compact,delete"}
        tier = {"on_topic_deletion": "delete", "deleted_topic_retention_ms": KEPT_MS}
        kafka = SETTINGS.kafka.model_copy(update={"bootstrap_servers": "cluster:9092"})
        settings = SETTINGS.model_copy(
            update={
                "cleaner": SETTINGS.cleaner.model_copy(update=limits),
                "tier": SETTINGS.tier.model_copy(update=tier),
                "kafka": kafka,
            }
        )
        self.oracles = [LifeOracle(self, world, brokers, ordinal) for ordinal in range(1, 2 * MOST_TOPICS + 6)]
        for oracle in self.oracles[1:]:
            first = self.oracles[0]
            oracle.attempts, oracle.ended, oracle.readers = first.attempts, first.ended, first.readers
        side = LifeSide(world, world.control, world.data, self.oracles[0], folder, settings, self.oracles)
        super().__init__(world, brokers, side, side)
        self.directories = brokers
        self.dice = world.hazards
        self.lying: dict[str, float] = {}
        self.lied: dict[str, tuple[float, int]] = {}
        self.asked: dict[str, float] = {}
        self.runs: list[Run] = []

    # --- the cluster ---

    @override
    def ask(self, topics: Sequence[str]) -> ClusterTopicIds:
        return self.world.call("ask for topics", lambda: ClusterTopicIds(CLUSTER, {NAME.topic: self.brokers.topic_id}), changes=False)

    def ask_other(self, topics: Sequence[str]) -> ClusterTopicIds:
        """Ask a copy of the cluster that still has a former topic of this name."""
        return ClusterTopicIds(OTHER_CLUSTER, {NAME.topic: self.directories.stale[-1].topic_id})

    def ask_about(self, topic_ids: Sequence[TopicId]) -> ExistingAndMissingTopicIds:
        def answers() -> ExistingAndMissingTopicIds:
            if self.dice.random() < 0.1:  # a copy of the cluster, which has lost all topics
                return ExistingAndMissingTopicIds(OTHER_CLUSTER, tuple(topic_ids), ())
            missing = {name for name in topic_ids if name in self.directories.gone or self.lying.get(name, 0) > self.world.now_ms}
            return ExistingAndMissingTopicIds(CLUSTER, tuple(sorted(missing)), tuple(sorted(set(topic_ids) - missing)))

        return self.world.call("ask about topics", answers, changes=False)

    def lie(self) -> None:
        """Let the cluster say falsely that its topic does not exist; again only after a daemon has heard and recorded otherwise."""
        current = self.brokers.topic_id
        since, times = self.lied.get(current, (float("-inf"), 0))
        if times < 2 and (not times or self.asked.get(current, 0) > since + LIE_MS + LANDED_MS):
            self.lied[current] = self.world.now_ms, times + 1
            self.lying[current] = self.world.now_ms + LIE_MS
            self.world.note(f"the cluster does not know topic {current} for a while")
        self.world.push(self.world.now_ms + self.dice.choice((500, 2_000)), self.lie)

    # --- what must hold ---

    def check_order(self) -> None:
        """A log has the records of one topic, and a later incarnation those of a later topic, or of one that was restored."""
        last = 0
        for oracle in self.oracles:
            topics = oracle.topics()
            if len(topics) > 1 or min(topics, default=last) < last:
                self.world.violate(f"{oracle.name} has records of topics {sorted(topics)}, after those of topic {last}")
                return
            last = max(topics, default=last)

    def check_opening(self, opened: LifeOracle) -> None:
        """A new incarnation is not opened for a log that agrees with the former one wherever both have records."""
        former = self.oracles[self.oracles.index(opened) - 1]
        rows = {row[0]: number(row) for segment in former.state.live for row in former.contents[segment.id]}
        attempt = former.attempts.get(getcurrent())
        if attempt and rows and all(_agree(rows, _sealed(source)) for source in attempt.sources):
            self.world.violate(f"{opened.name} was opened for a log whose records the tier has")

    def check_deletion(self, body: PartitionDeleted) -> None:
        if body.deleted_topic_id and body.deleted_topic_id not in self.directories.gone:
            self.world.violate(f"topic {body.deleted_topic_id} was deleted, and it exists")

    # --- processes ---

    def opening(self, disk: DiskReplica) -> TopicRecreationConfirmationSources:
        """Return who may say that the topic was created again: a person only who sees the leader's directory."""
        by_hand = disk is self.brokers.led and self.dice.random() < 0.2
        return TopicRecreationConfirmationSources(self.ask if self.dice.random() < 0.8 else None, by_hand=by_hand)

    @override
    def take(self, side: Side, tier: Tier, disk: DiskReplica, options: ImportOptions) -> None:
        super().take(side, tier, disk, replace(options, opening=self.opening(disk)))

    @override
    def importer(self, side: Side) -> Callable[[Tier], Callable[[], None]]:
        """Somebody who types ``import``, now and then with the directory of a topic that was deleted."""
        usual = super().importer(side)

        def begin(tier: Tier) -> Callable[[], None]:
            act = usual(tier)

            def sometimes_stale() -> None:
                if self.directories.stale and self.dice.random() < 0.25:
                    self.take_stale(tier, self.dice.choice(self.directories.stale))
                else:
                    act()
                    self.confirm(tier)

            return sometimes_stale

        return begin

    def take_stale(self, tier: Tier, disk: DiskReplica) -> None:
        """``import`` of a directory that was left behind, with a cluster that has another topic by now, or with another cluster."""
        other = self.dice.random() < 0.3 and disk.topic_id == self.directories.stale[-1].topic_id
        options = ImportOptions(opening=TopicRecreationConfirmationSources(self.ask_other if other else self.ask))
        source = Source(disk.present(), disk.start, disk.version)
        if self.hides_truncation(self.mine, disk):
            return
        self.world.note(f"import of {disk.folder.name} of topic {disk.topic_id}")
        with self.attempt(self.mine, lambda: source, gaps=False):
            import_directory(tier, disk.folder, NAME, tier.settings.cleaner.cleaner_policy(), None, options)

    def confirm(self, tier: Tier) -> None:
        """Record which cluster has the topic, as agents do after an upload."""
        topic_id = tier.open_partition_log(tier.latest_incarnation(NAME)).refresh().topic_id
        record_cluster_of_topics(tier.catalog, {NAME.topic: topic_id}, self.ask)

    def daemon(self, tier: Tier) -> Callable[[], None]:
        """Rounds and retention over all incarnations, retire, undo, records deleted by hand, and topics that are deleted for good."""
        retention_bytes = self.dice.choice((-1, 0, 600, 3_000))
        cleaner = tier.settings.cleaner.model_copy(update={"retention_bytes": retention_bytes})
        opened = replace(tier, settings=tier.settings.model_copy(update={"cleaner": cleaner}))

        def act() -> None:
            dice = self.world.rng.random()
            if not tier.catalog.refresh().tier_id:
                return
            name = self.dice.choice(opened.list_partitions() or [NAME])
            log = opened.open_partition_log(name, caller_runs_round=True)
            state = log.refresh()
            if dice < 0.3:
                asked_ms, current = self.world.now_ms, self.brokers.topic_id
                delete_missing_topics(opened, self.ask_about)
                self.asked[current] = asked_ms
            elif not state.live:
                return
            elif dice < 0.6:
                compact(opened, name, opened.ports.clock_ms(), force=True)
                opened.ports.sleep(1.1 * RETENTION_MS / 1000)
            elif dice < 0.8:
                retire_partition(opened.ports, log, LEASE, RETENTION)
            elif dice < 0.9 and state.published:
                undo_round(opened.ports, log, LEASE, state.published[-1])
            elif dice >= 0.9:
                delete_records(opened, name, self.dice.randint(state.log_start, state.end_offset + 1))

        return act

    def reader(self, tier: Tier) -> Callable[[], None]:
        """Read the topic by its name, from its beginning on; a new process goes on where the one before it has stopped."""
        if not self.runs:
            self.runs.append(Run())
        run = self.runs[0]
        resets: tuple[Literal["earliest", "error"], ...] = ("earliest", "error")
        consumer = TieredConsumer(tier, None, ConsumerOptions(threads=0, refresh_s=0.001, offset_reset=self.dice.choice(resets)))
        begun = False

        def act() -> None:
            nonlocal begun
            if not begun:
                if not self.oracles[0].state.live:
                    return
                consumer.assign([run.place])
                begun = True
            self.read(consumer, run)

        return act

    def read(self, consumer: TieredConsumer, run: Run) -> None:
        """Take what comes now. Between two errors a reader gets records of one log, ascending."""
        for message in consumer.consume(10_000, 0):
            offset = message.offset()
            assert offset is not None
            if (error := message.error()) is not None:
                run.told.append(f"{offset}: {error}")
                run.received = {}
                continue
            last = max(run.received, default=-1)
            if last >= offset:
                self.world.violate(f"a reader got offset {offset} after offset {last}")
            run.received[offset] = message.timestamp()[1]
        (run.place,) = consumer.position([Place(NAME.topic, NAME.partition)])
        if run.received:
            chain = self.brokers.chain(run.received[max(run.received)])
            wrong = next((at for at, got in run.received.items() if chain.get(at) != got), None)
            if wrong is not None:
                self.world.violate(f"a reader got offset {wrong} of another log, and was not told: {run.told}")

    def historian(self, tier: Tier) -> Callable[[], None]:
        """Read former incarnations by their topic ids."""

        def act() -> None:
            former = [oracle for oracle in self.oracles if oracle.state.live and oracle.state.topic_id]
            if former:
                self.read_former(tier, self.dice.choice(former))

        return act

    def read_former(self, tier: Tier, oracle: LifeOracle) -> dict[int, int]:
        """Read a whole incarnation by its topic id; return offset -> number of what came."""
        topic_id = oracle.state.topic_id
        options = ConsumerOptions(threads=0, refresh_s=0.001, topic_ids={NAME.topic: topic_id})
        consumer, run = TieredConsumer(tier, None, options), Run()
        consumer.assign([run.place])
        for _ in range(4):
            tier.ports.sleep(0.01)
            self.read(consumer, run)
        topics = {self.brokers.known[got].incarnation for got in run.received.values()}
        if len(topics | oracle.topics()) > 1 and oracle.state.topic_id == topic_id:
            self.world.violate(f"who reads {oracle.name} by its id gets records of topics {sorted(topics)}")
        return run.received


def run_life(seed: int, *, steps: int = STEPS, trace: bool = False) -> Outcome:
    """Run one life to its end. Deterministic in ``seed``."""
    world = World(seed)
    if trace:
        world.trace = []
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder, ExitStack() as stack:
        stack.enter_context(patch.object(os, "fsync", lambda _: None))
        stack.enter_context(in_one_thread(world))
        stack.enter_context(confirmed_within(CONFIRMATION_MS))
        world.faults = world.rng.choice((NO_FAULTS, CALM, CALM, Faults(), ZOMBIES))
        brokers = LifeDirectories(world, Path(folder) / "brokers")
        brokers.clock = lambda: world.now_ms
        brokers.write()
        life = Life(world, brokers, Path(folder))
        stack.enter_context(watched(world, *life.oracles))
        stack.enter_context(patch.object(staged_files, "inode_change_ms", brokers.inode_change_ms))
        play(life, steps)
        for holder in life.holders:
            holder.close_partition(NAME)
    counts: dict[str, int] = {}
    for oracle in life.oracles:
        counts = {kind: counts.get(kind, 0) + oracle.counts.get(kind, 0) for kind in {*counts, *oracle.counts}}
    told = tuple(line.replace(folder, "") for line in world.trace or ())
    return Outcome(seed, tuple(text.replace(folder, "") for text in world.violations), world.steps, counts, told)


@contextmanager
def confirmed_within(milliseconds: int) -> Iterator[None]:
    """Let that time lie between two answers instead of an hour."""
    with (
        patch.object(incarnations, "CONFIRMATION_MS", milliseconds),
        patch.object(deleted_topics, "CONFIRMATION_MS", milliseconds),
    ):
        yield


def play(life: Life, steps: int) -> None:
    """Some of the processes for a while, then the end."""
    world, side = life.world, life.mine
    cast: list[tuple[str, Callable[[Tier], Callable[[], None]]]] = [
        ("importer", life.importer(side)),
        ("daemon-1", life.daemon),
        ("daemon-2", life.daemon),
        ("reader", life.reader),
    ]
    if world.rng.random() < 0.5:
        cast += [(f"agent-{broker}", life.agent(broker)) for broker in range(3)]
    if world.rng.random() < 0.5:
        cast.append(("historian", life.historian))
    for name, body in cast:
        world.spawn(name, life.restarting(name, f"host-{name}", side, body), f"host-{name}")
    world.push(world.now_ms + 100, life.event)
    world.push(world.now_ms + 1_000, life.lie)
    world.run(steps)
    world.queue = [entry for entry in world.queue if entry[2] not in (life.event, life.lie)]
    world.stop()
    if not world.violations:
        end_life(life)


def end_life(life: Life) -> None:
    """No faults: the leader's log comes in but for stated reasons, all logs are cleaned, and each is read by its id."""
    world, side, brokers = life.world, life.mine, life.directories
    for disk in brokers.disks:
        disk.damaged = -1
    life.lying.clear()
    brokers.produce(25)
    brokers.led.bases.append(len(brokers.led.log))
    brokers.produce(1)
    brokers.write()
    world.wait(10_000)
    tier = side.tier(Process("last", "last"))
    options = ImportOptions(live=True, gaps=True, accept_truncation=True)
    finish(life, side, lambda: life.take(side, tier, brokers.led, options), options, excuse=lambda *means: life_excuse(life, *means))
    if world.violations:
        return
    for oracle in [oracle for oracle in life.oracles if oracle.state.slot]:
        log = tier.open_partition_log(oracle.name, caller_runs_round=True)
        for _ in range(3):
            with passing(world):
                compact(tier, oracle.name, tier.ports.clock_ms(), force=True)
            world.wait(2 * RETENTION_MS)
        for _ in range(20):
            world.wait(ORPHAN_AGE_MS / 10)
        with passing(world):
            retire_partition(tier.ports, log, LEASE, RETENTION)
        oracle.check_view()
        oracle.check_leftovers()
    tier.catalog.refresh()
    for oracle in [oracle for oracle in life.oracles if oracle.state.live and oracle.state.topic_id]:
        received = life.read_former(tier, oracle)
        if received != oracle.readable():
            missed = sorted(oracle.readable().items() ^ received.items())
            world.violate(f"who reads {oracle.name} by its id does not get what is there: {missed[:3]}")


def _agree(rows: Mapping[int, int], present: Mapping[int, int]) -> bool:
    """Return whether two logs have records in common, and the same ones at all offsets that both cover."""
    if not rows:
        return False
    first, last = max(min(rows), min(present, default=0)), min(max(rows), max(present, default=-1))
    both = [offset for offset in rows if first <= offset <= last]
    return bool(both) and all(present.get(offset) == rows[offset] for offset in both)


def _sealed(source: Source) -> dict[int, int]:
    """Return what is sealed of a directory: offset -> number. Of a live log no more is compared."""
    return {offset: got for offset, got in source.present.items() if offset < source.active}


@contextmanager
def passing(world: World) -> Iterator[None]:
    """Note what a command may end with."""
    try:
        yield
    except PASSING as error:
        world.note(f"at the end: {said(error)}")


def life_excuse(life: Life, way: WayIn, side: Side, options: ImportOptions) -> str:
    """Return why the last import may be refused or incomplete, by what really is; an empty string if it may not."""
    oracle, led = side.oracle, way.brokers.led
    at = [each.name for each in life.oracles].index(oracle.name)
    if at and not oracle.state.live:  # opened by a process that died before it listed it
        oracle = life.oracles[at - 1]
    known = oracle.state.topic_id
    if known and known != led.topic_id:
        rows = {row[0]: number(row) for segment in oracle.state.live for row in oracle.contents[segment.id]}
        return "it was restored" if _agree(rows, led.present()) else "another topic"
    oracle = side.oracle
    parted = next((row[0] for row in oracle.rows if way.brokers.chain(led.log[-1][2]).get(row[0]) != number(row)), None)
    if parted is not None and parted <= oracle.log_start:
        return "it was cut below the log start"
    if led.start > oracle.state.end_offset + 1 or oracle.log_start:
        return "records are missing"
    return excuse_of(way, side, options)
