"""Finds bundles that interrupted attempts left in the scratch prefix and reuses those that match the current plan.

    <scratch>/<run>/<epoch>-keys-..                    bundles of an announced plan
    <scratch>/scouted-<now>-<kin>/<attempt>/keys-..    bundles of a plan that was not announced yet; no record names them

*kin* is a digest of everything that determines rows, verdicts and the gate's rows, except *now*. The time of the interrupted attempt
is reused, as a resumed plan keeps its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from compactor.control.logs import PartitionLog
from compactor.errors import BadData, StoreError
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.drive import SCOUTED, scratch_key_prefix
from compactor.round.engines import DraftPlanAtTimeFunction
from compactor.spark.cluster.round_jobs import RoundJobRunner
from compactor.spark.round.bundles import decode_pass_one_result_of_bundle
from compactor.spark.round.exchange import is_scratch_object_of_kind, read_arrays_at_object_end
from compactor.spark.round.pass_one_tasks import GATE_PREFIX, KEYS_PREFIX
from compactor.spark.round.segment_index import PassOneSegmentResults
from compactor.storage.port import ObjectInfo, ObjectStore

_SCOUTED: Final = re.compile(rf"({SCOUTED}(\d+)-[0-9a-f]+/).+")


def scratch_prefix_of_draft_plan(log: PartitionLog, plan: CompactionPlan, live_segments: Sequence[RemoteLogSegmentMetadata]) -> str:
    """Return the key prefix of scratch objects that are written while a plan is only a draft, before it is recorded in the control log.
    Attempts at the same plan share the prefix.
    """
    below = " ".join(segment.id for segment in live_segments if segment.start_offset < plan.end_offset)
    facts = (plan.fingerprint, plan.policy.model_dump_json(), plan.vector, plan.first_dirty_offset, plan.end_offset, below)
    kin = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]
    return f"{scratch_key_prefix(log)}{SCOUTED}{plan.now_ms}-{kin}/"


def plan_time_ms_of_resumable_attempt_or_now(
    store: ObjectStore, log: PartitionLog, live_segments: Sequence[RemoteLogSegmentMetadata], now_ms: int, draft_at: DraftPlanAtTimeFunction
) -> int:
    """Return the time to set as the new plan's time so that results of an interrupted pass 1 can be reused, or ``now_ms`` if there are
    none. Results are reusable if a plan of the time of their attempt would read exactly the same; the newest reusable results are chosen.

    An attempt over other segments or with other settings is not used, because deletions could be due at its time that are not due now.

    :param draft_at: returns the plan that would be made at a time, or None.
    """
    prefix = scratch_key_prefix(log)
    found = (
        _SCOUTED.fullmatch(info.key.removeprefix(prefix))
        for info in store.list(f"{prefix}{SCOUTED}")
        if is_scratch_object_of_kind(KEYS_PREFIX, info.key)
    )
    places = sorted({(int(match[2]), f"{prefix}{match[1]}") for match in found if match and int(match[2]) <= now_ms}, reverse=True)
    for at_ms, place in places:
        plan = draft_at(at_ms)
        if plan is not None and scratch_prefix_of_draft_plan(log, plan, live_segments) == place:
            return at_ms
    return now_ms


def list_stored_pass_one_results(store: ObjectStore, prefix: str) -> list[ObjectInfo]:
    """Return the stored results of pass 1 tasks (key rows and rows for the gate) below a key prefix."""
    return [
        info
        for info in store.list(prefix)
        if is_scratch_object_of_kind(KEYS_PREFIX, info.key) or is_scratch_object_of_kind(GATE_PREFIX, info.key)
    ]


def list_leftover_bundles_and_delete_others(jobs: RoundJobRunner, log: PartitionLog, round_prefix: str) -> list[ObjectInfo]:
    """Return the stored pass 1 results of earlier attempts at the same round, and delete those of other rounds. Only the leader may call
    it.

    :param round_prefix: key prefix of this round's scratch objects.
    """
    found = list(jobs.control.list(f"{scratch_key_prefix(log)}{SCOUTED}"))
    jobs.delete_scratch_objects([info.key for info in found if not info.key.startswith(round_prefix)])
    return [info for info in found if info.key.startswith(round_prefix)]


def add_leftover_bundles_and_adapt_runner(
    jobs: RoundJobRunner, index: PassOneSegmentResults, leftovers: Sequence[ObjectInfo]
) -> RoundJobRunner:
    """Add those stored pass 1 results of earlier attempts that match this round to ``index``. Return a job runner that divides keys into as
    many hash ranges as these results do; ``jobs`` itself if none was added.

    :param leftovers: stored results (bundles) of earlier attempts.
    """
    for info in leftovers:
        if not is_scratch_object_of_kind(KEYS_PREFIX, info.key):
            continue
        try:
            bundle = decode_pass_one_result_of_bundle(read_arrays_at_object_end(jobs.control, info.key, info.size), info.key, info.size)
        except (BadData, StoreError):
            continue  # damaged, or its writer lives and has deleted it
        shared = jobs.shared
        if bundle.keys is None or (bundle.gate is not None) != shared.gate or (index.bundles and bundle.keys.ranges != shared.ranges):
            continue
        if index.add_bundle_unless_known(bundle):
            jobs = replace(jobs, shared=replace(shared, ranges=bundle.keys.ranges))
    return jobs
