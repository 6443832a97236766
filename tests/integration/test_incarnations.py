"""Topics that are deleted and created again: a new incarnation has prefixes of its own, and nothing of the former one gets into it."""

from __future__ import annotations

import json
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compactor.cli.commands import import_ as import_command, topics as topics_command
from compactor.constants import TopicId
from compactor.consumer import OFFSET_BEGINNING, ConsumerOptions, Place, open_consumer
from compactor.control.state import CatalogState
from compactor.errors import Unavailable, UsageError
from compactor.features.imports import import_, incarnations
from compactor.model.ids import TopicPartition, partition_of_incarnation
from compactor.model.remote_log import ClusterTopicIds
from tests.builders import TOPIC_ID as ID, LogBuilder
from tests.features.imports.test_log_identity import OTHER_ID as OTHER
from tests.simulation.life_mutations import OPENING_MUTATIONS
from tests.support.tier_cli import TierCli

ORDERS = TopicPartition("orders", 0)
THIRD, FOURTH = "BBBBBBBBBBBBBBBBBBBBBQ", "CCCCCCCCCCCCCCCCCCCCCQ"
SECOND = partition_of_incarnation("orders", 0, 2)


class TestNames:
    def test_the_first_incarnation_has_the_partitions_name(self) -> None:
        assert str(partition_of_incarnation("orders", 0, 1)) == "orders-0"
        assert TopicPartition.parse_partition_store_prefix("orders-0") == ORDERS

    def test_a_later_incarnation_reads_back(self) -> None:
        assert str(partition_of_incarnation("orders", 0, 12)) == "orders-0~12"
        assert TopicPartition.parse_partition_store_prefix("orders-0~12") == partition_of_incarnation("orders", 0, 12)
        assert pickle.loads(pickle.dumps(SECOND)) == SECOND

    def test_incarnations_differ_although_topic_and_number_are_the_same(self) -> None:
        assert len({ORDERS, SECOND, partition_of_incarnation("orders", 0, 3)}) == 3
        assert SECOND != ORDERS != SECOND
        assert tuple(SECOND) == tuple(SECOND.first_incarnation) == ("orders", 0)

    @pytest.mark.parametrize("text", ["orders-0~", "orders-0~0", "orders-0~1", "orders-0~02", "orders-0~x", "orders~2", "orders-0~2~3"])
    def test_an_incarnation_has_one_spelling(self, text: str) -> None:
        with pytest.raises(UsageError):
            TopicPartition.parse_partition_store_prefix(text)

    def test_no_topic_or_directory_is_called_like_a_later_incarnation(self) -> None:
        with pytest.raises(UsageError, match="not a topic name"):
            TopicPartition.create_validated("orders-0~2", 0)
        with pytest.raises(UsageError, match="not a partition"):
            TopicPartition.parse("orders-0~2")

    def test_a_catalog_lists_all_incarnations(self) -> None:
        assert CatalogState(partitions={"orders-0~2": 5, "orders-0": 1, "b-1": 2}).topic_partitions == [
            TopicPartition("b", 1),
            ORDERS,
            SECOND,
        ]


def log_of(letter: str, count: int, topic_id: str = "") -> LogBuilder:
    """Return a log with one segment per record, whose keys and values begin with this letter."""
    log = LogBuilder(topic_id=topic_id)
    for number in range(count):
        log.put(f"{letter}{number}={letter}{number}")
        log.roll()
    return log


SETTINGS = {"publish": {"grace_ms": 0}}


def bring(cli: TierCli, folder: Path, letter: str, count: int, topic_id: str, *options: str) -> Any:
    """Import a log of ``count`` records of the partition orders-0 with this topic id; return the command's answer."""
    log_dir = log_of(letter, count, topic_id).write(folder)
    return cli.ask("import", log_dir, "--topic", "orders", "--partition", 0, *options)


def keys(cli: TierCli, *arguments: str) -> list[str]:
    return [json.loads(line)["key"] for line in cli.ask("cat", "orders-0", *arguments, output="table").document.splitlines()]


@pytest.fixture
def recreated(cli: TierCli, tmp_path: Path) -> TierCli:
    """A tier with a topic of three records, and its successor of two records with other keys."""
    assert bring(cli, tmp_path / "old", "a", 3, ID).code == 0
    assert bring(cli, tmp_path / "new", "b", 2, OTHER, "--new-incarnation").code == 0
    return cli


