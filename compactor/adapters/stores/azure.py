"""A prefix of a container of Azure Blob Storage as an object store (``az://account/container/prefix``).

*Create-if-absent* is ``If-None-Match: *`` of Put Blob and of Put Block List. The version of an object is its ETag.

*Large objects* are staged as blocks and become visible by Put Block List. Uncommitted blocks belong to the blob's name, so each attempt has
block ids of its own. Any Put Block List drops all other blocks of the name: "InvalidBlockList" means that another attempt was faster, or
that the answer to an earlier one was lost.

*Copies* of ranges are Put Block From URL. The source is read with a signature for one hour, or with the caller's own token. An account's
firewall may refuse that; the first refusal ends the copying of this process.
"""

from __future__ import annotations

import base64
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

from compactor.adapters.stores.cloud import (
    CloudStore,
    ErrorHints,
    ObjectRangeContent,
    PartUploader,
    RequestRunnerWithRetries,
    StoreHttpRequest,
    StoreHttpResponse,
    connection_error,
    http_status_error,
    request_timeouts_s,
)
from compactor.adapters.stores.s3_requests import MIN_PART_BYTES, UploadPart, upload_part_length_bytes
from compactor.config.sections import AzureSettings
from compactor.errors import AlreadyExists, CannotCopy, CompactorError, Refused, Unavailable, UsageError
from compactor.model.finding import Finding
from compactor.storage.checks import FindingKindAndDetail, read_file_range, unknown_deletion_settings
from compactor.storage.factory import PreconditionFailed
from compactor.storage.keys import normalize_metadata_names
from compactor.storage.port import CopyLimits, ObjectInfo, ObjectRangeToCopy, ObjectStore
from compactor.storage.schemes import bucket_and_prefix
from compactor.storage.wrappers import FirstAnswerTracker, RequestMeter, StoreOptions

BlobServiceClientOfAzure = Any
"""``azure.storage.blob.BlobServiceClient``. The library is imported on first use and has no types."""
ContainerClientOfAzure = Any
"""``azure.storage.blob.ContainerClient``."""
BlobClientOfAzure = Any
"""``azure.storage.blob.BlobClient``."""
T = TypeVar("T")

_ROLE: Final = "Grant the role Storage Blob Data Contributor on the container, or a SAS with the permissions racwdl; then run config check"
_HINTS: Final = ErrorHints(
    credentials="Check [azure] credentials_file, AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN"
    " or the managed identity of this machine, and its clock",
    permission=_ROLE,
    bucket="Create the container, or check [tier] url and [azure] endpoint_url",
    endpoint="Check the account in [tier] url, [azure] endpoint_url, the network and the DNS",
)
_COPIES: Final = CopyLimits(min_run_bytes=MIN_PART_BYTES, max_bytes=100 << 20)
_ONE_REQUEST_BYTES: Final = 4000 << 20
"""Largest body of one request. The client library splits larger ones by itself, which is never wanted here."""
_POOL: Final = 64
_SAS_HOURS: Final = 1
_SCOPE: Final = "https://storage.azure.com/.default"
_ACTIONS: Final = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
_PERMISSIONS: Final = {
    "write": f"{_ACTIONS}/write, SAS permission c",
    "overwrite": f"{_ACTIONS}/write, SAS permission w",
    "read": f"{_ACTIONS}/read, SAS permission r",
    "list": f"{_ACTIONS}/read, SAS permission l",
    "delete": f"{_ACTIONS}/delete, SAS permission d",
}
_TAKEN: Final = ("BlobAlreadyExists", "UnauthorizedBlobOverwrite")


def open_store_at(url: str, options: StoreOptions) -> ObjectStore:
    place, prefix = bucket_and_prefix(url)
    account, _, container = place.partition("/")
    return CloudStore(AzureClient(account, container, prefix, options.settings.azure, options.meter, options.contact), options)


@dataclass(frozen=True)
class AccountCredentials:
    """Address of a blob service, and one of: its key, a shared access signature (without question mark), a credential of azure-identity."""

    endpoint: str
    key: str = ""
    sas: str = ""
    token: Any = None


