"""Single requests to one bucket through boto3: metered, retried, with translated errors.

botocore's own retries are off, so that every attempt passes through the Retrier and the meter.
"""

from __future__ import annotations

import base64
import http.client
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from http import HTTPStatus
from itertools import groupby
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from compactor.config.sections import S3Settings
from compactor.errors import CompactorError, NotFound, Refused, StoreError, Unavailable, UsageError
from compactor.storage.factory import NoSuchUpload, PreconditionFailed, RangeNotSatisfiable
from compactor.storage.keys import check_byte_range
from compactor.storage.port import ComposeSource, CopyLimits, FileRange, ObjectRangeToCopy
from compactor.storage.wrappers import RequestMeter, Retrier

_POLICY = (
    "Grant what conf/iam-policy.json lists (also s3:ListBucket, without which an absent key answers 403), then run config check."
    " A bucket that makes the requester pay answers the same to all but its owner"
)
_KEYS = "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the instance role"
_LOGIN = "Log in again or renew the session token; long-running services want a role that renews itself"
_REGION = "Set [s3] region to the bucket's region"
_NO_BUCKET = "Create it, or check [tier] url, [s3] endpoint_url and region"
_KMS = "The bucket encrypts with a KMS key: grant kms:Decrypt and kms:GenerateDataKey on it, and check that it is enabled"
_BUSY = "The store asks for patience; lower [limits] max_requests_per_s if it happens often"
_AGAIN = "Try again; the next run finishes or undoes what was begun"
_UNREACHABLE = f"Is the store running, and is [s3] endpoint_url right? {_AGAIN}"
_REQUESTER = (
    "The bucket makes the requester pay, which this service does not accept on your behalf: use the owner's credentials or switch it off"
)

_INTERNAL: dict[str, type[StoreError]] = {
    "PreconditionFailed": PreconditionFailed,
    "412": PreconditionFailed,
    "NoSuchUpload": NoSuchUpload,
    "InvalidRange": RangeNotSatisfiable,
    "416": RangeNotSatisfiable,
}

_REFUSALS: dict[str, tuple[str, str]] = {
    "AccessDenied": ("access denied", _POLICY),
    "AllAccessDisabled": ("access denied", _POLICY),
    "403": ("access denied", _POLICY),
    "UnauthorizedAccess": ("access denied", _POLICY),
    "InvalidAccessKeyId": ("the access key is unknown", _KEYS),
    "SignatureDoesNotMatch": ("the secret key does not belong to the access key, or a proxy changed the request", _KEYS),
    "InvalidToken": ("the session token is not valid", _LOGIN),
    "ExpiredToken": ("the session token has expired", _LOGIN),
    "ExpiredTokenException": ("the session token has expired", _LOGIN),
    "TokenRefreshRequired": ("the session token must be renewed", _LOGIN),
    "AccountProblem": ("the account has a problem", "Ask the provider"),
    "InvalidBucketName": ("this is not a bucket's name", "Check [tier] url"),
    "NoSuchBucket": ("the bucket does not exist", _NO_BUCKET),
    "PermanentRedirect": ("the bucket is in another region", _REGION),
    "TemporaryRedirect": ("the bucket is in another region", _REGION),
    "301": ("the bucket is in another region", _REGION),
    "AuthorizationHeaderMalformed": ("the request was signed for another region", _REGION),
    "IllegalLocationConstraintException": ("the bucket is in another region", _REGION),
    "RequestTimeTooSkewed": ("the clocks of this machine and of the store differ too much", "Set this machine's clock (NTP)"),
    "InvalidObjectState": ("the object is archived", "Restore it, or keep archiving lifecycle rules away from the tier's prefix"),
    "ObjectParentIsFile": ("the key lies below another object", "No key may be a directory of another key"),
    "ExistingObjectIsDirectory": ("the key is a directory in this store", "No key may be a directory of another key"),
    "NotImplemented": (
        "the store does not know this request",
        "It needs conditional puts and multipart uploads: see docs, or run config check",
    ),
    "InvalidRequest": ("the store refuses the request as such", "Run config check"),
    "400": ("the store refuses the request as such", "Check [s3] region and endpoint_url, and this machine's clock"),
    "MethodNotAllowed": ("the store does not know this request", "Run config check"),
    "405": ("the store does not know this request", "Run config check"),
    "501": ("the store does not know this request", "Run config check"),
    "QuotaExceeded": ("the bucket's quota is used up", "Raise it or free space"),
}

