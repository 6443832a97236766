"""Command ``checkpoints``: cleaner offsets by compactor epoch, leaders, publications, void records."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from compactor.cli import command_parser, tiers
from compactor.cli.output import Output, Table, Tree, format_size
from compactor.config.times import format_iso_time
from compactor.config.units import count_noun, format_duration
from compactor.errors import ExitCode, UsageError
from compactor.views.checkpoints import (
    LEADER_EPOCHS,
    Document,
    KafkaCheckpointFile,
    checkpoint_file_of_partition,
    compare_checkpoint_files,
    epoch_history_document,
    partition_checkpoint_document,
    read_checkpoint_file,
    select_checkpoint_entries,
)
from compactor.views.difference import (
    ControlLogHistory,
    PartitionHistoryDifference,
    PartitionHistoryPoint,
    compare_history_points,
)


def list_partition_checkpoints(args: argparse.Namespace, out: Output) -> ExitCode:
    files = [text for text in args.targets if _is_checkpoint_file(text)]
    if files:
        return _print_checkpoint_files(files, out, [text for text in args.targets if text not in files])
    tier = tiers.open_read_only(args)
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=bool(args.targets))
    logs = tiers.read_control_logs(tier, tiers.select_partitions(tier, args.targets), out, outcomes)
    found = [partition_checkpoint_document(tier.ports, log) for log in logs]
    now = tier.ports.clock_ms()
    rows = [
        (
            tiers.partition_of_row(v),
            tiers.format_cleaner_offsets(v["cleaner_offsets"]),
            v["first_dirty_offset"],
            v["end_offset"],
            _describe_lease(v, now),
            "quarantined" if v["quarantine"] else "round open" if v["open_run"] else "",
            len(v["fenced"]),
        )
        for v in found
    ]
    columns = ("partition", "cleaner offsets", "first dirty", "end offset", "leader", "state", "fenced")
    table = Table("", columns, rows, minor=("leader", "end offset", "fenced"))
    out.print_result({"partitions": found}, table)
    return outcomes.exit_code()


def show_partition_checkpoint(args: argparse.Namespace, out: Output) -> ExitCode:
    if _is_checkpoint_file(args.target):
        return _print_checkpoint_files([args.target], out)
    tier = tiers.open_read_only(args)
    (name,) = tier.list_partitions([args.target])
    log = tier.open_partition_log(name)
    log.refresh()
    found = partition_checkpoint_document(tier.ports, log)
    offsets = Table(
        f"{name}: cleaner offsets (the first one not clean) at slot {found['slot']}",
        ("compactor epoch", "offset"),
        [(entry.leader_epoch, entry.offset) for entry in found["cleaner_offsets"]],
    )
    facts = [
        ("offsets", f"{found['start_offset']} to {found['end_offset']}, dirty from {found['first_dirty_offset']}"),
        ("leader", _describe_lease(found, tier.ports.clock_ms()) or "nobody"),
        ("last compactor epoch", str(found["compactor_epoch"]) if found["compactor_epoch"] >= 0 else "none yet"),
        ("broker's leader epochs", " ".join(f"{entry.epoch}@{entry.start_offset}" for entry in found["leader_epochs"]) or "unknown"),
    ]
    if found["open_run"]:
        facts.append(("open round", f"{found['open_run']}; the next `run` finishes or undoes it"))
    if found["quarantine"]:
        facts.append(("quarantined", found["quarantine"]))
    tables = [offsets, Table("", ("", ""), facts)] if found["cleaner_offsets"] else [Table(f"{name}: never cleaned", ("", ""), facts)]
    out.print_result(found, *tables, *_fenced_tables(found["fenced"]))
    return 0


def show_compactor_epochs(args: argparse.Namespace, out: Output) -> None:
    if _is_checkpoint_file(args.partition):
        file = read_checkpoint_file(Path(args.partition))
        if file.kind != LEADER_EPOCHS:
            raise UsageError(f"{file.path} is a {file.kind}, which has no lineage", hint=f"`checkpoints show {file.path}` prints it")
        out.print_result(_checkpoint_file_document(file), _checkpoint_file_table(file))
        return
    tier, name = tiers.open_tier_and_partition(args)
    log = tier.open_partition_log(name)
    log.refresh()
    found = epoch_history_document(tier.ports, log)
    out.print_result(found, _compactor_epochs_tree(found, tier.ports.clock_ms()))


def show_checkpoint_diff(args: argparse.Namespace, out: Output) -> None:
    if _is_checkpoint_file(args.target) or (args.after is None and _is_existing_file(args.before)):
        _print_file_diff(args, out)
        return

    tier = tiers.open_read_only(args)
    (name,) = tier.list_partitions([args.target])
    past = ControlLogHistory(tier.open_partition_log(name))
    around = past.points_around_run(args.before) if args.after is None else None
    before, after = around or (
        past.find_point(_absolute_time(args.before)),
        past.find_point(_absolute_time(args.after)) if args.after is not None else past.latest_point,
    )
    found = compare_history_points(before, after)
    document = {
        **tiers.partition_name_fields(name),
        "from": _history_point_document(before),
        "to": _history_point_document(after),
        **tiers.report_document(found),
    }
    out.print_result(document, *_history_difference_tables(before, after, found))


def _absolute_time(moment: str) -> str:
    return moment if command_parser.parse_relative_time_ms(moment) is None else str(command_parser.parse_time_ms(moment))


def verify_command(args: argparse.Namespace, out: Output) -> ExitCode:
    files = [text for text in args.partitions if _is_checkpoint_file(text)]
    if files:
        if len(files) < len(args.partitions):
            raise UsageError("files and partitions together", hint="Verify them one after the other")
        entries = sum(len(file.offsets) + len(file.leader_epochs) for file in map(read_checkpoint_file, map(Path, files)))
        return tiers.print_check_findings([], out, f"{count_noun(entries, 'entry', 'entries')}: Kafka would read all of them")
    from compactor.upkeep.verify import verify_control_logs

    tier = tiers.open_read_only(args)
    names = tiers.select_partitions(tier, args.partitions)
    with out.show_progress("verifying", len(names), "partitions") as progress:
        found = verify_control_logs(tier, names, progress.advance)
    return tiers.print_check_findings(found, out, f"{count_noun(len(names), 'partition')}: all is well")


# --- Kafka's own files ---


def _is_checkpoint_file(path_or_partition: str) -> bool:
    """Tell a Kafka checkpoint file from a partition's name. Raises UsageError if the text can only be a path and there is no such file."""
    if Path(path_or_partition).is_file():
        return True
    if "/" in path_or_partition or Path(path_or_partition).is_dir():
        raise UsageError(
            f"there is no file {path_or_partition}", hint="Name a TOPIC-PARTITION of the tier or one of Kafka's checkpoint files"
        )
    return False


