"""Full re-compaction of many partitions with Spark, from the start of each log.

Small partitions share Spark jobs; a large one is spread over the whole cluster at the same time. Each partition is published on its own, so
that a killed run is resumed where it stopped.
"""

from __future__ import annotations

import atexit
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from compactor.access.rounds import create_round
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.cleaner.retention import transaction_verdicts_by_source
from compactor.cleaner.rewrite import substitute_segment
from compactor.config.settings import CleanerSettings, load_settings
from compactor.config.units import format_size
from compactor.control.logs import PartitionLog
from compactor.control.state import PartitionState
from compactor.errors import CompactorError, Fenced, Leased, UsageError, bug_reason
from compactor.extras import require_pip_extra
from compactor.features.spark.session import require_supported_java, require_supported_pyspark
from compactor.kernels.common import KEY_BYTES
from compactor.local.budget import DiskBudget
from compactor.model.ids import CHANGING, RoundStatus, TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.outputs import OutputReport
from compactor.records.producers import reason_to_read_markers
from compactor.round.plan import RoundAssessment, assess_round
from compactor.round.ports import estimate_distinct_keys, estimate_record_count
from compactor.tier.sidecars import SidecarHead

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from compactor.features.spark.jobs import JobListener, SparkCluster
    from compactor.features.spark.shared_jobs import SharedJobs
    from compactor.round.compaction import RoundReport, Runner
    from compactor.round.ports import Costs


# ---- benefit of a round, estimated from metadata and the headers of sidecars -------------------------------------------------


NOTHING_DUE = "nothing is dirty, and no delete horizon has passed"


class RoundBenefitAssessment(NamedTuple):
    is_worthwhile: bool
    reason: str


def assess_round_benefit(tier: Tier, state: PartitionState, now_ms: int, min_benefit_bytes: int) -> RoundBenefitAssessment:
    """Assess a full round. ``min_benefit_bytes``: expected saving; 0 accepts every round. Raises StoreError if sidecars cannot be read."""
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
    # Kafka's cleaner sets a tombstone's delete horizon the first time it processes the tombstone. Without a round over a horizon that is
    # due or not yet set, the tombstone would stay forever.
    horizon_work = delete_horizon_reason(state, assessment, heads, now_ms, drops_keyless=cleaner.keyless_records == "drop")
    if horizon_work:
        return RoundBenefitAssessment(True, horizon_work)
    gain = estimate_removable_bytes(assessment, heads)
    if gain < min_benefit_bytes:
        return RoundBenefitAssessment(False, f"a round would gain about {format_size(gain)}, less than {format_size(min_benefit_bytes)}")
    return RoundBenefitAssessment(True, f"a round would gain about {format_size(gain)}")


def is_compaction_lag_exceeded(assessment: RoundAssessment[RemoteLogSegmentMetadata], cleaner: CleanerSettings, now_ms: int) -> bool:
    return any(0 < segment.first_timestamp_ms < now_ms - cleaner.max_compaction_lag_ms for segment in assessment.dirty)


def delete_horizon_reason(
    state: PartitionState,
    assessment: RoundAssessment[RemoteLogSegmentMetadata],
    heads: Mapping[str, SidecarHead],
    now_ms: int,
    *,
    drops_keyless: bool = True,
) -> str:
    """Return why a segment must be read for its delete horizons (passed, not yet set, or a sidecar is missing)."""
    sidecars = [heads[segment.id].sidecar for segment in state.live]
    segments = [(segment, sidecar) for segment, sidecar in zip(state.live, sidecars, strict=True) if sidecar is not None]
    if len(segments) < len(sidecars):
        return "a segment without a sidecar may hold tombstones"
    sources = [
        substitute_segment(place, segment.id, segment.start_offset, segment.end_offset + 1, segment.mtime_ms, sidecar)
        for place, (segment, sidecar) in enumerate(segments)
    ]
    cleaned_ids = {segment.id for segment in assessment.covered_segments}
    for source, verdicts, (segment, sidecar) in zip(sources, transaction_verdicts_by_source(sources), segments, strict=True):
        reason = sidecar.due.reason_to_read(now_ms, drops_keyless=drops_keyless) or reason_to_read_markers(
            source.table, verdicts.aborted, verdicts.discardable, now_ms
        )
        if reason and segment.id in cleaned_ids:
            return reason
    return ""


