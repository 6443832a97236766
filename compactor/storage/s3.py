"""A prefix of an S3 bucket as an object store (``s3://bucket/prefix``), on Amazon or any compatible endpoint.

*Metadata names* are sent with ``-`` for ``_``, because many proxies and servers drop headers whose names have an underscore.

*Create-if-absent* is ``If-None-Match: *``, on CompleteMultipartUpload too. A repeated request whose first answer was lost
meets its own object and gets 412 like a loser: so every create marks its object with a token of its own, and after a repeat
a 412 is believed only if the object bears another token.

*What arrives* is checked for its length and range, and against the store's checksum where a whole object is read and the
store has one. A flipped bit in a range goes unnoticed here: callers know the digest of what they download.

*What was sent* has to be what is stored: the checksum of the answer says so, or an ETag that is an MD5, or reading back.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from compactor.config.store_sections import S3Settings
from compactor.errors import AlreadyExists, CopyDiffers, NotFound, Refused, Unavailable
from compactor.storage.answers import NoSuchUpload, PreconditionFailed, RangeNotSatisfiable
from compactor.storage.copy_checks import delete_and_raise_if_copied_bytes_differ, require_unchanged_copy_sources
from compactor.storage.findings import StoreFinding
from compactor.storage.keys import (
    check_byte_range,
    check_object_key,
    check_object_key_prefix,
    normalize_metadata_names,
    object_key_problem,
    require_storable_object_metadata,
)
from compactor.storage.options import StoreOptions
from compactor.storage.os_errors import os_errors_as_compactor_errors
from compactor.storage.port import ComposeSource, CopyLimits, FileRange, ObjectInfo, ObjectStore, UnfinishedUpload
from compactor.storage.s3_errors import s3_answer_error
from compactor.storage.s3_parts import COPIES, divide_file_into_upload_parts, find_mismatched_copied_range, plan_upload_parts
from compactor.storage.s3_requests import CompletedPartEntry, LearnedServerBehaviour, S3Answer, S3RequestClient
from compactor.storage.s3_transfer import MultipartUpload, crc32_base64, download_object, md5_base64
from compactor.storage.schemes import bucket_and_prefix
from compactor.storage.settings import TransferSettings

_MARK = "written_by"
_PERMISSIONS = {
    "write": "s3:PutObject",
    "overwrite": "s3:PutObject",
    "read": "s3:GetObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}
_BATCH = 1000
_RESTARTS = 3


def open_store_at(url: str, options: StoreOptions) -> ObjectStore:
    """Return the store at ``s3://bucket/prefix``. Makes no request. Raises UsageError if the URL has another form."""
    bucket, prefix = bucket_and_prefix(url)
    settings = options.settings.s3
    requests = S3RequestClient(
        bucket,
        prefix,
        settings,
        options.create_retrier(settings.first_answer_ms / 1000),
        options.meter,
        _server_behaviour_of_bucket(bucket, settings),
    )
    return S3Store(requests, options.transfers, options.before_create)


@lru_cache(maxsize=64)
def _server_behaviour_of_bucket(bucket: str, settings: S3Settings) -> LearnedServerBehaviour:
    """Return the record of how the server of a bucket behaves. All stores of this process in the bucket share it, and add to it."""
    return LearnedServerBehaviour()


