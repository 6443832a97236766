"""What the commands over a tier share."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from compactor.cli import frame
from compactor.cli.output import Output
from compactor.errors import CompactorError, Leased, UsageError

READERS = "What only reads works without: topics, segments, plan, explain, checkpoints, verify, export"
WRITERS = ("run", "retire", "daemon", "recompact", "undo")
"""For a tier of kind kafka."""

if TYPE_CHECKING:
    from compactor.bootstrap import Tier
    from compactor.control.summary import PartitionSummary
    from compactor.model.ids import TopicPartition


def opened(args: argparse.Namespace, *, local_state: bool = False, writes: str = "") -> Tier:
    """The tier of the configuration; ``local_state``: with what this machine remembers of it. Raises UsageError.

    ``writes``: the command, where it is one that changes the tier. All others cannot change one that brokers write.
    """
    from compactor.bootstrap import open_tier

    gc.set_threshold(100_000)  # segments are made by the hundred thousand, and no cycles
    settings = frame.settings(args)
    kafka = settings.tier.kind == "kafka"
    if kafka and writes and writes not in WRITERS:
        raise UsageError(f"`{writes}` does not work on a tier that brokers write", hint=READERS)
    if kafka and writes and not (settings.control_url and settings.kafka.bootstrap_servers.strip()):
        missing = "bootstrap_servers under [kafka]" if settings.control_url else "control_url under [tier]"
        raise UsageError(f"`{writes}` on a tier that brokers write needs {missing}", hint=READERS)
    if kafka and writes and not settings.kafka.topics:
        raise UsageError(f"`{writes}`: topics under [kafka] is empty, so that no topic is read", hint="Name whole regular expressions")
    opened = open_tier(settings, local_state=local_state)
    if kafka and writes:
        opened.create()
    elif kafka:
        from compactor.views.checkpoints import read_only

        opened = read_only(opened)
    if any(cleaner.map_engine == "spark" for cleaner in (settings.cleaner, *settings.topics.values())):
        from compactor.spark.round.engine import SparkEngines

        return replace(opened, engines=SparkEngines())
    return opened


def keeping(args: argparse.Namespace) -> Tier:
    """The same for a command that writes into the control store alone. Raises UsageError where there is none."""
    from compactor.bootstrap import open_tier
    from compactor.storage.readonly import ReadOnly

    settings = frame.settings(args)
    if settings.tier.kind != "kafka":
        return opened(args)
    if not settings.control_url:
        raise UsageError("there is no place for what is made", hint="Set control_url under [tier], outside of what brokers write")
    found = open_tier(settings)
    found.create()
    return found.over(data=ReadOnly(found.ports.data))


def viewed(args: argparse.Namespace) -> Tier:
    """The same for a command that must not write: its stores refuse to."""
    from compactor.views.checkpoints import read_only

    return read_only(opened(args))


def summaries(tier: Tier, names: Sequence[TopicPartition], out: Output, outcomes: PartitionOutcomes) -> list[PartitionSummary]:
    """A look at each of these partitions; those that cannot be read are reported and left out."""
    from compactor.views.overview import overview

    found = []
    with out.progress("looking", len(names), "partitions") as progress:
        looks = overview(tier, names, marks=True, on_partition=progress.advance)
    for look in looks:
        if look.error is not None:
            outcomes.failed(str(look.name), look.error)
        if look.summary is not None:
            outcomes.ok()
            found.append(look.summary)
    return found


def partitions_argument(parser: frame.Parser) -> None:
    parser.add_argument("partitions", nargs="*", metavar="TOPIC-PARTITION", help="default: all partitions of the tier")


def now_argument(parser: frame.Parser) -> None:
    help_text = "the cleaner's clock: milliseconds, a time, '2h ago', 'in 3d' (default: the clock)"
    parser.add_argument("--now", "--at", type=frame.moment, metavar="TIME", help=help_text)


def now_ms(args: argparse.Namespace) -> int:
    return int(time.time() * 1000) if args.now is None else args.now


def plain(value: Any) -> dict[str, Any]:
    """A report as JSON has it."""
    return asdict(value)


class PartitionOutcomes:
    """Exit codes of a command over several partitions: a failing one does not stop the others (I9)."""

    def __init__(self, out: Output, named: bool) -> None:
        self._out = out
        self._named = named
        self._codes: list[int] = []
        self._leased = 0

    def ok(self) -> None:
        self._codes.append(0)

    def failed(self, what: str, error: Exception) -> CompactorError:
        """Notes it; with TIERED_COMPACTOR_DEBUG=1 a bug ends the command here, to be seen."""
        told = frame.known(error)
        if told is not error and os.environ.get(frame.DEBUG) == "1":
            raise error
        self._out.note(f"error: {told}" if str(told).startswith(f"{what}: ") else f"error: {what}: {told}")
        if isinstance(told, Leased) and not self._named:
            self._leased += 1
        else:
            self._codes.append(told.exit_code)
        return told

    def bad_data(self, what: str, reason: str) -> None:
        advice = (
            "Readers have what they had. Restore the object from the store's versions or a backup, and run again; `verify` names all damage"
        )
        self._out.note(f"error: {what} is quarantined: {reason}. {advice}")
        self._codes.append(3)

    def exit_code(self) -> int:
        from compactor.errors import gravest

        if self._leased and not self._codes:
            return Leased.exit_code
        return gravest(self._codes)
