"""Import again: increments, replicas that roll elsewhere, live directories, another log under the same name, deleted partitions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from compactor.access.tier import Tier
from compactor.errors import BadData, UsageError
from compactor.features.imports import staged_files as intake
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.model.ids import TopicPartition
from tests.builders import LogBuilder, name_topic
from tests.support.side_broker import PartitionStory, Replica, SideCluster
from tests.support.tier_cli import TierCli, batches_of, latest

ORDERS = TopicPartition("orders", 0)
SETTINGS = {"publish": {"grace_ms": 0, "orphan_age_ms": 0}}


def batches(folder: Path) -> list[bytes]:
    return [batch.raw for batch in batches_of(folder)]


class Broker:
    """A log that grows, and its directory as replicas have it, who roll where they like."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = LogBuilder()
        self.epochs = "0 0\n"

    def write(self, count: int = 4) -> None:
        for number in range(count):
            self.log.put(f"k{number % 3}={self.log.next_offset}", f"x{self.log.next_offset}=1")

    def roll(self) -> None:
        self.log.roll()

    def replica(self, name: str, *rolls: int, start: int = 0) -> Path:
        """The log as a directory with a segment from each of these offsets on."""
        folder = self.folder / name / "orders-0"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        written = [batch for _, parts in self.log.segments for batch in parts]
        bases = sorted({start, *rolls})
        for base in bases:
            (folder / f"{base:020}.log").touch()
        for raw in written:
            offset = int.from_bytes(raw[:8], "big")
            if offset >= start:
                base = max(base for base in bases if base <= offset)
                with (folder / f"{base:020}.log").open("ab") as file:
                    file.write(raw)
        (folder / "leader-epoch-checkpoint").write_text(f"0\n{self.epochs.count(chr(10))}\n{self.epochs}")
        return name_topic(folder)


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    made = Broker(tmp_path / "brokers")
    made.write()
    return made


def test_the_directory_says_whose_it_is(cli: TierCli, broker: Broker) -> None:
    folder = broker.replica("a")
    assert cli.do("import", folder) == {"segments": 1, "bytes": 4 * 81, "start_offset": 0, "end_offset": 7}
    again = cli.ask("import", folder)
    assert (again.code, again.document) == (0, {"segments": 0, "bytes": 0, "start_offset": 8, "end_offset": 7})
    assert "nothing to do" in again.stderr
    other = cli.ask("import", folder, "--partition", 3)
    assert other.code == 0
    assert "imported as orders-3" in other.stderr
    nameless = broker.folder / "something"
    shutil.copytree(folder, nameless)
    assert "--topic" in cli.ask("import", nameless).stderr
    assert cli.ask("import", nameless).code == 2


def test_increments_of_replicas_that_roll_elsewhere(cli: TierCli, broker: Broker) -> None:
    """Position is the tier's last offset + 1: a new leader's segment that holds it is cut there, also once the tier is compacted."""
    cli.do("import", broker.replica("a", 4))
    broker.write()
    assert cli.do("import", broker.replica("b", 6))["start_offset"] == 8
    assert cli.run("orders-0")["status"] == "cleaned"
    broker.write(5)
    assert cli.do("import", broker.replica("a", 4, 10, 20)) == {"segments": 2, "bytes": 5 * 83, "start_offset": 16, "end_offset": 25}
    assert cli.ask("import", broker.replica("c")).document["segments"] == 0
    assert latest(cli.export(broker.folder / "out")) == latest(broker.replica("whole"))
    assert cli.do("verify")["ok"]


def test_retention_may_have_cut_what_the_tier_has(cli: TierCli, broker: Broker) -> None:
    cli.do("import", broker.replica("a"))
    broker.write()
    assert cli.do("import", broker.replica("b", start=6))["end_offset"] == 15
    broker.write()
    (gap,) = [cli.ask("import", broker.replica("c", start=18))]
    assert (gap.code, gap.document) == (3, None)
    assert "--allow-gaps" in gap.stderr
    assert cli.do("import", broker.replica("c", start=18), "--allow-gaps")["start_offset"] == 16
    assert cli.do("verify")["ok"]


