"""Commands ``outputs``: compacted views for other readers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from compactor.access.tier import Tier
from compactor.cli import tiers
from compactor.cli.output import Output, Table, format_size
from compactor.config.units import format_duration
from compactor.errors import CompactorError, ExitCode, UsageError
from compactor.extras import require_pip_extra
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.outputs import configured_output_writer
from compactor.round.compaction import disk_budget_bytes

T = TypeVar("T")


def write_outputs(args: argparse.Namespace, out: Output) -> ExitCode:
    tier = tiers.open_configured_tier(args)
    writer = configured_output_writer(tier, lambda store: store)
    if writer is None:
        raise UsageError("no output is configured", hint="Name topics under [outputs.iceberg], or a target under [tier.pinterest]")
    disk = DiskBudget(disk_budget_bytes(tier.settings.cleaner, tier.state_dir))
    found, code = _for_each_partition(tier, args, out, lambda name: writer.update_output(tier, name, disk))
    rows = [{"topic": name.topic, "partition": name.partition, "status": done.status, "summary": done.summary} for name, done in found]
    table = Table("", ("partition", "status", ""), [(f"{row['topic']}-{row['partition']}", row["status"], row["summary"]) for row in rows])
    out.print_result({"partitions": rows}, table)
    return code


def list_iceberg_tables(args: argparse.Namespace, out: Output) -> ExitCode:
    tier = tiers.open_read_only(args)
    if not tier.settings.outputs.iceberg.topics:
        raise UsageError("no topic has an Iceberg table", hint="Name topics under [outputs.iceberg]; `generations list` has Pinterest's")
    require_pip_extra("iceberg", "[outputs.iceberg]")
    from compactor.features.iceberg.output import read_table_status

    found, code = _for_each_partition(tier, args, out, lambda name: read_table_status(tier, name))
    statuses = [status for _, status in found if status is not None]
    rows = [
        (f"{one.topic}-{one.partition}", one.table, one.status, one.lag_offsets, format_duration(one.lag_ms) if one.lag_ms else "",
         one.rows, one.files, format_size(one.bytes), one.snapshots, one.undecoded or "", one.remains)
        for one in statuses
    ]  # fmt: skip
    columns = ("partition", "table", "status", "lag", "behind for", "rows", "files", "size", "snapshots", "not decoded", "remains")
    table = Table("", columns, rows, minor=("snapshots", "files", "remains"))
    out.print_result({"tables": [tiers.report_document(one) for one in statuses]}, table)
    return code


def _for_each_partition(
    tier: Tier, args: argparse.Namespace, out: Output, query: Callable[[TopicPartition], T]
) -> tuple[list[tuple[TopicPartition, T]], ExitCode]:
    """Run ``daemon.threads`` partitions at a time. Partitions of deleted topics are left out."""
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=bool(args.partitions))
    names = [name for name in tiers.select_partitions(tier, args.partitions) if name == tier.latest_incarnation(name)]

    def call_query(partition: TopicPartition) -> T | CompactorError:
        try:
            return query(partition)
        except CompactorError as error:
            return error

    found: list[tuple[TopicPartition, T]] = []
    with ThreadPoolExecutor(tier.settings.daemon.threads, "outputs") as pool:
        for name, done in zip(names, pool.map(call_query, names), strict=True):
            if isinstance(done, CompactorError):
                outcomes.record_failure(str(name), done)
            else:
                outcomes.record_success()
                found.append((name, done))
    return found, outcomes.exit_code()
