"""CPU seconds of each test and fixture, own and of child processes that ended meanwhile: ``make test-costs`` (CONTRIBUTING.md).

A pytest plug-in: ``pytest -p tests.support.costs --costs FILE``. Each worker appends one line of JSON per test phase and per fixture to
FILE. ``python -m tests.support.costs FILE`` prints the table. Processes that outlive a test, such as brokers, count where they end.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest


class Usage(NamedTuple):
    own: float
    children: float
    wall: float


def usage() -> Usage:
    """Return this process's CPU seconds, those of its ended children, and a clock, all since some fixed moment."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return Usage(own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime, time.monotonic())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="append CPU seconds of tests and fixtures to FILE, as lines of JSON")


class Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file

    def record(self, kind: str, name: str, began: Usage) -> None:
        spent = [round(after - before, 4) for before, after in zip(began, usage(), strict=True)]
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([kind, name, *spent]) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began = usage()
        result = yield
        self.record("test", item.nodeid, began)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        began = usage()
        result = yield
        self.record("fixture", f"{fixturedef.argname} ({fixturedef.scope}, {fixturedef.baseid})", began)
        return result


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--costs"):
        config.pluginmanager.register(Recorder(Path(file).absolute()), "costs")


def table(file: Path, rows: int = 60) -> list[str]:
    """Return lines of Markdown: seconds per suite, then the dearest tests and fixtures."""
    by_suite: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    by_name: dict[str, defaultdict[str, list[float]]] = {kind: defaultdict(lambda: [0.0] * 4) for kind in ("test", "fixture")}
    for line in file.read_text(encoding="utf-8").splitlines():
        kind, name, own, children, wall = json.loads(line)
        suite = [by_suite[name.split("/")[1]]] if kind == "test" else []
        for row in (by_name[kind][name.partition("[")[0] if kind == "test" else name], *suite):
            for place, value in enumerate((1, own, children, wall)):
                row[place] += value
    lines = []
    for title, sums in (("suite", by_suite), ("test function", by_name["test"]), ("fixture", by_name["fixture"])):
        lines += [f"| {title} | cases | own CPU s | children's CPU s | wall s |", "|---|---|---|---|---|"]
        dearest = sorted(sums.items(), key=lambda row: -(row[1][1] + row[1][2]))[:rows]
        lines += [f"| {name} | {row[0]:.0f} | {row[1]:.1f} | {row[2]:.1f} | {row[3]:.1f} |" for name, row in dearest]
        totals = [sum(row[place] for row in sums.values()) for place in range(4)]
        lines += [f"| all | {totals[0]:.0f} | {totals[1]:.1f} | {totals[2]:.1f} | {totals[3]:.1f} |", ""]
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table(Path(sys.argv[1]))) + "\n")
