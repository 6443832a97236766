"""Digests and checksums of a log computed from its batch headers alone.

A v2 header contains the CRC-32C of the rest of its batch. If all CRCs match, a digest over the headers therefore detects
accidental changes anywhere in the file: flipped bits, and batches that are missing, moved or from another log. It does not protect against
intent, because another payload with the same CRC can be constructed. Logs with v0/v1 batches have no such digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.kernels.common import RowCount, Sha256Hex
from compactor.kernels.crc import START, CrcTable, crc_after_zero_bytes, crc_tables_for_power_of_two_zero_bytes, extend, extend_word
from compactor.kernels.jit import kernel
from compactor.kernels.memory import load_i32, load_u32, load_u64
from compactor.records.batches import FRAME, HEADER, Bytes, Int64s, memory_map_file, read_only_view

HEADER_BYTES: Final = HEADER

HeaderBytes = npt.NDArray[np.uint8]
"""Shape (batches, HEADER_BYTES), in the order of the log."""

SCAN_BYTES: Final = 8 << 20
_PREFIX: Final = b"headers of v2 batches\0"
_CRC: Final = 17
_CHECKED: Final = 21  # what the CRC is of begins here

# Between two pieces: bytes of the header that are there, bytes that the batch still has to come, and the CRC's state after the others.
_HAVE: Final = 0
_LEFT: Final = 1
_STATE: Final = 2


def copy_batch_headers(buf: Bytes, position: Int64s) -> HeaderBytes:
    """Return a copy of the v2 batch headers at these byte positions, shape (batches, 61). Raises IndexError if one is
    not within ``buf``.
    """
    if not len(position):
        return np.empty((0, HEADER_BYTES), np.uint8)
    if len(buf) < HEADER_BYTES:
        raise IndexError(f"{len(buf)} bytes hold no header")
    found: HeaderBytes = np.lib.stride_tricks.sliding_window_view(buf, HEADER_BYTES)[position]
    return found


def sha256_of_batch_headers(headers: HeaderBytes) -> Sha256Hex:
    """Return the SHA-256 of batch headers in hexadecimal. Because a header contains the CRC of its batch, the digest stands for the
    payloads, too, if the CRCs were verified.
    """
    digest = hashlib.sha256(_PREFIX)
    digest.update(np.ascontiguousarray(headers).reshape(-1).data)
    return digest.hexdigest()


def crc32c_of_batches_from_headers(headers: HeaderBytes) -> int:
    """Return the CRC-32C of all bytes of consecutive batches, computed from their headers alone. It is valid if the batches match their
    stored CRCs.
    """
    return int(_combine_batch_crcs(read_only_view(np.ascontiguousarray(headers).reshape(-1)), crc_tables_for_power_of_two_zero_bytes()))


class BatchHeaderDigestBuilder:
    """Builder of the SHA-256 of all batch headers of a log whose bytes arrive in parts of any size. It verifies the CRC of every batch,
    and holds one header in memory.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256(_PREFIX)
        self._header = np.zeros(HEADER_BYTES, np.uint8)
        self._between = np.zeros(3, np.int64)
        self._is_sound = True

    def add_log_bytes_to_digest(self, data: bytes | Bytes) -> None:
        """Process the next bytes of the log."""
        if not self._is_sound:
            return
        buf = read_only_view(np.frombuffer(data, np.uint8))
        out = np.empty((len(buf) // HEADER_BYTES + 1) * HEADER_BYTES, np.uint8)
        done = _collect_batch_headers(self._between, self._header, buf, out)
        self._is_sound = done >= 0
        if self._is_sound:
            self._digest.update(out[: done * HEADER_BYTES].data)

    def batch_header_digest_or_empty(self) -> Sha256Hex:
        """Return the digest, or an empty string if the bytes so far are not complete v2 batches whose CRCs match."""
        return self._digest.hexdigest() if self._is_sound and not self._between[_HAVE] else ""


def verified_batch_header_digest_or_empty(path: Path) -> Sha256Hex:
    """Return the SHA-256 of all batch headers of a file, in hexadecimal, after verifying the CRC of every batch. The result is empty if a
    CRC does not match, if the file holds anything but v2 batches, or if it ends within a batch.
    """
    buf, digest = memory_map_file(path), BatchHeaderDigestBuilder()
    for start in range(0, len(buf), SCAN_BYTES):
        digest.add_log_bytes_to_digest(buf[start : start + SCAN_BYTES])
    return digest.batch_header_digest_or_empty()


@kernel
def _combine_batch_crcs(headers: Bytes, zero_byte_tables: CrcTable) -> int:
    """Return the CRC-32C of all bytes of consecutive batches, from their headers. ``zero_byte_tables``: the tables of
    ``crc_tables_for_power_of_two_zero_bytes``.
    """
    crc = np.uint64(0)
    for at in range(0, headers.size, HEADER):
        left = int(load_i32(headers, at + 8)) + FRAME - _CHECKED
        crc = extend(crc ^ START, headers, at, at + _CHECKED) ^ START
        crc = crc_after_zero_bytes(zero_byte_tables, crc, left) ^ np.uint64(load_u32(headers, at + _CRC))
    return int(crc)


@kernel
def _collect_batch_headers(partial_batch_state: Int64s, partial_header: Bytes, buf: Bytes, out_headers: Bytes) -> RowCount:
    """Write the headers of the batches whose last byte is in ``buf`` to ``out_headers``. Return the number of these headers, or -1 if a
    batch is not v2 or its CRC does not match.

    :param partial_batch_state: state between two calls: bytes of the current header, bytes of its batch still to come, and the CRC so far.
        Updated in place.
    :param partial_header: the current header as far as it was received. Updated in place.
    """
    have, left, crc = partial_batch_state[_HAVE], partial_batch_state[_LEFT], np.uint64(partial_batch_state[_STATE])
    at = 0
    done = 0
    while True:
        if have < HEADER:
            taken = min(HEADER - have, buf.size - at)
            for i in range(taken):
                partial_header[have + i] = buf[at + i]
            have += taken
            at += taken
            if have < HEADER:
                break
            left = np.int64(load_i32(partial_header, 8)) + FRAME - HEADER
            if partial_header[16] != 2 or left < 0:
                return -1
            crc = START
            for i in range(_CHECKED, HEADER, 8):
                crc = extend_word(crc, load_u64(partial_header, i))
        taken = min(left, buf.size - at)
        crc = extend(crc, buf, at, at + taken)
        at += taken
        left -= taken
        if left:
            break
        if np.int64(crc ^ START) != np.int64(load_u32(partial_header, _CRC)):
            return -1
        out_headers[done * HEADER : (done + 1) * HEADER] = partial_header
        done += 1
        have = 0
    partial_batch_state[_HAVE], partial_batch_state[_LEFT], partial_batch_state[_STATE] = have, left, np.int64(crc)
    return done
