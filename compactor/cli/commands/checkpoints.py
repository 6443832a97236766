"""``checkpoints``: cleaner offsets by leader epoch, who led, who published what, where a zombie was cut off and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, Tree, size
from compactor.errors import CompactorError, UsageError

if TYPE_CHECKING:
    from checkpoint.offsets import CleanerOffset
    from compactor.views.checkpoints import CheckpointView, EpochView, FencedView, LineageView, RunView
    from compactor.views.difference import Difference, Point
    from compactor.views.kafka_files import KafkaFile

FILE_HELP = "or one of Kafka's own cleaner-offset-checkpoint and leader-epoch-checkpoint files"


def add_arguments(parser: frame.Parser) -> None:
    listing = parser.subcommand("list", "cleaner offsets and leaders of all partitions, or what is in a checkpoint file of Kafka's")
    listing.add_argument("targets", nargs="*", metavar="TOPIC-PARTITION|FILE", help=f"default: all partitions of the tier; {FILE_HELP}")
    listing.runs(show_list)
    show = parser.subcommand("show", "one partition: cleaner offsets, lease, what was fenced")
    show.add_argument("target", metavar="TOPIC-PARTITION|FILE", help=FILE_HELP)
    show.runs(show_one)
    lineage = parser.subcommand("lineage", "the tree of compactor epochs: who led when, published what, was cut off where")
    lineage.add_argument("partition", metavar="TOPIC-PARTITION")
    lineage.runs(show_lineage)
    diff = parser.subcommand("diff", "two points in time of one partition, or two checkpoint files of Kafka's")
    diff.add_argument("target", metavar="TOPIC-PARTITION|FILE")
    diff.add_argument("before", metavar="FROM", help="a slot, a time (milliseconds, ISO 8601, '2h ago'), a run id; or the second file")
    diff.add_argument("after", metavar="TO", nargs="?", help="default: now; for a run alone: before and after it")
    diff.runs(show_diff)
    verify = parser.subcommand("verify", "cleaner offsets against rules and segments, the control log against itself")
    tiers.partitions_argument(verify)
    verify.runs(show_verify)


def show_list(args: argparse.Namespace, out: Output) -> int:
    from compactor.views.checkpoints import view

    files = [text for text in args.targets if _is_file(text)]
    if files and len(files) == len(args.targets):
        return _list_files(files, out)
    if files:
        raise UsageError("files and partitions together", hint="List them one after the other")
    opened = tiers.viewed(args)
    outcomes = tiers.PartitionOutcomes(out, named=bool(args.targets))
    found = []
    names = opened.partitions(args.targets)
    with out.progress("reading", len(names), "partitions") as progress:
        for name, log in zip(names, opened.read_logs(names, progress.advance), strict=True):
            if isinstance(log, CompactorError):
                outcomes.failed(str(name), log)
            else:
                found.append(view(opened.ports, log))
                outcomes.ok()
    now = opened.ports.clock_ms()
    rows = [
        (
            f"{v.topic}-{v.partition}",
            _vector(v.cleaner_offsets),
            v.first_dirty_offset,
            v.end_offset,
            _holder(v, now),
            _state(v),
            len(v.fenced),
        )
        for v in found
    ]
    columns = ("partition", "cleaner offsets", "first dirty", "end offset", "leader", "state", "fenced")
    out.result({"partitions": [tiers.plain(v) for v in found]}, Table("", columns, rows))
    return outcomes.exit_code()


def show_one(args: argparse.Namespace, out: Output) -> int:
    from compactor.views.checkpoints import view

    if _is_file(args.target):
        return _list_files([args.target], out)
    opened = tiers.viewed(args)
    (name,) = opened.partitions([args.target])
    log = opened.open(name)
    log.refresh()
    found = view(opened.ports, log)
    offsets = Table(
        f"{name}: cleaner offsets (the first one not clean) at slot {found.slot}",
        ("leader epoch", "offset"),
        [(entry.leader_epoch, entry.offset) for entry in found.cleaner_offsets],
    )
    facts = [
        ("offsets", f"{found.start_offset} to {found.end_offset}, dirty from {found.first_dirty_offset}"),
        ("leader", _holder(found, opened.ports.clock_ms()) or "nobody"),
        ("last compactor epoch", str(found.compactor_epoch) if found.compactor_epoch >= 0 else "none yet"),
        ("broker's leader epochs", " ".join(f"{entry.epoch}@{entry.start_offset}" for entry in found.leader_epochs) or "unknown"),
    ]
    if found.open_run:
        facts.append(("open round", f"{found.open_run}; the next `run` finishes or undoes it"))
    if found.quarantine:
        facts.append(("quarantined", found.quarantine))
    tables = [offsets, Table("", ("", ""), facts)] if found.cleaner_offsets else [Table(f"{name}: never cleaned", ("", ""), facts)]
    out.result(tiers.plain(found), *tables, *_fenced_table(found.fenced))
    return 0


def show_lineage(args: argparse.Namespace, out: Output) -> None:
    from compactor.views.checkpoints import lineage

    opened = tiers.viewed(args)
    (name,) = opened.partitions([args.partition])
    log = opened.open(name)
    log.refresh()
    found = lineage(opened.ports, log)
    out.result(tiers.plain(found), _tree(found, opened.ports.clock_ms()))


def show_diff(args: argparse.Namespace, out: Output) -> None:
    if _is_file(args.target):
        _diff_files(args, out)
        return
    from compactor.views.difference import Past, difference

    opened = tiers.viewed(args)
    (name,) = opened.partitions([args.target])
    past = Past(opened.open(name))
    around = past.around(args.before) if args.after is None else None
    before, after = around or (past.point(_point(args.before)), past.point(_point(args.after)) if args.after is not None else past.now)
    found = difference(before, after)
    document = {
        "topic": name.topic,
        "partition": name.partition,
        "from": _point_document(before),
        "to": _point_document(after),
        **tiers.plain(found),
    }
    out.result(document, *_diff_tables(before, after, found))


def _point(text: str) -> str:
    """What goes by the clock as milliseconds; everything else is the log's to understand."""
    return text if frame.distance_ms(text) is None else str(frame.moment(text))


