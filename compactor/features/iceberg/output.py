"""Iceberg tables as an output: the last values of a topic's keys in plain data files, without any deletes.

    table read < control log read < files written < control log read again < snapshot committed < old snapshots expired

The rows of a partition are derived from the published view of its control log. Any number of processes may commit: a commit names the
snapshot that it follows, and a slower process starts again. A crash leaves files that no snapshot names, which are swept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from compactor.access.tier import Tier
from compactor.config.units import count_noun, format_size
from compactor.constants import MAX_OFFSET, NEVER_MS
from compactor.control.state import PartitionState
from compactor.errors import BadData, Unavailable
from compactor.features.iceberg.columns import DataFilesToWrite, DataFileWriter, DataFileWriteTask, LocalDataFileWriter
from compactor.features.iceberg.plan import (
    DataFileName,
    PartitionEntryInSnapshot,
    TableUpdatePlan,
    ViewSlice,
    plan_table_update,
    unfinished_round_end,
    view_slices,
    view_snapshot_entry,
)
from compactor.features.iceberg.table import TableChanged, TopicTable, open_table_loader, shared_table_error
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.outputs import OutputReport, PartitionOutputExtent
from compactor.read.outcomes import log_identity
from compactor.read.reading import LogChanged, OffsetRangeToRead
from compactor.storage.port import ObjectStore

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile


COMMIT_ATTEMPTS: Final = 5
"""Attempts per update. An attempt fails if the control log or the table has changed while it ran."""


@dataclass(frozen=True)
class IcebergOutput:
    """Output that keeps each topic's compacted view as an Iceberg table.

    next_sweep_ms: by table and partition number, when the youngest orphan may be deleted; NEVER_MS if none is left, absent if not swept
        yet.
    """

    writer: DataFileWriter = field(default_factory=LocalDataFileWriter)
    next_sweep_ms: dict[tuple[str, int], int] = field(default_factory=dict)

    def update_output(self, tier: Tier, partition: TopicPartition, disk: DiskBudget) -> OutputReport:
        """Update a partition's rows to its published view, and expire old snapshots. Raises BadData, OutOfBudget, StoreError."""
        settings = tier.settings.outputs.iceberg
        wanted = settings.iceberg_table_settings(partition.topic)
        if wanted is None or partition != tier.latest_incarnation(partition):  # by now, the name means another topic
            return OutputReport("empty", MAX_OFFSET)
        written: dict[ViewSlice, DataFile | None] = {}

        def require_unshared_table() -> None:
            topics = settings.find_shared_tables(name.topic for name in tier.list_partitions()).get(wanted.table, [])
            if partition.topic in topics:
                raise shared_table_error(wanted.table, topics)

        tier_id = tier.identity.read_catalog().tier_id
        with open_table_loader(
            wanted, tier_id, partition.topic, create_if_missing=True, before_creation=require_unshared_table
        ) as read_table:

            def read_existing_table() -> TopicTable:
                if (table := read_table()) is None:
                    raise Unavailable(f"table {wanted.table} was dropped meanwhile")
                return table

            for _ in range(COMMIT_ATTEMPTS):
                try:
                    attempt = _TableUpdateAttempt(tier, partition, read_existing_table(), self.writer, written)
                    report = attempt.try_commit()
                except (TableChanged, LogChanged):
                    continue
                if report is not None:
                    return self._expire_and_report(tier, partition.partition, read_existing_table, report)
        raise Unavailable(
            f"{partition}: control log or table changed {COMMIT_ATTEMPTS} times meanwhile", hint="The daemon tries again later"
        )

    def _expire_and_report(self, tier: Tier, partition: int, read_table: Callable[[], TopicTable], report: OutputReport) -> OutputReport:
        """The next update is due at the next expiry or sweep, or ``keep_ms`` from now, because other programs may change the table."""
        now, keep_ms = tier.ports.clock_ms(), tier.settings.outputs.iceberg.keep_ms
        table, deleted, next_ms = _expire_snapshots(read_table, keep_ms, now)
        key, orphan_age_ms = (table.name, partition), tier.retention.orphan_age_ms
        if report.status not in {"behind", "empty"} and (deleted or now >= self.next_sweep_ms.get(key, 0)):
            swept, youngest_ms = table.delete_orphan_files(partition, now - orphan_age_ms)
            deleted += swept
            self.next_sweep_ms[key] = NEVER_MS if youngest_ms is None else youngest_ms + orphan_age_ms + 1
        parts = [report.summary, f"deleted {count_noun(deleted, 'file')}" if deleted else "", table.reason_to_keep_files]
        content = replace(report.content, snapshots=table.snapshot_count) if report.content else None
        due_ms = min(now + keep_ms, NEVER_MS if next_ms is None else next_ms, self.next_sweep_ms.get(key, NEVER_MS))
        return replace(report, next_deletion_ms=due_ms, summary="; ".join(filter(None, parts)), content=content)


