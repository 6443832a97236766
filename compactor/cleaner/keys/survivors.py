"""Pass 1, and the one question that pass 2 asks of it: which rows have a later record of the same key in the mapped range?

Two answers behind one port. ``scan_backwards``: the first record seen of a key survives, so a set of key hashes is enough, and the
answer for the dirty range is a bitmap. ``scan_bounded``: Kafka's own ascending map that stops when it holds N keys (kafka-rules 2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel
from bloom.siphash import key_halves, siphash128
from compactor.cleaner.keys.keysets import BoundedOffsetMap, KeySet
from compactor.cleaner.passes.chunks import FinishedChunks, clean_chunk
from compactor.cleaner.passes.lanes import Lane, Lanes
from compactor.cleaner.passes.retention import BatchFates, RoundRules, decide_batches
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Flags, Verdicts
from compactor.errors import OutOfBudget
from compactor.records.batches import NOT_CONTROL, Bytes, Int64s
from compactor.records.encode import FILTER
from compactor.records.rows import Chunk, Int32s, Rows, parse
from compactor.stages import WorkStage, measured

Hashes = npt.NDArray[np.uint64]

_END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """Per batch of one segment, from pass 1: ``kept`` survivors and ``tombstones`` among them; kept is -1 where pass 1 cannot say."""

    kept: Int32s
    tombstones: Flags


class Survivors(Protocol):
    """What pass 1 found."""

    @property
    def latest_offset(self) -> int:
        """The last offset that the map covers; what lies above stays as it is."""

    @property
    def keys(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    def counts(self, source: SourceSegment) -> KeptCounts | None:
        """What is known of whole batches without looking at their records."""

    def superseded(self, source: SourceSegment, chunk: Chunk, rows: Rows, first_row: Int64s) -> Flags:
        """One flag per row of the chunk."""


class WitnessNote(Protocol):
    """What a witness makes of one chunk; it lives in the lane."""

    def detached(self) -> Self: ...


class Witness(Protocol):
    """Somebody else who wants to see what is inflated, so that it need not be inflated twice: the gate (compactor.cleaner.gate.judge).

    ``begin`` and ``note`` are called in order and one at a time, the others from any lane.
    """

    @property
    def on_disk(self) -> bool:
        """It wants to see in pass 1 what lies outside the dirty range, too: nothing that it could ask later will be at hand."""

    @property
    def sees_again(self) -> bool:
        """It wants to see the same once more, in the next scan."""

    def begin(self, source: SourceSegment) -> None:
        """The segment's bytes are there, and its chunks follow."""

    def look(self, lane: Lane, source: SourceSegment, chunk: Chunk, *, below: bool = False) -> Any:
        """Pass 1: every batch of the chunk that may enter the map; ``below``: that may be looked up in it. Returns WitnessNote."""

    def note(self, source: SourceSegment, looked: Any) -> None:
        """Takes what ``look`` returned."""

    def expect(self, lane: Lane, source: SourceSegment, chunk: Chunk) -> None:
        """Pass 2: batches whose records are looked at."""


