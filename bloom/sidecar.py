"""Sidecar of a remote segment: its keys, its producers and markers, and what makes it due for cleaning even without a dirty key.
    magic:8 version:4 key fingerprint:8 head length:4 filter length:8 | head MAC:16 filter MAC:16 | head | filter
Head: a JSON object, with its length first, the tables BATCH_RUNS and MARKERS, a HyperLogLog sketch. Filter: pybloom-live's file format.
Numbers are little-endian; the MACs are BLAKE2b under the tier's hash key. Planning reads the head only.
A sidecar can be deleted at any time: a segment without a usable sidecar is read.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bloom.filter import KeyFilter
from bloom.sizing import FilterDesign, useless_probability
from compactor.constants import NEVER_MS
from compactor.kernels.common import Hashes
from compactor.kernels.jit import kernel

# ---- HyperLogLog over key hashes: estimates the number of distinct keys in several segments together, from 4 KiB per segment -----
# The estimator is that of Ertl, "New cardinality estimation algorithms for HyperLogLog sketches" (2017), which needs no bias tables.
# Its standard error is 1.04 / sqrt(registers), which is 1.6 %. Sketches are merged by taking the maximum of each register.

PRECISION = 12
REGISTERS = 1 << PRECISION
LONGEST = 64 - PRECISION + 1

HyperLogLogRegisters = npt.NDArray[np.uint8]


def empty_sketch() -> HyperLogLogRegisters:
    return np.zeros(REGISTERS, dtype=np.uint8)


@kernel
def add_to_sketch(sketch: HyperLogLogRegisters, hashes: npt.NDArray[np.uint64]) -> None:
    for row in range(len(hashes)):
        h1 = hashes[row, 1]
        rest = h1 << np.uint64(PRECISION)
        run = 1
        while run < LONGEST and rest >> np.uint64(63) == 0:
            rest <<= np.uint64(1)
            run += 1
        register = h1 >> np.uint64(64 - PRECISION)
        sketch[register] = max(sketch[register], np.uint8(run))


def merge_sketches(sketches: Iterable[HyperLogLogRegisters]) -> HyperLogLogRegisters:
    merged = empty_sketch()
    for sketch in sketches:
        np.maximum(merged, sketch, out=merged)
    return merged


def estimate_distinct_keys(sketch: HyperLogLogRegisters) -> int:
    """Standard error 1.6 %."""
    counts = np.bincount(sketch, minlength=LONGEST + 1)
    if counts[0] == REGISTERS:
        return 0
    z = REGISTERS * _ertl_tau(1 - counts[LONGEST] / REGISTERS)
    for run in range(LONGEST - 1, 0, -1):
        z = 0.5 * (z + counts[run])
    z += REGISTERS * _ertl_sigma(counts[0] / REGISTERS)
    return round(REGISTERS**2 / (2 * math.log(2) * z))


def _ertl_sigma(x: float) -> float:
    power, total = 1.0, x
    while True:
        x *= x
        before = total
        total += x * power
        power += power
        if total == before:
            return total


def _ertl_tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    power, total = 1.0, 1 - x
    while True:
        x = math.sqrt(x)
        before = total
        power *= 0.5
        total -= (1 - x) ** 2 * power
        if total == before:
            return total / 3


# ---- the sidecar -----------------------------------------------------------------------------------------------------------

SIDECAR_MAGIC = b"tc-side\n"
SIDECAR_VERSION = 1
_FIXED = struct.Struct("<8sI8sIQ16s16s")
_COVERED = _FIXED.size - 32
_COUNT = struct.Struct("<I")
HEAD_GUESS = 16 * 1024
"""Bytes that hold the whole head of most sidecars: fetch these first, then what ``sidecar_head_size_bytes`` says."""

ProducerRunOrMarkerTable = npt.NDArray[np.void]

BATCH_RUNS = np.dtype(
    [
        ("first_offset", "<i8"),  # base offset of the first batch
        ("last_offset", "<i8"),  # last offset of the last batch
        ("producer_id", "<i8"),
        ("max_timestamp", "<i8"),  # of the last batch
        ("base_sequence", "<i4"),  # of the last batch
        ("last_offset_delta", "<i4"),  # of the last batch
        ("batches", "<i4"),
        ("epoch", "<i2"),
        ("transactional", "?"),
        ("has_records", "?"),  # False where all its batches have been emptied: nothing left to remove, should the transaction be aborted
    ]
)
"""Columns of the table of producer runs, ascending by first offset. A *run* is all data batches of one producer, epoch and kind between two
markers of that producer. Batches without a producer id are in no run.
"""

MARKERS = np.dtype(
    [
        ("offset", "<i8"),
        ("producer_id", "<i8"),
        ("horizon", "<i8"),  # NO_HORIZON where the batch has none
        ("max_timestamp", "<i8"),
        ("coordinator_epoch", "<i4"),
        ("epoch", "<i2"),
        ("control", "<i2"),  # what kind of control batch, as in compactor.records.batches
    ]
)
"""Columns of the table of transaction markers: every control batch of a producer, ascending by offset."""


class SidecarUnusableReason(StrEnum):
    NOT_A_SIDECAR = "it is not a sidecar"
    FUTURE_VERSION = "it is of another version"
    OTHER_KEY = "it was made under another hash key"
    OTHER_SEGMENT = "it was made for another segment"
    CUT_OFF = "it is cut off"
    DAMAGED = "its checksum is invalid"


class SidecarUnusable(Exception):
    """Raised for a sidecar that must be ignored; it can be rebuilt."""

    def __init__(self, reason: SidecarUnusableReason, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RemovableRecordCounts:
    """Records that a later round must remove or change. Transaction markers are not counted.
    tombstones_without_horizon: get a delete horizon when the segment is next read; all of v0/v1 count.
    keyless_records: removed unless the topic's rules keep them.
    """

    tombstones: int = 0
    tombstones_without_horizon: int = 0
    earliest_tombstone_horizon_ms: int = NEVER_MS
    keyless_records: int = 0

    def reason_to_read(self, now_ms: int, *, drops_keyless: bool = True) -> str:
        """The reason to read the segment now although its filter contains no dirty key; empty if there is none."""
        if self.tombstones_without_horizon:
            return f"{self.tombstones_without_horizon} tombstones have no delete horizon yet"
        if self.earliest_tombstone_horizon_ms <= now_ms:
            return "a tombstone's delete horizon has passed"
        if self.keyless_records and drops_keyless:
            return f"{self.keyless_records} records have no key"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Sidecar:
    """Contents of a segment's sidecar.
    :param distinct_keys: exact if there is a filter or no key, otherwise within about 2 %. If keys were not hashed (``sketch`` is all
    zeros), the number of records with a key.
    :param made_for: None if the segment has no key, or if a filter would cost more than it saves.
    :param filter: None also after ``decode_sidecar_head``.
    """

    segment_id: str
    records: int
    distinct_keys: int
    due: RemovableRecordCounts
    producer_runs: ProducerRunOrMarkerTable
    markers: ProducerRunOrMarkerTable
    sketch: HyperLogLogRegisters
    made_for: FilterDesign | None = None
    filter: KeyFilter | None = field(default=None, repr=False)
    inherited: bool = False

    def useless_read_probability(self, probed_keys: int) -> float:
        """Probability that the segment has none of ``probed_keys`` keys but its filter gives a false positive: 1 without a filter, 0
        without keys.
        """
        if self.distinct_keys == 0:
            return 0.0
        return useless_probability(self.made_for.rate, probed_keys) if self.made_for else 1.0


class SidecarKeyHashCollector:
    """Collector of a segment's key hashes, in any order and with repetitions."""

    def __init__(self, filter_design: FilterDesign | None) -> None:
        """:param filter_design: for at least as many distinct keys as will be added."""
        self._made_for = filter_design
        self._filter = KeyFilter(filter_design.keys, filter_design.rate) if filter_design else None
        self._sketch = empty_sketch()
        self._rows = 0

    def add_record_key_hashes(self, hashes: Hashes) -> None:
        """Key hashes have shape (n, 2). Raises IndexError if earlier calls exceeded the filter's design."""
        add_to_sketch(self._sketch, hashes)
        self._rows += len(hashes)
        if self._filter is not None:
            self._filter.add_record_key_hashes(hashes)

    def build_sidecar(
        self,
        segment_id: str,
        record_count: int,
        removable_counts: RemovableRecordCounts,
        producer_runs: ProducerRunOrMarkerTable,
        markers: ProducerRunOrMarkerTable,
    ) -> Sidecar:
        """If no key hash was added, each record with a key counts as a distinct key."""
        if self._filter is not None:
            keys = self._filter.count
        elif self._rows:
            keys = min(self._rows, estimate_distinct_keys(self._sketch))
        else:
            keys = record_count - removable_counts.keyless_records
        return Sidecar(segment_id, record_count, keys, removable_counts, producer_runs, markers, self._sketch, self._made_for, self._filter)


