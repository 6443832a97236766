"""An agent's pages: turns its status into documents. Pure, except for asking the agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from compactor import __version__
from compactor.agent.metrics import agent_metrics
from compactor.agent.plan import PartitionUploadState, UploadFailure, UploadLag, upload_lag
from compactor.agent.status import AgentStatus
from compactor.daemon.scheduling import PartitionCondition
from compactor.model.ids import TopicPartition
from compactor.service.metrics import render_metrics
from compactor.web.documents import (
    AgentTotals,
    NeedsAttention,
    PendingSegment,
    PlannedStep,
    StatusDocument,
    UploadDocument,
    UploadRow,
    WorkItem,
)
from compactor.web.listing import ListColumn, ListQuery
from compactor.web.status_page import MOST_SHOWN, ORDER, format_command, runbook_link, status_document

MOST_PENDING = 100
"""Largest number of waiting segments on a partition's page. The totals cover all of them."""
PASSING = frozenset({UploadFailure.EPOCH, UploadFailure.BROKER, UploadFailure.FENCED, UploadFailure.STORE, UploadFailure.BUDGET})
"""Failures that are not caused by the partition itself, so that no command about the partition helps."""


@dataclass(frozen=True)
class _LedPartition:
    """A partition that this broker leads, with the values by which the list is sorted and filtered."""

    watch: PartitionUploadState
    name: str
    condition: PartitionCondition
    lag: UploadLag


UPLOAD_COLUMNS: dict[str, ListColumn[_LedPartition]] = {
    "state": ListColumn(lambda led: (ORDER[led.condition], led.watch.name)),
    "name": ListColumn(lambda led: (led.watch.name,)),
    "lag": ListColumn(lambda led: (led.lag.bytes, led.watch.name), descending=True),
    "age": ListColumn(lambda led: (-led.lag.since_ms if led.lag.since_ms else -(2**63), led.watch.name), descending=True),
    "end": ListColumn(lambda led: (led.watch.position or 0, led.watch.name), descending=True),
}


@dataclass(frozen=True)
class AgentPages:
    """Source of the pages that an agent (uploader on a broker) serves.

    config: path of the agent's configuration file, for the commands that pages show.
    runbook_url: address of the runbook; empty for the documentation's own.
    """

    status: Callable[[], AgentStatus]
    config: str = ""
    runbook_url: str = ""
    template: ClassVar[str] = "agent.html"
    partition_template: ClassVar[str] = "upload.html"
    looks_for: ClassVar[str] = "segments"

    def health_status(self) -> AgentStatus:
        """Return the agent's status now."""
        return self.status()

    def metrics_text(self, *, with_kafka_names: bool) -> bytes:
        """Return the agent's metrics for Prometheus. Kafka has no names for them, so that ``with_kafka_names`` has no effect."""
        return render_metrics(agent_metrics(self.status()))

    def status_page_document(self, query: ListQuery) -> StatusDocument[AgentTotals, UploadRow]:
        """Return the document of the first page."""
        status = self.status()
        led = [_led_partition(watch, status) for watch in status.watches if watch.leads]
        failing_partitions = sorted(
            (each.watch for each in led if each.condition is PartitionCondition.ATTENTION), key=lambda w: (-w.troubled_ms, w.name)
        )
        return status_document(
            StatusDocument[AgentTotals, UploadRow],
            "agent",
            status,
            led,
            UPLOAD_COLUMNS,
            query,
            lambda each: _upload_row(each, status.now_ms),
            totals=_agent_totals(status, led, len(failing_partitions)),
            needs_attention=[_failing_upload_entry(watch, self.config, self.runbook_url) for watch in failing_partitions[:MOST_SHOWN]],
            running_jobs=[
                _running_upload_entry(name, begun, status.now_ms)
                for name, begun in sorted(status.running.items(), key=lambda each: each[1])
            ],
            due_partitions=sum(each.condition is PartitionCondition.DUE for each in led),
        )

    def topics_document(self) -> None:
        """Return None: an agent has no page of topics."""

    def partition_document(self, partition: TopicPartition) -> UploadDocument | None:
        """Return the document of one partition's page, or None if the partition is in no log directory of the broker."""
        status = self.status()
        watch = next((watch for watch in status.watches if watch.name == partition), None)
        if watch is None:
            return None
        pending = [
            PendingSegment(start_offset=f.base, end_offset=f.end - 1, bytes=f.size, sealed_ms=f.mtime_ms) for f in watch.pending_segments
        ]
        begun = status.running.get(partition)
        return UploadDocument(
            version=__version__,
            now_ms=status.now_ms,
            row=_upload_row(_led_partition(watch, status), status.now_ms),
            attention=_failing_upload_entry(watch, self.config, self.runbook_url) if watch.trouble is not None else None,
            at_work=None if begun is None else _running_upload_entry(partition, begun, status.now_ms),
            leads=watch.leads,
            directory=watch.seen.path,
            first_offset=watch.seen.first_base if watch.seen.first_base >= 0 else None,
            active_offset=watch.seen.active_base if watch.seen.active_base >= 0 else None,
            pending=tuple(pending[:MOST_PENDING]),
            checked_ms=watch.checked_ms or None,
            commands=tuple(format_command(verb, partition, self.config) for verb in ("segments list", "verify", "explain")),
        )


