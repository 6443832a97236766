"""Rows sorted by hash range in a file on local disk: for when the keys of a round do not fit the memory.

    file:   block 0 [range 0 | range 1 | ..]  block 1 [range 0 | range 1 | ..]  ..

A row is some words of one numpy type; the first word is from the hash of the key and chooses the range. Rows are sorted into ranges within
blocks and keep their order within a range, so that one range after the other can be read back in the order in which it was written. Each
piece, one range of one block, has a checksum. Rows belong to sections, which are read separately.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from compactor.errors import OutOfBudget, StoreError
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import upper_64_bits_of_product

BLOCK_BYTES: Final = 16 << 20

NextRowAndOutRowCount = tuple[int, int]
"""Number of the next row to read, and the number of rows in the output."""

HashRangeNumber = int

SpoolRows = npt.NDArray[Any]
"""Rows of one type, shape (n, words)."""


class DiskReservation(Protocol):
    """Reservation of bytes of the disk budget. It grows before bytes are written and shrinks after they are deleted."""

    def reserve_bytes_on_disk(self, byte_count: int, /) -> None:
        """Reserve bytes before they are written. Raises OutOfBudget if the disk budget does not have them."""

    def release_bytes_on_disk(self, byte_count: int, /) -> None:
        """Release the reservation of bytes that were deleted from the disk."""


class _UnlimitedDiskReservation:
    """A DiskReservation that permits every write, for rounds without a disk budget."""

    def reserve_bytes_on_disk(self, byte_count: int) -> None:
        pass

    def release_bytes_on_disk(self, byte_count: int) -> None:
        pass


NO_LIMIT: Final = _UnlimitedDiskReservation()
"""A reservation without a bound, for files outside the disk budget."""


@dataclass(frozen=True, slots=True)
class HashRangeSpan:
    """Hash ranges from number ``first`` up to ``first + count`` (exclusive), of ``total`` equal ranges of the hash."""

    count: int
    first: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.total or self.count)
        if not 0 <= self.first <= self.first + self.count <= self.total:
            raise ValueError(f"ranges {self.first} to {self.first + self.count} of {self.total}")

    @staticmethod
    def hash_ranges_of_key_part(ranges_per_part: int, part_number: int, part_count: int) -> HashRangeSpan:
        """Return the hash ranges of one of several equal parts of the keys. ``ranges_per_part``: number of ranges in each part."""
        return HashRangeSpan(ranges_per_part, part_number * ranges_per_part, part_count * ranges_per_part)


@dataclass(frozen=True, slots=True)
class _SortedRowBlock:
    """Location of a block of rows that are sorted by hash range of their keys. position: byte position of the block in the file. begins:
    index of the first row of each hash range, followed by the number of rows. crcs: a CRC per hash range.
    """

    position: int
    begins: npt.NDArray[np.int64]
    crcs: tuple[int, ...]

    def row_count_of_hash_range(self, range_number: int) -> int:
        """Return the number of rows of this block in a hash range."""
        return int(self.begins[range_number + 1] - self.begins[range_number])


class HashRangeRowFile:
    """File that sorts rows by hash range. Rows are added to numbered sections (rows that are read together), and the rows of a section are
    read range by range. The file exists until ``close``. Can be used as a context manager.

    :param disk_reservation: reserves the bytes of every write.
    :param words_per_row, dtype: number and type of a row's words; at least three words.
    :param row_name_for_messages: name of the rows in error messages.
    """

    def __init__(
        self,
        path: Path,
        disk_reservation: DiskReservation,
        range_span: HashRangeSpan,
        words_per_row: int,
        dtype: type[np.generic],
        row_name_for_messages: str,
    ) -> None:
        self.ranges = range_span
        self.size = 0
        """Bytes in the file."""
        self._path, self._disk, self._content = path, disk_reservation, row_name_for_messages
        self._row_bytes = words_per_row * np.dtype(dtype).itemsize
        self._buffer: SpoolRows = np.empty((max(1, BLOCK_BYTES // self._row_bytes), words_per_row), dtype)
        self._sorted: SpoolRows | None = None
        self._fill = 0
        self._section = 0
        self._blocks: dict[int, list[_SortedRowBlock]] = {}
        self._reserved = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    @property
    def row_count(self) -> int:
        """Return the number of rows that were added so far."""
        return self.size // self._row_bytes + self._fill

    def add_rows_to_section(self, section_number: int, rows: SpoolRows) -> None:
        """Add rows to a section (rows that are read together). Rows of hash ranges that this file does not hold are skipped. Raises
        OutOfBudget if the disk budget, or the disk, is used up.
        """
        if section_number != self._section:
            self.write_buffered_rows()
            self._section = section_number
        row, ranges = 0, self.ranges
        while row < len(rows):
            if ranges.count == ranges.total:
                size = min(len(rows) - row, len(self._buffer) - self._fill)
                self._buffer[self._fill : self._fill + size] = rows[row : row + size]
                row, self._fill = row + size, self._fill + size
            else:
                row, self._fill = _copy_rows_in_hash_ranges(rows, row, ranges.total, ranges.first, ranges.count, self._buffer, self._fill)
            if self._fill == len(self._buffer):
                self.write_buffered_rows()

    def count_rows_of_section_and_hash_range(self, section_number: int, range_number: int) -> int:
        """Return the number of rows of a section in one hash range; ranges are counted from 0, the first range of the file."""
        self.write_buffered_rows()
        return sum(block.row_count_of_hash_range(range_number) for block in self._blocks.get(section_number, ()))

    def read_rows_of_section_and_hash_range(self, section_number: int, range_number: int) -> Iterator[SpoolRows]:
        """Yield the rows of a section in one hash range, in the order in which they were added. An array is valid until the next one is
        requested. Raises StoreError if a checksum does not match.
        """
        self.write_buffered_rows()
        self._sorted = None
        for block in self._blocks.get(section_number, ()):
            if block.row_count_of_hash_range(range_number):
                yield self._read_rows_of_hash_ranges_of_block(block, range_number, range_number + 1)

    def read_rows_of_section(self, section_number: int) -> Iterator[SpoolRows]:
        """Yield all rows of a section, block by block. An array is valid until the next one is requested. Raises StoreError if a checksum
        does not match.
        """
        self.write_buffered_rows()
        for block in self._blocks.get(section_number, ()):
            yield self._read_rows_of_hash_ranges_of_block(block, 0, self.ranges.count)

    def write_buffered_rows(self) -> None:
        """Sort the rows that are still in memory, and write them to the file as a block."""
        if not self._fill:
            return
        out = self._sorted if self._sorted is not None else np.empty_like(self._buffer)
        begins = sort_rows_by_hash_range(self._buffer, self._fill, self.ranges.total, self.ranges.first, self.ranges.count, out)
        data, places = view_as_bytes(out[: self._fill]), (begins * self._row_bytes).tolist()
        crcs = tuple(crc32c(data[begin:end]) for begin, end in pairwise(places))
        self._blocks.setdefault(self._section, []).append(_SortedRowBlock(self.size, begins, crcs))
        self._reserve_and_append_bytes(data)
        self._sorted, self._fill = out, 0

    def close(self) -> None:
        """Remove the file and release the reservation. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._path.unlink(missing_ok=True)
            self._disk.release_bytes_on_disk(self._reserved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _reserve_and_append_bytes(self, data: memoryview) -> None:
        """Append bytes to the file, after reserving them. Raises OutOfBudget."""
        self._disk.reserve_bytes_on_disk(len(data))
        self._reserved += len(data)
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self.size + written)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            hint = "Free space there, or raise map_budget_bytes so that the keys stay in memory, and run it again; nothing was published"
            raise OutOfBudget(f"no space is left for {self._content} in {self._path}", hint=hint) from error
        self.size += len(data)

    def _read_rows_of_hash_ranges_of_block(self, block: _SortedRowBlock, first_range: int, end_range: int) -> SpoolRows:
        """Read the rows of a block in the ranges from ``first_range`` up to ``end_range`` (exclusive) into the buffer. The buffer must have
        no rows that are not written to the file yet, because they would be lost.
        """
        begin, end = int(block.begins[first_range]), int(block.begins[end_range])
        rows = self._buffer[: end - begin]
        data, done = view_as_bytes(rows), 0
        while done < len(data):
            size = os.preadv(self._descriptor, [data[done:]], block.position + begin * self._row_bytes + done)
            if size == 0:
                raise OSError(errno.EIO, "a file became shorter while it was in use", str(self._path))
            done += size
        places = ((block.begins[first_range : end_range + 1] - begin) * self._row_bytes).tolist()
        if any(crc32c(data[a:b]) != crc for (a, b), crc in zip(pairwise(places), block.crcs[first_range:end_range], strict=True)):
            raise StoreError(
                f"{self._content} in {self._path} have changed on the disk",
                hint="Nothing was published. Check the disk below state_dir (SPARK_LOCAL_DIRS on executors), then run it again",
            )
        return rows


