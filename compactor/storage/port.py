"""The object-store port. Only behaviour that all servers share is used: no rename, no conditional delete, no key that is a "directory" of
another. Keys are relative to the store's root and separated by ``/``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ObjectInfo:
    """Properties of one object.

    modified_ms: by the store's own clock.
    etag: identifies the version of the content; may be empty.
    """

    key: str
    size: int
    modified_ms: int
    etag: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class UnfinishedUpload:
    """Upload that was neither finished nor aborted. Listings do not contain it, but its bytes are billed."""

    key: str
    id: str
    begun_ms: int


@dataclass(frozen=True)
class ObjectRangeToCopy:
    """Bytes [start, start + length) of an object of the same store, in the version ``etag``."""

    key: str
    start: int
    length: int
    etag: str
    crc32c: int | None = None


@dataclass(frozen=True)
class FileRange:
    path: Path
    start: int
    length: int


ComposeSource = ObjectRangeToCopy | FileRange


@dataclass(frozen=True)
class CopyLimits:
    """Limits of ``ObjectStore.compose``.

    :param min_run_bytes: smallest run of adjacent copied or local pieces, except at the object's end.
    :param max_bytes: most bytes copied by one request; longer ranges are split.
    """

    min_run_bytes: int
    max_bytes: int


class FileLease(Protocol):
    """Keeps other programs from writing to a lent file."""

    def require_unbroken(self) -> None:
        """Raise Unavailable if another program waits to write, or has written."""

    def close(self) -> None: ...


class ObjectStore(Protocol):
    """A store of objects under keys. All methods raise NotFound if there is no object, AlreadyExists, Unavailable, Refused, or OutOfBudget
    if a disk is full.
    """

    @property
    def url(self) -> str: ...

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Read bytes [start, start + length) (None: up to the end), fewer if the object ends earlier."""

    def head(self, key: str) -> ObjectInfo: ...

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """Create an object atomically, only if the key is free.

        :raises AlreadyExists: if the key is taken, also by an earlier attempt of this call whose answer was lost; the caller compares the
            content.
        :raises Unavailable: if the outcome is unknown; the object may still appear.
        """

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None, *, may_link: bool = False) -> ObjectInfo:
        """Create an object from a file of any size, under the conditions of ``create``.

        :param may_link: whether the file may itself become the object, because nothing will write to it any more.
        """

    @property
    def server_copy_limits(self) -> CopyLimits | None:
        """Limits of server-side copies, None if the store cannot copy ranges or has refused to."""

    def compose(self, key: str, sources: Sequence[ComposeSource], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """Create an object from ranges of objects, which the store copies itself, and of local files, in order, only if the key is free. A
        failed call leaves nothing behind.

        :raises NotFound: if a source is gone.
        :raises Unavailable: if a source has another etag.
        :raises CannotCopy: if the store turns out not to copy ranges; ``server_copy_limits`` is None from then on.
        :raises CopyDiffers: if the store has copied other bytes.
        :raises ValueError: if ``server_copy_limits`` does not allow these pieces.
        """

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Create or overwrite an object atomically. Only for heartbeats and hints, on which no correctness depends."""

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        """Write bytes [start, start + length) (None: up to the end) to a local file, and return their number."""

    def lend(self, key: str, path: Path) -> FileLease | None:
        """Let ``path``, which is only to be read, be the object itself, until it is removed and the lease is closed. Return None, and make
        nothing, if objects are no local files, or cannot be protected.
        """

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects with this prefix whose keys are greater than ``after``, in ascending UTF-8 order, without metadata."""

    def delete(self, keys: Iterable[str]) -> None:
        """Absent keys are ignored."""

    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Yield the unfinished uploads to keys with this prefix, in no order, also those whose writer is still active.

        A directory store yields its staged files, which have no key yet, only for an empty prefix; a store that is a whole bucket yields
        nothing for it, because the uploads may be other programs'.
        """

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        """Finished or aborted uploads are ignored. A writer that is still active fails."""

    def clock_ms(self) -> int:
        """Time of the store's own clock, with at most one request."""
