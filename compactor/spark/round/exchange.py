"""What executors hand to each other through the tier's scratch prefix: key rows in, survivors out. Never a key, never a value.

    buckets of one segment     [range 0 | range 1 | ..] of its dirty rows   [range 0 | range 1 | ..] of its clean rows   [facts]
    row, 16 bytes              tag:4 hash:8 ordinal:4   (the 96 bits of a hash that are the key, see bloom.siphash)
    answer of one range        for one segment: the gaps between the ordinals of its survivors, ascending, as varints
    survivors of one segment   bitmap, verdicts of its batches, and what pass 2 need not look up again

Rows of a range lie newest first, as the scan meets them. An *ordinal* counts the records of a segment from its end: that of a record is the
number of records in the batches behind its own, plus its place within its batch. It does not depend on how the scan cuts the segment.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from bloom.filter import Hashes
from bloom.jit import kernel
from bloom.siphash import siphash128, tag_of
from compactor.cleaner.keys.buckets import BLOCK_ROWS, ROW_BYTES, keys_of, scatter
from compactor.cleaner.keys.survivors import KeptCounts
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts
from compactor.control.records import ScratchObject
from compactor.errors import AlreadyExists, BadData, NotFound, StoreError
from compactor.records.batches import NOT_CONTROL, Bytes, Int64s
from compactor.records.indexes import TXN_ENTRY
from compactor.records.rows import Chunk, Int32s, Rows
from compactor.storage.port import ObjectStore

Flags = npt.NDArray[np.bool_]
Arrays = dict[str, npt.NDArray[Any]]

FIRST: Final = 0
MAX_OFFSET: Final = 2**63 - 1


@dataclass(frozen=True)
class BucketIndex:
    """Where the rows of one segment lie in its object: rows [dirty[r], dirty[r + 1]) and [clean[r], clean[r + 1]) are those of range r.

    Clean rows lie behind the dirty ones, ``facts_size`` bytes behind the last row. All ordinals are below ``ordinals``.
    """

    key: str
    dirty: Int64s
    clean: Int64s
    ordinals: int
    facts_size: int

    @property
    def rows(self) -> int:
        return int(self.clean[-1])

    @property
    def dirty_rows(self) -> int:
        return int(self.dirty[-1])

    @property
    def size(self) -> int:
        return self.rows * ROW_BYTES + self.facts_size

    def has(self, number: int, *, clean: bool) -> bool:
        section = self.clean if clean else self.dirty
        return bool(section[number] < section[number + 1])

    def facts(self, store: ObjectStore) -> Arrays:
        """``tombstones``: a flag per batch, a tombstone is in it; ``counts``: rows per batch where a header does not tell (else empty)."""
        return unpack_arrays(store.get(self.key, self.rows * ROW_BYTES, self.facts_size), self.key)

    def read(self, store: ObjectStore, number: int, *, clean: bool) -> npt.NDArray[np.uint32]:
        """The rows of one range, newest first, as (tag, low, high, ordinal)."""
        section = self.clean if clean else self.dirty
        return self._rows(store, int(section[number]), int(section[number + 1]))

    def dirty_keys(self, store: ObjectStore) -> Iterator[Hashes]:
        """The keys of all dirty rows, repeated ones too: what filters are asked about."""
        for begin in range(0, self.dirty_rows, BLOCK_ROWS):
            yield keys_of(self._rows(store, begin, min(begin + BLOCK_ROWS, self.dirty_rows)))

    def _rows(self, store: ObjectStore, begin: int, end: int) -> npt.NDArray[np.uint32]:
        data = store.get(self.key, begin * ROW_BYTES, (end - begin) * ROW_BYTES)
        if len(data) != (end - begin) * ROW_BYTES:
            raise BadData("a scratch object is shorter than when it was written", segment=self.key, hint="Run it again")
        return np.frombuffer(data, np.uint32).reshape(-1, 4)


class RowSorter:
    """Rows in the order of the scan -> rows by range, those of a range in their old order. What does not fit a block goes to ``spool``."""

    def __init__(self, spool: Path, ranges: int, reserve: Callable[[int], None]) -> None:
        """``reserve``: called with bytes before they are written to the disk (I10)."""
        self._ranges = ranges
        self._reserve = reserve
        self._spool_path = spool
        self._spool: BinaryIO | None = None
        self._blocks: list[Int64s] = []
        self._buffer = np.empty((BLOCK_ROWS, 4), np.uint32)
        self._fill = 0

    def add(
        self, chunk: Chunk, rows: Rows, first_row: Int64s, begin: Int64s, halves: tuple[np.uint64, np.uint64], low: int, end: int
    ) -> None:
        """Keyed rows of a chunk with low <= offset < end, backwards. ``begin``: ordinal of each batch's first row."""
        row = len(rows)
        while row:
            row, self._fill = _pack(
                chunk.buf, rows.offset, rows.key_start, rows.key_length, first_row, begin, *halves, low, end, row, self._buffer, self._fill
            )
            if row:
                self._flush()

    def write(self, file: BinaryIO) -> Int64s:
        """Appends all rows; returns where each range begins, and their number. To be called once."""
        if self._spool is None:
            begins, data = self._sorted()
            self._reserve(data.nbytes)
            file.write(_bytes(data))
            return begins
        self._flush()
        self._spool.flush()
        self._reserve(self._spool.tell())
        spooled = np.memmap(self._spool_path, np.uint32, "r").reshape(-1, 4)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum([block[-1] for block in self._blocks])))
        total = np.zeros(self._ranges + 1, np.int64)
        for number in range(self._ranges):
            for start, block in zip(starts, self._blocks, strict=False):
                file.write(_bytes(spooled[start + block[number] : start + block[number + 1]]))
                total[number + 1] += block[number + 1] - block[number]
        self._spool.close()
        del spooled
        self._spool_path.unlink()
        return np.cumsum(total)

    def _flush(self) -> None:
        begins, data = self._sorted()
        if self._spool is None:
            self._spool = self._spool_path.open("wb")
        self._reserve(data.nbytes)
        self._spool.write(_bytes(data))
        self._blocks.append(begins)
        self._fill = 0

    def _sorted(self) -> tuple[Int64s, npt.NDArray[np.uint32]]:
        out = np.empty((self._fill, 4), np.uint32)
        return scatter(self._buffer, self._fill, self._ranges, 0, self._ranges, out), out


