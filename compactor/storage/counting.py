"""Counting what goes over the wire: every request of every attempt, every byte of a body.

Adapters report to a :class:`Meter` because only they see single requests (one upload is many); a meter can stand around another.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from compactor.model.base import Value


class Meter(Protocol):
    def request(self, kind: str) -> None:
        """Called before each request; kinds: get, head, put, copy, list, delete, multipart."""

    def repeated(self) -> None:
        """Called before each request that is made again."""

    def read(self, size: int) -> None:
        """Called for body bytes that arrived."""

    def wrote(self, size: int) -> None:
        """Called before body bytes leave."""


class Usage(Value):
    """What was asked of a store so far; differences of two usages are usages. ``repeats``: of these the ones that were made again."""

    requests: Mapping[str, int] = {}
    repeats: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def total_requests(self) -> int:
        return sum(self.requests.values())

    def since(self, earlier: Usage) -> Usage:
        difference = Counter(self.requests)
        difference.subtract(earlier.requests)
        return Usage(
            requests={kind: count for kind, count in sorted(difference.items()) if count},
            repeats=self.repeats - earlier.repeats,
            bytes_read=self.bytes_read - earlier.bytes_read,
            bytes_written=self.bytes_written - earlier.bytes_written,
        )


class Counters:
    """The innermost meter. Thread-safe; not pickled: an executor counts for itself and returns a Usage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watcher: Callable[[int], None] | None = None
        self._requests: Counter[str] = Counter()
        self._repeats = 0
        self._read = 0
        self._wrote = 0

    def request(self, kind: str) -> None:
        with self._lock:
            self._requests[kind] += 1

    def repeated(self) -> None:
        with self._lock:
            self._repeats += 1

    def read(self, size: int) -> None:
        with self._lock:
            self._read += size
        if self._watcher:
            self._watcher(size)

    def wrote(self, size: int) -> None:
        with self._lock:
            self._wrote += size
        if self._watcher:
            self._watcher(size)

    @contextmanager
    def watched(self, on_bytes: Callable[[int], None]) -> Iterator[None]:
        """While the block runs ``on_bytes`` is told of every transfer, from any thread: for progress."""
        self._watcher = on_bytes
        try:
            yield
        finally:
            self._watcher = None

    def usage(self) -> Usage:
        with self._lock:
            requests = dict(sorted(self._requests.items()))
            return Usage(requests=requests, repeats=self._repeats, bytes_read=self._read, bytes_written=self._wrote)