_NO_COPIES = {"NotImplemented", "XNotImplemented", "MethodNotAllowed", "InvalidArgument", "InvalidRequest", "400", "405", "501"}
_TRANSIENT = {
    "SlowDown",
    "503",
    "ServiceUnavailable",
    "InternalError",
    "500",
    "502",
    "504",
    "RequestTimeout",
    "RequestTimeoutException",
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "RequestThrottled",
    "TooManyRequests",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
    "OperationAborted",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
    "InvalidDigest",
    "KMS.ThrottlingException",
}
"""Includes what only bytes damaged on their way can cause: our own digests are right."""


_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "Set AWS_CA_BUNDLE to the authority that signed the store's certificate",
    "WRONG_VERSION_NUMBER": "What listens at [s3] endpoint_url speaks no TLS: write http://, or name the port that does",
    "UNSUPPORTED_PROTOCOL": "The store and this machine know no version of TLS in common",
    "HANDSHAKE_FAILURE": "The store refuses this machine's TLS: check [s3] endpoint_url and what the store asks of clients",
    "CERTIFICATE_REQUIRED": "The store wants a certificate of the client, which is not supported: put a proxy before it",
}
"""What TLS does not get over by itself."""
_UNKNOWN_HOST = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


def translate_s3_error(error: Exception, verb: str, url: str, *, answered_before: bool = False) -> CompactorError:
    """Translate an error of botocore, or of its connection. Before the store's first answer an unknown host name is Refused instead of
    Unavailable.
    """
    from botocore import exceptions as boto

    what = f"cannot {verb} {url}"
    if isinstance(error, boto.ClientError):
        return s3_answer_error(error.response.get("Error", {}), what, error.response)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.ProfileNotFound | boto.CredentialRetrievalError):
        return Refused(f"{what}: {error}".rstrip("."), hint=_KEYS)
    if isinstance(error, boto.UnauthorizedSSOTokenError | boto.SSOTokenLoadError | boto.TokenRetrievalError):
        return Refused(f"{what}: {error}".rstrip("."), hint=_LOGIN)
    if isinstance(error, boto.SSLError) and (cause := next((name for name in _TLS if name in str(error)), None)):
        return Refused(f"{what}: {error}".rstrip("."), hint=_TLS[cause])
    if isinstance(error, boto.EndpointConnectionError) and not answered_before and is_unknown_host(error):
        return Refused(f"{what}: {error}: the host name is unknown".rstrip("."), hint="Check [s3] endpoint_url and region, and the DNS")
    if isinstance(error, boto.ParamValidationError | boto.InvalidRegionError | boto.EndpointProviderError | ValueError):
        return UsageError(f"{what}: {error}".rstrip("."), hint="Check [tier] url and [s3]")
    unreached = isinstance(error, boto.EndpointConnectionError | boto.ReadTimeoutError) and not answered_before
    return Unavailable(f"{what}: {error}".rstrip("."), hint=_UNREACHABLE if unreached else _AGAIN)


def is_copy_refusal(error: BaseException) -> bool:
    from botocore import exceptions as boto

    cause = error.__cause__
    return isinstance(cause, boto.ClientError) and str(cause.response.get("Error", {}).get("Code", "")) in _NO_COPIES


