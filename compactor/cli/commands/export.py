"""Command ``export``: writes a partition's current view as a Kafka log directory."""

from __future__ import annotations

import argparse

from compactor.cli import tiers
from compactor.cli.output import Output, Table, format_size
from compactor.config.units import count_noun
from compactor.constants import TopicId
from compactor.errors import BadData, ExitCode, UsageError
from compactor.tier.contents import is_topic_id
from compactor.upkeep.export import export_partition


def export_command(args: argparse.Namespace, out: Output) -> ExitCode:
    topic_id = args.new_topic_id or ""
    if topic_id and not (args.leader_epoch_zero and is_topic_id(topic_id)):
        raise UsageError(
            f"--new-topic-id {topic_id} is not a valid topic id, or --leader-epoch-zero is missing",
            hint="`kafka-topics --describe` shows the id of the topic",
        )

    tier, name = tiers.open_tier_and_partition(args, tiers.open_configured_tier)
    with out.show_progress(f"exporting {name}", unit="bytes") as progress:
        report = export_partition(
            tier,
            name,
            args.folder,
            progress.advance,
            lambda size: progress.begin_step(progress.title, size),
            new_cluster_topic_id=TopicId(topic_id) if args.leader_epoch_zero else None,
            skip_damaged=args.skip_damaged,
        )
    for left in report.skipped:
        out.print_note(f"error: offsets {left.first_offset} to {left.last_offset} of {name} cannot be read and are left out: {left.reason}")
    for one in report.open_transactions:
        offsets = f"offsets {one.first_offset} to {one.last_offset}"
        whose = f"the transaction of producer {one.producer_id}, epoch {one.producer_epoch}, has not ended"
        out.print_note(f"{count_noun(one.records, 'record')} of {name} at {offsets} left out: {whose}")
    row = (str(name), report.segments, format_size(report.bytes), report.start_offset, report.end_offset)
    out.print_result(tiers.report_document(report), Table("", ("partition", "segments", "size", "start offset", "end offset"), [row]))
    return BadData.exit_code if report.skipped else 0