def estimate_removable_bytes(assessment: RoundAssessment[RemoteLogSegmentMetadata], heads: Mapping[str, SidecarHead]) -> int:
    """Roughly: in the dirty range all but one record of each key, in the clean range one record for each key of the dirty range."""
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


# ---- engine for ``map_engine = "spark"`` --------------------------------------------------------------------------------------


class SparkRunners:
    """Engines share one Spark application, from the first round to the process's end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checked = False
        self._cluster: SparkCluster | None = None
        self._stack = ExitStack()

    def __call__(self, tier: Tier, partition: TopicPartition) -> Runner | None:
        """Return None if the settings do not ask for Spark. Raises UsageError if Java or PySpark is missing or not supported."""
        cleaner = tier.cleaner_settings_for_topic(partition.topic)
        if cleaner.map_engine != "spark":
            return None
        with self._lock:
            if not self._checked:
                require_supported_pyspark()
                require_supported_java()
                self._checked = True
        from compactor.features.spark.worker import SparkRunner

        return SparkRunner(lambda: self.get_or_start_cluster(tier), tier, cleaner)

    def get_or_start_cluster(self, tier: Tier) -> SparkCluster:
        from compactor.features.spark.session import start_cluster

        with self._lock:
            if self._cluster is None:
                atexit.register(self._stack.close)
                self._cluster = self._stack.enter_context(start_cluster(tier.settings)).cluster
            return self._cluster


LED_PARTITIONS_PER_SLOT: Final = 4
LED_LIMITS: Final = (16, 256)
"""Least and largest number of partitions led at the same time. Each has a lease to renew, and its thread mostly waits."""

SURVEY_THREADS: Final = 16
SMALL_PARTITION_BYTES: Final = 32 << 20
"""A partition smaller than this is not spread over the cluster."""

MAX_CACHED_LOGS: Final = 5_000
"""With at most this many partitions, folded logs are cached between the survey and the round; with more they are folded again."""

CHANGES_PER_RECORD: Final = 64
"""Number of changed partitions that one catalog record announces."""

RESULT_COLUMNS: Final = {
    "topic": "string", "partition": "int", "status": "string", "reason": "string", "rewritten_data_files_count": "bigint",
    "added_data_files_count": "bigint", "rewritten_bytes_count": "bigint", "failed_data_files_count": "bigint", "records_read": "bigint",
    "records_kept": "bigint", "bytes_read": "bigint", "bytes_written": "bigint", "next_dirty_offset": "bigint", "seconds": "double",
    "table": "string",
}  # fmt: skip
"""Columns of the data frame that ``compactor.spark.recompact`` returns, with their Spark types."""
ResultRow = dict[str, Any]
"""Row of the data frame that ``recompact`` returns, by column name."""


@dataclass(frozen=True)
class RecompactionResult:
    """A report (also for a quarantined partition), an error, or the reason why the partition was skipped.

    skip_reason: empty if a round ran or failed.
    segments, bytes_before: of the live segments before the work began.
    """

    partition: TopicPartition
    report: RoundReport | None
    error: CompactorError | None
    seconds: float
    skip_reason: str = ""
    segments: int = 0
    bytes_before: int = 0


TableResult = OutputReport | CompactorError
"""Result of bringing a partition's rows in an Iceberg table up to date."""