@dataclass(frozen=True, slots=True)
class PassOne:
    """What both scans need: the log's segments, verdicts, range [first_dirty, end), hash key and limits.

    ``rules``: given, compressed chunks of which the scan backwards already knows everything are cleaned at once, into ``finished``.
    """

    sources: Sequence[SourceSegment]
    verdicts: Sequence[Verdicts]
    first_dirty: int
    end: int
    hash_key: bytes
    inflate_limit: int
    finished: FinishedChunks
    rules: RoundRules | None = None
    witness: Witness | None = None

    def dirty(self) -> list[tuple[SourceSegment, Flags]]:
        """The segments that pass 1 reads, with the batches whose records may enter the map."""
        dirty = [source for source in self.sources if source.end > self.first_dirty and source.base < self.end]
        return [(source, self.wanted(source)) for source in dirty]

    def wanted(self, source: SourceSegment) -> Flags:
        """The batches of a segment whose records may enter the map."""
        table = source.table
        return (table.control == NOT_CONTROL) & ~self.verdicts[source.ordinal].aborted & (table.last_offset >= self.first_dirty)

    def below(self, source: SourceSegment) -> Flags:
        """The batches whose records may be superseded although they lie below the dirty range."""
        table = source.table
        return (table.control == NOT_CONTROL) & ~self.verdicts[source.ordinal].aborted & (table.base_offset < self.first_dirty)

    def hashed(
        self, lane: Lane, source: SourceSegment, first: int, last: int, wanted: Flags, *, backwards: bool, below: bool = False
    ) -> list[Hashed]:
        """Rows of one range that may enter the map, hashed; in descending order where ``backwards``. They live in the lane.

        :param below: those below the dirty range instead, which are only looked up.
        """
        low, high = (-1, self.first_dirty) if below else (self.first_dirty, _END)
        found = []
        for chunk in source.chunks(first, last, wanted, self.inflate_limit, lane.bodies, backwards=backwards):
            rows, first_row = parse(source.table, chunk, lane.rows, source.name)
            hashes, picked = _hashed(lane, chunk, rows, low, high, self.hash_key, backwards)
            shown = self.witness is not None and (self.witness.on_disk if below else backwards)
            looked = self.witness.look(lane, source, chunk, below=below) if self.witness is not None and shown else None
            piece = Hashed(chunk, first_row, hashes, picked, rows.offset, rows.value_length, rows, looked)
            found.append(piece if chunk.last - chunk.first == last - first else piece.detached())
        return found


@dataclass(frozen=True, slots=True)
class Hashed:
    """A chunk's rows that may enter the map: ``hashes`` of shape (n, 2) and ``picked``, their numbers among all rows.

    ``rows`` is None where the range came in several chunks: only the arrays named here outlive the next one.
    """

    chunk: Chunk
    first_row: Int64s
    hashes: Hashes
    picked: Int64s
    offset: Int64s
    value_length: Int32s
    rows: Rows | None
    looked: WitnessNote | None

    def detached(self) -> Hashed:
        looked = None if self.looked is None else self.looked.detached()
        hashes, picked, offset, value_length = self.hashes.copy(), self.picked.copy(), self.offset.copy(), self.value_length.copy()
        return Hashed(self.chunk, self.first_row, hashes, picked, offset, value_length, None, looked)


class SegmentBits:
    """Which records of one dirty segment survive: packed bits, and where each batch's bits begin (-1: not in the map)."""

    def __init__(self, batches: int) -> None:
        self.begin = np.full(batches, -1, np.int64)
        self.kept = np.full(batches, -1, np.int32)
        self.tombstones = np.zeros(batches, np.bool_)
        self._parts: list[npt.NDArray[np.uint8]] = []
        self._size = 0
        self.packed: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        """Complete after ``close``."""

    @measured(WorkStage.DECIDE)
    def add(self, hashed: Hashed, survives: Flags, first_dirty: int, source: SourceSegment, *, final: bool) -> None:
        """``final``: nothing of these flags is still to be answered."""
        chunk, first_row = hashed.chunk, hashed.first_row
        some = slice(chunk.first, chunk.last)
        self.begin[some] = np.where(chunk.wanted, 8 * self._size + first_row[:-1], -1)
        # Only where the map speaks for every record of the batch; legacy batches are always written anew.
        whole = chunk.wanted & (source.table.base_offset[some] >= first_dirty) & (source.table.magic[some] == 2) & final
        _summary(first_row, survives, hashed.value_length, whole, self.kept[some], self.tombstones[some])
        self._parts.append(np.packbits(survives))
        self._size += len(self._parts[-1])

    def close(self) -> None:
        if self._parts:
            self.packed = np.concatenate(self._parts)
        self._parts = []

    @measured(WorkStage.DECIDE)
    def superseded(self, chunk: Chunk, first_row: Int64s) -> Flags:
        out = np.zeros(int(first_row[-1]), np.bool_)
        _unpack(self.packed, self.begin[chunk.first : chunk.last], first_row, out)
        return out


@dataclass(frozen=True, slots=True)
class _Scanned:
    """A segment that is scanned. ``fates``: None where no chunk of it may be cleaned ahead."""

    source: SourceSegment
    bits: SegmentBits
    fates: BatchFates | None


@dataclass(frozen=True, slots=True)
class _ScanJob:
    scanned: _Scanned
    first: int
    last: int
    wanted: Flags


