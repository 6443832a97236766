"""Pass 1 on the executors: a task indexes a bundle of segments, one answers ranges of the key hashes, one gathers a bundle's survivors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from bloom.siphash import key_halves
from compactor.cleaner.gate.judge import Gate
from compactor.cleaner.gate.spool import RowSpool
from compactor.cleaner.gate.table import ROW_BYTES as GATE_ROW_BYTES
from compactor.cleaner.keys.buckets import survive_if_absent, survive_if_first
from compactor.cleaner.keys.keysets import KeySet
from compactor.cleaner.passes.lanes import Lane
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts
from compactor.control.records import ScratchObject
from compactor.errors import CompactorError, OutOfBudget
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import NOT_CONTROL, BatchTable
from compactor.records.rows import parse
from compactor.round.sources import Reading
from compactor.spark.cluster.executor import Cost, Shared, note_memory, sidecars_of, tier_of, workplace
from compactor.spark.round.bundles import Indexed, IndexedBundle, Neighbours, PartsOf, RowFacts, facts_from, tail_of
from compactor.spark.round.exchange import (
    MAX_OFFSET,
    KeyBundle,
    KeyRows,
    RowSorter,
    create_once,
    encode_kept,
    encode_verdicts,
    ordinals,
    pack_arrays,
    pack_tail,
    set_bits,
    tombstone_batches,
    wanted_batches,
)
from compactor.spark.round.fetching import RangeRows, ranges_of
from compactor.spark.round.gate import (
    ENTRY_BYTES,
    SparseFates,
    encode_fates,
    no_fates,
    showing,
    write_rows,
)

Flags = npt.NDArray[np.bool_]

GATE: Final = "gate-"
"""Begins the names of the gate's rows among a round's scratch objects."""

KEYS: Final = "keys-"
SURVIVORS: Final = "survivors-"


@dataclass(frozen=True)
class ToIndex:
    """A segment for pass 1. ``rows``: its keys are wanted; ``verdicts``, ``fates``: once the driver has folded the transactions."""

    metadata: RemoteLogSegmentMetadata
    rows: bool
    verdicts: SparseVerdicts | None = None
    fates: SparseFates | None = None


@dataclass(frozen=True)
class SparseVerdicts:
    """Verdicts of a segment whose other batches are of no transaction."""

    batches: int
    places: npt.NDArray[np.int64]
    verdicts: Verdicts

    def whole(self) -> Verdicts:
        flags = {}
        for name in ("aborted", "discardable", "indexed"):
            flags[name] = np.zeros(self.batches, np.bool_)
            flags[name][self.places] = getattr(self.verdicts, name)
        return Verdicts(**flags, txn_entries=self.verdicts.txn_entries)


def index_bundle(shared: Shared, items: tuple[ToIndex, ...], cost: Cost) -> IndexedBundle:
    """Headers of some segments, newest first, and, where wanted, the rows of their keys as one scratch object.

    Raises BadData, StoreError, OutOfBudget.
    """
    name = hashlib.sha256("".join(f"{item.metadata.id} {item.rows} {item.verdicts is None}\n" for item in items).encode()).hexdigest()[:16]
    with workplace(shared, cost) as staging, ExitStack() as reserved:

        def reserve(size: int) -> None:
            reserved.enter_context(staging.reserved(size, f"the keys of {len(items)} segments of {shared.partition}"))

        bundle = _Bundle(
            shared,
            shared.reading(staging, [item.metadata for item in items]),
            [RowSorter(staging.folder / f"{section}.spool", shared.ranges, reserve) for section in ("dirty", "clean")],
            RowSpool(staging.folder / "gate.spool", _Reserved(reserve), ranges=shared.ranges) if shared.gate else None,
        )
        indexed = [bundle.read(ordinal, item) for ordinal, item in enumerate(items)]
        done = IndexedBundle(tuple(indexed), None)
        if any(item.rows for item in items):
            done = bundle.written(done, name, staging.folder / "keys", reserve)
            cost.rows += bundle.rows
            cost.exchanged_bytes += sum(part.size for part in (done.keys, done.gate) if part)
        return done


@dataclass(frozen=True)
class _Reserved:
    """Room (cleaner.spool_file) that is given back when the task ends."""

    reserve: Callable[[int], None]

    def release(self, nbytes: int) -> None:
        """Not before."""


@dataclass
class _Bundle:
    """What one task has read so far. ``behind``: the first ordinal that is free."""

    shared: Shared
    reading: Reading
    sorters: list[RowSorter]
    gate_rows: RowSpool | None
    facts: dict[str, RowFacts] = field(default_factory=dict)
    behind: int = 0
    rows: int = 0

    def read(self, ordinal: int, item: ToIndex) -> Indexed:
        with self.reading.opened(ordinal) as source:
            pass  # its headers
        table, name = source.table, item.metadata.id
        data = table.is_transactional & (table.control == NOT_CONTROL)
        places = np.flatnonzero(data | (table.control != NOT_CONTROL))
        undecided = item.rows and item.verdicts is None and bool(data.any())
        first, ordinals_, rows = -1, 0, 0
        if item.rows and not undecided:
            before = sum(sorter.rows for sorter in self.sorters)
            first, ordinals_ = self.behind, self._keys_of(source, item)
            self.behind = -(-(first + ordinals_) // 8) * 8
            rows = sum(sorter.rows for sorter in self.sorters) - before
            self.rows += rows
        self.reading.staging.forget([self.reading.log(ordinal)])
        deciding = BatchTable(**{name: getattr(table, name)[places] for name in table.__dataclass_fields__})
        return Indexed(name, len(table), places, deciding, source.txn_entries, undecided, first, ordinals_, rows)

    def _keys_of(self, source: SourceSegment, item: ToIndex) -> int:
        """Sorts the rows of one segment; the number of its ordinals."""
        aborted = item.verdicts.whole().aborted if item.verdicts else np.zeros(len(source.table), np.bool_)
        fates = item.fates.whole() if item.fates else no_fates(len(source.table))
        with self.reading.mapped(source):
            gate = showing(self.shared.plan, self.shared.hash_key, source, fates, self.gate_rows) if self.gate_rows else None
            wanted = wanted_batches(source, aborted)
            self.facts[item.metadata.id], count = _scan(self.shared, source, wanted, self.sorters, gate, self.behind)
        return count

    def written(self, done: IndexedBundle, name: str, path: Path, reserve: Callable[[int], None]) -> IndexedBundle:
        """The gate's keys first: where the bundle is, they are."""
        shared, store = self.shared, tier_of(self.shared).ports.control
        gate = None
        if self.gate_rows is not None:
            reserve(self.gate_rows.rows_written * GATE_ROW_BYTES + (shared.ranges + 1) * ENTRY_BYTES)
            gate = write_rows(self.gate_rows, path, f"{shared.scratch}{GATE}{name}")
            create_once(store, gate.key, path)
            self.gate_rows.close()
        with path.open("wb") as file:
            dirty = self.sorters[0].write(file)
            clean = dirty[-1] + self.sorters[1].write(file)
            file.write(np.column_stack((dirty, clean)).tobytes())
            keys = KeyBundle(f"{shared.scratch}{KEYS}{name}", 0, shared.ranges, self.behind, int(dirty[-1]), int(clean[-1] - dirty[-1]))
            tail = pack_tail(tail_of(replace(done, keys=keys, gate=gate), self.facts))
            reserve(len(tail))
            file.write(tail)
        size = create_once(store, keys.key, path).size
        path.unlink()
        return replace(done, keys=replace(keys, size=size), gate=gate)


