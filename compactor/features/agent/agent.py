"""The agent: runs beside a broker and uploads sealed segments of the partitions that this broker leads.

1. ``scan`` lists the log directories, asks the cluster who leads and where the leaders' logs end.
2. ``start_due_jobs`` starts uploads in threads.
3. ``_process_job_result`` processes the uploads that have ended.

Two agents on one partition upload the same segments under the same ids; the second one finds them in the tier.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from compactor.access.tier import Tier
from compactor.adapters.brokers.chain import ClusterPartitionLeaders, LeaderReportedLogEnd
from compactor.config.settings import CleanerSettings, Settings
from compactor.config.times import format_iso_time
from compactor.config.units import format_size
from compactor.constants import TopicId
from compactor.control.logs import PartitionLog
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError, Fenced, OutOfBudget, StoreError, UsageError, bug_reason
from compactor.features.agent.log_directories import (
    EPOCHS,
    BrokerIdentity,
    indexed_timestamp_ms,
    last_leader_epoch,
    read_broker_identity,
    scan_log_directory,
)
from compactor.features.agent.plan import (
    CHECK_MS,
    DELETE_DELAY_MS,
    PartitionDirectoryListing,
    PartitionUploadState,
    UploadFailureReason,
    UploadOutcome,
    adoption_log_line,
    choose_uploads,
    has_fresh_log_end,
    is_upload_due,
    leadership_check,
    needs_log_end_query,
    retention_deadline_ms,
    unknown_leadership_message,
    upload_lag,
    with_directory_listing,
    with_leadership,
    with_log_end,
    with_upload_outcome,
)
from compactor.features.agent.status import SHARED, AgentCounters, AgentStatus, with_upload_counted
from compactor.features.imports.from_tier import is_topic_chosen, topics_in_catalog
from compactor.features.imports.import_ import ImportOptions, ImportReport, ImportResources, import_directory
from compactor.features.imports.incarnations import (
    TopicIdsQuery,
    TopicRecreationConfirmationSources,
    TopicSettingsQuery,
    record_cluster_of_topics,
    record_settings_of_topics,
    unreadable_settings_message,
)
from compactor.features.imports.log_directory import DELETED, staged_segment_path
from compactor.features.imports.log_identity import PARTITION_METADATA
from compactor.features.imports.staged_files import FileStagedForDeletion, OpenFilesStagedForDeletion
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import ClusterTopicIds
from compactor.round.compaction import disk_budget_bytes
from compactor.service import EventLogger, InterruptibleStore, PollingLoop, ServiceEventLogger, Stopped, StopRequest, backoff_ms

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent


# Only created and renamed files are reported: a broker writes into its files thousands of times per second.


@contextmanager
def watch_log_dirs(log_dirs: Sequence[str], callback: Callable[[], None], log: EventLogger) -> Iterator[None]:
    """Call ``callback`` whenever a segment may have been rolled or staged for deletion (inotify, through watchdog)."""
    try:
        from watchdog.events import FileCreatedEvent, FileMovedEvent, FileSystemEventHandler
        from watchdog.observers import Observer
    except ImportError:
        log("directories are scanned every agent.interval_ms (pip install 'tiered-compactor[agent]' to be notified of new segments)")
        yield
        return

    class NewSegmentFileEventHandler(FileSystemEventHandler):
        @override
        def on_created(self, event: FileSystemEvent) -> None:
            if str(event.src_path).endswith(".log"):
                callback()

        @override
        def on_moved(self, event: FileSystemEvent) -> None:
            if str(event.dest_path).endswith(f".log{DELETED}"):
                callback()

    observer = Observer()
    try:
        for log_dir in log_dirs:
            observer.schedule(NewSegmentFileEventHandler(), log_dir, recursive=True, event_filter=[FileCreatedEvent, FileMovedEvent])
        observer.start()
    except OSError as error:  # more directories than fs.inotify.max_user_watches, or one that is not there
        log(f"the system cannot report new segments ({error.strerror}): directories are scanned every agent.interval_ms")
        observer.unschedule_all()
        yield
        return
    try:
        yield
    finally:
        observer.stop()
        observer.join(5)


class SegmentUploader:
    """Uploader of segments to one tier. Thread-safe for different partitions. Large imports run one at a time, so that the disk budget
    suffices.
    """

    def __init__(self, tier: Tier, stop: StopRequest, ask_topic_ids: TopicIdsQuery) -> None:
        self._tier = tier
        self._stop = stop
        self._ask = ask_topic_ids
        self._one_at_a_time = threading.Lock()
        self._large = threading.Lock()
        self._output_updater = _PinterestOutputAppender(tier, stop) if tier.settings.tier.pinterest.target else None

    def upload_partition(self, upload_state: PartitionUploadState, held_files: OpenFilesStagedForDeletion | None = None) -> UploadOutcome:
        """Import the partition's new segments below the high watermark, then update its output. Raises nothing."""
        try:
            self._stop.raise_if_stopped()
            outcome = self._import_new_segments(upload_state, held_files)
            return (
                outcome
                if self._output_updater is None or outcome.trouble is not None
                else self._output_updater.append_upload(upload_state.partition, outcome)
            )
        except Stopped:
            return UploadOutcome(None, stopped=True)
        except Exception as error:  # noqa: BLE001 - one partition's trouble must not end the service for the others (I9)
            state = self._find_state(upload_state.partition)
            position = state.end_offset + 1 if state is not None and state.has_segments else None
            reason = str(error) if isinstance(error, CompactorError) else bug_reason(error)
            return UploadOutcome(position, trouble=classify_upload_failure(error, upload_state.seen, state), reason=reason)

    def record_topics(self, topic_ids: Mapping[str, TopicId]) -> None:
        with self._one_at_a_time:
            record_cluster_of_topics(self._tier.catalog, topic_ids, self._ask)

    def record_topic_settings(self, topic_ids: Mapping[str, TopicId], ask_settings: TopicSettingsQuery) -> list[str]:
        """Record these topics' compaction settings in the catalog. Return the topics whose settings may not be read. Raises StoreError."""
        with self._one_at_a_time:
            return record_settings_of_topics(self._tier.catalog, topic_ids, self._ask, ask_settings)

    def _import_new_segments(self, upload_state: PartitionUploadState, held_files: OpenFilesStagedForDeletion | None) -> UploadOutcome:
        path, end = Path(upload_state.seen.path), upload_state.end
        if end is None:
            return UploadOutcome(None, trouble=UploadFailureReason.BROKER, reason="no leader has reported where its log ends")
        try:
            epoch = last_leader_epoch(path)
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
            staged_problem=leadership_check(upload_state.leadership),
            opening=TopicRecreationConfirmationSources(ask=self._ask),
        )
        report = self._run_import(upload_state, options)
        position = report.end_offset + 1
        if upload_state.trouble is UploadFailureReason.BEHIND and position > end.high_watermark:
            return UploadOutcome(position, trouble=UploadFailureReason.BEHIND, reason=upload_state.reason, notes=report.notes)
        return UploadOutcome(position, report.segments, report.bytes, notes=report.notes)

    def _run_import(self, upload_state: PartitionUploadState, options: ImportOptions) -> ImportReport:
        tier, name = self._tier, upload_state.partition
        hint = tier.change_notifier.latest_hint(tier.latest_incarnation(name))

        def announce_and_cache(log: PartitionLog) -> None:
            with self._one_at_a_time:
                tier.change_notifier.announce_changed_control_logs([log])
                tier.change_notifier.cache_state(log, hint)

        policy = tier.settings.cleaner_settings_for_topic(name.topic).cleaner_policy()
        company = ImportResources(1, announce_and_cache, self._large)
        return import_directory(tier, Path(upload_state.seen.path), name, policy, options=options, shared=company)

    def _find_state(self, partition: TopicPartition) -> PartitionState | None:
        try:
            return self._tier.open_partition_log(self._tier.latest_incarnation(partition)).refresh()
        except CompactorError:
            return None


