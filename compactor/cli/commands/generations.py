"""``generations write / list / retire``: compacted partitions for consumers of Pinterest's layout."""

from __future__ import annotations

import argparse
from typing import Any

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size
from compactor.errors import CompactorError


def add_arguments(parser: frame.Parser) -> None:
    write = parser.subcommand("write", "bring them up to what the tier's readers read")
    tiers.partitions_argument(write)
    write.runs(run_write)
    listing = parser.subcommand("list", "the current generation of each partition, and those that wait for their end")
    listing.runs(run_list)
    retire = parser.subcommand("retire", "delete those that were superseded long enough ago")
    retire.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    retire.runs(run_retire)


def run_write(args: argparse.Namespace, out: Output) -> int:
    from compactor.transfer.generations import GenerationReport, target_of, write_generation

    opened = tiers.opened(args)
    target = target_of(opened)
    outcomes = tiers.PartitionOutcomes(out, named=bool(args.partitions))
    done: list[GenerationReport] = []
    with out.progress("writing", unit="bytes") as progress:
        for name in opened.partitions(args.partitions):
            progress.at(f"writing {name}")
            try:
                done.append(write_generation(opened, target, name, progress.advance))
                outcomes.ok()
            except CompactorError as error:
                outcomes.failed(str(name), error)
    rows = [(f"{r.topic}-{r.partition}", r.status, r.generation, r.objects, size(r.bytes), r.start_offset, r.end_offset) for r in done]
    columns = ("partition", "status", "generation", "objects", "size", "start offset", "end offset")
    out.result({"partitions": [tiers.plain(report) for report in done]}, Table("", columns, rows))
    return outcomes.exit_code()


def run_list(args: argparse.Namespace, out: Output) -> int:
    from compactor.transfer.generations import generations_of, names_in, target_of

    opened = tiers.viewed(args)
    target = target_of(opened)
    outcomes = tiers.PartitionOutcomes(out, named=False)
    found: list[dict[str, Any]] = []
    for name in names_in(target):
        try:
            current, earlier = generations_of(target, name)
        except CompactorError as error:
            outcomes.failed(str(name), error)
            continue
        outcomes.ok()
        if current is None:
            continue
        objects = current.objects
        about = {"topic": name.topic, "partition": name.partition}
        found += [{**about, "generation": one.name, "current": False, "objects": None, "bytes": None} for one in earlier]
        total = sum(part.log_bytes for part in objects)
        found.append({**about, "generation": current.name, "current": True, "objects": len(objects), "bytes": total})
    rows = [
        (f"{r['topic']}-{r['partition']}", r["generation"], "current" if r["current"] else "superseded",
         r["objects"] if r["current"] else "", size(r["bytes"]) if r["current"] else "")
        for r in found
    ]  # fmt: skip
    out.result({"generations": found}, Table("", ("partition", "generation", "", "objects", "size"), rows))
    return outcomes.exit_code()


def run_retire(args: argparse.Namespace, out: Output) -> int:
    from compactor.transfer.generations import RetiredGeneration, names_in, retire_generations, target_of

    opened = tiers.viewed(args) if args.dry_run else tiers.opened(args)
    target = target_of(opened)
    outcomes = tiers.PartitionOutcomes(out, named=False)
    found: list[RetiredGeneration] = []
    for name in names_in(target):
        try:
            found += retire_generations(target, name, dry_run=args.dry_run)
            outcomes.ok()
        except CompactorError as error:
            outcomes.failed(str(name), error)
    gone, kept = [one for one in found if one.deleted], [one for one in found if not one.deleted]
    document = {"deleted": [tiers.plain(one) for one in gone], "waiting": [tiers.plain(one) for one in kept]}
    rows = [
        (f"{one.topic}-{one.partition}", one.generation, "deleted" if one.deleted else "waits", one.objects, size(one.bytes))
        for one in found
    ]
    out.result(document, Table("", ("partition", "generation", "", "objects", "size"), rows))
    return outcomes.exit_code()
