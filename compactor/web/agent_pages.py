"""An agent's pages: turns its status into documents. Pure, except for asking the agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from compactor import __version__
from compactor.agent.metrics import agent_metrics
from compactor.agent.plan import PartitionUploadState, UploadFailureReason, UploadLag, upload_lag
from compactor.agent.status import AgentStatus
from compactor.daemon.scheduling import PartitionCondition
from compactor.model.ids import TopicPartition
from compactor.service.metrics import render_metrics
from compactor.web.documents import (
    AgentTotals,
    NextPartitionAction,
    PartitionNeedingAttention,
    PartitionUploadDocument,
    PartitionUploadRow,
    RunningJobProgress,
    SegmentPendingUpload,
    ServiceStatusDocument,
)
from compactor.web.listing import PartitionListColumn, PartitionListQuery
from compactor.web.status_page import MOST_SHOWN, ORDER, format_partition_command_line, runbook_link, service_status_document

MOST_PENDING = 100
"""Largest number of waiting segments on a partition's page. The totals cover all of them."""
PASSING = frozenset(
    {
        UploadFailureReason.EPOCH,
        UploadFailureReason.BROKER,
        UploadFailureReason.FENCED,
        UploadFailureReason.STORE,
        UploadFailureReason.BUDGET,
    }
)
"""Failures that are not caused by the partition itself, so that no command about the partition helps."""


@dataclass(frozen=True)
class _BrokerLedPartitionEntry:
    """Entry of the list of partitions that this broker leads, with the values by which the list is sorted and filtered."""

    upload_state: PartitionUploadState
    name: str
    condition: PartitionCondition
    lag: UploadLag


UPLOAD_COLUMNS: dict[str, PartitionListColumn[_BrokerLedPartitionEntry]] = {
    "state": PartitionListColumn(lambda led: (ORDER[led.condition], led.upload_state.partition)),
    "name": PartitionListColumn(lambda led: (led.upload_state.partition,)),
    "lag": PartitionListColumn(lambda led: (led.lag.bytes, led.upload_state.partition), descending=True),
    "age": PartitionListColumn(
        lambda led: (-led.lag.since_ms if led.lag.since_ms else -(2**63), led.upload_state.partition), descending=True
    ),
    "end": PartitionListColumn(lambda led: (led.upload_state.position or 0, led.upload_state.partition), descending=True),
}


@dataclass(frozen=True)
class AgentPages:
    """Source of the pages that an agent (uploader on a broker) serves.

    status: returns the agent's present status.
    config: path of the agent's configuration file, for the commands that pages show.
    runbook_url: address of the runbook; empty for the one in the documentation.
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
        """Return the agent's metrics in Prometheus' text format. Kafka has no names for them, so ``with_kafka_names`` has no effect."""
        return render_metrics(agent_metrics(self.status()))

    def status_page_document(self, query: PartitionListQuery) -> ServiceStatusDocument[AgentTotals, PartitionUploadRow]:
        """Return the document of the agent's start page, whose list holds the partitions that ``query`` selects among those that this
        broker leads.
        """
        status = self.status()
        led = [_broker_led_partition_entry(upload_state, status) for upload_state in status.upload_states if upload_state.leads]
        failing_partitions = sorted(
            (each.upload_state for each in led if each.condition is PartitionCondition.ATTENTION),
            key=lambda w: (-w.troubled_ms, w.partition),
        )
        return service_status_document(
            ServiceStatusDocument[AgentTotals, PartitionUploadRow],
            "agent",
            status,
            led,
            UPLOAD_COLUMNS,
            query,
            lambda each: _partition_upload_row(each, status.now_ms),
            totals=_agent_totals(status, led, len(failing_partitions)),
            needs_attention=[
                _failing_upload_entry(upload_state, self.config, self.runbook_url) for upload_state in failing_partitions[:MOST_SHOWN]
            ],
            running_jobs=[
                _running_upload_entry(name, begun, status.now_ms)
                for name, begun in sorted(status.running.items(), key=lambda each: each[1])
            ],
            due_partitions=sum(each.condition is PartitionCondition.DUE for each in led),
        )

    def topics_document(self) -> None:
        """Return None: an agent has no page of topics."""

    def partition_document(self, partition: TopicPartition) -> PartitionUploadDocument | None:
        """Return the document of one partition's page, or None if the partition is in no log directory of the broker."""
        status = self.status()
        upload_state = next((upload_state for upload_state in status.upload_states if upload_state.partition == partition), None)
        if upload_state is None:
            return None
        pending = [
            SegmentPendingUpload(start_offset=f.base, end_offset=f.end - 1, bytes=f.size, sealed_ms=f.mtime_ms)
            for f in upload_state.segments_pending_upload
        ]
        begun = status.running.get(partition)
        return PartitionUploadDocument(
            version=__version__,
            now_ms=status.now_ms,
            row=_partition_upload_row(_broker_led_partition_entry(upload_state, status), status.now_ms),
            attention=_failing_upload_entry(upload_state, self.config, self.runbook_url) if upload_state.trouble is not None else None,
            at_work=None if begun is None else _running_upload_entry(partition, begun, status.now_ms),
            leads=upload_state.leads,
            directory=upload_state.seen.path,
            first_offset=upload_state.seen.base_offset_of_first_listed_segment
            if upload_state.seen.base_offset_of_first_listed_segment >= 0
            else None,
            active_offset=upload_state.seen.active_base if upload_state.seen.active_base >= 0 else None,
            pending=tuple(pending[:MOST_PENDING]),
            checked_ms=upload_state.checked_ms or None,
            commands=tuple(format_partition_command_line(verb, partition, self.config) for verb in ("segments list", "verify", "explain")),
        )


