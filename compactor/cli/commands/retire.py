"""Command ``retire``: deletes replaced segments whose grace is over, and sweeps orphans."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from compactor.access.rounds import create_round
from compactor.access.tier import Tier
from compactor.adapters.brokers.cluster import query_topic_ids
from compactor.bootstrap import kafka_connection_settings
from compactor.cli import command_parser, tiers, tiers as audit
from compactor.cli.output import Output, Table, format_size
from compactor.config.times import format_iso_time
from compactor.config.units import count_noun
from compactor.constants import NEVER_MS
from compactor.control.logs import PartitionLog, collect_queued_hints
from compactor.control.records import DeletionCheckResult
from compactor.errors import CompactorError, ExitCode
from compactor.model.ids import TopicPartition
from compactor.upkeep.retire import (
    MAX_UNHINTED_INSPECTIONS,
    GraceClock,
    RetireReport,
    abort_stale_uploads,
    delete_missing_topics,
    partitions_to_inspect,
    require_deletion_configured,
    retire_partition,
)

NOTED_TOGETHER = 100
"""Largest number of partitions whose inspections are recorded in one record of the catalog."""


@dataclass
class _RetireFindingsCollector:
    """Writes what `retire` found to the catalog, many partitions per record.

    behind: control logs that are longer than the catalog knows.
    looks: times of the next deletion, by name of the control log.
    """

    tier: Tier
    records_next_deletion_times: bool
    now_ms: int
    behind: list[PartitionLog] = field(default_factory=list)
    looks: dict[str, DeletionCheckResult] = field(default_factory=dict)

    def add_findings(self, partition: TopicPartition, log: PartitionLog, report: RetireReport) -> None:
        if log.state.slot > self.tier.min_log_slot(partition):
            self.behind.append(log)
        if self.records_next_deletion_times:
            self.looks[self.tier.control_log_name(partition)] = DeletionCheckResult(log.state.slot, report.next_ms, self.now_ms)
        if max(len(self.behind), len(self.looks)) >= NOTED_TOGETHER:
            self.save_findings()

    def save_findings(self) -> None:
        if self.behind:
            self.tier.change_notifier.record_lengths(self.behind)
        if self.looks:
            self.tier.change_notifier.record_deletion_checks(self.looks)
        self.behind.clear()
        self.looks.clear()


def retire_command(args: argparse.Namespace, out: Output) -> ExitCode:
    is_manual = args.force_now and not args.dry_run
    details = {} if args.now is None else {"now": format_iso_time(args.now)}
    with audit.audited_if(is_manual, args, command_parser.load_command_settings(args), out, "retire --force-now", [], **details):
        return _retire_partitions(args, out)


def _retire_partitions(args: argparse.Namespace, out: Output) -> ExitCode:
    clock = GraceClock(args.now, args.force_now)
    tier = tiers.open_configured_tier(args, writing_command="retire")
    if not args.dry_run:
        require_deletion_configured(tier.retention)
    if args.now is not None and not args.force_now and args.now > tier.ports.clock_ms():
        out.print_note("note: --now is later than the store's clock, so the store's clock is used; only --force-now shortens grace")
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=False)
    would = "to be " if args.dry_run else ""
    states, rows = (f"{would}deleted", f"{would}swept", "waiting"), list[tuple[object, ...]]()
    deleted: list[str] = []
    swept: list[str] = []
    waiting: list[str] = []
    sizes: dict[str, int] = {}
    usual = args.now is None and not args.dry_run and tier.kind.is_compactor_managed
    removed = _delete_missing_topics(tier, outcomes) if usual else []
    every = tier.list_partitions()
    # Machines go by one another's looks: by the store's clock.
    now_ms = (tier.ports.control if usual else tier.ports).clock_ms()
    names = every
    if usual and not args.all:
        collect_queued_hints(tier.catalog)
        names = partitions_to_inspect(tier.catalog.state, every, now_ms, tier.control_log_name)
    noted = _RetireFindingsCollector(tier, usual and len(every) > MAX_UNHINTED_INSPECTIONS, now_ms)
    moments = [inspection.next_ms for inspection in tier.catalog.state.looks.values()]
    with out.show_progress("retiring", len(names), "partitions") as progress:
        for name in names:
            progress.begin_part(f"retiring {name}")
            try:
                # An open intent is resumed first, as `run` would.
                work = create_round(tier, name, tier.ports.clock_ms())
                log = tier.open_partition_log(name, caller_runs_round=True)
                report = retire_partition(tier.ports, log, tier.lease, tier.retention, clock=clock, dry_run=args.dry_run, job=work)
            except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
                outcomes.record_failure(str(name), error)
                continue
            finally:
                progress.advance()
            outcomes.record_success()
            if not args.dry_run:
                noted.add_findings(name, log, report)
            sizes |= report.sizes
            deleted += report.deleted
            swept += report.swept
            waiting += report.waiting
            reported = zip(states, (report.deleted, report.swept, report.waiting), strict=True)
            rows += [(state, name, *_count_objects(keys, sizes)) for state, keys in reported if keys]
            moments.append(report.next_ms)
    noted.save_findings()
    unfinished = _abort_stale_uploads(tier, args, outcomes)
    swept += unfinished
    rows += [(states[1], "unfinished uploads", *_count_objects(unfinished, sizes))] if unfinished else []
    rows.sort(key=lambda row: states.index(str(row[0])))
    tables = [Table("", ("state", "partition", "segments", "objects", "size"), rows)] if rows else []
    freed, held = (sum(sizes.get(key, 0) for key in keys) for keys in ([*deleted, *swept], waiting))
    later = min((moment for moment in moments if now_ms < moment < NEVER_MS), default=None)
    summary = f"{count_noun(len(deleted), 'object')} {would}deleted, {len(swept)} {would}swept ({format_size(freed)})"
    summary += f", {len(waiting)} wait for grace"
    summary += f" ({format_size(held)})" if waiting else ""
    summary += f". {count_noun(len(removed), 'partition')} of deleted topics left the tier: {', '.join(removed)}" if removed else ""
    summary += f". The next are due at {format_iso_time(later)}" if later is not None else ""
    summary += f". Looked at {len(names)} of {len(every)} partitions" if len(names) < len(every) else ""
    document = {"deleted": deleted, "swept": swept, "waiting": waiting, "bytes": freed, "next_ms": later, "looked_at": len(names)}
    document |= {"waiting_bytes": held, "topics_deleted": removed}
    out.print_result(document, *tables, summary=summary)
    return outcomes.exit_code()


def _delete_missing_topics(tier: Tier, outcomes: tiers.PartitionOutcomes) -> list[str]:
    try:
        ask = partial(query_topic_ids, kafka_connection_settings(tier.settings))
        return [str(name) for name in delete_missing_topics(tier, ask)]
    except CompactorError as error:
        outcomes.record_failure("topics that their cluster has deleted", error)
        return []


def _abort_stale_uploads(tier: Tier, args: argparse.Namespace, outcomes: tiers.PartitionOutcomes) -> tuple[str, ...]:
    try:
        now = tier.ports.clock_ms()
        if args.now is not None:
            now = args.now if args.force_now else min(now, args.now)
        return abort_stale_uploads(tier, now, dry_run=args.dry_run)
    except CompactorError as error:
        outcomes.record_failure("unfinished uploads", error)
        return ()


def _count_objects(object_keys: Sequence[str], object_sizes: Mapping[str, int]) -> tuple[int, int, str]:
    """Number of segments (keys that differ only in the suffix are of one), of objects, and their size as text."""
    return (
        len({key.rpartition(".")[0] for key in object_keys}),
        len(object_keys),
        format_size(sum(object_sizes.get(key, 0) for key in object_keys)),
    )
