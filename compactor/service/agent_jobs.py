"""One upload: what a thread of the agent does with one partition. Effects only; what to upload is agent_plan's business."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.lineage import epoch_at
from compactor.bootstrap import Tier
from compactor.config import Cleaner
from compactor.control.logs import PartitionLog
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError, Fenced, OutOfBudget, StoreError, UsageError
from compactor.local.budget import Budget
from compactor.model.ids import TopicPartition
from compactor.round.compaction import disk_budget
from compactor.service.agent_files import CLEANED, EPOCHS, cleaner_offset, last_epoch
from compactor.service.agent_plan import SeenDirectory, Trouble, UploadOutcome, UploadWatch, cleaned_too_far
from compactor.service.jobs import Interruptible, Stop, Stopped
from compactor.transfer.generations import Writing, target_of, write_generation
from compactor.transfer.import_ import Company, ImportOptions, ImportProgress, ImportReport, import_directory
from compactor.transfer.log_directory import given_lineage
from compactor.transfer.seam import parting
from compactor.transfer.truncation import accept_truncation


class Uploads:
    """What the uploads of one process share: its access to the tier, one catalog log, and room for one large import at a time.

    An upload may be called from several threads, for different partitions. Nothing is raised: whatever happens is an outcome.
    """

    def __init__(self, opened: Tier, stop: Stop) -> None:
        self._opened = opened
        self._stop = stop
        self._one_at_a_time = threading.Lock()
        self._large = threading.Lock()
        self._shows = _Shows(opened, stop) if opened.settings.tier.pinterest.target else None

    def upload(self, watch: UploadWatch) -> UploadOutcome:
        """Takes in what is sealed, below the high watermark, and new; then it goes to who reads Pinterest's layout, if there are any."""
        try:
            self._stop.check()
            outcome = self._import(watch)
            return outcome if self._shows is None or outcome.trouble is not None else self._shows.after(watch.name, outcome)
        except Stopped:
            return UploadOutcome(None, stopped=True)
        except Exception as error:  # noqa: BLE001 - one partition's trouble must not end the service for the others (I9)
            state = self._state(watch.name)
            position = state.end_offset + 1 if state is not None and state.live else None
            reason = str(error) if isinstance(error, CompactorError) else f"a bug: {type(error).__name__}: {error}"
            return UploadOutcome(position, trouble=trouble_of(error, watch.seen, state), reason=reason)

    def _import(self, watch: UploadWatch) -> UploadOutcome:
        name, path, end = watch.name, Path(watch.seen.path), watch.end
        if end is None:
            return UploadOutcome(None, trouble=Trouble.BROKER, reason="no leader has said where its log ends")
        try:
            epoch = last_epoch(path)
        except OSError as error:
            raise UsageError(f"cannot read {path / EPOCHS}: {error.strerror}", hint="Check its owner and its mode") from error
        if epoch != end.leader_epoch:
            # Below another leader's high watermark this replica may have what no other has: it is a follower by now that was not
            # truncated yet. One that has the leader's epoch in its log was.
            reason = f"the leader is at epoch {end.leader_epoch}, and this replica knows of {epoch}"
            return UploadOutcome(None, trouble=Trouble.EPOCH, reason=reason)
        rules = self._opened.settings.agent
        if watch.trouble is Trouble.BEHIND and rules.accept_truncation:
            position = self._discard(name, path)
            if position > end.high_watermark:
                return UploadOutcome(position, trouble=Trouble.BEHIND, reason=watch.reason)
        guard = _CleanerGuard(self._opened, name, path)
        guard.check()
        options = ImportOptions(
            live=True,
            gaps=rules.allow_gaps,
            accept_truncation=rules.accept_truncation,
            below=end.high_watermark,
            older=False,
            refill=False,
            may_be_empty=True,
        )
        report = self._imported(watch, options, guard)
        return UploadOutcome(report.end_offset + 1, report.segments, report.bytes, notes=report.notes)

    def _imported(self, watch: UploadWatch, options: ImportOptions, guard: _CleanerGuard) -> ImportReport:
        opened, name = self._opened, watch.name
        hint = opened.hint(name)

        def note_change(log: PartitionLog) -> None:
            with self._one_at_a_time:
                opened.note_change(log)
                opened.keep(log, hint)

        policy = opened.settings.cleaner_for(name.topic).policy()
        company = Company(1, note_change, self._large)
        return import_directory(opened, Path(watch.seen.path), name, policy, ImportProgress(at=guard.at), options, company)

    def _discard(self, name: TopicPartition, path: Path) -> int:
        """The broker's log ends below the tier: what its later leader epochs disown leaves the tier, too. Returns where that ends."""
        log = self._opened.open(name)
        state = log.check_whole()
        parted = parting(state, [], given_lineage(path))
        if parted is not None and parted.newer and parted.offset > state.start_offset:
            policy = self._opened.settings.cleaner_for(name.topic).policy()
            accept_truncation(self._opened, log, parted.offset, epoch_at(parted.given, parted.offset), policy)
            with self._one_at_a_time:
                self._opened.note_change(log)
        return log.state.end_offset + 1

    def _state(self, name: TopicPartition) -> PartitionState | None:
        try:
            return self._opened.open(name).refresh()
        except CompactorError:
            return None


