"""Commands ``orphans``: objects of a broker-managed tier that no metadata names."""

from __future__ import annotations

import argparse

from compactor.bootstrap import open_tier
from compactor.cli import tiers, tiers as audit
from compactor.cli.output import Output, Table, format_size
from compactor.config.units import count_noun, format_duration
from compactor.upkeep.orphans import find_orphans, purge_orphans, read_orphan_list, write_orphan_list


def find_command(args: argparse.Namespace, out: Output) -> None:
    tier = tiers.open_configured_tier(args)
    _ = tier.broker_metadata
    names = tiers.select_partitions(tier, args.partitions)
    with out.show_progress("looking", len(names), "partitions") as progress:
        found = find_orphans(tier, names, progress.advance)
    if args.to is not None:
        write_orphan_list(found, args.to)
    rows = [
        (one.partition, format_size(one.bytes), format_duration(one.age_ms), one.certainty, one.object, one.reason) for one in found.orphans
    ]
    total = format_size(sum(one.bytes for one in found.orphans))
    where = f" {args.to} lists them" if args.to is not None else ""
    columns = ("partition", "size", "age", "certainty", "object", "because")
    tables = [Table("", columns, rows, below=2)] if rows else []
    out.print_result(found.to_json(), *tables, summary=f"{count_noun(len(rows), 'orphan')}, {total}.{where}")


def purge_command(args: argparse.Namespace, out: Output) -> None:
    wanted = read_orphan_list(args.file)
    tier = tiers.open_configured_tier(args)
    _ = tier.broker_metadata
    data = open_tier(tier.settings).ports.data
    details: dict[str, str | int] = {"file": str(args.file), "orphans": len(wanted.orphans)}
    recorded = audit.audited_if(not args.dry_run, args, tier.settings, out, "orphans purge", [], **details)
    with recorded, out.show_progress("looking again"):
        done = purge_orphans(tier, wanted, data, dry_run=args.dry_run)
    freed = sum(one.bytes for one in done.deleted)
    kept = [{"object": name, "reason": why} for name, why in done.kept.items()]
    document = {"deleted": [one.object for one in done.deleted], "kept": kept, "bytes": freed}
    would = "would be " if args.dry_run else ""
    rows = [(would + "deleted", one.object, "") for one in done.deleted] + [("kept", name, why) for name, why in done.kept.items()]
    tables = [Table("", ("", "object", "because"), rows, below=2)] if rows else []
    out.print_result(
        document, *tables, summary=f"{count_noun(len(done.deleted), 'object')} {would}deleted, {len(done.kept)} kept; {format_size(freed)}"
    )
