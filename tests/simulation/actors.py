"""The processes of a schedule: each a loop over the project's own operations, with what its command line would catch."""

from __future__ import annotations

from collections.abc import Callable

from checkpoint.lineage import EpochEntry
from compactor.control.importing import record_lineage, register, tier
from compactor.control.logs import PartitionLog, open_partition
from compactor.control.ports import Lease, Ports, Retention
from compactor.control.records import BadControlRecord
from compactor.control.undo import undo
from compactor.errors import BadData, Fenced, NotFound, StoreError, UsageError
from compactor.round.drive import run_round
from compactor.upkeep.retire import retire
from tests.simulation.oracle import Oracle
from tests.simulation.symbolic import NAME, Row, Rows, SymbolicPlanner, SymbolicRound, SymbolicWorker, describe, encode, upload, view
from tests.simulation.world import GRACE_MS, ORPHAN_AGE_MS, TTL_MS, UNDO_WINDOW_MS, World
from tests.support.keys import object_key

LEASE = Lease(ttl_ms=TTL_MS)
RETENTION = Retention(grace_ms=GRACE_MS, undo_window_ms=UNDO_WINDOW_MS, orphan_age_ms=ORPHAN_AGE_MS)
EPOCH_SEGMENTS = 3


class Actors:
    """Everything that a schedule's processes share: the world, the oracle (as sidecars and as judge), what the broker wrote."""

    def __init__(self, world: World, oracle: Oracle, broker: list[Rows]) -> None:
        self.world = world
        self.oracle = oracle
        self.broker = broker
        self.runs = world.rng.choice((0.5, 0.5, 0.85))
        self.retires = world.rng.choice((0.05, 0.2, 0.3))  # the rest is mostly undo
        self.lineage = tuple(EpochEntry(number // EPOCH_SEGMENTS, broker[number][0][0]) for number in range(0, len(broker), EPOCH_SEGMENTS))

    def work(self, ports: Ports, *, fails: bool = False) -> SymbolicRound:
        rng = self.world.rng
        worker = SymbolicWorker(
            ports, keeps_survivors=rng.random() < 0.3, fails=(lambda: rng.random() < 0.05) if fails else (lambda: False)
        )
        refuses = fails and rng.random() < 0.05
        return SymbolicRound(
            ports,
            now_ms=ports.clock_ms(),
            planner=SymbolicPlanner(self.oracle.contents, skips=rng.random() < 0.8),
            worker=worker,
            resumable=lambda plan: "other settings" if refuses else "",
        )

    def restarting(self, name: str, holder: str, body: Callable[[Ports, PartitionLog], None]) -> Callable[[Ports], None]:
        """A process that does ``body`` again and again, survives what a daemon survives, and is started anew after a crash."""
        world = self.world

        def run(ports: Ports) -> None:
            log = open_partition(ports, NAME)
            try:
                while True:
                    try:
                        body(ports, log)
                    except BadControlRecord:
                        raise
                    except StoreError:
                        if world.rng.random() < 0.5:
                            log = open_partition(ports, NAME)
                    except (Fenced, UsageError, BadData):
                        pass
                    ports.sleep(world.rng.choice((0.02, 0.2, 0.7)))
            finally:
                again = self.restarting(name, holder, body)
                world.push(world.now_ms + world.rng.choice((30, TTL_MS / 2, TTL_MS * 1.5)), lambda: void(world.spawn(name, again, holder)))

        return run

    def compactor(self, ports: Ports, log: PartitionLog) -> None:
        dice = self.world.rng.random()
        if dice < self.runs:
            run_round(ports, log, LEASE, self.work(ports, fails=True))
        elif dice < self.runs + self.retires:
            retire(ports, log, LEASE, RETENTION, work=self.work(ports) if self.world.rng.random() < 0.6 else None)
        elif dice < 0.92:
            published = log.refresh().published
            if published:
                undo(ports, log, LEASE, published[-1])
        else:
            log.cut(self.world.rng.choice((1, 4)))

    def collector(self, ports: Ports, log: PartitionLog) -> None:
        log.cut(self.world.rng.choice((1, 1, 6)))

    def sweeper(self, ports: Ports, log: PartitionLog) -> None:
        retire(ports, log, LEASE, RETENTION, dry_run=self.world.rng.random() < 0.2)

    def importer(self, ports: Ports, log: PartitionLog) -> None:
        """One or two segments at the end of the tier, by the protocol: register, upload, tier."""
        rng = self.world.rng
        end = log.refresh().end_offset
        missing = [number for number, rows in enumerate(self.broker) if rows[0][0] > end]
        if not missing:
            ports.sleep(2)
            return
        if rng.random() < 0.03:  # a broker that lost its last epoch, as far as it says
            record_lineage(ports, log, self.lineage[: 1 + missing[0] // EPOCH_SEGMENTS][:-1] or self.lineage[:1], max(end - 1, 0))
            return
        chosen = [(ports.new_id(), number) for number in missing[: rng.choice((1, 1, 2))]]
        import_id = ports.new_id()
        register(ports, log, import_id, [name for name, _ in chosen])
        segments = []
        for name, number in chosen:
            rows = self.broker[number]
            data = encode(rows)
            epoch = number // EPOCH_SEGMENTS
            segment = describe(name, rows[0][0], rows[-1][0], data, [EpochEntry(epoch, max(rows[0][0], self.lineage[epoch].start_offset))])
            upload(ports, segment, data)
            segments.append(segment)
        tier(ports, log, import_id, segments, self.lineage[: 1 + chosen[-1][1] // EPOCH_SEGMENTS] if rng.random() < 0.7 else ())

    def reader(self, ports: Ports, log: PartitionLog) -> None:
        """Folds, then reads; starts over with a fresh fold when an object is gone."""
        before = self.oracle.state.end_offset
        state = log.refresh()
        if not before <= state.end_offset <= self.oracle.state.end_offset:
            self.world.violate(f"a reader's view ends at {state.end_offset}, outside what was there while it folded")
        rows: list[Row] = []
        try:
            for segment in state.live:
                ports.data.get(object_key(NAME, segment))
                rows.extend(self.oracle.contents[segment.id])
        except NotFound:
            return
        if view(rows) != self.oracle.truth(state.end_offset):
            self.world.violate(f"a reader sees {view(rows)}, the broker wrote {self.oracle.truth(state.end_offset)}")


def void(_: object) -> None:
    return None
