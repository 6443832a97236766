"""Commands ``topics``: the tier's partitions, deletion, topic ids, owners, metadata snapshots."""

from __future__ import annotations

import argparse
from typing import Any

from compactor.access.tier import Tier
from compactor.bootstrap import create_topic_ids_query, kafka_connection_settings, open_tier
from compactor.cli import command_parser, tiers, tiers as audit
from compactor.cli.output import Output, Table, format_size
from compactor.config.units import count_noun, format_duration
from compactor.constants import TopicId
from compactor.control.importing import record_topic_id_adoption
from compactor.control.incarnations import superseding_topic_id
from compactor.control.logs import pattern_matches
from compactor.control.publication import delete_partition, restart_lost_log
from compactor.control.records import BadControlRecord, TopicAdopted
from compactor.errors import CompactorError, ExitCode, UsageError
from compactor.features.imports.incarnations import reinstate_superseded_topic
from compactor.tier.kinds import control_url, tier_kind


def list_command(args: argparse.Namespace, out: Output) -> ExitCode:
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=False)
    with tiers.open_configured_tier(args, local_state=True) as tier:
        found = [summary for summary in tiers.read_partition_summaries(tier, tier.list_partitions(), out, outcomes) if summary.segments]
    fields = ("topic", "partition", "segments", "bytes", "start_offset", "end_offset", "incarnation", "topic_id")
    partitions = []
    for summary in found:
        later = superseding_topic_id(tier.catalog.state, summary.topic, summary.topic_id)
        row = {field: getattr(summary, field) for field in fields}
        partitions.append(row | {"start_offset": summary.log_start, "superseded_by": later})
    shown = ("segments", "bytes", "start_offset", "end_offset", "topic_id", "superseded_by")
    rows = [
        (tiers.partition_of_row(row), *(format_size(row[name]) if name == "bytes" else row[name] for name in shown)) for row in partitions
    ]
    titles = ("partition", "segments", "size", "start offset", "end offset", "topic id", "superseded by")
    out.print_result({"partitions": partitions}, Table("", titles, rows, minor=("superseded by", "topic id", "start offset")))
    return outcomes.exit_code()


def _refuse_broker_managed(args: argparse.Namespace, what_brokers_decide: str, hint: str) -> None:
    settings = command_parser.load_command_settings(args)
    if tier_kind(settings).is_broker_managed:
        raise UsageError(f"the brokers say which {what_brokers_decide} a tier of kind {settings.tier.kind} has", hint=hint)


def delete_command(args: argparse.Namespace, out: Output) -> None:
    _refuse_broker_managed(args, "partitions", "Delete the topic there")
    with tiers.open_configured_tier(args) as tier:
        (name,) = tier.list_partitions([args.partition])
        log = tier.open_partition_log(name)
        with audit.audited(args, tier.settings, out, "topics delete", [str(name)]):
            try:
                before, _ = delete_partition(tier.ports, log, tier.lease)
            except BadControlRecord as error:
                out.print_note(f"{error.message}. What can still be read of this control log is given up")
                tier.ports.require_data_root_ownership(repeat_if_passed_before=True)
                before = restart_lost_log(log)
        later = superseding_topic_id(tier.catalog.state, name.topic, before.topic_id)
        tier.change_notifier.announce_changed_control_logs([log])
    grace = tier.retention.grace_ms
    document = {
        **tiers.partition_name_fields(name),
        "status": "deleted",
        "segments": len(before.live),
        "bytes": before.bytes,
        "start_offset": before.start_offset,
        "end_offset": before.end_offset,
        "objects_until_ms": tier.ports.clock_ms() + grace,
    }
    rows = [(len(before.live), format_size(before.bytes), before.start_offset, before.end_offset)]
    again = "The name can be imported again; an agent does not do so by itself"
    if later:
        again = f"Its topic id, {before.topic_id}, was superseded by {later} and cannot be imported under this name again"
    summary = f"`retire` deletes its objects in {format_duration(grace)}. {again}"
    table = Table(f"{name} is deleted", ("segments", "size", "start offset", "end offset"), rows)
    out.print_result(document, table, summary=summary)


def delete_records_command(args: argparse.Namespace, out: Output) -> None:
    from compactor.adapters.brokers.admin import KafkaAdmin
    from compactor.read.reading import time_offset_or_end
    from compactor.upkeep.orphans import delete_records

    kind, bound = args.before
    with tiers.open_configured_tier(args) as tier:
        (name,) = tier.list_partitions([args.partition])
        offset = bound if kind == "offset" else time_offset_or_end(tier, name, bound)
        segments = removed = 0
        if not tier.kind.compacts:
            raise UsageError(f"a tier of layout {tier.settings.tier.layout} is only read", hint="Delete the records at their source")
        with audit.audited(args, tier.settings, out, "topics delete-records", [str(name)], before=offset):
            if tier.kind.is_broker_managed:
                start = KafkaAdmin(kafka_connection_settings(tier.settings)).delete_records(name.topic, name.partition, offset)
            else:
                before, after = delete_records(tier, name, offset)
                start, segments, removed = after.log_start, len(before.live) - len(after.live), before.bytes - after.bytes
    document = tiers.partition_name_fields(name) | {"log_start_offset": start, "segments": segments, "bytes": removed}
    table = Table(
        f"Records of {name} below the log start are deleted",
        ("log start", "segments", "size"),
        [(start, segments, format_size(removed))],
    )
    out.print_result(document, table)


