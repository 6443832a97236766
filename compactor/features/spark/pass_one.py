"""Tasks of pass 1: key index, Bloom filters, survivors in hash ranges and of bundles. A *bundle* is a set of neighbouring segments that one
task reads.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from bloom.filter import siphash_key_halves
from compactor.cleaner.disk_map import (
    KEY_ROW_BYTES,
    HashRangeRowFile,
    HashRangeSpan,
    mark_absent_rows,
    mark_newest_rows,
)
from compactor.cleaner.gate.gate import Gate
from compactor.cleaner.gate.parser import (
    GATE_ROW_BYTES,
    MAX_GATE_RANGES,
    WORDS,
    FingerprintSumsBySegment,
    LatestRecordRows,
    LatestRecordTable,
    allocate_zero_fingerprint_sums,
)
from compactor.cleaner.keys import KeyHashSet, count_keyless_rows
from compactor.cleaner.retention import TransactionVerdicts
from compactor.cleaner.source import SourceSegment
from compactor.cleaner.worker_threads import ReusableJobBuffers
from compactor.config.units import count_noun
from compactor.constants import MAX_OFFSET
from compactor.control.records import ScratchObject
from compactor.errors import CompactorError, OutOfBudget
from compactor.features.spark.exchange import (
    DIRECTORY_ENTRY_BYTES,
    DIRTY_ROWS,
    OUTSIDE,
    BatchScanSummary,
    ExchangeRows,
    ExpectedRecordSums,
    PassOneResultOfSegment,
    PassOneResultOfSegmentBundle,
    RowNumberRange,
    SegmentFirstOffsetsAndEnd,
    SparseTransactionOutcomes,
    StoredGateRows,
    StoredKeyRows,
    StoredSurvivorLocations,
    create_collecting_gate,
    create_scratch_object_idempotently,
    decode_scan_summaries,
    encode_bundle_result,
    encode_surviving_row_numbers,
    encode_transaction_outcomes,
    encode_transaction_verdicts,
    flag_tombstone_batches,
    flag_unaborted_data_batches,
    non_transactional_outcomes,
    number_last_rows,
    pack_arrays,
    pack_key_rows,
    pack_tail,
    set_row_bits,
    write_gate_object,
    write_sorted_rows,
)
from compactor.features.spark.jobs import RoundTaskSettings, open_sidecars, open_task_staging, open_task_tier, record_peak_memory
from compactor.kernels.common import Flags
from compactor.model.plan import KeylessRecords
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import NOT_CONTROL
from compactor.records.rows import parse_records
from compactor.round.ports import Costs
from compactor.round.sources import StagedSegmentReader
from compactor.storage.port import ObjectStore

# ---- rows of hash ranges, read from bundles in the store -----------------------------------------------------------------------


PREFETCHED_BUNDLES: Final = 4
"""Number of bundles fetched ahead, because a request takes longer than processing its rows."""

COMBINED_FETCH_BYTES: Final = 64 << 20
"""Neighbouring ranges are fetched together, with one request per bundle, up to this many bytes of rows."""

FirstRowNumbersOfHashRanges = npt.NDArray[np.int64]
FetchedRows = npt.NDArray[Any]
BundleIndexAndRows = tuple[int, FetchedRows]


class StoredHashRangeRows(Protocol):
    """Stored rows of a bundle by hash range, in two sections (0: offsets in the dirty range, 1: all others)."""

    @property
    def row_bytes(self) -> int: ...

    def read_range_starts(self, store: ObjectStore, first_range: int, end_range: int) -> FirstRowNumbersOfHashRanges:
        """Row numbers, with a line per range up to ``end_range`` (exclusive) and one for the end. Column 0: dirty, column 1: clean."""

    def read_stored_rows(self, store: ObjectStore, first_row: int, end_row: int) -> FetchedRows:
        """Up to ``end_row`` (exclusive)."""


@dataclass(frozen=True)
class HashRangeRows:
    """Rows of one hash range from all bundles.

    directories: by bundle, row numbers of the range's begin and end in each section.
    prefetched: by (bundle, section): number of the first row, and the rows.
    """

    store: ObjectStore
    bundles: Mapping[int, StoredHashRangeRows]
    directories: Mapping[int, FirstRowNumbersOfHashRanges]
    prefetched: Mapping[tuple[int, int], tuple[int, Future[FetchedRows]]]
    pool: ThreadPoolExecutor

    def read_dirty_rows(self, row_ranges: Sequence[RowNumberRange]) -> Iterator[BundleIndexAndRows]:
        """In the order of ``row_ranges``. A bundle stays in memory from the first of its rows to the last."""
        row_ranges = [piece for piece in row_ranges if self._has_section(piece.place, 0)]
        last = {piece.place: number for number, piece in enumerate(row_ranges)}
        coming = self._fetch_section(list(dict.fromkeys(piece.place for piece in row_ranges)), 0)
        held: dict[int, FetchedRows] = {}
        for number, piece in enumerate(row_ranges):
            if piece.place not in held:
                held.update([next(coming)])
            rows = held[piece.place]
            low, high = np.searchsorted(rows[:, 3], (piece.first, piece.end))
            if low < high:
                yield piece.place, rows[low:high]
            if last[piece.place] == number:
                del held[piece.place]

    def read_section(self, bundles: Sequence[int], section: int) -> Iterator[BundleIndexAndRows]:
        """Section 0: dirty, 1: clean."""
        return self._fetch_section([place for place in bundles if self._has_section(place, section)], section)

    def _has_section(self, bundle: int, section: int) -> bool:
        begin, end = self.directories[bundle][:, section]
        return bool(begin < end)

    def _fetch_section(self, bundles: Sequence[int], section: int) -> Iterator[BundleIndexAndRows]:
        running: deque[tuple[int, Future[FetchedRows]]] = deque()
        for place in bundles:
            begin, end = (int(row) for row in self.directories[place][:, section])
            if (place, section) in self.prefetched:
                first, rows = self.prefetched[place, section]
                yield place, rows.result()[begin - first : end - first]
                continue
            running.append((place, self.pool.submit(self.bundles[place].read_stored_rows, self.store, begin, end)))
            if len(running) > PREFETCHED_BUNDLES:
                at, arrived = running.popleft()
                yield at, arrived.result()
        for at, arrived in running:
            yield at, arrived.result()


def read_hash_ranges(store: ObjectStore, bundles: Mapping[int, StoredHashRangeRows], ranges: range) -> Iterator[tuple[int, HashRangeRows]]:
    """In order. Raises StoreError, or BadData if a bundle is damaged."""
    with ThreadPoolExecutor(PREFETCHED_BUNDLES) as pool:
        found = pool.map(lambda bundle: bundle.read_range_starts(store, ranges.start, ranges.stop), bundles.values())
        directories = dict(zip(bundles, found, strict=True))
        for some in _group_ranges_for_fetching(ranges, directories, max((bundle.row_bytes for bundle in bundles.values()), default=0)):
            first, last = some.start - ranges.start, some.stop - ranges.start
            prefetched = {}
            if len(some) > 1:
                for place, directory in directories.items():
                    for section in (0, 1):
                        begin, end = int(directory[first, section]), int(directory[last, section])
                        if begin < end:
                            prefetched[place, section] = (
                                begin,
                                pool.submit(bundles[place].read_stored_rows, store, begin, end),
                            )
            for number in some:
                at = number - ranges.start
                yield (
                    number,
                    HashRangeRows(
                        store, bundles, {place: directory[at : at + 2] for place, directory in directories.items()}, prefetched, pool
                    ),
                )


def _group_ranges_for_fetching(ranges: range, directories: Mapping[int, FirstRowNumbersOfHashRanges], row_bytes: int) -> Iterator[range]:
    rows = sum((np.diff(directory[:, :2], axis=0).sum(axis=1) for directory in directories.values()), np.zeros(len(ranges), np.int64))
    begin, size = ranges.start, 0
    for number, more in zip(ranges, (rows * row_bytes).tolist(), strict=True):
        if number > begin and size + more > COMBINED_FETCH_BYTES:
            yield range(begin, number)
            begin, size = number, 0
        size += more
    if begin < ranges.stop:
        yield range(begin, ranges.stop)


# ---- what the gate (the independent check of the output) expects to be left of each segment -------------------------------------


GATE_SUMS_NAME = "judged"
"""Last part of the key of the scratch object with the sums that the gate expects."""


@dataclass(frozen=True)
class GateInputOfAllHashRanges:
    bundles: tuple[StoredGateRows, ...]
    bounds: SegmentFirstOffsetsAndEnd


def encode_expected_sums(shared: RoundTaskSettings, ranges: range, gate_input: GateInputOfAllHashRanges, cost: Costs) -> bytes:
    """Encoded sums over the records that must remain, followed by the number of keys (8 bytes)."""
    store = open_task_tier(shared).ports.control
    sums, keys = compute_expected_sums(store, gate_input.bundles, ranges, shared.ranges, shared.map_budget_bytes, gate_input.bounds)
    cost.gate_keys += keys
    cost.gate_coverage = 1.0
    record_peak_memory(cost)
    return sums.tobytes() + keys.to_bytes(8, "little")


def write_expected_record_sums(
    shared: RoundTaskSettings, gate_input: GateInputOfAllHashRanges, encoded_sums: Iterable[bytes], cost: Costs
) -> ScratchObject:
    sums, keys = allocate_zero_fingerprint_sums(len(gate_input.bounds) - 1), 0
    for answer in encoded_sums:
        sums += np.frombuffer(answer[:-8], np.uint64).reshape(-1, 2)
        keys += int.from_bytes(answer[-8:], "little")
        cost.exchanged_bytes += len(answer)
    judged = ExpectedRecordSums(gate_input.bounds, sums, keys)
    written = create_scratch_object_idempotently(
        open_task_tier(shared).ports.control,
        f"{shared.scratch}{GATE_SUMS_NAME}",
        pack_arrays(judged.as_arrays(), skip_compression=True),
    )
    cost.exchanged_bytes += written.size
    record_peak_memory(cost)
    return written


@dataclass(frozen=True)
class StoredGateRowsOfHashRange:
    """Rows from all bundles, which can be read several times."""

    bundles: Mapping[int, StoredGateRows]
    rows_of_range: HashRangeRows

    def count_section(self, section: int) -> int:
        return sum(int(directory[1, section] - directory[0, section]) for directory in self.rows_of_range.directories.values())

    def read_section(self, section: int) -> Iterator[LatestRecordRows]:
        """Fetched at every call. Raises StoreError, or BadData if a checksum does not match."""
        for place, rows in self.rows_of_range.read_section(list(self.bundles), section):
            crc = int(self.rows_of_range.directories[place][:1, 2].copy().view(np.uint32)[section])
            if zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data) != crc:
                self.bundles[place].raise_damaged_rows_error()
            yield np.ascontiguousarray(rows)


def compute_expected_sums(
    store: ObjectStore,
    bundles: Sequence[StoredGateRows],
    ranges: range,
    range_count: int,
    budget_bytes: int,
    bounds: SegmentFirstOffsetsAndEnd,
) -> tuple[FingerprintSumsBySegment, int]:
    """Fingerprint sums of the records that must remain, and the number of keys. Raises StoreError, BadData, OutOfBudget."""
    by_place, sums, keys, table = (
        dict(enumerate(bundles)),
        allocate_zero_fingerprint_sums(len(bounds) - 1),
        0,
        LatestRecordTable(budget_bytes, 0),
    )
    for number, found in read_hash_ranges(store, by_place, ranges):
        keys += add_range_sums(StoredGateRowsOfHashRange(by_place, found), table, range_count, number, bounds, sums)
    return sums, keys


def add_range_sums(
    gate_range: StoredGateRowsOfHashRange,
    table: LatestRecordTable,
    range_count: int,
    range_number: int,
    bounds: SegmentFirstOffsetsAndEnd,
    out_sums: FingerprintSumsBySegment,
) -> int:
    """Return the number of keys. A range too large for ``table`` is split and read again. Raises OutOfBudget, StoreError, BadData."""
    if range_count > MAX_GATE_RANGES:
        raise OutOfBudget("more keys than the gate's memory holds share one hash", hint="Raise map_budget_bytes")
    done = 0
    table.reset_to_hash_range(gate_range.count_section(DIRTY_ROWS), range_count, range_number)
    for rows in gate_range.read_section(DIRTY_ROWS):
        taken = table.put_rows_until_full(rows)
        done += taken
        if taken < len(rows):
            parts = max(2, -(-gate_range.count_section(DIRTY_ROWS) // max(1, done)))
            return sum(
                add_range_sums(gate_range, table, range_count * parts, range_number * parts + part, bounds, out_sums)
                for part in range(parts)
            )
    table.add_remaining_sums(bounds, out_sums)
    for rows in gate_range.read_section(OUTSIDE):
        table.add_outside_sums(rows, bounds, out_sums)
    return table.key_count


GATE_PREFIX: Final = "gate-"
"""Prefix of the names of scratch objects with the gate's rows."""

