"""A store in memory that counts its requests and whose clock stands still until it is moved: for tests of what the daemon asks for."""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from compactor.control.ports import EnvironmentPorts
from compactor.errors import AlreadyExists, CannotCopy, NotFound, Unavailable
from compactor.storage.keys import check_byte_range, check_object_key, check_object_key_prefix, require_storable_object_metadata
from compactor.storage.port import ComposeSource, CopyLimits, FileLease, FileRange, ObjectInfo, UnfinishedUpload
from compactor.storage.wrappers import RequestCounters
from compactor.tier.plain import NativeLayout
from compactor.tier.ports import ControlLogPublisher


class Clock:
    """Milliseconds."""

    def __init__(self, now_ms: int = 1_770_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class MemoryStore:
    """``down``: no request is answered any more. ``begun``: uploads that somebody left unfinished; it makes none by itself.

    ``server_copy_limits``: None makes it a store that cannot copy ranges.
    """

    def __init__(self, clock: Clock, counters: RequestCounters) -> None:
        self._clock = clock
        self._meter = counters
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._keys: list[bytes] = []
        self._lock = threading.Lock()
        self._numbers = count(1)
        self.down = False
        self.server_copy_limits: CopyLimits | None = CopyLimits(min_run_bytes=0, max_bytes=1 << 30)
        self.begun: list[UnfinishedUpload] = []

    @property
    def url(self) -> str:
        return "memory://store"

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_byte_range(start, length)
        check_object_key(key)
        self._ask("get")
        data, _ = self._found(key)
        return data[start:] if length is None else data[start : start + length]

    def head(self, key: str) -> ObjectInfo:
        check_object_key(key)
        self._ask("head")
        return self._found(key)[1]

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        check_object_key(key)
        require_storable_object_metadata(metadata)
        self._ask("put")
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"{key} exists already")
            return self._kept(key, data, metadata)

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None, *, may_link: bool = False) -> ObjectInfo:
        return self.create(key, path.read_bytes(), metadata)

    def compose(self, key: str, pieces: Sequence[ComposeSource], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        check_object_key(key)
        require_storable_object_metadata(metadata)
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"{key} exists already")
        return self.create(key, b"".join(self._content(piece) for piece in pieces), metadata)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        check_object_key(key)
        self._ask("put")
        with self._lock:
            return self._kept(key, data, None)

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        return path.write_bytes(self.get(key, start, length))

    def lend(self, key: str, path: Path) -> FileLease | None:
        return None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_object_key_prefix(prefix)
        self._ask("list")
        found = []
        with self._lock:
            for at in range(bisect_left(self._keys, max(prefix.encode(), after.encode())), len(self._keys)):
                key = self._keys[at].decode()
                if not key.startswith(prefix):
                    break
                if key != after:
                    found.append(self._objects[key][1])
        yield from (replace(info, etag="", metadata={}) for info in found)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            check_object_key(key)
            self._ask("delete")
            with self._lock:
                if self._objects.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key.encode())]

    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        self._ask("list")
        return iter([upload for upload in self.begun if upload.key.startswith(prefix)])

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        for upload in uploads:
            self._ask("multipart")
            if upload in self.begun:
                self.begun.remove(upload)

    def clock_ms(self) -> int:
        self._ask("head")
        return self._clock.now_ms

    def _ask(self, kind: str) -> None:
        self._meter.record_request(kind)
        if self.down:
            raise Unavailable("the store does not answer")

    def _content(self, piece: ComposeSource) -> bytes:
        check_byte_range(piece.start, piece.length)
        if isinstance(piece, FileRange):
            return piece.path.read_bytes()[piece.start : piece.start + piece.length]
        self._ask("copy")
        if self.server_copy_limits is None:
            raise CannotCopy("this store copies no ranges")
        data, info = self._found(piece.key)
        if info.etag != piece.etag:
            raise Unavailable(f"{piece.key} is not the version that was to be copied")
        if piece.start + piece.length > len(data):
            raise ValueError(f"{piece.key} ends before what was to be copied of it")
        return data[piece.start : piece.start + piece.length]

    def _found(self, key: str) -> tuple[bytes, ObjectInfo]:
        with self._lock:
            if key not in self._objects:
                raise NotFound(f"{key} does not exist")
            return self._objects[key]

    def _kept(self, key: str, data: bytes, metadata: Mapping[str, str] | None) -> ObjectInfo:
        info = ObjectInfo(key, len(data), self._clock.now_ms, f"{next(self._numbers)}", dict(metadata or {}))
        if key not in self._objects:
            insort(self._keys, key.encode())
        self._objects[key] = (bytes(data), info)
        return info


@contextmanager
def no_beats(send_heartbeat: Callable[[], None], interval_s: float) -> Iterator[None]:
    """HeartbeatRunner without a thread: what stands in memory needs no heartbeat."""
    yield


def ports_on(store: MemoryStore, clock: Clock, holder: str = "test") -> EnvironmentPorts:
    """One process's view of it; waiting takes no time."""
    return EnvironmentPorts(
        store, store, NativeLayout(store), ControlLogPublisher(), clock, lambda seconds: None, secrets.token_bytes, holder, no_beats
    )
