"""One sealed segment as the cleaner reads it: mapped bytes, batch table, and its batches in chunks, checked and inflated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.errors import BadData
from compactor.records import codecs
from compactor.records.batches import HEADER, MALFORMED, PACKED, BatchTable, Bytes, check_crcs, map_file, read_only, scan_batches
from compactor.records.indexes import TXN_ENTRY, TxnEntries
from compactor.records.rows import Chunk, RowBuffers, parse, plain_chunk

Mask = npt.NDArray[np.bool_]

PLAIN_CHUNK: Final = 1 << 20
"""Bytes of uncompressed batches handled at once: small enough to stay in the processor's cache, large enough to hide Python."""

PACKED_CHUNK: Final = 1 << 18
INFLATED_CHUNK: Final = 1 << 26
"""More inflated bytes than this are not held at once, unless a single batch has them."""


class InflateCache:
    """Inflated bodies kept from pass 1 for pass 2, up to a budget: nothing is inflated twice that fits."""

    def __init__(self, budget_bytes: int) -> None:
        self._left = budget_bytes
        self._bodies: dict[tuple[int, int], codecs.Buffer] = {}
        self._lock = threading.Lock()

    def keep(self, key: tuple[int, int], body: codecs.Buffer) -> None:
        with self._lock:
            if len(body) <= self._left and key not in self._bodies:
                self._left -= len(body)
                self._bodies[key] = body

    def take(self, key: tuple[int, int]) -> codecs.Buffer | None:
        with self._lock:
            body = self._bodies.pop(key, None)
            if body is not None:
                self._left += len(body)
            return body


@dataclass(slots=True)
class SourceSegment:
    """``base``: the segment's base offset; ``end``: the next segment's base (exclusive bound of its offsets).

    ``index_bytes`` and ``timeindex_bytes`` are the sizes that grouping adds up (8 and 12 bytes an entry).
    """

    ordinal: int
    name: str
    base: int
    end: int
    mtime_ms: int
    buf: Bytes
    table: BatchTable
    index_bytes: int = 0
    timeindex_bytes: int = 0
    txn_entries: TxnEntries = field(default_factory=lambda: np.empty(0, TXN_ENTRY))
    verified: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.verified = np.zeros(len(self.table), np.bool_)

    @property
    def size(self) -> int:
        return len(self.buf)

    def ranges(self) -> list[tuple[int, int]]:
        """The batches in runs of one kind (magic, compressed or not) and of bounded size, in file order."""
        table = self.table
        if not len(table):
            return []
        kind = table.magic.astype(np.int16) * 2 + (table.codec > 0)
        cuts = np.flatnonzero(np.diff(kind)) + 1
        found: list[tuple[int, int]] = []
        for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(table)], strict=True):
            limit = PACKED_CHUNK if table.codec[first] else PLAIN_CHUNK
            while first < last:
                stop = int(np.searchsorted(table.position, table.position[first] + limit, side="left"))
                stop = min(max(stop, first + 1), last)
                found.append((first, stop))
                first = stop
        return found

    def verify(self, first: int, last: int) -> None:
        """CRCs of these batches, once. Raises BadData."""
        if not self.verified[first:last].all():
            check_crcs(self.buf, self.table, first, last, self.name)
            self.verified[first:last] = True

    def chunks(
        self, first: int, last: int, wanted: Mask, limit: int, cache: InflateCache | None, *, keep: bool = False, backwards: bool = False
    ) -> Iterator[Chunk]:
        """The batches [first, last) of one range as chunks; bodies of the ``wanted`` ones only (a flag per batch of the range).

        :param keep: put what was inflated into the cache, for the next pass.
        :raises BadData: a wrong CRC, a body that cannot be inflated or grows beyond ``limit``.
        """
        self.verify(first, last)
        if not self.table.codec[first]:
            yield plain_chunk(self.buf, self.table, first, last, wanted)
            return
        bodies: list[codecs.Buffer] = []
        total = 0
        for batch in range(first, last):
            if not wanted[batch - first]:
                bodies.append(b"")
                continue
            body = self._inflate(batch, limit, cache, keep)
            total += len(body)
            if total > INFLATED_CHUNK and last - first > 1:
                break
            bodies.append(body)
        else:
            yield _joined(first, last, bodies, wanted)
            return
        del bodies
        middle = (first + last) // 2
        for one, two in [(middle, last), (first, middle)] if backwards else [(first, middle), (middle, last)]:
            yield from self.chunks(one, two, wanted[one - first : two - first], limit, cache, keep=keep, backwards=backwards)

    def _inflate(self, batch: int, limit: int, cache: InflateCache | None, keep: bool) -> codecs.Buffer:
        if cache is not None and not keep:
            body = cache.take((self.ordinal, batch))
            if body is not None:
                return body
        body = inflate(self.buf, self.table, batch, limit, self.name)
        if cache is not None and keep:
            cache.keep((self.ordinal, batch), body)
        return body


