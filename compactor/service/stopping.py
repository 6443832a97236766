"""Stopping a service: the request to stop, and a store wrapper that obeys it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from compactor.control.stages import RoundStage
from compactor.errors import CompactorError
from compactor.storage.forwarding import ForwardingStore
from compactor.storage.port import ObjectInfo, ObjectStore

T = TypeVar("T")


class Stopped(CompactorError):
    """Raised to interrupt work because the service was asked to stop.

    A round that ends with this error is resumed by the next run, like one that a crash has ended.
    """


@dataclass(frozen=True)
class StopRequest:
    """Flag that the service was asked to stop, shared by all its threads. Work checks it wherever it can be interrupted safely."""

    event: threading.Event

    def raise_if_stopped(self) -> None:
        """Raise Stopped if the service was asked to stop."""
        if self.event.is_set():
            raise Stopped("the daemon is stopping")

    def sleep_unless_stopped(self, seconds: float) -> None:
        """Sleep for at most ``seconds``. Raises Stopped as soon as the service is asked to stop."""
        if self.event.wait(seconds):
            self.raise_if_stopped()

    def raise_if_stopped_unless_published(self, stage: RoundStage) -> None:
        """Raise Stopped if the service was asked to stop, unless the round is published already: then only its statistics are left to
        record.

        :param stage: the stage that the round has reached.
        """
        if stage is not RoundStage.PUBLISHED:
            self.raise_if_stopped()


class InterruptibleStore(ForwardingStore):
    """Object store whose next request raises Stopped once the service was asked to stop, so that large jobs end within one request.

    :param record_transferred_bytes: called after each read of an object with the number of its bytes, for progress reports.
    """

    def __init__(self, store: ObjectStore, stop: StopRequest, record_transferred_bytes: Callable[[int], None] = lambda size: None) -> None:
        super().__init__(store)
        self._stop = stop
        self._moved = record_transferred_bytes

    @override
    def _forward_read_request(self, key: str, request: Callable[[], T]) -> T:
        """Make a read request to the store and return its result. Raises Stopped if the service was asked to stop."""
        self._stop.raise_if_stopped()
        return request()

    @override
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, start, length)
        self._moved(len(data))
        return data

    @override
    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        size = super().download(key, path, start, length)
        self._moved(size)
        return size

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._stop.raise_if_stopped()
        return super().list(prefix, after)

    @override
    def clock_ms(self) -> int:
        return self._store.clock_ms()
