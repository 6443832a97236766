"""Data files of a table: the rows of one slice each, and the check that no key of a partition occurs twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import pyarrow as pa

from bloom.siphash import hash_keys, siphash_key_halves
from compactor.access.tier import Tier
from compactor.cleaner.keys.key_set import KeyHashSet
from compactor.consumer.columns import to_arrow_batch
from compactor.consumer.gather import SelectedRecords
from compactor.consumer.last_values import PREFETCHED_PIECES
from compactor.consumer.reading import LastRecordOfEachKeyRequest, OffsetRangeReader, OffsetRangeToRead, ReadOptions, hash_keys_of_rows
from compactor.decoding.fields import KeyAndValueDecoder
from compactor.errors import BadData
from compactor.kernels.common import Hashes, HashKeyHalves
from compactor.model.ids import TopicPartition
from compactor.outputs.iceberg_columns import TableColumnsMissing, TypedColumnBuilder
from compactor.outputs.iceberg_plan import DataFileName, ViewSlice
from compactor.outputs.iceberg_table import TopicTable

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile

BYTES_PER_KEY: Final = 20
"""Memory of one key in a ``KeyHashSet``, at most."""

_COLUMNS: Final = pa.schema(
    [
        ("key", pa.binary()), ("value", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")), ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))), ("leaderEpoch", pa.int32()),
    ]
)  # fmt: skip
"""The columns of a table as ``to_arrow_batch`` makes them, in the table's order."""

TYPED_ROWS: Final = 1024
"""Most rows whose types are merged at once: if each has other fields, pyarrow makes as many columns, of as many rows each."""

_NAMES: Final = ("key", "value", "partition", "offset", "timestamp", "timestamp_type", "headers", "leader_epoch")
ShareOfKeysCheckedUnique = float
"""Share, from 0 to 1, of the written keys of which it was checked that they occur once."""


@dataclass(frozen=True)
class DataFileWriteTask:
    """Task to write the data file of one slice (the part of a compacted view that lies in one segment), in this process or on another
    machine.

    extent: offsets of the slice, and the segment that holds them. inflate_limit: largest size of an uncompressed batch, in bytes.
    """

    file: DataFileName
    extent: OffsetRangeToRead
    inflate_limit: int

    @property
    def upper_bound_of_records_in_slice(self) -> int:
        """Return an upper bound of the number of records in the slice. The number itself is not known, because brokers do not report it."""
        return self.extent.segments[0].records or self.extent.last - self.extent.first + 1


@dataclass(frozen=True)
class DataFilesToWrite:
    """Request to write the data files that one update of a partition needs.

    others: the partition's data files that stay in the table. Their keys are compared with those that are written, because no key may occur
        twice.
    turn: number that selects the range of key hashes that is compared, if memory does not suffice for all keys.
    """

    tier: Tier
    partition: TopicPartition
    table: TopicTable
    tasks: Sequence[DataFileWriteTask]
    others: Sequence[DataFile]
    turn: int


class DataFileWriter(Protocol):
    """Interface of an object that writes the data files of a table, in this process or in a cluster."""

    def write_data_files(self, files: DataFilesToWrite, out_files_by_slice: dict[ViewSlice, DataFile | None]) -> ShareOfKeysCheckedUnique:
        """Write data files, and return which share (0 to 1) of their keys was checked to be unique in the partition.

        :param out_files_by_slice: receives each file as soon as it is complete; None for a slice without rows.
        :raises BadData: if a key occurs twice. :raises LogChanged: if the log was truncated meanwhile.
        :raises StoreError: if a store fails.
        """


class LocalDataFileWriter:
    """Writer of data files in this process, one after the other."""

    def write_data_files(self, files: DataFilesToWrite, out_files_by_slice: dict[ViewSlice, DataFile | None]) -> ShareOfKeysCheckedUnique:
        """Write data files one after the other, and return which share (0 to 1) of their keys was checked to be unique in the partition.

        :param out_files_by_slice: receives each file as soon as it is complete; None for a slice without rows.
        :raises BadData: if a key occurs twice. :raises LogChanged: if the log was truncated meanwhile.
        :raises StoreError: if a store fails.
        """
        budget = files.tier.cleaner_settings_for_topic(files.partition.topic).map_budget_bytes
        check = _KeyUniquenessCheck(files, budget, sum(task.upper_bound_of_records_in_slice for task in files.tasks))
        for task in files.tasks:
            each = task.file.slice
            try:
                out_files_by_slice[each] = write_data_file_of_slice(files.tier, files.table, task, partial(check.add_keys_of_records, each))
            except TableColumnsMissing as error:
                files.table.add_columns(error.columns)
                out_files_by_slice[each] = write_data_file_of_slice(files.tier, files.table, task)  # whose keys are added
        for file in files.others if files.tasks else ():
            for keys in files.table.read_keys_of_data_file(file.file_path):
                check.require_keys_not_among_written_keys(keys, file.file_path)
        return check.checked_share_of_keys


def _ignore_records(selection: SelectedRecords) -> None:
    """Do nothing; the default callback."""


