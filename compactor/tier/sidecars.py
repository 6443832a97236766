"""Sidecars in the control store: ``partitions/<topic-partition>/sidecars/<segment id>.bloom``, and key directories, ``<segment id>.keys``.
Both can be deleted at any time: that costs reading the segment, never a record.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from compactor.errors import AlreadyExists, NotFound, StoreError
from compactor.storage.port import ObjectStore

if TYPE_CHECKING:
    from bloom.directory import KeyDirectory
    from bloom.filter import KeyFilter
    from bloom.sidecar import Sidecar
    from compactor.kernels.common import Hashes

T = TypeVar("T")

NO_SIDECAR = "it has no sidecar"
FILTER_MATCHES = "its filter matches a dirty key"
PARALLEL_REQUESTS = 16
"""At a time: they wait for the store, not for each other."""

MAX_FILTER_BYTES = 64 << 20
"""Filters that are in memory at a time, besides those that are on their way."""
MAX_PREFETCHED = 4
"""Filters or key directories on their way at a time: they are large."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SidecarHead:
    """Sidecar without Bloom filter, or the reason why it cannot be used (``problem``)."""

    sidecar: Sidecar | None
    problem: str
    bytes: int


def sidecar_key_prefix(log_prefix: str) -> str:
    return f"{log_prefix}/sidecars/"


class SidecarObjectKeys(NamedTuple):
    sidecar: str
    key_directory: str


class PossibleSegments(NamedTuple):
    """Segments that may hold wanted keys, and the fetched bytes of Bloom filters.
    reasons: segment id -> why: the filter matches, or cannot be read.
    """

    reasons: dict[str, str]
    fetched_bytes: int


class LoadedKeyDirectory(NamedTuple):
    """A key directory, None if absent or unusable, and the bytes fetched for it."""

    directory: KeyDirectory | None
    fetched_bytes: int


def sidecar_object_keys(log_prefix: str, segment_id: str) -> SidecarObjectKeys:
    return SidecarObjectKeys(f"{sidecar_key_prefix(log_prefix)}{segment_id}.bloom", f"{sidecar_key_prefix(log_prefix)}{segment_id}.keys")


class SidecarHeadCache(Protocol):
    """Local cache by segment id. Entries may disappear at any time; methods raise nothing."""

    def cached_sidecar_heads(self, ids: Sequence[str]) -> dict[str, bytes]: ...

    def cache_sidecar_heads(self, heads: Mapping[str, bytes]) -> None: ...


