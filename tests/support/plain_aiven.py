"""Aiven's objects read as the format's description has it, by nothing of the program: manifest, chunks, zstd, AES, RSA by hand."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import zstandard
from Crypto.Cipher import AES
from cryptography.hazmat.primitives.serialization import load_pem_private_key

INDEXES = {
    "index": "offset",
    "timeindex": "timestamp",
    "snapshot": "producerSnapshot",
    "leader-epoch-checkpoint": "leaderEpoch",
    "txnindex": "transaction",
}


def read_segment(main_path: Path, private_keys: dict[str, Path]) -> dict[str, bytes]:
    """All files of a segment: what lies in the three objects of this path and an own suffix each."""
    manifest = json.loads(main_path.with_name(main_path.name + ".rsm-manifest").read_bytes())
    log = main_path.with_name(main_path.name + ".log").read_bytes()
    indexes = main_path.with_name(main_path.name + ".indexes").read_bytes()
    assert manifest["version"] == "1"
    secret = data_key(manifest["encryption"], private_keys) if "encryption" in manifest else None
    files = {"log": b"".join(_chunks(log, manifest, secret))}
    end = 0
    for kind, name in INDEXES.items():
        span = manifest["segmentIndexes"][name]
        if span is None:
            continue
        assert span["position"] == end
        end += span["size"]
        stored = indexes[span["position"] : end]
        files[kind] = decrypt(stored, secret) if secret and stored else stored
    assert end == len(indexes)
    assert len(files["log"]) == manifest["chunkIndex"]["originalFileSize"]
    return files


def _chunks(log: bytes, manifest: dict[str, Any], secret: tuple[bytes, bytes] | None) -> list[bytes]:
    index = manifest["chunkIndex"]
    if index["type"] == "fixed":
        count = -(-index["originalFileSize"] // index["originalChunkSize"])
        sizes = [index["transformedChunkSize"]] * (count - 1) + [index["finalTransformedChunkSize"]]
    else:
        sizes = codec(zstandard.decompress(base64.b64decode(index["transformedChunks"])))
    found, at = [], 0
    for size in sizes:
        chunk = log[at : at + size]
        at += size
        chunk = decrypt(chunk, secret) if secret else chunk
        found.append(zstandard.decompress(chunk) if manifest["compression"] else chunk)
    assert at == len(log)
    assert all(len(chunk) == index["originalChunkSize"] for chunk in found[:-1])
    return found


def codec(data: bytes) -> list[int]:
    count = int.from_bytes(data[:4], "big")
    if count < 2:
        return [int.from_bytes(data[4:8], "big")] * count
    base, width = struct.unpack(">ib", data[4:9])
    body = data[9:-4]
    assert len(body) == width * (count - 1)
    return [base + int.from_bytes(body[n * width : (n + 1) * width], "big") for n in range(count - 1)] + [int.from_bytes(data[-4:], "big")]


def decrypt(stored: bytes, secret: tuple[bytes, bytes]) -> bytes:
    key, aad = secret
    cipher = AES.new(key, AES.MODE_GCM, nonce=stored[:12])
    cipher.update(aad)
    return cipher.decrypt_and_verify(stored[12:-16], stored[-16:])


def data_key(encryption: dict[str, str], private_keys: dict[str, Path]) -> tuple[bytes, bytes]:
    """RSA by pow, OAEP by hand: SHA3-512 for the label's hash and for MGF1, no label (RFC 8017, 7.1.2)."""
    pair, wrapped = encryption["dataKey"].split(":")
    numbers = load_pem_private_key(private_keys[pair].read_bytes(), None).private_numbers()  # type: ignore[union-attr]
    n, d = numbers.public_numbers.n, numbers.d  # type: ignore[union-attr]
    size = (n.bit_length() + 7) // 8
    padded = pow(int.from_bytes(base64.b64decode(wrapped), "big"), d, n).to_bytes(size, "big")
    assert padded[0] == 0
    masked_seed, masked = padded[1:65], padded[65:]
    seed = _xor(masked_seed, _mgf1(masked, 64))
    block = _xor(masked, _mgf1(seed, len(masked)))
    assert block[:64] == hashlib.sha3_512(b"").digest()
    zeros, one, key = block[64:].partition(b"\x01")
    assert (set(zeros) <= {0}, one, len(key)) == (True, b"\x01", 32)
    return key, base64.b64decode(encryption["aad"])


def _mgf1(seed: bytes, size: int) -> bytes:
    return b"".join(hashlib.sha3_512(seed + n.to_bytes(4, "big")).digest() for n in range(-(-size // 64)))[:size]


def _xor(one: bytes, two: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, two, strict=True))
