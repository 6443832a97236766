"""A log by the headers of its batches: a digest for logs whose bytes nobody has read, and the checksum of ranges of them.

The header of a v2 batch holds the CRC-32C of everything that follows it, so that a digest over all headers, together with the CRC of every
batch, says of a whole file what CRC-32C can say: it finds what happens by accident, flipped bits and batches that are missing, moved or
another log's. It is not cryptographic: who wants to can make another payload with the same CRC. Logs with v0/v1 messages have no such
digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel, load_u64
from compactor.kernels.crc import START, Table, after_zeros, extend, extend_word, zeros_by_power
from compactor.kernels.memory import load_i32, load_u32
from compactor.records.batches import FRAME, HEADER, Bytes, Int64s, map_file, read_only

HEADER_BYTES: Final = HEADER

Headers = npt.NDArray[np.uint8]
"""Shape (batches, HEADER_BYTES), in the order of the log."""

PIECE_BYTES: Final = 8 << 20
_PREFIX: Final = b"headers of v2 batches\0"
_CRC: Final = 17
_CHECKED: Final = 21  # what the CRC is of begins here

# Between two pieces: bytes of the header that are there, bytes that the batch still has to come, and the CRC's state after the others.
_HAVE: Final = 0
_LEFT: Final = 1
_STATE: Final = 2


def headers_of(buf: Bytes, position: Int64s) -> Headers:
    """The headers of the v2 batches at these positions, as a copy. Raises IndexError for one that lies outside."""
    if not len(position):
        return np.empty((0, HEADER_BYTES), np.uint8)
    if len(buf) < HEADER_BYTES:
        raise IndexError(f"{len(buf)} bytes hold no header")
    found: Headers = np.lib.stride_tricks.sliding_window_view(buf, HEADER_BYTES)[position]
    return found


def digest_of_headers(headers: Headers) -> str:
    """As hex digits. It says something of the batches' payloads only where their CRCs are known to fit (``checked_digest``)."""
    digest = hashlib.sha256(_PREFIX)
    digest.update(np.ascontiguousarray(headers).reshape(-1).data)
    return digest.hexdigest()


def range_crc32c(headers: Headers) -> int:
    """CRC-32C of all bytes of these batches, one behind the other, provided that their CRCs fit: nothing but the headers is looked at."""
    return int(_crc_of_batches(read_only(np.ascontiguousarray(headers).reshape(-1)), zeros_by_power()))


class DigestInPieces:
    """``digest_of_headers`` of a log whose bytes come in pieces of any size, every batch checked against its CRC; holds one header."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256(_PREFIX)
        self._header = np.zeros(HEADER_BYTES, np.uint8)
        self._between = np.zeros(3, np.int64)
        self._is_sound = True

    def update(self, data: bytes | Bytes) -> None:
        if not self._is_sound:
            return
        buf = read_only(np.frombuffer(data, np.uint8))
        out = np.empty((len(buf) // HEADER_BYTES + 1) * HEADER_BYTES, np.uint8)
        done = _walk(self._between, self._header, buf, out)
        self._is_sound = done >= 0
        if self._is_sound:
            self._digest.update(out[: done * HEADER_BYTES].data)

    def digest(self) -> str:
        """Of what came so far; empty where that is not whole v2 batches, one behind the other, whose CRCs fit."""
        return self._digest.hexdigest() if self._is_sound and not self._between[_HAVE] else ""


def checked_digest(path: Path) -> str:
    """``digest_of_headers`` of a file of v2 batches, every one checked against its CRC.

    Empty where a CRC does not fit, where it is not such batches alone (a v0/v1 message), or where it ends within one.
    """
    buf, digest = map_file(path), DigestInPieces()
    for start in range(0, len(buf), PIECE_BYTES):
        digest.update(buf[start : start + PIECE_BYTES])
    return digest.digest()


@kernel
def _crc_of_batches(headers: Bytes, powers: Table) -> int:
    crc = np.uint64(0)
    for at in range(0, headers.size, HEADER):
        left = int(load_i32(headers, at + 8)) + FRAME - _CHECKED
        crc = extend(crc ^ START, headers, at, at + _CHECKED) ^ START
        crc = after_zeros(powers, crc, left) ^ np.uint64(load_u32(headers, at + _CRC))
    return int(crc)


@kernel
def _walk(between: Int64s, header: Bytes, buf: Bytes, out: Bytes) -> int:
    """How many batches end in ``buf``; their headers go to ``out``. -1: what is no v2 batch, or one whose CRC does not fit."""
    have, left, crc = between[_HAVE], between[_LEFT], np.uint64(between[_STATE])
    at = 0
    done = 0
    while True:
        if have < HEADER:
            taken = min(HEADER - have, buf.size - at)
            for i in range(taken):
                header[have + i] = buf[at + i]
            have += taken
            at += taken
            if have < HEADER:
                break
            left = np.int64(load_i32(header, 8)) + FRAME - HEADER
            if header[16] != 2 or left < 0:
                return -1
            crc = START
            for i in range(_CHECKED, HEADER, 8):
                crc = extend_word(crc, load_u64(header, i))
        taken = min(left, buf.size - at)
        crc = extend(crc, buf, at, at + taken)
        at += taken
        left -= taken
        if left:
            break
        if np.int64(crc ^ START) != np.int64(load_u32(header, _CRC)):
            return -1
        out[done * HEADER : (done + 1) * HEADER] = header
        done += 1
        have = 0
    between[_HAVE], between[_LEFT], between[_STATE] = have, left, np.int64(crc)
    return done
