"""``topics``: what the tier holds; ``topics delete``: takes a partition out; ``topics snapshot``: keeps a broker tier's metadata."""

from __future__ import annotations

import argparse

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size
from compactor.errors import UsageError


def add_arguments(parser: frame.Parser) -> None:
    parser.runs(run)
    delete = parser.subcommand("delete", "take a partition out of the tier", required=False)
    delete.add_argument("partition", metavar="TOPIC-PARTITION")
    delete.runs(run_delete)
    snapshot = parser.subcommand("snapshot", "keep a broker tier's metadata, for readers without a broker", required=False)
    snapshot.runs(run_snapshot)


def run(args: argparse.Namespace, out: Output) -> int:
    outcomes = tiers.PartitionOutcomes(out, named=False)
    with tiers.opened(args, local_state=True) as opened:
        found = [summary for summary in tiers.summaries(opened, opened.partitions(), out, outcomes) if summary.segments]
    fields = ("topic", "partition", "segments", "bytes", "start_offset", "end_offset")
    partitions = [{field: getattr(summary, field) for field in fields} for summary in found]
    rows = [(s.topic, s.partition, s.segments, size(s.bytes), s.start_offset, s.end_offset) for s in found]
    out.result({"partitions": partitions}, Table("", ("topic", "partition", "segments", "size", "start offset", "end offset"), rows))
    return outcomes.exit_code()


def run_delete(args: argparse.Namespace, out: Output) -> None:
    from compactor.control.deletion import delete_partition, give_up_log
    from compactor.control.records import BadControlRecord

    kind = frame.settings(args).tier.kind
    if kind != "object-log":
        raise UsageError(f"the brokers say which partitions a tier of kind {kind} has", hint="Delete the topic there")
    with tiers.opened(args) as opened:
        (name,) = opened.partitions([args.partition])
        log = opened.open(name)
        try:
            before, _ = delete_partition(opened.ports, log, opened.lease)
        except BadControlRecord as error:
            out.note(f"{error.message}. What can still be read of this control log is given up")
            opened.ports.own(anew=True)
            before = give_up_log(log)
        opened.note_change(log)
    grace = opened.retention.grace_ms
    document = {
        "topic": name.topic,
        "partition": name.partition,
        "status": "deleted",
        "segments": len(before.live),
        "bytes": before.bytes,
        "start_offset": before.start_offset,
        "end_offset": before.end_offset,
        "objects_until_ms": opened.ports.clock_ms() + grace,
    }
    rows = [(len(before.live), size(before.bytes), before.start_offset, before.end_offset)]
    summary = f"Its objects are deleted by `retire` in {grace} ms. The name can be imported anew; an agent waits until it is told to"
    table = Table(f"{name} is deleted", ("segments", "size", "start offset", "end offset"), rows)
    out.result(document, table, summary=summary)


def run_snapshot(args: argparse.Namespace, out: Output) -> None:
    from compactor.bootstrap import open_tier
    from compactor.tier.metadata_snapshot import keep, taken

    settings = frame.settings(args)
    if settings.tier.kind != "kafka":
        raise UsageError("a tier of this program's own has its metadata beside it", hint="A copy of the tier is complete")
    if not settings.kafka.bootstrap_servers.strip():
        raise UsageError("no broker is named to take a snapshot from", hint="Set bootstrap_servers under [kafka]")
    if not settings.control_url:
        raise UsageError("there is no place for a snapshot", hint="Set control_url under [tier], outside of what brokers write")
    opened = open_tier(settings)
    with out.progress("reading the metadata topic"):
        snapshot = taken(opened.metadata, url=settings.tier_url, layout=settings.tier.layout, now_ms=opened.ports.clock_ms())
    key = keep(opened.ports.control, snapshot)
    document = {
        "snapshot": f"{opened.ports.control.url}/{key}",
        "taken_ms": snapshot.taken_ms,
        "cluster_id": snapshot.cluster_id,
        "topics": len(snapshot.topics),
        "partitions": sum(len(topic.partitions) for topic in snapshot.topics),
        "segments": snapshot.segments,
    }
    told = f"{document['segments']} segments of {document['partitions']} partitions are kept in {document['snapshot']}"
    out.result(document, summary=told)