def estimate_union_keys(sidecars: Iterable[Sidecar]) -> int:
    """Within about 2 %; too high if a segment's keys were not hashed: each record with a key then counts."""
    sketched, rest = [], 0
    for sidecar in sidecars:
        if sidecar.sketch.any():
            sketched.append(sidecar.sketch)
        else:
            rest += sidecar.distinct_keys
    return estimate_distinct_keys(merge_sketches(sketched)) + rest


def hash_key_fingerprint(hash_key: bytes) -> bytes:
    """8 bytes that identify a hash key without revealing it."""
    return hashlib.blake2b(key=hash_key, digest_size=8, person=b"tc-key-id").digest()


def sidecar_mac(hash_key: bytes, purpose: bytes, *parts: bytes | memoryview) -> bytes:
    """:param purpose: at most 16 bytes, per kind of object, so that one cannot pass as another kind."""
    digest = hashlib.blake2b(key=hash_key, digest_size=16, person=purpose)
    for part in parts:
        digest.update(part)
    return digest.digest()


def encode_sidecar(sidecar: Sidecar, hash_key: bytes) -> bytes:
    """Equal contents give equal bytes."""
    about = {
        "segment_id": sidecar.segment_id,
        "records": sidecar.records,
        "distinct_keys": sidecar.distinct_keys,
        "due": asdict(sidecar.due),
        "made_for": asdict(sidecar.made_for) if sidecar.made_for else None,
        "runs": len(sidecar.producer_runs),
        "markers": len(sidecar.markers),
        **({"inherited": True} if sidecar.inherited else {}),
    }
    text = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    head = b"".join([_COUNT.pack(len(text)), text, sidecar.producer_runs.tobytes(), sidecar.markers.tobytes(), sidecar.sketch.tobytes()])
    body = io.BytesIO()
    if sidecar.filter is not None:
        sidecar.filter.tofile(body)
    filter_bytes = body.getbuffer()
    fixed = _FIXED.pack(SIDECAR_MAGIC, SIDECAR_VERSION, hash_key_fingerprint(hash_key), len(head), len(filter_bytes), bytes(16), bytes(16))[
        :_COVERED
    ]
    # Each MAC covers the lengths and the fingerprint; the filter's covers the head's, so that halves of two sidecars do not make a third.
    head_mac = sidecar_mac(hash_key, b"tc-side-head", fixed, head)
    return b"".join([fixed, head_mac, sidecar_mac(hash_key, b"tc-side-filter", head_mac, filter_bytes), head, filter_bytes])