class BackwardSurvivors:
    """Answers from bitmaps inside the dirty range and by probing the key set below it."""

    def __init__(self, one: PassOne, keys: KeySet) -> None:
        self._one = one
        self._set = keys
        self._bits: dict[int, SegmentBits] = {}

    @property
    def latest_offset(self) -> int:
        return self._one.end - 1

    @property
    def keys(self) -> int:
        return self._set.entries

    @property
    def peak_bytes(self) -> int:
        return self._set.peak_bytes

    def scan(self, source: SourceSegment, wanted: Flags, lanes: Lanes, *, ahead: bool = True) -> None:
        """Reads one segment of ``PassOne.dirty``; to be called in descending order. Raises BadData; OutOfBudget where the set is full.

        :param ahead: compressed chunks may be cleaned at once: of the verdicts on their batches more is known than what is aborted.
        """
        self.scan_all([(source, wanted)], lanes, ahead=ahead)

    def scan_all(self, segments: Iterable[tuple[SourceSegment, Flags]], lanes: Lanes, *, ahead: bool = True) -> None:
        """The same for many that are at hand: lanes go on in the next one while the last chunks of this one are under way."""
        one = self._one
        begun: list[_Scanned] = []

        def jobs() -> Iterator[_ScanJob]:
            for source, wanted in segments:
                begun.append(self._begin(source, ahead))
                for first, last in reversed(source.ranges()):
                    if wanted[first:last].any():
                        yield _ScanJob(begun[-1], first, last, wanted[first:last])

        def prepare(lane: Lane, job: _ScanJob) -> tuple[_Scanned, list[Hashed]]:
            return job.scanned, one.hashed(lane, job.scanned.source, job.first, job.last, job.wanted, backwards=True)

        def decide(prepared: tuple[_Scanned, list[Hashed]]) -> tuple[_Scanned, Hashed, Flags] | None:
            scanned, pieces = prepared
            marked = [(piece, *self._first_seen(piece)) for piece in pieces]
            for piece in pieces:
                if one.witness is not None and piece.looked is not None:
                    one.witness.note(scanned.source, piece.looked)
            for piece, survives, final in marked:
                scanned.bits.add(piece, survives, one.first_dirty, scanned.source, final=final)
            return (scanned, *marked[0][:2]) if len(marked) == 1 and marked[0][2] else None

        for _ in lanes.run_in_steps(prepare, decide, self._clean_ahead, jobs()):
            pass
        for scanned in begun:
            scanned.bits.close()

    def _begin(self, source: SourceSegment, ahead: bool) -> _Scanned:
        one = self._one
        if one.witness is not None:
            one.witness.begin(source)
        bits = self._bits.setdefault(source.ordinal, SegmentBits(len(source.table)))
        fates = decide_batches(source.table, one.verdicts[source.ordinal], one.rules, source.name) if one.rules and ahead else None
        return _Scanned(source, bits, fates)

    def _clean_ahead(self, lane: Lane, decided: tuple[_Scanned, Hashed, Flags] | None) -> None:
        """A compressed chunk of which everything is known is cleaned while it is inflated."""
        one = self._one
        if decided is None or one.rules is None or decided[0].fates is None or not one.finished.has_room:
            return
        scanned, piece, survives = decided
        source, fates, chunk, rows = scanned.source, decided[0].fates, piece.chunk, piece.rows
        some = slice(chunk.first, chunk.last)
        if rows is None or not source.table.codec[some].any() or np.any(source.table.control[some] != NOT_CONTROL):
            return
        if np.any((fates.action[some] == FILTER) != chunk.wanted):
            return
        if rows.offset.min(initial=one.end) < one.first_dirty:
            return  # older records are looked up when all keys are known
        clean = clean_chunk(lane, source, chunk, rows, piece.first_row, ~survives, fates.part(some), one.rules)
        one.finished.keep(source, chunk, clean)

    def _first_seen(self, hashed: Hashed) -> tuple[Flags, bool]:
        """One flag per row of the chunk: it may enter the map and none of its key was seen before. And whether that is the last word."""
        seen = np.empty(len(hashed.hashes), np.bool_)
        if self._set.insert_if_absent(hashed.hashes, seen) < len(seen):
            raise OutOfBudget(
                f"the offset map is full at {self._set.entries} keys ({self._set.peak_bytes} bytes)",
                hint='Raise map_budget_bytes, or let map_engine = "auto" choose an engine that needs less memory',
            )
        survives = np.zeros(int(hashed.first_row[-1]), np.bool_)
        survives[hashed.picked] = seen
        return survives, True

    def counts(self, source: SourceSegment) -> KeptCounts | None:
        bits = self._bits.get(source.ordinal)
        return None if bits is None else KeptCounts(bits.kept, bits.tombstones)

    def superseded(self, source: SourceSegment, chunk: Chunk, rows: Rows, first_row: Int64s) -> Flags:
        bits = self._bits.get(source.ordinal)
        superseded = bits.superseded(chunk, first_row) if bits is not None else np.zeros(len(rows), np.bool_)
        if source.base < self._one.first_dirty:
            below = _below(rows.offset, rows.key_length, self._one.first_dirty)
            if len(below):
                superseded[below] = self._met(source, chunk, rows, first_row, below)
        return superseded

    def _met(self, source: SourceSegment, chunk: Chunk, rows: Rows, first_row: Int64s, below: Int64s) -> Flags:
        """Of the rows below the dirty range: whether it has their key."""
        found = np.empty(len(below), np.bool_)
        self._set.contains(_hashes_of(chunk, rows, below, self._one.hash_key), found)
        return found


