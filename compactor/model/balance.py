"""What a round took and gave, as sums that do not depend on any order: nothing may be lost or made up without a reason.

    batches   sources = left as they are + opened + dropped as a whole, by reason
    records   of the opened batches = of the batches written anew + dropped, by reason

A batch's digest is of its header, which holds the checksum of the rest; a record's is of its offset and the edges of its key
and value. Both are mixed with the tier's key and added up, each half modulo 2^64. An *opened* batch was looked into record by record and
not left as it was. Batches that are left are never inflated for this; so a sum of batches can be had of a segment by a walk over its
headers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import Field

from compactor.model.base import Value

_HALF: Final = 1 << 64


class Sum(Value):
    """``count`` things and the sum of their digests, 32 hex digits: two halves, each modulo 2^64."""

    count: int = 0
    digest: str = "0" * 32

    @staticmethod
    def of(count: int, high: int, low: int) -> Sum:
        return Sum(count=count, digest=f"{high % _HALF:016x}{low % _HALF:016x}")

    @property
    def halves(self) -> tuple[int, int]:
        return int(self.digest[:16], 16), int(self.digest[16:], 16)

    def plus(self, other: Sum) -> Sum:
        (high, low), (more_high, more_low) = self.halves, other.halves
        return Sum.of(self.count + other.count, high + more_high, low + more_low)

    def __str__(self) -> str:
        return f"{self.count} ({self.digest[:8]})"


def total(sums: Iterable[Sum]) -> Sum:
    whole = Sum()
    for one in sums:
        whole = whole.plus(one)
    return whole


class Balance(Value):
    """Of one group, or of all groups of a round. ``sources``, ``left``, ``opened``, ``dropped`` and ``result`` are of batches.

    ``result``: all batches of the new segments, ``left`` those of them that were not written anew. ``dropped``: whole batches that were
    not looked into, by reason: superseded, aborted, marker. ``records``: in the opened batches; ``written``: in those written anew;
    ``records_dropped`` by reason: superseded, tombstone, keyless.
    """

    sources: Sum = Field(default_factory=Sum)
    left: Sum = Field(default_factory=Sum)
    opened: Sum = Field(default_factory=Sum)
    dropped: dict[str, Sum] = Field(default_factory=dict)
    result: Sum = Field(default_factory=Sum)
    records: Sum = Field(default_factory=Sum)
    written: Sum = Field(default_factory=Sum)
    records_dropped: dict[str, Sum] = Field(default_factory=dict)

    def problem(self) -> str:
        """Which of the two equations does not hold, or nothing."""
        accounted = total((self.left, self.opened, *self.dropped.values()))
        if self.sources != accounted:
            return f"the sources hold {self.sources} batches, and {accounted} are accounted for"
        accounted = total((self.written, *self.records_dropped.values()))
        if self.records != accounted:
            return f"the batches that were looked into hold {self.records} records, and {accounted} are accounted for"
        return ""

    def plus(self, other: Balance) -> Balance:
        return Balance(
            sources=self.sources.plus(other.sources),
            left=self.left.plus(other.left),
            opened=self.opened.plus(other.opened),
            dropped=_joined(self.dropped, other.dropped),
            result=self.result.plus(other.result),
            records=self.records.plus(other.records),
            written=self.written.plus(other.written),
            records_dropped=_joined(self.records_dropped, other.records_dropped),
        )


def _joined(one: dict[str, Sum], other: dict[str, Sum]) -> dict[str, Sum]:
    return {reason: one.get(reason, Sum()).plus(other.get(reason, Sum())) for reason in sorted({*one, *other})}