def sidecar_head_size_bytes(data: bytes) -> int:
    """Bytes that ``decode_sidecar_head`` needs, from a sidecar's first 64 bytes or more. Raises SidecarUnusable if they are not the start
    of a sidecar of this version.
    """
    return _FIXED.size + _parse_sidecar_fixed_part(data).head_size


def decode_sidecar_head(data: bytes, segment_id: str, hash_key: bytes) -> Sidecar:
    """Parse the first ``sidecar_head_size_bytes`` bytes, or more, without the filter. Raises SidecarUnusable if damaged, or of another
    segment or hash key.
    """
    found_key, head_size, _, head_mac, _ = _parse_sidecar_fixed_part(data)
    if not hmac.compare_digest(found_key, hash_key_fingerprint(hash_key)):
        raise SidecarUnusable(SidecarUnusableReason.OTHER_KEY)
    if len(data) < _FIXED.size + head_size:
        raise SidecarUnusable(SidecarUnusableReason.CUT_OFF, f"{len(data)} bytes")
    head = memoryview(data)[_FIXED.size : _FIXED.size + head_size]
    if not hmac.compare_digest(head_mac, sidecar_mac(hash_key, b"tc-side-head", data[:_COVERED], head)):
        raise SidecarUnusable(SidecarUnusableReason.DAMAGED)
    sidecar = _parse_sidecar_head(head)
    if sidecar.segment_id != segment_id:
        raise SidecarUnusable(SidecarUnusableReason.OTHER_SEGMENT, sidecar.segment_id)
    return sidecar


