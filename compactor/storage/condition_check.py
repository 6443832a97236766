"""Refusal of a store that ignores conditional requests, before the first object is created in it."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import suppress
from pathlib import Path

from compactor.errors import Refused
from compactor.storage.port import ObjectStore
from compactor.storage.probe import StoreWithTestableConditionalCreates, find_ignored_create_if_absent


class ConditionalCreateCheck:
    """Check that a store honours create-if-absent, made before this process's first create in a bucket. Thread-safe.

    The check creates one key twice, and again by an upload in parts; the first object must not be overwritten. If a store ignores
    create-if-absent, two compactors can lead at once and overwrite each other's records.

    A store that passed is not checked again: this process remembers its bucket, and a file in ``folder`` tells later processes its
    endpoint, bucket and prefix. The file is local, because a file in the store would also be in each copy of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._passed: set[tuple[str, str]] = set()

    def require_conditional_creates(self, store: ObjectStore, prefix: str) -> None:
        """Check the store unless it has passed before. Raises Refused if it ignores create-if-absent, StoreError if it cannot be reached.
        Stores that are not on a server need no check.

        :param prefix: prefix of the key that is created and deleted for the check.
        """
        if not isinstance(store, StoreWithTestableConditionalCreates):
            return
        with self._lock:
            endpoint, bucket, root = store.endpoint_bucket_and_prefix_of_server()
            if (endpoint, bucket) in self._passed:
                return
            place = json.dumps({"endpoint": endpoint, "bucket": bucket, "prefix": root})
            marker = self._folder / hashlib.sha256(place.encode()).hexdigest()[:32]
            if not _does_marker_show_check_passed(marker, place):
                self._require_create_if_absent_works(store.without_conditional_create_check(), prefix)
                with suppress(OSError):  # the next process asks again
                    self._folder.mkdir(parents=True, exist_ok=True)
                    marker.write_text(place)
            self._passed.add((endpoint, bucket))

    def _require_create_if_absent_works(self, store: ObjectStore, prefix: str) -> None:
        """Raise Refused if the store overwrites an object that was to be created only if absent, StoreError if it cannot be reached."""
        problem = find_ignored_create_if_absent(store, prefix)
        if problem is not None:
            raise Refused(problem.detail, hint=problem.hint)


def _does_marker_show_check_passed(marker: Path, location: str) -> bool:
    """Return whether the file ``marker`` exists and contains this location (endpoint, bucket and prefix)."""
    try:
        return marker.read_text() == location
    except (OSError, UnicodeDecodeError):
        return False