class _Shows:
    """Brings a partition's newest generation up to what the tier has. A generation that a round has superseded is the daemon's business.

    Logs are read from the broker's directories, as long as they have them as the tier does.
    """

    def __init__(self, opened: Tier, stop: Stop) -> None:
        target = target_of(opened)
        self._target = replace(target, store=Interruptible(target.store, stop))
        self._opened = _beside_broker(opened)
        self._how = Writing(disk=Budget(disk_budget(opened.settings.cleaner, opened.state_dir)), append_only=True, yields=True)
        self._left: set[TopicPartition] = set()

    def after(self, name: TopicPartition, outcome: UploadOutcome) -> UploadOutcome:
        """Behind an upload. Raises Stopped."""
        if not outcome.position:
            return outcome
        try:
            report = write_generation(self._opened, self._target, name, self._how)
        except Stopped:
            raise
        except Exception as error:  # noqa: BLE001 - as for the upload: it is an outcome, and what was uploaded stays
            reason = str(error) if isinstance(error, CompactorError) else f"a bug: {type(error).__name__}: {error}"
            return replace(outcome, trouble=Trouble.GENERATION, reason=reason)
        if report.status != "superseded":
            self._left.discard(name)
        elif name not in self._left:
            self._left.add(name)
            note = "a round has changed what generations are made of: the next one is left to a daemon, or `generations write`"
            return replace(outcome, notes=(*outcome.notes, note))
        return outcome


def _beside_broker(opened: Tier) -> Tier:
    """With the agent's directories among those that logs are read from."""
    settings = opened.settings

    def local(cleaner: Cleaner) -> Cleaner:
        return cleaner.model_copy(update={"local_log_dirs": (*cleaner.local_log_dirs, *settings.agent.log_dirs)})

    topics = {pattern: local(cleaner) for pattern, cleaner in settings.topics.items()}
    return replace(opened, settings=settings.model_copy(update={"cleaner": local(settings.cleaner), "topics": topics}))


@dataclass
class _CleanerGuard:
    """Looks before the upload, and again once its segments were read: the cleaner may have come in between."""

    opened: Tier
    name: TopicPartition
    path: Path

    def at(self, step: str, size: int) -> None:
        if step == "uploading":
            self.check()

    def check(self) -> None:
        """Raises BadData where the broker's cleaner has passed the tier's end."""
        try:
            cleaned = cleaner_offset(self.path, self.name)
        except OSError as error:
            raise UsageError(f"cannot read {self.path.parent / CLEANED}: {error.strerror}", hint="Check its owner and its mode") from error
        if not cleaned:
            return
        position = self.opened.open(self.name).refresh().end_offset + 1
        if cleaned_too_far(position, cleaned):
            raise BadData(
                f"this broker's own cleaner has cleaned {self.name} up to offset {cleaned}, and the tier ends at {position - 1}: "
                "tombstones may be gone that delete keys which the tier has",
                segment=str(self.path.parent / CLEANED),
                hint="Topics for the agent need cleanup.policy=delete, or a min.compaction.lag.ms beyond its longest outage. "
                "`topics delete` the partition and `import` the log to begin anew",
            )


def trouble_of(error: Exception, seen: SeenDirectory, state: PartitionState | None) -> Trouble:
    """What kind of failure this is, for metrics. ``state``: the tier's, where it could be read since."""
    if isinstance(error, BadData):
        if error.segment.endswith(EPOCHS):
            return Trouble.LINEAGE
        if error.segment.endswith(CLEANED):
            return Trouble.COMPACTED
        gap = state is not None and state.live and seen.first_base > state.end_offset + 1
        return Trouble.GAP if gap else Trouble.CONTENT
    if isinstance(error, UsageError):
        return Trouble.DELETED if state is not None and state.deleted_slot else Trouble.UNREADABLE
    kinds = ((Fenced, Trouble.FENCED), (StoreError, Trouble.STORE), (OutOfBudget, Trouble.BUDGET))
    return next((trouble for kind, trouble in kinds if isinstance(error, kind)), Trouble.BUG)
