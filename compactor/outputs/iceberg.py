"""Iceberg tables as an output: the last values of a topic's keys in plain data files, without any deletes.

    table read < control log read < files written < control log read again < snapshot committed < old snapshots expired

The rows of a partition are derived from the published view of its control log, so that whatever a fenced compactor wrote is not among them.
Any number of processes may do that: a commit names the snapshot that it follows, and a process that finds that another one was faster
starts again from both. A crash leaves files that no snapshot names, which are swept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from bloom.siphash import hash_keys, siphash_key_halves
from compactor.access.tier import Tier
from compactor.cleaner.keys.key_set import KeySet
from compactor.constants import MAX_OFFSET, NEVER_MS
from compactor.consumer.columns import arrow_batch
from compactor.consumer.gather import SelectedRecords
from compactor.consumer.history import log_identity
from compactor.consumer.last_values import PREFETCHED_PIECES
from compactor.consumer.reading import LastRecordsRequest, LogChanged, RangeReader, ReadOptions, ReadRange, hash_keys_of_rows
from compactor.control.state import PartitionState
from compactor.errors import BadData, Unavailable
from compactor.local.budget import Budget
from compactor.model.ids import TopicPartition
from compactor.outputs.iceberg_plan import (
    DataFileName,
    PartitionEntry,
    Slice,
    TablePlan,
    end_of_unfinished_round,
    plan_table,
    view_entry,
    view_slices,
)
from compactor.outputs.iceberg_table import TableChanged, TopicTable, open_table
from compactor.outputs.port import OutputContent, OutputReport

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile

COMMIT_ATTEMPTS: Final = 5
"""Attempts per update. An attempt fails if the control log or the table has changed while it ran."""

BYTES_PER_KEY: Final = 20
"""Memory of one key in a ``KeySet``, at most."""

_COLUMNS: Final = pa.schema(
    [
        ("key", pa.binary()), ("value", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")), ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))), ("leaderEpoch", pa.int32()),
    ]
)  # fmt: skip
"""The columns of a table as ``arrow_batch`` makes them, in the table's order."""

_NAMES: Final = ("key", "value", "partition", "offset", "timestamp", "timestamp_type", "headers", "leader_epoch")


@dataclass(frozen=True)
class IcebergOutput:
    """Iceberg tables of topics as an output (compactor.outputs.port). swept: tables whose orphans this process has swept."""

    swept: set[str] = field(default_factory=set)

    def update_output(self, opened: Tier, name: TopicPartition, disk: Budget) -> OutputReport:
        """Bring a partition's rows up to its published view, and expire old snapshots. Raises as ``OutputWriter.update_output``."""
        settings = opened.settings.outputs.iceberg
        wanted = settings.table_for(name.topic)
        if wanted is None or name != opened.current(name):  # by now, the name means another topic
            return OutputReport("empty", MAX_OFFSET)
        written: dict[Slice, DataFile | None] = {}
        with open_table(wanted, opened.identity.read().tier_id, name.topic, create=True) as read_table:
            for _ in range(COMMIT_ATTEMPTS):
                table = read_table()
                if table is None:
                    raise Unavailable(f"table {wanted.table} was dropped meanwhile")
                try:
                    report = _TableUpdate(opened, name, table, written).run()
                except (TableChanged, LogChanged):
                    continue
                if report is not None:
                    return self._with_expiry(opened, read_table() or table, report)
        raise Unavailable(f"{name}: control log or table changed {COMMIT_ATTEMPTS} times meanwhile", hint="The daemon tries again later")

    def _with_expiry(self, opened: Tier, table: TopicTable, report: OutputReport) -> OutputReport:
        """Expire old snapshots, sweep orphans, and return the report with what was deleted and with the time of the next expiry."""
        now = opened.ports.clock_ms()
        deleted, next_ms = table.expire_snapshots(opened.settings.outputs.iceberg.keep_ms, now)
        if deleted or table.name not in self.swept:
            deleted += table.delete_orphan_files(now - opened.retention.orphan_age_ms)
            self.swept.add(table.name)
        summary = "; ".join(part for part in (report.summary, f"deleted {deleted} files" if deleted else "") if part)
        content = replace(report.content, snapshots=len(table.snapshot_ages())) if report.content else None
        return replace(report, next_deletion_ms=NEVER_MS if next_ms is None else next_ms, summary=summary, content=content)


