"""Commands ``bloom show`` and ``bloom rebuild``: show a partition's sidecars, and build them again.

A sidecar describes a segment that never changes, so neither command needs leadership. A sidecar that is written for a segment which is
retired meanwhile is swept with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bloom.sidecar import Sidecar
from compactor.access.rounds import open_reader_of_live_segments
from compactor.access.tier import Tier
from compactor.cleaner.passes.sidecar_builder import SidecarBuilder, add_segment_to_sidecar_builder
from compactor.cleaner.passes.worker_threads import WorkerThreads
from compactor.constants import NEVER_MS
from compactor.control.state import PartitionState
from compactor.errors import NotFound
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.partial.plan import is_key_directory_worthwhile
from compactor.round.skip import bloom_filter_usage_of_runs, design_bloom_filter, expected_dirty_key_count_of_next_rounds
from compactor.tier.sidecars import SidecarHead


@dataclass(frozen=True)
class SidecarRebuildReport:
    """Result of rebuilding sidecars (Bloom filter, delete horizons and producer runs of a segment). Sizes are in bytes.

    written: ids of the segments with a new sidecar.
    kept: number of segments whose sidecar was usable and was left unchanged.
    """

    written: tuple[str, ...]
    kept: int
    bytes_read: int
    bytes_written: int


def sidecars_json(tier: Tier, partition: TopicPartition, now_ms: int) -> dict[str, Any]:
    """Return the content of live segments' sidecars, and how many reads their filters have saved, as JSON for ``bloom show``. Raises
    StoreError.
    """
    state = tier.open_control_log_of_partition(partition).refresh()
    cleaner = tier.cleaner_settings_for_topic(partition.topic)
    record = bloom_filter_usage_of_runs(state.runs)
    sidecars = tier.open_sidecar_store(partition)
    sizes = sidecars.stored_sidecar_bytes_by_segment()
    heads = sidecars.load_sidecar_heads([segment.id for segment in state.live])
    probes = expected_dirty_key_count_of_next_rounds(cleaner, state.runs, 0)
    return {
        "topic": partition.topic,
        "partition": partition.partition,
        "incarnation": partition.incarnation,
        "on": cleaner.bloom and record.are_bloom_filters_worthwhile,
        "reason": "bloom = false"
        if not cleaner.bloom
        else ""
        if record.are_bloom_filters_worthwhile
        else f"filters do not pay on this partition: {record.saved_reads_text()}",
        "design_keys": probes,
        "asked": record.asked,
        "skipped": record.skipped,
        "useless": record.useless,
        "useless_rate": record.false_positive_rate,
        "target_rate": cleaner.bloom_false_positive_rate,
        "filter_bytes": record.bytes_read,
        "segment_bytes_saved": record.bytes_saved,
        "segments": [
            _live_segment_sidecar_json(
                segment,
                state,
                heads[segment.id],
                sizes.get(segment.id, 0),
                probes,
                now_ms,
                drops_keyless=cleaner.keyless_records == "drop",
            )
            for segment in state.live
        ],
    }


def _live_segment_sidecar_json(
    segment: RemoteLogSegmentMetadata,
    state: PartitionState,
    head: SidecarHead,
    size: int,
    filter_probe_count: int,
    now_ms: int,
    *,
    drops_keyless: bool,
) -> dict[str, Any]:
    return {
        "id": segment.id,
        "start_offset": segment.start_offset,
        "end_offset": segment.end_offset,
        "bytes": segment.size_bytes,
        "clean": segment.end_offset < state.first_dirty_offset,
        "problem": head.problem,
        "sidecar": None
        if head.sidecar is None
        else _sidecar_json(head.sidecar, size, filter_probe_count, now_ms, drops_keyless=drops_keyless),
    }


def _sidecar_json(sidecar: Sidecar, size: int, filter_probe_count: int, now_ms: int, *, drops_keyless: bool) -> dict[str, Any]:
    made_for, due = sidecar.made_for, sidecar.due
    return {
        "bytes": size,
        "records": sidecar.records,
        "keys": sidecar.distinct_keys,
        "filter_bytes": made_for.bytes if made_for else 0,
        "bits_per_key": round(8 * made_for.bytes / max(1, made_for.keys), 1) if made_for else 0.0,
        "rate_per_key": made_for.rate if made_for else None,
        "made_for_keys": made_for.probes if made_for else None,
        "useless_rate": sidecar.useless_read_probability(filter_probe_count),
        "due": due.reason_to_read_despite_filter(now_ms, drops_keyless=drops_keyless),
        "tombstones": due.tombstones,
        "next_horizon_ms": due.earliest_tombstone_horizon_ms if due.earliest_tombstone_horizon_ms != NEVER_MS else None,
        "producer_runs": len(sidecar.producer_runs),
        "markers": len(sidecar.markers),
    }


def rebuild_sidecars(
    tier: Tier, partition: TopicPartition, budget: DiskBudget, *, unusable_only: bool, on_segment: Callable[[int], None] = lambda size: None
) -> SidecarRebuildReport:
    """Read live segments and build their sidecars again, with one segment on disk at a time.

    :param unusable_only: whether segments that have a usable sidecar are skipped.
    :param on_segment: called with the size of each segment, in bytes, when it is done.
    :raises BadData: if a segment is corrupt.
    :raises OutOfBudget: if a segment does not fit within the disk budget.
    :raises StoreError: if the store fails.
    """
    state = tier.open_control_log_of_partition(partition).refresh()
    cleaner = tier.cleaner_settings_for_topic(partition.topic)
    sidecars = tier.open_sidecar_store(partition)
    heads = sidecars.load_sidecar_heads([segment.id for segment in state.live])
    wanted = [n for n, segment in enumerate(state.live) if not unusable_only or heads[segment.id].sidecar is None]
    record, probes = bloom_filter_usage_of_runs(state.runs), expected_dirty_key_count_of_next_rounds(cleaner, state.runs, 0)
    written, size = [], 0
    reading = open_reader_of_live_segments(tier, state, budget, "bloom")
    try:
        with WorkerThreads(tier.settings.daemon.threads) as workers:
            for ordinal in wanted:
                segment = state.live[ordinal]
                try:
                    with reading.open_segment(ordinal) as source:
                        # A compressed v0/v1 wrapper does not show how many keys it has, so there is no filter; cleaning makes it v2.
                        records = segment.records or int(source.table.count.sum())  # brokers do not record it
                        counted = not np.any((source.table.magic < 2) & (source.table.codec_ids > 0))
                        design = design_bloom_filter(cleaner, record, probes, records, segment.size_bytes) if counted else None
                        directory = cleaner.splice and is_key_directory_worthwhile(
                            segment, len(source.table), tier.ports.layout.log_file_copy_limits
                        )
                        builder = SidecarBuilder(
                            source, design, tier.identity.hash_key(), counts_distinct_keys=True, collects_key_directory=directory
                        )
                        add_segment_to_sidecar_builder(builder, source, reading.inflate_limit, workers)
                        keys = builder.build_key_directory(segment.id) if directory else None
                except NotFound:
                    if segment.id in tier.open_control_log_of_partition(partition).refresh().live_segments_by_id():
                        raise
                    continue  # replaced and retired meanwhile
                reading.staging.delete_cached_copies([reading.log_file_to_stage(ordinal)])
                size += sidecars.save_sidecar(builder.build_sidecar(segment.id), keys)
                written.append(segment.id)
                on_segment(segment.size_bytes)
        return SidecarRebuildReport(tuple(written), len(state.live) - len(wanted), reading.staging.bytes_fetched, size)
    finally:
        reading.staging.close()
