"""Checks of an S3 bucket's settings: versions, locks, archived classes, unfinished uploads. Each costs one request."""

from __future__ import annotations

from typing import Any

from compactor.errors import Refused
from compactor.model.base import StrictFrozenModel
from compactor.storage.findings import StoreFinding
from compactor.storage.s3 import S3Store

_ARCHIVED = {"GLACIER", "DEEP_ARCHIVE"}
_DAY_MS = 86_400_000


class BucketDeletionSettings(StrictFrozenModel):
    """Settings of a bucket that decide whether a delete frees space. A field is None if the credentials may not read it.

    versioning: status such as ``Enabled`` or ``Suspended``; empty if the bucket never had versioning.
    object_lock: whether objects can be locked against deletion.
    refusal: what the store answered to the first question that it refused; empty if it refused none.
    """

    versioning: str | None
    object_lock: bool | None
    refusal: str = ""

    @property
    def does_delete_free_space(self) -> bool | None:
        if self.versioning is None or self.object_lock is None:
            return None
        return self.versioning == "" and not self.object_lock


def read_bucket_deletion_settings(store: S3Store) -> BucketDeletionSettings:
    """Return the settings of the store's bucket, with two requests. Raises StoreError if the store cannot be reached."""
    versioning = _query_bucket_setting(store, "get_bucket_versioning")
    lock = _query_bucket_setting(store, "get_object_lock_configuration")
    return BucketDeletionSettings(
        versioning=None if isinstance(versioning, Refused) else str(versioning.get("Status", "")),
        object_lock=None if isinstance(lock, Refused) else lock.get("ObjectLockConfiguration", {}).get("ObjectLockEnabled") == "Enabled",
        refusal=next((answer.message for answer in (versioning, lock) if isinstance(answer, Refused)), ""),
    )


def bucket_findings(store: S3Store, now_ms: int) -> list[StoreFinding]:
    """Return the findings about versioning, object lock, archived objects and unfinished uploads."""
    state = read_bucket_deletion_settings(store)
    return [
        *_versioning_findings(store, state),
        *_archived_object_findings(store),
        *_unfinished_upload_findings(store, now_ms),
    ]


def _versioning_findings(store: S3Store, state: BucketDeletionSettings) -> list[StoreFinding]:
    findings = []
    if state.versioning:
        findings.append(
            StoreFinding.warning(
                "versioning",
                f"the bucket of {store.url} keeps versions ({state.versioning}): a deleted object stays as an old version, and is paid for",
                "Add a lifecycle rule NoncurrentVersionExpiration for the tier's prefix, or use a bucket without versioning",
            )
        )
    if state.object_lock:
        findings.append(
            StoreFinding.warning(
                "object-lock",
                f"the bucket of {store.url} has Object Lock: replaced objects cannot be removed before their retention ends",
                "Use a bucket without Object Lock, or expect no saving before the retention ends",
            )
        )
    if state.refusal:
        is_denied = "denied" in state.refusal.lower()
        findings.append(
            StoreFinding.note(
                "versioning-unknown",
                f"whether {store.url} keeps versions or locks objects is not known, so no saving is promised: {state.refusal}",
                "Grant s3:GetBucketVersioning and s3:GetBucketObjectLockConfiguration (conf/iam-policy.json)"
                if is_denied
                else "No right is missing: this server does not answer the question. Its documentation says whether it keeps versions",
            )
        )
    return findings


def _archived_object_findings(store: S3Store) -> list[StoreFinding]:
    """Return a list with one finding if any of the first 1000 objects is in an archive storage class, otherwise an empty list."""
    page = store.requests.send_request_with_retries("list_objects_v2", "list", Prefix=store.requests.prefix, MaxKeys=1000)
    archived = [entry for entry in page.get("Contents", []) if entry.get("StorageClass") in _ARCHIVED]
    if not archived:
        return []
    return [
        StoreFinding.warning(
            "archived",
            f"{len(archived)} of the first {len(page['Contents'])} objects of {store.url} are archived"
            f" (storage class {archived[0]['StorageClass']}, for example {archived[0]['Key']}) and cannot be read",
            "Restore them, and keep lifecycle rules that archive away from the tier's prefix",
        )
    ]


def _unfinished_upload_findings(store: S3Store, now_ms: int) -> list[StoreFinding]:
    """Return a list with one finding if any unfinished multipart upload is older than a day, otherwise an empty list. Parts of such uploads
    are billed, and no listing of objects shows them.
    """
    answer = _query_bucket_setting(store, "list_multipart_uploads", Prefix=store.requests.prefix)
    uploads = [] if isinstance(answer, Refused) else answer.get("Uploads", [])
    old = [upload for upload in uploads if now_ms - upload["Initiated"].timestamp() * 1000 > _DAY_MS]
    if not old:
        return []
    return [
        StoreFinding.note(
            "unfinished-uploads",
            f"{len(old)} multipart uploads below {store.url} were begun more than a day ago and never finished ({old[0]['Key']})",
            "Add a lifecycle rule AbortIncompleteMultipartUpload of 7 days to the bucket",
        )
    ]


def _query_bucket_setting(store: S3Store, operation: str, **params: Any) -> dict[str, Any] | Refused:
    """Return the store's answer to an S3 operation that reads a setting: an empty dict if the setting is absent, the error if the store
    refuses the request (missing permission, or an operation that the server does not have).
    """
    try:
        return store.requests.send_request_with_retries(operation, "ask for the settings of", **params)
    except Refused as error:
        return {} if "ConfigurationNotFound" in error.message else error
