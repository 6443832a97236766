"""Topics that their cluster has deleted: kept, or deleted from the tier on the cluster's word."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compactor.access.tier import Tier
from compactor.adapters.brokers.cluster import kafka_python_options
from compactor.adapters.kafka_client import KafkaConnection
from compactor.errors import Unavailable, UsageError
from compactor.features.imports.incarnations import record_cluster_of_topics
from compactor.model.remote_log import ClusterTopicIds, ExistingAndMissingTopicIds
from compactor.upkeep import retire as deleted_topics
from tests.builders import TOPIC_ID as ID, LogBuilder
from tests.simulation.life_mutations import DELETION_MUTATIONS
from tests.support.tier_cli import TierCli

CLUSTER = "cluster-1"
HOUR_MS = 3_600_000
RETENTION_MS = 5 * HOUR_MS
YES, NO = ExistingAndMissingTopicIds(CLUSTER, (), (ID,)), ExistingAndMissingTopicIds(CLUSTER, (ID,), ())
NOTHING = ExistingAndMissingTopicIds(CLUSTER, (), ())
ANOTHER = ExistingAndMissingTopicIds("cluster-2", (ID,), ())


class Clocked:
    """A tier whose clocks, the process's and the store's, are set by hand."""

    def __init__(self, cli: TierCli) -> None:
        self.tier = cli.open()
        self.now_ms = self.tier.ports.clock_ms()

    def at(self, hours: float, *, store_hours: float | None = None) -> Tier:
        tier = self.tier.with_stores()
        ports = replace(tier.ports, clock_ms=lambda: self.now_ms + int(hours * HOUR_MS))
        late = self.now_ms + int((hours if store_hours is None else store_hours) * HOUR_MS)
        control = ports.control

        class Late:
            def __getattr__(self, name: str) -> object:
                return getattr(control, name)

            def clock_ms(self) -> int:
                return late

        return replace(tier, ports=replace(ports, control=Late()))  # type: ignore[arg-type]

    def ask(self, hours: float, answer: ExistingAndMissingTopicIds, *, store_hours: float | None = None) -> list[str]:
        """Ask the cluster at a time in hours; return the partitions that are deleted then."""

        def asked(topic_ids: Sequence[str]) -> ExistingAndMissingTopicIds:
            assert topic_ids == [ID]
            return answer

        return [str(name) for name in deleted_topics.delete_missing_topics(self.at(hours, store_hours=store_hours), asked)]


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """A tier with a topic of a recorded cluster, whose removed topics are deleted after five hours."""
    cli = TierCli(tmp_path / "cli", {"publish": {"grace_ms": 0}})
    log = LogBuilder(topic_id=ID).add("a=1 b=2")
    cli.bring(log.write(tmp_path / "log"))
    cli.set(
        kafka={"bootstrap_servers": "127.0.0.1:1"},
        tier={"on_topic_deletion": "delete", "deleted_topic_retention_ms": RETENTION_MS},
    )
    tier = cli.open()
    tier.catalog.refresh()
    record_cluster_of_topics(tier.catalog, {"orders": ID}, lambda names: ClusterTopicIds(CLUSTER, {"orders": ID}))
    return cli


def test_a_topic_is_deleted_once_its_cluster_has_said_twice_that_its_id_is_unknown_and_its_time_is_over(cli: TierCli) -> None:
    clocked = Clocked(cli)
    assert clocked.ask(0, NO) == clocked.ask(1, NO) == clocked.ask(4.9, NO) == []
    assert clocked.ask(5.1, NO) == ["orders-0"]
    assert cli.do("topics")["partitions"] == []
    state = clocked.tier.open_partition_log(clocked.tier.list_partitions()[0]).refresh()
    assert state.deleted_slot
    assert state.topic_id == ID, "another topic of this name is another incarnation"
    assert clocked.ask(5.2, NO) == []


@pytest.mark.parametrize("answer", [NOTHING, ANOTHER, YES], ids=["not described", "another cluster", "it exists"])
def test_no_other_answer_deletes_a_topic(cli: TierCli, answer: ExistingAndMissingTopicIds) -> None:
    clocked = Clocked(cli)
    assert [clocked.ask(hours, answer) for hours in (0, 2, 6)] == [[]] * 3


def test_one_answer_is_none_and_two_in_one_hour_are_one(cli: TierCli) -> None:
    clocked = Clocked(cli)
    assert clocked.ask(0, NO) == clocked.ask(0.9, NO) == []
    assert clocked.ask(20, NOTHING) == [], "it is asked again before anything is deleted"
    assert clocked.at(0).catalog.refresh().missing[ID].last_ms == clocked.at(0).catalog.refresh().missing[ID].first_ms


def test_a_topic_that_is_not_to_be_kept_takes_two_answers_an_hour_apart(cli: TierCli) -> None:
    cli.set(tier={"deleted_topic_retention_ms": 0})
    clocked = Clocked(cli)
    assert clocked.ask(0, NO) == clocked.ask(0.9, NO) == []
    assert clocked.ask(1, NO) == ["orders-0"]


def test_a_contradiction_begins_anew(cli: TierCli) -> None:
    clocked = Clocked(cli)
    assert clocked.ask(0, NO) == clocked.ask(2, NO) == clocked.ask(4, YES) == clocked.ask(6, NO) == clocked.ask(8, NO) == []
    assert clocked.ask(11.1, NO) == ["orders-0"]


def test_a_clock_that_is_ahead_deletes_nothing(cli: TierCli) -> None:
    clocked = Clocked(cli)
    assert clocked.ask(0, NO) == clocked.ask(2, NO) == []
    assert clocked.ask(1000, NO, store_hours=3) == clocked.ask(3, NO, store_hours=1000) == []


def test_a_clock_that_is_behind_makes_one_answer_of_two_at_the_same_time(cli: TierCli) -> None:
    clocked = Clocked(cli)
    assert clocked.ask(-30, NO, store_hours=0) == clocked.ask(0, NO, store_hours=-30) == clocked.ask(0.1, NO) == []
    assert clocked.ask(4.9, NO) == []
    assert clocked.ask(5.1, NO) == ["orders-0"]


def test_retire_asks_about_deleted_topics(cli: TierCli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def answer(connection: object, topic_ids: Sequence[str]) -> ExistingAndMissingTopicIds:
        asked.append(topic_ids)
        return NO

    monkeypatch.setattr("compactor.cli.commands.retire.query_topic_ids", answer)
    assert cli.do("retire")["topics_deleted"] == []
    assert cli.do("retire", "--dry-run")["topics_deleted"] == []
    assert asked == [[ID]], "nothing is asked where nothing would be recorded"
    monkeypatch.setattr("compactor.upkeep.retire.CONFIRMATION_MS", 0)
    monkeypatch.setattr("compactor.control.incarnations.CONFIRMATION_MS", 0)
    cli.set(tier={"on_topic_deletion": "delete", "deleted_topic_retention_ms": 0})
    time.sleep(0.01)
    assert cli.do("retire")["topics_deleted"] == ["orders-0"]


def test_retire_deletes_what_is_due_although_the_cluster_cannot_be_asked(cli: TierCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(connection: object, topic_ids: Sequence[str]) -> ExistingAndMissingTopicIds:
        raise Unavailable("no broker answers")

    monkeypatch.setattr("compactor.cli.commands.retire.query_topic_ids", unavailable)
    cli.run("--force")
    answer = cli.refused("retire", code=5, says="no broker answers")
    assert answer.document["deleted"] != []


def test_topics_are_kept_by_default(cli: TierCli) -> None:
    cli.set(tier={"on_topic_deletion": "keep"})
    clocked = Clocked(cli)
    assert [clocked.ask(hours, NO) for hours in (0, 2, 1000)] == [[]] * 3


def test_deletion_needs_brokers_to_ask(cli: TierCli) -> None:
    tier = cli.open()
    tier = replace(tier, settings=tier.settings.model_copy(update={"kafka": type(tier.settings.kafka)()}))
    with pytest.raises(UsageError, match="bootstrap_servers names none"):
        deleted_topics.delete_missing_topics(tier, lambda topic_ids: NO)


@pytest.mark.parametrize(
    ("kafka", "reason"),
    [
        ({"bootstrap_servers": ""}, "bootstrap_servers names none"),
        ({"bootstrap_servers": "127.0.0.1:1", "properties": {'"sasl.oauthbearer.config"': "x"}}, "cannot be asked about by id"),
    ],
    ids=["no brokers", "a login that the client does not have"],
)
def test_config_check_says_that_the_cluster_cannot_be_asked(cli: TierCli, kafka: dict[str, Any], reason: str) -> None:
    properties = kafka.pop("properties", {})
    cli.set(kafka=kafka, **{"kafka.properties": properties})
    [problem] = [each for each in cli.ask("config", "check").document["problems"] if each["object"] == "tier.on_topic_deletion"]
    assert (problem["severity"], reason in problem["detail"]) == ("error", True)


def test_the_connection_has_the_login_of_the_configuration() -> None:
    properties = {
        "security.protocol": "sasl_ssl",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "u",
        "sasl.password": "p",
        "ssl.ca.location": "ca",
    }
    options = kafka_python_options(KafkaConnection("a:1,b:2", properties))
    assert options["bootstrap_servers"] == ["a:1", "b:2"]
    assert (options["security_protocol"], options["sasl_plain_username"], options["ssl_cafile"]) == ("SASL_SSL", "u", "ca")
    with pytest.raises(UsageError, match="ssl.keystore.location"):
        kafka_python_options(KafkaConnection("a:1", {"ssl.keystore.location": "k"}))


@pytest.mark.parametrize(
    ("rule", "noticed_by"),
    [
        ("one answer is enough", test_a_topic_that_is_not_to_be_kept_takes_two_answers_an_hour_apart),
        ("answers need not lie apart", test_a_topic_that_is_not_to_be_kept_takes_two_answers_an_hour_apart),
        ("contradictions do not count", test_a_contradiction_begins_anew),
        ("answers of any cluster count", test_no_other_answer_deletes_a_topic),
        ("the earlier clock counts", test_a_clock_that_is_behind_makes_one_answer_of_two_at_the_same_time),
    ],
)
def test_a_missing_rule_about_deleted_topics_is_noticed(rule: str, noticed_by: Callable[..., None], cli: TierCli) -> None:
    arguments = {"answer": ANOTHER} if noticed_by is test_no_other_answer_deletes_a_topic else {}
    with DELETION_MUTATIONS[rule](), pytest.raises(AssertionError):
        noticed_by(cli, **arguments)
