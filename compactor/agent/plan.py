"""Choice of the uploads that the agent starts next, as pure functions over frozen values: no store, no broker, no clock, no threads.

    PartitionDirectoryListing   the latest listing of a partition's directory
    PartitionUploadState     the agent's memory of a partition: that listing, who leads, where the tier ends, the latest failure
    choose          the uploads to start now

A segment is uploaded once it is sealed (not the newest), entirely below the high watermark, and not in the tier yet. The end of the tier
comes from the control log, never from a file's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from compactor.agent.leadership import TICK_MS, LeadershipInterval, RenameEvidence, add_leader_answer, rename_evidence
from compactor.brokers.metadata_topic.leaders import LogEnd
from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.model.ids import TopicPartition
from compactor.service.retry_delay import backoff_ms
from compactor.transfer.staged import StagedFile
from compactor.views.words import format_iso_time

FRESH_MS = 2_000
"""Largest age of a leader's answer about the end of its log when an upload begins. The answer carries the leader epoch, and what was
committed in that epoch stays committed.
"""
CHECK_MS = 60_000
"""How often brokers are asked who leads and where logs end although no segment waits for upload."""
UPLOAD_RETRY_MS = 5_000
MAX_UPLOAD_RETRY_MS = 600_000
"""Longest delay before a failed partition is retried. The delay begins with RETRY_MS and doubles with every failure."""
DELETE_DELAY_MS = 60_000
"""Kafka's default for ``file.delete.delay.ms``, the time between the renaming of a file and its deletion."""


class UploadFailure(StrEnum):
    """Reason why a partition is not uploaded. Also the label of metrics.

    GAP: retention deleted segments that were not uploaded yet. LINEAGE: the leader epochs of the broker's log and of the tier do not match.
    BEHIND: the broker's log ends before the tier's. IDENTITY: the log belongs to another topic id than the tier's.
    CONTENT: the tier has other bytes, a CRC is invalid, or a file changed. COMPACTED: the broker's own cleaner has rewritten the log.
    DELETED: the partition was deleted from the tier. UNREADABLE: the directory cannot be read. EPOCH: this replica does not know the
    leader's epoch yet. BROKER: no leader answered. FENCED: another process leads the partition. STORE: a request to the store failed.
    BUDGET: not enough disk or memory. GENERATION: the upload succeeded, but the output for readers of Pinterest's layout failed.
    BUG: an unexpected exception.
    """

    GAP = "gap"
    LINEAGE = "lineage"
    BEHIND = "behind"
    IDENTITY = "identity"
    CONTENT = "content"
    COMPACTED = "compacted"
    DELETED = "deleted"
    UNREADABLE = "unreadable"
    EPOCH = "epoch"
    BROKER = "broker"
    FENCED = "fenced"
    STORE = "store"
    BUDGET = "budget"
    GENERATION = "generation"
    BUG = "bug"


@dataclass(frozen=True)
class SealedFile:
    """A segment file that its broker no longer writes. By the file names it holds offsets from ``base`` up to ``end``, exclusive.

    size: in bytes. mtime_ms: modification time in milliseconds.
    """

    base: int
    end: int
    size: int
    mtime_ms: int


@dataclass(frozen=True)
class PartitionDirectoryListing:
    """Listing of one partition's directory on the broker.

    mtime_ms: the directory's modification time. looked_ms: when it was listed, in milliseconds. sealed: all segments but the newest,
        ascending.
    active_base: base offset of the newest segment, -1 if there is none. problem: why the directory could not be listed, or an empty string.
    staged: files below the first segment that are staged for deletion, ascending.
    topic_id: topic id in ``partition.metadata``; empty if there is none that can be read.
    """

    name: TopicPartition
    path: str
    mtime_ms: int
    scanned_ms: int
    sealed: tuple[SealedFile, ...] = ()
    active_base: int = -1
    problem: str = ""
    staged: tuple[StagedFile, ...] = ()
    topic_id: TopicId = EMPTY_TOPIC_ID

    @property
    def first_base(self) -> int:
        """Return the base offset of the first segment; -1 if there is none."""
        return self.sealed[0].base if self.sealed else self.active_base


def is_listing_current(listing: PartitionDirectoryListing | None, mtime_ms: int) -> bool:
    """Return whether a listing is still valid because no file was added to the directory or removed from it since.

    :param mtime_ms: the directory's modification time now.
    """
    return listing is not None and not listing.problem and listing.mtime_ms == mtime_ms and mtime_ms + TICK_MS < listing.scanned_ms


