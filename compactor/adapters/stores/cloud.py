"""An object store over a vendor's client library: retries, create-if-absent after lost answers, parallel reads, listings.

``CloudStore`` makes the port of a ``SingleRequestObjectClient``. *Create-if-absent*: each create marks its object with a token of its own.
If the key is taken by an object with the same token, an earlier attempt has succeeded and its answer was lost.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from compactor.adapters.stores.s3_requests import UploadPart, is_unknown_host, plan_upload_parts, split_file
from compactor.errors import AlreadyExists, CannotCopy, CompactorError, NotFound, Refused, Unavailable
from compactor.model.finding import Finding
from compactor.storage.checks import (
    require_unchanged_copy_sources,
    run_in_parallel,
    translated_os_errors,
    verify_or_delete_copy,
    write_at_position,
)
from compactor.storage.factory import PreconditionFailed, RangeNotSatisfiable
from compactor.storage.keys import (
    check_byte_range,
    check_object_key,
    check_object_key_prefix,
    object_key_problem,
    require_storable_object_metadata,
)
from compactor.storage.port import ComposeSource, CopyLimits, FileLease, FileRange, ObjectInfo, ObjectStore, UnfinishedUpload
from compactor.storage.wrappers import FirstAnswerTracker, Retrier, StoreOptions

T = TypeVar("T")

StoreHttpSession = Any
"""HTTP session of a client library. These libraries are imported on first use and have no types."""
StoreHttpRequest = Any
"""Request of a client library."""
StoreHttpResponse = Any
"""Answer to a request of a client library."""

FIRST_ANSWER_S = 8.0
"""Longest wait for the first answer of a store, in seconds. A store that never answered is more likely a wrong address than a busy one."""
_CONNECT_S = 3.0
_READ_S = 60.0
_TOKEN = "written_by"  # noqa: S105 - the name of an object's metadata
_DELETES_AT_ONCE = 1000
_BUSY = "The store asks for patience or has trouble; lower [limits] max_requests_per_s if it happens often"


@dataclass(frozen=True)
class ErrorHints:
    credentials: str
    permission: str
    bucket: str
    endpoint: str


def http_status_error(status: int, message: str, hints: ErrorHints, *, is_object_request: bool) -> CompactorError:
    """Translate an HTTP status. 404 means that the object is missing if ``is_object_request``, otherwise the bucket."""
    if status == HTTPStatus.NOT_FOUND:
        return NotFound(message) if is_object_request else Refused(f"{message}: it does not exist", hint=hints.bucket)
    if status == HTTPStatus.PRECONDITION_FAILED:
        return PreconditionFailed(message)
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return RangeNotSatisfiable(message)
    if status == HTTPStatus.UNAUTHORIZED:
        return Refused(f"{message}: the credentials are refused", hint=hints.credentials)
    if status == HTTPStatus.FORBIDDEN:
        return Refused(f"{message}: access denied", hint=hints.permission)
    if status == HTTPStatus.NOT_IMPLEMENTED:  # another try would be answered alike
        return Refused(f"{message}: the store does not know this request", hint="Run config check")
    if status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return Unavailable(message, hint=_BUSY)
    return Refused(message, hint="Run config check")


def connection_error(error: Exception, failed_request: str, hints: ErrorHints, *, answered_before: bool) -> CompactorError:
    """Error for a failed connection. Before the store's first answer an unknown host name is Refused instead of Unavailable."""
    if not answered_before and is_unknown_host(error):
        return Refused(f"{failed_request}: the host name is unknown ({error})", hint=hints.endpoint)
    return Unavailable(f"{failed_request}: {error}".rstrip("."), hint=hints.endpoint if not answered_before else "Try again")


def request_timeouts_s(contact: FirstAnswerTracker) -> tuple[float, float]:
    """Timeouts for the connection, and between received bytes; shorter until the store's first answer."""
    return _CONNECT_S, _READ_S if contact.answered else FIRST_ANSWER_S / 2


