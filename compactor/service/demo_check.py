"""What a consumer sees in a Kafka log directory: the demo's own reader, which shares no code with the cleaner.

Slow and obvious, for magic 2: batches one after the other, each inflated by its codec's library, aborted transactions left out
as a read_committed consumer leaves them out (a broker tells it of them from the transaction index; here the abort markers do
where there is no index).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import cramjam
import lz4.frame
import zstandard

from compactor.errors import BadData

_HEADER = struct.Struct(">qiibIhiqqqhii")
_TXN_ENTRY = struct.Struct(">hqqqq")
_XERIAL_HEADER_BYTES = 16
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_ABORT = b"\x00\x00"


@dataclass
class View:
    """``latest``: key -> digest of value and headers of its last visible record, None for a delete.

    ``records`` and ``size`` in bytes: what lies there, visible or not, markers included.
    """

    latest: dict[bytes, bytes | None] = field(default_factory=dict)
    records: int = 0
    size: int = 0

    @property
    def live(self) -> dict[bytes, bytes]:
        """Keys that are there, with their values."""
        return {key: value for key, value in self.latest.items() if value is not None}


def differences(before: View, after: View) -> list[str]:
    """Keys whose latest value is not the same: a delete may be told by a tombstone or by the key's absence, nothing else may change."""
    found = [f"{key!r} has another latest value" for key, value in before.live.items() if after.latest.get(key, b"") != value]
    found += [f"{key!r} was deleted and is back" for key in after.live if before.latest.get(key) is None]
    return found


def read_view(folder: Path) -> View:
    """Reads the whole directory. Raises BadData for what it cannot read."""
    view = View()
    aborted = _aborted(folder)
    for path in sorted(folder.glob("*.log")):
        data = path.read_bytes()
        view.size += len(data)
        for head, body in _batches(data, path.name):
            base, attributes, producer, count = head[0], head[5], head[9], head[12]
            view.records += count
            if attributes & _CONTROL:
                continue
            hidden = attributes & _TRANSACTIONAL and any(first <= base <= last for first, last in aborted.get(producer, ()))
            for key, content in () if hidden else _records(_inflated(attributes & 7, body), count):
                if key is not None:
                    view.latest[key] = content
    return view


def _aborted(folder: Path) -> dict[int, list[tuple[int, int]]]:
    """Producer id -> ranges of offsets of its aborted transactions, the marker included."""
    found: dict[int, list[tuple[int, int]]] = {}
    opened: dict[int, int] = {}
    for path in sorted(folder.glob("*.log")):
        for head, body in _batches(path.read_bytes(), path.name):
            base, attributes, producer, count = head[0], head[5], head[9], head[12]
            if attributes & _CONTROL and count:
                key, _ = next(_records(bytes(body), 1))
                first = opened.pop(producer, None)
                if key is not None and key[2:4] == _ABORT and first is not None:
                    found.setdefault(producer, []).append((first, base))
            elif attributes & _TRANSACTIONAL and not attributes & _CONTROL:
                opened.setdefault(producer, base)
        index = path.with_suffix(".txnindex")
        for _, producer, first, last, _ in _TXN_ENTRY.iter_unpack(index.read_bytes() if index.exists() else b""):
            found.setdefault(producer, []).append((first, last))
    return found


def _batches(data: bytes, name: str) -> Iterator[tuple[tuple[int, ...], memoryview]]:
    """Header fields (in the order of _HEADER) and body of each batch."""
    view, position = memoryview(data), 0
    while position < len(data):
        head = _HEADER.unpack_from(data, position)
        size, magic = head[1], head[3]
        if magic != 2 or position + 12 + size > len(data):
            raise BadData("not a batch that the demo wrote", segment=name, position=position)
        yield head, view[position + _HEADER.size : position + 12 + size]
        position += 12 + size


def _inflated(codec: int, body: memoryview) -> bytes:
    if codec == 1:
        return zlib.decompress(body, wbits=31)
    if codec == 2:
        return b"".join(_xerial_blocks(body))
    if codec == 3:
        return bytes(lz4.frame.decompress(body))
    if codec == 4:
        return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return bytes(body)


def _xerial_blocks(body: memoryview) -> Iterator[bytes]:
    position = _XERIAL_HEADER_BYTES
    while position < len(body):
        size = int.from_bytes(body[position : position + 4], "big")
        yield bytes(cramjam.snappy.decompress_raw(bytes(body[position + 4 : position + 4 + size])))
        position += 4 + size


def _records(data: bytes, count: int) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Key, and a digest of value and headers (None for a tombstone)."""
    at = 0
    for _ in range(count):
        length, at = _varint(data, at)
        end = at + length
        _, at = _varint(data, at + 1)
        _, at = _varint(data, at)
        size, at = _varint(data, at)
        key = data[at : at + size] if size >= 0 else None
        size, start = _varint(data, at + max(size, 0))
        # Value and headers together are one run of bytes, which no cleaner may touch.
        yield key, None if size < 0 else hashlib.blake2b(data[start:end], digest_size=16).digest()
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    value, shift = byte & 0x7F, 7
    while byte & 0x80:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
    return (value >> 1) ^ -(value & 1), at