@dataclass(frozen=True)
class PartitionUploadState:
    """State of uploading one partition, as the agent remembers it. Times are in milliseconds.

    position: last offset of the tier plus one; None if not known yet. end: the leader's latest answer about its log's end; None before the
    first.
    anew: whether the end of the tier must be read again although no segment seems to wait for upload. checked_ms: time of the leader's
        latest answer.
    failures: failed attempts in a row. trouble and reason: the latest failure. troubled_ms: since when the partition fails, or 0.
    retry_at_ms: earliest time of the next attempt. deadline_ms: see UploadOutcome. leadership: when this broker led, by leader epoch.
    delete_delay_ms: the topic's ``file.delete.delay.ms``. held: staged files that the agent holds open, also deleted ones.
    """

    seen: PartitionDirectoryListing
    leads: bool = False
    position: int | None = None
    end: LogEnd | None = None
    anew: bool = False
    checked_ms: int = 0
    failures: int = 0
    trouble: UploadFailure | None = None
    reason: str = ""
    troubled_ms: int = 0
    retry_at_ms: int = 0
    deadline_ms: int | None = None
    leadership: tuple[LeadershipInterval, ...] = ()
    delete_delay_ms: int = DELETE_DELAY_MS
    held: tuple[StagedFile, ...] = ()

    @property
    def name(self) -> TopicPartition:
        """Return the partition's name."""
        return self.seen.name

    @property
    def pending_segments(self) -> tuple[SealedFile, ...]:
        """Return the segments with offsets after the tier's end: those staged for deletion, then sealed ones. Empty segments are left out,
        because they are uploaded together with a neighbour.
        """
        staged = self.uploadable_staged_files
        files = (*(segment for file, segment in self._staged_files if file in staged), *self.seen.sealed)
        return tuple(file for file in files if file.end > (self.position or 0) and file.size)

    @property
    def uploadable_staged_files(self) -> tuple[StagedFile, ...]:
        """Return the files staged for deletion whose offsets are missing in the tier, except ``skipped_staged_files``."""
        return tuple(
            file for file in self._staged_files_missing_in_tier if self._rename_under_leadership(file) is not RenameEvidence.UNKNOWN
        )

    @property
    def skipped_staged_files(self) -> tuple[StagedFile, ...]:
        """Return the files staged for deletion that are never uploaded although the tier lacks their offsets, because it is unknown whether
        this broker led when it renamed them. Empty as long as the tier's end is not known.
        """
        if not self.leads or self.position is None:
            return ()
        return tuple(file for file in self._staged_files_missing_in_tier if self._rename_under_leadership(file) is RenameEvidence.UNKNOWN)

    @property
    def has_undecided_files(self) -> bool:
        """Return whether a staged file waits for the leader's next answer, which decides whether the file is uploaded."""
        return any(self._rename_under_leadership(file) is RenameEvidence.UNDECIDED for file in self.uploadable_staged_files)

    @property
    def _staged_files(self) -> list[tuple[StagedFile, SealedFile]]:
        """Return the staged files, listed in the directory or held open, each with its segment, which ends where the next one begins."""
        files = sorted({file.inode: file for file in (*self.seen.staged, *self.held)}.values(), key=lambda file: file.base)
        ends = (*(file.base for file in files), self.seen.first_base)[1:]
        return [(file, SealedFile(file.base, end, file.size, file.mtime_ms)) for file, end in zip(files, ends, strict=False)]

    @property
    def _staged_files_missing_in_tier(self) -> tuple[StagedFile, ...]:
        position = self.position or 0
        if 0 <= self.seen.first_base <= position:
            return ()
        return tuple(file for file, segment in self._staged_files if segment.end > position and file.size)

    def _rename_under_leadership(self, file: StagedFile) -> RenameEvidence:
        return rename_evidence(self.leadership, file.changed_ms)


@dataclass(frozen=True)
class UploadLag:
    """Segments that are sealed or staged for deletion, and not in the tier.

    since_ms: when the oldest of them was sealed, in milliseconds; 0 if there is none.
    staged: number of them that are staged for deletion.
    deadline_ms: when the broker deletes the first staged one, in milliseconds; 0 if there is none.
    """

    segments: int
    bytes: int
    since_ms: int
    staged: int = 0
    deadline_ms: int = 0


