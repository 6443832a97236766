"""What the daemon does next, as pure functions over frozen values: no store, no clock, no threads, no randomness.

    Sight   what one look at a partition came to: everything that scheduling needs of its folded state
    PartitionWatch   what the daemon remembers of a partition: the last sight, and when what may be done next
    choose  the jobs to begin now

Looking is what costs while nothing happens. A partition is looked at when the tier-wide log hints that it changed, when time alone
changes the answer (``wake_ms``: a delete horizon, a lag), and every ``poll_ms``, because hints can be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from checkpoint.offsets import CleanerOffset
from compactor.config import Cleaner
from compactor.control.grace import retire_ms, stale_ms
from compactor.control.ports import Retention
from compactor.control.summary import LastRound, PartitionSummary, SegmentFacts
from compactor.model.ids import TopicPartition
from compactor.round.plan import assess

NEVER = 2**63 - 1
POLL_MS = 3_600_000
"""Where nothing happens a partition costs two requests in this time: the safety net under hints that were lost."""
LOOKS_AN_HOUR = 1_250
"""Of partitions in which nothing happens, all together: in a large tier each one's turn comes less often."""
FIRST_POLL_MS = 60_000
"""After a change looks follow at this distance, doubled each time up to POLL_MS."""
LONG_QUIET = 64
"""Looks in a row that found nothing, after which POLL_MS is reached for certain."""
CLOCK_MS = 1_000
"""Stores tell their time to the second: what is deleted a second late is not tried in vain."""
RETRY_MS = 60_000
MOST_RETRY_MS = 6 * 3_600_000
"""A partition that fails is tried again after RETRY_MS, doubled with every failure up to this."""


HOLD_MS = 60_000
"""One round that has to wait for the budget of all holds the others up for so long: thousands would ask in vain."""


class Action(StrEnum):
    LOOK = "look"
    ROUND = "round"
    RETIRE = "retire"
    GENERATION = "generation"


@dataclass(frozen=True)
class Sight:
    """One partition at one slot of its log. Offsets as everywhere: ``end_offset`` inclusive, ``first_dirty_offset`` the first not clean.

    ``first_uncleanable_offset``: up to here, exclusive, a round may go now.

    ``due``: a round would do something, also where one was begun and not finished. ``wake_ms``: until then only a new record can
    change that. ``retire_at_ms``: when something may be deleted, NEVER where nothing waits; ``max_delay_ms``: by how much
    max.compaction.lag.ms is exceeded. ``freed``: when replaced segments could go, and bytes of them that went, by the hour.
    """

    name: TopicPartition
    slot: int
    segments: int = 0
    bytes: int = 0
    start_offset: int = 0
    end_offset: int = -1
    cleaner_offsets: tuple[CleanerOffset, ...] = ()
    first_dirty_offset: int = 0
    first_uncleanable_offset: int = 0
    dirty_bytes: int = 0
    dirty_ratio: float = 0.0
    due: bool = False
    reason: str = ""
    max_delay_ms: int = 0
    wake_ms: int = NEVER
    open_run: str = ""
    leader: str = ""
    leader_epoch: int = -1
    quarantine: str = ""
    quarantine_segment: str = ""
    quarantine_ms: int = 0
    quarantine_failures: int = 0
    retire_at_ms: int = NEVER
    waiting_bytes: int = 0
    undone_slot: int = 0
    last_round: LastRound | None = None
    freed: tuple[tuple[int, int], ...] = ()


