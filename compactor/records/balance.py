"""Sums over batches and records for the balance of a round (compactor.model.balance), which shows that no record was lost or
added.

Each record contributes a digest of its offset, of the lengths of its key and value, and of the first and last eight bytes of both, mixed
with a key of the tier. That is enough to distinguish records, and takes a few nanoseconds. The bytes between are covered by the gate and by
checksums. The sums of new segments are computed by other code (compactor.cleaner.gate.new_segment_balance), so that both sides cannot
share a mistake.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

from bloom.siphash import siphash_key_halves
from compactor.kernels.common import FirstRowByBatch, Flags, HashKeyHalf, HashKeyHalves
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import load_i32, load_u64
from compactor.model.balance import CountAndDigestSum
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.batches import HEADER, NOT_CONTROL, BatchTable, Bytes, read_only_view
from compactor.records.encode import COPY, FILTER, Actions, CleaningDecisions
from compactor.records.rows import BatchChunk, RecordRows

DigestSumRows = npt.NDArray[np.uint64]
"""One row per account: how many, and the two halves of their digests' sum."""

(OPENED, RECORDS, BATCH_SUPERSEDED, BATCH_ABORTED, BATCH_MARKER, SUPERSEDED, TOMBSTONE, KEYLESS) = ACCOUNTS = range(8)
BATCHES_DROPPED: Final = {"superseded": BATCH_SUPERSEDED, "aborted": BATCH_ABORTED, "marker": BATCH_MARKER}
RECORDS_DROPPED: Final = {"superseded": SUPERSEDED, "tombstone": TOMBSTONE, "keyless": KEYLESS}

_LEGACY_HEADER: Final = 26  # what every message of v0 and v1 has, its CRC included


class BalanceDigestKey:
    """Secret key of the record digests of a tier, derived from the tier's hash key."""

    def __init__(self, hash_key: bytes) -> None:
        """Derive a key of its own from the tier's 16-byte hash key, so that records that collide in an offset map differ here."""
        self.halves = siphash_key_halves(hashlib.sha256(b"balance" + hash_key).digest()[:16])


def allocate_zero_digest_sums_by_reason() -> DigestSumRows:
    """Return sums of zero, one row for each account. An account is a reason for which batches or records are counted, such as a dropped
    tombstone.
    """
    return np.zeros((len(ACCOUNTS), 3), np.uint64)


def digest_sum_from_row(row_of_sums: DigestSumRows) -> CountAndDigestSum:
    """Convert one row of an array of sums (number of items, and the two halves of the sum of their digests) to a CountAndDigestSum."""
    return CountAndDigestSum.from_digest_halves(int(row_of_sums[0]), int(row_of_sums[1]), int(row_of_sums[2]))


@measure_stage(SegmentWorkStage.GATE, lambda buf, _: len(buf))
def batch_digest_sum_of_segment(buf: Bytes, key: BalanceDigestKey) -> CountAndDigestSum:
    """Return the number of batches in a segment and the sum of their digests, computed from their headers. The bytes must be valid
    batches.
    """
    out = np.zeros(3, np.uint64)
    _add_digests_of_segment_batches(buf, *key.halves, out)
    return digest_sum_from_row(out)


def digest_sum_of_headers(headers: Bytes, key: BalanceDigestKey) -> CountAndDigestSum:
    """Return the number of v2 batches and the sum of their digests, computed from their 61-byte headers, shape (batches, 61)."""
    out = np.zeros(3, np.uint64)
    _add_digests_of_batch_headers(read_only_view(np.ascontiguousarray(headers).reshape(-1)), *key.halves, out)
    return digest_sum_from_row(out)


