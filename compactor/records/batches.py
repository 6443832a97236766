"""Parser of batch headers: one row per batch (Kafka: DefaultRecordBatch, LegacyRecord, AbstractLegacyRecordBatch).

v2 header, 61 bytes                                                     v0/v1 entry
 0 baseOffset:8    21 attributes:2       43 producerId:8                 0 offset:8        17 attributes:1
 8 batchLength:4   23 lastOffsetDelta:4  51 producerEpoch:2              8 size:4          18 [v1 timestamp:8]
12 leaderEpoch:4   27 baseTimestamp:8    53 baseSequence:4              12 crc:4              keyLen:4 key
16 magic:1         35 maxTimestamp:8     57 recordsCount:4              16 magic:1            valueLen:4 value
17 crc:4                                 61 records
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from compactor.constants import MAX_OFFSET
from compactor.errors import BadData
from compactor.kernels.common import Bytes as Bytes, ControlTypeAndEpoch, CountAndEndPosition, Int64s as Int64s, ProblemAndPosition
from compactor.kernels.crc import START, CrcTable, crc32c, crc_after_zero_bytes, extend, extend_word, zero_bytes_tables
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import load_i16, load_i32, load_i64, load_u32, load_u64, read_varint
from compactor.profiling import SegmentWorkStage, measure_stage

# ---- digests and checksums of a log computed from its batch headers alone ------------------------------------------------------
# A v2 header contains the CRC-32C of the rest of its batch. If all CRCs match, a digest over the headers therefore detects accidental
# changes anywhere in the file: flipped bits, and batches that are missing, moved or from another log. It does not protect against intent,
# because another payload with the same CRC can be constructed. Logs with v0/v1 batches have no such digest.


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
    """Copy v2 headers, shape (batches, 61). Raises IndexError if one is not within
    ``buf``.
    """
    if not len(position):
        return np.empty((0, HEADER_BYTES), np.uint8)
    if len(buf) < HEADER_BYTES:
        raise IndexError(f"{len(buf)} bytes hold no header")
    found: HeaderBytes = np.lib.stride_tricks.sliding_window_view(buf, HEADER_BYTES)[position]
    return found


def sha256_of_batch_headers(headers: HeaderBytes) -> str:
    """Hexadecimal. Stands for the payloads, too, if the CRCs were verified."""
    digest = hashlib.sha256(_PREFIX)
    digest.update(np.ascontiguousarray(headers).reshape(-1).data)
    return digest.hexdigest()


def crc32c_from_headers(headers: HeaderBytes) -> int:
    """CRC-32C of all bytes of consecutive batches, valid if the batches match their stored CRCs."""
    return int(_combine_batch_crcs(read_only_view(np.ascontiguousarray(headers).reshape(-1)), zero_bytes_tables()))


class BatchHeaderDigestBuilder:
    """Builder of the SHA-256 of all batch headers of a log that arrives in parts of any size. Every CRC is verified."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256(_PREFIX)
        self._header = np.zeros(HEADER_BYTES, np.uint8)
        self._between = np.zeros(3, np.int64)
        self._is_sound = True

    def add_log_bytes(self, data: bytes | Bytes) -> None:
        if not self._is_sound:
            return
        buf = read_only_view(np.frombuffer(data, np.uint8))
        out = np.empty((len(buf) // HEADER_BYTES + 1) * HEADER_BYTES, np.uint8)
        done = _collect_batch_headers(self._between, self._header, buf, out)
        self._is_sound = done >= 0
        if self._is_sound:
            self._digest.update(out[: done * HEADER_BYTES].data)

    def header_digest(self) -> str:
        """Empty if the bytes so far are not complete v2 batches whose CRCs match."""
        return self._digest.hexdigest() if self._is_sound and not self._between[_HAVE] else ""


def verified_header_digest(path: Path) -> str:
    """Hexadecimal; empty if a CRC does not match, if the file holds anything but v2 batches, or if it ends within a batch."""
    buf, digest = memory_map_file(path), BatchHeaderDigestBuilder()
    for start in range(0, len(buf), SCAN_BYTES):
        digest.add_log_bytes(buf[start : start + SCAN_BYTES])
    return digest.header_digest()


@kernel
def _combine_batch_crcs(headers: Bytes, zero_byte_tables: CrcTable) -> int:
    crc = np.uint64(0)
    for at in range(0, headers.size, HEADER):
        left = int(load_i32(headers, at + 8)) + FRAME - _CHECKED
        crc = extend(crc ^ START, headers, at, at + _CHECKED) ^ START
        crc = crc_after_zero_bytes(zero_byte_tables, crc, left) ^ np.uint64(load_u32(headers, at + _CRC))
    return int(crc)


@kernel
def _collect_batch_headers(partial_batch_state: Int64s, partial_header: Bytes, buf: Bytes, out_headers: Bytes) -> int:
    """Return the number of batches whose last byte is in ``buf``, or -1 if a batch is not v2 or its CRC does not match.
    :param partial_batch_state: between two calls: bytes of the current header, bytes of its batch still to come, and the CRC so far.
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


FRAME: Final = 12  # offset and size come before what ``size`` counts
HEADER: Final = 61

HEADER_BYTES: Final = HEADER
CODEC_MASK: Final = 0x07
LOG_APPEND: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20
HORIZON: Final = 0x40
UNKNOWN_OFFSET: Final = -1

# Column ``control``: what kind of control batch a batch is.
NOT_CONTROL: Final = -1
EMPTIED: Final = -2  # an earlier round took the marker and left the header (KAFKA-7467)
PACKED: Final = -3  # compressed: nobody writes such, but Kafka reads them
MALFORMED: Final = -4
ABORT: Final = 0
COMMIT: Final = 1
OTHER: Final = 2  # leader change, snapshot header and footer, KRaft version and voters, unknown ones

INCOMPLETE_BATCH_CAUSES: Final = (
    "the file ends in the middle of a batch header",
    "the batch claims more bytes than the file has left (truncated?)",
)
"""Causes of BadData where a file ends within a batch, as one does to which a broker is writing."""
_PROBLEMS: Final = (
    "",
    INCOMPLETE_BATCH_CAUSES[0],
    "the batch claims fewer bytes than a header has",
    INCOMPLETE_BATCH_CAUSES[1],
    "unknown magic byte",
    "negative offset",
    "the last offset lies before the base offset",
    "negative record count",
    "the base offset is not above the last offset before it",
    "unknown compression codec",
    "zstd is not allowed in message formats before v2",
)


class BatchTable(NamedTuple):
    """Batch headers of one segment as columns: one row per batch, in file order.
    ``size`` includes the 12 bytes of offset and size. The header of a compressed v0/v1 wrapper does not state its first offset: its
    ``base_offset`` is UNKNOWN_OFFSET and its ``count`` 0. v0/v1 batches have no producer, epoch or sequence (-1).
    Kernels take a table as one argument: a tuple of columns, whose ``len`` is the number of batches; in kernels, use the size of a column.
    """

    position: Int64s
    size: Int64s
    base_offset: Int64s
    last_offset: Int64s
    base_timestamp: Int64s
    max_timestamp: Int64s
    producer_id: Int64s
    magic: npt.NDArray[np.int8]
    attributes: npt.NDArray[np.int16]
    leader_epoch: npt.NDArray[np.int32]
    producer_epoch: npt.NDArray[np.int16]
    base_sequence: npt.NDArray[np.int32]
    count: npt.NDArray[np.int32]
    control: npt.NDArray[np.int8]
    coordinator_epoch: npt.NDArray[np.int32]

    @override
    def __len__(self) -> int:
        return len(self.position)

    @staticmethod
    def allocate_rows(batch_count: int) -> BatchTable:
        """Rows are not initialized."""
        return BatchTable(*(np.empty(batch_count, _DTYPES.get(name, np.int64)) for name in BatchTable._fields))

    def select_rows(self, batches: slice | Int64s) -> BatchTable:
        """The result's ``position`` is still that in the complete segment."""
        return BatchTable(*(column[batches] for column in self))

    def replace_columns(self, **columns: npt.NDArray[Any]) -> BatchTable:
        return BatchTable(**{**self._asdict(), **columns})

    @property
    def codec_ids(self) -> npt.NDArray[np.int16]:
        return self.attributes & np.int16(CODEC_MASK)

    @property
    def transactional_flags(self) -> npt.NDArray[np.bool_]:
        return (self.attributes & np.int16(TRANSACTIONAL)) != 0


_DTYPES: Final[dict[str, Any]] = {
    "magic": np.int8,
    "attributes": np.int16,
    "leader_epoch": np.int32,
    "producer_epoch": np.int16,
    "base_sequence": np.int32,
    "count": np.int32,
    "control": np.int8,
    "coordinator_epoch": np.int32,
}


def memory_map_file(path: Path) -> Bytes:
    """Read-only; an empty array for an empty file."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return read_only_view(np.empty(0, np.uint8))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        mapped.madvise(mmap.MADV_SEQUENTIAL)
    return np.frombuffer(mapped, np.uint8)


def read_only_view(array: Bytes) -> Bytes:
    """Kernels are compiled for read-only input, so that each is compiled only once."""
    view = array.view()
    view.flags.writeable = False
    return view


@measure_stage(SegmentWorkStage.CHECK)
def parse_batch_headers(buf: Bytes, segment_name: str, previous_last_offset: int = -1) -> BatchTable:
    """Bodies are not read and CRCs are not checked.
    :param previous_last_offset: the first base offset must be greater.
    :raises BadData: if the bytes are not batches with ascending offsets.
    """
    count, position = _count_complete_batches(buf)
    if position < len(buf):
        _raise_invalid_header(buf, position, _problem_of_incomplete_batch(buf, position), segment_name)
    table = BatchTable.allocate_rows(count)
    problem, position = _parse_headers(buf, previous_last_offset, table)
    if problem:
        _raise_invalid_header(buf, position, problem, segment_name)
    return table


@measure_stage(SegmentWorkStage.CHECK, lambda buf, table, first_batch, end_batch, _: int(table.size[first_batch:end_batch].sum()))
def verify_crcs_of_batches(buf: Bytes, table: BatchTable, first_batch: int, end_batch: int, segment_name: str) -> None:
    """Raises BadData for the first mismatch in [first_batch, end_batch).
    In v2, a CRC-32C covers byte 21 to the end of the batch; in v0 and v1, a CRC-32 covers byte 16 to the end. Kafka's cleaner does not
    verify them; see docs/compatibility.md.
    """
    position, size, magic = table.position[first_batch:end_batch], table.size[first_batch:end_batch], table.magic[first_batch:end_batch]
    wrong = _find_crc_mismatch(buf, position, size, magic)
    if wrong >= 0:
        _raise_crc_mismatch(buf, int(position[wrong]), segment_name)
    view = memoryview(buf)
    for at, length in zip(position[magic < 2].tolist(), size[magic < 2].tolist(), strict=True):
        if zlib.crc32(view[at + 16 : at + length]) != int.from_bytes(view[at + 12 : at + 16], "big"):
            _raise_crc_mismatch(buf, at, segment_name)


def _raise_crc_mismatch(buf: Bytes, position: int, segment_name: str) -> None:
    offset = int.from_bytes(buf[position : position + 8].tobytes(), "big", signed=True)
    raise BadData(
        "the CRC does not match the bytes",
        segment=segment_name,
        position=position,
        offset=offset,
        hint="Restore this segment from a replica or a backup; nothing was changed",
    )


def _raise_invalid_header(buf: Bytes, position: int, problem: int, segment_name: str) -> None:
    """Raise BadData. ``problem`` is an index of _PROBLEMS."""
    offset = int.from_bytes(buf[position : position + 8].tobytes(), "big", signed=True) if position + 8 <= len(buf) else -1
    cause = _PROBLEMS[problem]
    if problem == 4:
        cause += f" {int(buf[position + 16])}"
    raise BadData(
        cause,
        segment=segment_name,
        position=position,
        offset=offset,
        hint="Restore this segment from a replica or a backup; nothing was changed",
    )


@kernel
def _count_complete_batches(buf: Bytes) -> CountAndEndPosition:
    """Number of batches, and the byte position after the last one."""
    end = buf.size
    position = 0
    count = 0
    while position + 17 <= end:
        size = np.int64(load_i32(buf, position + 8)) + FRAME
        if size < FRAME + 14 or position + size > end:
            break
        magic = buf[position + 16]
        if magic > 2 or size < (HEADER if magic == 2 else 26 + 8 * np.int64(magic)):
            break
        position += size
        count += 1
    return count, position


@kernel
def cut_off_batch(buf: Bytes) -> tuple[int, int]:
    """Byte position after the last whole batch, and full size of the batch that is cut off there: 0 if there
    is none, or if not even its length field is complete.
    """
    position = np.int64(0)
    while position + FRAME <= buf.size:
        size = np.int64(load_i32(buf, position + 8)) + FRAME
        if size < FRAME or position + size > buf.size:
            return int(position), int(max(size, np.int64(0)))
        position += size
    return int(position), 0


@kernel
def _problem_of_incomplete_batch(buf: Bytes, position: int) -> int:
    left = buf.size - position
    if left < 17:
        return 1
    size = np.int64(load_i32(buf, position + 8)) + FRAME
    magic = buf[position + 16]
    if size < FRAME + 14:
        return 2
    if magic > 2:
        return 4
    if size > left:
        return 3
    return 2


@kernel
def _find_crc_mismatch(buf: Bytes, position: Int64s, size: Int64s, magic: npt.NDArray[np.int8]) -> int:
    for i in range(position.size):
        if magic[i] == 2 and crc32c(buf, position[i] + 21, position[i] + size[i]) != np.int64(load_u32(buf, position[i] + 17)):
            return i
    return -1


@inline_kernel
def _parse_control(buf: Bytes, position: int, end: int, record_count: int) -> ControlTypeAndEpoch:
    """Parse an uncompressed control batch, whose record has the key ``version:int16 | type:int16``."""
    if record_count == 0:
        return EMPTIED, -1
    _, at = read_varint(buf, position + HEADER, end)
    if at < 0 or at >= end:
        return MALFORMED, -1
    _, at = read_varint(buf, at + 1, end)
    if at < 0:
        return MALFORMED, -1
    _, at = read_varint(buf, at, end)
    if at < 0:
        return MALFORMED, -1
    length, at = read_varint(buf, at, end)
    if at < 0 or length < 4 or length > end - at or load_i16(buf, at) < 0:
        return MALFORMED, -1
    kind = np.int64(load_i16(buf, at + 2))
    if kind != ABORT and kind != COMMIT:
        return OTHER, -1
    length, at = read_varint(buf, at + length, end)
    if at < 0 or length < 6 or at + 6 > end:
        return kind, -1
    return kind, np.int64(load_i32(buf, at + 2))


@kernel
def _parse_headers(buf: Bytes, previous_last_offset: int, out_table: BatchTable) -> ProblemAndPosition:
    """A problem (0 for none) and the byte position of its batch."""
    position = 0
    for i in range(out_table.position.size):
        size = np.int64(load_i32(buf, position + 8)) + FRAME
        magic = np.int64(buf[position + 16])
        base = load_i64(buf, position)
        out_table.position[i] = position
        out_table.size[i] = size
        out_table.magic[i] = magic
        out_table.control[i] = NOT_CONTROL
        out_table.coordinator_epoch[i] = -1
        if base < 0:
            return 5, position
        if magic == 2:
            out_table.attributes[i] = load_i16(buf, position + 21)
            delta = np.int64(load_i32(buf, position + 23))
            last = base + delta
            out_table.leader_epoch[i] = load_i32(buf, position + 12)
            out_table.base_timestamp[i] = load_i64(buf, position + 27)
            out_table.max_timestamp[i] = load_i64(buf, position + 35)
            out_table.producer_id[i] = load_i64(buf, position + 43)
            out_table.producer_epoch[i] = load_i16(buf, position + 51)
            out_table.base_sequence[i] = load_i32(buf, position + 53)
            out_table.count[i] = load_i32(buf, position + 57)
            if delta < 0 or base > MAX_OFFSET - delta:
                return 6, position
            if out_table.count[i] < 0:
                return 7, position
            if out_table.attributes[i] & CODEC_MASK > 4:
                return 9, position
            if out_table.attributes[i] & CONTROL:
                if out_table.attributes[i] & CODEC_MASK:
                    out_table.control[i] = PACKED
                else:
                    kind, epoch = _parse_control(buf, position, position + size, np.int64(out_table.count[i]))
                    out_table.control[i] = kind
                    out_table.coordinator_epoch[i] = epoch
        else:
            codec = buf[position + 17] & CODEC_MASK
            if codec > 4:
                return 9, position
            if codec == 4:
                return 10, position
            # Bit 3 is the timestamp type since v1; the rest means nothing in these formats.
            out_table.attributes[i] = buf[position + 17] & (CODEC_MASK | LOG_APPEND if magic == 1 else CODEC_MASK)
            timestamp = load_i64(buf, position + 18) if magic == 1 else np.int64(-1)
            last = base
            out_table.leader_epoch[i] = -1
            out_table.base_timestamp[i] = timestamp
            out_table.max_timestamp[i] = timestamp
            out_table.producer_id[i] = -1
            out_table.producer_epoch[i] = -1
            out_table.base_sequence[i] = -1
            out_table.count[i] = 0 if codec else 1
            if codec:
                base = np.int64(UNKNOWN_OFFSET)
        if (last if base == UNKNOWN_OFFSET else base) <= previous_last_offset:
            return 8, position
        out_table.base_offset[i] = base
        out_table.last_offset[i] = last
        previous_last_offset = last
        position += size
    return 0, position


_HEADER_FIELDS: Final = np.dtype(
    [
        ("base", ">i8"),
        ("length", ">i4"),
        ("leader_epoch", ">i4"),
        ("magic", "i1"),
        ("crc", ">u4"),
        ("attributes", ">i2"),
        ("delta", ">i4"),
        ("base_ms", ">i8"),
        ("max_ms", ">i8"),
        ("producer", ">i8"),
        ("epoch", ">i2"),
        ("sequence", ">i4"),
        ("count", ">i4"),
    ]
)


def batch_table_from_headers(headers: Bytes, control_kind: npt.NDArray[np.int8], coordinator_epoch: npt.NDArray[np.int32]) -> BatchTable:
    """Headers, shape (batches, 61), are of consecutive v2 batches."""
    rows = np.ascontiguousarray(headers).view(_HEADER_FIELDS).reshape(-1)
    size: Int64s = rows["length"].astype(np.int64) + FRAME
    base: Int64s = rows["base"].astype(np.int64)
    return BatchTable(
        position=np.cumsum(size) - size,
        size=size,
        base_offset=base,
        last_offset=base + rows["delta"].astype(np.int64),
        base_timestamp=rows["base_ms"].astype(np.int64),
        max_timestamp=rows["max_ms"].astype(np.int64),
        producer_id=rows["producer"].astype(np.int64),
        magic=rows["magic"].astype(np.int8),
        attributes=rows["attributes"].astype(np.int16),
        leader_epoch=rows["leader_epoch"].astype(np.int32),
        producer_epoch=rows["epoch"].astype(np.int16),
        base_sequence=rows["sequence"].astype(np.int32),
        count=rows["count"].astype(np.int32),
        control=control_kind.copy(),
        coordinator_epoch=coordinator_epoch.copy(),
    )


def select_batches_of_table(table: BatchTable, batch_numbers: Int64s) -> BatchTable:
    """The table of a file of only these batches, ascending."""
    selected = table.select_rows(batch_numbers)
    return selected.replace_columns(position=np.cumsum(selected.size) - selected.size)