def sight(known: PartitionSummary, cleaner: Cleaner, retention: Retention, since_ms: Mapping[int, int], now_ms: int) -> Sight:
    """``since_ms``: the store's time of each slot that something waits from."""
    found = assess(known, cleaner, now_ms)
    leads = known.leader if known.leader is not None and not known.leader.released else None
    why = known.quarantine
    late = [s.first_timestamp_ms + cleaner.max_compaction_lag_ms for s in found.dirty if s.first_timestamp_ms > 0]
    return Sight(
        name=known.name,
        slot=known.slot,
        segments=known.segments,
        bytes=known.bytes,
        start_offset=known.start_offset,
        end_offset=known.end_offset,
        cleaner_offsets=known.vector,
        first_dirty_offset=known.first_dirty_offset,
        first_uncleanable_offset=found.end,
        dirty_bytes=sum(segment.size_bytes for segment in found.dirty),
        dirty_ratio=found.dirty_ratio,
        due=found.due or known.open_run != "",
        reason="a round was begun and not finished" if known.open_run else found.reason,
        max_delay_ms=max(0, now_ms - min(late)) if late else 0,
        wake_ms=wake_ms(known.live, cleaner, now_ms),
        open_run=known.open_run,
        leader=leads.holder if leads else "",
        leader_epoch=known.leader.epoch if known.leader else -1,
        quarantine=why.reason if why else "",
        quarantine_segment=why.segment if why else "",
        quarantine_ms=why.at_ms if why else 0,
        quarantine_failures=why.failures if why else 0,
        retire_at_ms=_retire_at_ms(known, retention, since_ms, now_ms),
        waiting_bytes=sum(group.size_bytes for group in known.waiting),
        undone_slot=known.undone_slot,
        last_round=known.last_round,
        freed=tuple((at_ms + max(retention.grace_ms, retention.undo_window_ms), size) for at_ms, size in known.freed),
    )


def wake_ms(live: Iterable[SegmentFacts], cleaner: Cleaner, now_ms: int) -> int:
    """The next moment at which ``assess`` may answer otherwise though nothing was written; NEVER where there is none."""
    moments = []
    for segment in live:
        moments.append(segment.due_ms)
        if cleaner.min_compaction_lag_ms > 0:
            stamp = segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.mtime_ms
            moments.append(stamp + cleaner.min_compaction_lag_ms)
        if segment.first_timestamp_ms > 0:
            moments.append(segment.first_timestamp_ms + cleaner.max_compaction_lag_ms + 1)
    return min((moment for moment in moments if now_ms < moment < NEVER), default=NEVER)


def _retire_at_ms(known: PartitionSummary, retention: Retention, since_ms: Mapping[int, int], now_ms: int) -> int:
    if known.retiring:
        return now_ms
    moments = [retire_ms(group, retention, since_ms, now_ms) for group in known.waiting]
    moments += [stale_ms(entry, retention, since_ms, now_ms) for entry in known.imports]
    return min(min(moments, default=NEVER) + CLOCK_MS, NEVER)


@dataclass(frozen=True)
class GenerationWatch:
    """What consumers of Pinterest's layout have of a partition. ``shown_slot``: of the log whose view it is, -1 where that is not known.

    ``again_ms``: when one may be deleted, NEVER where none waits. ``rounds``: since the view was brought to them. ``failures`` in a row,
    the last one's ``problem``, and when it is tried again.
    """

    shown_slot: int = -1
    again_ms: int = NEVER
    rounds: int = 0
    failures: int = 0
    problem: str = ""
    retry_at_ms: int = 0

    def is_due(self, seen: Sight, now_ms: int) -> bool:
        return now_ms >= self.retry_at_ms and (seen.slot > self.shown_slot or now_ms >= self.again_ms)


