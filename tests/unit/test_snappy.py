"""The snappy kernel reads what cramjam writes, and gives up on everything that it must leave to ``codecs``."""

from __future__ import annotations

import random
from collections.abc import Sequence

import cramjam
import numpy as np
import pytest
from hypothesis import given, strategies as st

from compactor.records import bulk
from compactor.records.batches import read_only_view
from compactor.records.codecs import SNAPPY, CodecError, compress_body
from tests.support.inflating import decompress
from tests.unit.test_codecs_bulk import as_of_one, inflated

WORDS = [b"a", b"bc", b'{"id":', b"0123456789", b"\x00" * 9, b"the quick brown fox jumps", b'","name":"', bytes(range(40))]


@st.composite
def texts(draw: st.DrawFn, most: int = 400) -> bytes:
    """Words that come again near and far, numbers between them, and runs."""
    dice = random.Random(draw(st.integers(0, 1 << 30)))
    words = [*WORDS, *(dice.randbytes(dice.randrange(1, 90)) for _ in range(3))]
    noise = draw(st.sampled_from([0.0, 0.1, 0.6]))
    parts = [
        dice.randbytes(dice.randrange(1, 300)) if dice.random() < noise else dice.choice(words) * dice.choice([1, 1, 1, 2, 30])
        for _ in range(draw(st.integers(0, most)))
    ]
    return b"".join(parts)


def read_by_kernel(frames: Sequence[bytes], limit: int = 1 << 20) -> tuple[int, bytes]:
    """How many of them it reads by itself, and what they hold."""
    size = np.array([len(frame) for frame in frames], np.int64)
    end = np.cumsum(size)
    out = np.zeros(1 << 21, np.uint8)
    ends = np.zeros(len(frames), np.int64)
    buf = read_only_view(np.frombuffer(b"".join(frames) + bytes(64), np.uint8))
    codec, wanted = np.full(len(frames), SNAPPY, np.int16), np.ones(len(frames), np.bool_)
    count, filled = bulk.decompress_lz4_snappy(0, buf, codec, end - size, end, wanted, 0, out, 0, limit, 1 << 62, ends)
    return count, out[:filled].tobytes()


@given(st.lists(texts(), min_size=1, max_size=4))
def test_the_kernel_reads_streams_that_cramjam_wrote(bodies: list[bytes]) -> None:
    frames = [compress_body(SNAPPY, body) for body in bodies]
    assert read_by_kernel(frames) == (len(frames), b"".join(bodies))


@given(texts())
def test_the_kernel_reads_raw_blocks(body: bytes) -> None:
    block = bytes(cramjam.snappy.compress_raw(body))
    count, found = read_by_kernel([block])
    assert (count, found) == (1, body) or len(block) < 8
    assert inflated([block], SNAPPY, [True]) == [body]


@given(texts(60), texts(60), st.data())
def test_a_damaged_body_in_a_chunk_gives_the_result_of_reading_it_alone(body: bytes, other: bytes, data: st.DataObject) -> None:
    frame = bytearray(compress_body(SNAPPY, body + b"some more"))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    as_of_one(SNAPPY, compress_body(SNAPPY, other), bytes(frame[: data.draw(st.integers(1, len(frame)))]))


def element(kind: int, length: int, offset: int) -> bytes:
    if kind == 1:
        return bytes([(offset >> 8) << 5 | (length - 4) << 2 | 1, offset & 255])
    return bytes([(length - 1) << 2 | kind]) + offset.to_bytes(2 if kind == 2 else 4, "little")


@pytest.mark.parametrize("kind", [1, 2, 3])
@pytest.mark.parametrize("offset", [*range(1, 20), 31, 32, 33, 63, 64, 65, 300])
def test_the_kernel_reads_copies_that_overlap_their_own_output(kind: int, offset: int) -> None:
    """``snap`` never writes some of them; other writers may."""
    start = random.Random(offset).randbytes(60) * 6
    plain = bytearray(start)
    body = b"".join(bytes([59 << 2]) + start[at : at + 60] for at in range(0, len(start), 60))
    for length in range(4, 12) if kind == 1 else range(1, 65):
        body += element(kind, length, offset)
        for _ in range(length):
            plain.append(plain[-offset])
    head = len(plain)
    block = bytes([head & 127 | 128, head >> 7]) + body
    assert inflated([block], SNAPPY, [True]) == [bytes(plain)]
    assert read_by_kernel([block])[0] == int(kind < 3)


@pytest.mark.parametrize("size", [1, 60, 61, 256, 257, 65_536, 65_537, 70_000])
def test_the_kernel_reads_literals_of_every_length(size: int) -> None:
    body = random.Random(size).randbytes(size)
    last = size - 1
    wide = (last.bit_length() + 7) // 8
    tag = bytes([last << 2]) if last < 60 else bytes([(59 + wide) << 2]) + last.to_bytes(wide, "little")
    varint, left = b"", size
    while left >= 128:
        varint, left = varint + bytes([left & 127 | 128]), left >> 7
    assert inflated([varint + bytes([left]) + tag + body], SNAPPY, [True]) == [body]


def test_concatenated_streams_are_read_as_one_body() -> None:
    one, two = compress_body(SNAPPY, b"first" * 100), compress_body(SNAPPY, b"second" * 100)
    assert inflated([one + two, one], SNAPPY, [True, True]) == [b"first" * 100 + b"second" * 100, b"first" * 100]


def test_a_block_that_claims_more_than_the_limit_is_refused() -> None:
    body = bytes(100_000)
    assert read_by_kernel([compress_body(SNAPPY, body)], limit=99_999) == (0, b"")
    with pytest.raises(CodecError, match="inflates beyond 99999 bytes"):
        decompress(SNAPPY, memoryview(compress_body(SNAPPY, body)), 99_999)
