"""Output of commands: tables or one JSON document on stdout; everything else on stderr."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from typing_extensions import override

from compactor.config.units import format_size as format_size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from compactor.errors import CompactorError


# Lines on stderr: remarks of commands and log lines of services.


FIRST = ("partition",)
"""Fields that are written before the text in lines for people."""


@dataclass(frozen=True)
class StderrLineFormat:
    """Format of lines on stderr.

    as_json: one object per line with ``time``, ``level``, ``message`` and further fields.
    stamped: whether plain lines begin with time and level.
    """

    as_json: bool = False
    stamped: bool = False

    def format_stderr_line(self, text: str, level: int, fields: Mapping[str, str], now: time.struct_time) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", now)
        if self.as_json:
            return json.dumps({"time": stamp, "level": logging.getLevelName(level).lower(), "message": text, **fields}, ensure_ascii=False)
        parts = [stamp, f"{logging.getLevelName(level):<7}"] if self.stamped else []
        parts += [f"{fields[name]}:" for name in FIRST if name in fields]
        return " ".join([*parts, text, *(f"{name}={value}" for name, value in fields.items() if name not in FIRST)])


class StderrNotePrinter(Protocol):
    def __call__(
        self, text: str, level: int = logging.INFO, fields: Mapping[str, str] | None = None, *, transient: bool = False
    ) -> None: ...


class NoteLogHandler(logging.Handler):
    """Writes the program's own log records, by default from WARNING on, to stderr. Those of libraries are never written: some log every
    header of every request.

    :param note: returns the function that writes a line. Called for each line: the output changes once the arguments are parsed.
    """

    def __init__(self, note: Callable[[], StderrNotePrinter]) -> None:
        super().__init__()
        self._note = note
        self._logger = logging.getLogger("compactor")
        self._before = self._logger.level
        self._logger.addHandler(self)
        self.set_minimum_level(logging.WARNING)

    def set_minimum_level(self, level: int) -> None:
        self._logger.setLevel(level)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        transient = getattr(record, "transient", False)
        self._note()(record.getMessage(), record.levelno, getattr(record, "fields", {}), transient=transient)

    @override
    def close(self) -> None:
        """Restore the program's logger."""
        self._logger.setLevel(self._before)
        self._logger.removeHandler(self)
        super().close()


SCHEMA_VERSION = 1
"""Version of the JSON documents (docs/reference/json.md). Fields may be added; none is removed or changes its meaning."""
_QUIET_SECONDS = 2.0
"""Work that is done sooner shows no progress."""
CLEAR_LINE = "\r\x1b[K"
TRANSIENT_ENDING = 20
"""Characters at the end of a transient remark that are shown in any case: the number of the next try, and when."""
_LINE_SECONDS = 5.0
"""Seconds between two lines of progress if stderr is not a terminal."""
_TRANSIENT_LINE_SECONDS = 60.0
"""Seconds between two transient remarks if stderr is not a terminal, where none can take another one's place."""


_AMOUNT = re.compile(r"-?[\d.,]+ ?(B|[KMGTP]iB|s|min|h|d|%)?( .*)?")
"""Text of a size, a duration or a percentage. Such cells are aligned to the right, like numbers."""
_GREEN, _YELLOW, _RED = "32", "33", "31"
_WORD_COLOURS = {
    **dict.fromkeys(("cleaned", "published", "imported", "live", "clean", "written", "current"), _GREEN),
    **dict.fromkeys(("paused", "waiting", "leased", "warning", "attention", "resumed", "reverted", "due", "running", "at work"), _YELLOW),
    **dict.fromkeys(("error", "failed", "fenced", "quarantined", "refused", "down", "needs you", "blocked", "cannot run"), _RED),
}
"""ANSI colours of cells that say how something stands. The words say the same to people who see no colours."""
_STATE_COLUMNS = ("status", "state", "severity")
"""Headings of the columns whose words are coloured."""