@dataclass(frozen=True)
class ObjectRangeContent:
    """Bytes of an object. size: of the whole object. version: ``ObjectInfo.etag``."""

    data: bytes
    size: int
    version: str


class RequestRunnerWithRetries(Protocol):
    """Function that repeats a request; after the retry deadline it raises Unavailable."""

    def __call__(self, request: Callable[[], T], /) -> T: ...


class SingleRequestObjectClient(Protocol):
    """Client that makes single requests to the objects below one prefix. All methods raise StoreErrors, PreconditionFailed or
    RangeNotSatisfiable.
    """

    @property
    def server_copy_limits(self) -> CopyLimits | None: ...

    @property
    def url(self) -> str: ...

    @property
    def endpoint_bucket_and_prefix(self) -> tuple[str, str, str]: ...

    def read(self, key: str, start: int, length: int | None, version: str = "") -> ObjectRangeContent:
        """Read bytes [start, start + length) of an object (None: up to its end), of no other ``version`` if given."""

    def head(self, key: str) -> ObjectInfo: ...

    def create(self, key: str, data: bytes, metadata: Mapping[str, str], retried: RequestRunnerWithRetries) -> ObjectInfo:
        """Create an object if the key is free, each request through ``retried``."""

    def create_in_parts(self, key: str, parts: Sequence[UploadPart], metadata: Mapping[str, str], upload: PartUploader) -> ObjectInfo:
        """Create an object from these parts, in order, if the key is free."""

    def put(self, key: str, data: bytes) -> ObjectInfo: ...

    def list_page(self, prefix: str, after: str, token: str, size: int) -> tuple[Sequence[ObjectInfo], str]:
        """At most ``size`` objects, and the token of the next page (empty after the last one).

        :param after: where the listing begins. Stores that cannot do that return earlier keys, too.
        :param token: empty for the first page.
        """

    def delete(self, key: str, version: str = "") -> None:
        """Delete an object, or only this ``version`` if given. Raises NotFound if there is no object."""

    def clock_ms(self) -> int:
        """Store's time, with one request."""

    def does_delete_free_space(self) -> bool | None: ...

    def inspect_store_settings(self) -> list[Finding]: ...

    def required_permission_name(self, verb: str) -> str: ...


@dataclass(frozen=True)
class PartUploader:
    """Runner of an upload's requests in parallel threads, with retries.

    confirm: called when all parts are stored; raises an error to keep the object invisible.
    """

    retrier: Retrier
    threads: int
    confirm: Callable[[], None] = lambda: None

    def run_tasks_with_retries(self, tasks: Sequence[Callable[[], T]]) -> Sequence[T]:
        def add_retries(task: Callable[[], T]) -> Callable[[threading.Event], T]:
            def run_with_retries(stop: threading.Event) -> T:
                if stop.is_set():
                    raise CancelledError
                return task()

            return lambda stop: self.retrier.call_with_retries(lambda _: run_with_retries(stop))

        return run_in_parallel(self.threads, [add_retries(task) for task in tasks])


