"""The sidecar of one remote segment: which keys it has, what makes it due although no dirty key meets it, and its producers and markers.

    magic:8 version:4 key fingerprint:8 head length:4 filter length:8 | head MAC:16 filter MAC:16 | head | filter

The head is a JSON object (its length before it), the two tables of bloom.producer_runs and a sketch; the filter is pybloom-live's
own file. Everything is little-endian. The MACs are BLAKE2b under the tier's hash key, so a sidecar can be neither damaged nor forged
without being seen. A reader that only plans needs no filter: ``head_length`` says how much of the object to fetch, ``read_head`` takes
that much.

A sidecar can be dropped at any time. One that is missing or unusable costs a read, never a record.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from bloom.cardinality import REGISTERS, Registers, empty_sketch, estimate, observe, union
from bloom.filter import Hashes, KeyFilter
from bloom.producer_runs import BATCH_RUNS, MARKERS, Table
from bloom.sizing import FilterDesign, useless_rate

MAGIC = b"tc-side\n"
VERSION = 1
_FIXED = struct.Struct("<8sI8sIQ16s16s")
_COVERED = _FIXED.size - 32
_COUNT = struct.Struct("<I")
HEAD_GUESS = 16 * 1024
"""Bytes that hold the whole head of most sidecars: fetch these first, then what ``head_length`` says."""

NEVER_MS = 2**63 - 1


class Unusable(StrEnum):
    """Why a sidecar is ignored."""

    NOT_A_SIDECAR = "it is not a sidecar"
    FUTURE_VERSION = "it is of another version"
    OTHER_KEY = "it was made under another hash key"
    OTHER_SEGMENT = "it was made for another segment"
    CUT_OFF = "it is cut off"
    DAMAGED = "its checksum is wrong"


class SidecarUnusable(Exception):
    """The sidecar is to be ignored and may be rebuilt from the segment."""

    def __init__(self, reason: Unusable, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Due:
    """What forces a clean segment to be read in spite of its filter, as far as its records say. Markers: bloom.producer_runs.due_by_fold.

    A tombstone without a horizon gets one when it is next read; v0/v1 tombstones count as such. Keyless records go when they are next read.
    """

    tombstones: int = 0
    tombstones_without_horizon: int = 0
    earliest_tombstone_horizon_ms: int = NEVER_MS
    keyless_records: int = 0

    def reason(self, now_ms: int) -> str:
        """Why it must be read at this time; "" where it need not."""
        if self.tombstones_without_horizon:
            return f"{self.tombstones_without_horizon} tombstones have no delete horizon yet"
        if self.earliest_tombstone_horizon_ms <= now_ms:
            return "a tombstone's delete horizon has passed"
        if self.keyless_records:
            return f"{self.keyless_records} records have no key"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Sidecar:
    """:param records: records in the segment; :param distinct_keys: exact where there is a filter or no key, else within about 2 %, or
        the number of keyed records where the keys were not looked at (then ``sketch`` is all zeros).
    :param made_for: what the filter was designed for; None where none pays, or where the segment has no key.
    :param filter: None where there is none, and in what ``read_head`` returns.
    :param inherited: filter and sketch are those of the segment that this one was made from, with keys that may be gone.
    """

    segment_id: str
    records: int
    distinct_keys: int
    due: Due
    producer_runs: Table
    markers: Table
    sketch: Registers
    made_for: FilterDesign | None = None
    filter: KeyFilter | None = field(default=None, repr=False)
    inherited: bool = False

    def useless_rate(self, probes: int) -> float:
        """The probability that so many keys, none of them in the segment, do not let it be skipped."""
        if self.distinct_keys == 0:
            return 0.0
        return useless_rate(self.made_for.rate, probes) if self.made_for else 1.0


class Portrait:
    """A sidecar in the making: the hashes of a segment's keys come in any order and in any number of calls, repeated ones too."""

    def __init__(self, made_for: FilterDesign | None) -> None:
        """:param made_for: its filter, for at least as many keys as will come; None: it gets none (bloom.sizing)."""
        self._made_for = made_for
        self._filter = KeyFilter(made_for.keys, made_for.rate) if made_for else None
        self._sketch = empty_sketch()
        self._rows = 0

    def add(self, hashes: Hashes) -> None:
        """Keys of shape (n, 2). Raises IndexError where they are more than the filter was made for."""
        observe(self._sketch, hashes)
        self._rows += len(hashes)
        if self._filter is not None:
            self._filter.add_all(hashes)

    def sidecar(self, segment_id: str, records: int, due: Due, runs: Table, markers: Table) -> Sidecar:
        """:param records: in the segment. Where it has keys and none was added, they were not looked at: then each counts as one."""
        if self._filter is not None:
            keys = self._filter.count
        elif self._rows:
            keys = min(self._rows, estimate(self._sketch))
        else:
            keys = records - due.keyless_records
        return Sidecar(segment_id, records, keys, due, runs, markers, self._sketch, self._made_for, self._filter)