class Table(NamedTuple):
    """A table for people. Numbers are aligned to the right, None is an empty cell.

    minor: columns that a narrow terminal leaves out, the least important first.
    below: how many columns, counted from the right, a terminal shows on separate lines below each row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    minor: Sequence[str] = ()
    below: int = 0


class Tree(NamedTuple):
    label: str
    branches: Sequence[Tree]


class Output:
    def __init__(
        self,
        mode: Literal["table", "json"],
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        lines: StderrLineFormat = StderrLineFormat(),
    ) -> None:
        self.mode = mode
        self.lines = lines
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self._meter: Progress | None = None
        self._reported = False
        self._has_transient_line = False
        self._next_transient_line = 0.0

    def print_result(self, document: Mapping[str, object], *tables: Table | Tree, summary: str = "") -> None:
        """Print the JSON document, or tables, trees and summary. If the reader of stdout is gone (``| head``), the rest is dropped."""
        self._reported = True
        self._end_transient_line(CLEAR_LINE)
        try:
            if self.mode == "json":
                self._stdout.write(_to_json({"schema_version": SCHEMA_VERSION, **document}) + "\n")
            else:
                self._print_tables(tables)
                for line in summary.splitlines():
                    self._stdout.write(_wrap_for_terminal(line, self._stdout) + "\n")
            self._stdout.flush()
        except BrokenPipeError:
            self._discard_output()

    def print_error_document(self, error: CompactorError) -> None:
        if self.mode == "json" and not self._reported:
            reported = {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
            self.print_result({"error": reported})

    def write_chunks(self, parts: Iterable[bytes]) -> None:
        """Write each chunk at once, in place of a result."""
        self._reported = True
        raw = getattr(self._stdout, "buffer", None)
        try:
            for part in parts:
                if raw is None:
                    self._stdout.write(part.decode("utf-8", "replace"))
                else:
                    raw.write(part)
            self._stdout.flush()
        except BrokenPipeError:
            self._discard_output()

    def terminal_width(self) -> int | None:
        return _terminal_width(self._stdout)

    def print_note(self, text: str, level: int = logging.INFO, fields: Mapping[str, str] | None = None, *, transient: bool = False) -> None:
        """Write one remark to stderr, above the progress bar if there is one.

        :param transient: on a terminal the next remark takes this one's place; elsewhere at most one a minute is written.
        """
        width = _terminal_width(self._stderr)
        if transient and width is None:
            if time.monotonic() < self._next_transient_line:
                return
            self._next_transient_line = time.monotonic() + _TRANSIENT_LINE_SECONDS
        text = self.lines.format_stderr_line(text, level, fields or {}, time.gmtime())
        self._end_transient_line(CLEAR_LINE)
        self._has_transient_line = transient and width is not None and not self.lines.as_json
        if self._has_transient_line and width:
            ending = text[-TRANSIENT_ENDING:]
            line = text if len(text) < width else f"{text[: width - TRANSIENT_ENDING - 6]} ... {ending}"
            self._stderr.write(line)
            self._stderr.flush()
            return
        text = text if self.lines.as_json else _wrap_for_terminal(text, self._stderr)
        if self._meter is None or not self._meter.print_above(text):
            _write_line(self._stderr, text)

    def _end_transient_line(self, ending: str) -> None:
        if self._has_transient_line:
            self._stderr.write(ending)
            self._stderr.flush()
            self._has_transient_line = False

    @contextmanager
    def show_progress(self, title: str, total: int | None = None, unit: str = "") -> Iterator[Progress]:
        """Show progress after two seconds. The yielded object may be used from any thread.

        :param total: None if unknown.
        :param unit: ``bytes`` or a plural noun.
        """
        self._meter = Progress(title, total, unit, "json" if self.lines.as_json else self.mode, self._stderr)
        try:
            yield self._meter
        finally:
            self._meter.close()
            self._meter = None

    def close(self) -> None:
        """Flush stdout now, so that Python's flush at exit cannot fail."""
        self._end_transient_line("\n")
        try:
            self._stdout.flush()
        except BrokenPipeError:
            self._discard_output()

    def _discard_output(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())

    def _print_tables(self, tables: Sequence[Table | Tree]) -> None:
        width = _terminal_width(self._stdout)
        for table in tables:
            if isinstance(table, Tree):
                _print_tree(table, self._stdout, width or 10_000)
                continue
            if table.title:
                self._stdout.write(_wrap_for_terminal(table.title, self._stdout) + "\n")
            coloured = width is not None and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
            self._stdout.writelines(f"{line}\n" for line in table_lines(table, width, coloured=coloured))


