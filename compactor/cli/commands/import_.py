"""Command ``import``: new sealed segments of a log directory, a LOG_ROOT, or another tier."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from compactor.access.tier import Tier
from compactor.bootstrap import create_topic_ids_query, create_topic_settings_query, open_tier
from compactor.cli import command_parser, tiers, tiers as audit
from compactor.cli.kernels import compile_numba_kernels
from compactor.cli.output import Output, Table, format_size
from compactor.config.settings import load_settings
from compactor.errors import ExitCode, StoreError, UsageError
from compactor.features.imports.from_tier import (
    ALL_TOPICS,
    PartitionImportResult,
    has_partition_directories,
    import_partition_directories,
    import_tier,
    is_topic_chosen,
    list_partition_directories,
    partition_of_directory,
    partitions_to_import,
    topics_in_catalog,
)
from compactor.features.imports.import_ import ImportOptions, ImportProgressCallbacks, import_directory
from compactor.features.imports.incarnations import (
    TopicRecreationConfirmationSources,
    record_cluster_of_topics,
    record_settings_of_topics,
    unreadable_settings_message,
)
from compactor.features.imports.log_directory import is_locked_by_broker
from compactor.features.imports.log_identity import read_topic_id
from compactor.model.ids import TopicPartition
from compactor.tier.kinds import tier_kind
from compactor.views.checkpoints import read_only_copy
from compactor.views.overview import read_summaries

PartitionCallback = Callable[[PartitionImportResult], None]
BytesCallback = Callable[[TopicPartition, int], None]


def import_command(args: argparse.Namespace, out: Output) -> ExitCode:
    if tier_kind(command_parser.load_command_settings(args)).is_broker_managed:
        raise UsageError("import into a broker-managed tier is refused: its brokers write it", hint="Import into a tier of kind object-log")
    options = ImportOptions(
        live=args.live,
        gaps=args.allow_gaps,
        accept_truncation=args.accept_truncation,
        accept_loss=args.accept_loss,
        accept_erased=args.accept_erased,
        opening=TopicRecreationConfirmationSources(
            create_topic_ids_query(command_parser.load_command_settings(args)), by_hand=args.new_incarnation
        ),
    )
    if args.from_tier is not None:
        return _import_tier(args, out, options)
    if args.log_dir is None:
        raise UsageError("there is nothing to import from", hint="Name a log directory, or use --from-tier")
    if not args.log_dir.is_dir():
        raise UsageError(
            f"there is no directory {args.log_dir}", hint="Name a broker's directory, such as /var/lib/kafka/orders-0 or /var/lib/kafka"
        )
    is_root = has_partition_directories(args.log_dir)
    broker_dir = args.log_dir if is_root else Path(os.path.abspath(args.log_dir)).parent
    if not args.live and is_locked_by_broker(broker_dir):
        out.print_note(f"note: a broker holds the lock of {broker_dir}: imported as with --live, without each log's newest segment")
        options = replace(options, live=True)
    if is_root:
        if args.topic is not None or args.partition is not None:
            raise UsageError(
                f"{args.log_dir} holds directories of partitions",
                hint="--topic and --partition name one partition; for several use --topics REGEX",
            )
        return _import_root(args, out, options)
    if args.topics is not None:
        raise UsageError(
            f"{args.log_dir} holds no directories of partitions that --topics could choose from",
            hint="For one partition use --topic and --partition",
        )
    _import_directory(args, out, options)
    return 0


def _audited_import(args: argparse.Namespace, tier: Tier, out: Output, targets: Sequence[str]) -> AbstractContextManager[None]:
    consents = ("allow_gaps", "accept_truncation", "accept_loss", "new_incarnation", "accept_erased")
    given = {name: True for name in consents if getattr(args, name)}
    return audit.audited_if(bool(given), args, tier.settings, out, "import", targets, **given)


def _record_cluster(tier: Tier, directories: Iterable[tuple[TopicPartition, Path]], options: ImportOptions, out: Output) -> None:
    """Record the topics' Kafka cluster and compaction settings, if brokers are configured."""
    ask, ask_settings = options.opening.ask, create_topic_settings_query(tier.settings)
    if ask is not None:
        tier.catalog.refresh()
        topic_ids = {name.topic: read_topic_id(path) for name, path in directories}
        try:
            record_cluster_of_topics(tier.catalog, topic_ids, ask)
            refused = record_settings_of_topics(tier.catalog, topic_ids, ask, ask_settings) if ask_settings else []
            if refused:
                out.print_note(f"note: {unreadable_settings_message(refused)}")
        except StoreError as error:
            out.print_note(f"note: which cluster has these topics, and what is set on them, is not recorded: {error.message}")


def _import_directory(args: argparse.Namespace, out: Output, options: ImportOptions) -> None:
    name = _partition_to_import(args, out)
    tier = tiers.open_configured_tier(args)
    tier.identity.check_can_exist()  # also where nothing is new
    policy = tier.cleaner_settings_for_topic(name.topic).cleaner_policy()
    compile_numba_kernels(out)
    with _audited_import(args, tier, out, [str(name)]), out.show_progress("importing", unit="bytes") as bar:
        progress = ImportProgressCallbacks(lambda step, size: bar.begin_step(f"{step} {name}", size), bar.advance)
        report = import_directory(tier, args.log_dir, name, policy, progress, options)
    _record_cluster(tier, [(name, args.log_dir)], options, out)
    for note in report.notes:
        out.print_note(f"note: {note}")
    if not report.segments:
        out.print_note(f"{name}: the tier has all of this directory; nothing to do")
    document = {key: value for key, value in tiers.report_document(report).items() if key != "notes"}
    row = (str(name), report.segments, format_size(report.bytes), report.start_offset, report.end_offset)
    table = Table("", ("partition", "segments", "size", "start offset", "end offset"), [row])
    out.print_result(document, *([table] if report.segments else []))


