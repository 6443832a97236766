"""Pass 2 and the upload of a plan's groups on this machine. Neither writes metadata."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from bloom.sizing import FilterDesign
from checkpoint.files import format_leader_epoch_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, truncate_lineage_at
from compactor import __version__
from compactor.cleaner.gate.batch_checks import GateFailed
from compactor.cleaner.gate.gate import Gate, NewSegmentBalanceBuilder
from compactor.cleaner.keys import SurvivorLookup
from compactor.cleaner.retention import CleanedChunkCache, RetentionRules, TransactionVerdicts
from compactor.cleaner.rewrite import CleanedSegment, GroupRewriter, SidecarBuilder, add_segment
from compactor.cleaner.source import (
    SecondReader,
    SourceSegment,
    count_negative_timestamps,
    earliest_delete_horizon_ms,
    open_source_segment,
    read_earliest_horizon_ms,
    summarize_timestamps,
)
from compactor.cleaner.worker_threads import WorkerThreads
from compactor.constants import TimestampMs
from compactor.errors import CannotCopy, CopyDiffers, OutOfBudget
from compactor.local.budget import BLOCK, DiskReservationExceeded, DiskSpaceReservation
from compactor.local.staging import FileToStage, StagingFolder, rewrite_disk_bytes
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import FILE_KINDS, Balance, CountAndDigestSum, RemoteLogSegmentMetadata, SegmentFile
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records import codecs
from compactor.records.batches import BatchTable, copy_batch_headers, sha256_of_batch_headers
from compactor.records.encode import BalanceDigestKey
from compactor.records.indexes import encode_indexes
from compactor.records.producers import ENTRY, ProducerStates, format_producer_snapshot, parse_producer_snapshot_file
from compactor.round.partial import (
    ComposedSegment,
    SegmentPartToRead,
    WholeSegmentReadNeededError,
    balance_with_copies,
    composed_sidecar,
    describe_composed_segment,
    is_key_directory_worthwhile,
    log_pieces,
)
from compactor.round.pass_one import CleanSegmentSelectionInputs, SurvivorScanResult, SurvivorScanSettings, scan_for_survivors
from compactor.round.ports import BloomFilterUsageStatistics, Costs, Session, filter_stats
from compactor.round.roles import RoundRange
from compactor.round.sources import StagedSegmentReader
from compactor.storage.port import ComposeSource
from compactor.tier.contents import file_sha256
from compactor.tier.ports import SegmentLayout, SegmentPublisher
from compactor.tier.sidecars import SidecarStore


@dataclass(frozen=True)
class RewrittenSegment:
    """New segment that is ready for upload.

    contents: by kind of object; the log is missing if the store composes it.
    due_ms: earliest delete horizon in the segment.
    pieces: from which the store composes the log; empty if the log is uploaded.
    """

    table: BatchTable
    log: SegmentFile
    contents: Mapping[str, Path | bytes]
    due_ms: int
    pieces: Sequence[ComposeSource] = ()

    @staticmethod
    def from_local_files(
        output: SourceSegment, contents_by_kind: Mapping[str, Path | bytes], max_inflated_bytes: int, *, should_record_batch_digests: bool
    ) -> RewrittenSegment:
        """:param output: the segment's log, opened."""
        log = describe_log(output) if should_record_batch_digests else describe_file(contents_by_kind["log"])
        return RewrittenSegment(output.table, log, contents_by_kind, read_earliest_horizon_ms(output, max_inflated_bytes))

    @staticmethod
    def from_composed_pieces(
        composed: ComposedSegment, sources: Sequence[ComposeSource], contents_by_kind: Mapping[str, Path | bytes]
    ) -> RewrittenSegment:
        size, due = int(composed.table.size.sum()), earliest_delete_horizon_ms(composed.table, composed.due)
        log = SegmentFile(size=size, batches=sha256_of_batch_headers(composed.directory.headers))
        return RewrittenSegment(composed.table, log, contents_by_kind, due, sources)


