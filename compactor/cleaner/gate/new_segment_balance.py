"""Balance of a new segment, summed by the gate's parser and not by the cleaner that wrote the segment."""

from __future__ import annotations

import numpy as np

from compactor.cleaner.gate.parser import (
    COUNT,
    MAGIC,
    POSITION,
    GateRecordParser,
    GateRecords,
    HeaderFields,
    InflatedTooLargeError,
    UnreadableBatchesError,
    first_batch_with_crc_mismatch,
    parse_varint,
    read_all_batch_headers,
    split_batch_numbers_into_chunks,
)
from compactor.cleaner.passes.rewrite import CleanedSegment
from compactor.errors import BadData
from compactor.kernels.common import FirstRowByBatch, Flags, HashKeyHalf
from compactor.kernels.jit import kernel
from compactor.model.balance import Balance
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.balance import (
    BATCHES_DROPPED,
    OPENED,
    RECORDS,
    RECORDS_DROPPED,
    BalanceDigestKey,
    DigestSumRows,
    add_batch_digest,
    digest_sum_from_row,
    first_half_of_record_digest,
    second_half_of_digest,
)
from compactor.records.batches import Bytes, Int64s, memory_map_file


class NewSegmentBalanceBuilder:
    """Builder of the balance of one new segment, that is, of sums that account for all its batches and records. The gate adds the records
    that it parses; ``compute_balance_of_kept_and_removed_records`` parses the others.
    """

    def __init__(self, cleaned: CleanedSegment, balance_key: BalanceDigestKey, max_inflated_bytes: int) -> None:
        self._cleaned = cleaned
        self._key = balance_key
        self._limit = max_inflated_bytes
        self._begun: tuple[Bytes, HeaderFields] | None = None
        self._anew = self._wanted = cleaned.anew
        self._records = np.zeros(3, np.uint64)

    def set_segment_bytes_and_headers(self, buf: Bytes, headers: HeaderFields) -> None:
        """Set the segment's bytes and the headers of all its batches, whose checksums were verified."""
        if headers.shape[1] != len(self._anew):
            self._anew = np.zeros(headers.shape[1], np.bool_)  # nobody knows which is which, and nothing will add up
        self._begun = buf, headers
        self._wanted = self._anew & (headers[COUNT] > 0)

    def add_parsed_records(self, headers: HeaderFields, records: GateRecords) -> None:
        """Add the records of some batches of the segment. Batches that were added before are ignored."""
        batches = np.searchsorted(self._segment_bytes_and_headers()[1][POSITION], headers[POSITION])
        _add_record_digests_and_clear_wanted_flags(
            batches, self._wanted, records.buf, records.first_row, records.offset, records.key_start,
            records.key_length, *self._key.halves, self._records,
        )  # fmt: skip

    @measure_stage(SegmentWorkStage.GATE)
    def compute_balance_of_kept_and_removed_records(self) -> Balance:
        """Return the balance of the new segment: counts and digest sums of its records and of what was removed. Records that were not added
        yet are parsed first.

        Called once. Raises BadData if the segment cannot be parsed.
        """
        buf, headers = self._segment_bytes_and_headers()
        self._parse_and_add_remaining_records(buf, headers)
        self._begun = None  # whoever still knows this tally must not keep the file's room on the disk
        cleaned, sums = self._cleaned, self._cleaned.sums
        left, result = np.zeros(3, np.uint64), np.zeros(3, np.uint64)
        _sum_unchanged_and_new_batch_digests(buf, headers[POSITION], headers[MAGIC], self._anew, *self._key.halves, left, result)
        return Balance(
            sources=cleaned.sources,
            left=digest_sum_from_row(left),
            opened=digest_sum_from_row(sums[OPENED]),
            dropped={reason: digest_sum_from_row(sums[row]) for reason, row in BATCHES_DROPPED.items() if sums[row, 0]},
            result=digest_sum_from_row(result),
            records=digest_sum_from_row(sums[RECORDS]),
            written=digest_sum_from_row(self._records),
            records_dropped={reason: digest_sum_from_row(sums[row]) for reason, row in RECORDS_DROPPED.items() if sums[row, 0]},
        )

    def _segment_bytes_and_headers(self) -> tuple[Bytes, HeaderFields]:
        """Return the segment's bytes and headers, and read them if the gate has not."""
        if self._begun is None:
            buf = memory_map_file(self._cleaned.paths["log"])
            try:
                headers = read_all_batch_headers(buf)
            except UnreadableBatchesError as problem:
                raise self._unparsable_segment_error(f"cannot be read: {problem}") from None
            if first_batch_with_crc_mismatch(buf, headers) >= 0:
                raise self._unparsable_segment_error("has a batch with an invalid CRC")
            self.set_segment_bytes_and_headers(buf, headers)
            return buf, headers
        return self._begun

    def _parse_and_add_remaining_records(self, buf: Bytes, headers: HeaderFields) -> None:
        """Parse and add the records that the gate has not added. Without a gate, these are all records."""
        waiting = list(split_batch_numbers_into_chunks(headers, self._wanted))[::-1]
        if not waiting:
            return
        reader = GateRecordParser(np.uint64(0), np.uint64(0), self._limit)
        reader.on_records = self.add_parsed_records
        while waiting:
            some = waiting.pop()
            try:
                reader.parse_records_of_batches(buf, headers[:, some])
            except InflatedTooLargeError:
                waiting += np.array_split(some, 2)[::-1]
            except UnreadableBatchesError as problem:
                raise self._unparsable_segment_error(f"cannot be read: {problem}") from None

    def _unparsable_segment_error(self, cause: str) -> BadData:
        """Return the error for a new segment that cannot be parsed."""
        return BadData(f"the new segment {cause}", segment=self._cleaned.paths["log"].name, hint="This is a bug; please report it")


