"""Remote segments and their state machine, as in Kafka (KIP-405, RemoteLogSegmentState)."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from checkpoint.lineage import EpochEntry as EpochEntry
from compactor.constants import Offset, TimestampMs
from compactor.model.balance import CountAndDigestSum
from compactor.model.base import StrictFrozenModel


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


class SegmentFile(StrictFrozenModel):
    """Size and digests of one file of a segment. Files that a broker wrote have no digest, so only their size is compared.

    sha256: hex digits; empty if the bytes were never read as a whole.
    batches: digest over the headers of a log of v2 batches (compactor.records.headers). It is the only digest of a log that was composed
        of copied ranges. A log that was written as a whole has both digests, if its layout stores digests and it has no v0 or v1
        messages.
    """

    size: int
    sha256: str = ""
    batches: str = Field(default="", exclude_if=lambda value: not value)

    @property
    def has_digest(self) -> bool:
        """Return whether any digest is known."""
        return bool(self.sha256 or self.batches)

    def has_digest_of_same_kind(self, other: SegmentFile) -> bool:
        """Return whether this file and the other one have a digest of the same kind, so that the digests can be compared."""
        return bool(self.sha256 and other.sha256) or bool(self.batches and other.batches)

    def has_same_size_and_digest_as(self, other: SegmentFile) -> bool:
        """Return whether this file and the other one have equal sizes and equal common digests, at least one of them. Files without a
        common digest are not known to be the same.
        """
        pairs = ((self.sha256, other.sha256), (self.batches, other.batches))
        return self.size == other.size and self.has_digest_of_same_kind(other) and all(one == two for one, two in pairs if one and two)

    def does_read_file_match_recorded(self, file_read: SegmentFile) -> bool:
        """Return whether a file that was read matches what is recorded here: by digest, or by size if no digest is recorded."""
        return self.has_same_size_and_digest_as(file_read) if self.has_digest else self.size == file_read.size


class RemoteLogSegmentMetadata(StrictFrozenModel):
    """Metadata of one remote segment.

    end_offset: inclusive, as in Kafka.
    max_timestamp_ms: -1 if no record has a timestamp.
    mtime_ms: modification time of the broker's .log file, by which Kafka judges v0 and v1 tombstones.
    leader_epochs: at least one entry, ascending.
    files: by kind; empty for segments of a broker, whose layout knows the files.
    first_timestamp_ms: maximum timestamp of the first batch (for max.compaction.lag.ms).
    due_ms: when the first delete horizon in it passes; -1 for never.
    open_txn_offset: first offset of the oldest transaction that is open at its end; -1 for none.
    records: number of records, for estimates only.
    custom_metadata: base64 of what the layout needs to read the objects (KIP-405's CustomMetadata).
    content: sum of its batches under the tier's key (compactor.model.balance); None if an earlier version or a broker wrote it.
    negative_timestamps: number of records with a negative timestamp other than -1, which no cleaner can write.
    copied_end_offset: last offset in its objects if brokers continue in another segment before it (two leaders tiered the same offsets); -1
        if it is the end offset.
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

    def recorded_size_and_digests(self, file_kind: str) -> SegmentFile:
        """Return the recorded size and digests of the file of this kind. Raises KeyError if nothing is recorded; only the size of the log
        is known of a broker's segment.
        """
        return SegmentFile(size=self.size_bytes) if file_kind == "log" and not self.files else self.files[file_kind]

    @property
    def last_copied_offset(self) -> int:
        """Return the last offset, inclusive, in the segment's objects, which may be after ``end_offset``."""
        return max(self.copied_end_offset, self.end_offset)

    @property
    def has_offsets_after_end_offset(self) -> bool:
        """Return whether the segment's objects hold offsets after its ``end_offset``, which readers skip because another segment has
        them.
        """
        return self.last_copied_offset > self.end_offset

    @property
    def index_bytes(self) -> int:
        """Size of the offset index in bytes; 0 if unknown."""
        return self.files["index"].size if "index" in self.files else 0

    @property
    def timeindex_bytes(self) -> int:
        """Size of the time index in bytes; 0 if unknown."""
        return self.files["timeindex"].size if "timeindex" in self.files else 0

    @property
    def file_count(self) -> int:
        """Number of recorded files."""
        return len(self.files)
