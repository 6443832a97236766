"""Bundles that earlier attempts left behind, and which of them say what this attempt would read.

    <scratch>/<run>/<epoch>-keys-..                    of an announced plan
    <scratch>/scouted-<now>-<kin>/<attempt>/keys-..    of one that was not announced yet: who died then left no record of it

*kin* is a digest of everything that rows, verdicts and the gate's rows follow from, but for *now*: that is taken over, as a resumed plan
keeps its own.
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
from compactor.round.drive import SCOUTED, scratch_prefix
from compactor.round.engines import DraftAt
from compactor.spark.cluster.steps import TaskSteps
from compactor.spark.round.bundles import bundle_from
from compactor.spark.round.exchange import is_a, read_tail
from compactor.spark.round.indexing import Index
from compactor.spark.round.mapping import GATE, KEYS
from compactor.storage.port import ObjectInfo, ObjectStore

_SCOUTED: Final = re.compile(rf"({SCOUTED}(\d+)-[0-9a-f]+/).+")


def scouted_place(log: PartitionLog, plan: CompactionPlan, live: Sequence[RemoteLogSegmentMetadata]) -> str:
    """Prefix of what is read before such a plan is announced, by any attempt at it."""
    below = " ".join(segment.id for segment in live if segment.start_offset < plan.end_offset)
    facts = (plan.fingerprint, plan.policy.model_dump_json(), plan.vector, plan.first_dirty_offset, plan.end_offset, below)
    kin = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]
    return f"{scratch_prefix(log)}{SCOUTED}{plan.now_ms}-{kin}/"


def begun_ms(store: ObjectStore, log: PartitionLog, live: Sequence[RemoteLogSegmentMetadata], now_ms: int, draft_at: DraftAt) -> int:
    """The time of the newest pass 1 that broke off before its plan was announced and read what is to be read now; else ``now_ms``.

    Of another log, or by other settings, it gives neither bundles nor its time: by that nothing may be due, and horizons would be over.
    """
    prefix = scratch_prefix(log)
    found = (_SCOUTED.fullmatch(info.key.removeprefix(prefix)) for info in store.list(f"{prefix}{SCOUTED}") if is_a(KEYS, info.key))
    places = sorted({(int(match[2]), f"{prefix}{match[1]}") for match in found if match and int(match[2]) <= now_ms}, reverse=True)
    for at_ms, place in places:
        plan = draft_at(at_ms)
        if plan is not None and scouted_place(log, plan, live) == place:
            return at_ms
    return now_ms


def left_behind(store: ObjectStore, prefix: str) -> list[ObjectInfo]:
    """Bundles, and what the gate saw of them."""
    return [info for info in store.list(prefix) if is_a(KEYS, info.key) or is_a(GATE, info.key)]


def kin_of(steps: TaskSteps, log: PartitionLog, place: str) -> list[ObjectInfo]:
    """What is left behind of attempts at the same; of others nothing stays. To be called by who leads."""
    found = list(steps.control.list(f"{scratch_prefix(log)}{SCOUTED}"))
    steps.forget([info.key for info in found if not info.key.startswith(place)])
    return [info for info in found if info.key.startswith(place)]


def adopt(steps: TaskSteps, index: Index, left: Sequence[ObjectInfo]) -> TaskSteps:
    """Takes up what can be used of these.

    They were cut into ranges for the slots of that attempt, and so this one goes on with as many.
    """
    for info in left:
        if not is_a(KEYS, info.key):
            continue
        try:
            bundle = bundle_from(read_tail(steps.control, info.key, info.size), info.key, info.size)
        except (BadData, StoreError):
            continue  # damaged, or its writer lives and has deleted it
        shared = steps.shared
        if bundle.keys is None or (bundle.gate is not None) != shared.gate or (index.bundles and bundle.keys.ranges != shared.ranges):
            continue
        if index.take(bundle):
            steps = replace(steps, shared=replace(shared, ranges=bundle.keys.ranges))
    return steps
