"""Opening a store by its URL, with limits and counters around it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from compactor.errors import UsageError
from compactor.storage.counting import Counters
from compactor.storage.local import LocalStore
from compactor.storage.port import ObjectStore
from compactor.storage.settings import Limits, Retries, S3Settings, Transfers
from compactor.storage.throttled import Buckets, Throttled


def open_store(
    url: str,
    *,
    s3: S3Settings | None = None,
    limits: Limits | None = None,
    retries: Retries | None = None,
    transfers: Transfers | None = None,
    counters: Counters | None = None,
) -> ObjectStore:
    """``file:///dir`` (percent-encoded or with plain spaces), a plain path, or ``s3://bucket/prefix``. Makes no request.

    :param limits: shared by all stores of this process that are opened with equal limits.
    :param counters: where requests and bytes are counted; may be shared by several stores.
    :raises UsageError: for a URL that is neither.
    """
    meter = Throttled(counters or Counters(), _buckets(limits or Limits()))
    if not is_s3(url):
        return LocalStore(local_path(url), meter)
    raise UsageError(f"{url!r}: the S3 adapter is not built yet")


def is_s3(url: str) -> bool:
    return url[:5].lower() == "s3://"


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


@lru_cache(maxsize=8)
def _buckets(limits: Limits) -> Buckets:
    return Buckets(limits)
