"""Small logs through the code of large ones: how much the cleaner handles at once, made so small that every border is met."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from compactor.cleaner import offline, source

SIZES = (None, None, 1, 200, 3000)
"""Bytes of a chunk; None: as it is, megabytes."""


@contextmanager
def chunks_of(size: int | None) -> Iterator[None]:
    """Batches in chunks of about ``size`` bytes, inflated bodies in chunks of four times that, few of them kept for pass 2."""
    if size is None:
        yield
        return
    with (
        patch.object(source, "PLAIN_CHUNK", size),
        patch.object(source, "PACKED_CHUNK", size),
        patch.object(source, "INFLATED_CHUNK", 4 * size),
        patch.object(offline, "_CACHE_BYTES", 2 * size),
    ):
        yield
