"""Finds out, before a spread round is planned, which clean segments need not be read.

dirty segments    executors index their keys; the round reuses the resulting scratch objects
transactions      folded on the driver, with sidecars in place of clean segments, to find deletions that are due
clean segments    the driver reads the sidecar headers; tasks compare the Bloom filters with all dirty keys
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compactor.control.state import PartitionState
from compactor.errors import Fenced, OutOfBudget, StoreError
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.producer_runs import reason_markers_are_due
from compactor.round.plan import RoundAssessment
from compactor.round.skip import (
    CleanVerdicts,
    FilterRecord,
    SidecarDecision,
    clean_verdicts,
    decide_by_sidecar,
    estimate_distinct_keys,
    estimate_records,
    horizon_passed_reason,
)
from compactor.spark.cluster.binpack import pack_bins
from compactor.spark.cluster.round_jobs import RoundJobs
from compactor.spark.round.leftover_bundles import adopt_bundles
from compactor.spark.round.pass_one_tasks import FilterQuery, query_filters
from compactor.spark.round.segment_index import SegmentIndex
from compactor.storage.port import ObjectInfo
from compactor.tier.sidecars import SidecarHead, Sidecars


@dataclass(frozen=True)
class PreparedPassOne:
    """Pass 1 results of the dirty segments, kept for the plan that follows.

    jobs: job runner with the settings under which ``index`` was made.
    verdicts: which clean segments the plan can skip.
    leftover_keys: keys of all objects that earlier attempts left, used or not.
    """

    jobs: RoundJobs
    index: SegmentIndex
    verdicts: CleanVerdicts
    leftover_keys: tuple[str, ...]

    def matches_plan(self, plan: CompactionPlan) -> bool:
        """Return whether the plan covers the same range at the same time, and skips only segments that are known here."""
        same = ("topic", "partition", "now_ms", "first_dirty_offset", "end_offset", "vector", "policy")
        return all(getattr(plan, name) == getattr(self.jobs.shared.plan, name) for name in same) and all(
            segment.id in self.index.stand_ins or segment.id in self.index.segments for segment in plan.skipped
        )

    @property
    def scratch_keys(self) -> list[str]:
        """Return the keys of all scratch objects that belong to this result."""
        return list(dict.fromkeys((*self.leftover_keys, *self.index.scratch_keys)))


def prepare_pass_one(
    jobs: RoundJobs,
    state: PartitionState,
    assessment: RoundAssessment[RemoteLogSegmentMetadata],
    sidecars: Sidecars,
    record: FilterRecord,
    leftovers: Sequence[ObjectInfo],
) -> PreparedPassOne | None:
    """Index the dirty segments and decide which clean segments can be skipped. Return None if no clean segment has a sidecar, because
    nothing could be skipped then.

    :param leftovers: bundles that earlier attempts at the same round left.
    :raises BadData, StoreError, OutOfBudget: if a segment is corrupt, the store fails or disk is short. After StoreError and
        OutOfBudget bundles are kept for the next attempt.
    """
    heads = sidecars.heads([segment.id for segment in state.live])
    if all(heads[segment.id].sidecar is None for segment in assessment.clean):
        return None
    index = SegmentIndex(state.live, {name: head.sidecar for name, head in heads.items() if head.sidecar is not None})
    jobs = adopt_bundles(jobs, index, leftovers)
    keys = tuple(info.key for info in leftovers)
    try:
        # Where something is dirty, a clean segment without a sidecar is read in any case: its keys now, and not once more for them.
        blind = {segment.id for segment in assessment.clean if segment.id not in index.stand_ins} if assessment.dirty else set()
        index.read_segments(jobs, blind | {segment.id for segment in assessment.dirty})
        return PreparedPassOne(jobs, index, _check_clean_segments(jobs, index, assessment, heads, record), keys)
    except (StoreError, OutOfBudget, Fenced):
        raise
    except BaseException:
        jobs.delete_scratch([*keys, *index.scratch_keys])
        raise


def _check_clean_segments(
    jobs: RoundJobs,
    index: SegmentIndex,
    assessment: RoundAssessment[RemoteLogSegmentMetadata],
    heads: dict[str, SidecarHead],
    record: FilterRecord,
) -> CleanVerdicts:
    """Decide for each clean segment whether it can be skipped, using its sidecar header and, if needed, its Bloom filter."""
    now_ms = jobs.shared.plan.now_ms
    bundles = tuple(bundle for bundle in index.bundles if bundle.dirty_rows)
    rows = sum(bundle.dirty_rows for bundle in bundles)
    estimate = estimate_distinct_keys([heads[s.id] for s in assessment.dirty], [estimate_records(s) for s in assessment.dirty])
    # Without a key every clean segment may be skipped, so 0 is said only where there is none.
    keys = max(1, min(rows, estimate)) if rows else 0
    due: dict[str, str] = {}
    inspections: dict[str, SidecarDecision] = {}
    for segment in assessment.clean:
        source, verdicts, _ = index.folded[segment.id]
        why = reason_markers_are_due(source.table, verdicts.aborted, verdicts.discardable, now_ms)
        if why:
            due[segment.id] = why
        inspections[segment.id] = decide_by_sidecar(
            heads[segment.id], why or horizon_passed_reason(segment, now_ms), keys=keys, record=record, now_ms=now_ms
        )
    asked = [name for name, decision in inspections.items() if decision.askable and not decision.must and not decision.may]
    sizes = {segment.id: segment.size_bytes for segment in assessment.clean}
    bunches = pack_bins([sizes[name] for name in asked], jobs.cluster.task_slots)
    items = [FilterQuery(tuple(asked[n] for n in bunch), bundles) for bunch in bunches]
    met: dict[str, str] = {}
    size = sum(head.bytes for head in heads.values())
    for _, (why_of, fetched) in jobs.run_items(f"filters of {len(asked)} clean segments", query_filters, items):
        met |= why_of
        size += fetched
    return clean_verdicts(inspections, met, due, asked=asked, keys=keys, sidecar_bytes=size)
