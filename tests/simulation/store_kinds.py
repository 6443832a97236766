"""Kinds of stores in the simulated world: the adapters' common code (``CloudStore``) over single requests that differ from kind to kind.

``World`` alone is S3 as its adapter shows it. What other kinds do otherwise comes from their row of ``STORE_KINDS``: no server-side copies,
listings without start keys, blocks that are staged before they count, and HDFS's publication by a rename, after which an object has no time
until somebody sets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar
from unittest.mock import patch

from typing_extensions import override

from compactor.adapters.stores import cloud
from compactor.adapters.stores.cloud import CloudStore, ObjectRangeContent, PartUploader, RequestRunnerWithRetries
from compactor.adapters.stores.hdfs import UNDATED_MS
from compactor.adapters.stores.s3_requests import UploadPart
from compactor.config.settings import Settings
from compactor.errors import AlreadyExists, Unavailable
from compactor.model.finding import Finding
from compactor.storage.factory import PreconditionFailed, RangeNotSatisfiable
from compactor.storage.port import CopyLimits, ObjectInfo, ObjectStore
from compactor.storage.schemes import STORE_KINDS, StoreKind
from compactor.storage.settings import RetrySettings, TransferSettings
from compactor.storage.wrappers import FirstAnswerTracker, RequestCounters, Retrier, StoreOptions
from tests.simulation.world import TRYING, SimStore, Stored, Unheard, World

T = TypeVar("T")
CLOUD_KINDS: dict[str, StoreKind] = {kind.scheme: kind for kind in STORE_KINDS if kind.scheme not in ("file", "s3")}
AT_ONCE = RetrySettings(deadline_s=0)
"""Of the data store: requests are not tried again, so that much is left undone."""


class KindOfWorld(World):
    """A world whose stores are of one kind."""

    def __init__(self, seed: int, kind: StoreKind) -> None:
        super().__init__(seed)
        self.kind = kind
        self.numbers = count()

    @override
    def opened(self, store: SimStore, *, tries_again: bool) -> ObjectStore:
        options = SimulatedOptions(
            Settings(),
            RequestCounters(),
            TRYING if tries_again else AT_ONCE,
            TransferSettings(),
            FirstAnswerTracker(),
            False,
            lambda _: None,
        )
        object.__setattr__(options, "world", self)
        return CloudStore(SimulatedClient(self, store), options)


class SimulatedOptions(StoreOptions):
    """Options whose retries take simulated time."""

    world: World

    @override
    def create_retrier(self, first_answer_s: float) -> Retrier:
        world = self.world
        assert self.retries is not None
        return Retrier(self.retries, lambda: world.now_ms / 1000, lambda s: world.wait(s * 1000), lambda: 1.0, Unheard())


class SimulatedClient:
    """Single requests to a simulated store (``SingleRequestObjectClient``), as a kind of store answers them."""

    def __init__(self, world: KindOfWorld, store: SimStore) -> None:
        self._store = store
        self._world = world
        self._kind = kind = world.kind
        self._publishes_by_rename = "rename" in kind.can.create_only

    @property
    def server_copy_limits(self) -> CopyLimits | None:
        return self._store.server_copy_limits if self._kind.can.range_copy else None

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def endpoint_bucket_and_prefix(self) -> tuple[str, str, str]:
        return "", "simulated", self._store.name

    def read(self, key: str, start: int, length: int | None, version: str = "") -> ObjectRangeContent:
        def effect() -> ObjectRangeContent:
            info, data = self._store._info(key), self._store._at(key).data
            if version and info.etag != version:
                raise PreconditionFailed(f"{key} has changed")
            if start >= len(data):
                raise RangeNotSatisfiable(f"{key} ends before {start}")
            return ObjectRangeContent(data[start : None if length is None else start + length], len(data), info.etag)

        return self._world.call(f"get {key}", effect, changes=False)

    def head(self, key: str) -> ObjectInfo:
        return self._dated(self._store.head(key))

    def create(self, key: str, data: bytes, metadata: Mapping[str, str], retried: RequestRunnerWithRetries) -> ObjectInfo:
        if self._publishes_by_rename:
            return self._create_by_rename(key, data, metadata, retried)
        return retried(lambda: self._store.create(key, data, metadata))

    def create_in_parts(self, key: str, parts: Sequence[UploadPart], metadata: Mapping[str, str], upload: PartUploader) -> ObjectInfo:
        data = b"".join(self._store._content(piece) for part in parts for piece in (part if isinstance(part, tuple) else (part,)))
        upload.confirm()
        return self.create(key, data, metadata, lambda request: upload.retrier.call_with_retries(lambda _: request()))

    def put(self, key: str, data: bytes) -> ObjectInfo:
        return self._store.put(key, data)

    def list_page(self, prefix: str, after: str, token: str, size: int) -> tuple[Sequence[ObjectInfo], str]:
        found = self._store.list(prefix, after if self._kind.can.start_key else "")
        return [self._dated(info) for info in found], ""

    def delete(self, key: str, version: str = "") -> None:
        self._store.delete([key])

    def clock_ms(self) -> int:
        return self._store.clock_ms()

    def does_delete_free_space(self) -> bool | None:
        return None

    def inspect_store_settings(self) -> list[Finding]:
        return []

    def required_permission_name(self, verb: str) -> str:
        return verb

    def _create_by_rename(self, key: str, data: bytes, metadata: Mapping[str, str], retried: RequestRunnerWithRetries) -> ObjectInfo:
        """Stage a file, rename it, and give it its time: three requests, between which the process may die or stand still."""
        store, world = self._store, self._world
        name = retried(self._stage)

        def rename() -> None:
            if key in store.objects:
                raise AlreadyExists(f"{key} exists")
            if name not in store.staged:
                raise PreconditionFailed(f"{name} is gone")
            staged_ms = store.staged.pop(name)
            store.objects[key] = Stored(data, staged_ms + UNDATED_MS, dict(metadata), name)
            for told in store.on_create:
                told(key, data)

        try:
            retried(lambda: world.call(f"rename to {key}", rename, changes=True))
        except Exception:
            with suppress(Unavailable):
                world.call(f"delete {name}", lambda: store.staged.pop(name, None), changes=True)
            raise
        published_ms = retried(lambda: self._set_time(key))
        return replace(store._info(key), modified_ms=published_ms) if key in store.objects else ObjectInfo(key, len(data), published_ms)

    def _stage(self) -> str:
        name = f"staged-{next(self._world.numbers)}"

        def effect() -> None:
            self._store.staged[name] = int(self._world.now_ms)

        self._world.call("stage", effect, changes=True)
        return name

    def _dated(self, info: ObjectInfo) -> ObjectInfo:
        if info.modified_ms < UNDATED_MS:
            return info
        return replace(info, modified_ms=self._set_time(info.key))

    def _set_time(self, key: str) -> int:
        """Set an object's time to that of a request which began before, as HDFS has no request for "now"."""
        now_ms = self._store.clock_ms() + 1

        def effect() -> None:
            stored = self._store.objects.get(key)
            if stored is not None and stored.modified_ms >= UNDATED_MS:
                stored.modified_ms = now_ms

        self._world.call(f"date {key}", effect, changes=True)
        return now_ms


def _one_after_the_other(threads: int, tasks: list[Callable[[threading.Event], Any]]) -> list[Any]:
    return [task(threading.Event()) for task in tasks]


@contextmanager
def without_threads() -> Iterator[None]:
    """A simulated world has no threads: parts are sent one after the other."""
    with patch.object(cloud, "run_in_parallel", _one_after_the_other):
        yield
