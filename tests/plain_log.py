"""A Kafka log directory read the plain way: segments, indexes, producer snapshots, transaction indexes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import google_crc32c

from tests.plain_format import DEFAULT_LIMIT, Batch, Unreadable, first_key, read_batches, segment_paths

NEVER = 2**63


@dataclass
class Segment:
    base: int
    bytes: int
    batches: list[Batch]
    mtime_ms: int
    index_bytes: int
    time_index_bytes: int
    next_base: int = 0


def load(folder: Path, index_interval_bytes: int, limit: int = DEFAULT_LIMIT) -> list[Segment]:
    """All segments of a log directory: what lies where. Raises Unreadable where that cannot be told.

    What is inside a batch is judged when somebody needs it (``Batch.check_crc``, ``Batch.records``).
    """
    segments, last = [], -1
    for base, path in segment_paths(folder).items():
        batches = list(read_batches(path.read_bytes(), check_crc=False, limit=limit))
        for batch in batches:
            batch.floor, batch.ceiling = max(last + 1, base), base + 2**31 - 1
            if batch.last_offset < batch.floor:
                batch.floor = NEVER
            last = max(last, batch.last_offset)
        sizes = [path.with_suffix(s).stat().st_size if path.with_suffix(s).exists() else None for s in (".index", ".timeindex")]
        if sizes[0] is None:  # Kafka rebuilds both
            sizes = [len(index) for index in indexes_of(batches, base, index_interval_bytes)]
        mtime = path.stat().st_mtime_ns // 1_000_000
        segments.append(Segment(base, path.stat().st_size, batches, mtime, sizes[0] or 0, sizes[1] or 0))
    for segment, following in pairwise(segments):
        segment.next_base = following.base
    segments[-1].next_base = max(last, segments[-1].base) + 1
    return segments


def indexes_of(batches: Iterable[Batch], base: int, interval: int) -> tuple[bytes, bytes]:
    """Offset and time index of a segment, an entry when more than ``interval`` bytes came since the last (LogSegment.append)."""
    index, times, since, position = b"", b"", 0, 0
    top, top_offset, last_top = -1, base, -1
    for batch in batches:
        if batch.max_timestamp > top:
            top, top_offset = batch.max_timestamp, batch.last_offset
        if since > interval:
            index += struct.pack(">Ii", batch.last_offset - base & 0xFFFFFFFF, position)
            if top > last_top:
                times, last_top = times + struct.pack(">qI", top, top_offset - base & 0xFFFFFFFF), top
            since = 0
        since, position = since + len(batch.raw), position + len(batch.raw)
    return index, times + struct.pack(">qI", top, top_offset - base & 0xFFFFFFFF) if top > last_top else times


def control_type(batch: Batch, *, strict: bool = True) -> int | None:
    """None: an emptied marker. -1: what nobody can read. ``strict``: the whole record must be as Kafka wants it."""
    if batch.count == 0:
        return None
    try:
        key = (batch.records[0].key if strict else first_key(batch)) or b""
    except Unreadable:
        if strict:
            raise
        key = b""
    if len(key) >= 4 and key[0] < 128:
        return int.from_bytes(key[2:4], "big", signed=True)
    if strict:
        raise Unreadable(f"position {batch.position}: a control record's key")
    return -1


def unexpired_producers(folder: Path, segments: list[Segment]) -> dict[int, tuple[int, int]]:
    """Producer id -> (epoch, last data offset or -1): the newest snapshot and the log behind it (ProducerStateManager)."""
    end = segments[-1].next_base
    bases = {segment.base for segment in segments[1:]} | {end}
    snapshots = {int(path.stem): path for path in folder.glob("*.snapshot") if path.stem.isdecimal() and int(path.stem) in bases}
    start, producers = -1, {}
    for number in sorted(snapshots, reverse=True):
        data = snapshots[number].read_bytes()
        if _sound_snapshot(data):  # else Kafka goes on with an older one
            start = number
            for at in range(10, len(data), 46):
                pid, epoch, _, last = struct.unpack_from(">qhiq", data, at)
                producers[pid] = (epoch, last)
            break
    for batch in (b for s in segments for b in s.batches if b.last_offset >= start and b.producer_id >= 0):
        epoch, last = producers.get(batch.producer_id, (-1, -1))
        if not batch.control:
            producers[batch.producer_id] = (batch.producer_epoch, batch.last_offset)
        elif control_type(batch, strict=False) in (0, 1):
            producers[batch.producer_id] = (batch.producer_epoch, last if epoch == batch.producer_epoch else -1)
    return producers


def _sound_snapshot(data: bytes) -> bool:
    if len(data) < 10:
        return False
    version, crc, count = struct.unpack_from(">hIi", data)
    return bool(version == 1 and crc == google_crc32c.value(data[6:]) and len(data) == 10 + 46 * count)


def transaction_index(folder: Path) -> dict[int, bytes]:
    """Marker offset -> the 34 bytes of its entry."""
    entries = {}
    for path in folder.glob("*.txnindex"):
        data = path.read_bytes()
        entries.update({int.from_bytes(data[at + 18 : at + 26], "big"): data[at : at + 34] for at in range(0, len(data), 34)})
    return entries
