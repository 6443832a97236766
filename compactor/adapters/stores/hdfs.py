"""A directory of HDFS as an object store (``hdfs://namenode/path``), over the namenode's WebHDFS.

*Create-if-absent*: a file is staged below the reserved folder and renamed to its key with ``renameoptions=NONE``, which the namenode
refuses where the target exists.

*Modification times*: a rename keeps the file's time, and grace must never count from staging. Therefore a staged file is dated
``UNDATED_MS`` into the future, and gets the namenode's time after the rename. A file that a crash has left undated is dated when it is
found, which is later and therefore safe.

*Versions* are inode numbers, which HDFS never uses twice; bytes are read by them.

*Kerberos*: the namenode answers the first request with 401 and gets a ticket by SPNEGO; then its cookie is enough until that ends. The
datanodes get a delegation token with each redirect.
"""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from typing_extensions import override

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
from compactor.config.sections import HdfsSettings
from compactor.errors import AlreadyExists, CompactorError, NotFound, Refused, Unavailable
from compactor.extras import require_pip_extra
from compactor.model.finding import Finding
from compactor.storage.checks import read_file_range
from compactor.storage.factory import PreconditionFailed, RangeNotSatisfiable
from compactor.storage.keys import RESERVED, check_object_key_prefix, object_key_component_problem
from compactor.storage.port import FileRange, ObjectInfo, ObjectStore, UnfinishedUpload
from compactor.storage.schemes import bucket_and_prefix
from compactor.storage.wrappers import FirstAnswerTracker, RequestMeter, StoreOptions

T = TypeVar("T")

UNDATED_MS: Final = 1 << 43
"""Added to the modification time of a staged file: 278 years in milliseconds. What is left after the subtraction is when it was staged."""
_STAGING: Final = f"{RESERVED}/staged/"
_ATTRIBUTE: Final = "user.tiered_compactor"
_POOL: Final = 64
_PIECE_BYTES: Final = 8 << 20
_HINTS: Final = ErrorHints(
    credentials="Check [hdfs] user; set [hdfs] kerberos = true if the cluster wants Kerberos",
    permission="Grant the user of [hdfs] user the rights rwx on the directory and x on those above it, then run config check",
    bucket="Check [tier] url",
    endpoint="Check the host in [tier] url, [hdfs] webhdfs_url, the network and the DNS",
)
_KERBEROS_HINT: Final = (
    "Check KRB5_CLIENT_KTNAME or the ticket cache (klist), [hdfs] user if it names a principal, /etc/krb5.conf, this machine's clock, and"
    " that the host in [hdfs] webhdfs_url is the one of the namenode's principal HTTP/HOST"
)
_SPNEGO: Final = "1.3.6.1.5.5.2"
_DATANODE_HINT: Final = "Try again; this machine must reach the datanodes under the names that the namenode gives"
_RPC_ANSWER: Final = "org.apache.hadoop.ipc.RPC"
"""Part of the answer of an RPC port to requests other than GET."""
_BUSY_HINT: Final = "Try again; if it stays, see whether the datanodes are alive and have space"
_PASSING: Final = {
    "StandbyException": "Let [hdfs] webhdfs_url name the active namenode. A standby is asked again until it is active",
    "SafeModeException": "It goes on when the namenode has left safe mode (hdfs dfsadmin -safemode get)",
    "RetriableException": _BUSY_HINT,
    "IOException": _BUSY_HINT,
    "LeaseExpiredException": _BUSY_HINT,
}
"""What to do, by the exception that may pass by itself."""
_QUOTAS: Final = ("NSQuotaExceededException", "DSQuotaExceededException", "QuotaByStorageTypeExceededException")


def open_store_at(url: str, options: StoreOptions) -> ObjectStore:
    namenode, prefix = bucket_and_prefix(url)
    if options.settings.hdfs.kerberos:
        require_pip_extra("kerberos", "[hdfs] kerberos")
    return HdfsStore(HdfsClient(namenode, prefix, options.settings.hdfs, options.meter, options.contact), options)


