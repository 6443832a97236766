"""The object-store port: the few requests that everything else is built on.

Every adapter passes tests/contract/test_object_store.py. What servers do differently (spec: S3, versitygw, MinIO, moto) is
not used: no rename, no conditional delete, no key that is a "directory" of another. Copying a range is used where there is such a thing.

Keys are relative to the store's root: ``/``-separated, no empty, ``.`` or ``..`` part, at most 255 bytes a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ObjectInfo:
    """What the store knows of one object. ``modified_ms`` is by the store's own clock."""

    key: str
    size: int
    modified_ms: int
    etag: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unfinished:
    """What a writer has begun and not finished: no object, in no LIST, and paid for. ``id`` tells it from others of the same key."""

    key: str
    id: str
    begun_ms: int


@dataclass(frozen=True)
class CopiedRange:
    """Bytes [start, start + length) of an object of the same store, in the version that has this ``etag`` (ObjectInfo.etag).

    ``crc32c``: what their CRC-32C must be, where the caller knows it: compared with the copy's receipt by stores that give one (S3).
    """

    key: str
    start: int
    length: int
    etag: str
    crc32c: int | None = None


@dataclass(frozen=True)
class FileRange:
    """Bytes [start, start + length) of a local file."""

    path: Path
    start: int
    length: int


Piece = CopiedRange | FileRange


@dataclass(frozen=True)
class RangeCopies:
    """What ``ObjectStore.compose`` can do.

    :param least_bytes: of everything between two changes from copied to local bytes, the object's end apart; shorter ranges that lie
        between local bytes have to be local, and neighbouring local pieces count together. 0: any length.
    :param most_bytes: that one request copies; longer ranges are split.
    """

    least_bytes: int
    most_bytes: int


class ObjectStore(Protocol):
    """All methods raise NotFound, AlreadyExists, Unavailable or Refused (compactor.errors), or OutOfBudget for a full disk."""

    @property
    def url(self) -> str:
        """Where this store is, for messages: ``file:///tier`` or ``s3://bucket/prefix``."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length) of an object; shorter only where the object ends. Raises NotFound."""

    def head(self, key: str) -> ObjectInfo:
        """Raises NotFound."""

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """Writes a new object, atomically and only if the key is free (S3 ``If-None-Match: *``, an exclusive hard link).

        Raises AlreadyExists, also where an earlier attempt of this very call won and its answer was lost: the caller
        compares the content. After Unavailable the object may still appear.
        """

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """Like ``create`` for a file of any size (multipart, streamed)."""

    @property
    def copies(self) -> RangeCopies | None:
        """None: this store cannot copy ranges, as far as is known: what it refused once it is not asked again by this process."""

    def compose(self, key: str, pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """Like ``create``, of these pieces, one behind the other. Copied bytes do not pass through this machine where it can be helped.

        Raises NotFound or Unavailable where a source is gone or has another ``etag``, CannotCopy where it turns out that the store does
        not copy ranges (then ``copies`` is None from here on), CopyDiffers where it has copied something else, ValueError for pieces that
        ``copies`` does not allow. Nothing is left behind, and never is an object put together from two versions.
        """

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Writes or overwrites, atomically. Only for heartbeats and hints, which nothing depends on."""

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        """Writes those bytes into a new file and returns their number; ranged, parallel where it pays. Raises NotFound."""

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key begins with ``prefix`` and sorts above ``after``, ascending by UTF-8 bytes; without metadata."""

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes them; absent keys are fine."""

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Uploads to keys with that prefix that were begun and neither finished nor aborted, those at work included; in no order.

        A directory's staged files have no key yet: they are told for an empty prefix only. A bucket without a prefix of our own tells
        none: whose they are is not known.
        """

    def abort(self, uploads: Iterable[Unfinished]) -> None:
        """Frees what they hold; what is finished or gone meanwhile is fine. A writer that still lives finds its upload gone, and fails."""

    def clock_ms(self) -> int:
        """The store's own clock (a server's Date header; the file system's time). Costs up to one request."""
