"""Tables in the documents that benchmarks write, and compare with what they measure.

The line ``<!-- make bench BENCH=NAME -->`` above a table in README.md or docs/ says which benchmark it belongs to. A run compares
the columns that hold on any machine (ratios, requests, bytes); with ``make bench WRITE=1`` it replaces the rows that it has measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST_DEVIATION = 1 / 3
"""By how much of what was measured a document may differ from it."""
WRITE_VARIABLE = "BENCH_WRITE"
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class BenchmarkTable:
    """Measured rows under the columns of the document's table.

    The first ``label_columns`` cells say what a row is; ``compared`` names the columns whose numbers hold on any machine.
    """

    benchmark: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    compared: tuple[str, ...]
    label_columns: int = 1

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows) or not set(self.compared) <= set(self.columns):
            raise ValueError(f"{self.benchmark}: rows or compared columns are not those of {self.columns}")


def report_table(table: BenchmarkTable, root: Path = ROOT) -> None:
    """Print a table. Then write its rows into the document, if ``BENCH_WRITE`` is set, or compare them with those that stand there.

    Raises SystemExit if no document has the table, or if a number there differs by more than a third from what was measured.
    """
    print("\n".join(_markdown(cells) for cells in (table.columns, ("---",) * len(table.columns), *table.rows)), flush=True)
    document, first, last = _find_table(table.benchmark, root)
    lines = document.read_text().splitlines()
    written = [_cells(line) for line in lines[first:last]]
    if os.environ.get(WRITE_VARIABLE):
        lines[first:last] = map(_markdown, _merged(table, written[2:]))
        document.write_text("\n".join(lines) + "\n")
    elif deviations := find_deviations(table, written):
        raise SystemExit("\n".join(f"{document.relative_to(root)}: {deviation}" for deviation in deviations))


def find_deviations(table: BenchmarkTable, written: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a sentence for each compared cell that differs. ``written`` is the document's table: columns, rule, rows."""
    if written[0] != table.columns:
        return [f"the columns are {written[0]}, and {table.columns} were measured (make bench BENCH={table.benchmark} WRITE=1)"]
    labels = table.label_columns
    rows = {row[:labels]: row for row in written[2:]}
    found = []
    for measured in table.rows:
        label = ", ".join(measured[:labels])
        if measured[:labels] not in rows:
            found.append(f"there is no row {label}")
            continue
        for name, says, is_measured in zip(table.columns, rows[measured[:labels]], measured, strict=True):
            if name in table.compared and not _are_close(_numbers(says), _numbers(is_measured)):
                found.append(f"{label}: {name} is {says}, and {is_measured} was measured")
    return found


def _find_table(benchmark: str, root: Path) -> tuple[Path, int, int]:
    """Return the document, the index of the table's first line, and the index behind its last."""
    marker = f"<!-- make bench BENCH={benchmark} -->"
    for document in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        lines = document.read_text().splitlines()
        if marker in lines:
            first = next(number for number in range(lines.index(marker), len(lines)) if lines[number].startswith("|"))
            last = next((number for number in range(first, len(lines)) if not lines[number].startswith("|")), len(lines))
            return document, first, last
    raise SystemExit(f"no document has the line {marker}")


def _merged(table: BenchmarkTable, written: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the lines of the new table: rows that were not measured stay, measured ones are replaced or added."""
    labels = table.label_columns
    rows = {row[:labels]: row for row in written if len(row) == len(table.columns)} | {row[:labels]: row for row in table.rows}
    return [table.columns, ("---",) * len(table.columns), *rows.values()]


def _markdown(cells: Sequence[str]) -> str:
    rule = set(cells) == {"---"}
    return f"|{'|'.join(cells)}|" if rule else f"| {' | '.join(cells)} |"


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def _numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in _NUMBER.findall(cell)]


def _are_close(says: Sequence[float], measured: Sequence[float]) -> bool:
    return len(says) == len(measured) and all(
        abs(one - other) <= LARGEST_DEVIATION * other for one, other in zip(says, measured, strict=True)
    )