@dataclass(frozen=True)
class TableStatus:
    """State of one partition in its topic's table, at one moment.

    status: current, behind (the next update shows more), waiting (a round must complete first), or missing (nothing was committed yet).
    snapshot_id, snapshot_ms: the current snapshot and its time; None if there is none.
    cleaner_offset: end of the offsets that the table shows (exclusive). tier_cleaner_offset: of those that it could show.
    lag_offsets: the difference; negative after an undo. lag_ms: time since the first publication that the table does not show; 0 if none.
    rows, files, bytes: of the partition. snapshots: number of snapshots of the table that can be read.
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


def read_table_status(opened: Tier, name: TopicPartition) -> TableStatus | None:
    """Return the state of a partition in its topic's table; None if its topic has no table. Raises StoreError, BadData, UsageError."""
    settings = opened.settings.outputs.iceberg.table_for(name.topic)
    if settings is None:
        return None
    with open_table(settings, opened.identity.read().tier_id, name.topic, create=False) as read_table:
        table = read_table()
        known = table.partition_entry(name.partition) if table else None
        files = table.data_files(name.partition).values() if table else ()
    state, view, _ = _read_view(opened, name)
    is_waiting = end_of_unfinished_round(state) >= 0
    shown = not is_waiting and known is not None and known.is_same_view(view.model_copy(update={"empty": known.empty}))
    since = [run.ended_ms for run in state.runs if run.published_slot > (known.slot if known else 0)]
    current = table.snapshot if table else None
    cleaner_offset = known.cleaner_offset if known else view.log_start
    return TableStatus(
        name.topic, name.partition, settings.table,
        "current" if shown else "waiting" if is_waiting else "behind" if known else "missing",
        current.snapshot_id if current else None, current.timestamp_ms if current else None,
        cleaner_offset, view.cleaner_offset, view.cleaner_offset - cleaner_offset,
        0 if shown or not since else max(0, opened.ports.clock_ms() - min(since)),
        sum(file.record_count for file in files), len(files), sum(file.file_size_in_bytes for file in files),
        len(table.snapshot_ages()) if table else 0,
    )  # fmt: skip


@dataclass(frozen=True)
class FileWithKey:
    """A data file of a topic's table that has a row with a key.

    snapshots: ids of the snapshots that name the file. is_current: whether the current snapshot is among them.
    partition: -1 if another program wrote the file.
    """

    path: str
    partition: int
    key: bytes
    snapshots: tuple[int, ...]
    is_current: bool


def find_files_with_keys(opened: Tier, topic: str, keys: Collection[bytes]) -> list[FileWithKey]:
    """Return the data files of a topic's table with a row that has one of the keys, in all snapshots. Raises StoreError, UsageError."""
    settings = opened.settings.outputs.iceberg.table_for(topic)
    if settings is None:
        return []
    with open_table(settings, opened.identity.read().tier_id, topic, create=False) as read_table:
        table = read_table()
        current = table.snapshot.snapshot_id if table and table.snapshot else 0
        return [
            FileWithKey(path, name.partition if (name := DataFileName.parse(path)) else -1, key, snapshots, current in snapshots)
            for path, key, snapshots in (table.files_with_keys(keys) if table else ())
        ]


def _read_view(opened: Tier, name: TopicPartition) -> tuple[PartitionState, PartitionEntry, tuple[Slice, ...]]:
    """Return a partition's state as its control log has it now, what the table's snapshot is to record about the partition, and the slices
    of segments that make up the compacted view, ascending by offset.
    """
    state = opened.open(name).refresh()
    log_start = opened.first_readable_offset(state)
    return state, view_entry(state, log_start), view_slices(state, log_start)