def show_verify(args: argparse.Namespace, out: Output) -> int:
    from compactor.upkeep.verify_offsets import verify_all

    opened = tiers.viewed(args)
    names = opened.partitions(args.partitions)
    with out.progress("verifying", len(names), "partitions") as progress:
        found = verify_all(opened, names, progress.advance)
    ok = not any(finding.severity == "error" for finding in found)
    for finding in found:
        if finding.severity == "error":
            out.note(f"error: {finding.topic}-{finding.partition}: {finding.object or finding.kind}: {finding.detail}")
    rows = [(f.severity, f.kind, f"{f.topic}-{f.partition}", f.object, f.detail) for f in found]
    tables = [Table("", ("severity", "kind", "partition", "object", "detail"), rows)] if rows else []
    document = {"ok": ok, "problems": [tiers.plain(finding) for finding in found]}
    out.result(document, *tables, summary=f"{len(names)} partitions: all is well" if ok else "NOT ok")
    return 0 if ok else 3


# --- Kafka's own files ---


def _is_file(text: str) -> bool:
    """An argument that is a path: it exists as one, or could be nothing else."""
    if Path(text).is_file():
        return True
    if "/" in text or Path(text).is_dir():
        raise UsageError(f"there is no file {text}", hint="Name a TOPIC-PARTITION of the tier or one of Kafka's checkpoint files")
    return False


def _list_files(paths: Sequence[str], out: Output) -> int:
    from compactor.views.kafka_files import read_kafka_file

    files = [read_kafka_file(Path(path)) for path in paths]
    documents = [_file_document(file) for file in files]
    out.result(documents[0] if len(files) == 1 else {"files": documents}, *(_file_table(file) for file in files))
    return 0


def _file_document(file: KafkaFile) -> dict[str, object]:
    """As a partition of the tier is shown, where that makes sense: such a file knows neither leases nor compactor epochs."""
    document: dict[str, object] = {"file": file.path, "kind": file.kind}
    if file.leader_epochs or file.kind == "leader-epoch-checkpoint":
        return document | {"leader_epochs": [tiers.plain(entry) for entry in file.leader_epochs]}
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


def _file_table(file: KafkaFile) -> Table:
    title = f"{file.path} ({file.kind})"
    if file.kind == "leader-epoch-checkpoint":
        return Table(title, ("leader epoch", "start offset"), [(entry.epoch, entry.start_offset) for entry in file.leader_epochs])
    return Table(title, ("partition", "cleaner offset"), [(f"{entry.topic}-{entry.partition}", entry.offset) for entry in file.offsets])


def _diff_files(args: argparse.Namespace, out: Output) -> None:
    from compactor.views.kafka_files import compare, read_kafka_file

    if args.after is not None or not _is_file(args.before):
        raise UsageError(f"{args.target} is a file", hint="Compare it with one other file: checkpoints diff FILE FILE")
    before, after = read_kafka_file(Path(args.target)), read_kafka_file(Path(args.before))
    changes = compare(before, after)
    document = {"kind": before.kind, "from": before.path, "to": after.path, "changes": [tiers.plain(change) for change in changes]}
    table = Table(before.kind, ("", before.path, after.path), [(c.what, c.before, c.after) for c in changes])
    out.result(document, *([table] if changes else []), summary="" if changes else "no difference")


# --- how things are put ---


