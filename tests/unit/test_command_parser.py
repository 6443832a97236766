"""The frame of the command line: exit codes, one line on stderr, what is imported when."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from compactor import __version__
from compactor.cli import command_parser, main
from compactor.cli.arguments import COMMANDS
from compactor.cli.command_parser import Command
from compactor.cli.main import entry
from compactor.cli.output import Output, Progress, Table, format_size
from compactor.errors import BadData, CompactorError, Fenced, Leased, NotFound, OutOfBudget, UsageError

ROOT = Path(__file__).parents[2]
HEAVY = ("boto3", "moto", "numba", "numpy", "prometheus_client", "pyarrow", "pydantic", "pyspark", "rich", "rocksdict", "pybloom_live")


def call(*arguments: str, env: dict[str, str] | None = None, stdin: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "compactor", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=stdin,
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[command_parser.CommandFunction], None]:
    """Registers `try` as a command that runs the given function."""

    def register(run: command_parser.CommandFunction) -> None:
        monkeypatch.setitem(sys.modules, "compactor.cli.commands.of_test", SimpleNamespace(run_try=run))
        monkeypatch.setattr(main, "COMMANDS", (*COMMANDS, Command("try", "for tests", "of_test.run_try")))

    return register


def test_version_and_help() -> None:
    assert call("--version").stdout == f"tiered-compactor {__version__} (not a release)\n"
    shown = call("--help")
    assert shown.returncode == 0
    for one in COMMANDS:
        assert f"{one.name} " in shown.stdout
        assert one.help in " ".join(shown.stdout.split())  # lines break elsewhere in each version of Python


def test_no_command_shows_help() -> None:
    shown = call()
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, call("--help").stdout, "")


def test_common_options_may_stand_before_the_command() -> None:
    ran = call("--output", "json", "--config=/nowhere.toml", "-v", "config", "show")
    assert ran.returncode == 2
    assert json.loads(ran.stdout) == {
        "schema_version": 1,
        "error": {
            "kind": "UsageError",
            "message": "there is no configuration file /nowhere.toml",
            "hint": "See --config and $TIERED_COMPACTOR_CONFIG",
            "exit_code": 2,
        },
    }


def test_a_wrong_argument_is_told_in_json_where_that_was_asked_for() -> None:
    ran = call("config", "nosuch", "--output", "json")
    assert json.loads(ran.stdout)["error"]["exit_code"] == ran.returncode == 2
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete_commands_and_options(shell: str, tmp_path: Path) -> None:
    ran = call("completion", shell)
    assert ran.returncode == 0
    if shell == "zsh":
        assert "recompact" in ran.stdout
        return
    script = tmp_path / "completion"
    script.write_text(ran.stdout)
    asked = (
        f"source '{script}'; COMP_WORDS=(tiered-compactor segments dump --wh); COMP_CWORD=3; "
        "_shtab_tiered_compactor; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    answer = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.split() == ["--whole"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([one.name, "--help"] for one in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """What keeps `--help` under 0.3 s; a bound on time itself would fail on a busy machine."""
    program = f"import sys; from compactor.cli.main import entry; assert entry({arguments!r}) == 0; print(*sys.modules, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert [module for module in HEAVY if module in ran.stderr.split()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "error: argument COMMAND: invalid choice: 'nosuch'"),
        (["topcs"], "error: argument COMMAND: invalid choice: 'topcs'. Did you mean topics?"),
        (["config"], "error: the following arguments are required: SUBCOMMAND. See `tiered-compactor config --help`"),
        (["config", "show", "--outptu", "json"], "error: unrecognized arguments: --outptu json. Did you mean --output?"),
        (["config", "show", "--out", "json"], "error: unrecognized arguments: --out json. Did you mean --output?"),
        (["undo", "x3H", "--dry-run"], "error: unrecognized arguments: --dry-run. See `tiered-compactor undo --help`"),
        (["config", "show", "--output", "yaml"], "error: argument --output: invalid choice: 'yaml'"),
        (["--all", "config", "show"], "error: --all comes before the command. Only --config, --output, --log-format, -v, --verbose may"),
        (["config", "show", "--config", "/nowhere.toml"], "error: there is no configuration file /nowhere.toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    ran = call(*arguments)
    assert ran.stderr.startswith(message)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("wrong", hint="do it right"), 2, "error: wrong. do it right\n"),
        (BadData("no batch", segment="00.log", position=7), 3, "error: bad data in 00.log, position 7: no batch\n"),
        (Fenced("gone"), 4, "error: gone\n"),
        (Leased("taken"), 4, "error: taken\n"),
        (NotFound("no object"), 5, "error: no object\n"),
        (OutOfBudget("small"), 6, "error: small\n"),
        (CompactorError("odd"), 1, "error: odd\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/a b"), 5, "error: Permission denied (/a b)\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/d"), 6, "error: the disk is full (/d). Free space or"),
        (MemoryError(), 6, "error: out of memory. Lower [cleaner] map_budget_bytes"),
        (KeyError("x"), 1, "error: a bug: KeyError: 'x'. TIERED_COMPACTOR_DEBUG=1 shows where"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(
    command: Callable[[command_parser.CommandFunction], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(args: Namespace, out: Output) -> int:
        raise error

    command(fail)
    assert entry(["try"]) == code
    printed = capsys.readouterr()
    assert printed.err.startswith(message)
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_debug_shows_the_traceback(command: Callable[[command_parser.CommandFunction], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: Namespace, out: Output) -> int:
        raise KeyError("x")

    command(fail)
    monkeypatch.setenv("TIERED_COMPACTOR_DEBUG", "1")
    with pytest.raises(KeyError):
        entry(["try"])


def test_what_a_command_returns_is_the_exit_code(command: Callable[[command_parser.CommandFunction], None]) -> None:
    command(lambda args, out: 3)
    assert entry(["try"]) == 3
    command(lambda args, out: None)
    assert entry(["try"]) == 0


def test_options_stand_after_the_command_or_its_subcommand() -> None:
    for arguments in (["config", "show", "--output", "json"],):
        document = json.loads(call(*arguments).stdout)
        assert document["ok"] is True


def test_json_is_one_document_and_everything_else_is_on_stderr(
    command: Callable[[command_parser.CommandFunction], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: Namespace, out: Output) -> None:
        out.print_note("a remark")
        out.print_result({"ok": True, "name": "Größe"}, Table("sizes", ("size",), [(1,)]), summary="done")

    command(run)
    assert entry(["try", "--output", "json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"schema_version": 1, "ok": True, "name": "Größe"}
    assert printed.err == "a remark\n"


def test_a_table_shows_values_as_they_are(
    command: Callable[[command_parser.CommandFunction], None], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("[bold]:smile:" + "x" * 300, 1234567, None, True, 0.12345)]

    def run(args: Namespace, out: Output) -> None:
        out.print_result({}, Table("[red]title", ("a", "b", "c", "d", "e"), rows), summary="1 row")

    command(run)
    assert entry(["try"]) == 0
    printed = capsys.readouterr().out
    for text in ("[red]title", "[bold]:smile:" + "x" * 300, " 1234567 ", "yes", "0.123", "\n1 row\n"):
        assert text in printed


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "compactor", "config", "show", "--output", "json"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_whole_numbers() -> None:
    parser = command_parser.CommandLineParser(prog="x")
    parser.add_argument("--now", type=command_parser.whole_number_parser())
    parser.add_argument("--threads", type=command_parser.whole_number_parser(1, 4))
    assert parser.parse_args(["--now", "0", "--threads", "4"]) == Namespace(now=0, threads=4)
    for arguments, message in {
        ("--now", "-1"): "argument --now: -1 is not from 0 to 9223372036854775807",
        ("--threads", "5"): "argument --threads: 5 is not from 1 to 4",
        ("--threads", "many"): "argument --threads: 'many' is not a whole number",
    }.items():
        with pytest.raises(UsageError) as refused:
            parser.parse_args(arguments)
        assert refused.value.message == message


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_is_silent_for_two_seconds_and_then_a_line_now_and_then() -> None:
    stderr, clock = io.StringIO(), Clock()
    progress = Progress("cleaning orders-0", 4 << 20, "bytes", "table", stderr, clock)
    for second in range(9):
        clock.now = second * 0.9
        progress.advance(1 << 18)
    progress.close()
    assert stderr.getvalue().splitlines() == [
        "cleaning orders-0: 25 %, 1.0 MiB of 4.0 MiB",  # at 2.7 s
        "cleaning orders-0: 56 %, 2.2 MiB of 4.0 MiB",  # the end
    ]


def test_short_work_shows_no_progress() -> None:
    stderr = io.StringIO()
    with Output("table", io.StringIO(), stderr).show_progress("x", 3, "records") as progress:
        progress.advance(3)
    assert stderr.getvalue() == ""


def test_progress_as_json_lines() -> None:
    stderr, clock = io.StringIO(), Clock()
    progress = Progress("reading", None, "records", "json", stderr, clock)
    clock.now = 3
    progress.advance(5)
    progress.begin_step("writing", 7)
    clock.now = 9
    progress.advance(1)
    progress.close()
    lines = [json.loads(line)["progress"] for line in stderr.getvalue().splitlines()]
    assert lines == [
        {"title": "reading", "done": 5, "total": None, "unit": "records"},
        {"title": "writing", "done": 1, "total": 7, "unit": "records"},
        {"title": "writing", "done": 1, "total": 7, "unit": "records"},
    ]


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, clock = io.StringIO(), Clock()
    stderr.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress("cleaning [b]", 10, "records", "table", stderr, clock)
    clock.now = 3
    assert not progress.print_above("too early for a bar")
    progress.advance(5)
    assert progress.print_above("orders-1 is [quarantined]")
    progress.close()
    assert "orders-1 is [quarantined]\n" in stderr.getvalue().replace("\r\n", "\n")
    assert "cleaning [b]" in stderr.getvalue()
    assert "5 of 10 records" in stderr.getvalue()
    assert "50%" in stderr.getvalue()


def test_steps_that_are_not_counted_show_no_number() -> None:
    stderr, clock = io.StringIO(), Clock()
    progress = Progress("cleaning", None, "", "table", stderr, clock)
    clock.now += 100
    progress.begin_step("round: announced")
    assert stderr.getvalue() == "round: announced\n"


def test_progress_counts_from_any_thread() -> None:
    progress = Progress("x", None, "", "table", io.StringIO(), Clock())

    def count() -> None:
        for _ in range(2000):
            progress.advance()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.done == 8000


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1048524, "1023.9 KiB"),
        (1048575, "1.0 MiB"),
        (-2048, "-2.0 KiB"),
        (5 << 60, "5120.0 PiB"),
    ],
)
def test_sizes(count: int | None, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("text", "distance_ms"),
    [("now", 0), ("2h ago", -7_200_000), ("-2h", -7_200_000), ("in 3d", 259_200_000), ("+90s", 90_000), ("1w ago", -604_800_000)],
)
def test_times_that_go_by_the_clock(text: str, distance_ms: int) -> None:
    before = int(time.time() * 1000)
    found = command_parser.parse_time_ms(text)
    assert before + distance_ms <= found <= int(time.time() * 1000) + distance_ms


def test_times_that_stand_for_themselves() -> None:
    assert command_parser.parse_time_ms("1700000000000") == 1_700_000_000_000
    assert (
        command_parser.parse_time_ms("1970-01-02")
        == command_parser.parse_time_ms("1970-01-02T00:00:00Z")
        == command_parser.parse_time_ms("1970-01-02T01:00+01:00")
        == 86_400_000
    )
    for text in ("", "2h", "in 2h ago", "yesterday", "-5", "2026-13-01"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a valid time"):
            command_parser.parse_time_ms(text)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_comes_while_something_is_finalized_counts(
    sent: signal.Signals, code: int, command: Callable[[command_parser.CommandFunction], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Python drops what is raised there; the command must not go on to its end."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(sent)

    def work(args: object, out: object) -> int:
        one = Finalized()
        del one
        time.sleep(30)
        return 0

    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command(work)
        assert entry(["try"]) == code
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
    assert capsys.readouterr().err.splitlines() == ["terminated" if code == 143 else "interrupted"]