@dataclass(frozen=True)
class PartitionWatch:
    """What the daemon remembers of one partition; times in milliseconds of its own clock.

    ``hint``: the one that was followed last (service.hearing). ``suspended``: why no round is begun, for as long as that is so.
    ``waits``: why the last round was not begun, though nothing is wrong.
    ``paused``: who does not want rounds to be begun; one that was begun goes on. ``wish``: the last slot in which a round was asked for,
    ``urgent`` until it was begun. ``alone``: its next round needs the budgets for itself. ``failures``: of jobs
    in a row, for reasons of this process (the store, the budgets) beside those that the partition's own log knows; ``problem``: the
    last one. ``look_failures`` and ``unreadable``: the same for looks; ``troubled_ms``: since when either, 0 where neither.
    ``repeats``: rounds in a row that found nothing new to clean and left the partition due all the same; ``repeat_at_ms``: when the
    next such one may begin, unless something new comes.
    ``swept_slot``: up to where undone rounds were swept after; those of earlier processes are left to `retire`. ``generation``: None where
    nobody wants any.
    """

    name: TopicPartition
    hint: int = 0
    sight: Sight | None = None
    look_at_ms: int = 0
    quiet: int = 0
    round_at_ms: int = 0
    retire_at_ms: int = 0
    swept_slot: int = NEVER
    alone: bool = False
    failures: int = 0
    problem: str = ""
    look_failures: int = 0
    unreadable: str = ""
    troubled_ms: int = 0
    repeats: int = 0
    repeat_at_ms: int = 0
    suspended: str = ""
    waits: str = ""
    generation: GenerationWatch | None = None
    paused: str = ""
    wish: int = 0
    urgent: bool = False

    @property
    def uncleanable(self) -> str:
        """Why nothing cleans it at present; empty where nothing is wrong."""
        return self.suspended or self.unreadable or self.problem or (self.sight.quarantine if self.sight else "")


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended. ``status``: one of `run`'s, or retired, failed, out_of_budget, stopped. ``sight``: after it, None where unknown.

    ``until_ms``: when what is waiting may be tried again. Of a generation: ``shown_slot`` and ``again_ms`` as GenerationWatch has them.
    """

    status: str
    reason: str = ""
    sight: Sight | None = None
    until_ms: int = 0
    shown_slot: int = -1
    again_ms: int = NEVER


@dataclass(frozen=True)
class Job:
    """``force``: a round whatever the dirty ratio says."""

    name: TopicPartition
    action: Action
    alone: bool = False
    force: bool = False


def backoff_ms(failures: int, first_ms: int = RETRY_MS, most_ms: int = MOST_RETRY_MS) -> int:
    """Doubled with every failure; 0 for none."""
    return 0 if failures <= 0 else min(most_ms, first_ms << min(failures - 1, 40))


def hinted(watch: PartitionWatch, slot: int, now_ms: int) -> PartitionWatch:
    """Somebody says that the partition changed."""
    return replace(watch, hint=slot, look_at_ms=now_ms, quiet=0)


def discovered(name: TopicPartition, slot: int, now_ms: int) -> PartitionWatch:
    return PartitionWatch(name=name, hint=slot, look_at_ms=now_ms)


def poll_ms(partitions: int) -> int:
    """How long a partition in which nothing happens waits for its turn, by how many there are."""
    return max(POLL_MS, partitions * POLL_MS // LOOKS_AN_HOUR)


def remembered(name: TopicPartition, slot: int, seen: Sight, checked_ms: int, poll: int = POLL_MS) -> PartitionWatch:
    """A partition that an earlier process looked at; nobody has hinted at it since."""
    return PartitionWatch(name=name, hint=slot, sight=seen, look_at_ms=checked_ms + poll, quiet=LONG_QUIET, swept_slot=seen.undone_slot)


def suspended(watch: PartitionWatch, why: str) -> PartitionWatch:
    """No round is begun as long as there is a reason; what failed meanwhile is tried again at once when there is none any more."""
    if why == watch.suspended:
        return watch
    if why:
        return replace(watch, suspended=why)
    return replace(watch, suspended="", failures=0, problem="", round_at_ms=0, troubled_ms=watch.troubled_ms if watch.unreadable else 0)


def asked_for(watch: PartitionWatch, paused: str, wish: int, now_ms: int) -> PartitionWatch:
    """What people want of it: ``paused`` why no round may begin, ``wish`` the slot in which one was asked for (0: none)."""
    if wish > watch.wish:
        return replace(watch, paused=paused, wish=wish, urgent=True, look_at_ms=now_ms, round_at_ms=0, repeat_at_ms=0)
    return watch if paused == watch.paused else replace(watch, paused=paused)


def needs_look(watch: PartitionWatch, now_ms: int) -> bool:
    return now_ms >= watch.look_at_ms or (watch.sight is not None and now_ms >= watch.sight.wake_ms)


def looked(watch: PartitionWatch, seen: Sight, now_ms: int, spread: float, poll: int = POLL_MS) -> PartitionWatch:
    """After a look. ``spread`` (0 to 1) keeps the looks of many partitions apart: the first waits for that share of ``poll``."""
    before = watch.sight
    changed = before is not None and before.slot != seen.slot
    grown = before is not None and before.end_offset != seen.end_offset
    generation = watch.generation
    if generation is not None and before is not None and seen.slot < before.slot:
        generation = replace(generation, shown_slot=-1)  # the log was begun anew
    quiet = 0 if changed else watch.quiet + 1
    if before is None:
        pause = poll // 8 + int(spread * poll * 7 / 8)
        quiet = LONG_QUIET
    else:
        pause = min(poll, FIRST_POLL_MS << min(quiet, 40))
    return replace(
        watch,
        sight=seen,
        look_at_ms=now_ms + pause,
        quiet=quiet,
        look_failures=0,
        unreadable="",
        troubled_ms=watch.troubled_ms if watch.problem else 0,
        repeats=0 if grown else watch.repeats,
        repeat_at_ms=0 if grown else watch.repeat_at_ms,
        swept_slot=seen.undone_slot if before is None else watch.swept_slot,
        generation=generation,
    )


def look_failed(watch: PartitionWatch, reason: str, now_ms: int) -> PartitionWatch:
    failures = watch.look_failures + 1
    since = watch.troubled_ms or now_ms
    return replace(watch, look_failures=failures, unreadable=reason, troubled_ms=since, look_at_ms=now_ms + backoff_ms(failures))


def wanted(watch: PartitionWatch, now_ms: int, *, rounds: bool = True) -> Action | None:
    """What there is to do about a partition now. ``rounds``: whether new ones may be begun at all."""
    seen = watch.sight
    if seen is None or needs_look(watch, now_ms):
        return Action.LOOK if needs_look(watch, now_ms) else None
    may_begin = not watch.suspended and ((rounds and not watch.paused) or bool(seen.open_run))
    if may_begin and watch.urgent and now_ms >= watch.round_at_ms:
        return Action.ROUND
    shows = watch.generation is not None and watch.generation.is_due(seen, now_ms)
    if shows and watch.generation is not None and watch.generation.rounds:
        return Action.GENERATION  # rounds without end would keep it for ever
    if (
        seen.due
        and may_begin
        and now_ms >= max(watch.round_at_ms, watch.repeat_at_ms, seen.quarantine_ms + backoff_ms(seen.quarantine_failures))
    ):
        return Action.ROUND
    if shows:
        return Action.GENERATION
    if now_ms >= watch.retire_at_ms and (now_ms >= seen.retire_at_ms or seen.undone_slot > watch.swept_slot):
        return Action.RETIRE
    return None


def finished(watch: PartitionWatch, job: Job, outcome: JobOutcome, now_ms: int, ttl_ms: int) -> PartitionWatch:
    """After a job: when the next one may begin."""
    if job.action is Action.GENERATION:
        return replace(watch, generation=_shown(watch.generation or GenerationWatch(), outcome, now_ms, ttl_ms))
    if outcome.status in ("cleaned", "resumed") and watch.generation is not None:
        watch = replace(watch, generation=replace(watch.generation, rounds=watch.generation.rounds + 1))
    before, seen = watch.sight, outcome.sight or watch.sight
    urgent = watch.urgent and job.action is not Action.ROUND
    changed = replace(watch, sight=seen, alone=False, urgent=urgent, look_at_ms=now_ms if outcome.sight is None else watch.look_at_ms)
    if outcome.status in ("leased", "fenced"):
        # Somebody else is at it: look again once it is done, or its lease is over.
        return replace(changed, round_at_ms=now_ms + ttl_ms, retire_at_ms=now_ms + ttl_ms, look_at_ms=now_ms + ttl_ms)
    if outcome.status == "out_of_budget" and not job.alone:
        return replace(changed, alone=True, urgent=watch.urgent)
    if outcome.status in ("failed", "out_of_budget"):
        failures = watch.failures + 1
        later = now_ms + backoff_ms(failures)
        since = watch.troubled_ms or now_ms
        return replace(changed, failures=failures, problem=outcome.reason, troubled_ms=since, round_at_ms=later, retire_at_ms=later)
    changed = replace(changed, failures=0, problem="", waits="", troubled_ms=watch.troubled_ms if watch.unreadable else 0)
    if outcome.status == "waiting":
        # It was not begun: what was wanted of it still is.
        later = max(outcome.until_ms, now_ms + CLOCK_MS)
        return replace(changed, waits=outcome.reason, round_at_ms=later, alone=job.alone, urgent=watch.urgent)
    if job.action is Action.RETIRE and outcome.status == "nothing_to_do":
        return changed  # not begun: what is due is decided anew, by what others have written
    if job.action is Action.RETIRE:
        # What was not due by the store's clock yet is tried again, not every second.
        pause = RETRY_MS if seen is not None and now_ms >= seen.retire_at_ms else 0
        return replace(changed, retire_at_ms=now_ms + pause, swept_slot=seen.undone_slot if seen else watch.swept_slot)
    again = seen is not None and seen.due and before is not None and before.end_offset == seen.end_offset
    repeats = watch.repeats + 1 if again else 0
    return replace(changed, repeats=repeats, repeat_at_ms=now_ms + backoff_ms(repeats - 1))


def _shown(before: GenerationWatch, outcome: JobOutcome, now_ms: int, ttl_ms: int) -> GenerationWatch:
    """What fails here keeps no round from being done."""
    if outcome.status == "stopped":
        return before
    if outcome.status in ("leased", "fenced"):
        return replace(before, retry_at_ms=now_ms + ttl_ms)
    if outcome.status in ("failed", "out_of_budget"):
        failures = before.failures + 1
        return replace(before, rounds=0, failures=failures, problem=outcome.reason, retry_at_ms=now_ms + backoff_ms(failures))
    return GenerationWatch(outcome.shown_slot, min(outcome.again_ms + CLOCK_MS, NEVER))


def choose(
    watches: Iterable[PartitionWatch], running: Mapping[TopicPartition, Job], threads: int, now_ms: int, *, rounds: bool = True
) -> list[Job]:
    """The jobs to begin now, in the order of ``watches``: at most ``threads`` at once, one a partition; one that is alone by itself.

    ``rounds``: as ``wanted`` has it.
    """
    if any(job.alone for job in running.values()):
        return []
    wants: list[tuple[PartitionWatch, Action]] = []
    for watch in watches:
        action = wanted(watch, now_ms, rounds=rounds)
        if watch.name not in running and action is not None and action is not Action.LOOK:
            wants.append((watch, action))
    alone = next((watch for watch, action in wants if watch.alone and action is Action.ROUND), None)
    if alone is not None:
        # Nothing else begins before it, or it would wait for ever.
        return [] if running else [Job(alone.name, Action.ROUND, alone=True, force=alone.urgent)]
    wants.sort(key=lambda want: not want[0].urgent)
    free = max(0, threads - len(running))
    return [Job(watch.name, action, force=watch.urgent and action is Action.ROUND) for watch, action in wants[:free]]