class CloudStore:
    """ObjectStore over a SingleRequestObjectClient. Thread-safe."""

    def __init__(self, client: SingleRequestObjectClient, options: StoreOptions) -> None:
        self._client = client
        self._options = options
        self._retrier = options.create_retrier(FIRST_ANSWER_S)
        self._transfers = options.transfers
        self._before_create = options.before_create
        self._bucket_seen = False

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def server_copy_limits(self) -> CopyLimits | None:
        return self._client.server_copy_limits

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_object_key(key)
        check_byte_range(start, length)
        if length == 0:
            self.head(key)
            return b""
        try:
            return self._request_object_with_retries(key, lambda: self._read_range(key, start, length)).data
        except RangeNotSatisfiable:
            return b""

    def head(self, key: str) -> ObjectInfo:
        found = self._head_object(key)
        return replace(found, metadata={name: value for name, value in found.metadata.items() if name != _TOKEN})

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        return self._create_or_find_own(
            key, metadata, lambda described: self._client.create(key, data, described, self._request_with_retries)
        )

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None, *, may_link: bool = False) -> ObjectInfo:
        check_object_key(key)
        require_storable_object_metadata(metadata)
        with translated_os_errors("read", path):
            size = path.stat().st_size
            data = path.read_bytes() if size <= self._transfers.part_bytes else None
        if data is not None:
            return self.create(key, data, metadata)
        return self._create_in_parts(key, split_file(FileRange(path, 0, size), self._transfers.part_bytes), metadata)

    def compose(self, key: str, sources: Sequence[ComposeSource], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """Copied bytes are read back, because these stores return no CRC-32C of a copy."""
        check_object_key(key)
        if self.server_copy_limits is None:
            raise CannotCopy(f"{self.url} copies no ranges of objects")
        parts = plan_upload_parts(sources, self._transfers.part_bytes, self.server_copy_limits.max_bytes)
        if not parts:
            return self.create(key, b"", metadata)
        require_unchanged_copy_sources(self, sources)
        made = self._create_in_parts(key, parts, metadata, lambda: require_unchanged_copy_sources(self, sources))
        verify_or_delete_copy(self, key, sources, self._transfers.part_bytes)
        return made

    def put(self, key: str, data: bytes) -> ObjectInfo:
        check_object_key(key)
        return self._request_with_retries(lambda: self._client.put(key, data))

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        check_object_key(key)
        check_byte_range(start, length)
        part = self._transfers.part_bytes
        first = ObjectRangeContent(b"", start, "")
        if length == 0:
            self.head(key)
        else:
            with suppress(RangeNotSatisfiable):
                first = self._request_object_with_retries(
                    key, lambda: self._read_range(key, start, part if length is None else min(part, length))
                )
        end = first.size if length is None else min(first.size, start + length)
        version = first.version
        with translated_os_errors("write", path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

        def fetch_range_into_file(position: int) -> None:
            found = self._read_range(key, position, min(part, end - position), version)
            with translated_os_errors("write", path):
                write_at_position(descriptor, found.data, position - start)

        try:
            with translated_os_errors("write", path):
                write_at_position(descriptor, first.data, 0)
            rest = range(start + len(first.data), end, part)
            PartUploader(self._retrier, self._transfers.threads).run_tasks_with_retries([partial(fetch_range_into_file, at) for at in rest])
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, PreconditionFailed | RangeNotSatisfiable):
                hint = "Something else writes to this tier; run verify"
                raise Unavailable(f"{self.url}/{key} changed while it was read", hint=hint) from error
            raise
        finally:
            os.close(descriptor)
        return end - start

    def lend(self, key: str, path: Path) -> FileLease | None:
        return None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_object_key_prefix(prefix)
        token, last = "", after

        def next_page() -> tuple[Sequence[ObjectInfo], str]:
            return self._client.list_page(prefix, after, token, self._transfers.list_page)

        while True:
            found, token = self._request_with_retries(next_page)
            for info in found:
                if object_key_problem(info.key) or info.key.encode() <= after.encode():
                    continue
                if info.key.encode() <= last.encode():
                    raise Refused(f"{self.url} lists {info.key!r} after {last!r}", hint="Use a store that lists in the order of UTF-8")
                last = info.key
                yield replace(info, metadata={})
            if not token:
                return

    def delete(self, keys: Iterable[str]) -> None:
        left = iter(keys)
        upload = PartUploader(self._retrier, self._transfers.threads)
        while batch := tuple(islice(left, _DELETES_AT_ONCE)):
            for key in batch:
                check_object_key(key)
            upload.run_tasks_with_retries([lambda key=key: self._delete_object(key) for key in dict.fromkeys(batch)])  # type: ignore[misc]

    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Yield nothing: these stores do not list unfinished uploads, and delete them after a week."""
        check_object_key_prefix(prefix)
        return iter(())

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        """Do nothing: these stores list no unfinished uploads."""

    def clock_ms(self) -> int:
        return self._request_with_retries(self._client.clock_ms)

    def inspect_store_settings(self, now_ms: int) -> Sequence[Finding]:
        return self._request_with_retries(self._client.inspect_store_settings)

    def does_delete_free_space(self) -> bool | None:
        return self._request_with_retries(self._client.does_delete_free_space)

    def required_permission_name(self, verb: str) -> str:
        return self._client.required_permission_name(verb)

    def server_location(self) -> tuple[str, str, str]:
        return self._client.endpoint_bucket_and_prefix

    def without_conditional_create_check(self) -> ObjectStore:
        return type(self)(self._client, replace(self._options, before_create=lambda store: None))

    def with_list_page(self, keys: int) -> ObjectStore:
        return type(self)(self._client, replace(self._options, transfers=self._transfers.model_copy(update={"list_page": keys})))

    def upload_if_absent(self, key: str, file: FileRange) -> None:
        """Raise AlreadyExists or PreconditionFailed if the key is taken."""
        self._client.create_in_parts(key, [(file,)], {}, PartUploader(self._retrier, 1))

    def _create_in_parts(
        self, key: str, parts: Sequence[UploadPart], metadata: Mapping[str, str] | None, confirm: Callable[[], None] = lambda: None
    ) -> ObjectInfo:
        if self._find_object(key) is not None:  # before a gigabyte is sent for nothing; the last request decides
            raise AlreadyExists(f"{self.url}/{key} exists already")
        upload = PartUploader(self._retrier, self._transfers.threads, confirm)
        return self._create_or_find_own(key, metadata, lambda described: self._client.create_in_parts(key, parts, described, upload))

    def _create_or_find_own(
        self, key: str, metadata: Mapping[str, str] | None, write: Callable[[dict[str, str]], ObjectInfo]
    ) -> ObjectInfo:
        """Call ``write`` with a random token in the metadata. An object with this token at the key is this call's earlier attempt."""
        check_object_key(key)
        described = require_storable_object_metadata(metadata)
        self._before_create(self)
        token = uuid.uuid4().hex
        try:
            made = write({**described, _TOKEN: token})
        except (AlreadyExists, PreconditionFailed) as error:
            found = self._find_object(key)
            if found is None:
                raise Unavailable(f"{self.url}/{key} was taken and is free again", hint="Try again") from error
            if found.metadata.get(_TOKEN) != token:
                raise AlreadyExists(f"{self.url}/{key} exists already") from error
            made = found
        return replace(made, metadata=described)

    def _read_range(self, key: str, start: int, length: int | None, version: str = "") -> ObjectRangeContent:
        """Raises Unavailable if the store sends fewer or more bytes than the object has."""
        found = self._client.read(key, start, length, version)
        received = len(found.data)
        self._options.meter.record_bytes_read(received)
        if received != (found.size if length is None else min(found.size, start + length)) - start:
            sent = f"asked for {length} bytes from {start} of {found.size}, the store sent {received}"
            raise Unavailable(f"cannot read {self.url}/{key}: {sent}")
        return found

    def _head_object(self, key: str) -> ObjectInfo:
        check_object_key(key)
        return self._request_object_with_retries(key, lambda: self._client.head(key))

    def _find_object(self, key: str) -> ObjectInfo | None:
        try:
            return self._head_object(key)
        except NotFound:
            return None

    def _delete_object(self, key: str) -> None:
        try:
            self._client.delete(key)
        except NotFound:
            return

    def _request_object_with_retries(self, key: str, request: Callable[[], T]) -> T:
        # Make a request for an object. A store may answer NotFound because the whole bucket is missing: until any request has succeeded, a
        # listing decides, which raises Refused if it is.
        try:
            return self._request_with_retries(request)
        except NotFound:
            if not self._bucket_seen:
                self._request_with_retries(lambda: self._client.list_page("", "", "", 1))
            raise NotFound(f"cannot read {self.url}/{key}: no such object") from None

    def _request_with_retries(self, request: Callable[[], T]) -> T:
        def attempt_and_count_retries(attempt_number: int) -> T:
            if attempt_number:
                self._options.meter.record_retry()
            return request()

        answer = self._retrier.call_with_retries(attempt_and_count_retries)
        self._bucket_seen = True
        return answer