def _is_existing_file(text: str) -> bool:
    return Path(text).is_file()


def _print_checkpoint_files(paths: Sequence[str], out: Output, partitions: Sequence[str] = ()) -> ExitCode:
    """Raises UsageError if one of ``partitions`` (none: all) has no entry."""
    files = [read_checkpoint_file(Path(path)) for path in paths]
    files = [select_checkpoint_entries(file, partitions) for file in files] if partitions else files
    documents = [_checkpoint_file_document(file) for file in files]
    out.print_result(documents[0] if len(files) == 1 else {"files": documents}, *(_checkpoint_file_table(file) for file in files))
    return 0


def _checkpoint_file_document(file: KafkaCheckpointFile) -> dict[str, object]:
    document: dict[str, object] = {"file": file.path, "kind": file.kind}
    if file.leader_epochs or file.kind == LEADER_EPOCHS:
        return document | {"leader_epochs": [tiers.report_document(entry) for entry in file.leader_epochs]}
    partitions = [
        {
            "topic": entry.topic,
            "partition": entry.partition,
            "cleaner_offsets": [{"leader_epoch": None, "offset": entry.offset}],
            "lease": None,
            "fenced": [],
        }
        for entry in file.offsets
    ]
    return document | {"partitions": partitions}


def _checkpoint_file_table(file: KafkaCheckpointFile) -> Table:
    title = f"{file.path} ({file.kind})"
    if file.kind == LEADER_EPOCHS:
        return Table(title, ("leader epoch", "start offset"), [(entry.epoch, entry.start_offset) for entry in file.leader_epochs])
    return Table(title, ("partition", "cleaner offset"), [(f"{entry.topic}-{entry.partition}", entry.offset) for entry in file.offsets])


def _print_file_diff(args: argparse.Namespace, out: Output) -> None:
    if args.after is not None:
        hint = "Compare it with one other file or partition: checkpoints diff FILE FILE|TOPIC-PARTITION"
        raise UsageError(f"{args.target} is a file", hint=hint)
    texts = (args.target, args.before)
    files = {text: read_checkpoint_file(Path(text)) for text in texts if _is_checkpoint_file(text)}
    for text in texts:
        if text not in files:
            (other,) = files.values()
            tier = tiers.open_read_only(args)
            (name,) = tier.list_partitions([text])
            files[text] = checkpoint_file_of_partition(tier.open_partition_log(name).refresh(), other.kind)
            if other.kind != LEADER_EPOCHS:
                files[other.path] = select_checkpoint_entries(other, [str(name.first_incarnation)])
    before, after = (files[text] for text in texts)
    changes = compare_checkpoint_files(before, after)
    document = {
        "kind": before.kind,
        "from": before.path,
        "to": after.path,
        "changes": [tiers.report_document(change) for change in changes],
    }
    table = Table(before.kind, ("", before.path, after.path), [(c.what, c.before, c.after) for c in changes])
    out.print_result(document, *([table] if changes else []), summary="" if changes else "no difference")


# --- how things are put ---