def _broker_led_partition_entry(upload_state: PartitionUploadState, status: AgentStatus) -> _BrokerLedPartitionEntry:
    """Return the list entry of a partition, with its condition and the lag of its upload."""
    found = upload_lag(upload_state)
    return _BrokerLedPartitionEntry(
        upload_state,
        str(upload_state.partition),
        _upload_condition(upload_state, found, is_uploading=upload_state.partition in status.running),
        found,
    )


def _upload_condition(upload_state: PartitionUploadState, lag: UploadLag, *, is_uploading: bool) -> PartitionCondition:
    """Return the condition of a partition: failing, being uploaded, unknown, waiting for upload, or up to date.

    :param is_uploading: whether an upload of this partition runs now.
    """
    if upload_state.trouble is not None:
        return PartitionCondition.ATTENTION
    if is_uploading:
        return PartitionCondition.WORKING
    if upload_state.position is None:
        return PartitionCondition.UNSEEN
    return PartitionCondition.DUE if lag.segments else PartitionCondition.QUIET


def _agent_totals(status: AgentStatus, led: list[_BrokerLedPartitionEntry], failing_partitions: int) -> AgentTotals:
    """Return the totals of the agent's first page.

    :param led: the partitions that this broker leads.
    """
    moments = [each.lag.since_ms for each in led if each.lag.since_ms]
    return AgentTotals(
        partitions=len(status.upload_states),
        led=len(led),
        lag_segments=sum(each.lag.segments for each in led),
        lag_bytes=sum(each.lag.bytes for each in led),
        oldest_lag_ms=max(0, status.now_ms - min(moments)) if moments else None,
        uploaded_segments=status.tallies.segments,
        uploaded_bytes=status.tallies.bytes,
        attention_partitions=failing_partitions,
        requests=status.usage.total_requests,
    )


def _failing_upload_entry(upload_state: PartitionUploadState, config_path: str, runbook_url: str) -> PartitionNeedingAttention:
    """Return the entry of a failing partition for the page's list of problems, with the first command to run.

    The entry has no command if the cause lies outside the partition, such as a store that cannot be reached.
    """
    trouble = upload_state.trouble
    return PartitionNeedingAttention(
        partition=str(upload_state.partition),
        kind=trouble.value if trouble else "",
        reason=upload_state.reason,
        segment="",
        since_ms=upload_state.troubled_ms or None,
        failures=upload_state.failures,
        next_try_ms=upload_state.retry_at_ms or None,
        commands=() if trouble in PASSING else (format_partition_command_line("checkpoints show", upload_state.partition, config_path),),
        runbook=runbook_link(runbook_url, "alert-tieredcompactoragentrefuses"),
    )


def _running_upload_entry(partition: TopicPartition, begun_ms: int, now_ms: int) -> RunningJobProgress:
    """Return the entry of a running upload for the page's list of jobs, with the time since it began. Its progress is unknown."""
    return RunningJobProgress(
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


def _partition_upload_row(led: _BrokerLedPartitionEntry, now_ms: int) -> PartitionUploadRow:
    """Return the row that the page's list has for a partition which this broker leads."""
    upload_state, end = led.upload_state, led.upload_state.end
    why = "it failed before" if upload_state.trouble else "sealed segments" if led.lag.segments else "the tier has all sealed segments"
    return PartitionUploadRow(
        partition=led.name,
        condition=led.condition.value,
        reason=f"{upload_state.trouble.value}: {upload_state.reason}" if upload_state.trouble else "",
        leader_epoch=end.leader_epoch if end else None,
        tier_end_offset=None if upload_state.position is None else upload_state.position - 1,
        high_watermark=end.high_watermark if end else None,
        lag_segments=led.lag.segments,
        lag_bytes=led.lag.bytes,
        lag_since_ms=led.lag.since_ms or None,
        lag_staged_segments=led.lag.staged,
        lag_deadline_ms=led.lag.deadline_ms or None,
        next=NextPartitionAction(
            action="upload", at_ms=max(now_ms, upload_state.retry_at_ms) if led.lag.segments or upload_state.trouble else None, why=why
        ),
    )
