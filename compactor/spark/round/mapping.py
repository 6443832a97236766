"""Pass 1 on the executors: a task indexes a segment, one answers a range of the key hashes, one gathers a segment's survivors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from bloom.siphash import key_halves
from compactor.cleaner.gate.judge import Gate
from compactor.cleaner.keys.buckets import survive_if_absent, survive_if_first
from compactor.cleaner.keys.keysets import KeySet
from compactor.cleaner.passes.lanes import Lane
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts
from compactor.control.records import ScratchObject
from compactor.errors import CompactorError, OutOfBudget
from compactor.local.staging import Staging
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import NOT_CONTROL, BatchTable
from compactor.records.indexes import TxnEntries
from compactor.records.rows import parse
from compactor.spark.cluster.executor import Cost, Shared, gate_of, note_memory, sidecars_of, tier_of, workplace
from compactor.spark.round.exchange import (
    MAX_OFFSET,
    Arrays,
    BucketIndex,
    RowSorter,
    create_once,
    encode_bits,
    encode_verdicts,
    ordinals,
    pack_arrays,
    read_scratch,
    set_bits,
    tombstone_batches,
    wanted_batches,
)
from compactor.spark.round.gate import Sample, SparseFates, encode_fates, no_fates, seed_of
from compactor.storage.port import ObjectStore

Flags = npt.NDArray[np.bool_]

SAMPLE: Final = "sample"
"""Name of the gate's keys among a round's scratch objects."""

AHEAD: Final = 4
"""Ranges that are fetched while one is looked at: a request takes longer than its rows."""


@dataclass(frozen=True)
class ToIndex:
    """A segment for pass 1. ``rows``: its keys are wanted; ``verdicts``, ``fates``: once the driver has folded the transactions."""

    metadata: RemoteLogSegmentMetadata
    rows: bool
    verdicts: SparseVerdicts | None = None
    fates: SparseFates | None = None


@dataclass(frozen=True)
class Indexed:
    """What pass 1 says of a segment. ``table``: only the batches that decide about transactions, at ``places`` of ``batches``.

    ``buckets`` is None where the keys were not wanted, or have to wait for the verdicts (``undecided``). ``sample``: what the gate saw.
    """

    batches: int
    places: npt.NDArray[np.int64]
    table: BatchTable
    txn_entries: TxnEntries
    undecided: bool
    buckets: BucketIndex | None
    sample: ScratchObject | None = None


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


def index_segment(shared: Shared, item: ToIndex, cost: Cost) -> Indexed:
    """Headers of one segment and, where wanted, the rows of its keys as one scratch object. Raises BadData, StoreError, OutOfBudget."""
    with workplace(shared, cost) as staging:
        reading = shared.reading(staging, (item.metadata,))
        with reading.opened(0) as source:
            pass  # its headers
        table = source.table
        data = table.is_transactional & (table.control == NOT_CONTROL)
        places = np.flatnonzero(data | (table.control != NOT_CONTROL))
        undecided = item.rows and item.verdicts is None and bool(data.any())
        buckets, sample = None, None
        if item.rows and not undecided:
            aborted = item.verdicts.whole().aborted if item.verdicts else np.zeros(len(table), np.bool_)
            seen = Sample(max(item.metadata.records, len(table)), seed_of(shared.plan), shared.gate_bits)
            gate = gate_of(shared, [source], [item.fates.whole() if item.fates else no_fates(len(table))], seen, full=False)
            with reading.mapped(source):
                buckets = _write_buckets(shared, item.metadata.id, source, aborted, staging, gate)
                cost.rows += buckets.rows
                cost.exchanged_bytes += buckets.size
                if gate is not None and gate.dirty:
                    if not gate.has_whole(source):
                        gate.read(source)
                    store = tier_of(shared.settings).ports.control
                    sample = create_once(store, f"{shared.scratch}{SAMPLE}-{item.metadata.id}", pack_arrays(seen.arrays(), dense=True))
                    cost.exchanged_bytes += sample.size
        deciding = BatchTable(**{name: getattr(table, name)[places] for name in table.__dataclass_fields__})
        return Indexed(len(table), places, deciding, source.txn_entries, undecided, buckets, sample)


def _write_buckets(
    shared: Shared, segment_id: str, source: SourceSegment, aborted: Flags, staging: Staging, gate: Gate | None
) -> BucketIndex:
    with ExitStack() as reserved:

        def reserve(size: int) -> None:
            reserved.enter_context(staging.reserved(size, f"the keys of {source.name}"))

        sorters = [RowSorter(staging.folder / f"{name}.spool", shared.ranges, reserve) for name in ("dirty", "clean")]
        scanned, most = _scan(shared, source, wanted_batches(source, aborted), sorters[0], sorters[1], gate)
        facts = pack_arrays(scanned)
        path = staging.folder / "buckets"
        with path.open("wb") as file:
            dirty = sorters[0].write(file)
            clean = dirty[-1] + sorters[1].write(file)
            reserve(len(facts))
            file.write(facts)
        index = BucketIndex(f"{shared.scratch}keys-{segment_id}", dirty, clean, most, len(facts))
        create_once(tier_of(shared.settings).ports.control, index.key, path)
        path.unlink()
    return index


def _scan(
    shared: Shared, source: SourceSegment, wanted: Flags, dirty: RowSorter, clean: RowSorter, gate: Gate | None
) -> tuple[Arrays, int]:
    """Sorts the segment's rows, backwards; (what ``BucketIndex.facts`` says, number of ordinals). What is inflated the gate sees, too."""
    table, plan, lane = source.table, shared.plan, Lane()
    halves = key_halves(shared.hash_key)
    first_dirty = plan.first_dirty_offset
    limit = plan.policy.max_decompressed_batch_bytes
    tombstones = np.zeros(len(table), np.bool_)
    counts = np.where(wanted, table.count.astype(np.int64), 0)
    behind = 0
    witness = gate if gate is not None and gate.dirty and gate.has_whole(source) else None
    if witness is not None:
        witness.begin(source)
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
            if witness is not None:
                witness.note(source, witness.look(lane, source, chunk))
            if source.end > first_dirty:
                dirty.add(chunk, rows, first_row, begin, halves, first_dirty, MAX_OFFSET)
            if source.base < first_dirty:
                clean.add(chunk, rows, first_row, begin, halves, 0, first_dirty)
    packed_legacy = (table.magic < 2) & (table.codec > 0)
    return {"tombstones": tombstones, "counts": counts if (packed_legacy & wanted).any() else counts[:0]}, behind