def test_another_topic_id_is_refused_unless_somebody_says_that_the_topic_is_new(cli: TierCli, tmp_path: Path) -> None:
    bring(cli, tmp_path / "old", "a", 3, ID)
    answer = bring(cli, tmp_path / "new", "b", 2, OTHER)
    assert answer.code == 3
    assert ID in answer.stderr
    assert OTHER in answer.stderr
    assert "--new-incarnation" in answer.stderr
    assert keys(cli) == ["a0", "a1", "a2"]


def test_the_name_means_the_new_topic_and_the_old_one_is_read_by_its_id(recreated: TierCli, tmp_path: Path) -> None:
    assert keys(recreated) == ["b0", "b1"]
    assert keys(recreated, "--topic-id", ID) == ["a0", "a1", "a2"]
    assert keys(recreated, "--topic-id", OTHER) == ["b0", "b1"]
    rows = recreated.do("topics")["partitions"]
    assert [(row["incarnation"], row["topic_id"], row["superseded_by"], row["segments"]) for row in rows] == [
        (1, ID, OTHER, 3),
        (2, OTHER, "", 2),
    ]
    assert recreated.do("export", "orders-0", tmp_path / "out", "--topic-id", ID)["end_offset"] == 2
    answer = recreated.ask("cat", "orders-0", "--topic-id", "AAAAAAAAAAAAAAAAAAAAAQ")
    assert answer.code == 2
    assert "no partition orders-0 of topic id AAAAAAAAAAAAAAAAAAAAAQ" in answer.stderr


def test_a_new_incarnation_grows_by_later_imports_without_an_option(recreated: TierCli, tmp_path: Path) -> None:
    assert bring(recreated, tmp_path / "more", "b", 4, OTHER).code == 0
    assert keys(recreated) == ["b0", "b1", "b2", "b3"]


@pytest.mark.parametrize("options", [(), ("--new-incarnation",)])
def test_a_superseded_topic_never_comes_back(recreated: TierCli, tmp_path: Path, options: tuple[str, ...]) -> None:
    answer = bring(recreated, tmp_path / "stale", "a", 5, ID, *options)
    assert answer.code == 3
    assert ID in answer.stderr
    assert OTHER in answer.stderr
    assert keys(recreated) == ["b0", "b1"]
    assert keys(recreated, "--topic-id", ID) == ["a0", "a1", "a2"]


def cluster_that_says(monkeypatch: pytest.MonkeyPatch, topic_id: str) -> None:
    """`import` and `topics adopt` ask a cluster that has the topic under this id."""
    answer = ClusterTopicIds("cluster", {"orders": TopicId(topic_id)})
    for command in (import_command, topics_command):
        monkeypatch.setattr(command, "create_topic_ids_query", lambda settings: lambda topics: answer)


