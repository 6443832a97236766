"""The parser, the common options, argument types, the settings."""

from __future__ import annotations

import argparse
import errno
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from typing_extensions import override

from compactor import extras
from compactor.config.units import parse_duration_ms, parse_size_bytes
from compactor.constants import TopicId
from compactor.errors import CompactorError, ExitCode, OutOfBudget, StoreError, UsageError, bug_reason

if TYPE_CHECKING:
    from compactor.cli.output import Output
    from compactor.config.settings import Settings


DEBUG = "TIERED_COMPACTOR_DEBUG"
"""Environment variable. If it is 1, errors are shown with their stack trace."""

CommandFunction = Callable[[argparse.Namespace, "Output"], ExitCode | None]
"""A command's function. It returns the exit code, or None for 0."""


class Argument(NamedTuple):
    """Argument of a command, or a group of arguments of which at most one may be given.

    names: of a positional argument, or all spellings of an option; empty for a group.
    settings: keyword arguments of argparse.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    exclusive: tuple[Argument, ...] = ()


def argument(*names: str, **settings: Any) -> Argument:
    return Argument(names, settings)


def exclusive_arguments(*arguments: Argument, required: bool = False) -> Argument:
    return Argument((), {"required": required}, arguments)


class Command(NamedTuple):
    """A command or subcommand.

    function: module below ``compactor.cli.commands`` and its function, such as ``run.run_compaction_rounds``; empty if a subcommand must be
        given.
    """

    name: str
    help: str
    function: str
    arguments: tuple[Argument, ...] = ()
    subcommands: tuple[Command, ...] = ()


COMMON_ARGUMENTS = (
    argument("--config", metavar="FILE", help="settings (default: ./tiered-compactor.toml)"),
    argument("--output", choices=("table", "json"), help="for people, or one JSON document on stdout"),
    argument("--log-format", choices=("text", "json"), help="of the lines on stderr: for people, or JSON objects"),
    argument("-v", "--verbose", action="store_true", help="more of them: every step, and why"),
)
"""Options that every command takes, before or after it."""
_OPTIONS_BEFORE_COMMAND = {name: "action" not in option.settings for option in COMMON_ARGUMENTS for name in option.names}
"""Names of the common options. True if the option takes a value."""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    @override
    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        self._action_max_length += self._indent_increment


class CommandLineParser(argparse.ArgumentParser):
    """argparse parser that raises UsageError instead of exiting, and adds the common options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _HelpFormatter, **settings})

    def define_command(self, command: Command) -> None:
        if command.function:
            for one in command.arguments:
                group = self.add_mutually_exclusive_group(**one.settings) if one.exclusive else self
                for each in one.exclusive or (one,):
                    group.add_argument(*each.names, **each.settings)
            for one in COMMON_ARGUMENTS:
                # SUPPRESS: a default here would undo what was given before the subcommand (`config --output json show`).
                self.add_argument(*one.names, default=argparse.SUPPRESS, **one.settings)
            self.set_defaults(run=command.function)
        if command.subcommands:
            required = not command.function
            choices = self.add_subparsers(metavar="SUBCOMMAND", required=required, dest="subcommand", parser_class=CommandLineParser)
            for child in command.subcommands:
                choices.add_parser(child.name, help=child.help, description=child.help).define_command(child)

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises UsageError if an argument is unknown, with the most similar option as its hint."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from difflib import get_close_matches

            # Dashes do not count: every option has them.
            options = {name.lstrip("-"): name for name in self._option_string_actions}
            near = get_close_matches(unknown[0].partition("=")[0].lstrip("-"), options, n=1)
            hint = f"Did you mean {options[near[0]]}?" if near else f"See `{self.prog} --help`"
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", hint=hint)
        return found, unknown

    @override
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        from difflib import get_close_matches

        choices = None if action.choices is None else [*map(str, action.choices)]
        if choices is None or str(value) in choices:
            return
        near = get_close_matches(str(value), choices, n=1)
        hint = f". Did you mean {near[0]}?" if near else f" (choose from {', '.join(choices)})" if len(choices) < 10 else ""
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"See `{self.prog} --help`")


def common_options_last(arguments: Sequence[str]) -> list[str]:
    """Move common options to the end: ``--config FILE run`` becomes ``run --config FILE``.

    :raises UsageError: if an option other than these, ``--help`` and ``--version`` comes before the command.
    """
    rest = list(arguments)
    before: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-h", "--help", "--version"):
        name = rest[0].partition("=")[0]
        if name not in _OPTIONS_BEFORE_COMMAND:
            hint = f"Only {', '.join(_OPTIONS_BEFORE_COMMAND)} may: tiered-compactor COMMAND {name}"
            raise UsageError(f"{rest[0]} comes before the command", hint=hint)
        words = 2 if _OPTIONS_BEFORE_COMMAND[name] and "=" not in rest[0] else 1
        before += rest[:words]
        rest = rest[words:]
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *before, *rest[end:]] if rest else []


def is_json_requested(arguments: Sequence[str]) -> bool:
    return "--output=json" in arguments or ("--output", "json") in pairwise(arguments)


def whole_number_parser(low: int = 0, high: int = 2**63 - 1) -> Callable[[str], int]:
    """Parser of whole numbers from ``low`` to ``high``, inclusive, for argparse."""

    def parse_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not from {low} to {high}")
        return number

    return parse_number


