"""The main job on a directory, as a user types it: import, topics, plan, run, verify, export, retire, segments; demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compactor.cli.main import entry
from tests.builders import GZIP, LZ4, NONE, SNAPPY, ZSTD, LogBuilder, log_of
from tests.support.tier_cli import TierCli, batches_of, contents, latest, visible

pytestmark = pytest.mark.quick

ROW = {
    *("topic", "partition", "status", "first_dirty_offset", "next_dirty_offset", "segments_in", "segments_out", "segments_skipped"),
    *("bytes_read", "bytes_written", "records_read", "records_kept", "map_engine", "peak_disk_bytes", "peak_map_bytes", "seconds"),
}
PLAN = {
    *("topic", "partition", "due", "reason", "dirty_ratio", "segments", "skip", "bytes_to_read", "bytes_to_write", "map_keys"),
    *("map_engine", "passes", "peak_disk_bytes", "requests", "cost_usd"),
}


def write_log(folder: Path, start: int = 0, rounds: int = 3, time_ms: int = 1_000) -> Path:
    """Three segments, a codec each, with headers, deletes, and a committed and an aborted transaction."""
    log = LogBuilder(start, time=time_ms)
    for number, codec in enumerate((NONE, GZIP, LZ4, SNAPPY, ZSTD)[:rounds]):
        if number:
            log.roll()
        log.put("a=1", "b=1", "c=1", "d=1", codec=codec, headers=[("h", b"x"), ("n", None)])
        log.put("b=1", "b=2", "c", codec=codec)
        log.put("a=aborted", pid=7, txn=True, codec=codec)
        log.put(f"a={number}", f"e{number}=1", pid=8, txn=True, codec=codec)
        log.add("7 aborts; 8 commits")
    return log.write(folder)


SETTINGS = {"publish": {"grace_ms": 0}}


def test_the_whole_job(cli: TierCli, tmp_path: Path) -> None:
    log_dir = write_log(tmp_path / "log dir")
    size = sum(path.stat().st_size for path in log_dir.glob("*.log"))
    assert cli.bring(log_dir) == {"segments": 3, "bytes": size, "start_offset": 0, "end_offset": 35}
    (topic,) = cli.do("topics")["partitions"]
    expected = {"topic": "orders", "partition": 0, "segments": 3, "bytes": size, "start_offset": 0, "end_offset": 35}
    assert {name: topic[name] for name in expected} == expected

    (plan,) = cli.do("plan")["partitions"]
    assert plan.keys() >= PLAN
    assert (plan["due"], plan["dirty_ratio"], plan["bytes_to_read"], plan["skip"]) == (True, 1.0, size, 0)
    assert [segment["action"] for segment in plan["segments"]] == ["rewrite"] * 3

    (row,) = cli.do("run")["partitions"]
    assert row.keys() >= ROW
    assert (row["status"], row["first_dirty_offset"], row["next_dirty_offset"]) == ("cleaned", 0, 36)
    assert (row["segments_in"], row["segments_out"], row["segments_skipped"]) == (3, 1, 0)
    assert (row["records_read"], row["bytes_read"]) == (36, size)
    assert 0 < row["bytes_written"] < size
    assert row["peak_disk_bytes"] > 0
    assert row["peak_map_bytes"] > 0

    after = cli.export(tmp_path / "exported")
    assert latest(after) == latest(log_dir) == {b"a": b"2", b"b": b"2", b"d": b"1", b"e0": b"1", b"e1": b"1", b"e2": b"1"}
    assert row["records_kept"] == sum(len(batch.records) for batch in batches_of(after))
    assert set(visible(after)) <= set(visible(log_dir))
    assert [r[2] for r in visible(after)] == [b"e0", b"e1", b"d", b"b", b"c", b"a", b"e2"]

    (plan,) = cli.do("plan")["partitions"]
    assert (plan["due"], plan["bytes_to_read"], plan["requests"]) == (False, 0, 0)
    verified = cli.do("verify")
    assert verified["ok"]
    assert {problem["severity"] for problem in verified["problems"]} == {"note"}
    retired = cli.do("retire")
    assert len(retired["deleted"]) >= 3 * 3
    assert cli.do("verify") == {"ok": True, "problems": []}
    (segment,) = cli.do("segments", "list", "orders-0")["segments"]
    assert (segment["state"], segment["start_offset"], segment["end_offset"]) == ("COPY_SEGMENT_FINISHED", 0, 35)
    assert contents(cli.export(tmp_path / "again")) == contents(after)


def test_segments_dump_shows_batches_and_records(cli: TierCli, tmp_path: Path) -> None:
    cli.bring(write_log(tmp_path / "log"))
    first = cli.do("segments", "list", "orders-0")["segments"][0]
    for name in (first["id"], first["id"][:8]):
        dumped = cli.do("segments", "dump", "orders-0", name)
        assert [batch["kind"] for batch in dumped["batches"]] == ["data", "data", "data", "data", "abort", "commit"]
        records = dumped["batches"][0]["records"]
        assert [(r["offset"], r["key"], r["value"]) for r in records] == [(0, "a", "1"), (1, "b", "1"), (2, "c", "1"), (3, "d", "1")]
    cli.refused("segments", "dump", "orders-0", "nonsense", code=2, says="nonsense")


def test_everything_also_prints_tables(cli: TierCli, tmp_path: Path) -> None:
    cli.bring(write_log(tmp_path / "log"))
    first = cli.do("segments", "list", "orders-0")["segments"][0]["id"]
    for command in (
        ["topics"], ["plan"], ["segments", "list", "orders-0"], ["segments", "dump", "orders-0", first], ["run"], ["verify"], ["plan"],
        ["retire", "--dry-run"], ["retire"], ["export", "orders-0", tmp_path / "out"],
    ):  # fmt: skip
        answer = cli.ask(*command, output="table")
        assert answer.code == 0, answer
        assert "a bug" not in answer.stderr
        if command[0] not in ("segments", "retire"):
            assert max(map(len, str(answer.document).splitlines())) <= 140


# ---- second rounds ----------------------------------------------------------------------------------------------------------


def test_a_second_import_continues_a_compacted_partition(cli: TierCli, tmp_path: Path) -> None:
    cli.bring(write_log(tmp_path / "one"))
    cli.run()
    assert cli.bring(write_log(tmp_path / "two", start=36))["end_offset"] == 71
    (plan,) = cli.do("plan")["partitions"]
    assert 0 < plan["dirty_ratio"] < 1
    row = cli.run()
    assert (row["first_dirty_offset"], row["next_dirty_offset"], row["segments_in"], row["segments_out"]) == (36, 72, 4, 1)
    assert latest(cli.export(tmp_path / "out")) == latest(tmp_path / "one") | latest(tmp_path / "two")
    assert cli.run()["status"] == "nothing_to_do"


def test_the_same_import_again_is_no_news(cli: TierCli, tmp_path: Path) -> None:
    log_dir = write_log(tmp_path / "log")
    first = cli.bring(log_dir)
    cli.run()
    before = cli.digest()
    answer = cli.ask("import", log_dir, "--topic", "orders", "--partition", 0)
    end = first["end_offset"]
    assert (answer.code, answer.document) == (0, {"segments": 0, "bytes": 0, "start_offset": end + 1, "end_offset": end})
    assert cli.digest() == before


def test_a_transaction_that_crosses_two_imports(cli: TierCli, tmp_path: Path) -> None:
    """Its beginning is known from the first import only: consumers of the second must not see what was aborted."""
    log = log_of("a=1 b=1; 7t: a=aborted; 8t: b=committed")
    cli.bring(log.write(tmp_path / "one"))
    assert cli.run()["status"] == "nothing_to_do"  # nothing of it is decided
    log.add("/; c=1; 7 aborts; 8 commits")
    cli.bring(log.write(tmp_path / "two"))
    before = cli.export(tmp_path / "before")
    assert latest(before) == {b"a": b"1", b"b": b"committed", b"c": b"1"}
    (index,) = before.glob("*.txnindex")
    assert [int.from_bytes(index.read_bytes()[at : at + 8], "big") for at in (2, 10, 18, 26)] == [7, 2, 5, 3]
    assert cli.run()["status"] == "cleaned"
    assert latest(cli.export(tmp_path / "after")) == latest(before)


def test_an_open_transaction_holds_the_round_back(cli: TierCli, tmp_path: Path) -> None:
    log = log_of("a=1 a=2; /; 7t: a=3; /; a=4 a=5")
    cli.bring(log.write(tmp_path / "log"))
    row = cli.run()
    assert (row["status"], row["next_dirty_offset"]) == ("cleaned", 2)
    assert cli.run()["status"] == "nothing_to_do"
    (plan,) = cli.do("plan", "--force")["partitions"]
    assert "transaction" in plan["reason"]


@pytest.mark.parametrize("empty", ["first", "middle", "last", "several"])
def test_zero_byte_segments(empty: str, cli: TierCli, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    log = LogBuilder(10)
    log.put("a=1", "b=1", offsets=(10, 12))  # with a gap, as a cleaner leaves them
    log.roll(base=20)
    log.put("a=2")
    bases = {"first": [5], "middle": [15], "last": [30], "several": [3, 5, 14, 15, 30, 40]}[empty]
    for base in bases:
        (folder / f"{base:020}.log").touch()
    imported = cli.bring(log.write(folder))
    end = max(bases) - 1 if max(bases) > 20 else 20
    assert (imported["segments"], imported["start_offset"], imported["end_offset"]) == (2, min([10, *bases]), end)
    assert visible(cli.export(tmp_path / "before")) == visible(folder)
    assert cli.run()["next_dirty_offset"] == end + 1
    assert latest(cli.export(tmp_path / "after")) == {b"a": b"2", b"b": b"1"}
    assert cli.do("verify")["ok"]
    log = LogBuilder(end + 1).add("a=3")
    cli.bring(log.write(tmp_path / "next"))
    assert latest(cli.export(tmp_path / "end")) == {b"a": b"3", b"b": b"1"}


def test_segments_that_span_more_than_an_index_can(cli: TierCli, tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a=1", "b=1", offsets=(0, 2))
    log.roll(base=5_000_000_000)
    log.put("a=2")
    log.roll(base=9_000_000_000)
    log.put("a=3", "c=1")
    cli.bring(log.write(tmp_path / "log"))
    row = cli.run()
    assert (row["segments_in"], row["segments_out"]) == (3, 3)
    assert latest(cli.export(tmp_path / "after")) == {b"a": b"3", b"b": b"1", b"c": b"1"}
    assert cli.do("verify")["ok"]


# ---- several partitions -----------------------------------------------------------------------------------------------------


def three(cli: TierCli, tmp_path: Path) -> list[Path]:
    folders = []
    for partition in range(3):
        cli.named = f"orders-{partition}"
        folders.append(write_log(tmp_path / f"log {partition}"))
        cli.bring(folders[-1])
    return folders


@pytest.mark.parametrize("harm", ["missing", "altered", "shorter"])
def test_a_damaged_object_stops_its_partition_only(harm: str, cli: TierCli, tmp_path: Path) -> None:
    folders = three(cli, tmp_path)
    (victim,) = cli.tier.glob("orders-1/00000000000000000012-*.log")
    data = victim.read_bytes()
    if harm == "missing":
        victim.unlink()
    else:
        victim.write_bytes(data[:-1] if harm == "shorter" else data[:100] + bytes([data[100] ^ 1]) + data[101:])
    before = cli.do("segments", "list", "orders-1")
    answer = cli.ask("run")
    assert answer.code == 3
    rows = {row["partition"]: row for row in answer.document["partitions"]}
    assert [rows[n]["status"] for n in range(3)] == ["cleaned", "quarantined", "cleaned"]
    assert rows[1].keys() >= ROW
    assert victim.name in answer.stderr
    assert cli.do("segments", "list", "orders-1") == before
    for partition in (0, 2):
        cli.named = f"orders-{partition}"
        assert latest(cli.export(tmp_path / f"out {partition}")) == latest(folders[partition])
    verified = cli.ask("verify")
    errors = [problem for problem in verified.document["problems"] if problem["severity"] == "error"]
    assert verified.code == 3
    assert [(e["partition"], victim.name in e["object"]) for e in errors] == [(1, True)]

    victim.write_bytes(data)  # restored: the next run takes it up
    os.utime(victim, ns=(time.time_ns(), time.time_ns()))
    assert [row["status"] for row in cli.do("run", "orders-1")["partitions"]] == ["cleaned"]
    assert cli.do("verify")["ok"]


def test_a_disk_budget_that_is_too_small_says_what_it_needs(cli: TierCli, tmp_path: Path) -> None:
    three(cli, tmp_path)
    cli.set(cleaner={"disk_budget_bytes": 4096}, topics={})
    before = cli.digest()
    answer = cli.ask("run")
    assert answer.code == 6
    assert {(row["status"], row.keys() >= ROW) for row in answer.document["partitions"]} == {("quarantined", True)}
    needed = int(answer.stderr.split("disk_budget_bytes to at least ")[1].split()[0].strip(",."))
    views = {key: value for key, value in cli.digest().items() if key.startswith("orders-")}
    assert views == {key: value for key, value in before.items() if key.startswith("orders-")}
    cli.set(cleaner={"disk_budget_bytes": needed})
    rows = cli.do("run")["partitions"]
    assert {row["status"] for row in rows} == {"cleaned"}
    assert max(row["peak_disk_bytes"] for row in rows) <= needed


def test_a_lease_of_somebody_else(cli: TierCli, tmp_path: Path) -> None:
    """A foreign leader that is alive: its partition is left alone, and only counts where it was named or nothing else ran."""
    from compactor.control.leadership import acquire_leadership
    from compactor.model.ids import TopicPartition

    three(cli, tmp_path)
    cli.set(lease={"ttl_ms": 500})
    other = cli.open()

    def taken(partition: int) -> None:
        log = other.open_partition_log(TopicPartition("orders", partition))
        log.refresh()
        acquire_leadership(other.ports, log, type(other.lease)(ttl_ms=60_000))

    taken(1)
    answer = cli.ask("run")
    rows = {row["partition"]: row for row in answer.document["partitions"]}
    assert (answer.code, rows[0]["status"], rows[1]["status"], rows[2]["status"]) == (0, "cleaned", "leased", "cleaned")
    assert "orders-1: " in answer.stderr
    assert "holds the lease; waiting" in answer.stderr
    assert rows[1].keys() >= ROW
    assert cli.ask("run", "orders-1").code == 4


def test_settings_that_changed_under_an_open_round(cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash left a round open; with other settings it is undone, and a new one is made."""
    from compactor.control import publication

    cli.bring(write_log(tmp_path / "log"))

    def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(publication, "publish_round", crash)
        assert cli.ask("run").code == 130
    cli.set(cleaner={"segment_bytes": 300}, lease={"ttl_ms": 100})
    (row,) = cli.do("run")["partitions"]
    assert (row["status"], row["segments_out"]) == ("cleaned", 3)
    assert latest(cli.export(tmp_path / "out")) == latest(tmp_path / "log")


