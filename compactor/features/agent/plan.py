"""Choice of the agent's next uploads. Pure.

1. ``PartitionDirectoryListing``: the latest listing of a partition's directory.
2. ``PartitionUploadState``: that listing, who leads, where the tier ends, and the latest failure.
3. ``choose_uploads``: the uploads to start now: segments that are sealed (not the newest), entirely below the high watermark, and not in
   the tier yet. The end of the tier comes from the control log, never from a file's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path

from compactor.adapters.brokers.chain import LeaderReportedLogEnd
from compactor.config.times import format_iso_time
from compactor.constants import EMPTY_TOPIC_ID, LeaderEpoch, TopicId
from compactor.errors import BadData
from compactor.features.imports.log_directory import staged_segment_path
from compactor.features.imports.staged_files import FileStagedForDeletion
from compactor.model.ids import TopicPartition
from compactor.service import backoff_ms

FRESH_MS = 2_000
"""Largest age of a leader's answer about the end of its log when an upload begins. The answer carries the leader epoch, and what was
committed in that epoch stays committed.
"""
CHECK_MS = 60_000
"""How often brokers are asked who leads and where logs end although no segment waits for upload."""
UPLOAD_RETRY_MS = 5_000
MAX_UPLOAD_RETRY_MS = 600_000
"""Longest delay before a failed partition is retried. The delay begins with UPLOAD_RETRY_MS and doubles with every failure."""
DELETE_DELAY_MS = 60_000
"""Kafka's default for ``file.delete.delay.ms``, the time between the renaming of a file and its deletion."""


class UploadFailureReason(StrEnum):
    """Reason why a partition is not uploaded.

    GAP: retention deleted segments that were not uploaded yet. LINEAGE: the leader epochs of log and tier do not match. BEHIND: the log
        ends before the tier. IDENTITY: the log has another topic id than the tier. CONTENT: the tier has other bytes, a CRC is invalid, or
        a file changed. COMPACTED: a log cleaner has rewritten the log. DELETED: the partition was deleted from the tier. EPOCH: this
        replica does not know the leader's epoch yet. FENCED: another process leads the partition. BUDGET: not enough disk or memory.
        GENERATION: the upload succeeded, the output for readers of Pinterest's layout failed.
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
class SealedSegmentFile:
    """Segment file to which its broker no longer writes. base, end: first offset, and offset after the last one, both from file names."""

    base: int
    end: int
    size: int
    mtime_ms: int


@dataclass(frozen=True)
class PartitionDirectoryListing:
    """Listing of one partition's directory.

    sealed: all segments but the newest, ascending.
    active_base: -1 if there is no segment.
    problem: empty if the directory could be listed.
    staged: files below the first segment that are staged for deletion, ascending.
    topic_id: in ``partition.metadata``; empty if unreadable.
    """

    partition: TopicPartition
    path: str
    mtime_ms: int
    scanned_ms: int
    sealed: tuple[SealedSegmentFile, ...] = ()
    active_base: int = -1
    problem: str = ""
    staged: tuple[FileStagedForDeletion, ...] = ()
    topic_id: TopicId = EMPTY_TOPIC_ID

    @property
    def first_base_offset(self) -> int:
        return self.sealed[0].base if self.sealed else self.active_base


def is_listing_current(listing: PartitionDirectoryListing | None, mtime_ms: int) -> bool:
    """Return whether no file was added to the directory or removed since. mtime_ms: the directory's, now."""
    return listing is not None and not listing.problem and listing.mtime_ms == mtime_ms and mtime_ms + TICK_MS < listing.scanned_ms


