"""Pass 1 within bounded memory: a set of keys while they fit, rows on local disk from then on.

The answers are those of BackwardSurvivorScan, record by record. What the set has answered stays answered; its keys go to the disk before
the rows that come after them. Rows below the dirty range are looked up in pass 1 too, because no set of all keys is left.

The bits of all segments form one bitmap in the order of the scan, and the position of a row there is its ordinal on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from compactor.cleaner.keys.disk_map import SEEN, DiskOffsetMap
from compactor.cleaner.keys.key_set import MIN_MAP_BYTES, KeyHashSet
from compactor.cleaner.keys.survivors import (
    BackwardSurvivorScan,
    FlagsAndWhetherTheyAreFinal,
    HashedChunkKeys,
    KeyScanParameters,
    SegmentSurvivorBitmap,
)
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.worker_threads import ReusableJobBuffers, WorkerThreads
from compactor.errors import CompactorError, OutOfBudget
from compactor.kernels.common import FirstAndEndBatch, FirstRowByBatch, Flags, Hashes
from compactor.records.batches import Int64s
from compactor.records.rows import BatchChunk, RecordRows

OpenDiskMapOfPart = Callable[[int, int], DiskOffsetMap]
"""(part, parts) -> an empty engine on disk."""
FirstRowOrdinal = int


class KeyScanSpillingToDisk(BackwardSurvivorScan):
    """Backward scan for surviving records whose keys move to disk when they do not fit in memory.

    For each part of the keys the caller scans the dirty segments in descending order (``scan_dirty_segment_keys``), then the clean segments
    with rows to look up, in any order (``scan_clean_segment_keys``), and calls ``mark_survivors_and_end_key_part``. Between the two scans
    ``iterate_dirty_key_hashes`` yields the keys for Bloom filters. The survivors are known after the last part.

    :param key_set: set in memory for the keys at first; None to keep all keys on disk. Several parts require None.
    :param open_disk_map: function that opens the offset map on disk, given the number of the part and the number of parts.
    """

    def __init__(
        self, key_scan: KeyScanParameters, key_set: KeyHashSet | None, open_disk_map: OpenDiskMapOfPart, key_part_count: int = 1
    ) -> None:
        super().__init__(key_scan, key_set or KeyHashSet(MIN_MAP_BYTES))
        self._open = open_disk_map
        self._part, self._parts = 0, key_part_count
        self._map = open_disk_map(0, key_part_count) if key_set is None else None
        self._next = 0
        self._places: dict[int, int] = {}
        self._clean: dict[int, SegmentSurvivorBitmap] = {}
        self._clean_places: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}
        self._entries = 0
        self._peak = 0
        self.segments_superseded: set[int] = set()
        """Ordinals of segments of which pass 2 has found a superseded record below the dirty range."""

    @property
    @override
    def key_count(self) -> int:
        """Return the number of distinct keys in the dirty range."""
        return self._entries or self._set.key_count

    @property
    @override
    def peak_bytes(self) -> int:
        """Return the largest memory of the key set so far, in bytes."""
        return max(self._peak, self._set.peak_bytes)

    @property
    def key_scan(self) -> KeyScanParameters:
        """Return the parameters of the scan. After the first part of the keys they have no second reader (the gate, which checks the
        round), because it has read all keys by then.
        """
        return self._scan

    @property
    def are_rows_on_disk(self) -> bool:
        """Return whether the rows of the current part of the keys are on disk. If so, rows below the dirty range must be looked up
        during the scan.
        """
        return self._map is not None

    @property
    def has_moved_keys_to_disk(self) -> bool:
        """Return whether keys are or were on disk, because memory did not suffice for all of them."""
        return self._map is not None or self._entries > 0

    @override
    def scan_dirty_segment_keys(
        self, source: SourceSegment, wanted_batch_flags: Flags, workers: WorkerThreads, *, cleans_chunks_while_reading: bool = True
    ) -> None:
        """Read the keys of one dirty segment. Segments are passed in descending order. Raises BadData, OutOfBudget, StoreError.

        :param wanted_batch_flags: a flag per batch: whether it may have rows of the dirty range.
        :param cleans_chunks_while_reading: whether compressed chunks may be cleaned at once, because the outcomes of their transactions are
            known.
        """
        before = self._bits.pop(source.ordinal, None)
        self._places[source.ordinal] = self._next
        super().scan_dirty_segment_keys(source, wanted_batch_flags, workers, cleans_chunks_while_reading=cleans_chunks_while_reading)
        if before is not None:  # an earlier part of the keys has begun these bits, in the same places
            self._bits[source.ordinal] = before

    @override
    def _flag_newest_row_of_each_key(self, hashed: HashedChunkKeys) -> FlagsAndWhetherTheyAreFinal:
        rows = int(hashed.first_row[-1])
        place = self._reserve_consecutive_row_ordinals(rows)
        survives = np.zeros(rows, np.bool_)
        done = 0
        if self._map is None:
            seen = np.zeros(len(hashed.hashes), np.bool_)
            done = self._set.insert_keys_until_full(hashed.hashes, seen)
            survives[hashed.picked[:done]] = seen[:done]
            if done == len(hashed.hashes):
                return survives, True
            self._move_keys_to_disk()
        self._current_disk_map.add_keys_of_dirty_rows(hashed.hashes[done:], (place + hashed.picked[done:]).astype(np.uint32))
        return survives, False

    def iterate_dirty_key_hashes(self) -> Iterator[Hashes]:
        """Yield arrays of hashes, shape (n, 2), of the dirty range's keys that belong to the current part of the keys. A key may occur more
        than once.
        """
        return self._set.iterate_key_hashes() if self._map is None else self._map.iterate_dirty_key_hashes()

    def scan_clean_segment_keys(self, source: SourceSegment, wanted_batch_flags: Flags, workers: WorkerThreads) -> None:
        """Read the rows of a segment below the dirty range and add them to the disk map. Do nothing if the set in memory holds all keys,
        because pass 2 looks such rows up in it. Raises BadData, OutOfBudget.

        :param wanted_batch_flags: a flag per batch: whether it may have rows below the dirty range.
        """
        if self._map is None:
            return
        key_scan = self._scan
        bits = SegmentSurvivorBitmap(len(source.table))
        begins = self._next
        added: list[npt.NDArray[np.uint8]] = []

        def hash_keys_of_range_in_worker(buffers: ReusableJobBuffers, batch_range: FirstAndEndBatch) -> list[HashedChunkKeys]:
            first, last = batch_range
            return key_scan.hash_keys_of_batch_range(
                buffers, source, first, last, wanted_batch_flags[first:last], is_backwards=False, hashes_rows_below_dirty_range=True
            )

        for pieces in workers.yield_job_results_in_order(
            hash_keys_of_range_in_worker,
            [(first, last) for first, last in source.split_batches_by_magic_and_compression() if wanted_batch_flags[first:last].any()],
        ):
            for piece in pieces:
                rows = int(piece.first_row[-1])
                place = self._reserve_consecutive_row_ordinals(rows)
                self._current_disk_map.add_keys_of_clean_rows(piece.hashes, (place + piece.picked).astype(np.uint32))
                bits.add_survivors_of_chunk(piece, np.ones(rows, np.bool_), key_scan.first_dirty, source, are_flags_final=False)
                mine = np.zeros(rows, np.bool_)
                mine[piece.picked[self._current_disk_map.flag_keys_assigned_to_map(piece.hashes)]] = True
                added.append(np.packbits(mine))
        bits.join_chunk_flags_to_segment_bitmap()
        self._clean.setdefault(source.ordinal, bits)
        self._clean_places[source.ordinal] = (begins, np.concatenate(added) if added else np.empty(0, np.uint8))

    def mark_survivors_and_end_key_part(self) -> None:
        """Finish the current part of the keys: find which of its rows on disk survive, and continue with the next part. Raises OutOfBudget,
        StoreError.
        """
        self._scan = replace(self._scan, second_reader=None)  # it has seen all keys
        if self._map is None:
            return
        with self._current_disk_map as disk_map:
            found = disk_map.survivor_bitmap(8 * self._next)
            self._entries += disk_map.entries
            self._peak = max(self._peak, disk_map.peak_bytes)
        for ordinal, place in self._places.items():
            packed = self._bits[ordinal].packed
            packed |= found[place : place + len(packed)]
        for ordinal, (place, mine) in self._clean_places.items():
            packed = self._clean[ordinal].packed
            packed &= ~(mine & ~found[place : place + len(mine)])
        self._next = 0
        self._clean_places = {}
        self._part += 1
        self._map = self._open(self._part, self._parts) if self._part < self._parts else None

    def close(self) -> None:
        """Remove the file of the disk map if it is still open, which it is after a failed scan. A second call does nothing."""
        if self._map is not None:
            self._map.close()

    def free_key_set(self) -> None:
        """Free the memory of the key set. Afterwards no key can be looked up."""
        self._entries, self._peak = self.key_count, self.peak_bytes
        self._set = KeyHashSet(MIN_MAP_BYTES)

    @override
    def _flag_superseded_clean_rows(
        self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch, row_numbers: Int64s
    ) -> Flags:
        if not self.has_moved_keys_to_disk:
            found = super()._flag_superseded_clean_rows(source, chunk, rows, first_row, row_numbers)
        elif source.ordinal in self._clean:
            found = self._clean[source.ordinal].flag_superseded_rows_of_chunk(chunk, first_row)[row_numbers]
        else:
            return np.zeros(len(row_numbers), np.bool_)  # nobody had a reason to look them up: its filter met no key
        if found.any():
            self.segments_superseded.add(source.ordinal)
        return found

    @property
    def _current_disk_map(self) -> DiskOffsetMap:
        """Return the offset map on disk, which must be open."""
        if self._map is None:
            raise CompactorError("the disk is asked before it was needed", hint="This is a bug; please report it")
        return self._map

    def _reserve_consecutive_row_ordinals(self, row_count: int) -> FirstRowOrdinal:
        """Reserve consecutive row numbers (ordinals) for the rows of a chunk, and return the first one."""
        place = 8 * self._next
        self._next += (row_count + 7) // 8
        if 8 * self._next >= SEEN:
            raise OutOfBudget(
                f"one round over more than {SEEN - 1} records", hint="Clean a part of them first: raise min_compaction_lag_ms for one round"
            )
        return place

    def _move_keys_to_disk(self) -> None:
        """Open an offset map on disk, and move the keys of the full set to it."""
        self._map = self._open(0, 1)
        for keys in self._set.iterate_key_hashes():
            self._map.add_keys_with_known_newest_record(keys)
        self._peak = self._set.peak_bytes
        self._set = KeyHashSet(MIN_MAP_BYTES)
