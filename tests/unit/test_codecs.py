"""lz4 frames by hand: block by block, as Kafka's KafkaLZ4BlockInputStream reads them."""

from __future__ import annotations

import lz4.block
import pytest
import xxhash

from compactor.records.codecs import LZ4, CodecError, compress_body
from tests.support.inflating import decompress

LIMIT = 1 << 20
BLOCK = 1 << 16


def frame(*blocks: bytes, end: bytes = bytes(4)) -> memoryview:
    """Independent blocks of at most 64 KiB, no checksums."""
    descriptor = bytes([0x60, 0x40])
    return memoryview(b"\x04\x22\x4d\x18" + descriptor + bytes([xxhash.xxh32_intdigest(descriptor) >> 8 & 0xFF]) + b"".join(blocks) + end)


def packed(data: bytes) -> bytes:
    block: bytes = lz4.block.compress(data, store_size=False)
    return len(block).to_bytes(4, "little") + block


def stored(data: bytes) -> bytes:
    return (len(data) | 1 << 31).to_bytes(4, "little") + data


def test_blocks_of_either_kind_follow_each_other() -> None:
    data = decompress(LZ4, frame(packed(b"a" * 1000), stored(b"bc"), packed(b"d" * BLOCK)), LIMIT)
    assert bytes(data) == b"a" * 1000 + b"bc" + b"d" * BLOCK


@pytest.mark.parametrize("size", [0, 1, 100, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_what_is_written_is_read(size: int) -> None:
    for data in (bytes(size), bytes(n * n % 251 for n in range(size))):
        assert bytes(decompress(LZ4, memoryview(compress_body(LZ4, data)), LIMIT)) == data


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 8, 12])
def test_a_frame_that_ends_early(cut: int) -> None:
    whole = frame(stored(b"1234"), stored(b"5678"))
    with pytest.raises(CodecError, match="ends early"):
        decompress(LZ4, whole[: len(whole) - cut], LIMIT)


@pytest.mark.parametrize("block", [stored(bytes(BLOCK + 1)), (BLOCK + 1).to_bytes(4, "little") + bytes(BLOCK + 1)])
def test_a_block_larger_than_the_frame_allows(block: bytes) -> None:
    """Kafka: "Block size 65537 exceeded max: 65536"."""
    with pytest.raises(CodecError, match="larger than its frame allows"):
        decompress(LZ4, frame(block), LIMIT)


def test_the_limit_holds_for_all_blocks_together() -> None:
    blocks = [packed(bytes(BLOCK))] * 3
    assert len(decompress(LZ4, frame(*blocks), 3 * BLOCK)) == 3 * BLOCK
    for few in (frame(*blocks), frame(*[stored(bytes(BLOCK))] * 3)):
        with pytest.raises(CodecError, match="beyond"):
            decompress(LZ4, few, 3 * BLOCK - 1)
