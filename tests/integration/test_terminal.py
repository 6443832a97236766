"""Every table of the command line on terminals of three widths."""

from __future__ import annotations

import contextlib
import random
from typing import IO

import pytest

from compactor.cli.main import entry
from tests.support.deployment import Deployment, GrowingLog
from tests.support.terminal import on_terminal, without_colours

COMMANDS = (
    ("topics",),
    ("plan",),
    ("runs", "list"),
    ("segments", "list", "orders-0"),
    ("checkpoints", "list"),
    ("checkpoints", "show", "orders-0"),
    ("bloom", "show", "orders-0"),
    ("explain", "orders-0"),
    ("explain", "orders-0", "--key", "key-1"),
    ("erasure", "orders", "--key", "key-1"),
    ("retire", "--dry-run"),
    ("verify",),
    ("pause",),
    ("recompact", "--dry-run"),
    ("run", "--force"),
)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A partition with a round in its history, and dirty records."""
    folder = tmp_path_factory.mktemp("tier")
    log = GrowingLog("orders", 0, folder, random.Random(11))
    made = Deployment(folder, {"cleaner": {"segment_bytes": 16_384}})
    made.bring(log.write_part())
    made.do("run", "--force")
    made.bring(log.write_part())
    made.do("pause", "payments.*", "--reason", "the brokers move to another rack, and nobody knows for how long that will take them")
    return made


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_every_table_fits_the_terminal(deployment: Deployment, columns: int) -> None:
    for words in COMMANDS:

        def write(terminal: IO[str], words: tuple[str, ...] = words) -> None:
            with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
                entry([*words, "--config", str(deployment.config)])

        lines = without_colours(on_terminal(columns, write)).splitlines()
        assert lines, words
        assert [line for line in lines if len(line) > columns and " " in line.strip()] == [], words


def test_segment_ids_are_not_broken(deployment: Deployment) -> None:
    found = deployment.do("segments", "list", "orders-0")["segments"]

    def write(terminal: IO[str]) -> None:
        with contextlib.redirect_stdout(terminal):
            entry(["segments", "list", "orders-0", "--config", str(deployment.config)])

    shown = on_terminal(80, write)
    assert [one["id"] for one in found if one["id"] not in shown] == []
