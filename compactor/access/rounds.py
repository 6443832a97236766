"""Readers and rounds of one partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial

from compactor.access.tier import Tier
from compactor.control.logs import PartitionLog
from compactor.control.state import PartitionState
from compactor.errors import CompactorError
from compactor.local.budget import DiskBudget
from compactor.model.ids import CHANGING, TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import (
    Compaction,
    LocalRunner,
    RoundAssessmentFunction,
    RoundReport,
    RoundResourcesAndSettings,
    RoundStageCallback,
    Runner,
    disk_budget_bytes,
)
from compactor.round.plan import assess_round
from compactor.round.sources import StagedSegmentReader, open_live_segment_reader, open_reader_of_segments, use_and_close_reader


def open_live_reader(tier: Tier, state: PartitionState, budget: DiskBudget, local_copy_folder_prefix: str) -> StagedSegmentReader:
    """Local copies are removed when the caller closes the reader's ``staging``."""
    return open_live_segment_reader(
        tier.ports, tier.cleaner_settings_for_topic(state.topic), tier.state_dir, state, budget, local_copy_folder_prefix
    )


def open_given_reader(
    tier: Tier, partition: TopicPartition, segments: Sequence[RemoteLogSegmentMetadata], local_copy_folder_prefix: str
) -> AbstractContextManager[StagedSegmentReader]:
    """Local copies have a disk budget of their own, as the settings allow, and are removed at the end of the ``with`` block."""
    cleaner = tier.cleaner_settings_for_topic(partition.topic)
    budget = DiskBudget(disk_budget_bytes(cleaner, tier.state_dir))
    return use_and_close_reader(
        open_reader_of_segments(tier.ports, cleaner, tier.state_dir, partition, segments, budget, local_copy_folder_prefix)
    )


def create_round(
    tier: Tier,
    partition: TopicPartition,
    now_ms: int,
    *,
    force: bool = False,
    on_stage: RoundStageCallback = lambda s, p: None,
    disk: DiskBudget | None = None,
    runner: Runner | None = None,
    assess_with: RoundAssessmentFunction | None = None,
    shares_budgets: bool = False,
) -> Compaction:
    """Configure a round by the tier's settings.

    :param force: run the round whatever the dirty ratio is. Has no effect if ``assess_with`` is given.
    :param disk: shared with other rounds; None for a budget of its own.
    :param runner: None for the one that the settings name.
    :param shares_budgets: whether other rounds run in this process at the same time.
    """
    if runner is None and tier.runners is not None:
        runner = tier.runners(tier, partition)
    cleaner = tier.cleaner_settings_for_topic(partition.topic)
    context = RoundResourcesAndSettings(
        ports=tier.ports,
        lease=tier.lease,
        cleaner=cleaner,
        hash_key=tier.identity.hash_key(),
        sidecars=tier.open_sidecar_store(partition) if cleaner.bloom else None,
        threads=tier.settings.daemon.threads,
        state_dir=tier.state_dir,
        records_per_hour=tier.settings.publish.metadata_records_per_hour,
    )
    return Compaction(
        context,
        now_ms,
        runner or LocalRunner(context, disk),
        assess_if_round_is_due=assess_with or partial(assess_round, force=force),
        on_stage=on_stage,
        shares_budgets=shares_budgets,
    )


def execute_round(
    tier: Tier,
    partition: TopicPartition,
    log: PartitionLog,
    now_ms: int,
    *,
    force: bool = False,
    on_stage: RoundStageCallback = lambda s, p: None,
    disk: DiskBudget | None = None,
    check_stop: Callable[[], None] = lambda: None,
    shares_budgets: bool = False,
) -> RoundReport:
    """Run on the Spark cluster that the settings name, or in this process if there is none or it declines. A failure that is recorded is
    announced by a hint.

    :param check_stop: raises an error to end a wait for the cluster.

    Raises the errors of Compaction.run.
    """
    before = log.state.quarantine
    try:
        why = ""
        if tier.remote_rounds is not None and tier.settings.spark.uses_spark_cluster:
            remote = tier.remote_rounds.run_round_remotely(tier, log.refresh(), now_ms, force=force, check_stop=check_stop)
            if isinstance(remote, RoundReport):
                log.refresh()
                return remote
            why = remote
        job = create_round(tier, partition, now_ms, force=force, on_stage=on_stage, disk=disk, shares_budgets=shares_budgets)
        report = job.run(log)
        return replace(report, reason=report.reason or why)
    finally:
        if log.state.quarantine is not None and log.state.quarantine != before:  # so that other processes tell it, too
            with suppress(CompactorError):
                tier.change_notifier.announce_changed_control_logs([log])


def compact(
    tier: Tier, partition: TopicPartition, now_ms: int, *, force: bool = False, on_stage: RoundStageCallback = lambda s, p: None
) -> RoundReport:
    """Publish a hint if the round changed what readers read. Raises the errors of Compaction.run."""
    log, hint = (
        tier.open_partition_log(partition, caller_runs_round=True),
        tier.change_notifier.latest_hint(partition),
    )
    report = execute_round(tier, partition, log, now_ms, force=force, on_stage=on_stage)
    tier.change_notifier.cache_state(log, hint)
    if tier.local:
        tier.local.delete_cached_sidecar_heads([segment.id for segment in report.segments if segment.action == "rewritten"])
    if report.status in CHANGING:
        tier.change_notifier.announce_changed_control_logs([log])
    return report
