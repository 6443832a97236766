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

from compactor.config.store_sections import S3Settings
from compactor.errors import Unavailable, UsageError
from compactor.storage.counting import RequestMeter
from compactor.storage.retrying import Retrier
from compactor.storage.s3_errors import translate_s3_error

T = TypeVar("T")

BotoS3Client = Any
"""Client that botocore has made for S3. Such clients have no types."""
S3Answer = dict[str, Any]
"""Parsed answer of botocore to an S3 request, by the names of S3's fields."""
CompletedPartEntry = dict[str, Any]
"""Entry of one part in the request that completes a multipart upload: its number, ETag and checksum."""

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
_CONNECT_S = 3.0
_READ_S = 60.0
"""Longest wait between two received pieces of an answer, in seconds, once the store has answered a request."""


@dataclass
class LearnedServerBehaviour:
    """Behaviour of a server, learned from its answers.

    is_etag_md5: whether ETags are the MD5 of the stored bytes; None until known. If True, ETags verify uploads to servers that return no
        checksum.
    can_copy: whether the server copies ranges; True until it has refused to.
    """

    is_etag_md5: bool | None = None
    can_copy: bool = True


@dataclass(frozen=True)
class ReturnedByteRange:
    """Range [start, end) of bytes that a GET returned, of an object of ``total`` bytes in the version ``etag``."""

    start: int
    end: int
    total: int
    etag: str


class S3RequestClient:
    """Requests to one bucket, with translated errors, retries and counting.

    :param prefix: prepended to every key; empty, or ending in a slash.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        settings: S3Settings,
        retrier: Retrier,
        meter: RequestMeter,
        traits: LearnedServerBehaviour | None = None,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.meter = meter
        self.retrier = retrier
        self.bucket_seen = False
        self.traits = traits or LearnedServerBehaviour()
        self.settings = settings
        self._lock = threading.Lock()
        self._clients: dict[bool, BotoS3Client] = {}

    def object_url(self, key: str = "") -> str:
        return f"s3://{self.bucket}/{self.prefix}{key}"

    @property
    def boto_client(self) -> BotoS3Client:
        """Return botocore's client. Until the store has answered for the first time, a request times out after half of the longest wait for
        a first answer, so that two attempts fit into that wait. Later requests have a longer timeout.
        """
        with self._lock:
            answered = self.retrier.contact.answered
            if answered not in self._clients:
                waiting_s = _READ_S if answered else max(1.0, self.retrier.policy.first_answer_s / 2)
                self._clients[answered] = _create_boto_s3_client(self.settings, self.meter, waiting_s)
            return self._clients[answered]

    def send_request_without_retries(self, operation: str, verb: str, key: str = "", **params: Any) -> S3Answer:
        """Send one request without retries and return the answer. Errors of botocore are translated (``translate_s3_error``).

        :param operation: name of the client's method, such as ``get_object``.
        :param verb: what the request does, for messages.
        :param key: key of the object; empty if the request is about the bucket. Added to ``params`` as ``Key``, with the prefix.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        if key:
            params["Key"] = self.prefix + key
        try:
            answer: S3Answer = getattr(self.boto_client, operation)(Bucket=self.bucket, **params)
        except (BotoCoreError, ClientError, ResponseParserError, ValueError, OSError, http.client.HTTPException) as error:
            if isinstance(error, ClientError):
                self.retrier.contact.record_answer()
            raise translate_s3_error(error, verb, self.object_url(key), answered_before=self.retrier.contact.answered) from error
        self.bucket_seen = True
        self.retrier.contact.record_answer()
        return answer

    def send_request_with_retries(self, operation: str, verb: str, key: str = "", **params: Any) -> S3Answer:
        """Send a request and return the answer, repeating it while the store is unavailable. The arguments are those of
        ``send_request_without_retries``.
        """
        return self.request_with_retries(lambda _: self.send_request_without_retries(operation, verb, key, **params))

    def list_one_key(self) -> S3Answer:
        """List one key and return the answer. This is the cheapest request that returns the server's date and shows whether the bucket
        exists and may be used; HEAD of a bucket has no error message and needs another permission.
        """
        return self.send_request_with_retries("list_objects_v2", "list", Prefix=self.prefix, MaxKeys=1)

    def request_with_retries(self, attempt: Callable[[int], T]) -> T:
        def attempt_and_count_retries(attempt_number: int) -> T:
            if attempt_number:
                self.meter.record_retry()
            return attempt(attempt_number)

        return self.retrier.call_with_retries(attempt_and_count_retries)

    def read_range(self, key: str, start: int, length: int | None, **params: Any) -> bytes:
        """Return bytes [start, start + length) of an object, with retries. If ``length`` is None, return all bytes from ``start`` on.
        Raises RangeNotSatisfiable if the object ends at or before ``start``.
        """

        def read_range_in_one_attempt(attempt: int) -> bytes:
            answer = self.send_request_without_retries("get_object", "read", key, **params)
            return b"".join(self.read_body(answer, key, parse_and_check_returned_span(answer, self.object_url(key), start, length)))

        if start or length is not None:
            params["Range"] = range_header(start, length)
        return self.request_with_retries(read_range_in_one_attempt)

    def read_body(self, response: S3Answer, key: str, span: ReturnedByteRange) -> Iterator[bytes]:
        """Yield the body of the answer to a GET in chunks, and close it. Raises Unavailable if the body is shorter or longer than ``span``,
        or if the connection breaks.
        """
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        stream = response["Body"]
        left = span.end - span.start
        try:
            while chunk := stream.read(_CHUNK):
                self.meter.record_bytes_read(len(chunk))
                left -= len(chunk)
                if left < 0:
                    break
                yield chunk
        except (BotoCoreError, HTTPError, OSError, http.client.HTTPException) as error:
            raise translate_s3_error(error, "read", self.object_url(key)) from error
        finally:
            stream.close()
        if left:
            raise Unavailable(f"cannot read {self.object_url(key)}: the body is {'shorter' if left > 0 else 'longer'} than the store said")