def test_another_log_under_the_same_name(cli: TierCli, broker: Broker, tmp_path: Path) -> None:
    cli.do("import", broker.replica("a"))
    stranger = Broker(tmp_path / "elsewhere")
    stranger.log.time = 5_000
    stranger.write(9)
    before = cli.digest()
    for compacted in (False, True):
        answer = cli.ask("import", stranger.replica("a", 4))
        assert (answer.code, answer.document) == (3, None)
        assert "other content under known offsets" in answer.stderr
        if not compacted:
            assert cli.digest() == before
            assert cli.run("orders-0")["status"] == "cleaned"


@pytest.mark.parametrize("batches", [3, 20, 40, 56, 80], ids="{} batches".format)
def test_another_log_is_told_wherever_it_ends(batches: int, cli: TierCli, broker: Broker, tmp_path: Path) -> None:
    """Sixteen batches are remembered: of a directory that ends before them, the records are compared."""
    broker.write(56)
    cli.do("import", broker.replica("a", 30, 70, 100))
    stranger = Broker(tmp_path / "elsewhere")
    stranger.log.time += 1
    stranger.write(batches)
    older = Broker(tmp_path / "older")
    older.write()
    older.write(batches)
    for compacted in (False, True):
        before = cli.digest()
        for folder in (stranger.replica("a"), stranger.replica("b", 4)):
            answer = cli.ask("import", folder)
            assert (answer.code, answer.document) == (3, None)
            assert "other content under known offsets" in answer.stderr
        answer = cli.ask("import", stranger.replica("live", 2 * batches - 2), "--live")  # with one batch that is not sealed
        assert (answer.code, answer.document) == (3, None)
        assert cli.digest() == before
        if batches <= 56:
            assert cli.do("import", older.replica("live", 2 * batches), "--live")["segments"] == 0
            assert cli.do("import", older.replica("a", 2))["segments"] == 0
        if not compacted:
            assert cli.run("orders-0")["status"] == "cleaned"


def test_live_leaves_out_the_newest_segment(cli: TierCli, broker: Broker) -> None:
    folder = broker.replica("a", 4)
    assert cli.do("import", folder, "--live")["end_offset"] == 3
    assert cli.do("import", folder, "--live")["segments"] == 0
    broker.write()
    folder = broker.replica("a", 4, 8, 12)
    (folder / f"{8:020}.log.cleaned").touch()
    (folder / f"{0:020}.log").rename(folder / f"{0:020}.log.deleted")
    assert cli.do("import", folder, "--live") == {"segments": 2, "bytes": 3 * 81 + 83, "start_offset": 4, "end_offset": 11}
    assert cli.do("import", broker.replica("b", 12))["end_offset"] == 15
    assert latest(cli.export(broker.folder / "out")) == latest(broker.replica("whole"))


def test_a_truncation_below_all_that_is_sealed_in_a_live_log(cli: TierCli, broker: Broker) -> None:
    """Only the newest segment, which is left out, would tell by its batches; the leader epochs tell now."""
    broker.write()
    missed = broker.replica("missed", 4)
    cli.do("import", broker.replica("a", 4))
    truncated(broker, 6)
    folder = broker.replica("a", 4)
    cli.refused("import", folder, "--live", says="--accept-truncation")
    cli.do("import", folder, "--live", "--accept-truncation")
    assert cli.do("topics")["partitions"][0]["end_offset"] == 5
    # Nothing of the new branch has come yet: a replica that has missed the truncation does not bring the old one back.
    cli.refused("import", missed, says="has missed a truncation")
    assert cli.do("import", folder)["start_offset"] == 6