def recompaction_result_row(result: RecompactionResult, table: TableResult | None) -> ResultRow:
    """Our own fields plus the count fields of Iceberg's ``rewrite_data_files``."""
    report, error = result.report, result.error
    name = result.partition
    row: dict[str, Any] = {"topic": name.topic, "partition": name.partition, "incarnation": name.incarnation}
    if report is not None:
        row = asdict(report)
    elif error is not None:
        row |= {
            "status": RoundStatus.LEASED
            if isinstance(error, Leased)
            else RoundStatus.FENCED
            if isinstance(error, Fenced)
            else RoundStatus.FAILED,
            "reason": error.message,
        }
    else:
        row |= {"status": "left_alone", "reason": result.skip_reason}
    done = report is not None and report.segments_out > 0
    failed = error is not None or (report is not None and report.status == RoundStatus.QUARANTINED)
    if table is not None:
        row["table"] = table.status if isinstance(table, OutputReport) else f"failed: {table.message}"
    return row | {
        "seconds": round(result.seconds, 3),
        "rewritten_data_files_count": report.segments_in - report.segments_skipped if report is not None and done else 0,
        "added_data_files_count": report.segments_out if report is not None else 0,
        "rewritten_bytes_count": result.bytes_before if done else 0,
        "failed_data_files_count": result.segments if failed else 0,
    }


@dataclass(frozen=True)
class RecompactionListener:
    """Callbacks, from several threads."""

    job_listener: JobListener
    on_done: Callable[[RecompactionResult], None]


@dataclass(frozen=True)
class RecompactionCandidate:
    """error: why the state could not be read. log: with its folded state, if cached for the round."""

    partition: TopicPartition
    bytes: int = 0
    records: int = 0
    segments: int = 0
    is_skipped: bool = False
    reason: str = ""
    error: CompactorError | None = None
    log: PartitionLog | None = None


def assess_full_round(state: PartitionState, cleaner: CleanerSettings, now_ms: int) -> RoundAssessment[RemoteLogSegmentMetadata]:
    """Every segment that a normal round could clean counts as dirty. Such a round never moves the cleaner offset backwards."""
    found = assess_round(state, cleaner, now_ms, force=True)
    return replace(
        found, due=bool(found.covered_segments), reason="full re-compaction", first_dirty=state.log_start, dirty_ratio=1.0,
        dirty=found.covered_segments, clean=(),
    )  # fmt: skip


def find_recompaction_candidates(
    tier: Tier, partitions: Sequence[TopicPartition], now_ms: int, min_benefit_bytes: int
) -> list[RecompactionCandidate]:
    """In the given order. Nothing is written. ``min_benefit_bytes``: 0 accepts every partition."""
    keeps = len(partitions) <= MAX_CACHED_LOGS and tier.kind.is_compactor_managed  # if not, a round reads the control log without the view

    def assess_recompaction_candidate(partition: TopicPartition) -> RecompactionCandidate:
        try:
            log = tier.open_partition_log(partition)
            state = log.refresh()
            is_worthwhile, reason = assess_round_benefit(tier, state, now_ms, min_benefit_bytes)
        except CompactorError as error:
            return RecompactionCandidate(partition, error=error)
        records = sum(segment.records for segment in state.live)
        return RecompactionCandidate(
            partition, state.bytes, records, len(state.live), not is_worthwhile, reason, log=log if keeps else None
        )

    with ThreadPoolExecutor(SURVEY_THREADS, "survey") as pool:
        return list(pool.map(assess_recompaction_candidate, partitions))


def recompact_partitions(
    tier: Tier,
    cluster: SparkCluster,
    partitions: Sequence[TopicPartition],
    now_ms: int,
    cost: Costs,
    listener: RecompactionListener,
    min_benefit_bytes: int = 0,
) -> list[RecompactionResult]:
    """Results are in order. An error affects only its own partition.

    :param min_benefit_bytes: least expected saving; 0 accepts every partition.
    """
    from compactor.features.spark.shared_jobs import SharedJobs

    recompaction = _SharedRecompactionState(tier, cluster, now_ms, cost, listener)
    unfinished = recompaction.record_skipped(find_recompaction_candidates(tier, partitions, now_ms, min_benefit_bytes))
    total = sum(candidate.bytes for candidate in unfinished)
    large = [candidate for candidate in unfinished if recompaction.should_spread(candidate, total)]
    small = sorted((candidate for candidate in unfinished if candidate not in large), key=lambda candidate: -candidate.bytes)
    with ExitStack() as stack:
        flow = stack.enter_context(SharedJobs(cluster, tier, cost, listener.job_listener))
        spread = stack.enter_context(ThreadPoolExecutor(tier.settings.spark.large_at_once, "large"))
        pool = stack.enter_context(ThreadPoolExecutor(recompaction.max_led_partitions(), "partition"))
        try:
            futures = [spread.submit(recompaction.record_rounds, candidate, recompaction.clean_on_all_executors) for candidate in large]
            futures += [
                pool.submit(recompaction.record_rounds, candidate, partial(recompaction.clean_in_shared_job, flow)) for candidate in small
            ]
            for future in futures:
                future.result()
        except BaseException:
            cluster.cancel_jobs()
            for workers in (spread, pool):
                workers.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            recompaction.publish_changed_partitions()
    return [recompaction.finished[name] for name in partitions]


