"""`repair` on real tiers: what is made good from where, and what is refused. After each repair `verify` finds nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from compactor.control.records import LeadershipAcquired
from compactor.errors import Fenced
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.producers import parse_producer_snapshot_file
from compactor.upkeep.repair import DirectoryRepairSource, repair_partition
from tests.builders import TOPIC_ID, LogBuilder, log_of, name_topic
from tests.features.imports.test_import_truncated import Log, end_of
from tests.support.tier_cli import Answer, TierCli, visible

KINDS = ("log", "index", "timeindex", "txnindex", "snapshot", "leader-epoch-checkpoint")


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    log = LogBuilder()
    for number in range(3):
        if number:
            log.roll()
        for _ in range(3):
            log.put("a=1", "b=2", f"only-{number}=1")
        log.add("7t: c=3; 7 aborts")
    return log.write(tmp_path / "logs" / "orders-0")


@pytest.fixture
def cli(tmp_path: Path, log_dir: Path) -> TierCli:
    cli = TierCli(tmp_path / "cli", {"cleaner": {"index_interval_bytes": 64}, "publish": {"grace_ms": 3_600_000}})
    cli.bring(log_dir)
    return cli


def objects(cli: TierCli, kind: str) -> list[Path]:
    return sorted(cli.tier.glob(f"orders-0/*.{kind}"))


def data_objects(digests: dict[str, str]) -> list[str]:
    return [key for key in digests if key.startswith("orders-0/") and ".object-store" not in key]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def repaired(answer: Answer) -> list[tuple[str, str]]:
    return [(one["how"], one["object"].rpartition(".")[2]) for one in answer.document["repaired"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_object_is_created_again_under_its_key(kind: str, cli: TierCli, log_dir: Path, tmp_path: Path) -> None:
    before = cli.digest()
    victim = objects(cli, kind)[1]
    victim.unlink()
    assert cli.ask("verify").code == 3
    answer = cli.ask("repair", "orders-0", "--from", log_dir.parent)
    assert (answer.code, repaired(answer)) == (0, [("created", kind)])
    after = cli.digest()
    assert {key: after[key] for key in data_objects(after)} == {key: before[key] for key in data_objects(before)}
    assert cli.do("verify") == {"ok": True, "problems": []}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_object_is_replaced_under_a_new_id_and_stays_for_grace(kind: str, cli: TierCli, log_dir: Path, tmp_path: Path) -> None:
    read = visible(cli.export(tmp_path / "before"))
    victim = objects(cli, kind)[1]
    flip(victim)
    damaged = victim.read_bytes()
    answer = cli.ask("repair", "orders-0", "--from", log_dir)
    assert (answer.code, repaired(answer)) == (0, [("replaced", kind)])
    (one,) = answer.document["repaired"]
    assert (cli.tier / one["new_object"]).is_file()
    assert one["new_object"] != one["object"] == f"orders-0/{victim.name}"
    assert victim.read_bytes() == damaged, "an object is never overwritten"
    assert cli.ask("verify").document["ok"]
    assert visible(cli.export(tmp_path / "after")) == read
    (run,) = cli.do("runs", "list", "orders-0")["runs"]
    assert (run["status"], run["undoable"], run["next_dirty_offset"]) == ("repaired", False, 0)
    assert cli.ask("undo", run["run_id"]).code == 2
    row = cli.run()
    assert (row["status"], row["first_dirty_offset"]) == ("cleaned", 0)


def test_a_damaged_index_needs_no_source_but_the_log_beside_it(cli: TierCli) -> None:
    for kind in KINDS[1:]:
        flip(objects(cli, kind)[1])
    answer = cli.ask("repair", "orders-0")
    assert answer.code == 0
    assert sorted(repaired(answer)) == sorted(("replaced", kind) for kind in KINDS[1:])
    assert cli.ask("verify").document["ok"]


@pytest.fixture
def open_transactions(tmp_path: Path) -> TierCli:
    """Pid 7's transaction begins at offset 1, in the second of four segments, and is never decided."""
    log = log_of("5: p=old; /; 7t: p=undecided; /; 6: b=1; /; 6: c=1")
    cli = TierCli(tmp_path / "open", {"publish": {"grace_ms": 0}})
    cli.bring(log.write(tmp_path / "open-logs" / "orders-0"))
    return cli


def producers(cli: TierCli) -> list[list[tuple[int, int]]]:
    """Return, for each live segment, the producer ids and first offsets of open transactions in its snapshot."""
    live = [one["id"] for one in cli.do("segments", "list", "orders-0")["segments"] if not one["replaced_by"]]
    found = {
        path.stem[-len(live[0]) :]: parse_producer_snapshot_file(path.read_bytes(), path.name).entries for path in objects(cli, "snapshot")
    }
    return [[(int(entry["producer_id"]), int(entry["txn_first_offset"])) for entry in found[one]] for one in live]