# ---- processes --------------------------------------------------------------------------------------------------------------


def start(cli: TierCli, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "compactor", *map(str, arguments), "--config", str(cli.config), "--output", "json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def many_segments(folder: Path, count: int = 40) -> Path:
    log = LogBuilder()
    for number in range(count):
        if number:
            log.roll()
        for part in range(4):
            log.put(*(f"k{(number * 7 + part * 5 + i) % 31}={number}" for i in range(5)))
    return log.write(folder)


def test_a_killed_import_goes_on_where_it_stopped(cli: TierCli, tmp_path: Path) -> None:
    log_dir = many_segments(tmp_path / "log")
    cli.bring(write_log(tmp_path / "other", start=5_000))  # there is a tier already
    cli.named = "orders-1"
    killed_inside = 0
    for wait in (8, 24, 60):
        process = start(cli, "import", log_dir, "--topic", "orders", "--partition", 1)
        deadline = time.monotonic() + 60
        while len(list(cli.tier.glob("orders-1/*.log"))) < wait and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.kill()
        process.communicate()
        killed_inside += 0 < len(list(cli.tier.glob("orders-1/*.log"))) < 40
        listed = [p for p in cli.do("topics")["partitions"] if p["partition"] == 1]
        assert not listed or listed[0]["end_offset"] == 799
    assert killed_inside
    uploaded = len(list(cli.tier.glob("orders-1/*.log")))
    cli.bring(log_dir)
    (listed,) = [p for p in cli.do("topics")["partitions"] if p["partition"] == 1]
    size = sum(p.stat().st_size for p in log_dir.glob("*.log"))
    assert (listed["segments"], listed["bytes"], listed["start_offset"], listed["end_offset"]) == (40, size, 0, 799)
    assert len(list(cli.tier.glob("orders-1/*.log"))) == 40 >= uploaded
    assert visible(cli.export(tmp_path / "out")) == visible(log_dir)
    assert cli.do("verify") == {"ok": True, "problems": []}


def test_a_killed_import_with_other_settings(cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left cannot be used; it is left to be swept, and the import takes new ids."""
    from compactor.features.imports import staged_files as intake

    log_dir = many_segments(tmp_path / "log", 4)

    def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(intake, "record_tiered_segments", crash)
        assert cli.ask("import", log_dir, "--topic", "orders", "--partition", 0).code == 130
    cli.set(cleaner={"index_interval_bytes": 64})
    cli.bring(log_dir)
    assert visible(cli.export(tmp_path / "out")) == visible(log_dir)
    cli.set(publish={"orphan_age_ms": 0})
    assert len(cli.do("retire")["swept"]) >= 4 * 4
    assert cli.do("verify") == {"ok": True, "problems": []}
    assert visible(cli.export(tmp_path / "still")) == visible(log_dir)


@pytest.mark.parametrize("same", [True, False])
def test_two_imports_at_once(same: bool, cli: TierCli, tmp_path: Path) -> None:
    """Of the same directory both succeed; of two different ones the slower is refused and leaves no trace in the view."""
    one = many_segments(tmp_path / "one")
    two = one if same else write_log(tmp_path / "two")
    processes = [start(cli, "import", folder, "--topic", "orders", "--partition", 0) for folder in (one, two)]
    said = [process.communicate(timeout=120) for process in processes]
    codes = [process.returncode for process in processes]
    assert "a bug" not in said[0][1] + said[1][1]
    assert codes == [0, 0] if same else sorted(codes) == [0, 3], said
    winner = one if codes[0] == 0 else two
    assert visible(cli.export(tmp_path / "out")) == visible(winner)
    assert cli.do("verify")["ok"]


# ---- demo -------------------------------------------------------------------------------------------------------------------


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a demo"
    document = shown(folder, capsys)
    before, after = folder / "kafka-log" / "customers-0", folder / "exported" / "customers-0"
    batches = list(batches_of(before))
    assert {batch.codec for batch in batches if not batch.control} == {NONE, GZIP, SNAPPY, LZ4, ZSTD}
    assert {batch.records[0].key for batch in batches if batch.control} == {b"\0\0\0\0", b"\0\0\0\1"}
    assert latest(after) == latest(before)
    assert len(latest(after)) == document["keys"]
    assert entry(["topics", "--config", str(folder / "tiered-compactor.toml"), "--output", "json"]) == 0
    capsys.readouterr()

    assert shown(folder, capsys)["keys"] == document["keys"]
    (folder / "tiered-compactor.toml").unlink()
    for wrong in (folder, folder / "state" / "file"):
        (folder / "state" / "file").touch()
        assert entry(["demo", "--dir", str(wrong)]) == 2
    assert before.exists()


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert entry(["demo", "--dir", str(folder), "--output", "json"]) == 0
    printed = capsys.readouterr()
    for step in ("1. make", "2. import", "3. plan", "4. run", "5. verify", "6. export", "7. check"):
        assert step in printed.err
    document: dict[str, Any] = json.loads(printed.out)
    assert document["ok"]
    assert document["records_before"] > 200_000
    assert document["records_after"] < document["records_before"] / 5
    assert document["bytes_after"] < document["bytes_before"] / 5
    assert document["keys"] > 20_000
    return document


def test_demo_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from compactor import demo as demo_data

    monkeypatch.setattr(demo_data.DemoTopicSettings, "__init__", _small(demo_data.DemoTopicSettings.__init__))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiered-compactor.toml").write_text("[nonsense]\n")  # not its own: the demo does not look
    assert entry(["demo"]) == 0
    assert "keys with a value" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["tiered-compactor.toml"]


def test_demo_notices_a_lost_update(tmp_path: Path) -> None:
    """A value that is not the last one, a key that is gone, and a deleted key that is back."""
    from compactor.demo import CustomersTable, DemoTopicSettings, value_differences, write_demo_topic

    shape = DemoTopicSettings(now_ms=1_790_000_000_000, records=6_000, keys=300, segment_bytes=1 << 18)
    table = CustomersTable(shape)
    sum(write_demo_topic(tmp_path / "log", shape, table))
    written = table.latest
    assert {key: value for key, value in written.items() if value is not None} == latest(tmp_path / "log")
    live, dead = (next(key for key, value in written.items() if (value is None) == deleted) for deleted in (False, True))
    assert value_differences(written, written) == []
    assert value_differences(written, {key: value for key, value in written.items() if key != dead}) == []
    for key, value in ((live, b"stale"), (live, None), (dead, b"back"), (b"new", b"1")):
        assert len(value_differences(written, {**written, key: value})) == 1


def _small(made: object) -> object:
    def small(self: object, now_ms: int) -> None:
        made(self, now_ms, records=6_000, keys=300, segment_bytes=1 << 18)  # type: ignore[operator]

    return small