def is_unknown_host(error: BaseException) -> bool:
    """Return whether the DNS has no such name. A DNS server that does not answer (EAI_AGAIN) does not count."""
    causes: list[object] = [error]
    for cause in causes:
        if isinstance(cause, socket.gaierror):
            return cause.errno in _UNKNOWN_HOST
        if isinstance(cause, BaseException) and len(causes) < 16:
            kept = getattr(cause, "kwargs", {}).get("error")  # botocore keeps urllib3's error there, azure-core in inner_exception
            named = (kept, getattr(cause, "inner_exception", None), cause.__cause__, cause.__context__)
            causes += [each for each in named if each is not None]
    return False


def s3_answer_error(details: Mapping[str, Any], failed_request: str, response: Mapping[str, Any] | None = None) -> CompactorError:
    """Translate an error answer of S3.

    :param failed_request: text such as ``cannot read s3://bucket/key``.
    :param response: the whole answer; None if the error is about one key of it.
    """
    response = response or {}
    meta: Mapping[str, Any] = response.get("ResponseMetadata", {})
    code, message, status = str(details.get("Code", "")), str(details.get("Message", "")), int(meta.get("HTTPStatusCode", 0))
    detail = f"{failed_request}: the store answered {code or status}" + (f" ({message.rstrip('.')})" if message and message != code else "")
    if kind := _INTERNAL.get(code) or _INTERNAL.get(str(status)):
        return kind(detail)
    if code in ("NoSuchKey", "404", "NoSuchVersion"):
        return NotFound(f"{failed_request}: no such object")
    if code in _TRANSIENT:
        return Unavailable(detail, hint=_BUSY if status == 503 else _AGAIN)
    if "requester pays" in message.lower() or "requesterpays" in (code + message).lower():
        return Refused(detail, hint=_REQUESTER)
    if code.startswith("KMS.") or (status in (400, 403) and "kms" in message.lower()):
        return Refused(f"{detail}: the encryption key refuses", hint=_KMS)
    if code in _REFUSALS:
        meaning, hint = _REFUSALS[code]
        return Refused(f"{detail}: {meaning}{_actionable_error_detail(code, response, details)}", hint=hint)
    if status == HTTPStatus.NOT_IMPLEMENTED:  # no later attempt is answered better
        return Refused(f"{detail}: {_REFUSALS['501'][0]}", hint=_REFUSALS["501"][1])
    if status >= 500 or status in (408, 429):
        return Unavailable(detail, hint=_AGAIN)
    return Refused(detail, hint="Run config check" if code else "Check [s3] endpoint_url: what answers there does not speak S3")


