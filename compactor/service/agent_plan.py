"""What the agent uploads next, as pure functions over frozen values: no store, no broker, no clock, no threads.

    SeenDirectory   one look at a partition's directory
    UploadWatch     what the agent remembers of the partition: that look, who leads, where the tier ends, what went wrong
    choose          the uploads to begin now

A segment is uploaded once it is sealed (not the newest), wholly below the high watermark, and not in the tier yet. The position is what
the control log has, never a file's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from compactor.metadata_topic.leaders import LogEnd
from compactor.model.ids import TopicPartition
from compactor.service.scheduling import backoff_ms

FRESH_MS = 2_000
"""So old may be what a leader said of its log's end when an upload begins. It asks for the epoch, and what was committed in it stays so."""
CHECK_MS = 60_000
"""So often brokers are asked who leads and where logs end, though there is nothing to upload."""
RETRY_MS = 5_000
MOST_RETRY_MS = 600_000
"""A partition that fails is tried again after RETRY_MS, doubled with every failure up to this."""
TICK_MS = 2_000
"""A directory's modification time may stand still for so long while it changes: clocks of file systems are coarse."""


class Trouble(StrEnum):
    """Why a partition is not uploaded; the label of metrics.

    GAP: retention overtook the upload. LINEAGE: leader epochs disown what the tier has, or the reverse. BEHIND: the broker's log ends
    below the tier. CONTENT: other bytes, a wrong CRC, a file that changed. COMPACTED: the broker's own cleaner was there first.
    DELETED: somebody took the partition out of the tier. EPOCH: this directory does not know of the leader's epoch yet. GENERATION: the
    tier has it, and readers of Pinterest's layout do not yet.
    """

    GAP = "gap"
    LINEAGE = "lineage"
    BEHIND = "behind"
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
    """A segment that its broker does not write any more, by the names: it holds offsets from ``base`` to below ``end``."""

    base: int
    end: int
    size: int
    mtime_ms: int


@dataclass(frozen=True)
class SeenDirectory:
    """``active_base``: of the newest segment, -1 where there is none. ``problem``: why it could not be listed."""

    name: TopicPartition
    path: str
    mtime_ms: int
    looked_ms: int
    sealed: tuple[SealedFile, ...] = ()
    active_base: int = -1
    problem: str = ""

    @property
    def first_base(self) -> int:
        return self.sealed[0].base if self.sealed else self.active_base


def is_current(seen: SeenDirectory | None, mtime_ms: int) -> bool:
    """Whether the listing still holds: no name in the directory came or went since."""
    return seen is not None and not seen.problem and seen.mtime_ms == mtime_ms and mtime_ms + TICK_MS < seen.looked_ms


@dataclass(frozen=True)
class UploadWatch:
    """``position``: the tier's last offset + 1, None where it is not known yet. ``end``: None where no leader has answered yet.

    ``anew``: the tier is to be looked at though nothing seems to be pending. ``troubled_ms``: since when there is ``trouble``, or 0.
    """

    seen: SeenDirectory
    leads: bool = False
    position: int | None = None
    end: LogEnd | None = None
    anew: bool = False
    checked_ms: int = 0
    failures: int = 0
    trouble: Trouble | None = None
    reason: str = ""
    troubled_ms: int = 0
    retry_at_ms: int = 0

    @property
    def name(self) -> TopicPartition:
        return self.seen.name

    @property
    def pending(self) -> tuple[SealedFile, ...]:
        """Sealed segments that reach beyond the tier's end. Empty ones join a neighbour."""
        position = self.position or 0
        return tuple(file for file in self.seen.sealed if file.end > position and file.size)


@dataclass(frozen=True)
class Lag:
    """What is sealed and not in the tier. ``since_ms``: when the oldest of it was sealed, 0 where there is nothing."""

    segments: int
    bytes: int
    since_ms: int


def lag(watch: UploadWatch) -> Lag:
    """Nothing where this broker does not lead, or nobody knows yet where the tier ends."""
    if not watch.leads or watch.position is None:
        return Lag(0, 0, 0)
    pending = watch.pending
    return Lag(len(pending), sum(file.size for file in pending), min((file.mtime_ms for file in pending), default=0))


def found(watch: UploadWatch | None, seen: SeenDirectory) -> UploadWatch:
    """After a look at the directory."""
    return UploadWatch(seen) if watch is None else replace(watch, seen=seen)


def led(watch: UploadWatch, leads: bool) -> UploadWatch:
    """After cluster metadata. Who has led meanwhile may have uploaded: where the tier ends is asked anew."""
    if watch.leads == leads:
        return watch
    if watch.seen.problem:
        return replace(watch, leads=leads, position=None, anew=True)  # what cannot be listed stays so, whoever leads
    return UploadWatch(watch.seen, leads=leads)


