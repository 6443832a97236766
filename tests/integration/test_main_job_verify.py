"""`verify` finds what is wrong with a tier, and calls what only waits a note."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest

from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.cleaner.source import SourceSegment, open_source_segment
from compactor.constants import LeaderEpoch, Offset
from compactor.control.records import append_checksum
from compactor.upkeep.verify import segment_file_problems
from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli

pytestmark = pytest.mark.quick


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    cli = TierCli(tmp_path / "tier", {"cleaner": {"index_interval_bytes": 64}})
    log = LogBuilder()
    for number in range(2):
        if number:
            log.roll()
        for _ in range(3):
            log.put("a=1", "b=2")
        log.add("7t: c=3; 7 aborts")
    cli.bring(log.write(tmp_path / "log"))
    return cli


def harmed(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
        os.utime(path, ns=(time.time_ns(), time.time_ns()))


@pytest.mark.damages
@pytest.mark.parametrize("kind", ["log", "index", "timeindex", "txnindex", "snapshot", "leader-epoch-checkpoint"])
@pytest.mark.parametrize("harm", ["missing", "size", "digest"])
def test_every_object_is_looked_at(kind: str, harm: str, cli: TierCli) -> None:
    (victim,) = cli.tier.glob(f"orders-0/{8:020}-*.{kind}")
    data = victim.read_bytes()
    altered = {"missing": None, "size": data + b"\0", "digest": data[:-1] + bytes([data[-1] ^ 1])}[harm]
    harmed(victim, altered)
    answer = cli.ask("verify")
    assert answer.code == 3
    assert [(p["severity"], p["kind"], p["object"]) for p in answer.document["problems"]] == [("error", harm, f"orders-0/{victim.name}")]
    assert not answer.document["ok"]
    assert victim.name in answer.stderr


def test_orphans_are_notes(cli: TierCli) -> None:
    orphan = cli.tier / "orders-0" / f"{99:020}-AAAAAAAAAAAAAAAAAAAAAA.log"
    orphan.write_bytes(b"left over")
    document = cli.do("verify")
    assert document["ok"]
    assert [(p["severity"], p["kind"], p["object"]) for p in document["problems"]] == [("note", "orphan", f"orders-0/{orphan.name}")]
    assert cli.do("retire")["swept"] == [], "what the log never knew waits for its age"
    os.utime(orphan, (1, 1))
    assert cli.do("retire")["swept"] == [f"orders-0/{orphan.name}"]
    assert cli.do("verify") == {"ok": True, "problems": []}
    assert not orphan.exists()


@pytest.mark.damages
def test_a_damaged_control_log_is_named(cli: TierCli) -> None:
    slot = max(cli.tier.glob(".tiered-compactor/partitions/orders-0/log/*"))
    slot.write_bytes(slot.read_bytes()[:-20])
    answer = cli.ask("verify")
    assert (answer.code, answer.document["problems"][0]["kind"]) == (3, "control-log")
    assert slot.name.split(".")[0] in answer.stderr


@pytest.mark.check  # `recompact` asks Java for its version
@pytest.mark.damages
def test_a_lost_control_record_is_named_and_nothing_is_built_on_what_came_before_it(cli: TierCli, tmp_path: Path) -> None:
    cli.run()
    (cli.folder / "state").rename(tmp_path / "of another machine")  # it remembers more than the tier has now
    slots = sorted(cli.tier.glob(".tiered-compactor/partitions/orders-0/log/*"))
    slots[2].unlink()
    before = cli.digest()
    answer = cli.ask("verify")
    assert (answer.code, [(p["severity"], p["kind"]) for p in answer.document["problems"]]) == (3, [("error", "control-log")])
    assert slots[2].name in answer.stderr
    commands = ["topics", "plan", f"export orders-0 {tmp_path / 'out'}", "segments list orders-0", "checkpoints list", "recompact"]
    commands += ["retire", "retire --dry-run", "run --force", f"import {tmp_path / 'log'} --topic orders --partition 0"]
    for command in commands:
        answer = cli.ask(*command.split())
        assert answer.code == 3, command
        assert "orders-0 ends at slot 2" in answer.stderr, command
        assert "topics delete orders-0" in answer.stderr, command
    assert cli.digest() == before
    assert not (tmp_path / "out").exists()


@pytest.mark.damages
@pytest.mark.parametrize("lost", ["the last record", "all of it"])
def test_a_control_log_that_is_shorter_than_it_was_is_noticed(lost: str, cli: TierCli, tmp_path: Path) -> None:
    cli.run()
    assert cli.do("topics")["partitions"]  # this machine remembers it
    slots = sorted(cli.tier.glob(".tiered-compactor/partitions/orders-0/log/*"))
    for slot in slots if lost == "all of it" else slots[-1:]:
        slot.unlink()
    before = cli.digest()
    assert cli.ask("verify").code == 3
    commands = ["topics", "plan", "run --force", "retire", f"export orders-0 {tmp_path / 'out'}", "explain orders-0"]
    for command in [*commands, f"import {tmp_path / 'log'} --topic orders --partition 0"]:
        answer = cli.ask(*command.split())
        assert answer.code == 3, command
        assert "the records between are missing" in answer.stderr
    assert cli.digest() == before


@pytest.mark.parametrize("lost", [slice(None), slice(2, 3), slice(-1, None)])
def test_a_partition_whose_control_log_is_lost_can_be_taken_out(lost: slice, cli: TierCli, tmp_path: Path) -> None:
    cli.run()
    for slot in sorted(cli.tier.glob(".tiered-compactor/partitions/orders-0/log/*"))[lost]:
        slot.unlink()
    assert cli.ask("verify").code == 3
    cli.do("topics", "delete", "orders-0")
    assert cli.do("topics")["partitions"] == []
    assert cli.do("verify")["ok"]
    assert cli.do("retire")["swept"] == [], "they are not old enough"
    cli.bring(tmp_path / "log")
    assert cli.run()["status"] == "cleaned"
    cli.set(publish={"orphan_age_ms": 0})
    assert cli.do("retire")["swept"]
    assert cli.do("verify")["ok"]


def test_a_control_log_that_was_set_back_is_not_believed_from_memory(cli: TierCli, tmp_path: Path) -> None:
    """A tier of before there were bounds: nothing says how long the log was, and all commands agree on what it says now."""
    folder = cli.tier / ".tiered-compactor/partitions/orders-0/log"
    backup = {path.name for path in folder.iterdir()}
    cli.run()
    for path in sorted((cli.tier / ".tiered-compactor/catalog/log").iterdir()):
        document = json.loads(path.read_bytes())["record"]
        document["version"] = 1
        document["body"].pop("slot", None)
        path.write_bytes(append_checksum(json.dumps(document).encode()))
    cleaned = cli.do("topics")["partitions"]
    for path in set(folder.iterdir()) - {folder / name for name in backup}:
        path.unlink()
    (shown,) = cli.do("topics")["partitions"]
    assert [shown] != cleaned
    exported = cli.do("export", "orders-0", tmp_path / "out")
    assert (exported.pop("skipped"), exported.pop("open_transactions")) == ([], [])
    assert {field: shown[field] for field in exported} == exported
    (row,) = cli.do("run", "--force")["partitions"]
    assert row["status"] == "cleaned"


@pytest.mark.damages
@pytest.mark.parametrize(("field", "value", "word"), [("size_bytes", 999, "999 bytes"), ("max_timestamp_ms", 7, "of 1970-01-01T00:00:00Z")])
def test_metadata_that_does_not_fit_its_object(field: str, value: int, word: str, cli: TierCli) -> None:
    record = cli.tier / f".tiered-compactor/partitions/orders-0/log/{2:020}.json"
    document = json.loads(record.read_bytes())["record"]
    document["body"]["segments"][1][field] = value
    record.write_bytes(append_checksum(json.dumps(document).encode()))
    answer = cli.ask("verify")
    assert (answer.code, [problem["kind"] for problem in answer.document["problems"]]) == (3, ["metadata"])
    assert word in answer.stderr


@pytest.mark.damages
def test_a_tier_whose_identity_is_lost_gets_no_other(cli: TierCli, tmp_path: Path) -> None:
    slots = sorted(cli.tier.glob(".tiered-compactor/catalog/log/*"))
    kept = slots[1].read_bytes()
    slots[1].unlink()
    answer = cli.ask("verify")
    assert (answer.code, answer.document["problems"][0]["kind"]) == (3, "control-log")
    slots[1].write_bytes(kept)
    slots[0].unlink()
    before = cli.digest()
    for command in ("topics", "verify", f"import {tmp_path / 'log'} --topic orders --partition 1"):
        answer = cli.ask(*command.split())
        assert answer.code == 3, command
        assert "an object before it is missing" in answer.stderr
    assert cli.digest() == before


def test_strange_objects_are_notes_and_stay(cli: TierCli) -> None:
    strange = [cli.tier / "orders-0" / "README", cli.tier / ".tiered-compactor/partitions/orders-0/heartbeat/README"]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_text("who put this here?")
    document = cli.do("verify")
    assert document["ok"]
    assert [(p["kind"], p["object"]) for p in document["problems"]] == [("stranger", "orders-0/README")]
    assert cli.do("retire")["swept"] == []
    assert all(path.exists() for path in strange)


def test_one_segment_at_a_time_within_the_disk_budget(cli: TierCli) -> None:
    cli.set(cleaner={"disk_budget_bytes": 4096})
    answer = cli.ask("verify")
    assert answer.code == 6
    needed = int(answer.stderr.split("at least ")[1].split()[0].strip(".,"))
    cli.set(cleaner={"disk_budget_bytes": needed})
    assert cli.do("verify")["ok"]


# ---- files beside a sound log: wrong, though they are what was recorded -----------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> SourceSegment:
    log = LogBuilder(10).add("a=1 b=1; 7t: a=2; 7 aborts; 8 commits")
    (path,) = log.write(tmp_path / "log").glob("*.log")
    return open_source_segment(0, path, 10, 20, 0, -1, 1 << 20)


def problems(source: SourceSegment, kind: str, data: bytes) -> list[str]:
    return [f"{found}: {detail}" for found, detail in segment_file_problems(source, {kind: data})]


def test_a_leader_epoch_checkpoint_lacks_only_epochs_before_the_log_start(source: SourceSegment) -> None:
    reported = (
        EpochEntry(LeaderEpoch(2), Offset(1739)),
        EpochEntry(LeaderEpoch(3), Offset(2082)),
        EpochEntry(LeaderEpoch(5), Offset(4000)),
    )

    def found(*entries: EpochEntry, log_start: int) -> list[str]:
        data = format_leader_epoch_checkpoint(entries).encode()
        return [kind for kind, _ in segment_file_problems(source, {"leader-epoch-checkpoint": data}, reported, log_start)]

    assert found(*reported, log_start=0) == []
    assert (
        found(EpochEntry(LeaderEpoch(3), Offset(2500)), EpochEntry(LeaderEpoch(5), Offset(4000)), log_start=2500) == []
    )  # brokers cut it there
    assert found(EpochEntry(LeaderEpoch(3), Offset(2500)), EpochEntry(LeaderEpoch(5), Offset(4000)), log_start=2499) == [
        "leader-epoch-checkpoint"
    ]
    assert found(EpochEntry(LeaderEpoch(5), Offset(4000)), log_start=2500) == ["leader-epoch-checkpoint"]


def test_indexes_that_do_not_fit_their_log(source: SourceSegment) -> None:
    second = int(source.table.position[1])
    assert problems(source, "index", struct.pack(">ii", 2, second)) == []
    assert "point at a batch" in problems(source, "index", struct.pack(">ii", 2, second + 1))[0]
    assert "below its offset" in problems(source, "index", struct.pack(">ii", 3, second))[0]
    assert "whole number" in problems(source, "index", bytes(7))[0]
    assert "ascend" in problems(source, "index", struct.pack(">ii", 2, second) * 2)[0]
    assert problems(source, "timeindex", struct.pack(">qi", 1001, 1) + struct.pack(">qi", 1002, 2)) == []
    assert "ascend" in problems(source, "timeindex", struct.pack(">qi", 1001, 1) * 2)[0]
    assert "latest timestamp" in problems(source, "timeindex", struct.pack(">qi", 1001, 2))[0]
    assert "outside" in problems(source, "timeindex", struct.pack(">qi", 1001, 10))[0]
    assert "outside" in problems(source, "timeindex", struct.pack(">qi", 1001, -1))[0]
    assert "whole number" in problems(source, "timeindex", bytes(11))[0]


def test_transaction_indexes_that_do_not_fit_their_log(source: SourceSegment) -> None:
    def entry(first: int, last: int) -> bytes:
        return struct.pack(">hqqqq", 0, 7, first, last, last + 1)

    assert problems(source, "txnindex", entry(12, 13)) == []
    assert problems(source, "txnindex", entry(3, 13)) == []  # it began in an earlier segment
    assert "marker" in problems(source, "txnindex", entry(12, 14))[0]
    assert "ended in this segment" in problems(source, "txnindex", entry(12, 25))[0]
    assert "ended in this segment" in problems(source, "txnindex", entry(13, 12))[0]
    assert "ended in this segment" in problems(source, "txnindex", entry(12, 13) * 2)[0]
    assert "34" in problems(source, "txnindex", bytes(33))[0]


def test_snapshots_and_checkpoints_that_cannot_be_read(source: SourceSegment) -> None:
    assert problems(source, "snapshot", b"nonsense that is no snapshot")[0].startswith("snapshot: ")
    assert problems(source, "leader-epoch-checkpoint", b"0\n1\n0 0\n") == []
    assert problems(source, "leader-epoch-checkpoint", b"0\n2\n0 0\n")[0].startswith("leader-epoch-checkpoint: ")
    assert problems(source, "leader-epoch-checkpoint", b"\xff")[0].startswith("leader-epoch-checkpoint: ")
