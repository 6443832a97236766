"""Stores in front of other stores, counters of requests, retries, and options of adapters."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from typing_extensions import override

from compactor.config.settings import Settings
from compactor.errors import CompactorError, NotFound, Unavailable, UsageError
from compactor.model.segment import StrictFrozenModel
from compactor.storage.port import ComposeSource, CopyLimits, FileLease, ObjectInfo, ObjectStore, UnfinishedUpload
from compactor.storage.settings import RetrySettings, TransferSettings

T = TypeVar("T")


class ForwardingStore:
    """ObjectStore that passes requests to another store. Subclasses override the two hooks to change all reads or all writes."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def _forward_read_request(self, key: str, request: Callable[[], T]) -> T:
        return request()

    def _forward_write_request(self, verb: str, key: str, request: Callable[[], T]) -> T:
        return self._forward_read_request(key, request)

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def server_copy_limits(self) -> CopyLimits | None:
        return self._store.server_copy_limits

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._forward_read_request(key, lambda: self._store.get(key, start, length))

    def head(self, key: str) -> ObjectInfo:
        return self._forward_read_request(key, lambda: self._store.head(key))

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        return self._forward_read_request(key, lambda: self._store.download(key, path, start, length))

    def lend(self, key: str, path: Path) -> FileLease | None:
        return self._forward_read_request(key, lambda: self._store.lend(key, path))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix, after)

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self._forward_write_request("create", key, lambda: self._store.create(key, data, metadata))

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None, *, may_link: bool = False) -> ObjectInfo:
        return self._forward_write_request("create", key, lambda: self._store.create_from_file(key, path, metadata, may_link=may_link))

    def compose(self, key: str, sources: Sequence[ComposeSource], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self._forward_write_request("create", key, lambda: self._store.compose(key, sources, metadata))

    def put(self, key: str, data: bytes) -> ObjectInfo:
        return self._forward_write_request("put", key, lambda: self._store.put(key, data))

    def delete(self, keys: Iterable[str]) -> None:
        if wanted := tuple(keys):
            self._forward_write_request("delete", ", ".join(wanted), lambda: self._store.delete(wanted))

    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        return iter(self._forward_read_request(prefix, lambda: [*self._store.unfinished_uploads(prefix)]))

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        wanted = tuple(uploads)
        self._forward_write_request("abort", ", ".join(upload.key for upload in wanted), lambda: self._store.abort_uploads(wanted))

    def clock_ms(self) -> int:
        return self._forward_write_request("ask the clock of", "the store", lambda: self._store.clock_ms())  # noqa: PLW0108 - a null store has no store


class ReadOnlyStore(ForwardingStore):
    """ObjectStore that raises CompactorError for requests that write, also ``clock_ms``: a directory store writes to read its clock."""

    @override
    def _forward_write_request(self, verb: str, key: str, request: Callable[[], T]) -> NoReturn:
        raise CompactorError(
            f"something that only reads tried to {verb} {key}", hint="This is a bug; please report it. Nothing was changed"
        )


class UnconfiguredStore(ForwardingStore):
    """Empty store that refuses writes.

    :param missing_setting: what has to be configured, for the message.
    """

    def __init__(self, missing_setting: str) -> None:
        self._needed = missing_setting

    @property
    @override
    def url(self) -> str:
        return "nowhere"

    @property
    @override
    def server_copy_limits(self) -> None:
        return None

    @override
    def _forward_read_request(self, key: str, request: Callable[[], T]) -> T:
        raise NotFound(f"{key} does not exist: {self._needed}")

    @override
    def _forward_write_request(self, verb: str, key: str, request: Callable[[], T]) -> NoReturn:
        raise UsageError(f"nothing can be written: {self._needed}")

    @override
    def lend(self, key: str, path: Path) -> None:
        return None

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return iter(())

    @override
    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        return iter(())


STORE = "store"
"""Reason of delays that the store causes: it was busy, did not answer or broke off."""


class RequestMeter(Protocol):
    """Receiver of reports about each request and each transferred byte, also of failed attempts. Only adapters see single requests: one
    upload is many.
    """

    def record_request(self, request_kind: str) -> None:
        """Called before the request is sent. kind: get, head, put, copy, list, delete or multipart."""

    def record_retry(self) -> None: ...

    def record_bytes_read(self, size: int) -> None: ...

    def record_bytes_written(self, size: int) -> None: ...

    def record_request_delay(self, reason: str, seconds: float) -> None:
        """reason: the setting in [limits], or ``STORE`` for the delay before a retry."""


class StoreUsage(StrictFrozenModel):
    """Requests by kind and bytes transferred. waited_s: by reason, summed over threads."""

    requests: Mapping[str, int] = {}
    repeats: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    waited_s: Mapping[str, float] = {}

    @property
    def total_requests(self) -> int:
        return sum(self.requests.values())

    def usage_since(self, earlier: StoreUsage) -> StoreUsage:
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
    """Thread-safe RequestMeter that counts."""

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
        self._watcher = on_bytes
        try:
            yield
        finally:
            self._watcher = None

    def usage(self) -> StoreUsage:
        with self._lock:
            requests = dict(sorted(self._requests.items()))
            return StoreUsage(
                requests=requests, repeats=self._repeats, bytes_read=self._read, bytes_written=self._wrote, waited_s=dict(self._waited)
            )


# Adapters retry each single request, not a whole upload of many parts, so that a store which fails one request in ten can still take large
# objects. Only Unavailable is retried; every other error is final.


_log = logging.getLogger(__name__)
_LOG_INTERVAL_S = 1.0
"""Least time between two log lines about one store, because many threads may wait for it."""


class FirstAnswerTracker:
    """Record of whether a store has ever answered this process. Thread-safe. If not, its address is probably wrong; therefore all requests
    share one wait, counted from the first of them.
    """

    def __init__(self) -> None:
        self.answered = False
        self._asked_at: float | None = None
        self._logged_at: float | None = None

    def record_answer(self) -> None:
        self.answered = True

    def seconds_without_first_answer(self, requested_at: float, now: float) -> float:
        """Seconds since the first request; 0 if the store has answered."""
        if self.answered:
            return 0.0
        if self._asked_at is None:
            self._asked_at = requested_at
        return now - self._asked_at

    def claim_log_line(self, now: float) -> bool:
        """Return whether the caller may (and then must) log a retry: at most one line per second."""
        if self._logged_at is not None and now - self._logged_at < _LOG_INTERVAL_S:
            return False
        self._logged_at = now
        return True


@dataclass(frozen=True)
class Retrier:
    policy: RetrySettings = field(default_factory=RetrySettings)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    fraction: Callable[[], float] = random.random
    contact: FirstAnswerTracker = field(default_factory=FirstAnswerTracker)

    def call_with_retries(self, attempt: Callable[[int], T]) -> T:
        """Call ``attempt`` until it does not raise Unavailable.

        The deadline counts from the first failure, because [limits] may delay an attempt for minutes. A store that has never answered is
        given up after ``policy.first_answer_s``.

        :param attempt: receives 0, 1, 2, ...; from 1 on, an earlier attempt may have taken effect.
        """
        began = failed = self.clock()
        number = 0
        while True:
            try:
                result = attempt(number)
            except Unavailable as error:
                ceiling = min(self.policy.cap_s, self.policy.base_s * 2.0 ** min(number, 32))
                pause = ceiling * self.fraction()
                now = self.clock()
                failed = failed if number else now
                silent = self.contact.seconds_without_first_answer(began, now)
                if now - failed + pause > self.policy.deadline_s or (silent and silent + pause > self.policy.first_answer_s):
                    tries = f" (tried {number + 1} times in {now - began:.1f} s)" if number else ""
                    raise Unavailable(f"{error.message}{tries}", hint=error.hint) from error
                if (number or silent > _LOG_INTERVAL_S) and self.contact.claim_log_line(now):
                    _log.warning("%s; try %d in %.1f s", error.message, number + 2, pause, extra={"transient": True})
            else:
                self.contact.record_answer()
                return result
            self.sleep(pause)
            number += 1


class RetryingStore(ForwardingStore):
    """ObjectStore that repeats failed requests. A failed listing continues after the last key that it has yielded."""

    def __init__(self, store: ObjectStore, retrier: Retrier) -> None:
        super().__init__(store)
        self._retrier = retrier

    @override
    def _forward_read_request(self, key: str, request: Callable[[], T]) -> T:
        return self._retrier.call_with_retries(lambda _: request())

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        last = after
        listing: Iterator[ObjectInfo] | None = None

        def next_listed_object(attempt_number: int) -> ObjectInfo | None:
            nonlocal listing
            if listing is None or attempt_number:
                listing = self._store.list(prefix, last)
            return next(listing, None)

        while (info := self._retrier.call_with_retries(next_listed_object)) is not None:
            last = info.key
            yield info


@dataclass(frozen=True)
class StoreOptions:
    """Options of an adapter. retries: None for the adapter's default. records: whether the store holds control records."""

    settings: Settings
    meter: RequestMeter
    retries: RetrySettings | None
    transfers: TransferSettings
    contact: FirstAnswerTracker
    records: bool
    before_create: Callable[[ObjectStore], None]

    def create_retrier(self, max_wait_for_first_answer_s: float) -> Retrier:
        policy = (self.retries or RetrySettings()).model_copy(update={"first_answer_s": max_wait_for_first_answer_s})

        def sleep(seconds: float) -> None:
            time.sleep(seconds)
            self.meter.record_request_delay(STORE, seconds)

        return Retrier(policy, sleep=sleep, contact=self.contact)
