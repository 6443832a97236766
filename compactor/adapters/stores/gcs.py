"""A prefix of a bucket of Google Cloud Storage as an object store (``gs://bucket/prefix``).

*Create-if-absent* is ``ifGenerationMatch=0``, for resumable uploads too. The version of an object is its generation.

*Checksums* are CRC-32C; the store compares them, and whole objects are compared when read.

*Copies* of ranges do not exist: compose takes whole objects.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from compactor.adapters.stores.cloud import (
    CloudStore,
    ErrorHints,
    ObjectRangeContent,
    PartUploader,
    RequestRunnerWithRetries,
    StoreHttpResponse,
    StoreHttpSession,
    connection_error,
    http_status_error,
    request_timeouts_s,
)
from compactor.adapters.stores.s3_requests import UploadPart
from compactor.config.sections import GcsSettings
from compactor.errors import CompactorError, Refused, Unavailable, UsageError
from compactor.model.finding import Finding
from compactor.storage.checks import FindingKindAndDetail, unknown_deletion_settings
from compactor.storage.port import ObjectInfo, ObjectStore
from compactor.storage.schemes import bucket_and_prefix
from compactor.storage.wrappers import FirstAnswerTracker, RequestMeter, StoreOptions

GcsLibraryClient = Any
"""``google.cloud.storage.Client``. The library is imported on first use and has no types."""
GcsLibraryBlob = Any
"""``google.cloud.storage.Blob``."""

_POOL = 64
_CHUNK_UNIT = 256 << 10
_HINTS = ErrorHints(
    credentials="Check [gcs] credentials_file, GOOGLE_APPLICATION_CREDENTIALS or the service account of this machine, and its clock",
    permission="Grant the role Storage Object User (roles/storage.objectUser) on the bucket, then run config check",
    bucket="Create it, or check [tier] url and [gcs] endpoint_url",
    endpoint="Check [gcs] endpoint_url, the network and the DNS",
)
_DAMAGED = re.compile(r"CRC32C|MD5|[Cc]hecksum|md5Hash|crc32c")
_KEPT = re.compile(r"\b(retention|[Hh]old)\b")
_PERMISSIONS = {
    "write": "storage.objects.create",
    "overwrite": "storage.objects.delete",
    "read": "storage.objects.get",
    "list": "storage.objects.list",
    "delete": "storage.objects.delete",
}


def open_store_at(url: str, options: StoreOptions) -> ObjectStore:
    bucket, prefix = bucket_and_prefix(url)
    return CloudStore(GcsClient(bucket, prefix, options.settings.gcs, options.meter, options.contact), options)


class GcsClient:
    """Requests to the objects below one prefix of a bucket."""

    def __init__(self, bucket: str, prefix: str, settings: GcsSettings, meter: RequestMeter, contact: FirstAnswerTracker) -> None:
        self._name = bucket
        self._prefix = prefix
        self._settings = settings
        self._meter = meter
        self._contact = contact
        self._lock = threading.Lock()
        self._session: Any = None
        self._made: Any = None

    @property
    def server_copy_limits(self) -> None:
        return None

    @property
    def url(self) -> str:
        return f"gs://{self._name}/{self._prefix}".rstrip("/")

    @property
    def endpoint_bucket_and_prefix(self) -> tuple[str, str, str]:
        return self._settings.endpoint_url, self._name, self._prefix

    def read(self, key: str, start: int, length: int | None, version: str = "") -> ObjectRangeContent:
        whole = start == 0 and length is None
        with self._translated_errors("read", key):
            data = self._blob_handle(key).download_as_bytes(
                start=None if whole else start,
                end=None if length is None else start + length - 1,
                raw_download=True,
                if_generation_match=int(version) if version else None,
                timeout=request_timeouts_s(self._contact),
                retry=None,
            )
        headers = self._session.answer.headers
        size = int(headers.get("Content-Range", f"/{len(data)}").rpartition("/")[2])
        return ObjectRangeContent(data, size, headers.get("x-goog-generation", ""))

    def head(self, key: str) -> ObjectInfo:
        with self._translated_errors("read", key):
            blob = self._blob_handle(key)
            blob.reload(timeout=request_timeouts_s(self._contact), retry=None)
        return self._object_info(blob)

    def create(self, key: str, data: bytes, metadata: Mapping[str, str], retried: RequestRunnerWithRetries) -> ObjectInfo:
        return retried(lambda: self._upload_object(key, data, metadata, if_generation_match=0))

    def put(self, key: str, data: bytes) -> ObjectInfo:
        return self._upload_object(key, data, {})

    def create_in_parts(self, key: str, parts: Sequence[UploadPart], metadata: Mapping[str, str], upload: PartUploader) -> ObjectInfo:
        """Resumable upload, whose failed chunks the client library repeats itself."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        policy = upload.retrier.policy
        deadline_s = policy.deadline_s if self._contact.answered else policy.first_answer_s
        first = parts[0]
        if not isinstance(first, tuple):
            raise TypeError("only files are uploaded")
        with self._translated_errors("write", key):
            blob = self._blob_handle(key, metadata)
            blob.chunk_size = -(-first[0].length // _CHUNK_UNIT) * _CHUNK_UNIT
            self._meter.record_bytes_written(sum(piece.length for part in parts if isinstance(part, tuple) for piece in part))
            blob.upload_from_filename(
                str(first[0].path),
                content_type="application/octet-stream",
                if_generation_match=0,
                checksum="crc32c",
                timeout=request_timeouts_s(self._contact),
                retry=DEFAULT_RETRY.with_delay(policy.base_s, policy.cap_s).with_timeout(deadline_s),
            )
        return self._object_info(blob)

    def list_page(self, prefix: str, after: str, token: str, size: int) -> tuple[Sequence[ObjectInfo], str]:
        with self._translated_errors("list"):
            listing = self._gcs_client().list_blobs(
                self._name,
                prefix=self._prefix + prefix,
                start_offset=self._prefix + after if after else None,
                page_token=token or None,
                page_size=size,
                timeout=request_timeouts_s(self._contact),
                retry=None,
            )
            found = [self._object_info(blob) for blob in next(listing.pages, ())]
        return found, listing.next_page_token or ""

    def delete(self, key: str, version: str = "") -> None:
        with self._translated_errors("delete", key):
            self._blob_handle(key).delete(
                if_generation_match=int(version) if version else None, timeout=request_timeouts_s(self._contact), retry=None
            )

    def clock_ms(self) -> int:
        self.list_page("", "", "", 1)
        return int(parsedate_to_datetime(self._session.answer.headers["Date"]).timestamp() * 1000)

    def does_delete_free_space(self) -> bool | None:
        try:
            return not self._retention_reasons()
        except Refused:
            return None

    def inspect_store_settings(self) -> list[Finding]:
        try:
            reasons = self._retention_reasons()
        except Refused as refusal:
            return [unknown_deletion_settings(self.url, refusal.message, "storage.buckets.get on the bucket")]
        hint = "Expect no saving before they are gone, or use a bucket without"
        return [Finding("warning", kind, "", f"the bucket of {self.url} {detail}", hint) for kind, detail in reasons]

    def required_permission_name(self, verb: str) -> str:
        return _PERMISSIONS[verb]

    def _retention_reasons(self) -> list[FindingKindAndDetail]:
        bucket = self._gcs_client().bucket(self._name)
        with self._translated_errors("ask for the settings of"):
            bucket.reload(timeout=request_timeouts_s(self._contact), retry=None)
        soft_s = bucket.soft_delete_policy.retention_duration_seconds
        found = [
            ("versioning", "keeps versions: a deleted object stays as a noncurrent version, and is paid for", bucket.versioning_enabled),
            ("soft-delete", f"keeps deleted objects for {soft_s} seconds (soft delete), and they are paid for", soft_s),
            ("retention", f"has a retention policy of {bucket.retention_period} seconds", bucket.retention_period),
            ("holds", "puts an event-based hold on new objects", bucket.default_event_based_hold),
        ]
        return [(kind, detail) for kind, detail, is_set in found if is_set]

    def _upload_object(self, key: str, data: bytes, metadata: Mapping[str, str], **condition: int) -> ObjectInfo:
        with self._translated_errors("write", key):
            blob = self._blob_handle(key, metadata)
            self._meter.record_bytes_written(len(data))
            kind = "application/octet-stream"
            blob.upload_from_string(
                data, content_type=kind, checksum="crc32c", timeout=request_timeouts_s(self._contact), retry=None, **condition
            )
        return self._object_info(blob)

    def _object_info(self, blob: GcsLibraryBlob) -> ObjectInfo:
        key = str(blob.name)[len(self._prefix) :]
        return ObjectInfo(key, int(blob.size), int(blob.updated.timestamp() * 1000), str(blob.generation), dict(blob.metadata or {}))

    def _blob_handle(self, key: str, metadata: Mapping[str, str] | None = None) -> GcsLibraryBlob:
        blob = self._gcs_client().bucket(self._name).blob(self._prefix + key)
        if metadata:
            blob.metadata = dict(metadata)
        return blob

    @contextmanager
    def _translated_errors(self, verb: str, key: str = "") -> Iterator[None]:
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError, TransportError as AuthTransportError
        from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
        from requests import RequestException
        from urllib3.exceptions import HTTPError

        failed_request = f"cannot {verb} {self.url}{f'/{key}' if key else ''}"
        is_object_request = bool(key) and verb != "write"
        try:
            yield
        except CompactorError:
            raise
        except GoogleAPICallError as error:
            self._contact.record_answer()
            raise _http_status_error(int(error.code or 0), error.response, failed_request, is_object_request=is_object_request) from error
        except InvalidResponse as error:
            self._contact.record_answer()
            raise _http_status_error(
                int(error.response.status_code), error.response, failed_request, is_object_request=is_object_request
            ) from error
        except DataCorruption as error:
            raise Unavailable(f"{failed_request}: it arrived damaged", hint="Try again") from error
        except AuthTransportError as error:
            raise connection_error(error, failed_request, _HINTS, answered_before=self._contact.answered) from error
        except GoogleAuthError as error:
            raise Refused(f"{failed_request}: the credentials are refused or missing ({error})", hint=_HINTS.credentials) from error
        except (RequestException, HTTPError, OSError, EOFError) as error:  # HTTPError: a raw body that broke off
            raise connection_error(error, failed_request, _HINTS, answered_before=self._contact.answered) from error

    def _gcs_client(self) -> GcsLibraryClient:
        with self._lock:
            if self._made is None:
                self._session, self._made = _connect(self._settings, self._meter)
            return self._made


def _connect(settings: GcsSettings, meter: RequestMeter) -> tuple[StoreHttpSession, GcsLibraryClient]:
    """Raises UsageError if the credentials file cannot be used."""
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.transport.requests import AuthorizedSession
    from google.cloud.storage import Client
    from requests.adapters import HTTPAdapter

    class RequestCountingSession(AuthorizedSession):  # type: ignore[misc]
        def __init__(self, credentials: Any) -> None:
            super().__init__(credentials)
            self._latest = threading.local()

        @property
        def answer(self) -> StoreHttpResponse:
            return self._latest.answer

        def request(self, method: str, url: str, *args: Any, **kwargs: Any) -> StoreHttpResponse:
            meter.record_request(request_kind_for_metering(method, url))
            self._latest.answer = super().request(method, url, *args, **kwargs)
            return self._latest.answer

    scopes = ["https://www.googleapis.com/auth/devstorage.read_write"]
    if settings.credentials_file:
        try:
            credentials, project = google.auth.load_credentials_from_file(settings.credentials_file, scopes=scopes)
        except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
            raise UsageError(f"[gcs] credentials_file cannot be used: {error}", hint=_HINTS.credentials) from error
    elif settings.endpoint_url.startswith("http:"):
        credentials, project = AnonymousCredentials(), None  # credentials are not sent without TLS
    else:
        credentials, project = google.auth.default(scopes=scopes)
    session = RequestCountingSession(credentials)
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=_POOL))
    options = {"api_endpoint": settings.endpoint_url} if settings.endpoint_url else None
    client = Client(project=project or "unused", credentials=credentials, _http=session, client_options=options)
    # For its traces the library asks for the bucket after each 404, from a thread of its own: most requests of a round would be these.
    client._bucket_metadata_cache = None
    return session, client


