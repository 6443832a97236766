"""Entry point: imports only the command's module, and turns every error into one line and an exit code."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from compactor import __commit__, __version__
from compactor.cli.arguments import COMMANDS
from compactor.cli.command_parser import (
    DEBUG,
    CommandFunction,
    CommandLineParser,
    as_compactor_error,
    common_options_last,
    is_json_requested,
)
from compactor.cli.output import NoteLogHandler, Output, StderrLineFormat, StderrNotePrinter, Table, format_size
from compactor.errors import ExitCode
from compactor.profiling import StageCost, StageCostRecorder, loading_cost, record_stage_costs

_LOADED_S: Final = time.perf_counter()


class CommandProfile:
    """Costs of a command that works on segments: its start-up, and with ``--profile`` those of each stage."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._asked: bool = args.profile
        self._costs: dict[str, StageCost] = {}
        self._startup: StageCost | None = None
        loading_cost.clocks = time.thread_time, time.perf_counter

    @contextmanager
    def record_costs(self) -> Iterator[None]:
        self._startup = StageCost(time.process_time(), time.perf_counter() - _LOADED_S)
        loaded = StageCost(loading_cost.cpu, loading_cost.wall)
        try:
            with self._record_stages():
                yield
        finally:  # kernels that are first needed during the work
            self._startup.cpu += loading_cost.cpu - loaded.cpu
            self._startup.wall += loading_cost.wall - loaded.wall

    def startup_document(self) -> dict[str, float] | None:
        """Cost of the process until the work began, and of loading and compiling kernels since then. None if there was no work."""
        return None if self._startup is None else {"seconds": round(self._startup.wall, 6), "cpu": round(self._startup.cpu, 6)}

    @contextmanager
    def _record_stages(self) -> Iterator[None]:
        if not self._asked:
            yield
            return
        recorder = StageCostRecorder(time.thread_time, time.perf_counter)
        cpu, wall = time.process_time(), time.perf_counter()
        with record_stage_costs(recorder):
            yield
        total = StageCost(time.process_time() - cpu, time.perf_counter() - wall)
        staged = sum(cost.cpu for cost in recorder.costs.values())
        self._costs = {
            **{str(stage): cost for stage, cost in recorder.costs.items()},
            "other": StageCost(max(0.0, total.cpu - staged)),
            "total": total,
        }

    def stage_costs_document(self) -> list[dict[str, object]] | None:
        rows = self._costs.items()
        reported = [{"stage": name, "cpu": round(cost.cpu, 6), "seconds": round(cost.wall, 6), "bytes": cost.bytes} for name, cost in rows]
        return reported if self._asked else None

    def stage_cost_tables(self) -> list[Table]:
        rows = [
            (name, f"{cost.cpu:.3f}", f"{cost.wall:.3f}" if cost.wall else None, format_size(cost.bytes) if cost.bytes else None)
            for name, cost in self._costs.items()
            if cost != StageCost()
        ]
        return [Table("what it cost", ("stage", "CPU s", "seconds", "bytes"), rows)] if self._costs else []


SERVICES = ("daemon.run_daemon", "agent.run_upload_agent", "serve.serve_tier")
"""Functions of commands that run until they are stopped. Their lines on stderr carry time and level."""


def _speed_up_start() -> None:
    """Saves a third of a small command's time."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else the metadata of every package that is installed are read
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.freeze)  # else Python ends by looking through all that was imported, three times: a fifth


def entry(argv: list[str] | None = None) -> ExitCode:
    """Exit code: 0, 130 after Ctrl-C, 143 after SIGTERM, else that of the error. argv: without the program's name; None for those of the
    process.
    """
    with _signals_as_exceptions():
        _speed_up_start()
        return _run_command(sys.argv[1:] if argv is None else argv)


def _run_command(arguments: list[str]) -> ExitCode:
    out = Output("table")

    def current_note_printer() -> StderrNotePrinter:
        return out.print_note

    remarks = NoteLogHandler(current_note_printer)
    if is_json_requested(arguments):
        out = Output("json")
    try:
        arguments = common_options_last(arguments) or ["--help"]
        args = build_parser(arguments[:1]).parse_args(arguments)
        service = args.run in SERVICES
        out = Output(
            getattr(args, "output", "table"), lines=StderrLineFormat(getattr(args, "log_format", "text") == "json", stamped=service)
        )
        remarks.set_minimum_level(logging.DEBUG if getattr(args, "verbose", False) else logging.INFO if service else logging.WARNING)
        module, _, function = args.run.partition(".")
        run: CommandFunction = getattr(importlib.import_module(f"compactor.cli.commands.{module}"), function)
        return run(args, out) or 0
    except SystemExit as stop:  # --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    except Terminated:
        out.print_note("terminated")
        return 143
    except KeyboardInterrupt:
        out.print_note("interrupted")
        return 130
    except Exception as error:
        if os.environ.get(DEBUG) == "1":
            raise
        reported = as_compactor_error(error)
        is_stamped = out.lines.stamped or out.lines.as_json  # such a line has its level
        out.print_note(str(reported) if is_stamped else f"error: {reported}", logging.ERROR)
        out.print_error_document(reported)
        return reported.exit_code
    finally:
        remarks.close()
        out.close()


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM, so that leases are released and staged files deleted."""


class InterruptedByCtrlC(KeyboardInterrupt):
    """Raised by Ctrl-C. Python loses the exit code of a KeyboardInterrupt that passed through ``exec``."""


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """A second SIGTERM ends the process at once."""

    def raise_terminated(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    def raise_interrupted(number: int, frame: object) -> NoReturn:
        raise InterruptedByCtrlC

    # Python drops an exception that is raised in a finalizer or a callback of a library.
    def resend_dropped_signal(dropped: sys.UnraisableHookArgs) -> None:
        number = signal.SIGTERM if dropped.exc_type is Terminated else signal.SIGINT if dropped.exc_type is InterruptedByCtrlC else None
        if number is None or threading.current_thread() is not threading.main_thread():
            hook(dropped)
            return
        signal.signal(number, raise_terminated if number == signal.SIGTERM else raise_interrupted)
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook, sys.unraisablehook = sys.unraisablehook, resend_dropped_signal
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, raise_terminated)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored here, and stays so
        before[signal.SIGINT] = signal.signal(signal.SIGINT, raise_interrupted)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def build_parser(command_names: Container[str]) -> CommandLineParser:
    parser = CommandLineParser(
        prog="tiered-compactor",
        description="Log compaction for Apache Kafka's tiered storage, outside the broker.",
        epilog="Exit codes: 0 done, 2 usage or configuration, 3 bad data, 4 fenced or leased elsewhere,\n"
        "5 store, broker or network, 6 out of budget (disk, memory), 1 a bug, 130 after Ctrl-C, 143 after SIGTERM.",
    )
    built_of = f"commit {__commit__}" if __commit__ else "not a release"
    parser.add_argument("--version", action="version", version=f"tiered-compactor {__version__} ({built_of})")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandLineParser)
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.help, description=command.help)
        if command.name in command_names:
            child.define_command(command)
    return parser
