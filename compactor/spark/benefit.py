"""Estimate what a full re-compaction of one partition would save, using only metadata and the headers of sidecars.

Kafka's cleaner sets a tombstone's delete horizon the first time it processes the tombstone. A partition with a horizon that is due or not
yet set is therefore always worth a round, because its tombstones would otherwise stay forever. The same holds for a partition that has
exceeded ``max.compaction.lag.ms``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from compactor.access.tier import Tier
from compactor.cleaner.passes.sidecar_builder import create_substitute_segment_from_sidecar
from compactor.cleaner.passes.transactions import transaction_verdicts_by_source
from compactor.config.settings import CleanerSettings
from compactor.config.units import format_size
from compactor.control.state import PartitionState
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.producer_runs import reason_to_read_segment_for_its_markers
from compactor.round.plan import RoundAssessment, assess_round
from compactor.round.skip import estimate_distinct_keys, estimate_record_count
from compactor.tier.sidecars import SidecarHead

NOTHING_DUE = "nothing is dirty, and no delete horizon has passed"


class RoundBenefitAssessment(NamedTuple):
    """Result of assessing a full round over a partition: whether it is worth running, and why it is or is not."""

    is_worthwhile: bool
    reason: str


def assess_round_benefit(tier: Tier, state: PartitionState, now_ms: int, min_benefit_bytes: int) -> RoundBenefitAssessment:
    """Return whether a full round over the partition is worth running, and why. If the benefit cannot be estimated, because a sidecar is
    missing, a round is worth running if any segment is dirty.

    :param min_benefit_bytes: least number of bytes that a round must be expected to save; 0 accepts every round.
    :raises StoreError: if sidecars cannot be read.
    """
    cleaner = tier.cleaner_settings_for_topic(state.topic)
    assessment = assess_round(state, cleaner, now_ms, force=True)
    if not assessment.covered_segments:
        return RoundBenefitAssessment(False, assessment.reason or "there is nothing to clean")
    dirty = sum(segment.size_bytes for segment in assessment.dirty)
    if state.intent is not None:
        return RoundBenefitAssessment(True, "a round was interrupted")
    if assessment.horizon_due:
        return RoundBenefitAssessment(True, "a delete horizon has passed")
    if is_compaction_lag_exceeded(assessment, cleaner, now_ms):
        return RoundBenefitAssessment(True, "max_compaction_lag_ms has passed")
    if dirty and (min_benefit_bytes <= 1 or not cleaner.bloom):
        return RoundBenefitAssessment(True, f"{format_size(dirty)} of {format_size(state.bytes)} is dirty")
    if not min_benefit_bytes:
        return RoundBenefitAssessment(True, "every partition is cleaned, also clean ones")
    heads = (
        tier.open_sidecar_store(state.topic_partition).load_sidecar_heads([segment.id for segment in state.live]) if cleaner.bloom else {}
    )
    if not dirty and any(head is None or head.sidecar is None for head in map(heads.get, (segment.id for segment in state.live))):
        return RoundBenefitAssessment(False, NOTHING_DUE)
    horizon_work = reason_to_read_segment_for_delete_horizons(
        state, assessment, heads, now_ms, drops_keyless=cleaner.keyless_records == "drop"
    )
    if horizon_work:
        return RoundBenefitAssessment(True, horizon_work)
    gain = estimate_removable_bytes(assessment, heads)
    if gain < min_benefit_bytes:
        return RoundBenefitAssessment(False, f"a round would gain about {format_size(gain)}, less than {format_size(min_benefit_bytes)}")
    return RoundBenefitAssessment(True, f"a round would gain about {format_size(gain)}")


def is_compaction_lag_exceeded(assessment: RoundAssessment[RemoteLogSegmentMetadata], cleaner: CleanerSettings, now_ms: int) -> bool:
    """Return whether a dirty segment contains records older than ``max_compaction_lag_ms``."""
    return any(0 < segment.first_timestamp_ms < now_ms - cleaner.max_compaction_lag_ms for segment in assessment.dirty)


def reason_to_read_segment_for_delete_horizons(
    state: PartitionState,
    assessment: RoundAssessment[RemoteLogSegmentMetadata],
    heads: Mapping[str, SidecarHead],
    now_ms: int,
    *,
    drops_keyless: bool = True,
) -> str:
    """Return why a segment of the round must be read for its delete horizons (the times at which tombstones and transaction markers may be
    removed), or an empty string if none must be read. Reasons are a horizon that has passed or is not yet set, and a missing sidecar.
    """
    sidecars = [heads[segment.id].sidecar for segment in state.live]
    segments = [(segment, sidecar) for segment, sidecar in zip(state.live, sidecars, strict=True) if sidecar is not None]
    if len(segments) < len(sidecars):
        return "a segment without a sidecar may hold tombstones"
    sources = [
        create_substitute_segment_from_sidecar(place, segment.id, segment.start_offset, segment.end_offset + 1, segment.mtime_ms, sidecar)
        for place, (segment, sidecar) in enumerate(segments)
    ]
    cleaned_ids = {segment.id for segment in assessment.covered_segments}
    for source, verdicts, (segment, sidecar) in zip(sources, transaction_verdicts_by_source(sources), segments, strict=True):
        reason = sidecar.due.reason_to_read_despite_filter(now_ms, drops_keyless=drops_keyless) or reason_to_read_segment_for_its_markers(
            source.table, verdicts.aborted, verdicts.discardable, now_ms
        )
        if reason and segment.id in cleaned_ids:
            return reason
    return ""


def estimate_removable_bytes(assessment: RoundAssessment[RemoteLogSegmentMetadata], heads: Mapping[str, SidecarHead]) -> int:
    """Return roughly how many bytes a round would remove: in the dirty range all but one record of each key, and in the clean range one
    record for each key of the dirty range.
    """
    dirty, clean = (sum(segment.size_bytes for segment in some) for some in (assessment.dirty, assessment.clean))
    records = sum(estimate_record_count(segment) for segment in assessment.dirty)
    keys = (
        estimate_distinct_keys(
            [heads[segment.id] for segment in assessment.dirty], [estimate_record_count(segment) for segment in assessment.dirty]
        )
        if records
        else 0
    )
    of_clean = max(1, sum(estimate_record_count(segment) for segment in assessment.clean))
    return round(dirty * (1 - min(1.0, keys / max(1, records)))) + min(clean, clean * keys // of_clean)