class HdfsStore(CloudStore):
    """CloudStore of an HDFS directory. Its unfinished uploads are files not yet renamed to their keys."""

    _client: HdfsClient

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_object_key_prefix(prefix)
        folder, slash, _ = prefix.rpartition("/")
        return self._list_tree(folder + slash, prefix, after)

    @override
    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Yield nothing unless ``prefix`` is empty: a staged file's name does not show its key."""
        check_object_key_prefix(prefix)
        for entry in [] if prefix else self._request_with_retries(lambda: self._client.list_folder(_STAGING)):
            yield UnfinishedUpload(entry.name, entry.name.removeprefix(_STAGING), entry.modified_ms % UNDATED_MS)

    @override
    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        for upload in uploads:
            with suppress(NotFound):
                self._request_with_retries(lambda name=_STAGING + upload.id: self._client.delete(name))  # type: ignore[misc]

    def _list_tree(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        # Yield objects in UTF-8 byte order of their keys; to get it, a directory is sorted by its name with a slash.
        for entry in sorted(self._request_with_retries(lambda: self._client.list_folder(folder)), key=lambda entry: entry.name.encode()):
            name = entry.name
            if object_key_component_problem(name.removeprefix(folder).rstrip("/")):
                continue
            is_wanted = name.startswith(prefix) and name.encode() > after.encode()
            if name.endswith("/"):
                if is_wanted or prefix.startswith(name) or (name.startswith(prefix) and after.startswith(name)):
                    yield from self._list_tree(name, prefix, after)
            elif is_wanted:
                with suppress(NotFound):
                    yield self._request_with_retries(lambda entry=entry: self._client.object_info(entry, {}))  # type: ignore[misc]


@dataclass(frozen=True)
class FileStatus:
    """Properties of a file or, if ``name`` ends with a slash, of a directory. modified_ms: ``UNDATED_MS`` (278 years) too late until
    publication.
    """

    name: str
    inode: int
    size: int
    modified_ms: int


class HdfsClient:
    """Requests to the files below one directory of HDFS."""

    def __init__(self, namenode: str, prefix: str, settings: HdfsSettings, meter: RequestMeter, contact: FirstAnswerTracker) -> None:
        self._namenode = namenode
        self._prefix = prefix
        self._user = settings.user
        self._kerberos = settings.kerberos
        self._endpoint = settings.webhdfs_url.rstrip("/") or f"http://{namenode.partition(':')[0]}:9870"
        self._meter = meter
        self._contact = contact
        self._lock = threading.Lock()
        self._made: Any = None

    @property
    def server_copy_limits(self) -> None:
        return None

    @property
    def url(self) -> str:
        return f"hdfs://{self._namenode}/{self._prefix}".rstrip("/")

    @property
    def endpoint_bucket_and_prefix(self) -> tuple[str, str, str]:
        return self._endpoint, self._namenode, self._prefix

    def read(self, key: str, start: int, length: int | None, version: str = "") -> ObjectRangeContent:
        if version and length is not None:
            inode, size = int(version), start + length
        else:
            status = self._fetch_file_status(key)
            inode, size = status.inode, status.size
        if start >= size:
            raise RangeNotSatisfiable(f"cannot read {self.url}/{key}: it has {size} bytes")
        wanted = size - start if length is None else min(length, size - start)
        try:
            answer = self._request_with_redirect(
                "GET", _inode_path(inode), "OPEN", failed_request=self._describe_failed_request("read", key), offset=start, length=wanted
            )
        except NotFound as error:
            changed = f"{self.url}/{key} changed while it was read"
            raise (PreconditionFailed(changed) if version else Unavailable(changed, hint="Try again")) from error
        return ObjectRangeContent(answer.content, size, str(inode))

    def head(self, key: str) -> ObjectInfo:
        status = self._fetch_file_status(key)
        failed_request = self._describe_failed_request("read", key)
        attributes = _json_field(
            self._request_with_redirect("GET", _inode_path(status.inode), "GETXATTRS", failed_request=failed_request, encoding="BASE64"),
            failed_request,
            "XAttrs",
        )
        texts = [base64.b64decode(each["value"].removeprefix("0s")) for each in attributes if each["name"] == _ATTRIBUTE]
        return self.object_info(status, json.loads(texts[0]) if texts else {})

    def create(self, key: str, data: bytes, metadata: Mapping[str, str], retried: RequestRunnerWithRetries) -> ObjectInfo:
        return self._create_by_rename(key, _RequestBody([data], len(data)), metadata, retried)

    def create_in_parts(self, key: str, parts: Sequence[UploadPart], metadata: Mapping[str, str], upload: PartUploader) -> ObjectInfo:
        """Create an object from ranges of files, sent as one stream."""
        ranges = [piece for part in parts if isinstance(part, tuple) for piece in part]
        body = _RequestBody(_FileChunks(ranges), sum(piece.length for piece in ranges))

        def retried(request: Callable[[], T]) -> T:
            return upload.retrier.call_with_retries(lambda _: request())

        return self._create_by_rename(key, body, metadata, retried)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Modification time is that of staging, a moment before publication."""
        staged = self._write_staged_file(_RequestBody([data], len(data)), key)
        self._rename_staged_file(staged.name, key, "OVERWRITE")
        return ObjectInfo(key, staged.size, staged.modified_ms, str(staged.inode))

    def list_page(self, prefix: str, after: str, token: str, size: int) -> tuple[Sequence[ObjectInfo], str]:
        return [self.object_info(entry, {}) for entry in self.list_folder("") if not entry.name.endswith("/")], ""

    def delete(self, key: str, version: str = "") -> None:
        failed_request = self._describe_failed_request("delete", key)
        path = _inode_path(int(version)) if version else self._url_path(key)
        if not _json_field(self._request_with_redirect("DELETE", path, "DELETE", failed_request=failed_request), failed_request, "boolean"):
            raise NotFound(f"{failed_request}: no such object")

    def clock_ms(self) -> int:
        return self._namenode_clock_ms("/")

    def does_delete_free_space(self) -> bool | None:
        return not self._directories_with_snapshots()

    def inspect_store_settings(self) -> list[Finding]:
        hint = "Expect no saving before those snapshots are deleted, or use a directory without"
        detail = f"of {self.url} has snapshots, which keep deleted files"
        return [Finding("warning", "snapshots", "", f"the directory {path} {detail}", hint) for path in self._directories_with_snapshots()]

    def required_permission_name(self, verb: str) -> str:
        written = "w and x on the directory, and r on the file, which is read back"
        return {"read": "r on the file", "list": "r and x on the directory", "write": written}.get(verb, "w and x on the directory")

    def list_folder(self, folder: str) -> list[FileStatus]:
        failed_request = self._describe_failed_request("list", folder.rstrip("/"))
        try:
            found = self._request_folder_entry_statuses(self._url_path(folder), failed_request)
        except NotFound:
            return []
        return [
            _parse_file_status(f"{folder}{each['pathSuffix']}{'/' if each['type'] == 'DIRECTORY' else ''}", each)
            for each in found
            if each["pathSuffix"]  # a file was asked for as if it were a folder
        ]

    def _request_folder_entry_statuses(self, path: str, failed_request: str) -> list[dict[str, Any]]:
        return list(
            _json_field(
                self._request_with_redirect("GET", path, "LISTSTATUS", failed_request=failed_request), failed_request, "FileStatuses"
            )["FileStatus"]
        )

    def object_info(self, status: FileStatus, metadata: Mapping[str, str]) -> ObjectInfo:
        """Properties of an object. If its creator died before dating it, it is dated now; without permission its time stays in the far
        future, so that no deadline has passed. Raises NotFound if the file is gone.
        """
        modified_ms = status.modified_ms
        if modified_ms >= UNDATED_MS:
            with suppress(Refused):
                modified_ms = self._set_publication_time(status.name, status.inode)
        return ObjectInfo(status.name, status.size, modified_ms, str(status.inode), metadata)

    def _create_by_rename(self, key: str, body: _RequestBody, metadata: Mapping[str, str], retried: RequestRunnerWithRetries) -> ObjectInfo:
        staged = retried(lambda: self._write_staged_file(body, key))
        failed_request = self._describe_failed_request("write", key)
        encoded = "0s" + base64.b64encode(json.dumps(dict(metadata)).encode()).decode()
        attribute: dict[str, Any] = {"xattr.name": _ATTRIBUTE, "xattr.value": encoded, "flag": "CREATE,REPLACE"}
        path = self._url_path(staged.name)
        try:
            retried(lambda: self._request_with_redirect("PUT", path, "SETXATTR", failed_request=failed_request, **attribute))
            retried(
                lambda: self._request_with_redirect(
                    "PUT", path, "SETTIMES", failed_request=failed_request, modificationtime=staged.modified_ms + UNDATED_MS
                )
            )
            retried(lambda: self._rename_staged_file(staged.name, key, "NONE"))
        except BaseException:
            self._delete_staged_file(staged.name)
            raise
        published_ms = retried(lambda: self._set_publication_time(key, staged.inode))
        return ObjectInfo(key, staged.size, published_ms, str(staged.inode), metadata)

    def _write_staged_file(self, body: _RequestBody, key: str) -> FileStatus:
        # Write and read back a new staged file, under another name at each attempt so that a delayed attempt cannot overwrite a later one.
        # Raises Unavailable if other bytes arrived.
        name = f"{_STAGING}{uuid.uuid4().hex}"
        failed_request = self._describe_failed_request("write", key)
        try:
            self._meter.record_bytes_written(len(body))
            self._request_with_redirect("PUT", self._url_path(name), "CREATE", failed_request=failed_request, body=body, overwrite="false")
            staged = self._fetch_file_status(name)
            self._require_staged_body(staged, body, failed_request)
        except BaseException:
            self._delete_staged_file(name)
            raise
        return staged

    def _require_staged_body(self, staged: FileStatus, body: _RequestBody, failed_request: str) -> None:
        # Read a staged file back: WebHDFS takes no checksum with an upload, and HDFS keeps checksums of what arrives.
        if staged.size != len(body):
            raise Unavailable(f"{failed_request}: {staged.size} bytes of {len(body)} arrived", hint="Try again")
        start = 0
        for chunk in filter(None, body):
            arrived = self._request_with_redirect(
                "GET", _inode_path(staged.inode), "OPEN", failed_request=failed_request, offset=start, length=len(chunk)
            ).content
            self._meter.record_bytes_read(len(arrived))
            if arrived != chunk:
                raise Unavailable(f"{failed_request}: other bytes arrived than were sent", hint="Try again")
            start += len(chunk)

    def _delete_staged_file(self, name: str) -> None:
        with suppress(CompactorError):
            self.delete(name)

    def _rename_staged_file(self, name: str, key: str, option: str) -> None:
        """Raises AlreadyExists if ``option`` is NONE and the key is taken, PreconditionFailed if the staged file is gone."""
        failed_request = self._describe_failed_request("write", key)
        destination = "/" + self._prefix + key

        def rename() -> StoreHttpResponse:
            return self._request_with_redirect(
                "PUT", self._url_path(name), "RENAME", failed_request=failed_request, destination=destination, renameoptions=option
            )

        try:
            answer = rename()
        except NotFound:
            parent = self._url_path(key).rpartition("/")[0] or "/"
            self._request_with_redirect("PUT", parent, "MKDIRS", failed_request=failed_request)
            try:
                answer = rename()
            except NotFound as error:
                raise PreconditionFailed(f"{failed_request}: its staged file is gone") from error
        if answer.content:  # HttpFS knows no options, and answers whether it has renamed
            if _json_field(answer, failed_request, "boolean"):
                self.delete(key)
            hint = "Two compactors would lead at once. Let [hdfs] webhdfs_url name the namenode itself, not HttpFS"
            raise Refused(f"{self.url} ignores conditional requests: its renames know no options", hint=hint)

    def _set_publication_time(self, key: str, inode: int) -> int:
        # Date a published file, never before its publication: the namenode's time is requested after the rename, and a second is added
        # because the namenode reports whole seconds.
        now_ms = self._namenode_clock_ms(_inode_path(inode)) + 1000
        self._request_with_redirect(
            "PUT", _inode_path(inode), "SETTIMES", failed_request=self._describe_failed_request("date", key), modificationtime=now_ms
        )
        return now_ms

    def _namenode_clock_ms(self, probe_path: str) -> int:
        failed_request = self._describe_failed_request("ask for the time of")
        answer = self._request_with_redirect("GET", probe_path, "GETFILESTATUS", failed_request=failed_request)
        date = answer.headers.get("Date", "").partition(" GMT")[0]  # Hadoop sends it twice
        try:
            return int(parsedate_to_datetime(f"{date} GMT").timestamp() * 1000)
        except ValueError as error:
            raise Unavailable(f"{failed_request}: the answer has no date") from error

    def _directories_with_snapshots(self) -> list[str]:
        parts = ["", *self._prefix.split("/")[:-1]]
        found = []
        for path in (quote("/".join(parts[:count])) for count in range(1, len(parts) + 1)):
            with suppress(NotFound):  # it does not exist yet, or takes no snapshots
                if self._request_folder_entry_statuses(f"{path}/.snapshot", self._describe_failed_request("ask for the snapshots of")):
                    found.append(path or "/")
        return found

    def _fetch_file_status(self, key: str) -> FileStatus:
        status = self._fetch_status_of_path(self._url_path(key), "read", key)
        if status.name.endswith("/"):
            raise NotFound(f"{self._describe_failed_request('read', key)}: it is a directory")
        return status

    def _fetch_status_of_path(self, path: str, verb: str, key: str) -> FileStatus:
        failed_request = self._describe_failed_request(verb, key)
        found = _json_field(
            self._request_with_redirect("GET", path, "GETFILESTATUS", failed_request=failed_request), failed_request, "FileStatus"
        )
        return _parse_file_status(key + ("/" if found["type"] == "DIRECTORY" else ""), found)

    def _url_path(self, key: str) -> str:
        return "/" + quote(self._prefix + key).rstrip("/")

    def _describe_failed_request(self, verb: str, key: str = "") -> str:
        return f"cannot {verb} {self.url}{f'/{key}' if key else ''}"

    def _request_with_redirect(
        self, method: str, path: str, operation: str, *, failed_request: str, body: _RequestBody | None = None, **parameters: object
    ) -> StoreHttpResponse:
        """Send a request to the namenode and, if it redirects, to the datanode with the body. path: percent-encoded."""
        named = {"op": operation, **({"user.name": self._user} if self._user and not self._kerberos else {}), **parameters}
        url = f"{self._endpoint}/webhdfs/v1{path}?{urlencode(named)}"
        try:
            answer = self._send_http_request(method, url, failed_request)
            if answer.status_code == HTTPStatus.UNAUTHORIZED:
                ticket = _kerberos_authorization_header(urlsplit(url).hostname or "", self._user, failed_request)
                answer = self._send_http_request(method, url, failed_request, ticket=ticket)
        except _connection_error_types() as error:
            if _RPC_ANSWER in str(error):
                raise _not_webhdfs_error(failed_request) from error
            raise connection_error(error, failed_request, _HINTS, answered_before=self._contact.answered) from error
        if answer.status_code == HTTPStatus.TEMPORARY_REDIRECT:
            try:
                answer = self._send_http_request(method, answer.headers.get("Location", ""), failed_request, body)
            except _connection_error_types() as error:
                raise Unavailable(f"{failed_request}: {error}".rstrip("."), hint=_DATANODE_HINT) from error
        return answer

    def _send_http_request(
        self, method: str, url: str, failed_request: str, body: _RequestBody | None = None, ticket: str = ""
    ) -> StoreHttpResponse:
        # Send one request. With Kerberos and an empty ``ticket``, an answer that demands a ticket is returned, too. Raises StoreError for
        # every other error answer.
        self._meter.record_request(request_kind_for_metering(method, url))
        headers = {"Content-Type": "application/octet-stream"} if method == "PUT" else {}
        headers |= {"Authorization": ticket} if ticket else {}
        timeouts = request_timeouts_s(self._contact)
        answer = self._http_session().request(method, url, data=body, headers=headers, timeout=timeouts, allow_redirects=False)
        self._contact.record_answer()
        demands_ticket = answer.status_code == HTTPStatus.UNAUTHORIZED and "Negotiate" in answer.headers.get("WWW-Authenticate", "")
        if answer.status_code >= HTTPStatus.BAD_REQUEST and not (demands_ticket and self._kerberos and not ticket):
            raise _http_status_error(answer, failed_request)
        return answer

    def _http_session(self) -> StoreHttpSession:
        import requests

        with self._lock:
            if self._made is None:
                self._made = requests.Session()
                for scheme in ("https://", "http://"):
                    self._made.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=_POOL))
            return self._made


def _kerberos_authorization_header(host: str, principal: str, failed_request: str) -> str:
    import gssapi

    try:
        owner = gssapi.Name(principal, gssapi.NameType.kerberos_principal) if principal else None
        credentials = gssapi.Credentials(name=owner, usage="initiate")
        server = gssapi.Name(f"HTTP@{host}", gssapi.NameType.hostbased_service)
        context = gssapi.SecurityContext(name=server, creds=credentials, mech=gssapi.OID.from_int_seq(_SPNEGO), usage="initiate")
        return f"Negotiate {base64.b64encode(context.step()).decode()}"
    except gssapi.exceptions.GSSError as error:
        message = f"{failed_request}: Kerberos gives no ticket for HTTP/{host}: {error.gen_message()}"
        raise (Unavailable if "contact any KDC" in message else Refused)(message, hint=_KERBEROS_HINT) from error


def _connection_error_types() -> tuple[type[Exception], ...]:
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    return RequestException, HTTPError, OSError


@dataclass(frozen=True)
class _RequestBody:
    """Body in chunks, iterable repeatedly so that the request can be repeated."""

    chunks: Iterable[bytes]
    size: int

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.chunks)


@dataclass(frozen=True)
class _FileChunks:
    ranges: Sequence[FileRange]

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.ranges:
            for at in range(0, piece.length, _PIECE_BYTES):
                yield read_file_range(FileRange(piece.path, piece.start + at, min(_PIECE_BYTES, piece.length - at)))


def _inode_path(inode: int) -> str:
    # Return the path by which HDFS finds a file wherever it was renamed to.
    return f"/.reserved/.inodes/{inode}"


def _parse_file_status(name: str, properties: Mapping[str, Any]) -> FileStatus:
    return FileStatus(name, int(properties["fileId"]), int(properties["length"]), int(properties["modificationTime"]))


def _not_webhdfs_error(failed_request: str) -> Refused:
    hint = "Let [hdfs] webhdfs_url name the web server of the namenode (port 9870 or 9871), not its RPC port"
    return Refused(f"{failed_request}: what answers there is not WebHDFS", hint=hint)


def _json_field(response: StoreHttpResponse, failed_request: str, field: str) -> Any:
    """Raises Unavailable if the document lacks the field, as in a proxy's answer."""
    try:
        return response.json()[field]
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"{failed_request}: the answer is not one of WebHDFS", hint=_HINTS.endpoint) from error