def _joined(first: int, last: int, bodies: list[codecs.Buffer], wanted: Mask) -> Chunk:
    ends = np.cumsum(np.fromiter((len(body) for body in bodies), np.int64, len(bodies)))
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    joined = bodies[0] if len(bodies) == 1 else b"".join(bodies)
    return Chunk(first, last, read_only(np.frombuffer(joined, np.uint8)), starts, ends, wanted)


def inflate(buf: Bytes, table: BatchTable, batch: int, limit: int, segment: str) -> codecs.Buffer:
    """The records of one compressed batch, inflated. Raises BadData."""
    position, size, magic = int(table.position[batch]), int(table.size[batch]), int(table.magic[batch])
    offset = int(table.last_offset[batch]) if magic < 2 else int(table.base_offset[batch])
    start = position + HEADER
    if magic < 2:
        # A wrapper: key length (null), value length, value.
        at = position + 18 + 8 * magic
        key = int.from_bytes(buf[at : at + 4].tobytes(), "big", signed=True)
        start = at + 8 + max(key, 0)
        length = int.from_bytes(buf[start - 4 : start].tobytes(), "big", signed=True) if start <= position + size else -1
        if length < 0 or start + length > position + size:
            raise BadData("a compressed message without a value", segment=segment, position=position, offset=offset)
        size = start + length - position
    try:
        return codecs.decompress(int(table.codec[batch]), memoryview(buf)[start : position + size], limit, magic)
    except codecs.CodecError as error:
        raise BadData(
            str(error), segment=segment, position=position, offset=offset, hint="Kafka cannot read this batch either, or the limit is too low"
        ) from None


def open_source(
    ordinal: int, path: Path, base: int, end: int | None, mtime_ms: int, previous_last: int, limit: int, *, txn_entries: TxnEntries | None = None
) -> SourceSegment:
    """Maps a segment and reads its batch headers. ``end`` None: the segment is the last one. Raises BadData."""
    buf = map_file(path)
    table = scan_batches(buf, path.name, max(previous_last, base - 1))
    last = int(table.last_offset[-1]) if len(table) else base - 1
    if end is not None and last >= end:
        raise BadData(
            f"its last offset {last} reaches into the next segment, which begins at {end}",
            segment=path.name,
            position=int(table.position[-1]),
            offset=last,
            hint="The segments overlap; restore the directory from a replica",
        )
    source = SourceSegment(
        ordinal, path.name, base, end if end is not None else max(last + 1, base + 1), mtime_ms, buf, table,
        txn_entries=txn_entries if txn_entries is not None else np.empty(0, TXN_ENTRY),
    )  # fmt: skip
    _read_packed_markers(source, limit)
    return source


def _read_packed_markers(source: SourceSegment, limit: int) -> None:
    """Control batches that are compressed: nobody writes them, but Kafka reads them."""
    table = source.table
    for batch in np.flatnonzero(table.control == PACKED).tolist():
        wanted = np.ones(1, np.bool_)
        for chunk in source.chunks(batch, batch + 1, wanted, limit, None):
            rows, _ = parse(table, chunk, RowBuffers(), source.name)
            key = chunk.buf[rows.key_start[0] : rows.key_start[0] + max(rows.key_length[0], 0)].tobytes() if len(rows) else b""
            value = chunk.buf[rows.value_start[0] : rows.value_start[0] + max(rows.value_length[0], 0)].tobytes() if len(rows) else b""
            kind = int.from_bytes(key[2:4], "big")
            table.control[batch] = -2 if not len(rows) else MALFORMED if len(key) < 4 or key[0] & 0x80 else kind if kind < 2 else 2
            if len(value) >= 6:
                table.coordinator_epoch[batch] = int.from_bytes(value[2:6], "big", signed=True)