@measure_stage(SegmentWorkStage.GATE)
def digest_sums_of_uncopied_data_by_reason(
    key: BalanceDigestKey,
    segment_bytes: Bytes,
    table: BatchTable,
    chunk: BatchChunk,
    rows: RecordRows,
    first_row: FirstRowByBatch,
    action_by_header: Actions,
    decisions: CleaningDecisions,
    superseded_flags: Flags,
    aborted_flags: Flags,
) -> DigestSumRows:
    """Return the counts and digest sums of those batches and records of a chunk that the cleaner does not copy, one row for each account
    (reason for which they are counted).

    A batch whose records were filtered counts in the account OPENED, and all its records in RECORDS. Dropped batches and records count in
    the account of the reason for which they were dropped. A record that was dropped for no valid reason is in no account of dropped
    records.

    :param segment_bytes: the segment's bytes.
    :param action_by_header: action of each batch as decided by its header.
    :param decisions: decisions on batches and records after the records were filtered.
    :param superseded_flags: a flag per row: whether a later record has its key.
    :param aborted_flags: a flag per batch: whether it is data of an aborted transaction.
    """
    sums = allocate_zero_digest_sums_by_reason()
    if np.all(decisions.action == COPY):
        return sums
    batches = table.select_rows(slice(chunk.first, chunk.last))
    _add_digests_of_uncopied_data_by_reason(
        segment_bytes, chunk.buf, batches, rows, first_row, action_by_header, decisions, superseded_flags, aborted_flags, key.halves, sums
    )
    return sums


