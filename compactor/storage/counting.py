"""Counters of requests and transferred bytes, including those of failed attempts.

Adapters report to a :class:`RequestMeter`, because only they see single requests: one upload is many. Meters can be nested.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from compactor.model.base import StrictFrozenModel

STORE = "store"
"""Reason of delays that the store causes: it was busy, did not answer or broke off."""


class RequestMeter(Protocol):
    """Receiver of reports about each request and each transferred byte of a store."""

    def record_request(self, request_kind: str) -> None:
        """Record a request before it is sent. kind: get, head, put, copy, list, delete or multipart."""

    def record_retry(self) -> None:
        """Record that the next request repeats a failed one."""

    def record_bytes_read(self, size: int) -> None:
        """Record body bytes that were received."""

    def record_bytes_written(self, size: int) -> None:
        """Record body bytes before they are sent."""

    def record_request_delay(self, reason: str, seconds: float) -> None:
        """Record that a request was delayed. reason: the setting in [limits] that delayed it, or ``STORE`` for the delay before a retry."""


class StoreUsage(StrictFrozenModel):
    """Requests by kind and bytes transferred. repeats: number of requests that repeated a failed one. waited_s: seconds of delay by reason,
    summed over threads.
    """

    requests: Mapping[str, int] = {}
    repeats: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    waited_s: Mapping[str, float] = {}

    @property
    def total_requests(self) -> int:
        """Return the number of requests of all kinds."""
        return sum(self.requests.values())

    def usage_since(self, earlier: StoreUsage) -> StoreUsage:
        """Return the usage since ``earlier``, which must be an earlier result of the same counters."""
        difference = Counter(self.requests)
        difference.subtract(earlier.requests)
        return StoreUsage(
            requests={kind: count for kind, count in sorted(difference.items()) if count},
            repeats=self.repeats - earlier.repeats,
            bytes_read=self.bytes_read - earlier.bytes_read,
            bytes_written=self.bytes_written - earlier.bytes_written,
            waited_s={why: seconds - earlier.waited_s.get(why, 0.0) for why, seconds in self.waited_s.items()},
        )


class RequestCounters:
    """Thread-safe RequestMeter that counts requests and bytes. It cannot be sent to another process: each Spark executor has its own and
    returns a StoreUsage.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watcher: Callable[[int], None] | None = None
        self._requests: Counter[str] = Counter()
        self._repeats = 0
        self._read = 0
        self._wrote = 0
        self._waited: dict[str, float] = {}

    def record_request(self, request_kind: str) -> None:
        with self._lock:
            self._requests[request_kind] += 1

    def record_retry(self) -> None:
        with self._lock:
            self._repeats += 1

    def record_bytes_read(self, size: int) -> None:
        with self._lock:
            self._read += size
        if self._watcher:
            self._watcher(size)

    def record_bytes_written(self, size: int) -> None:
        with self._lock:
            self._wrote += size
        if self._watcher:
            self._watcher(size)

    def record_request_delay(self, reason: str, seconds: float) -> None:
        with self._lock:
            self._waited[reason] = self._waited.get(reason, 0.0) + seconds

    @contextmanager
    def report_transferred_bytes_to(self, on_bytes: Callable[[int], None]) -> Iterator[None]:
        """Provide a ``with`` block during which ``on_bytes`` is called with the number of bytes of every transfer, from any thread. For
        progress reports.
        """
        self._watcher = on_bytes
        try:
            yield
        finally:
            self._watcher = None

    def usage(self) -> StoreUsage:
        """Return all requests and bytes counted so far."""
        with self._lock:
            requests = dict(sorted(self._requests.items()))
            return StoreUsage(
                requests=requests, repeats=self._repeats, bytes_read=self._read, bytes_written=self._wrote, waited_s=dict(self._waited)
            )