@pytest.mark.parametrize("victims", [(3,), (2, 3), (0, 1, 2, 3)])
def test_snapshots_in_a_row_are_built_again_from_the_last_known_producer_states(
    victims: tuple[int, ...], open_transactions: TierCli
) -> None:
    cli = open_transactions
    before, written = producers(cli), objects(cli, "snapshot")
    for number in victims:
        written[number].unlink()
    answer = cli.ask("repair", "orders-0")
    assert (answer.code, repaired(answer)) == (0, [("created", "snapshot")] * len(victims))
    assert producers(cli) == before == [[(5, -1)], [(5, -1), (7, 1)], [(5, -1), (6, -1), (7, 1)], [(5, -1), (6, -1), (7, 1)]]


@pytest.mark.damages
@pytest.mark.parametrize("kind", ["snapshot", "txnindex"])
def test_producer_states_are_never_guessed(kind: str, cli: TierCli, log_dir: Path) -> None:
    """Where the log begins later than at 0, nobody knows the producers before it: a transaction may be open."""
    cli.do("topics", "delete-records", "orders-0", "--before", "11")
    first = cli.do("segments", "list", "orders-0")["segments"][0]
    assert first["start_offset"] == 11
    (victim,) = [path for path in objects(cli, kind) if path.stem.endswith(first["id"])]
    shutil.copyfile(victim, log_dir / f"{first['end_offset'] + 1 if kind == 'snapshot' else 11:020}.{kind}")
    flip(victim)
    before = cli.digest()
    answer = cli.ask("repair", "orders-0")
    assert (answer.code, answer.document["repaired"], "producer states before it are not known" in answer.stderr) == (3, [], True)
    assert cli.digest() == before
    answer = cli.ask("repair", "orders-0", "--from", log_dir)
    assert (answer.code, repaired(answer)) == (0, [("replaced", kind)])


def test_a_segment_damaged_after_its_repair_comes_back_from_the_replaced_object(cli: TierCli, log_dir: Path) -> None:
    first, second, _ = objects(cli, "log")
    good = second.read_bytes()
    flip(second)
    (one,) = cli.do("repair", "orders-0", "--from", log_dir)["repaired"]
    flip(cli.tier / one["new_object"])
    flip(first)
    refused = cli.ask("repair", "orders-0")
    assert (refused.code, len(refused.document["unrepaired"]), "compacted" in refused.stderr) == (3, 2, False)
    second.write_bytes(good)  # from the store's versions, say
    answer = cli.ask("repair", "orders-0")
    assert (answer.code, repaired(answer), len(answer.document["unrepaired"])) == (3, [("replaced", "log")], 1)
    assert cli.ask("repair", "orders-0", "--from", log_dir).code == 0
    assert cli.ask("verify").document["ok"]


def test_a_replica_that_rolled_elsewhere_is_a_source(cli: TierCli, log_dir: Path, tmp_path: Path) -> None:
    joined = tmp_path / "replica" / "orders-0"
    joined.mkdir(parents=True)
    (joined / f"{0:020}.log").write_bytes(b"".join(path.read_bytes() for path in sorted(log_dir.glob("*.log"))))
    _, second, third = objects(cli, "log")
    second.unlink()
    flip(third)
    answer = cli.ask("repair", "orders-0", "--from", joined)
    assert (answer.code, repaired(answer)) == (0, [("created", "log"), ("replaced", "log")])
    assert cli.ask("verify").document["ok"]


@pytest.mark.damages
def test_a_log_with_other_bytes_is_refused_and_nothing_is_changed(cli: TierCli, tmp_path: Path) -> None:
    other = LogBuilder()
    for number in range(3):
        if number:
            other.roll()
        for _ in range(3):
            other.put("a=1", "b=X", f"only-{number}=1")
        other.add("7t: c=3; 7 aborts")
    wrong = other.write(tmp_path / "wrong" / "orders-0")
    objects(cli, "log")[0].unlink()
    flip(objects(cli, "log")[1])
    before = cli.digest()
    answer = cli.ask("repair", "orders-0", "--from", wrong)
    assert (answer.code, answer.document["repaired"], len(answer.document["unrepaired"])) == (3, [], 2)
    assert str(wrong) in answer.stderr
    assert cli.digest() == before
    cli.refused("repair", "orders-0", says="--from LOG_DIR|CONFIG")


@pytest.mark.damages
def test_a_dry_run_changes_nothing(cli: TierCli, log_dir: Path) -> None:
    objects(cli, "log")[0].unlink()
    flip(objects(cli, "log")[1])
    before = cli.digest()
    answer = cli.ask("repair", "orders-0", "--from", log_dir, "--dry-run")
    assert (answer.code, repaired(answer)) == (0, [("created", "log"), ("replaced", "log")])
    assert cli.digest() == before


def test_a_compacted_segment_comes_back_by_undoing_its_round_while_its_sources_wait(cli: TierCli, log_dir: Path, tmp_path: Path) -> None:
    read = visible(cli.export(tmp_path / "before"))
    cli.run()
    live = {one["id"] for one in cli.do("segments", "list", "orders-0")["segments"] if not one["replaced_by"]}
    compacted = [path for path in objects(cli, "log") if any(path.stem.endswith(name) for name in live)]
    flip(compacted[0])
    answer = cli.ask("repair", "orders-0", "--from", log_dir)
    assert (answer.code, repaired(answer)) == (0, [("undone", "log")])
    assert cli.ask("verify").document["ok"]
    assert visible(cli.export(tmp_path / "after")) == read
    assert cli.run()["status"] == "cleaned"