def _expire_snapshots(read_table: Callable[[], TopicTable], keep_ms: int, now_ms: int) -> tuple[TopicTable, int, int | None]:
    """Return the table, the number of deleted files, and when the next snapshot may expire. Raises Unavailable if other processes change
    the table each time.
    """
    for _ in range(COMMIT_ATTEMPTS):
        with suppress(TableChanged):
            return (table := read_table(), *table.expire_snapshots(keep_ms, now_ms))
    raise Unavailable("the table was changed each time that its snapshots were about to expire", hint="The daemon tries again later")


@dataclass(frozen=True)
class PartitionTableStatus:
    """State of one partition in its topic's table.

    status: current, behind (the next update shows more), waiting (a round must complete first), or missing (nothing was committed yet).
    cleaner_offset: end (exclusive) of the offsets that the table shows.
    tier_cleaner_offset: end (exclusive) of the tier's cleaned offsets.
    lag_offsets: negative after a round was undone.
    lag_ms: since the first publication of a round that the table does not show; 0 if there is none.
    remains: why superseded snapshots and orphans remain; empty if they are deleted in time.
    """

    topic: str
    partition: int
    table: str
    status: str
    snapshot_id: int | None
    snapshot_ms: int | None
    cleaner_offset: int
    tier_cleaner_offset: int
    lag_offsets: int
    lag_ms: int
    rows: int
    files: int
    bytes: int
    snapshots: int
    undecoded: int
    remains: str = ""


def read_table_status(tier: Tier, partition: TopicPartition) -> PartitionTableStatus | None:
    """Status of a partition with a table. Raises StoreError, UsageError, and BadData if another program has written into the table."""
    settings = tier.settings.outputs.iceberg.iceberg_table_settings(partition.topic)
    if settings is None:
        return None
    with open_table_loader(settings, tier.identity.read_catalog().tier_id, partition.topic, create_if_missing=False) as read_table:
        table = read_table()
        known = table.partition_entry(partition.partition) if table else None
        files = list(table.data_files_of_partition(partition.partition).values()) if table else []
        is_changed = table is not None and table.is_partition_changed(partition.partition)
    state, view, _ = _read_published_view(tier, partition)
    is_waiting = unfinished_round_end(state) >= 0
    shown = (
        not is_waiting
        and not is_changed
        and known is not None
        and known.describes_same_rows(view.model_copy(update={"empty": known.empty}))
    )
    since = [run.ended_ms for run in state.runs if run.published_slot > (known.slot if known else 0)]
    current = table.current_snapshot if table else None
    cleaner_offset = known.cleaner_offset if known else view.log_start
    return PartitionTableStatus(
        partition.topic, partition.partition, settings.table,
        "current" if shown else "waiting" if is_waiting else "behind" if known else "missing",
        current.snapshot_id if current else None, current.timestamp_ms if current else None,
        cleaner_offset, view.cleaner_offset, view.cleaner_offset - cleaner_offset,
        0 if shown or not since else max(0, tier.ports.clock_ms() - min(since)),
        sum(file.record_count for file in files), len(files), sum(file.file_size_in_bytes for file in files),
        table.snapshot_count if table else 0, table.count_undecoded_rows(files) if table else 0,
        table.reason_to_keep_files if table else "",
    )  # fmt: skip


@dataclass(frozen=True)
class IcebergDataFileHoldingRecordKey:
    """A data file that has a row with a key.

    key: None if another program wrote the file in a format that is not read here, so that it may have any key.
    snapshots: that name the file. is_current: the current one is among them.
    partition: -1 if another program wrote the file. kept_because: why the snapshots do not expire; empty if they do.
    """

    path: str
    partition: int
    key: bytes | None
    snapshots: tuple[int, ...]
    is_current: bool
    kept_because: str = ""


def find_files_holding_keys(tier: Tier, topic: str, keys: Collection[bytes]) -> list[IcebergDataFileHoldingRecordKey]:
    """In all snapshots. Raises StoreError, UsageError."""
    settings = tier.settings.outputs.iceberg.iceberg_table_settings(topic)
    if settings is None:
        return []
    with open_table_loader(settings, tier.identity.read_catalog().tier_id, topic, create_if_missing=False) as read_table:
        table = read_table()
        current = table.current_snapshot.snapshot_id if table and table.current_snapshot else 0
        return (
            [
                IcebergDataFileHoldingRecordKey(
                    path,
                    name.partition if (name := DataFileName.from_data_file_path(path)) else -1,
                    key,
                    snapshots,
                    current in snapshots,
                    table.reason_to_keep_files,
                )
                for path, key, snapshots in (table.find_files_with_keys(keys))
            ]
            if table
            else []
        )


def _read_published_view(tier: Tier, partition: TopicPartition) -> tuple[PartitionState, PartitionEntryInSnapshot, tuple[ViewSlice, ...]]:
    state = tier.open_partition_log(partition).refresh()
    log_start = tier.first_readable_offset(state)
    return state, view_snapshot_entry(state, log_start), view_slices(state, log_start)