def update_iceberg_tables(
    tier: Tier, cluster: SparkCluster, partitions: Sequence[TopicPartition], cost: Costs
) -> dict[TopicPartition, TableResult]:
    """Executors write the data files. Return the report or error of each partition that has a table. Raises UsageError if a package is
    missing or the settings of an output are not valid.
    """
    from compactor.features.spark.jobs import JobListener

    topics = tier.settings.outputs.iceberg
    wanted = [
        name for name in partitions if topics.iceberg_table_settings(name.topic) is not None and name == tier.latest_incarnation(name)
    ]
    if not wanted:
        return {}
    require_pip_extra("iceberg", "[outputs.iceberg]")
    from compactor.features.iceberg.output import IcebergOutput
    from compactor.features.spark.table_files import SparkTaskDataFileWriter

    output = IcebergOutput(SparkTaskDataFileWriter(cluster, cost, JobListener()))

    def update_iceberg_table(partition: TopicPartition) -> TableResult:
        try:
            return output.update_output(tier, partition, DiskBudget(0))  # it streams
        except CompactorError as error:
            return error

    with ThreadPoolExecutor(tier.settings.spark.large_at_once, "tables") as pool:
        return dict(zip(wanted, pool.map(update_iceberg_table, wanted), strict=True))


def recompact_topics(spark: SparkSession, config: str, topics: str, min_benefit_bytes: int, now_ms: int | None) -> DataFrame:
    """Implementation of ``compactor.spark.recompact``."""
    from compactor.features.spark.jobs import JobListener
    from compactor.features.spark.session import start_cluster
    from compactor.round.ports import Costs

    settings = load_settings(config)
    tier = open_tier(settings)
    if tier.kind.is_broker_managed:
        tier.identity.read_or_create_catalog()
    names = [name for name in sorted(tier.list_partitions()) if re.fullmatch(topics, name.topic)]
    if not names:
        raise UsageError(f"the tier at {tier.ports.layout.url} holds no topic that matches {topics}")
    now = tier.ports.clock_ms() if now_ms is None else now_ms
    with start_cluster(settings) as started:
        listener = RecompactionListener(JobListener(), lambda _: None)
        results = recompact_partitions(tier, started.cluster, names, now, Costs(), listener, min_benefit_bytes)
        tables = update_iceberg_tables(tier, started.cluster, names, Costs())
    rows = [recompaction_result_row(result, tables.get(result.partition)) for result in results]
    schema = ", ".join(f"{name} {kind}" for name, kind in RESULT_COLUMNS.items())
    return spark.createDataFrame([tuple(row.get(name) for name in RESULT_COLUMNS) for row in rows], schema)