@dataclass(frozen=True)
class PartitionUploadState:
    """State of one partition's upload.

    position: last offset of the tier plus one.
    end: the leader's latest report, at ``checked_ms``.
    anew: whether the end of the tier must be read again although no segment seems to wait.
    trouble, reason: the latest of ``failures`` in a row, which began at ``troubled_ms`` (0: none).
    deadline_ms: if the upload waits for ``topics adopt``, when retention deletes the first segment that is not in the tier.
    held: files staged for deletion that the agent holds open, even if the broker has deleted them.
    """

    seen: PartitionDirectoryListing
    leads: bool = False
    position: int | None = None
    end: LeaderReportedLogEnd | None = None
    anew: bool = False
    checked_ms: int = 0
    failures: int = 0
    trouble: UploadFailureReason | None = None
    reason: str = ""
    troubled_ms: int = 0
    retry_at_ms: int = 0
    deadline_ms: int | None = None
    leadership: tuple[LeadershipInterval, ...] = ()
    delete_delay_ms: int = DELETE_DELAY_MS
    held: tuple[FileStagedForDeletion, ...] = ()

    @property
    def partition(self) -> TopicPartition:
        return self.seen.partition

    @property
    def segments_pending_upload(self) -> tuple[SealedSegmentFile, ...]:
        """Staged ones first. Empty ones are uploaded together with a neighbour."""
        staged = self.uploadable_staged_files
        files = (*(segment for file, segment in self._staged_ranges if file in staged), *self.seen.sealed)
        return tuple(file for file in files if file.end > (self.position or 0) and file.size)

    @property
    def uploadable_staged_files(self) -> tuple[FileStagedForDeletion, ...]:
        """Staged files whose offsets are missing in the tier, if this broker led at their renaming or may have."""
        return tuple(
            file for file in self._staged_missing if self._leadership_at_deletion_rename(file) is not LeadershipAtDeletionRename.UNKNOWN
        )

    @property
    def unproven_staged_files(self) -> tuple[FileStagedForDeletion, ...]:
        """Staged files that are never uploaded, because it is unknown whether this broker led at their renaming."""
        if not self.leads or self.position is None:
            return ()
        return tuple(
            file for file in self._staged_missing if self._leadership_at_deletion_rename(file) is LeadershipAtDeletionRename.UNKNOWN
        )

    @property
    def awaits_leader_answer(self) -> bool:
        return any(
            self._leadership_at_deletion_rename(file) is LeadershipAtDeletionRename.UNDECIDED for file in self.uploadable_staged_files
        )

    @property
    def _staged_ranges(self) -> list[tuple[FileStagedForDeletion, SealedSegmentFile]]:
        # Return the listed or held files, ascending, each with its offsets: from its base offset to the next file's, exclusive.
        files = sorted({file.inode: file for file in (*self.seen.staged, *self.held)}.values(), key=lambda file: file.base)
        ends = (*(file.base for file in files), self.seen.first_base_offset)[1:]
        return [(file, SealedSegmentFile(file.base, end, file.size, file.mtime_ms)) for file, end in zip(files, ends, strict=False)]

    @property
    def _staged_missing(self) -> tuple[FileStagedForDeletion, ...]:
        position = self.position or 0
        if 0 <= self.seen.first_base_offset <= position:
            return ()
        return tuple(file for file, segment in self._staged_ranges if segment.end > position and file.size)

    def _leadership_at_deletion_rename(self, file: FileStagedForDeletion) -> LeadershipAtDeletionRename:
        return leadership_at_deletion_rename(self.leadership, file.changed_ms)


@dataclass(frozen=True)
class UploadLag:
    """Segments that are sealed or staged for deletion, and not in the tier.

    since_ms: when the oldest was sealed; 0 if there is none.
    staged: how many are staged for deletion; the broker deletes the first at ``deadline_ms`` (0: none).
    """

    segments: int
    bytes: int
    since_ms: int
    staged: int = 0
    deadline_ms: int = 0


def upload_lag(upload_state: PartitionUploadState) -> UploadLag:
    """Zero if this broker does not lead the partition, or the tier's end is not known yet."""
    if not upload_state.leads or upload_state.position is None:
        return UploadLag(0, 0, 0)
    pending, staged = upload_state.segments_pending_upload, upload_state.uploadable_staged_files
    since_ms = min((file.mtime_ms for file in pending), default=0)
    deadline_ms = min(file.changed_ms for file in staged) + upload_state.delete_delay_ms if staged else 0
    return UploadLag(len(pending), sum(file.size for file in pending), since_ms, len(staged), deadline_ms)


