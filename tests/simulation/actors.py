"""The processes of a schedule: each a loop over the project's own operations, with what its command line would catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from checkpoint.lineage import EpochEntry, first_contradicting_offset
from checkpoint.offsets import first_dirty_offset_in
from compactor.config.settings import CleanerSettings
from compactor.constants import Offset
from compactor.control.identity import DataRootOwnershipCheckByTierId
from compactor.control.importing import record_tail_truncation, register_import
from compactor.control.leadership import RecordRefused, hold_leadership
from compactor.control.logs import PartitionLog, create_tier, open_catalog, open_partition_log
from compactor.control.ports import EnvironmentPorts, LeaseDurations, ObjectRetention
from compactor.control.publication import raise_log_start, undo_round
from compactor.control.records import BadControlRecord, LastImportedBatch, TailTruncated
from compactor.control.state import PartitionState
from compactor.errors import BadData, Fenced, NotFound, OutOfBudget, StoreError, UsageError
from compactor.features.imports.staged_files import SegmentAddition, add_segments_once
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.drive import run_round, settle_intent
from compactor.round.plan import find_expired_segments
from compactor.upkeep.retire import WITHDRAWAL, retire_partition
from tests.simulation.losses import Losses
from tests.simulation.oracle import Oracle
from tests.simulation.symbolic import Broker, Row, Rows, SymbolicJob, SymbolicPlanner, SymbolicWorker, describe, encode, upload, view
from tests.simulation.world import GRACE_MS, ORPHAN_AGE_MS, TTL_MS, UNDO_WINDOW_MS, World
from tests.support.keys import object_key

LEASE = LeaseDurations(ttl_ms=TTL_MS, stall_ms=3 * TTL_MS)
RETENTION = ObjectRetention(grace_ms=GRACE_MS, undo_window_ms=UNDO_WINDOW_MS, orphan_age_ms=ORPHAN_AGE_MS)
HASTY = ObjectRetention(grace_ms=0, undo_window_ms=0, orphan_age_ms=ORPHAN_AGE_MS)
EPOCH_SEGMENTS = 3


class Actors:
    """Everything that a schedule's processes share: the world, the oracle (as sidecars and as judge), what the broker wrote."""

    def __init__(self, world: World, oracle: Oracle, broker: list[Rows]) -> None:
        self.world = world
        self.oracle = oracle
        self.broker = broker
        self.undoing = 0
        self.runs = world.rng.choice((0.5, 0.5, 0.85))
        self.retires = world.rng.choice((0.05, 0.2, 0.3))  # the rest is mostly undo
        self.live = Broker(broker, EPOCH_SEGMENTS)
        self.elections = 0
        """How many unclean elections are to come."""
        self.name = oracle.name
        self.losses: Losses | None = None
        self.retention_bytes: tuple[int, ...] = ()
        """Limits of the compactors' configurations, which need not agree; empty if nothing expires."""

    def expires(self, state: PartitionState) -> int | None:
        """What retention says by one of the configurations, and what stays of segments that were deleted by hand."""
        limit = self.world.hazards.choice(self.retention_bytes) if self.retention_bytes else -1
        cleaner = CleanerSettings(cleanup_policy="compact,delete", retention_bytes=limit)
        expired = find_expired_segments(state, cleaner, 0)
        return expired.log_start_offset if expired else None

    def work(self, ports: EnvironmentPorts, *, fails: bool = False) -> SymbolicJob:
        rng = self.world.rng
        worker = SymbolicWorker(
            ports, keeps_survivors=rng.random() < 0.3, fails=(lambda: rng.random() < 0.05) if fails else (lambda: False)
        )
        refuses = fails and rng.random() < 0.05
        return SymbolicJob(
            ports,
            now_ms=ports.clock_ms(),
            planner=SymbolicPlanner(self.oracle.contents, skips=rng.random() < 0.8),
            worker=worker,
            resumable=lambda plan: "other settings" if refuses else "",
            expires=self.expires,
        )

    def restarting(
        self, name: str, holder: str, body: Callable[[EnvironmentPorts, PartitionLog], None]
    ) -> Callable[[EnvironmentPorts], None]:
        """A process that does ``body`` again and again, survives what a daemon survives, and is started anew after a crash."""
        world, losses = self.world, self.losses
        if losses:
            losses.joins(name)

        def opened(ports: EnvironmentPorts) -> PartitionLog:
            return losses.opened(ports, name, holder) if losses else open_partition_log(ports, self.name)

        def run(ports: EnvironmentPorts) -> None:
            log = opened(ports)
            try:
                while True:
                    try:
                        if losses:
                            losses.hear(name, log)
                        body(ports, log)
                        if losses:
                            losses.tell(name, holder, log)
                    except BadControlRecord:
                        if not (losses and losses.lost):
                            raise
                        log = opened(ports)
                    except StoreError:
                        if world.rng.random() < 0.5:
                            log = opened(ports)
                    except (Fenced, UsageError, BadData, OutOfBudget):
                        pass
                    ports.sleep(world.rng.choice((0.02, 0.2, 0.7)))
            finally:
                again = self.restarting(name, holder, body)
                world.push(world.now_ms + world.rng.choice((30, TTL_MS / 2, TTL_MS * 1.5)), lambda: void(world.spawn(name, again, holder)))

        return run

    def compactor(self, ports: EnvironmentPorts, log: PartitionLog) -> None:
        dice = self.world.rng.random()
        if dice < self.runs:
            run_round(ports, log, LEASE, self.work(ports, fails=True))
        elif dice < self.runs + self.retires:
            retire_partition(ports, log, LEASE, RETENTION, job=self.work(ports) if self.world.rng.random() < 0.6 else WITHDRAWAL)
        elif dice < 0.92:
            if log.refresh().published:
                self.take_back(ports, log)
        else:
            log.snapshot_and_cut(self.world.rng.choice((1, 4)))

    def take_back(self, ports: EnvironmentPorts, log: PartitionLog) -> None:
        """Undo the latest round."""
        self.undoing += 1
        try:
            undo_round(ports, log, LEASE, log.state.published[-1])
        finally:
            self.undoing -= 1

    def deleter(self, ports: EnvironmentPorts, log: PartitionLog) -> None:
        """Delete records below any offset, also where there is none. Some do not settle an open round first, some undo a round after it."""
        dice = self.world.hazards
        state = log.refresh()
        offset = dice.randint(state.log_start - 2, state.end_offset + 2)
        replaced = [segment for group in state.waiting if not group.undone for segment in group.segments]
        if replaced and dice.random() < 0.4:
            offset = dice.choice(replaced).end_offset + 1  # a round may have made one segment of it and of its neighbour
        with hold_leadership(ports, log, LEASE) as leadership:
            if dice.random() < 0.7:
                settle_intent(leadership, self.work(ports))
            try:
                raise_log_start(leadership, lambda state: None if (state.log_start_offset or -1) == offset else offset)
            except RecordRefused:
                pass
        if log.state.published and dice.random() < 0.4:
            self.take_back(ports, log)

    def collector(self, ports: EnvironmentPorts, log: PartitionLog) -> None:
        log.snapshot_and_cut(self.world.rng.choice((1, 1, 6)))

    def sweeper(self, ports: EnvironmentPorts, log: PartitionLog) -> None:
        """With another configuration, where there is one: what was recorded with what waits counts, too."""
        retire_partition(ports, log, LEASE, HASTY if ports.retention else RETENTION, dry_run=self.world.rng.random() < 0.2)

    def importer(self, ports: EnvironmentPorts, log: PartitionLog) -> None:
        """One or two segments at the end of the tier, through the real intake; what the broker has discarded is discarded first."""
        rng, broker = self.world.rng, self.live
        state = log.refresh()
        parted = first_contradicting_offset(state.lineage, state.end_offset + 1, broker.lineage(broker.end), broker.end)
        if state.live and parted is not None:
            self.truncation(ports, log, parted)
            return
        end = state.end_offset
        missing = [tuple(row for row in rows if row[0] > end) for rows, _ in broker.segments if rows[-1][0] > end]
        if self.elections and state.live and rng.random() < 0.2:
            self.elect()
            return
        if not missing:
            ports.sleep(2)
            return
        chosen = [SymbolicIncoming(self, ports, rows) for rows in missing[: rng.choice((1, 1, 2))]]
        last = chosen[-1].rows[-1][0]
        tail = (LastImportedBatch(base_offset=Offset(last), last_offset=Offset(last), digest=str(chosen[-1].rows[-1])),)
        add_segments_once(ports, log, chosen, SegmentAddition(broker.lineage(last + 1), tail))

    def elect(self) -> None:
        """The broker's log loses its end, most often some of what the tier has."""
        self.elections -= 1
        self.live.elect(self.world.rng, max(1, self.oracle.state.end_offset - 3))
        self.world.note(f"the broker goes on at {self.live.lineage(self.live.end)}")

    def truncation(self, ports: EnvironmentPorts, log: PartitionLog, offset: int) -> None:
        """What `import --accept-truncation` does: the segment in the middle is cut, and one record takes the rest out."""
        state = log.state
        voided = [segment for segment in state.live if segment.end_offset >= offset]
        first, head, cut_id = voided[0], None, ports.new_id()
        if first.start_offset < offset:
            data = encode(row for row in self.oracle.contents[first.id] if row[0] < offset)
            head = describe(ports.new_id(), first.start_offset, offset - 1, data, first.leader_epochs)
            register_import(ports, log, cut_id, [head.id])
            upload(ports, head, data, self.name)
        lost = first_dirty_offset_in(state.vector) > offset
        body = TailTruncated(
            cut_id=cut_id, offset=Offset(offset), voided=tuple(segment.id for segment in voided), head=head, accept_loss=lost
        )
        record_tail_truncation(ports, log, body)

    def stranger(self, ports: EnvironmentPorts, log: PartitionLog) -> None:
        """Somebody whose control store was mistyped: an empty one over the same data. He imports nothing, and would sweep everything."""
        mine = replace(ports, control=self.world.mistyped, ownership=DataRootOwnershipCheckByTierId())
        owner, catalog = mine.ownership, open_catalog(mine)
        assert isinstance(owner, DataRootOwnershipCheckByTierId)
        owner.require_unowned_root(mine, catalog.refresh())
        owner.tier_id = create_tier(mine, kind="object-log", layout="native").tier_id
        mine.require_data_root_ownership(repeat_if_passed_before=True)
        retire_partition(mine, open_partition_log(mine, self.name), LEASE, RETENTION)

    def lose(self) -> None:
        """An object that waits for grace is lost. Nobody reads it; but who goes back to it must notice."""
        groups = [group for group in self.oracle.state.waiting if not group.undone]
        if groups and not self.undoing:
            key = object_key(self.name, self.world.hazards.choice(groups[-1].segments))
            if self.world.data.objects.pop(key, None):
                self.world.note(f"lost: {key}")

    def reader(self, ports: EnvironmentPorts, log: PartitionLog) -> None:
        """Folds, then reads; starts over with a fresh fold when an object is gone."""
        before, truncated = self.oracle.state.end_offset, self.oracle.truncated
        state = log.refresh()
        if truncated != self.oracle.truncated:
            return
        if not before <= state.end_offset <= self.oracle.state.end_offset:
            self.world.violate(f"a reader's view ends at {state.end_offset}, outside what was there while it folded")
        rows: list[Row] = []
        try:
            for segment in state.live:
                ports.data.get(object_key(self.name, segment))
                rows.extend(self.oracle.contents[segment.id])
        except NotFound:
            return
        seen = view(row for row in rows if row[0] >= state.log_start)
        truth = self.oracle.truth(state.end_offset, state.log_start)
        if truncated == self.oracle.truncated and seen != truth:
            self.world.violate(f"a reader sees {seen}, the broker wrote {truth}")


