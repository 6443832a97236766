"""What lies in a store compared with what should: byte by byte, for tiers whose objects bear no digest of ours."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from compactor.errors import AlreadyExists, BadData, NotFound
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.port import ObjectStore

FileContent = Path | bytes
"""A file on this machine, or what would stand in it."""

PIECE_BYTES: Final = 8 << 20


def opened(content: FileContent) -> BinaryIO:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def size_of(content: FileContent) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def pieces(content: FileContent, size: int = PIECE_BYTES) -> Iterator[bytes]:
    """All of it, ``size`` bytes at a time; the last piece may be shorter."""
    with opened(content) as file:
        while piece := file.read(size):
            yield piece


def digest_of(content: FileContent) -> str:
    """SHA-256, as hex digits."""
    digest = hashlib.sha256()
    for piece in pieces(content):
        digest.update(piece)
    return digest.hexdigest()


class Digests:
    """Of bytes that come in pieces: the digest by which they can be compared with what was ``recorded``, SHA-256 before ``batches``."""

    def __init__(self, recorded: SegmentFile) -> None:
        self._size = 0
        self._sha256 = hashlib.sha256() if recorded.sha256 else None
        self._batches = None
        if recorded.batches and not recorded.sha256:
            from compactor.records.headers import DigestInPieces  # loads the compiler, which few commands need

            self._batches = DigestInPieces()

    def update(self, data: bytes) -> None:
        self._size += len(data)
        if self._sha256 is not None:
            self._sha256.update(data)
        if self._batches is not None:
            self._batches.update(data)

    def found(self) -> SegmentFile:
        """Without a digest where none was recorded, or where what came is no log of sound v2 batches and has to be one."""
        sha256 = self._sha256.hexdigest() if self._sha256 is not None else ""
        return SegmentFile(size=self._size, sha256=sha256, batches=self._batches.digest() if self._batches is not None else "")


def damaged(key: str, found: SegmentFile, recorded: SegmentFile) -> BadData:
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


def create(store: ObjectStore, key: str, content: FileContent) -> bool:
    """A new object without metadata. False: one with other content is there already. Raises StoreError."""
    try:
        if isinstance(content, bytes):
            store.create(key, content)
        else:
            store.create_from_file(key, content)
    except AlreadyExists:
        return _holds(store, key, content)
    return True


def stored_file(store: ObjectStore, key: str, size: int, recorded: SegmentFile) -> SegmentFile:
    """What lies there, by reading it: ``size`` bytes, with the digest that can be compared. Raises NotFound, StoreError."""
    digests = Digests(recorded)
    for start in range(0, size, PIECE_BYTES):
        digests.update(store.get(key, start, min(PIECE_BYTES, size - start)))
    return digests.found()


def stored_problem(store: ObjectStore, key: str, segment: RemoteLogSegmentMetadata, kind: str) -> str:
    """Why the object that holds one file of a segment is not what was recorded, or nothing. Without a digest its size is what counts."""
    recorded = segment.files.get(kind)
    size = recorded.size if recorded else segment.size_bytes if kind == "log" else -1
    try:
        info = store.head(key)
        if size not in (-1, info.size):
            return f"{store.url}/{key} has {info.size} bytes, recorded are {size}"
        if recorded and recorded.has_digest and not recorded.is_same(stored_file(store, key, info.size, recorded)):
            return f"{store.url}/{key} has another digest than was recorded"
    except NotFound:
        return f"{store.url}/{key} is missing"
    return ""


def _holds(store: ObjectStore, key: str, content: FileContent) -> bool:
    try:
        if store.head(key).size != size_of(content):
            return False
        at = 0
        for piece in pieces(content):
            if store.get(key, at, len(piece)) != piece:
                return False
            at += len(piece)
    except NotFound:
        return False
    return True