def _scan(
    shared: Shared, source: SourceSegment, wanted: Flags, sorters: Sequence[RowSorter], gate: Gate | None, behind: int
) -> tuple[RowFacts, int]:
    """Sorts the segment's rows, backwards, with ordinals from ``behind`` on; what it saw, and how many ordinals it took.

    What is inflated the gate sees, too.
    """
    table, plan, lane, begun_at = source.table, shared.plan, Lane(), behind
    halves, (dirty, clean) = key_halves(shared.hash_key), sorters
    first_dirty = plan.first_dirty_offset
    limit = plan.policy.max_decompressed_batch_bytes
    tombstones = np.zeros(len(table), np.bool_)
    counts = np.where(wanted, table.count.astype(np.int64), 0)
    for first, last in reversed(source.ranges()):
        if not wanted[first:last].any():
            continue
        for chunk in source.chunks(first, last, wanted[first:last], limit, lane.bodies, backwards=True):
            rows, first_row = parse(table, chunk, lane.rows, source.name)
            some = slice(chunk.first, chunk.last)
            counts[some] = np.diff(first_row)
            begin = behind + ordinals(counts[some])
            behind += len(rows)
            tombstone_batches(first_row, rows.value_length, tombstones[some])
            if source.end > first_dirty:
                dirty.add(chunk, rows, first_row, begin, halves, first_dirty, MAX_OFFSET)
                if gate is not None:
                    gate.note(source, gate.look(lane, source, chunk))
            if source.base < first_dirty:
                clean.add(chunk, rows, first_row, begin, halves, 0, first_dirty)
                if gate is not None:
                    gate.note(source, gate.look(lane, source, chunk, below=True))
    packed_legacy = (table.magic < 2) & (table.codec > 0)
    return RowFacts(tombstones, counts if (packed_legacy & wanted).any() else counts[:0]), behind - begun_at


