"""Retries of requests: the only place that decides how often, how long and after which delay.

Adapters retry each single request, not a whole upload of many parts, so that a store which fails one request in ten can still take large
objects. ``RetryingStore`` retries for adapters that do not do it themselves. Only Unavailable is retried; every other error is final.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import override

from compactor.errors import Unavailable
from compactor.storage.forwarding import ForwardingStore
from compactor.storage.port import ObjectInfo, ObjectStore
from compactor.storage.settings import RetrySettings

T = TypeVar("T")

_log = logging.getLogger(__name__)
_LOG_INTERVAL_S = 1.0
"""Least time between two log lines about one store, because many threads may wait for it."""


class FirstAnswerTracker:
    """Record of whether a store has ever answered this process, shared by everything that sends requests to that store. Thread-safe.

    If a store has never answered, its address is probably wrong. Therefore all requests wait for the first answer together, and the wait is
    counted from the first of them.
    """

    def __init__(self) -> None:
        self.answered = False
        self._asked_at: float | None = None
        self._logged_at: float | None = None

    def record_answer(self) -> None:
        """Record that the store has answered a request, successfully or not."""
        self.answered = True

    def seconds_without_first_answer(self, requested_at: float, now: float) -> float:
        """Return the seconds since the first request to a store that has never answered; 0 if it has answered.

        :param requested_at: start of the caller's request; it counts as the first one if no other request was reported before.
        :param now: current time. Both are seconds of the same clock.
        """
        if self.answered:
            return 0.0
        if self._asked_at is None:
            self._asked_at = requested_at
        return now - self._asked_at

    def claim_permission_to_log_retry(self, now: float) -> bool:
        """Return whether the caller may write a log line about a retry. At most one line per second is allowed, so a caller that gets True
        must write it.

        :param now: current time in seconds.
        """
        if self._logged_at is not None and now - self._logged_at < _LOG_INTERVAL_S:
            return False
        self._logged_at = now
        return True


@dataclass(frozen=True)
class Retrier:
    """Sender of requests. A request that fails with Unavailable is repeated after random delays (settings.RetrySettings).

    clock, sleep, fraction: time in seconds, function that waits, and random number from 0 to 1. Tests replace them.
    """

    policy: RetrySettings = field(default_factory=RetrySettings)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    fraction: Callable[[], float] = random.random
    contact: FirstAnswerTracker = field(default_factory=FirstAnswerTracker)

    def call_with_retries(self, attempt: Callable[[int], T]) -> T:
        """Call ``attempt`` until it does not raise Unavailable, and return its result. If the next attempt would begin after the retry
        deadline (``policy.deadline_s``), raise the last Unavailable instead.

        The deadline counts from the first failure, because [limits] may delay an attempt for minutes. A store that has never answered is
        given up earlier, after ``policy.first_answer_s``. Retries from the second on are logged with cause and delay.

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
                if (number or silent > _LOG_INTERVAL_S) and self.contact.claim_permission_to_log_retry(now):
                    _log.warning("%s; try %d in %.1f s", error.message, number + 2, pause, extra={"transient": True})
            else:
                self.contact.record_answer()
                return result
            self.sleep(pause)
            number += 1


class RetryingStore(ForwardingStore):
    """ObjectStore that repeats failed requests to an inner store which does not retry itself. A failed listing continues after the last key
    that it has yielded.
    """

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
