"""The processes of a life: agents, imports by hand, transfers between tiers, compactors, operators, consumers. All run the real code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from unittest.mock import patch

from greenlet import getcurrent
from typing_extensions import override

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.config.settings import Settings
from compactor.consumer import ConsumerOptions, TieredConsumer
from compactor.control.identity import DataRootOwnershipCheckByTierId
from compactor.control.leadership import RecordRefused
from compactor.control.logs import open_catalog
from compactor.control.ports import EnvironmentPorts
from compactor.control.publication import delete_partition, undo_round
from compactor.errors import BadData, CompactorError, Fenced, Leased, OutOfBudget, StoreError, UsageError
from compactor.features.agent.agent import OpenStagedFiles, SegmentUploader
from compactor.features.agent.log_directories import scan_log_directory
from compactor.features.agent.plan import (
    LeadershipAtDeletionRename,
    PartitionUploadState,
    UploadFailureReason,
    is_upload_due,
    leadership_at_deletion_rename,
    with_directory_listing,
    with_leadership,
    with_log_end,
    with_upload_outcome,
)
from compactor.features.consumer import sources, tiered
from compactor.features.consumer.sources import PartitionPrefetchFailure, TierPrefetcher
from compactor.features.imports import from_tier as import_root
from compactor.features.imports.from_tier import import_tier
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.local import staging
from compactor.model.remote_log import ClusterTopicIds
from compactor.read.reading import LogChanged
from compactor.read.records import OFFSET_BEGINNING, Place
from compactor.round import pass_two
from compactor.service import StopRequest
from compactor.storage.wrappers import RequestCounters
from compactor.upkeep.retire import retire_partition
from tests.simulation.actors import LEASE, RETENTION, void
from tests.simulation.directories import Directories, DiskReplica
from tests.simulation.symbolic import NAME
from tests.simulation.way_in_oracle import Attempt, Source, WayInOracle, number
from tests.simulation.world import RETENTION_MS, TTL_MS, Process, SimStore, World

REFUSALS = (BadData, UsageError)
PASSING = (*REFUSALS, StoreError, Fenced, Leased, OutOfBudget, RecordRefused)
"""What a command may end with: it says why, and may be given again."""
CONTENT = (
    UploadFailureReason.CONTENT,
    UploadFailureReason.LINEAGE,
    UploadFailureReason.GAP,
    UploadFailureReason.COMPACTED,
    UploadFailureReason.UNREADABLE,
)


class Later(Future[Any]):
    """Work that is done when somebody asks for its result, in that thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work

    @override
    def result(self, timeout: float | None = None) -> Any:
        if not self.done() and self.set_running_or_notify_cancel():
            try:
                self.set_result(self.work())
            except Exception as error:  # noqa: BLE001 - a crash goes on through it
                self.set_exception(error)
        return super().result(0)


class SameThread:
    """An executor that works in the caller's thread, so that every store call is one of the simulation's."""

    def __init__(self, *_: object, **__: object) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return Later(partial(work, *arguments))

    def map(self, work: Callable[..., Any], *columns: Sequence[Any]) -> Iterator[Any]:
        return iter([work(*row) for row in zip(*columns, strict=False)])

    def shutdown(self, **_: object) -> None:
        return None


@contextmanager
def in_one_thread(world: World) -> Iterator[None]:
    """No thread but the simulation's, and a consumer that reads when it is asked, by the world's clock."""

    def take(feed: TierPrefetcher, timeout_s: float) -> Any:
        while not feed._queue and feed._due_reads:
            turn = feed._due_reads.popleft()
            try:
                item = feed._prefetch_turn(turn)
            except LogChanged:
                feed._requeue_partition(turn)
                continue
            except Exception as error:  # noqa: BLE001 - as the feed's threads do
                item = PartitionPrefetchFailure(turn.partition, error)
            if item is not None:
                feed._enqueue_item_unless_stopped(turn, item, is_last=True)
        return real(feed, 0)

    class Clock:
        monotonic = staticmethod(lambda: world.now_ms / 1000)

    real = TierPrefetcher.next_prefetched_item
    with ExitStack() as stack:
        for module in (staging, pass_two, import_root):
            stack.enter_context(patch.object(module, "ThreadPoolExecutor", SameThread))
        stack.enter_context(patch.object(TierPrefetcher, "next_prefetched_item", take))
        for module in (tiered, sources):
            stack.enter_context(patch.object(module, "time", Clock))
        yield


