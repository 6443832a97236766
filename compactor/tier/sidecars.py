"""Sidecars in the control store: ``partitions/<topic-partition>/sidecars/<segment id>.bloom``, one for each segment that has one.

They can be dropped at any time. What is missing or cannot be used costs a read of the segment, never a record. What reads them is imported
late: it brings numba, and many commands never ask for a sidecar.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from compactor.errors import AlreadyExists, NotFound, StoreError
from compactor.storage.port import ObjectStore

if TYPE_CHECKING:
    from bloom.filter import Hashes, KeyFilter
    from bloom.sidecar import Sidecar

MISSING = "it has no sidecar"
MET = "its filter meets a key of the dirty range"
REQUESTS = 16
"""At a time: they wait for the store, not for each other."""

FILTER_BYTES = 64 << 20
"""Filters that are in memory at a time, besides those that are on their way."""
AHEAD = 4
"""Filters on their way at a time: they are large."""

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


def sidecar_key(log_prefix: str, segment_id: str) -> str:
    return f"{sidecar_prefix(log_prefix)}{segment_id}.bloom"


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
        return sidecar_key(self._log_prefix, segment_id)

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

    def _loaded(self, segment_ids: Sequence[str]) -> Generator[tuple[str, Sidecar | None], None, None]:
        """As ``load``, in this order, some of them ahead."""
        rest = iter(segment_ids)
        with ThreadPoolExecutor(AHEAD, "filters") as pool:
            coming = deque((name, pool.submit(self.load, name)) for name in islice(rest, AHEAD))
            while coming:
                name, one = coming.popleft()
                yield name, one.result()
                coming.extend((after, pool.submit(self.load, after)) for after in islice(rest, 1))

    def save(self, sidecar: Sidecar) -> int:
        """Writes or replaces it; its size in bytes. Raises StoreError."""
        from bloom import sidecar as sidecars

        data = sidecars.write(sidecar, self.hash_key)
        self._control.put(self.key(sidecar.segment_id), data)
        if self._kept is not None:
            self._kept.keep_heads({sidecar.segment_id: data[: sidecars.head_length(data)]})
        return len(data)

    def add(self, sidecar: Sidecar) -> int:
        """Writes it where there is none. A store that does not take it costs a later read, not the round."""
        from bloom import sidecar as sidecars

        data = sidecars.write(sidecar, self.hash_key)
        try:
            self._control.create(self.key(sidecar.segment_id), data)
            return len(data)
        except AlreadyExists:
            return 0  # of another process at the same plan
        except StoreError as error:
            _log.warning("%s is not written: %s", self.key(sidecar.segment_id), error)
            return 0

    def ids(self) -> dict[str, int]:
        """Segment ids that have an object here, with its size. Raises StoreError."""
        return {
            segment_id_of(info.key): info.size for info in self._control.list(sidecar_prefix(self._log_prefix)) if segment_id_of(info.key)
        }

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


def segment_id_of(key: str) -> str:
    """The segment that a sidecar's key names; empty for what is no such key."""
    name, dot, kind = key.rpartition("/")[2].rpartition(".")
    return name if dot and kind == "bloom" else ""
