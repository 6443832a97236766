"""Opening of stores by URL, with rate limits and counters around them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Protocol

from compactor.config.settings import RateLimitSettings, Settings
from compactor.errors import StoreError
from compactor.extras import require_pip_extra
from compactor.storage.port import ObjectStore
from compactor.storage.schemes import store_kind
from compactor.storage.settings import RetrySettings, TransferSettings
from compactor.storage.wrappers import FirstAnswerTracker, RequestCounters, RequestMeter, StoreOptions


class PreconditionFailed(StoreError):
    """Raised inside adapters if a request's condition did not hold (HTTP 412)."""


class RangeNotSatisfiable(StoreError):
    """Raised inside adapters if a range begins at or after the object's end (HTTP 416)."""


class NoSuchUpload(StoreError):
    """Raised inside adapters if a multipart upload, or a part, was completed, aborted or has expired."""


class TokenBucket:
    """Token bucket that holds at most the tokens of one second.

    A caller that takes more leaves a debt and sleeps until it is paid; later callers sleep longer. The average rate holds for requests of
    any size.

    :param rate: tokens per second.
    """

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._level = float(rate)
        self._at = clock()

    def take_tokens(self, tokens: int) -> float:
        with self._lock:
            now = self._clock()
            self._level = min(float(self._rate), self._level + (now - self._at) * self._rate) - tokens
            self._at = now
            wait = max(0.0, -self._level / self._rate)
        if wait:
            self._sleep(wait)
        return wait


class RateLimits:
    def __init__(
        self, limits: RateLimitSettings, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._buckets = {name: TokenBucket(rate, clock, sleep) for name, rate in limits.model_dump().items() if rate}

    def take_tokens(self, setting: str, tokens: int) -> float:
        """Seconds slept; 0 if the setting in [limits] has no limit."""
        bucket = self._buckets.get(setting)
        return bucket.take_tokens(tokens) if bucket else 0.0


class RateLimitingRequestMeter:
    def __init__(self, inner: RequestMeter, buckets: RateLimits) -> None:
        self._inner = inner
        self._buckets = buckets

    def record_request(self, request_kind: str) -> None:
        self._take_tokens("max_requests_per_s", 1)
        self._inner.record_request(request_kind)

    def record_retry(self) -> None:
        self._inner.record_retry()

    def record_bytes_read(self, size: int) -> None:
        self._take_tokens("max_read_bytes_per_s", size)
        self._inner.record_bytes_read(size)

    def record_bytes_written(self, size: int) -> None:
        self._take_tokens("max_write_bytes_per_s", size)
        self._inner.record_bytes_written(size)

    def record_request_delay(self, reason: str, seconds: float) -> None:
        self._inner.record_request_delay(reason, seconds)

    def _take_tokens(self, setting: str, tokens: int) -> None:
        if seconds := self._buckets.take_tokens(setting, tokens):
            self._inner.record_request_delay(setting, seconds)


class StoreOpeningModule(Protocol):
    def open_store_at(self, url: str, options: StoreOptions) -> ObjectStore:
        """Makes no request. Raises UsageError if the URL names no store of this kind."""


def open_store(
    url: str,
    *,
    settings: Settings | None = None,
    limits: RateLimitSettings | None = None,
    retries: RetrySettings | None = None,
    transfers: TransferSettings | None = None,
    counters: RequestCounters | None = None,
    contact: FirstAnswerTracker | None = None,
    holds_control_records: bool = False,
    before_create: Callable[[ObjectStore], None] = lambda store: None,
) -> ObjectStore:
    """Store at a URL (``schemes.STORE_KINDS``) or in the directory at a plain path. Makes no request.

    :param limits: shared by all stores of this process with equal limits.
    :param contact: shared by the stores on one server.
    :param holds_control_records: as in ``LocalStore``.
    :param before_create: called before each create on a server (``ConditionalCreateCheck``).
    :raises UsageError: if the URL names no store, or its client library is not installed.
    """
    kind = store_kind(url)
    if kind.extra:
        require_pip_extra(kind.extra, kind.example)
    adapter: StoreOpeningModule = import_module(kind.adapter)
    options = StoreOptions(
        settings=settings or Settings(),
        meter=RateLimitingRequestMeter(counters or RequestCounters(), _shared_rate_limits(limits or RateLimitSettings())),
        retries=retries,
        transfers=transfers or TransferSettings(),
        contact=contact or FirstAnswerTracker(),
        records=holds_control_records,
        before_create=before_create,
    )
    return adapter.open_store_at(url, options)


@lru_cache(maxsize=8)
def _shared_rate_limits(limits: RateLimitSettings) -> RateLimits:
    return RateLimits(limits)