class S3Store:
    """ObjectStore in an S3 bucket.

    before_create: called with this store before each create, to check that the store honours create-if-absent; may raise StoreError.
    """

    def __init__(
        self, requests: S3RequestClient, transfers: TransferSettings, before_create: Callable[[ObjectStore], None] = lambda store: None
    ) -> None:
        self._requests = requests
        self._transfers = transfers
        self._before_create = before_create

    @property
    def url(self) -> str:
        return self._requests.object_url().rstrip("/")

    @property
    def requests(self) -> S3RequestClient:
        """Client for single requests. `config check` and the reader of old versions use it for requests that ObjectStore does not have."""
        return self._requests

    def inspect_store_settings(self, now_ms: int) -> list[StoreFinding]:
        """Return findings about the bucket's settings. Raises StoreError if the store cannot be reached."""
        from compactor.storage.probe_s3 import bucket_findings

        return bucket_findings(self, now_ms)

    def does_delete_free_space(self) -> bool | None:
        """Return whether a deleted object frees its space at once; None if the credentials may not read the settings that decide it. Raises
        StoreError if the store cannot be reached.
        """
        from compactor.storage.probe_s3 import read_bucket_deletion_settings

        return read_bucket_deletion_settings(self).does_delete_free_space

    def required_permission_name(self, verb: str) -> str:
        """Return the S3 action that an access policy must allow for a request, such as ``s3:GetObject``.

        :param verb: the kind of request: write, overwrite, read, list or delete.
        """
        return _PERMISSIONS[verb]

    def endpoint_bucket_and_prefix_of_server(self) -> tuple[str, str, str]:
        """Return a triple: the server's endpoint, the bucket, and the prefix of all keys of this store."""
        return str(self._requests.boto_client.meta.endpoint_url), self._requests.bucket, self._requests.prefix

    def without_conditional_create_check(self) -> S3Store:
        """Return a copy of this store that does not test create-if-absent before its first create."""
        return S3Store(self._requests, self._transfers)

    def with_list_page(self, keys: int) -> S3Store:
        """Return a copy of this store that asks for so many keys in each page of a listing."""
        return S3Store(self._requests, self._transfers.model_copy(update={"list_page": keys}), self._before_create)

    def upload_in_parts_if_absent(self, key: str, file: FileRange) -> None:
        """Upload a file by a multipart upload, asking the store to create the object only if the key is free. Raises PreconditionFailed or
        NoSuchUpload if the key is taken.
        """
        upload = MultipartUpload(self._requests, self._transfers, key, {})
        try:
            upload.complete_upload(upload.send_parts([(file,)]))
        except BaseException:
            upload.abort_upload()
            raise

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_object_key(key)
        check_byte_range(start, length)
        if length == 0:
            self.head(key)
            return b""
        params = {} if start or length is not None else {"ChecksumMode": "ENABLED"}
        try:
            return self._requests.read_range(key, start, length, **params)
        except RangeNotSatisfiable:
            return b""

    def head(self, key: str) -> ObjectInfo:
        return _object_info_without_write_token(self._head_object(key))

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        check_object_key(key)
        described = require_storable_object_metadata(metadata)
        self._before_create(self)
        return self._create_in_one_request(key, data, described)

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        check_object_key(key)
        described = require_storable_object_metadata(metadata)
        with os_errors_as_compactor_errors("read", path):
            size = path.stat().st_size
            data = path.read_bytes() if size <= self._transfers.part_bytes else None
        self._before_create(self)
        if data is not None:
            return self._create_in_one_request(key, data, described)
        parts = divide_file_into_upload_parts(FileRange(path, 0, size), self._transfers.part_bytes)
        return self._create_by_multipart_upload(key, size, described, "CRC32", lambda upload: upload.send_parts(parts))

    @property
    def server_copy_limits(self) -> CopyLimits | None:
        return COPIES if self._requests.traits.can_copy else None

    def compose(self, key: str, sources: Sequence[ComposeSource], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """Create an object from copied ranges and local bytes by a multipart upload.

        The version of each source is checked before and after the copies. The checksums that the server returns for copied parts are
        compared; if it returns none, copied bytes are read back after the object has become visible. If the process dies before that, the
        object stays unverified: a later attempt gets AlreadyExists and has to read the object itself.
        """
        check_object_key(key)
        described = require_storable_object_metadata(metadata)
        parts = plan_upload_parts(sources, self._transfers.part_bytes)
        self._before_create(self)
        if not parts:
            return self._create_in_one_request(key, b"", described)
        size = sum(piece.length for piece in sources)
        require_unchanged_copy_sources(self, sources)
        unconfirmed = threading.Event()

        def send_parts_and_check_copies(upload: MultipartUpload) -> list[CompletedPartEntry]:
            done = upload.send_parts(parts)
            require_unchanged_copy_sources(self, sources)
            receipts = [str(part.get("ChecksumCRC32C", "")) for part in done]
            wrong = find_mismatched_copied_range(sources, parts, receipts)
            if wrong:
                where = self._requests.object_url(wrong.key)
                raise CopyDiffers(f"{where}: what was copied of it has another checksum than it must have", hint="Run verify --deep")
            if not all(receipts):
                unconfirmed.set()
            return done

        info = self._create_by_multipart_upload(key, size, described, "CRC32C", send_parts_and_check_copies)
        if unconfirmed.is_set():
            delete_and_raise_if_copied_bytes_differ(self, key, sources, self._transfers.part_bytes)
        return info

    def put(self, key: str, data: bytes) -> ObjectInfo:
        check_object_key(key)

        def put_in_one_attempt(attempt: int) -> ObjectInfo:
            self._requests.meter.record_bytes_written(len(data))
            answer = self._requests.send_request_without_retries("put_object", "write", key, Body=data, ChecksumCRC32=crc32_base64(data))
            return _object_info_from_write_answer(key, len(data), answer, {})

        return self._requests.request_with_retries(put_in_one_attempt)

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        check_object_key(key)
        check_byte_range(start, length)
        try:
            if length != 0:
                return download_object(self._requests, self._transfers, key, path, start, length)
            self.head(key)
        except RangeNotSatisfiable:
            pass
        with os_errors_as_compactor_errors("write", path):
            path.write_bytes(b"")
        return 0

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_object_key_prefix(prefix)
        root = self._requests.prefix
        params: dict[str, Any] = {"Prefix": root + prefix, "MaxKeys": self._transfers.list_page}
        if after:
            params["StartAfter"] = root + after
        last = after
        while True:
            answer = self._list_page(params)
            for entry in answer.get("Contents", []):
                key = str(entry["Key"])[len(root) :]
                if object_key_problem(key):
                    continue  # a console's "folder", or an object that is not ours
                if key <= last:
                    raise Refused(
                        f"{self.url} lists {key!r} after {last!r}",
                        hint="Directory buckets list without order; use a general purpose bucket",
                    )
                last = key
                yield ObjectInfo(key, int(entry["Size"]), _epoch_ms(entry["LastModified"]), _etag_of_answer(entry), {})
            if not answer["IsTruncated"]:
                return
            if answer["NextContinuationToken"] == params.get("ContinuationToken"):
                raise Refused(f"{self.url} lists one page again and again", hint="Use a store whose ListObjectsV2 ends")
            params["ContinuationToken"] = answer["NextContinuationToken"]

    def delete(self, keys: Iterable[str]) -> None:
        left = iter(keys)
        while batch := tuple(islice(left, _BATCH)):
            for key in batch:
                check_object_key(key)
            self._delete_keys_in_one_request(batch)

    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        check_object_key_prefix(prefix)
        root = self._requests.prefix
        params: dict[str, Any] = {"Prefix": root + prefix}
        while root or prefix:
            answer = self._requests.send_request_with_retries("list_multipart_uploads", "list the uploads of", **params)
            for upload in answer.get("Uploads", []):
                key = str(upload["Key"])
                if key.startswith(root + prefix):  # some servers take the prefix for a hint
                    yield UnfinishedUpload(key[len(root) :], str(upload["UploadId"]), _epoch_ms(upload["Initiated"]))
            marks = {"KeyMarker": answer.get("NextKeyMarker", ""), "UploadIdMarker": answer.get("NextUploadIdMarker", "")}
            if not answer.get("IsTruncated") or not marks["KeyMarker"] or marks == {name: params.get(name, "") for name in marks}:
                return
            params |= {name: mark for name, mark in marks.items() if mark}

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        for upload in uploads:
            with suppress(NoSuchUpload, NotFound):
                self._requests.send_request_with_retries("abort_multipart_upload", "abort an upload of", upload.key, UploadId=upload.id)

    def clock_ms(self) -> int:
        return _date_header_ms(self._requests.list_one_key(), self.url)

    def _list_page(self, params: dict[str, Any]) -> S3Answer:
        def list_page_in_one_attempt(attempt: int) -> S3Answer:
            answer = self._requests.send_request_without_retries("list_objects_v2", "list", **params)
            # A cut answer may parse as an empty one.
            if "IsTruncated" not in answer or (answer["IsTruncated"] and not answer.get("NextContinuationToken")):
                raise Unavailable(f"cannot list {self.url}: the store's answer is incomplete")
            return answer

        return self._requests.request_with_retries(list_page_in_one_attempt)

    def _head_object(self, key: str) -> ObjectInfo:
        check_object_key(key)
        try:
            answer = self._requests.send_request_with_retries("head_object", "read", key)
        except NotFound:
            if not self._requests.bucket_seen:
                # HEAD has no body that could say which of the two is missing.
                self._requests.list_one_key()
            raise
        metadata = normalize_metadata_names(answer.get("Metadata", {}))
        return ObjectInfo(key, int(answer["ContentLength"]), _epoch_ms(answer["LastModified"]), _etag_of_answer(answer), metadata)

    def _create_in_one_request(self, key: str, data: bytes, metadata: dict[str, str]) -> ObjectInfo:
        """Create an object with one conditional PUT, which is retried. If the key is taken by an object of an earlier attempt of this call,
        return that object; otherwise raise AlreadyExists.
        """
        token = uuid.uuid4().hex
        checksum = crc32_base64(data)
        attempts = 0

        def put_in_one_attempt(attempt: int) -> ObjectInfo:
            nonlocal attempts
            attempts = attempt + 1
            self._requests.meter.record_bytes_written(len(data))
            answer = self._requests.send_request_without_retries(
                "put_object",
                "write",
                key,
                Body=data,
                ChecksumCRC32=checksum,
                Metadata=_metadata_headers({**metadata, _MARK: token}),
                IfNoneMatch="*",
                **self._transfers.s3_create_request_parameters,
            )
            self._delete_and_raise_unless_stored_as_sent(key, data, answer.get("ChecksumCRC32", ""), _etag_of_answer(answer))
            return _object_info_from_write_answer(key, len(data), answer, metadata)

        try:
            return self._requests.request_with_retries(put_in_one_attempt)
        except PreconditionFailed as error:
            own = self._find_object_written_by_this_call(key, token) if attempts > 1 else None
            if own:
                self._delete_and_raise_unless_stored_as_sent(key, data, "", own.etag)
                return own
            raise AlreadyExists(f"{self._requests.object_url(key)} exists already") from error

    def _delete_and_raise_unless_stored_as_sent(self, key: str, data: bytes, checksum: str, etag: str) -> None:
        """Check that an object that this call has created has the bytes that were sent, because some servers ignore the checksum of a
        request. If it does not, delete the object and raise Unavailable. No reader can have used the object yet.

        :param checksum: CRC-32 that the server returned; empty if it returned none.
        :param etag: ETag that the server returned.
        """
        known = self._requests.traits
        if checksum == crc32_base64(data) or known.is_etag_md5 is False:
            return
        if etag == md5_base64(data):
            known.is_etag_md5 = True
            return
        if self.get(key) == data:
            known.is_etag_md5 = False
            return
        self._delete_keys_in_one_request((key,))
        raise Unavailable(f"cannot write {self._requests.object_url(key)}: it arrived damaged, and the store took it")

    def _create_by_multipart_upload(
        self,
        key: str,
        size: int,
        metadata: dict[str, str],
        algorithm: Literal["CRC32", "CRC32C"],
        send_parts: Callable[[MultipartUpload], Sequence[CompletedPartEntry]],
    ) -> ObjectInfo:
        """Create an object by a multipart upload, which is restarted if the store loses it. Raises AlreadyExists if the key is taken.

        :param size: size of the object in bytes.
        :param algorithm: checksum of the parts.
        :param send_parts: sends all parts and returns the list that completion needs.
        """
        if self._find_object(key) is not None:  # before a gigabyte travels for nothing; the completion decides
            raise AlreadyExists(f"{self._requests.object_url(key)} exists already")
        token = uuid.uuid4().hex
        for _ in range(_RESTARTS):
            upload = MultipartUpload(self._requests, self._transfers, key, _metadata_headers({**metadata, _MARK: token}), algorithm)
            try:
                return _object_info_from_write_answer(key, size, upload.complete_upload(send_parts(upload)), metadata)
            except (PreconditionFailed, NoSuchUpload) as error:
                upload.abort_upload()
                if own := self._find_object_written_by_this_call(key, token):
                    return own
                if isinstance(error, PreconditionFailed) or self._find_object(key) is not None:
                    raise AlreadyExists(f"{self._requests.object_url(key)} exists already") from error
                # A conflict with another writer (409) has used the upload up, and neither came through.
            except BaseException:
                upload.abort_upload()
                raise
        raise Unavailable(f"cannot write {self._requests.object_url(key)}: the store lost the upload {_RESTARTS} times")

    def _find_object_written_by_this_call(self, key: str, token: str) -> ObjectInfo | None:
        """Return the properties of the object at ``key`` if its metadata contain this write token, which shows that this call wrote it.
        None if the key is free or another writer's object is there.
        """
        found = self._find_object(key)
        return _object_info_without_write_token(found) if found is not None and found.metadata.get(_MARK) == token else None

    def _find_object(self, key: str) -> ObjectInfo | None:
        try:
            return self._head_object(key)
        except NotFound:
            return None

    def _delete_keys_in_one_request(self, batch: Sequence[str]) -> None:
        root = self._requests.prefix
        wanted = {root + key for key in batch}

        def delete_keys_in_one_attempt(attempt: int) -> None:
            answer = self._requests.send_request_without_retries(
                "delete_objects",
                "delete in",
                ChecksumAlgorithm="CRC32",
                Delete={"Objects": [{"Key": key} for key in sorted(wanted)], "Quiet": False},
            )
            errors = answer.get("Errors", [])
            gone = [entry for entry in errors if entry.get("Code") == "NoSuchKey"]  # some servers count that as an error
            wanted.difference_update(entry["Key"] for entry in [*answer.get("Deleted", []), *gone])
            for failed in errors:
                if failed in gone:
                    continue
                raise s3_answer_error(failed, f"cannot delete {self._requests.object_url(str(failed.get('Key', ''))[len(root) :])}")
            if wanted:
                raise Unavailable(f"cannot delete in {self.url}: the store does not say what became of {len(wanted)} keys")

        self._requests.request_with_retries(delete_keys_in_one_attempt)


def _object_info_from_write_answer(key: str, size: int, response: S3Answer, metadata: Mapping[str, str]) -> ObjectInfo:
    return ObjectInfo(key, size, _date_header_ms(response, key), _etag_of_answer(response), metadata)


def _metadata_headers(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in metadata.items()}


def _object_info_without_write_token(info: ObjectInfo) -> ObjectInfo:
    """Return object properties without the token that identifies the call that wrote the object."""
    return replace(info, metadata={name: value for name, value in info.metadata.items() if name != _MARK})


def _etag_of_answer(response: Mapping[str, Any]) -> str:
    return str(response.get("ETag", "")).strip('"')


def _epoch_ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _date_header_ms(response: Mapping[str, Any], url: str) -> int:
    """Return the time in the Date header of an answer, in milliseconds. Raises Refused if there is no valid one."""
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return _epoch_ms(parsedate_to_datetime(date))
    except ValueError as error:
        raise Refused(f"{url}: the store's answers bear no date ({date!r})", hint="Remove the proxy that drops the Date header") from error
