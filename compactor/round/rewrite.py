"""The work of one round on this machine: fetch -> fold -> pass 1 -> pass 2 -> upload -> receipt. Never writes metadata."""

from __future__ import annotations

import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from bloom.sizing import FilterDesign
from checkpoint.files import format_leader_epoch_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, cut
from compactor import __version__
from compactor.cleaner.gate.balance import ResultTally
from compactor.cleaner.gate.judge import Gate, GateFailed
from compactor.cleaner.keys.survivors import Survivors, Witness
from compactor.cleaner.passes.chunks import FinishedChunks
from compactor.cleaner.passes.describe import negative_timestamps
from compactor.cleaner.passes.lanes import Lanes
from compactor.cleaner.passes.portraits import Sitting, sat
from compactor.cleaner.passes.retention import RoundRules
from compactor.cleaner.passes.rewrite import CleanedSegment, RewritePass
from compactor.cleaner.passes.source import SourceSegment, open_source
from compactor.cleaner.passes.transactions import Verdicts
from compactor.errors import CannotCopy, CopyDiffers
from compactor.local.budget import BLOCK, Grant, Overrun
from compactor.local.staging import Staging, group_room
from compactor.model.balance import Balance
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata
from compactor.records import codecs
from compactor.records.balance import BalanceKey
from compactor.records.indexes import build
from compactor.records.producers import ENTRY, ProducerStates, format_snapshot, parse_snapshot
from compactor.round.delivery import Made, deliver, described
from compactor.round.index import CleanInquiry, PassOneFound, PassOneSettings, run_pass_one
from compactor.round.ports import WorkSession, WorkStats
from compactor.round.roles import RoundExtent
from compactor.round.skip import FilterRecord
from compactor.round.sources import Reading
from compactor.round.splice import pieces, succeeded, worth_a_directory
from compactor.round.splicing import NotInPart, PutTogether, SegmentPart, put_together, whole_balance
from compactor.stages import WorkStage, measured
from compactor.tier.ports import SegmentLayout, SegmentPublisher
from compactor.tier.sidecars import Sidecars

_log = logging.getLogger(__name__)


def fingerprint() -> str:
    """What decides the bytes of a round besides its plan; an executor that differs refuses (I7)."""
    return f"tiered-compactor={__version__} {codecs.fingerprint()}"


