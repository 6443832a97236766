"""A store that cannot be written to: for whoever only looks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from compactor.errors import CompactorError
from compactor.storage.port import ObjectInfo, ObjectStore, Piece, RangeCopies, Unfinished


class ReadOnly:
    """Every request that writes raises CompactorError (a bug). So does asking for the store's clock: a directory writes a file for it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._store.get(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        return self._store.head(key)

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        return self._store.download(key, path, start, length)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix, after)

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        _refuse("create", key)

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        _refuse("create", key)

    @property
    def copies(self) -> RangeCopies | None:
        return self._store.copies

    def compose(self, key: str, pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        _refuse("create", key)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        _refuse("put", key)

    def delete(self, keys: Iterable[str]) -> None:
        _refuse("delete", ", ".join(keys))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        return self._store.unfinished(prefix)

    def abort(self, uploads: Iterable[Unfinished]) -> None:
        _refuse("abort", ", ".join(upload.key for upload in uploads))

    def clock_ms(self) -> int:
        _refuse("ask the clock of", "the store")


def _refuse(what: str, key: str) -> NoReturn:
    raise CompactorError(f"something that only reads tried to {what} {key}", hint="This is a bug; please report it. Nothing was changed")
