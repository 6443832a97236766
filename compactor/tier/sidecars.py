"""Sidecars in the control store: ``partitions/<topic-partition>/sidecars/<segment id>.bloom``, one for each segment that has one.

Beside it ``<segment id>.keys``, the segment's key directory, where a later round may read a part of it alone.

They can be dropped at any time. What is missing or cannot be used costs a read of the segment, never a record. What reads them is imported
late: it brings numba, and many commands never ask for a sidecar.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeVar

from compactor.errors import AlreadyExists, NotFound, StoreError
from compactor.storage.port import ObjectStore

if TYPE_CHECKING:
    from bloom.directory import KeyDirectory
    from bloom.filter import Hashes, KeyFilter
    from bloom.sidecar import Sidecar

T = TypeVar("T")

MISSING = "it has no sidecar"
MET = "its filter meets a key of the dirty range"
REQUESTS = 16
"""At a time: they wait for the store, not for each other."""

FILTER_BYTES = 64 << 20
"""Filters that are in memory at a time, besides those that are on their way."""
AHEAD = 4
"""Filters or key directories on their way at a time: they are large."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """``sidecar`` without its filter, or why there is none to use. ``bytes``: what was fetched."""

    sidecar: Sidecar | None
    problem: str
    bytes: int


def sidecar_prefix(log_prefix: str) -> str:
    """:param log_prefix: of the partition's control log."""
    return f"{log_prefix}/sidecars/"


def sidecar_keys(log_prefix: str, segment_id: str) -> tuple[str, str]:
    """Of what there may be of a segment: sidecar and key directory."""
    return f"{sidecar_prefix(log_prefix)}{segment_id}.bloom", f"{sidecar_prefix(log_prefix)}{segment_id}.keys"


class KeptHeads(Protocol):
    """local.cache: what can be forgotten at any time. Raises nothing."""

    def heads(self, ids: Sequence[str]) -> dict[str, bytes]: ...

    def keep_heads(self, heads: Mapping[str, bytes]) -> None: ...


