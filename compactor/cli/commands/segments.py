"""Commands ``segments``: a partition's segments, and the records in one of them."""

from __future__ import annotations

import argparse
from typing import Any

from compactor.cli import tiers
from compactor.cli.output import Output, Table, format_size
from compactor.views.dump import dump_segment, list_segments, unused_broker_segments


def list_segments_command(args: argparse.Namespace, out: Output) -> None:
    tier = tiers.open_configured_tier(args)
    names, found, live = tiers.select_partitions(tier, [args.partition]), [], set()
    for name in names:
        state = tier.open_partition_log(name).refresh()
        listed = list_segments(state, tier.open_sidecar_store(name).stored_sidecar_sizes(), unused_broker_segments(tier, state))
        found += [{**tiers.partition_name_fields(name), **segment} for segment in listed]
        live |= {segment.id for segment in state.live}
    rows = [
        (
            s["id"],
            tiers.partition_of_row(s) if len(names) > 1 else "",
            _segment_state_word(s, live),
            f"{s['start_offset']} - {s['end_offset']}",
            format_size(s["bytes"]),
            " ".join(f"{e['epoch']}@{e['start_offset']}" for e in s["leader_epochs"]),
            (s["replaced_by"] or "")[:8],
            format_size(s["sidecar"]["bytes"]) if s["sidecar"] else "",
        )
        for s in found
    ]
    columns = ("id", "partition", "state", "offsets", "size", "leader epochs", "replaced by", "sidecar")
    out.print_result({"segments": found}, Table("", columns, rows, minor=("sidecar", "leader epochs", "replaced by")))


def _segment_state_word(segment: dict[str, Any], live_segment_ids: set[str]) -> str:
    if segment["state"] == "COPY_SEGMENT_FINISHED" and not segment["replaced_by"] and segment["id"] not in live_segment_ids:
        return "not read"
    words = {"COPY_SEGMENT_STARTED": "being made", "COPY_SEGMENT_FINISHED": "live", "DELETE_SEGMENT_STARTED": "being deleted"}
    return "replaced" if segment["replaced_by"] else words[segment["state"]]


def dump_segment_command(args: argparse.Namespace, out: Output) -> None:
    tier, name = tiers.open_tier_and_partition(args, tiers.open_configured_tier)
    limit = tier.cleaner_settings_for_topic(name.topic).max_decompressed_batch_bytes
    with out.show_progress("reading", unit="bytes") as progress, tier.counters.report_transferred_bytes_to(progress.advance):
        document = dump_segment(tier, name, args.id, limit, show_everything=args.whole)
    fields = ("offset", "timestamp", "key", "value")
    rows = [
        (
            b["base_offset"],
            b["last_offset"],
            b["codec"],
            b["kind"],
            b["producer_id"],
            *map(r.get, fields),
            *_record_header_cells(r, are_headers_shown=args.whole),
        )
        for b in document["batches"]
        for r in b["records"] or [{}]
    ]
    columns = ("base offset", "last offset", "codec", "kind", "producer", *fields, *(("headers",) if args.whole else ()))
    out.print_result(
        document, Table(document["id"], columns, rows, minor=("producer", "kind", "codec", "last offset"), below=len(columns) - 7)
    )


def _record_header_cells(record: dict[str, Any], *, are_headers_shown: bool) -> tuple[str, ...]:
    return (" ".join(f"{each['key']}={each['value']}" for each in record.get("headers", ())),) if are_headers_shown else ()
