"""The key hash against its published vectors, and against a straightforward second implementation."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bloom.filter import hash_keys, siphash_key_halves

# The 64 SipHash-2-4-128 vectors of the reference implementation: key 00 01 .. 0f, messages of 0, 1, .. 63 bytes 00 01 ..
VECTORS = bytes.fromhex(
    "a3817f04ba25a8e66df67214c7550293da87c1d86b99af44347659119b22fc458177228da4a45dc7fca38bdef60affe49c70b60c5267a94e5f33b6b02985ed51"
    "f88164c12d9c8faf7d0f6e7c7bcd55791368875980776f8854527a07690e962714eeca338b208613485ea0308fd7a15ea1f1ebbed8dbc153c0b84aa61ff08239"
    "3b62a9ba6258f5610f83e264f31497b4264499060ad9baabc47f8b02bb6d71ed00110dc378146956c95447d3f3d0fbba0151c568386b6677a2b4dc6f81e5dc18"
    "d626b266905ef35882634df68532c1259869e247e9c08b10d029934fc4b952f731fcefac66d7de9c7ec7485fe44949025493e99933b0a8117e08ec0f97cfc3d9"
    "6ee2a4ca67b054bbfd3315bf85230577473d06e8738db89854c066c47ae47740a426e5e423bf4885294da481feaef72378017731cf65fab074d5208952512eb1"
    "9e25fc833f2290733e9344a5e83839eb568e495abe525a218a2214cd3e071d124a29b54552d16b9a469c10528eff0aaec9d184ddd5a9f5e0cf8ce29a9abf691c"
    "2db479ae78bd50d8882a8a178a6132ad8ece5f042d5e447b5051b9eacb8d8f6f9c0b53b4b3c307e87eaee08678141f66abf248af69a6eae4bfd3eb2f129eeb94"
    "0664da1668574b88b935f3027358aef4aa4b9dc4bf337de90cd4fd3c467c6ab7ea5c7f471faf6bde2b1ad7d4686d22872939b0183223fafc1723de4f52c43d35"
    "7c3956ca5eeafc3e363e9d556546eb6877c6077146f01c32b6b69d5f4ea9ffcf37a6986cb8847edf0925f0f1309b54dea705f0e69da9a8f907241a2e923c8cc8"
    "3dc47d1f29c448461e9e76ed904f67110d62bf01e6fc0e1a0d3c4751c5d3692b8c03468bca7c669ee4fd5e084bbee7b5528a5bb93baf2c9c4473cce5d0d22bd9"
    "df6a301e95c95dad97ae0cc8c6913bd8801189902c857f39e73591285e70b6dbe617346ac9c231bb3650ae34ccca0c5b27d93437efb721aa401821dcec5adf89"
    "89237d9ded9c5e78d8b1c9b166cc73424a6d8091bf5e7d651189fa94a250b14c0e33f96055e7ae893ffc0e3dcf492902e61c432b720b19d18ec8d84bdc63151b"
    "f7e5aef549f782cf379055a608269b16438d030fd0b7a54fa837f2ad201a6403a590d3ee4fbf04e3247e0d27f286423f5fe2c1a172fe93c4b15cd37caef9f538"
    "2c97325cbd06b36eb2133dd08b3a017c92c814227a6bca949ff0659f002ad39edce850110bd8328cfbd50841d6911d8767f14984c7da791248e32bb5922583da"
    "1938f2cf72d54ee97e94166fa91d2a3674481e9646ed49fe0f6224301604698e57fca5de98a9d6d8006438d0583d8a1d9fecde1cefdc1cbed4763674d9575359"
    "e3040c00eb28f15366ca73cbd872e7407697009a6a831dfecca91c5993670f7a5853542321f567a005d547a4f04759bd5150d1772f50834a503e069a973fbd7c"
)
KEY = bytes(range(16))
MASK = 2**64 - 1


def hashed(keys: list[bytes | None], secret: bytes = KEY, gap: int = 0) -> list[bytes]:
    """Each key's 16-byte hash; the keys lie one after another, the last one at the very end of the array."""
    buf = np.frombuffer(b"".join(b"\xaa" * gap + (key or b"") for key in keys), dtype=np.uint8)
    lengths = np.array([-1 if key is None else len(key) for key in keys], dtype=np.int32)
    starts = np.cumsum(np.maximum(lengths, 0) + gap).astype(np.int64) - np.maximum(lengths, 0)
    out = np.full((len(keys), 2), 77, dtype=np.uint64)
    hash_keys(buf, starts, lengths, *siphash_key_halves(secret), out)
    return [row.tobytes() for row in out]


def textbook(message: bytes, secret: bytes) -> bytes:
    k0, k1 = int.from_bytes(secret[:8], "little"), int.from_bytes(secret[8:], "little")
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D ^ 0xEE, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rotated(x: int, by: int) -> int:
        return ((x << by) | (x >> (64 - by))) & MASK

    def rounds(count: int) -> None:
        for _ in range(count):
            for a, b, by, flip in ((0, 1, 13, True), (2, 3, 16, False), (0, 3, 21, False), (2, 1, 17, True)):
                v[a] = (v[a] + v[b]) & MASK
                v[b] = rotated(v[b], by) ^ v[a]
                if flip:
                    v[a] = rotated(v[a], 32)

    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) % 256])
    for i in range(0, len(padded), 8):
        word = int.from_bytes(padded[i : i + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return low.to_bytes(8, "little") + (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")


@pytest.mark.parametrize("gap", [0, 1, 5])
def test_published_vectors(gap: int) -> None:
    assert b"".join(hashed([bytes(range(n)) for n in range(64)], gap=gap)) == VECTORS


def test_any_key_and_any_length_against_the_textbook() -> None:
    dice = random.Random(20)
    for _ in range(20):
        secret = dice.randbytes(16)
        keys = [dice.randbytes(dice.choice([0, 1, 7, 8, 9, 15, 16, 17, 100, 255, 256, 257, 1000])) for _ in range(20)]
        assert hashed(list(keys), secret, gap=dice.randrange(3)) == [textbook(key, secret) for key in keys]


def test_a_record_without_a_key_gets_zeros_and_an_empty_key_does_not() -> None:
    assert hashed([None, b"", None]) == [bytes(16), textbook(b"", KEY), bytes(16)]


def test_read_only_bytes_are_taken() -> None:
    assert not np.frombuffer(b"abc", dtype=np.uint8).flags.writeable
    assert hashed([b"abc"]) == [textbook(b"abc", KEY)]


def test_nothing_to_hash() -> None:
    assert hashed([]) == []


def test_a_secret_has_16_bytes() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        siphash_key_halves(b"short")
