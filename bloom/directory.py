"""Key directory of a remote segment (object ``<id>.keys``): which of its batches may hold a key.
    magic:8 version:4 key fingerprint:8 length:8 | MAC:16 | body
Body: zlib-compressed, with its length first, a JSON object, also with its length first, and columns: batch headers of 61 bytes, transposed
(all first bytes, then all second bytes), facts about control batches, flags, number of keys of each batch. 32 bits of each key's hash
follow, uncompressed. Numbers are little-endian; the MAC is BLAKE2b under the tier's hash key.
A directory can be deleted at any time: without a usable one the whole segment is read. Stored headers are compared with the bytes read.
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

from bloom.sidecar import SidecarUnusable, SidecarUnusableReason, hash_key_fingerprint, sidecar_mac
from compactor.kernels.common import Bytes, Flags, Hashes
from compactor.kernels.jit import kernel

DIRECTORY_MAGIC: Final = b"tc-keys\n"
DIRECTORY_VERSION: Final = 1
DIRECTORY_HEADER_BYTES: Final = 61
"""Of a batch of v2, which a directory is of."""
HAS_KEYLESS_RECORD: Final = 1
HAS_TOMBSTONE: Final = 2
"""Flags of a batch: what is in it."""

_PURPOSE: Final = b"tc-directory"
_FIXED: Final = struct.Struct("<8sI8sQ16s")
_COVERED: Final = _FIXED.size - 16
_COUNT: Final = struct.Struct("<I")
_MOST_BYTES: Final = 1 << 32
_SLOTS: Final = 16
"""Bits of the bitmap that is asked first, for each key."""

HashPrefixes = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class KeyDirectory:
    """Key directory of a segment whose batches all have message format v2, in file order.
    :param headers: batch headers, shape (batches, 61).
    :param control, coordinator_epoch: per batch; batch headers do not contain them.
    :param keys: per batch the number of its entries in ``pieces``.
    :param pieces: ``key_hash_prefixes`` of all batches, one batch after another.
    """

    segment_id: str
    headers: Bytes = field(repr=False)
    control: npt.NDArray[np.int8] = field(repr=False)
    coordinator_epoch: npt.NDArray[np.int32] = field(repr=False)
    flags: Bytes = field(repr=False)
    keys: npt.NDArray[np.int32] = field(repr=False)
    pieces: HashPrefixes = field(repr=False)
    _begin: npt.NDArray[np.int64] = field(init=False, repr=False)
    """Where each batch's pieces begin, and the end of the last one's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begin", np.concatenate((np.zeros(1, np.int64), np.cumsum(self.keys, dtype=np.int64))))

    def __len__(self) -> int:
        return len(self.headers)

    def flag_matching_batches(self, wanted_prefixes: HashPrefixes) -> Flags:
        """Flag the batches that may contain a wanted key; ``wanted_prefixes`` ascend. Each pair of a wanted key and a key in a batch gives
        a false positive with probability 2^-32; there are no false negatives.
        """
        found = np.zeros(len(self), np.bool_)
        if len(wanted_prefixes) and len(self.pieces):
            bits = max(6, int(_SLOTS * len(wanted_prefixes) - 1).bit_length())
            _flag_batches(self.pieces, self.keys, wanted_prefixes, np.zeros(1 << (bits - 3), np.uint8), bits, found)
        return found

    def key_directory_of_batches(self, first_batch: int, end_batch: int) -> KeyDirectory:
        """The directory of batches [first_batch, end_batch)."""
        some, own = slice(first_batch, end_batch), self.pieces[self._begin[first_batch] : self._begin[end_batch]]
        return KeyDirectory(
            self.segment_id, self.headers[some], self.control[some], self.coordinator_epoch[some], self.flags[some], self.keys[some], own
        )


def key_hash_prefixes(hashes: Hashes) -> HashPrefixes:
    """The upper half of each key hash's second number, which a key directory stores."""
    pieces: HashPrefixes = (hashes[:, 1] >> np.uint64(32)).astype(np.uint32)
    return pieces


def distinct_key_hash_prefixes(keys: Iterable[Hashes]) -> HashPrefixes:
    """The distinct prefixes, ascending."""
    some = [np.unique(key_hash_prefixes(hashes)) for hashes in keys]
    return np.unique(np.concatenate(some)) if some else np.empty(0, np.uint32)


def concatenate_key_directories(segment_id: str, parts: Iterable[KeyDirectory]) -> KeyDirectory:
    found = list(parts)

    def concatenated_column(name: str) -> npt.NDArray[np.generic]:
        return np.concatenate([getattr(part, name) for part in found])

    columns = ("headers", "control", "coordinator_epoch", "flags", "keys", "pieces")
    return KeyDirectory(segment_id, *(concatenated_column(name) for name in columns))  # type: ignore[arg-type]