@inline_kernel
def _mix_digest(digest_state: np.uint64) -> np.uint64:
    """Return the state of a digest after one mixing step."""
    return (digest_state ^ (digest_state >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)


@inline_kernel
def _finish_digest(digest_state: np.uint64) -> np.uint64:
    """Return the final value of a digest state: the last step of MurmurHash3, in which each bit changes half of the others."""
    digest_state = (digest_state ^ (digest_state >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    digest_state = (digest_state ^ (digest_state >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return digest_state ^ (digest_state >> np.uint64(33))


@inline_kernel
def add_batch_digest(segment_bytes: Bytes, position: int, magic: int, k0: HashKeyHalf, k1: HashKeyHalf, out_sums: DigestSumRows) -> None:
    """Add the batch at a byte position to a row of sums.

    :param magic: message format of the batch.
    :param k0, k1: halves of the balance key.
    :param out_sums: number of batches, and the two halves of the sum of their digests.
    """
    end = position + (HEADER if magic == 2 else _LEGACY_HEADER)
    state = _mix_digest(k0 ^ load_u64(segment_bytes, end - 8))
    for at in range(position, end - 8, 8):
        state = _mix_digest(state + load_u64(segment_bytes, at))
    one = _finish_digest(state)
    out_sums[0] += np.uint64(1)
    out_sums[1] += one
    out_sums[2] += second_half_of_digest(one, k1)


@inline_kernel
def _digest_key_or_value(buf: Bytes, start: int, length: int) -> np.uint64:
    """Return a digest of a key or value from its length (-1 for null) and its first and last eight bytes."""
    edges = np.uint64(length) * np.uint64(0x9E3779B97F4A7C15)
    if length >= 8:
        first: np.uint64 = load_u64(buf, start)
        last: np.uint64 = load_u64(buf, start + length - 8)
        return edges + first + ((last << np.uint64(29)) | (last >> np.uint64(35)))
    for at in range(start, start + length):
        edges = (edges ^ np.uint64(buf[at])) * np.uint64(0x100000001B3)
    return edges


@inline_kernel
def first_half_of_record_digest(
    buf: Bytes, offset: int, key_start: int, key_length: int, value_start: int, value_length: int, k0: HashKeyHalf
) -> np.uint64:
    """Return the first half of a record's digest. A length of -1 means null. ``k0`` is the first half of the balance key.

    The timestamp is not included, because rewriting v0 and v1 batches as v2 changes its encoding; the gate checks timestamps.
    """
    state = k0 + _digest_key_or_value(buf, key_start, key_length)
    state = _mix_digest(state) + _digest_key_or_value(buf, value_start, value_length)
    return _finish_digest(_mix_digest(state) + np.uint64(offset))


@inline_kernel
def second_half_of_digest(first_half: np.uint64, k1: HashKeyHalf) -> np.uint64:
    """Return the second half of a record's or batch's digest, computed from its first half. The second half of a sum of digests cannot be
    derived from the sum of first halves. ``k1`` is the second half of the balance key.
    """
    state = (first_half ^ k1) * np.uint64(0x9FB21C651E98DF25)
    return state ^ (state >> np.uint64(31))


@kernel
def _add_digests_of_batch_headers(headers: Bytes, k0: HashKeyHalf, k1: HashKeyHalf, out_sums: DigestSumRows) -> None:
    """Add to ``out_sums`` the number of v2 batches, and both halves of the sum of their digests. ``headers``: the headers of these batches,
    one after the other.

    :param k0, k1: halves of the balance key.
    """
    for position in range(0, headers.size, HEADER):
        add_batch_digest(headers, position, 2, k0, k1, out_sums)


@kernel
def _add_digests_of_segment_batches(buf: Bytes, k0: HashKeyHalf, k1: HashKeyHalf, out_sums: DigestSumRows) -> None:
    """Add the digests of all batches in a segment to ``out_sums``: the number of batches, and the two halves of the sum of their digests.
    :param k0, k1: halves of the balance key.
    """
    at = 0
    while at + _LEGACY_HEADER <= buf.size:
        size = 12 + load_i32(buf, at + 8)
        magic = buf[at + 16]
        if at + size > buf.size or size < (HEADER if magic == 2 else _LEGACY_HEADER):
            break
        add_batch_digest(buf, at, magic, k0, k1, out_sums)
        at += size


@kernel
def _add_digests_of_uncopied_data_by_reason(
    segment_bytes: Bytes,
    buf: Bytes,
    batches: BatchTable,
    rows: RecordRows,
    first_row: FirstRowByBatch,
    action_by_header: Actions,
    decisions: CleaningDecisions,
    superseded_flags: Flags,
    aborted_flags: Flags,
    key_halves: HashKeyHalves,
    out_sums: DigestSumRows,
) -> None:
    """Add the batches of a chunk that are not copied, and their records, to the sums of their accounts: the reasons for which they are
    dropped, or OPENED and RECORDS for batches whose records were filtered.

    :param buf: decompressed bytes of the chunk, to which the positions in ``rows`` refer.
    :param action_by_header: action of each batch as decided by its header.
    :param superseded_flags: a flag per row: whether a later record has its key.
    :param aborted_flags: a flag per batch: whether it is data of an aborted transaction.
    """
    k0, k1 = key_halves
    records = np.uint64(0)
    first = np.uint64(0)
    second = np.uint64(0)
    for batch in range(decisions.action.size):
        if decisions.action[batch] == COPY:
            continue
        if action_by_header[batch] != FILTER:
            account = BATCH_ABORTED if aborted_flags[batch] else BATCH_SUPERSEDED
            if batches.control[batch] != NOT_CONTROL:
                account = BATCH_MARKER
            add_batch_digest(segment_bytes, batches.position[batch], batches.magic[batch], k0, k1, out_sums[account])
            continue
        add_batch_digest(segment_bytes, batches.position[batch], batches.magic[batch], k0, k1, out_sums[OPENED])
        for row in range(first_row[batch], first_row[batch + 1]):
            one = first_half_of_record_digest(
                buf, rows.offset[row], rows.key_start[row], rows.key_length[row], rows.value_start[row], rows.value_length[row], k0
            )
            two = second_half_of_digest(one, k1)
            records += np.uint64(1)
            first += one
            second += two
            if decisions.keep_flags[row]:
                continue
            if rows.key_length[row] < 0:
                account = KEYLESS
            elif superseded_flags[row]:
                account = SUPERSEDED
            elif rows.value_length[row] < 0:
                account = TOMBSTONE
            else:
                continue
            out_sums[account, 0] += np.uint64(1)
            out_sums[account, 1] += one
            out_sums[account, 2] += two
    out_sums[RECORDS, 0] += records
    out_sums[RECORDS, 1] += first
    out_sums[RECORDS, 2] += second
