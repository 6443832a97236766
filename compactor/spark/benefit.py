"""What a full re-compaction of one partition can gain, from metadata and the heads of sidecars; and what forbids to leave it alone.

Kafka's cleaner gives a tombstone its delete horizon when it first meets it: a partition in which one is still to be set, or is due, is
rewritten whatever that gains, as its tombstones would never go. So is one for which somebody promised a time (max.compaction.lag.ms).
"""

from __future__ import annotations

from collections.abc import Mapping

from bloom.producer_runs import due_by_fold
from compactor.bootstrap import Tier
from compactor.cleaner.passes.portraits import stand_in
from compactor.cleaner.passes.transactions import fold
from compactor.config import Cleaner
from compactor.control.state import PartitionState
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import Assessment, assess
from compactor.round.skip import keys_expected, records_about
from compactor.tier.sidecars import Head


def left_alone(tier: Tier, state: PartitionState, now_ms: int, min_benefit: int) -> str:
    """Why no round is worth its while, in words; empty where one is, or where nobody can say. Raises StoreError."""
    cleaner = tier.cleaner_for(state.topic)
    found = assess(state, cleaner, now_ms, force=True)
    if not found.segments:
        return found.reason or "there is nothing to clean"
    dirty = sum(segment.size_bytes for segment in found.dirty)
    if state.intent is not None or not min_benefit or found.horizon_due or is_late(found, cleaner, now_ms) or not cleaner.bloom:
        return ""
    if dirty and min_benefit <= 1:
        return ""
    heads = tier.sidecars(state.name).heads([segment.id for segment in state.live])
    if horizons_open(state, found, heads, now_ms):
        return ""
    gain = gain_of(found, heads)
    return f"a round would gain about {gain} bytes, less than {min_benefit}" if gain < min_benefit else ""


def is_late(found: Assessment[RemoteLogSegmentMetadata], cleaner: Cleaner, now_ms: int) -> bool:
    """Whether max_compaction_lag_ms has passed for something dirty."""
    return any(0 < segment.first_timestamp_ms < now_ms - cleaner.max_compaction_lag_ms for segment in found.dirty)


def horizons_open(state: PartitionState, found: Assessment[RemoteLogSegmentMetadata], heads: Mapping[str, Head], now_ms: int) -> bool:
    """Whether a delete horizon is due or still to be set in a segment of the round, or might be: a sidecar is missing."""
    sidecars = [heads[segment.id].sidecar for segment in state.live]
    known = [(segment, sidecar) for segment, sidecar in zip(state.live, sidecars, strict=True) if sidecar is not None]
    if len(known) < len(sidecars):
        return True
    sources = [
        stand_in(place, segment.id, segment.start_offset, segment.end_offset + 1, segment.mtime_ms, sidecar)
        for place, (segment, sidecar) in enumerate(known)
    ]
    mine = {segment.id for segment in found.segments}
    for source, verdicts, (segment, sidecar) in zip(sources, fold(sources), known, strict=True):
        if segment.id in mine and (sidecar.due.reason(now_ms) or due_by_fold(source.table, verdicts.aborted, verdicts.discardable, now_ms)):
            return True
    return False


def gain_of(found: Assessment[RemoteLogSegmentMetadata], heads: Mapping[str, Head]) -> int:
    """Bytes, about: what the dirty range has of its keys more than once, and a clean record for each of its keys."""
    dirty, clean = (sum(segment.size_bytes for segment in some) for some in (found.dirty, found.clean))
    records = sum(records_about(segment) for segment in found.dirty)
    keys = (
        keys_expected([heads[segment.id] for segment in found.dirty], [records_about(segment) for segment in found.dirty]) if records else 0
    )
    of_clean = max(1, sum(records_about(segment) for segment in found.clean))
    return round(dirty * (1 - min(1.0, keys / max(1, records)))) + min(clean, clean * keys // of_clean)
