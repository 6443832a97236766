"""Environment of a task on an executor: the round's settings and budgets, store clients, and a folder on local disk.

Settings are sent to executors, clients are not: each Python worker opens the stores once and reuses them. A task receives no record data
from the driver and returns about a kilobyte. Nothing here writes metadata.
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

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import Settings
from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.local.staging import DiskBudget, StagingFolder
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.pass_two import LocalWorker
from compactor.round.ports import RoundCosts
from compactor.round.skip import BloomFilterUsageStatistics, design_bloom_filter
from compactor.round.sources import StagedSegmentReader
from compactor.tier.publishers import ControlLogPublisher
from compactor.tier.sidecars import SidecarStore


@dataclass(frozen=True)
class BloomFilterSettings:
    """Settings that decide whether and how new segments get Bloom filters.

    log_prefix: key prefix of the partition's control log.
    record: statistics of the reads that filters saved in earlier rounds.
    probes: number of keys that a later round is expected to look up.
    """

    log_prefix: str
    record: BloomFilterUsageStatistics
    probes: int


@dataclass(frozen=True)
class RoundTaskSettings:
    """Settings that all tasks of a round share.

    scratch: key prefix of this attempt's scratch objects.
    ranges: number of hash ranges that keys are divided into.
    map_budget_bytes, disk_budget_bytes: limits of memory for keys and of local disk for one task.
    gate: whether the output is checked by the gate, which computes it independently from the sources.
    filters: settings for the Bloom filters of new segments; None if none are written.
    topic_id: topic id in a broker-managed tier, because object keys contain it; otherwise empty.
    """

    settings: Settings
    hash_key: bytes
    plan: CompactionPlan
    scratch: str
    ranges: int
    map_budget_bytes: int
    disk_budget_bytes: int
    gate: bool
    filters: BloomFilterSettings | None
    topic_id: TopicId = EMPTY_TOPIC_ID

    @property
    def partition(self) -> str:
        """Return the partition as ``topic-number``."""
        return str(self.plan.topic_partition)

    def open_segments(self, staging: StagingFolder, segments: Sequence[RemoteLogSegmentMetadata]) -> StagedSegmentReader:
        """Return a reader of these segments, in the given order."""
        name = self.plan.topic_partition
        return StagedSegmentReader(staging, name, segments, self.plan.policy.max_decompressed_batch_bytes)


@dataclass
class TaskCost:
    """Resources that tasks used.

    gate_keys: number of keys whose last record the gate (the independent check of the output) looked up.
    gate_coverage: share of keys that the gate checked.
    cpu_seconds: CPU time of the Python processes.
    exchanged_bytes: bytes that tasks passed to each other through scratch objects and the shuffle.
    """

    bytes_fetched: int = 0
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    peak_memory_bytes: int = 0
    map_entries: int = 0
    rows: int = 0
    exchanged_bytes: int = 0
    gate_keys: int = 0
    gate_coverage: float = 0.0
    cpu_seconds: float = 0.0
    sidecar_bytes: int = 0

    def add_cost(self, other: TaskCost) -> None:
        """Add the cost of another task to this one in place. For peaks and for ``gate_coverage``, keep the higher value."""
        for name, value in other.__dict__.items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name.startswith(("peak", "gate_coverage")) else mine + value)


@lru_cache(maxsize=4)
def open_tier_on_executor(settings_json: str, topic: str, topic_id: TopicId) -> Tier:
    """Open a tier, once per process for the same arguments.

    :param settings_json: the tier's settings as JSON.
    :param topic_id: id of ``topic`` in a broker-managed tier; otherwise empty.
    """
    return open_tier(Settings.model_validate_json(settings_json), topics={topic: topic_id} if topic_id else None)


def open_task_tier(shared: RoundTaskSettings) -> Tier:
    """Return this process's clients for the tier of a round. They never contact the brokers, because ``shared`` holds everything that a
    task needs to know from them.
    """
    return open_tier_on_executor(shared.settings.model_dump_json(), shared.plan.topic * bool(shared.topic_id), shared.topic_id)


@contextmanager
def open_staging_folder_of_task(shared: RoundTaskSettings, cost: TaskCost) -> Iterator[StagingFolder]:
    """Provide a staging folder on the executor's local disk, limited to the task's disk budget, and delete it at the end. The bytes fetched
    and the highest use of disk are added to ``cost``.
    """
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or shared.settings.tier.state_dir
    os.makedirs(local, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"tiered-compactor-{os.getpid()}-", dir=local))
    staging = StagingFolder(folder / "staged", open_task_tier(shared).ports.layout, DiskBudget(shared.disk_budget_bytes))
    try:
        yield staging
    finally:
        cost.bytes_fetched += staging.bytes_fetched
        cost.peak_disk_bytes = max(cost.peak_disk_bytes, staging.peak_bytes)
        record_peak_memory(cost)
        staging.close()
        shutil.rmtree(folder, ignore_errors=True)


def record_peak_memory(cost: TaskCost) -> None:
    """Record in ``cost`` the highest memory use of this process so far, in bytes."""
    cost.peak_memory_bytes = max(cost.peak_memory_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def open_sidecars(shared: RoundTaskSettings) -> SidecarStore | None:
    """Return access to the partition's sidecars, or None if filters are switched off."""
    filters = shared.filters
    return SidecarStore(open_task_tier(shared).ports.control, filters.log_prefix, shared.hash_key) if filters else None


def create_local_worker(
    shared: RoundTaskSettings,
    staging: StagingFolder,
    stats: RoundCosts | None = None,
    sent_files: Mapping[tuple[str, str], bytes] | None = None,
) -> LocalWorker:
    """Return a LocalWorker that cleans with the budgets of one task.

    :param stats: costs of the round, to which the worker adds; None if they are not needed.
    :param sent_files: by segment id and file kind, content of segment files that was sent with the task and need not be fetched.
    """
    filters = shared.filters
    cleaner = shared.settings.cleaner_settings_for_topic(shared.plan.topic)
    ports = open_task_tier(shared).ports
    return LocalWorker(
        layout=ports.layout,
        publisher=ControlLogPublisher(),  # the driver introduces what a receipt names
        staging=staging,
        hash_key=shared.hash_key,
        map_budget_bytes=shared.map_budget_bytes,
        threads=1,
        engine="auto" if cleaner.map_engine == "spark" else cleaner.map_engine,
        verify_before_publish=shared.gate,
        sidecars=open_sidecars(shared),
        filter_for=partial(design_bloom_filter, cleaner, filters.record, filters.probes) if filters else _design_no_bloom_filter,
        splices=cleaner.splice,
        stats=stats or RoundCosts(),
        known=sent_files or {},
    )


def _design_no_bloom_filter(record_count: int, segment_bytes: int) -> None:
    """Return None, so that new segments get no Bloom filter. Used in place of ``design_bloom_filter`` if filters are switched off."""
    return
