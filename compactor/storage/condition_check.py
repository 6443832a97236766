"""Refusal of a store that does not honour conditional requests, before the first object is created in it."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from contextlib import suppress
from pathlib import Path

from compactor.errors import Refused
from compactor.storage.port import ObjectStore
from compactor.storage.probe import (
    StoreWithTestableConditionalCreates,
    find_ignored_create_if_absent,
    race_creates,
    unsafe_concurrent_creates_finding,
)

RACE_WRITERS = 8
RACE_KEYS = 4
RACE_ATTEMPTS = 3
"""How many times keys that no writer could create are raced again, before the result counts as unknown."""
CHECK_VERSION = 2
"""Version 1 of the check had no race: what had passed it is checked again."""

_log = logging.getLogger(__name__)


class ConditionalCreateCheck:
    """Check that a store honours create-if-absent, made before this process's first create in a bucket. Thread-safe.

    The check creates one key twice, and again by an upload in parts; the first object must not be overwritten. Then RACE_WRITERS writers
    create each of RACE_KEYS keys at once; one of them must win. If a store ignores create-if-absent, or only honours it for one writer
    after the other, two compactors can lead at once and overwrite each other's records.

    A store that passed is not checked again: this process remembers its bucket, and a file in ``folder`` tells later processes its
    endpoint, bucket and prefix. The file is local, because a file in the store would also be in each copy of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._passed: set[tuple[str, str]] = set()

    def require_conditional_creates(self, store: ObjectStore, prefix: str) -> None:
        """Check the store unless it has passed before. Raises Refused if it does not honour create-if-absent, StoreError if it cannot be
        reached. Stores that are not on a server need no check.

        :param prefix: prefix of the keys that are created and deleted for the check.
        """
        if not isinstance(store, StoreWithTestableConditionalCreates):
            return
        with self._lock:
            endpoint, bucket, root = store.endpoint_bucket_and_prefix_of_server()
            if (endpoint, bucket) in self._passed:
                return
            place = json.dumps({"endpoint": endpoint, "bucket": bucket, "prefix": root, "check": CHECK_VERSION})
            marker = self._folder / hashlib.sha256(place.encode()).hexdigest()[:32]
            if not _does_marker_show_check_passed(marker, place) and self._has_race_been_decided(
                store.without_conditional_create_check(), prefix
            ):
                with suppress(OSError):  # the next process asks again
                    self._folder.mkdir(parents=True, exist_ok=True)
                    marker.write_text(place)
            self._passed.add((endpoint, bucket))

    def _has_race_been_decided(self, store: ObjectStore, prefix: str) -> bool:
        """Return whether the store has shown that it honours create-if-absent, also for several writers at once. False, with a warning, if
        no writer could create some of the keys. Raises Refused if the store does not honour it, StoreError if it cannot be reached.
        """
        problem = find_ignored_create_if_absent(store, prefix)
        if problem is not None:
            raise Refused(problem.detail, hint=problem.hint)
        keys = RACE_KEYS
        for _ in range(RACE_ATTEMPTS):
            raced = race_creates(store, prefix, RACE_WRITERS, keys)
            if raced.problem:
                problem = unsafe_concurrent_creates_finding(store, raced.problem)
                raise Refused(problem.detail, hint=f"{problem.hint}. Nothing was changed")
            if not raced.undecided:
                return True
            keys = raced.undecided
        _log.warning(
            "%s: whether one of several writers wins who create an object at once is unknown, because none of %d could create it; "
            "`config check` tries it again",
            store.url,
            RACE_WRITERS,
        )
        return False


def _does_marker_show_check_passed(marker: Path, location: str) -> bool:
    """Return whether the file ``marker`` exists and contains this location (endpoint, bucket, prefix and version of the check)."""
    try:
        return marker.read_text() == location
    except (OSError, UnicodeDecodeError):
        return False