KEYS_PREFIX: Final = "keys-"
SURVIVORS_PREFIX: Final = "survivors-"
BundleIndexAndRowNumbers = tuple[int, bytes]
"""Index of a bundle, and the encoded row numbers of its surviving records in one hash range."""

ReadReasonsAndFetchedBytes = tuple[dict[str, str], int]
"""Why segments must be read, by segment id, and the number of bytes fetched."""


@dataclass(frozen=True)
class SegmentToReadInPassOne:
    """Segment to read.

    rows: whether its key rows are wanted, not just its batch headers.
    verdicts, outcomes: for the cleaner and for the gate; None until the driver knows which transactions were aborted.
    """

    metadata: RemoteLogSegmentMetadata
    rows: bool
    verdicts: SparseTransactionVerdicts | None = None
    outcomes: SparseTransactionOutcomes | None = None


@dataclass(frozen=True)
class SparseTransactionVerdicts:
    """Counterpart of SparseTransactionOutcomes for the cleaner."""

    batches: int
    places: npt.NDArray[np.int64]
    verdicts: TransactionVerdicts

    def expand_to_all_batches(self) -> TransactionVerdicts:
        """Batches without a stored one are neither aborted nor discardable nor indexed."""
        flags = {}
        for name in ("aborted", "discardable", "indexed"):
            flags[name] = np.zeros(self.batches, np.bool_)
            flags[name][self.places] = getattr(self.verdicts, name)
        return TransactionVerdicts(**flags, txn_entries=self.verdicts.txn_entries)