@pytest.mark.parametrize("begin", [60, 75])
def test_a_replica_that_begins_in_an_accepted_gap_is_no_truncation(begin: int, cli: TierCli, tmp_path: Path) -> None:
    """Retention has moved the first leader epoch of each directory up to the directory's beginning: epoch 1 began at 50."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    story, replica, other = PartitionStory(SideCluster()), *(Replica(tmp_path / name / "orders-0") for name in ("one", "two"))
    story.lead(1, epoch=0)
    story.write(replica, 50, per_segment=5)
    cli.do("import", replica.folder)
    story.lead(1, epoch=1)
    story.write(replica, 50, per_segment=5)
    story.follow(other, per_segment=5)
    replica.stage_until(80)
    replica.unlink_staged()
    assert cli.do("import", replica.folder, "--allow-gaps")["start_offset"] == 50
    story.write(other, 20, per_segment=5)
    other.stage_until(begin)
    other.unlink_staged()
    assert cli.do("import", other.folder)["start_offset"] == 100
    out = tmp_path / "out"
    cli.do("export", "orders-0", out)
    assert [batch.raw for batch in batches_of(out)] == [*story.written[:50], *story.written[80:]]


@pytest.mark.timeout(120)
def test_a_replica_without_an_epoch_that_begins_after_the_tiers_end_is_refused(cli: TierCli, tmp_path: Path) -> None:
    """The leader's epoch 1 begins in its active segment, which is not imported. The other replica has epoch 0 there."""
    for name in ("leader", "stale"):
        (tmp_path / name).mkdir()
    story, leader, stale = PartitionStory(SideCluster()), *(Replica(tmp_path / name / "orders-0") for name in ("leader", "stale"))
    story.lead(1, epoch=0)
    story.write(stale, 40, per_segment=10)
    story.truncate(25)
    story.follow(leader, per_segment=10)
    story.lead(2, epoch=1)
    story.write(leader, 2, per_segment=10)
    assert cli.do("import", leader.folder, "--live")["end_offset"] == 19
    cli.refused("import", stale.folder, says="has missed a truncation")


def test_what_is_asked_for_does_not_go_with_the_directory(cli: TierCli, broker: Broker, tmp_path: Path) -> None:
    folder = broker.replica("a")
    cases: list[tuple[list[object], str]] = [
        ([folder, "--topics", "other"], "--topics"),
        ([folder.parent, "--topic", "orders"], "holds directories of partitions"),
        ([tmp_path / "nowhere"], "there is no directory"),
    ]
    for arguments, words in cases:
        answer = cli.ask("import", *arguments)
        assert (answer.code, words in answer.stderr) == (2, True), answer
    nobody = cli.ask("import", folder.parent, "--topics", "order")
    assert (nobody.code, nobody.document, "matches" in nobody.stderr) == (0, {"partitions": []}, True)


def test_a_link_is_called_what_the_broker_calls_it(cli: TierCli, broker: Broker, tmp_path: Path) -> None:
    """A partition that was moved to another disk."""
    shutil.move(broker.replica("a"), tmp_path / "disk2")
    root = tmp_path / "kafka-logs"
    root.mkdir()
    (root / "orders-0").symlink_to(tmp_path / "disk2")
    (row,) = cli.do("import", root)["partitions"]
    assert (row["topic"], row["partition"], row["status"]) == ("orders", 0, "imported")
    assert cli.do("import", root / "orders-0")["segments"] == 0