class SidecarStore:
    def __init__(self, control: ObjectStore, log_prefix: str, hash_key: bytes, head_cache: SidecarHeadCache | None = None) -> None:
        self._control = control
        self._head_cache = head_cache
        self._log_prefix = log_prefix
        self.hash_key = hash_key

    def sidecar_object_key(self, segment_id: str) -> str:
        return sidecar_object_keys(self._log_prefix, segment_id).sidecar

    def load_sidecar_heads(self, segment_ids: Sequence[str]) -> dict[str, SidecarHead]:
        """Logs a warning for each unusable sidecar. Raises StoreError."""
        found = self._usable_cached_heads(segment_ids)
        missing = [segment_id for segment_id in segment_ids if segment_id not in found]
        with ThreadPoolExecutor(PARALLEL_REQUESTS, "sidecars") as pool:
            fetched = dict(zip(missing, pool.map(self._fetch_sidecar_head, missing), strict=True))
        if self._head_cache is not None:
            self._head_cache.cache_sidecar_heads(
                {segment_id: data for segment_id, (head, data) in fetched.items() if head.sidecar is not None}
            )
        found |= {segment_id: head for segment_id, (head, _) in fetched.items()}
        for segment_id, head in found.items():
            if head.problem not in ("", NO_SIDECAR):
                _log.warning("%s is ignored: %s; the segment is read and gets a new one", self.sidecar_object_key(segment_id), head.problem)
        return found

    def load_sidecar(self, segment_id: str) -> Sidecar | None:
        """Returns None if the sidecar is absent or unusable. Raises StoreError."""
        from bloom import sidecar as sidecars

        try:
            return sidecars.decode_sidecar(self._control.get(self.sidecar_object_key(segment_id)), segment_id, self.hash_key)
        except NotFound:
            return None
        except sidecars.SidecarUnusable as unusable:
            _log.warning("%s is ignored: %s; the segment is read and gets a new one", self.sidecar_object_key(segment_id), unusable)
            return None

    def find_possible_segments(self, segment_ids: Sequence[str], yield_key_hashes: Callable[[], Iterable[Hashes]]) -> PossibleSegments:
        """Segments whose Bloom filter may contain a key or cannot be read; about MAX_FILTER_BYTES are loaded at a time. Raises StoreError.
        :param yield_key_hashes: called per group of filters.
        """
        met: dict[str, str] = {}
        fetched = 0
        with contextlib.closing(self._prefetch_sidecars(segment_ids)) as loaded:
            left = len(segment_ids)
            while left:
                filters: dict[str, KeyFilter] = {}
                size = 0
                while left and size < MAX_FILTER_BYTES:
                    name, whole = next(loaded)
                    left -= 1
                    if whole is None or whole.filter is None:
                        met[name] = "its filter cannot be read"
                        continue
                    filters[name] = whole.filter
                    size += len(whole.filter.bitarray) // 8
                fetched += size
                for some in yield_key_hashes() if filters else ():
                    for name in [name for name, each in filters.items() if each.flag_possible_keys(some).any()]:
                        met[name] = FILTER_MATCHES
                        del filters[name]
                    if not filters:
                        break
        return PossibleSegments(met, fetched)

    def load_key_directories(self, segment_ids: Sequence[str]) -> Iterator[LoadedKeyDirectory]:
        """In order. Raises StoreError."""
        with contextlib.closing(_prefetch_in_order(segment_ids, self._load_key_directory)) as found:
            yield from (each for _, each in found)

    def _prefetch_sidecars(self, segment_ids: Sequence[str]) -> Generator[tuple[str, Sidecar | None], None, None]:
        return _prefetch_in_order(segment_ids, self.load_sidecar)

    def save_sidecar(self, sidecar: Sidecar, directory: KeyDirectory | None = None) -> int:
        """Return the bytes written. Raises StoreError."""
        from bloom import directory as directories, sidecar as sidecars

        data = sidecars.encode_sidecar(sidecar, self.hash_key)
        keys = directories.encode_key_directory(directory, self.hash_key) if directory is not None else b""
        if keys:
            self._control.put(sidecar_object_keys(self._log_prefix, sidecar.segment_id).key_directory, keys)
        self._control.put(self.sidecar_object_key(sidecar.segment_id), data)
        if self._head_cache is not None:
            self._head_cache.cache_sidecar_heads({sidecar.segment_id: data[: sidecars.sidecar_head_size_bytes(data)]})
        return len(data) + len(keys)

    def add_sidecar(self, sidecar: Sidecar) -> int:
        """Bytes written: 0 if one exists, or if the store failed, which is only logged."""
        from bloom import sidecar as sidecars

        return self._create_object_if_absent(self.sidecar_object_key(sidecar.segment_id), sidecars.encode_sidecar(sidecar, self.hash_key))

    def add_key_directory(self, directory: KeyDirectory) -> int:
        """Bytes written: 0 if one exists, or if the store failed, which is only logged."""
        from bloom import directory as directories

        return self._create_object_if_absent(
            sidecar_object_keys(self._log_prefix, directory.segment_id).key_directory,
            directories.encode_key_directory(directory, self.hash_key),
        )

    def _load_key_directory(self, segment_id: str) -> LoadedKeyDirectory:
        from bloom import directory as directories
        from bloom.sidecar import SidecarUnusable

        key = sidecar_object_keys(self._log_prefix, segment_id).key_directory
        try:
            data = self._control.get(key)
        except NotFound:
            return LoadedKeyDirectory(None, 0)
        try:
            return LoadedKeyDirectory(directories.decode_key_directory(data, segment_id, self.hash_key), len(data))
        except SidecarUnusable as unusable:
            _log.warning("%s is ignored: %s; the whole segment is read", key, unusable)
            return LoadedKeyDirectory(None, len(data))

    def _create_object_if_absent(self, key: str, data: bytes) -> int:
        try:
            self._control.create(key, data)
            return len(data)
        except AlreadyExists:
            return 0  # of another process at the same plan
        except StoreError as error:
            _log.warning("%s is not written: %s", key, error)
            return 0

    def stored_sidecar_sizes(self) -> dict[str, int]:
        """By segment id. Raises StoreError."""
        listed = self._control.list(sidecar_key_prefix(self._log_prefix))
        return {segment_id_in_key(info.key): info.size for info in listed if info.key.endswith(".bloom") and segment_id_in_key(info.key)}

    def _usable_cached_heads(self, segment_ids: Sequence[str]) -> dict[str, SidecarHead]:
        from bloom import sidecar as sidecars

        found = {}
        for segment_id, data in (self._head_cache.cached_sidecar_heads(segment_ids) if self._head_cache is not None else {}).items():
            with contextlib.suppress(sidecars.SidecarUnusable):
                found[segment_id] = SidecarHead(sidecars.decode_sidecar_head(data, segment_id, self.hash_key), "", 0)
        return found

    def _fetch_sidecar_head(self, segment_id: str) -> tuple[SidecarHead, bytes]:
        """Decoded, and as bytes for the cache; empty if missing or unusable."""
        from bloom import sidecar as sidecars

        try:
            data = self._control.get(self.sidecar_object_key(segment_id), 0, sidecars.HEAD_GUESS)
            wanted = sidecars.sidecar_head_size_bytes(data)
            if wanted > len(data) == sidecars.HEAD_GUESS:
                data += self._control.get(self.sidecar_object_key(segment_id), sidecars.HEAD_GUESS, wanted - sidecars.HEAD_GUESS)
            return SidecarHead(sidecars.decode_sidecar_head(data, segment_id, self.hash_key), "", len(data)), data[:wanted]
        except NotFound:
            return SidecarHead(None, NO_SIDECAR, 0), b""
        except sidecars.SidecarUnusable as unusable:
            return SidecarHead(None, str(unusable), 0), b""


def _prefetch_in_order(segment_ids: Sequence[str], fetch_segment: Callable[[str], T]) -> Generator[tuple[str, T], None, None]:
    """Up to MAX_PREFETCHED calls run at a time, in threads."""
    rest = iter(segment_ids)
    with ThreadPoolExecutor(MAX_PREFETCHED, "sidecars") as pool:
        coming = deque((name, pool.submit(fetch_segment, name)) for name in islice(rest, MAX_PREFETCHED))
        while coming:
            name, one = coming.popleft()
            yield name, one.result()
            coming.extend((after, pool.submit(fetch_segment, after)) for after in islice(rest, 1))


def segment_id_in_key(key: str) -> str:
    """Empty for a key of anything but a sidecar or key directory."""
    name, dot, kind = key.rpartition("/")[2].rpartition(".")
    return name if dot and kind in ("bloom", "keys") else ""