@dataclass(frozen=True)
class _TableUpdateAttempt:
    tier: Tier
    partition: TopicPartition
    table: TopicTable
    writer: DataFileWriter
    written: dict[ViewSlice, DataFile | None]

    def try_commit(self) -> OutputReport | None:
        """Commit changed rows, if any. Return None, without a commit, if the view has changed while files were written.

        Raises TableChanged if another process has committed, LogChanged if the log was truncated meanwhile.
        """
        partition = self.partition.partition
        # In this order: the control log is then at least as new as the table, unless it is another one.
        known = self.table.partition_entry(partition)
        state, view, slices = _read_published_view(self.tier, self.partition)
        files, unfinished = self.table.data_files_of_partition(partition), unfinished_round_end(state)
        # Of an entry that has expired, the names of the files still tell the incarnation.
        incarnation = max((name.incarnation for name in map(DataFileName.from_data_file_path, files) if name), default=0)
        if incarnation > view.incarnation or (known is not None and known.snapshot_ordering_key > view.snapshot_ordering_key):
            shown = f"slot {known.slot} of incarnation {known.incarnation}" if known else f"incarnation {incarnation}"
            raise BadData(
                f"it shows {shown}, the control log has slot {view.slot} of {view.incarnation}",
                segment=f"table {self.table.name}, partition {partition}",
                hint="Was the control store restored? Drop the table to have it written anew",
            )
        is_changed = self.table.is_partition_changed(partition)
        undecoded = self.table.count_undecoded_rows(files.values())
        content = PartitionOutputExtent(known.cleaner_offset if known else view.log_start, len(files), 0, undecoded=undecoded)
        if unfinished >= 0:
            content = replace(content, waits_for=f"a round that cleans up to {unfinished}")
            return OutputReport("behind", state.slot, summary=f"table {self.table.name} waits for {content.waits_for}", content=content)
        # Before files are written: a later round may have superseded none of the rows, and no snapshot would name the files.
        if (
            known is not None
            and not is_changed
            and (
                known.snapshot_ordering_key == view.snapshot_ordering_key
                or known.describes_same_rows(view.model_copy(update={"empty": known.empty}))
            )
        ):
            if self.table.is_changed_by_others:  # the entries of all partitions would expire with the snapshot that holds them
                self.table.commit_snapshot({}, [], [])
            return OutputReport("up_to_date", state.slot, content=content)
        plan = plan_table_update(partition, view, slices, files, known)
        checked = self._write_changed_slices(state, plan, files)
        added = [file for each in plan.write if (file := self.written[each]) is not None]
        empty = tuple(str(each) for each in slices if each in plan.empty or (each in plan.write and self.written[each] is None))
        view = view.model_copy(update={"empty": empty, "checked": checked})
        if known is None and not state.vector and not files:
            return OutputReport("empty", state.slot)
        _, again, slices_again = _read_published_view(self.tier, self.partition)
        if slices_again != slices or not again.describes_same_rows(view.model_copy(update={"empty": ()})):
            return None
        self.table.commit_snapshot({partition: view}, added, [files[path] for path in plan.remove])
        rows, size = sum(file.record_count for file in added), sum(file.file_size_in_bytes for file in added)
        files_now = f"{count_noun(len(added), 'file')} with {count_noun(rows, 'row')} ({format_size(size)})"
        summary = f"table {self.table.name}: {files_now} in place of {count_noun(len(plan.remove), 'file')}"
        undecoded = self.table.count_undecoded_rows([*added, *(files[path] for path in plan.keep)])
        content = PartitionOutputExtent(view.cleaner_offset, len(plan.keep) + len(added), 0, undecoded=undecoded)
        return OutputReport("written" if state.has_segments else "removed", state.slot, summary=summary, content=content)

    def _write_changed_slices(self, state: PartitionState, plan: TableUpdatePlan, files: Mapping[str, DataFile]) -> float:
        """Files of earlier attempts are reused. No key may occur twice."""
        todo = [each for each in plan.write if each not in self.written]
        live, log = state.live_segments_by_id(), log_identity(self.tier, state)
        limit = self.tier.cleaner_settings_for_topic(self.partition.topic).max_decompressed_batch_bytes
        tasks = [
            DataFileWriteTask(
                DataFileName(self.partition.partition, state.incarnation, each),
                OffsetRangeToRead(self.partition, each.first, each.last, (live[each.segment_id],), log),
                limit,
            )
            for each in todo
        ]
        others = [files[path] for path in plan.keep]
        others += [file for each in plan.write if each not in todo and (file := self.written[each]) is not None]
        return self.writer.write_data_files(
            DataFilesToWrite(self.tier, self.partition, self.table, tasks, others, state.slot), self.written
        )


def open_output(tier: Tier, wrap_store: Callable[[ObjectStore], ObjectStore]) -> IcebergOutput:
    """Output of [outputs.iceberg]. Its files are not written through our stores."""
    return IcebergOutput()