class SymbolicIncoming:
    """Incoming (transfer.intake): a segment of the broker's, read once to be described and once to be uploaded."""

    def __init__(self, actors: Actors, ports: EnvironmentPorts, rows: Rows) -> None:
        self.actors = actors
        self.ports = ports
        self.rows = rows

    @property
    def content_identity(self) -> str:
        return encode(self.rows).decode()

    def upload_under_id(self, registered: str) -> RemoteLogSegmentMetadata | None:
        actors, rows = self.actors, self.rows
        start, end = rows[0][0], rows[-1][0]
        entries = actors.live.lineage(end + 1)
        inside = [entry for entry in entries if entry.start_offset > start]
        before = [entry for entry in entries if entry.start_offset <= start]
        segment = describe(registered, start, end, encode(rows), [EpochEntry(before[-1].epoch, Offset(start)), *inside])
        actors.oracle.promised[registered] = rows
        if actors.elections and actors.world.rng.random() < 0.1:
            actors.elect()
        return segment if upload(self.ports, segment, encode(actors.live.between(start, end)), actors.name) else None

    def check_source_unchanged(self) -> None:
        if self.actors.live.between(self.rows[0][0], self.rows[-1][0]) != self.rows:
            raise BadData("it changed while it was imported")


def void(_: object) -> None:
    return None
