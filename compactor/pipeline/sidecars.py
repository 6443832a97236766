"""Sidecars in the control store: ``partitions/<topic-partition>/sidecars/<segment id>.bloom``, one for each segment that has one.

They can be dropped at any time. What is missing or cannot be used costs a read of the segment, never a record.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bloom import sidecar as sidecars
from bloom.sidecar import HEAD_GUESS, Sidecar, SidecarUnusable
from compactor.errors import AlreadyExists, NotFound, StoreError
from compactor.storage.port import ObjectStore

MISSING = "it has no sidecar"
REQUESTS = 16
"""At a time: they wait for the store, not for each other."""

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


class Sidecars:
    """Those of one partition."""

    def __init__(self, control: ObjectStore, log_prefix: str, hash_key: bytes) -> None:
        self._control = control
        self._log_prefix = log_prefix
        self._hash_key = hash_key

    def key(self, segment_id: str) -> str:
        return sidecar_key(self._log_prefix, segment_id)

    def heads(self, segment_ids: Sequence[str]) -> dict[str, Head]:
        """What they say without their filters. One that is there and cannot be used is told once. Raises StoreError."""
        with ThreadPoolExecutor(REQUESTS, "sidecars") as pool:
            found = dict(zip(segment_ids, pool.map(self._head, segment_ids), strict=True))
        for segment_id, head in found.items():
            if head.problem not in ("", MISSING):
                _log.warning("%s is ignored: %s; the segment is read and gets a new one", self.key(segment_id), head.problem)
        return found

    def load(self, segment_id: str) -> Sidecar | None:
        """With its filter; None where it cannot be used (any more). Raises StoreError."""
        try:
            return sidecars.read(self._control.get(self.key(segment_id)), segment_id, self._hash_key)
        except NotFound:
            return None
        except SidecarUnusable as unusable:
            _log.warning("%s is ignored: %s; the segment is read and gets a new one", self.key(segment_id), unusable)
            return None

    def save(self, sidecar: Sidecar) -> int:
        """Writes or replaces it; its size in bytes. Raises StoreError."""
        data = sidecars.write(sidecar, self._hash_key)
        self._control.put(self.key(sidecar.segment_id), data)
        return len(data)

    def add(self, sidecar: Sidecar) -> int:
        """Writes it where there is none. A store that does not take it costs a later read, not the round."""
        data = sidecars.write(sidecar, self._hash_key)
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

    def _head(self, segment_id: str) -> Head:
        try:
            data = self._control.get(self.key(segment_id), 0, HEAD_GUESS)
            wanted = sidecars.head_length(data)
            if wanted > len(data) == HEAD_GUESS:
                data += self._control.get(self.key(segment_id), HEAD_GUESS, wanted - HEAD_GUESS)
            return Head(sidecars.read_head(data, segment_id, self._hash_key), "", len(data))
        except NotFound:
            return Head(None, MISSING, 0)
        except SidecarUnusable as unusable:
            return Head(None, str(unusable), 0)


def segment_id_of(key: str) -> str:
    """The segment that a sidecar's key names; empty for what is no such key."""
    name, dot, kind = key.rpartition("/")[2].rpartition(".")
    return name if dot and kind == "bloom" else ""