# ---- clean segments that need not be read -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToAsk:
    """Segments (ids) whose filters one task asks about all dirty keys, which are in ``bundles``."""

    segments: tuple[str, ...]
    bundles: tuple[KeyBundle, ...]


def ask_filters(shared: Shared, item: ToAsk, cost: Cost) -> tuple[dict[str, str], int]:
    """As Sidecars.meeting. Raises StoreError."""
    sidecars = sidecars_of(shared)
    if sidecars is None:
        return dict.fromkeys(item.segments, "bloom = false"), 0
    store = tier_of(shared).ports.control
    answer = sidecars.meeting(item.segments, lambda: chain.from_iterable(each.dirty_keys(store) for each in item.bundles))
    note_memory(cost)
    return answer


# ---- the second stage -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """What all range tasks look at. ``dirty``: newest first. ``asked``: bundles (places) in which survivors are wanted."""

    bundles: tuple[KeyBundle, ...]
    dirty: tuple[Neighbours, ...]
    asked: frozenset[int]


@dataclass(frozen=True)
class ToGather:
    """A segment whose survivors are to be written down. Without rows nothing in it is superseded."""

    indexed: Indexed
    verdicts: SparseVerdicts
    fates: SparseFates


@dataclass(frozen=True)
class GatherBundle:
    """Segments of one bundle; ``keys`` None: of none. ``name``: of the object to be written."""

    name: str
    segments: tuple[ToGather, ...]
    keys: KeyBundle | None


def answer_ranges(shared: Shared, ranges: range, exchange: Exchange, cost: Cost) -> Iterator[tuple[int, bytes]]:
    """(place of a bundle, ordinals of survivors in it) for neighbouring ranges of the keys. A bundle may come several times, or never."""
    store = tier_of(shared).ports.control
    wanted = {place: bundle for place, bundle in enumerate(exchange.bundles) if bundle.dirty_rows or place in exchange.asked}
    for number, rows in ranges_of(store, wanted, ranges):
        yield from _answered(shared, number, exchange, rows, cost)
    note_memory(cost)


