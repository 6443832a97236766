"""A daemon's pages: its status as documents. Pure, but for asking the daemon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compactor import __version__
from compactor.control.state import EpochHistory, Run
from compactor.control.summary import LastRound
from compactor.model.ids import TopicPartition
from compactor.service.metrics import daemon_families, exposed
from compactor.service.outlook import Condition, condition, next_step, since_ms, trouble
from compactor.service.pages.axis import axis_of
from compactor.service.pages.documents import (
    CompactorEpoch,
    DaemonTotals,
    NeedsAttention,
    PartitionDocument,
    PartitionRow,
    PlannedStep,
    RoundEntry,
    RoundOutcome,
    StatusDocument,
    WorkItem,
)
from compactor.service.pages.listing import Column, ListQuery
from compactor.service.pages.status_page import MOST_SHOWN, ORDER, command, status_document
from compactor.service.progress import AtWork
from compactor.service.scheduling import NEVER, PartitionWatch
from compactor.service.status import PartitionPicture, Status
from compactor.views.prices import DIRECTORY, PriceTable

DAY_MS = 86_400_000


@dataclass(frozen=True)
class _Seen:
    """A partition as the list sorts it."""

    watch: PartitionWatch
    name: str
    condition: Condition
    now_ms: int

    @property
    def ratio(self) -> float:
        return self.watch.sight.dirty_ratio if self.watch.sight else -1.0

    @property
    def bytes(self) -> int:
        return self.watch.sight.bytes if self.watch.sight else -1

    @property
    def rounded_ms(self) -> int:
        seen = self.watch.sight
        return seen.last_round.ended_ms if seen is not None and seen.last_round is not None else -1


COLUMNS: dict[str, Column[_Seen]] = {
    "state": Column(lambda seen: (ORDER[seen.condition], seen.watch.name)),
    "name": Column(lambda seen: (seen.watch.name,)),
    "dirty": Column(lambda seen: (seen.ratio, seen.watch.name), descending=True),
    "size": Column(lambda seen: (seen.bytes, seen.watch.name), descending=True),
    "round": Column(lambda seen: (seen.rounded_ms, seen.watch.name), descending=True),
    "next": Column(lambda seen: (next_step(seen.watch, seen.now_ms).at_ms, seen.watch.name)),
}


@dataclass(frozen=True)
class DaemonPages:
    """What a daemon gives to its pages. ``config``: the configuration that it was started with, for commands to be copied.

    ``prices``: by which money is reckoned.
    """

    status: Callable[[], Status]
    picture: Callable[[TopicPartition], PartitionPicture | None]
    config: str = ""
    prices: PriceTable = DIRECTORY
    template: str = "daemon.html"
    partition_template: str = "partition.html"
    looks_for: str = "work"

    def health(self) -> Status:
        return self.status()

    def metrics(self, *, aliases: bool) -> bytes:
        return exposed(daemon_families(self.status(), aliases=aliases))

    def document(self, query: ListQuery) -> StatusDocument[DaemonTotals, PartitionRow]:
        status = self.status()
        working = {work.job.name for work in status.at_work}
        seen = [_Seen(w, str(w.name), condition(w, working=w.name in working), status.now_ms) for w in status.watches]
        bad = sorted((each.watch for each in seen if each.condition is Condition.ATTENTION), key=lambda w: (-since_ms(w), w.name))
        totals = _totals(status, len(bad))
        return status_document(
            StatusDocument[DaemonTotals, PartitionRow],
            "daemon",
            status,
            seen,
            COLUMNS,
            query,
            lambda each: _row(each.watch, each.condition, status.now_ms),
            totals=totals,
            needs_attention=[_attention(watch, status.now_ms, self.config) for watch in bad[:MOST_SHOWN]],
            at_work=[_work(work, status.now_ms) for work in sorted(status.at_work, key=lambda work: work.begun_ms)],
            due=totals.due_partitions,
        )

    def partition(self, name: TopicPartition) -> PartitionDocument | None:
        found = self.picture(name)
        if found is None:
            return None
        watch, story, seen = found.watch, found.story, found.watch.sight
        row = _row(watch, condition(watch, working=found.at_work is not None), found.now_ms)
        return PartitionDocument(
            version=__version__,
            now_ms=found.now_ms,
            row=row,
            attention=_attention(watch, found.now_ms, self.config) if trouble(watch) else None,
            at_work=_work(found.at_work, found.now_ms) if found.at_work else None,
            axis=axis_of(seen, found.segments, story) if seen is not None and seen.segments else None,
            leader_epoch=seen.leader_epoch if seen is not None and seen.leader_epoch >= 0 else None,
            fenced_appends=story.fenced if story else None,
            rounds=tuple(_round(run, self.prices) for run in reversed(story.runs)) if story else (),
            prices=str(self.prices) if self.prices.stored_gib_month_usd else "",
            compactor_epochs=tuple(_epoch(entry) for entry in reversed(story.epochs)) if story else (),
            commands=tuple(command(verb, name, self.config) for verb in ("explain", "plan", "runs list", "checkpoints lineage", "verify")),
        )


def _totals(status: Status, bad: int) -> DaemonTotals:
    sights = [watch.sight for watch in status.watches if watch.sight is not None]
    due = [watch.sight for watch in status.watches if watch.sight is not None and watch.sight.due and not watch.uncleanable]
    moments = [sight.retire_at_ms for sight in sights if sight.retire_at_ms < NEVER]
    yesterday_ms = status.now_ms - DAY_MS
    return DaemonTotals(
        partitions=len(status.watches),
        segments=sum(sight.segments for sight in sights),
        stored_bytes=sum(sight.bytes + sight.waiting_bytes for sight in sights),
        dirty_bytes=sum(sight.dirty_bytes for sight in sights),
        reclaimed_24h_bytes=sum(size for sight in sights for at_ms, size in sight.freed if yesterday_ms < at_ms <= status.now_ms),
        reclaimed_since_ms=yesterday_ms,
        waiting_bytes=sum(sight.waiting_bytes for sight in sights),
        waiting_partitions=len(moments),
        waiting_due_ms=min(moments, default=None),
        due_partitions=len(due),
        due_bytes=sum(sight.dirty_bytes for sight in due),
        attention_partitions=bad,
        requests=status.usage.total_requests,
        disk_used_bytes=status.disk_used,
        disk_budget_bytes=status.disk_total,
    )


def _attention(watch: PartitionWatch, now_ms: int, config: str) -> NeedsAttention:
    seen, step = watch.sight, next_step(watch, now_ms)
    kind = "unreadable" if watch.unreadable else "failing" if watch.problem else "quarantined"
    failures = {"unreadable": watch.look_failures, "failing": watch.failures}.get(kind, seen.quarantine_failures if seen else 0)
    verbs = ("verify", "explain") if kind == "unreadable" else ("explain", "run")
    return NeedsAttention(
        partition=str(watch.name),
        kind=kind,
        reason=trouble(watch),
        segment=seen.quarantine_segment if seen is not None and kind == "quarantined" else "",
        since_ms=since_ms(watch) or None,
        failures=failures,
        next_try_ms=step.at_ms if step.at_ms < NEVER else None,
        commands=tuple(command(verb, watch.name, config) for verb in verbs),
    )


def _work(work: AtWork, now_ms: int) -> WorkItem:
    return WorkItem(
        partition=str(work.job.name),
        action=work.job.action.value,
        phase=work.phase,
        run=work.run_id,
        begun_ms=work.begun_ms,
        elapsed_ms=max(0, now_ms - work.begun_ms),
        done=work.done if work.unit else None,
        total=work.total or None,
        unit=work.unit,
        share=round(work.share, 4) if work.total or work.phase == "close" else None,
        expected_end_ms=work.expected_end_ms or None,
    )


def _row(watch: PartitionWatch, found: Condition, now_ms: int) -> PartitionRow:
    seen, step = watch.sight, next_step(watch, now_ms)
    return PartitionRow(
        partition=str(watch.name),
        condition=found.value,
        reason=trouble(watch) or watch.suspended or watch.paused or watch.waits or (seen.reason if seen else ""),
        segments=seen.segments if seen else None,
        bytes=seen.bytes if seen else None,
        start_offset=seen.start_offset if seen else None,
        end_offset=seen.end_offset if seen else None,
        cleaner_offsets=tuple((entry.leader_epoch, entry.offset) for entry in seen.cleaner_offsets) if seen else (),
        first_dirty_offset=seen.first_dirty_offset if seen else None,
        dirty_bytes=seen.dirty_bytes if seen else None,
        dirty_ratio=round(seen.dirty_ratio, 6) if seen else None,
        waiting_bytes=seen.waiting_bytes if seen else None,
        leader=seen.leader if seen else "",
        last_round=_outcome(seen.last_round) if seen is not None and seen.last_round is not None else None,
        next=PlannedStep(action=step.action.value, at_ms=step.at_ms if step.at_ms < NEVER else None, why=step.why),
    )


def _outcome(last: LastRound) -> RoundOutcome:
    return RoundOutcome(
        run=last.run_id,
        status=last.status,
        ended_ms=last.ended_ms,
        bytes_before=last.bytes_before if last.bytes_before >= 0 else None,
        bytes_after=last.bytes_after if last.bytes_after >= 0 else None,
    )


def _round(run: Run, prices: PriceTable) -> RoundEntry:
    def stat(name: str) -> int | None:
        return int(run.stats[name]) if name in run.stats else None

    before, after = stat("bytes_before"), stat("bytes_written")
    billed = bool(prices.stored_gib_month_usd) and before is not None and after is not None
    return RoundEntry(
        run=run.run_id,
        status=run.status,
        holder=run.holder,
        started_ms=run.started_ms,
        ended_ms=run.ended_ms if run.ended_ms >= 0 else None,
        first_dirty_offset=run.first_dirty_offset if run.first_dirty_offset >= 0 else None,
        next_dirty_offset=run.next_dirty_offset if run.next_dirty_offset >= 0 else None,
        segments_in=run.sources,
        segments_out=run.outputs,
        bytes_before=before,
        bytes_after=after,
        records_read=stat("records_read"),
        records_kept=stat("records_kept"),
        cost_bytes_read=stat("bytes_read"),
        cost_bytes_written=stat("bytes_written"),
        cost_ms=max(0, run.ended_ms - run.started_ms) if run.ended_ms >= 0 else None,
        cost_usd=prices.round_usd(run.sources, run.outputs) if billed else None,
        saved_usd_month=prices.stored_usd_month((before or 0) - (after or 0)) if billed else None,
        reason=run.reason,
        segment=run.segment,
    )


def _epoch(entry: EpochHistory) -> CompactorEpoch:
    ended_ms = entry.ended_ms if entry.ended_ms >= 0 else None
    return CompactorEpoch(epoch=entry.epoch, holder=entry.holder, since_ms=entry.at_ms, ended=entry.ended, ended_ms=ended_ms)
