"""Command ``undo RUN``: makes readers use the segments again that a round replaced."""

from __future__ import annotations

import argparse

from compactor.access.tier import Tier
from compactor.cli import command_parser, tiers, tiers as audit
from compactor.cli.output import Output, Table, format_size
from compactor.config.times import format_iso_time
from compactor.control.audit import latest_erasure_ms
from compactor.control.publication import undo_round, was_round_undone
from compactor.errors import UsageError
from compactor.model.ids import RunHistoryStatus
from compactor.upkeep.orphans import undo_by_copies
from compactor.views.overview import search_run, undo_refusal


def _unknown_run_error(tier: Tier, args: argparse.Namespace) -> UsageError:
    given_name = args.run_id
    try:
        names = tiers.select_partitions(tier, [given_name])
    except UsageError as error:
        is_near_miss = error.hint.startswith("Did you mean")
        return UsageError(f"no partition remembers a run {given_name}", hint=error.hint if is_near_miss else "`runs list` shows the rounds")
    states = [tier.open_partition_log(name).refresh() for name in names]
    runs = [(state, run) for state in states for run in state.runs if not undo_refusal(state, run.run_id)]
    if not runs:
        return UsageError(f"no round of {given_name} can be undone", hint=f"`runs list {given_name}` shows its rounds")
    state, run = max(runs, key=lambda found: found[1].started_ms)
    return UsageError(
        f"{given_name} is not a run; the latest round that can be undone is that of {state.topic_partition}"
        f" at {format_iso_time(run.started_ms)}",
        hint=command_parser.command_line(args, f"undo {run.run_id}"),
    )


def undo_command(args: argparse.Namespace, out: Output) -> None:
    tier = tiers.open_configured_tier(args, writing_command="undo")
    names = tier.list_partitions([args.partition] if args.partition else None)
    is_name = args.run_id in {*map(str, names), *(name.topic for name in names)}
    with out.show_progress("looking for the run", len(names), "partitions") as progress:
        found = None if is_name else search_run(tier, args.run_id, names, progress.advance)
    if found is None:
        raise _unknown_run_error(tier, args)
    before, run_id = found
    name = before.topic_partition
    if was_round_undone(before, run_id):
        out.print_note(f"{name}: run {run_id} was undone before; nothing to do")
        state = before
    else:
        log = tier.open_partition_log(name, caller_runs_round=True)
        started_ms = next((run.started_ms for run in before.runs if run.run_id == run_id), 0)
        erased_ms = None if args.accept_erased else latest_erasure_ms(tier.ports, name)
        if erased_ms is not None and started_ms <= erased_ms:
            raise UsageError(
                f"keys of {name.topic} were erased until {format_iso_time(erased_ms)}, and without run {run_id} values may come back",
                hint="Nothing was changed. To undo it nevertheless: --accept-erased, and erase the keys again afterwards",
            )
        with audit.audited(args, tier.settings, out, "undo", [str(name)], run=run_id):
            state = undo_by_copies(tier, log, run_id) if tier.kind.undo_copies else undo_round(tier.ports, log, tier.lease, run_id)
        tier.change_notifier.announce_changed_control_logs([log])
    document = {
        **tiers.partition_name_fields(name),
        "run_id": run_id,
        "status": RunHistoryStatus.REVERTED,
        "cleaner_offsets": [tiers.report_document(entry) for entry in state.vector],
        "first_dirty_offset": state.first_dirty_offset,
        "segments": len(state.live),
        "bytes": state.bytes,
    }
    rows = [
        ("segments", len(before.live), len(state.live)),
        ("size", format_size(before.bytes), format_size(state.bytes)),
        ("cleaner offsets", *map(tiers.format_cleaner_offsets, (before.vector, state.vector))),
        ("dirty from", before.first_dirty_offset, state.first_dirty_offset),
    ]
    summary = "Its outputs are deleted by `retire` once the grace period is over. The same round is due again, unless the settings change"
    out.print_result(document, Table(f"{name}: run {run_id} is undone", ("", "before", "now"), rows), summary=summary)
