"""What all commands share: the parser, the two options that every command takes, argument types, the settings."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from compactor import extras
from compactor.errors import CompactorError, OutOfBudget, StoreError, UsageError

if TYPE_CHECKING:
    from compactor.cli.output import Output
    from compactor.config import Settings

DEBUG = "TIERED_COMPACTOR_DEBUG"
"""Set to 1, an error is shown with where it came from."""

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
        """Attaches the function that does it; ``--config`` and ``--output`` stand after the command."""
        # SUPPRESS: a default here would undo what was given before the subcommand (`config --output json show`).
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings (default: ./tiered-compactor.toml)")
        self.add_argument(
            "--output", choices=("table", "json"), default=argparse.SUPPRESS, help="for people, or one JSON document on stdout"
        )
        self.set_defaults(run=run)

    def subcommand(self, name: str, help: str, *, required: bool = True) -> Parser:  # noqa: A002, argparse's own word
        """Adds ``show`` to ``config``. ``required``: False where the command does something by itself, too."""
        if self._choices is None:
            self._choices = self.add_subparsers(metavar="SUBCOMMAND", required=required, dest="subcommand", parser_class=Parser)
        return self._choices.add_parser(name, help=help, description=help)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"See `{self.prog} --help`")


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