def upload_segment(
    destination: tuple[SegmentLayout, SegmentPublisher],
    partition: TopicPartition,
    task: CompactionTask,
    segment: RewrittenSegment,
    *,
    open_txn_offset: int,
    sum_of_batches: CountAndDigestSum,
    negative_timestamp_count: int,
    broker_log_start: int,
    scratch: Path,
) -> tuple[RemoteLogSegmentMetadata, str]:
    """Inform the publisher, then upload. Return the metadata, and why the layout refused the upload; empty: it did not.

    :param open_txn_offset: first offset of the earliest transaction that is open at the segment's end; -1 if there is none.
    :param negative_timestamp_count: records with one that is not -1.
    :param broker_log_start: of the plan. Records below it do not count for the largest timestamp.
    :param scratch: folder of the segment's files.
    :raises CannotCopy: if the store cannot compose the log from pieces.
    """
    layout, publisher = destination
    about = summarize_timestamps(segment.table, broker_log_start)
    metadata = RemoteLogSegmentMetadata(
        id=task.new_segment_id,
        start_offset=task.start_offset,
        end_offset=task.end_offset,
        size_bytes=segment.log.size,
        max_timestamp_ms=TimestampMs(about.max_timestamp_ms),
        mtime_ms=task.mtime_ms,
        leader_epochs=task.leader_epochs,
        files={"log": segment.log} | {kind: describe_file(data) for kind, data in segment.contents.items() if kind != "log"},
        first_timestamp_ms=about.first_timestamp_ms,
        due_ms=segment.due_ms,
        open_txn_offset=open_txn_offset,
        records=about.records,
        content=sum_of_batches,
        negative_timestamps=negative_timestamp_count,
    )
    reported = layout.custom_metadata(partition, metadata, segment.contents)
    metadata = metadata.model_copy(update={"custom_metadata": reported}) if reported else metadata
    publisher.announce_segment(partition, metadata)
    if segment.pieces:
        return metadata, layout.compose_segment(partition, metadata, segment.pieces, segment.contents)
    return metadata, layout.upload_segment(partition, metadata, segment.contents, scratch)


