"""One batch body inflated by the product's codecs, as a value."""

from __future__ import annotations

from compactor.records.codecs import GrowingByteBuffer, decompress_body_into


def decompress(codec: int, data: memoryview, limit: int, magic: int = 2) -> bytes:
    """Raises CodecError, also if the output would exceed ``limit`` bytes."""
    out = GrowingByteBuffer(0)
    decompress_body_into(codec, data, out, limit, magic)
    return out.array[: out.size].tobytes()