BEGINNING = Place(NAME.topic, NAME.partition, OFFSET_BEGINNING)


@dataclass
class Reading:
    """What a consumer was handed out (offset -> number), where it stands, and the errors that it was told."""

    received: dict[int, int] = field(default_factory=dict)
    place: Place = BEGINNING
    told: list[str] = field(default_factory=list)


@dataclass
class Side:
    """One tier of a life: its stores, its judge, its settings."""

    world: World
    control: SimStore
    data: SimStore
    oracle: WayInOracle
    root: Path
    settings: Settings

    def tier(self, process: Process) -> Tier:
        """A process's access to it."""
        ports = self.world.ports(process, self.control, self.data)
        folder = str(self.root / process.holder / self.control.name)
        state = self.settings.tier.model_copy(update={"state_dir": folder, "url": self.data.url, "control_url": self.control.url})
        ownership = DataRootOwnershipCheckByTierId()
        settings = self.settings.model_copy(update={"tier": state})
        ports = replace(ports, ownership=ownership, retention=RETENTION)
        return Tier(settings, ports, open_catalog(ports), RequestCounters(), ownership=ownership)


class WayIn:
    """What the processes of a life share."""

    def __init__(self, world: World, brokers: Directories, mine: Side, other: Side) -> None:
        self.world = world
        self.brokers = brokers
        self.mine = mine
        self.other = other
        self.heard = (brokers.leader.number, brokers.end(), brokers.incarnation, int(world.now_ms))
        self.holders: list[OpenStagedFiles] = []
        self.readings: list[Reading] = []
        self.counts: dict[str, int] = {}

    def event(self) -> None:
        """Something happens to the brokers, now and later."""
        rng = self.world.rng
        self.world.note(self.brokers.happen())
        self.brokers.write()
        for attempt in (*self.mine.oracle.attempts.values(), *self.other.oracle.attempts.values()):
            attempt.seen.append(attempt.now())
        if rng.random() < 0.7:
            self.hear()
        self.world.push(self.world.now_ms + rng.choice((20, 300, 1500)), self.event)

    def ask(self, topics: Sequence[str]) -> ClusterTopicIds:
        """Return what the cluster says of topic ids: nothing."""
        return ClusterTopicIds("", {})

    def hear(self) -> None:
        """Agents learn who leads, and where the log ends."""
        self.heard = (self.brokers.leader.number, self.brokers.end(), self.brokers.incarnation, int(self.world.now_ms))

    def restarting(
        self, name: str, holder: str, side: Side, body: Callable[[Tier], Callable[[], None]]
    ) -> Callable[[EnvironmentPorts], None]:
        """A process that does ``body`` again and again, survives what a command may end with, and is started anew after a crash."""
        world = self.world

        def run(ports: EnvironmentPorts) -> None:
            process = world.owners[getcurrent()]
            act = body(side.tier(process))
            try:
                while True:
                    try:
                        act()
                    except PASSING as error:
                        world.note(f"{type(error).__name__}: {str(error)[:150]}")
                        if world.rng.random() < 0.3:
                            act = body(side.tier(process))
                    ports.sleep(world.rng.choice((0.02, 0.2, 0.6)))
            finally:
                again = self.restarting(name, holder, side, body)
                world.push(world.now_ms + world.rng.choice((30, TTL_MS / 2)), lambda: void(world.spawn(name, again, holder)))

        return run

    # --- the way in ---

    @contextmanager
    def attempt(self, side: Side, source: Callable[[], Source], *, gaps: bool) -> Iterator[Attempt]:
        """One import, seen by the judge: one that is refused has left the tier as it was."""
        attempts, me = side.oracle.attempts, getcurrent()
        attempt = attempts[me] = Attempt(source(), source, gaps)
        try:
            yield attempt
        except REFUSALS as error:
            self.refused(attempt, str(error))
            raise
        finally:
            del attempts[me]
            attempt.seen.append(attempt.now())
            side.oracle.ended.append(attempt)

    def refused(self, attempt: Attempt, why: str) -> None:
        if attempt.cut and not attempt.disturbed and attempt.now().version == attempt.began.version:
            self.world.violate(f"it was refused after it had cut the tier: {why}")

    def source(self, disk: DiskReplica, is_taken: Callable[[int], bool] = lambda changed_ms: False) -> Callable[[], Source]:
        """A directory, by its path, as the source of an import: the topic may be created again meanwhile.

        :param is_taken: of the change time of a file staged for deletion.
        """

        def now() -> Source:
            there = self.brokers.disks[disk.number]
            version = (self.brokers.incarnation, there.version)
            cleaned = max((there.clean_to - 1, *(offset for offset in there.removed if offset >= there.start))) + 1
            return Source(there.present(), there.start, version, there.takeable(is_taken), cleaned, active=there.bases[-1])

        return now

    def agent(self, broker: int) -> Callable[[Tier], Callable[[], None]]:
        """The agent of one broker."""

        def begin(tier: Tier) -> Callable[[], None]:
            rng = self.world.rng
            rules = {"accept_truncation": rng.random() < 0.7, "allow_gaps": rng.random() < 0.4}
            agent = tier.settings.agent.model_copy(update=rules)
            opened = replace(tier, settings=tier.settings.model_copy(update={"agent": agent}))
            uploads = SegmentUploader(opened, StopRequest(threading.Event()), self.ask)
            known: list[PartitionUploadState | None] = [None]
            holder = OpenStagedFiles()
            self.holders.append(holder)

            def look() -> None:
                disk = self.brokers.disks[broker]
                seen = next(scan_log_directory(disk.folder.parent, (NAME.topic,), {}, tier.ports.clock_ms()), None)
                if seen is None:
                    return
                leader, end, incarnation, counted_ms = self.heard
                if incarnation != self.brokers.incarnation:
                    return
                held = holder.close_reused(NAME, seen.staged, is_upload_running=False)
                now = tier.ports.clock_ms()
                watch = with_log_end(
                    replace(with_leadership(with_directory_listing(known[0], seen), leader == broker), retry_at_ms=0, held=held),
                    end,
                    counted_ms,
                )
                watch = known[0] = replace(
                    watch,
                    held=holder.open_wanted(NAME, disk.folder, watch.uploadable_staged_files, is_upload_running=False),
                )
                ends = disk.start == self.mine.oracle.state.end_offset + 1
                hides = (agent.allow_gaps or ends) and self.hides_truncation(self.mine, disk)
                if hides or not is_upload_due(watch, now, accept_truncation=agent.accept_truncation):
                    return
                source = self.source(
                    disk, lambda ms: leadership_at_deletion_rename(watch.leadership, ms) is LeadershipAtDeletionRename.SAME_EPOCH
                )
                with self.attempt(self.mine, source, gaps=agent.allow_gaps) as attempt:
                    outcome = uploads.upload_partition(watch, holder.held_files(NAME))
                known[0] = with_upload_outcome(watch, outcome, now)
                self.world.note(f"upload: {outcome.position} {outcome.trouble} {outcome.reason[:150]}")
                if outcome.trouble is UploadFailureReason.BUG:
                    self.world.violate(f"agent: {outcome.reason}")
                if outcome.trouble in CONTENT:
                    self.refused(attempt, outcome.reason)

            return look

        return begin

    def importer(self, side: Side) -> Callable[[Tier], Callable[[], None]]:
        """Somebody who types `import`, most often with the leader's directory."""

        def begin(tier: Tier) -> Callable[[], None]:
            def act() -> None:
                rng = self.world.rng
                disk = self.brokers.led if rng.random() < 0.7 else self.brokers.choose()
                options = ImportOptions(
                    live=rng.random() < 0.6,
                    gaps=rng.random() < 0.5,
                    accept_truncation=rng.random() < 0.7,
                )
                self.take(side, tier, disk, options)

            return act

        return begin

    def hides_truncation(self, side: Side, disk: DiskReplica) -> bool:
        """Whether retention has taken from a directory what would tell that the tier's end was discarded.

        Then nobody accepts a gap, and nobody imports a log that begins where the tier ends. Another topic is to be noticed all the same.
        """
        rows, known = side.oracle.rows, self.brokers.known
        if not rows or not disk.log or known[number(rows[-1])].incarnation != known[disk.log[-1][2]].incarnation:
            return False
        chain = self.brokers.chain(disk.log[-1][2])
        return next((row[0] for row in rows if chain.get(row[0]) != number(row)), disk.start) < disk.start

    def take(self, side: Side, tier: Tier, disk: DiskReplica, options: ImportOptions) -> None:
        """`import` of one directory."""
        hides = self.hides_truncation(side, disk)
        if hides and disk.start == side.oracle.state.end_offset + 1:
            return
        options = replace(options, gaps=options.gaps and not hides)
        policy = tier.settings.cleaner.cleaner_policy()
        self.world.note(f"import of broker {disk.number}: {options}")
        with self.attempt(side, self.source(disk, lambda changed_ms: options.live), gaps=options.gaps):
            report = import_directory(tier, disk.folder, NAME, policy, None, options)
            self.world.note(f"imported {report.start_offset} to {report.end_offset} {report.notes}")

    def transfer(self, tier: Tier) -> Callable[[], None]:
        """`import --from-tier`."""
        process = self.world.owners[getcurrent()]

        def act() -> None:
            rng = self.world.rng
            tier.ports.sleep(rng.choice((0, 0.5, 3)))
            self.bring(self.other.tier(process), tier, ImportOptions(gaps=rng.random() < 0.5, accept_truncation=rng.random() < 0.7))

        return act

    def bring(self, source: Tier, target: Tier, options: ImportOptions) -> None:
        """The other tier's partition into this one."""
        if not self.other.oracle.state.live:
            return
        self.world.note(f"transfer: {options}")
        with self.attempt(self.mine, self.other.oracle.source, gaps=True) as attempt:
            self.other.oracle.readers.append(attempt)
            try:
                (done,) = import_tier(source, target, [NAME], options)
            finally:
                self.other.oracle.readers.remove(attempt)
            if done.error is not None:
                raise done.error
            self.world.note(f"transferred up to {done.report and done.report.end_offset}")

    # --- what else happens to a tier ---

    def compactor(self, tier: Tier) -> Callable[[], None]:
        """Rounds, retire, and now and then an undo."""

        def act() -> None:
            dice = self.world.rng.random()
            log = tier.open_partition_log(NAME, caller_runs_round=True)
            if not log.refresh().live:
                return
            if dice < 0.5:
                for _ in range(self.world.rng.choice((1, 2))):  # a tombstone goes in the second round after it came in
                    compact(tier, NAME, tier.ports.clock_ms(), force=True)
                    tier.ports.sleep(1.1 * RETENTION_MS / 1000)
            elif dice < 0.8:
                retire_partition(tier.ports, log, LEASE, RETENTION)
            elif log.state.published:
                undo_round(tier.ports, log, LEASE, log.state.published[-1])

        return act

    def operator(self, side: Side) -> Callable[[Tier], Callable[[], None]]:
        """Deletes what the tier holds of a topic that is no more, so that it can be imported anew."""

        def begin(tier: Tier) -> Callable[[], None]:
            def act() -> None:
                rows = side.oracle.rows
                chain = self.brokers.chain(self.brokers.led.log[-1][2])
                if rows and rows[0][3] not in chain.values() and self.world.rng.random() < 0.3:
                    delete_partition(tier.ports, tier.open_partition_log(NAME, caller_runs_round=True), LEASE)

            return act

        return begin

    def consumer(self, tier: Tier) -> Callable[[], None]:
        """Reads the tier as it grows; a new process goes on where the one before it has stopped."""
        if not self.readings:
            self.readings.append(Reading())
        reading = self.readings[0]
        resets: tuple[Literal["earliest", "error"], ...] = ("earliest", "error")
        reset = self.world.rng.choice(resets)
        consumer = TieredConsumer(tier, None, ConsumerOptions(threads=0, refresh_s=0.001, offset_reset=reset))
        begun = False

        def act() -> None:
            nonlocal begun
            if not begun:
                if not self.mine.oracle.state.live:
                    return
                consumer.assign([reading.place])
                begun = True
            read(consumer, reading)

        return act


def read(consumer: TieredConsumer, reading: Reading) -> None:
    """Takes what comes now."""
    for message in consumer.consume(10_000, 0):
        offset = message.offset()
        assert offset is not None
        if (error := message.error()) is None:
            reading.received[offset] = message.timestamp()[1]
        else:
            reading.told.append(f"{offset}: {error}")
            reading.received = {at: number for at, number in reading.received.items() if at < offset}
    (reading.place,) = consumer.position([Place(NAME.topic, NAME.partition)])


def said(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, CompactorError) else repr(error)