def with_directory_listing(upload_state: PartitionUploadState | None, listing: PartitionDirectoryListing) -> PartitionUploadState:
    """A new topic id may mean a new topic (or that the broker has just written ``partition.metadata``): only listing and leadership are
    kept.
    """
    if upload_state is not None and upload_state.seen.topic_id != listing.topic_id:
        return PartitionUploadState(listing, leads=upload_state.leads)
    return PartitionUploadState(listing) if upload_state is None else replace(upload_state, seen=listing)


def with_leadership(upload_state: PartitionUploadState, is_leader: bool) -> PartitionUploadState:
    """After a change only the listing is kept: the former leader's agent may have uploaded meanwhile."""
    if upload_state.leads == is_leader:
        return upload_state
    if upload_state.seen.problem:
        return replace(
            upload_state, leads=is_leader, position=None, anew=True, leadership=()
        )  # what cannot be listed stays so, whoever leads
    return PartitionUploadState(upload_state.seen, leads=is_leader)


def needs_log_end_query(upload_state: PartitionUploadState, now_ms: int) -> bool:
    """Before an upload, and every CHECK_MS, so that a truncation is noticed."""
    if not upload_state.leads or now_ms < upload_state.retry_at_ms:
        return False
    if upload_state.end is None or now_ms >= upload_state.checked_ms + CHECK_MS or upload_state.awaits_leader_answer:
        return True
    return (
        upload_state.position is not None
        and bool(upload_state.segments_pending_upload)
        and upload_state.segments_pending_upload[0].end > upload_state.end.high_watermark
    )


def has_fresh_log_end(upload_state: PartitionUploadState, now_ms: int) -> bool:
    return upload_state.end is not None and upload_state.checked_ms <= now_ms < upload_state.checked_ms + FRESH_MS


def with_log_end(
    upload_state: PartitionUploadState, log_end: LeaderReportedLogEnd, now_ms: int, answered_ms: int | None = None
) -> PartitionUploadState:
    """Upload state after a leader's answer to a question sent at ``now_ms``. After a new leader epoch the tier is read again, because the
    log may have been truncated.
    """
    anew = upload_state.anew or (upload_state.end is not None and upload_state.end.leader_epoch != log_end.leader_epoch)
    leadership = with_answer_added(upload_state.leadership, log_end, now_ms, answered_ms or now_ms) if upload_state.leads else ()
    known = replace(upload_state, end=log_end, anew=anew, checked_ms=now_ms, leadership=leadership)
    if known.trouble not in (None, UploadFailureReason.BEHIND):
        return known
    if known.position is not None and log_end.high_watermark < known.position:
        reason = (
            f"the broker's log ends at offset {log_end.high_watermark}, and the tier has it up to {known.position - 1}: it was truncated, "
            "or the topic was deleted and created again"
        )
        return replace(known, trouble=UploadFailureReason.BEHIND, reason=reason, troubled_ms=known.troubled_ms or now_ms)
    return replace(known, trouble=None, reason="", troubled_ms=0) if known.trouble is UploadFailureReason.BEHIND else known


def is_upload_due(upload_state: PartitionUploadState, now_ms: int, *, accept_truncation: bool = False) -> bool:
    """Return whether a segment lies entirely below the high watermark, the tier's end is not known yet, or the log's topic id is not the
    tier's (the cluster is asked again).

    :param accept_truncation: also if the log ends before the tier does. The upload then truncates the tier.
    """
    if not upload_state.leads or upload_state.end is None or now_ms < upload_state.retry_at_ms or upload_state.seen.active_base < 0:
        return False
    if upload_state.awaits_leader_answer:
        return False  # what follows it is not taken before it, and no gap is accepted in its place
    if upload_state.position is None or upload_state.anew or upload_state.trouble is UploadFailureReason.IDENTITY:
        return True
    if upload_state.trouble is UploadFailureReason.BEHIND and accept_truncation:
        return True
    return bool(upload_state.segments_pending_upload) and upload_state.segments_pending_upload[0].end <= upload_state.end.high_watermark


