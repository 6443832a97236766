"""Kafka 4.4.0's log cleaner in dicts and loops: slow, obvious, and the judge of the fast one.

One pass after the other over decoded batches, everything in memory. It deviates from Kafka where docs/compatibility.md says so:
CRCs are checked, offsets must ascend, outcomes of transactions come from the markers, an emptied legacy last batch goes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from tests.plain_format import Batch, Record, Unreadable, java_utf8
from tests.plain_log import Segment, control_type, load, transaction_index, unexpired_producers

MAX32 = 2**31 - 1
ABORT, COMMIT = 0, 1


@dataclass(frozen=True)
class Request:
    """What a round is asked to do; the names of `clean`."""

    now_ms: int
    first_dirty_offset: int | None = None
    first_uncleanable_offset: int | None = None
    delete_retention_ms: int = 86_400_000
    segment_bytes: int = 1 << 30
    segment_index_bytes: int = 10_485_760
    index_interval_bytes: int = 4096
    map_entries: int | None = None
    high_watermark: int | None = None
    max_decompressed_batch_bytes: int = 1 << 30
    drops_keyless: bool = True  # else each stays, as if it had a key of its own; Kafka knows no such thing


@dataclass
class Cleaned:
    """Output base -> batches, transaction index entries, modification time of the group's last input."""

    next_dirty_offset: int
    segments: dict[int, list[Batch]]
    txn_index: dict[int, list[bytes]]
    mtimes_ms: dict[int, int]


def clean(folder: Path, ask: Request) -> Cleaned:
    """One round over a log directory. Raises Unreadable where Kafka, or our contract, refuses the log."""
    segments = load(folder, ask.index_interval_bytes, ask.max_decompressed_batch_bytes)
    end = max(segments[-1].next_base, ask.first_uncleanable_offset or 0)
    segments[-1].next_base = end
    first_dirty = segments[0].base if ask.first_dirty_offset is None else ask.first_dirty_offset
    upper = end if ask.first_uncleanable_offset is None else ask.first_uncleanable_offset
    upper = max((s.base for s in segments if s.base <= upper < s.next_base), default=end)
    high_watermark = end if ask.high_watermark is None else ask.high_watermark
    aborted, entries = outcomes(folder, segments)
    latest, map_end = build_map(segments, first_dirty, upper, aborted, ask.map_entries)
    cleaned_before = [s for s in segments if s.base < first_dirty]
    legacy_horizon = cleaned_before[-1].mtime_ms - ask.delete_retention_ms if cleaned_before else 0
    producers = unexpired_producers(folder, segments)
    fold = Transactions(aborted)
    out = Cleaned(map_end + 1, {}, {}, {})
    for group in grouped([s for s in segments if s.base <= map_end], ask, upper):
        target, base = [], group[0].base
        out.txn_index[base], out.mtimes_ms[base] = [], group[-1].mtime_ms
        for segment in group:
            for batch in segment.batches:
                batch.check_crc_and_order()
                can_discard, aborts = fold.see(batch)
                if aborts:
                    out.txn_index[base].append(entries[batch.last_offset])
                expired = batch.horizon is not None and batch.horizon <= ask.now_ms
                drop_records = can_discard and (expired or not batch.control)
                keeps_header = is_last_of_producer(batch, producers) or batch.last_offset + 1 == high_watermark
                if drop_records and not keeps_header:
                    continue
                legacy_retain = segment.mtime_ms > legacy_horizon
                kept = [r for r in (() if drop_records else batch.records)
                        if batch.control or record_survives(r, batch, latest, map_end, ask, legacy_retain)]  # fmt: skip
                if kept:
                    target.append(rewritten(batch, kept, can_discard and batch.control, ask))
                elif keeps_header and batch.magic == 2:
                    header = replace(batch, attributes=batch.attributes & 0x38, base_timestamp=-1, count=0)
                    target.append(replace(header, known_records=(), raw=b""))
        out.segments[base] = target
    return out


def record_survives(record: Record, batch: Batch, latest: dict[bytes, int], map_end: int, ask: Request, legacy_retain: bool) -> bool:
    if record.offset > map_end:
        return True
    if record.key is None:
        return not ask.drops_keyless
    if record.offset < latest.get(record.key, -1):
        return False
    if record.value is not None:
        return True
    return legacy_retain if batch.magic < 2 else batch.horizon is None or ask.now_ms < batch.horizon


