"""What executors hand to each other through the tier's scratch prefix: key rows in, survivors out. Never a key, never a value.

    keys of a bundle           [range 0 | range 1 | ..] of its dirty rows   [range 0 | ..] of its clean rows   [directory]   [tail]
    row, 16 bytes              tag:4 hash:8 ordinal:4   (the 96 bits of a hash that are the key, see bloom.siphash)
    directory                  for each range, and behind the last: the first of its dirty rows and of its clean rows, 8 bytes each
    answer of one range        for one bundle: the gaps between the ordinals of its survivors, ascending, as varints
    survivors of a bundle      for each segment: bitmap, verdicts of its batches, and what pass 2 need not look up again   [tail]
    tail                       arrays that say what lies before them; then their size and their CRC

A *bundle* is some segments that one task read, newest first. An *ordinal* counts the records of a bundle from its end: that of a record is
the first ordinal of its segment (a multiple of 8), plus the number of records behind it in the segment. Rows of a range lie in the order of
the scan, so their ordinals ascend.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

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

KeyRows = npt.NDArray[np.uint32]

MAX_OFFSET: Final = 2**63 - 1
ENTRY_BYTES: Final = 16
MOST_GAP_BYTES: Final = 5
_END: Final = struct.Struct("<QI")
_GONE: Final = "Run it again: what is gone is read anew"


@dataclass(frozen=True)
class KeyBundle:
    """Where the rows of some segments' keys lie. All ordinals are below ``ordinals``; ``size``: bytes of the object."""

    key: str
    size: int
    ranges: int
    ordinals: int
    dirty_rows: int
    clean_rows: int

    row_bytes: ClassVar[int] = ROW_BYTES

    def directory(self, store: ObjectStore, first: int, last: int) -> npt.NDArray[np.int64]:
        """Where each of the ranges [first, last) begins, and where the last one ends: (dirty row, clean row) each."""
        position = (self.dirty_rows + self.clean_rows) * ROW_BYTES + first * ENTRY_BYTES
        found = np.frombuffer(self._get(store, position, (last - first + 1) * ENTRY_BYTES), np.int64).reshape(-1, 2)
        if (np.diff(found, axis=0) < 0).any() or found[-1, 0] > self.dirty_rows or found[-1, 1] > self.dirty_rows + self.clean_rows:
            raise BadData("the directory of a scratch object is damaged", segment=self.key, hint="Run it again")
        return found

    def rows(self, store: ObjectStore, begin: int, end: int) -> KeyRows:
        """Rows as (tag, low, high, ordinal)."""
        return np.frombuffer(self._get(store, begin * ROW_BYTES, (end - begin) * ROW_BYTES), np.uint32).reshape(-1, 4)

    def dirty_keys(self, store: ObjectStore) -> Iterator[Hashes]:
        """The keys of all dirty rows, repeated ones too: what filters are asked about."""
        for begin in range(0, self.dirty_rows, BLOCK_ROWS):
            yield keys_of(self.rows(store, begin, min(begin + BLOCK_ROWS, self.dirty_rows)))

    def tail(self, store: ObjectStore) -> Arrays:
        """What pass 1 found out about the segments (compactor.spark.round.bundles)."""
        return read_tail(store, self.key, self.size)

    def _get(self, store: ObjectStore, position: int, size: int) -> bytes:
        data = get_scratch(store, self.key, position, size)
        if len(data) != size:
            raise BadData("a scratch object is shorter than when it was written", segment=self.key, hint="Run it again")
        return data


@dataclass(frozen=True)
class ScratchPart:
    """Bytes [position, position + size) of a scratch object, and their SHA-256."""

    key: str
    position: int
    size: int
    sha256: str


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
        self._flushed = 0

    @property
    def rows(self) -> int:
        return self._flushed + self._fill

    def add(
        self, chunk: Chunk, rows: Rows, first_row: Int64s, begin: Int64s, halves: tuple[np.uint64, np.uint64], low: int, end: int
    ) -> None:
        """Keyed rows of a chunk with low <= offset < end, backwards. ``begin``: ordinal of each batch's last row."""
        row = len(rows)
        while row:
            row, self._fill = _pack(
                chunk.buf, rows.offset, rows.key_start, rows.key_length, first_row, begin, *halves, low, end, row, self._buffer, self._fill
            )
            if row:
                self._flush()

    def write(self, file: BinaryIO) -> Int64s:
        """Appends all rows; returns where each range begins, and their number: one more than there are ranges. To be called once."""
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
        self._flushed += self._fill
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
    """The ordinal of each batch's last row, from the rows per batch."""
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


def encode_kept(rows: KeyRows, kept: Bytes) -> bytes:
    """The ordinals of some rows, which ascend: those whose bit is set in ``kept``."""
    chosen = rows[np.unpackbits(kept, count=len(rows)).astype(np.bool_), 3]
    out = np.empty(MOST_GAP_BYTES * len(chosen), np.uint8)
    return out[: gaps(chosen, out)].tobytes()


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


def get_scratch(store: ObjectStore, key: str, position: int = 0, size: int | None = None) -> bytes:
    """Raises StoreError, also where the object is gone: that of a round which somebody else has taken over is no loss."""
    try:
        return store.get(key, position, size)
    except NotFound:
        raise StoreError(f"the scratch object {store.url}/{key} is gone", hint=_GONE) from None


def is_a(kind: str, key: str) -> bool:
    """Whether a scratch object is of a kind, by its own name: a topic may be called anything."""
    return kind in key.rpartition("/")[2]


def read_scratch(store: ObjectStore, scratch: ScratchObject | ScratchPart) -> Arrays:
    """Raises BadData where it is not what was recorded."""
    position = scratch.position if isinstance(scratch, ScratchPart) else 0
    data = get_scratch(store, scratch.key, position, scratch.size)
    if len(data) != scratch.size or hashlib.sha256(data).hexdigest() != scratch.sha256:
        raise BadData("a scratch object is not what was recorded", segment=scratch.key, hint="Run it again")
    return unpack_arrays(data, scratch.key)


def pack_tail(arrays: Arrays) -> bytes:
    """To be the last bytes of an object."""
    data = pack_arrays(arrays)
    return data + _END.pack(len(data), zlib.crc32(data))


def read_tail(store: ObjectStore, key: str, size: int) -> Arrays:
    """Of an object of so many bytes. Raises BadData where it is damaged, StoreError where it is gone."""
    end = get_scratch(store, key, max(0, size - _END.size), _END.size)
    length, crc = _END.unpack(end) if len(end) == _END.size else (size + 1, 0)
    data = get_scratch(store, key, size - _END.size - length, length) if length + _END.size <= size else b""
    if not data or zlib.crc32(data) != crc:
        raise BadData("the end of a scratch object is damaged", segment=key, hint="Run it again")
    return unpack_arrays(data, key)


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
                buffer[fill, 3] = np.uint32(begin[batch] + first_row[batch + 1] - 1 - row)
                fill += 1
    return 0, fill


@kernel
def gaps(ordinals: npt.NDArray[np.uint32], out: Bytes) -> int:
    """Ascending ordinals as the gaps between them in seven bits a byte; returns the bytes used."""
    at = 0
    previous = np.int64(-1)
    for i in range(ordinals.size):
        gap = np.int64(ordinals[i]) - previous - 1
        previous = np.int64(ordinals[i])
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
                bit = begin[batch] + first_row[batch + 1] - 1 - row
                out[row] = (bitmap[bit >> 3] >> (7 - (bit & 7))) & 1 == 0
