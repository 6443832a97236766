"""Opening a store by its URL, with limits and counters around it."""

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

# Answers of stores that only adapters understand. They never leave an adapter.


class PreconditionFailed(StoreError):
    """Raised if a condition of a request did not hold (HTTP 412). Callers decide what that means for their request."""


class RangeNotSatisfiable(StoreError):
    """Raised if the requested range begins at or after the object's end (HTTP 416)."""


class NoSuchUpload(StoreError):
    """Raised if a multipart upload or one of its parts no longer exists, because it was completed, was aborted or has expired."""


SleptSeconds = float
"""Time for which a call has slept, in seconds; 0 if it has not."""

# ---- rate limits of the settings ``[limits]``, enforced across all threads of a process --------------------------------------------


class TokenBucket:
    """Token bucket that holds at most the tokens of one second.

    A caller that takes more tokens than are available leaves a debt and sleeps until the debt is paid; callers that come meanwhile sleep
    longer. The average rate therefore holds for requests of any size, and every caller gets its tokens.

    :param rate: tokens per second.
    """

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._level = float(rate)
        self._at = clock()

    def take_tokens(self, tokens: int) -> SleptSeconds:
        """Take ``tokens`` tokens. If that leaves a debt, sleep until it is paid. Return the seconds slept."""
        with self._lock:
            now = self._clock()
            self._level = min(float(self._rate), self._level + (now - self._at) * self._rate) - tokens
            self._at = now
            wait = max(0.0, -self._level / self._rate)
        if wait:
            self._sleep(wait)
        return wait


class RateLimits:
    """Token buckets of the rate limits in [limits], one for each limit that is set. Stores of a process with equal limits share one
    RateLimits, so that the limits hold for all of them together.
    """

    def __init__(
        self, limits: RateLimitSettings, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._buckets = {name: TokenBucket(rate, clock, sleep) for name, rate in limits.model_dump().items() if rate}

    def take_tokens(self, setting: str, tokens: int) -> SleptSeconds:
        """Take tokens from the bucket of a setting in [limits], sleeping if necessary. Return the seconds slept; 0 if the setting has no
        limit.
        """
        bucket = self._buckets.get(setting)
        return bucket.take_tokens(tokens) if bucket else 0.0


class RateLimitingRequestMeter:
    """RequestMeter that delays its callers so that the rate limits hold, and then passes each report on to the meter ``inner``."""

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


# ---- stores -----------------------------------------------------------------------------------------------------------------


class StoreOpeningModule(Protocol):
    """Interface of the modules that open the stores of one kind (``StoreKind.adapter`` names the module)."""

    def open_store_at(self, url: str, options: StoreOptions) -> ObjectStore:
        """Return the store at a URL of this kind. Makes no request. Raises UsageError if the URL names none."""


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
    """Return the store at a URL (``schemes.STORE_KINDS``) or in the directory at a plain path. Makes no request.

    :param settings: how servers are reached; the defaults if None.
    :param limits: rate limits, shared by all stores of this process that are opened with equal limits; None for no limits.
    :param retries, transfers: None for the defaults.
    :param counters: count requests and bytes; may be shared by several stores.
    :param contact: record of whether the server has answered; shared by the stores on that server.
    :param holds_control_records: whether control records are stored there (``LocalStore``). It makes no difference for servers.
    :param before_create: called with the store before each create on a server (``ConditionalCreateCheck``). Directories need no check.
    :raises UsageError: if the URL names no store, or the client library of its kind is not installed.
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
    """Return the token buckets of these limits, the same for all calls with equal limits."""
    return RateLimits(limits)
