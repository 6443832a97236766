"""The document of a service's first page, built the same way for the daemon and the agent. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from compactor import __version__
from compactor.daemon.scheduling import PartitionCondition
from compactor.model.ids import TopicPartition
from compactor.service.service_status import ServiceStatus
from compactor.views.time_formats import count_noun
from compactor.web.documents import (
    Level,
    PartitionNeedingAttention,
    RowT,
    RunningJobProgress,
    ServiceStatusDocument,
    ServiceVerdict,
    TotalsT,
    WorkScanTimes,
)
from compactor.web.listing import ItemT, PartitionListColumn, PartitionListQuery, list_partitions_page

RUNBOOK_FILE = "docs/operating.md"
"""The runbook in the documentation, where ``runbook_url`` is not set."""
MOST_SHOWN = 20
"""Largest number of partitions under "needs attention". The list below has all of them."""
ORDER = {condition: place for place, condition in enumerate(PartitionCondition)}
"""Place of each condition in the list's default order: the most urgent first."""


def runbook_link(runbook_url: str, section: str) -> str:
    """Return the link to a section of the runbook. ``runbook_url``: address of the runbook; empty for the one in the documentation."""
    return f"{runbook_url or RUNBOOK_FILE}#{section}"


def service_status_document(
    document_class: type[ServiceStatusDocument[TotalsT, RowT]],
    kind: Literal["daemon", "agent"],
    status: ServiceStatus,
    partitions: Sequence[ItemT],
    columns: Mapping[str, PartitionListColumn[ItemT]],
    query: PartitionListQuery,
    make_row: Callable[[ItemT], RowT],
    *,
    totals: TotalsT,
    needs_attention: Sequence[PartitionNeedingAttention],
    running_jobs: Sequence[RunningJobProgress],
    due_partitions: int,
) -> ServiceStatusDocument[TotalsT, RowT]:
    """Return the document of a service's first page.

    :param document_class: class of the document.
    :param partitions: list entries of all partitions, from which ``query`` selects those to show.
    :param columns: columns by which the list can be sorted, by name.
    :param make_row: makes a row of the list from an entry.
    :param needs_attention: the failing partitions to show; all of them are counted in ``totals.attention_partitions``.
    :param due_partitions: number of partitions that wait for work.
    """
    counts = Counter(each.condition for each in partitions)
    return document_class(
        kind=kind,
        version=__version__,
        holder=status.holder,
        tier=status.tier,
        now_ms=status.now_ms,
        started_ms=status.started_ms,
        ready=status.ready,
        verdict=service_verdict(
            ready=status.ready,
            stopping=status.stopping,
            problem=status.problem,
            has_scanned=status.scans > 0,
            failing_partitions=totals.attention_partitions,
            running_jobs=len(running_jobs),
            due_partitions=due_partitions,
        ),
        looks=WorkScanTimes(count=status.scans, last_ms=status.scan_ms or None, interval_ms=status.interval_ms),
        totals=totals,
        needs_attention=tuple(needs_attention),
        at_work=tuple(running_jobs),
        conditions={chip.value: counts[chip] for chip in PartitionCondition},
        partitions=list_partitions_page(partitions, query, columns, make_row),
    )


def format_partition_command_line(verb: str, partition: TopicPartition, config_path: str) -> str:
    """Return a command line of ``tiered-compactor`` about a partition, for people to copy.

    :param verb: command and subcommand, such as ``segments list``.
    :param config_path: path of the configuration file that the service was started with; empty for none.
    """
    return f"tiered-compactor {verb} {partition}" + (f" --config {shlex.quote(config_path)}" if config_path else "")


def service_verdict(
    *, ready: bool, stopping: bool, problem: str, has_scanned: bool, failing_partitions: int, running_jobs: int, due_partitions: int
) -> ServiceVerdict:
    """Return the service's condition at a glance.

    :param ready: whether the latest scan for work succeeded.
    :param stopping: whether the service has been asked to stop.
    :param problem: why the service cannot work, or an empty string.
    :param has_scanned: whether it has scanned the partitions at least once.
    :param due_partitions: number of partitions that wait for work.
    """
    level, text, detail = _verdict_level_text_and_detail(
        ready=ready, stopping=stopping, problem=problem, has_scanned=has_scanned, failing_partitions=failing_partitions
    )
    doing = [count_noun(running_jobs, "job") + " at work"] if running_jobs else []
    doing += [count_noun(due_partitions, "partition") + " due"] if due_partitions else []
    return ServiceVerdict(level=level, text=text, detail=detail or ", ".join(doing) or "No job runs, and no partition is due")


def _verdict_level_text_and_detail(
    *, ready: bool, stopping: bool, problem: str, has_scanned: bool, failing_partitions: int
) -> tuple[Level, str, str]:
    """Return level, text and detail of the verdict about a service.

    The detail is empty for levels that need no reason. The caller then fills in the work that runs or is due.
    """
    if stopping:
        return "stopping", "Stopping", "The next start continues running jobs"
    if problem:
        return "down", "It cannot work", problem
    if not has_scanned or not ready:
        return "starting", "Starting", "The first scan of all partitions is running"
    if failing_partitions:
        return "attention", f"{count_noun(failing_partitions, 'partition')} {'needs' if failing_partitions == 1 else 'need'} you", ""
    return "ok", "All well", ""
