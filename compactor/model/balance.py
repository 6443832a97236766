"""Balance of a round: order-independent sums over batches and records, which show that none was lost or made up without a reason.

  batches   sources = left as they are + opened + dropped as a whole, by reason
  records   of the opened batches = of the batches written anew + dropped, by reason

A batch's digest is computed from its header, which holds the checksum of the rest; a record's digest from its offset and the edges of its
key and value. Both are mixed with the tier's hash key and added up, each half modulo 2^64. A batch is *opened* if its records were decided
one by one and it was not copied unchanged. Other batches are not decompressed for the sums, so the sum of a segment's batches needs only a
pass over its headers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import Field
from typing_extensions import override

from compactor.model.base import ReasonOrEmpty, StrictFrozenModel

_HALF: Final = 1 << 64


class CountAndDigestSum(StrictFrozenModel):
    """Number of items and the sum of their digests, which does not depend on the order of the items. ``digest``: 32 hex digits, two halves
    of 64 bits, each added modulo 2^64.
    """

    count: int = 0
    digest: str = "0" * 32

    @staticmethod
    def from_digest_halves(item_count: int, high_half: int, low_half: int) -> CountAndDigestSum:
        """Return the sum with this number of items and these halves of the digest, each reduced modulo 2^64."""
        return CountAndDigestSum(count=item_count, digest=f"{high_half % _HALF:016x}{low_half % _HALF:016x}")

    @property
    def digest_halves(self) -> tuple[int, int]:
        """Return the two halves of the digest as integers, the high one first."""
        return int(self.digest[:16], 16), int(self.digest[16:], 16)

    def plus(self, other: CountAndDigestSum) -> CountAndDigestSum:
        """Return the sum over the items of both sums: counts and digests are added. Neither sum is changed."""
        (high, low), (more_high, more_low) = self.digest_halves, other.digest_halves
        return CountAndDigestSum.from_digest_halves(self.count + other.count, high + more_high, low + more_low)

    @override
    def __str__(self) -> str:
        return f"{self.count} ({self.digest[:8]})"


def total_of_count_and_digest_sums(sums: Iterable[CountAndDigestSum]) -> CountAndDigestSum:
    """Return the sum over the items of all these sums: counts and digests are added."""
    whole = CountAndDigestSum()
    for one in sums:
        whole = whole.plus(one)
    return whole


class Balance(StrictFrozenModel):
    """Balance of one group, or of all groups of a round: counts and digest sums by which it is checked that every batch and record of the
    source segments was copied, rewritten, or dropped for a known reason.

    sources: all batches of the source segments.
    left: batches copied unchanged.
    opened: batches for whose records it was decided one by one whether to keep them.
    dropped: whole batches dropped without opening, by reason: superseded, aborted, marker.
    result: all batches of the new segments.
    records: records in the opened batches.
    written: records of the opened batches that were written to new batches.
    records_dropped: records of the opened batches that were dropped, by reason: superseded, tombstone, keyless.
    """

    sources: CountAndDigestSum = Field(default_factory=CountAndDigestSum)
    left: CountAndDigestSum = Field(default_factory=CountAndDigestSum)
    opened: CountAndDigestSum = Field(default_factory=CountAndDigestSum)
    dropped: dict[str, CountAndDigestSum] = Field(default_factory=dict)
    result: CountAndDigestSum = Field(default_factory=CountAndDigestSum)
    records: CountAndDigestSum = Field(default_factory=CountAndDigestSum)
    written: CountAndDigestSum = Field(default_factory=CountAndDigestSum)
    records_dropped: dict[str, CountAndDigestSum] = Field(default_factory=dict)

    def imbalance_problem(self) -> ReasonOrEmpty:
        """Return which of the two equations does not hold, or an empty string if both do. Batches: sources = left + opened + dropped.
        Records: records = written + records_dropped.
        """
        accounted = total_of_count_and_digest_sums((self.left, self.opened, *self.dropped.values()))
        if self.sources != accounted:
            return f"the sources hold {self.sources} batches, and {accounted} are accounted for"
        accounted = total_of_count_and_digest_sums((self.written, *self.records_dropped.values()))
        if self.records != accounted:
            return f"the batches that were looked into hold {self.records} records, and {accounted} are accounted for"
        return ""

    def plus(self, other: Balance) -> Balance:
        """Return the balance of two groups together: all their sums added."""
        return Balance(
            sources=self.sources.plus(other.sources),
            left=self.left.plus(other.left),
            opened=self.opened.plus(other.opened),
            dropped=_add_sums_by_reason(self.dropped, other.dropped),
            result=self.result.plus(other.result),
            records=self.records.plus(other.records),
            written=self.written.plus(other.written),
            records_dropped=_add_sums_by_reason(self.records_dropped, other.records_dropped),
        )


def _add_sums_by_reason(left: dict[str, CountAndDigestSum], right: dict[str, CountAndDigestSum]) -> dict[str, CountAndDigestSum]:
    """Return one table of sums by reason in which the sums of both tables for the same reason are added."""
    return {
        reason: left.get(reason, CountAndDigestSum()).plus(right.get(reason, CountAndDigestSum())) for reason in sorted({*left, *right})
    }
