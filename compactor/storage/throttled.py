"""Rate limits of the settings ``[limits]``, enforced across all threads of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from compactor.config.settings import LimitSettings
from compactor.storage.counting import Meter


class TokenBucket:
    """Token bucket that holds at most one second's worth of tokens.

    A caller that takes more tokens than are available leaves a debt and waits until it is paid; later callers wait longer. The average
    therefore holds for requests of any size, and no caller starves.

    :param rate: tokens per second.
    """

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._level = float(rate)
        self._at = clock()

    def take(self, tokens: int) -> None:
        """Take tokens, and sleep until the bucket is out of debt."""
        with self._lock:
            now = self._clock()
            self._level = min(float(self._rate), self._level + (now - self._at) * self._rate) - tokens
            self._at = now
            wait = -self._level / self._rate
        if wait > 0:
            self._sleep(wait)


class RateLimits:
    """Token buckets for requests, reads and writes, shared by all stores of a process that have equal limits."""

    def __init__(
        self, limits: LimitSettings, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        def bucket(rate: int) -> TokenBucket | None:
            return TokenBucket(rate, clock, sleep) if rate else None

        self.requests = bucket(limits.max_requests_per_s)
        self.reads = bucket(limits.max_read_bytes_per_s)
        self.writes = bucket(limits.max_write_bytes_per_s)


class ThrottledMeter:
    """Meter that delays callers according to the rate limits and passes everything on."""

    def __init__(self, inner: Meter, buckets: RateLimits) -> None:
        self._inner = inner
        self._buckets = buckets

    def record_request(self, kind: str) -> None:
        if self._buckets.requests:
            self._buckets.requests.take(1)
        self._inner.record_request(kind)

    def record_retry(self) -> None:
        self._inner.record_retry()

    def record_read(self, size: int) -> None:
        if self._buckets.reads:
            self._buckets.reads.take(size)
        self._inner.record_read(size)

    def record_write(self, size: int) -> None:
        if self._buckets.writes:
            self._buckets.writes.take(size)
        self._inner.record_write(size)
