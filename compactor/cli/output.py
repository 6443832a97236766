"""How results are printed: tables for people or one JSON document on stdout; remarks, progress and errors on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Literal, NamedTuple

from compactor.cli.lines import LineFormat
from compactor.views.words import size as size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.tree import Tree as RichTree

    from compactor.errors import CompactorError

SCHEMA_VERSION = 1
"""Of JSON documents (docs/reference/json.md): fields may be added to it, none goes or changes its meaning."""
_QUIET_SECONDS = 2.0
"""Work that is done sooner shows no progress."""
_MOST_DRAWN_ROWS = 200
"""rich takes a second for a few thousand; longer tables are printed as lines of the same shape, which a terminal breaks by itself."""
_LINE_SECONDS = 5.0
"""Between two progress lines where stderr is no terminal."""


class Table(NamedTuple):
    """``columns`` are headings; a cell may be anything: numbers stand to the right (whole ones can be copied), None is empty."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


class Tree(NamedTuple):
    """``label``: one line, or several; a branch stands below it."""

    label: str
    branches: Sequence[Tree]


class Output:
    """Where one command prints. At most one ``result``."""

    def __init__(
        self,
        mode: Literal["table", "json"],
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        lines: LineFormat = LineFormat(),  # noqa: B008, frozen
    ) -> None:
        self.mode = mode
        self.lines = lines
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self._meter: Progress | None = None
        self._told = False

    def result(self, document: Mapping[str, object], *tables: Table | Tree, summary: str = "") -> None:
        """The JSON document, or the tables and trees and one closing line. A reader that has gone away (``| head``) is no error."""
        self._told = True
        try:
            if self.mode == "json":
                self._stdout.write(_as_json({"schema_version": SCHEMA_VERSION, **document}) + "\n")
            else:
                self._tables(tables)
                if summary:
                    self._stdout.write(summary + "\n")
            self._stdout.flush()
        except BrokenPipeError:
            self._reader_gone()

    def failure(self, error: CompactorError) -> None:
        """The document of a command that failed before it had a result: ``error`` with kind, message, hint and exit_code."""
        if self.mode == "json" and not self._told:
            told = {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
            self.result({"error": told})

    def stream(self, parts: Iterable[bytes]) -> None:
        """Bytes as they are, in the place of a ``result``; they are written as they come."""
        self._told = True
        raw = getattr(self._stdout, "buffer", None)
        try:
            for part in parts:
                if raw is None:
                    self._stdout.write(part.decode("utf-8", "replace"))
                else:
                    raw.write(part)
            self._stdout.flush()
        except BrokenPipeError:
            self._reader_gone()

    def note(self, text: str, level: int = logging.INFO, fields: Mapping[str, str] | None = None) -> None:
        """One remark on stderr, above the progress bar where there is one. ``level``: of logging; ``fields``: what it is about."""
        text = self.lines.line(text, level, fields or {}, time.gmtime())
        if self._meter is None or not self._meter.note(text):
            _write_line(self._stderr, text)

    @contextmanager
    def progress(self, title: str, total: int | None = None, unit: str = "") -> Iterator[Progress]:
        """For work that may take longer than two seconds; ``unit`` is ``bytes`` or a plural noun. Counted from any thread."""
        self._meter = Progress(title, total, unit, "json" if self.lines.as_json else self.mode, self._stderr)
        try:
            yield self._meter
        finally:
            self._meter.close()
            self._meter = None

    def close(self) -> None:
        """Nothing may fail after this, not even Python's own flush of stdout when it ends."""
        try:
            self._stdout.flush()
        except BrokenPipeError:
            self._reader_gone()

    def _reader_gone(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())

    def _tables(self, tables: Sequence[Table | Tree]) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable

        # Names of topics and files are printed as they are: no markup, no emoji. A pipe gets lines as wide as they need to be.
        terminal = self._stdout.isatty()
        console = Console(file=self._stdout, width=None if terminal else 10_000, markup=False, emoji=False, highlight=False)
        for table in tables:
            if isinstance(table, Tree):
                console.print(_grown(table))
                continue
            if table.title:
                console.print(table.title)  # by itself: a table's own title is broken to the table's width
            if len(table.rows) > _MOST_DRAWN_ROWS:
                self._stdout.writelines(f"{line}\n" for line in _long_table(table))
                continue
            drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(table.columns))
            for position, heading in enumerate(table.columns):
                numeric = any(_is_number(row[position]) for row in table.rows)
                drawn.add_column(heading, justify="right" if numeric else "left", overflow="fold")
            for row in table.rows:
                drawn.add_row(*(_cell(value) for value in row))
            console.print(drawn)