def parse_and_check_returned_span(response: S3Answer, url: str, start: int, length: int | None) -> ReturnedByteRange:
    """Return which bytes of the object an answer contains, read off its headers. Raises Unavailable if they are not the requested bytes
    [start, start + length), cut at the object's end.
    """
    size = int(response.get("ContentLength", -1))
    described = response.get("ContentRange", "")
    try:
        unit, _, rest = described.partition(" ") if described else ("bytes", "", f"0-{size - 1}/{size}")
        positions, _, total = rest.partition("/")
        first, _, last = positions.partition("-")
        span = ReturnedByteRange(int(first), int(last) + 1, int(total), str(response.get("ETag", "")))
    except ValueError as error:
        raise Unavailable(f"cannot read {url}: unknown Content-Range {described!r}") from error
    wanted = span.total if length is None else min(span.total, start + length)
    if unit != "bytes" or span.start != start or span.end != wanted or size != span.end - span.start:
        raise Unavailable(f"cannot read {url}: asked for bytes {start} to {wanted - 1}, the store sent {described or f'all {size}'}")
    return span


def range_header(start: int, length: int | None) -> str:
    """Return the Range header for bytes [start, start + length), or from ``start`` on if ``length`` is None."""
    return f"bytes={start}-" if length is None else f"bytes={start}-{start + length - 1}"


def _create_boto_s3_client(settings: S3Settings, meter: RequestMeter, read_timeout_s: float) -> BotoS3Client:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError
    from botocore.session import get_session

    endpoint = settings.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    config = Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=_CONNECT_S,
        read_timeout=read_timeout_s,
        max_pool_connections=_POOL,
        tcp_keepalive=True,
        # Only Amazon has a DNS name for every bucket.
        s3={"addressing_style": "path"} if endpoint and not _is_amazon_endpoint(endpoint) else None,
        # Checksums are named request by request: some servers send an object's checksum with a part of it.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        core = get_session()
        core.register_component("data_loader", _shared_botocore_loader())
        session = boto3.session.Session(botocore_session=core)
        region = settings.region or session.region_name or ("us-east-1" if endpoint else None)
        client = session.client("s3", endpoint_url=endpoint, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise UsageError(f"cannot set up the S3 client: {error}", hint="Check [s3], AWS_PROFILE and ~/.aws/config") from error

    def count_request(event_name: str, **_: Any) -> None:
        meter.record_request(PRICED_OPERATIONS.get(event_name.rpartition(".")[2], "other"))

    client.meta.events.register("before-send.s3", count_request)
    client.meta.events.register_first("needs-retry.s3", _disable_region_redirect)
    return client


def _disable_region_redirect(request_dict: dict[str, Any], **_: Any) -> None:
    """Prevent botocore from searching the bucket's region by further requests, which never end if the answer names no region.

    The user gets an error that names the region instead.
    """
    request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True


@cache
def _shared_botocore_loader() -> Any:
    """Return the loader of botocore's description of S3. All clients of the process share it, because reading the description takes a tenth
    of a second.
    """
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _is_amazon_endpoint(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
