"""``generations write / list / retire``: compacted partitions for consumers of Pinterest's layout."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size
from compactor.errors import CompactorError, UsageError

if TYPE_CHECKING:
    from compactor.model.ids import TopicPartition
    from compactor.transfer.generations import GenerationReport


def add_arguments(parser: frame.Parser) -> None:
    write = parser.subcommand("write", "bring them up to what the tier's readers read")
    tiers.partitions_argument(write)
    topics_argument(write)
    write.runs(run_write)
    listing = parser.subcommand("list", "the current generation of each partition, and those that wait for their end")
    topics_argument(listing)
    listing.runs(run_list)
    retire = parser.subcommand("retire", "delete those that were superseded long enough ago")
    topics_argument(retire)
    retire.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    retire.runs(run_retire)


def topics_argument(parser: frame.Parser) -> None:
    parser.add_argument("--topics", metavar="REGEX", help="only topics whose whole name matches")


def run_write(args: argparse.Namespace, out: Output) -> int:
    from compactor.transfer.generation_upkeep import write_generations
    from compactor.transfer.generations import GenerationReport, target_of
    from compactor.transfer.import_root import of_topics

    if args.partitions and args.topics is not None:
        raise UsageError("partitions and --topics exclude each other", hint="Name one or the other")
    wanted = of_topics(args.topics)
    opened = tiers.opened(args)
    target = target_of(opened)
    outcomes = tiers.PartitionOutcomes(out, named=bool(args.partitions))

    def note(name: TopicPartition, done: GenerationReport | CompactorError) -> None:
        if isinstance(done, CompactorError):
            outcomes.failed(str(name), done)
        else:
            outcomes.ok()

    names = [name for name in opened.partitions(args.partitions) if wanted(name)]
    if not names:
        out.note(f"warning: no topic of the tier matches {args.topics!r} as a whole" if args.topics else "warning: there is no partition")
    with out.progress("writing", unit="bytes") as progress:
        found = write_generations(opened, target, names, on_bytes=progress.advance, on_partition=note)
    done = [report for report in found if isinstance(report, GenerationReport)]
    rows = [(f"{r.topic}-{r.partition}", r.status, r.generation, r.objects, size(r.bytes), r.start_offset, r.end_offset) for r in done]
    columns = ("partition", "status", "generation", "objects", "size", "start offset", "end offset")
    out.result({"partitions": [tiers.plain(report) for report in done]}, Table("", columns, rows))
    return outcomes.exit_code()


def run_list(args: argparse.Namespace, out: Output) -> int:
    from compactor.transfer.generation_upkeep import generations_of, names_in
    from compactor.transfer.generations import target_of
    from compactor.transfer.import_root import of_topics

    wanted = of_topics(args.topics)
    opened = tiers.viewed(args)
    target = target_of(opened)
    outcomes = tiers.PartitionOutcomes(out, named=False)
    found: list[dict[str, Any]] = []
    for name in filter(wanted, names_in(target)):
        try:
            known = generations_of(target, name)
        except CompactorError as error:
            outcomes.failed(str(name), error)
            continue
        outcomes.ok()
        current, earlier = known.current, known.earlier
        if current is None:
            continue
        objects = current.objects
        about = {"topic": name.topic, "partition": name.partition}
        found += [{**about, "generation": one.name, "current": False, "objects": None, "bytes": None} for one in earlier]
        total = sum(part.log_bytes for part in objects)
        if objects:
            found.append({**about, "generation": current.name, "current": True, "objects": len(objects), "bytes": total})
    rows = [
        (f"{r['topic']}-{r['partition']}", r["generation"], "current" if r["current"] else "superseded",
         r["objects"] if r["current"] else "", size(r["bytes"]) if r["current"] else "")
        for r in found
    ]  # fmt: skip
    out.result({"generations": found}, Table("", ("partition", "generation", "", "objects", "size"), rows))
    return outcomes.exit_code()


def run_retire(args: argparse.Namespace, out: Output) -> int:
    from compactor.transfer.generation_upkeep import RetiredGeneration, names_in, retire_generations
    from compactor.transfer.generations import target_of
    from compactor.transfer.import_root import of_topics

    wanted = of_topics(args.topics)
    opened = tiers.viewed(args) if args.dry_run else tiers.opened(args)
    target = target_of(opened)
    outcomes = tiers.PartitionOutcomes(out, named=False)
    found: list[RetiredGeneration] = []
    for name in filter(wanted, names_in(target)):
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
