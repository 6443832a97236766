"""RemoteLogSegmentMetadata and its state machine, as Kafka has them (KIP-405, RemoteLogSegmentState)."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from checkpoint.lineage import EpochEntry as EpochEntry
from compactor.model.balance import Sum
from compactor.model.base import Value


class SegmentState(StrEnum):
    """Kafka's RemoteLogSegmentState."""

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
"""Kafka's RemoteLogSegmentState.isValidTransition, less the idempotent self-transitions."""

FILE_KINDS = ("log", "index", "timeindex", "txnindex", "snapshot", "leader-epoch-checkpoint")
"""What a remote segment is made of. ``snapshot`` is the producer state at the segment's *end* (as KIP-405 copies it)."""


class SegmentFile(Value):
    """One file of a segment. Without a digest of ours (a broker wrote it) only the size is compared.

    ``sha256``, as hex digits: of its bytes; empty where nobody read them all. ``batches``: of a log of v2 batches, over their headers
    (compactor.records.headers); a log that was put together of copies of other objects' ranges has this one alone. A log that was written
    whole has both, where its layout keeps digests and it has no older messages.
    """

    size: int
    sha256: str = ""
    batches: str = Field(default="", exclude_if=lambda value: not value)

    @property
    def has_digest(self) -> bool:
        return bool(self.sha256 or self.batches)

    def is_comparable(self, other: SegmentFile) -> bool:
        """Whether both have a digest of one kind."""
        return bool(self.sha256 and other.sha256) or bool(self.batches and other.batches)

    def is_same(self, other: SegmentFile) -> bool:
        """By size and by every digest that both have; where they have none in common they are not known to be the same."""
        pairs = ((self.sha256, other.sha256), (self.batches, other.batches))
        return self.size == other.size and self.is_comparable(other) and all(one == two for one, two in pairs if one and two)

    def is_met_by(self, found: SegmentFile) -> bool:
        """Whether what was found is what was recorded here."""
        return self.is_same(found) if self.has_digest else self.size == found.size


class RemoteLogSegmentMetadata(Value):
    """One remote segment. ``end_offset`` is inclusive, as in Kafka.

    ``mtime_ms`` is the modification time of the broker's .log file: Kafka judges v0/v1 tombstones by it.
    ``leader_epochs`` holds at least one entry, ascending; ``max_timestamp_ms`` is -1 where no record has a timestamp.
    ``first_timestamp_ms``: maximum timestamp of the first batch (Kafka's max.compaction.lag.ms looks at it). ``due_ms``: when the
    first delete horizon in it passes, -1 for never. ``open_txn_offset``: first offset of the oldest transaction that is open at
    its end, -1 for none. ``records``: how many it holds; only estimates depend on it. ``custom_metadata``: what the layout that wrote
    its objects wants back when they are read (KIP-405's RemoteLogSegmentMetadata.CustomMetadata), as base64. ``content``: the sum of its
    batches under the tier's key (compactor.model.balance); None where an earlier program or a broker wrote it. ``negative_timestamps``: how
    many of its records have one that is not -1, which no cleaner can write anew. ``copied_end_offset``: the last offset in its objects,
    where brokers go on in another segment before that (two leaders tiered the same offsets); -1 where it is the end offset.
    """

    id: str
    start_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp_ms: int
    mtime_ms: int
    leader_epochs: tuple[EpochEntry, ...]
    files: dict[str, SegmentFile]
    first_timestamp_ms: int = -1
    due_ms: int = -1
    open_txn_offset: int = -1
    records: int = 0
    custom_metadata: str = Field(default="", exclude_if=lambda value: not value)
    content: Sum | None = Field(default=None, exclude_if=lambda value: value is None)
    negative_timestamps: int = Field(default=0, exclude_if=lambda value: not value)
    copied_end_offset: int = Field(default=-1, exclude_if=lambda value: value < 0)

    def file(self, kind: str) -> SegmentFile:
        """As recorded. Of a broker's segment nothing but the log's size is. Raises KeyError."""
        return SegmentFile(size=self.size_bytes) if kind == "log" and not self.files else self.files[kind]

    @property
    def copied_end(self) -> int:
        """The last offset in its objects."""
        return max(self.copied_end_offset, self.end_offset)

    @property
    def is_cut(self) -> bool:
        """Whether its objects hold more than is read of it."""
        return self.copied_end > self.end_offset

    @property
    def index_bytes(self) -> int:
        return self.files["index"].size if "index" in self.files else 0

    @property
    def timeindex_bytes(self) -> int:
        return self.files["timeindex"].size if "timeindex" in self.files else 0

    @property
    def file_count(self) -> int:
        return len(self.files)
