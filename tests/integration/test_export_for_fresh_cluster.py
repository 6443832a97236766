"""`export --leader-epoch-zero`: a log directory for a cluster that has not written it."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.records.batches import memory_map_file, parse_batch_headers
from compactor.records.indexes import offset_index_problem, time_index_problem
from compactor.records.producers import parse_producer_snapshot_file
from tests.builders import LogBuilder, log_of
from tests.plain_format import read_batches
from tests.support.tier_cli import TierCli, batches_of, visible

ID = "R0AHqObxTZmsN-zsxr_0TQ"


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """Two segments under leader epoch 6; in the second one a transaction begins at offset 5 and is still open."""
    log = LogBuilder()
    log.leader_epoch = 6
    log.add("3: a=1 b=1; /; 3: c=1; 3: d=1 e=1; 4t: open=1; f=1")
    made = TierCli(tmp_path / "cli")
    made.bring(log.write(tmp_path / "orders-0"))
    return made


def keys(folder: Path) -> list[bytes | None]:
    return [record.key for batch in batches_of(folder) if not batch.control for record in batch.records]


def test_an_open_transaction_is_left_out_and_every_segment_has_an_empty_snapshot(cli: TierCli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = cli.do("export", "orders-0", out, "--leader-epoch-zero", "--new-topic-id", ID)
    assert (report["segments"], report["start_offset"], report["end_offset"]) == (2, 0, 6)
    assert report["bytes"] == sum(path.stat().st_size for path in out.glob("*.log"))
    assert report["open_transactions"] == [{"producer_id": 4, "producer_epoch": 0, "first_offset": 5, "last_offset": 5, "records": 1}]
    assert keys(out) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert {batch.leader_epoch for batch in batches_of(out)} == {0}
    assert (out / "leader-epoch-checkpoint").read_text() == "0\n1\n0 0\n"
    snapshots = sorted(out.glob("*.snapshot"))
    assert [int(path.stem) for path in snapshots] == [2, 7]
    assert [len(parse_producer_snapshot_file(path.read_bytes(), path.name).entries) for path in snapshots] == [0, 0]
    assert (out / "partition.metadata").read_text() == f"version: 0\ntopic_id: {ID}"


def test_the_command_names_the_open_transactions_that_it_leaves_out(cli: TierCli, tmp_path: Path) -> None:
    answer = cli.ask("export", "orders-0", tmp_path / "out", "--leader-epoch-zero", output="table")
    assert answer.code == 0
    assert "1 record of orders-0 at offsets 5 to 5 left out: the transaction of producer 4, epoch 0, has not ended" in answer.stderr


@pytest.mark.parametrize("rounds", [0, 1])
def test_one_hanging_transaction_takes_nothing_from_those_that_overlap_it(tmp_path: Path, rounds: int) -> None:
    """50 producers write before and after the first record of the hanging transaction, and end in the last segment: half of them commit."""
    log = LogBuilder()
    producers = range(100, 150)
    for number in producers:
        log.put(f"first-{number}=1", pid=number, txn=True)
    log.roll()
    log.put("hangs-1=1", pid=7, txn=True)
    log.roll()
    log.put("hangs-2=1", pid=7, txn=True)  # all that its segment holds
    log.roll()
    for number in producers:
        log.put(f"second-{number}=1", pid=number, txn=True)
    for number in producers:
        log.end(number, commit=number % 2 == 0)
    log.add("7t: hangs-3=1; end=1")
    cli = TierCli(tmp_path / "cli")
    cli.bring(log.write(tmp_path / "orders-0"))
    for _ in range(rounds):
        cli.run()
    report = cli.do("export", "orders-0", tmp_path / "out" / "orders-0", "--leader-epoch-zero")
    (left,) = report["open_transactions"]
    assert (left["producer_id"], left["records"], left["first_offset"], left["last_offset"]) == (7, 3, 50, log.next_offset - 2)
    assert report["end_offset"] == log.next_offset - 1
    committed = [b"%s-%d" % (word, number) for word in (b"first", b"second") for number in producers if number % 2 == 0]
    for by_index in (False, True):  # as a broker that was killed restores it, and as one that was stopped finds it
        assert [record[2] for record in visible(tmp_path / "out" / "orders-0", by_index=by_index)] == [*committed, b"end"]
    assert not {b"hangs-1", b"hangs-2", b"hangs-3"} & set(keys(tmp_path / "out" / "orders-0"))
    indexes_valid(tmp_path / "out" / "orders-0")


def indexes_valid(folder: Path) -> None:
    """The indexes point at the batches that the log has."""
    for path in folder.glob("*.log"):
        table = parse_batch_headers(memory_map_file(path), path.name, -1)
        assert offset_index_problem(path.with_suffix(".index").read_bytes(), int(path.stem), table) == ""
        assert time_index_problem(path.with_suffix(".timeindex").read_bytes(), int(path.stem), table) == ""


def test_a_log_of_open_transactions_only_is_refused(tmp_path: Path) -> None:
    log = log_of("4t: open=1")
    cli = TierCli(tmp_path / "cli")
    cli.bring(log.write(tmp_path / "orders-0"))
    assert cli.ask("export", "orders-0", tmp_path / "out", "--leader-epoch-zero").code == 2
    assert list(tmp_path.glob("out*")) == []


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
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"orders-0", "log-start-offset-checkpoint"}


@pytest.mark.parametrize("words", [("--new-topic-id", ID), ("--leader-epoch-zero", "--new-topic-id", "no-id")])
def test_a_topic_id_must_be_one_and_comes_with_the_other_option(cli: TierCli, tmp_path: Path, words: tuple[str, ...]) -> None:
    cli.refused("export", "orders-0", tmp_path / "out", *words, code=2)
    assert not (tmp_path / "out").exists()
