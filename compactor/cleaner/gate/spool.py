"""The gate's rows on local disk, by range of the gate's own hash: for when the keys of a round do not fit the memory that it has.

    file:   block 0 [range 0 | range 1 | ..]  block 1 [range 0 | range 1 | ..]  ..

Rows come in any order and are sorted into ranges within blocks. Each piece, one range of one block, has its checksum. There are two
sections: rows of the dirty range, whose keys' last ones are wanted, and rows outside of it, which are looked up.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel
from compactor.cleaner.gate.table import ROW_BYTES, WORDS, Rows, range_of
from compactor.cleaner.spool_file import Room, SpoolFile
from compactor.errors import StoreError
from compactor.records.batches import Int64s

BLOCK_ROWS: Final = 1 << 19
DIRTY, BELOW = SECTIONS = range(2)


@dataclass(frozen=True, slots=True)
class _SortedBlock:
    """Where it lies in the file, at which of its rows each range begins (one more entry: the number of rows), and the CRC of each."""

    position: int
    begins: Int64s
    crcs: npt.NDArray[np.uint32]


class RowSpool:
    """Close it, or use it in a ``with``."""

    def __init__(self, path: Path, room: Room, *, ranges: int, part: int = 0, parts: int = 1) -> None:
        """
        :param path: the file to write; it exists until ``close``.
        :param ranges: of this part of the keys; the rows of others are left out.
        """
        self.ranges = ranges
        self.first, self.all_ranges = part * ranges, parts * ranges
        """What ``read`` calls range 0 is this one of so many."""
        self._blocks: tuple[list[_SortedBlock], ...] = ([], [])
        self._section = DIRTY
        self._buffer: Rows = np.empty((BLOCK_ROWS, WORDS), np.uint64)
        self._sorted: Rows = np.empty((BLOCK_ROWS, WORDS), np.uint64)
        self._fill = 0
        self._file = SpoolFile(path, room, "what the gate writes to", "Free space there and run it again; nothing was published")

    def add(self, section: int, rows: Rows) -> None:
        """Raises OutOfBudget when the room is used up, or the disk is."""
        if section != self._section:
            self._flush()
            self._section = section
        row = 0
        while row < len(rows):
            row, self._fill = _take(rows, row, self.all_ranges, self.first, self.ranges, self._buffer, self._fill)
            if self._fill == len(self._buffer):
                self._flush()

    @property
    def disk_bytes(self) -> int:
        return self._file.size

    @property
    def rows_written(self) -> int:
        """In memory, too."""
        return self.disk_bytes // ROW_BYTES + self._fill

    def rows(self, section: int, number: int) -> int:
        """How many there are of a range."""
        self._flush()
        return sum(int(block.begins[number + 1] - block.begins[number]) for block in self._blocks[section])

    def read(self, section: int, number: int) -> Iterator[Rows]:
        """The rows of a range; each array is good until the next one is asked for. Raises StoreError where the disk has changed them."""
        self._flush()
        for block in self._blocks[section]:
            begin, end = int(block.begins[number]), int(block.begins[number + 1])
            if begin == end:
                continue
            rows = self._buffer[: end - begin]
            data = _bytes(rows)
            self._file.fetch(data, block.position + begin * ROW_BYTES)
            if zlib.crc32(data) != block.crcs[number]:
                raise StoreError(
                    f"what the gate wrote to {self._file.path} has changed on the disk",
                    hint="Nothing was published. Check the disk below state_dir (SPARK_LOCAL_DIRS on executors), then run it again",
                )
            yield rows

    def write(self, file: BinaryIO) -> tuple[Int64s, npt.NDArray[np.uint32]]:
        """Appends all rows, section by section, range by range: where in the rows each of them begins, and its CRC.

        Shapes (2, ranges + 1) and (2, ranges).
        """
        begins, crcs, at = np.zeros((2, self.ranges + 1), np.int64), np.zeros((2, self.ranges), np.uint32), 0
        for section in SECTIONS:
            for number in range(self.ranges):
                begins[section, number] = at
                crc = 0
                for rows in self.read(section, number):
                    file.write(_bytes(rows))
                    crc = zlib.crc32(_bytes(rows), crc)
                    at += len(rows)
                crcs[section, number] = crc
            begins[section, self.ranges] = at
        return begins, crcs

    def close(self) -> None:
        """Removes the file and gives its room back. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _flush(self) -> None:
        if not self._fill:
            return
        begins = _scatter(self._buffer, self._fill, self.all_ranges, self.first, self.ranges, self._sorted)
        pieces = zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
        crcs = np.array([zlib.crc32(_bytes(self._sorted[begin:end])) for begin, end in pieces], np.uint32)
        position = self._file.append(_bytes(self._sorted[: self._fill]))
        self._blocks[self._section].append(_SortedBlock(position, begins, crcs))
        self._fill = 0


def _bytes(rows: Rows) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


@kernel
def _take(rows: Rows, start: int, ranges: int, first: int, count: int, buffer: Rows, fill: int) -> tuple[int, int]:
    """Copies rows from ``start`` on whose range is one of ``count`` from ``first``. Returns the row that comes next, and the new fill."""
    row = start
    while row < len(rows) and fill < len(buffer):
        if first <= range_of(rows[row, 0], ranges) < first + count:
            for word in range(WORDS):
                buffer[fill, word] = rows[row, word]
            fill += 1
        row += 1
    return row, fill


@kernel
def _scatter(rows: Rows, fill: int, ranges: int, first: int, count: int, out: Rows) -> Int64s:
    """Sorts the first ``fill`` rows by range; returns where each range begins, and ``fill``."""
    begins = np.zeros(count + 1, np.int64)
    for row in range(fill):
        begins[range_of(rows[row, 0], ranges) - first + 1] += 1
    for number in range(count):
        begins[number + 1] += begins[number]
    place = begins[:-1].copy()
    for row in range(fill):
        number = range_of(rows[row, 0], ranges) - first
        for word in range(WORDS):
            out[place[number], word] = rows[row, word]
        place[number] += 1
    return begins