def scan_backwards(one: PassOne, keys: KeySet, lanes: Lanes) -> BackwardSurvivors:
    """Reads the dirty range from its end to its beginning. Raises BadData; OutOfBudget where the key set is full."""
    found = BackwardSurvivors(one, keys)
    found.scan_all(reversed(one.dirty()), lanes)
    return found


class BoundedSurvivors:
    """Kafka's own map: a table from key to latest offset."""

    def __init__(self, one: PassOne, table: BoundedOffsetMap) -> None:
        self._one = one
        self._table = table
        self.latest_offset = -1

    @property
    def keys(self) -> int:
        return self._table.entries

    @property
    def peak_bytes(self) -> int:
        return self._table.peak_bytes

    def counts(self, source: SourceSegment) -> KeptCounts | None:
        return None

    def superseded(self, source: SourceSegment, chunk: Chunk, rows: Rows, first_row: Int64s) -> Flags:
        keyed = np.flatnonzero((rows.key_length >= 0) & (rows.offset <= self.latest_offset))
        latest = np.empty(len(keyed), np.int64)
        self._table.latest(_hashes_of(chunk, rows, keyed, self._one.hash_key), latest)
        superseded = np.zeros(len(rows), np.bool_)
        superseded[keyed] = rows.offset[keyed] < latest
        return superseded

    def fill(self, source: SourceSegment, hashed: Hashed) -> bool:
        """Puts one chunk's rows; False once the map was full when a keyed record came, even one whose key is present."""
        offsets = hashed.offset[hashed.picked]
        taken = self._table.put_until_full(hashed.hashes, offsets)
        chunk = hashed.chunk
        if taken == len(offsets):
            self._pass(int(source.table.last_offset[chunk.last - 1]))
            return True
        # Batches before the one that holds the first row without room were read completely.
        batch = int(np.searchsorted(hashed.first_row, hashed.picked[taken], side="right")) - 1
        if chunk.first + batch:
            self._pass(int(source.table.last_offset[chunk.first + batch - 1]))
        if taken and hashed.picked[taken - 1] >= hashed.first_row[batch]:
            self.latest_offset = int(offsets[taken - 1])
        return False

    def _pass(self, last_offset: int) -> None:
        """Kafka sets it, whatever was put before: an old wrapper at offset 0 ends below the records in it."""
        if last_offset >= self._one.first_dirty:
            self.latest_offset = last_offset

    def finish(self, source: SourceSegment) -> None:
        """A segment read to its end counts up to the next one's base: offset gaps are jumped (KAFKA-8764)."""
        self._pass(min(source.end, self._one.end) - 1)