def _answered(shared: Shared, number: int, exchange: Exchange, rows_of: RangeRows, cost: Cost) -> Iterator[tuple[int, bytes]]:
    """One range. Where its keys exceed the budget it is read again, a part of it each time."""
    clean = [place for place in sorted(exchange.asked) if exchange.bundles[place].clean_rows]
    part, parts, guess = 0, 1, 0
    while part < parts:
        ranges, wanted = shared.ranges * parts, number * parts + part
        if ranges > 2**32:
            raise OutOfBudget("more keys than the map budget holds share one hash", hint="Raise map_budget_bytes")
        keys = KeySet(shared.map_budget_bytes, expected_keys=guess)
        full = False
        for place, rows in rows_of.dirty(exchange.dirty):
            by_row, kept = _numbered(rows)
            taken = survive_if_first(keys.table, keys.state, by_row, 0, ranges, wanted, kept)
            while taken < len(rows) and keys.grow():
                taken = survive_if_first(keys.table, keys.state, by_row, taken, ranges, wanted, kept)
            if taken < len(rows):
                full = True
                break
            if place in exchange.asked and kept.any():
                yield place, encode_kept(rows, kept)
        cost.peak_map_bytes = max(cost.peak_map_bytes, keys.peak_bytes)
        if full:
            # What has been answered so far was right and will be answered again.
            part, parts = part * 2, parts * 2
            continue
        for place, rows in rows_of.section(clean, 1):
            by_row, kept = _numbered(rows)
            survive_if_absent(keys.table, keys.state, by_row, ranges, wanted, kept)
            if kept.any():
                yield place, encode_kept(rows, kept)
        cost.map_entries += keys.entries
        guess = keys.entries + keys.entries // 20
        part += 1


def _numbered(rows: KeyRows) -> tuple[KeyRows, npt.NDArray[np.uint8]]:
    """Rows whose ordinals are their places, and a bit for each."""
    by_row = rows.copy()
    by_row[:, 3] = np.arange(len(rows), dtype=np.uint32)
    return by_row, np.zeros(-(-len(rows) // 8), np.uint8)


@dataclass(frozen=True)
class Gathered:
    """What the second stage wrote: survivors, where those of each segment lie, and which segments have records that are none; or what the
    gate says must be left."""

    written: ScratchObject
    parts: PartsOf | None = None
    superseded: tuple[str, ...] = ()


def gather_survivors(shared: Shared, item: GatherBundle, answers: Iterable[bytes], cost: Cost) -> Gathered:
    """The answers of all ranges for one bundle as one scratch object, with everything that pass 2 wants to know of each segment."""
    store = tier_of(shared).ports.control
    bitmap, facts = np.zeros(0, np.uint8), {}
    if item.keys is not None:
        bitmap = np.zeros(item.keys.ordinals // 8 + 1, np.uint8)
        for answer in answers:
            if not set_bits(np.frombuffer(answer, np.uint8), bitmap):
                raise CompactorError(f"an answer does not fit {item.keys.key}", hint="This is a bug; please report it")
            cost.exchanged_bytes += len(answer)
        facts = facts_from(item.keys.tail(store))
    out, parts, superseded = bytearray(), {}, []
    for segment in item.segments:
        known = segment.indexed
        # With or without a gate: whoever takes the round up may have one.
        arrays = encode_verdicts(segment.verdicts.whole()) | encode_fates(segment.fates.whole())
        if known.has_rows:
            mine = bitmap[known.first // 8 : -(-(known.first + known.ordinals) // 8)]
            if int(np.bitwise_count(mine).sum(dtype=np.int64)) < known.rows:
                superseded.append(known.id)
            arrays |= {"bitmap": mine, "tombstones": facts[known.id].tombstones, "counts": facts[known.id].counts}
        data = pack_arrays(arrays)
        parts[known.id] = (len(out), len(data), hashlib.sha256(data).hexdigest())
        out += data
    found = PartsOf(parts)
    written = create_once(store, f"{shared.scratch}{SURVIVORS}{item.name}", bytes(out) + pack_tail(found.tail()))
    cost.exchanged_bytes += written.size
    note_memory(cost)
    return Gathered(written, found, tuple(superseded))


def warm_up() -> None:
    """Compiles the kernels of the second stage, or loads them from the cache."""
    keys, kept = KeySet(1 << 16, expected_keys=0), np.zeros(1, np.uint8)
    rows = np.frombuffer(bytes(16), np.uint32).reshape(-1, 4)
    survive_if_first(keys.table, keys.state, rows, 0, 1, 0, kept)
    survive_if_absent(keys.table, keys.state, rows, 1, 0, kept)
    set_bits(np.frombuffer(encode_kept(rows, kept), np.uint8), kept)
