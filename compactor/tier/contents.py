"""Comparison of stored objects with expected content: by recorded digests, or byte by byte if there is no digest."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from compactor.errors import AlreadyExists, BadData, NotFound
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.port import ObjectInfo, ObjectStore

FileContent = Path | bytes
"""The content of a file: a local path, or the bytes."""

READ_BYTES: Final = 8 << 20


def open_content(content: FileContent) -> BinaryIO:
    """Open the content for reading."""
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def content_size(content: FileContent) -> int:
    """Return the size of the content in bytes."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def read_pieces(content: FileContent, size: int = READ_BYTES) -> Iterator[bytes]:
    """Yield the content in pieces of ``size`` bytes; the last one may be shorter."""
    with open_content(content) as file:
        while piece := file.read(size):
            yield piece


def content_sha256(content: FileContent) -> str:
    """Return the SHA-256 of the content as hex digits."""
    digest = hashlib.sha256()
    for piece in read_pieces(content):
        digest.update(piece)
    return digest.hexdigest()


class StreamDigest:
    """Digest of bytes that arrive in pieces, of the kind that was recorded: SHA-256, else the digest over batch headers (``batches``)."""

    def __init__(self, recorded: SegmentFile) -> None:
        self._size = 0
        self._sha256 = hashlib.sha256() if recorded.sha256 else None
        self._batches = None
        if recorded.batches and not recorded.sha256:
            from compactor.records.headers import DigestInPieces  # loads the compiler, which few commands need

            self._batches = DigestInPieces()

    def update(self, data: bytes) -> None:
        """Add the next piece."""
        self._size += len(data)
        if self._sha256 is not None:
            self._sha256.update(data)
        if self._batches is not None:
            self._batches.update(data)

    def found(self) -> SegmentFile:
        """Return size and digest of all pieces.

        The digest is empty if none was recorded, or if the bytes should be a log of v2 batches and are not.
        """
        sha256 = self._sha256.hexdigest() if self._sha256 is not None else ""
        return SegmentFile(size=self._size, sha256=sha256, batches=self._batches.digest() if self._batches is not None else "")


def damaged_object_error(key: str, found: SegmentFile, recorded: SegmentFile) -> BadData:
    """Return the error for an object whose size or digest differs from what was recorded."""
    what = (
        f"it has {found.size} bytes, recorded are {recorded.size}"
        if found.size != recorded.size
        else "its digest is not the one that was recorded"
    )
    return BadData(
        f"the object was changed or damaged: {what}",
        segment=key,
        hint="Restore it from the store's versions or a backup; nothing was changed",
    )


def create_object(store: ObjectStore, key: str, content: FileContent) -> bool:
    """Create an object without metadata. Return False if one with other content exists already. Raises StoreError."""
    try:
        if isinstance(content, bytes):
            store.create(key, content)
        else:
            store.create_from_file(key, content)
    except AlreadyExists:
        return _has_content(store, key, content)
    return True


def stored_file(store: ObjectStore, key: str, size: int, recorded: SegmentFile) -> SegmentFile:
    """Read ``size`` bytes of an object and return their digest, of the kind that was recorded. Raises NotFound, StoreError."""
    digests = StreamDigest(recorded)
    for start in range(0, size, READ_BYTES):
        digests.update(store.get(key, start, min(READ_BYTES, size - start)))
    return digests.found()


def recorded_file(info: ObjectInfo) -> SegmentFile:
    """Return size and digests that an object's own metadata states."""
    return SegmentFile(size=info.size, sha256=info.metadata.get("sha256", ""), batches=info.metadata.get("batches", ""))


def known_file(store: ObjectStore, info: ObjectInfo, expected: SegmentFile) -> SegmentFile:
    """Return size and digests of an object from its metadata, or by reading it if the metadata has no comparable digest."""
    stated = recorded_file(info)
    if stated.size != expected.size or stated.is_comparable(expected):
        return stated
    return stored_file(store, info.key, info.size, expected)


def stored_problem(store: ObjectStore, key: str, segment: RemoteLogSegmentMetadata, kind: str) -> str:
    """Return why the object with one file of a segment is not as recorded, or an empty string.

    Without a recorded digest only the size is compared.
    """
    recorded = segment.files.get(kind)
    size = recorded.size if recorded else segment.size_bytes if kind == "log" else -1
    try:
        info = store.head(key)
        if size not in (-1, info.size):
            return f"{store.url}/{key} has {info.size} bytes, recorded are {size}"
        if recorded and recorded.has_digest and not known_file(store, info, recorded).is_same(recorded):
            return f"{store.url}/{key} has another digest than was recorded"
    except NotFound:
        return f"{store.url}/{key} is missing"
    return ""


def _has_content(store: ObjectStore, key: str, content: FileContent) -> bool:
    try:
        if store.head(key).size != content_size(content):
            return False
        at = 0
        for piece in read_pieces(content):
            if store.get(key, at, len(piece)) != piece:
                return False
            at += len(piece)
    except NotFound:
        return False
    return True
