"""The seam where another kind of tier enters: where segments' bytes lie (SegmentLayout), how readers come to use them (SegmentPublisher).

Adding a kind of tier is one layout below ``tier/layouts``, one publisher below ``tier/publishers``, one row in the composition root.
Nothing outside ``tier/layouts`` makes an object's key; nothing outside ``tier/publishers`` switches readers over. Neither knows logs:
what has to be appended there is handed in. Conformance: tests/contract/test_segment_layout.py and test_segment_publisher.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from compactor.model.ids import TopicPartition
from compactor.model.plan import Replacement
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.port import Piece, RangeCopies


class SegmentRef(Protocol):
    """What names a segment's objects. RemoteLogSegmentMetadata is one."""

    @property
    def id(self) -> str:
        """22 characters of URL-safe base64."""

    @property
    def start_offset(self) -> int: ...


@dataclass(frozen=True)
class Named:
    """A SegmentRef of which nothing else is known: announced and never finished."""

    id: str
    start_offset: int


@dataclass(frozen=True)
class ListedObject:
    """One object among a partition's, as LIST has it. ``segment_id`` and ``kind`` are empty where its name is none of this layout's."""

    key: str
    size: int
    modified_ms: int
    segment_id: str = ""
    start_offset: int = -1
    kind: str = ""


