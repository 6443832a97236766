"""The work of one round on this machine: fetch -> fold -> pass 1 -> pass 2 -> upload -> receipt. Never writes metadata."""

from __future__ import annotations

import hashlib
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from compactor import __version__
from compactor.cleaner.chunks import FinishedChunks
from compactor.cleaner.describe import content_of, due_ms
from compactor.cleaner.gate import Gate, GateFailed
from compactor.cleaner.keysets import KeySet
from compactor.cleaner.lanes import Lanes
from compactor.cleaner.retention import RoundRules
from compactor.cleaner.rewrite import CleanedSegment, RewritePass
from compactor.cleaner.source import SourceSegment, open_source
from compactor.cleaner.survivors import BackwardSurvivors, PassOne, Survivors
from compactor.cleaner.transactions import Verdicts, fold
from compactor.errors import AlreadyExists, CompactorError, NotFound
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile, segment_key
from compactor.pipeline.disk import BLOCK, Grant, Overrun
from compactor.pipeline.ports import WorkSession
from compactor.pipeline.recorded import digest
from compactor.pipeline.staging import Staging, Wanted, group_room
from compactor.records import codecs
from compactor.records.batches import Bytes, map_file, read_only
from compactor.records.indexes import TXN_ENTRY, TxnEntries, parse_txn_index
from compactor.records.producers import ENTRY, ProducerStates
from compactor.storage.port import ObjectStore

_NOTHING: Bytes = read_only(np.empty(0, np.uint8))


def fingerprint() -> str:
    """What decides the bytes of a round besides its plan; an executor that differs refuses (I7)."""
    return f"tiered-compactor={__version__} {codecs.fingerprint()}"


@dataclass
class WorkStats:
    """What a round cost, beyond what the receipts say. Bytes; ``gate_coverage``: share of the keys that the gate looked up exactly."""

    bytes_fetched: int = 0
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    map_entries: int = 0
    gate_coverage: float = 0.0


@dataclass(frozen=True)
class LocalWorker:
    """Worker (pipeline.ports) by threads of this process. ``stats`` is filled in as the round goes."""

    data: ObjectStore
    staging: Staging
    hash_key: bytes
    map_budget_bytes: int
    inflate_budget_bytes: int
    threads: int
    verify_before_publish: bool = True
    stats: WorkStats = field(default_factory=WorkStats)

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        if plan.fingerprint != fingerprint():
            message = f"the plan is for {plan.fingerprint}, this process is {fingerprint()}"
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=message)
            return
        try:
            with Lanes(self.threads) as lanes:
                round_ = Execution(self, plan, session.state.live, lanes)
                round_.read_headers()
                session.check()
                round_.read_keys()
                yield from self._in_order(round_, tasks, session)
        except GateFailed as refused:
            yield CompactionFailure(run_id=plan.run_id, group=-1, kind="gate", message=refused.message)

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
    """A group's new segment on the local disk, and the room that it has there."""

    task: CompactionTask
    members: tuple[SourceSegment, ...]
    cleaned: CleanedSegment
    folder: Path
    grant: Grant


