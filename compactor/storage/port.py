"""The object-store port: the few requests that everything else is built on.

Every adapter passes tests/contract/test_object_store.py. What servers do differently (spec: S3, versitygw, MinIO, moto) is
not used: no rename, no conditional copy, no conditional delete, no key that is a "directory" of another.

Keys are relative to the store's root: ``/``-separated, no empty, ``.`` or ``..`` part, at most 255 bytes a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
