"""What lies in a store compared with what should: byte by byte, for tiers whose objects bear no digest of ours."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from compactor.errors import AlreadyExists, NotFound
from compactor.model.segment import RemoteLogSegmentMetadata
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


def stored_digest(store: ObjectStore, key: str, size: int) -> str:
    """SHA-256 of an object of ``size`` bytes. Raises NotFound, StoreError."""
    digest = hashlib.sha256()
    for start in range(0, size, PIECE_BYTES):
        digest.update(store.get(key, start, min(PIECE_BYTES, size - start)))
    return digest.hexdigest()


def stored_problem(store: ObjectStore, key: str, segment: RemoteLogSegmentMetadata, kind: str) -> str:
    """Why the object that holds one file of a segment is not what was recorded, or nothing. Without a digest its size is what counts."""
    recorded = segment.files.get(kind)
    size = recorded.size if recorded else segment.size_bytes if kind == "log" else -1
    try:
        info = store.head(key)
        if size not in (-1, info.size):
            return f"{store.url}/{key} has {info.size} bytes, recorded are {size}"
        if recorded and recorded.sha256 and stored_digest(store, key, info.size) != recorded.sha256:
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