class _PinterestOutputAppender:
    # Writer that appends newly uploaded segments to the partition's output in Pinterest's layout. If a round has rewritten segments of the
    # output, a daemon has to write the complete output again.
    def __init__(self, tier: Tier, stop: StopRequest) -> None:
        from compactor.features.pinterest.generations import GenerationWriteOptions, configured_generation_target, write_generation

        target = configured_generation_target(tier)
        self._target = replace(target, store=InterruptibleStore(target.store, stop))
        self._tier = _with_agent_log_directories(tier)
        self._write_options = GenerationWriteOptions(
            disk=DiskBudget(disk_budget_bytes(tier.settings.cleaner, tier.state_dir)), append_only=True, yields=True
        )
        self._write = write_generation
        self._left: set[TopicPartition] = set()

    def append_upload(self, partition: TopicPartition, outcome: UploadOutcome) -> UploadOutcome:
        if not outcome.position:
            return outcome
        try:
            report = self._write(self._tier, self._target, self._tier.latest_incarnation(partition), self._write_options)
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
    settings = tier.settings

    def with_log_dirs(cleaner: CleanerSettings) -> CleanerSettings:
        return cleaner.model_copy(update={"local_log_dirs": (*cleaner.local_log_dirs, *settings.agent.log_dirs)})

    topics = {pattern: with_log_dirs(cleaner) for pattern, cleaner in settings.topics.items()}
    return replace(tier, settings=settings.model_copy(update={"cleaner": with_log_dirs(settings.cleaner), "topics": topics}))


