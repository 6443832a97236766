"""Equivalence gate of a spread round, in which no process sees all keys: one task computes the expected result for each range of the
gate's own hash.

    pass 1      each task also writes the gate's rows of its segments, sorted by range, as one object per bundle
    ranges      range tasks find the last record of each key and compute what must be left of each segment: a count and a sum of record
    marks gathering   one task adds up the sums of all range tasks, 16 bytes a segment
    pass 2      each group is compared with its sources and these sums before it is uploaded

The other checks equal those on one machine: transactions (folded a second time on the driver), headers, order, checksums, coverage.
The gate shares only the transport of bytes with the cleaner's exchange.

    object      [range 0 | range 1 | ..] dirty rows   [range 0 | ..] rows outside the dirty range   [directory]
    directory   for each range and for the end: the first row number of both sections, 8 bytes each; CRCs of both sections, 4 bytes each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, NoReturn

import numpy as np
import numpy.typing as npt

from compactor.cleaner.gate.batch_checks import BatchTransactionOutcomes
from compactor.cleaner.gate.gate import Gate
from compactor.cleaner.gate.key_table import GATE_ROW_BYTES, WORDS, FingerprintSumsBySegment, LatestRecordRows, LatestRecordTable, Words
from compactor.cleaner.gate.parameters import CleanedSegmentCheckParameters
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.row_spool import HashRangeRowFile
from compactor.errors import BadData, CompactorError
from compactor.model.plan import CompactionPlan
from compactor.records.batches import Int64s
from compactor.round.pass_two import retention_rules_of_plan
from compactor.spark.round.exchange import Arrays, read_scratch_bytes, write_rows_by_section_and_hash_range
from compactor.storage.port import ObjectStore

DIRECTORY_ENTRY_BYTES: Final = 24
DIRTY_ROWS, OUTSIDE = range(2)
"""Sections of a bundle: rows of the dirty range, and rows outside it that are looked up."""

SegmentFirstOffsetsAndEnd = Int64s
"""First offset of each segment that the gate covers, ascending, and the end offset (exclusive) of the last one."""


# ---- rows of a bundle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredGateRows:
    """Location of the rows that tasks have stored for the gate (the independent check of the output), of one bundle of segments (neighbours
    that one task has read).

    size: bytes of the object. ranges: number of hash ranges by which the rows are sorted.
    dirty_rows: number of rows in the dirty range.
    rows_below: number of rows at offsets below the dirty range.
    """

    key: str
    size: int
    ranges: int
    dirty_rows: int
    rows_below: int

    row_bytes: ClassVar[int] = GATE_ROW_BYTES

    def read_first_row_numbers_of_hash_ranges(self, store: ObjectStore, first_range: int, end_range: int) -> npt.NDArray[np.int64]:
        """Read at which row numbers the hash ranges from ``first_range`` to ``end_range`` (exclusive) begin, as an array with a line per
        range and one for the end of the last range. Column 0 is the section of rows in the dirty range, column 1 that of the others, column
        2 holds the CRCs of both. Raises BadData if the numbers are inconsistent.
        """
        total = self.dirty_rows + self.rows_below
        size = (end_range - first_range + 1) * DIRECTORY_ENTRY_BYTES
        data = read_scratch_bytes(store, self.key, total * GATE_ROW_BYTES + first_range * DIRECTORY_ENTRY_BYTES, size)
        found = np.frombuffer(data, np.int64).reshape(-1, 3) if len(data) == size else np.empty((0, 3), np.int64)
        if not len(found) or (np.diff(found[:, :2], axis=0) < 0).any() or found[-1, 0] > self.dirty_rows or found[-1, 1] > total:
            self.raise_damaged_rows_error()
        return found

    def read_stored_rows_by_row_number(self, store: ObjectStore, first_row: int, end_row: int) -> LatestRecordRows:
        """Read the gate's rows from ``first_row`` to ``end_row`` (exclusive). Raises BadData if the object is too short."""
        data = read_scratch_bytes(store, self.key, first_row * GATE_ROW_BYTES, (end_row - first_row) * GATE_ROW_BYTES)
        if len(data) != (end_row - first_row) * GATE_ROW_BYTES:
            self.raise_damaged_rows_error()
        return np.frombuffer(data, np.uint64).reshape(-1, WORDS)

    def raise_damaged_rows_error(self) -> NoReturn:
        """Raise BadData, which states that the stored rows are not those that were written."""
        raise BadData("the gate's rows in a scratch object are not what was written", segment=self.key, hint="Run it again")


def write_gate_rows_and_directory(spool: HashRangeRowFile, path: Path, object_key: str) -> StoredGateRows:
    """Write the rows collected for the gate (the independent check of the output), and a directory of them, to the local file ``path``.
    Return their location in the object ``object_key``, to which the caller uploads the file. Raises StoreError if the disk fails.
    """
    with path.open("wb") as file:
        begins, crcs = write_rows_by_section_and_hash_range(spool, file)
        file.write(np.column_stack((begins, np.append(crcs.view(np.int64), 0))).tobytes())
        dirty, total = begins[-1].tolist()
        return StoredGateRows(object_key, file.tell(), spool.ranges.count, dirty, total - dirty)


