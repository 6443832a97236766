"""Jobs: what a thread of the daemon does with one partition (a round, a deletion, an output). ``scheduling`` decides which."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from compactor.access.rounds import create_round, execute_round
from compactor.access.tier import Tier
from compactor.config.settings import CleanerSettings, Settings
from compactor.control.leadership import current_lease
from compactor.control.logs import PartitionLog, open_catalog
from compactor.control.stages import RoundStage
from compactor.control.state import CatalogState
from compactor.daemon.scheduling import DaemonAction, PartitionJob
from compactor.errors import BlockedCause, CompactorError, Fenced, Leased, OutOfBudget, bug_reason
from compactor.local.budget import DiskBudget
from compactor.model.plan import CompactionPlan
from compactor.model.status import CHANGING, RoundStatus
from compactor.outputs.port import OutputReport, OutputWriter
from compactor.round.compaction import RoundReport
from compactor.service.stopping import InterruptibleStore, Stopped, StopRequest
from compactor.upkeep.retire import RetireReport, retire_replaced_segments_and_orphans


@dataclass(frozen=True)
class JobResult:
    """Result of a job of the daemon (a round, an update of an output, or a deletion).

    status: a status of a round or of an output's update, or retired (the deletion was done), failed, out_of_budget, stopped.
    log: the partition's control log as read after the job; None if it was not read.
    report: what the job did, in detail; None if the job failed.
    phases: seconds per phase (see ``progress.RunningJobSnapshot``).
    run_id: id of the job's round; empty if it has none.
    cause: why each further attempt fails until a person acts; FAILING if a later one may succeed.
    """

    job: PartitionJob
    status: str
    reason: str = ""
    log: PartitionLog | None = None
    report: RoundReport | RetireReport | OutputReport | None = None
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    run_id: str = ""
    cause: BlockedCause = BlockedCause.FAILING


class JobProgressObserver(Protocol):
    """Receiver of a job's progress: stages and bytes, reported while the job runs."""

    def record_transferred_bytes(self, size: int) -> None:
        """Record a number of segment bytes that were read from the store or written to it."""

    def record_round_stage(self, stage: RoundStage, plan: CompactionPlan) -> None:
        """Report that a round has reached this stage, such as the rewriting of segments."""


@dataclass(frozen=True)
class JobResources:
    """Resources that all jobs share besides the tier: budgets, engines and the configured output (None if there is none)."""

    disk: DiskBudget
    stop: StopRequest
    output: OutputWriter | None = None


def execute_job(
    tier: Tier,
    catalog: CatalogState,
    job: PartitionJob,
    resources: JobResources,
    now_ms: int,
    observer: JobProgressObserver,
    *,
    log_slot_when_chosen: int = -1,
) -> JobResult:
    """Perform a job and return its result; raises nothing. The job writes its records under a random id of its own (writer incarnation),
    which distinguishes them from the records of other jobs.

    :param log_slot_when_chosen: number of the last control log record (slot) that was read when the job was chosen. A deletion is skipped
        if the log has grown since, because another daemon has then deleted all segments that were due.
    """

    def on_stage(stage: RoundStage, plan: CompactionPlan) -> None:
        observer.record_round_stage(stage, plan)
        resources.stop.raise_if_stopped_unless_published(stage)

    tier = tier.with_stores(data=InterruptibleStore(tier.ports.data, resources.stop, observer.record_transferred_bytes))
    tier = replace(tier, catalog=open_catalog(tier.ports))
    tier.catalog.continue_from_cached_state(catalog)
    log = tier.open_control_log_of_partition(job.partition, caller_runs_round=True)
    try:
        if job.action is DaemonAction.OUTPUT and resources.output is not None:
            written = resources.output.update_output_to_published_view(tier, job.partition, resources.disk)
            return JobResult(job, written.status, report=written)
        log.refresh()
        lease = current_lease(tier.ports, log)
        left_ms = lease.expires_ms - tier.ports.control.clock_ms() if lease else 0
        # A lease that seems to last longer than two of ours is ignored: the store's clock was set back, or the holder's ttl is longer.
        if lease is not None and 0 < left_ms <= 2 * tier.lease.ttl_ms:
            return JobResult(job, RoundStatus.LEASED, f"{lease.holder} is at work", log)
        if job.action is DaemonAction.RETIRE and 0 <= log_slot_when_chosen < log.state.slot:
            return JobResult(job, RoundStatus.NOTHING_TO_DO, "another process has written meanwhile", log)
        if job.action is DaemonAction.ROUND:
            stop = resources.stop.raise_if_stopped
            round_report = execute_round(
                tier,
                job.partition,
                log,
                now_ms,
                force=job.force,
                on_stage=on_stage,
                disk=resources.disk,
                check_stop=stop,
                shares_budgets=not job.exclusive,
            )
            if round_report.status in CHANGING:
                tier.change_notifier.announce_changed_control_logs([log])
            result = JobResult(job, round_report.status, round_report.reason, log, round_report)
        else:
            work = create_round(tier, job.partition, now_ms, on_stage=on_stage, disk=resources.disk)
            result = JobResult(
                job,
                RoundStatus.RETIRED,
                "",
                log,
                retire_replaced_segments_and_orphans(tier.ports, log, tier.lease, tier.retention, round_steps=work),
            )
            tier.change_notifier.save_last_record_numbers_in_catalog([log])
        log.refresh()
    except CompactorError as error:
        known = {
            Stopped: RoundStatus.STOPPED,
            Leased: RoundStatus.LEASED,
            Fenced: RoundStatus.FENCED,
            OutOfBudget: RoundStatus.OUT_OF_BUDGET,
        }
        status = known.get(type(error), RoundStatus.FAILED)
        text = error.message if status in (RoundStatus.STOPPED, RoundStatus.LEASED, RoundStatus.FENCED) else str(error)
        return JobResult(job, status, text, cause=error.blocks_by)
    except Exception as error:  # noqa: BLE001 - one partition's bug must not end the service for the others (I9)
        return JobResult(job, RoundStatus.FAILED, bug_reason(error))
    return result


def check_stores_writable(tier: Tier) -> None:
    """Write a few bytes into each store that rounds write to, and delete them. Raises StoreError or OutOfBudget if that fails."""
    ports = tier.ports
    places = [(ports.control, "probe/daemon")]
    if tier.settings.tier.control_url and tier.ownership.ours:
        places.append((ports.data, ".tiered-compactor/probe/daemon"))
    for store, key in places:
        store.put(key, b"may a round write here?")
        store.delete([key])


def settings_for_parallel_job(settings: Settings, parallel_jobs: int, worker_threads: int) -> Settings:
    """Return the settings for one of ``parallel_jobs`` jobs: an equal share of the map budget, and this number of worker threads."""

    def with_equal_share_of_map_budget(cleaner: CleanerSettings) -> CleanerSettings:
        return cleaner.model_copy(update={"map_budget_bytes": max(1, cleaner.map_budget_bytes // parallel_jobs)})

    return settings.model_copy(
        update={
            "cleaner": with_equal_share_of_map_budget(settings.cleaner),
            "topics": {pattern: with_equal_share_of_map_budget(cleaner) for pattern, cleaner in settings.topics.items()},
            "daemon": settings.daemon.model_copy(update={"threads": worker_threads}),
        }
    )
