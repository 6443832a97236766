"""Division of an object's pieces into the parts of an upload. S3 wants at least 5 MiB of every part but the last."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from compactor.errors import Refused
from compactor.storage.keys import check_byte_range
from compactor.storage.port import ComposeSource, CopyLimits, FileRange, ObjectRangeToCopy

MAX_PARTS: Final = 10_000
MIN_PART_BYTES: Final = 5 << 20
COPIES: Final = CopyLimits(min_run_bytes=MIN_PART_BYTES, max_bytes=512 << 20)
"""S3 copies up to 5 GiB with one request; smaller ones are done side by side, and well before a connection is given up."""

RangePositionAndLength = tuple[int, int]
"""Position and length in bytes of a range."""
UploadPartOfLocalRanges = tuple[FileRange, ...]
"""Ranges of files that travel as one part, one behind the other."""
UploadPart = ObjectRangeToCopy | UploadPartOfLocalRanges


def upload_part_size_bytes(file_size_bytes: int, default_part_bytes: int) -> int:
    """Return the size in bytes of the parts into which a file is divided: ``default_part_bytes``, or more if S3 does not allow so many
    parts.

    :param file_size_bytes: size of the whole file.
    """
    return max(default_part_bytes, -(-file_size_bytes // MAX_PARTS))


def divide_file_into_upload_parts(file: FileRange, part_bytes: int) -> list[UploadPart]:
    """Return equal parts of a file; the last one may be shorter."""
    part = upload_part_size_bytes(file.length, part_bytes)
    return [(replace(file, start=at, length=min(part, file.length - at)),) for at in range(0, file.length, part)]


def plan_upload_parts(sources: Sequence[ComposeSource], part_bytes: int, max_copy_bytes: int = 0) -> list[UploadPart]:
    """Return the parts of a multipart upload that creates an object from these ranges, in order. Adjacent ranges of local files are joined
    into one part, or into several nearly equal ones. Long copied ranges are split. Empty ranges are left out.

    :param part_bytes: size in bytes of parts with local bytes; larger if S3 would otherwise get too many parts.
    :param max_copy_bytes: most bytes copied by one request; 0 for the limit of S3.
    :raises ValueError: if a part that is not the last would be smaller than S3 allows.
    :raises Refused: if there would be too many parts.
    """
    for piece in sources:
        check_byte_range(piece.start, piece.length)
    parts: list[UploadPart] = []
    for _, group in groupby((piece for piece in sources if piece.length), type):
        run = list(group)
        parts += [
            part
            for piece in run
            if isinstance(piece, ObjectRangeToCopy)
            for part in _split_copied_range(piece, max_copy_bytes or COPIES.max_bytes)
        ]
        parts += _pack_local_ranges([piece for piece in run if isinstance(piece, FileRange)], part_bytes)
    small = [part for part in parts[:-1] if upload_part_length_bytes(part) < MIN_PART_BYTES]
    if small:
        raise ValueError(
            f"a part of {upload_part_length_bytes(small[0])} bytes that is not the last: stores want at least {MIN_PART_BYTES}"
        )
    if len(parts) > MAX_PARTS:
        raise Refused(f"an object of {len(parts)} parts: stores take {MAX_PARTS}", hint="This is a bug; please report it")
    return parts


def find_mismatched_copied_range(
    sources: Sequence[ComposeSource], parts: Sequence[UploadPart], checksums: Sequence[str]
) -> ObjectRangeToCopy | None:
    """Return the first copied range whose checksum in the new object is not the expected one, or None if there is none. Ranges are not
    compared if their expected checksum or that of one of their parts is unknown.

    :param sources: the ranges of which the object was composed.
    :param parts: the parts that ``plan_upload_parts`` made of ``sources``.
    :param checksums: CRC-32C of each part as the store returned it (base64 of four bytes); empty if it returned none.
    """
    copied = iter([(part, reported) for part, reported in zip(parts, checksums, strict=True) if isinstance(part, ObjectRangeToCopy)])
    for piece in sources:
        if not isinstance(piece, ObjectRangeToCopy):
            continue
        left, crc, is_known = piece.length, 0, True
        while left:
            part, reported = next(copied)
            left -= part.length
            is_known = is_known and bool(reported)
            crc = _combine_crc32c(crc, int.from_bytes(base64.b64decode(reported), "big"), part.length) if is_known else 0
        if is_known and piece.length and piece.crc32c not in (None, crc):
            return piece
    return None


def _combine_crc32c(first_crc: int, second_crc: int, second_size_bytes: int) -> int:
    """Return the CRC-32C of two adjacent ranges together, given the CRC-32C of each.

    :param second_size_bytes: length of the second range in bytes.
    """
    from compactor.kernels.crc import combine_crc32c  # loads the compiler, which few commands need

    return combine_crc32c(first_crc, second_crc, second_size_bytes) if first_crc else second_crc


def upload_part_length_bytes(part: UploadPart) -> int:
    return part.length if isinstance(part, ObjectRangeToCopy) else sum(piece.length for piece in part)


def _split_copied_range(piece: ObjectRangeToCopy, max_bytes: int) -> list[UploadPart]:
    """Return the parts of one copied range, each at most ``max_bytes`` long. If there are several, their ``crc32c`` is None, because only
    that of the whole range is known.
    """
    spans = list(_split_into_equal_ranges(piece.length, -(-piece.length // max_bytes)))
    if len(spans) == 1:
        return [piece]
    return [replace(piece, start=piece.start + at, length=length, crc32c=None) for at, length in spans]


def _pack_local_ranges(ranges: list[FileRange], part_bytes: int) -> list[UploadPart]:
    """Return parts of about ``part_bytes`` bytes that together contain these ranges of local files in order. A part may join several
    ranges.
    """
    total = sum(piece.length for piece in ranges)
    if not total:
        return []
    return [
        tuple(_slice_concatenated_local_ranges(ranges, at, length))
        for at, length in _split_into_equal_ranges(total, max(1, total // upload_part_size_bytes(total, part_bytes)))
    ]


def _split_into_equal_ranges(total_bytes: int, range_count: int) -> Iterator[RangePositionAndLength]:
    """Yield (position, length) of ``range_count`` ranges that divide ``total_bytes`` bytes; lengths differ by at most one."""
    for number in range(range_count):
        start, end = total_bytes * number // range_count, total_bytes * (number + 1) // range_count
        yield start, end - start


def _slice_concatenated_local_ranges(ranges: list[FileRange], start: int, length: int) -> Iterator[FileRange]:
    """Yield the pieces of these local ranges that lie in [start, start + length) of their concatenation."""
    at, end = 0, start + length
    for piece in ranges:
        first, last = max(start, at), min(end, at + piece.length)
        if first < last:
            yield FileRange(piece.path, piece.start + first - at, last - first)
        at += piece.length
