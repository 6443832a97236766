"""Every table of the command line on terminals of three widths."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import IO

import pytest
from rich.cells import cell_len

from compactor.cli import output
from compactor.cli.main import entry
from tests.support.deployment import Deployment, GrowingLog
from tests.support.terminal import on_terminal, without_colours

COMMANDS = (
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
    ("audit", "list"),
    ("cat", "orders-0"),
    ("status",),
    ("topics",),
    ("segments", "dump", "orders-0", "{segment}"),
    ("segments", "dump", "orders-0", "{segment}", "--whole"),
    ("runs", "show", "{run}"),
    ("checkpoints", "lineage", "orders-0"),
    ("checkpoints", "diff", "orders-0", "0"),
    ("checkpoints", "verify"),
    ("repair", "orders-0", "--from", "{part}", "--dry-run"),
    ("config", "show"),
    ("config", "check"),
    ("import", "{root}"),
    ("bloom", "rebuild", "orders-0"),
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
    live = next(one["id"] for one in deployment.do("segments", "list", "orders-0")["segments"] if not one["replaced_by"])
    run = deployment.do("runs", "list")["runs"][0]["run_id"]
    root = deployment.folder / "root"
    shutil.copytree(deployment.folder / "orders-0-part-1", root / "payments-0", dirs_exist_ok=True)
    for template in COMMANDS:
        words = [word.format(segment=live, run=run, part=deployment.folder / "orders-0-part-1", root=root) for word in template]
        codes: list[int] = []

        def write(terminal: IO[str], words: list[str] = words, codes: list[int] = codes) -> None:
            with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
                codes.append(entry([*words, "--config", str(deployment.config)]))

        lines = without_colours(on_terminal(columns, write)).splitlines()
        assert lines, words
        assert codes[0] in (0, 3), lines
        assert [line for line in lines if cell_len(line) > columns and " " in line.strip()] == [], words


@pytest.mark.parametrize(
    "words",
    [
        ("verify",),
        ("run", "--force"),
        ("explain", "orders-0", "--key", "key-1"),
        ("erasure", "orders", "--key", "key-1"),
        ("bloom", "rebuild", "orders-0"),
        ("import", "{root}"),
        ("export", "orders-0", "{folder}/exported"),
    ],
    ids=lambda words: words[0],
)
def test_progress_counts_bytes_of_the_whole(tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    log = GrowingLog("orders", 0, tmp_path, random.Random(12))
    made = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}})
    made.bring(log.write_part())
    made.do("run", "--force")
    made.bring(log.write_part())
    for number in range(2):
        shutil.copytree(tmp_path / "orders-0-part-1", tmp_path / "root" / f"payments-{number}")
    monkeypatch.setattr(output, "_QUIET_SECONDS", 0)
    monkeypatch.setattr(output, "_LINE_SECONDS", 0)
    answer = made.ask(*(word.format(root=tmp_path / "root", folder=tmp_path) for word in words))
    lines = [json.loads(line)["progress"] for line in answer.stderr.splitlines() if line.startswith('{"progress"')]
    told = [line for line in lines if line["unit"] == "bytes"]
    assert {line["unit"] for line in lines if line["title"] != "looking"} == {"bytes"}
    assert len({line["total"] for line in told}) == 1
    assert told[0]["done"] < told[0]["total"]
    shares = [line["done"] / line["total"] for line in told]
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1


def test_segment_ids_are_not_broken(deployment: Deployment) -> None:
    found = deployment.do("segments", "list", "orders-0")["segments"]

    def write(terminal: IO[str]) -> None:
        with contextlib.redirect_stdout(terminal):
            entry(["segments", "list", "orders-0", "--config", str(deployment.config)])

    shown = on_terminal(80, write)
    assert [one["id"] for one in found if one["id"] not in shown] == []
