"""Unfinished uploads that dead writers left behind: multipart uploads and staged files, which no LIST shows and which are paid for.

They are found for a whole tier with one or two requests. Only uploads to this tier's own keys count, because others may keep objects below
the same prefix. Uploads of brokers are left to the brokers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from compactor.access.tier import Tier
from compactor.errors import Refused
from compactor.storage.keys import RESERVED
from compactor.storage.port import ObjectStore, UnfinishedUpload

LEAST_AGE_MS = 3_600_000
"""Least age of an upload that is swept, whatever ``orphan_age_ms`` says: uploading a large segment over a slow line takes long."""

_CONTROL_PREFIXES: Final = ("catalog/", "partitions/", "probe/")
_PROBES: Final = ".tiered-compactor/probe/"
ObjectUrl = str


@dataclass(frozen=True)
class UnfinishedUploadOfTier:
    """A multipart upload to the tier that was begun and not finished.

    due: whether it is old enough to be aborted.
    """

    store: ObjectStore
    upload: UnfinishedUpload
    due: bool

    @property
    def object_url(self) -> ObjectUrl:
        return f"{self.store.url}/{self.upload.key}"


def find_unfinished_uploads(tier: Tier, now_ms: int) -> list[UnfinishedUploadOfTier]:
    """Return all unfinished uploads of the tier, including those in progress. Raises StoreError, and Refused if the credentials forbid
    listing uploads.
    """
    age_ms = max(tier.retention.orphan_age_ms, LEAST_AGE_MS)
    found: dict[str, UnfinishedUploadOfTier] = {}
    for store in _stores_written_by_tier(tier):
        for upload in store.unfinished_uploads(""):
            one = UnfinishedUploadOfTier(store, upload, now_ms - upload.begun_ms >= age_ms)
            if _is_upload_to_tier(tier, one):
                found.setdefault(f"{one.object_url} {upload.id}", one)
    return list(found.values())


def abort_stale_multipart_uploads(tier: Tier, now_ms: int, *, dry_run: bool = False) -> tuple[ObjectUrl, ...]:
    """Abort the unfinished uploads that are due, and return the URLs of their objects. If the credentials forbid listing
    uploads, do nothing and return an empty tuple. Raises StoreError.

    :param dry_run: abort nothing, and return what would be aborted.
    """
    try:
        due = [one for one in find_unfinished_uploads(tier, now_ms) if one.due]
    except Refused:
        return ()
    for one in () if dry_run else due:
        one.store.abort_uploads([one.upload])
    return tuple(one.object_url for one in due)


def _is_upload_to_tier(tier: Tier, upload: UnfinishedUploadOfTier) -> bool:
    """Return whether an upload is to a key that this tier writes: in its control log, its probes, or a partition of its catalog."""
    key, known = upload.upload.key, tier.catalog.state
    if upload.store is tier.ports.control:
        return key.startswith((f"{RESERVED}/", *_CONTROL_PREFIXES))
    partition = tier.ports.layout.partition_name_in_object_key(key)
    return key.startswith((f"{RESERVED}/", _PROBES)) or partition in known.partitions or partition in known.reached


def _stores_written_by_tier(tier: Tier) -> Iterator[ObjectStore]:
    yield tier.ports.control
    if tier.ownership.ours:
        yield tier.ports.data
