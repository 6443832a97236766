"""Commands ``bloom show`` and ``bloom rebuild``: sidecars that let a round skip segments."""

from __future__ import annotations

import argparse

from compactor.cli import command_parser, tiers
from compactor.cli.output import Output, Table, format_size
from compactor.config.units import count_noun
from compactor.local.budget import DiskBudget
from compactor.round.compaction import disk_budget_bytes
from compactor.upkeep.repair import rebuild_sidecars, sidecars_json


def show_command(args: argparse.Namespace, out: Output) -> None:
    tier, name = tiers.open_tier_and_partition(args)
    document = sidecars_json(tier, name, command_parser.now_ms_from_arguments(args))
    rows = []
    for segment in document["segments"]:
        about = segment["sidecar"]
        place = (segment["id"], f"{segment['start_offset']} - {segment['end_offset']}", format_size(segment["bytes"]), segment["clean"])
        if about is None:
            rows.append((*place, "", "", "", "", segment["problem"]))
        else:
            made_for = about["made_for_keys"]
            promise = f"{made_for:,} keys at {about['rate_per_key']:.1g}" if made_for is not None else "none"
            rows.append((*place, about["keys"], format_size(about["bytes"]), about["bits_per_key"], promise, about["due"]))
    columns = ("id", "offsets", "size", "clean", "keys", "sidecar", "bits a key", "filter made for", "read anyway because")
    reported = [f"off: {document['reason']}"] if document["reason"] else []
    if document["asked"]:
        asked = f"{count_noun(document['asked'], 'filter')} asked, {count_noun(document['skipped'], 'read')} spared"
        rate = f"{document['useless_rate']:.2%} of the segments without a dirty key; the target is {document['target_rate']:.2%}"
        reported.append(f"{asked}, {document['useless']} useless ({rate})")
    out.print_result(
        document, Table("", columns, rows, minor=("filter made for", "bits a key", "sidecar", "keys"), below=1), summary="\n".join(reported)
    )


def rebuild_command(args: argparse.Namespace, out: Output) -> None:
    tier, name = tiers.open_tier_and_partition(args, tiers.open_for_control_writes)
    budget = DiskBudget(disk_budget_bytes(tier.cleaner_settings_for_topic(name.topic), tier.state_dir))
    with out.show_progress("reading", tiers.sum_stored_bytes(tier, [name], out), "bytes") as progress:
        made = rebuild_sidecars(tier, name, budget, unusable_only=args.missing, on_segment=progress.advance)
    document = {
        **tiers.partition_name_fields(name),
        "written": list(made.written),
        "kept": made.kept,
        "bytes_read": made.bytes_read,
        "bytes_written": made.bytes_written,
    }
    written = f"{count_noun(len(made.written), 'sidecar')} written ({format_size(made.bytes_written)})"
    reported = f"{written}, {made.kept} kept; {format_size(made.bytes_read)} read"
    out.print_result(document, summary=reported)