def test_a_stale_directory_does_not_supersede_a_topic_that_its_cluster_still_has(
    cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(cli, tmp_path / "live", "a", 3, ID)
    cluster_that_says(monkeypatch, ID)
    answer = bring(cli, tmp_path / "stale", "b", 2, OTHER, "--new-incarnation")
    assert (answer.code, f"the cluster has the topic id {ID} now" in answer.stderr) == (3, True)
    assert bring(cli, tmp_path / "more", "a", 4, ID).code == 0, "the live topic is not locked out"
    cluster_that_says(monkeypatch, THIRD)
    assert bring(cli, tmp_path / "former", "b", 2, OTHER, "--new-incarnation").code == 0, "a person may bring a topic between the two"


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_topic_that_a_person_has_superseded_by_mistake_is_taken_back(recreated: TierCli, tmp_path: Path, is_deleted: bool) -> None:
    if is_deleted:
        recreated.do("topics", "delete", "orders-0")
    (row,) = recreated.do("topics", "adopt", "orders", "--topic-id", ID)["partitions"]
    assert (row["partition"], row["status"], row["topic_id"], row["previous_id"]) == (0, "adopted", ID, OTHER)
    assert keys(recreated) == ["a0", "a1", "a2"]
    assert bring(recreated, tmp_path / "live", "a", 5, ID).code == 0
    assert keys(recreated) == ["a0", "a1", "a2", "a3", "a4"]
    assert bring(recreated, tmp_path / "stale", "b", 4, OTHER, "--new-incarnation").code == 3, "the stale directory stays out"
    rows = recreated.do("topics")["partitions"]
    expected = [(1, ID, "")] if is_deleted else [(1, ID, ""), (2, OTHER, ID)]
    assert [(row["incarnation"], row["topic_id"], row["superseded_by"]) for row in rows] == expected
    assert bring(recreated, tmp_path / "next", "c", 2, THIRD, "--new-incarnation").code == 0
    assert keys(recreated) == ["c0", "c1"]
    assert keys(recreated, "--topic-id", ID) == ["a0", "a1", "a2", "a3", "a4"]
    assert "topics adopt" in json.dumps(recreated.do("audit", "list"))


def test_a_partition_that_only_the_mistake_has_brought_gets_the_topics_log_after_it(recreated: TierCli, tmp_path: Path) -> None:
    stray = log_of("b", 2, OTHER).write(tmp_path / "stray")
    recreated.do("import", stray, "--topic", "orders", "--partition", 5)
    recreated.do("topics", "adopt", "orders", "--topic-id", ID)
    live = log_of("a", 4, ID).write(tmp_path / "live")
    recreated.do("import", live, "--topic", "orders", "--partition", 5)
    rows = recreated.do("topics")["partitions"]
    assert [(row["partition"], row["incarnation"], row["topic_id"]) for row in rows] == [
        (0, 1, ID),
        (0, 2, OTHER),
        (5, 1, OTHER),
        (5, 2, ID),
    ]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_what_a_cluster_says_is_not_taken_back(cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool) -> None:
    bring(cli, tmp_path / "old", "a", 3, ID)
    if is_recorded:
        cluster_that_says(monkeypatch, OTHER)
    assert bring(cli, tmp_path / "new", "b", 2, OTHER, "--new-incarnation").code == 0
    if is_recorded:
        monkeypatch.setattr(topics_command, "create_topic_ids_query", lambda settings: None)
    else:
        cluster_that_says(monkeypatch, OTHER)
    cli.refused("topics", "adopt", "orders", "--topic-id", ID, code=2, says=OTHER)
    assert keys(cli) == ["b0", "b1"]


def test_a_superseded_topic_does_not_come_back_as_another_partition(recreated: TierCli, tmp_path: Path) -> None:
    log_dir = log_of("a", 2, ID).write(tmp_path / "stray")
    assert recreated.ask("import", log_dir, "--topic", "orders", "--partition", 5).code == 3
    assert recreated.ask("import", log_dir, "--topic", "other", "--partition", 5).code == 0


def test_a_topic_that_was_restored_with_the_same_records_is_adopted_first(cli: TierCli, tmp_path: Path) -> None:
    bring(cli, tmp_path / "old", "a", 3, ID)
    answer = bring(cli, tmp_path / "restored", "a", 4, OTHER, "--new-incarnation")
    assert answer.code == 3
    assert "topics adopt" in answer.stderr
    cli.do("topics", "adopt", "orders", "--topic-id", OTHER)
    assert bring(cli, tmp_path / "again", "a", 4, OTHER).code == 0
    assert keys(cli) == ["a0", "a1", "a2", "a3"]


def test_damage_is_no_difference_that_makes_another_topic(cli: TierCli, tmp_path: Path) -> None:
    bring(cli, tmp_path / "old", "a", 3, ID)
    log_dir = log_of("a", 4, OTHER).write(tmp_path / "restored")
    for path in log_dir.glob("*.log"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    answer = cli.ask("import", log_dir, "--topic", "orders", "--partition", 0, "--new-incarnation")
    assert answer.code == 3
    assert "topics adopt" not in answer.stderr, answer.stderr
    assert cli.open().catalog.refresh().superseded == {}


def test_a_topic_may_be_superseded_before_its_first_segment_has_come(cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(cli, tmp_path / "old", "a", 3, ID)
    with monkeypatch.context() as patched:
        patched.setattr(import_, "combine_parts_to_segments", fail)
        assert bring(cli, tmp_path / "new", "b", 2, OTHER, "--new-incarnation").code == 5
        patched.setattr(incarnations, "publish_hints", fail)
        assert bring(cli, tmp_path / "third", "c", 2, THIRD, "--new-incarnation").code == 5
    assert bring(cli, tmp_path / "again", "d", 2, FOURTH, "--new-incarnation").code == 0
    assert keys(cli) == ["d0", "d1"]
    rows = [(row["incarnation"], row["topic_id"], row["segments"]) for row in cli.do("topics")["partitions"]]
    assert rows == [(1, ID, 3), (4, FOURTH, 2)]


@pytest.mark.parametrize("rule", OPENING_MUTATIONS)
def test_a_missing_rule_about_new_incarnations_is_noticed(rule: str, cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = rule == "damage is a difference"
    noticed_by = (
        test_damage_is_no_difference_that_makes_another_topic
        if damaged
        else partial(test_a_topic_may_be_superseded_before_its_first_segment_has_come, monkeypatch=monkeypatch)
    )
    with OPENING_MUTATIONS[rule](), pytest.raises(AssertionError):
        noticed_by(cli, tmp_path)


def fail(*arguments: object, **options: object) -> None:
    """Fail as a store does that is not there."""
    raise Unavailable("the store is not there")


def test_a_consumer_goes_on_with_the_new_topic_and_reads_the_former_one_by_its_id(cli: TierCli, tmp_path: Path) -> None:
    bring(cli, tmp_path / "old", "a", 3, ID)
    with open_consumer(str(cli.config), options=ConsumerOptions(refresh_s=0.01)) as consumer:
        consumer.assign([Place("orders", 0, OFFSET_BEGINNING)])
        assert [message.key() for message in consumer.consume(3, 60)] == [b"a0", b"a1", b"a2"]
        bring(cli, tmp_path / "new", "b", 2, OTHER, "--new-incarnation")
        first, *rest = [message for _ in range(3) for message in consumer.consume(1, 60)]
        assert first.error() is not None
        assert [(message.key(), message.topic_id()) for message in rest] == [(b"b0", OTHER), (b"b1", OTHER)]
    with open_consumer(str(cli.config), options=ConsumerOptions(topic_ids={"orders": ID})) as consumer:
        consumer.assign([Place("orders", 0, OFFSET_BEGINNING)])
        assert [message.key() for message in consumer.consume(3, 60)] == [b"a0", b"a1", b"a2"]
        assert consumer.get_watermark_offsets(Place("orders", 0)) == (0, 3)


def test_upkeep_covers_all_incarnations(recreated: TierCli, tmp_path: Path) -> None:
    assert recreated.do("verify") == {"ok": True, "problems": []}
    for command in (("plan",), ("run", "--force")):
        rows = recreated.do(*command)["partitions"]
        assert [(row["topic"], row["partition"], row["incarnation"]) for row in rows] == [("orders", 0, 1), ("orders", 0, 2)]
    swept = recreated.do("retire", "--now", 4_000_000_000_000, "--force-now")
    assert swept["swept"] == []
    assert recreated.do("verify") == {"ok": True, "problems": []}
    assert (keys(recreated), keys(recreated, "--topic-id", ID)) == (["b0", "b1"], ["a0", "a1", "a2"])
    answer = recreated.ask("erasure", "orders", "--key", "a1")
    assert answer.code == 3, "the superseded topic still has the key"
    deleted = recreated.ask("topics", "delete", "orders-0~1", output="table")
    assert (deleted.code, f"{ID}, was superseded by" in deleted.document) == (0, True)
    recreated.do("retire", "--now", 4_000_000_000_000, "--force-now")
    assert recreated.ask("erasure", "orders", "--key", "a1").code == 0
    assert keys(recreated) == ["b0", "b1"]


@pytest.mark.damages
def test_no_tier_is_made_over_segments_of_a_later_incarnation(recreated: TierCli, tmp_path: Path) -> None:
    (recreated.tier / "tier-id.json").unlink()
    shutil.rmtree(recreated.tier / "orders-0")
    other = TierCli(tmp_path / "other")
    other.set(tier={"url": recreated.tier.as_uri(), "control_url": (tmp_path / "control").as_uri()})
    other.refused("import", log_of("a", 1).write(tmp_path / "more"), "--topic", "orders", "--partition", 0, code=2, says="orders-0~2")