def wants_end(watch: UploadWatch, now_ms: int) -> bool:
    """Whether the leader is to be asked where its log ends: for an upload, and now and then because a truncation is to be seen."""
    if not watch.leads or now_ms < watch.retry_at_ms:
        return False
    if watch.end is None or now_ms >= watch.checked_ms + CHECK_MS:
        return True
    return watch.position is not None and bool(watch.pending) and watch.pending[0].end > watch.end.high_watermark


def is_fresh(watch: UploadWatch, now_ms: int) -> bool:
    """Whether the leader's answer is good enough to begin an upload with."""
    return watch.end is not None and watch.checked_ms <= now_ms < watch.checked_ms + FRESH_MS


def answered(watch: UploadWatch, end: LogEnd, now_ms: int) -> UploadWatch:
    """After a leader's answer. In a new epoch the tier is looked at anew: the log may have been truncated."""
    anew = watch.anew or (watch.end is not None and watch.end.leader_epoch != end.leader_epoch)
    known = replace(watch, end=end, anew=anew, checked_ms=now_ms)
    if known.trouble not in (None, Trouble.BEHIND):
        return known
    if known.position is not None and end.high_watermark < known.position:
        reason = (
            f"the broker's log ends at offset {end.high_watermark}, and the tier has it up to {known.position - 1}: it was truncated, "
            "or the topic was made anew under its old name"
        )
        return replace(known, trouble=Trouble.BEHIND, reason=reason, troubled_ms=known.troubled_ms or now_ms)
    return replace(known, trouble=None, reason="", troubled_ms=0) if known.trouble is Trouble.BEHIND else known


def is_due(watch: UploadWatch, now_ms: int, *, accept_truncation: bool = False) -> bool:
    """Whether an upload may begin: something is wholly below the high watermark, or nobody knows yet where the tier ends.

    ``accept_truncation``: where the log ends below the tier, there is something to do as well.
    """
    if not watch.leads or watch.end is None or now_ms < watch.retry_at_ms or watch.seen.active_base < 0:
        return False
    if watch.position is None or watch.anew or (watch.trouble is Trouble.BEHIND and accept_truncation):
        return True
    return bool(watch.pending) and watch.pending[0].end <= watch.end.high_watermark


def choose(
    watches: Iterable[UploadWatch],
    running: Mapping[TopicPartition, object],
    most: int,
    now_ms: int,
    *,
    accept_truncation: bool = False,
) -> list[UploadWatch]:
    """The uploads to begin now: at most ``most`` at once, one a partition, what was sealed first before the others."""
    due = [watch for watch in watches if watch.name not in running and is_due(watch, now_ms, accept_truncation=accept_truncation)]
    due.sort(key=lambda watch: (watch.pending[0].mtime_ms if watch.pending else now_ms, watch.name))
    return due[: max(0, most - len(running))]


@dataclass(frozen=True)
class UploadOutcome:
    """How an upload ended. ``position``: where the tier ends now, None where that is not known. Of a failure ``trouble`` and ``reason``.

    ``segments`` and ``bytes`` are in the tier, also where something failed behind them.
    """

    position: int | None
    segments: int = 0
    bytes: int = 0
    trouble: Trouble | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    stopped: bool = False


def finished(watch: UploadWatch, outcome: UploadOutcome, now_ms: int) -> UploadWatch:
    """After an upload: when the next one may begin."""
    position = watch.position if outcome.position is None else outcome.position
    if outcome.stopped:
        return watch
    if outcome.trouble is not None:
        failures = watch.failures + 1
        later = now_ms + backoff_ms(failures, RETRY_MS, MOST_RETRY_MS)
        return replace(
            watch,
            position=position,
            anew=watch.anew or outcome.trouble is Trouble.GENERATION,
            failures=failures,
            trouble=outcome.trouble,
            reason=outcome.reason,
            troubled_ms=watch.troubled_ms or now_ms,
            retry_at_ms=later,
        )
    # Something pending that did not come in is not tried without a pause: a file that vanished meanwhile, an end that is empty.
    stands = position == watch.position and bool(watch.pending)
    return replace(
        watch,
        position=position,
        anew=False,
        failures=0,
        trouble=None,
        reason="",
        troubled_ms=0,
        retry_at_ms=now_ms + CHECK_MS if stands else 0,
    )


def cleaned_too_far(position: int, cleaner_offset: int | None) -> bool:
    """Whether the broker's cleaner has passed where the tier ends: a tombstone that it dropped there would bring its key back.

    An empty tier has nothing that could come back.
    """
    return position > 0 and cleaner_offset is not None and cleaner_offset > position
