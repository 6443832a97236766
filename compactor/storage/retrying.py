"""Trying again: the one place that decides how often, how long and after which pause.

Adapters call it around each single request (not around an upload of a thousand parts), so a store that fails one request in
ten still takes large objects; ``RetryingStore`` puts it around an adapter that does not. Nobody above repeats a request. Only
Unavailable is tried again; every other error is an answer.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from compactor.errors import Unavailable
from compactor.storage.port import ObjectInfo, ObjectStore, Piece, RangeCopies, Unfinished
from compactor.storage.settings import Retries

T = TypeVar("T")

_log = logging.getLogger(__name__)
_SAYING_S = 1.0
"""Many threads that wait for one store do not fill the screen."""


class Contact:
    """Whether a store has answered this process yet: shared by everything that asks it.

    A store that never answered is more likely a wrong address than a busy one; how long it is waited for counts once, from the first
    request to it on, and not again for each request. Used from several threads; what they may lose to each other is a line or a moment.
    """

    def __init__(self) -> None:
        self.answered = False
        self._asked_at: float | None = None
        self._told_at: float | None = None

    def hear(self) -> None:
        """It has answered, whatever it said."""
        self.answered = True

    def silent_s(self, asked_at: float, now: float) -> float:
        """Since when it owes its first answer; 0 for a store that has given it."""
        if self.answered:
            return 0.0
        if self._asked_at is None:
            self._asked_at = asked_at
        return now - self._asked_at

    def may_tell(self, now: float) -> bool:
        """Whether a line about it is in order again."""
        if self._told_at is not None and now - self._told_at < _SAYING_S:
            return False
        self._told_at = now
        return True


@dataclass(frozen=True)
class Retrier:
    """Full jitter (settings.Retries); clock, sleep and the random fraction are injected for tests."""

    policy: Retries = field(default_factory=Retries)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    fraction: Callable[[], float] = random.random
    contact: Contact = field(default_factory=Contact)

    def call(self, attempt: Callable[[int], T]) -> T:
        """``attempt`` gets 0, 1, 2, ...: above 0 an earlier one may have had its effect. Raises its last Unavailable.

        The deadline counts from the first failure: an attempt that [limits] made wait for minutes is not the store's fault. From the
        second repetition on each is said: what failed, and when it is tried again.
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
                silent = self.contact.silent_s(began, now)
                if now - failed + pause > self.policy.deadline_s or (silent and silent + pause > self.policy.first_answer_s):
                    tries = f" (tried {number + 1} times in {now - began:.1f} s)" if number else ""
                    raise Unavailable(f"{error.message}{tries}", hint=error.hint) from error
                if number and self.contact.may_tell(now):
                    _log.warning("%s; try %d in %.1f s", error.message, number + 2, pause)
            else:
                self.contact.hear()
                return result
            self.sleep(pause)
            number += 1


class RetryingStore:
    """A store whose adapter does not try again by itself. Repeats are of whole requests of the port; a LIST goes on where it was."""

    def __init__(self, store: ObjectStore, retrier: Retrier) -> None:
        self._store = store
        self._retrier = retrier

    @property
    def url(self) -> str:
        return self._store.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._retrier.call(lambda _: self._store.get(key, start, length))

    def head(self, key: str) -> ObjectInfo:
        return self._retrier.call(lambda _: self._store.head(key))

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self._retrier.call(lambda _: self._store.create(key, data, metadata))

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self._retrier.call(lambda _: self._store.create_from_file(key, path, metadata))

    @property
    def copies(self) -> RangeCopies | None:
        return self._store.copies

    def compose(self, key: str, pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self._retrier.call(lambda _: self._store.compose(key, pieces, metadata))

    def put(self, key: str, data: bytes) -> ObjectInfo:
        return self._retrier.call(lambda _: self._store.put(key, data))

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        return self._retrier.call(lambda _: self._store.download(key, path, start, length))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        last = after
        listing: Iterator[ObjectInfo] | None = None

        def following(number: int) -> ObjectInfo | None:
            nonlocal listing
            if listing is None or number:
                listing = self._store.list(prefix, last)
            return next(listing, None)

        while (info := self._retrier.call(following)) is not None:
            last = info.key
            yield info

    def delete(self, keys: Iterable[str]) -> None:
        wanted = tuple(keys)
        self._retrier.call(lambda _: self._store.delete(wanted))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        return iter(self._retrier.call(lambda _: list(self._store.unfinished(prefix))))

    def abort(self, uploads: Iterable[Unfinished]) -> None:
        wanted = tuple(uploads)
        self._retrier.call(lambda _: self._store.abort(wanted))

    def clock_ms(self) -> int:
        return self._retrier.call(lambda _: self._store.clock_ms())