def _bytes(rows: npt.NDArray[np.uint32]) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def wanted_batches(source: SourceSegment, aborted: Flags) -> Flags:
    """Batches whose records may enter the map or be looked up in it."""
    wanted: Flags = (source.table.control == NOT_CONTROL) & ~aborted
    return wanted


def ordinals(counts: Int64s) -> Int64s:
    """The ordinal of each batch's first row, from the rows per batch."""
    return np.concatenate((np.cumsum(counts[::-1])[::-1][1:], np.zeros(min(1, len(counts)), np.int64)))


class StoredSurvivors:
    """Survivors (cleaner.survivors) of the segments of one group, as the second stage wrote them."""

    def __init__(self, latest_offset: int) -> None:
        self.latest_offset = latest_offset
        self.keys = 0
        self.peak_bytes = 0
        self._segments: dict[int, tuple[Bytes, Int64s, KeptCounts]] = {}

    def add(self, source: SourceSegment, verdicts: Verdicts, arrays: Arrays) -> None:
        """``arrays``: as ``encode_survivors`` got them; without a bitmap nothing in the segment is superseded."""
        if "bitmap" not in arrays:
            return
        table = source.table
        wanted = wanted_batches(source, verdicts.aborted)
        counts = table.count.astype(np.int64) if not len(arrays["counts"]) else arrays["counts"].astype(np.int64)
        counts[~wanted] = 0
        begin = ordinals(counts)
        kept = np.full(len(table), -1, np.int32)
        known = wanted & (table.magic == 2)
        _count_bits(arrays["bitmap"], begin, counts, known, kept)
        begin[~wanted] = -1
        self._segments[source.ordinal] = (arrays["bitmap"], begin, KeptCounts(kept, arrays["tombstones"].astype(np.bool_)))

    def counts(self, source: SourceSegment) -> KeptCounts | None:
        found = self._segments.get(source.ordinal)
        return found[2] if found else None

    def superseded(self, source: SourceSegment, chunk: Chunk, rows: Rows, first_row: Int64s) -> Flags:
        out = np.zeros(len(rows), np.bool_)
        found = self._segments.get(source.ordinal)
        if found:
            _superseded(found[0], found[1][chunk.first : chunk.last], first_row, out)
        return out