def adopt_command(args: argparse.Namespace, out: Output) -> ExitCode:
    _refuse_broker_managed(args, "topics", "There is nothing to adopt")
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=True)
    rows = []
    with tiers.open_configured_tier(args) as tier:
        tier.identity.require_root_not_foreign()
        names = [name for name in tier.list_latest_incarnations() if pattern_matches(args.pattern, name)]
        if not names:
            raise UsageError(f"{args.pattern!r} matches no partition of the tier", hint="`topics` lists what it holds")
        if args.topic_id and len({name.topic for name in names}) > 1:
            raise UsageError(f"{args.pattern!r} matches several topics, and a topic id is of one", hint="Name one topic")
        topic = names[0].topic
        if args.topic_id in tier.catalog.state.superseded.get(topic, {}):
            rows = _reinstate_superseded_topic(args, tier, out, topic)
            names = []
        given = {"topic_id": args.topic_id} if args.topic_id else {"seam": args.seam}
        with audit.audited_if(bool(names), args, tier.settings, out, "topics adopt", [*map(str, names)], **given):
            for name in names:
                log = tier.open_partition_log(name)
                before = log.refresh_and_check_gaps()
                seam = -1 if args.seam is None else args.seam
                body = TopicAdopted(
                    topic_id=TopicId(args.topic_id or ""),
                    previous_id=before.topic_id,
                    seam=seam,
                    by=audit.operator_name(),
                    why="topics adopt",
                )
                status, reason, after = "adopted", "", before
                try:
                    after = record_topic_id_adoption(log, body)
                    status = "unchanged" if after.slot == before.slot else status
                    tier.change_notifier.announce_changed_control_logs([log])
                    outcomes.record_success()
                except CompactorError as error:
                    status, reason = "refused", outcomes.record_failure(str(name), error).message
                adopted = {"topic_id": after.topic_id, "previous_id": before.topic_id, "seam": after.adopted_seam}
                rows.append({"topic": name.topic, "partition": name.partition, "status": status, **adopted, "reason": reason})
    columns = ("topic", "partition", "status", "topic_id", "previous_id", "seam", "reason")
    cells = [tuple(row[column] for column in columns) for row in rows]
    out.print_result({"partitions": rows}, Table("", columns, cells, minor=("previous_id",), below=1))
    return outcomes.exit_code()


def _reinstate_superseded_topic(args: argparse.Namespace, tier: Tier, out: Output, topic: str) -> list[dict[str, Any]]:
    """Take back that ``args.topic_id`` was superseded by mistake."""
    ask = create_topic_ids_query(tier.settings)
    with audit.audited(args, tier.settings, out, "topics adopt", [topic], topic_id=args.topic_id):
        previous_id = reinstate_superseded_topic(tier, topic, args.topic_id, ask)
    names = [name for name in tier.list_latest_incarnations() if name.topic == topic]
    fields = {"topic": topic, "status": "adopted", "topic_id": args.topic_id, "previous_id": previous_id, "seam": -1, "reason": ""}
    return [fields | {"partition": name.partition} for name in names]


def take_over_topics(args: argparse.Namespace, out: Output) -> None:
    settings = command_parser.load_command_settings(args)
    if not tier_kind(settings).is_broker_managed:
        raise UsageError("only topics of a broker-managed tier have an owner", hint="Another tier belongs to one control store")
    rows = []
    with tiers.open_configured_tier(args, writing_command="topics takeover") as tier:
        first = {name.topic: name for name in reversed(tier.list_partitions()) if pattern_matches(args.pattern, name)}
        if not first:
            raise UsageError(f"{args.pattern!r} matches no topic of the tier", hint="`topics` lists what it holds")
        ownership = tier.ports.topic_ownership
        if ownership is None:
            raise UsageError("no control store is configured", hint="Set control_url under [tier]")
        with audit.audited(args, tier.settings, out, "topics takeover", sorted(first)):
            for topic, name in sorted(first.items()):
                before = ownership.take_over(tier.ports, name)
                status = "unchanged" if before == tier.ports.control.url else "taken"
                rows.append({"topic": topic, "topic_id": tier.metadata.topic_id(name), "status": status, "previous_control_url": before})
    columns = ("topic", "topic_id", "status", "previous_control_url")
    out.print_result({"topics": rows}, Table("", columns, [tuple(row[column] for column in columns) for row in rows]))


def save_broker_metadata(args: argparse.Namespace, out: Output) -> None:
    from compactor.adapters.brokers.view import save_metadata_snapshot, take_metadata_snapshot

    settings = command_parser.load_command_settings(args)
    if not tier_kind(settings).is_broker_managed:
        raise UsageError("a tier of this program's own has its metadata beside it", hint="A copy of the tier is complete")
    if not settings.kafka.bootstrap_servers.strip():
        raise UsageError("no broker is named to take a snapshot from", hint="Set bootstrap_servers under [kafka]")
    if not control_url(settings):
        raise UsageError(
            "no control store is configured for a snapshot", hint="Set control_url under [tier], outside of the location that brokers write"
        )
    tier = open_tier(settings)
    with out.show_progress("reading the metadata topic"):
        snapshot = take_metadata_snapshot(
            tier.broker_metadata, url=settings.tier_url, layout=settings.tier.layout, now_ms=tier.ports.clock_ms()
        )
    key = save_metadata_snapshot(tier.ports.control, snapshot)
    document = {
        "snapshot": f"{tier.ports.control.url}/{key}",
        "taken_ms": snapshot.taken_ms,
        "cluster_id": snapshot.cluster_id,
        "topics": len(snapshot.topics),
        "partitions": sum(len(topic.partitions) for topic in snapshot.topics),
        "segments": snapshot.segment_count,
    }
    partitions = count_noun(sum(len(topic.partitions) for topic in snapshot.topics), "partition")
    reported = f"The metadata of {count_noun(snapshot.segment_count, 'segment')} in {partitions} is saved in {document['snapshot']}"
    out.print_result(document, summary=reported)