@kernel
def _add_record_digests_and_clear_wanted_flags(
    batch_numbers: Int64s,
    wanted_flags: Flags,
    buf: Bytes,
    first_row: FirstRowByBatch,
    offset: Int64s,
    key_start: Int64s,
    key_length: Int64s,
    k0: HashKeyHalf,
    k1: HashKeyHalf,
    out_sums: DigestSumRows,
) -> None:
    """Add the number of records and both halves of the sum of their digests to ``out_sums``, for the wanted batches, and clear the flags of
    these batches. Records are of format v2, in which the length of the value follows the key.

    :param batch_numbers: for each parsed batch, its number in the segment.
    :param wanted_flags: a flag per batch of the segment: whether its records are still to be added.
    :param first_row, offset, key_start, key_length: columns of the parsed records; ``first_row`` has each batch's first row.
    :param k0, k1: halves of the balance key.
    """
    for i in range(batch_numbers.size):
        if not wanted_flags[batch_numbers[i]]:
            continue
        wanted_flags[batch_numbers[i]] = False
        for row in range(first_row[i], first_row[i + 1]):
            value_length, value_start = parse_varint(buf, key_start[row] + max(key_length[row], 0), buf.size)
            one = first_half_of_record_digest(buf, offset[row], key_start[row], key_length[row], value_start, max(value_length, -1), k0)
            out_sums[0] += np.uint64(1)
            out_sums[1] += one
            out_sums[2] += second_half_of_digest(one, k1)


@kernel
def _sum_unchanged_and_new_batch_digests(
    buf: Bytes,
    position: Int64s,
    magic: Int64s,
    rewritten_flags: Flags,
    k0: HashKeyHalf,
    k1: HashKeyHalf,
    unchanged_sums: DigestSumRows,
    new_sums: DigestSumRows,
) -> None:
    for i in range(position.size):
        add_batch_digest(buf, position[i], magic[i], k0, k1, new_sums)
        if not rewritten_flags[i]:
            add_batch_digest(buf, position[i], magic[i], k0, k1, unchanged_sums)
