"""Into which parts of an upload pieces go, and what copied parts come to together."""

from __future__ import annotations

import base64
from itertools import accumulate
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import assume, given, strategies as st

from compactor.adapters.stores import s3_requests as s3_parts
from compactor.adapters.stores.s3_requests import (
    MAX_PARTS,
    MIN_PART_BYTES,
    UploadPart,
    find_mismatched_copied_range,
    plan_upload_parts,
    split_file,
    upload_part_length_bytes,
)
from compactor.errors import Refused
from compactor.storage.port import ComposeSource, CopyLimits, FileRange, ObjectRangeToCopy

MIB = 1 << 20
BIG = st.integers(MIN_PART_BYTES, 3 << 30)
PIECES = st.lists(
    st.one_of(
        st.builds(ObjectRangeToCopy, st.sampled_from("ab"), st.integers(0, 9), st.one_of(BIG, st.just(0)), st.just("e")),
        st.builds(FileRange, st.just(Path("f")), st.integers(0, 9), st.one_of(BIG, st.integers(0, 9))),
    ),
    max_size=8,
)


def flat(pieces: list[ComposeSource] | list[UploadPart]) -> list[tuple[str | Path, int, int]]:
    """Source and range of all bytes in order, neighbours of one source joined."""
    joined: list[tuple[str | Path, int, int]] = []
    for piece in [one for each in pieces for one in (each if isinstance(each, tuple) else (each,))]:
        source = piece.key if isinstance(piece, ObjectRangeToCopy) else piece.path
        if joined and joined[-1][::2] == (source, piece.start):
            joined[-1] = (source, joined[-1][1], piece.start + piece.length)
        elif piece.length:
            joined.append((source, piece.start, piece.start + piece.length))
    return joined


@given(PIECES, st.integers(MIN_PART_BYTES, 64 * MIB))
def test_parts_are_the_pieces_in_sizes_that_s3_takes(pieces: list[ComposeSource], part_bytes: int) -> None:
    try:
        parts = plan_upload_parts(pieces, part_bytes)
    except ValueError:
        assume(False)
    assert flat(parts) == flat(pieces)
    assert all(upload_part_length_bytes(part) >= MIN_PART_BYTES for part in parts[:-1])
    for part in parts:
        assert (
            0
            < upload_part_length_bytes(part)
            <= (s3_parts.COPIES.max_bytes if isinstance(part, ObjectRangeToCopy) else max(2 * part_bytes, MIN_PART_BYTES))
        )


def test_a_short_local_range_between_copies_is_refused_and_at_the_end_is_not() -> None:
    copied, short = ObjectRangeToCopy("a", 0, MIN_PART_BYTES, "e"), FileRange(Path("f"), 0, MIN_PART_BYTES - 1)
    assert len(plan_upload_parts([copied, short], MIN_PART_BYTES)) == 2
    assert len(plan_upload_parts([copied, short, FileRange(Path("g"), 4, 1), copied], MIN_PART_BYTES)) == 3
    wrong: list[list[ComposeSource]] = [
        [short, copied],
        [copied, short, copied],
        [ObjectRangeToCopy("a", 0, MIN_PART_BYTES - 1, "e"), short],
    ]
    for pieces in wrong:
        with pytest.raises(ValueError, match=f"a part of {MIN_PART_BYTES - 1} bytes"):
            plan_upload_parts(pieces, MIN_PART_BYTES)


def test_a_file_of_more_than_ten_thousand_parts_gets_larger_ones() -> None:
    parts = split_file(FileRange(Path("f"), 0, 5 << 40), MIN_PART_BYTES)
    assert len(parts) == MAX_PARTS
    assert sum(map(upload_part_length_bytes, parts)) == 5 << 40


def test_more_copies_than_an_upload_has_parts_are_refused() -> None:
    with pytest.raises(Refused, match="10001 parts"):
        plan_upload_parts([ObjectRangeToCopy("a", 0, MIN_PART_BYTES, "e")] * (MAX_PARTS + 1), MIN_PART_BYTES)


@given(st.binary(min_size=1, max_size=200), st.integers(1, 60), st.integers(0, 3), st.data())
def test_what_split_copies_come_to_is_compared(content: bytes, most: int, flip: int, data: st.DataObject) -> None:
    """The checksum of the whole is that of its parts one behind the other, unless a receipt has none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_parts, "COPIES", CopyLimits(0, most))
        patch.setattr(s3_parts, "MIN_PART_BYTES", 0)
        piece = ObjectRangeToCopy("a", 0, len(content), "e", google_crc32c.value(content) ^ flip)
        pieces: list[ComposeSource] = [FileRange(Path("f"), 0, 3), ObjectRangeToCopy("b", 0, 0, "e", 7), piece, FileRange(Path("f"), 0, 3)]
        parts = plan_upload_parts(pieces, 5)
    ends = list(accumulate(part.length for part in parts if isinstance(part, ObjectRangeToCopy)))
    told = [
        base64.b64encode(google_crc32c.value(content[first:last]).to_bytes(4, "big")).decode()
        for first, last in zip([0, *ends], ends, strict=False)
    ]
    receipts = [told.pop(0) if isinstance(part, ObjectRangeToCopy) else "AAAA" for part in parts]
    assert find_mismatched_copied_range(pieces, parts, receipts) == (piece if flip else None)
    silent = data.draw(st.sampled_from([number for number, part in enumerate(parts) if isinstance(part, ObjectRangeToCopy)]))
    receipts[silent] = ""
    assert find_mismatched_copied_range(pieces, parts, receipts) is None