def view_as_bytes(rows: SpoolRows) -> memoryview:
    """Return a view of the bytes of rows, without copying them."""
    return rows.reshape(-1).view(np.uint8).data


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@inline_kernel
def hash_range_number_of_row_first_word(first_word: np.uint64, range_count: int) -> HashRangeNumber:
    """Return the number of a row's hash range, of ``range_count`` equal ranges. It is computed from the lower half of the row's first word,
    because hash tables take their cells from the upper half.
    """
    return np.int64(upper_64_bits_of_product((first_word << np.uint64(32)) | (first_word >> np.uint64(32)), np.uint64(range_count)))  # type: ignore[return-value]


@inline_kernel
def _copy_row(source_rows: SpoolRows, row: int, target_rows: SpoolRows, target_row: int) -> None:
    target_rows[target_row, 0], target_rows[target_row, 1], target_rows[target_row, 2] = (
        source_rows[row, 0],
        source_rows[row, 1],
        source_rows[row, 2],
    )
    for word in range(3, source_rows.shape[1]):
        target_rows[target_row, word] = source_rows[row, word]


@kernel
def _copy_rows_in_hash_ranges(
    rows: SpoolRows, first_row: int, range_count: int, first_range: int, copied_range_count: int, out_rows: SpoolRows, out_row_count: int
) -> NextRowAndOutRowCount:
    """Append rows to ``out_rows`` whose hash lies in the wanted ranges, until ``out_rows`` is full. Return the number of the next row to
    read, and the number of rows now in ``out_rows``.

    :param first_row: row to begin with.
    :param range_count: number of equal ranges of the hash.
    :param first_range, copied_range_count: first wanted range, and how many of them there are.
    :param out_row_count: number of rows in ``out_rows`` before the call.
    """
    row = first_row
    while row < len(rows) and out_row_count < len(out_rows):
        if first_range <= hash_range_number_of_row_first_word(np.uint64(rows[row, 0]), range_count) < first_range + copied_range_count:
            _copy_row(rows, row, out_rows, out_row_count)
            out_row_count += 1
        row += 1
    return row, out_row_count


@kernel
def sort_rows_by_hash_range(
    rows: SpoolRows, row_count: int, range_count: int, first_range: int, sorted_range_count: int, out_rows: SpoolRows
) -> npt.NDArray[np.int64]:
    """Sort the first ``row_count`` rows by hash range into ``out_rows``, keeping their order within a range. Return one array: the index in
    ``out_rows`` of each range's first row, and ``row_count`` at its end.

    :param range_count: number of equal ranges of the hash.
    :param first_range, sorted_range_count: first range, and number of ranges, to which all these rows belong.
    """
    begins = np.zeros(sorted_range_count + 1, dtype=np.int64)
    for row in range(row_count):
        begins[hash_range_number_of_row_first_word(np.uint64(rows[row, 0]), range_count) - first_range + 1] += 1
    for number in range(sorted_range_count):
        begins[number + 1] += begins[number]
    place = begins[:-1].copy()
    for row in range(row_count):
        number = hash_range_number_of_row_first_word(np.uint64(rows[row, 0]), range_count) - first_range
        _copy_row(rows, row, out_rows, place[number])
        place[number] += 1
    return begins