class AzureClient:
    """Requests to the blobs below one prefix of a container."""

    def __init__(
        self, account: str, container: str, prefix: str, settings: AzureSettings, meter: RequestMeter, contact: FirstAnswerTracker
    ) -> None:
        self._account = account
        self._name = container
        self._prefix = prefix
        self._settings = settings
        self._meter = meter
        self._contact = contact
        self._lock = threading.Lock()
        self._latest = threading.local()
        self._access = AccountCredentials("")
        self._made: Any = None
        self._can_copy = True

    @property
    def server_copy_limits(self) -> CopyLimits | None:
        return _COPIES if self._can_copy else None

    @property
    def url(self) -> str:
        return f"az://{self._account}/{self._name}/{self._prefix}".rstrip("/")

    @property
    def endpoint_bucket_and_prefix(self) -> tuple[str, str, str]:
        return self._settings.endpoint_url, f"{self._account}/{self._name}", self._prefix

    def read(self, key: str, start: int, length: int | None, version: str = "") -> ObjectRangeContent:
        whole = start == 0 and length is None
        with self._translated_errors("read", key):
            found = self._blob_client(key).download_blob(
                offset=None if whole else start, length=length, max_concurrency=1, decompress=False, **_etag_match_arguments(version)
            )
            data = bytes(found.readall())
        size = int(found.properties.content_range.rpartition("/")[2]) if found.size else start
        return ObjectRangeContent(data, size, str(found.properties.etag))

    def head(self, key: str) -> ObjectInfo:
        with self._translated_errors("read", key):
            found = self._blob_client(key).get_blob_properties()
        return _object_info(key, found)

    def create(self, key: str, data: bytes, metadata: Mapping[str, str], retried: RequestRunnerWithRetries) -> ObjectInfo:
        return retried(lambda: self._upload_blob(key, data, metadata, overwrite=False))

    def put(self, key: str, data: bytes) -> ObjectInfo:
        return self._upload_blob(key, data, {}, overwrite=True)

    def create_in_parts(self, key: str, parts: Sequence[UploadPart], metadata: Mapping[str, str], upload: PartUploader) -> ObjectInfo:
        """Create an object of staged blocks. Raises AlreadyExists if the key is taken, PreconditionFailed if it is or the staged blocks are
        gone, CannotCopy if the server refuses to copy.
        """
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        blob = self._blob_client(key)
        attempt = uuid.uuid4().hex
        ids = [f"{attempt}{number:05}" for number in range(len(parts))]

        def stage_block(block_id: str, part: UploadPart) -> None:
            if isinstance(part, ObjectRangeToCopy):
                try:
                    with self._translated_errors("copy", part.key):
                        source = self._copy_source_arguments(part.key)
                        blob.stage_block_from_url(block_id, source_offset=part.start, source_length=part.length, **source)
                except Refused as error:
                    self._can_copy = False
                    raise CannotCopy(error.message) from error
                return
            data = b"".join(read_file_range(piece) for piece in part)
            self._meter.record_bytes_written(len(data))
            with self._translated_errors("write", key):
                blob.stage_block(block_id, data, length=len(data), validate_content=True)

        def commit_blocks(attempt: int) -> Any:
            with self._translated_errors("write", key):
                blocks = [BlobBlock(block_id=block) for block in ids]
                return blob.commit_block_list(blocks, metadata=dict(metadata), match_condition=MatchConditions.IfMissing)

        upload.run_tasks_with_retries([partial(stage_block, block, part) for block, part in zip(ids, parts, strict=True)])
        upload.confirm()
        made = upload.retrier.call_with_retries(commit_blocks)
        return ObjectInfo(
            key, sum(upload_part_length_bytes(part) for part in parts), _epoch_ms(made["last_modified"]), str(made["etag"]), dict(metadata)
        )

    def list_page(self, prefix: str, after: str, token: str, size: int) -> tuple[Sequence[ObjectInfo], str]:
        with self._translated_errors("list"):
            listing = self._container_client().list_blobs(name_starts_with=self._prefix + prefix, results_per_page=size)
            pages = listing.by_page(token or None)
            found = [_object_info(blob.name[len(self._prefix) :], blob) for blob in next(pages, ())]
        return found, pages.continuation_token or ""

    def delete(self, key: str, version: str = "") -> None:
        with self._translated_errors("delete", key):
            self._blob_client(key).delete_blob(**_etag_match_arguments(version))

    def clock_ms(self) -> int:
        self.list_page("", "", "", 1)
        return int(parsedate_to_datetime(self._latest.answer.headers["Date"]).timestamp() * 1000)

    def does_delete_free_space(self) -> bool | None:
        reasons, unknown = self._retention_reasons()
        return False if reasons else None if unknown else True

    def inspect_store_settings(self) -> list[Finding]:
        reasons, unknown = self._retention_reasons()
        hint = "Expect no saving before they are gone, or use a container without"
        findings = [Finding("warning", kind, "", f"{self.url} {detail}", hint) for kind, detail in reasons]
        if unknown:
            findings.append(unknown_deletion_settings(self.url, unknown, f"{_ACTIONS.rpartition('/containers')[0]}/read"))
        return findings

    def required_permission_name(self, verb: str) -> str:
        return _PERMISSIONS[verb]

    def _retention_reasons(self) -> tuple[list[FindingKindAndDetail], str]:
        """Settings because of which a delete frees no space, and why others are unknown."""
        unknown = []

        def ask(question: Callable[[], T]) -> T | None:
            try:
                with self._translated_errors("ask for the settings of"):
                    return question()
            except Refused as refusal:
                unknown.append(refusal.message)
                return None

        days, versions = ask(self._soft_delete_days), self._keeps_versions()
        policy, hold = ask(self._policy_and_hold) or (False, False)
        if versions is None:
            unknown.append("there is no object yet, which would show whether the account keeps versions")
        found = [
            ("versioning", "keeps versions: a deleted object stays as an earlier version, and is paid for", versions),
            ("soft-delete", f"keeps deleted objects for {days} days (soft delete), and they are paid for", days),
            ("retention", "has an immutability policy: objects cannot be deleted before it ends", policy),
            ("holds", "has a legal hold: objects cannot be deleted", hold),
        ]
        return [(kind, detail) for kind, detail, is_set in found if is_set], "; ".join(unknown)

    def _soft_delete_days(self) -> int:
        policy = self._service_client().get_service_properties()["delete_retention_policy"]
        return int(policy.days or 1) if policy.enabled else 0

    def _policy_and_hold(self) -> tuple[bool, bool]:
        found = self._container_client().get_container_properties()
        return bool(found.has_immutability_policy), bool(found.has_legal_hold)

    def _keeps_versions(self) -> bool | None:
        with self._translated_errors("list"):
            first = next(iter(self._container_client().list_blobs(name_starts_with=self._prefix, results_per_page=1)), None)
            return None if first is None else bool(self._container_client().get_blob_client(first.name).get_blob_properties().version_id)

    def _upload_blob(self, key: str, data: bytes, metadata: Mapping[str, str], *, overwrite: bool) -> ObjectInfo:
        with self._translated_errors("write", key):
            self._meter.record_bytes_written(len(data))
            made = self._blob_client(key).upload_blob(
                data, overwrite=overwrite, metadata=dict(metadata), max_concurrency=1, validate_content=True, length=len(data)
            )
        return ObjectInfo(key, len(data), _epoch_ms(made["last_modified"]), str(made["etag"]), dict(metadata))

    def _copy_source_arguments(self, key: str) -> dict[str, str]:
        from azure.storage.blob import BlobSasPermissions, generate_blob_sas

        source = self._blob_client(key)
        if self._access.token is not None:
            return {"source_url": source.url, "source_authorization": f"Bearer {self._access.token.get_token(_SCOPE).token}"}
        if self._access.sas:
            return {"source_url": f"{source.url}?{self._access.sas}"}
        signature = generate_blob_sas(
            self._account,
            self._name,
            self._prefix + key,
            account_key=self._access.key,
            permission=BlobSasPermissions(read=True),
            expiry=datetime.now(UTC) + timedelta(hours=_SAS_HOURS),
        )
        return {"source_url": f"{source.url}?{signature}"}

    def _blob_client(self, key: str) -> BlobClientOfAzure:
        return self._container_client().get_blob_client(self._prefix + key)

    @contextmanager
    def _translated_errors(self, verb: str, key: str = "") -> Iterator[None]:
        from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError
        from urllib3.exceptions import HTTPError

        failed_request = f"cannot {verb} {self.url}{f'/{key}' if key else ''}"
        try:
            yield
        except CompactorError:
            raise
        except HttpResponseError as error:
            if isinstance(error, ClientAuthenticationError) and error.response is None:  # no credential was found, or it was refused
                raise Refused(f"{failed_request}: {_first_line_of_message(error)}", hint=_HINTS.credentials) from error
            if (error.status_code or 0) < HTTPStatus.BAD_REQUEST:  # the body broke off
                raise connection_error(error, failed_request, _HINTS, answered_before=True) from error
            self._contact.record_answer()
            raise _http_status_error(error, failed_request, key) from error
        except (AzureError, HTTPError, OSError, EOFError, ValueError) as error:  # ValueError: an answer lacks its headers
            raise connection_error(error, failed_request, _HINTS, answered_before=self._contact.answered) from error

    def _container_client(self) -> ContainerClientOfAzure:
        return self._service_client().get_container_client(self._name)

    def _service_client(self) -> BlobServiceClientOfAzure:
        with self._lock:
            if self._made is None:
                self._access = choose_credentials(self._account, self._settings, os.environ)
                self._made = _create_service_client(self._access, self._account, self._send_request_and_count)
            return self._made

    def _send_request_and_count(self, request: StoreHttpRequest, send: Callable[..., StoreHttpResponse]) -> StoreHttpResponse:
        self._meter.record_request(request_kind_for_metering(request.method, request.url, is_copy="x-ms-copy-source" in request.headers))
        connect_s, read_s = request_timeouts_s(self._contact)
        answer = send(connection_timeout=connect_s, read_timeout=read_s)
        if answer.status_code >= HTTPStatus.BAD_REQUEST or answer.headers.get("Content-Length") == "0":
            answer.body()  # the client library leaves such bodies of downloads unread, and with them the connection
        self._latest.answer = answer
        return answer