def encode_verdicts(verdicts: Verdicts) -> Arrays:
    return {
        "aborted": np.packbits(verdicts.aborted),
        "discardable": np.packbits(verdicts.discardable),
        "indexed": np.packbits(verdicts.indexed),
        "txn_entries": np.frombuffer(verdicts.txn_entries.tobytes(), np.uint8),
    }


def decode_verdicts(arrays: Arrays, batches: int) -> Verdicts:
    flags = {name: np.unpackbits(arrays[name], count=batches).astype(np.bool_) for name in ("aborted", "discardable", "indexed")}
    return Verdicts(**flags, txn_entries=np.frombuffer(arrays["txn_entries"].tobytes(), TXN_ENTRY))


def encode_bits(bitmap: Bytes) -> bytes:
    """Of a bitmap in which few bits are set: about a byte each."""
    out = np.empty(most_gap_bytes(bitmap), np.uint8)
    return out[: gaps(bitmap, out)].tobytes()


def most_gap_bytes(bitmap: Bytes) -> int:
    """Gaps below 128 take a byte, and of larger ones there are few: a further byte for at least 128 bits skipped."""
    return int(np.bitwise_count(bitmap).sum(dtype=np.int64)) + bitmap.size // 16 + 8


def pack_arrays(arrays: Arrays, *, dense: bool = False) -> bytes:
    """The same bytes for the same arrays. ``dense``: there is nothing in them that a compressor could find."""
    out = io.BytesIO()
    save = np.savez if dense else np.savez_compressed
    save(out, **arrays)
    return out.getvalue()


def unpack_arrays(data: bytes, where: str) -> Arrays:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as loaded:
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, KeyError, EOFError) as error:
        raise BadData(f"a scratch object cannot be read: {error}", segment=where, hint="Run it again") from error


def create_once(store: ObjectStore, key: str, data: bytes | Path) -> ScratchObject:
    """Creates a scratch object; one that exists with equal digest is done (a task that was tried again, or speculation).

    Raises StoreError where it exists with other content: two executors did not do the same.
    """
    if isinstance(data, Path):
        with data.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.path.getsize(data)
    else:
        sha256, size = hashlib.sha256(data).hexdigest(), len(data)
    try:
        if isinstance(data, Path):
            store.create_from_file(key, data, {"sha256": sha256})
        else:
            store.create(key, data, {"sha256": sha256})
    except AlreadyExists:
        try:
            info = store.head(key)
        except NotFound:
            raise StoreError(f"{store.url}/{key} went while it was written", hint="Run it again") from None
        if info.size != size or info.metadata.get("sha256") != sha256:
            raise StoreError(
                f"{store.url}/{key} exists already with other content", hint="Are all executors of one version? Run it again to begin anew"
            ) from None
    return ScratchObject(key=key, size=size, sha256=sha256)


