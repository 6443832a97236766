"""``bloom show`` and ``bloom rebuild``: the sidecars of one partition, and making them anew.

A sidecar says what is in a segment that never changes, so neither needs leadership: one that is written for a segment which is retired
meanwhile is swept with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bloom.sidecar import NEVER_MS, Sidecar
from compactor.bootstrap import Tier
from compactor.cleaner.passes.lanes import Lanes
from compactor.cleaner.passes.portraits import Sitting, sat
from compactor.control.state import PartitionState
from compactor.errors import NotFound
from compactor.local.budget import Budget
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.skip import filter_for, filter_record, keys_to_come
from compactor.round.splice import worth_a_directory
from compactor.tier.sidecars import Head


@dataclass(frozen=True)
class Rebuilt:
    """``written``: ids of the segments that have a new sidecar; ``kept``: how many had one that can be used; bytes."""

    written: tuple[str, ...]
    kept: int
    bytes_read: int
    bytes_written: int


def show(opened: Tier, name: TopicPartition, now_ms: int) -> dict[str, Any]:
    """What the sidecars of live segments say, and what filters have done here so far. Raises StoreError."""
    state = opened.open(name).refresh()
    cleaner = opened.cleaner_for(name.topic)
    record = filter_record(state.runs)
    sidecars = opened.sidecars(name)
    sizes = sidecars.ids()
    heads = sidecars.heads([segment.id for segment in state.live])
    probes = keys_to_come(cleaner, state.runs, 0)
    return {
        "topic": name.topic,
        "partition": name.partition,
        "on": cleaner.bloom and record.pays,
        "reason": "bloom = false" if not cleaner.bloom else "" if record.pays else f"filters do not pay on this partition: {record.text()}",
        "design_keys": probes,
        "asked": record.asked,
        "skipped": record.skipped,
        "useless": record.useless,
        "useless_rate": record.useless_rate,
        "filter_bytes": record.bytes_read,
        "segment_bytes_saved": record.bytes_saved,
        "segments": [_row(segment, state, heads[segment.id], sizes.get(segment.id, 0), probes, now_ms) for segment in state.live],
    }


def _row(segment: RemoteLogSegmentMetadata, state: PartitionState, head: Head, size: int, probes: int, now_ms: int) -> dict[str, Any]:
    return {
        "id": segment.id,
        "start_offset": segment.start_offset,
        "end_offset": segment.end_offset,
        "bytes": segment.size_bytes,
        "clean": segment.end_offset < state.first_dirty_offset,
        "problem": head.problem,
        "sidecar": None if head.sidecar is None else _about(head.sidecar, size, probes, now_ms),
    }


def _about(sidecar: Sidecar, size: int, probes: int, now_ms: int) -> dict[str, Any]:
    made_for, due = sidecar.made_for, sidecar.due
    return {
        "bytes": size,
        "records": sidecar.records,
        "keys": sidecar.distinct_keys,
        "filter_bytes": made_for.bytes if made_for else 0,
        "bits_per_key": round(8 * made_for.bytes / max(1, made_for.keys), 1) if made_for else 0.0,
        "rate_per_key": made_for.rate if made_for else None,
        "made_for_keys": made_for.probes if made_for else None,
        "useless_rate": sidecar.useless_rate(probes),
        "due": due.reason(now_ms),
        "tombstones": due.tombstones,
        "next_horizon_ms": due.earliest_tombstone_horizon_ms if due.earliest_tombstone_horizon_ms != NEVER_MS else None,
        "producer_runs": len(sidecar.producer_runs),
        "markers": len(sidecar.markers),
    }


def rebuild(
    opened: Tier, name: TopicPartition, budget: Budget, *, unusable_only: bool, on_segment: Callable[[int], None] = lambda size: None
) -> Rebuilt:
    """Reads live segments and writes their sidecars anew, one segment on the disk at a time.

    :param unusable_only: only where there is none that can be used.
    :param on_segment: told the bytes of each segment as it is done.
    :raises BadData: a segment cannot be read. OutOfBudget, StoreError as staging does.
    """
    state = opened.open(name).refresh()
    cleaner = opened.cleaner_for(name.topic)
    sidecars = opened.sidecars(name)
    heads = sidecars.heads([segment.id for segment in state.live])
    wanted = [n for n, segment in enumerate(state.live) if not unusable_only or heads[segment.id].sidecar is None]
    record, probes = filter_record(state.runs), keys_to_come(cleaner, state.runs, 0)
    written, size = [], 0
    reading = opened.reading(state, budget, "bloom")
    try:
        with Lanes(opened.settings.daemon.threads) as lanes:
            for ordinal in wanted:
                segment = state.live[ordinal]
                try:
                    with reading.opened(ordinal) as source:
                        # A compressed v0/v1 wrapper does not say how many keys a filter must have room for, and cleaning makes v2 of it.
                        records = segment.records or int(source.table.count.sum())  # brokers do not say it
                        counted = not np.any((source.table.magic < 2) & (source.table.codec > 0))
                        design = filter_for(cleaner, record, probes, records, segment.size_bytes) if counted else None
                        directory = cleaner.splice and worth_a_directory(segment, len(source.table), opened.ports.layout.copies)
                        sitting = Sitting(source, design, opened.hash_key(), sketch=True, directory=directory)
                        sat(sitting, source, reading.inflate_limit, lanes)
                        keys = sitting.directory(segment.id) if directory else None
                except NotFound:
                    if segment.id in opened.open(name).refresh().live_by_id():
                        raise
                    continue  # replaced and retired meanwhile
                reading.staging.forget([reading.log(ordinal)])
                size += sidecars.save(sitting.sidecar(segment.id), keys)
                written.append(segment.id)
                on_segment(segment.size_bytes)
        return Rebuilt(tuple(written), len(state.live) - len(wanted), reading.staging.bytes_fetched, size)
    finally:
        reading.staging.close()
