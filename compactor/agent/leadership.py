"""Leadership of the agent's broker over time, and what it tells of files staged for deletion, as pure functions over frozen values.

A truncation stages files of the same kind as retention. A leader never truncates its log. So the agent takes a staged file only if its
broker led the partition in one and the same leader epoch before and after the file was renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from compactor.brokers.metadata_topic.leaders import LeaderReportedLogEnd
from compactor.constants import LeaderEpoch
from compactor.errors import BadData
from compactor.model.base import ReasonOrEmpty
from compactor.transfer.log_directory import path_of_segment_staged_for_deletion
from compactor.transfer.staged_file_rules import FileStagedForDeletion
from compactor.views.time_formats import format_iso_time

TICK_MS = 2_000
"""Resolution of file system clocks: a file or directory may have changed this long after the time that it shows."""
MAX_INTERVALS = 8
"""Number of leader epochs that are remembered of a partition; an older one no longer decides about a file."""


@dataclass(frozen=True)
class LeadershipInterval:
    """Period in which this broker was certainly the leader of a partition, in one leader epoch. It is derived from leaders' answers to
    requests. Times are in milliseconds.

    from_ms: when the first answer with this epoch arrived.
    until_ms: when the latest request whose answer has this epoch was sent.
    """

    leader_epoch: LeaderEpoch
    from_ms: int
    until_ms: int


class LeadershipAtDeletionRename(Enum):
    """Answer to the question whether this broker led a partition, in one leader epoch, before and after it renamed a file for deletion.

    SAME_EPOCH: it did.
    UNDECIDED: it led before the rename, and the leader has not been asked since.
    UNKNOWN: it is not known to have led before the rename.
    """

    SAME_EPOCH = "same epoch"
    UNDECIDED = "undecided"
    UNKNOWN = "unknown"


def leadership_intervals_with_answer_added(
    intervals: tuple[LeadershipInterval, ...], log_end: LeaderReportedLogEnd, asked_ms: int, answered_ms: int
) -> tuple[LeadershipInterval, ...]:
    """Return the intervals of leadership after one more answer of the leader, which is this broker. If the answer has no leader epoch, no
    interval remains.

    If the clock was set back, a new interval begins, because times before and after that cannot be compared.

    :param log_end: the answer.
    :param asked_ms: when the request was sent, in milliseconds.
    :param answered_ms: when the answer arrived, in milliseconds.
    """
    if log_end.leader_epoch < 0:
        return ()
    latest = intervals[-1] if intervals else None
    if latest is not None and latest.leader_epoch == log_end.leader_epoch and latest.until_ms <= asked_ms:
        return (*intervals[:-1], replace(latest, until_ms=asked_ms))
    return (*intervals, LeadershipInterval(log_end.leader_epoch, answered_ms, asked_ms))[-MAX_INTERVALS:]


def leadership_at_deletion_rename(intervals: Sequence[LeadershipInterval], renamed_ms: int) -> LeadershipAtDeletionRename:
    """Return whether this broker is known to have led the partition, in one leader epoch, before and after it renamed a file for deletion.
    An answer of the leader that arrived in the millisecond of the rename counts as later than the rename.

    :param renamed_ms: time of the rename: the file's change time, in milliseconds.
    """
    if any(each.from_ms < renamed_ms and renamed_ms + TICK_MS <= each.until_ms for each in intervals):
        return LeadershipAtDeletionRename.SAME_EPOCH
    if intervals and intervals[-1].from_ms < renamed_ms:
        return LeadershipAtDeletionRename.UNDECIDED
    return LeadershipAtDeletionRename.UNKNOWN


def make_upload_refusal_check_by_leadership(intervals: Sequence[LeadershipInterval]) -> Callable[[FileStagedForDeletion], ReasonOrEmpty]:
    """Return a function that takes a staged file and returns why the agent must not upload it, or an empty string.

    The function raises BadData for a file about which this is not decided yet, so that the upload is tried again.
    """

    def upload_refusal_reason(file: FileStagedForDeletion) -> ReasonOrEmpty:
        evidence = leadership_at_deletion_rename(intervals, file.changed_ms)
        if evidence is LeadershipAtDeletionRename.UNDECIDED:
            cause = "it was staged for deletion a moment ago, and the leader's epoch is not confirmed since"
            raise BadData(cause, segment=path_of_segment_staged_for_deletion(Path(), file.base).name, hint="It is tried again")
        return "" if evidence is LeadershipAtDeletionRename.SAME_EPOCH else unknown_leadership_message(file)

    return upload_refusal_reason


def unknown_leadership_message(file: FileStagedForDeletion) -> str:
    """Return the message for a staged file that is not uploaded because it cannot be known whether this broker led when it renamed the
    file.
    """
    return (
        f"it is not known that this broker led the partition in one leader epoch before and after "
        f"{format_iso_time(file.changed_ms)}, when the file was renamed: "
        "a truncation may have removed it. `import --live` takes it if the other conditions hold"
    )