def decode_sidecar(data: bytes, segment_id: str, hash_key: bytes) -> Sidecar:
    """Raises SidecarUnusable as ``decode_sidecar_head`` does."""
    sidecar = decode_sidecar_head(data, segment_id, hash_key)
    _, head_size, filter_size, head_mac, filter_mac = _parse_sidecar_fixed_part(data)
    filter_bytes = memoryview(data)[_FIXED.size + head_size :]
    if len(filter_bytes) < filter_size:
        raise SidecarUnusable(SidecarUnusableReason.CUT_OFF, f"{len(data)} bytes")
    if not hmac.compare_digest(filter_mac, sidecar_mac(hash_key, b"tc-side-filter", head_mac, filter_bytes)):
        raise SidecarUnusable(SidecarUnusableReason.DAMAGED)
    return replace(sidecar, filter=KeyFilter.fromfile(io.BytesIO(filter_bytes)) if filter_size else None)


class _SidecarFixedPart(NamedTuple):
    key_fingerprint: bytes
    head_size: int
    filter_size: int
    head_mac: bytes
    filter_mac: bytes


def _parse_sidecar_fixed_part(data: bytes) -> _SidecarFixedPart:
    if data[: len(SIDECAR_MAGIC)] != SIDECAR_MAGIC[: len(data)]:
        raise SidecarUnusable(SidecarUnusableReason.NOT_A_SIDECAR)
    if len(data) < _FIXED.size:
        raise SidecarUnusable(SidecarUnusableReason.CUT_OFF, f"{len(data)} bytes")
    _, version, key, head_size, filter_size, head_mac, filter_mac = _FIXED.unpack_from(data)
    if version != SIDECAR_VERSION:
        raise SidecarUnusable(SidecarUnusableReason.FUTURE_VERSION, f"version {version}, this program writes {SIDECAR_VERSION}")
    return _SidecarFixedPart(key, head_size, filter_size, head_mac, filter_mac)


def _parse_sidecar_head(head: memoryview) -> Sidecar:
    (size,) = _COUNT.unpack_from(head)
    about = json.loads(bytes(head[_COUNT.size : _COUNT.size + size]))
    at = _COUNT.size + size
    arrays: list[npt.NDArray[np.void]] = []
    for dtype, rows in ((BATCH_RUNS, about["runs"]), (MARKERS, about["markers"]), (np.dtype(np.uint8), REGISTERS)):
        arrays.append(np.frombuffer(head, dtype=dtype, count=rows, offset=at))
        at += rows * dtype.itemsize
    runs, markers, sketch = arrays
    return Sidecar(
        segment_id=about["segment_id"],
        records=about["records"],
        distinct_keys=about["distinct_keys"],
        due=RemovableRecordCounts(**about["due"]),
        producer_runs=runs,
        markers=markers,
        sketch=sketch.view(np.uint8),
        made_for=FilterDesign(**about["made_for"]) if about["made_for"] else None,
        inherited=about.get("inherited", False),
    )
