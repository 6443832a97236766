"""The entry point: picks the command, imports only that one, and turns every error into one line and an exit code."""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from compactor import __version__
from compactor.cli.frame import DEBUG, Parser, asks_for_json, command_first, known
from compactor.cli.lines import LineFormat, Note, Remarks
from compactor.cli.output import Output


class Command(NamedTuple):
    name: str
    help: str
    module: str


COMMANDS = (
    Command("demo", "the main job, end to end, on data that it makes", "compactor.cli.commands.demo"),
    Command("import", "sealed segments of a Kafka log directory into the tier", "compactor.cli.commands.import_"),
    Command("export", "the current view of a partition as a Kafka log directory", "compactor.cli.commands.export"),
    Command("topics", "what the tier holds", "compactor.cli.commands.topics"),
    Command("cat", "the records of a partition, one a line", "compactor.cli.commands.cat"),
    Command("plan", "what a round would do, and what it would cost", "compactor.cli.commands.plan"),
    Command("run", "one round over what is due", "compactor.cli.commands.run"),
    Command("recompact", "full re-compaction from the log's start, as a Spark job", "compactor.cli.commands.recompact"),
    Command("retire", "delete what was replaced and is due, sweep orphans", "compactor.cli.commands.retire"),
    Command("clean", "clean one Kafka log directory offline, no tier involved", "compactor.cli.commands.clean"),
    Command("generations", "compacted partitions for consumers of Pinterest's layout", "compactor.cli.commands.generations"),
    Command("segments", "remote segments, and what is in one", "compactor.cli.commands.segments"),
    Command("bloom", "sidecars: which segments a round may leave alone", "compactor.cli.commands.bloom"),
    Command("verify", "is the tier what its metadata says?", "compactor.cli.commands.verify"),
    Command("orphans", "objects of brokers' tiers that nothing names", "compactor.cli.commands.orphans"),
    Command("checkpoints", "cleaner offsets by leader epoch: who led, who was fenced", "compactor.cli.commands.checkpoints"),
    Command("runs", "what ran, by whom, how much, and how it ended", "compactor.cli.commands.runs"),
    Command("undo", "readers go back to what a round replaced", "compactor.cli.commands.undo"),
    Command("explain", "why it is not cleaned, what became of a key or an offset", "compactor.cli.commands.explain"),
    Command("erasure", "whether a key is gone: what still holds it, and what has to pass", "compactor.cli.commands.erasure"),
    Command("daemon", "run and retire over and over; metrics and a status page", "compactor.cli.commands.daemon"),
    Command("pause", "no compactor begins a round over these partitions, until resume", "compactor.cli.commands.pause"),
    Command("resume", "rounds may be begun again over what was paused", "compactor.cli.commands.resume"),
    Command("wake", "the daemons take these partitions up at once", "compactor.cli.commands.wake"),
    Command("agent", "beside a broker: uploads sealed segments of the partitions that it leads", "compactor.cli.commands.agent"),
    Command("config", "the settings in force, and whether they work", "compactor.cli.commands.config"),
    Command("completion", "a script that completes commands and options in a shell", "compactor.cli.commands.completion"),
)
"""In the order of `--help`."""
SERVICES = ("compactor.cli.commands.daemon", "compactor.cli.commands.agent")
"""They work on for ever: what happens is told with the time."""


def _start_lightly() -> None:
    """A third of what a small command costs: threads for linear algebra, garbage in what is imported, pydantic's plug-ins."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else the metadata of every package that is installed are read
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.freeze)  # else Python ends by looking through all that was imported, three times: a fifth


def entry(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code (compactor.errors; 130 after Ctrl-C, 143 after SIGTERM)."""
    with _ended_by_exception():
        _start_lightly()
        return _entered(sys.argv[1:] if argv is None else argv)


def _entered(arguments: list[str]) -> int:
    out = Output("table")

    def note() -> Note:
        return out.note

    remarks = Remarks(note)
    if asks_for_json(arguments):
        out = Output("json")
    try:
        arguments = command_first(arguments) or ["--help"]
        args = _parser(arguments).parse_args(arguments)
        service = args.run.__module__ in SERVICES
        out = Output(getattr(args, "output", "table"), lines=LineFormat(getattr(args, "log_format", "text") == "json", stamped=service))
        remarks.hear(logging.DEBUG if getattr(args, "verbose", False) else logging.INFO if service else logging.WARNING)
        return args.run(args, out) or 0
    except SystemExit as stop:  # --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    except Terminated:
        out.note("terminated")
        return 143
    except KeyboardInterrupt:
        out.note("interrupted")
        return 130
    except Exception as error:
        if os.environ.get(DEBUG) == "1":
            raise
        told = known(error)
        out.note(f"error: {told}", logging.ERROR)
        out.failure(told)
        return told.exit_code
    finally:
        remarks.close()
        out.close()


class Terminated(KeyboardInterrupt):
    """SIGTERM, which is left the way that Ctrl-C is left: leases are given back, local state is closed, staged files go."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. Python forgets the exit code of a KeyboardInterrupt itself that has come through an ``exec``, even where it was caught."""


@contextmanager
def _ended_by_exception() -> Iterator[None]:
    """SIGTERM and Ctrl-C as exceptions, where this thread may say what they do. A second SIGTERM ends the process at once.

    Python drops what is raised while it calls a finalizer, or back from a library: then the signal comes once more, a moment later.
    """

    def terminate(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    def interrupt(number: int, frame: object) -> NoReturn:
        raise Interrupted

    def dropped(what: sys.UnraisableHookArgs) -> None:
        number = signal.SIGTERM if what.exc_type is Terminated else signal.SIGINT if what.exc_type is Interrupted else None
        if number is None or threading.current_thread() is not threading.main_thread():
            hook(what)
            return
        signal.signal(number, terminate if number == signal.SIGTERM else interrupt)
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored here, and stays so
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _parser(arguments: list[str]) -> Parser:
    return every_command(arguments[:1])


def every_command(names: Container[str]) -> Parser:
    """The parser, with the arguments of these commands; their modules alone are imported."""
    parser = Parser(
        prog="tiered-compactor",
        description="Log compaction for Apache Kafka's tiered storage, outside the broker.",
        epilog="Exit codes: 0 done, 2 usage or configuration, 3 bad data, 4 fenced or leased elsewhere,\n"
        "5 store, broker or network, 6 out of budget (disk, memory), 1 a bug, 130 after Ctrl-C, 143 after SIGTERM.",
    )
    parser.add_argument("--version", action="version", version=f"tiered-compactor {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.help, description=command.help)
        if command.name in names:
            importlib.import_module(command.module).add_arguments(child)
    return parser
