"""Translation of the errors of S3 and botocore into the port's errors: which request, on what, and what to do next."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from compactor.errors import CompactorError, NotFound, Refused, StoreError, Unavailable, UsageError
from compactor.storage.answers import NoSuchUpload, PreconditionFailed, RangeNotSatisfiable

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
    """Translate an error of botocore, or of its connection, into the error that ObjectStore raises for it.

    :param verb: what failed: ``read``, ``list``, ...
    :param url: URL of the object or store, for the message.
    :param answered_before: whether the store has answered this process before. If so, an unknown host name counts as temporary
        (Unavailable), otherwise as a mistake in the settings (Refused).
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
    """Return whether an error shows that the server refuses all copies of ranges (UploadPartCopy), not only this one."""
    from botocore import exceptions as boto

    cause = error.__cause__
    return isinstance(cause, boto.ClientError) and str(cause.response.get("Error", {}).get("Code", "")) in _NO_COPIES


def is_unknown_host(error: BaseException) -> bool:
    """Return whether an error or any of its causes says that the DNS has no such host name. A DNS server that does not answer (EAI_AGAIN)
    does not count.
    """
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
    """Translate an error answer of S3 into the error that ObjectStore raises for it.

    :param details: Code and Message of the error, which is about the whole request or about one key of it.
    :param failed_request: text such as ``cannot read s3://bucket/key``, for the message.
    :param response: the whole answer, for its HTTP status and headers; None if the error is about one key.
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
    """Return the detail of an error answer that helps a person to act (storage class, region or clock difference), or an empty string."""
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
