"""One upload: what a thread of the agent does with one partition. ``agent.plan`` decides which partitions are uploaded."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from compactor.access.tier import Tier
from compactor.agent.leadership import make_upload_refusal_check_by_leadership
from compactor.agent.log_directories import EPOCHS, last_epoch_in_leader_epoch_checkpoint
from compactor.agent.plan import PartitionDirectoryListing, PartitionUploadState, UploadFailureReason, UploadOutcome
from compactor.config.settings import CleanerSettings
from compactor.constants import TopicId
from compactor.control.logs import PartitionLog
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError, Fenced, OutOfBudget, StoreError, UsageError, bug_reason
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.outputs.pinterest import GenerationWriteOptions, configured_generation_target, write_generation
from compactor.round.compaction import disk_budget_bytes
from compactor.service.stopping import InterruptibleStore, Stopped, StopRequest
from compactor.transfer.import_ import import_directory
from compactor.transfer.import_options import ImportOptions, ImportReport, ImportResources
from compactor.transfer.incarnations import (
    TopicIdsQuery,
    TopicRecreationConfirmationSources,
    TopicSettingsQuery,
    record_cluster_of_topics,
    record_settings_of_topics,
)
from compactor.transfer.log_identity import PARTITION_METADATA
from compactor.transfer.staged_files import OpenFilesStagedForDeletion


class SegmentUploader:
    """Uploads segments to one tier. Thread-safe for different partitions.

    All threads share the access to the tier and its catalog log. One large import runs at a time, so that the disk budget suffices.
    """

    def __init__(self, tier: Tier, stop: StopRequest, ask_topic_ids: TopicIdsQuery) -> None:
        self._tier = tier
        self._stop = stop
        self._ask = ask_topic_ids
        self._one_at_a_time = threading.Lock()
        self._large = threading.Lock()
        self._output_updater = _PinterestOutputAppender(tier, stop) if tier.settings.tier.pinterest.target else None

    def upload_partition(self, upload_state: PartitionUploadState, held_files: OpenFilesStagedForDeletion | None = None) -> UploadOutcome:
        """Import the partition's new segments below the high watermark, then update its output if one is configured. Raises nothing.

        :param held_files: files staged for deletion that the caller holds open.
        """
        try:
            self._stop.raise_if_stopped()
            outcome = self._import_new_segments(upload_state, held_files)
            return (
                outcome
                if self._output_updater is None or outcome.trouble is not None
                else self._output_updater.append_upload_to_pinterest_output(upload_state.partition, outcome)
            )
        except Stopped:
            return UploadOutcome(None, stopped=True)
        except Exception as error:  # noqa: BLE001 - one partition's trouble must not end the service for the others (I9)
            state = self._find_partition_state_in_tier(upload_state.partition)
            position = state.end_offset + 1 if state is not None and state.has_segments else None
            reason = str(error) if isinstance(error, CompactorError) else bug_reason(error)
            return UploadOutcome(position, trouble=classify_upload_failure(error, upload_state.seen, state), reason=reason)

    def record_topics_of_cluster_in_catalog(self, topic_ids: Mapping[str, TopicId]) -> None:
        """Record in the catalog that these topics, with their ids, belong to the brokers' cluster. Raises StoreError."""
        with self._one_at_a_time:
            record_cluster_of_topics(self._tier.catalog, topic_ids, self._ask)

    def record_settings_of_topics_in_catalog(self, topic_ids: Mapping[str, TopicId], ask_settings: TopicSettingsQuery) -> list[str]:
        """Record in the catalog what is set for compaction on these topics, which have these ids. Return the topics whose settings may not
        be read. Raises StoreError.
        """
        with self._one_at_a_time:
            return record_settings_of_topics(self._tier.catalog, topic_ids, self._ask, ask_settings)

    def _import_new_segments(self, upload_state: PartitionUploadState, held_files: OpenFilesStagedForDeletion | None) -> UploadOutcome:
        """Import the partition's new segments below the high watermark. If no leader has answered, or this replica does not know the
        leader's epoch yet, return an outcome with that failure instead. Raises CompactorError.
        """
        path, end = Path(upload_state.seen.path), upload_state.end
        if end is None:
            return UploadOutcome(None, trouble=UploadFailureReason.BROKER, reason="no leader has reported where its log ends")
        try:
            epoch = last_epoch_in_leader_epoch_checkpoint(path)
        except OSError as error:
            raise UsageError(f"cannot read {path / EPOCHS}: {error.strerror}", hint="Check its owner and its mode") from error
        if epoch != end.leader_epoch:
            # Below another leader's high watermark this replica may have what no other has: it is a follower by now that was not
            # truncated yet. One that has the leader's epoch in its log was.
            reason = f"the leader is at epoch {end.leader_epoch}, and this replica at {epoch}"
            return UploadOutcome(None, trouble=UploadFailureReason.EPOCH, reason=reason)
        rules = self._tier.settings.agent
        options = ImportOptions(
            live=True,
            gaps=rules.allow_gaps,
            accept_truncation=rules.accept_truncation,
            below=end.high_watermark,
            older=False,
            refill=False,
            may_be_empty=True,
            held=held_files,
            staged_problem=make_upload_refusal_check_by_leadership(upload_state.leadership),
            opening=TopicRecreationConfirmationSources(ask=self._ask),
        )
        report = self._run_import(upload_state, options)
        position = report.end_offset + 1
        if upload_state.trouble is UploadFailureReason.BEHIND and position > end.high_watermark:
            return UploadOutcome(position, trouble=UploadFailureReason.BEHIND, reason=upload_state.reason, notes=report.notes)
        return UploadOutcome(position, report.segments, report.bytes, notes=report.notes)

    def _run_import(self, upload_state: PartitionUploadState, options: ImportOptions) -> ImportReport:
        """Import the partition's directory into the tier with these options, and return the report of the import."""
        tier, name = self._tier, upload_state.partition
        hint = tier.change_notifier.latest_control_log_change_hint_number(tier.latest_incarnation(name))

        def publish_control_log_change_and_cache_state(log: PartitionLog) -> None:
            with self._one_at_a_time:
                tier.change_notifier.announce_changed_control_logs([log])
                tier.change_notifier.cache_control_log_state_locally(log, hint)

        policy = tier.settings.cleaner_settings_for_topic(name.topic).cleaner_policy()
        company = ImportResources(1, publish_control_log_change_and_cache_state, self._large)
        return import_directory(tier, Path(upload_state.seen.path), name, policy, options=options, shared=company)

    def _find_partition_state_in_tier(self, partition: TopicPartition) -> PartitionState | None:
        """Return the partition's state in the tier, or None if it cannot be read."""
        try:
            return self._tier.open_control_log_of_partition(self._tier.latest_incarnation(partition)).refresh()
        except CompactorError:
            return None


