"""Tables of the documents that benchmarks write and check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.doc_tables import ROOT, WRITE_VARIABLE, BenchmarkTable, report_table

COLUMNS = ("way", "seconds", "ratio")


def measured(*rows: tuple[str, ...]) -> BenchmarkTable:
    return BenchmarkTable("speed", COLUMNS, rows, compared=("ratio",))


@pytest.fixture
def document(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("Nothing here.\n")
    path = tmp_path / "docs" / "speed.md"
    table = "| way | seconds | ratio |\n|---|---|---|\n| a | 9 s | 3.0 |\n| b | 1,200 s | 1.5, 2 |"
    path.write_text(f"# Speed\n\n<!-- make bench BENCH=speed -->\n{table}\n\nEnd.\n")
    return path


def test_a_ratio_within_a_third_passes_and_seconds_are_not_compared(document: Path, tmp_path: Path) -> None:
    report_table(measured(("a", "100 s", "2.3"), ("b", "1 s", "1.2, 2.5")), tmp_path)


@pytest.mark.parametrize("ratio", ["2.2", "4.6", "3.0, 3.0", ""])
def test_another_ratio_fails_and_says_where(document: Path, tmp_path: Path, ratio: str) -> None:
    with pytest.raises(SystemExit, match=re.escape("docs/speed.md: a: ratio is 3.0")):
        report_table(measured(("a", "9 s", ratio)), tmp_path)


def test_a_row_or_column_that_the_document_lacks_fails(document: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no row c"):
        report_table(measured(("c", "9 s", "1.0")), tmp_path)
    with pytest.raises(SystemExit, match="the columns are"):
        report_table(BenchmarkTable("speed", ("way", "ratio"), [("a", "3.0")], compared=("ratio",)), tmp_path)
    with pytest.raises(SystemExit, match="no document has the line"):
        report_table(BenchmarkTable("size", COLUMNS, [], compared=()), tmp_path)


def test_writing_replaces_measured_rows_and_keeps_the_others(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WRITE_VARIABLE, "1")
    report_table(measured(("a", "8 s", "5.0"), ("c", "", "1.0")), tmp_path)
    assert document.read_text().splitlines()[2:] == [
        "<!-- make bench BENCH=speed -->",
        "| way | seconds | ratio |",
        "|---|---|---|",
        "| a | 8 s | 5.0 |",
        "| b | 1,200 s | 1.5, 2 |",
        "| c |  | 1.0 |",
        "",
        "End.",
    ]
    monkeypatch.delenv(WRITE_VARIABLE)
    report_table(measured(("c", "", "1.0")), tmp_path)


def test_every_table_of_a_benchmark_stands_in_one_document() -> None:
    programs = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    documents = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    tables = re.findall(r'BenchmarkTable\(\s*"(\w+)"', programs)
    assert sorted(tables) == sorted(re.findall(r"^<!-- make bench BENCH=(\w+) -->$", documents, re.MULTILINE))
    assert len(tables) >= 8
