"""A prefix of an S3 bucket as an object store (``s3://bucket/prefix``), on Amazon or any compatible endpoint.

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
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from compactor.errors import AlreadyExists, CopyDiffers, NotFound, Refused, Unavailable
from compactor.storage.keys import check_key, check_metadata, check_prefix, check_range, key_fault
from compactor.storage.os_errors import file_errors
from compactor.storage.port import CopiedRange, FileRange, ObjectInfo, Piece, RangeCopies, Unfinished
from compactor.storage.s3_errors import NoSuchUpload, OutOfRange, PreconditionFailed, answered
from compactor.storage.s3_parts import COPIES, parts_of, parts_of_file, unlike
from compactor.storage.s3_requests import S3Requests, byte_range, span_of
from compactor.storage.s3_transfer import MultipartUpload, changed_source, crc32, download, md5
from compactor.storage.settings import Transfers

_MARK = "written-by"
_BATCH = 1000
_EDGE = 64
"""Bytes at both ends of a copied range that are compared where there is no receipt: as many as a batch's header has."""
_RESTARTS = 3


class S3Store:
    def __init__(self, requests: S3Requests, transfers: Transfers) -> None:
        self._requests = requests
        self._transfers = transfers

    @property
    def url(self) -> str:
        return self._requests.where().rstrip("/")

    @property
    def requests(self) -> S3Requests:
        """For `config check`, which asks more than the port knows."""
        return self._requests

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
        return self._put_new(key, data, check_metadata(metadata))

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        check_key(key)
        described = check_metadata(metadata)
        with file_errors("read", path):
            size = path.stat().st_size
            data = path.read_bytes() if size <= self._transfers.part_bytes else None
        if data is not None:
            return self._put_new(key, data, described)
        parts = parts_of_file(FileRange(path, 0, size), self._transfers.part_bytes)
        return self._upload(key, size, described, "CRC32", lambda upload: upload.put_together(parts))

    @property
    def copies(self) -> RangeCopies | None:
        return COPIES if self._requests.traits.copies else None

    def compose(self, key: str, pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """A source has to be the same before and after, whether or not the server knows the condition of a copy; receipts are compared, or,
        where the server gives none, the edges of what it has copied."""
        check_key(key)
        described = check_metadata(metadata)
        parts = parts_of(pieces, self._transfers.part_bytes)
        if not parts:
            return self._put_new(key, b"", described)
        size = sum(piece.length for piece in pieces)
        self._require_sources(pieces)
        unconfirmed = threading.Event()

        def put_together(upload: MultipartUpload) -> list[dict[str, Any]]:
            done = upload.put_together(parts)
            self._require_sources(pieces)
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
            self._compare_edges(key, pieces)
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
                if key_fault(key):
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

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        check_prefix(prefix)
        root = self._requests.prefix
        params: dict[str, Any] = {"Prefix": root + prefix}
        while root or prefix:
            answer = self._requests.call("list_multipart_uploads", "list the uploads of", **params)
            for upload in answer.get("Uploads", []):
                key = str(upload["Key"])
                if key.startswith(root + prefix):  # some servers take the prefix for a hint
                    yield Unfinished(key[len(root) :], str(upload["UploadId"]), _ms(upload["Initiated"]))
            marks = {"KeyMarker": answer.get("NextKeyMarker", ""), "UploadIdMarker": answer.get("NextUploadIdMarker", "")}
            if not answer.get("IsTruncated") or not marks["KeyMarker"] or marks == {name: params.get(name, "") for name in marks}:
                return
            params |= {name: mark for name, mark in marks.items() if mark}

    def abort(self, uploads: Iterable[Unfinished]) -> None:
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
        return ObjectInfo(key, int(answer["ContentLength"]), _ms(answer["LastModified"]), _etag(answer), dict(answer.get("Metadata", {})))

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
                Metadata={**metadata, _MARK: token},
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

    def _require_sources(self, pieces: Sequence[Piece]) -> None:
        """One request a source. Raises NotFound, Unavailable, ValueError for ranges that no longer are, or never were, in it."""
        copied = [piece for piece in pieces if isinstance(piece, CopiedRange) and piece.length]
        for key in dict.fromkeys(piece.key for piece in copied):
            found = self._head(key)
            if any(piece.etag != found.etag for piece in copied if piece.key == key):
                raise changed_source(self._requests.where(key))
            if any(piece.start + piece.length > found.size for piece in copied if piece.key == key):
                raise ValueError(f"{self._requests.where(key)} ends before what was to be copied of it")

    def _compare_edges(self, key: str, pieces: Sequence[Piece]) -> None:
        """Of what was copied into a new object, which goes again where they differ. Raises CopyDiffers."""
        at = 0
        for piece in pieces:
            if isinstance(piece, CopiedRange) and piece.length:
                edge = min(_EDGE, piece.length)
                for begin in (0, piece.length - edge):
                    if self.get(key, at + begin, edge) != self.get(piece.key, piece.start + begin, edge):
                        self.delete([key])
                        where = self._requests.where(piece.key)
                        raise CopyDiffers(f"{where}: the store has copied other bytes of it than it was asked for")
            at += piece.length

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
            upload = MultipartUpload(self._requests, self._transfers, key, {**metadata, _MARK: token}, algorithm)
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
