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

from compactor.config.store_sections import S3
from compactor.errors import AlreadyExists, CopyDiffers, NotFound, Refused, Unavailable
from compactor.storage.answers import NoSuchUpload, OutOfRange, PreconditionFailed
from compactor.storage.copied import read_back, require_sources
from compactor.storage.findings import StoreFinding
from compactor.storage.keys import check_key, check_metadata, check_prefix, check_range, key_problem, portable_names
from compactor.storage.options import StoreOptions
from compactor.storage.os_errors import file_errors
from compactor.storage.port import ComposeSource, FileRange, ObjectInfo, ObjectStore, RangeCopies, UnfinishedUpload
from compactor.storage.s3_errors import answered
from compactor.storage.s3_parts import COPIES, parts_of, parts_of_file, unlike
from compactor.storage.s3_requests import S3Requests, Traits, byte_range, span_of
from compactor.storage.s3_transfer import MultipartUpload, crc32, download, md5
from compactor.storage.schemes import bucket_and_prefix
from compactor.storage.settings import Transfers

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


def open_at(url: str, options: StoreOptions) -> ObjectStore:
    """Return the store at ``s3://bucket/prefix``. Makes no request. Raises UsageError."""
    bucket, prefix = bucket_and_prefix(url)
    settings = options.settings.s3
    requests = S3Requests(
        bucket, prefix, settings, options.retrier(settings.first_answer_ms / 1000), options.meter, _shared_traits(bucket, settings)
    )
    return S3Store(requests, options.transfers, options.before_create)


@lru_cache(maxsize=64)
def _shared_traits(bucket: str, settings: S3) -> Traits:
    """Return what all stores of this process in one bucket have learned about its server."""
    return Traits()


