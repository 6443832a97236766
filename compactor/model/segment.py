"""Remote segments and their state machine, as in Kafka (KIP-405, RemoteLogSegmentState)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass
from typing_extensions import override

from checkpoint.lineage import EpochEntry as EpochEntry
from compactor.constants import Offset, TimestampMs


class StrictFrozenModel(BaseModel):
    """Base class of stored values. Unknown fields are refused, so that a record of a future version is refused as a whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# Values of which a state holds several a segment are dataclasses with slots: a model's dictionary and set of fields would double the state.
_STRICT: Final = ConfigDict(extra="forbid")


# Balance of a round: order-independent sums, which show that no batch or record was lost or made up without a reason.
#
#   batches   sources = left as they are + opened + dropped as a whole, by reason
#   records   of the opened batches = of the batches written anew + dropped, by reason
#
# A batch's digest is computed from its header, which holds the checksum of the rest; a record's digest from its offset and the edges of its
# key and value. Both are mixed with the tier's hash key and added up, each half modulo 2^64. A batch is *opened* if its records were
# decided one by one and it was not copied unchanged. Other batches are not decompressed for the sums, so the sum of a segment's batches
# needs only a pass over its headers.


_HALF: Final = 1 << 64


@dataclass(frozen=True, slots=True, config=_STRICT)
class CountAndDigestSum:
    """Number of items and the sum of their digests, whatever their order. ``digest``: 32 hex digits, two halves of 64 bits, each added
    modulo 2^64.
    """

    count: int = 0
    digest: str = "0" * 32

    @staticmethod
    def from_digest_halves(item_count: int, high_half: int, low_half: int) -> CountAndDigestSum:
        return CountAndDigestSum(count=item_count, digest=f"{high_half % _HALF:016x}{low_half % _HALF:016x}")

    @property
    def digest_halves(self) -> tuple[int, int]:
        return int(self.digest[:16], 16), int(self.digest[16:], 16)

    def plus(self, other: CountAndDigestSum) -> CountAndDigestSum:
        (high, low), (more_high, more_low) = self.digest_halves, other.digest_halves
        return CountAndDigestSum.from_digest_halves(self.count + other.count, high + more_high, low + more_low)

    @override
    def __str__(self) -> str:
        return f"{self.count} ({self.digest[:8]})"


def total_digest_sum(sums: Iterable[CountAndDigestSum]) -> CountAndDigestSum:
    whole = CountAndDigestSum()
    for one in sums:
        whole = whole.plus(one)
    return whole