def describe_file(content: Path | bytes) -> SegmentFile:
    if isinstance(content, bytes):
        return SegmentFile(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    return SegmentFile(size=content.stat().st_size, sha256=file_sha256(content))


def describe_log(source: SourceSegment) -> SegmentFile:
    """Omit the digest of batch headers if batches of v0 or v1 are among them. The CRCs are known to be valid."""
    sha256 = hashlib.sha256(source.buf.data).hexdigest()
    batches = sha256_of_batch_headers(copy_batch_headers(source.buf, source.table.position)) if (source.table.magic == 2).all() else ""
    return SegmentFile(size=source.size, sha256=sha256, batches=batches)


_log = logging.getLogger(__name__)


def versions_fingerprint() -> str:
    """Return the versions that decide the bytes which a plan produces (determinism, I7)."""
    return f"tiered-compactor={__version__} {codecs.codec_library_versions()}"


@dataclass(frozen=True)
class LocalWorker:
    """Executor of tasks in threads of this process.

    publisher: informed about each new segment before its first object is created.
    engine: auto, memory or partitioned; used if pass 1 must be repeated.
    sidecars: None to use and write none.
    filter_for: records, bytes -> filter of a new segment.
    splices: whether segments may be read in part, and new ones get key directories.
    known: small files that were already read, by segment id and kind.
    """

    layout: SegmentLayout
    publisher: SegmentPublisher
    staging: StagingFolder
    hash_key: bytes
    map_budget_bytes: int
    engine: str = "auto"
    verify_before_publish: bool = True
    sidecars: SidecarStore | None = None
    filter_for: Callable[[int, int], FilterDesign | None] = lambda records, size: None
    splices: bool = False
    known: Mapping[tuple[str, str], bytes] = field(default_factory=dict)

    def work(
        self,
        plan: CompactionPlan,
        tasks: Sequence[CompactionTask],
        session: Session,
        threads: WorkerThreads,
        found: SurvivorScanResult | None = None,
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        """See ``Job.work``.

        :param found: result of pass 1 for the plan that was just announced; None if pass 1 must be repeated.
        """
        if plan.fingerprint != versions_fingerprint():
            message = f"the plan is for {plan.fingerprint}, this process is {versions_fingerprint()}"
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=message)
            return
        left = {task.group: task for task in tasks}
        try:
            try:
                for outcome in self._attempt_tasks(plan, tasks, session, threads, found, may_read_in_part=self.splices):
                    del left[outcome.group]
                    yield outcome
            except WholeSegmentReadNeededError as why:
                _log.warning("%s is read whole: %s", plan.topic_partition, why)
            if left:
                if found is not None:
                    found.free_key_memory()
                yield from self._attempt_tasks(plan, list(left.values()), session, threads, None, may_read_in_part=False)
            if found is not None:
                filters = filter_stats(found.clean, plan, session.state, session.run.superseded)
                session.run.filters = {**filters, "passes": found.passes}
        except GateFailed as refused:
            yield CompactionFailure(run_id=plan.run_id, group=-1, kind="gate", message=refused.message)

    def _attempt_tasks(
        self,
        plan: CompactionPlan,
        tasks: Sequence[CompactionTask],
        session: Session,
        threads: WorkerThreads,
        found: SurvivorScanResult | None,
        *,
        may_read_in_part: bool,
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        name, limit, run = plan.topic_partition, plan.policy.max_decompressed_batch_bytes, session.run
        reading = StagedSegmentReader(self.staging, name, session.state.live, limit, self.known)
        if found is None:
            found = self._repeat_survivor_scan(plan, tasks, session, reading, threads, may_read_in_part=may_read_in_part)
        else:
            reading.ranges.update(found.opened_sources.reading.ranges)
        run.costs.peak_map_bytes = found.survivors.peak_bytes
        run.costs.map_entries = found.survivors.key_count
        run.keyless = found.survivors.count_keyless_records()
        execution = PlanExecution(self, plan, reading, threads, found, run.costs)
        uploads: deque[tuple[RewrittenGroup, Future[CompactionReceipt | CompactionFailure]]] = deque()
        with ThreadPoolExecutor(1, "upload") as uploader:
            try:
                for number, task in enumerate(tasks):
                    session.check()
                    written = execution.rewrite_group(task, tasks[number + 1 : number + 2])
                    # It is uploaded while the next group is rewritten.
                    uploads.append((written, uploader.submit(execution.upload_group, written)))
                    while uploads and (uploads[0][1].done() or len(uploads) > 1):
                        yield uploads.popleft()[1].result()
                while uploads:
                    yield uploads.popleft()[1].result()
            finally:
                for written, upload in uploads:
                    if upload.cancel():
                        execution.discard_group(written)
                run.superseded |= {reading.live[ordinal].id for ordinal in found.survivors.segments_superseded}

    def _repeat_survivor_scan(
        self,
        plan: CompactionPlan,
        tasks: Sequence[CompactionTask],
        session: Session,
        reader: StagedSegmentReader,
        workers: WorkerThreads,
        *,
        may_read_in_part: bool,
    ) -> SurvivorScanResult:
        """Only the clean segments of the plan's tasks are read."""
        wanted = {name for task in tasks for name in task.sources}
        clean = frozenset(s.id for s in reader.live if s.id in wanted and s.end_offset < plan.first_dirty_offset)
        settings = SurvivorScanSettings(
            self.engine,
            self.map_budget_bytes,
            self.hash_key,
            workers,
            self.verify_before_publish,
            session.check_while_reading,
            refuses_keyless=plan.policy.keyless_records == "refuse",
        )
        extent = RoundRange(plan.first_dirty_offset, plan.end_offset, retention_rules_of_plan(plan, BalanceDigestKey(self.hash_key)))
        parts = frozenset(task.sources[0] for task in tasks if task.in_part) if may_read_in_part else frozenset()
        # If every segment is a source, all are read and no sidecar is needed as a stand-in.
        sidecars = self.sidecars if parts or any(s.id not in wanted for s in reader.live) else None
        return scan_for_survivors(
            reader, extent, settings, CleanSegmentSelectionInputs(sidecars, BloomFilterUsageStatistics(), clean, parts)
        )


@dataclass(frozen=True)
class RewrittenGroup:
    """New segment of a group on local disk.

    members: positions of the group's sources in the partition.
    cleaned: of a partial rewrite, only the rewritten batches.
    balance: sums that account for all records of the sources, also with a partial rewrite.
    part: None if the source was read completely.
    """

    task: CompactionTask
    members: tuple[int, ...]
    cleaned: CleanedSegment
    folder: Path
    reservation: DiskSpaceReservation
    balance: Balance
    part: SegmentPartToRead | None = None

    @property
    def unread_record_count(self) -> int:
        return int(self.part.whole.table.count.sum() - self.part.source.table.count.sum()) if self.part else 0


class SurvivorScanResultsForRewrite(Protocol):
    """Results of pass 1.

    gate: None if the check is switched off.
    second_reader: receives the records that pass 2 decompresses.
    sources: by position; if opened, with batch headers.
    """

    @property
    def survivors(self) -> SurvivorLookup: ...

    @property
    def cleaned_chunk_cache(self) -> CleanedChunkCache: ...

    @property
    def gate(self) -> Gate | None: ...

    @property
    def second_reader(self) -> SecondReader | None: ...

    @property
    def sources(self) -> Sequence[SourceSegment]: ...

    def open_segment(
        self, ordinal: int, reservation: DiskSpaceReservation | None
    ) -> AbstractContextManager[tuple[SourceSegment, TransactionVerdicts]]:
        """Yield only a part if ``part_of_segment`` returns one. Raises BadData, StoreError, OutOfBudget, and WholeSegmentReadNeededError if
        the part proves not to be enough.
        """

    def part_of_segment(self, ordinal: int) -> SegmentPartToRead | None: ...


class PlanExecution:
    def __init__(
        self,
        worker: LocalWorker,
        plan: CompactionPlan,
        reader: StagedSegmentReader,
        workers: WorkerThreads,
        scan_answers: SurvivorScanResultsForRewrite,
        costs: Costs,
    ) -> None:
        self._worker = worker
        self._costs = costs
        self._plan = plan
        self._live = reader.live
        self._threads = workers
        self._answers = scan_answers
        self._partition = reader.partition
        self._limit = reader.inflate_limit
        self._forward_read = reader
        self._key = BalanceDigestKey(worker.hash_key)
        self._rules = retention_rules_of_plan(plan, self._key)

    def rewrite_and_upload(self, task: CompactionTask) -> CompactionReceipt | CompactionFailure:
        return self.upload_group(self.rewrite_group(task))

    def rewrite_group(self, task: CompactionTask, tasks_to_prefetch: Sequence[CompactionTask] = ()) -> RewrittenGroup:
        """One disk reservation covers everything that the group has on disk at the same time.

        :raises OutOfBudget: if the group does not fit even alone.
        :raises WholeSegmentReadNeededError: if a segment must be read completely after all.
        """
        members = tuple(ordinal for ordinal, metadata in enumerate(self._live) if metadata.id in task.sources)
        inputs, staging = [self._forward_read.log_file_to_stage(ordinal) for ordinal in members], self._worker.staging
        wait, everything = staging.disk_full_wait(), False
        try:
            while True:
                need = staging.budget.total if everything else self._needed_disk_bytes(task, members, inputs)
                try:
                    return self._rewrite_within(need, task, members, inputs, tasks_to_prefetch)
                except DiskReservationExceeded:
                    if everything:
                        raise
                    everything = True
                except (OSError, OutOfBudget) as error:
                    wait.before_retry(error)
        finally:
            staging.delete_cached_copies(inputs)
            self._update_round_costs()

    def _needed_disk_bytes(self, task: CompactionTask, source_ordinals: Sequence[int], inputs: Sequence[FileToStage]) -> int:
        staging, part = self._worker.staging, self._part_of_group(source_ordinals)
        sources = [self._live[ordinal] for ordinal in source_ordinals]
        most = int(part.source.table.size.sum()) if part else task.most_bytes
        interval = self._plan.policy.index_interval_bytes
        need = rewrite_disk_bytes(sources, interval, staging.files_without_local_copy(inputs), max_output_bytes=most)
        return min(need, staging.budget.total)

    def _rewrite_within(
        self,
        reserved_bytes: int,
        task: CompactionTask,
        source_ordinals: tuple[int, ...],
        inputs: Sequence[FileToStage],
        tasks_to_prefetch: Sequence[CompactionTask],
    ) -> RewrittenGroup:
        staging, interval = self._worker.staging, self._plan.policy.index_interval_bytes
        folder = staging.folder / f"group-{task.group}"
        with staging.reserved_disk_space(reserved_bytes, f"group {task.group} of {self._partition}", inputs) as reservation:
            for coming in tasks_to_prefetch:
                self._prefetch_sources_of_task(coming)
            try:
                folder.mkdir()
                answers = self._answers
                rewriting = GroupRewriter(
                    answers.survivors, self._rules, interval, self._limit, answers.cleaned_chunk_cache, answers.second_reader
                )
                reservation.reserve_bytes_on_disk(len(FILE_KINDS) * BLOCK)  # the last block of each file is partly unused
                part = self._part_of_group(source_ordinals)
                cleaned = rewriting.rewrite_group(
                    task.start_offset,
                    [partial(answers.open_segment, ordinal, reservation) for ordinal in source_ordinals],
                    folder,
                    self._threads,
                    end_offset=task.end_offset,
                    filler_epoch=task.leader_epochs[-1].epoch if task.leader_epochs else -1,
                    disk_reservation=reservation,
                )
                tally = NewSegmentBalanceBuilder(cleaned, self._key, self._limit)
                if answers.gate is not None:
                    sources = [part.source] if part else [answers.sources[ordinal] for ordinal in source_ordinals]
                    mapped = partial(self._forward_read.memory_map_segment, reservation=reservation)
                    report = answers.gate.check_cleaned_group(
                        sources, cleaned.paths, end_offset=task.end_offset, map_bytes=mapped, new_segment_balance=tally
                    )
                    self._costs.gate_keys = report.keys
                    self._costs.gate_coverage = report.coverage
                balance = tally.compute_balance()
                if part:
                    balance = balance_with_copies(part, balance, self._live[part.source.ordinal].content, self._key)
                reservation.reserve_bytes_on_disk(self._worker.layout.upload_scratch_disk_bytes(cleaned.size))
                return RewrittenGroup(task, source_ordinals, cleaned, folder, reservation.split_off_used(), balance, part)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

    def _part_of_group(self, source_ordinals: Sequence[int]) -> SegmentPartToRead | None:
        return self._answers.part_of_segment(source_ordinals[0]) if len(source_ordinals) == 1 else None

    def upload_group(self, group: RewrittenGroup) -> CompactionReceipt | CompactionFailure:
        """May run while another group is rewritten. Raises StoreError, WholeSegmentReadNeededError."""
        try:
            return self._worker.staging.retry_while_disk_full(lambda: self._upload_group_with_sidecar(group))
        finally:
            self.discard_group(group)

    def discard_group(self, group: RewrittenGroup) -> None:
        """Delete files, and give disk space back."""
        shutil.rmtree(group.folder, ignore_errors=True)
        group.reservation.release_all()
        self._update_round_costs()

    @measure_stage(SegmentWorkStage.UPLOAD, lambda self, group: group.cleaned.size)
    def _upload_group_with_sidecar(self, group: RewrittenGroup) -> CompactionReceipt | CompactionFailure:
        task, cleaned = group.task, group.cleaned
        last, layout = self._live[group.members[-1]], self._worker.layout
        output = open_source_segment(0, cleaned.paths["log"], task.start_offset, task.end_offset + 1, task.mtime_ms, -1, self._limit)
        negative = any(self._live[ordinal].negative_timestamps for ordinal in group.members)
        joined = None
        if group.part is None:
            contents: dict[str, Path | bytes] = {**cleaned.paths, **self._end_state_files(group)}
            made = RewrittenSegment.from_local_files(
                output, contents, self._limit, should_record_batch_digests=layout.should_record_batch_digests
            )
        else:
            joined = describe_composed_segment(group.part, task.new_segment_id, output, self._worker.hash_key, self._limit)
            made = self._compose_segment(group, group.part, output, joined)
        try:
            metadata, problem = upload_segment(
                (layout, self._worker.publisher),
                self._partition,
                task,
                made,
                open_txn_offset=last.open_txn_offset if not last.has_unread_tail else -1,
                sum_of_batches=group.balance.result,
                negative_timestamp_count=count_negative_timestamps(output, self._limit) if negative else 0,
                broker_log_start=self._plan.broker_log_start,
                scratch=group.folder,
            )
        except (CannotCopy, CopyDiffers) as refused:
            raise WholeSegmentReadNeededError(refused.message) from None
        if problem:
            return CompactionFailure(run_id=self._plan.run_id, group=task.group, kind="upload", message=problem)
        if joined is None:
            self._store_sidecar(metadata, output)
        else:
            self._store_composed_sidecar(metadata, last, joined)
        if group.part:
            self._costs.bytes_copied += group.part.splice.bytes_copied
        return CompactionReceipt(
            run_id=self._plan.run_id,
            group=task.group,
            segment=metadata,
            records_read=cleaned.records_read + group.unread_record_count,
            records_kept=cleaned.records_kept + group.unread_record_count,
            bytes_read=sum(self._live[ordinal].size_bytes for ordinal in group.members),
            bytes_written=made.log.size,
            balance=group.balance,
        )

    def _compose_segment(
        self, group: RewrittenGroup, segment_part: SegmentPartToRead, output: SourceSegment, composed: ComposedSegment
    ) -> RewrittenSegment:
        task, table, source = group.task, composed.table, self._live[group.members[0]]
        index, timeindex = encode_indexes(
            task.start_offset, table.size, table.last_offset, table.max_timestamp, self._plan.policy.index_interval_bytes
        )
        object_key_of_log = self._worker.layout.object_name(self._partition, source, "log")
        return RewrittenSegment.from_composed_pieces(
            composed,
            log_pieces(segment_part.splice, object_key_of_log, group.cleaned.paths["log"], output.table),
            {"index": index, "timeindex": timeindex, **self._end_state_files(group)},
        )

    def _end_state_files(self, group: RewrittenGroup) -> dict[str, bytes]:
        """Return, by kind, the files of the group's last source, cut at the offset up to which readers read that source. A file that the
        source lacks is left out.
        """
        ordinal = group.members[-1]
        last, end = self._live[ordinal], group.task.end_offset
        found: dict[str, bytes] = {}
        if "snapshot" in last.files:
            found["snapshot"] = self._forward_read.read_small_file(last, "snapshot")
        if "leader-epoch-checkpoint" in last.files:
            found["leader-epoch-checkpoint"] = self._read_leader_epoch_checkpoint(ordinal)
        if last.has_unread_tail and "snapshot" in found:
            copied = parse_producer_snapshot_file(found["snapshot"], self._forward_read.object_key(last, "snapshot"))
            before = self._live[ordinal - 1] if ordinal else None
            known = ProducerStates.empty_producer_states()
            if before is not None and "snapshot" in before.files:
                known = parse_producer_snapshot_file(
                    self._forward_read.read_small_file(before, "snapshot"), self._forward_read.object_key(before, "snapshot")
                )
            states = copied.states_at(end, known.states_at(last.start_offset - 1).replay_batches(self._answers.sources[ordinal].table))
            found["snapshot"] = format_producer_snapshot(states)
        if last.has_unread_tail and "leader-epoch-checkpoint" in found:
            where = self._forward_read.object_key(last, "leader-epoch-checkpoint")
            lineage = parse_leader_epoch_checkpoint(found["leader-epoch-checkpoint"].decode(), where)
            found["leader-epoch-checkpoint"] = format_leader_epoch_checkpoint(truncate_lineage_at(lineage, end + 1)).encode()
        return found

    def _read_leader_epoch_checkpoint(self, ordinal: int) -> bytes:
        """The checkpoint is not fetched if its recorded digest equals that of the one computed from the segments' epochs."""
        segment, kind = self._live[ordinal], "leader-epoch-checkpoint"
        known: dict[int, EpochEntry] = {}
        for entry in (entry for before in self._live[: ordinal + 1] for entry in before.leader_epochs):
            known.setdefault(entry.epoch, entry)
        made = format_leader_epoch_checkpoint(list(known.values())).encode()
        return made if describe_file(made).has_same_content_as(segment.files[kind]) else self._forward_read.read_small_file(segment, kind)

    def _store_sidecar(self, metadata: RemoteLogSegmentMetadata, output: SourceSegment) -> None:
        worker = self._worker
        if worker.sidecars is None:
            return
        design = worker.filter_for(metadata.records, metadata.size_bytes)
        directory = worker.splices and is_key_directory_worthwhile(metadata, len(output.table), worker.layout.log_file_copy_limits)
        builder = SidecarBuilder(output, design, worker.hash_key, counts_distinct_keys=design is not None, collects_key_directory=directory)
        with WorkerThreads(1) as workers:
            add_segment(builder, output, self._limit, workers)
        self._costs.sidecar_bytes += worker.sidecars.add_sidecar(builder.build_sidecar(metadata.id))
        if directory:
            self._costs.sidecar_bytes += worker.sidecars.add_key_directory(builder.build_key_directory(metadata.id))

    def _store_composed_sidecar(
        self, metadata: RemoteLogSegmentMetadata, source: RemoteLogSegmentMetadata, composed: ComposedSegment
    ) -> None:
        """Store none if the source has none."""
        worker = self._worker
        old = worker.sidecars.load_sidecar(source.id) if worker.sidecars else None
        if worker.sidecars is None or old is None:
            return
        sidecar = composed_sidecar(old, metadata.id, composed.due, composed.table)
        self._costs.sidecar_bytes += worker.sidecars.add_sidecar(sidecar) + worker.sidecars.add_key_directory(composed.directory)

    def _prefetch_sources_of_task(self, task: CompactionTask) -> None:
        for ordinal, metadata in enumerate(self._live):
            if metadata.id in task.sources:
                self._worker.staging.prefetch_file(self._forward_read.log_file_to_stage(ordinal))
                return

    def _update_round_costs(self) -> None:
        self._costs.bytes_fetched = self._worker.staging.bytes_fetched
        self._costs.peak_disk_bytes = self._worker.staging.peak_bytes


def retention_rules_of_plan(plan: CompactionPlan, balance_key: BalanceDigestKey | None = None) -> RetentionRules:
    """:param balance_key: None to compute no record sums for the balance."""
    return RetentionRules(
        now_ms=plan.now_ms,
        delete_retention_ms=plan.policy.delete_retention_ms,
        legacy_horizon_ms=plan.legacy_horizon_ms,
        high_watermark=plan.high_watermark,
        latest_offset=plan.next_dirty_offset - 1,
        producers=producer_states_of_plan(plan),
        balance_key=balance_key,
        drops_keyless=plan.policy.keyless_records == "drop",
    )


def producer_states_of_plan(plan: CompactionPlan) -> ProducerStates:
    entries = np.zeros(len(plan.producers), ENTRY)
    for row, producer in enumerate(sorted(plan.producers, key=lambda p: p.producer_id)):
        entries[row]["producer_id"] = producer.producer_id
        entries[row]["epoch"] = producer.epoch
        entries[row]["last_offset"] = producer.last_offset
    return ProducerStates(entries)
