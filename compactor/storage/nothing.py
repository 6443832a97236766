"""A store in which nothing is and nothing can be: where a place is needed to read from and none was configured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from compactor.errors import NotFound, UsageError
from compactor.storage.port import ObjectInfo, Piece, Unfinished


class NothingStore:
    """:param needed: what is to be set before anything can be written."""

    def __init__(self, needed: str) -> None:
        self._needed = needed

    @property
    def url(self) -> str:
        return "nowhere"

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        raise self._absent(key)

    def head(self, key: str) -> ObjectInfo:
        raise self._absent(key)

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        raise self._absent(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return iter(())

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        raise self._refusal()

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        raise self._refusal()

    @property
    def copies(self) -> None:
        return None

    def compose(self, key: str, pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        raise self._refusal()

    def put(self, key: str, data: bytes) -> ObjectInfo:
        raise self._refusal()

    def delete(self, keys: Iterable[str]) -> None:
        raise self._refusal()

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        return iter(())

    def abort(self, uploads: Iterable[Unfinished]) -> None:
        raise self._refusal()

    def clock_ms(self) -> int:
        raise self._refusal()

    def _absent(self, key: str) -> NotFound:
        return NotFound(f"{key} does not exist: {self._needed}")

    def _refusal(self) -> UsageError:
        return UsageError(f"nothing can be written: {self._needed}")