def choose_uploads(
    upload_states: Iterable[PartitionUploadState],
    running: Mapping[TopicPartition, object],
    max_uploads: int,
    now_ms: int,
    *,
    accept_truncation: bool = False,
) -> list[PartitionUploadState]:
    """Uploads to start, with the running ones at most ``max_uploads``: partitions with staged files, then those whose first waiting segment
    is oldest.
    """
    due = [
        upload_state
        for upload_state in upload_states
        if upload_state.partition not in running and is_upload_due(upload_state, now_ms, accept_truncation=accept_truncation)
    ]
    due.sort(
        key=lambda upload_state: (
            not upload_state.uploadable_staged_files,
            upload_state.segments_pending_upload[0].mtime_ms if upload_state.segments_pending_upload else now_ms,
            upload_state.partition,
        )
    )
    return due[: max(0, max_uploads - len(running))]


@dataclass(frozen=True)
class UploadOutcome:
    """Result of an upload.

    position: last offset of the tier plus one; None if unknown.
    segments, bytes: uploaded, even if a later step failed.
    """

    position: int | None
    segments: int = 0
    bytes: int = 0
    trouble: UploadFailureReason | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    stopped: bool = False
    deadline_ms: int | None = None


def with_upload_outcome(upload_state: PartitionUploadState, outcome: UploadOutcome, now_ms: int) -> PartitionUploadState:
    """A stopped upload changes nothing. Else the state includes the time of the next attempt."""
    position = upload_state.position if outcome.position is None else outcome.position
    if outcome.stopped:
        return upload_state
    if outcome.trouble is not None:
        failures = upload_state.failures + 1
        later = now_ms + backoff_ms(failures, UPLOAD_RETRY_MS, MAX_UPLOAD_RETRY_MS)
        return replace(
            upload_state,
            position=position,
            anew=upload_state.anew or outcome.trouble is UploadFailureReason.GENERATION,
            failures=failures,
            trouble=outcome.trouble,
            reason=outcome.reason,
            troubled_ms=upload_state.troubled_ms or now_ms,
            retry_at_ms=later,
            deadline_ms=outcome.deadline_ms,
        )
    # Something pending that did not come in is not tried without a pause: a file that vanished meanwhile, an end that is empty.
    stands = position == upload_state.position and bool(upload_state.segments_pending_upload)
    return replace(
        upload_state,
        position=position,
        anew=False,
        failures=0,
        trouble=None,
        reason="",
        troubled_ms=0,
        retry_at_ms=now_ms + CHECK_MS if stands else 0,
        deadline_ms=None,
    )


def adoption_log_line(upload_states: Iterable[PartitionUploadState]) -> str | None:
    """Log line of the partitions that wait for ``topics adopt``, the nearest deadline first. Empty if there is none; None as long as some
    led partition was not tried yet.
    """
    led_here = [upload_state for upload_state in upload_states if upload_state.leads]
    if not led_here or any(upload_state.position is None and upload_state.trouble is None for upload_state in led_here):
        return None
    waiting = [upload_state for upload_state in led_here if upload_state.trouble is UploadFailureReason.IDENTITY]
    waiting.sort(key=lambda upload_state: (upload_state.deadline_ms is None, upload_state.deadline_ms, upload_state.partition))
    named = (
        f"{upload_state.partition}" + (f" (until {format_iso_time(upload_state.deadline_ms)})" if upload_state.deadline_ms else "")
        for upload_state in waiting
    )
    return f"waiting for `topics adopt`, before retention deletes what is not uploaded: {', '.join(named)}" if waiting else ""


