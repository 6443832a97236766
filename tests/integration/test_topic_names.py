"""Every name that Kafka allows, over the whole life of a partition, on a directory and on a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.builders import LogBuilder
from tests.support.bucket_cli import BucketCli
from tests.support.s3_server import Bucket
from tests.support.tier_cli import TierCli, latest

LONGEST = "t" * 249
ODD = ["...", "-", "--a_.", ".object-store", "orders-0"]
GRACELESS: dict[str, Any] = {"grace_ms": 0}


def on_a_directory(request: pytest.FixtureRequest, folder: Path) -> TierCli:
    return TierCli(folder, {"publish": GRACELESS})


def on_moto(request: pytest.FixtureRequest, folder: Path) -> TierCli:
    return BucketCli(folder, bucket(request, "s3_bucket"), publish=GRACELESS)


def on_versitygw(request: pytest.FixtureRequest, folder: Path) -> TierCli:
    return BucketCli(folder, bucket(request, "versity_bucket"), publish=GRACELESS)


def bucket(request: pytest.FixtureRequest, name: str) -> Bucket:
    found: Bucket = request.getfixturevalue(name)
    return found


@pytest.fixture(params=[on_a_directory, on_moto, pytest.param(on_versitygw, marks=pytest.mark.slow)])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> TierCli:
    made: TierCli = request.param(request, tmp_path / "cli")
    return made


def log_dir(folder: Path, first: int) -> Path:
    """Two versions of ten keys in two segments."""
    log = LogBuilder(first)
    for version in range(2):
        log.put(*(f"key-{key}={first + version}" for key in range(10)))
        log.roll()
    log.put("last=1")
    return log.write(folder)


def live_through(cli: TierCli, topic: str, number: int, tmp_path: Path) -> None:
    """Everything that takes a name or makes a path of it."""
    name = f"{topic}-{number}"
    for first in (0, 21):
        folder = log_dir(tmp_path / f"log-{first}", first)
        cli.do("import", folder, f"--topic={topic}", "--partition", number)
        assert cli.run("--", name)["status"] == "cleaned"
    (row,) = [row for row in cli.do("topics")["partitions"] if row["topic"] == topic]
    assert (row["partition"], row["start_offset"], row["end_offset"]) == (number, 0, 41)
    assert cli.do("checkpoints", "show", "--", name)["cleaner_offsets"]
    assert cli.do("runs", "list", "--", name)["runs"]
    assert cli.do("explain", "--key", "key-1", "--", name)["facts"]
    # As a broker names it: the copy beside it that becomes it needs a name, too.
    cli.do("export", "--", name, tmp_path / "out" / name)
    view = latest(tmp_path / "out" / name)
    assert view == {b"last": b"1", **{f"key-{key}".encode(): b"22" for key in range(10)}}
    assert cli.retire_everything()


def test_the_longest_name(cli: TierCli, tmp_path: Path) -> None:
    """255 characters with its partition, as long as a directory's name can be."""
    live_through(cli, LONGEST, 99_999, tmp_path)


def test_odd_names_side_by_side(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli", {"publish": GRACELESS})
    folder = log_dir(tmp_path / "log", 0)
    for topic in ODD:
        cli.do("import", folder, f"--topic={topic}", "--partition", "0")
    live_through(cli, "orders", 0, tmp_path)
    assert cli.run("--", "--a_.-0")["status"] == "cleaned"
    rows = cli.do("run", "--force")["partitions"]
    assert {row["topic"] for row in rows} == {"orders", *ODD}
    assert [row["topic"] for row in rows if row["status"] != "cleaned"] == ["--a_.", "orders"]
    assert len(cli.retire_everything()) > 3 * (len(ODD) - 1)
    for number, topic in enumerate(ODD):
        cli.do("export", "--", f"{topic}-0", tmp_path / f"view {number}")
        assert latest(tmp_path / f"view {number}")[b"key-3"] == b"1", topic


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "é", "a b", "t" * 250, "a\x00"])
def test_what_is_no_name_is_refused_before_anything_is_made(tmp_path: Path, topic: str) -> None:
    cli = TierCli(tmp_path / "cli")
    cli.refused("import", log_dir(tmp_path / "log", 0), f"--topic={topic}", "--partition", "0", code=2, says="is not a topic name")
    assert not cli.tier.exists()


def test_what_no_broker_could_have_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli")
    answer = cli.ask("import", log_dir(tmp_path / "log", 0), "--topic", LONGEST, "--partition", "100000")
    assert answer.code == 2
    assert "longer than 255 characters" in answer.stderr
    assert not cli.tier.exists()