def test_a_whole_broker(cli: TierCli, broker: Broker, tmp_path: Path) -> None:
    root = tmp_path / "kafka-logs"
    for number in range(3):
        shutil.copytree(broker.replica("a", 4), root / f"orders-{number}")
        shutil.copytree(broker.replica("a"), root / f"other-{number}")
    shutil.copytree(broker.replica("a"), root / "__cluster_metadata-0")  # KRaft's own log is no topic
    (root / "orders-7.0123abc-delete").mkdir()
    (root / "empty-0").mkdir()
    (root / "recovery-point-offset-checkpoint").write_text("0\n0\n")
    damaged = root / "orders-1" / f"{4:020}.log"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    answer = cli.ask("import", root, "--topics", "orders|empty")
    assert answer.code == 3
    rows = {(row["topic"], row["partition"]): row for row in answer.document["partitions"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        ("empty", 0): "up_to_date",
        ("orders", 0): "imported",
        ("orders", 1): "refused",
        ("orders", 2): "imported",
    }
    assert "truncated" in rows["orders", 1]["reason"]
    assert {key: rows["orders", 0][key] for key in ("segments", "bytes", "start_offset", "end_offset", "reason")} == {
        "segments": 2, "bytes": 4 * 81, "start_offset": 0, "end_offset": 7, "reason": "",
    }  # fmt: skip
    assert [row["status"] for row in cli.do("import", root, "--topics", "other")["partitions"]] == ["imported"] * 3
    assert cli.ask("import", root, "--topics", "(").code == 2
    assert {row["topic"] for row in cli.ask("import", root).document["partitions"]} == {"empty", "orders", "other"}
    assert len(cli.do("topics")["partitions"]) == 5


def test_offsets_before_the_first(cli: TierCli, broker: Broker) -> None:
    broker.write()
    cli.do("import", broker.replica("late", start=6))
    assert cli.do("import", broker.replica("whole", 4)) == {"segments": 2, "bytes": 3 * 81, "start_offset": 0, "end_offset": 5}
    assert batches(cli.export(broker.folder / "out")) == batches(broker.replica("whole"))
    assert cli.do("verify")["ok"]


def test_no_offsets_before_what_is_compacted(cli: TierCli, broker: Broker) -> None:
    broker.write()
    cli.do("import", broker.replica("late", start=6))
    assert cli.run("orders-0")["status"] == "cleaned"
    cli.refused("import", broker.replica("whole"), says="was compacted up to offset 16")
    broker.write()
    answer = cli.ask("import", broker.replica("whole"))  # what it has at the end is taken all the same
    assert (answer.code, answer.document["start_offset"]) == (0, 16)
    assert "cannot be added before" in answer.stderr


def truncated(broker: Broker, offset: int) -> None:
    """An unclean election: the log goes on from ``offset`` in a new epoch."""
    kept = [(base, [raw for raw in parts if int.from_bytes(raw[:8], "big") < offset]) for base, parts in broker.log.segments]
    broker.log.segments = kept
    broker.log.next_offset = offset
    broker.log.leader_epoch += 1
    broker.log.time += 1_000_000
    broker.epochs += f"{broker.log.leader_epoch} {offset}\n"
    broker.write()


@pytest.mark.parametrize("rolls", [(), (12,), (10,)])
def test_a_truncated_log(rolls: tuple[int, ...], cli: TierCli, broker: Broker) -> None:
    broker.write()
    cli.do("import", broker.replica("a", *rolls))
    truncated(broker, 12)
    folder = broker.replica("a", 6)
    before = cli.digest()
    answer = cli.ask("import", folder)
    assert (answer.code, answer.document) == (3, None)
    for word in ("from offset 12 on", "epochs 0 from 0, this log has 0 from 0, 1 from 12", "--accept-truncation"):
        assert word in answer.stderr
    assert cli.digest() == before
    accepted = cli.ask("import", folder, "--accept-truncation")
    assert accepted.document["start_offset"] == 12
    assert "were discarded" in accepted.stderr
    assert batches(cli.export(broker.folder / "out")) == batches(broker.replica("whole"))
    assert cli.do("retire")["deleted"]
    assert cli.do("verify") == {"ok": True, "problems": []}
    assert cli.do("import", folder)["segments"] == 0


def test_a_truncation_undoes_what_was_compacted_beyond_it(cli: TierCli, broker: Broker) -> None:
    broker.write()
    cli.do("import", broker.replica("a", 4, 12))
    assert cli.run("orders-0")["status"] == "cleaned"
    truncated(broker, 10)
    cli.do("import", broker.replica("b"), "--accept-truncation")
    assert batches(cli.export(broker.folder / "out")) == batches(broker.replica("whole"))
    assert cli.run("orders-0")["first_dirty_offset"] <= 10
    assert latest(cli.export(broker.folder / "after")) == latest(broker.replica("whole"))


def test_a_truncation_behind_a_round_that_is_final(cli: TierCli, broker: Broker) -> None:
    broker.write()
    cli.do("import", broker.replica("a", 4, 12))
    cli.run("orders-0")
    assert cli.do("retire")["deleted"]
    truncated(broker, 10)
    before = cli.digest()
    cli.refused("import", broker.replica("b"), "--accept-truncation", says="--accept-loss")
    assert cli.digest() == before
    answer = cli.ask("import", broker.replica("b"), "--accept-truncation", "--accept-loss")
    assert answer.code == 0
    assert "cannot be undone any more" in answer.stderr
    assert cli.do("checkpoints", "show", "orders-0")["cleaner_offsets"][-1]["offset"] <= 10
    view = latest(cli.export(broker.folder / "out"))
    assert {key: value for key, value in latest(broker.replica("whole")).items() if view.get(key) != value} == {}
    assert cli.do("verify")["ok"]


def test_an_older_copy_is_no_truncation(cli: TierCli, broker: Broker) -> None:
    older = broker.replica("old")
    truncated(broker, 8)
    cli.do("import", broker.replica("a"))
    assert cli.do("import", older)["segments"] == 0
    stale = Broker(broker.folder / "stale")
    stale.write(6)
    cli.refused("import", stale.replica("a"), says="has missed a truncation")
    assert cli.ask("import", stale.replica("a"), "--accept-truncation").code == 3


def test_a_checkpoint_that_retention_has_cut_extends_the_lineage(cli: TierCli, broker: Broker) -> None:
    cli.do("import", broker.replica("a"))
    truncated(broker, 8)
    folder = broker.replica("b", start=6)
    (folder / "leader-epoch-checkpoint").write_text("0\n2\n0 6\n1 8\n")
    cli.do("import", folder)
    state = cli.open().open_partition_log(ORDERS).refresh()
    assert [(entry.epoch, entry.start_offset) for entry in state.lineage] == [(0, 0), (1, 8)]


def test_a_partition_is_deleted_and_imported_anew(cli: TierCli, broker: Broker) -> None:
    cli.do("import", broker.replica("a"))
    cli.run("orders-0")
    document = cli.do("topics", "delete", "orders-0")
    assert (document["status"], document["end_offset"]) == ("deleted", 7)
    assert cli.do("topics")["partitions"] == []
    assert cli.ask("topics", "delete", "orders-0").code == 2
    assert cli.ask("topics", "delete", "orders-9").code == 2
    tier = cli.open()
    with pytest.raises(UsageError, match="not filled again"):
        bring(tier, broker.replica("a"), refill=False)
    cli.do("retire")
    assert list((cli.tier / "orders-0").glob("0*")) == []
    assert cli.do("import", broker.replica("a"))["end_offset"] == 7
    assert batches(cli.export(broker.folder / "out")) == batches(broker.replica("a"))
    assert cli.do("verify")["ok"]


def bring(tier: Tier, folder: Path, **options: Any) -> Any:
    return import_directory(
        tier, folder, ORDERS, tier.settings.cleaner_settings_for_topic("orders").cleaner_policy(), options=ImportOptions(**options)
    )


def test_an_agent_brings_what_is_below_the_high_watermark(cli: TierCli, broker: Broker) -> None:
    broker.write()
    tier, folder = cli.open(), broker.replica("a", 4, 8)
    assert bring(tier, folder, live=True, below=6).end_offset == 3
    assert bring(tier, folder, live=True, below=8).end_offset == 7
    assert bring(tier, folder, live=True, below=16).import_status == "up_to_date"


@pytest.mark.parametrize("live", [False, True])
def test_a_segment_that_changes_while_it_is_imported(live: bool, cli: TierCli, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, folder = cli.open(), broker.replica("a", 4)
    segment = folder / f"{0:020}.log"

    def shrink(one: intake.IncomingSegment) -> None:
        segment.write_bytes(segment.read_bytes()[:-100])
        one.check_source_unchanged()

    monkeypatch.setattr(intake, "require_source_unchanged", shrink)
    with pytest.raises(BadData, match="changed while it was imported"):
        bring(tier, folder, live=live)
    assert cli.do("topics")["partitions"] == []


def test_negative_timestamps_are_told_at_the_door(cli: TierCli, tmp_path: Path) -> None:
    log = LogBuilder(time=-5000).add("a=1 b=2")
    folder = log.write(tmp_path / "orders-0")
    answer = cli.ask("import", folder)
    assert answer.code == 0
    assert "2 records of orders-0 have negative timestamps" in answer.stderr
    document = cli.do("verify")
    assert document["ok"]
    assert [(row["severity"], row["kind"]) for row in document["problems"]] == [("note", "negative-timestamp")]
    for _ in range(2):  # the second time from what this machine remembers
        (planned,) = cli.do("plan")["partitions"]
        assert planned["negative_timestamps"] == 2
    assert "orders-0: 2 records have negative timestamps" in cli.ask("plan", output="table").document


def test_a_round_refuses_what_kafka_refuses(cli: TierCli, tmp_path: Path) -> None:
    """The batch must be written anew, and keeps a record with a negative timestamp."""
    log = LogBuilder(time=-5000).add("a=1 b=2")
    log.time = 5
    log.add("a=3; /; c=1")
    cli.do("import", log.write(tmp_path / "orders-0"))
    answer = cli.ask("run", "--force")
    assert (answer.code, answer.document["partitions"][0]["status"]) == (3, "quarantined")
    assert "negative timestamp" in answer.stderr
    assert latest(cli.export(tmp_path / "out")) == latest(tmp_path / "orders-0")