def choose_credentials(account: str, settings: AzureSettings, environment: Mapping[str, str]) -> AccountCredentials:
    """First credentials that are set: [azure] credentials_file, environment variables of Azure's tools, azure-identity. Raises UsageError
    if they cannot be used.
    """
    endpoint = settings.endpoint_url or f"https://{account}.blob.core.windows.net"
    if settings.credentials_file:
        try:
            text = Path(settings.credentials_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"[azure] credentials_file cannot be used: {error}", hint=_HINTS.credentials) from error
        return _credentials_from_text(text, account, settings, endpoint, "[azure] credentials_file")
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        if environment.get(name):
            return _credentials_from_text(environment[name], account, settings, endpoint, name)

    from azure.identity import DefaultAzureCredential

    return AccountCredentials(endpoint, token=DefaultAzureCredential(process_timeout=5))


def _credentials_from_text(text: str, account: str, settings: AzureSettings, endpoint: str, origin: str) -> AccountCredentials:
    fields = {name.strip().lower(): value for name, sign, value in (part.partition("=") for part in text.split(";")) if sign}
    if "accountkey" in fields or "sharedaccesssignature" in fields:
        named = fields.get("accountname", account)
        if named != account:
            hint = "Write the account's name in [tier] url, or use its own connection string"
            raise UsageError(f"{origin} is of the account {named!r}, and the tier lies in {account!r}", hint=hint)
        suffix = fields.get("endpointsuffix", "core.windows.net")
        found = fields.get("blobendpoint", f"{fields.get('defaultendpointsprotocol', 'https')}://{account}.blob.{suffix}").rstrip("/")
        signature = fields.get("sharedaccesssignature", "").lstrip("?")
        return AccountCredentials(settings.endpoint_url or found, key="" if signature else fields["accountkey"], sas=signature)
    if "sig=" in text:
        return AccountCredentials(endpoint, sas=text.lstrip("?"))
    try:
        is_key = bool(base64.b64decode(text, validate=True))
    except ValueError:
        is_key = False
    if not is_key:
        hint = "Write a connection string, an account key or a shared access signature, nothing else"
        raise UsageError(f"{origin} holds no credentials of Azure", hint=hint)
    return AccountCredentials(endpoint, key=text)


