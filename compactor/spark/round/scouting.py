"""What a spread round need not read, found out before it is planned: dirty keys on the executors, sidecars of clean segments asked there.

dirty segments     their rows, as scratch objects that the round goes on with
fold               over them and over what stands in for the others: what is due in spite of a filter
clean segments     heads of sidecars here; filters by tasks, each with some of them, and all dirty keys
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bloom.producer_runs import due_by_fold
from compactor.control.state import PartitionState
from compactor.errors import Fenced, OutOfBudget, StoreError
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import Assessment
from compactor.round.skip import (
    CleanVerdicts,
    FilterRecord,
    SidecarLook,
    clean_verdicts,
    horizon_passed,
    keys_expected,
    look_at,
    records_about,
)
from compactor.spark.cluster.balance import balanced
from compactor.spark.cluster.steps import TaskSteps
from compactor.spark.round.indexing import Index
from compactor.spark.round.leftovers import adopt
from compactor.spark.round.mapping import ToAsk, ask_filters
from compactor.storage.port import ObjectInfo
from compactor.tier.sidecars import Head, Sidecars


@dataclass(frozen=True)
class Scouting:
    """Pass 1 so far, for the plan that follows it. ``index`` has the dirty segments, with their rows as ``steps`` cut them into ranges.

    ``left``: keys of what earlier attempts left behind, of use or not.
    """

    steps: TaskSteps
    index: Index
    scouted: CleanVerdicts
    left: tuple[str, ...]

    def is_for(self, plan: CompactionPlan) -> bool:
        """Whether the plan is about the same range at the same time, and leaves out nothing else."""
        same = ("topic", "partition", "now_ms", "first_dirty_offset", "end_offset", "vector", "policy")
        return all(getattr(plan, name) == getattr(self.steps.shared.plan, name) for name in same) and all(
            segment.id in self.index.stand_ins or segment.id in self.index.found for segment in plan.skipped
        )

    @property
    def scratch(self) -> list[str]:
        return list(dict.fromkeys((*self.left, *self.index.scratch)))


def scout(
    steps: TaskSteps,
    state: PartitionState,
    found: Assessment[RemoteLogSegmentMetadata],
    sidecars: Sidecars,
    record: FilterRecord,
    left: Sequence[ObjectInfo],
) -> Scouting | None:
    """None where no clean segment has a sidecar, and nothing is gained by knowing more. Raises BadData, StoreError, OutOfBudget.

    :param left: what earlier attempts at the same left behind. Where the store or Spark fails, bundles stay for the next one.
    """
    heads = sidecars.heads([segment.id for segment in state.live])
    if all(heads[segment.id].sidecar is None for segment in found.clean):
        return None
    index = Index(state.live, {name: head.sidecar for name, head in heads.items() if head.sidecar is not None})
    steps = adopt(steps, index, left)
    keys = tuple(info.key for info in left)
    try:
        # Where something is dirty, a clean segment without a sidecar is read in any case: its keys now, and not once more for them.
        blind = {segment.id for segment in found.clean if segment.id not in index.stand_ins} if found.dirty else set()
        index.read(steps, blind | {segment.id for segment in found.dirty})
        return Scouting(steps, index, _ask(steps, index, found, heads, record), keys)
    except (StoreError, OutOfBudget, Fenced):
        raise
    except BaseException:
        steps.forget([*keys, *index.scratch])
        raise


def _ask(
    steps: TaskSteps, index: Index, found: Assessment[RemoteLogSegmentMetadata], heads: dict[str, Head], record: FilterRecord
) -> CleanVerdicts:
    now_ms = steps.shared.plan.now_ms
    bundles = tuple(bundle for bundle in index.bundles if bundle.dirty_rows)
    rows = sum(bundle.dirty_rows for bundle in bundles)
    estimate = keys_expected([heads[s.id] for s in found.dirty], [records_about(s) for s in found.dirty])
    # Without a key every clean segment may be skipped, so 0 is said only where there is none.
    keys = max(1, min(rows, estimate)) if rows else 0
    due: dict[str, str] = {}
    looks: dict[str, SidecarLook] = {}
    for segment in found.clean:
        source, verdicts, _ = index.folded[segment.id]
        why = due_by_fold(source.table, verdicts.aborted, verdicts.discardable, now_ms)
        if why:
            due[segment.id] = why
        looks[segment.id] = look_at(heads[segment.id], why or horizon_passed(segment, now_ms), keys=keys, record=record, now_ms=now_ms)
    asked = [name for name, look in looks.items() if look.askable and not look.must and not look.may]
    sizes = {segment.id: segment.size_bytes for segment in found.clean}
    bunches = balanced([sizes[name] for name in asked], steps.cluster.slots)
    items = [ToAsk(tuple(asked[n] for n in bunch), bundles) for bunch in bunches]
    met: dict[str, str] = {}
    size = sum(head.bytes for head in heads.values())
    for _, (why_of, fetched) in steps.each(f"filters of {len(asked)} clean segments", ask_filters, items):
        met |= why_of
        size += fetched
    return clean_verdicts(looks, met, due, asked=asked, keys=keys, sidecar_bytes=size)