def upload_lag(watch: PartitionUploadState) -> UploadLag:
    """Return the partition's upload lag; zero if this broker does not lead it, or the tier's end is not known yet."""
    if not watch.leads or watch.position is None:
        return UploadLag(0, 0, 0)
    pending, staged = watch.pending_segments, watch.uploadable_staged_files
    since_ms = min((file.mtime_ms for file in pending), default=0)
    deadline_ms = min(file.changed_ms for file in staged) + watch.delete_delay_ms if staged else 0
    return UploadLag(len(pending), sum(file.size for file in pending), since_ms, len(staged), deadline_ms)


def with_listing(watch: PartitionUploadState | None, listing: PartitionDirectoryListing) -> PartitionUploadState:
    """Return the upload state with a new listing of the partition's directory.

    If the topic id has changed, nothing else is taken over from the old state, because the topic may have been created again. A broker
    writes ``partition.metadata`` after it has created the directory, so that a listing in between has no id.
    """
    if watch is not None and watch.seen.topic_id != listing.topic_id:
        return PartitionUploadState(listing, leads=watch.leads)
    return PartitionUploadState(listing) if watch is None else replace(watch, seen=listing)


def with_leadership(watch: PartitionUploadState, is_leader: bool) -> PartitionUploadState:
    """Return the upload state after the cluster reported who leads the partition.

    If the leadership has changed, the tier's end is read again, because the agent of the former leader may have uploaded meanwhile.

    :param is_leader: whether this broker leads the partition now.
    """
    if watch.leads == is_leader:
        return watch
    if watch.seen.problem:
        return replace(watch, leads=is_leader, position=None, anew=True, leadership=())  # what cannot be listed stays so, whoever leads
    return PartitionUploadState(watch.seen, leads=is_leader)


def needs_log_end(watch: PartitionUploadState, now_ms: int) -> bool:
    """Return whether the leader must be asked where its log ends: before an upload, and every CHECK_MS so that a truncation is noticed."""
    if not watch.leads or now_ms < watch.retry_at_ms:
        return False
    if watch.end is None or now_ms >= watch.checked_ms + CHECK_MS or watch.has_undecided_files:
        return True
    return watch.position is not None and bool(watch.pending_segments) and watch.pending_segments[0].end > watch.end.high_watermark


def has_fresh_log_end(watch: PartitionUploadState, now_ms: int) -> bool:
    """Return whether the leader's latest answer is recent enough to begin an upload."""
    return watch.end is not None and watch.checked_ms <= now_ms < watch.checked_ms + FRESH_MS


def with_log_end(watch: PartitionUploadState, log_end: LogEnd, now_ms: int, answered_ms: int | None = None) -> PartitionUploadState:
    """Return the upload state after a leader's answer about the end of its log.

    If the leader epoch has changed, the tier is read again, because the log may have been truncated.

    :param now_ms: when the question was sent.
    :param answered_ms: when the answer had arrived; None for ``now_ms``.
    """
    anew = watch.anew or (watch.end is not None and watch.end.leader_epoch != log_end.leader_epoch)
    leadership = add_leader_answer(watch.leadership, log_end, now_ms, answered_ms or now_ms) if watch.leads else ()
    known = replace(watch, end=log_end, anew=anew, checked_ms=now_ms, leadership=leadership)
    if known.trouble not in (None, UploadFailure.BEHIND):
        return known
    if known.position is not None and log_end.high_watermark < known.position:
        reason = (
            f"the broker's log ends at offset {log_end.high_watermark}, and the tier has it up to {known.position - 1}: it was truncated, "
            "or the topic was deleted and created again"
        )
        return replace(known, trouble=UploadFailure.BEHIND, reason=reason, troubled_ms=known.troubled_ms or now_ms)
    return replace(known, trouble=None, reason="", troubled_ms=0) if known.trouble is UploadFailure.BEHIND else known


def is_upload_due(watch: PartitionUploadState, now_ms: int, *, accept_truncation: bool = False) -> bool:
    """Return whether an upload may begin: a segment lies entirely below the high watermark, or the tier's end is not known yet.

    An upload is also due for a log of another topic id, because the cluster may say by now that the topic was created again.

    :param accept_truncation: whether a log that ends before the tier's end is due as well, because the tier is then truncated.
    """
    if not watch.leads or watch.end is None or now_ms < watch.retry_at_ms or watch.seen.active_base < 0:
        return False
    if watch.has_undecided_files:
        return False  # what follows it is not taken before it, and no gap is accepted in its place
    if watch.position is None or watch.anew or watch.trouble is UploadFailure.IDENTITY:
        return True
    if watch.trouble is UploadFailure.BEHIND and accept_truncation:
        return True
    return bool(watch.pending_segments) and watch.pending_segments[0].end <= watch.end.high_watermark


