"""Large objects to and from S3: parallel ranged GETs into one file, multipart uploads of local and of copied bytes."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import crc32c as castagnoli

from compactor.errors import CannotCopy, Refused, StoreError, Unavailable
from compactor.storage.answers import NoSuchUpload, OutOfRange, PreconditionFailed
from compactor.storage.copied import changed_source
from compactor.storage.os_errors import file_errors
from compactor.storage.parallel import file_bytes, in_parallel, write_all
from compactor.storage.port import CopiedRange, FileRange
from compactor.storage.s3_errors import refuses_copies
from compactor.storage.s3_parts import SentPart, UploadPart, parts_of_file
from compactor.storage.s3_requests import S3Requests, Span, byte_range, span_of
from compactor.storage.settings import Transfers

_ABORT_S = 10.0
_log = logging.getLogger(__name__)


def crc32(data: bytes) -> str:
    """As S3 writes it: base64 of the big-endian CRC-32."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def crc32c(data: bytes) -> str:
    """Likewise, of CRC-32C."""
    return base64.b64encode(castagnoli.crc32c(data).to_bytes(4, "big")).decode()


_CHECKSUMS: dict[str, Callable[[bytes], str]] = {"CRC32": crc32, "CRC32C": crc32c}


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def download(requests: S3Requests, transfers: Transfers, key: str, path: Path, start: int, length: int | None) -> int:
    """The first range says how large the object is and in which version; the others insist on that version.

    :raises Unavailable: also where the object changes while it is read.
    """
    part = transfers.part_bytes
    with file_errors("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        first = _fetch(requests, key, path, descriptor, start, start, part if length is None else min(part, length), "")
        end = first.total if length is None else min(first.total, start + length)

        def rest(at: int) -> Callable[[threading.Event], Span]:
            return lambda stop: _fetch(requests, key, path, descriptor, start, at, min(part, end - at), first.etag, stop)

        in_parallel(transfers.threads, [rest(at) for at in range(first.end, end, part)])
        with file_errors("write", path):
            # A repeated first attempt may have met a shorter object than the one before it.
            os.ftruncate(descriptor, end - start)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return end - start


def _fetch(
    requests: S3Requests,
    key: str,
    path: Path,
    descriptor: int,
    base: int,
    start: int,
    length: int,
    etag: str,
    stop: threading.Event | None = None,
) -> Span:
    """Bytes [start, start + length) of the object to position ``start - base`` of the file."""
    condition = {"IfMatch": etag} if etag else {}

    def attempt(_: int) -> Span:
        if stop and stop.is_set():
            raise CancelledError
        answer = requests.once("get_object", "read", key, Range=byte_range(start, length), **condition)
        span = span_of(answer, requests.where(key), start, length)
        if etag and (span.etag != etag or span.end != start + length):
            answer["Body"].close()
            raise PreconditionFailed("changed")
        at = start - base
        for chunk in requests.body(answer, key, span):
            with file_errors("write", path):
                at += write_all(descriptor, chunk, at)
        return span

    try:
        return requests.retry(attempt)
    except (PreconditionFailed, OutOfRange) as error:
        if not etag:
            raise
        raise Unavailable(
            f"{requests.where(key)} changed while it was read", hint="Something else writes to this tier; run verify"
        ) from error


class MultipartUpload:
    """One upload, from CreateMultipartUpload to its completion or abortion. The algorithm is named in both calls.

    ``CRC32C``: for parts that are copied, of which a caller may know it already.
    """

    def __init__(
        self,
        requests: S3Requests,
        transfers: Transfers,
        key: str,
        metadata: Mapping[str, str],
        algorithm: Literal["CRC32", "CRC32C"] = "CRC32",
    ) -> None:
        self._requests = requests
        self._transfers = transfers
        self._key = key
        self._algorithm = algorithm
        about = {"Metadata": dict(metadata), **transfers.of_new_objects}
        answer = requests.call("create_multipart_upload", "write", key, ChecksumAlgorithm=algorithm, **about)
        self._id = answer.get("UploadId", "")
        if not self._id:
            raise Unavailable(f"cannot write {requests.where(key)}: the store began no upload")

    def send(self, path: Path, size: int) -> list[dict[str, Any]]:
        """A file, whole; returns what completion needs."""
        return self.put_together(parts_of_file(FileRange(path, 0, size), self._transfers.part_bytes))

    def put_together(self, parts: Sequence[UploadPart]) -> list[dict[str, Any]]:
        """All parts; returns what completion needs, of copied ones with the checksum that the store tells, if it tells any."""

        def one(number: int, part: UploadPart) -> Callable[[threading.Event], dict[str, Any]]:
            if isinstance(part, CopiedRange):
                return lambda stop: self._copy_part(part, number, stop)
            return lambda stop: self._send_part(part, number, stop)

        return in_parallel(self._transfers.threads, [one(number, part) for number, part in enumerate(parts, start=1)])

    def _copy_part(self, part: CopiedRange, number: int, stop: threading.Event) -> dict[str, Any]:
        """Raises NotFound, Unavailable where the source is another version, CannotCopy."""
        checksum = f"Checksum{self._algorithm}"

        def attempt(_: int) -> dict[str, Any]:
            if stop.is_set():
                raise CancelledError
            answer = self._requests.once(
                "upload_part_copy",
                "copy to",
                self._key,
                UploadId=self._id,
                PartNumber=number,
                CopySource={"Bucket": self._requests.bucket, "Key": self._requests.prefix + part.key},
                CopySourceRange=byte_range(part.start, part.length),
                CopySourceIfMatch=f'"{part.etag}"',
            ).get("CopyPartResult", {})
            if not answer.get("ETag"):  # a copy that fails late says so in a body below 200, which may be cut off
                raise Unavailable(f"cannot copy to {self._requests.where(self._key)}: the store's answer is incomplete")
            reported = {checksum: answer[checksum]} if answer.get(checksum) else {}
            return {"PartNumber": number, "ETag": answer["ETag"], **reported}

        try:
            return self._requests.retry(attempt)
        except (PreconditionFailed, OutOfRange) as error:
            raise changed_source(self._requests.where(part.key)) from error
        except Refused as error:
            if not refuses_copies(error):
                raise
            self._requests.traits.copies = False
            raise CannotCopy(f"cannot copy a range of {self._requests.where(part.key)}: {error.message}") from error

    def _send_part(self, part: SentPart, number: int, stop: threading.Event) -> dict[str, Any]:
        data = b"".join(file_bytes(piece) for piece in part)
        checksum = _CHECKSUMS[self._algorithm](data)

        def attempt(_: int) -> dict[str, Any]:
            if stop.is_set():
                raise CancelledError
            self._requests.meter.wrote(len(data))
            answer = self._requests.once(
                "upload_part",
                "write",
                self._key,
                UploadId=self._id,
                PartNumber=number,
                Body=data,
                **{f"Checksum{self._algorithm}": checksum},
            )
            # Where ETags have proved to be digests they count: moto sends the request's own checksum back.
            if self._requests.traits.md5 and answer["ETag"].strip('"') != md5(data):
                raise Unavailable(f"cannot write {self._requests.where(self._key)}: part {number} arrived damaged")
            return {"PartNumber": number, "ETag": answer["ETag"], f"Checksum{self._algorithm}": checksum}

        return self._requests.retry(attempt)

    def complete(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Only if the key is free. Raises PreconditionFailed, or NoSuchUpload; either may mean that an earlier attempt came through."""

        def attempt(_: int) -> dict[str, Any]:
            answer = self._requests.once(
                "complete_multipart_upload",
                "write",
                self._key,
                UploadId=self._id,
                MultipartUpload={"Parts": list(parts)},
                IfNoneMatch="*",
            )
            if not answer.get("ETag"):
                raise Unavailable(f"cannot write {self._requests.where(self._key)}: the store's answer is incomplete")
            return answer

        return self._requests.retry(attempt)

    def abort(self) -> None:
        """Frees the parts. Where even that fails the upload stays, costs storage, and `config check` names it."""
        retrier = self._requests.retrier
        hasty = replace(retrier, policy=retrier.policy.model_copy(update={"deadline_s": min(retrier.policy.deadline_s, _ABORT_S)}))
        try:
            hasty.call(lambda _: self._requests.once("abort_multipart_upload", "write", self._key, UploadId=self._id))
        except NoSuchUpload:
            return
        except StoreError as error:
            _log.warning("an unfinished upload of %s is left behind (%s)", self._requests.where(self._key), error)