def retention_deadline_ms(upload_state: PartitionUploadState, largest_timestamp_ms: int, retention_ms: int) -> int | None:
    """Time of deletion; None if never. If ``largest_timestamp_ms`` is negative, the file's modification time counts, as in Kafka."""
    if retention_ms < 0 or not upload_state.segments_pending_upload:
        return None
    return (largest_timestamp_ms if largest_timestamp_ms >= 0 else upload_state.segments_pending_upload[0].mtime_ms) + retention_ms


# A truncation stages files of the same kind as retention, and a leader never truncates its log. Therefore a staged file is taken only if
# this broker led the partition in one and the same leader epoch before and after the renaming.


TICK_MS = 2_000
"""Resolution of file system clocks: a file or directory may have changed this long after the time that it shows."""
MAX_INTERVALS = 8
"""Number of leader epochs that are remembered of a partition; an older one no longer decides about a file."""


@dataclass(frozen=True)
class LeadershipInterval:
    """Period in which this broker was certainly the leader, in one leader epoch: from the arrival of its first answer to the sending of the
    latest request.
    """

    leader_epoch: LeaderEpoch
    from_ms: int
    until_ms: int


class LeadershipAtDeletionRename(Enum):
    """Leadership of this broker, in one leader epoch, before and after it renamed a file for deletion.

    UNDECIDED: it led before the rename, and the leader has not been asked since.
    UNKNOWN: it is not known to have led before the rename.
    """

    SAME_EPOCH = "same epoch"
    UNDECIDED = "undecided"
    UNKNOWN = "unknown"


def with_answer_added(
    intervals: tuple[LeadershipInterval, ...], log_end: LeaderReportedLogEnd, asked_ms: int, answered_ms: int
) -> tuple[LeadershipInterval, ...]:
    """Intervals after one more answer of this broker as leader; none if it has no leader epoch. After a clock was set back a new
    interval begins, because times before cannot be compared.
    """
    if log_end.leader_epoch < 0:
        return ()
    latest = intervals[-1] if intervals else None
    if latest is not None and latest.leader_epoch == log_end.leader_epoch and latest.until_ms <= asked_ms:
        return (*intervals[:-1], replace(latest, until_ms=asked_ms))
    return (*intervals, LeadershipInterval(log_end.leader_epoch, answered_ms, asked_ms))[-MAX_INTERVALS:]


def leadership_at_deletion_rename(intervals: Sequence[LeadershipInterval], renamed_ms: int) -> LeadershipAtDeletionRename:
    """An answer that arrived in the millisecond of the rename counts as later."""
    if any(each.from_ms < renamed_ms and renamed_ms + TICK_MS <= each.until_ms for each in intervals):
        return LeadershipAtDeletionRename.SAME_EPOCH
    if intervals and intervals[-1].from_ms < renamed_ms:
        return LeadershipAtDeletionRename.UNDECIDED
    return LeadershipAtDeletionRename.UNKNOWN


def leadership_check(intervals: Sequence[LeadershipInterval]) -> Callable[[FileStagedForDeletion], str]:
    """Return a function that returns why the agent must not upload a staged file (empty: it may), and raises BadData if that is not decided
    yet.
    """

    def upload_refusal_reason(file: FileStagedForDeletion) -> str:
        evidence = leadership_at_deletion_rename(intervals, file.changed_ms)
        if evidence is LeadershipAtDeletionRename.UNDECIDED:
            cause = "it was staged for deletion a moment ago, and the leader's epoch is not confirmed since"
            raise BadData(cause, segment=staged_segment_path(Path(), file.base).name, hint="It is tried again")
        return "" if evidence is LeadershipAtDeletionRename.SAME_EPOCH else unknown_leadership_message(file)

    return upload_refusal_reason


def unknown_leadership_message(file: FileStagedForDeletion) -> str:
    return (
        f"it is not known that this broker led the partition in one leader epoch before and after "
        f"{format_iso_time(file.changed_ms)}, when the file was renamed: "
        "a truncation may have removed it. `import --live` takes it if the other conditions hold"
    )