def _http_status_error(status: int, response: StoreHttpResponse, failed_request: str, *, is_object_request: bool) -> CompactorError:
    answer = _message_of_error_answer(response, status)
    message = f"{failed_request}: {answer}"
    if status == HTTPStatus.BAD_REQUEST and _DAMAGED.search(answer):
        return Unavailable(f"{message}: it was damaged on its way", hint="Try again")
    if status == HTTPStatus.GONE:
        return Unavailable(f"{message}: the upload was given up by the store", hint="Try again")
    if status == HTTPStatus.FORBIDDEN and _KEPT.search(answer):
        return Refused(message, hint="Use a bucket without holds and retention policies")
    if status == HTTPStatus.FORBIDDEN and "billing" in answer:
        return Refused(message, hint="Enable billing for the project of the bucket")
    return http_status_error(status, message, _HINTS, is_object_request=is_object_request)


def _message_of_error_answer(response: StoreHttpResponse, status: int) -> str:
    try:
        return f"the store answered {status} ({response.json()['error']['message'].rstrip('.')})"
    except (AttributeError, KeyError, TypeError, ValueError):
        return f"the store answered {status}"


def request_kind_for_metering(method: str, url: str) -> str:
    if method == "GET":
        return "get" if "alt=media" in url else "list" if re.search(r"/o(\?|$)", url) else "head"
    return "delete" if method == "DELETE" else "put"
