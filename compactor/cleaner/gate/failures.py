"""Errors of the gate, and the search for the record that explains why a segment's records differ from those that must be left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from compactor.cleaner.gate.key_table import record_fingerprints
from compactor.cleaner.gate.parser import GateRecords
from compactor.errors import CompactorError
from compactor.kernels.common import Flags
from compactor.records.batches import Int64s

LOST: Final = "the last record of a key is missing"
EXPIRED: Final = "a tombstone whose horizon has passed"


class GateFailed(CompactorError):
    """Raised if the gate, the independent check of a round, finds that a cleaned segment differs from what it expects.

    That is a bug in the cleaner or in the gate. Nothing was uploaded.
    """

    def __init__(self, cause: str, *, segment: str, offset: int = -1, key: bytes | None = None) -> None:
        where = segment + (f", offset {offset}" if offset >= 0 else "") + (f", key {key[:100]!r}" if key is not None else "")
        super().__init__(
            f"the gate refuses the cleaned segment of {where}: {cause}",
            hint="Nothing was published and the sources are untouched. This is a bug; please report it with this message",
        )
        self.cause = cause
        self.segment = segment
        self.offset = offset
        self.key = key


@dataclass(frozen=True, slots=True)
class FingerprintSumMismatch:
    """Difference between a cleaned segment's records and those that must remain of its source.

    expected, found: number of records.
    excess: sum of the record fingerprints found, minus the sum expected, modulo 2^64.
    """

    segment: str
    expected: int
    found: int
    excess: int

    def unexplained_fingerprint_mismatch_error(self) -> GateFailed:
        """Return the error for a difference that no single missing or surplus record explains. It states both numbers of records."""
        what = LOST if self.found < self.expected else "records are left that must not be"
        return GateFailed(f"{what}, and not only one: {self.expected} must be left of it, {self.found} are", segment=self.segment)


def source_rows_of_written_records(segment_name: str, source: GateRecords, written: GateRecords) -> Int64s:
    """Return, for each record in the output (``written``), its row in ``source``. Raises GateFailed for a record that the source does not
    have, or has with another content.
    """
    if not len(source.offset) and len(written.offset):
        invented = np.ones(len(written.offset), np.bool_)
        raise first_invalid_record_error("a record that no source has", segment_name, written, invented)
    at = np.minimum(np.searchsorted(source.offset, written.offset), len(source.offset) - 1)
    invented = source.offset[at] != written.offset
    if invented.any():
        raise first_invalid_record_error("a record that no source has", segment_name, written, invented)
    changed = source.digest[at] != written.digest
    if changed.any():
        raise first_invalid_record_error("key, timestamp, value or headers are not the source's", segment_name, written, changed)
    return at


def raise_for_missing_or_superseded_record(
    segment_name: str,
    source: GateRecords,
    in_output_flags: Flags,
    latest_offset_of_key: Int64s,
    must_be_removed_flags: Flags,
    checked_flags: Flags,
) -> None:
    """Raise GateFailed for the first record that is missing from the output, or that is in the output and must not be. Return if there is
    none.

    :param in_output_flags: a flag per source record: whether it is in the output.
    :param latest_offset_of_key: for each source record, the offset of the newest record with its key.
    :param must_be_removed_flags: a flag per source record: whether it must not be in the output.
    :param checked_flags: a flag per source record: whether it is compared.
    """
    invalid = checked_flags & (in_output_flags == must_be_removed_flags)
    for row in np.flatnonzero(invalid)[:1].tolist():
        raise first_invalid_record_error(
            f"superseded by the record at offset {latest_offset_of_key[row]}" if in_output_flags[row] else LOST,
            segment_name,
            source,
            invalid,
        )


def raise_for_record_that_explains_mismatch(
    segment_name: str, source: GateRecords, in_output_flags: Flags, may_stay_flags: Flags, mismatch: FingerprintSumMismatch
) -> None:
    """Raise GateFailed if a single missing or surplus record explains why the sums of fingerprints differ, that is, if its fingerprint is
    the difference. Return if no record does.

    :param in_output_flags: a flag per source record, set if it is in the output.
    :param may_stay_flags: a flag per source record: whether the rules allow it to stay.
    """
    fingerprints = record_fingerprints(source.offset, source.digest)
    for cause, invalid in (
        (LOST, ~in_output_flags & may_stay_flags & (fingerprints == np.uint64(-mismatch.excess % 2**64))),
        ("superseded by a later record of its key", in_output_flags & (fingerprints == np.uint64(mismatch.excess))),
    ):
        if invalid.any():
            raise first_invalid_record_error(cause, segment_name, source, invalid)


def first_invalid_record_error(cause: str, segment_name: str, records: GateRecords, invalid_flags: Flags) -> GateFailed:
    """Return the error with this cause that names the first record whose flag in ``invalid_flags`` is set."""
    row = int(np.flatnonzero(invalid_flags)[0])
    return GateFailed(cause, segment=segment_name, offset=int(records.offset[row]), key=records.key_of_row(row))
