"""Command ``repair``: makes good missing and damaged objects of live segments."""

from __future__ import annotations

import argparse
from pathlib import Path

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.cli import command_parser, tiers, tiers as audit
from compactor.cli.kernels import compile_numba_kernels
from compactor.cli.output import Output, Table, format_size
from compactor.config.settings import load_settings
from compactor.config.units import count_noun
from compactor.errors import BadData, ExitCode, UsageError
from compactor.model.ids import TopicPartition
from compactor.tier.kinds import tier_kind
from compactor.upkeep.repair import DirectoryRepairSource, RepairReport, RepairSource, TierRepairSource, repair_partition
from compactor.views.checkpoints import read_only_copy


def repair_partition_command(args: argparse.Namespace, out: Output) -> ExitCode:
    if not tier_kind(command_parser.load_command_settings(args)).owns_root:
        raise UsageError(
            "`repair` needs the digests of all objects, and other programs that write a tier record none",
            hint="Restore objects from the store's versions or a backup; `undo` takes a round of this program back while its sources exist",
        )
    tier, name = tiers.open_tier_and_partition(args, tiers.open_configured_tier)
    sources = [_open_repair_source(text, tier, name) for text in args.sources]
    compile_numba_kernels(out)
    is_manual = not args.dry_run
    with (
        audit.audited_if(is_manual, args, tier.settings, out, "repair", [str(name)], sources=" ".join(args.sources)),
        out.show_progress(f"reading {name}", tier.open_partition_log(name).refresh().bytes, "bytes") as progress,
    ):
        report = repair_partition(tier, name, sources, progress.advance, dry_run=args.dry_run)
    return _print_repair_report(report, name, out, dry_run=args.dry_run)


def _open_repair_source(source_name: str, tier: Tier, partition: TopicPartition) -> RepairSource:
    """Open a Kafka log directory or another tier. Raises UsageError if the path is neither, has no segments, or configures this tier."""
    path = Path(source_name)
    if path.is_dir():
        below = path / str(partition.first_incarnation)
        folder = below if below.is_dir() else path
        if not any(folder.glob("*.log")):
            raise UsageError(
                f"{path} holds neither segments nor a directory {partition.first_incarnation}", hint="Name a Kafka log directory"
            )
        return DirectoryRepairSource(folder)
    if not path.is_file():
        raise UsageError(f"there is neither a directory nor a configuration {path}", hint="Name a Kafka log directory or a configuration")
    other = read_only_copy(open_tier(load_settings(source_name, {})))  # what the environment sets is this tier's
    if other.ports.layout.url == tier.ports.layout.url:
        raise UsageError(f"both configurations name the tier at {other.ports.layout.url}", hint="--from is where to look for what is lost")
    return TierRepairSource(other, other.list_partitions([str(partition.first_incarnation)])[0])


def _print_repair_report(report: RepairReport, partition: TopicPartition, out: Output, *, dry_run: bool) -> ExitCode:
    would = "would be " if dry_run else ""
    rows: list[tuple[object, ...]] = [(would + one.how, format_size(one.bytes), one.object, one.new_object) for one in report.repaired]
    for left in report.unrepaired:
        out.print_note(f"error: {left.object}: {left.reason}")
        rows.append(("not repaired", "", left.object, left.reason))
    tables = [Table("", ("status", "size", "object", "now"), rows, below=2)] if rows else []
    done, left_over = count_noun(len(report.repaired), "object"), len(report.unrepaired)
    summary = f"{done} {'would be ' if dry_run else ''}repaired" if rows else f"{partition}: every object is as recorded"
    summary += f", {left_over} cannot be" if left_over else ""
    if report.repaired and not dry_run:
        summary += f". `wake {partition}` or `run {partition}` begins the round that had to wait"
    document = tiers.report_document(report)
    out.print_result({key: list(value) for key, value in document.items()}, *tables, summary=summary)
    return BadData.exit_code if report.unrepaired else 0
