"""What all commands share: the parser, the options that every command takes, argument types, the settings."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from compactor import extras
from compactor.errors import CompactorError, OutOfBudget, StoreError, UsageError

if TYPE_CHECKING:
    from compactor.cli.output import Output
    from compactor.config import Settings

DEBUG = "TIERED_COMPACTOR_DEBUG"
"""Set to 1, an error is shown with where it came from."""

_COMMON = {"--config": True, "--output": True, "--log-format": True, "-v": False, "--verbose": False}
"""The options that every command takes; True: with a value."""

Run = Callable[[argparse.Namespace, "Output"], "int | None"]
"""A command's function: the parsed arguments and where to print; returns the exit code, None for 0."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """argparse forgets that commands are indented once more, and breaks the line behind the longest one."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        self._action_max_length += self._indent_increment


class Parser(argparse.ArgumentParser):
    """argparse, with errors raised as UsageError and the common options added where a function is attached."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **settings})
        self._choices: argparse._SubParsersAction[Parser] | None = None

    def runs(self, run: Run) -> None:
        """Attaches the function that does it; the common options stand after the command."""
        # SUPPRESS: a default here would undo what was given before the subcommand (`config --output json show`).
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings (default: ./tiered-compactor.toml)")
        self.add_argument(
            "--output", choices=("table", "json"), default=argparse.SUPPRESS, help="for people, or one JSON document on stdout"
        )
        self.add_argument(
            "--log-format", choices=("text", "json"), default=argparse.SUPPRESS, help="of the lines on stderr: for people, or JSON objects"
        )
        self.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="more of them: every step, and why")
        self.set_defaults(run=run)

    def subcommand(self, name: str, help: str, *, required: bool = True) -> Parser:  # noqa: A002, argparse's own word
        """Adds ``show`` to ``config``. ``required``: False where the command does something by itself, too."""
        if self._choices is None:
            self._choices = self.add_subparsers(metavar="SUBCOMMAND", required=required, dest="subcommand", parser_class=Parser)
        return self._choices.add_parser(name, help=help, description=help)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What a command does not know is its own error, with its own help and options, not that of the whole program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from difflib import get_close_matches

            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"See `{self.prog} --help`"
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", hint=hint)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"See `{self.prog} --help`")


def command_first(arguments: Sequence[str]) -> list[str]:
    """``--config FILE run now`` as ``run now --config FILE``: common options may stand before the command; UsageError for others."""
    rest = list(arguments)
    before: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-h", "--help", "--version"):
        name = rest[0].partition("=")[0]
        if name not in _COMMON:
            hint = f"Only {', '.join(_COMMON)} may: tiered-compactor COMMAND {name}"
            raise UsageError(f"{rest[0]} stands before the command", hint=hint)
        words = 2 if _COMMON[name] and "=" not in rest[0] else 1
        before += rest[:words]
        rest = rest[words:]
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *before, *rest[end:]] if rest else []


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether a failure is told in JSON, too, also where the arguments are wrong."""
    return "--output=json" in arguments or ("--output", "json") in pairwise(arguments)


def whole(low: int = 0, high: int = 2**63 - 1) -> Callable[[str], int]:
    """An argument type: a whole number of that range (``whole()`` takes offsets, bytes and milliseconds)."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not from {low} to {high}")
        return number

    return parse


def distance_ms(text: str) -> int | None:
    """``2h ago``, ``in 3d``, ``-2h``, ``+3d`` in milliseconds from now, ``now`` as 0; None for anything else. Units are s, m, h, d, w."""
    import re

    if text == "now":
        return 0
    far = re.fullmatch(r"(?P<sign>[+-]|in )?(?P<count>\d+)(?P<unit>[smhdw])(?P<ago> ago)?", text)
    if far is None or bool(far["sign"]) == bool(far["ago"]):
        return None
    length = int(far["count"]) * {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}[far["unit"]]
    return -length if far["ago"] or far["sign"] == "-" else length


def moment(text: str) -> int:
    """An argument type: milliseconds since 1970, a time like 2026-01-31T12:00:00Z (UTC where it does not say), ``now``, ``2h ago``,
    ``in 3d``.

    The short forms of the last two are ``-2h`` (as ``--at=-2h``) and ``+3d``; units are s, m, h, d, w.
    """
    import time
    from datetime import UTC, datetime

    if text.isascii() and text.isdigit():
        return whole()(text)
    distance = distance_ms(text)
    if distance is not None:
        return max(0, int(time.time() * 1000) + distance)
    try:
        found = datetime.fromisoformat(text)
        return max(0, int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000))
    except (ValueError, OverflowError):
        said = f"{text!r} is no time: milliseconds since 1970, 2026-01-31T12:00:00Z, now, '2h ago', 'in 3d'"
        raise argparse.ArgumentTypeError(said) from None


def settings(args: argparse.Namespace) -> Settings:
    """The settings in force for this call. Raises UsageError."""
    from compactor.config import load

    return load(getattr(args, "config", None))


def known(error: BaseException) -> CompactorError:
    """Adapters name their errors; what slips through them is sorted here so that the exit code is right all the same."""
    if isinstance(error, CompactorError):
        return error
    if isinstance(error, ModuleNotFoundError) and (lacking := extras.missing(error.name or "")):
        return lacking
    if isinstance(error, MemoryError):
        return OutOfBudget("out of memory", hint="Lower [cleaner] map_budget_bytes")
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return OutOfBudget(f"the disk is full{where}", hint="Free space or lower [cleaner] disk_budget_bytes")
        return StoreError(f"{error.strerror or error}{where}")
    return CompactorError(f"a bug: {type(error).__name__}: {error}", hint=f"{DEBUG}=1 shows where; please report it")
