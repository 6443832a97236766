"""Checks around server-side copies: the sources before and after, and the copied bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import crc32c

from compactor.errors import CopyDiffers, Unavailable
from compactor.storage.port import ComposeSource, ObjectRangeToCopy, ObjectStore


def require_copied_bytes_equal_source(
    piece: ObjectRangeToCopy, object_name: str, copied: Iterable[bytes], read_source: Callable[[], Iterable[bytes]]
) -> None:
    """Raise CopyDiffers if the copied bytes have another CRC-32C than the range from which they were copied.

    :param piece: the range that was to be copied.
    :param object_name: name of the source object, for the message.
    :param copied: the bytes of the new object, in chunks of any size.
    :param read_source: reads the range from the source; called only if ``piece.crc32c`` is None.
    """
    expected = _crc32c_of_chunks(read_source()) if piece.crc32c is None else piece.crc32c
    if _crc32c_of_chunks(copied) != expected:
        raise CopyDiffers(f"{object_name}: the store has copied other bytes of it than it was asked for", hint="Run verify --deep")


def _crc32c_of_chunks(chunks: Iterable[bytes]) -> int:
    crc = 0
    for chunk in chunks:
        crc = crc32c.crc32c(chunk, crc)
    return crc


def copy_source_changed_error(object_name: str) -> Unavailable:
    """Return the error for a copy whose source object was replaced by another version."""
    return Unavailable(f"{object_name} is not the version that was to be copied", hint="Something else writes to this tier; run verify")


def require_unchanged_copy_sources(store: ObjectStore, sources: Sequence[ComposeSource]) -> None:
    """Check that the objects from which ranges are copied exist in the expected version and contain the ranges, with one request for each
    object.

    Raises NotFound if an object is gone, Unavailable if it has another version, ValueError if a range is not in it.
    """
    copied = [piece for piece in sources if isinstance(piece, ObjectRangeToCopy) and piece.length]
    for key in dict.fromkeys(piece.key for piece in copied):
        found = store.head(key)
        if any(piece.etag != found.etag for piece in copied if piece.key == key):
            raise copy_source_changed_error(f"{store.url}/{key}")
        if any(piece.start + piece.length > found.size for piece in copied if piece.key == key):
            raise ValueError(f"{store.url}/{key} ends before what was to be copied of it")


def delete_and_raise_if_copied_bytes_differ(store: ObjectStore, key: str, sources: Sequence[ComposeSource], chunk_bytes: int) -> None:
    """Read back the copied ranges of a new object, ``chunk_bytes`` bytes at a time. If they differ from their sources, delete the object
    and raise CopyDiffers.

    :param sources: the ranges of which the object was composed, in order.
    """

    def read_range(source: str, start: int, length: int) -> Iterator[bytes]:
        for at in range(start, start + length, chunk_bytes):
            yield store.get(source, at, min(chunk_bytes, start + length - at))

    at = 0
    for piece in sources:
        if isinstance(piece, ObjectRangeToCopy):
            try:
                source = partial(read_range, piece.key, piece.start, piece.length)
                require_copied_bytes_equal_source(piece, f"{store.url}/{piece.key}", read_range(key, at, piece.length), source)
            except CopyDiffers:
                store.delete([key])
                raise
        at += piece.length