def _actionable_error_detail(code: str, response: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    if code == "InvalidObjectState":
        storage_class = response.get("StorageClass") or details.get("StorageClass") or "unknown"
        tier = response.get("AccessTier") or details.get("AccessTier")
        return f" (storage class {storage_class}{f', tier {tier}' if tier else ''})"
    region = details.get("Region") or response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if region and _REFUSALS[code][1] == _REGION:
        return f" ({region})"
    if code == "RequestTimeTooSkewed" and details.get("ServerTime"):
        return f" (here {details.get('RequestTime')}, there {details['ServerTime']})"
    return ""


# Parts of uploads. S3 wants at least 5 MiB of every part but the last.


MAX_PARTS: Final = 10_000
MIN_PART_BYTES: Final = 5 << 20
COPIES: Final = CopyLimits(min_run_bytes=MIN_PART_BYTES, max_bytes=512 << 20)
"""S3 copies up to 5 GiB with one request; smaller ones are done side by side, and well before a connection is given up."""

RangePositionAndLength = tuple[int, int]
"""Position and length in bytes of a range."""
UploadPartOfLocalRanges = tuple[FileRange, ...]
"""Ranges of files that travel as one part, one behind the other."""
UploadPart = ObjectRangeToCopy | UploadPartOfLocalRanges


def upload_part_size_bytes(file_size_bytes: int, default_part_bytes: int) -> int:
    """Part size ``default_part_bytes``, or more if there would be more than MAX_PARTS."""
    return max(default_part_bytes, -(-file_size_bytes // MAX_PARTS))


def split_file(file: FileRange, part_bytes: int) -> list[UploadPart]:
    part = upload_part_size_bytes(file.length, part_bytes)
    return [(replace(file, start=at, length=min(part, file.length - at)),) for at in range(0, file.length, part)]


def plan_upload_parts(sources: Sequence[ComposeSource], part_bytes: int, max_copy_bytes: int = 0) -> list[UploadPart]:
    """Parts of a multipart upload from these ranges. Adjacent local ranges are joined into nearly equal parts, long copied ranges are
    split, empty ranges are left out.

    :param part_bytes: size of parts with local bytes; larger if they would be more than MAX_PARTS.
    :param max_copy_bytes: most bytes copied by one request; 0 for the limit of S3.
    :raises ValueError: if a part that is not the last would be smaller than S3 allows.
    :raises Refused: if there would be too many parts.
    """
    for piece in sources:
        check_byte_range(piece.start, piece.length)
    parts: list[UploadPart] = []
    for _, group in groupby((piece for piece in sources if piece.length), type):
        run = list(group)
        parts += [
            part
            for piece in run
            if isinstance(piece, ObjectRangeToCopy)
            for part in _split_copied_range(piece, max_copy_bytes or COPIES.max_bytes)
        ]
        parts += _pack_local_ranges([piece for piece in run if isinstance(piece, FileRange)], part_bytes)
    small = [part for part in parts[:-1] if upload_part_length_bytes(part) < MIN_PART_BYTES]
    if small:
        raise ValueError(
            f"a part of {upload_part_length_bytes(small[0])} bytes that is not the last: stores want at least {MIN_PART_BYTES}"
        )
    if len(parts) > MAX_PARTS:
        raise Refused(f"an object of {len(parts)} parts: stores take {MAX_PARTS}", hint="This is a bug; please report it")
    return parts


def find_mismatched_copied_range(
    sources: Sequence[ComposeSource], parts: Sequence[UploadPart], checksums: Sequence[str]
) -> ObjectRangeToCopy | None:
    """First copied range with another CRC-32C than expected, if both are known.

    :param checksums: of each part as returned (base64 of four bytes); may be empty.
    """
    copied = iter([(part, reported) for part, reported in zip(parts, checksums, strict=True) if isinstance(part, ObjectRangeToCopy)])
    for piece in sources:
        if not isinstance(piece, ObjectRangeToCopy):
            continue
        left, crc, is_known = piece.length, 0, True
        while left:
            part, reported = next(copied)
            left -= part.length
            is_known = is_known and bool(reported)
            crc = _combine_crc32c(crc, int.from_bytes(base64.b64decode(reported), "big"), part.length) if is_known else 0
        if is_known and piece.length and piece.crc32c not in (None, crc):
            return piece
    return None


def _combine_crc32c(first_crc: int, second_crc: int, second_size_bytes: int) -> int:
    from compactor.kernels.crc import combine_crc32c  # loads the compiler, which few commands need

    return combine_crc32c(first_crc, second_crc, second_size_bytes) if first_crc else second_crc


def upload_part_length_bytes(part: UploadPart) -> int:
    return part.length if isinstance(part, ObjectRangeToCopy) else sum(piece.length for piece in part)


def _split_copied_range(piece: ObjectRangeToCopy, max_bytes: int) -> list[UploadPart]:
    spans = list(_split_into_equal_ranges(piece.length, -(-piece.length // max_bytes)))
    if len(spans) == 1:
        return [piece]
    return [replace(piece, start=piece.start + at, length=length, crc32c=None) for at, length in spans]


def _pack_local_ranges(ranges: list[FileRange], part_bytes: int) -> list[UploadPart]:
    total = sum(piece.length for piece in ranges)
    if not total:
        return []
    return [
        tuple(_slice_concatenated_local_ranges(ranges, at, length))
        for at, length in _split_into_equal_ranges(total, max(1, total // upload_part_size_bytes(total, part_bytes)))
    ]


def _split_into_equal_ranges(total_bytes: int, range_count: int) -> Iterator[RangePositionAndLength]:
    for number in range(range_count):
        start, end = total_bytes * number // range_count, total_bytes * (number + 1) // range_count
        yield start, end - start


def _slice_concatenated_local_ranges(ranges: list[FileRange], start: int, length: int) -> Iterator[FileRange]:
    at, end = 0, start + length
    for piece in ranges:
        first, last = max(start, at), min(end, at + piece.length)
        if first < last:
            yield FileRange(piece.path, piece.start + first - at, last - first)
        at += piece.length


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
    """Behaviour learned from answers. is_etag_md5: whether ETags are the MD5 of the stored bytes, so that they verify uploads; None until
    known.
    """

    is_etag_md5: bool | None = None
    can_copy: bool = True


@dataclass(frozen=True)
class ReturnedByteRange:
    """Bytes [start, end) of an object of ``total`` bytes."""

    start: int
    end: int
    total: int
    etag: str


class S3RequestClient:
    """Requests to one bucket. prefix: prepended to every key; empty, or ending in a slash."""

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
        """Until the store's first answer, a request times out after half of the longest wait, so that two attempts fit."""
        with self._lock:
            answered = self.retrier.contact.answered
            if answered not in self._clients:
                waiting_s = _READ_S if answered else max(1.0, self.retrier.policy.first_answer_s / 2)
                self._clients[answered] = _create_boto_s3_client(self.settings, self.meter, waiting_s)
            return self._clients[answered]

    def send_request_without_retries(self, operation: str, verb: str, key: str = "", **params: Any) -> S3Answer:
        """Send one request. key: sent with the prefix; empty if the request is about the bucket."""
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
        return self.request_with_retries(lambda _: self.send_request_without_retries(operation, verb, key, **params))

    def list_one_key(self) -> S3Answer:
        """List one key: the cheapest request that returns the server's date and shows whether the bucket may be used. HEAD of a bucket has
        no error message.
        """
        return self.send_request_with_retries("list_objects_v2", "list", Prefix=self.prefix, MaxKeys=1)

    def request_with_retries(self, attempt: Callable[[int], T]) -> T:
        def attempt_and_count_retries(attempt_number: int) -> T:
            if attempt_number:
                self.meter.record_retry()
            return attempt(attempt_number)

        return self.retrier.call_with_retries(attempt_and_count_retries)

    def read_range(self, key: str, start: int, length: int | None, **params: Any) -> bytes:
        """Bytes [start, start + length) (None: up to the object's end). Raises RangeNotSatisfiable if it ends at or before ``start``."""

        def read_once(attempt: int) -> bytes:
            answer = self.send_request_without_retries("get_object", "read", key, **params)
            return b"".join(self.read_body(answer, key, returned_span(answer, self.object_url(key), start, length)))

        if start or length is not None:
            params["Range"] = range_header(start, length)
        return self.request_with_retries(read_once)

    def read_body(self, response: S3Answer, key: str, span: ReturnedByteRange) -> Iterator[bytes]:
        """Yield the body of a GET in chunks. Raises Unavailable if it does not have ``span``'s length, or the connection breaks."""
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


def returned_span(response: S3Answer, url: str, start: int, length: int | None) -> ReturnedByteRange:
    """Range that an answer contains. Raises Unavailable if it is not [start, start + length), cut at the object's end."""
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
    # Prevent botocore from searching the bucket's region by requests that never end if the answer names no region.
    request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True


@cache
def _shared_botocore_loader() -> Any:
    # Return botocore's description of S3, shared by all clients because reading it takes a tenth of a second.
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _is_amazon_endpoint(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