def choose_uploads(
    watches: Iterable[PartitionUploadState],
    running: Mapping[TopicPartition, object],
    max_uploads: int,
    now_ms: int,
    *,
    accept_truncation: bool = False,
) -> list[PartitionUploadState]:
    """Return the uploads to start now, one per partition: segments staged for deletion first, then the longest waiting one.

    :param running: partitions that are being uploaded, as keys.
    :param max_uploads: largest number of uploads, including the running ones.
    """
    due = [watch for watch in watches if watch.name not in running and is_upload_due(watch, now_ms, accept_truncation=accept_truncation)]
    due.sort(
        key=lambda watch: (
            not watch.uploadable_staged_files,
            watch.pending_segments[0].mtime_ms if watch.pending_segments else now_ms,
            watch.name,
        )
    )
    return due[: max(0, max_uploads - len(running))]


@dataclass(frozen=True)
class UploadOutcome:
    """Result of an upload.

    position: last offset of the tier plus one; None if unknown. segments and bytes: uploaded, also if a later step failed.
    trouble and reason: the failure, if any. notes: lines for the log. stopped: whether the upload was interrupted because the agent stops.
    deadline_ms: when retention deletes the first segment that waits for adoption of its topic, in milliseconds; None if unknown.
    """

    position: int | None
    segments: int = 0
    bytes: int = 0
    trouble: UploadFailure | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    stopped: bool = False
    deadline_ms: int | None = None


def after_upload(watch: PartitionUploadState, outcome: UploadOutcome, now_ms: int) -> PartitionUploadState:
    """Return the upload state after an upload: its position or failure, and when the next attempt may begin."""
    position = watch.position if outcome.position is None else outcome.position
    if outcome.stopped:
        return watch
    if outcome.trouble is not None:
        failures = watch.failures + 1
        later = now_ms + backoff_ms(failures, UPLOAD_RETRY_MS, MAX_UPLOAD_RETRY_MS)
        return replace(
            watch,
            position=position,
            anew=watch.anew or outcome.trouble is UploadFailure.GENERATION,
            failures=failures,
            trouble=outcome.trouble,
            reason=outcome.reason,
            troubled_ms=watch.troubled_ms or now_ms,
            retry_at_ms=later,
            deadline_ms=outcome.deadline_ms,
        )
    # Something pending that did not come in is not tried without a pause: a file that vanished meanwhile, an end that is empty.
    stands = position == watch.position and bool(watch.pending_segments)
    return replace(
        watch,
        position=position,
        anew=False,
        failures=0,
        trouble=None,
        reason="",
        troubled_ms=0,
        retry_at_ms=now_ms + CHECK_MS if stands else 0,
        deadline_ms=None,
    )


def adoption_log_line(watches: Iterable[PartitionUploadState]) -> str | None:
    """Return a log line that names every partition whose topic a person must adopt before it can be uploaded, the nearest deadline first;
    empty if there is none. None while an upload was not tried yet for every partition that this broker leads.
    """
    led_here = [watch for watch in watches if watch.leads]
    if not led_here or any(watch.position is None and watch.trouble is None for watch in led_here):
        return None
    waiting = [watch for watch in led_here if watch.trouble is UploadFailure.IDENTITY]
    waiting.sort(key=lambda watch: (watch.deadline_ms is None, watch.deadline_ms, watch.name))
    named = (f"{watch.name}" + (f" (until {format_iso_time(watch.deadline_ms)})" if watch.deadline_ms else "") for watch in waiting)
    return f"waiting for `topics adopt`, before retention deletes what is not uploaded: {', '.join(named)}" if waiting else ""


def retention_deadline_ms(watch: PartitionUploadState, largest_timestamp_ms: int, retention_ms: int) -> int | None:
    """Return when the broker's retention deletes the first segment that is not in the tier, in milliseconds; None if there is none, or
    nothing expires.

    :param largest_timestamp_ms: largest timestamp of that segment; negative if unknown. Its modification time counts then, as in Kafka.
    :param retention_ms: the topic's ``retention.ms``; negative for unlimited.
    """
    if retention_ms < 0 or not watch.pending_segments:
        return None
    return (largest_timestamp_ms if largest_timestamp_ms >= 0 else watch.pending_segments[0].mtime_ms) + retention_ms