# ---- transactions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseTransactionOutcomes:
    """Transaction results that the gate (the independent check of the output) has computed for one segment, stored only for batches that
    belong to transactions.

    places: the batch numbers of ``outcomes``.
    batches: the number of batches in all.
    """

    batches: int
    places: Int64s
    outcomes: BatchTransactionOutcomes

    def expand_to_all_batches(self) -> BatchTransactionOutcomes:
        """Return the transaction results of all batches, including those outside transactions."""
        aborted, idle = np.zeros(self.batches, np.bool_), np.zeros(self.batches, np.bool_)
        began = np.full(self.batches, -1, np.int64)
        aborted[self.places], idle[self.places], began[self.places] = self.outcomes.aborted, self.outcomes.idle, self.outcomes.began
        return BatchTransactionOutcomes(aborted, idle, began)


def outcomes_of_non_transactional_batches(batch_count: int) -> BatchTransactionOutcomes:
    """Return the transaction results of a segment in which no batch belongs to a transaction."""
    return BatchTransactionOutcomes(np.zeros(batch_count, np.bool_), np.zeros(batch_count, np.bool_), np.full(batch_count, -1, np.int64))


def encode_transaction_outcomes(outcomes: BatchTransactionOutcomes) -> Arrays:
    """Return transaction results as arrays for a scratch object."""
    return {"gate_aborted": np.packbits(outcomes.aborted), "gate_idle": np.packbits(outcomes.idle), "gate_began": outcomes.began}


def decode_transaction_outcomes(arrays: Arrays, batch_count: int) -> BatchTransactionOutcomes:
    """Restore the transaction outcomes of a segment with ``batch_count`` batches."""
    aborted, idle = (np.unpackbits(arrays[name], count=batch_count).astype(np.bool_) for name in ("gate_aborted", "gate_idle"))
    return BatchTransactionOutcomes(aborted, idle, arrays["gate_began"].astype(np.int64))


# ---- gates over some segments of a log --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectedRecordSums:
    """Sums over the records that must remain of each segment. The gate, the independent check of the output, compares the rewritten
    segments with them.

    bounds: the first offset of each segment, ascending, and the end of the last one.
    sums: for each segment, the number of its surviving records and the sum of their checksums.
    keys: number of distinct keys in the dirty range.
    """

    bounds: SegmentFirstOffsetsAndEnd
    sums: FingerprintSumsBySegment
    keys: int

    def encode_expected_sums_as_arrays(self) -> Arrays:
        """Return the arrays for a scratch object."""
        return {"gate_bounds": self.bounds, "gate_sums": self.sums, "gate_keys": np.array([self.keys], np.int64)}

    @staticmethod
    def decode_expected_sums_from_arrays(arrays: Arrays) -> ExpectedRecordSums:
        """Restore the sums from the arrays of a scratch object."""
        return ExpectedRecordSums(arrays["gate_bounds"], arrays["gate_sums"], int(arrays["gate_keys"][0]))

    def expected_count_and_checksum_sum_of_segment(self, source: SourceSegment) -> Words:
        """Return the number of records that must remain of one segment and the sum of their checksums. Raises CompactorError if these sums
        were not computed for the segment.
        """
        place = int(np.searchsorted(self.bounds[:-1], source.base))
        if place >= len(self.sums) or int(self.bounds[place]) != source.base:
            raise CompactorError(f"the gate was not shown {source.name}", hint="This is a bug; please report it")
        return np.asarray(self.sums[place])


def create_gate_collecting_segment_rows(
    plan: CompactionPlan, hash_key: bytes, source: SourceSegment, outcomes: BatchTransactionOutcomes
) -> Gate:
    """Return a gate (an independent check of the output) that in pass 1 collects the rows of one segment with which the output is compared
    later.

    :param hash_key: key of the cleaner's hash.
    :param outcomes: outcomes of the segment's transactions.
    """
    gate = Gate(_gate_parameters_of_plan(plan, hash_key), LatestRecordTable(0, 0), {source.ordinal: outcomes})
    gate.begin_checks_of_segment_chunks(source)
    return gate


def create_gate_checking_rewritten_groups(
    plan: CompactionPlan,
    hash_key: bytes,
    sources: Sequence[SourceSegment],
    outcomes: Sequence[BatchTransactionOutcomes],
    expected_sums: ExpectedRecordSums | None,
) -> Gate:
    """Return a gate (an independent check of the output) that compares rewritten groups of segments with their sources in pass 2.

    :param outcomes: for each source, the outcomes of its transactions.
    :param expected_sums: the sums that the output must have; None if nothing is dirty, so that no record is superseded.
    """
    known = {source.ordinal: fate for source, fate in zip(sources, outcomes, strict=True)}
    left = (
        {}
        if expected_sums is None
        else {source.ordinal: expected_sums.expected_count_and_checksum_sum_of_segment(source) for source in sources}
    )
    return Gate(_gate_parameters_of_plan(plan, hash_key), LatestRecordTable(0, 0), known, left)


def _gate_parameters_of_plan(plan: CompactionPlan, hash_key: bytes) -> CleanedSegmentCheckParameters:
    """Return the rules and limits that the gate takes from the plan."""
    return CleanedSegmentCheckParameters(
        retention_rules_of_plan(plan), plan.first_dirty_offset, hash_key, plan.policy.max_decompressed_batch_bytes
    )
