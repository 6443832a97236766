"""The key directory of one remote segment: which of its batches may hold a key, so that a round reads only those (``<id>.keys``).

    magic:8 version:4 key fingerprint:8 length:8 | MAC:16 | body

The body is zlib's (its length before it), of a JSON object (likewise) and one column after the other: the batches' headers of 61 bytes (all
first bytes, then all second ones), what else a reader of them wants to know of control batches, flags, how many keys a batch has. Behind
that lie 32 bits of each key's hash. Everything is little-endian. The MAC is BLAKE2b under the tier's hash key.

A directory can be dropped at any time. One that is missing or unusable costs a read of the whole segment, never a record: what it says of
headers is compared with the bytes that are read, and with the checksums of those that a store copies.
"""

from __future__ import annotations

import hmac
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from bloom.filter import Hashes
from bloom.jit import kernel
from bloom.sidecar import SidecarUnusable, Unusable, fingerprint, mac

MAGIC: Final = b"tc-keys\n"
VERSION: Final = 1
HEADER_BYTES: Final = 61
"""Of a batch of v2, which a directory is of."""
KEYLESS: Final = 1
TOMBSTONE: Final = 2
"""Flags of a batch: what is in it."""

_PURPOSE: Final = b"tc-directory"
_FIXED: Final = struct.Struct("<8sI8sQ16s")
_COVERED: Final = _FIXED.size - 16
_COUNT: Final = struct.Struct("<I")
_MOST_BYTES: Final = 1 << 32
_SLOTS: Final = 16
"""Bits of the bitmap that is asked first, for each key."""

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Pieces = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class KeyDirectory:
    """One row per batch, in file order, all of v2.

    :param headers: shape (batches, 61).
    :param control, coordinator_epoch: as in records.batches.BatchTable; a header alone does not say them.
    :param flags: KEYLESS, TOMBSTONE.
    :param keys: how many of ``pieces`` are a batch's, which follow each other.
    """

    segment_id: str
    headers: Bytes = field(repr=False)
    control: npt.NDArray[np.int8] = field(repr=False)
    coordinator_epoch: npt.NDArray[np.int32] = field(repr=False)
    flags: Bytes = field(repr=False)
    keys: npt.NDArray[np.int32] = field(repr=False)
    pieces: Pieces = field(repr=False)
    _begin: npt.NDArray[np.int64] = field(init=False, repr=False)
    """Where each batch's pieces begin, and the end of the last one's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begin", np.concatenate((np.zeros(1, np.int64), np.cumsum(self.keys, dtype=np.int64))))

    def __len__(self) -> int:
        return len(self.headers)

    def holding(self, wanted: Pieces) -> Flags:
        """Of each batch, whether it may hold one of these keys: a wrong yes for one in 2^32 pairs of keys, never a wrong no.

        :param wanted: as ``distinct_pieces`` makes them.
        """
        found = np.zeros(len(self), np.bool_)
        if len(wanted) and len(self.pieces):
            bits = max(6, int(_SLOTS * len(wanted) - 1).bit_length())
            _find(self.pieces, self.keys, wanted, np.zeros(1 << (bits - 3), np.uint8), bits, found)
        return found

    def part(self, first: int, last: int) -> KeyDirectory:
        """Its batches [first, last)."""
        some, own = slice(first, last), self.pieces[self._begin[first] : self._begin[last]]
        return KeyDirectory(
            self.segment_id, self.headers[some], self.control[some], self.coordinator_epoch[some], self.flags[some], self.keys[some], own
        )


def pieces_of(hashes: Hashes) -> Pieces:
    """What a directory has of keys: 32 bits, which no filter's positions are made of alone."""
    pieces: Pieces = (hashes[:, 1] >> np.uint64(32)).astype(np.uint32)
    return pieces


def distinct_pieces(keys: Iterable[Hashes]) -> Pieces:
    """Of many keys, ascending."""
    some = [np.unique(pieces_of(hashes)) for hashes in keys]
    return np.unique(np.concatenate(some)) if some else np.empty(0, np.uint32)


def joined(segment_id: str, parts: Iterable[KeyDirectory]) -> KeyDirectory:
    """The batches of several, one behind the other, as those of another segment."""
    found = list(parts)

    def column(name: str) -> npt.NDArray[np.generic]:
        return np.concatenate([getattr(part, name) for part in found])

    return KeyDirectory(segment_id, *(column(name) for name in ("headers", "control", "coordinator_epoch", "flags", "keys", "pieces")))  # type: ignore[arg-type]