@pytest.mark.damages
def test_a_compacted_segment_without_its_sources_needs_a_tier_that_has_its_bytes(cli: TierCli, log_dir: Path, tmp_path: Path) -> None:
    cli.set(publish={"grace_ms": 0})
    cli.run()
    cli.do("retire")
    copy = TierCli(tmp_path / "copy", {"publish": {"grace_ms": 0}})
    shutil.copytree(cli.tier, copy.tier)
    flip(objects(cli, "log")[0])
    cli.refused("repair", "orders-0", "--from", log_dir, says="what it replaced is deleted")
    answer = cli.ask("repair", "orders-0", "--from", copy.config)
    assert (answer.code, repaired(answer)) == (0, [("replaced", "log")])
    assert cli.ask("verify").document["ok"]


def test_a_quarantined_partition_is_cleaned_again_after_the_repair(cli: TierCli, log_dir: Path) -> None:
    flip(objects(cli, "log")[1])
    assert cli.ask("run", "orders-0", "--force").code == 3
    explained = cli.do("explain", "orders-0")
    assert "repair orders-0 --from" in explained["answer"]
    assert "repair orders-0 --from" in cli.ask("verify", output="table").stderr
    assert cli.ask("repair", "orders-0", "--from", log_dir).code == 0
    assert cli.do("topics")["partitions"][0]["segments"] == 3
    assert cli.run()["status"] == "cleaned"


def test_a_tier_that_brokers_write_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = tmp_path / "brokers.toml"
    settings = {"url": (tmp_path / "tier").as_uri(), "state_dir": str(tmp_path / "state"), "kind": "kafka", "layout": "kafka-local"}
    config.write_text("\n".join(["[tier]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]))
    cli = TierCli(tmp_path / "unused")
    cli.config = config
    cli.refused("repair", "orders-0", "--from", tmp_path, code=2, says="record none")


def test_an_intact_partition_is_left_alone(cli: TierCli, log_dir: Path) -> None:
    before = cli.digest()
    answer = cli.ask("repair", "orders-0", "--from", log_dir)
    assert (answer.code, answer.document) == (0, {"repaired": [], "unrepaired": []})
    assert cli.digest() == before


@pytest.mark.damages
def test_a_truncation_below_a_repaired_round_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    """The round cannot be undone, because the repair came after it: the message says what is left to do."""
    cli, first = TierCli(tmp_path / "truncated", {"publish": {"grace_ms": 3_600_000}}), Log(tmp_path / "first").lead(0, 100)
    name_topic(first.path, TOPIC_ID)
    cli.do("import", first.path)
    cli.run()
    (live,) = [one["id"] for one in cli.do("segments", "list", "orders-0")["segments"] if not one["replaced_by"]]
    (index,) = cli.tier.glob(f"orders-0/*{live}.index")
    index.write_bytes(b"damaged" + index.read_bytes()[7:])
    assert cli.ask("repair", "orders-0").code == 0
    second = first.replica_until(40, "second").lead(1, 160)
    name_topic(second.path, TOPIC_ID)
    before = cli.digest()
    refused = cli.ask("import", second.path, "--accept-truncation")
    assert (refused.code, "it replaced damaged segments" in refused.stderr, "--accept-loss" in refused.stderr) == (3, True, True)
    assert cli.digest() == before
    assert cli.ask("import", second.path, "--accept-truncation", "--accept-loss").code == 0
    assert end_of(cli) == 199


@dataclass(frozen=True)
class SlowSource(DirectoryRepairSource):
    """A log directory whose last copy arrives so late that another compactor has taken the partition over."""

    take_over: Callable[[], None]
    reads: list[str] = field(default_factory=list)

    @override
    def write_copies(self, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> Iterator[None]:
        self.reads.append(file_kind)
        if len(self.reads) == 2:  # the first read plans the repair, the second one fetches what is uploaded
            self.take_over()
        yield from super().write_copies(segment, file_kind, path)


@pytest.mark.damages
def test_a_repair_that_lost_its_leadership_while_it_fetched_uploads_nothing(cli: TierCli, log_dir: Path) -> None:
    """The new leader may have deleted the segment meanwhile: an object created then would be nobody's."""
    victim = objects(cli, "log")[1]
    victim.unlink()

    def take_over() -> None:
        log = cli.open().open_partition_log(TopicPartition("orders", 0))
        epoch = log.refresh().next_compactor_epoch
        log.append_due_records(
            lambda state: (
                LeadershipAcquired(leader_epoch=epoch, holder="another", ttl_ms=1) if state.next_compactor_epoch == epoch else None
            )
        )

    tier = cli.open()
    tier.identity.read_catalog()
    with pytest.raises(Fenced):
        repair_partition(tier, TopicPartition("orders", 0), [SlowSource(log_dir, take_over)])
    assert not victim.exists()
