"""Command ``audit list``: what people did to the tier."""

from __future__ import annotations

import argparse
import re
from itertools import islice

from compactor.cli import tiers
from compactor.cli.output import Output, Table
from compactor.config.times import format_iso_time
from compactor.config.units import count_noun
from compactor.control.audit import RecordedAction, list_actions
from compactor.errors import UsageError


def list_audited_actions(args: argparse.Namespace, out: Output) -> None:
    tier = tiers.open_read_only(args)
    try:
        wanted = re.compile(args.pattern or ".*")
    except re.error as error:
        raise UsageError(f"{args.pattern!r} is not a valid regular expression: {error}") from error

    def matches_requested_target_pattern(recorded: RecordedAction) -> bool:
        """A recorded target may be a pattern, which counts if it matches the requested text."""
        targets = recorded.action.targets
        texts = [text for each in targets for text in (each, re.sub(r"-\d+(~\d+)?$", "", each))]
        return (
            not args.pattern
            or any(wanted.fullmatch(text) for text in texts)
            or any(_matches_whole_text(each, args.pattern) for each in targets)
        )

    matching = (recorded for recorded in list_actions(tier.ports, args.since) if matches_requested_target_pattern(recorded))
    found = list(islice(matching, args.limit))
    rows = []
    for recorded in found:
        action, outcome = recorded.action, recorded.outcome
        state = "unknown" if outcome is None else "failed" if outcome.error else "done"
        details = " ".join(f"{name}={value}" for name, value in action.details.items())
        targets = " ".join(action.targets[:3]) + (f" and {len(action.targets) - 3} more" if len(action.targets) > 3 else "")
        who, why = f"{action.user}@{action.host}", f"because: {action.reason}" if action.reason else ""
        rows.append((format_iso_time(action.at_ms), who, action.command, targets, state, details, why, outcome.error if outcome else ""))
    columns = ("time", "who", "action", "on", "state", "details", "reason", "error")
    document = {"actions": [recorded.model_dump(mode="json") for recorded in found]}
    tables = [Table("", columns, rows, minor=("state",), below=3)] if rows else []
    out.print_result(document, *tables, summary=count_noun(len(found), "action"))


def _matches_whole_text(pattern: str, text: str) -> bool:
    try:
        return re.fullmatch(pattern, text) is not None
    except re.error:
        return False
