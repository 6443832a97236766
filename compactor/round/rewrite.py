"""The work of one round on this machine: fetch -> fold -> pass 1 -> pass 2 -> upload -> receipt. Never writes metadata."""

from __future__ import annotations

import hashlib
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
from compactor.cleaner.passes.describe import content_of, due_ms, negative_timestamps
from compactor.cleaner.passes.lanes import Lanes
from compactor.cleaner.passes.portraits import portray
from compactor.cleaner.passes.retention import RoundRules
from compactor.cleaner.passes.rewrite import CleanedSegment, RewritePass
from compactor.cleaner.passes.source import SourceSegment, open_source
from compactor.cleaner.passes.transactions import Verdicts
from compactor.local.budget import BLOCK, Grant, Overrun
from compactor.local.staging import Staging, group_room
from compactor.model.balance import Balance, Sum
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile
from compactor.records import codecs
from compactor.records.balance import BalanceKey
from compactor.records.headers import digest_of_headers, headers_of
from compactor.records.producers import ENTRY, ProducerStates, format_snapshot, parse_snapshot
from compactor.round.index import CleanInquiry, PassOneFound, PassOneSettings, run_pass_one
from compactor.round.ports import WorkSession, WorkStats
from compactor.round.roles import RoundExtent
from compactor.round.skip import FilterRecord
from compactor.round.sources import Reading
from compactor.stages import WorkStage, measured
from compactor.tier.ports import SegmentLayout, SegmentPublisher
from compactor.tier.recorded import digest
from compactor.tier.sidecars import Sidecars


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
    stats: WorkStats = field(default_factory=WorkStats)
    known: Mapping[tuple[str, str], bytes] = field(default_factory=dict)

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        if plan.fingerprint != fingerprint():
            message = f"the plan is for {plan.fingerprint}, this process is {fingerprint()}"
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=message)
            return
        live = session.state.live
        try:
            with nullcontext(self.lanes) if self.lanes else Lanes(self.threads) as lanes:
                name, limit = TopicPartition(plan.topic, plan.partition), plan.policy.max_decompressed_batch_bytes
                reading = Reading(self.staging, name, live, limit, self.known)
                found = self.found or self._pass_one(plan, tasks, session, reading, lanes)
                self.stats.peak_map_bytes = found.survivors.peak_bytes
                self.stats.map_entries = found.survivors.keys
                yield from self._in_order(Execution(self, plan, reading, lanes, found), tasks, session)
        except GateFailed as refused:
            yield CompactionFailure(run_id=plan.run_id, group=-1, kind="gate", message=refused.message)

    def _pass_one(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession, reading: Reading, lanes: Lanes
    ) -> PassOneFound:
        """Pass 1 of a plan that was announced before: the clean segments that it reads are settled."""
        wanted = {name for task in tasks for name in task.sources}
        clean = frozenset(s.id for s in reading.live if s.id in wanted and s.end_offset < plan.first_dirty_offset)
        settings = PassOneSettings(self.engine, self.map_budget_bytes, self.hash_key, lanes, self.verify_before_publish, session.check)
        extent = RoundExtent(plan.first_dirty_offset, plan.end_offset, rules_of(plan, BalanceKey(self.hash_key)))
        # Where every segment is a source all are read, and no sidecar is asked to stand in for one.
        sidecars = self.sidecars if any(s.id not in wanted for s in reading.live) else None
        return run_pass_one(reading, extent, settings, CleanInquiry(sidecars, FilterRecord(), clean))

    def _in_order(
        self, round_: Execution, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        """Groups are fetched ahead, rewritten here by all threads, and uploaded while the next ones are at work."""
        uploads: deque[Future[CompactionReceipt | CompactionFailure]] = deque()
        with ThreadPoolExecutor(1, "upload") as uploader:
            try:
                for number, task in enumerate(tasks):
                    session.check()
                    written = round_.rewritten(task, tasks[number + 1 : number + 2])
                    uploads.append(uploader.submit(round_.delivered, written))
                    while uploads and (uploads[0].done() or len(uploads) > 1):
                        yield uploads.popleft().result()
                while uploads:
                    yield uploads.popleft().result()
            finally:
                for upload in uploads:
                    upload.cancel()


@dataclass(frozen=True)
class Written:
    """A group's new segment on the local disk, and the room that it has there. ``members``: ordinals of its sources."""

    task: CompactionTask
    members: tuple[int, ...]
    cleaned: CleanedSegment
    folder: Path
    grant: Grant
    balance: Balance


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
            need = group_room(sources, interval, staging.missing(inputs), most_bytes=task.most_bytes)
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
            sources = [answers.sources[ordinal] for ordinal in members]
            mapped = partial(self._reading.mapped, grant=grant)
            report = answers.gate.check(sources, cleaned.paths, end_offset=task.end_offset, mapped=mapped, tally=tally)
            self._worker.stats.gate_keys = report.keys
            self._worker.stats.gate_disk_bytes = answers.gate.disk_bytes
        balance = tally.balance()
        grant.take(self._worker.layout.upload_room(cleaned.size))
        return Written(task, members, cleaned, folder, grant.handed_over(), balance)

    def delivered(self, written: Written) -> CompactionReceipt | CompactionFailure:
        """Uploads a group and frees its room. May run beside ``rewritten`` of another group."""
        try:
            return self._worker.staging.patiently(lambda: self._uploaded(written))
        finally:
            shutil.rmtree(written.folder, ignore_errors=True)
            written.grant.release()
            self._note()

    @measured(WorkStage.UPLOAD, lambda self, written: written.cleaned.size)
    def _uploaded(self, written: Written) -> CompactionReceipt | CompactionFailure:
        task, cleaned = written.task, written.cleaned
        last = self._live[written.members[-1]]
        contents: dict[str, Path | bytes] = {**cleaned.paths, **self._beside(written)}
        output = open_source(0, cleaned.paths["log"], task.start_offset, task.end_offset + 1, task.mtime_ms, -1, self._limit)
        negative = any(self._live[ordinal].negative_timestamps for ordinal in written.members)
        metadata, problem = deliver(
            (self._worker.layout, self._worker.publisher),
            self._partition,
            task,
            (output, contents),
            open_txn_offset=last.open_txn_offset if not last.is_cut else -1,
            content=written.balance.result,
            negative_timestamps=negative_timestamps(output, self._limit) if negative else 0,
            limit=self._limit,
        )
        if problem:
            return CompactionFailure(run_id=self._plan.run_id, group=task.group, kind="upload", message=problem)
        self._portray(metadata, output)
        return CompactionReceipt(
            run_id=self._plan.run_id,
            group=task.group,
            segment=metadata,
            records_read=cleaned.records_read,
            records_kept=cleaned.records_kept,
            bytes_read=sum(self._live[ordinal].size_bytes for ordinal in written.members),
            bytes_written=cleaned.size,
            balance=written.balance,
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
        with Lanes(1) as lanes:
            sidecar = portray(metadata.id, output, design, worker.hash_key, self._limit, lanes, sketch=design is not None)
        worker.stats.sidecar_bytes_written += worker.sidecars.add(sidecar)

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


def deliver(
    where: tuple[SegmentLayout, SegmentPublisher],
    name: TopicPartition,
    task: CompactionTask,
    made: tuple[SourceSegment, Mapping[str, Path | bytes]],
    *,
    open_txn_offset: int,
    content: Sum,
    negative_timestamps: int,
    limit: int,
) -> tuple[RemoteLogSegmentMetadata, str]:
    """A new segment under its announced id: introduced first, then uploaded. Its metadata, and what the layout has against it.

    :param made: its batches, and its files with those beside the log.
    """
    (layout, publisher), (output, contents) = where, made
    about = content_of(output.table)
    metadata = RemoteLogSegmentMetadata(
        id=task.new_segment_id,
        start_offset=task.start_offset,
        end_offset=task.end_offset,
        size_bytes=output.size,
        max_timestamp_ms=about.max_timestamp_ms,
        mtime_ms=task.mtime_ms,
        leader_epochs=task.leader_epochs,
        files={kind: described(data) for kind, data in contents.items()} | ({"log": described_log(output)} if layout.keeps_digests else {}),
        first_timestamp_ms=about.first_timestamp_ms,
        due_ms=due_ms(output, limit),
        open_txn_offset=open_txn_offset,
        records=about.records,
        content=content,
        negative_timestamps=negative_timestamps,
    )
    told = layout.custom_metadata(name, metadata, contents)
    metadata = metadata.model_copy(update={"custom_metadata": told}) if told else metadata
    publisher.begin(name, metadata)
    return metadata, layout.upload(name, metadata, contents)


def described(content: Path | bytes) -> SegmentFile:
    """What is recorded of an object."""
    if isinstance(content, bytes):
        return SegmentFile(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    return SegmentFile(size=content.stat().st_size, sha256=digest(content))


def described_log(source: SourceSegment) -> SegmentFile:
    """What is recorded of a new log, whose CRCs all fit: with the digest of its batches' headers, unless there are older messages."""
    sha256 = hashlib.sha256(source.buf.data).hexdigest()
    batches = digest_of_headers(headers_of(source.buf, source.table.position)) if (source.table.magic == 2).all() else ""
    return SegmentFile(size=source.size, sha256=sha256, batches=batches)
