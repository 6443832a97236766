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
from typing import Literal

import crc32c as castagnoli

from compactor.errors import CannotCopy, Refused, StoreError, Unavailable
from compactor.storage.answers import NoSuchUpload, PreconditionFailed, RangeNotSatisfiable
from compactor.storage.copy_checks import copy_source_changed_error
from compactor.storage.os_errors import os_errors_as_compactor_errors
from compactor.storage.parallel import read_file_range, run_in_parallel, write_at_position
from compactor.storage.port import ObjectRangeToCopy
from compactor.storage.s3_errors import is_copy_refusal
from compactor.storage.s3_parts import UploadPart, UploadPartOfLocalRanges
from compactor.storage.s3_requests import (
    CompletedPartEntry,
    ReturnedByteRange,
    S3Answer,
    S3RequestClient,
    parse_and_check_returned_span,
    range_header,
)
from compactor.storage.settings import TransferSettings

_ABORT_S = 10.0
_log = logging.getLogger(__name__)


def crc32_base64(data: bytes) -> str:
    """Return the CRC-32 of the data in S3's form: base64 of four big-endian bytes."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def crc32c_base64(data: bytes) -> str:
    """Return the CRC-32C of the data in S3's form: base64 of four big-endian bytes."""
    return base64.b64encode(castagnoli.crc32c(data).to_bytes(4, "big")).decode()


_CHECKSUMS: dict[str, Callable[[bytes], str]] = {"CRC32": crc32_base64, "CRC32C": crc32c_base64}


def md5_base64(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def download_object(requests: S3RequestClient, transfers: TransferSettings, key: str, path: Path, start: int, length: int | None) -> int:
    """Write bytes [start, start + length) of an object to a file and return their number. Long ranges are fetched in parallel. If
    ``length`` is None, all bytes from ``start`` on are written.

    The first answer tells the object's size and version; all other requests demand that version.

    :raises Unavailable: also if the object changes while it is read.
    """
    part = transfers.part_bytes
    with os_errors_as_compactor_errors("write", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        first = _fetch_range(requests, key, path, descriptor, start, start, part if length is None else min(part, length), "")
        end = first.total if length is None else min(first.total, start + length)

        def make_fetch_task(position: int) -> Callable[[threading.Event], ReturnedByteRange]:
            return lambda stop: _fetch_range(requests, key, path, descriptor, start, position, min(part, end - position), first.etag, stop)

        run_in_parallel(transfers.threads, [make_fetch_task(at) for at in range(first.end, end, part)])
        with os_errors_as_compactor_errors("write", path):
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
    """Write bytes [start, start + length) of an object to position ``start - file_start`` of a file. Return the range that was written.

    :param path: path of the file, for messages.
    :param descriptor: the open file.
    :param object_position_of_file_start: position in the object of the file's first byte.
    :param etag: the only version that may be read; empty for any. Raises Unavailable if the object has another one.
    :param stop: event that ends the attempts when it is set, because another range has failed.
    """
    condition = {"IfMatch": etag} if etag else {}

    def fetch_range_in_one_attempt(attempt: int) -> ReturnedByteRange:
        if stop and stop.is_set():
            raise CancelledError
        answer = requests.send_request_without_retries("get_object", "read", key, Range=range_header(start, length), **condition)
        span = parse_and_check_returned_span(answer, requests.object_url(key), start, length)
        if etag and (span.etag != etag or span.end != start + length):
            answer["Body"].close()
            raise PreconditionFailed("changed")
        at = start - object_position_of_file_start
        for chunk in requests.read_body(answer, key, span):
            with os_errors_as_compactor_errors("write", path):
                at += write_at_position(descriptor, chunk, at)
        return span

    try:
        return requests.request_with_retries(fetch_range_in_one_attempt)
    except (PreconditionFailed, RangeNotSatisfiable) as error:
        if not etag:
            raise
        raise Unavailable(
            f"{requests.object_url(key)} changed while it was read", hint="Something else writes to this tier; run verify"
        ) from error


class MultipartUpload:
    """One multipart upload, from CreateMultipartUpload until it is completed or aborted.

    algorithm: checksum of the parts. CRC32C if parts are copied, because the CRC-32C of a copied range may be known already.
    """

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
        """Upload or copy all parts. Return the entries that completion needs, one for each part. A copied part's entry has a checksum only
        if the store returned one.
        """

        def make_task_to_upload_or_copy_part(number: int, part: UploadPart) -> Callable[[threading.Event], CompletedPartEntry]:
            if isinstance(part, ObjectRangeToCopy):
                return lambda stop: self._copy_part(part, number, stop)
            return lambda stop: self._send_part(part, number, stop)

        return run_in_parallel(
            self._transfers.threads, [make_task_to_upload_or_copy_part(number, part) for number, part in enumerate(parts, start=1)]
        )

    def _copy_part(self, part: ObjectRangeToCopy, number: int, stop: threading.Event) -> CompletedPartEntry:
        """Copy one part on the server and return its entry for completion.

        Raises NotFound if the source is gone, Unavailable if it has another version, CannotCopy if the server copies no ranges.
        """
        checksum = f"Checksum{self._algorithm}"

        def copy_part_in_one_attempt(attempt: int) -> CompletedPartEntry:
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
            return self._requests.request_with_retries(copy_part_in_one_attempt)
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

        def upload_part_in_one_attempt(attempt: int) -> CompletedPartEntry:
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
            if self._requests.traits.is_etag_md5 and answer["ETag"].strip('"') != md5_base64(data):
                raise Unavailable(f"cannot write {self._requests.object_url(self._key)}: part {number} arrived damaged")
            return {"PartNumber": number, "ETag": answer["ETag"], f"Checksum{self._algorithm}": checksum}

        return self._requests.request_with_retries(upload_part_in_one_attempt)

    def complete_upload(self, parts: Sequence[CompletedPartEntry]) -> S3Answer:
        """Make the object visible, only if its key is free, and return the store's answer.

        Raises PreconditionFailed if the key is taken, NoSuchUpload if the upload is gone; either may mean that an earlier attempt of this
        call succeeded. Raises CannotCopy if the server demands a checksum of each part but reported none for copied parts, as S3Proxy does.
        """

        def complete_upload_in_one_attempt(attempt: int) -> S3Answer:
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
            return self._requests.request_with_retries(complete_upload_in_one_attempt)
        except Refused as error:
            if "checksum for each part" not in error.message or all(f"Checksum{self._algorithm}" in part for part in parts):
                raise
            self._requests.traits.can_copy = False
            raise CannotCopy(f"cannot create {self._requests.object_url(self._key)} of copied ranges: {error.message}") from error

    def abort_upload(self) -> None:
        """Abort the upload, which deletes its stored parts. Store errors are logged, not raised; the parts then stay and are billed until
        somebody aborts the upload (`config check` reports it).
        """
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
