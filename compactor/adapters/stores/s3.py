"""A prefix of an S3 bucket as an object store (``s3://bucket/prefix``), on Amazon or any compatible endpoint.

*Metadata names* are sent with ``-`` for ``_``, because many proxies and servers drop headers with an underscore.

*Create-if-absent* is ``If-None-Match: *``, on CompleteMultipartUpload too. A repeated request whose first answer was lost gets 412 like a
loser: therefore every create marks its object with a token of its own, and after a repeat a 412 is believed only if the object bears
another.

*Received bytes* are checked for length and range, and whole objects against the store's checksum. A flipped bit in a range goes unnoticed
here: callers know the digest of what they download.

*Sent bytes* must be what is stored: the checksum of the answer says so, or an ETag that is an MD5, or reading back.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import threading
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import crc32c as castagnoli
from typing_extensions import override

from compactor.adapters.stores.s3_requests import (
    COPIES,
    CompletedPartEntry,
    LearnedServerBehaviour,
    ReturnedByteRange,
    S3Answer,
    S3RequestClient,
    UploadPart,
    UploadPartOfLocalRanges,
    find_mismatched_copied_range,
    is_copy_refusal,
    plan_upload_parts,
    range_header,
    returned_span,
    s3_answer_error,
    split_file,
)
from compactor.config.sections import S3Settings
from compactor.errors import AlreadyExists, CannotCopy, CopyDiffers, NotFound, Refused, StoreError, Unavailable
from compactor.model.finding import Finding
from compactor.model.segment import StrictFrozenModel
from compactor.storage.checks import (
    copy_source_changed_error,
    read_file_range,
    require_unchanged_copy_sources,
    run_in_parallel,
    translated_os_errors,
    unknown_deletion_settings,
    verify_or_delete_copy,
    write_at_position,
)
from compactor.storage.factory import NoSuchUpload, PreconditionFailed, RangeNotSatisfiable
from compactor.storage.keys import (
    check_byte_range,
    check_object_key,
    check_object_key_prefix,
    normalize_metadata_names,
    object_key_problem,
    require_storable_object_metadata,
)
from compactor.storage.port import (
    ComposeSource,
    CopyLimits,
    FileLease,
    FileRange,
    ObjectInfo,
    ObjectRangeToCopy,
    ObjectStore,
    UnfinishedUpload,
)
from compactor.storage.schemes import bucket_and_prefix
from compactor.storage.settings import TransferSettings
from compactor.storage.wrappers import StoreOptions, UnconfiguredStore

_ABORT_S = 10.0
_log = logging.getLogger(__name__)


def crc32_base64(data: bytes) -> str:
    """CRC-32 in S3's form: base64 of four big-endian bytes."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def crc32c_base64(data: bytes) -> str:
    return base64.b64encode(castagnoli.crc32c(data).to_bytes(4, "big")).decode()


_CHECKSUMS: dict[str, Callable[[bytes], str]] = {"CRC32": crc32_base64, "CRC32C": crc32c_base64}