def rewritten(batch: Batch, kept: list[Record], empty_marker: bool, ask: Request) -> Batch:
    """The batch as it was where nothing changes, else what Kafka's builder makes of the kept records (magic 2, always)."""
    tombstones = [record for record in kept if record.value is None and (record.key is not None or ask.drops_keyless)]
    sets_horizon = (empty_marker or len(tombstones) > 0) and batch.horizon is None
    if batch.magic == 2 and len(kept) == len(batch.records) and not sets_horizon:
        return batch
    horizon = ask.now_ms + ask.delete_retention_ms if sets_horizon else batch.horizon
    if any(b.offset <= a.offset for a, b in pairwise(kept)):
        raise Unreadable(f"position {batch.position}: offsets do not ascend")
    if any(record.timestamp < -1 for record in kept):
        raise Unreadable(f"position {batch.position}: a negative timestamp")
    base, last = (batch.base_offset, batch.last_offset) if batch.magic == 2 else (kept[0].offset, kept[-1].offset)
    if batch.producer_id == -1 and batch.transactional:
        raise Unreadable(f"position {batch.position}: transactional without a producer id")
    if batch.producer_id != -1 and (batch.producer_epoch == -1 or (batch.base_sequence < 0 and not batch.control)):
        raise Unreadable(f"position {batch.position}: a producer without an epoch or a sequence")
    attributes = batch.attributes & (0x3F if batch.magic == 2 else 0x0F if batch.magic else 0x07) | (0x40 if horizon is not None else 0)
    max_timestamp = batch.max_timestamp if batch.append_time else max(record.timestamp for record in kept)
    records = tuple(r._replace(attributes=0, timestamp=max_timestamp if batch.append_time else r.timestamp,
                               headers=tuple((java_utf8(n), v) for n, v in r.headers)) for r in kept)  # fmt: skip
    return Batch(2, last, batch.leader_epoch, attributes, kept[0].timestamp if horizon is None else horizon, max_timestamp,
                 batch.producer_id, batch.producer_epoch, batch.base_sequence, len(kept), base, records)  # fmt: skip


def outcomes(folder: Path, segments: list[Segment]) -> tuple[set[int], dict[int, bytes]]:
    """Last offsets of the batches that were aborted; transaction index entries by marker offset, the original ones where given."""
    aborted: set[int] = set()
    entries: dict[int, bytes] = {}
    ongoing: dict[int, list[Batch]] = {}
    for batch in (batch for segment in segments for batch in segment.batches):
        kind = control_type(batch, strict=False) if batch.control else None
        if batch.transactional and not batch.control:
            ongoing.setdefault(batch.producer_id, []).append(batch)
        elif kind in (ABORT, COMMIT):
            batches = ongoing.pop(batch.producer_id, [])
            if kind == ABORT and batches:
                aborted.update(b.last_offset for b in batches)
                stable = min((other[0].base_offset for other in ongoing.values()), default=batch.last_offset + 1)
                numbers = (0, batch.producer_id, batches[0].base_offset, batch.last_offset, stable)
                entries[batch.last_offset] = struct.pack(">hqqqq", *numbers)
    return aborted, entries | transaction_index(folder)


class Transactions:
    """CleanedTransactionMetadata: may this batch go, and does its marker keep an index entry?"""

    def __init__(self, aborted: set[int]) -> None:
        self.aborted = aborted
        self.seen: dict[int, set[int]] = {ABORT: set(), COMMIT: set()}

    def see(self, batch: Batch) -> tuple[bool, bool]:
        if not batch.control:
            gone = batch.last_offset in self.aborted
            if batch.transactional:
                self.seen[ABORT if gone else COMMIT].add(batch.producer_id)
            return gone, False
        kind = control_type(batch)
        if kind not in (ABORT, COMMIT):
            return kind is None, False
        had_data = batch.producer_id in self.seen[kind]
        self.seen[kind].discard(batch.producer_id)
        return not had_data, had_data and kind == ABORT


def build_map(segments: list[Segment], first: int, upper: int, aborted: set[int], most: int | None) -> tuple[dict[bytes, int], int]:
    """Key -> its last offset, and the offset up to which the map knows every key."""
    latest, map_end = dict[bytes, int](), -1
    for segment in (s for s in segments if s.next_base > first and s.base < upper):
        for batch in (b for b in segment.batches if b.last_offset >= first):
            batch.check_crc()
            for record in () if batch.control or batch.last_offset in aborted else batch.records:
                if record.key is not None and record.offset >= first:
                    if most is not None and len(latest) >= most:
                        return latest, map_end
                    latest[record.key] = map_end = record.offset
            map_end = batch.last_offset
        map_end = segment.next_base - 1
    return latest, map_end


def is_last_of_producer(batch: Batch, producers: dict[int, tuple[int, int]]) -> bool:
    if batch.producer_id not in producers or batch.producer_id < 0:
        return False
    epoch, last = producers[batch.producer_id]
    return batch.last_offset == last if last >= 0 else batch.control and batch.producer_epoch == epoch


def grouped(segments: list[Segment], ask: Request, upper: int) -> Iterator[list[Segment]]:
    group: list[Segment] = []
    for number, segment in enumerate(segments):
        bound = segments[number + 1].base - 1 if number + 1 < len(segments) else upper - 1
        joined = [*group, segment]
        fits = sum(s.bytes for s in joined) <= ask.segment_bytes
        fits &= sum(s.index_bytes for s in joined) <= ask.segment_index_bytes
        fits &= sum(s.time_index_bytes for s in joined) <= ask.segment_index_bytes
        fits &= segment.bytes == 0 or bound - joined[0].base <= MAX32
        if group and not fits:
            yield group
            group = []
        group.append(segment)
    if group:
        yield group