class S3Store:
    """ObjectStore in a bucket. before_create: called with this store before each create, may raise StoreError (``ConditionCheck``)."""

    def __init__(
        self, requests: S3Requests, transfers: Transfers, before_create: Callable[[ObjectStore], None] = lambda store: None
    ) -> None:
        self._requests = requests
        self._transfers = transfers
        self._before_create = before_create

    @property
    def url(self) -> str:
        return self._requests.where().rstrip("/")

    @property
    def requests(self) -> S3Requests:
        """Requests beyond the port, for `config check` and old versions."""
        return self._requests

    def inspect(self, prefix: str, now_ms: int) -> list[StoreFinding]:
        """Return findings about the bucket's settings. Raises StoreError."""
        from compactor.storage.probe_s3 import bucket_findings

        return bucket_findings(self, prefix, now_ms)

    def deletes_free_space(self) -> bool | None:
        """Return whether deleting frees space at once, or None if the credentials may not ask. Raises StoreError."""
        from compactor.storage.probe_s3 import bucket_state

        return bucket_state(self).deletes_free_space

    def required_permission(self, verb: str) -> str:
        """Return the action that a policy must allow for this verb of ``probe``."""
        return _PERMISSIONS[verb]

    def conditions_place(self) -> tuple[str, str, str]:
        """Return endpoint, bucket and prefix (``ConditionCheck``)."""
        return str(self._requests.client.meta.endpoint_url), self._requests.bucket, self._requests.prefix

    def unchecked(self) -> S3Store:
        """Return the same store without ``before_create``."""
        return S3Store(self._requests, self._transfers)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_key(key)
        check_range(start, length)
        if length == 0:
            self.head(key)
            return b""
        whole = start == 0 and length is None
        params = {"ChecksumMode": "ENABLED"} if whole else {"Range": byte_range(start, length)}

        def attempt(_: int) -> bytes:
            answer = self._requests.once("get_object", "read", key, **params)
            span = span_of(answer, self._requests.where(key), start, length)
            return b"".join(self._requests.body(answer, key, span))

        try:
            return self._requests.retry(attempt)
        except OutOfRange:
            return b""

    def head(self, key: str) -> ObjectInfo:
        return _without_token(self._head(key))

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        check_key(key)
        described = check_metadata(metadata)
        self._before_create(self)
        return self._put_new(key, data, described)

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        check_key(key)
        described = check_metadata(metadata)
        with file_errors("read", path):
            size = path.stat().st_size
            data = path.read_bytes() if size <= self._transfers.part_bytes else None
        self._before_create(self)
        if data is not None:
            return self._put_new(key, data, described)
        parts = parts_of_file(FileRange(path, 0, size), self._transfers.part_bytes)
        return self._upload(key, size, described, "CRC32", lambda upload: upload.put_together(parts))

    @property
    def copies(self) -> RangeCopies | None:
        return COPIES if self._requests.traits.copies else None

    def compose(self, key: str, pieces: Sequence[ComposeSource], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """A source has to be the same before and after, whether or not the server knows the condition of a copy; receipts are compared.

        If the server gives none, what it has copied is read back once the object exists. A process that dies before that leaves an object
        that nobody has compared: whoever meets it has to read it (AlreadyExists).
        """
        check_key(key)
        described = check_metadata(metadata)
        parts = parts_of(pieces, self._transfers.part_bytes)
        self._before_create(self)
        if not parts:
            return self._put_new(key, b"", described)
        size = sum(piece.length for piece in pieces)
        require_sources(self, pieces)
        unconfirmed = threading.Event()

        def put_together(upload: MultipartUpload) -> list[dict[str, Any]]:
            done = upload.put_together(parts)
            require_sources(self, pieces)
            receipts = [str(part.get("ChecksumCRC32C", "")) for part in done]
            wrong = unlike(pieces, parts, receipts)
            if wrong:
                where = self._requests.where(wrong.key)
                raise CopyDiffers(f"{where}: what was copied of it has another checksum than it must have", hint="Run verify --deep")
            if not all(receipts):
                unconfirmed.set()
            return done

        info = self._upload(key, size, described, "CRC32C", put_together)
        if unconfirmed.is_set():
            read_back(self, key, pieces, self._transfers.part_bytes)
        return info

    def put(self, key: str, data: bytes) -> ObjectInfo:
        check_key(key)

        def attempt(_: int) -> ObjectInfo:
            self._requests.meter.wrote(len(data))
            answer = self._requests.once("put_object", "write", key, Body=data, ChecksumCRC32=crc32(data))
            return _written(key, len(data), answer, {})

        return self._requests.retry(attempt)

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        check_key(key)
        check_range(start, length)
        try:
            if length != 0:
                return download(self._requests, self._transfers, key, path, start, length)
            self.head(key)
        except OutOfRange:
            pass
        with file_errors("write", path):
            path.write_bytes(b"")
        return 0

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        root = self._requests.prefix
        params: dict[str, Any] = {"Prefix": root + prefix, "MaxKeys": self._transfers.list_page}
        if after:
            params["StartAfter"] = root + after
        last = after
        while True:
            answer = self._page(params)
            for entry in answer.get("Contents", []):
                key = str(entry["Key"])[len(root) :]
                if key_problem(key):
                    continue  # a console's "folder", or an object that is not ours
                if key <= last:
                    raise Refused(
                        f"{self.url} lists {key!r} after {last!r}",
                        hint="Directory buckets list without order; use a general purpose bucket",
                    )
                last = key
                yield ObjectInfo(key, int(entry["Size"]), _ms(entry["LastModified"]), _etag(entry), {})
            if not answer["IsTruncated"]:
                return
            if answer["NextContinuationToken"] == params.get("ContinuationToken"):
                raise Refused(f"{self.url} lists one page again and again", hint="Use a store whose ListObjectsV2 ends")
            params["ContinuationToken"] = answer["NextContinuationToken"]

    def delete(self, keys: Iterable[str]) -> None:
        left = iter(keys)
        while batch := tuple(islice(left, _BATCH)):
            for key in batch:
                check_key(key)
            self._delete_batch(batch)

    def unfinished_uploads(self, prefix: str) -> Iterator[UnfinishedUpload]:
        check_prefix(prefix)
        root = self._requests.prefix
        params: dict[str, Any] = {"Prefix": root + prefix}
        while root or prefix:
            answer = self._requests.call("list_multipart_uploads", "list the uploads of", **params)
            for upload in answer.get("Uploads", []):
                key = str(upload["Key"])
                if key.startswith(root + prefix):  # some servers take the prefix for a hint
                    yield UnfinishedUpload(key[len(root) :], str(upload["UploadId"]), _ms(upload["Initiated"]))
            marks = {"KeyMarker": answer.get("NextKeyMarker", ""), "UploadIdMarker": answer.get("NextUploadIdMarker", "")}
            if not answer.get("IsTruncated") or not marks["KeyMarker"] or marks == {name: params.get(name, "") for name in marks}:
                return
            params |= {name: mark for name, mark in marks.items() if mark}

    def abort_uploads(self, uploads: Iterable[UnfinishedUpload]) -> None:
        for upload in uploads:
            with suppress(NoSuchUpload, NotFound):
                self._requests.call("abort_multipart_upload", "abort an upload of", upload.key, UploadId=upload.id)

    def clock_ms(self) -> int:
        return _date_ms(self._requests.glance(), self.url)

    def _page(self, params: dict[str, Any]) -> dict[str, Any]:
        def attempt(_: int) -> dict[str, Any]:
            answer = self._requests.once("list_objects_v2", "list", **params)
            # A cut answer may parse as an empty one.
            if "IsTruncated" not in answer or (answer["IsTruncated"] and not answer.get("NextContinuationToken")):
                raise Unavailable(f"cannot list {self.url}: the store's answer is incomplete")
            return answer

        return self._requests.retry(attempt)

    def _head(self, key: str) -> ObjectInfo:
        check_key(key)
        try:
            answer = self._requests.call("head_object", "read", key)
        except NotFound:
            if not self._requests.bucket_seen:
                # HEAD has no body that could say which of the two is missing.
                self._requests.glance()
            raise
        metadata = portable_names(answer.get("Metadata", {}))
        return ObjectInfo(key, int(answer["ContentLength"]), _ms(answer["LastModified"]), _etag(answer), metadata)

    def _put_new(self, key: str, data: bytes, metadata: dict[str, str]) -> ObjectInfo:
        token = uuid.uuid4().hex
        checksum = crc32(data)
        attempts = 0

        def attempt(number: int) -> ObjectInfo:
            nonlocal attempts
            attempts = number + 1
            self._requests.meter.wrote(len(data))
            answer = self._requests.once(
                "put_object",
                "write",
                key,
                Body=data,
                ChecksumCRC32=checksum,
                Metadata=_headers({**metadata, _MARK: token}),
                IfNoneMatch="*",
                **self._transfers.of_new_objects,
            )
            self._check_stored(key, data, answer.get("ChecksumCRC32", ""), _etag(answer))
            return _written(key, len(data), answer, metadata)

        try:
            return self._requests.retry(attempt)
        except PreconditionFailed as error:
            own = self._own(key, token) if attempts > 1 else None
            if own:
                self._check_stored(key, data, "", own.etag)
                return own
            raise AlreadyExists(f"{self._requests.where(key)} exists already") from error

    def _check_stored(self, key: str, data: bytes, checksum: str, etag: str) -> None:
        """Whether an object that this call has just created is what was sent: some servers ignore the checksum of a request.

        One that is not was seen by nobody who could have believed it, and is removed. Raises Unavailable.
        """
        known = self._requests.traits
        if checksum == crc32(data) or known.md5 is False:
            return
        if etag == md5(data):
            known.md5 = True
            return
        if self.get(key) == data:
            known.md5 = False
            return
        self._delete_batch((key,))
        raise Unavailable(f"cannot write {self._requests.where(key)}: it arrived damaged, and the store took it")

    def _upload(
        self,
        key: str,
        size: int,
        metadata: dict[str, str],
        algorithm: Literal["CRC32", "CRC32C"],
        fill: Callable[[MultipartUpload], Sequence[dict[str, Any]]],
    ) -> ObjectInfo:
        if self._present(key):  # before a gigabyte travels for nothing; the completion decides
            raise AlreadyExists(f"{self._requests.where(key)} exists already")
        token = uuid.uuid4().hex
        for _ in range(_RESTARTS):
            upload = MultipartUpload(self._requests, self._transfers, key, _headers({**metadata, _MARK: token}), algorithm)
            try:
                return _written(key, size, upload.complete(fill(upload)), metadata)
            except (PreconditionFailed, NoSuchUpload) as error:
                upload.abort()
                if own := self._own(key, token):
                    return own
                if isinstance(error, PreconditionFailed) or self._present(key):
                    raise AlreadyExists(f"{self._requests.where(key)} exists already") from error
                # A conflict with another writer (409) has used the upload up, and neither came through.
            except BaseException:
                upload.abort()
                raise
        raise Unavailable(f"cannot write {self._requests.where(key)}: the store lost the upload {_RESTARTS} times")

    def _own(self, key: str, token: str) -> ObjectInfo | None:
        """The object, if it is this very call that wrote it."""
        try:
            found = self._head(key)
        except NotFound:
            return None
        return _without_token(found) if found.metadata.get(_MARK) == token else None

    def _present(self, key: str) -> bool:
        try:
            self._head(key)
        except NotFound:
            return False
        return True

    def _delete_batch(self, batch: Sequence[str]) -> None:
        root = self._requests.prefix
        wanted = {root + key for key in batch}

        def attempt(_: int) -> None:
            answer = self._requests.once(
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
                raise answered(failed, f"cannot delete {self._requests.where(str(failed.get('Key', ''))[len(root) :])}")
            if wanted:
                raise Unavailable(f"cannot delete in {self.url}: the store does not say what became of {len(wanted)} keys")

        self._requests.retry(attempt)


def _written(key: str, size: int, answer: dict[str, Any], metadata: Mapping[str, str]) -> ObjectInfo:
    return ObjectInfo(key, size, _date_ms(answer, key), _etag(answer), metadata)


def _headers(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in metadata.items()}


def _without_token(info: ObjectInfo) -> ObjectInfo:
    return replace(info, metadata={name: value for name, value in info.metadata.items() if name != _MARK})


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


def _ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _date_ms(answer: Mapping[str, Any], where: str) -> int:
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return _ms(parsedate_to_datetime(date))
    except ValueError as error:
        raise Refused(
            f"{where}: the store's answers bear no date ({date!r})", hint="Remove the proxy that drops the Date header"
        ) from error