def md5_hex(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def download_object(requests: S3RequestClient, transfers: TransferSettings, key: str, path: Path, start: int, length: int | None) -> int:
    """Write bytes [start, start + length) of an object (None: up to its end) to a file. Raises Unavailable also if the object changes
    meanwhile.
    """
    part = transfers.part_bytes
    with translated_os_errors("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        first = _fetch_range(requests, key, path, descriptor, start, start, part if length is None else min(part, length), "")
        end = first.total if length is None else min(first.total, start + length)

        def make_fetch_task(position: int) -> Callable[[threading.Event], ReturnedByteRange]:
            return lambda stop: _fetch_range(requests, key, path, descriptor, start, position, min(part, end - position), first.etag, stop)

        run_in_parallel(transfers.threads, [make_fetch_task(at) for at in range(first.end, end, part)])
        with translated_os_errors("write", path):
            # A repeated first attempt may have met a shorter object than the one before it.
            os.ftruncate(descriptor, end - start)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return end - start


def _fetch_range(
    requests: S3RequestClient,
    key: str,
    path: Path,
    descriptor: int,
    object_position_of_file_start: int,
    start: int,
    length: int,
    etag: str,
    stop: threading.Event | None = None,
) -> ReturnedByteRange:
    """Write bytes [start, start + length) of an object to a file. Raises Unavailable if the object has another than a given ``etag``."""
    condition = {"IfMatch": etag} if etag else {}

    def fetch_once(attempt: int) -> ReturnedByteRange:
        if stop and stop.is_set():
            raise CancelledError
        answer = requests.send_request_without_retries("get_object", "read", key, Range=range_header(start, length), **condition)
        span = returned_span(answer, requests.object_url(key), start, length)
        if etag and (span.etag != etag or span.end != start + length):
            answer["Body"].close()
            raise PreconditionFailed("changed")
        at = start - object_position_of_file_start
        for chunk in requests.read_body(answer, key, span):
            with translated_os_errors("write", path):
                at += write_at_position(descriptor, chunk, at)
        return span

    try:
        return requests.request_with_retries(fetch_once)
    except (PreconditionFailed, RangeNotSatisfiable) as error:
        if not etag:
            raise
        raise Unavailable(
            f"{requests.object_url(key)} changed while it was read", hint="Something else writes to this tier; run verify"
        ) from error


class MultipartUpload:
    """One multipart upload. algorithm: CRC32C if parts are copied, because a copied range's may be known already."""

    def __init__(
        self,
        requests: S3RequestClient,
        transfers: TransferSettings,
        key: str,
        metadata: Mapping[str, str],
        algorithm: Literal["CRC32", "CRC32C"] = "CRC32",
    ) -> None:
        self._requests = requests
        self._transfers = transfers
        self._key = key
        self._algorithm = algorithm
        about = {"Metadata": dict(metadata), **transfers.s3_create_request_parameters}
        answer = requests.send_request_with_retries("create_multipart_upload", "write", key, ChecksumAlgorithm=algorithm, **about)
        self._id = answer.get("UploadId", "")
        if not self._id:
            raise Unavailable(f"cannot write {requests.object_url(key)}: the store began no upload")

    def send_parts(self, parts: Sequence[UploadPart]) -> list[CompletedPartEntry]:
        """Entries for completion. That of a copied part has a checksum only if the store returned one."""

        def make_part_task(number: int, part: UploadPart) -> Callable[[threading.Event], CompletedPartEntry]:
            if isinstance(part, ObjectRangeToCopy):
                return lambda stop: self._copy_part(part, number, stop)
            return lambda stop: self._send_part(part, number, stop)

        return run_in_parallel(self._transfers.threads, [make_part_task(number, part) for number, part in enumerate(parts, start=1)])

    def _copy_part(self, part: ObjectRangeToCopy, number: int, stop: threading.Event) -> CompletedPartEntry:
        checksum = f"Checksum{self._algorithm}"

        def copy_once(attempt: int) -> CompletedPartEntry:
            if stop.is_set():
                raise CancelledError
            answer = self._requests.send_request_without_retries(
                "upload_part_copy",
                "copy to",
                self._key,
                UploadId=self._id,
                PartNumber=number,
                CopySource={"Bucket": self._requests.bucket, "Key": self._requests.prefix + part.key},
                CopySourceRange=range_header(part.start, part.length),
                CopySourceIfMatch=f'"{part.etag}"',
            ).get("CopyPartResult", {})
            if not answer.get("ETag"):  # a copy that fails late says so in a body below 200, which may be cut off
                raise Unavailable(f"cannot copy to {self._requests.object_url(self._key)}: the store's answer is incomplete")
            reported = {checksum: answer[checksum]} if answer.get(checksum) else {}
            return {"PartNumber": number, "ETag": answer["ETag"], **reported}

        try:
            return self._requests.request_with_retries(copy_once)
        except (PreconditionFailed, RangeNotSatisfiable) as error:
            raise copy_source_changed_error(self._requests.object_url(part.key)) from error
        except Refused as error:
            if not is_copy_refusal(error):
                raise
            self._requests.traits.can_copy = False
            raise CannotCopy(f"cannot copy a range of {self._requests.object_url(part.key)}: {error.message}") from error

    def _send_part(self, part: UploadPartOfLocalRanges, number: int, stop: threading.Event) -> CompletedPartEntry:
        data = b"".join(read_file_range(piece) for piece in part)
        checksum = _CHECKSUMS[self._algorithm](data)

        def upload_once(attempt: int) -> CompletedPartEntry:
            if stop.is_set():
                raise CancelledError
            self._requests.meter.record_bytes_written(len(data))
            answer = self._requests.send_request_without_retries(
                "upload_part",
                "write",
                self._key,
                UploadId=self._id,
                PartNumber=number,
                Body=data,
                **{f"Checksum{self._algorithm}": checksum},
            )
            # Where ETags have proved to be digests they count: moto sends the request's own checksum back.
            if self._requests.traits.is_etag_md5 and answer["ETag"].strip('"') != md5_hex(data):
                raise Unavailable(f"cannot write {self._requests.object_url(self._key)}: part {number} arrived damaged")
            return {"PartNumber": number, "ETag": answer["ETag"], f"Checksum{self._algorithm}": checksum}

        return self._requests.request_with_retries(upload_once)

    def complete_upload(self, parts: Sequence[CompletedPartEntry]) -> S3Answer:
        """Make the object visible, only if its key is free.

        :raises PreconditionFailed: if the key is taken; NoSuchUpload, if the upload is gone. Either may mean that an earlier attempt
            succeeded.
        :raises CannotCopy: if the server demands checksums but reported none for copied parts, as S3Proxy does.
        """

        def complete_once(attempt: int) -> S3Answer:
            answer = self._requests.send_request_without_retries(
                "complete_multipart_upload",
                "write",
                self._key,
                UploadId=self._id,
                MultipartUpload={"Parts": list(parts)},
                IfNoneMatch="*",
            )
            if not answer.get("ETag"):
                raise Unavailable(f"cannot write {self._requests.object_url(self._key)}: the store's answer is incomplete")
            return answer

        try:
            return self._requests.request_with_retries(complete_once)
        except Refused as error:
            if "checksum for each part" not in error.message or all(f"Checksum{self._algorithm}" in part for part in parts):
                raise
            self._requests.traits.can_copy = False
            raise CannotCopy(f"cannot create {self._requests.object_url(self._key)} of copied ranges: {error.message}") from error

    def abort_upload(self) -> None:
        """Store errors are logged; the parts then stay and are billed (`config check` reports it)."""
        retrier = self._requests.retrier
        hasty = replace(retrier, policy=retrier.policy.model_copy(update={"deadline_s": min(retrier.policy.deadline_s, _ABORT_S)}))
        try:
            hasty.call_with_retries(
                lambda _: self._requests.send_request_without_retries("abort_multipart_upload", "write", self._key, UploadId=self._id)
            )
        except NoSuchUpload:
            return
        except StoreError as error:
            _log.warning("an unfinished upload of %s is left behind (%s)", self._requests.object_url(self._key), error)


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
    # Return the record that all stores of this process in the bucket share and add to.
    return LearnedServerBehaviour()


class S3Store:
    """ObjectStore in an S3 bucket. before_create: called before each create, to check create-if-absent."""

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
        return self._requests

    def inspect_store_settings(self, now_ms: int) -> list[Finding]:
        return bucket_findings(self, now_ms)

    def does_delete_free_space(self) -> bool | None:
        return read_bucket_deletion_settings(self).does_delete_free_space

    def required_permission_name(self, verb: str) -> str:
        """S3 action, such as ``s3:GetObject``."""
        return _PERMISSIONS[verb]

    def server_location(self) -> tuple[str, str, str]:
        return str(self._requests.boto_client.meta.endpoint_url), self._requests.bucket, self._requests.prefix

    def without_conditional_create_check(self) -> S3Store:
        return S3Store(self._requests, self._transfers)

    def with_list_page(self, keys: int) -> S3Store:
        return S3Store(self._requests, self._transfers.model_copy(update={"list_page": keys}), self._before_create)

    def upload_if_absent(self, key: str, file: FileRange) -> None:
        """Raise PreconditionFailed or NoSuchUpload if the key is taken."""
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
        return _without_write_token(self._head_object(key))

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        check_object_key(key)
        described = require_storable_object_metadata(metadata)
        self._before_create(self)
        return self._create_in_one_request(key, data, described)

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None, *, may_link: bool = False) -> ObjectInfo:
        check_object_key(key)
        described = require_storable_object_metadata(metadata)
        with translated_os_errors("read", path):
            size = path.stat().st_size
            data = path.read_bytes() if size <= self._transfers.part_bytes else None
        self._before_create(self)
        if data is not None:
            return self._create_in_one_request(key, data, described)
        parts = split_file(FileRange(path, 0, size), self._transfers.part_bytes)
        return self._create_by_multipart_upload(key, size, described, "CRC32", lambda upload: upload.send_parts(parts))

    @property
    def server_copy_limits(self) -> CopyLimits | None:
        return COPIES if self._requests.traits.can_copy else None

    def compose(self, key: str, sources: Sequence[ComposeSource], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """Create an object by a multipart upload. Each source's version is checked before and after, and the checksums of copied parts are
        compared.

        If the server returns none, copied bytes are read back after the object has become visible. If the process dies before that, a later
        attempt gets AlreadyExists and has to read it itself.
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

        def send_and_check(upload: MultipartUpload) -> list[CompletedPartEntry]:
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

        info = self._create_by_multipart_upload(key, size, described, "CRC32C", send_and_check)
        if unconfirmed.is_set():
            verify_or_delete_copy(self, key, sources, self._transfers.part_bytes)
        return info

    def put(self, key: str, data: bytes) -> ObjectInfo:
        check_object_key(key)

        def put_once(attempt: int) -> ObjectInfo:
            self._requests.meter.record_bytes_written(len(data))
            answer = self._requests.send_request_without_retries("put_object", "write", key, Body=data, ChecksumCRC32=crc32_base64(data))
            return _written_object_info(key, len(data), answer, {})

        return self._requests.request_with_retries(put_once)

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        check_object_key(key)
        check_byte_range(start, length)
        try:
            if length != 0:
                return download_object(self._requests, self._transfers, key, path, start, length)
            self.head(key)
        except RangeNotSatisfiable:
            pass
        with translated_os_errors("write", path):
            path.write_bytes(b"")
        return 0

    def lend(self, key: str, path: Path) -> FileLease | None:
        return None

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
            self._delete_batch(batch)

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
        def list_once(attempt: int) -> S3Answer:
            answer = self._requests.send_request_without_retries("list_objects_v2", "list", **params)
            # A cut answer may parse as an empty one.
            if "IsTruncated" not in answer or (answer["IsTruncated"] and not answer.get("NextContinuationToken")):
                raise Unavailable(f"cannot list {self.url}: the store's answer is incomplete")
            return answer

        return self._requests.request_with_retries(list_once)

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
        """An earlier attempt's object counts as success; otherwise raises AlreadyExists."""
        token = uuid.uuid4().hex
        checksum = crc32_base64(data)
        attempts = 0

        def put_once(attempt: int) -> ObjectInfo:
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
            self._require_stored_as_sent(key, data, answer.get("ChecksumCRC32", ""), _etag_of_answer(answer))
            return _written_object_info(key, len(data), answer, metadata)

        try:
            return self._requests.request_with_retries(put_once)
        except PreconditionFailed as error:
            own = self._find_own_object(key, token) if attempts > 1 else None
            if own:
                self._require_stored_as_sent(key, data, "", own.etag)
                return own
            raise AlreadyExists(f"{self._requests.object_url(key)} exists already") from error

    def _require_stored_as_sent(self, key: str, data: bytes, checksum: str, etag: str) -> None:
        # Delete a new object and raise Unavailable if it has other bytes than were sent: some servers ignore a request's checksum. No
        # reader can have used it yet. An empty ``checksum`` (CRC-32): the server returned none.
        known = self._requests.traits
        if checksum == crc32_base64(data) or known.is_etag_md5 is False:
            return
        if etag == md5_hex(data):
            known.is_etag_md5 = True
            return
        if self.get(key) == data:
            known.is_etag_md5 = False
            return
        self._delete_batch((key,))
        raise Unavailable(f"cannot write {self._requests.object_url(key)}: it arrived damaged, and the store took it")

    def _create_by_multipart_upload(
        self,
        key: str,
        size: int,
        metadata: dict[str, str],
        algorithm: Literal["CRC32", "CRC32C"],
        send_parts: Callable[[MultipartUpload], Sequence[CompletedPartEntry]],
    ) -> ObjectInfo:
        """Restart an upload that the store loses. Raises AlreadyExists if the key is taken."""
        if self._find_object(key) is not None:  # before a gigabyte travels for nothing; the completion decides
            raise AlreadyExists(f"{self._requests.object_url(key)} exists already")
        token = uuid.uuid4().hex
        for _ in range(_RESTARTS):
            upload = MultipartUpload(self._requests, self._transfers, key, _metadata_headers({**metadata, _MARK: token}), algorithm)
            try:
                return _written_object_info(key, size, upload.complete_upload(send_parts(upload)), metadata)
            except (PreconditionFailed, NoSuchUpload) as error:
                upload.abort_upload()
                if own := self._find_own_object(key, token):
                    return own
                if isinstance(error, PreconditionFailed) or self._find_object(key) is not None:
                    raise AlreadyExists(f"{self._requests.object_url(key)} exists already") from error
                # A conflict with another writer (409) has used the upload up, and neither came through.
            except BaseException:
                upload.abort_upload()
                raise
        raise Unavailable(f"cannot write {self._requests.object_url(key)}: the store lost the upload {_RESTARTS} times")

    def _find_own_object(self, key: str, token: str) -> ObjectInfo | None:
        found = self._find_object(key)
        return _without_write_token(found) if found is not None and found.metadata.get(_MARK) == token else None

    def _find_object(self, key: str) -> ObjectInfo | None:
        try:
            return self._head_object(key)
        except NotFound:
            return None

    def _delete_batch(self, batch: Sequence[str]) -> None:
        root = self._requests.prefix
        wanted = {root + key for key in batch}

        def delete_once(attempt: int) -> None:
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

        self._requests.request_with_retries(delete_once)


def _written_object_info(key: str, size: int, response: S3Answer, metadata: Mapping[str, str]) -> ObjectInfo:
    return ObjectInfo(key, size, _date_header_ms(response, key), _etag_of_answer(response), metadata)


def _metadata_headers(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in metadata.items()}


def _without_write_token(info: ObjectInfo) -> ObjectInfo:
    return replace(info, metadata={name: value for name, value in info.metadata.items() if name != _MARK})


def _etag_of_answer(response: Mapping[str, Any]) -> str:
    return str(response.get("ETag", "")).strip('"')


def _epoch_ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _date_header_ms(response: Mapping[str, Any], url: str) -> int:
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return _epoch_ms(parsedate_to_datetime(date))
    except ValueError as error:
        raise Refused(f"{url}: the store's answers bear no date ({date!r})", hint="Remove the proxy that drops the Date header") from error


# Checks of a bucket's settings. Each costs one request.


_ARCHIVED = {"GLACIER", "DEEP_ARCHIVE"}
_DAY_MS = 86_400_000


class BucketDeletionSettings(StrictFrozenModel):
    """Settings that decide whether a delete frees space; None if they may not be read.

    versioning: ``Enabled`` or ``Suspended``; empty if the bucket never had versioning.
    refusal: answer to the first refused question.
    """

    versioning: str | None
    object_lock: bool | None
    refusal: str = ""

    @property
    def does_delete_free_space(self) -> bool | None:
        if self.versioning is None or self.object_lock is None:
            return None
        return self.versioning == "" and not self.object_lock


def read_bucket_deletion_settings(store: S3Store) -> BucketDeletionSettings:
    versioning = _query_bucket_setting(store, "get_bucket_versioning")
    lock = _query_bucket_setting(store, "get_object_lock_configuration")
    return BucketDeletionSettings(
        versioning=None if isinstance(versioning, Refused) else str(versioning.get("Status", "")),
        object_lock=None if isinstance(lock, Refused) else lock.get("ObjectLockConfiguration", {}).get("ObjectLockEnabled") == "Enabled",
        refusal=next((answer.message for answer in (versioning, lock) if isinstance(answer, Refused)), ""),
    )


def bucket_findings(store: S3Store, now_ms: int) -> list[Finding]:
    state = read_bucket_deletion_settings(store)
    return [
        *_versioning_findings(store, state),
        *_archived_object_findings(store),
        *_unfinished_upload_findings(store, now_ms),
    ]


def _versioning_findings(store: S3Store, state: BucketDeletionSettings) -> list[Finding]:
    findings = []
    if state.versioning:
        findings.append(
            Finding(
                "warning",
                "versioning",
                "",
                f"the bucket of {store.url} keeps versions ({state.versioning}): a deleted object stays as an old version, and is paid for",
                "Add a lifecycle rule NoncurrentVersionExpiration for the tier's prefix, or use a bucket without versioning",
            )
        )
    if state.object_lock:
        findings.append(
            Finding(
                "warning",
                "object-lock",
                "",
                f"the bucket of {store.url} has Object Lock: replaced objects cannot be removed before their retention ends",
                "Use a bucket without Object Lock, or expect no saving before the retention ends",
            )
        )
    if state.refusal:
        rights = "s3:GetBucketVersioning and s3:GetBucketObjectLockConfiguration (conf/iam-policy.json)"
        findings.append(unknown_deletion_settings(store.url, state.refusal, rights))
    return findings


def _archived_object_findings(store: S3Store) -> list[Finding]:
    page = store.requests.send_request_with_retries("list_objects_v2", "list", Prefix=store.requests.prefix, MaxKeys=1000)
    archived = [entry for entry in page.get("Contents", []) if entry.get("StorageClass") in _ARCHIVED]
    if not archived:
        return []
    return [
        Finding(
            "warning",
            "archived",
            "",
            f"{len(archived)} of the first {len(page['Contents'])} objects of {store.url} are archived"
            f" (storage class {archived[0]['StorageClass']}, for example {archived[0]['Key']}) and cannot be read",
            "Restore them, and keep lifecycle rules that archive away from the tier's prefix",
        )
    ]


def _unfinished_upload_findings(store: S3Store, now_ms: int) -> list[Finding]:
    # Return at most one finding, about uploads older than a day: their parts are billed, and no listing of objects shows them.
    answer = _query_bucket_setting(store, "list_multipart_uploads", Prefix=store.requests.prefix)
    uploads = [] if isinstance(answer, Refused) else answer.get("Uploads", [])
    old = [upload for upload in uploads if now_ms - upload["Initiated"].timestamp() * 1000 > _DAY_MS]
    if not old:
        return []
    return [
        Finding(
            "note",
            "unfinished-uploads",
            "",
            f"{len(old)} multipart uploads below {store.url} were begun more than a day ago and never finished ({old[0]['Key']})",
            "Add a lifecycle rule AbortIncompleteMultipartUpload of 7 days to the bucket",
        )
    ]


def _query_bucket_setting(store: S3Store, operation: str, **params: Any) -> dict[str, Any] | Refused:
    """Empty dict if the setting is absent, the error if the store refuses."""
    try:
        return store.requests.send_request_with_retries(operation, "ask for the settings of", **params)
    except Refused as error:
        return {} if "ConfigurationNotFound" in error.message else error


@dataclass(frozen=True)
class ObjectVersion:
    """Overwritten or deleted version of an object. modified_ms: when it was written."""

    key: str
    version: str
    size: int
    modified_ms: int


def old_version_stores(store: ObjectStore, prefix: str) -> list[OldObjectVersionStore]:
    """Stores of the old versions below ``prefix``: of each key the newest, the one before it, and so on; none if the store has no versions.
    Raises Refused without s3:ListBucketVersions and s3:GetObjectVersion.
    """
    if not isinstance(store, S3Store):
        return []
    by_key: dict[str, list[ObjectVersion]] = defaultdict(list)
    for version in _noncurrent_object_versions(store.requests, prefix):
        by_key[version.key].append(version)
    deepest = max((len(versions) for versions in by_key.values()), default=0)
    return [OldObjectVersionStore(store, [versions[n] for versions in by_key.values() if len(versions) > n]) for n in range(deepest)]


def _noncurrent_object_versions(requests: S3RequestClient, prefix: str) -> Iterator[ObjectVersion]:
    """By key, and for one key the newest first."""
    root, marks = requests.prefix, {"KeyMarker": "", "VersionIdMarker": ""}
    while True:
        asked = {name: mark for name, mark in marks.items() if mark}
        answer = requests.send_request_with_retries("list_object_versions", "list the versions of", Prefix=root + prefix, **asked)
        for entry in answer.get("Versions", []):
            key = str(entry["Key"])
            if not entry["IsLatest"] and key.startswith(root + prefix):
                moment = int(entry["LastModified"].timestamp() * 1000)
                yield ObjectVersion(key[len(root) :], str(entry["VersionId"]), int(entry["Size"]), moment)
        following = {"KeyMarker": answer.get("NextKeyMarker", ""), "VersionIdMarker": answer.get("NextVersionIdMarker", "")}
        if not answer.get("IsTruncated") or not following["KeyMarker"] or following == marks:
            return
        marks = following


class OldObjectVersionStore(UnconfiguredStore):
    def __init__(self, store: S3Store, versions: Sequence[ObjectVersion]) -> None:
        super().__init__(f"{store.url} is asked for old versions, which nobody writes")
        self._requests = store.requests
        self.versions = {version.key: version for version in versions}

    @property
    @override
    def url(self) -> str:
        return self._requests.object_url().rstrip("/")

    @override
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        version = self._version_of_key(key)
        if length == 0 or start >= version.size:
            return b""
        return self._requests.read_range(key, start, length, VersionId=version.version)

    @override
    def head(self, key: str) -> ObjectInfo:
        return _object_info(self._version_of_key(key))

    @override
    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        version = self._version_of_key(key)

        def download_once(attempt: int) -> int:
            answer = self._requests.send_request_without_retries("get_object", "read", key, VersionId=version.version)
            span = returned_span(answer, self._requests.object_url(key), 0, None)
            with translated_os_errors("write", path), path.open("wb") as file:
                return sum(file.write(part) for part in self._requests.read_body(answer, key, span))

        if start == 0 and length is None and version.size:
            return self._requests.request_with_retries(download_once)
        data = self.get(key, start, length)
        with translated_os_errors("write", path):
            return path.write_bytes(data)

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        found = (version for key, version in self.versions.items() if key.startswith(prefix) and key.encode() > after.encode())
        return (_object_info(version) for version in sorted(found, key=lambda version: version.key.encode()))

    def _version_of_key(self, key: str) -> ObjectVersion:
        try:
            return self.versions[key]
        except KeyError:
            raise NotFound(f"{self._requests.object_url(key)} has no old version") from None


def _object_info(version: ObjectVersion) -> ObjectInfo:
    return ObjectInfo(version.key, version.size, version.modified_ms, metadata={"version": version.version})
