"""What writers that died have begun and not finished: multipart uploads, staged files. In no LIST of objects, and paid for.

Looked at for a whole tier, by one or two requests: below the tier's own prefix, and in stores that only we write to. A broker's own
uploads are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compactor.bootstrap import Tier
from compactor.errors import Refused
from compactor.storage.port import ObjectStore, Unfinished

LEAST_AGE_MS = 3_600_000
"""Whatever ``orphan_age_ms`` says: an upload of a large segment over a slow line takes its time, and nobody hears of it meanwhile."""


@dataclass(frozen=True)
class Leftover:
    """One that nobody has finished. ``key`` with the store's URL before it; ``due``: old enough to be swept."""

    store: ObjectStore
    upload: Unfinished
    due: bool

    @property
    def where(self) -> str:
        return f"{self.store.url}/{self.upload.key}"


def leftovers(opened: Tier, now_ms: int) -> list[Leftover]:
    """All of them, those at work included. Reads only. Raises StoreError; Refused where the credentials may not ask."""
    age_ms = max(opened.retention.orphan_age_ms, LEAST_AGE_MS)
    found: dict[str, Leftover] = {}
    for store in _stores(opened):
        for upload in store.unfinished(""):
            one = Leftover(store, upload, now_ms - upload.begun_ms >= age_ms)
            found.setdefault(f"{one.where} {upload.id}", one)
    return list(found.values())


def sweep_uploads(opened: Tier, now_ms: int, *, dry_run: bool = False) -> tuple[str, ...]:
    """Aborts those that are due and returns where they were; nothing where the credentials may not ask. Raises StoreError."""
    try:
        due = [one for one in leftovers(opened, now_ms) if one.due]
    except Refused:
        return ()
    for one in () if dry_run else due:
        one.store.abort([one.upload])
    return tuple(one.where for one in due)


def _stores(opened: Tier) -> Iterator[ObjectStore]:
    yield opened.ports.control
    if opened.ownership.ours:
        yield opened.ports.data