class Execution:
    """One execution of a plan. Batch tables of all live segments stay in memory (about 80 bytes a batch); bytes do not.

    Who has sources, verdicts and survivors from elsewhere (an executor) sets them in a subclass and begins with ``work_on``.
    """

    def __init__(self, worker: LocalWorker, plan: CompactionPlan, live: Sequence[RemoteLogSegmentMetadata], lanes: Lanes) -> None:
        self._worker = worker
        self._plan = plan
        self._live = live
        self._lanes = lanes
        self._partition = f"{plan.topic}-{plan.partition}"
        self._limit = plan.policy.max_decompressed_batch_bytes
        self._finished = FinishedChunks(worker.inflate_budget_bytes)
        self._rules = rules_of(plan)
        self._sources: list[SourceSegment] = []
        self._verdicts: list[Verdicts] = []
        self._survivors: Survivors | None = None
        self._gate: Gate | None = None

    @property
    def survivors(self) -> Survivors:
        if self._survivors is None:
            raise CompactorError("a group is rewritten before pass 1", hint="This is a bug; please report it")
        return self._survivors

    def read_headers(self) -> None:
        """Batch headers of the whole log: what became of each transaction is told by control records anywhere in it."""
        previous_last = -1
        for ordinal, metadata in enumerate(self._live):
            source = self.opened(ordinal, metadata, previous_last)
            self._sources.append(source)
            if len(source.table):
                previous_last = int(source.table.last_offset[-1])
        self._verdicts = fold(self._sources)

    def opened(self, ordinal: int, metadata: RemoteLogSegmentMetadata, previous_last: int = -1) -> SourceSegment:
        """One segment's batch headers; ``ordinal`` is its place in ``live``. Its bytes are gone again (see ``mapped``)."""
        with self._worker.staging.opened(self._wanted(metadata, "log")) as path:
            self._note()
            source = open_source(
                ordinal, path, metadata.start_offset, metadata.end_offset + 1, metadata.mtime_ms, previous_last, self._limit,
                txn_entries=self._txn_entries(metadata),
            )  # fmt: skip
        source.name = metadata.key(self._partition, "log")
        source.buf = _NOTHING
        return source

    def read_keys(self) -> None:
        """Pass 1: the dirty range from its end to its beginning, one segment on disk at a time."""
        plan, worker = self._plan, self._worker
        begin, end = plan.first_dirty_offset, plan.end_offset
        gate = self._gate = self._new_gate() if worker.verify_before_publish else None
        one = PassOne(self._sources, self._verdicts, begin, end, worker.hash_key, self._limit, self._finished, self._rules, gate)
        dirty = one.dirty() if begin < end else []
        found = BackwardSurvivors(one, KeySet(worker.map_budget_bytes, expected_keys=0))
        for source, wanted in reversed(dirty):
            with self.mapped(source):
                found.scan(source, wanted, self._lanes)
        worker.stats.peak_map_bytes = found.peak_bytes
        worker.stats.map_entries = found.keys
        self._survivors = found

    def _new_gate(self) -> Gate:
        """Keys of its own: what makes two records meet in the cleaner's table does not in the gate's."""
        plan, worker = self._plan, self._worker
        secret = hashlib.sha256(b"gate" + worker.hash_key).digest()
        return Gate(
            self._sources,
            self._rules,
            first_dirty=plan.first_dirty_offset,
            hash_key=secret[:16],
            seed=int.from_bytes(hashlib.sha256(plan.run_id.encode()).digest()[:4], "big"),
            budget_bytes=worker.map_budget_bytes,
            inflate_limit=self._limit,
        )

    def work_on(self, task: CompactionTask) -> CompactionReceipt | CompactionFailure:
        """Pass 2 for one group, then upload under the announced id."""
        return self.delivered(self.rewritten(task))

    def rewritten(self, task: CompactionTask, following: Sequence[CompactionTask] = ()) -> Written:
        """Pass 2 for one group, within one grant over all that it will have on the disk at once.

        :param following: what comes next; fetched in the meantime, if there is room to spare.
        :raises OutOfBudget: it does not fit even alone.
        """
        members = [source for source, metadata in zip(self._sources, self._live, strict=True) if metadata.id in task.sources]
        inputs = [self._log(source.ordinal) for source in members]
        staging = self._worker.staging
        what = f"group {task.group} of {self._partition}"
        here = staging.missing(inputs)
        need = group_room([self._live[source.ordinal] for source in members], self._plan.policy.index_interval_bytes, here)

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
            try:
                return within(min(need, staging.budget.total))
            except Overrun:
                return within(staging.budget.total)

        try:
            return staging.patiently(attempt)
        finally:
            staging.forget(inputs)
            self._note()

    def _rewrite(self, task: CompactionTask, members: list[SourceSegment], grant: Grant, folder: Path) -> Written:
        folder.mkdir()
        interval = self._plan.policy.index_interval_bytes
        rewriting = RewritePass(self.survivors, self._rules, interval, self._limit, self._finished, self._gate)
        grant.take(len(FILE_KINDS) * BLOCK)  # no file fills its last block
        cleaned = rewriting.rewrite(
            [(source, self._verdicts[source.ordinal]) for source in members],
            folder,
            self._lanes,
            end_offset=task.end_offset,
            mapped=lambda source: self.mapped(source, grant),
            room=grant.take,
        )
        if self._gate is not None:
            report = self._gate.check(members, cleaned.paths, end_offset=task.end_offset, mapped=lambda source: self.mapped(source, grant))
            self._worker.stats.gate_coverage = report.coverage
        return Written(task, tuple(members), cleaned, folder, grant.handed_over())

    def delivered(self, written: Written) -> CompactionReceipt | CompactionFailure:
        """Uploads a group and frees its room. May run beside ``rewritten`` of another group."""
        try:
            return self._worker.staging.patiently(lambda: self._uploaded(written))
        finally:
            shutil.rmtree(written.folder, ignore_errors=True)
            written.grant.release()
            self._note()

    def _uploaded(self, written: Written) -> CompactionReceipt | CompactionFailure:
        task, cleaned = written.task, written.cleaned
        last = self._live[written.members[-1].ordinal]
        contents: dict[str, Path | bytes] = dict(cleaned.paths)
        for kind in ("snapshot", "leader-epoch-checkpoint"):
            if kind in last.files:
                contents[kind] = self._worker.staging.content(self._wanted(last, kind))
        output = open_source(0, cleaned.paths["log"], task.start_offset, task.end_offset + 1, task.mtime_ms, -1, self._limit)
        content = content_of(output.table)
        metadata = RemoteLogSegmentMetadata(
            id=task.new_segment_id,
            start_offset=task.start_offset,
            end_offset=task.end_offset,
            size_bytes=cleaned.size,
            max_timestamp_ms=content.max_timestamp_ms,
            mtime_ms=task.mtime_ms,
            leader_epochs=task.leader_epochs,
            files={kind: described(data) for kind, data in contents.items()},
            first_timestamp_ms=content.first_timestamp_ms,
            due_ms=due_ms(output, self._limit),
            open_txn_offset=last.open_txn_offset,
            records=content.records,
        )
        problem = upload(self._worker.data, self._partition, metadata, contents)
        if problem:
            return CompactionFailure(run_id=self._plan.run_id, group=task.group, kind="upload", message=problem)
        return CompactionReceipt(
            run_id=self._plan.run_id,
            group=task.group,
            segment=metadata,
            records_read=cleaned.records_read,
            records_kept=cleaned.records_kept,
            bytes_read=sum(self._live[source.ordinal].size_bytes for source in written.members),
            bytes_written=cleaned.size,
        )

    def _fetch_ahead(self, task: CompactionTask) -> None:
        for ordinal, metadata in enumerate(self._live):
            if metadata.id in task.sources:
                self._worker.staging.fetch_ahead(self._log(ordinal))
                return

    def _log(self, ordinal: int) -> Wanted:
        return self._wanted(self._live[ordinal], "log")

    def _wanted(self, metadata: RemoteLogSegmentMetadata, kind: str) -> Wanted:
        local = f"{self._partition}/{metadata.start_offset:020d}.log" if kind == "log" else ""
        return Wanted(metadata.key(self._partition, kind), metadata.files[kind], local)

    @contextmanager
    def mapped(self, source: SourceSegment, grant: Grant | None = None) -> Iterator[None]:
        """The source's bytes are there while the block runs."""
        with self._worker.staging.opened(self._log(source.ordinal), grant) as path:
            self._note()
            source.buf = map_file(path)
            try:
                yield
            finally:
                source.buf = _NOTHING

    def _txn_entries(self, metadata: RemoteLogSegmentMetadata) -> TxnEntries:
        if "txnindex" not in metadata.files:
            return np.empty(0, TXN_ENTRY)
        wanted = self._wanted(metadata, "txnindex")
        return parse_txn_index(self._worker.staging.content(wanted), wanted.key)

    def _note(self) -> None:
        self._worker.stats.bytes_fetched = self._worker.staging.bytes_fetched
        self._worker.stats.peak_disk_bytes = self._worker.staging.peak_bytes