def scan_bounded(one: PassOne, table: BoundedOffsetMap, lanes: Lanes) -> BoundedSurvivors:
    """Reads the dirty range in order until the map is full. Raises BadData."""
    found = BoundedSurvivors(one, table)
    for source, wanted in one.dirty():
        # Chunks without a record that may enter count as read too, so they are not left out.
        jobs = [(source, first, last, wanted[first:last]) for first, last in source.ranges()]
        for pieces in lanes.run(lambda lane, job: one.hashed(lane, *job, backwards=False), jobs):
            for piece in pieces:
                if not found.fill(source, piece):
                    return found
        found.finish(source)
    return found


@measured(WorkStage.HASH, lambda lane, chunk, rows, *_: int(np.maximum(rows.key_length, 0).sum()))
def _hashed(lane: Lane, chunk: Chunk, rows: Rows, low: int, high: int, key: bytes, backwards: bool) -> tuple[Hashes, Int64s]:
    """Keys of the rows with offsets [low, high), and these rows' numbers."""
    hashes, picked = lane.hashes.take(_keyed(rows.offset, rows.key_length, low, high))
    _hash_keyed(chunk.buf, rows.offset, rows.key_start, rows.key_length, low, high, *key_halves(key), backwards, hashes, picked)
    return hashes, picked


@measured(WorkStage.HASH, lambda chunk, rows, picked, _: int(rows.key_length[picked].sum()))
def _hashes_of(chunk: Chunk, rows: Rows, picked: Int64s, key: bytes) -> Hashes:
    return _hash_rows(chunk.buf, picked, rows.key_start, rows.key_length, *key_halves(key))


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@kernel
def _keyed(offset: Int64s, key_length: Int32s, low: int, high: int) -> int:
    count = 0
    for row in range(offset.size):
        if key_length[row] >= 0 and low <= offset[row] < high:
            count += 1
    return count


@kernel
def _hash_keyed(
    buf: Bytes,
    offset: Int64s,
    key_start: Int64s,
    key_length: Int32s,
    low: int,
    high: int,
    k0: np.uint64,
    k1: np.uint64,
    backwards: bool,
    hashes: Hashes,
    picked: Int64s,
) -> None:
    at = picked.size - 1 if backwards else 0
    step = -1 if backwards else 1
    for row in range(offset.size):
        if key_length[row] >= 0 and low <= offset[row] < high:
            hashes[at, 0], hashes[at, 1] = siphash128(buf, key_start[row], np.int64(key_length[row]), k0, k1)
            picked[at] = row
            at += step


@kernel
def _hash_rows(buf: Bytes, picked: Int64s, key_start: Int64s, key_length: Int32s, k0: np.uint64, k1: np.uint64) -> Hashes:
    hashes = np.empty((picked.size, 2), np.uint64)
    for i in range(picked.size):
        row = picked[i]
        hashes[i, 0], hashes[i, 1] = siphash128(buf, key_start[row], np.int64(key_length[row]), k0, k1)
    return hashes


@kernel
def _below(offset: Int64s, key_length: Int32s, first_dirty: int) -> Int64s:
    found = np.empty(offset.size, np.int64)
    count = 0
    for row in range(offset.size):
        if key_length[row] >= 0 and offset[row] < first_dirty:
            found[count] = row
            count += 1
    return found[:count]


@kernel
def _summary(first_row: Int64s, survives: Flags, value_length: Int32s, whole: Flags, kept: Int32s, tombstones: Flags) -> None:
    """Survivors of each ``whole`` batch (-1 for the others), and whether tombstones are among them."""
    for batch in range(kept.size):
        count = 0
        null = False
        for row in range(first_row[batch], first_row[batch + 1]):
            count += survives[row]
            null = null or (survives[row] and value_length[row] < 0)
        kept[batch] = count if whole[batch] else -1
        tombstones[batch] = null


@kernel
def _unpack(packed: npt.NDArray[np.uint8], begin: Int64s, first_row: Int64s, superseded: Flags) -> None:
    for batch in range(begin.size):
        if begin[batch] >= 0:
            for row in range(first_row[batch], first_row[batch + 1]):
                bit = begin[batch] + row - first_row[batch]
                superseded[row] = ((packed[bit >> 3] >> (7 - (bit & 7))) & 1) == 0
