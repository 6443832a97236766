"""Into which parts of a multipart upload an object's pieces go: pure. S3 wants at least 5 MiB of every part but the last."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from compactor.errors import Refused
from compactor.storage.keys import check_range
from compactor.storage.port import CopiedRange, FileRange, Piece, RangeCopies

MAX_PARTS: Final = 10_000
LEAST_BYTES: Final = 5 << 20
COPIES: Final = RangeCopies(least_bytes=LEAST_BYTES, most_bytes=512 << 20)
"""S3 copies up to 5 GiB with one request; smaller ones are done side by side, and well before a connection is given up."""

SentPart = tuple[FileRange, ...]
"""Ranges of files that travel as one part, one behind the other."""
Part = CopiedRange | SentPart


def part_size(total: int, part_bytes: int) -> int:
    """Of equal parts of one file: ``part_bytes``, more where there would be too many."""
    return max(part_bytes, -(-total // MAX_PARTS))


def parts_of_file(whole: FileRange, part_bytes: int) -> list[Part]:
    """Equal parts, the last one shorter."""
    part = part_size(whole.length, part_bytes)
    return [(replace(whole, start=at, length=min(part, whole.length - at)),) for at in range(0, whole.length, part)]


def parts_of(pieces: Sequence[Piece], part_bytes: int) -> list[Part]:
    """Neighbouring ranges of files become one part, or several that are nearly equal; so do long ranges to be copied.

    Raises ValueError where a part that is not the last would be too small; Refused where there are too many.
    """
    for piece in pieces:
        check_range(piece.start, piece.length)
    parts: list[Part] = []
    for _, group in groupby((piece for piece in pieces if piece.length), type):
        run = list(group)
        parts += [part for piece in run if isinstance(piece, CopiedRange) for part in _copied(piece)]
        parts += _sent([piece for piece in run if isinstance(piece, FileRange)], part_bytes)
    small = [part for part in parts[:-1] if length_of(part) < LEAST_BYTES]
    if small:
        raise ValueError(f"a part of {length_of(small[0])} bytes that is not the last: S3 wants at least {LEAST_BYTES}")
    if len(parts) > MAX_PARTS:
        raise Refused(f"an object of {len(parts)} parts: S3 takes {MAX_PARTS}", hint="This is a bug; please report it")
    return parts


def unlike(pieces: Sequence[Piece], parts: Sequence[Part], checksums: Sequence[str]) -> CopiedRange | None:
    """The first range that was copied with another checksum than it must have.

    :param checksums: CRC-32C of each part as the store tells it (base64 of four bytes), empty where it does not.
    """
    copied = iter([(part, told) for part, told in zip(parts, checksums, strict=True) if isinstance(part, CopiedRange)])
    for piece in pieces:
        if not isinstance(piece, CopiedRange):
            continue
        left, crc, is_known = piece.length, 0, True
        while left:
            part, told = next(copied)
            left -= part.length
            is_known = is_known and bool(told)
            crc = _after(crc, int.from_bytes(base64.b64decode(told), "big"), part.length) if is_known else 0
        if is_known and piece.length and piece.crc32c not in (None, crc):
            return piece
    return None


def _after(first: int, second: int, size: int) -> int:
    """Of two ranges together; ``size``: of the second one."""
    from compactor.kernels.crc import joined  # loads the compiler, which few commands need

    return joined(first, second, size) if first else second


def length_of(part: Part) -> int:
    return part.length if isinstance(part, CopiedRange) else sum(piece.length for piece in part)


def _copied(piece: CopiedRange) -> list[Part]:
    """Their own checksums are not known, but what they come to together is."""
    spans = list(_even(piece.length, -(-piece.length // COPIES.most_bytes)))
    if len(spans) == 1:
        return [piece]
    return [replace(piece, start=piece.start + at, length=length, crc32c=None) for at, length in spans]


def _sent(run: list[FileRange], part_bytes: int) -> list[Part]:
    total = sum(piece.length for piece in run)
    if not total:
        return []
    return [tuple(_slice(run, at, length)) for at, length in _even(total, max(1, total // part_size(total, part_bytes)))]


def _even(total: int, count: int) -> Iterator[tuple[int, int]]:
    """Position and length of ``count`` ranges, whose lengths differ by one at most."""
    for number in range(count):
        start, end = total * number // count, total * (number + 1) // count
        yield start, end - start


def _slice(run: list[FileRange], start: int, length: int) -> Iterator[FileRange]:
    at, end = 0, start + length
    for piece in run:
        first, last = max(start, at), min(end, at + piece.length)
        if first < last:
            yield FileRange(piece.path, piece.start + first - at, last - first)
        at += piece.length
