"""Single requests to one bucket through a client of boto3: metered, retried, with errors that a person understands.

Its own retries are off (one attempt), so that every attempt passes through our Retrier and our meter; the errors and the client's
configuration are those of botocore, its core. Importing them takes a while: that waits for the first request.
"""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from compactor.config.store_sections import S3
from compactor.errors import Unavailable, UsageError
from compactor.storage.counting import Meter
from compactor.storage.retrying import Retrier
from compactor.storage.s3_errors import translated

T = TypeVar("T")

_CHUNK = 256 << 10
PRICED_OPERATIONS = {
    "GetObject": "get",
    "HeadObject": "head",
    "PutObject": "put",
    "UploadPart": "put",
    "UploadPartCopy": "copy",
    "ListObjectsV2": "list",
    "DeleteObjects": "delete",
    "CreateMultipartUpload": "multipart",
    "CompleteMultipartUpload": "multipart",
    "AbortMultipartUpload": "multipart",
    "ListMultipartUploads": "list",
}
_POOL = 64
"""Connections kept: more than the threads of a service that share one store."""


@dataclass
class Traits:
    """What a server has shown of itself.

    :param md5: whether its ETags are the MD5 of what it has stored; None until an object without a checksum has shown it. The only word
        about what arrived there from a store that sends no checksum back.
    :param copies: whether it copies ranges, until it has refused to.
    """

    md5: bool | None = None
    copies: bool = True


@dataclass(frozen=True)
class Span:
    """Which bytes a GET answered with: [start, end) of ``total``, in the version named ``etag``."""

    start: int
    end: int
    total: int
    etag: str


class S3Requests:
    """:param prefix: empty, or what every key begins with, ending in a slash."""

    def __init__(self, bucket: str, prefix: str, settings: S3, retrier: Retrier, meter: Meter, traits: Traits | None = None) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.meter = meter
        self.retrier = retrier
        self.bucket_seen = False
        self.traits = traits or Traits()
        self.settings = settings
        self._lock = threading.Lock()
        self._made: Any = None

    def where(self, key: str = "") -> str:
        return f"s3://{self.bucket}/{self.prefix}{key}"

    @property
    def client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = _make_client(self.settings, self.meter)
            return self._made

    def once(self, operation: str, verb: str, key: str = "", **params: Any) -> dict[str, Any]:
        """One attempt. ``Key`` is added where a key is given."""
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        if key:
            params["Key"] = self.prefix + key
        try:
            answer: dict[str, Any] = getattr(self.client, operation)(Bucket=self.bucket, **params)
        except (BotoCoreError, ClientError, ResponseParserError, ValueError, OSError, http.client.HTTPException) as error:
            if isinstance(error, ClientError):
                self.retrier.contact.record_answer()
            raise translated(error, verb, self.where(key), met=self.retrier.contact.answered) from error
        self.bucket_seen = True
        self.retrier.contact.record_answer()
        return answer

    def call(self, operation: str, verb: str, key: str = "", **params: Any) -> dict[str, Any]:
        """Tried again while the store is unavailable."""
        return self.retry(lambda _: self.once(operation, verb, key, **params))

    def glance(self) -> dict[str, Any]:
        """The cheapest answer that has a date and says clearly whether the bucket is there and may be used: a LIST of one key.

        (HEAD of a bucket has no body to say it with, and a policy for one prefix does not allow it.)
        """
        return self.call("list_objects_v2", "list", Prefix=self.prefix, MaxKeys=1)

    def retry(self, attempt: Callable[[int], T]) -> T:
        def counted(number: int) -> T:
            if number:
                self.meter.repeated()
            return attempt(number)

        return self.retrier.call(counted)

    def body(self, answer: dict[str, Any], key: str, span: Span) -> Iterator[bytes]:
        """The body of a GET in chunks, exactly as long as its headers say. Raises Unavailable where it is not, or breaks off."""
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        stream = answer["Body"]
        left = span.end - span.start
        try:
            while chunk := stream.read(_CHUNK):
                self.meter.read(len(chunk))
                left -= len(chunk)
                if left < 0:
                    break
                yield chunk
        except (BotoCoreError, HTTPError, OSError, http.client.HTTPException) as error:
            raise translated(error, "read", self.where(key)) from error
        finally:
            stream.close()
        if left:
            raise Unavailable(f"cannot read {self.where(key)}: the body is {'shorter' if left > 0 else 'longer'} than the store said")


def span_of(answer: dict[str, Any], where: str, start: int, length: int | None) -> Span:
    """Checks that the answer holds the bytes that were asked for. Raises Unavailable."""
    size = int(answer.get("ContentLength", -1))
    described = answer.get("ContentRange", "")
    try:
        unit, _, rest = described.partition(" ") if described else ("bytes", "", f"0-{size - 1}/{size}")
        positions, _, total = rest.partition("/")
        first, _, last = positions.partition("-")
        span = Span(int(first), int(last) + 1, int(total), str(answer.get("ETag", "")))
    except ValueError as error:
        raise Unavailable(f"cannot read {where}: unknown Content-Range {described!r}") from error
    wanted = span.total if length is None else min(span.total, start + length)
    if unit != "bytes" or span.start != start or span.end != wanted or size != span.end - span.start:
        raise Unavailable(f"cannot read {where}: asked for bytes {start} to {wanted - 1}, the store sent {described or f'all {size}'}")
    return span


def byte_range(start: int, length: int | None) -> str:
    return f"bytes={start}-" if length is None else f"bytes={start}-{start + length - 1}"


def _make_client(settings: S3, meter: Meter) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError
    from botocore.session import get_session

    endpoint = settings.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    config = Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=4,  # so that a second failure, and with it a remark, comes within ten seconds
        read_timeout=60,
        max_pool_connections=_POOL,
        tcp_keepalive=True,
        # Only Amazon has a DNS name for every bucket.
        s3={"addressing_style": "path"} if endpoint and not _is_amazon(endpoint) else None,
        # Checksums are named request by request: some servers send an object's checksum with a part of it.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        core = get_session()
        core.register_component("data_loader", _loader())
        session = boto3.session.Session(botocore_session=core)
        region = settings.region or session.region_name or ("us-east-1" if endpoint else None)
        client = session.client("s3", endpoint_url=endpoint, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise UsageError(f"cannot set up the S3 client: {error}", hint="Check [s3], AWS_PROFILE and ~/.aws/config") from error

    def before_send(event_name: str, **_: Any) -> None:
        meter.request(PRICED_OPERATIONS.get(event_name.rpartition(".")[2], "other"))

    client.meta.events.register("before-send.s3", before_send)
    client.meta.events.register_first("needs-retry.s3", _stay_in_region)
    return client


def _stay_in_region(request_dict: dict[str, Any], **_: Any) -> None:
    """botocore follows a bucket to its region with requests of its own, for ever where the answer names none.

    A clear error that names the region is better than two requests instead of one for the whole life of a service.
    """
    request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True


@cache
def _loader() -> Any:
    """The description of S3 takes a tenth of a second to read: once per process."""
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _is_amazon(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