def classify_upload_failure(error: Exception, listing: PartitionDirectoryListing, state: PartitionState | None) -> UploadFailureReason:
    """Reason of an exception that ended an upload."""
    if isinstance(error, BadData):
        if error.segment.endswith(EPOCHS):
            return UploadFailureReason.LINEAGE
        if error.is_compacted:
            return UploadFailureReason.COMPACTED
        if error.segment.endswith(PARTITION_METADATA):
            return UploadFailureReason.IDENTITY
        gap = state is not None and state.has_segments and listing.first_base_offset > state.end_offset + 1
        return UploadFailureReason.GAP if gap else UploadFailureReason.CONTENT
    if isinstance(error, UsageError):
        return UploadFailureReason.DELETED if state is not None and state.deleted_slot else UploadFailureReason.UNREADABLE
    kinds = ((Fenced, UploadFailureReason.FENCED), (StoreError, UploadFailureReason.STORE), (OutOfBudget, UploadFailureReason.BUDGET))
    return next((trouble for kind, trouble in kinds if isinstance(error, kind)), UploadFailureReason.BUG)


UPLOADS_PER_THREAD = 4
"""Simultaneous uploads per thread of ``daemon.threads``. Uploads of small segments mostly wait for the store."""
ASKED_AT_ONCE = 1_000
"""Number of due uploads, the next ones first, for which the leaders are asked in one request where their logs end."""
TOPIC_SETTINGS_MS = 600_000
"""Time after which the cluster is asked again what is set for compaction on the topics."""
BROKER_RETRY_MS = 2_000
MAX_BROKER_RETRY_MS = 60_000

AGENT_JOURNAL = ServiceEventLogger(logging.getLogger(__name__))


class AgentClusterQueries(Protocol):
    """Cluster queries of the agent. Methods raise StoreError if the cluster refuses the request or does not answer."""

    def leaders(self) -> ClusterPartitionLeaders: ...

    def log_ends(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, LeaderReportedLogEnd | StoreError]: ...

    def topic_ids(self, topics: Sequence[str]) -> ClusterTopicIds:
        """May be called from several threads."""

    def compaction_settings(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str] | None]:
        """Settings for compaction: empty if brokers do not compact the topic, None if this user may not read it."""

    def retention_ms(self, topic: str) -> int | None:
        """Milliseconds; -1 if unlimited, None if this user may not read it."""

    def delete_delay_ms(self, topic: str) -> int | None:
        """Value of ``file.delete.delay.ms``; None if this user may not read it."""


