"""What every task has on its executor: the round's settings and budgets, clients for the stores, a folder on the local disk.

Settings are shipped, clients are not: each Python worker opens the stores itself and keeps them. A task holds no data that the driver sent;
what it hands back is about a kilobyte. Nothing here writes metadata.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from compactor.bootstrap import Tier, open_tier
from compactor.cleaner.gate.batches import Fates
from compactor.cleaner.gate.judge import Gate
from compactor.cleaner.passes.source import SourceSegment
from compactor.config import Settings
from compactor.local.staging import Budget, Staging
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.ports import WorkStats
from compactor.round.rewrite import LocalWorker
from compactor.round.skip import FilterRecord, filter_for
from compactor.round.sources import Reading
from compactor.spark.round.gate import Sample, part_gate
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

    ``gate_bits``: which keys the gate looks up (compactor.spark.round.gate); 0: there is no gate. ``filters``: for new segments, if any.
    """

    settings: Settings
    hash_key: bytes
    plan: CompactionPlan
    scratch: str
    ranges: int
    map_budget_bytes: int
    disk_budget_bytes: int
    gate_bits: int
    filters: Filters | None

    @property
    def partition(self) -> str:
        return f"{self.plan.topic}-{self.plan.partition}"

    def reading(self, staging: Staging, segments: Sequence[RemoteLogSegmentMetadata]) -> Reading:
        """These segments as sources, in their order."""
        name = TopicPartition(self.plan.topic, self.plan.partition)
        return Reading(staging, name, segments, self.plan.policy.max_decompressed_batch_bytes)


@dataclass
class Cost:
    """What a task used. Bytes; ``gate_coverage``: share of the keys that the gate looked up; ``cpu_seconds``: of its Python process."""

    bytes_fetched: int = 0
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    peak_memory_bytes: int = 0
    map_entries: int = 0
    rows: int = 0
    exchanged_bytes: int = 0
    gate_coverage: float = 0.0
    cpu_seconds: float = 0.0
    sidecar_bytes: int = 0

    def add(self, other: Cost) -> None:
        """Sums, and the highest of what does not add up."""
        for name, value in other.__dict__.items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name.startswith(("peak", "gate")) else mine + value)


@lru_cache(maxsize=4)
def _opened(settings: str) -> Tier:
    return open_tier(Settings.model_validate_json(settings))


def tier_of(settings: Settings) -> Tier:
    """This process's clients for a tier, opened once."""
    return _opened(settings.model_dump_json())


@contextmanager
def workplace(shared: Shared, cost: Cost) -> Iterator[Staging]:
    """A folder on this executor's local disk, within its budget, removed at the end."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or shared.settings.tier.state_dir
    os.makedirs(local, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"tiered-compactor-{os.getpid()}-", dir=local))
    staging = Staging(folder / "staged", tier_of(shared.settings).ports.layout, Budget(shared.disk_budget_bytes))
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
    return Sidecars(tier_of(shared.settings).ports.control, filters.log_prefix, shared.hash_key) if filters else None


def local_worker(shared: Shared, staging: Staging, stats: WorkStats | None = None) -> LocalWorker:
    filters = shared.filters
    cleaner = shared.settings.cleaner_for(shared.plan.topic)
    ports = tier_of(shared.settings).ports
    return LocalWorker(
        layout=ports.layout,
        publisher=ports.publisher,
        staging=staging,
        hash_key=shared.hash_key,
        map_budget_bytes=shared.map_budget_bytes,
        threads=1,
        engine="auto" if cleaner.map_engine == "spark" else cleaner.map_engine,
        verify_before_publish=bool(shared.gate_bits),
        sidecars=sidecars_of(shared),
        filter_for=partial(filter_for, cleaner, filters.record, filters.probes) if filters else _no_filter,
        stats=stats or WorkStats(),
    )


def _no_filter(records: int, segment_bytes: int) -> None:
    return None


def gate_of(shared: Shared, sources: Sequence[SourceSegment], fates: Sequence[Fates], sample: Sample, *, full: bool) -> Gate | None:
    return part_gate(shared.plan, shared.hash_key, sources, fates, sample, full=full) if shared.gate_bits else None