def _partition_to_import(args: argparse.Namespace, out: Output) -> TopicPartition:
    """Partition of the options, else of the directory's name, such as ``orders-0``. Raises UsageError if neither gives one."""
    reported = partition_of_directory(args.log_dir)
    if reported is None and (args.topic is None or args.partition is None):
        raise UsageError(
            f"{args.log_dir} is neither a <topic>-<partition> directory nor one with such directories in it",
            hint="Name a broker's directory, such as /var/lib/kafka/orders-0 or /var/lib/kafka, or use --topic and --partition",
        )
    topic = args.topic if reported is None or args.topic is not None else reported.topic
    partition = args.partition if reported is None or args.partition is not None else reported.partition
    name = TopicPartition.create_validated(topic, partition)
    if reported is not None and reported != name:
        out.print_note(f"warning: {args.log_dir} is named like partition {reported}, and is imported as {name}")
    return name


def _import_root(args: argparse.Namespace, out: Output, options: ImportOptions) -> ExitCode:
    tier = tiers.open_configured_tier(args)
    directories = list_partition_directories(args.log_dir, args.topics, topics_in_catalog(tier.catalog.refresh()))
    if not directories:
        out.print_note(f"warning: no topic in {args.log_dir} matches {args.topics!r} as a whole; names with __ must be named so")
    for topic in sorted({name.topic for name, _ in directories}):
        if not is_topic_chosen(topic, [ALL_TOPICS if args.topics is None else args.topics]):
            out.print_note(f"note: {topic} goes on because the tier holds it; other names with __ are left out unless --topics begins so")

    def import_directories(on_partition: PartitionCallback, on_bytes: BytesCallback) -> list[PartitionImportResult]:
        done = import_partition_directories(tier, directories, options, on_partition=on_partition, on_bytes=on_bytes)
        _record_cluster(tier, [pair for pair, entry in zip(directories, done, strict=True) if entry.error is None], options, out)
        return done

    with _audited_import(args, tier, out, [str(name) for name, _ in directories]):
        return _import_with_progress(
            out, {name: sum(log.stat().st_size for log in at.glob("*.log")) for name, at in directories}, import_directories
        )


def _import_tier(args: argparse.Namespace, out: Output, options: ImportOptions) -> ExitCode:
    for given, name in ((args.log_dir, "a directory"), (args.topic, "--topic"), (args.partition, "--partition"), (args.live, "--live")):
        if given:
            raise UsageError(f"--from-tier and {name} exclude each other", hint="--topics chooses among the other tier's topics")
    # What the environment sets is this tier's.
    source = read_only_copy(open_tier(load_settings(args.from_tier, {})))
    target = tiers.open_configured_tier(args)
    names = partitions_to_import(source, args.topics)
    with _audited_import(args, target, out, [*map(str, names)]):
        sizes = {one.partition: one.summary.bytes if one.summary else 0 for one in read_summaries(source, names)}
        return _import_with_progress(
            out, sizes, lambda tell, on_bytes: import_tier(source, target, names, options, on_partition=tell, on_bytes=on_bytes)
        )


def _import_with_progress(
    out: Output, sizes: Mapping[TopicPartition, int], import_all: Callable[[PartitionCallback, BytesCallback], list[PartitionImportResult]]
) -> ExitCode:
    """sizes: bytes of each partition in the source. import_all: calls its first argument with each result, and its second with a partition
    and a number of bytes, twice for each segment: checked and uploaded.
    """
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=True)
    compile_numba_kernels(out)

    halves: Counter[TopicPartition] = Counter()

    def add_bytes(partition: TopicPartition, size: int) -> None:
        halves[partition] += size // 2  # each segment is reported twice: checked and uploaded
        bar.advance(size // 2)

    def report_imported_partition(result: PartitionImportResult) -> None:
        bar.advance(sizes[result.partition] - halves[result.partition])
        if result.error is not None:
            outcomes.record_failure(str(result.partition), result.error)
        elif result.import_result_message:
            out.print_note(f"note: {result.import_result_message}")

    with out.show_progress("importing", sum(sizes.values()), "bytes") as bar:
        done = import_all(report_imported_partition, add_bytes)
    rows = [_result_row(entry) for entry in done]
    columns = ("topic", "partition", "status", "segments", "bytes", "start_offset", "end_offset", "reason")
    shown = [tuple(format_size(row[c]) if c == "bytes" else row[c] for c in columns) for row in rows]
    counts = {status: sum(entry.import_status == status for entry in done) for status in ("imported", "up_to_date", "refused")}
    summary = f"{counts['imported']} imported, {counts['up_to_date']} up to date, {counts['refused']} refused"
    titles = ("topic", "partition", "status", "segments", "size", "start offset", "end offset", "reason")
    out.print_result({"partitions": rows}, Table("", titles, shown, minor=("start offset", "segments"), below=1), summary=summary)
    return outcomes.exit_code()


def _result_row(entry: PartitionImportResult) -> dict[str, Any]:
    report = entry.report
    return {
        "topic": entry.partition.topic,
        "partition": entry.partition.partition,
        "status": entry.import_status,
        "segments": report.segments if report else 0,
        "bytes": report.bytes if report else 0,
        "start_offset": report.start_offset if report else -1,
        "end_offset": report.end_offset if report else -1,
        "reason": entry.import_result_message,
    }
