"""Reading a live segment that is damaged: the error names the offsets, and the rest is read only where that is asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from compactor.consumer import ConsumerOptions, Place, open_consumer
from compactor.errors import BadData, UsageError
from compactor.features.spark.datasource import parse_read_options
from compactor.records.producers import parse_producer_snapshot_file
from tests.builders import LogBuilder, log_of
from tests.plain_format import read_batches
from tests.support.tier_cli import Answer, TierCli, visible

pytestmark = pytest.mark.damages


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """Three segments of ten batches with two records each: offsets 0 to 19, 20 to 39, 40 to 59."""
    cli = TierCli(tmp_path / "cli", {"cleaner": {"index_interval_bytes": 64}})
    log = LogBuilder()
    for number in range(3):
        if number:
            log.roll()
        for batch in range(10):
            log.put(f"k{number}-{batch}=first", f"l{number}-{batch}=second")
    cli.bring(log.write(tmp_path / "log" / "orders-0"))
    return cli


def middle_log(cli: TierCli) -> Path:
    (path,) = cli.tier.glob(f"orders-0/{20:020}-*.log")
    return path


def batch_position(data: bytes, number: int) -> int:
    return sum(len(batch.raw) for batch in list(read_batches(data))[:number])


def damage_body(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[batch_position(bytes(data), 4) - 3] ^= 0x55
    path.write_bytes(bytes(data))


def damage_length(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = batch_position(bytes(data), 3) + 8
    data[at : at + 4] = (7).to_bytes(4, "big")
    path.write_bytes(bytes(data))


def change_offset(path: Path, mask: int) -> None:
    """Change the base offset of the batch with offsets 26 and 27, which no CRC covers."""
    data = bytearray(path.read_bytes())
    data[batch_position(bytes(data), 3) + 7] ^= mask
    path.write_bytes(bytes(data))


def cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: batch_position(data, 3)])


DAMAGES: dict[str, tuple[Callable[[Path], object], range]] = {
    "a body": (damage_body, range(26, 28)),
    "a header": (damage_length, range(26, 28)),
    "the end": (cut_short, range(26, 40)),
    "a missing object": (Path.unlink, range(20, 40)),
}
OFFSET_DAMAGES: dict[str, tuple[Callable[[Path], object], range]] = {
    "a lower offset": (lambda path: change_offset(path, 0x08), range(24, 28)),
    "a higher offset": (lambda path: change_offset(path, 0x04), range(26, 28)),
    "a huge offset": (lambda path: change_offset(path, 0x80), range(26, 28)),
}
READ_DAMAGES = DAMAGES | OFFSET_DAMAGES


def lines(answer: Answer) -> list[int]:
    return [json.loads(line)["offset"] for line in (answer.document or "").splitlines()]


def cat(cli: TierCli, *words: str) -> Answer:
    return cli.ask("cat", "orders-0", "--format", "json", *words, output="table")


@pytest.mark.parametrize("name", READ_DAMAGES)
@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_cat_reads_up_to_the_damage_and_names_the_offsets(name: str, isolation: str, cli: TierCli) -> None:
    harm, lost = READ_DAMAGES[name]
    harm(middle_log(cli))
    answer = cat(cli, "--isolation", isolation)
    assert (answer.code, lines(answer)) == (3, list(range(lost.start)))
    assert f"offsets {lost.start} to {lost.stop - 1} cannot be read" in answer.stderr
    assert "--skip-damaged" in answer.stderr
    assert "`explain orders-0` what helps" in answer.stderr


@pytest.mark.parametrize("name", READ_DAMAGES)
def test_cat_gives_the_rest_where_it_is_asked_for(name: str, cli: TierCli) -> None:
    harm, lost = READ_DAMAGES[name]
    harm(middle_log(cli))
    answer = cat(cli, "--skip-damaged")
    assert (answer.code, lines(answer)) == (3, [offset for offset in range(60) if offset not in lost])
    assert f"offsets {lost.start} to {lost.stop - 1} of orders-0 cannot be read" in answer.stderr
    assert cat(cli, "--skip-damaged", "--to", "19").code == 0


@pytest.mark.parametrize("name", READ_DAMAGES)
def test_an_export_leaves_out_what_cannot_be_read(name: str, cli: TierCli, tmp_path: Path) -> None:
    harm, lost = READ_DAMAGES[name]
    harm(middle_log(cli))
    refused = cli.ask("export", "orders-0", tmp_path / "refused")
    assert refused.code == 3
    assert not (tmp_path / "refused").exists()
    answer = cli.ask("export", "orders-0", tmp_path / "out", "--skip-damaged")
    assert answer.code == 3
    assert [(one["first_offset"], one["last_offset"]) for one in answer.document["skipped"]] == [(lost.start, lost.stop - 1)]
    assert [record[0] for record in visible(tmp_path / "out")] == [offset for offset in range(60) if offset not in lost]
    assert answer.document["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.log"))
    assert {path.stem for path in (tmp_path / "out").glob("*.index")} == {f"{0:020}", f"{40:020}"}, "intact segments have their files"


def test_a_damaged_index_costs_an_export_no_record(cli: TierCli, tmp_path: Path) -> None:
    path = middle_log(cli).with_suffix(".index")
    path.write_bytes(bytes(len(path.read_bytes())))
    assert cli.ask("export", "orders-0", tmp_path / "refused").code == 3
    cli.do("export", "orders-0", tmp_path / "out", "--skip-damaged")
    assert [record[0] for record in visible(tmp_path / "out")] == list(range(60))
    assert {path.stem for path in (tmp_path / "out").glob("*.index")} == {f"{0:020}", f"{40:020}"}


def test_an_export_ends_where_the_readable_log_ends(cli: TierCli, tmp_path: Path) -> None:
    (path,) = cli.tier.glob(f"orders-0/{40:020}-*.log")
    cut_short(path)
    report = cli.ask("export", "orders-0", tmp_path / "out", "--skip-damaged").document
    assert (report["start_offset"], report["end_offset"]) == (0, 45)


def test_a_log_without_a_readable_batch_is_not_exported(cli: TierCli, tmp_path: Path) -> None:
    for path in cli.tier.glob("orders-0/*.log"):
        path.unlink()
    assert cli.ask("export", "orders-0", tmp_path / "out", "--skip-damaged").code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("harm", ["the marker", "the segment"])
@pytest.mark.parametrize("options", [(), ("--leader-epoch-zero",)])
def test_an_export_withholds_records_of_transactions_that_cat_cannot_decide(harm: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """The abort marker of the transaction that began in the first segment is damaged; the second segment has nothing but data."""
    cli = TierCli(tmp_path / "cli")
    log = log_of("7t: aborted=1; b=1; /; c=1; /; 7 aborts; d=1; /; 7t: e=1; 7 commits; 8t: f=1; 8 aborts")
    cli.bring(log.write(tmp_path / "log" / "orders-0"))
    (path,) = cli.tier.glob(f"orders-0/{3:020}-*.log")
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(bytes(data))
    if harm == "the segment":
        path.unlink()
    read = lines(cat(cli, "--skip-damaged"))
    assert read == [1, 2, *([4] if harm == "the marker" else []), 5]
    answer = cli.ask("export", "orders-0", tmp_path / "out", "--skip-damaged", *options)
    assert answer.code == 3
    assert answer.document["skipped"][0]["reason"].startswith("the outcome of their transactions")
    assert (answer.document["skipped"][0]["first_offset"], answer.document["skipped"][0]["last_offset"]) == (0, 0)
    for by_index in (False, True):
        assert [record[0] for record in visible(tmp_path / "out", by_index=by_index)] == read
    for snapshot in (tmp_path / "out").glob("*.snapshot"):
        assert parse_producer_snapshot_file(snapshot.read_bytes(), "").first_open_offset() is None


def test_a_rescued_log_keeps_its_open_transaction_open(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli")
    log = log_of("a=1; /; b=1; 7t: open=1")
    cli.bring(log.write(tmp_path / "log" / "orders-0"))
    (path,) = cli.tier.glob(f"orders-0/{0:020}-*.log")
    path.unlink()
    assert cli.ask("export", "orders-0", tmp_path / "out", "--skip-damaged").code == 3
    (snapshot,) = (tmp_path / "out").glob("*.snapshot")
    assert (int(snapshot.stem), parse_producer_snapshot_file(snapshot.read_bytes(), "").first_open_offset()) == (3, 2)


def test_records_whose_transaction_cannot_be_decided_are_left_out(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli")
    log = log_of("7t: a=1; b=1; /; 7 aborts; c=1; /; 7t: d=1; 7 commits")
    cli.bring(log.write(tmp_path / "log" / "orders-0"))
    (path,) = cli.tier.glob(f"orders-0/{2:020}-*.log")
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(bytes(data))
    answer = cat(cli, "--skip-damaged")
    assert (answer.code, lines(answer)) == (3, [1, 3, 4])
    assert "offsets 0 to 0 of orders-0 cannot be read: the outcome of their transactions" in answer.stderr
    assert lines(cat(cli, "--skip-damaged", "--isolation", "read_uncommitted")) == [0, 1, 3, 4]
    path.unlink()
    assert lines(cat(cli, "--skip-damaged")) == [1, 4]


def test_a_lost_index_hides_nothing_where_damage_is_skipped(cli: TierCli) -> None:
    middle_log(cli).with_suffix(".index").unlink()
    answer = cat(cli, "--skip-damaged", "--from", "30")
    assert (answer.code, lines(answer)) == (0, list(range(30, 60)))


def test_a_consumer_ends_at_the_damage_or_skips_it_with_a_warning(cli: TierCli, caplog: pytest.LogCaptureFixture) -> None:
    damage_body(middle_log(cli))

    def read(options: ConsumerOptions, until: int) -> list[int]:
        found: list[int] = []
        with open_consumer(str(cli.config), options=options) as consumer:
            consumer.assign([Place("orders", 0, 0)])
            while not found or found[-1] < until:
                found += [message.offset() for message in consumer.consume(100, 5.0)]
        return found

    with pytest.raises(BadData, match="offsets 26 to 27 cannot be read"):
        read(ConsumerOptions(), 59)
    with caplog.at_level(logging.WARNING, "compactor"):
        assert read(ConsumerOptions(skip_damaged=True), 59) == [*range(26), *range(28, 60)]
    assert "offsets 26 to 27" in caplog.text


def test_the_last_values_are_never_read_around_damage(cli: TierCli) -> None:
    assert cat(cli, "--skip-damaged", "--view", "latest").code == 2
    with pytest.raises(UsageError, match="exclude each other"):
        ConsumerOptions(view="latest", skip_damaged=True)
    with pytest.raises(UsageError, match="exclude each other"):
        parse_read_options({"config": str(cli.config), "topic": "orders", "skipDamaged": "true", "view": "latest"})


@pytest.mark.parametrize("batch", [0, 4, 16])
@pytest.mark.parametrize("byte", [8, 9, 10, 20, 65], ids=["length", "length", "length", "CRC", "record"])
def test_last_values_are_not_taken_from_damaged_transactions(tmp_path: Path, batch: int, byte: int) -> None:
    """Markers of transactions are looked at first, and the check of their CRCs covers the batches around them."""
    cli, log = TierCli(tmp_path / "cli"), LogBuilder()
    for number in range(9):
        log.put(f"k{number}=some value", pid=7, txn=True)
        log.end(7, commit=True)
    cli.bring(log.write(tmp_path / "log" / "orders-0"))
    (path,) = cli.tier.glob("orders-0/*.log")
    data = bytearray(path.read_bytes())
    data[batch_position(bytes(data), batch) + byte] ^= 1
    path.write_bytes(bytes(data))
    consumer = open_consumer(str(cli.config))
    with pytest.raises(BadData, match="CRC|byte|batch"):
        list(consumer.latest(Place("orders", 0)))
    consumer.close()