@dataclass(frozen=True)
class _FinishedUpload:
    partition: TopicPartition
    outcome: UploadOutcome
    seconds: float


class UploadAgent(PollingLoop[int, _FinishedUpload]):
    """Service that uploads one broker's sealed segments. ``status`` may be called from any thread."""

    def __init__(self, tier: Tier, brokers: AgentClusterQueries, *, log: EventLogger = AGENT_JOURNAL) -> None:
        super().__init__(tier, log)
        self._brokers = brokers
        self._uploads = SegmentUploader(self._tier, self.stop, self._brokers.topic_ids)
        self._upload_states: dict[TopicPartition, PartitionUploadState] = {}
        self._staged = OpenStagedFiles()
        self._retentions: dict[str, int | None] = {}
        self._delete_delays: dict[str, int] = {}
        self._topics_with_settings: Mapping[str, TopicId] = {}
        self._settings_asked_ms = 0
        self._unreadable_settings: set[str] = set()
        self._left_out: set[str] = set()
        self._tallies = AgentCounters()
        self._problems: dict[str, str] = {}
        self._tier_ready = False
        self._adoptions_listed = False
        self._asked_ms = 0
        self._broker_failures = 0
        self._broker_retry_ms = 0

    # --- the loop ---

    @override
    def _apply_settings(self, settings: Settings) -> None:
        self._tier = replace(self._tier, settings=settings)
        self._uploads = SegmentUploader(self._tier, self.stop, self._brokers.topic_ids)

    @override
    def _scan_interval_s(self) -> float:
        return self._tier.settings.agent.interval_ms / 1000

    @override
    def scan(self) -> None:
        now = self._tier.ports.clock_ms()
        identity = self._list_directories(now)
        self._open_staged_files()
        if not self._open_tier() or identity is None:
            return
        self._refresh_leaders(identity, now)
        self._refresh_log_ends(
            [upload_state.partition for upload_state in self._upload_states.values() if needs_log_end_query(upload_state, now)], now
        )
        self._report_untaken_files()
        self._scans += 1
        self._scan_ms = now

    @override
    def start_due_jobs(self) -> list[TopicPartition]:
        """Start every due upload for which a thread is free, and return the partitions. Leaders are asked again if their report is older
        than FRESH_MS.
        """
        if self.stop.event.is_set() or not self._tier_ready or self._problems.get("broker"):
            return []
        now = self._tier.ports.clock_ms()
        most = UPLOADS_PER_THREAD * self._tier.settings.daemon.threads
        accept = self._tier.settings.agent.accept_truncation
        due = choose_uploads(self._upload_states.values(), self._running, len(self._running) + ASKED_AT_ONCE, now, accept_truncation=accept)
        names = [upload_state.partition for upload_state in due[: max(0, most - len(self._running))]]
        if not names:
            return []
        if not all(has_fresh_log_end(self._upload_states[name], now) for name in names):
            self._refresh_log_ends([upload_state.partition for upload_state in due], now)
        names = [name for name in names if is_upload_due(self._upload_states[name], now, accept_truncation=accept)]
        for name in names:
            self._start_upload(self._upload_states[name], now)
        return names

    # --- looking ---

    def _list_directories(self, now_ms: int) -> BrokerIdentity | None:
        # Report a directory that cannot be read or belongs to another broker than the first, and list the others all the same.
        rules = self._tier.settings.agent
        known = {name: upload_state.seen for name, upload_state in self._upload_states.items()}
        held = topics_in_catalog(self._tier.catalog.state) if self._tier_ready else set()
        seen: dict[TopicPartition, PartitionDirectoryListing] = {}
        whose: BrokerIdentity | None = None
        lost = False
        for text in rules.log_dirs:
            try:
                identity = read_broker_identity(Path(text))
                if whose is not None and identity != whose:
                    raise UsageError(
                        f"{text} belongs to {_describe_broker(identity)}, and other log_dirs to {_describe_broker(whose)}",
                        hint="One agent, one broker",
                    )
                whose = identity
                listings = scan_log_directory(Path(text), rules.topics, known, now_ms, held, self._report_left_out)
                seen |= {each.partition: each for each in listings}
            except CompactorError as error:
                self._set_problem(text, str(error))
                lost = True
            else:
                self._set_problem(text, "")
        for text in [key for key in self._problems if key not in (*rules.log_dirs, *SHARED)]:
            del self._problems[text]
        for topic in sorted({name.topic for name in seen.keys() - self._upload_states.keys()} & held):
            if not is_topic_chosen(topic, rules.topics):
                self._log(f"{topic} goes on because the tier holds it; other topics that begin with __ are left out unless named")
        for name, each in seen.items():
            self._upload_states[name] = with_directory_listing(self._upload_states.get(name), each)
            if each.problem:
                self._record_failure_before_upload(name, UploadFailureReason.UNREADABLE, each.problem, now_ms)
        # What a directory that cannot be read holds is not gone.
        for name in [] if lost else [name for name in self._upload_states if name not in seen and name not in self._running]:
            del self._upload_states[name]
            self._staged.close_partition(name)
        return whose

    def _report_left_out(self, topic: str) -> None:
        if topic not in self._left_out:
            self._left_out.add(topic)
            self._log(f"{topic} is left out: agent.topics chooses a name that begins with __ only by an expression that begins so")

    def _open_staged_files(self) -> None:
        for name, upload_state in self._upload_states.items():
            running, log_dir = name in self._running, Path(upload_state.seen.path)
            found = replace(upload_state, held=self._staged.close_reused(name, upload_state.seen.staged, is_upload_running=running))
            if found.seen.staged or found.held or upload_state.held:
                space = True
                with suppress(OSError):
                    space = not found.held or disk_has_space(log_dir)
                held = self._staged.open_wanted(
                    name, log_dir, found.uploadable_staged_files, is_upload_running=running, has_free_space=space
                )
                for file in self._staged.take_unreported("no room", set(found.held) - set(held) if not space else ()):
                    why = "the broker has deleted it, and its disk is almost full"
                    what = f"{staged_segment_path(Path(), file.base)} is not held open any longer: {why}"
                    self._log(what, level=logging.WARNING, partition=str(name))
                self._upload_states[name] = self._log_new_staged_files(replace(found, held=held))

    def _log_new_staged_files(self, upload_state: PartitionUploadState) -> PartitionUploadState:
        # Log each staged file once, with the time at which the broker deletes it by the topic's ``file.delete.delay.ms``.
        new = self._staged.take_unreported("staged", upload_state.uploadable_staged_files)
        if not new:
            return upload_state
        upload_state = replace(upload_state, delete_delay_ms=self._file_delete_delay_ms(upload_state.partition.topic))
        until = format_iso_time(upload_lag(replace(upload_state, position=upload_state.position or 0)).deadline_ms)
        what = (
            f"{len(new)} files from offset {new[0].base} on are staged for deletion and not in the tier: the broker deletes them at {until}"
        )
        self._log(f"{what}, and they are held open", partition=str(upload_state.partition))
        return upload_state

    def _report_untaken_files(self) -> None:
        for name, upload_state in self._upload_states.items():
            for file in self._staged.take_unreported("untaken", upload_state.unproven_staged_files):
                where = f"{staged_segment_path(Path(), file.base)} is staged for deletion and is not taken"
                self._tallies = replace(self._tallies, untaken=self._tallies.untaken + 1)
                self._log(f"{where}: {unknown_leadership_message(file)}", level=logging.WARNING, partition=str(name))

    def _file_delete_delay_ms(self, topic: str) -> int:
        if topic not in self._delete_delays and not self._problems.get("broker"):
            with suppress(StoreError):
                delay_ms = self._brokers.delete_delay_ms(topic)
                self._delete_delays[topic] = DELETE_DELAY_MS if delay_ms is None else delay_ms
        return self._delete_delays.get(topic, DELETE_DELAY_MS)

    def _open_tier(self) -> bool:
        if self._tier_ready:
            return True
        try:
            self._tier.identity.read_or_create_catalog()
            self._tier.identity.read_catalog()
        except Stopped:
            return False
        except CompactorError as error:
            self._set_problem("tier", str(error))
            return False
        self._set_problem("tier", "")
        self._tier_ready = True
        return True

    def _refresh_leaders(self, identity: BrokerIdentity, now_ms: int) -> None:
        # Ask nothing while the delay after a failed request lasts, or if no segment waits for upload and the last answer is younger than
        # CHECK_MS.
        pending = any(upload_lag(upload_state).segments or upload_state.position is None for upload_state in self._upload_states.values())
        if now_ms < self._broker_retry_ms or (not pending and not self._broker_failures and now_ms < self._asked_ms + CHECK_MS):
            return
        try:
            reported = self._brokers.leaders()
        except CompactorError as error:
            self._record_failed_query(str(error), now_ms)
            return
        if reported.cluster_id != identity.cluster_id:
            what = f"the brokers are those of cluster {reported.cluster_id}, and the log directories belong to {_describe_broker(identity)}"
            self._record_failed_query(f"{what}. Correct kafka.bootstrap_servers or agent.log_dirs", now_ms)
            return
        self._asked_ms, self._broker_failures, self._broker_retry_ms = now_ms, 0, 0
        self._set_problem("broker", "")
        for name, upload_state in self._upload_states.items():
            self._upload_states[name] = with_leadership(upload_state, reported.leaders.get(name) == identity.broker_id)
        with suppress(StoreError):  # asked again the next time; it matters only for a topic that is created again
            led = {state.partition.topic: state.seen.topic_id for state in self._upload_states.values() if state.leads}
            self._uploads.record_topics(led)
            self._record_settings(led, now_ms)

    def _record_settings(self, topic_ids: Mapping[str, TopicId], now_ms: int) -> None:
        # Ask when a topic is new, and every TOPIC_SETTINGS_MS. Raises StoreError.
        if topic_ids.items() <= self._topics_with_settings.items() and now_ms < self._settings_asked_ms + TOPIC_SETTINGS_MS:
            return
        refused = self._uploads.record_topic_settings(topic_ids, self._brokers.compaction_settings)
        self._topics_with_settings, self._settings_asked_ms = topic_ids, now_ms
        if new := sorted(set(refused) - self._unreadable_settings):
            self._unreadable_settings.update(new)
            self._log(unreadable_settings_message(new))

    def _record_failed_query(self, reason: str, now_ms: int) -> None:
        self._broker_failures += 1
        self._broker_retry_ms = now_ms + backoff_ms(self._broker_failures, BROKER_RETRY_MS, MAX_BROKER_RETRY_MS)
        self._tallies = replace(self._tallies, broker_failures=self._tallies.broker_failures + 1)
        self._set_problem("broker", reason)

    def _refresh_log_ends(self, partitions: Sequence[TopicPartition], now_ms: int) -> None:
        if not partitions or self._problems.get("broker"):
            return
        try:
            reported = self._brokers.log_ends(partitions)
        except CompactorError as error:
            self._record_failed_query(str(error), now_ms)
            return
        answered_ms = self._tier.ports.clock_ms()
        for name in partitions:
            end = reported.get(name)
            if isinstance(end, LeaderReportedLogEnd):
                before = self._upload_states[name]
                after = with_log_end(before, end, now_ms, answered_ms)
                self._upload_states[name] = after
                if after.trouble is UploadFailureReason.BEHIND is not before.trouble:
                    self._count_failed_upload(name, UploadOutcome(None, trouble=UploadFailureReason.BEHIND, reason=after.reason))
            else:
                self._record_failure_before_upload(name, UploadFailureReason.BROKER, str(end) if end else "no leader has answered", now_ms)

    # --- working ---

    def _start_upload(self, upload_state: PartitionUploadState, now_ms: int) -> None:
        self._running[upload_state.partition] = now_ms
        held = self._staged.held_files(upload_state.partition)

        def run_upload() -> None:
            begun = time.monotonic()
            outcome = self._uploads.upload_partition(upload_state, held)
            self._done.put(_FinishedUpload(upload_state.partition, outcome, time.monotonic() - begun))

        threading.Thread(target=run_upload, name=f"upload {upload_state.partition}", daemon=True).start()

    @override
    def _process_job_result(self, finished: _FinishedUpload) -> None:
        del self._running[finished.partition]
        outcome, name = finished.outcome, finished.partition
        if outcome.trouble is UploadFailureReason.STORE:
            self._set_problem("store", outcome.reason)
        elif outcome.trouble is UploadFailureReason.GENERATION:
            self._set_problem("generations", outcome.reason)
        elif outcome.trouble is None and not outcome.stopped:
            self._set_problem("store", "")
            self._set_problem("generations", "")
        if name in self._upload_states:
            before = self._upload_states[name]
            outcome = self._with_retention_deadline(before, outcome)
            self._upload_states[name] = with_upload_outcome(before, outcome, self._tier.ports.clock_ms())
            if outcome.trouble is not None and (before.trouble is not outcome.trouble or outcome.trouble is UploadFailureReason.GAP):
                self._log(outcome.reason, level=logging.WARNING, partition=str(name), trouble=outcome.trouble or "")
            if outcome.trouble is None and before.trouble is not None and not outcome.stopped:
                self._log("uploads succeed again", partition=str(name))
            self._report_partitions_awaiting_adoption()
        self._tallies = with_upload_counted(self._tallies, outcome)
        for note in outcome.notes:
            self._log(note, partition=str(name))
        if outcome.segments:
            plural = "s" * (outcome.segments != 1)
            what = f"{outcome.segments} segment{plural}, {format_size(outcome.bytes)}, up to offset {(outcome.position or 0) - 1}"
            self._log(f"uploaded {what}, {finished.seconds:.1f} s", partition=str(name))

    def _report_partitions_awaiting_adoption(self) -> None:
        # Log them once, after the upload of every partition was tried.
        line = None if self._adoptions_listed else adoption_log_line(self._upload_states.values())
        self._adoptions_listed = self._adoptions_listed or line is not None
        if line:
            self._log(line, level=logging.WARNING)

    def _with_retention_deadline(self, upload_state: PartitionUploadState, outcome: UploadOutcome) -> UploadOutcome:
        if outcome.trouble is not UploadFailureReason.IDENTITY:
            return outcome
        waiting = upload_state if outcome.position is None else replace(upload_state, position=outcome.position)
        topic, pending = upload_state.partition.topic, waiting.segments_pending_upload
        with suppress(StoreError):
            if topic not in self._retentions:
                self._retentions[topic] = self._brokers.retention_ms(topic)
        retention_ms = self._retentions.get(topic)
        largest = indexed_timestamp_ms(Path(upload_state.seen.path), pending[0].base) if pending else -1
        deadline = None if retention_ms is None else retention_deadline_ms(waiting, largest, retention_ms)
        if deadline is None:
            return outcome
        when = f"Retention deletes offset {pending[0].base} and what follows it from {format_iso_time(deadline)} on"
        return replace(outcome, reason=f"{outcome.reason}. {when}", deadline_ms=deadline)

    def _record_failure_before_upload(self, partition: TopicPartition, failure: UploadFailureReason, reason: str, now_ms: int) -> None:
        """Does nothing while the delay after an earlier failure lasts."""
        upload_state = self._upload_states[partition]
        if now_ms < upload_state.retry_at_ms:
            return
        outcome = UploadOutcome(None, trouble=failure, reason=reason)
        self._upload_states[partition] = with_upload_outcome(upload_state, outcome, now_ms)
        if upload_state.trouble is not failure:
            self._count_failed_upload(partition, outcome)
        else:
            self._tallies = with_upload_counted(self._tallies, outcome)

    def _count_failed_upload(self, partition: TopicPartition, outcome: UploadOutcome) -> None:
        self._tallies = with_upload_counted(self._tallies, outcome)
        self._log(outcome.reason, level=logging.WARNING, partition=str(partition), trouble=outcome.trouble or "")

    def _set_problem(self, source: str, reason: str) -> None:
        """Log a problem when it begins, and when it ends (an empty ``reason``)."""
        before = self._problems.get(source, "")
        if reason:
            self._problems[source] = reason
        else:
            self._problems.pop(source, None)
        if reason and not before:
            self._log(reason, level=logging.ERROR)
        elif before and not reason:
            self._log(f"{source}: works again")

    # --- being looked at ---

    def status(self) -> AgentStatus:
        tier, stopping = self._tier, self.stop.event.is_set()
        problems = self._problems.copy()
        return AgentStatus(
            holder=tier.ports.holder,
            tier=tier.ports.layout.url,
            now_ms=tier.ports.clock_ms(),
            started_ms=self._started_ms,
            scans=self._scans,
            scan_ms=self._scan_ms,
            interval_ms=tier.settings.agent.interval_ms,
            ready=self._scans > 0 and not problems and not stopping,
            stopping=stopping,
            problem="; ".join(problems.values()),
            problems=problems,
            upload_states=tuple(self._upload_states.copy().values()),
            running=self._running.copy(),
            usage=tier.counters.usage(),
            tallies=self._tallies,
        )