class Sidecars:
    """Those of one partition."""

    def __init__(self, control: ObjectStore, log_prefix: str, hash_key: bytes, kept: KeptHeads | None = None) -> None:
        """``kept``: heads that this machine remembers; what they say of a segment never changes."""
        self._control = control
        self._kept = kept
        self._log_prefix = log_prefix
        self.hash_key = hash_key

    def key(self, segment_id: str) -> str:
        return sidecar_keys(self._log_prefix, segment_id)[0]

    def heads(self, segment_ids: Sequence[str]) -> dict[str, Head]:
        """What they say without their filters. One that is there and cannot be used is told once. Raises StoreError."""
        found = self._remembered(segment_ids)
        missing = [segment_id for segment_id in segment_ids if segment_id not in found]
        with ThreadPoolExecutor(REQUESTS, "sidecars") as pool:
            fetched = dict(zip(missing, pool.map(self._fetched, missing), strict=True))
        if self._kept is not None:
            self._kept.keep_heads({segment_id: data for segment_id, (head, data) in fetched.items() if head.sidecar is not None})
        found |= {segment_id: head for segment_id, (head, _) in fetched.items()}
        for segment_id, head in found.items():
            if head.problem not in ("", MISSING):
                _log.warning("%s is ignored: %s; the segment is read and gets a new one", self.key(segment_id), head.problem)
        return found

    def load(self, segment_id: str) -> Sidecar | None:
        """With its filter; None where it cannot be used (any more). Raises StoreError."""
        from bloom import sidecar as sidecars

        try:
            return sidecars.read(self._control.get(self.key(segment_id)), segment_id, self.hash_key)
        except NotFound:
            return None
        except sidecars.SidecarUnusable as unusable:
            _log.warning("%s is ignored: %s; the segment is read and gets a new one", self.key(segment_id), unusable)
            return None

    def meeting(self, segment_ids: Sequence[str], keys: Callable[[], Iterable[Hashes]]) -> tuple[dict[str, str], int]:
        """(segments whose filter meets one of the keys or cannot be asked, with the reason; bytes of filters fetched). Raises StoreError.

        A few filters at a time, all keys for each: ``keys`` is called as often as that takes.
        """
        met: dict[str, str] = {}
        fetched = 0
        with contextlib.closing(self._loaded(segment_ids)) as loaded:
            left = len(segment_ids)
            while left:
                filters: dict[str, KeyFilter] = {}
                size = 0
                while left and size < FILTER_BYTES:
                    name, whole = next(loaded)
                    left -= 1
                    if whole is None or whole.filter is None:
                        met[name] = "its filter cannot be read"
                        continue
                    filters[name] = whole.filter
                    size += len(whole.filter.bitarray) // 8
                fetched += size
                for some in keys() if filters else ():
                    for name in [name for name, each in filters.items() if each.contains_all(some).any()]:
                        met[name] = MET
                        del filters[name]
                    if not filters:
                        break
        return met, fetched

    def directories(self, segment_ids: Sequence[str]) -> Iterator[tuple[KeyDirectory | None, int]]:
        """Key directories, in this order, and the bytes that were fetched for each; None where there is none to use. Raises StoreError."""
        with contextlib.closing(_ahead(segment_ids, self._directory)) as found:
            yield from (each for _, each in found)

    def _loaded(self, segment_ids: Sequence[str]) -> Generator[tuple[str, Sidecar | None], None, None]:
        return _ahead(segment_ids, self.load)

    def save(self, sidecar: Sidecar, directory: KeyDirectory | None = None) -> int:
        """Writes or replaces them; their size in bytes. Raises StoreError."""
        from bloom import directory as directories
        from bloom import sidecar as sidecars

        data = sidecars.write(sidecar, self.hash_key)
        keys = directories.write(directory, self.hash_key) if directory is not None else b""
        if keys:
            self._control.put(sidecar_keys(self._log_prefix, sidecar.segment_id)[1], keys)
        self._control.put(self.key(sidecar.segment_id), data)
        if self._kept is not None:
            self._kept.keep_heads({sidecar.segment_id: data[: sidecars.head_length(data)]})
        return len(data) + len(keys)

    def add(self, sidecar: Sidecar) -> int:
        """Writes it where there is none. A store that does not take it costs a later read, not the round."""
        from bloom import sidecar as sidecars

        return self._added(self.key(sidecar.segment_id), sidecars.write(sidecar, self.hash_key))

    def add_directory(self, directory: KeyDirectory) -> int:
        """Likewise."""
        from bloom import directory as directories

        return self._added(sidecar_keys(self._log_prefix, directory.segment_id)[1], directories.write(directory, self.hash_key))

    def _directory(self, segment_id: str) -> tuple[KeyDirectory | None, int]:
        from bloom import directory as directories
        from bloom.sidecar import SidecarUnusable

        key = sidecar_keys(self._log_prefix, segment_id)[1]
        try:
            data = self._control.get(key)
        except NotFound:
            return None, 0
        try:
            return directories.read(data, segment_id, self.hash_key), len(data)
        except SidecarUnusable as unusable:
            _log.warning("%s is ignored: %s; the whole segment is read", key, unusable)
            return None, len(data)

    def _added(self, key: str, data: bytes) -> int:
        try:
            self._control.create(key, data)
            return len(data)
        except AlreadyExists:
            return 0  # of another process at the same plan
        except StoreError as error:
            _log.warning("%s is not written: %s", key, error)
            return 0

    def ids(self) -> dict[str, int]:
        """Segment ids that have an object here, with its size. Raises StoreError."""
        listed = self._control.list(sidecar_prefix(self._log_prefix))
        return {segment_id_of(info.key): info.size for info in listed if info.key.endswith(".bloom") and segment_id_of(info.key)}

    def _remembered(self, segment_ids: Sequence[str]) -> dict[str, Head]:
        from bloom import sidecar as sidecars

        found = {}
        for segment_id, data in (self._kept.heads(segment_ids) if self._kept is not None else {}).items():
            with contextlib.suppress(sidecars.SidecarUnusable):
                found[segment_id] = Head(sidecars.read_head(data, segment_id, self.hash_key), "", 0)
        return found

    def _fetched(self, segment_id: str) -> tuple[Head, bytes]:
        from bloom import sidecar as sidecars

        try:
            data = self._control.get(self.key(segment_id), 0, sidecars.HEAD_GUESS)
            wanted = sidecars.head_length(data)
            if wanted > len(data) == sidecars.HEAD_GUESS:
                data += self._control.get(self.key(segment_id), sidecars.HEAD_GUESS, wanted - sidecars.HEAD_GUESS)
            return Head(sidecars.read_head(data, segment_id, self.hash_key), "", len(data)), data[:wanted]
        except NotFound:
            return Head(None, MISSING, 0), b""
        except sidecars.SidecarUnusable as unusable:
            return Head(None, str(unusable), 0), b""


def _ahead(segment_ids: Sequence[str], fetch: Callable[[str], T]) -> Generator[tuple[str, T], None, None]:
    """What ``fetch`` brings of each, in this order, some of them ahead."""
    rest = iter(segment_ids)
    with ThreadPoolExecutor(AHEAD, "sidecars") as pool:
        coming = deque((name, pool.submit(fetch, name)) for name in islice(rest, AHEAD))
        while coming:
            name, one = coming.popleft()
            yield name, one.result()
            coming.extend((after, pool.submit(fetch, after)) for after in islice(rest, 1))


def segment_id_of(key: str) -> str:
    """The segment that the key of a sidecar or of a key directory names; empty for what is no such key."""
    name, dot, kind = key.rpartition("/")[2].rpartition(".")
    return name if dot and kind in ("bloom", "keys") else ""