class Progress:
    """Counts work and shows it: a bar on a terminal, else a line now and then (a JSON line with ``--output json``)."""

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
            self._show()

    def at(self, title: str, total: int | None = None) -> None:
        """The next step of the same work: another title, counted from 0."""
        with self._lock:
            self.title, self.total, self.done = title, total, 0
            self._show()

    def note(self, text: str) -> bool:
        """Prints a remark above the bar; False where no bar is drawn."""
        with self._lock:
            if self._bar is not None:
                self._bar.console.print(text, highlight=False, soft_wrap=True)
            return self._bar is not None

    def close(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            elif self._shown:
                self._line()

    def _show(self) -> None:
        now = self._clock()
        if now < self._next:
            return
        if self._mode == "table" and self._stderr.isatty():
            self._next = now + 0.1
            self._draw()
        else:
            self._next = now + _LINE_SECONDS
            self._line()
        self._shown = True

    def _draw(self) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            console = Console(file=self._stderr, markup=False, emoji=False)
            amount = TextColumn("{task.fields[amount]}", markup=False)
            title = TextColumn("{task.description}", markup=False)
            self._bar = Progress(title, BarColumn(), TaskProgressColumn(), amount, console=console, transient=True)
            self._bar.add_task(self.title, amount="")
            self._bar.start()
        task = self._bar.task_ids[0]
        self._bar.update(task, description=self.title, completed=self.done, total=self.total, amount=self._amount())

    def _line(self) -> None:
        if self._mode == "json":
            text = json.dumps({"progress": {"title": self.title, "done": self.done, "total": self.total, "unit": self.unit}})
        else:
            share = f"{100 * self.done // self.total} %, " if self.total else ""
            amount = self._amount()
            text = f"{self.title}: {share}{amount}" if amount else self.title
        _write_line(self._stderr, text)

    def _amount(self) -> str:
        """Empty for work that is not counted."""
        if self.total is None and not self.done and not self.unit:
            return ""
        numbers = [self.done] if self.total is None else [self.done, self.total]
        texts = [size(number) if self.unit == "bytes" else f"{number:,}" for number in numbers]
        return " of ".join(texts) + (f" {self.unit}" if self.unit not in ("", "bytes") else "")


def _write_line(stream: IO[str], text: str) -> None:
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        pass  # nobody reads remarks any more; the work goes on


def _as_json(document: Mapping[str, object]) -> str:
    """As ``json.dumps`` with an indent has it, ten times as fast: a plan of a large tier has 200,000 segments."""
    from pydantic_core import to_json

    return to_json(document, indent=2).decode()


def _long_table(table: Table) -> Iterator[str]:
    from rich.cells import cell_len

    columns = []
    for position, heading in enumerate(table.columns):
        cells = [_cell(row[position]) for row in table.rows]
        width = max(cell_len(cell) for cell in [heading, *cells])
        right = any(_is_number(row[position]) for row in table.rows)
        padded = [" " * (width - cell_len(cell)) for cell in [heading, *cells]]
        columns.append([gap + cell if right else cell + gap for gap, cell in zip(padded, [heading, *cells], strict=True)])
    lines = [f" {'   '.join(row)} " for row in zip(*columns, strict=True)]
    yield from ("", lines[0], " " + "─" * (cell_len(lines[0]) - 2) + " ", *lines[1:], "")


def _grown(tree: Tree) -> RichTree:
    from rich.tree import Tree as RichTree

    def add(branches: Sequence[Tree], to: RichTree) -> RichTree:
        for branch in branches:
            add(branch.branches, to.add(branch.label))
        return to

    return add(tree.branches, RichTree(tree.label))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