class Progress:
    """Counter of work: a bar on a terminal, else a line every few seconds (JSON with ``--output json``)."""

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        mode: Literal["table", "json"],
        stderr: IO[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, 0
        self._mode, self._stderr, self._clock = mode, stderr, clock
        self._lock = threading.Lock()
        self._next = clock() + _QUIET_SECONDS
        self._shown = False
        self._bar: Bar | None = None

    def advance(self, amount: int = 1) -> None:
        with self._lock:
            self.done += amount
            self._update_display()

    def begin_part(self, title: str, done: int | None = None) -> None:
        """Show another title with the same total. done: amount that counts as done now; None for the amount recorded so far."""
        with self._lock:
            self.title, self.done = title, self.done if done is None else done
            self._update_display()

    def begin_step(self, title: str, total: int | None = None) -> None:
        """Show another title and total (None: unknown), with nothing done."""
        with self._lock:
            self.title, self.total, self.done = title, total, 0
            self._update_display()

    def print_above(self, text: str) -> bool:
        """Print a remark above the bar. Without a bar, return False."""
        with self._lock:
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, soft_wrap=True)
            return self._bar is not None

    def close(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            elif self._shown:
                self._write_progress_line()

    def _update_display(self) -> None:
        now = self._clock()
        if now < self._next:
            return
        if self._mode == "table" and self._stderr.isatty():
            self._next = now + 0.1
            self._draw_bar()
        else:
            self._next = now + _LINE_SECONDS
            self._write_progress_line()
        self._shown = True

    def _draw_bar(self) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            console = Console(file=self._stderr, markup=False, emoji=False)
            amount = TextColumn("{task.fields[amount]}", markup=False)
            title = TextColumn("{task.description}", markup=False)
            self._bar = Progress(title, BarColumn(), amount, console=console, transient=True)
            self._bar.add_task(self.title, total=None, amount="")
            self._bar.start()
        task = self._bar.task_ids[0]
        self._bar.tasks[0].total = self.total  # ``update`` takes None for no change
        share = f"{100 * self._capped_done() // self.total}% " if self.total else ""
        self._bar.update(task, description=self.title, completed=self._capped_done(), amount=share + self._format_done_amount())

    def _write_progress_line(self) -> None:
        if self._mode == "json":
            text = json.dumps({"progress": {"title": self.title, "done": self._capped_done(), "total": self.total, "unit": self.unit}})
        else:
            share = f"{100 * self._capped_done() // self.total} %, " if self.total else ""
            amount = self._format_done_amount()
            text = f"{self.title}: {share}{amount}" if amount else self.title
        _write_line(self._stderr, text)

    def _capped_done(self) -> int:
        return self.done if self.total is None else min(self.done, self.total)

    def _format_done_amount(self) -> str:
        if self.total is None and not self.done and not self.unit:
            return ""
        numbers = [self.done] if self.total is None else [self._capped_done(), self.total]
        texts = [format_size(number) if self.unit == "bytes" else f"{number:,}" for number in numbers]
        return " of ".join(texts) + (f" {self.unit}" if self.unit not in ("", "bytes") else "")


def _write_line(stream: IO[str], text: str) -> None:
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        pass  # the reader has closed the pipe; the work goes on


def _to_json(document: Mapping[str, object]) -> str:
    from pydantic_core import to_json  # ``json.dumps`` takes ten times as long for the 200,000 segments of a large tier's plan

    return to_json(document, indent=2).decode()


def table_lines(table: Table, width: int | None = None, *, coloured: bool = False) -> Iterator[str]:
    """Yield the lines of a table, the headings first. The last line names the columns that were left out.

    Names and ids are never broken: a table that is still too wide is printed too wide.

    :param width: columns of the terminal; None for a pipe, which gets all columns.
    """
    from rich.cells import cell_len

    if not table.rows and not any(table.columns):
        return
    cells = [[heading, *(_format_cell(row[place]) for row in table.rows)] for place, heading in enumerate(table.columns)]
    widths = [max(map(cell_len, column)) for column in cells]
    shown = list(range(len(cells)))
    dropped: list[str] = []
    if width is not None:
        shown = [place for place in shown[: len(cells) - table.below] if any(cells[place][1:]) or not table.rows]
        for heading in table.minor:
            place = table.columns.index(heading)
            if sum(widths[place] + 3 for place in shown) - 1 > width and place in shown:
                shown.remove(place)
                dropped.append(heading)
    rest = (width or 0) - sum(widths[place] + 3 for place in shown[:-1]) - 2
    texts = cells[shown[-1]] if width is not None and 20 <= rest < widths[shown[-1]] else []
    widths[shown[-1]] = rest if texts else widths[shown[-1]]
    wrapped = [_wrap_last_cell(text, rest) for text in texts] or [[""]] * (len(table.rows) + 1)
    for place in shown:
        right = all(_is_amount_cell(row[place]) for row in table.rows)
        column = [first for first, *_ in wrapped] if texts and place == shown[-1] else cells[place]
        gaps = [" " * (widths[place] - cell_len(cell)) for cell in column]
        padded = [gap + cell if right else cell + gap for gap, cell in zip(gaps, column, strict=True)]
        cells[place] = [padded[0], *map(_colour_cell, padded[1:])] if coloured and table.columns[place] in _STATE_COLUMNS else padded
    lines = [f" {'   '.join(row)} " for row in zip(*(cells[place] for place in shown), strict=True)]
    yield ""
    if any(table.columns):
        yield from (lines[0], " " + "─" * (sum(widths[place] + 3 for place in shown) - 3) + " ")
    for line, row, (_, *more) in zip(lines[1:], table.rows, wrapped[1:], strict=True):
        yield line
        yield from (text if len(text) > rest else " " * ((width or 0) - rest - 1) + text for text in more)
        for text in filter(None, map(_format_cell, row[len(row) - table.below :] if width is not None else ())):
            yield from textwrap.wrap(text, max(20, (width or 0) - 5), initial_indent="     ", subsequent_indent="     ", **_WHOLE_WORDS)
    if dropped:
        text = f"not shown for lack of width: {', '.join(reversed(dropped))}; a pipe and --output json have all columns"
        yield from textwrap.wrap(text, max(20, width or 0), initial_indent=" ", subsequent_indent=" ", **_WHOLE_WORDS)
    yield ""


def _wrap_last_cell(text: str, width: int) -> list[str]:
    """The row's own line stays empty if a path or URL is wider than the column."""
    lines = textwrap.wrap(text, width, **_WHOLE_WORDS) or [""]
    return ["", *(f"     {line}" if len(line) > width else line for line in lines)] if max(map(len, lines)) > width else lines


_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
"""Settings of ``textwrap`` that keep names and ids in one piece."""


def _colour_cell(cell: str) -> str:
    colour = _WORD_COLOURS.get(cell.strip().partition(",")[0].lower())
    return f"\x1b[{colour}m{cell}\x1b[0m" if colour else cell


def _terminal_width(stream: IO[str]) -> int | None:
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _wrap_for_terminal(text: str, stream: IO[str]) -> str:
    width = _terminal_width(stream)
    return text if width is None or len(text) <= width else textwrap.fill(text, width, subsequent_indent="  ", **_WHOLE_WORDS)


def _print_tree(tree: Tree, stream: IO[str], width: int) -> None:
    from rich.console import Console
    from rich.tree import Tree as RichTree

    def add_branches_to_tree(branches: Sequence[Tree], to: RichTree) -> RichTree:
        for branch in branches:
            add_branches_to_tree(branch.branches, to.add(branch.label))
        return to

    # Names of topics and files are printed as they are: no markup, no emoji.
    console = Console(file=stream, width=width, markup=False, emoji=False, highlight=False)
    console.print(add_branches_to_tree(tree.branches, RichTree(tree.label)))


def _is_amount_cell(value: object) -> bool:
    return value in ("", None) or isinstance(value, (int, float)) or (isinstance(value, str) and _AMOUNT.fullmatch(value) is not None)


def _format_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