def read_scratch(store: ObjectStore, scratch: ScratchObject) -> Arrays:
    """Raises BadData where it is not what was recorded."""
    data = store.get(scratch.key)
    if len(data) != scratch.size or hashlib.sha256(data).hexdigest() != scratch.sha256:
        raise BadData("a scratch object is not what was recorded", segment=scratch.key, hint="Run it again")
    return unpack_arrays(data, scratch.key)


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@kernel
def _pack(
    buf: Bytes, offset: Int64s, key_start: Int64s, key_length: Int32s, first_row: Int64s, begin: Int64s, k0: np.uint64, k1: np.uint64,
    low: int, end: int, stop: int, buffer: npt.NDArray[np.uint32], fill: int,
) -> tuple[int, int]:  # fmt: skip
    """Rows below ``stop``, backwards. Returns the row above which all are done (0: all), and how full the buffer is."""
    for batch in range(begin.size - 1, -1, -1):
        if first_row[batch] >= stop:
            continue
        for row in range(min(first_row[batch + 1], stop) - 1, first_row[batch] - 1, -1):
            if key_length[row] >= 0 and low <= offset[row] < end:
                if fill == len(buffer):
                    return row + 1, fill
                h0, h1 = siphash128(buf, key_start[row], key_length[row], k0, k1)
                buffer[fill, 0] = tag_of(h0)
                buffer[fill, 1] = np.uint32(h1 & np.uint64(0xFFFFFFFF))
                buffer[fill, 2] = np.uint32(h1 >> np.uint64(32))
                buffer[fill, 3] = np.uint32(begin[batch] + row - first_row[batch])
                fill += 1
    return 0, fill


@kernel
def gaps(bitmap: Bytes, out: Bytes) -> int:
    """The bits that are set, as the gaps between them in seven bits a byte; returns the bytes used. ``out``: see ``most_gap_bytes``."""
    at = 0
    previous = np.int64(-1)
    for byte in range(bitmap.size):
        if bitmap[byte] == 0:
            continue
        for bit in range(8):
            if bitmap[byte] & (128 >> bit):
                gap = 8 * byte + bit - previous - 1
                previous = np.int64(8 * byte + bit)
                while gap >= 128:
                    out[at] = (gap & 127) | 128
                    gap >>= 7
                    at += 1
                out[at] = gap
                at += 1
    return at


@kernel
def set_bits(data: Bytes, bitmap: Bytes) -> bool:
    """Sets the bits that ``gaps`` wrote down; False where the data does not fit the bitmap."""
    place = np.int64(-1)
    gap = np.int64(0)
    shift = 0
    for i in range(data.size):
        gap |= np.int64(data[i] & 127) << shift
        shift += 7
        if data[i] < 128:
            place += gap + 1
            if place >= 8 * bitmap.size:
                return False
            bitmap[place >> 3] |= np.uint8(128 >> (place & 7))
            gap = np.int64(0)
            shift = 0
    return shift == 0


@kernel
def tombstone_batches(first_row: Int64s, value_length: Int32s, out: Flags) -> None:
    """Which batches of a chunk hold a record without value."""
    for batch in range(out.size):
        for row in range(first_row[batch], first_row[batch + 1]):
            if value_length[row] < 0:
                out[batch] = True
                break


@kernel
def _count_bits(bitmap: Bytes, begin: Int64s, counts: Int64s, known: Flags, kept: Int32s) -> None:
    for batch in range(begin.size):
        if known[batch]:
            count = 0
            for bit in range(begin[batch], begin[batch] + counts[batch]):
                count += (bitmap[bit >> 3] >> (7 - (bit & 7))) & 1
            kept[batch] = count


@kernel
def _superseded(bitmap: Bytes, begin: Int64s, first_row: Int64s, out: Flags) -> None:
    for batch in range(begin.size):
        if begin[batch] >= 0:
            for row in range(first_row[batch], first_row[batch + 1]):
                bit = begin[batch] + row - first_row[batch]
                out[row] = (bitmap[bit >> 3] >> (7 - (bit & 7))) & 1 == 0