def read_bundle(shared: RoundTaskSettings, segments: tuple[SegmentToReadInPassOne, ...], cost: Costs) -> PassOneResultOfSegmentBundle:
    """Read headers (newest segment first) and, where wanted, write key rows to one scratch object.

    :raises BadData, StoreError, OutOfBudget: if a segment is corrupt, the store fails, disk is short.
    """
    name = hashlib.sha256("".join(f"{item.metadata.id} {item.rows} {item.verdicts is None}\n" for item in segments).encode()).hexdigest()[
        :16
    ]
    with open_task_staging(shared, cost) as staging, ExitStack() as reserved:

        def reserve_disk_bytes(size: int) -> None:
            reserved.enter_context(
                staging.reserved_at_once(size, f"the keys of {count_noun(len(segments), 'segment')} of {shared.partition}")
            )

        def open_row_file(name: str, words_per_row: int, dtype: type[np.generic]) -> HashRangeRowFile:
            spool = HashRangeRowFile(
                staging.folder / f"{name}.spool",
                _TaskDiskReservation(reserve_disk_bytes),
                HashRangeSpan(shared.ranges),
                words_per_row,
                dtype,
                f"the rows of the {name}",
            )
            return reserved.enter_context(spool)

        bundle = _KeyRowWriterOfSegmentBundle(
            shared,
            shared.open_segments(staging, [item.metadata for item in segments]),
            open_row_file("keys", 4, np.uint32),
            open_row_file("gate", WORDS, np.uint64) if shared.gate else None,
        )
        indexed = [bundle.read_segment(ordinal, item) for ordinal, item in enumerate(segments)]
        done = PassOneResultOfSegmentBundle(tuple(indexed), None)
        if any(item.rows for item in segments):
            done = bundle.write_scratch_objects(done, name, staging.folder / "keys", reserve_disk_bytes)
            cost.rows += bundle.key_rows.row_count
            cost.exchanged_bytes += sum(part.size for part in (done.keys, done.gate) if part)
        return done