class _PinterestOutputAppender:
    """Writer that appends newly uploaded segments to the partition's output in Pinterest's layout.

    If a round has rewritten segments of the output, nothing is appended; a daemon has to write the complete output again. Segments are read
    from the broker's directories as long as these contain the same bytes as the tier.
    """

    def __init__(self, tier: Tier, stop: StopRequest) -> None:
        target = configured_generation_target(tier)
        self._target = replace(target, store=InterruptibleStore(target.store, stop))
        self._tier = _with_agent_log_directories(tier)
        self._write_options = GenerationWriteOptions(
            disk=DiskBudget(disk_budget_bytes(tier.settings.cleaner, tier.state_dir)), append_only=True, yields=True
        )
        self._left: set[TopicPartition] = set()

    def append_upload_to_pinterest_output(self, partition: TopicPartition, outcome: UploadOutcome) -> UploadOutcome:
        """Append the segments of an upload to the partition's output, if an output is configured. Return the upload's outcome; a failure of
        the output, or a line for the log, is added to it. Raises Stopped if the agent is stopping.
        """
        if not outcome.position:
            return outcome
        try:
            report = write_generation(self._tier, self._target, self._tier.latest_incarnation(partition), self._write_options)
        except Stopped:
            raise
        except Exception as error:  # noqa: BLE001 - as for the upload: it is an outcome, and what was uploaded stays
            reason = str(error) if isinstance(error, CompactorError) else bug_reason(error)
            return replace(outcome, trouble=UploadFailureReason.GENERATION, reason=reason)
        if report.status != "superseded":
            self._left.discard(partition)
        elif partition not in self._left:
            self._left.add(partition)
            note = "a round has rewritten segments of the current generation: a daemon, or `generations write`, writes the next one"
            return replace(outcome, notes=(*outcome.notes, note))
        return outcome


def _with_agent_log_directories(tier: Tier) -> Tier:
    """Return the tier with settings under which segments may also be read from the agent's log directories."""
    settings = tier.settings

    def settings_with_agent_log_directories(cleaner: CleanerSettings) -> CleanerSettings:
        return cleaner.model_copy(update={"local_log_dirs": (*cleaner.local_log_dirs, *settings.agent.log_dirs)})

    topics = {pattern: settings_with_agent_log_directories(cleaner) for pattern, cleaner in settings.topics.items()}
    return replace(
        tier, settings=settings.model_copy(update={"cleaner": settings_with_agent_log_directories(settings.cleaner), "topics": topics})
    )


def classify_upload_failure(error: Exception, listing: PartitionDirectoryListing, state: PartitionState | None) -> UploadFailureReason:
    """Return the UploadFailureReason that corresponds to an exception that ended an upload.

    :param listing: the partition's directory on the broker.
    :param state: the partition's state in the tier after the failure; None if it could not be read.
    """
    if isinstance(error, BadData):
        if error.segment.endswith(EPOCHS):
            return UploadFailureReason.LINEAGE
        if error.is_compacted:
            return UploadFailureReason.COMPACTED
        if error.segment.endswith(PARTITION_METADATA):
            return UploadFailureReason.IDENTITY
        gap = state is not None and state.has_segments and listing.base_offset_of_first_listed_segment > state.end_offset + 1
        return UploadFailureReason.GAP if gap else UploadFailureReason.CONTENT
    if isinstance(error, UsageError):
        return UploadFailureReason.DELETED if state is not None and state.deleted_slot else UploadFailureReason.UNREADABLE
    kinds = ((Fenced, UploadFailureReason.FENCED), (StoreError, UploadFailureReason.STORE), (OutOfBudget, UploadFailureReason.BUDGET))
    return next((trouble for kind, trouble in kinds if isinstance(error, kind)), UploadFailureReason.BUG)
