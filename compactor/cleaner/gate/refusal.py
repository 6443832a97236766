"""What to say where a segment has other records than must be left of it: which one is wrong, as far as can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.cleaner.gate.reading import KEYLESS, Records
from compactor.cleaner.gate.table import ABSENT, marks_of
from compactor.errors import CompactorError
from compactor.records.batches import Int64s

Flags = npt.NDArray[np.bool_]

LOST: Final = "the last record of a key is gone"
EXPIRED: Final = "a tombstone whose horizon has passed"


class GateFailed(CompactorError):
    """The cleaner wrote something else than the gate expects: a bug in one of the two. Nothing was uploaded."""

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
class Wanting:
    """How many records must be left of a segment and how many are; and by how much the sum of their marks is too large (modulo 2^64)."""

    segment: str
    expected: int
    found: int
    excess: int

    def refused(self) -> GateFailed:
        """Where no single record is the reason."""
        what = LOST if self.found < self.expected else "records are left that must not be"
        return GateFailed(f"{what}, and not only one: {self.expected} must be left of it, {self.found} are", segment=self.segment)


def known(segment: str, source: Records, written: Records) -> Int64s:
    """The rows of a source from which these come. Raises GateFailed where one was invented or changed."""
    at = np.minimum(np.searchsorted(source.offset, written.offset), len(source.offset) - 1)
    invented = source.offset[at] != written.offset
    if invented.any():
        raise _refused("a record that no source has", segment, written, invented)
    changed = source.digest[at] != written.digest
    if changed.any():
        raise _refused("key, timestamp, value or headers are not the source's", segment, written, changed)
    return at


def by_keys(segment: str, source: Records, there: Flags, due: Flags, latest: Int64s, must_go: Flags) -> None:
    """Where the last offset of each key is at hand. Raises GateFailed for the first record that is gone, or there, and must not be."""
    wrong = there == must_go
    for row in np.flatnonzero(wrong)[:1].tolist():
        if not there[row]:
            cause = LOST
        elif due[row] and latest[row] <= source.offset[row]:
            cause = EXPIRED
        else:
            cause = f"superseded by the record at offset {latest[row]}" if latest[row] != ABSENT else "it must not be left"
        raise _refused(cause, segment, source, wrong)


def by_sums(segment: str, source: Records, there: Flags, due: Flags, wanting: Wanting) -> None:
    """Where only sums are at hand: a single record that is gone, or too many, is known by its mark. Raises GateFailed if it is there."""
    marks, keyed = marks_of(source.offset, source.digest), source.flags & KEYLESS == 0
    wrong = {
        EXPIRED: there & due,
        LOST: ~there & keyed & (marks == np.uint64(-wanting.excess % 2**64)),
        "superseded by a later record of its key": there & (marks == np.uint64(wanting.excess)),
    }
    for cause, rows in wrong.items():
        if rows.any():
            raise _refused(cause, segment, source, rows)


def _refused(cause: str, segment: str, records: Records, wrong: Flags) -> GateFailed:
    row = int(np.flatnonzero(wrong)[0])
    return GateFailed(cause, segment=segment, offset=int(records.offset[row]), key=records.key(row))
