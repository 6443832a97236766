"""An agent's pages: its status as documents. Pure, but for asking the agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compactor import __version__
from compactor.model.ids import TopicPartition
from compactor.service.agent_metrics import agent_families
from compactor.service.agent_plan import Lag, Trouble, UploadWatch, lag
from compactor.service.agent_status import AgentStatus
from compactor.service.metrics import exposed
from compactor.service.outlook import Condition
from compactor.service.pages.documents import (
    AgentTotals,
    NeedsAttention,
    PendingSegment,
    PlannedStep,
    StatusDocument,
    UploadDocument,
    UploadRow,
    WorkItem,
)
from compactor.service.pages.listing import Column, ListQuery
from compactor.service.pages.status_page import MOST_SHOWN, ORDER, command, status_document

MOST_PENDING = 100
"""Segments that wait, on a partition's page; the totals are about all."""
PASSING = frozenset({Trouble.EPOCH, Trouble.BROKER, Trouble.FENCED, Trouble.STORE, Trouble.BUDGET})
"""Nothing about the partition itself is wrong: there is no command that helps it."""


@dataclass(frozen=True)
class _Led:
    watch: UploadWatch
    name: str
    condition: Condition
    lag: Lag


COLUMNS: dict[str, Column[_Led]] = {
    "state": Column(lambda led: (ORDER[led.condition], led.watch.name)),
    "name": Column(lambda led: (led.watch.name,)),
    "lag": Column(lambda led: (led.lag.bytes, led.watch.name), descending=True),
    "age": Column(lambda led: (-led.lag.since_ms if led.lag.since_ms else -(2**63), led.watch.name), descending=True),
    "end": Column(lambda led: (led.watch.position or 0, led.watch.name), descending=True),
}


@dataclass(frozen=True)
class AgentPages:
    """What an agent gives to its pages. ``config``: the configuration that it was started with, for commands to be copied."""

    status: Callable[[], AgentStatus]
    config: str = ""
    template: str = "agent.html"
    partition_template: str = "upload.html"
    looks_for: str = "segments"

    def health(self) -> AgentStatus:
        return self.status()

    def metrics(self, *, aliases: bool) -> bytes:
        """Kafka has no names for what an agent does."""
        return exposed(agent_families(self.status()))

    def document(self, query: ListQuery) -> StatusDocument[AgentTotals, UploadRow]:
        status = self.status()
        led = [_led(watch, status) for watch in status.watches if watch.leads]
        bad = sorted((each.watch for each in led if each.condition is Condition.ATTENTION), key=lambda w: (-w.troubled_ms, w.name))
        return status_document(
            StatusDocument[AgentTotals, UploadRow],
            "agent",
            status,
            led,
            COLUMNS,
            query,
            lambda each: _row(each, status.now_ms),
            totals=_totals(status, led, len(bad)),
            needs_attention=[_attention(watch, self.config) for watch in bad[:MOST_SHOWN]],
            at_work=[_work(name, begun, status.now_ms) for name, begun in sorted(status.running.items(), key=lambda each: each[1])],
            due=sum(each.condition is Condition.DUE for each in led),
        )

    def partition(self, name: TopicPartition) -> UploadDocument | None:
        status = self.status()
        watch = next((watch for watch in status.watches if watch.name == name), None)
        if watch is None:
            return None
        pending = [PendingSegment(start_offset=f.base, end_offset=f.end - 1, bytes=f.size, sealed_ms=f.mtime_ms) for f in watch.pending]
        begun = status.running.get(name)
        return UploadDocument(
            version=__version__,
            now_ms=status.now_ms,
            row=_row(_led(watch, status), status.now_ms),
            attention=_attention(watch, self.config) if watch.trouble is not None else None,
            at_work=None if begun is None else _work(name, begun, status.now_ms),
            leads=watch.leads,
            directory=watch.seen.path,
            first_offset=watch.seen.first_base if watch.seen.first_base >= 0 else None,
            active_offset=watch.seen.active_base if watch.seen.active_base >= 0 else None,
            pending=tuple(pending[:MOST_PENDING]),
            checked_ms=watch.checked_ms or None,
            commands=tuple(command(verb, name, self.config) for verb in ("segments list", "verify", "explain")),
        )


def _led(watch: UploadWatch, status: AgentStatus) -> _Led:
    found = lag(watch)
    return _Led(watch, str(watch.name), _condition(watch, found, working=watch.name in status.running), found)


def _condition(watch: UploadWatch, found: Lag, *, working: bool) -> Condition:
    if watch.trouble is not None:
        return Condition.ATTENTION
    if working:
        return Condition.WORKING
    if watch.position is None:
        return Condition.UNSEEN
    return Condition.DUE if found.segments else Condition.QUIET


def _totals(status: AgentStatus, led: list[_Led], bad: int) -> AgentTotals:
    moments = [each.lag.since_ms for each in led if each.lag.since_ms]
    return AgentTotals(
        partitions=len(status.watches),
        led=len(led),
        lag_segments=sum(each.lag.segments for each in led),
        lag_bytes=sum(each.lag.bytes for each in led),
        oldest_lag_ms=max(0, status.now_ms - min(moments)) if moments else None,
        uploaded_segments=status.tallies.segments,
        uploaded_bytes=status.tallies.bytes,
        attention_partitions=bad,
        requests=status.usage.total_requests,
    )


def _attention(watch: UploadWatch, config: str) -> NeedsAttention:
    trouble = watch.trouble
    return NeedsAttention(
        partition=str(watch.name),
        kind=trouble.value if trouble else "",
        reason=watch.reason,
        segment="",
        since_ms=watch.troubled_ms or None,
        failures=watch.failures,
        next_try_ms=watch.retry_at_ms or None,
        commands=() if trouble in PASSING else (command("checkpoints show", watch.name, config),),
    )


def _work(name: TopicPartition, begun_ms: int, now_ms: int) -> WorkItem:
    return WorkItem(
        partition=str(name),
        action="upload",
        phase="upload",
        run="",
        begun_ms=begun_ms,
        elapsed_ms=max(0, now_ms - begun_ms),
        done=None,
        total=None,
        unit="",
        share=None,
        expected_end_ms=None,
    )


def _row(led: _Led, now_ms: int) -> UploadRow:
    watch, end = led.watch, led.watch.end
    why = "it failed before" if watch.trouble else "sealed segments" if led.lag.segments else "nothing is sealed that the tier has not"
    return UploadRow(
        partition=led.name,
        condition=led.condition.value,
        reason=f"{watch.trouble.value}: {watch.reason}" if watch.trouble else "",
        leader_epoch=end.leader_epoch if end else None,
        tier_end_offset=None if watch.position is None else watch.position - 1,
        high_watermark=end.high_watermark if end else None,
        lag_segments=led.lag.segments,
        lag_bytes=led.lag.bytes,
        lag_since_ms=led.lag.since_ms or None,
        next=PlannedStep(action="upload", at_ms=max(now_ms, watch.retry_at_ms) if led.lag.segments or watch.trouble else None, why=why),
    )
