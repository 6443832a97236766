"""Undo of a round on a broker-managed tier: what the round replaced is copied under new ids, by a round of its own.

Brokers cannot restore a segment whose deletion has begun. So each segment that the round wrote is replaced by the concatenated bytes of its
sources: the same offsets and leader epochs, nothing cleaned, published by the same protocol. Groups are published in descending order,
because a value must come back after the tombstone that deletes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from typing_extensions import override

from checkpoint.offsets import first_dirty_offset_in
from compactor.cleaner.source import count_negative_timestamps, open_source_segment
from compactor.config.settings import CleanerSettings
from compactor.constants import CompactorEpoch, Offset, TimestampMs
from compactor.control.ordering import round_restoration_problem
from compactor.control.ports import EnvironmentPorts
from compactor.control.state import GroupAwaitingDeletion, PartitionState, RoundIntent
from compactor.errors import UsageError
from compactor.local.budget import DiskBudget, DiskSpaceReservation
from compactor.local.staging import rewrite_disk_bytes
from compactor.model.plan import MAX32, CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import verify_crcs_of_batches
from compactor.records.encode import BalanceDigestKey, encode_filler_batch, segment_digest_sum
from compactor.records.indexes import TXN_ENTRY, encode_indexes
from compactor.round.compaction import disk_budget_bytes
from compactor.round.mirroring import broker_log_start_offset
from compactor.round.pass_two import RewrittenSegment, upload_segment, versions_fingerprint
from compactor.round.ports import Job, Run, Session, Stats
from compactor.round.sources import StagedSegmentReader, open_reader_of_segments


@dataclass(frozen=True)
class GroupToRestore:
    """Live segment of the round to be undone, with its sources, ascending by offset."""

    made: RemoteLogSegmentMetadata
    sources: tuple[RemoteLogSegmentMetadata, ...]


def groups_to_restore(state: PartitionState, run_id: str) -> list[GroupToRestore]:
    """Ascending. Empty if the sources no longer wait for deletion."""
    group: GroupAwaitingDeletion | None = next((one for one in state.waiting if one.run_id == run_id and not one.undone), None)
    if group is None:
        return []
    ascending = sorted(group.segments, key=lambda segment: segment.start_offset)
    made = set(group.replaced_by.values())
    return [
        GroupToRestore(new, tuple(source for source in ascending if group.replaced_by[source.id] == new.id))
        for new in state.live
        if new.id in made
    ]


def problem_that_prevents_restoring(groups: Sequence[GroupToRestore]) -> str:
    for one in groups:
        if one.made.copied_end_offset >= 0:
            again = f"brokers have tiered again what follows offset {one.made.end_offset}"
            return f"segment {one.made.id} is read in part: {again}, and the segments that it replaced reach beyond that"
        if sum(source.size_bytes for source in one.sources) > MAX32:
            return f"what segment {one.made.id} replaced is too large for one segment"
    return ""


@dataclass(frozen=True)
class Restoration(Job[PartitionState]):
    """Job of a round that undoes an earlier run."""

    ports: EnvironmentPorts
    cleaner: CleanerSettings
    hash_key: bytes
    state_dir: Path
    run_id: str
    now_ms: int

    @override
    def resumption_problem(self, intent: RoundIntent) -> str:
        plan, own = intent.plan, versions_fingerprint()
        if plan.restores != self.run_id:
            return "another one was to be taken back"
        return "" if plan.fingerprint == own else f"it was planned by {plan.fingerprint}, this process is {own}"

    @override
    @contextmanager
    def gather(self, session: Session) -> Iterator[PartitionState | None]:
        """Raises UsageError if the run cannot be undone."""
        state = session.state
        problem = round_restoration_problem(state, self.run_id, state.last_compactor_epoch) or problem_that_prevents_restoring(
            groups_to_restore(state, self.run_id)
        )
        if problem:
            raise UsageError(f"run {self.run_id} of {state.topic_partition} cannot be undone: {problem}", hint="Nothing was changed")
        yield state

    @override
    def plan(self, facts: PartitionState, leader_epoch: CompactorEpoch, new_id: Callable[[], str]) -> CompactionPlan:
        """No limit on metadata records applies, because a person asked for the undo."""
        state, groups = facts, groups_to_restore(facts, self.run_id)
        return CompactionPlan(
            run_id=new_id(),
            topic=state.topic,
            partition=state.partition,
            incarnation=state.incarnation,
            leader_epoch=leader_epoch,
            now_ms=TimestampMs(self.now_ms),
            first_dirty_offset=Offset(state.first_dirty_offset),
            end_offset=Offset(groups[-1].made.end_offset + 1),
            next_dirty_offset=Offset(
                min(
                    first_dirty_offset_in(self._replaced_group(state).vector_before),
                    first_dirty_offset_in(state.vector),
                )
            ),
            high_watermark=state.end_offset + 1,
            legacy_horizon_ms=0,
            vector=state.vector,
            policy=self.cleaner.cleaner_policy(),
            map_engine="memory",
            fingerprint=versions_fingerprint(),
            producers=(),
            tasks=tuple(_task_that_restores_group(number, one, new_id()) for number, one in enumerate(groups)),
            restores=self.run_id,
            broker_log_start=Offset(broker_log_start_offset(self.ports, state.topic_partition)),
        )

    @override
    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, facts: PartitionState | None
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        groups = {one.made.id: one for one in groups_to_restore(session.state, self.run_id)}
        name = session.state.topic_partition
        sources = [source for one in groups.values() for source in one.sources]
        reading = open_reader_of_segments(self.ports, self.cleaner, self.state_dir, name, sources, self._create_disk_budget(), "undo")
        try:
            for task in tasks:
                session.check()
                yield self._restore_group(plan, task, groups[task.sources[0]], reading)
        finally:
            reading.staging.close()

    @override
    def stats(self, run: Run) -> Stats:
        return {**super().stats(run), "restores": self.run_id}

    def _replaced_group(self, state: PartitionState) -> GroupAwaitingDeletion:
        return next(group for group in state.waiting if group.run_id == self.run_id and not group.undone)

    def _create_disk_budget(self) -> DiskBudget:
        return DiskBudget(disk_budget_bytes(self.cleaner, self.state_dir))

    def _restore_group(
        self, plan: CompactionPlan, task: CompactionTask, group: GroupToRestore, reader: StagedSegmentReader
    ) -> CompactionReceipt | CompactionFailure:
        staging = reader.staging
        ordinals = [ordinal for ordinal, segment in enumerate(reader.live) if segment in group.sources]
        inputs = [reader.log_file_to_stage(ordinal) for ordinal in ordinals]
        need = rewrite_disk_bytes(group.sources, plan.policy.index_interval_bytes)
        log = staging.folder / f"group-{task.group}.log"
        with staging.reserved_disk_space(need, f"group {task.group} of {reader.partition}", inputs) as reservation:
            try:
                entries = _concatenate_batches(reader, ordinals, task, log, reservation)
                reservation.reserve_bytes_on_disk(self.ports.layout.upload_scratch_disk_bytes(log.stat().st_size))
                return self._upload_restored_segment(plan, task, group, log, entries, reader)
            finally:
                log.unlink(missing_ok=True)
                staging.delete_cached_copies(inputs)

    def _upload_restored_segment(
        self,
        plan: CompactionPlan,
        task: CompactionTask,
        group: GroupToRestore,
        log: Path,
        txn_index_entries: bytes,
        reader: StagedSegmentReader,
    ) -> CompactionReceipt | CompactionFailure:
        name, made, limit = reader.partition, group.made, reader.inflate_limit
        output = open_source_segment(0, log, task.start_offset, task.end_offset + 1, task.mtime_ms, -1, limit)
        table = output.table
        index, timeindex = encode_indexes(
            task.start_offset, table.size, table.last_offset, table.max_timestamp, plan.policy.index_interval_bytes
        )
        contents: dict[str, Path | bytes] = {"log": log, "index": index, "timeindex": timeindex}
        if txn_index_entries:
            contents["txnindex"] = txn_index_entries
        for kind in ("snapshot", "leader-epoch-checkpoint"):  # both describe the segment's end, which does not change
            if kind in made.files:
                contents[kind] = reader.read_small_file(made, kind)
        metadata, problem = upload_segment(
            (self.ports.layout, self.ports.publisher),
            name,
            task,
            RewrittenSegment.from_local_files(
                output, contents, limit, should_record_batch_digests=self.ports.layout.should_record_batch_digests
            ),
            open_txn_offset=made.open_txn_offset,
            sum_of_batches=segment_digest_sum(output.buf, BalanceDigestKey(self.hash_key)),
            negative_timestamp_count=count_negative_timestamps(output, limit),
            broker_log_start=plan.broker_log_start,
            scratch=log.parent,
        )
        if problem:
            return CompactionFailure(run_id=plan.run_id, group=task.group, kind="upload", message=problem)
        return CompactionReceipt(
            run_id=plan.run_id,
            group=task.group,
            segment=metadata,
            records_read=metadata.records,
            records_kept=metadata.records,
            bytes_read=sum(source.size_bytes for source in group.sources),
            bytes_written=output.size,
        )


def _concatenate_batches(
    reader: StagedSegmentReader, ordinals: Sequence[int], task: CompactionTask, out_log: Path, reservation: DiskSpaceReservation
) -> bytes:
    """Write up to the group's end. Return the transaction index."""
    aborted = [np.empty(0, TXN_ENTRY)]
    last = -1
    with out_log.open("xb") as file:
        for ordinal in ordinals:
            with reader.open_segment(ordinal, reservation) as source:
                verify_crcs_of_batches(source.buf, source.table, 0, len(source.table), source.name)
                reservation.reserve_bytes_on_disk(len(source.buf))
                file.write(source.buf.data)
                aborted.append(source.txn_entries)
                last = int(source.table.last_offset[-1]) if len(source.table) else last
        if last < task.end_offset:
            file.write(encode_filler_batch(task.end_offset, task.end_offset, task.leader_epochs[-1].epoch))
    return np.concatenate(aborted).astype(TXN_ENTRY).tobytes()  # concatenate changes the byte order


def _task_that_restores_group(group_number: int, group: GroupToRestore, new_segment_id: str) -> CompactionTask:
    made = group.made
    return CompactionTask(
        group=group_number,
        sources=(made.id,),
        new_segment_id=new_segment_id,
        start_offset=made.start_offset,
        end_offset=made.end_offset,
        leader_epochs=made.leader_epochs,
        mtime_ms=group.sources[-1].mtime_ms,
    )