@dataclass(frozen=True)
class _TableUpdate:
    """One attempt to bring a partition's rows up to date.

    written: files that earlier attempts have written and that no snapshot names; None for slices without rows.
    """

    opened: Tier
    name: TopicPartition
    table: TopicTable
    written: dict[Slice, DataFile | None]

    def run(self) -> OutputReport | None:
        """Commit what has changed and return a report. Return None if the control log has changed meanwhile.

        Raises TableChanged if another process has committed, LogChanged if the log was truncated while it was read.
        """
        partition = self.name.partition
        # In this order: the control log is then at least as new as the table, unless it is another one.
        known = self.table.partition_entry(partition)
        state, view, slices = _read_view(self.opened, self.name)
        if known is not None and known.order > view.order:
            raise BadData(
                f"it shows slot {known.slot} of incarnation {known.incarnation}, the control log has {view.slot} of {view.incarnation}",
                segment=f"table {self.table.name}, partition {partition}",
                hint="Was the control store restored? Drop the table to have it written anew",
            )
        files, unfinished = self.table.data_files(partition), end_of_unfinished_round(state)
        content = OutputContent(known.cleaner_offset if known else view.log_start, len(files), 0)
        if unfinished >= 0:
            content = replace(content, waits_for=f"a round that cleans up to {unfinished}")
            return OutputReport("behind", state.slot, summary=f"table {self.table.name} waits for {content.waits_for}", content=content)
        # Before files are written: a later round may have superseded none of the rows, and no snapshot would name the files.
        if known is not None and (known.order == view.order or known.is_same_view(view.model_copy(update={"empty": known.empty}))):
            return OutputReport("up_to_date", state.slot, content=content)
        plan = plan_table(partition, view, slices, files, known)
        checked = self._write_files(state, plan)
        added = [file for each in plan.write if (file := self.written[each]) is not None]
        empty = tuple(str(each) for each in slices if each in plan.empty or (each in plan.write and self.written[each] is None))
        view = view.model_copy(update={"empty": empty, "checked": checked})
        if known is None and not state.vector:
            return OutputReport("empty", state.slot)
        _, again, slices_again = _read_view(self.opened, self.name)
        if slices_again != slices or not again.is_same_view(view.model_copy(update={"empty": ()})):
            return None
        self.table.commit_snapshot({partition: view}, added, [files[path] for path in plan.remove])
        rows, size = sum(file.record_count for file in added), sum(file.file_size_in_bytes for file in added)
        summary = f"table {self.table.name}: {len(added)} files with {rows} rows and {size} bytes take the place of {len(plan.remove)}"
        content = OutputContent(view.cleaner_offset, len(plan.keep) + len(added), 0)
        return OutputReport("written" if state.has_segments else "removed", state.slot, summary=summary, content=content)

    def _write_files(self, state: PartitionState, plan: TablePlan) -> float:
        """Write the files that are missing, and check that no key occurs twice. Return the share of keys that was checked."""
        todo = [each for each in plan.write if each not in self.written]
        live = state.live_segments_by_id()
        cleaner = self.opened.cleaner_for(self.name.topic)
        log = log_identity(self.opened, state)
        records = sum(live[each.segment_id].records or each.last - each.first + 1 for each in todo)
        check = _UniqueKeys(self.opened, self.name, cleaner.map_budget_bytes, records, state.slot)
        for each in todo:
            extent = ReadRange(self.name, each.first, each.last, (live[each.segment_id],), log)
            wanted = ReadOptions(True, cleaner.max_decompressed_batch_bytes, requests_in_advance=PREFETCHED_PIECES)
            selections = RangeReader(self.opened, extent, wanted).selected_records()
            name = DataFileName(self.name.partition, state.incarnation, each)
            self.written[each] = self.table.write_file(name, self._batches(check, each, selections))
        others = [*plan.keep, *(file.file_path for each in plan.write if each not in todo and (file := self.written[each]))]
        for path in others if todo else ():
            for keys in self.table.read_keys(path):
                check.compare_keys(keys, path)
        return check.checked_share

    def _batches(self, check: _UniqueKeys, each: Slice, selections: Iterator[SelectedRecords]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice: the records with a key and a value."""
        for selection in selections:
            check.add_records(selection, each)
            rows, picked = selection.rows, selection.picked
            found = picked[(rows.key_length[picked] >= 0) & (rows.value_length[picked] >= 0)]
            if len(found):
                batch = arrow_batch(replace(selection, picked=found), self.name.topic, self.name.partition, _COLUMNS)
                yield batch.rename_columns(list(_NAMES))


class _UniqueKeys:
    """Check that no key of a partition occurs twice among its records below the cleaner offset.

    Hashes of the keys that are written are kept in memory, and the keys of all other files are compared with them. If the hashes need more
    than the memory budget, one range of hashes is checked, another one each time.
    """

    def __init__(self, opened: Tier, name: TopicPartition, budget_bytes: int, records: int, turn: int) -> None:
        self._name = name
        self.ranges = max(1, -(-records * BYTES_PER_KEY // budget_bytes))
        self._options = LastRecordsRequest(turn % self.ranges, self.ranges, budget_bytes)
        self._halves = siphash_key_halves(opened.identity.hash_key_for_reading())
        self._keys = KeySet(max(budget_bytes, 1 << 16)) if records else None
        self._added = self._skipped = 0

    @property
    def checked_share(self) -> float:
        """Return the share of the added keys that was checked."""
        return (1 - self._skipped / max(self._added, 1)) / self.ranges

    def add_records(self, selection: SelectedRecords, within: Slice) -> None:
        """Add the keys of records, tombstones included. Raises BadData if one was added before."""
        hashes, rows = hash_keys_of_rows(selection, within.first, within.last, self._options, self._halves)
        new = np.empty(len(hashes), np.bool_)
        if self._keys is not None:
            done = self._keys.insert_if_absent(hashes, new)
            self._added, self._skipped = self._added + len(hashes), self._skipped + len(hashes) - done
            if not new[:done].all():
                offset = int(selection.rows.offset[rows[np.flatnonzero(~new[:done])[0]]])
                raise self._duplicate_error(f"segment {within.segment_id}", offset)

    def compare_keys(self, keys: pa.Array, path: str) -> None:
        """Raise BadData if one of these keys, of another file of the partition, was added. ``keys``: of type large_binary."""
        starts = np.frombuffer(keys.buffers()[1], np.int64)[keys.offset : keys.offset + len(keys) + 1]
        hashes, held = np.empty((len(keys), 2), np.uint64), np.empty(len(keys), np.bool_)
        data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
        hash_keys(data, starts[:-1], np.diff(starts).astype(np.int32), *self._halves, hashes)
        if self._keys is not None:
            self._keys.flag_contained_keys(hashes, held)
            if held.any():
                raise self._duplicate_error(path, -1)

    def _duplicate_error(self, place: str, offset: int) -> BadData:
        cause = f"{self._name}: a key occurs twice below the cleaner offset, so that its last value is not known"
        return BadData(cause, segment=place, offset=offset, hint="`verify` and `explain` with the key say more; the table stays as it is")
