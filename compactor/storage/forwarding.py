"""Stores in front of another store, or of none: they pass requests on and change only what they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from typing_extensions import override

from compactor.errors import CompactorError, NotFound, UsageError
from compactor.storage.port import ComposeSource, CopyLimits, ObjectInfo, ObjectStore, UnfinishedUpload

T = TypeVar("T")


class ForwardingStore:
    """ObjectStore that passes every request to another store. Subclasses override ``_forward_read_request`` or ``_forward_write_request``
    to change all reads or all writes.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def _forward_read_request(self, key: str, request: Callable[[], T]) -> T:
        """Make a request that changes nothing in the store, and return its result. Subclasses override it to change all reads."""
        return request()

    def _forward_write_request(self, verb: str, key: str, request: Callable[[], T]) -> T:
        """Make a request that writes or deletes, and return its result. ``verb``: write or delete, for messages."""
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

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix, after)

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self._forward_write_request("create", key, lambda: self._store.create(key, data, metadata))

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self._forward_write_request("create", key, lambda: self._store.create_from_file(key, path, metadata))

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
    """ObjectStore that raises CompactorError (a bug) for every request that writes. This includes ``clock_ms``, because a directory store
    writes a file to read its clock.
    """

    @override
    def _forward_write_request(self, verb: str, key: str, request: Callable[[], T]) -> NoReturn:
        raise CompactorError(
            f"something that only reads tried to {verb} {key}", hint="This is a bug; please report it. Nothing was changed"
        )


class UnconfiguredStore(ForwardingStore):
    """Empty store that refuses writes. It takes the place of a store that was not configured.

    :param missing_setting: what has to be configured before anything can be written, for the message.
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
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return iter(())

    @override
    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        return iter(())
