"""`cat`: which records, as what lines, and a reader that goes away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builders import LZ4, LogBuilder, entry
from tests.support.tier_cli import TierCli


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    log = LogBuilder()
    log.put("a=1", "b=x", headers=[("h", b"v"), ("n", None), ("raw", b"\xff")])
    log.put(b"\xff=\xfe\x00", "=no key", "a", codec=LZ4)
    log.add("/; 5t: t=aborted; 5 aborts")
    log.raw(entry(0, 7, "b=\u00e4"), 7)
    log.add("6t: t=open; c=behind")
    cli = TierCli(tmp_path / "tier of cat")
    cli.bring(log.write(tmp_path / "log"))
    return cli


def lines(cli: TierCli, *arguments: object) -> list[dict[str, Any]]:
    answer = cli.ask("cat", "orders-0", *arguments, output="table")
    assert answer.code == 0, answer.stderr
    return [json.loads(line) for line in (answer.document or "").splitlines()]


def offsets(cli: TierCli, *arguments: object) -> list[int]:
    return [line["offset"] for line in lines(cli, *arguments)]


def test_lines(cli: TierCli) -> None:
    found = lines(cli)
    headers = [{"key": "h", "value": "v"}, {"key": "n", "value": None}, {"key": "raw", "value_base64": "/w=="}]
    times = [line.pop("time") for line in found]
    assert times[:3] == ["1970-01-01T00:00:01.000Z", "1970-01-01T00:00:01.001Z", "1970-01-01T00:00:01.002Z"]
    assert found[0] == {"offset": 0, "timestamp": 1000, "key": "a", "value": "1", "headers": headers, "leader_epoch": 0}
    assert found[2] == {"offset": 2, "timestamp": 1002, "key_base64": "/w==", "value_base64": "/gA=", "headers": [], "leader_epoch": 0}
    assert times[5] is None
    assert [line["value"] for line in found[3:5]] == ["no key", None]
    assert found[5] == {"offset": 7, "timestamp": None, "key": "b", "value": "\u00e4", "headers": [], "leader_epoch": None}
    assert len(found) == 6


def test_ranges_keys_isolation_and_views(cli: TierCli) -> None:
    assert offsets(cli, "--from", 1, "--to", 3) == [1, 2, 3]
    assert offsets(cli, "--from", 100) == []
    assert offsets(cli, "--isolation", "read_uncommitted", "--from", 4) == [4, 5, 7, 8, 9]
    assert offsets(cli, "--key", "b") == [1, 7]
    assert offsets(cli, "--key", "base64:/w==") == [2]
    assert offsets(cli, "--key", "") == []
    assert offsets(cli, "--view", "latest") == [2, 7]
    assert offsets(cli, "--view", "latest", "--to", 3) == [0, 1, 2]
    assert offsets(cli, "--view", "latest", "--to", 3, "--key", "a") == [0]


def test_an_empty_answer_names_the_log_start_not_the_segments_below_it(cli: TierCli) -> None:
    end = cli.ask("topics").document["partitions"][0]["end_offset"]
    for start, held in ((2, f"it holds offsets 2 to {end}"), (end + 1, f"all records below its log start, {end + 1}, are deleted")):
        cli.do("topics", "delete-records", "orders-0", "--before", start)
        answer = cli.ask("cat", "orders-0", "--to", 1, output="table")
        assert (answer.code, answer.document or "") == (0, "")
        assert answer.stderr.splitlines()[-1] == f"orders-0 has no such record; {held}"


def test_raw(cli: TierCli) -> None:
    assert cli.ask("cat", "orders-0", "--format", "raw", "--to", 4, output="table").document == "1\nx\n\ufffd\x00\nno key\n\n"


def test_bad_data_comes_behind_the_last_good_record(cli: TierCli) -> None:
    second = sorted(cli.tier.glob("orders-0/*.log"))[1]
    second.chmod(0o600)
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    answer = cli.ask("cat", "orders-0", "--isolation", "read_uncommitted", output="table")
    assert answer.code == 3
    assert [json.loads(line)["offset"] for line in answer.document.splitlines()] == [0, 1, 2, 3, 4, 5, 7, 8]
    assert "CRC" in answer.stderr
    assert "offsets 9 to 9 cannot be read" in answer.stderr


def test_a_reader_that_goes_away(cli: TierCli) -> None:
    command = [sys.executable, "-m", "compactor", "cat", "orders-0", "--config", str(cli.config)]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
