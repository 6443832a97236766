"""`export --leader-epoch-zero`: a log directory for a cluster that has not written it."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.records.producers import parse_producer_snapshot_file
from tests.builders import LogBuilder
from tests.plain_format import read_batches
from tests.support.tier_cli import TierCli

ID = "R0AHqObxTZmsN-zsxr_0TQ"


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """Two segments under leader epoch 6; in the second one a transaction begins at offset 5 and is still open."""
    log = LogBuilder()
    log.leader_epoch = 6
    log.put("a=1", "b=1", pid=3)
    log.roll()
    log.put("c=1", pid=3)
    log.put("d=1", "e=1", pid=3)
    log.put("open=1", pid=4, txn=True)
    log.put("f=1")
    made = TierCli(tmp_path / "cli")
    made.bring(log.write(tmp_path / "orders-0"))
    return made


def test_the_log_ends_before_the_open_transaction_and_every_segment_has_an_empty_snapshot(cli: TierCli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = cli.do("export", "orders-0", out, "--leader-epoch-zero", "--new-topic-id", ID)
    assert (report["segments"], report["start_offset"], report["end_offset"]) == (2, 0, 4)
    assert report["bytes"] == sum(path.stat().st_size for path in out.glob("*.log"))
    batches = [batch for path in sorted(out.glob("*.log")) for batch in read_batches(path.read_bytes())]
    assert [record.key for batch in batches for record in batch.records] == [b"a", b"b", b"c", b"d", b"e"]
    assert {batch.leader_epoch for batch in batches} == {0}
    assert (out / "leader-epoch-checkpoint").read_text() == "0\n1\n0 0\n"
    snapshots = sorted(out.glob("*.snapshot"))
    assert [int(path.stem) for path in snapshots] == [2, 5]
    assert [len(parse_producer_snapshot_file(path.read_bytes(), path.name).entries) for path in snapshots] == [0, 0]
    assert (out / "partition.metadata").read_text() == f"version: 0\ntopic_id: {ID}"


def test_the_tier_and_an_ordinary_export_keep_epochs_producers_and_open_transactions(cli: TierCli, tmp_path: Path) -> None:
    cli.do("export", "orders-0", tmp_path / "fresh", "--leader-epoch-zero")
    out = cli.export(tmp_path / "plain")
    batches = [batch for path in sorted(out.glob("*.log")) for batch in read_batches(path.read_bytes())]
    assert {batch.leader_epoch for batch in batches} == {6}
    assert batches[-1].records[-1].key == b"f"


@pytest.mark.parametrize("options", [(), ("--leader-epoch-zero",)])
def test_the_broker_learns_what_is_clean_where_it_keeps_that(cli: TierCli, tmp_path: Path, options: tuple[str, ...]) -> None:
    cleaned = cli.run()["next_dirty_offset"]
    assert cleaned > 0
    cli.do("export", "orders-0", tmp_path / "elsewhere" / "orders-0", *options)
    root = tmp_path / "log.dirs"
    root.mkdir()
    checkpoint = root / "cleaner-offset-checkpoint"
    checkpoint.write_text("0\n2\norders 0 99\nother 0 7\n")
    cli.do("export", "orders-0", root / "orders-0", *options)
    assert checkpoint.read_text() == f"0\n2\norders 0 {cleaned}\nother 0 7\n"
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["orders-0"]


@pytest.mark.parametrize("words", [("--new-topic-id", ID), ("--leader-epoch-zero", "--new-topic-id", "no-id")])
def test_a_topic_id_must_be_one_and_comes_with_the_other_option(cli: TierCli, tmp_path: Path, words: tuple[str, ...]) -> None:
    answer = cli.ask("export", "orders-0", tmp_path / "out", *words)
    assert answer.code == 2
    assert not (tmp_path / "out").exists()