class SegmentLayout(Protocol):
    """Where the objects of one tier's segments lie, and what is done to their bytes on the way (chunks, compression, encryption).

    ``kind`` is one of model.segment.FILE_KINDS. Sizes and positions are those of the plain file, whatever lies in the store.
    All methods raise NotFound, Unavailable, Refused (compactor.errors), BadData where an object is not what it must be.
    """

    @property
    def url(self) -> str:
        """Of the data root, for messages."""

    @property
    def parts(self) -> frozenset[str]:
        """Kinds of objects, as ``list`` has them, without which a segment cannot be read."""

    def folder(self, name: TopicPartition) -> str:
        """What the keys of a partition's objects begin with; ends in a slash, so that partition 1 is not partition 10."""

    def where(self, name: TopicPartition, segment: SegmentRef, kind: str) -> str:
        """The object that holds this file (or this part), as people and reports name it."""

    def files(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        """What there is of a segment, by kind. Costs a request where metadata does not say it."""

    def read(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length) of one file; shorter only where it ends. Fetches no more of the store's objects than that needs."""

    def download(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, path: Path) -> int:
        """One file, whole, into a new local file; returns the bytes that travelled."""

    def upload(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        """Creates a segment's objects. What exists with equal content is done; the answer names what differs (I7), or is empty."""

    @property
    def keeps_digests(self) -> bool:
        """Whether a new log's ``batches`` is worth recording: the same log may be put together of copies, which have no other digest."""

    @property
    def copies(self) -> RangeCopies | None:
        """What ``compose`` may be asked for now; None: logs are uploaded whole. Never where objects are no plain logs."""

    def version(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        """The version (ObjectInfo.etag) of the log's object, for CopiedRange.

        Raises BadData where it is not as it was recorded, as far as the store can tell without reading it.
        """

    def compose(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, log: Sequence[Piece], contents: Mapping[str, Path | bytes]
    ) -> str:
        """Like ``upload``, with the log put together of pieces (ObjectStore.compose); keys of copied ranges are those of ``where``.

        Raises CannotCopy, before anything exists, where it turns out that the store does not copy ranges; NotFound or Unavailable where
        a source is gone or has changed.

        :param log: what the segment's ``log`` has to be; what else there is of it is in ``contents``.
        """

    def upload_room(self, log_bytes: int) -> int:
        """Bytes of local disk that ``upload`` writes beside a log of this size, and frees when it ends."""

    def custom_metadata(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        """What metadata has to say of the objects that ``upload`` will make of this (base64; empty: nothing). Known before any exists."""

    def problem(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        """Read back: whether every object of the segment is there as recorded; says what is wrong, or nothing."""

    def delete(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        """Deletes all their objects, those of unfinished uploads too. Absent ones are fine. Whether it may be is control.ordering's."""

    def list(self, name: TopicPartition) -> Iterator[ListedObject]:
        """Every object among the partition's, strangers included: what lies there by its place, and is no segment's by its name."""

    def partition_of(self, key: str) -> str:
        """The partition among whose objects this key is, as ``topic-partition``; empty for a key anywhere else."""


@dataclass(frozen=True)
class Announced:
    """A SegmentRef of an announced plan, or of what readers were told: enough to say of it that it never was. ``end_offset``: inclusive.

    ``cut_off_ms``: when readers were told that it is gone, by the clock of who told them; -1 where they were not.
    """

    id: str
    start_offset: int
    end_offset: int
    leader_epochs: tuple[EpochEntry, ...]
    cut_off_ms: int = -1


class Wait(NamedTuple):
    """Of a round that readers may not be told of yet. ``until_ms``: when to ask again, by this machine's clock; ``records``: that it was
    judged by; ``ahead``: how many rounds come before it."""

    until_ms: int
    records: int
    ahead: int


class SegmentPublisher(Protocol):
    """How readers learn of segments. Without a broker the control log's own record does it; on Kafka, ``__remote_log_metadata``.

    Everything may be asked again after a crash: what is done already is not done twice. Raises Unavailable, Refused.
    """

    @property
    def late_ms(self) -> int:
        """How long after its end what a process has said may still reach readers; 0: never."""

    def permit(self, name: TopicPartition) -> None:
        """Raises Refused where readers of this partition must not be switched: asked before a round is planned."""

    def admit(self, name: TopicPartition, records: int, per_hour: int) -> Wait | None:
        """Whether readers may be told so much more of a partition now; None: yes, and it is reserved. Rounds are served as they come.

        ``per_hour``: records for all partitions together, 0: any number. May be asked again, once more is known of the round.
        """

    def forgo(self, name: TopicPartition, *, due: bool) -> None:
        """What is left of that is reserved no more: the round has ended, whether or not readers were told anything.

        ``due``: it has to be asked for again, and keeps its place among those that wait.
        """

    def begin(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> None:
        """Before the first object of a finished rewrite is uploaded: size and largest timestamp are final (COPY_SEGMENT_STARTED)."""

    def publish(
        self,
        name: TopicPartition,
        replacements: Sequence[Replacement],
        begun: Callable[[], None],
        record: Callable[[Collection[str]], None],
        *,
        backwards: bool = False,
        resumed: bool = False,
    ) -> None:
        """Switches readers, calls ``record`` (the control log's *round published*) once they are. ``backwards``: the last group first.

        Where switching takes several steps, ``begun`` (*publish begun*) comes before the first; from there the only way is on. ``resumed``:
        it stands already, so nothing may be refused that a rule refuses before it.
        ``record`` is told which new segments were cut off instead, because what they replace had gone.
        """

    def restore(
        self, name: TopicPartition, restored: Sequence[RemoteLogSegmentMetadata], gone: Sequence[SegmentRef], record: Callable[[], None]
    ) -> None:
        """The way back from ``publish``: readers get ``restored`` instead of ``gone``, then ``record`` (*round undone*). Repeatable.

        Raises UsageError, before anything is changed, where readers cannot go back.
        """

    def withdraw(self, name: TopicPartition, segments: Sequence[Announced], *, late: bool = False) -> None:
        """These will never be published. ``late``: another process may still say something of them, and it must not count."""

    def deleted(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        """Their objects are gone (DELETE_SEGMENT_FINISHED)."""

    def strays(self, name: TopicPartition, known: Collection[str]) -> Sequence[Announced] | None:
        """What readers were told of by compactors and the control log does not know (``known``: the ids that it does): left by dead ones.

        None: whatever lies in the store and is not known is nobody's.
        """

    def cut_off(self, name: TopicPartition, live: Sequence[SegmentRef], known: Collection[str]) -> int:
        """Strays are taken from readers; ``live`` that they have displaced come back first. Returns how many there were."""


class LiveView(Protocol):
    """Where somebody else than the control log says which segments are live: on Kafka, ``__remote_log_metadata``."""

    def live(self, name: TopicPartition) -> tuple[RemoteLogSegmentMetadata, ...] | None:
        """A partition's live segments, ascending; None: the control log says it."""