def _create_service_client(
    access: AccountCredentials,
    account: str,
    observe_request: Callable[[StoreHttpRequest, Callable[..., StoreHttpResponse]], StoreHttpResponse],
) -> BlobServiceClientOfAzure:
    import requests
    from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
    from azure.core.pipeline.transport import RequestsTransport
    from azure.storage.blob import BlobServiceClient

    class ObservedTransport(RequestsTransport):  # type: ignore[misc]
        def send(self, request: StoreHttpRequest, **kwargs: Any) -> StoreHttpResponse:
            return observe_request(request, lambda **timeouts: super(ObservedTransport, self).send(request, **{**kwargs, **timeouts}))

    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=_POOL))
    credential = access.token
    if access.key:
        credential = AzureNamedKeyCredential(account, access.key)
    elif access.sas:
        credential = AzureSasCredential(access.sas)
    return BlobServiceClient(
        access.endpoint,
        credential=credential,
        transport=ObservedTransport(session=session, session_owner=False),
        retry_total=0,
        max_single_put_size=_ONE_REQUEST_BYTES,
        max_single_get_size=_ONE_REQUEST_BYTES,
        max_chunk_get_size=_ONE_REQUEST_BYTES,
    )


_NETWORK = (": access denied", f"Check the network rules of the account. {_HINTS.credentials}. {_ROLE}")
_ARCHIVED = (": it is in an offline access tier", "Move it to hot, cool or cold, and exclude it from the lifecycle rule that archives it")
_LEASED = (": somebody holds a lease on it", "Break the lease of the blob; this program takes none")
_REFUSALS: Final = {
    "AuthenticationFailed": (": the credentials are refused", _HINTS.credentials),
    "KeyBasedAuthenticationNotPermitted": (
        ": the account allows no keys",
        "Use a managed or workload identity, or allow keys in the account",
    ),
    "AuthorizationFailure": _NETWORK,
    "AuthorizationSourceIPMismatch": _NETWORK,
    "AccountIsDisabled": ("", "Enable the account, or check [tier] url"),
    "BlobArchived": _ARCHIVED,
    "BlobBeingRehydrated": _ARCHIVED,
    "LeaseIdMissing": _LEASED,
    "LeaseIdMismatchWithBlobOperation": _LEASED,
    "SnapshotsPresent": (": it has snapshots", "Delete the snapshots of the blob; this program makes none"),
}
"""Reason and hint of the error codes that somebody has to act on."""