def write_data_file_of_slice(
    tier: Tier, table: TopicTable, task: DataFileWriteTask, on_records: Callable[[SelectedRecords], None] = _ignore_records
) -> DataFile | None:
    """Write the records of a slice (a segment's part of the view) that have a key and a value to a data file. If there are none, write
    nothing and return None.

    :param on_records: receives all committed records of the slice, tombstones and records without a key included.
    :raises TableColumnsMissing: after all records were read, if the table lacks columns for their decoded keys or values.
    :raises LogChanged: if the log was truncated meanwhile.
    :raises BadData: if the data is damaged.
    :raises StoreError: if a store fails.
    """
    options = ReadOptions(True, task.inflate_limit, requests_in_advance=PREFETCHED_PIECES)
    settings = tier.settings.outputs.iceberg.iceberg_table_settings(task.extent.partition.topic)
    decoded_format_by_field = settings.decoded_format_by_field if settings is not None else {}
    typed = TypedColumnBuilder(table, KeyAndValueDecoder(tier.settings), decoded_format_by_field) if decoded_format_by_field else None

    def read_arrow_batches_of_slice() -> Iterator[pa.RecordBatch]:
        for selection in OffsetRangeReader(tier, task.extent, options).read_selected_records():
            on_records(selection)
            rows, picked = selection.rows, selection.picked
            found = picked[(rows.key_length[picked] >= 0) & (rows.value_length[picked] >= 0)]
            if len(found):
                batch = to_arrow_batch(replace(selection, picked=found), *task.extent.partition, _COLUMNS)
                batch = batch.rename_columns(list(_NAMES))
                if typed is None:
                    yield batch
                    continue
                for first in range(0, len(batch), TYPED_ROWS):
                    part = typed.add_typed_columns_to_batch(batch.slice(first, TYPED_ROWS))
                    if not typed.lacks_columns:
                        yield part
        if typed and typed.lacks_columns:
            raise typed.missing_columns_error()

    return table.write_data_file(task.file, read_arrow_batches_of_slice())


def hashes_of_key_column(keys: pa.Array, hash_key_halves: HashKeyHalves) -> Hashes:
    """Return the hashes of keys. ``keys``: of type large_binary; ``hash_key_halves``: the two halves of the tier's hash key."""
    starts = np.frombuffer(keys.buffers()[1], np.int64)[keys.offset : keys.offset + len(keys) + 1]
    hashes = np.empty((len(keys), 2), np.uint64)
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    hash_keys(data, starts[:-1], np.diff(starts).astype(np.int32), *hash_key_halves, hashes)
    return hashes


def duplicate_key_error(partition: TopicPartition, object_name: str, offset: int = -1) -> BadData:
    """Return the error for a key that occurs twice in a partition.

    :param object_name: segment or file with the second occurrence.
    :param offset: offset of the second occurrence; -1 if unknown.
    """
    cause = f"{partition}: a key occurs twice below the cleaner offset, so that its last value is not known"
    return BadData(cause, segment=object_name, offset=offset, hint="`verify` and `explain` with the key say more; the table stays as it is")


class _KeyUniquenessCheck:
    """Check that no key of a partition occurs twice among its records below the cleaner offset.

    Hashes of the keys that are written are kept in memory, and the keys of all other files are compared with them. If the hashes need more
    than the memory budget, each update of the table checks only one range of hashes, and ``DataFilesToWrite.turn`` selects it.
    """

    def __init__(self, files: DataFilesToWrite, budget_bytes: int, record_count: int) -> None:
        self._name = files.partition
        self.ranges = max(1, -(-record_count * BYTES_PER_KEY // budget_bytes))
        self._options = LastRecordOfEachKeyRequest(files.turn % self.ranges, self.ranges, budget_bytes)
        self._halves = siphash_key_halves(files.tier.identity.hash_key_for_unstored_hashes())
        self._keys = KeyHashSet(max(budget_bytes, 1 << 16)) if record_count else None
        self._added = self._skipped = 0

    @property
    def checked_share_of_keys(self) -> ShareOfKeysCheckedUnique:
        """Return the share (0 to 1) of the keys given to ``add_keys_of_records`` that was checked to be unique."""
        return (1 - self._skipped / max(self._added, 1)) / self.ranges

    def add_keys_of_records(self, view_slice: ViewSlice, selection: SelectedRecords) -> None:
        """Add the keys of a slice's records, tombstones included. Raises BadData if one of the keys was added before."""
        hashes, rows = hash_keys_of_rows(selection, view_slice.first, view_slice.last, self._options, self._halves)
        new = np.empty(len(hashes), np.bool_)
        if self._keys is not None:
            done = self._keys.insert_keys_until_full(hashes, new)
            self._added, self._skipped = self._added + len(hashes), self._skipped + len(hashes) - done
            if not new[:done].all():
                offset = int(selection.rows.offset[rows[np.flatnonzero(~new[:done])[0]]])
                raise duplicate_key_error(self._name, f"segment {view_slice.segment_id}", offset)

    def require_keys_not_among_written_keys(self, keys: pa.Array, path: str) -> None:
        """Raise BadData if one of ``keys`` is among the added ones, and so occurs twice in the partition.

        :param keys: keys of a file that stays in the table; of type large_binary.
        :param path: path of this file, for the error.
        """
        hashes, held = hashes_of_key_column(keys, self._halves), np.empty(len(keys), np.bool_)
        if self._keys is not None:
            self._keys.flag_contained_keys(hashes, held)
            if held.any():
                raise duplicate_key_error(self._name, path)
