"""Tables on terminals of three widths."""

from __future__ import annotations

from typing import IO

import pytest

from compactor.cli.output import Output, Progress, Table
from tests.support.terminal import on_terminal, without_colours

RUNS = Table(
    "rounds",
    ("partition", "run", "status", "began", "took", "read", "by", "reason"),
    [
        ("customers-0", "F-Bq0-Fa", "cleaned", "2026-11-24T15:05:24Z", "1.7 s", "33.8 MiB", "vm:9357", ""),
        ("orders.returned-112", "a1b2c3d4", "quarantined", "2026-11-24T15:06:00Z", "12 min", "1.0 GiB", "vm:9357",
         "bad data in orders.returned-112/00000000000000000000-INQo7tP9gnXhR6BYwFG0sQ.log: a batch has a wrong CRC"),
    ],
    minor=("by", "took", "read"),
    below=1,
)  # fmt: skip

AT_80 = """\
rounds

 partition             run        status        began                      read
 ──────────────────────────────────────────────────────────────────────────────
 customers-0           F-Bq0-Fa   cleaned       2026-11-24T15:05:24Z   33.8 MiB
 orders.returned-112   a1b2c3d4   quarantined   2026-11-24T15:06:00Z    1.0 GiB
     bad data in
     orders.returned-112/00000000000000000000-INQo7tP9gnXhR6BYwFG0sQ.log: a
     batch has a wrong CRC
"""
NOT_SHOWN_AT_80 = """
 not shown for lack of width: took, by; a pipe and --output json have all
 columns
"""
AT_80 = AT_80.rstrip("\n") + NOT_SHOWN_AT_80
AT_100 = """\
rounds

 partition             run        status        began                    took       read   by
 ─────────────────────────────────────────────────────────────────────────────────────────────────
 customers-0           F-Bq0-Fa   cleaned       2026-11-24T15:05:24Z    1.7 s   33.8 MiB   vm:9357
 orders.returned-112   a1b2c3d4   quarantined   2026-11-24T15:06:00Z   12 min    1.0 GiB   vm:9357
     bad data in orders.returned-112/00000000000000000000-INQo7tP9gnXhR6BYwFG0sQ.log: a batch
     has a wrong CRC
"""
AT_120 = AT_100.replace("a batch\n     has", "a batch has")


def shown(table: Table, columns: int) -> str:
    def write(terminal: IO[str]) -> None:
        Output("table", terminal).print_result({}, table)

    return on_terminal(columns, write)


@pytest.mark.parametrize(("columns", "lines"), [(80, AT_80), (100, AT_100), (120, AT_120)], ids=("80", "100", "120"))
def test_a_table_leaves_out_minor_columns_and_writes_reasons_below_the_row(columns: int, lines: str) -> None:
    drawn = without_colours(shown(RUNS, columns)).splitlines()
    assert "\n".join(map(str.rstrip, drawn)).strip("\n") + "\n" == lines


def test_states_have_colours_unless_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mcleaned" in shown(RUNS, 80)
    assert "\x1b[31mquarantined" in shown(RUNS, 80)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(RUNS, 80)


def test_long_text_in_the_last_column_is_broken_between_words() -> None:
    facts = Table(
        "", ("", ""), [("waiting", "9 segments wait for the end of their grace, then retire deletes them " * 2), ("lease", "none")]
    )
    lines = shown(facts, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("           ")
    assert lines[-2].split() == ["lease", "none"]


def test_columns_without_a_value_are_not_shown_on_a_terminal() -> None:
    table = Table("", ("partition", "leader"), [("orders-0", ""), ("orders-1", None)])
    assert "leader" not in shown(table, 80)


def test_a_transient_remark_is_one_line_that_the_next_remark_replaces() -> None:
    def write(terminal: IO[str]) -> None:
        out = Output("table", terminal, terminal)
        for number in (3, 4):
            out.print_note(f"cannot read s3://bucket/{'x' * 200}; try {number} in 0.4 s", transient=True)
        out.print_note("error: tried 5 times")

    first, second, last = on_terminal(80, write).split("\r\x1b[K")
    assert [len(line) < 80 and "\n" not in line for line in (first, second)] == [True, True]
    assert second.endswith("try 4 in 0.4 s")
    assert last == "error: tried 5 times\n"


def test_a_bar_of_work_without_a_total_shows_no_percentage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock = iter((0.0, 3.0, 6.0))

    def write(terminal: IO[str]) -> None:
        progress = Progress("sampling", None, "bytes", "table", terminal, lambda: next(clock))
        progress.advance(2 << 20)
        progress.close()

    drawn = on_terminal(80, write)
    assert "2.0 MiB" in drawn
    assert "%" not in drawn
