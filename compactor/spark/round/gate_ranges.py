"""Computes what the gate expects to be left of each segment: tasks do so for some ranges of the gate's hash, and one task adds up their
sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compactor.cleaner.gate.key_table import (
    MAX_GATE_RANGES,
    FingerprintSumsBySegment,
    LatestRecordRows,
    LatestRecordTable,
    allocate_zero_fingerprint_sums,
)
from compactor.control.records import ScratchObject
from compactor.errors import OutOfBudget
from compactor.kernels.common import RowCount
from compactor.spark.cluster.executor import RoundTaskSettings, TaskCost, open_task_tier, record_peak_memory
from compactor.spark.round.exchange import create_scratch_object_idempotently, pack_arrays
from compactor.spark.round.gate_rows import DIRTY_ROWS, OUTSIDE, ExpectedRecordSums, SegmentFirstOffsetsAndEnd, StoredGateRows
from compactor.spark.round.range_rows import HashRangeRows, read_hash_ranges
from compactor.storage.port import ObjectStore

KeyCount = int

GATE_SUMS_NAME = "judged"
"""Last part of the key of the scratch object with the sums that the gate expects."""


@dataclass(frozen=True)
class GateInputOfAllHashRanges:
    """Input of the gate (the independent check of the output) for all tasks over hash ranges: its stored rows, and the offsets at which the
    segments begin.
    """

    bundles: tuple[StoredGateRows, ...]
    bounds: SegmentFirstOffsetsAndEnd


def compute_and_encode_expected_record_sums(
    shared: RoundTaskSettings, ranges: range, gate_input: GateInputOfAllHashRanges, cost: TaskCost
) -> bytes:
    """Compute checksums over the records that must remain of each segment, for some ranges of the key hash.

    The gate, an independent check of the output, later compares them with the rewritten segments. Return the sums encoded, followed by the
    number of keys.
    """
    store = open_task_tier(shared).ports.control
    sums, keys = compute_sums_of_records_that_must_remain(
        store, gate_input.bundles, ranges, shared.ranges, shared.map_budget_bytes, gate_input.bounds
    )
    cost.gate_keys += keys
    cost.gate_coverage = 1.0
    record_peak_memory(cost)
    return sums.tobytes() + keys.to_bytes(8, "little")


def write_expected_record_sums(
    shared: RoundTaskSettings, gate_input: GateInputOfAllHashRanges, encoded_sums: Iterable[bytes], cost: TaskCost
) -> ScratchObject:
    """Add up the sums of all tasks over hash ranges and write the total as one scratch object. The gate, an independent check, expects
    these sums in the output.
    """
    sums, keys = allocate_zero_fingerprint_sums(len(gate_input.bounds) - 1), 0
    for answer in encoded_sums:
        sums += np.frombuffer(answer[:-8], np.uint64).reshape(-1, 2)
        keys += int.from_bytes(answer[-8:], "little")
        cost.exchanged_bytes += len(answer)
    judged = ExpectedRecordSums(gate_input.bounds, sums, keys)
    written = create_scratch_object_idempotently(
        open_task_tier(shared).ports.control,
        f"{shared.scratch}{GATE_SUMS_NAME}",
        pack_arrays(judged.encode_expected_sums_as_arrays(), skip_compression=True),
    )
    cost.exchanged_bytes += written.size
    record_peak_memory(cost)
    return written


@dataclass(frozen=True)
class StoredGateRowsOfHashRange:
    """Rows of one hash range that tasks have stored for the gate (the independent check of the output), from all bundles (the output of
    one task each). They can be read several times.
    """

    bundles: Mapping[int, StoredGateRows]
    rows_of_range: HashRangeRows

    def count_rows_of_dirty_or_clean_section(self, section: int) -> RowCount:
        """Return the number of rows in a section (0: in the dirty range, 1: outside it)."""
        return sum(int(directory[1, section] - directory[0, section]) for directory in self.rows_of_range.directories.values())

    def read_rows_of_dirty_or_clean_section(self, section: int) -> Iterator[LatestRecordRows]:
        """Yield the rows of a section (0: in the dirty range, 1: outside it). Every call fetches them from the store again. Raises
        StoreError, or BadData if a checksum does not match.
        """
        for place, rows in self.rows_of_range.read_rows_of_dirty_or_clean_section(list(self.bundles), section):
            crc = int(self.rows_of_range.directories[place][:1, 2].copy().view(np.uint32)[section])
            if zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data) != crc:
                self.bundles[place].raise_damaged_rows_error()
            yield np.ascontiguousarray(rows)


def compute_sums_of_records_that_must_remain(
    store: ObjectStore,
    bundles: Sequence[StoredGateRows],
    ranges: range,
    range_count: int,
    budget_bytes: int,
    bounds: SegmentFirstOffsetsAndEnd,
) -> tuple[FingerprintSumsBySegment, KeyCount]:
    """Return, for adjacent hash ranges, the fingerprint sums of the records that must remain, by segment, and the number of their keys.
    Raises StoreError, BadData, OutOfBudget.

    :param ranges: numbers of the hash ranges, out of ``range_count`` into which the hash is divided.
    :param budget_bytes: memory for the keys.
    :param bounds: first offset of each segment, and the end of the last one.
    """
    by_place, sums, keys, table = (
        dict(enumerate(bundles)),
        allocate_zero_fingerprint_sums(len(bounds) - 1),
        0,
        LatestRecordTable(budget_bytes, 0),
    )
    for number, found in read_hash_ranges(store, by_place, ranges):
        keys += add_hash_range_to_expected_record_sums(StoredGateRowsOfHashRange(by_place, found), table, range_count, number, bounds, sums)
    return sums, keys


def add_hash_range_to_expected_record_sums(
    gate_range: StoredGateRowsOfHashRange,
    table: LatestRecordTable,
    range_count: int,
    range_number: int,
    bounds: SegmentFirstOffsetsAndEnd,
    out_sums: FingerprintSumsBySegment,
) -> KeyCount:
    """Add to ``out_sums`` the records that must remain in hash range ``range_number`` of ``range_count``, and return the number of keys. If
    ``table`` cannot hold the keys of the range, the range is split and its rows are read again for each part. Raises OutOfBudget,
    StoreError, BadData.

    :param bounds: first offset of each segment, and the end of the last one.
    """
    if range_count > MAX_GATE_RANGES:
        raise OutOfBudget("more keys than the gate's memory holds share one hash", hint="Raise map_budget_bytes")
    done = 0
    table.reset_to_hash_range(gate_range.count_rows_of_dirty_or_clean_section(DIRTY_ROWS), range_count, range_number)
    for rows in gate_range.read_rows_of_dirty_or_clean_section(DIRTY_ROWS):
        taken = table.put_rows_until_full(rows)
        done += taken
        if taken < len(rows):
            parts = max(2, -(-gate_range.count_rows_of_dirty_or_clean_section(DIRTY_ROWS) // max(1, done)))
            return sum(
                add_hash_range_to_expected_record_sums(
                    gate_range, table, range_count * parts, range_number * parts + part, bounds, out_sums
                )
                for part in range(parts)
            )
    table.add_fingerprint_sums_of_remaining_records(bounds, out_sums)
    for rows in gate_range.read_rows_of_dirty_or_clean_section(OUTSIDE):
        table.add_expected_fingerprints_outside_dirty_range(rows, bounds, out_sums)
    return table.key_count
