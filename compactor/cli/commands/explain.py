"""Command ``explain``: why a partition is not cleaned, or what became of a key or an offset."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from compactor.access.tier import Tier
from compactor.cli import command_parser, tiers
from compactor.cli.output import Output, Table
from compactor.decoding import DecodedKeyOrValue, KeyAndValueDecoder, parse_topic_key
from compactor.model.ids import TopicPartition
from compactor.views import explain as explaining

MAX_EVENT_ROWS = 60
"""Largest number of facts in the table. JSON has all of them."""


def print_partition_explanation(args: argparse.Namespace, out: Output) -> None:
    tier = tiers.open_read_only(args)
    names = tiers.select_partitions(tier, [args.partition])
    found = [(name, _explain_partition(tier, name, args, out)) for name in names]
    documents = [
        {
            **tiers.partition_name_fields(name),
            "answer": one.answer,
            "facts": [{"kind": fact.kind, "text": fact.text, **fact.values} for fact in one.facts],
        }
        for name, one in found
    ]
    tables = [_explanation_facts_table(f"{name}: {one.answer}" if len(found) > 1 else one.answer, one.facts) for name, one in found]
    out.print_result(documents[0] if len(found) == 1 else {"partitions": documents}, *tables)


def _explain_partition(tier: Tier, partition: TopicPartition, args: argparse.Namespace, out: Output) -> explaining.Explanation:
    now = command_parser.now_ms_from_arguments(args)
    searches = args.key is not None or args.offset is not None
    total = tiers.sum_stored_bytes(tier, [partition], out, includes_replaced_segments=True) if searches else None
    with out.show_progress(f"reading {partition}", total, "bytes") as progress:
        if args.key is not None:
            decoder = KeyAndValueDecoder(tier.settings)
            key = parse_topic_key(args.key, partition.topic, decoder)
            decoded = decoder.decode_key_or_value(key) if decoder.has_registry else DecodedKeyOrValue()
            shown = f"{decoded.format_value_as_text()} by schema {decoded.schema_id}" if decoded.is_json else ""
            return explaining.explain_key(tier, partition, key, now, progress.advance, shown)
        if args.offset is not None:
            return explaining.explain_offset(tier, partition, args.offset, now, progress.advance)
        return explaining.explain_partition(tier, partition, now)


def _explanation_facts_table(title: str, facts: Sequence[explaining.ExplanationFact]) -> Table:
    """The last row states how many facts after MAX_EVENT_ROWS are left out."""
    rows = [(fact.kind.replace("_", " "), fact.text) for fact in facts[:MAX_EVENT_ROWS]]
    if len(facts) > MAX_EVENT_ROWS:
        rows.append(("", f"and {len(facts) - MAX_EVENT_ROWS} more; --output json has all"))
    return Table(title, ("", ""), rows)