def _describe_broker(identity: BrokerIdentity) -> str:
    return f"broker {identity.broker_id} of cluster {identity.cluster_id}"


MIN_FREE_SHARE = 0.1
"""Share of a broker's disk that must be free while files are held which the broker has deleted, because they still take up space."""


def disk_has_space(log_directory: Path) -> bool:
    """Return whether MIN_FREE_SHARE of the disk is free. Raises OSError."""
    usage = shutil.disk_usage(log_directory)
    return usage.free >= MIN_FREE_SHARE * usage.total


class OpenStagedFiles:
    """Staged files that the agent holds open until their records are in the tier, even after the broker has deleted them; then only unless
    they are refused or the disk is almost full. Not thread-safe.
    """

    def __init__(self) -> None:
        self._held: dict[TopicPartition, OpenFilesStagedForDeletion] = {}
        self._reported: set[tuple[str, FileStagedForDeletion]] = set()

    def held_files(self, partition: TopicPartition) -> OpenFilesStagedForDeletion | None:
        return self._held.get(partition)

    def close_reused(
        self, partition: TopicPartition, listed_files: Sequence[FileStagedForDeletion], *, is_upload_running: bool
    ) -> tuple[FileStagedForDeletion, ...]:
        """Close the files whose names other files have taken, unless an upload reads them now. Return the others."""
        files = self._held.get(partition)
        if files is None:
            return ()
        if not is_upload_running:
            try:
                files.close_outdated_files(listed_files)
            except OSError:
                files.close()
        return tuple(each.file for each in files.held_files)

    def open_wanted(
        self,
        partition: TopicPartition,
        log_dir: Path,
        wanted_files: Sequence[FileStagedForDeletion],
        *,
        is_upload_running: bool,
        has_free_space: bool = True,
    ) -> tuple[FileStagedForDeletion, ...]:
        """Open the wanted files, close the partition's others unless an upload reads them, and return the open ones. A wanted file that the
        broker has deleted is closed, too, if it is refused or there is no free space.
        """
        if partition not in self._held and not wanted_files:
            return ()
        files = self._held.setdefault(partition, OpenFilesStagedForDeletion(log_dir))
        files.open_files(wanted_files)
        if not is_upload_running:
            inodes = {file.inode for file in wanted_files}
            files.close_unwanted_files(
                lambda each: (
                    each.file.inode in inodes and not (each.is_unlinked and (not has_free_space or each.file.base in files.refusals))
                )
            )
            if not files.held_files:
                del self._held[partition]
        return tuple(each.file for each in files.held_files)

    def take_unreported(self, report_name: str, files: Iterable[FileStagedForDeletion]) -> list[FileStagedForDeletion]:
        new = [file for file in files if (report_name, file) not in self._reported]
        self._reported |= {(report_name, file) for file in new}
        return new

    def close_partition(self, partition: TopicPartition) -> None:
        files = self._held.pop(partition, None)
        if files is not None:
            files.close()