def _vector(offsets: Sequence[CleanerOffset]) -> str:
    return " ".join(f"{entry.leader_epoch}:{entry.offset}" for entry in offsets) or "never cleaned"


def _holder(found: CheckpointView | LineageView, now_ms: int) -> str:
    lease = found.lease
    if lease is None:
        return ""
    left = (lease.expires_ms - now_ms) / 1000
    return f"{lease.holder} (epoch {lease.epoch}), " + (f"lease for {left:.0f} s more" if left > 0 else f"lease over for {-left:.0f} s")


def _state(found: CheckpointView) -> str:
    if found.quarantine:
        return "quarantined"
    return "round open" if found.open_run else ""


def _fenced_table(fenced: Sequence[FencedView]) -> list[Table]:
    if not fenced:
        return []
    rows = [(f.slot, when(f.at_ms), f.leader_epoch if f.leader_epoch >= 0 else None, f.type, f.offset, f.by, f.reason) for f in fenced]
    return [Table("in the log, and void", ("slot", "at", "leader epoch", "record", "claimed offset", "by", "why"), rows)]


def _tree(found: LineageView, now_ms: int) -> Tree:
    title = f"{found.topic}-{found.partition} at slot {found.slot}: cleaner offsets {_vector(found.cleaner_offsets)}"
    branches = [_epoch_tree(epoch, found, now_ms) for epoch in found.epochs]
    branches += [Tree(_void(entry), ()) for entry in found.unowned]
    return Tree(title, branches or [Tree("nobody has led it yet", ())])


def _epoch_tree(epoch: EpochView, found: LineageView, now_ms: int) -> Tree:
    label = f"epoch {epoch.leader_epoch}  {epoch.holder}  from slot {epoch.slot} ({when(epoch.at_ms)})"
    if epoch.granted is not None:
        label += f", granted up to {epoch.granted}"
    branches = [Tree(_run(run, epoch), ()) for run in epoch.runs]
    branches += [Tree(f"took back run {run_id}", ()) for run_id in epoch.undid]
    if epoch.cut_off:
        cut = epoch.cut_off
        branches.append(
            Tree(
                f"CUT OFF in slot {cut.slot} ({when(cut.at_ms)}): {cut.holder} took over as epoch {cut.leader_epoch}; "
                "nothing that this epoch writes counts after it",
                (),
            )
        )
    branches += [Tree(_void(entry), ()) for entry in epoch.fenced]
    if epoch.ended == "released":
        branches.append(Tree(f"released ({when(epoch.ended_ms or 0)})", ()))
    if epoch.ended == "leading":
        branches.append(Tree(f"leads: {_holder(found, now_ms)}", ()))
    return Tree(label, branches)


def _run(run: RunView, epoch: EpochView) -> str:
    text = f"run {run.run_id}  {run.status}"
    if run.published_slot:
        text += f", published in slot {run.published_slot}: {run.first_dirty_offset} -> {run.next_dirty_offset}, "
        text += f"{run.sources} segments -> {run.outputs}"
    if run.announced_by and run.announced_by != epoch.holder:
        text += f" (begun by {run.announced_by})"
    return f"{text}: {run.reason}" if run.reason else text


def _void(entry: FencedView) -> str:
    claim = f" up to {entry.offset}" if entry.offset is not None else ""
    return f"VOID: {entry.type}{claim} in slot {entry.slot} by {entry.by}: {entry.reason}"


def _point_document(point: Point) -> dict[str, object]:
    return {"slot": point.slot, "at_ms": point.at_ms, "cleaner_offsets": [tiers.plain(entry) for entry in point.cleaner_offsets]}


def _diff_tables(before: Point, after: Point, found: Difference) -> list[Table]:
    def title(point: Point) -> str:
        return f"slot {point.slot}" + (f" ({when(point.at_ms)})" if point.at_ms else "")

    rows: list[tuple[object, ...]] = [(f"cleaner offset of epoch {c.leader_epoch}", c.before, c.after) for c in found.cleaner_offsets]
    if found.leader and found.leader[0] != found.leader[1]:
        rows.append(("leader", found.leader[0] or "nobody", found.leader[1] or "nobody"))
    if found.fenced:
        rows.append(("void records", None, f"{found.fenced} more"))
    tables = [Table("", ("", title(before), title(after)), rows or [("no difference", "", "")])]
    if found.segments:
        rows = [(c.change, c.start_offset, c.end_offset, size(c.bytes), c.id) for c in found.segments]
        tables.append(Table("segments", ("", "start offset", "end offset", "size", "id"), rows))
    if found.segments is None:
        tables.append(Table("", ("the slots of that time are gone; only its cleaner offsets are known",), ()))
    return tables


def when(at_ms: int) -> str:
    """A time for people."""
    from compactor.views.difference import iso

    return iso(at_ms)