def parse_byte_count(text: str) -> int:
    found = parse_size_bytes(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 1048576 or '64 MiB'")
    return found


def parse_relative_time_ms(text: str) -> int | None:
    """Distance from now: negative for ``2h ago`` and ``-2h``, positive for ``in 3d`` and ``+3d``, 0 for ``now``; None for other text. Units
    are ms, s, m (or min), h, d and w.
    """
    if text == "now":
        return 0
    sign = next((sign for sign in ("+", "-", "in ") if text.startswith(sign)), "")
    is_past = text.endswith(" ago")
    length = parse_duration_ms(text.removeprefix(sign).removesuffix(" ago"))
    if length is None or bool(sign) == is_past:
        return None
    return -length if is_past or sign == "-" else length


def parse_time_ms(text: str) -> int:
    """Parse milliseconds since 1970, a time such as 2026-01-31T12:00:00Z (UTC if it has no zone), or a relative time. Raises
    ArgumentTypeError.
    """
    from datetime import UTC, datetime

    if text.isascii() and text.isdigit():
        return whole_number_parser()(text)
    distance = parse_relative_time_ms(text)
    if distance is not None:
        return max(0, int(time.time() * 1000) + distance)
    try:
        found = datetime.fromisoformat(text)
        return max(0, int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000))
    except (ValueError, OverflowError):
        detail = f"{text!r} is not a valid time: milliseconds since 1970, 2026-01-31T12:00:00Z, now, '2h ago', 'in 3d'"
        raise argparse.ArgumentTypeError(detail) from None


def now_ms_from_arguments(args: argparse.Namespace) -> int:
    return int(time.time() * 1000) if args.now is None else args.now


def load_command_settings(args: argparse.Namespace) -> Settings:
    from compactor.config.settings import load_settings

    return load_settings(getattr(args, "config", None))


def command_line(args: argparse.Namespace, words: str) -> str:
    config = getattr(args, "config", None)
    return f"tiered-compactor {words}" + (f" --config {shlex.quote(config)}" if config else "")


def as_compactor_error(error: BaseException) -> CompactorError:
    """Convert missing packages, full disks, lack of memory. Others become bug reports."""
    if isinstance(error, CompactorError):
        return error
    if isinstance(error, ModuleNotFoundError) and (lacking := extras.missing_extra_error(error.name or "")):
        return lacking
    if isinstance(error, MemoryError):
        return OutOfBudget("out of memory", hint="Lower [cleaner] map_budget_bytes")
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return OutOfBudget(f"the disk is full{where}", hint="Free space or lower [cleaner] disk_budget_bytes")
        return StoreError(f"{error.strerror or error}{where}")
    return CompactorError(bug_reason(error), hint=f"{DEBUG}=1 shows where; please report it")


# Arguments that several commands share, and their types.


INT32_MAX = 2**31 - 1
WATCH_SECONDS = 5
"""Seconds between two answers of `status --watch`."""
SAMPLED_PARTITIONS = 8
"""Largest number of partitions that `plan` samples without being asked, so that it answers within seconds."""
FIELD_FORMATS = ("auto", "avro", "json", "text", "bytes")
FILE_HELP = "or one of Kafka's own cleaner-offset-checkpoint and leader-epoch-checkpoint files"


def parse_offset_or_time(text: str) -> tuple[str, int]:
    """Parse to ("offset", a number) or ("time", milliseconds). Raises ArgumentTypeError if it is neither."""
    if text.isascii() and text.isdigit():
        return "offset", whole_number_parser()(text)
    return "time", parse_time_ms(text)


def parse_topic_id(text: str) -> TopicId:
    from compactor.tier.contents import is_topic_id

    if not is_topic_id(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a topic id; `kafka-topics --describe` prints it")
    return TopicId(text)


PARTITION_ARGUMENT = argument("partition", metavar="TOPIC-PARTITION")
PARTITION_OR_TOPIC_ARGUMENT = argument("partition", metavar="TOPIC[-PARTITION]", help="a partition, a topic or a whole regular expression")
PARTITIONS_ARGUMENT = argument(
    "partitions", nargs="*", metavar="TOPIC[-PARTITION]", help="a partition, a topic or a whole regular expression (default: all)"
)
PATTERN_ARGUMENT = argument("pattern", metavar="PATTERN", help="a topic, a TOPIC-PARTITION or a whole regular expression")
RUN_ARGUMENT = argument("run_id", metavar="RUN", help="as `runs list` prints it, or its first characters")
TOPIC_ID_ARGUMENT = argument(
    "--topic-id", metavar="ID", help="of the topics that have had this name, the one with this id (default: the latest)"
)
TOPICS_OPTION = argument("--topics", metavar="REGEX", help="only topics whose whole name matches")
CLOCK_OPTION = argument(
    "--now",
    "--at",
    type=parse_time_ms,
    metavar="TIME",
    help="the cleaner's clock: milliseconds, a time, '2h ago', 'in 3d' (default: the clock)",
)
DRY_RUN_OPTION = argument("--dry-run", action="store_true", help="show what would be deleted, and delete nothing")
PRICES_OPTION = argument("--prices", type=Path, metavar="FILE", help="a TOML file with other prices (default: those of S3 Standard)")
PROFILE_OPTION = argument("--profile", action="store_true", help="show the cost of each stage: CPU seconds, seconds, bytes")
ACCEPT_ERASED_OPTION = argument(
    "--accept-erased", action="store_true", help="also if it may bring values back whose keys were erased (`erasure --expedite`)"
)
REASON_OPTION = argument("--reason", metavar="TEXT", default="", help="the reason, which `audit list` shows")
SKIP_DAMAGED_OPTION = argument(
    "--skip-damaged", action="store_true", help="leave out what cannot be read, name its offsets, and end with exit code 3"
)