def write(directory: KeyDirectory, hash_key: bytes) -> bytes:
    """The bytes of a directory; the same for the same contents."""
    about = {"segment_id": directory.segment_id, "batches": len(directory), "keys": len(directory.pieces)}
    text = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    columns = (np.ascontiguousarray(directory.headers.T), directory.control, directory.coordinator_epoch, directory.flags, directory.keys)
    packed = zlib.compress(b"".join([_COUNT.pack(len(text)), text, *(column.tobytes() for column in columns)]), 1)
    body = b"".join([_COUNT.pack(len(packed)), packed, directory.pieces.tobytes()])  # hashes do not shrink
    fixed = _FIXED.pack(MAGIC, VERSION, fingerprint(hash_key), len(body), bytes(16))[:_COVERED]
    return b"".join([fixed, mac(hash_key, _PURPOSE, fixed, body), body])


def read(data: bytes, segment_id: str, hash_key: bytes) -> KeyDirectory:
    """Raises SidecarUnusable: then there is none, and the whole segment is read."""
    if data[: len(MAGIC)] != MAGIC:
        raise SidecarUnusable(Unusable.NOT_A_SIDECAR)
    if len(data) < _FIXED.size:
        raise SidecarUnusable(Unusable.CUT_OFF, f"{len(data)} bytes")
    _, version, found_key, size, found_mac = _FIXED.unpack_from(data)
    if version != VERSION:
        raise SidecarUnusable(Unusable.FUTURE_VERSION, f"version {version}, this program writes {VERSION}")
    if not hmac.compare_digest(found_key, fingerprint(hash_key)):
        raise SidecarUnusable(Unusable.OTHER_KEY)
    body = memoryview(data)[_FIXED.size :]
    if len(body) != size:
        raise SidecarUnusable(Unusable.CUT_OFF, f"{len(data)} bytes")
    if not hmac.compare_digest(found_mac, mac(hash_key, _PURPOSE, data[:_COVERED], body)):
        raise SidecarUnusable(Unusable.DAMAGED)
    directory = _parse(body)
    if directory.segment_id != segment_id:
        raise SidecarUnusable(Unusable.OTHER_SEGMENT, directory.segment_id)
    return directory


def size_of(batches: int, records: int) -> int:
    """About how many bytes a directory has. Headers shrink to a third or less."""
    return 25 * batches + 4 * records


def _parse(body: memoryview) -> KeyDirectory:
    """What ``write`` wrote: the MAC has been checked, so nothing here can be missing."""
    (packed,) = _COUNT.unpack_from(body)
    plain = memoryview(zlib.decompressobj().decompress(body[_COUNT.size : _COUNT.size + packed], _MOST_BYTES))
    (size,) = _COUNT.unpack_from(plain)
    about = json.loads(bytes(plain[_COUNT.size : _COUNT.size + size]))
    batches, at = about["batches"], _COUNT.size + size
    columns = []
    for dtype, width in ((np.uint8, HEADER_BYTES), (np.int8, 1), (np.int32, 1), (np.uint8, 1), (np.int32, 1)):
        columns.append(np.frombuffer(plain, dtype, batches * width, at))
        at += columns[-1].nbytes
    headers, control, coordinator_epoch, flags, keys = columns
    pieces = np.frombuffer(body, np.uint32, about["keys"], _COUNT.size + packed)
    whole = np.ascontiguousarray(headers.reshape(HEADER_BYTES, batches).T)
    return KeyDirectory(about["segment_id"], whole, control, coordinator_epoch, flags, keys, pieces)  # type: ignore[arg-type]


@kernel
def _find(pieces: Pieces, keys: npt.NDArray[np.int32], wanted: Pieces, bitmap: Bytes, bits: int, found: Flags) -> None:
    """``wanted``: ascending; ``bitmap``: 2^bits bits, all zero. Most pieces are none of them, which one bit tells."""
    low = np.uint32((np.int64(1) << bits) - 1)
    for i in range(wanted.size):
        slot = wanted[i] & low
        bitmap[slot >> 3] |= np.uint8(1 << (slot & 7))
    at = np.int64(0)
    for batch in range(keys.size):
        end = at + keys[batch]
        while at < end:
            slot = pieces[at] & low
            if bitmap[slot >> 3] >> (slot & 7) & 1:
                place = np.searchsorted(wanted, pieces[at])
                if place < wanted.size and wanted[place] == pieces[at]:
                    found[batch] = True
                    at = end
                    break
            at += 1