# ---- clean segments that need not be read -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToAsk:
    """Segments (ids) whose filters one task asks about all dirty keys, which are in ``buckets``."""

    segments: tuple[str, ...]
    buckets: tuple[BucketIndex, ...]


def ask_filters(shared: Shared, item: ToAsk, cost: Cost) -> tuple[dict[str, str], int]:
    """As Sidecars.meeting. Raises StoreError."""
    sidecars = sidecars_of(shared)
    if sidecars is None:
        return dict.fromkeys(item.segments, "bloom = false"), 0
    store = tier_of(shared.settings).ports.control
    answer = sidecars.meeting(item.segments, lambda: chain.from_iterable(each.dirty_keys(store) for each in item.buckets))
    note_memory(cost)
    return answer


# ---- the second stage -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToGather:
    """A segment whose survivors are to be written down. ``buckets`` None: nothing in it is superseded."""

    metadata: RemoteLogSegmentMetadata
    verdicts: SparseVerdicts
    buckets: BucketIndex | None
    fates: SparseFates


def answer_range(shared: Shared, number: int, segments: Sequence[ToGather], cost: Cost) -> Iterator[tuple[int, bytes]]:
    """(place of a segment in ``segments``, its survivors among the keys of one range); a segment may come several times.

    ``segments``: oldest first. Where the keys exceed the budget, the range is read again, a part of it each time.
    """
    store = tier_of(shared.settings).ports.control
    part, parts, guess = 0, 1, 0
    while part < parts:
        ranges, wanted = shared.ranges * parts, number * parts + part
        if ranges > 2**32:
            raise OutOfBudget("more keys than the map budget holds share one hash", hint="Raise map_budget_bytes")
        keys = KeySet(shared.map_budget_bytes, expected_keys=guess)
        full = False
        for place, index, rows in _rows(store, number, reversed(list(enumerate(segments))), clean=False):
            bitmap = np.zeros(index.ordinals // 8 + 1, np.uint8)
            taken = survive_if_first(keys.table, keys.state, rows, 0, ranges, wanted, bitmap)
            while taken < len(rows) and keys.grow():
                taken = survive_if_first(keys.table, keys.state, rows, taken, ranges, wanted, bitmap)
            if taken < len(rows):
                full = True
                break
            yield place, encode_bits(bitmap)
        cost.peak_map_bytes = max(cost.peak_map_bytes, keys.peak_bytes)
        if full:
            # What has been answered so far was right and will be answered again.
            part, parts = part * 2, parts * 2
            continue
        for place, index, rows in _rows(store, number, enumerate(segments), clean=True):
            bitmap = np.zeros(index.ordinals // 8 + 1, np.uint8)
            survive_if_absent(keys.table, keys.state, rows, ranges, wanted, bitmap)
            yield place, encode_bits(bitmap)
        cost.map_entries += keys.entries
        guess = keys.entries + keys.entries // 20
        part += 1
    note_memory(cost)


def _rows(
    store: ObjectStore, number: int, segments: Iterable[tuple[int, ToGather]], *, clean: bool
) -> Iterator[tuple[int, BucketIndex, npt.NDArray[np.uint32]]]:
    """One range of each segment that has any, in the given order; the next ones are fetched meanwhile."""

    def fetch(index: BucketIndex) -> npt.NDArray[np.uint32]:
        return index.read(store, number, clean=clean)

    with ThreadPoolExecutor(AHEAD) as pool:
        running: deque[tuple[int, BucketIndex, Future[npt.NDArray[np.uint32]]]] = deque()
        for place, segment in segments:
            if segment.buckets is not None and segment.buckets.has(number, clean=clean):
                running.append((place, segment.buckets, pool.submit(fetch, segment.buckets)))
            if len(running) > AHEAD:
                yield _arrived(*running.popleft())
        for waiting in running:
            yield _arrived(*waiting)


def _arrived(place: int, index: BucketIndex, rows: Future[npt.NDArray[np.uint32]]) -> tuple[int, BucketIndex, npt.NDArray[np.uint32]]:
    return place, index, rows.result()


@dataclass(frozen=True)
class Gathered:
    """What the second stage wrote: survivors, or the gate's keys. ``superseded``: some records of the segment are no survivors."""

    written: ScratchObject
    superseded: bool = False


def gather_survivors(shared: Shared, item: ToGather, answers: Iterable[bytes], cost: Cost) -> Gathered:
    """The answers of all ranges for one segment as one scratch object, with everything that pass 2 wants to know."""
    store = tier_of(shared.settings).ports.control
    arrays = encode_verdicts(item.verdicts.whole())
    if shared.gate_bits:
        arrays |= encode_fates(item.fates.whole())
    superseded = False
    if item.buckets is not None:
        bitmap = np.zeros(item.buckets.ordinals // 8 + 1, np.uint8)
        for answer in answers:
            if not set_bits(np.frombuffer(answer, np.uint8), bitmap):
                raise CompactorError(f"an answer does not fit segment {item.metadata.id}", hint="This is a bug; please report it")
            cost.exchanged_bytes += len(answer)
        superseded = int(np.bitwise_count(bitmap).sum(dtype=np.int64)) < item.buckets.rows
        arrays |= {"bitmap": bitmap, **item.buckets.facts(store)}
    written = create_once(store, f"{shared.scratch}survivors-{item.metadata.id}", pack_arrays(arrays))
    cost.exchanged_bytes += written.size
    note_memory(cost)
    return Gathered(written, superseded)


def gather_sample(shared: Shared, parts: tuple[ScratchObject, ...], cost: Cost) -> Gathered:
    """The last record of each key of the sample, from those of all segments."""
    store = tier_of(shared.settings).ports.control
    whole = Sample.of([read_scratch(store, part) for part in parts], seed_of(shared.plan), shared.gate_bits)
    written = create_once(store, f"{shared.scratch}{SAMPLE}", pack_arrays(whole.arrays(), dense=True))
    cost.exchanged_bytes += written.size
    note_memory(cost)
    return Gathered(written)


def warm_up() -> None:
    """Compiles the kernels of the second stage, or loads them from the cache."""
    keys, bitmap = KeySet(1 << 16, expected_keys=0), np.zeros(2, np.uint8)
    rows = np.frombuffer(bytes(16), np.uint32).reshape(-1, 4)
    survive_if_first(keys.table, keys.state, rows, 0, 1, 0, bitmap)
    survive_if_absent(keys.table, keys.state, rows, 1, 0, bitmap)
    set_bits(np.frombuffer(encode_bits(bitmap), np.uint8), bitmap)