def estimate_together(sidecars: Iterable[Sidecar]) -> int:
    """How many distinct keys several segments have together, within about 2 %; more where the keys of one were not looked at."""
    sketched, rest = [], 0
    for sidecar in sidecars:
        if sidecar.sketch.any():
            sketched.append(sidecar.sketch)
        else:
            rest += sidecar.distinct_keys
    return estimate(union(sketched)) + rest


def fingerprint(hash_key: bytes) -> bytes:
    """8 bytes that tell one tier's hash key from another's and say nothing about it."""
    return hashlib.blake2b(key=hash_key, digest_size=8, person=b"tc-key-id").digest()


def mac(hash_key: bytes, purpose: bytes, *parts: bytes | memoryview) -> bytes:
    """Of what lies beside a segment, under the tier's hash key. ``purpose``: at most 16 bytes; no two kinds of content share one."""
    digest = hashlib.blake2b(key=hash_key, digest_size=16, person=purpose)
    for part in parts:
        digest.update(part)
    return digest.digest()


def write(sidecar: Sidecar, hash_key: bytes) -> bytes:
    """The bytes of a sidecar; the same for the same contents."""
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
    fixed = _FIXED.pack(MAGIC, VERSION, fingerprint(hash_key), len(head), len(filter_bytes), bytes(16), bytes(16))[:_COVERED]
    # Each MAC covers the lengths and the fingerprint; the filter's covers the head's, so that halves of two sidecars do not make a third.
    head_mac = mac(hash_key, b"tc-side-head", fixed, head)
    return b"".join([fixed, head_mac, mac(hash_key, b"tc-side-filter", head_mac, filter_bytes), head, filter_bytes])


def head_length(data: bytes) -> int:
    """How many bytes of the object ``read_head`` wants, from its first 64 or more. Raises SidecarUnusable."""
    _, head, _, _, _ = _fixed(data)
    return _FIXED.size + head


def read_head(data: bytes, segment_id: str, hash_key: bytes) -> Sidecar:
    """A sidecar without its filter, from at least ``head_length`` bytes. Raises SidecarUnusable."""
    found_key, head_size, _, head_mac, _ = _fixed(data)
    if not hmac.compare_digest(found_key, fingerprint(hash_key)):
        raise SidecarUnusable(Unusable.OTHER_KEY)
    if len(data) < _FIXED.size + head_size:
        raise SidecarUnusable(Unusable.CUT_OFF, f"{len(data)} bytes")
    head = memoryview(data)[_FIXED.size : _FIXED.size + head_size]
    if not hmac.compare_digest(head_mac, mac(hash_key, b"tc-side-head", data[:_COVERED], head)):
        raise SidecarUnusable(Unusable.DAMAGED)
    sidecar = _parse_head(head)
    if sidecar.segment_id != segment_id:
        raise SidecarUnusable(Unusable.OTHER_SEGMENT, sidecar.segment_id)
    return sidecar


def read(data: bytes, segment_id: str, hash_key: bytes) -> Sidecar:
    """The whole sidecar. Raises SidecarUnusable: then there is none, and the segment is read."""
    sidecar = read_head(data, segment_id, hash_key)
    _, head_size, filter_size, head_mac, filter_mac = _fixed(data)
    filter_bytes = memoryview(data)[_FIXED.size + head_size :]
    if len(filter_bytes) < filter_size:
        raise SidecarUnusable(Unusable.CUT_OFF, f"{len(data)} bytes")
    if not hmac.compare_digest(filter_mac, mac(hash_key, b"tc-side-filter", head_mac, filter_bytes)):
        raise SidecarUnusable(Unusable.DAMAGED)
    return replace(sidecar, filter=KeyFilter.fromfile(io.BytesIO(filter_bytes)) if filter_size else None)


def _fixed(data: bytes) -> tuple[bytes, int, int, bytes, bytes]:
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise SidecarUnusable(Unusable.NOT_A_SIDECAR)
    if len(data) < _FIXED.size:
        raise SidecarUnusable(Unusable.CUT_OFF, f"{len(data)} bytes")
    _, version, key, head_size, filter_size, head_mac, filter_mac = _FIXED.unpack_from(data)
    if version != VERSION:
        raise SidecarUnusable(Unusable.FUTURE_VERSION, f"version {version}, this program writes {VERSION}")
    return key, head_size, filter_size, head_mac, filter_mac


def _parse_head(head: memoryview) -> Sidecar:
    """What ``write`` wrote: the MAC has been checked, so nothing here can be missing."""
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
        due=Due(**about["due"]),
        producer_runs=runs,
        markers=markers,
        sketch=sketch.view(np.uint8),
        made_for=FilterDesign(**about["made_for"]) if about["made_for"] else None,
        inherited=about.get("inherited", False),
    )