def _describe_lease(document: Document, now_ms: int) -> str:
    lease = document["lease"]
    if lease is None:
        return ""
    left_ms = lease.expires_ms - now_ms
    term = f"lease for {format_duration(left_ms)} more" if left_ms > 0 else f"lease over for {format_duration(-left_ms)}"
    return f"{lease.holder} (epoch {lease.epoch}), {term}"


def _fenced_tables(fenced: Sequence[Document]) -> list[Table]:
    if not fenced:
        return []
    rows = [
        (
            f["slot"],
            format_iso_time(f["at_ms"]),
            f["leader_epoch"] if f["leader_epoch"] >= 0 else None,
            f["type"],
            f["offset"],
            f["by"],
            f["reason"],
        )
        for f in fenced
    ]
    columns = ("slot", "at", "leader epoch", "record", "claimed offset", "by", "why")
    return [Table("in the log, and void", columns, rows, minor=("claimed offset", "by"), below=1)]


def _compactor_epochs_tree(document: Document, now_ms: int) -> Tree:
    offsets = tiers.format_cleaner_offsets(document["cleaner_offsets"])
    title = f"{tiers.partition_of_row(document)} at slot {document['slot']}: cleaner offsets {offsets}"
    branches = [_compactor_epoch_tree(epoch, document, now_ms) for epoch in document["epochs"]]
    branches += [Tree(_describe_fenced(entry), ()) for entry in document["unowned"]]
    return Tree(title, branches or [Tree("no compactor has led it yet", ())])


def _compactor_epoch_tree(epoch: Document, document: Document, now_ms: int) -> Tree:
    label = f"epoch {epoch['leader_epoch']}  {epoch['holder']}  from slot {epoch['slot']} ({format_iso_time(epoch['at_ms'])})"
    if epoch["granted"] is not None:
        label += f", granted up to {epoch['granted']}"
    branches = [Tree(_describe_compaction_round(run, epoch), ()) for run in epoch["runs"]]
    branches += [Tree(f"took back run {run_id}", ()) for run_id in epoch["undid"]]
    if epoch["cut_off"]:
        cut = epoch["cut_off"]
        branches.append(
            Tree(
                f"CUT OFF in slot {cut['slot']} ({format_iso_time(cut['at_ms'])}): {cut['holder']} took over as epoch "
                f"{cut['leader_epoch']}; nothing that this epoch writes counts after it",
                (),
            )
        )
    branches += [Tree(_describe_fenced(entry), ()) for entry in epoch["fenced"]]
    if epoch["ended"] == "released":
        branches.append(Tree(f"released ({format_iso_time(epoch['ended_ms'] or 0)})", ()))
    if epoch["ended"] == "leading":
        branches.append(Tree(f"leads: {_describe_lease(document, now_ms)}", ()))
    return Tree(label, branches)


def _describe_compaction_round(run: Document, epoch: Document) -> str:
    text = f"run {run['run_id']}  {run['status']}"
    if run["published_slot"]:
        text += f", published in slot {run['published_slot']}: {run['first_dirty_offset']} -> {run['next_dirty_offset']}, "
        text += f"{count_noun(run['sources'], 'segment')} -> {run['outputs']}"
    if run["announced_by"] and run["announced_by"] != epoch["holder"]:
        text += f" (begun by {run['announced_by']})"
    return f"{text}: {run['reason']}" if run["reason"] else text


def _describe_fenced(entry: Document) -> str:
    claim = f" up to {entry['offset']}" if entry["offset"] is not None else ""
    return f"VOID: {entry['type']}{claim} in slot {entry['slot']} by {entry['by']}: {entry['reason']}"


def _history_point_document(point: PartitionHistoryPoint) -> dict[str, object]:
    return {
        "slot": point.slot,
        "at_ms": point.at_ms,
        "cleaner_offsets": [tiers.report_document(entry) for entry in point.cleaner_offsets],
    }


def _history_difference_tables(
    before: PartitionHistoryPoint, after: PartitionHistoryPoint, difference: PartitionHistoryDifference
) -> list[Table]:
    def history_point_title(point: PartitionHistoryPoint) -> str:
        return f"slot {point.slot}" + (f" ({format_iso_time(point.at_ms)})" if point.at_ms else "")

    rows: list[tuple[object, ...]] = [(f"cleaner offset of epoch {c.leader_epoch}", c.before, c.after) for c in difference.cleaner_offsets]
    if difference.leader and difference.leader[0] != difference.leader[1]:
        rows.append(("leader", difference.leader[0] or "nobody", difference.leader[1] or "nobody"))
    if difference.fenced:
        rows.append(("void records", None, f"{difference.fenced} more"))
    tables = [Table("", ("", history_point_title(before), history_point_title(after)), rows or [("no difference", "", "")])]
    if difference.segments:
        rows = [(c.change, c.start_offset, c.end_offset, format_size(c.bytes), c.id) for c in difference.segments]
        tables.append(Table("segments", ("", "start offset", "end offset", "size", "id"), rows))
    if difference.segments is None:
        tables.append(Table("", ("the slots of that time were deleted; only the cleaner offsets are known",), ()))
    return tables