class Balance(StrictFrozenModel):
    """Sums of one group or of a round, which show that every batch and record of the sources was copied, rewritten, or dropped for a known
    reason.

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

    def imbalance_problem(self) -> str:
        """Return which equation does not hold; empty: both do. Batches: sources = left + opened + dropped. Records: records = written +
        records_dropped.
        """
        accounted = total_digest_sum((self.left, self.opened, *self.dropped.values()))
        if self.sources != accounted:
            return f"the sources hold {self.sources} batches, and {accounted} are accounted for"
        accounted = total_digest_sum((self.written, *self.records_dropped.values()))
        if self.records != accounted:
            return f"the batches that were looked into hold {self.records} records, and {accounted} are accounted for"
        return ""

    def plus(self, other: Balance) -> Balance:
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
    return {
        reason: left.get(reason, CountAndDigestSum()).plus(right.get(reason, CountAndDigestSum())) for reason in sorted({*left, *right})
    }


class SegmentState(StrEnum):
    """State of a remote segment (Kafka's RemoteLogSegmentState)."""

    COPY_SEGMENT_STARTED = "COPY_SEGMENT_STARTED"
    COPY_SEGMENT_FINISHED = "COPY_SEGMENT_FINISHED"
    DELETE_SEGMENT_STARTED = "DELETE_SEGMENT_STARTED"
    DELETE_SEGMENT_FINISHED = "DELETE_SEGMENT_FINISHED"


_S = SegmentState
TRANSITIONS: dict[SegmentState | None, frozenset[SegmentState]] = {
    None: frozenset({_S.COPY_SEGMENT_STARTED}),
    _S.COPY_SEGMENT_STARTED: frozenset({_S.COPY_SEGMENT_FINISHED, _S.DELETE_SEGMENT_STARTED}),
    _S.COPY_SEGMENT_FINISHED: frozenset({_S.DELETE_SEGMENT_STARTED}),
    _S.DELETE_SEGMENT_STARTED: frozenset({_S.DELETE_SEGMENT_FINISHED}),
    _S.DELETE_SEGMENT_FINISHED: frozenset(),
}
"""Valid transitions (Kafka's RemoteLogSegmentState.isValidTransition) without those from a state to itself."""

FILE_KINDS = ("log", "index", "timeindex", "txnindex", "snapshot", "leader-epoch-checkpoint")
"""Kinds of files of a remote segment. ``snapshot`` is the producer state at the segment's *end* (as KIP-405 copies it)."""


@dataclass(frozen=True, slots=True, config=_STRICT)
class SegmentFile:
    """Size in bytes and digests of one file of a segment. Files that a broker wrote have no digest, so only their size is compared.

    sha256: hex digits; empty if the bytes were never read as a whole.
    batches: digest over the batch headers of a log (compactor.records.batches); empty if there is none. A composed log has only this
    digest. A log
        that was written as a whole has both, if its layout stores digests and it contains no v0 or v1 messages.
    """

    size: int
    sha256: str = ""
    batches: str = Field(default="", exclude_if=lambda value: not value)

    @property
    def has_digest(self) -> bool:
        return bool(self.sha256 or self.batches)

    def is_comparable_with(self, other: SegmentFile) -> bool:
        return bool(self.sha256 and other.sha256) or bool(self.batches and other.batches)

    def has_same_content_as(self, other: SegmentFile) -> bool:
        """Kinds of digest that only one file has are ignored; False if no kind is common to both, because the files may then differ."""
        pairs = ((self.sha256, other.sha256), (self.batches, other.batches))
        return self.size == other.size and self.is_comparable_with(other) and all(one == two for one, two in pairs if one and two)

    def matches_read_file(self, file_read: SegmentFile) -> bool:
        """Compare size and digest, or the size alone if no digest is recorded."""
        return self.has_same_content_as(file_read) if self.has_digest else self.size == file_read.size


_NO_FIELDS: Final[set[str]] = set()


class RemoteLogSegmentMetadata(StrictFrozenModel):
    """Metadata of one remote segment.

    end_offset: inclusive, as in Kafka.
    max_timestamp_ms: -1 if no record has a timestamp.
    mtime_ms: modification time of the broker's .log file, by which Kafka judges v0 and v1 tombstones.
    leader_epochs: at least one entry, ascending.
    files: by kind; empty for segments that a broker wrote.
    first_timestamp_ms: maximum timestamp of the first batch (for max.compaction.lag.ms).
    due_ms: time of the segment's earliest delete horizon; -1 for none.
    open_txn_offset: first offset of the oldest transaction that is still open at the segment's end; -1 for none.
    records: for estimates only.
    custom_metadata: base64 of what the layout needs to read the objects (KIP-405's CustomMetadata).
    content: sum of the batches, made with the tier's hash key. None if a broker or an earlier version of the program wrote the segment.
    negative_timestamps: records with one other than -1, which no cleaner can write.
    copied_end_offset: last offset in the segment's objects if it is greater than ``end_offset``, otherwise -1. That happens if two leaders
    uploaded the same offsets, so that readers continue in another segment before the objects end.
    """

    id: str
    start_offset: Offset
    end_offset: Offset
    size_bytes: int
    max_timestamp_ms: TimestampMs
    mtime_ms: int
    leader_epochs: tuple[EpochEntry, ...]
    files: dict[str, SegmentFile]
    first_timestamp_ms: int = -1
    due_ms: int = -1
    open_txn_offset: int = -1
    records: int = 0
    custom_metadata: str = Field(default="", exclude_if=lambda value: not value)
    content: CountAndDigestSum | None = Field(default=None, exclude_if=lambda value: value is None)
    negative_timestamps: int = Field(default=0, exclude_if=lambda value: not value)
    copied_end_offset: int = Field(default=-1, exclude_if=lambda value: value < 0)

    @override
    def model_post_init(self, context: object, /) -> None:
        # Every field is stored, given or not, so that one set serves all segments: pydantic's own would be a quarter of a segment's memory.
        object.__setattr__(self, "__pydantic_fields_set__", _NO_FIELDS)
        # A dictionary that Python fills attribute by attribute shares its keys with those of all segments. The one that pydantic has filled
        # does not, and takes 264 bytes more.
        values = self.__dict__
        object.__delattr__(self, "__dict__")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def recorded_size_and_digests(self, file_kind: str) -> SegmentFile:
        """Raises KeyError if nothing is recorded. Of a segment that a broker wrote, only the size of the log is recorded."""
        return SegmentFile(size=self.size_bytes) if file_kind == "log" and not self.files else self.files[file_kind]

    @property
    def last_copied_offset(self) -> int:
        """Inclusive; greater than ``end_offset`` if readers find the rest in another segment."""
        return max(self.copied_end_offset, self.end_offset)

    @property
    def has_unread_tail(self) -> bool:
        return self.last_copied_offset > self.end_offset

    @property
    def index_bytes(self) -> int:
        return self.files["index"].size if "index" in self.files else 0

    @property
    def timeindex_bytes(self) -> int:
        return self.files["timeindex"].size if "timeindex" in self.files else 0

    @property
    def file_count(self) -> int:
        return len(self.files)
