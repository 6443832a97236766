"""Many batches at once: the same bytes, the same complaints as one by one, with lz4's library called from kernels and without."""

from __future__ import annotations

import random
from collections.abc import Sequence

import lz4.frame
import numpy as np
import pytest

from compactor.records import bulk
from compactor.records.batches import read_only_view
from compactor.records.codecs import GZIP, LZ4, NONE, SNAPPY, ZSTD, CodecError, GrowingByteBuffer, compress_body, max_compressed_size
from tests.support.inflating import decompress

LIMIT = 1 << 20
ENDLESS = 1 << 62


@pytest.fixture(params=["library", "without"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(bulk, "lz4_library", bulk.Lz4FunctionAddresses(["LZ4_of_nobody"] * 3))
    assert (bulk.lz4_library.compress == 0) == (request.param == "without")


def bodies() -> list[bytes]:
    dice = random.Random(7)
    text = b"".join(b'{"id":%d,"name":"%s"}' % (dice.randrange(10**6), dice.choice([b"one", b"two", b"three"])) for _ in range(9000))
    return [b"", b"x", text[:100], text[:15_000], text[: 1 << 16], text[:200_000], dice.randbytes(70_000), bytes(300_000)]


def inflated(
    frames: Sequence[bytes], codec: int, wanted: Sequence[bool], limit: int = LIMIT, most: int = ENDLESS, magic: int = 2
) -> list[bytes]:
    sizes = np.array([len(frame) for frame in frames], np.int64)
    end = np.cumsum(sizes)
    out = GrowingByteBuffer(100)
    count = len(frames)
    ends = bulk.decompress_batch_bodies(
        read_only_view(np.frombuffer(b"".join(frames) + bytes(64), np.uint8)), np.full(count, codec, np.int16), end - sizes, end,
        np.array(wanted), out, limit, most, np.full(count, magic, np.int8),
    )  # fmt: skip
    assert out.size == ends[-1]
    return [out.array[begin:stop].tobytes() for begin, stop in zip([0, *ends.tolist()], ends.tolist(), strict=False)]


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
def test_bulk_compression_gives_the_bytes_of_single_calls(codec: int) -> None:
    all_bodies = bodies()
    size = np.array([len(body) for body in all_bodies], np.int64)
    bound = max_compressed_size(size)
    slot = np.cumsum(bound) - bound
    out = np.zeros(int(bound.sum()), np.uint8)
    plain = read_only_view(np.frombuffer(b"".join(all_bodies), np.uint8))
    packed = bulk.compress_bodies_into(plain, np.full(len(size), codec, np.int16), np.cumsum(size) - size, size, out, slot, bound)
    frames = [out[at : at + length].tobytes() for at, length in zip(slot.tolist(), packed.tolist(), strict=True)]
    assert frames == [compress_body(codec, body) for body in all_bodies]
    assert inflated(frames, codec, [True] * len(frames)) == all_bodies
    some = [number % 3 != 1 for number in range(len(frames))]
    assert inflated(frames, codec, some) == [body if one else b"" for body, one in zip(all_bodies, some, strict=True)]


def test_decompression_stops_after_the_body_that_exceeds_the_limit_of_all() -> None:
    frames = [compress_body(LZ4, bytes(1000))] * 5
    assert len(inflated(frames, LZ4, [True] * 5, most=2999)) == 3
    assert len(inflated(frames, LZ4, [True] * 5, most=3000)) == 4


def test_unusual_lz4_frames_are_read_between_usual_ones() -> None:
    text = b"key=value;" * 9000
    kinds = [{"content_checksum": True}, {"block_checksum": True}, {"store_size": True}, {"block_size": lz4.frame.BLOCKSIZE_MAX4MB}]
    frames = []
    for kind in kinds:
        frames += [compress_body(LZ4, text), lz4.frame.compress(text, **{"block_linked": False, "store_size": False, **kind})]
    assert inflated(frames, LZ4, [True] * len(frames)) == [text] * len(frames)


@pytest.mark.parametrize("codec", [LZ4, SNAPPY])
@pytest.mark.parametrize("where", [0, 4, 6, 7, 8, 10, 11, 15, 16, 18, 19, 20, 21, 22, 23, 24, 40, -5, -1])
def test_a_damaged_body_gives_the_error_of_reading_it_alone(where: int, codec: int) -> None:
    good = compress_body(codec, bodies()[3])
    bad = bytearray(good)
    bad[where] ^= 0xFF
    for frame in (bytes(bad), good[:where]):
        as_of_one(codec, good, frame)


def as_of_one(codec: int, good: bytes, frame: bytes) -> None:
    """A batch between two good ones is read as it is read alone, or refused with the same words."""
    message = ""
    try:
        alone: bytes | None = bytes(decompress(codec, memoryview(frame), LIMIT))
    except CodecError as error:
        alone, message = None, str(error)
    if alone is not None:
        assert inflated([good, frame, good], codec, [True] * 3)[1] == alone
        return
    with pytest.raises(bulk.BatchUnreadableError) as found:
        inflated([good, frame, good], codec, [True] * 3)
    assert (found.value.batch, str(found.value)) == (1, message)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_the_limit_applies_to_each_batch(codec: int) -> None:
    frames = [compress_body(codec, bytes(size)) for size in (1000, 1000, 1001)]
    assert len(inflated(frames[:2], codec, [True] * 2, limit=1000)) == 2
    with pytest.raises(bulk.BatchUnreadableError, match="inflates beyond 1000 bytes") as found:
        inflated(frames, codec, [True] * 3, limit=1000)
    assert found.value.batch == 2