def encode_key_directory(directory: KeyDirectory, hash_key: bytes) -> bytes:
    """Equal contents give equal bytes."""
    about = {"segment_id": directory.segment_id, "batches": len(directory), "keys": len(directory.pieces)}
    text = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    columns = (np.ascontiguousarray(directory.headers.T), directory.control, directory.coordinator_epoch, directory.flags, directory.keys)
    packed = zlib.compress(b"".join([_COUNT.pack(len(text)), text, *(column.tobytes() for column in columns)]), 1)
    body = b"".join([_COUNT.pack(len(packed)), packed, directory.pieces.tobytes()])  # hashes do not shrink
    fixed = _FIXED.pack(DIRECTORY_MAGIC, DIRECTORY_VERSION, hash_key_fingerprint(hash_key), len(body), bytes(16))[:_COVERED]
    return b"".join([fixed, sidecar_mac(hash_key, _PURPOSE, fixed, body), body])


def decode_key_directory(data: bytes, segment_id: str, hash_key: bytes) -> KeyDirectory:
    """Raises SidecarUnusable if the data is damaged or was written for another segment or hash key."""
    if data[: len(DIRECTORY_MAGIC)] != DIRECTORY_MAGIC:
        raise SidecarUnusable(SidecarUnusableReason.NOT_A_SIDECAR)
    if len(data) < _FIXED.size:
        raise SidecarUnusable(SidecarUnusableReason.CUT_OFF, f"{len(data)} bytes")
    _, version, found_key, size, found_mac = _FIXED.unpack_from(data)
    if version != DIRECTORY_VERSION:
        raise SidecarUnusable(SidecarUnusableReason.FUTURE_VERSION, f"version {version}, this program writes {DIRECTORY_VERSION}")
    if not hmac.compare_digest(found_key, hash_key_fingerprint(hash_key)):
        raise SidecarUnusable(SidecarUnusableReason.OTHER_KEY)
    body = memoryview(data)[_FIXED.size :]
    if len(body) != size:
        raise SidecarUnusable(SidecarUnusableReason.CUT_OFF, f"{len(data)} bytes")
    if not hmac.compare_digest(found_mac, sidecar_mac(hash_key, _PURPOSE, data[:_COVERED], body)):
        raise SidecarUnusable(SidecarUnusableReason.DAMAGED)
    directory = _parse_key_directory_body(body)
    if directory.segment_id != segment_id:
        raise SidecarUnusable(SidecarUnusableReason.OTHER_SEGMENT, directory.segment_id)
    return directory


def estimate_key_directory_bytes(batch_count: int, record_count: int) -> int:
    return 25 * batch_count + 4 * record_count  # compression shrinks headers of 61 bytes to a third or less


def _parse_key_directory_body(body: memoryview) -> KeyDirectory:
    """The body's MAC has been checked."""
    (packed,) = _COUNT.unpack_from(body)
    plain = memoryview(zlib.decompressobj().decompress(body[_COUNT.size : _COUNT.size + packed], _MOST_BYTES))
    (size,) = _COUNT.unpack_from(plain)
    about = json.loads(bytes(plain[_COUNT.size : _COUNT.size + size]))
    batches, at = about["batches"], _COUNT.size + size
    columns = []
    for dtype, width in ((np.uint8, DIRECTORY_HEADER_BYTES), (np.int8, 1), (np.int32, 1), (np.uint8, 1), (np.int32, 1)):
        columns.append(np.frombuffer(plain, dtype, batches * width, at))
        at += columns[-1].nbytes
    headers, control, coordinator_epoch, flags, keys = columns
    pieces = np.frombuffer(body, np.uint32, about["keys"], _COUNT.size + packed)
    whole = np.ascontiguousarray(headers.reshape(DIRECTORY_HEADER_BYTES, batches).T)
    return KeyDirectory(about["segment_id"], whole, control, coordinator_epoch, flags, keys, pieces)  # type: ignore[arg-type]


@kernel
def _flag_batches(
    batch_prefixes: HashPrefixes, prefix_counts: npt.NDArray[np.int32], wanted: HashPrefixes, bitmap: Bytes, bits: int, found: Flags
) -> None:
    """Set ``found`` of each batch that has one of the ``wanted`` hash prefixes, which ascend.
    bitmap: scratch space of 2^``bits`` bits, all zero. With it, a single bit test rejects most entries that are not wanted.
    """
    low = np.uint32((np.int64(1) << bits) - 1)
    for i in range(wanted.size):
        slot = wanted[i] & low
        bitmap[slot >> 3] |= np.uint8(1 << (slot & 7))
    at = np.int64(0)
    for batch in range(prefix_counts.size):
        end = at + prefix_counts[batch]
        while at < end:
            slot = batch_prefixes[at] & low
            if bitmap[slot >> 3] >> (slot & 7) & 1:
                place = np.searchsorted(wanted, batch_prefixes[at])
                if place < wanted.size and wanted[place] == batch_prefixes[at]:
                    found[batch] = True
                    at = end
                    break
            at += 1
