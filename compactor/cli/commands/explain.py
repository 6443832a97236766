"""Command ``explain TOPIC-PARTITION [--key K | --offset N]``: explains why a partition is not cleaned, or what became of a key or an
offset.
"""

from __future__ import annotations

import argparse

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table
from compactor.decoding.fields import DecodedField, FieldDecoder, parse_key_of_topic
from compactor.views import explain as explaining

MAX_EVENT_ROWS = 60
"""Largest number of facts in the table. JSON has all of them."""


def run_explain(args: argparse.Namespace, out: Output) -> None:
    opened, name = tiers.open_tier_and_partition(args)
    now = frame.cleaner_clock_ms(args)
    searches = args.key is not None or args.offset is not None
    total = tiers.sum_stored_bytes(opened, [name], out, with_replaced=True) if searches else None
    with out.progress(f"reading {name}", total, "bytes") as progress:
        if args.key is not None:
            decoder = FieldDecoder(opened.settings)
            key = parse_key_of_topic(args.key, name.topic, decoder)
            decoded = decoder.decode(key) if decoder.has_registry else DecodedField()
            shown = f"{decoded.format_text()} by schema {decoded.schema_id}" if decoded.is_json else ""
            found = explaining.explain_key(opened, name, key, now, progress.advance, shown)
        elif args.offset is not None:
            found = explaining.explain_offset(opened, name, args.offset, now, progress.advance)
        else:
            found = explaining.explain_partition(opened, name, now)
    document = {
        "topic": found.topic,
        "partition": found.partition,
        "answer": found.answer,
        "facts": [{"kind": fact.kind, "text": fact.text, **fact.values} for fact in found.facts],
    }
    rows = [(fact.kind.replace("_", " "), fact.text) for fact in found.facts[:MAX_EVENT_ROWS]]
    if len(found.facts) > MAX_EVENT_ROWS:
        rows.append(("", f"and {len(found.facts) - MAX_EVENT_ROWS} more; --output json has all"))
    out.print_result(document, *([Table(found.answer, ("", ""), rows)] if rows else []), summary="" if rows else found.answer)