@dataclass(frozen=True)
class _TaskDiskReservation:
    """Disk that a task keeps until it ends."""

    reserve_bytes_on_disk: Callable[[int], None]

    def release_bytes_on_disk(self, nbytes: int) -> None:
        """All is released when the task ends."""


@dataclass
class _KeyRowWriterOfSegmentBundle:
    shared: RoundTaskSettings
    reading: StagedSegmentReader
    key_rows: HashRangeRowFile
    gate_rows: HashRangeRowFile | None
    facts: dict[str, BatchScanSummary] = field(default_factory=dict)
    next_ordinal: int = 0

    def read_segment(self, ordinal: int, item: SegmentToReadInPassOne) -> PassOneResultOfSegment:
        with self.reading.open_segment(ordinal) as source:
            pass  # its headers
        table, name = source.table, item.metadata.id
        data = table.transactional_flags & (table.control == NOT_CONTROL)
        places = np.flatnonzero(data | (table.control != NOT_CONTROL))
        undecided = item.rows and item.verdicts is None and bool(data.any())
        first, ordinals_, rows, keyless = -1, 0, 0, KeylessRecords()
        if item.rows and not undecided:
            before = self.key_rows.row_count
            first, (ordinals_, keyless) = self.next_ordinal, self._collect_segment_rows(source, item)
            self.next_ordinal = -(-(first + ordinals_) // 8) * 8
            rows = self.key_rows.row_count - before
        self.reading.staging.delete_cached_copies([self.reading.log_file_to_stage(ordinal)])
        return PassOneResultOfSegment(
            name, len(table), places, table.select_rows(places), source.txn_entries, undecided, first, ordinals_, rows, keyless
        )

    def _collect_segment_rows(self, source: SourceSegment, item: SegmentToReadInPassOne) -> tuple[int, KeylessRecords]:
        aborted = item.verdicts.expand_to_all_batches().aborted if item.verdicts else np.zeros(len(source.table), np.bool_)
        outcomes = item.outcomes.expand_to_all_batches() if item.outcomes else non_transactional_outcomes(len(source.table))
        with self.reading.memory_map_segment(source):
            gate = create_collecting_gate(self.shared.plan, self.shared.hash_key, source, outcomes) if self.gate_rows else None
            wanted = flag_unaborted_data_batches(source, aborted)
            self.facts[item.metadata.id], count, keyless = _collect_key_rows(
                self.shared, source, wanted, self.key_rows, gate, self.gate_rows, self.next_ordinal
            )
        return count, keyless

    def write_scratch_objects(
        self, bundle: PassOneResultOfSegmentBundle, name: str, path: Path, reserve_bytes_on_disk: Callable[[int], None]
    ) -> PassOneResultOfSegmentBundle:
        """Return the bundle with locations. ``path``: local file, deleted at the end."""
        shared, store = self.shared, open_task_tier(self.shared).ports.control
        gate = None
        # The gate's object is created first, so that it exists whenever the object with the key rows does.
        if self.gate_rows is not None:
            reserve_bytes_on_disk(self.gate_rows.row_count * GATE_ROW_BYTES + (shared.ranges + 1) * DIRECTORY_ENTRY_BYTES)
            gate = write_gate_object(self.gate_rows, path, f"{shared.scratch}{GATE_PREFIX}{name}")
            create_scratch_object_idempotently(store, gate.key, path)
        reserve_bytes_on_disk(self.key_rows.row_count * KEY_ROW_BYTES)
        with path.open("wb") as file:
            begins, _ = write_sorted_rows(self.key_rows, file)
            file.write(begins.tobytes())
            dirty, total = begins[-1].tolist()
            keys = StoredKeyRows(f"{shared.scratch}{KEYS_PREFIX}{name}", 0, shared.ranges, self.next_ordinal, dirty, total - dirty)
            tail = pack_tail(encode_bundle_result(replace(bundle, keys=keys, gate=gate), self.facts))
            reserve_bytes_on_disk(len(tail))
            file.write(tail)
        size = create_scratch_object_idempotently(store, keys.key, path).size
        path.unlink()
        return replace(bundle, keys=replace(keys, size=size), gate=gate)


def _collect_key_rows(
    shared: RoundTaskSettings,
    source: SourceSegment,
    selected_batches: Flags,
    key_rows: HashRangeRowFile,
    gate: Gate | None,
    gate_rows: HashRangeRowFile | None,
    next_ordinal: int,
) -> tuple[BatchScanSummary, int, KeylessRecords]:
    """Last record first, numbered from ``next_ordinal`` on. Return the facts about batches, the number of row numbers used, and the dirty
    range's records without a key.
    """
    table, plan, buffers, begun_at = source.table, shared.plan, ReusableJobBuffers(), next_ordinal
    halves, first_dirty = siphash_key_halves(shared.hash_key), plan.first_dirty_offset
    limit = plan.policy.max_decompressed_batch_bytes
    tombstones = np.zeros(len(table), np.bool_)
    counts = np.where(selected_batches, table.count.astype(np.int64), 0)
    keyless, dirty = np.zeros(len(table), np.int64), KeylessRecords()
    for first, last in reversed(source.split_by_kind()):
        if not selected_batches[first:last].any():
            continue
        for chunk in source.read_chunks(first, last, selected_batches[first:last], limit, buffers.bodies, is_backwards=True):
            rows, first_row = parse_records(table, chunk, buffers.rows, source.name)
            some = slice(chunk.first, chunk.last)
            counts[some] = np.diff(first_row)
            begin = next_ordinal + number_last_rows(counts[some])
            next_ordinal += len(rows)
            flag_tombstone_batches(first_row, rows.value_length, tombstones[some])
            keyless[some] = np.diff(np.append(0, np.cumsum(rows.key_length < 0))[first_row])
            if source.end > first_dirty:
                dirty = dirty.plus(count_keyless_rows(rows.offset, rows.key_length, first_dirty))
                key_rows.add_rows_to_section(DIRTY_ROWS, pack_key_rows(chunk, rows, first_row, begin, halves, first_dirty, MAX_OFFSET))
                if gate is not None and gate_rows is not None:
                    gate_rows.add_rows_to_section(DIRTY_ROWS, gate.extract_key_rows(buffers, source, chunk).rows)
            if source.base < first_dirty:
                key_rows.add_rows_to_section(OUTSIDE, pack_key_rows(chunk, rows, first_row, begin, halves, 0, first_dirty))
                if gate is not None and gate_rows is not None:
                    gate_rows.add_rows_to_section(OUTSIDE, gate.extract_key_rows(buffers, source, chunk, selects_non_dirty=True).rows)
    packed_legacy = (table.magic < 2) & (table.codec_ids > 0)
    summary = BatchScanSummary(
        tombstones, counts if (packed_legacy & selected_batches).any() else counts[:0], keyless if keyless.any() else keyless[:0]
    )
    return summary, next_ordinal - begun_at, dirty


# ---- clean segments that need not be read -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BloomFilterQuery:
    """Comparison of the Bloom filters of segments (ids) with all dirty keys."""

    segments: tuple[str, ...]
    bundles: tuple[StoredKeyRows, ...]


def query_bloom_filters(shared: RoundTaskSettings, item: BloomFilterQuery, cost: Costs) -> ReadReasonsAndFetchedBytes:
    """By segment id, why the segment must be read (absent if its filter matches no dirty key), and the fetched bytes. Raises StoreError."""
    sidecars = open_sidecars(shared)
    if sidecars is None:
        return dict.fromkeys(item.segments, "bloom = false"), 0
    store = open_task_tier(shared).ports.control
    answer = sidecars.find_possible_segments(
        item.segments, lambda: chain.from_iterable(each.read_dirty_key_hashes(store) for each in item.bundles)
    )
    record_peak_memory(cost)
    return answer


# ---- the second stage -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputOfAllHashRangeTasks:
    """Input of all tasks over hash ranges.

    dirty: of the dirty segments, newest first.
    wanted_bundles: bundles whose survivors are wanted.
    """

    bundles: tuple[StoredKeyRows, ...]
    dirty: tuple[RowNumberRange, ...]
    wanted_bundles: frozenset[int]


@dataclass(frozen=True)
class SegmentForWritingSurvivors:
    """Without key rows, no record is superseded."""

    indexed: PassOneResultOfSegment
    verdicts: SparseTransactionVerdicts
    outcomes: SparseTransactionOutcomes


@dataclass(frozen=True)
class SurvivorBundle:
    """keys: None if no rows were stored, so that all records survive."""

    name: str
    segments: tuple[SegmentForWritingSurvivors, ...]
    keys: StoredKeyRows | None


def find_survivors(
    shared: RoundTaskSettings, ranges: range, range_input: InputOfAllHashRangeTasks, cost: Costs
) -> Iterator[BundleIndexAndRowNumbers]:
    """A bundle may appear several times or never."""
    store = open_task_tier(shared).ports.control
    wanted = {place: bundle for place, bundle in enumerate(range_input.bundles) if bundle.dirty_rows or place in range_input.wanted_bundles}
    for number, rows in read_hash_ranges(store, wanted, ranges):
        yield from _find_range_survivors(shared, number, range_input, rows, cost)
    record_peak_memory(cost)


def _find_range_survivors(
    shared: RoundTaskSettings, range_number: int, range_input: InputOfAllHashRangeTasks, range_rows: HashRangeRows, cost: Costs
) -> Iterator[BundleIndexAndRowNumbers]:
    """If the keys exceed the budget, the range is split and read again; survivors may then be yielded twice."""
    clean = [place for place in sorted(range_input.wanted_bundles) if range_input.bundles[place].clean_rows]
    part, parts, guess = 0, 1, 0
    while part < parts:
        ranges, wanted = shared.ranges * parts, range_number * parts + part
        if ranges > 2**32:
            raise OutOfBudget("more keys than the map budget holds share one hash", hint="Raise map_budget_bytes")
        keys = KeyHashSet(shared.map_budget_bytes, expected_key_count=guess)
        full = False
        for place, rows in range_rows.read_dirty_rows(range_input.dirty):
            by_row, kept = _number_rows_by_position(rows)
            taken = mark_newest_rows(keys.table, keys.state, by_row, 0, ranges, wanted, kept)
            while taken < len(rows) and keys.enlarge():
                taken = mark_newest_rows(keys.table, keys.state, by_row, taken, ranges, wanted, kept)
            if taken < len(rows):
                full = True
                break
            if place in range_input.wanted_bundles and kept.any():
                yield place, encode_surviving_row_numbers(rows, kept)
        cost.peak_map_bytes = max(cost.peak_map_bytes, keys.peak_bytes)
        if full:
            # What has been answered so far was right and will be answered again.
            part, parts = part * 2, parts * 2
            continue
        for place, rows in range_rows.read_section(clean, 1):
            by_row, kept = _number_rows_by_position(rows)
            mark_absent_rows(keys.table, keys.state, by_row, ranges, wanted, kept)
            if kept.any():
                yield place, encode_surviving_row_numbers(rows, kept)
        cost.map_entries += keys.key_count
        guess = keys.key_count + keys.key_count // 20
        part += 1


def _number_rows_by_position(rows: ExchangeRows) -> tuple[ExchangeRows, npt.NDArray[np.uint8]]:
    """Positions become row numbers; the bitmap of zeros has one bit per row."""
    by_row = rows.copy()
    by_row[:, 3] = np.arange(len(rows), dtype=np.uint32)
    return by_row, np.zeros(-(-len(rows) // 8), np.uint8)


@dataclass(frozen=True)
class WrittenSurvivors:
    """A scratch object with survivors, or with the gate's sums.

    parts: None for the gate's object.
    superseded: segments with superseded records.
    """

    written: ScratchObject
    parts: StoredSurvivorLocations | None = None
    superseded: tuple[str, ...] = ()


def write_survivors(shared: RoundTaskSettings, item: SurvivorBundle, encoded_row_numbers: Iterable[bytes], cost: Costs) -> WrittenSurvivors:
    """Write one scratch object, with all that pass 2 needs."""
    store = open_task_tier(shared).ports.control
    bitmap, facts = np.zeros(0, np.uint8), {}
    if item.keys is not None:
        bitmap = np.zeros(item.keys.ordinals // 8 + 1, np.uint8)
        for answer in encoded_row_numbers:
            if not set_row_bits(np.frombuffer(answer, np.uint8), bitmap):
                raise CompactorError(f"an answer does not fit {item.keys.key}", hint="This is a bug; please report it")
            cost.exchanged_bytes += len(answer)
        facts = decode_scan_summaries(item.keys.read_results(store))
    out, parts, superseded = bytearray(), {}, []
    for segment in item.segments:
        known = segment.indexed
        # With or without a gate: whoever takes the round up may have one.
        arrays = encode_transaction_verdicts(segment.verdicts.expand_to_all_batches()) | encode_transaction_outcomes(
            segment.outcomes.expand_to_all_batches()
        )
        if known.has_key_rows:
            mine = bitmap[known.first // 8 : -(-(known.first + known.ordinals) // 8)]
            if int(np.bitwise_count(mine).sum(dtype=np.int64)) < known.rows:
                superseded.append(known.id)
            scanned = facts[known.id]
            arrays |= {"bitmap": mine, "tombstones": scanned.tombstones, "counts": scanned.counts, "keyless": scanned.keyless}
        data = pack_arrays(arrays)
        parts[known.id] = (len(out), len(data), hashlib.sha256(data).hexdigest())
        out += data
    found = StoredSurvivorLocations(parts)
    written = create_scratch_object_idempotently(
        store, f"{shared.scratch}{SURVIVORS_PREFIX}{item.name}", bytes(out) + pack_tail(found.encode_locations_as_arrays())
    )
    cost.exchanged_bytes += written.size
    record_peak_memory(cost)
    return WrittenSurvivors(written, found, tuple(superseded))


def load_survivor_kernels() -> None:
    keys, kept = KeyHashSet(1 << 16, expected_key_count=0), np.zeros(1, np.uint8)
    rows = np.frombuffer(bytes(16), np.uint32).reshape(-1, 4)
    mark_newest_rows(keys.table, keys.state, rows, 0, 1, 0, kept)
    mark_absent_rows(keys.table, keys.state, rows, 1, 0, kept)
    set_row_bits(np.frombuffer(encode_surviving_row_numbers(rows, kept), np.uint8), kept)