def _http_status_error(error: Any, failed_request: str, key: str) -> CompactorError:
    code = getattr(error, "error_code", None) or (error.response.headers.get("x-ms-error-code", "") if error.response else "") or ""
    code = str(getattr(code, "value", code))
    status = int(error.status_code)
    message = f"{failed_request}: the store answered {status}" + (f" ({code})" if code else "")
    if code in _TAKEN:
        return AlreadyExists(message)
    if code in ("InvalidBlockList", "InvalidBlobOrBlock"):
        return PreconditionFailed(message)
    if code in _REFUSALS:
        reason, hint = _REFUSALS[code]
        return Refused(message + reason, hint=hint)
    if code.startswith("BlobImmutable"):
        return Refused(f"{message}: a hold or a policy keeps it", hint="Use a container without holds and immutability policies")
    if code == "ContainerBeingDeleted":
        return Unavailable(message, hint=_HINTS.bucket)
    if code == "Md5Mismatch":
        return Unavailable(f"{message}: it was damaged on its way", hint="Try again")
    return http_status_error(status, message, _HINTS, is_object_request=bool(key) and not code.startswith(("Container", "Resource")))


def _first_line_of_message(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _etag_match_arguments(version: str) -> dict[str, Any]:
    from azure.core import MatchConditions

    return {"etag": version, "match_condition": MatchConditions.IfNotModified} if version else {}


def _object_info(key: str, properties: Any) -> ObjectInfo:
    metadata = normalize_metadata_names(properties.metadata or {})
    return ObjectInfo(key, int(properties.size), _epoch_ms(properties.last_modified), _quoted_etag(str(properties.etag)), metadata)


def _quoted_etag(etag: str) -> str:
    # Return an ETag as headers have it; listings give ETags without quotation marks.
    return etag if etag.startswith('"') else f'"{etag}"'


def _epoch_ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def request_kind_for_metering(method: str, url: str, *, is_copy: bool = False) -> str:
    if method == "GET":
        return "list" if "comp=list" in url else "head" if "restype=" in url else "get"
    if method == "PUT":
        return "copy" if is_copy else "multipart" if "comp=blocklist" in url else "put"
    return {"HEAD": "head", "DELETE": "delete"}.get(method, "put")
