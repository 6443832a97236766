"""``segments list T-P`` and ``segments dump T-P ID``: remote segments, and what is in one."""

from __future__ import annotations

import argparse
from typing import Any

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size


def add_arguments(parser: frame.Parser) -> None:
    listing = parser.subcommand("list", "remote segments with state and lineage")
    listing.add_argument("partition", metavar="TOPIC-PARTITION")
    listing.runs(show_list)
    dump = parser.subcommand("dump", "batches and records of one segment")
    dump.add_argument("partition", metavar="TOPIC-PARTITION")
    dump.add_argument("id", metavar="ID", help="as `segments list` prints it, or its first characters")
    dump.add_argument("--whole", action="store_true", help="long keys and values are not cut, and headers are there")
    dump.runs(show_dump)


def show_list(args: argparse.Namespace, out: Output) -> None:
    from compactor.views.dump import list_segments, segments_of_brokers

    opened = tiers.opened(args)
    (name,) = opened.partitions([args.partition])
    state = opened.open(name).refresh()
    found = list_segments(state, opened.sidecars(name).ids(), segments_of_brokers(opened, state))
    live = {segment.id for segment in state.live}
    rows = [
        (
            s["id"],
            _state(s, live),
            f"{s['start_offset']} - {s['end_offset']}",
            size(s["bytes"]),
            " ".join(f"{e['epoch']}@{e['start_offset']}" for e in s["leader_epochs"]),
            (s["replaced_by"] or "")[:8],
            size(s["sidecar"]["bytes"]) if s["sidecar"] else "",
        )
        for s in found
    ]
    out.result({"segments": found}, Table("", ("id", "state", "offsets", "size", "leader epochs", "replaced by", "sidecar"), rows))


def _state(segment: dict[str, Any], live: set[str]) -> str:
    """Kafka's states in a word; JSON has them as they are called."""
    if segment["state"] == "COPY_SEGMENT_FINISHED" and not segment["replaced_by"] and segment["id"] not in live:
        return "not read"
    words = {"COPY_SEGMENT_STARTED": "being made", "COPY_SEGMENT_FINISHED": "live", "DELETE_SEGMENT_STARTED": "being deleted"}
    return "replaced" if segment["replaced_by"] else words[segment["state"]]


def show_dump(args: argparse.Namespace, out: Output) -> None:
    from compactor.views.dump import dump_segment

    opened = tiers.opened(args)
    (name,) = opened.partitions([args.partition])
    limit = opened.cleaner_for(name.topic).max_decompressed_batch_bytes
    with out.progress("reading", unit="bytes") as progress, opened.counters.watched(progress.advance):
        document = dump_segment(opened, name, args.id, limit, whole=args.whole)
    fields = ("offset", "timestamp", "key", "value")
    rows = [
        (b["base_offset"], b["last_offset"], b["codec"], b["kind"], b["producer_id"], *map(r.get, fields), *_headers(r, shown=args.whole))
        for b in document["batches"]
        for r in b["records"] or [{}]
    ]
    columns = ("base offset", "last offset", "codec", "kind", "producer", *fields, *(("headers",) if args.whole else ()))
    out.result(document, Table(document["id"], columns, rows))


def _headers(record: dict[str, Any], *, shown: bool) -> tuple[str, ...]:
    return (" ".join(f"{each['key']}={each['value']}" for each in record.get("headers", ())),) if shown else ()