class _SharedRecompactionState:
    """State that worker threads share. Thread-safe."""

    def __init__(self, tier: Tier, cluster: SparkCluster, now_ms: int, cost: Costs, listener: RecompactionListener) -> None:
        self._tier = tier
        self._cluster = cluster
        self._now_ms = now_ms
        self._cost = cost
        self._listener = listener
        self._lock = threading.Lock()
        self._changed: list[PartitionLog] = []
        self.finished: dict[TopicPartition, RecompactionResult] = {}

    def record_skipped(self, candidates: Sequence[RecompactionCandidate]) -> list[RecompactionCandidate]:
        for candidate in candidates:
            if candidate.error is not None or candidate.is_skipped:
                self._record_result(
                    RecompactionResult(
                        candidate.partition, None, candidate.error, 0.0, candidate.reason, candidate.segments, candidate.bytes
                    )
                )
        return [candidate for candidate in candidates if candidate.error is None and not candidate.is_skipped]

    def max_led_partitions(self) -> int:
        return self._tier.settings.spark.led_at_once or min(
            max(LED_LIMITS[0], self._cluster.task_slots * LED_PARTITIONS_PER_SLOT), LED_LIMITS[1]
        )

    def should_spread(self, candidate: RecompactionCandidate, total_bytes: int) -> bool:
        """Too large for one executor, or longer than an equal share of the work."""
        cleaner = self._tier.cleaner_settings_for_topic(candidate.partition.topic)
        if cleaner.map_engine != "auto":
            return cleaner.map_engine == "spark"
        if candidate.records * KEY_BYTES > cleaner.map_budget_bytes // self._cluster.task_slots_per_executor:
            return True
        return self._cluster.task_slots > 1 and candidate.bytes > max(SMALL_PARTITION_BYTES, total_bytes // self._cluster.task_slots)

    def record_rounds(self, candidate: RecompactionCandidate, run_rounds: Callable[[RecompactionCandidate], RoundReport]) -> None:
        begin = time.monotonic()
        report, problem = None, None
        try:
            report = run_rounds(candidate)
        except CompactorError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - a bug of ours in one partition is no reason to lose the others (I9)
            problem = CompactorError(bug_reason(error))
        self._record_result(
            RecompactionResult(candidate.partition, report, problem, time.monotonic() - begin, "", candidate.segments, candidate.bytes)
        )

    def clean_on_all_executors(self, candidate: RecompactionCandidate) -> RoundReport:
        from compactor.features.spark.worker import SparkRunner

        cleaner = self._tier.cleaner_settings_for_topic(candidate.partition.topic)

        return self._run_full_round(
            candidate, SparkRunner(lambda: self._cluster, self._tier, cleaner, self._cost, self._listener.job_listener)
        )

    def clean_in_shared_job(self, shared_jobs: SharedJobs, candidate: RecompactionCandidate) -> RoundReport:

        cleaner = self._tier.cleaner_settings_for_topic(candidate.partition.topic)
        engine = "partitioned" if cleaner.map_engine == "partitioned" else "memory"
        from compactor.features.spark.shared_jobs import SharedRunner

        return self._run_full_round(candidate, SharedRunner(shared_jobs, cleaner, engine))

    def publish_changed_partitions(self, min_changes: int = 1) -> None:
        with self._lock:
            if len(self._changed) < min_changes:
                return
            changed, self._changed = self._changed, []
            self._tier.change_notifier.announce_changed_control_logs(changed)

    def _run_full_round(self, candidate: RecompactionCandidate, runner: Runner) -> RoundReport:
        """A crashed round over another range is resumed first."""
        cleaner = self._tier.cleaner_settings_for_topic(candidate.partition.topic)
        share = cleaner.disk_budget_bytes
        disk = (
            DiskBudget(share // self._cluster.task_slots_per_executor) if isinstance(share, int) else DiskBudget(3 * cleaner.segment_bytes)
        )
        log = candidate.log
        while True:
            log = log or self._tier.open_partition_log(candidate.partition, caller_runs_round=True)
            report = create_round(
                self._tier, candidate.partition, self._now_ms, runner=runner, assess_with=assess_full_round, disk=disk
            ).run(log)
            if report.status in CHANGING:
                with self._lock:
                    self._changed.append(log)
                self.publish_changed_partitions(CHANGES_PER_RECORD)
            if report.status != RoundStatus.RESUMED or report.first_dirty_offset <= log.state.log_start:
                return report
            log = None

    def _record_result(self, result: RecompactionResult) -> None:
        with self._lock:
            self.finished[result.partition] = result
            self._listener.on_done(result)
