"""What every task has on its executor: the round's settings and budgets, clients for the stores, a folder on the local disk.

Settings are shipped, clients are not: each Python worker opens the stores itself and keeps them. A task holds no data that the driver sent;
what it hands back is about a kilobyte. Nothing here writes metadata.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from compactor.bootstrap import Tier, open_tier
from compactor.config import Settings
from compactor.local.staging import Budget, Staging
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.ports import WorkStats
from compactor.round.rewrite import LocalWorker
from compactor.round.skip import FilterRecord, filter_for
from compactor.round.sources import Reading
from compactor.tier.publishers.object_log import ObjectLogPublisher
from compactor.tier.sidecars import Sidecars


@dataclass(frozen=True)
class Filters:
    """What decides about the sidecars of new segments. ``log_prefix``: of the control log; ``probes``: keys that a round may bring."""

    log_prefix: str
    record: FilterRecord
    probes: int


@dataclass(frozen=True)
class Shared:
    """What all tasks of a round share. Budgets are one task's part of it; ``scratch``: prefix of this attempt's objects.

    ``gate``: whether there is one (compactor.spark.round.gate). ``filters``: for new segments, if any.
    ``topic_id``: of brokers' topics, as objects are named by it.
    """

    settings: Settings
    hash_key: bytes
    plan: CompactionPlan
    scratch: str
    ranges: int
    map_budget_bytes: int
    disk_budget_bytes: int
    gate: bool
    filters: Filters | None
    topic_id: str = ""

    @property
    def partition(self) -> str:
        return f"{self.plan.topic}-{self.plan.partition}"

    def reading(self, staging: Staging, segments: Sequence[RemoteLogSegmentMetadata]) -> Reading:
        """These segments as sources, in their order."""
        name = TopicPartition(self.plan.topic, self.plan.partition)
        return Reading(staging, name, segments, self.plan.policy.max_decompressed_batch_bytes)


@dataclass
class Cost:
    """What a task used. Bytes; ``gate_keys``: whose last records the gate looked up; ``cpu_seconds``: of its Python process."""

    bytes_fetched: int = 0
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    peak_memory_bytes: int = 0
    map_entries: int = 0
    rows: int = 0
    exchanged_bytes: int = 0
    gate_keys: int = 0
    gate_disk_bytes: int = 0
    cpu_seconds: float = 0.0
    sidecar_bytes: int = 0

    def add(self, other: Cost) -> None:
        """Sums, and the highest of what does not add up."""
        for name, value in other.__dict__.items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name.startswith("peak") else mine + value)


@lru_cache(maxsize=4)
def _opened(settings: str, topic: str, topic_id: str) -> Tier:
    return open_tier(Settings.model_validate_json(settings), topics={topic: topic_id} if topic_id else None)


def tier_of(shared: Shared) -> Tier:
    """This process's clients for a tier, opened once. No broker is asked anything: what has to be known of them travels."""
    return _opened(shared.settings.model_dump_json(), shared.plan.topic * bool(shared.topic_id), shared.topic_id)


@contextmanager
def workplace(shared: Shared, cost: Cost) -> Iterator[Staging]:
    """A folder on this executor's local disk, within its budget, removed at the end."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or shared.settings.tier.state_dir
    os.makedirs(local, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"tiered-compactor-{os.getpid()}-", dir=local))
    staging = Staging(folder / "staged", tier_of(shared).ports.layout, Budget(shared.disk_budget_bytes))
    try:
        yield staging
    finally:
        cost.bytes_fetched += staging.bytes_fetched
        cost.peak_disk_bytes = max(cost.peak_disk_bytes, staging.peak_bytes)
        note_memory(cost)
        staging.close()
        shutil.rmtree(folder, ignore_errors=True)


def note_memory(cost: Cost) -> None:
    """The most that this process ever held; ru_maxrss counts kilobytes on Linux."""
    cost.peak_memory_bytes = max(cost.peak_memory_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def sidecars_of(shared: Shared) -> Sidecars | None:
    """Those of the partition; None where there are none to be used or written."""
    filters = shared.filters
    return Sidecars(tier_of(shared).ports.control, filters.log_prefix, shared.hash_key) if filters else None


def local_worker(
    shared: Shared, staging: Staging, stats: WorkStats | None = None, known: Mapping[tuple[str, str], bytes] | None = None
) -> LocalWorker:
    filters = shared.filters
    cleaner = shared.settings.cleaner_for(shared.plan.topic)
    ports = tier_of(shared).ports
    return LocalWorker(
        layout=ports.layout,
        publisher=ObjectLogPublisher(),  # the driver introduces what a receipt names
        staging=staging,
        hash_key=shared.hash_key,
        map_budget_bytes=shared.map_budget_bytes,
        threads=1,
        engine="auto" if cleaner.map_engine == "spark" else cleaner.map_engine,
        verify_before_publish=shared.gate,
        sidecars=sidecars_of(shared),
        filter_for=partial(filter_for, cleaner, filters.record, filters.probes) if filters else _no_filter,
        splices=cleaner.splice,
        stats=stats or WorkStats(),
        known=known or {},
    )


def _no_filter(records: int, segment_bytes: int) -> None:
    return None
