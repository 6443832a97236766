"""Refusal of a store that ignores conditional requests, before the first object is created in it."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from compactor.errors import Refused
from compactor.storage.port import ObjectStore


@runtime_checkable
class ServerStore(Protocol):
    """A store on a server, which may ignore conditions."""

    def conditions_place(self) -> tuple[str, str, str]:
        """Return endpoint, bucket and prefix."""

    def unchecked(self) -> ObjectStore:
        """Return the same store without a check before its creates."""


class ConditionCheck:
    """Creates one key twice before this process's first create in a bucket, and refuses the store if the second one succeeds.

    Leadership and publication rest on create-if-absent: where it is ignored, two compactors lead at once and write over each other.
    Thread-safe. A store that passed is remembered by this process for its bucket, and by later ones in a file of ``folder`` for its
    endpoint, bucket and prefix. The file is not in the store, because there it would survive a copy to another store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._passed: set[tuple[str, str]] = set()

    def require(self, store: ObjectStore, prefix: str) -> None:
        """Raise Refused if the store ignores conditions. ``prefix``: of the key that is created and deleted. Raises StoreError."""
        if not isinstance(store, ServerStore):
            return
        with self._lock:
            endpoint, bucket, root = store.conditions_place()
            if (endpoint, bucket) in self._passed:
                return
            place = json.dumps({"endpoint": endpoint, "bucket": bucket, "prefix": root})
            marker = self._folder / hashlib.sha256(place.encode()).hexdigest()[:32]
            if not _holds(marker, place):
                self._ask(store.unchecked(), prefix)
                with suppress(OSError):  # the next process asks again
                    self._folder.mkdir(parents=True, exist_ok=True)
                    marker.write_text(place)
            self._passed.add((endpoint, bucket))

    def _ask(self, store: ObjectStore, prefix: str) -> None:
        from compactor.storage.probe import second_create

        problem = second_create(store, prefix)
        if problem is not None:
            raise Refused(problem.detail, hint=problem.hint)


def _holds(marker: Path, place: str) -> bool:
    try:
        return marker.read_text() == place
    except (OSError, UnicodeDecodeError):
        return False