def _led_partition(watch: PartitionUploadState, status: AgentStatus) -> _LedPartition:
    """Return a partition that this broker leads with its condition and the lag of its upload."""
    found = upload_lag(watch)
    return _LedPartition(watch, str(watch.name), _upload_condition(watch, found, is_uploading=watch.name in status.running), found)


def _upload_condition(watch: PartitionUploadState, lag: UploadLag, *, is_uploading: bool) -> PartitionCondition:
    """Return the condition of a partition that this broker leads: failing, being uploaded, unknown, waiting for upload, or up to date.
    ``is_uploading``: whether an upload runs.
    """
    if watch.trouble is not None:
        return PartitionCondition.ATTENTION
    if is_uploading:
        return PartitionCondition.WORKING
    if watch.position is None:
        return PartitionCondition.UNSEEN
    return PartitionCondition.DUE if lag.segments else PartitionCondition.QUIET


def _agent_totals(status: AgentStatus, led: list[_LedPartition], failing_partitions: int) -> AgentTotals:
    """Return the totals of the agent's first page.

    :param led: the partitions that this broker leads.
    """
    moments = [each.lag.since_ms for each in led if each.lag.since_ms]
    return AgentTotals(
        partitions=len(status.watches),
        led=len(led),
        lag_segments=sum(each.lag.segments for each in led),
        lag_bytes=sum(each.lag.bytes for each in led),
        oldest_lag_ms=max(0, status.now_ms - min(moments)) if moments else None,
        uploaded_segments=status.tallies.segments,
        uploaded_bytes=status.tallies.bytes,
        attention_partitions=failing_partitions,
        requests=status.usage.total_requests,
    )


def _failing_upload_entry(watch: PartitionUploadState, config: str, runbook_url: str) -> NeedsAttention:
    """Return the entry of a failing partition for the list of problems, with the first command to run."""
    trouble = watch.trouble
    return NeedsAttention(
        partition=str(watch.name),
        kind=trouble.value if trouble else "",
        reason=watch.reason,
        segment="",
        since_ms=watch.troubled_ms or None,
        failures=watch.failures,
        next_try_ms=watch.retry_at_ms or None,
        commands=() if trouble in PASSING else (format_command("checkpoints show", watch.name, config),),
        runbook=runbook_link(runbook_url, "alert-tieredcompactoragentrefuses"),
    )


def _running_upload_entry(partition: TopicPartition, begun_ms: int, now_ms: int) -> WorkItem:
    """Return the entry of a running upload for the list of jobs, with its progress."""
    return WorkItem(
        partition=str(partition),
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


def _upload_row(led: _LedPartition, now_ms: int) -> UploadRow:
    """Return the row of a partition that this broker leads in the list of partitions."""
    watch, end = led.watch, led.watch.end
    why = "it failed before" if watch.trouble else "sealed segments" if led.lag.segments else "the tier has all sealed segments"
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
        lag_staged_segments=led.lag.staged,
        lag_deadline_ms=led.lag.deadline_ms or None,
        next=PlannedStep(action="upload", at_ms=max(now_ms, watch.retry_at_ms) if led.lag.segments or watch.trouble else None, why=why),
    )
