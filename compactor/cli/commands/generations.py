"""Commands ``generations``: compacted partitions for consumers of Pinterest's layout."""

from __future__ import annotations

import argparse
from typing import Any

from compactor.cli import tiers
from compactor.cli.output import Output, Table, format_size
from compactor.errors import CompactorError, ExitCode, UsageError
from compactor.features.imports.from_tier import topic_name_filter
from compactor.features.pinterest.generations import GenerationReport, configured_generation_target
from compactor.features.pinterest.output import (
    DeletedOrExpiringGeneration,
    delete_due_generations,
    partitions_with_generations,
    read_partition_generations,
    write_generations,
)
from compactor.model.ids import TopicPartition


def write_generations_command(args: argparse.Namespace, out: Output) -> ExitCode:
    if args.partitions and args.topics is not None:
        raise UsageError("partitions and --topics exclude each other", hint="Name one or the other")
    wanted = topic_name_filter(args.topics)
    tier = tiers.open_configured_tier(args)
    target = configured_generation_target(tier)
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=bool(args.partitions))

    def record_generation_outcome(partition: TopicPartition, outcome: GenerationReport | CompactorError) -> None:
        if isinstance(outcome, CompactorError):
            outcomes.record_failure(str(partition), outcome)
        else:
            outcomes.record_success()

    names = [name for name in tiers.select_partitions(tier, args.partitions) if wanted(name)]
    if not names:
        out.print_note(
            f"warning: no topic of the tier matches {args.topics!r} as a whole" if args.topics else "warning: there is no partition"
        )
    with out.show_progress("writing", tiers.sum_stored_bytes(tier, names, out), "bytes") as progress:
        found = write_generations(tier, target, names, on_bytes=progress.advance, on_partition=record_generation_outcome)
    done = [report for report in found if isinstance(report, GenerationReport)]
    rows = [
        (f"{r.topic}-{r.partition}", r.status, r.generation, r.objects, format_size(r.bytes), r.start_offset, r.end_offset) for r in done
    ]
    columns = ("partition", "status", "generation", "objects", "size", "start offset", "end offset")
    table = Table("", columns, rows, minor=("start offset", "objects", "end offset"))
    out.print_result({"partitions": [tiers.report_document(report) for report in done]}, table)
    return outcomes.exit_code()


def list_generations_command(args: argparse.Namespace, out: Output) -> ExitCode:
    wanted = topic_name_filter(args.topics)
    tier = tiers.open_read_only(args)
    target = configured_generation_target(tier)
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=False)
    found: list[dict[str, Any]] = []
    for name in filter(wanted, partitions_with_generations(target)):
        try:
            known = read_partition_generations(target, name)
        except CompactorError as error:
            outcomes.record_failure(str(name), error)
            continue
        outcomes.record_success()
        current, earlier = known.current, known.earlier
        if current is None:
            continue
        objects = current.published_segments_with_objects
        about = {"topic": name.topic, "partition": name.partition}
        found += [{**about, "generation": one.name, "current": False, "objects": None, "bytes": None} for one in earlier]
        total = sum(part.log_bytes for part in objects)
        if objects:
            found.append({**about, "generation": current.name, "current": True, "objects": len(objects), "bytes": total})
    rows = [
        (f"{r['topic']}-{r['partition']}", r["generation"], "current" if r["current"] else "superseded",
         r["objects"] if r["current"] else "", format_size(r["bytes"]) if r["current"] else "")
        for r in found
    ]  # fmt: skip
    out.print_result({"generations": found}, Table("", ("partition", "generation", "", "objects", "size"), rows))
    return outcomes.exit_code()


def delete_pinterest_generations(args: argparse.Namespace, out: Output) -> ExitCode:
    wanted = topic_name_filter(args.topics)
    tier = tiers.open_read_only(args) if args.dry_run else tiers.open_configured_tier(args)
    target = configured_generation_target(tier)
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=False)
    found: list[DeletedOrExpiringGeneration] = []
    for name in filter(wanted, partitions_with_generations(target)):
        try:
            found += delete_due_generations(target, name, dry_run=args.dry_run)
            outcomes.record_success()
        except CompactorError as error:
            outcomes.record_failure(str(name), error)
    gone, kept = [one for one in found if one.deleted], [one for one in found if not one.deleted]
    document = {
        "deleted": [tiers.report_document(one) for one in gone],
        "waiting": [tiers.report_document(one) for one in kept],
    }
    rows = [
        (f"{one.topic}-{one.partition}", one.generation, "deleted" if one.deleted else "waits", one.objects, format_size(one.bytes))
        for one in found
    ]
    out.print_result(document, Table("", ("partition", "generation", "", "objects", "size"), rows))
    return outcomes.exit_code()