def rules_of(plan: CompactionPlan) -> RoundRules:
    return RoundRules(
        now_ms=plan.now_ms,
        delete_retention_ms=plan.policy.delete_retention_ms,
        legacy_horizon_ms=plan.legacy_horizon_ms,
        high_watermark=plan.high_watermark,
        latest_offset=plan.next_dirty_offset - 1,
        producers=active_states(plan),
    )


def active_states(plan: CompactionPlan) -> ProducerStates:
    """The plan's live producers as the cleaner's rules take them."""
    entries = np.zeros(len(plan.producers), ENTRY)
    for row, producer in enumerate(sorted(plan.producers, key=lambda p: p.producer_id)):
        entries[row]["producer_id"] = producer.producer_id
        entries[row]["epoch"] = producer.epoch
        entries[row]["last_offset"] = producer.last_offset
    return ProducerStates(entries)


def described(content: Path | bytes) -> SegmentFile:
    """What is recorded of an object."""
    if isinstance(content, bytes):
        return SegmentFile(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    return SegmentFile(size=content.stat().st_size, sha256=digest(content))


def upload(data: ObjectStore, partition: str, metadata: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
    """Creates a segment's objects. An object that exists with equal digest is done; the answer names one that differs (I7)."""
    for kind, content in contents.items():
        key = segment_key(partition, metadata.start_offset, metadata.id, kind)
        file = metadata.files[kind]
        about = {"sha256": file.sha256, "mtime-ms": str(metadata.mtime_ms)}
        try:
            if isinstance(content, bytes):
                data.create(key, content, about)
            else:
                data.create_from_file(key, content, about)
        except AlreadyExists:
            if not _same(data, key, file):
                return f"{key} exists already with other content"
    return ""


def _same(data: ObjectStore, key: str, file: SegmentFile) -> bool:
    try:
        info = data.head(key)
    except NotFound:
        return False
    return info.size == file.size and info.metadata.get("sha256") == file.sha256