def _http_status_error(response: StoreHttpResponse, failed_request: str) -> CompactorError:
    status = int(response.status_code)
    try:
        remote = response.json()["RemoteException"]
        name, text = str(remote["exception"]), str(remote["message"]).partition("\n")[0].rstrip(".")
    except (KeyError, TypeError, ValueError):
        if status == HTTPStatus.NOT_FOUND:  # HDFS itself names what it does not find
            return _not_webhdfs_error(failed_request)
        return http_status_error(status, f"{failed_request}: the store answered {status}", _HINTS, is_object_request=False)
    message = f"{failed_request}: the store answered {status} ({name}: {text})"
    if name == "FileAlreadyExistsException":
        return AlreadyExists(message)
    if name in ("FileNotFoundException", "SnapshotException"):  # the latter where a directory takes no snapshots
        return NotFound(message)
    if name in _QUOTAS:
        return Refused(message, hint="Raise the quota of the directory, or shorten grace and undo window")
    if name in _PASSING:
        return Unavailable(message, hint=_PASSING[name])
    return http_status_error(status, message, _HINTS, is_object_request=False)


def request_kind_for_metering(method: str, url: str) -> str:
    operation = url.partition("op=")[2].partition("&")[0]
    if "namenoderpcaddress=" in url or operation == "RENAME":
        return {"GET": "get"}.get(method, "put")
    return {"LISTSTATUS": "list", "DELETE": "delete"}.get(operation, "head")