@dataclass(frozen=True)
class LocalWorker:
    """Worker (round.ports) by threads of this process. ``stats`` is filled in as the round goes; ``known``: as Reading takes it.

    :param publisher: is told of each new segment before its first object is created.
    :param engine: auto, memory or partitioned, for a plan whose pass 1 is not at hand.
    :param sidecars: where those of new segments go, and those of segments that are not read come from; None: nowhere.
    :param filter_for: (records, bytes) of a new segment -> its filter, or None.
    :param found: pass 1 of the plan that was just announced, with ``lanes``.
    :param splices: whether segments may be read in part, and new ones get what later rounds need for that.
    """

    layout: SegmentLayout
    publisher: SegmentPublisher
    staging: Staging
    hash_key: bytes
    map_budget_bytes: int
    threads: int
    engine: str = "auto"
    verify_before_publish: bool = True
    sidecars: Sidecars | None = None
    filter_for: Callable[[int, int], FilterDesign | None] = lambda records, size: None
    found: PassOneFound | None = None
    lanes: Lanes | None = None
    splices: bool = False
    stats: WorkStats = field(default_factory=WorkStats)
    known: Mapping[tuple[str, str], bytes] = field(default_factory=dict)

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        if plan.fingerprint != fingerprint():
            message = f"the plan is for {plan.fingerprint}, this process is {fingerprint()}"
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=message)
            return
        left = {task.group: task for task in tasks}
        try:
            with nullcontext(self.lanes) if self.lanes else Lanes(self.threads) as lanes:
                try:
                    for outcome in self._attempt(plan, tasks, session, lanes, self.found, in_part=self.splices):
                        del left[outcome.group]
                        yield outcome
                except NotInPart as why:
                    _log.warning("%s-%d is read whole: %s", plan.topic, plan.partition, why)
                if left:
                    if self.found is not None:
                        self.found.forget()
                    yield from self._attempt(plan, list(left.values()), session, lanes, None, in_part=False)
        except GateFailed as refused:
            yield CompactionFailure(run_id=plan.run_id, group=-1, kind="gate", message=refused.message)

    def _attempt(
        self,
        plan: CompactionPlan,
        tasks: Sequence[CompactionTask],
        session: WorkSession,
        lanes: Lanes,
        found: PassOneFound | None,
        *,
        in_part: bool,
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        """``found``: None where pass 1 is still to be done, with parts of segments or without. Raises GateFailed, NotInPart."""
        name, limit = TopicPartition(plan.topic, plan.partition), plan.policy.max_decompressed_batch_bytes
        reading = Reading(self.staging, name, session.state.live, limit, self.known)
        if found is None:
            found = self._pass_one(plan, tasks, session, reading, lanes, in_part=in_part)
        else:
            reading.ranges.update(found.opened.reading.ranges)
        self.stats.peak_map_bytes = found.survivors.peak_bytes
        self.stats.map_entries = found.survivors.keys
        yield from self._in_order(Execution(self, plan, reading, lanes, found), tasks, session)
        if self.found is not None and self.found is not found:
            self.found.survivors.met |= found.survivors.met  # whoever asks what filters were good for asks that one

    def _pass_one(
        self,
        plan: CompactionPlan,
        tasks: Sequence[CompactionTask],
        session: WorkSession,
        reading: Reading,
        lanes: Lanes,
        *,
        in_part: bool,
    ) -> PassOneFound:
        """Pass 1 of a plan that was announced before: the clean segments that it reads are settled."""
        wanted = {name for task in tasks for name in task.sources}
        clean = frozenset(s.id for s in reading.live if s.id in wanted and s.end_offset < plan.first_dirty_offset)
        settings = PassOneSettings(self.engine, self.map_budget_bytes, self.hash_key, lanes, self.verify_before_publish, session.check)
        extent = RoundExtent(plan.first_dirty_offset, plan.end_offset, rules_of(plan, BalanceKey(self.hash_key)))
        parts = frozenset(task.sources[0] for task in tasks if task.in_part) if in_part else frozenset()
        # Where every segment is a source all are read, and no sidecar is asked to stand in for one.
        sidecars = self.sidecars if parts or any(s.id not in wanted for s in reading.live) else None
        return run_pass_one(reading, extent, settings, CleanInquiry(sidecars, FilterRecord(), clean, parts))

    def _in_order(
        self, round_: Execution, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        """Groups are fetched ahead, rewritten here by all threads, and uploaded while the next ones are at work."""
        uploads: deque[tuple[Written, Future[CompactionReceipt | CompactionFailure]]] = deque()
        with ThreadPoolExecutor(1, "upload") as uploader:
            try:
                for number, task in enumerate(tasks):
                    session.check()
                    written = round_.rewritten(task, tasks[number + 1 : number + 2])
                    uploads.append((written, uploader.submit(round_.delivered, written)))
                    while uploads and (uploads[0][1].done() or len(uploads) > 1):
                        yield uploads.popleft()[1].result()
                while uploads:
                    yield uploads.popleft()[1].result()
            finally:
                for written, upload in uploads:
                    if upload.cancel():
                        round_.abandon(written)


@dataclass(frozen=True)
class Written:
    """A group's new segment on the local disk, and the room that it has there. ``members``: ordinals of its sources.

    ``part``: where a part of its source was read, ``cleaned`` is of that; ``balance`` is of all.
    """

    task: CompactionTask
    members: tuple[int, ...]
    cleaned: CleanedSegment
    folder: Path
    grant: Grant
    balance: Balance
    part: SegmentPart | None = None

    @property
    def unread(self) -> int:
        """Records in batches that nobody read."""
        return int(self.part.whole.table.count.sum() - self.part.source.table.count.sum()) if self.part else 0


class Answers(Protocol):
    """What pass 2 asks of pass 1. ``gate`` is asked about each group, ``witness`` is shown what pass 2 inflates."""

    @property
    def survivors(self) -> Survivors: ...

    @property
    def finished(self) -> FinishedChunks: ...

    @property
    def gate(self) -> Gate | None: ...

    @property
    def witness(self) -> Witness | None: ...

    @property
    def sources(self) -> Sequence[SourceSegment]:
        """By ordinal; those that ``source`` was asked for have their batches."""

    def source(self, ordinal: int, grant: Grant | None) -> AbstractContextManager[tuple[SourceSegment, Verdicts]]:
        """A segment with its bytes while the block runs, and the verdicts on its batches. Raises BadData, StoreError, OutOfBudget."""

    def part(self, ordinal: int) -> SegmentPart | None:
        """Where ``source`` gives a part of a segment alone; it raises NotInPart, too, then."""


class Execution:
    """One execution of a plan: each group from its sources to its receipt."""

    def __init__(self, worker: LocalWorker, plan: CompactionPlan, reading: Reading, lanes: Lanes, answers: Answers) -> None:
        self._worker = worker
        self._plan = plan
        self._live = reading.live
        self._lanes = lanes
        self._answers = answers
        self._partition = reading.partition
        self._limit = reading.inflate_limit
        self._reading = reading
        self._key = BalanceKey(worker.hash_key)
        self._rules = rules_of(plan, self._key)

    def work_on(self, task: CompactionTask) -> CompactionReceipt | CompactionFailure:
        """Pass 2 for one group, then upload under the announced id."""
        return self.delivered(self.rewritten(task))

    def rewritten(self, task: CompactionTask, following: Sequence[CompactionTask] = ()) -> Written:
        """Pass 2 for one group, within one grant over all that it will have on the disk at once.

        :param following: what comes next; fetched in the meantime, if there is room to spare.
        :raises OutOfBudget: it does not fit even alone.
        :raises NotInPart:
        """
        members = tuple(ordinal for ordinal, metadata in enumerate(self._live) if metadata.id in task.sources)
        inputs = [self._reading.log(ordinal) for ordinal in members]
        staging = self._worker.staging
        what = f"group {task.group} of {self._partition}"
        interval = self._plan.policy.index_interval_bytes

        def within(size: int) -> Written:
            with staging.room(size, what, inputs) as grant:
                for coming in following:
                    self._fetch_ahead(coming)
                folder = staging.folder / f"group-{task.group}"
                try:
                    return self._rewrite(task, members, grant, folder)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise

        def attempt() -> Written:
            sources = [self._live[ordinal] for ordinal in members]
            part = self._part(members)
            most = int(part.source.table.size.sum()) if part else task.most_bytes
            need = group_room(sources, interval, staging.missing(inputs), most_bytes=most)
            try:
                return within(min(need, staging.budget.total))
            except Overrun:
                return within(staging.budget.total)

        try:
            return staging.patiently(attempt)
        finally:
            staging.forget(inputs)
            self._note()

    def _rewrite(self, task: CompactionTask, members: tuple[int, ...], grant: Grant, folder: Path) -> Written:
        folder.mkdir()
        interval = self._plan.policy.index_interval_bytes
        answers = self._answers
        rewriting = RewritePass(answers.survivors, self._rules, interval, self._limit, answers.finished, answers.witness)
        grant.take(len(FILE_KINDS) * BLOCK)  # no file fills its last block
        part = self._part(members)
        cleaned = rewriting.rewrite(
            task.start_offset,
            [partial(answers.source, ordinal, grant) for ordinal in members],
            folder,
            self._lanes,
            end_offset=task.end_offset,
            end_epoch=task.leader_epochs[-1].epoch if task.leader_epochs else -1,
            room=grant.take,
        )
        tally = ResultTally(cleaned, self._key, self._limit)
        if answers.gate is not None:
            sources = [part.source] if part else [answers.sources[ordinal] for ordinal in members]
            mapped = partial(self._reading.mapped, grant=grant)
            report = answers.gate.check(sources, cleaned.paths, end_offset=task.end_offset, mapped=mapped, tally=tally)
            self._worker.stats.gate_keys = report.keys
            self._worker.stats.gate_disk_bytes = answers.gate.disk_bytes
        balance = tally.balance()
        if part:
            balance = whole_balance(part, balance, self._live[part.source.ordinal].content, self._key)
        grant.take(self._worker.layout.upload_room(cleaned.size))
        return Written(task, members, cleaned, folder, grant.handed_over(), balance, part)

    def _part(self, members: Sequence[int]) -> SegmentPart | None:
        return self._answers.part(members[0]) if len(members) == 1 else None

    def delivered(self, written: Written) -> CompactionReceipt | CompactionFailure:
        """Uploads a group and frees its room. May run beside ``rewritten`` of another group. Raises StoreError, NotInPart."""
        try:
            return self._worker.staging.patiently(lambda: self._uploaded(written))
        finally:
            self.abandon(written)

    def abandon(self, written: Written) -> None:
        """Frees the room of a group that was delivered, or will not be."""
        shutil.rmtree(written.folder, ignore_errors=True)
        written.grant.release()
        self._note()

    @measured(WorkStage.UPLOAD, lambda self, written: written.cleaned.size)
    def _uploaded(self, written: Written) -> CompactionReceipt | CompactionFailure:
        task, cleaned = written.task, written.cleaned
        last, layout = self._live[written.members[-1]], self._worker.layout
        output = open_source(0, cleaned.paths["log"], task.start_offset, task.end_offset + 1, task.mtime_ms, -1, self._limit)
        negative = any(self._live[ordinal].negative_timestamps for ordinal in written.members)
        joined = None
        if written.part is None:
            contents: dict[str, Path | bytes] = {**cleaned.paths, **self._beside(written)}
            made = Made.whole(output, contents, self._limit, digests=layout.keeps_digests)
        else:
            joined = put_together(written.part, task.new_segment_id, output, self._worker.hash_key, self._limit)
            made = self._of_pieces(written, written.part, output, joined)
        try:
            metadata, problem = deliver(
                (layout, self._worker.publisher),
                self._partition,
                task,
                made,
                open_txn_offset=last.open_txn_offset if not last.is_cut else -1,
                content=written.balance.result,
                negative_timestamps=negative_timestamps(output, self._limit) if negative else 0,
            )
        except (CannotCopy, CopyDiffers) as refused:
            raise NotInPart(refused.message) from None
        if problem:
            return CompactionFailure(run_id=self._plan.run_id, group=task.group, kind="upload", message=problem)
        if joined is None:
            self._portray(metadata, output)
        else:
            self._portray_joined(metadata, last, joined)
        if written.part:
            self._worker.stats.bytes_copied += written.part.splice.bytes_copied
        return CompactionReceipt(
            run_id=self._plan.run_id,
            group=task.group,
            segment=metadata,
            records_read=cleaned.records_read + written.unread,
            records_kept=cleaned.records_kept + written.unread,
            bytes_read=sum(self._live[ordinal].size_bytes for ordinal in written.members),
            bytes_written=made.log.size,
            balance=written.balance,
        )

    def _of_pieces(self, written: Written, part: SegmentPart, output: SourceSegment, joined: PutTogether) -> Made:
        task, table, source = written.task, joined.table, self._live[written.members[0]]
        index, timeindex = build(
            task.start_offset, table.size, table.last_offset, table.max_timestamp, self._plan.policy.index_interval_bytes
        )
        log_key = self._worker.layout.where(self._partition, source, "log")
        return Made.of_pieces(
            joined,
            pieces(part.splice, log_key, written.cleaned.paths["log"], output.table),
            {"index": index, "timeindex": timeindex, **self._beside(written)},
        )

    def _beside(self, written: Written) -> dict[str, bytes]:
        """Producer states and lineage at the group's end: the last source's, up to where it is read."""
        ordinal = written.members[-1]
        last, end = self._live[ordinal], written.task.end_offset
        found: dict[str, bytes] = {}
        if "snapshot" in last.files:
            found["snapshot"] = self._reading.content(last, "snapshot")
        if "leader-epoch-checkpoint" in last.files:
            found["leader-epoch-checkpoint"] = self._lineage(ordinal)
        if last.is_cut and "snapshot" in found:
            copied = parse_snapshot(found["snapshot"], self._reading.where(last, "snapshot"))
            before = self._live[ordinal - 1] if ordinal else None
            known = ProducerStates.none()
            if before is not None and "snapshot" in before.files:
                known = parse_snapshot(self._reading.content(before, "snapshot"), self._reading.where(before, "snapshot"))
            states = copied.rewound(end, known.rewound(last.start_offset - 1).replay(self._answers.sources[ordinal].table))
            found["snapshot"] = format_snapshot(states)
        if last.is_cut and "leader-epoch-checkpoint" in found:
            where = self._reading.where(last, "leader-epoch-checkpoint")
            lineage = parse_leader_epoch_checkpoint(found["leader-epoch-checkpoint"].decode(), where)
            found["leader-epoch-checkpoint"] = format_leader_epoch_checkpoint(cut(lineage, end + 1)).encode()
        return found

    def _lineage(self, ordinal: int) -> bytes:
        """A segment's lineage. Nobody asks the store for it where its digest says that it is what the segments' epochs make of it."""
        segment, kind = self._live[ordinal], "leader-epoch-checkpoint"
        known: dict[int, EpochEntry] = {}
        for entry in (entry for before in self._live[: ordinal + 1] for entry in before.leader_epochs):
            known.setdefault(entry.epoch, entry)
        made = format_leader_epoch_checkpoint(list(known.values())).encode()
        return made if described(made).is_same(segment.files[kind]) else self._reading.content(segment, kind)

    def _portray(self, metadata: RemoteLogSegmentMetadata, output: SourceSegment) -> None:
        """The new segment's sidecar, while its bytes are in the page cache."""
        worker = self._worker
        if worker.sidecars is None:
            return
        design = worker.filter_for(metadata.records, metadata.size_bytes)
        directory = worker.splices and worth_a_directory(metadata, len(output.table), worker.layout.copies)
        sitting = Sitting(output, design, worker.hash_key, sketch=design is not None, directory=directory)
        with Lanes(1) as lanes:
            sat(sitting, output, self._limit, lanes)
        worker.stats.sidecar_bytes_written += worker.sidecars.add(sitting.sidecar(metadata.id))
        if directory:
            worker.stats.sidecar_bytes_written += worker.sidecars.add_directory(sitting.directory(metadata.id))

    def _portray_joined(self, metadata: RemoteLogSegmentMetadata, source: RemoteLogSegmentMetadata, joined: PutTogether) -> None:
        """The same of one that nobody has read, from its source's. Where that is gone, the next round reads the segment whole."""
        worker = self._worker
        old = worker.sidecars.load(source.id) if worker.sidecars else None
        if worker.sidecars is None or old is None:
            return
        sidecar = succeeded(old, metadata.id, joined.due, joined.table)
        worker.stats.sidecar_bytes_written += worker.sidecars.add(sidecar) + worker.sidecars.add_directory(joined.directory)

    def _fetch_ahead(self, task: CompactionTask) -> None:
        for ordinal, metadata in enumerate(self._live):
            if metadata.id in task.sources:
                self._worker.staging.fetch_ahead(self._reading.log(ordinal))
                return

    def _note(self) -> None:
        self._worker.stats.bytes_fetched = self._worker.staging.bytes_fetched
        self._worker.stats.peak_disk_bytes = self._worker.staging.peak_bytes


def rules_of(plan: CompactionPlan, balance_key: BalanceKey | None = None) -> RoundRules:
    return RoundRules(
        now_ms=plan.now_ms,
        delete_retention_ms=plan.policy.delete_retention_ms,
        legacy_horizon_ms=plan.legacy_horizon_ms,
        high_watermark=plan.high_watermark,
        latest_offset=plan.next_dirty_offset - 1,
        producers=active_states(plan),
        balance_key=balance_key,
    )


def active_states(plan: CompactionPlan) -> ProducerStates:
    """The plan's live producers as the cleaner's rules take them."""
    entries = np.zeros(len(plan.producers), ENTRY)
    for row, producer in enumerate(sorted(plan.producers, key=lambda p: p.producer_id)):
        entries[row]["producer_id"] = producer.producer_id
        entries[row]["epoch"] = producer.epoch
        entries[row]["last_offset"] = producer.last_offset
    return ProducerStates(entries)
