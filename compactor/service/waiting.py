"""Waiting for work that ends in threads of its own."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def ended_in(ends: queue.SimpleQueue[T | None], wait_s: float | None) -> Iterator[T]:
    """What has ended by now; waits for one, or for ``wait_s`` (None: as long as it takes). A None in there only wakes."""
    try:
        ended = ends.get(timeout=wait_s) if wait_s is None or wait_s > 0 else ends.get_nowait()
        while True:
            if ended is not None:
                yield ended
            ended = ends.get_nowait()
    except queue.Empty:
        return
