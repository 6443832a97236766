"""Opening a store by its URL, with limits and counters around it."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from compactor.errors import UsageError
from compactor.storage.counting import Counters
from compactor.storage.keys import MAX_KEY_BYTES, key_fault
from compactor.storage.local import LocalStore
from compactor.storage.port import ObjectStore
from compactor.storage.retrying import Contact, Retrier, RetryingStore
from compactor.storage.settings import Limits, Retries, S3Settings, Transfers
from compactor.storage.throttled import Buckets, Throttled

if TYPE_CHECKING:
    from compactor.storage.s3_requests import Traits

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}")
_MAX_PREFIX_BYTES = 1024 - MAX_KEY_BYTES - 1
_DIRECTORY = Retries(deadline_s=1, base_s=0.05, cap_s=0.5)
"""A network file system that has lost a handle finds it again at once, or not at all."""


def open_store(
    url: str,
    *,
    s3: S3Settings | None = None,
    limits: Limits | None = None,
    retries: Retries | None = None,
    transfers: Transfers | None = None,
    counters: Counters | None = None,
    contact: Contact | None = None,
    records: bool = False,
) -> ObjectStore:
    """``file:///dir`` (percent-encoded or with plain spaces), a plain path, or ``s3://bucket/prefix``. Makes no request.

    :param limits: shared by all stores of this process that are opened with equal limits.
    :param counters: where requests and bytes are counted; may be shared by several stores.
    :param contact: with the S3 server; shared by the stores that lie there.
    :param records: for control records (storage.local); a server needs no such thing.
    :raises UsageError: for a URL that is neither.
    """
    meter = Throttled(counters or Counters(), _buckets(limits or Limits()))
    if not is_s3(url):
        return RetryingStore(LocalStore(local_path(url), meter, records=records), Retrier(retries or _DIRECTORY))
    from compactor.storage.s3 import S3Store
    from compactor.storage.s3_requests import S3Requests

    bucket, prefix = s3_location(url)
    settings = s3 or S3Settings()
    policy = (retries or Retries()).model_copy(update={"first_answer_s": settings.first_answer_ms / 1000})
    requests = S3Requests(bucket, prefix, settings, Retrier(policy, contact=contact or Contact()), meter, _traits(bucket, s3))
    return S3Store(requests, transfers or Transfers())


def is_s3(url: str) -> bool:
    return url[:5].lower() == "s3://"


def s3_location(url: str) -> tuple[str, str]:
    """Bucket and prefix (empty, or ending in a slash) of ``s3://bucket/prefix``. Raises UsageError."""
    bucket, _, rest = url[5:].partition("/")
    prefix = rest.strip("/")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{url!r} names no bucket", hint="Write s3://bucket/prefix")
    fault = key_fault(prefix) if prefix else ""
    if not fault and len(prefix.encode()) > _MAX_PREFIX_BYTES:
        fault = f"is longer than {_MAX_PREFIX_BYTES} bytes"
    if fault:
        raise UsageError(f"the prefix of {url!r} {fault}", hint="Write s3://bucket/prefix")
    return bucket, f"{prefix}/" if prefix else ""


def local_path(url: str) -> Path:
    """The directory a ``file://`` URL or a plain path names. Raises UsageError."""
    if "://" not in url and not url.lower().startswith("file:"):
        if not url.strip():
            raise UsageError("the store's URL is empty", hint="Write s3://bucket/prefix or file:///directory")
        return Path(url)
    parts = urlsplit(url.replace("?", "%3F").replace("#", "%23"))
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UsageError(f"{url!r} is not a store", hint="Write s3://bucket/prefix or file:///directory (three slashes, an absolute path)")
    return Path(unquote(parts.path))


@lru_cache(maxsize=64)
def _traits(bucket: str, s3: S3Settings | None) -> Traits:
    """All stores of this process in one bucket learn from each other."""
    from compactor.storage.s3_requests import Traits

    return Traits()


@lru_cache(maxsize=8)
def _buckets(limits: Limits) -> Buckets:
    return Buckets(limits)
