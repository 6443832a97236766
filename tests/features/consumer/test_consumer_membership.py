"""Decisions about assignments and sources, members of a group without a broker, and the dictionary that opens a consumer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compactor.access.tier import Tier
from compactor.consumer import OFFSET_INVALID, ConsumerOptions, Place, TieredConsumer, open_consumer
from compactor.errors import UsageError
from compactor.features.consumer.group import AutoCommitOptions, OffsetWithLeaderEpoch
from compactor.features.consumer.sources import MODES, NEXT_SOURCE, compute_assignment_change
from compactor.features.consumer.tiered import parse_consumer_settings
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition
from compactor.read.records import BrokerMessage, MessageLike, PartitionReadError, TierMessage, to_broker_messages
from tests.builders import LogBuilder, read
from tests.support.memory_group import MemoryCoordinator
from tests.support.plain_broker import PlainBroker
from tests.support.spark_tier import Twins

pytestmark = pytest.mark.quick

NAMES = [TopicPartition("orders", number) for number in range(3)]
NAME = NAMES[0]


def test_every_mode_has_a_source_for_every_step() -> None:
    assert {mode for mode, _ in NEXT_SOURCE} == set(MODES)
    assert len(NEXT_SOURCE) == 3 * len(MODES)
    assert "broker" not in {source for (mode, _), source in NEXT_SOURCE.items() if mode == "remote_only"}
    assert "tier" not in {source for (mode, _), source in NEXT_SOURCE.items() if mode == "kafka_only"}


def test_an_assignment_is_replaced_or_changed_in_part() -> None:
    first, second, third = NAMES
    replaced = compute_assignment_change([first, second], "replace", [second, third])
    assert (replaced.dropped, replaced.added) == ((first, second), (second, third))
    added = compute_assignment_change([first], "add", [first, second])
    assert (added.dropped, added.added) == ((), (second,))
    removed = compute_assignment_change([first, second], "remove", [second, third])
    assert (removed.dropped, removed.added) == ((second,), ())


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    """Three partitions with the offsets 0 to 9."""
    tier = Twins(tmp_path / "twins").local
    for name in NAMES:
        log = LogBuilder()
        for number in range(10):
            log.put(f"k{number}={name.partition}")
        import_directory(tier, log.write(tmp_path / str(name)), name, tier.settings.cleaner.cleaner_policy())
    return tier


def member(tier: Tier, group: MemoryCoordinator, commits: AutoCommitOptions | None = None, reset: Any = "earliest") -> TieredConsumer:
    options = ConsumerOptions(refresh_s=0.01, offset_reset=reset)
    return TieredConsumer(tier, None, options, group.open(), commits or AutoCommitOptions())


def consume(consumer: TieredConsumer, count: int) -> list[MessageLike]:
    found: list[MessageLike] = []
    for _ in range(500):
        found += consumer.consume(count - len(found), 0.01)
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} messages instead of {count}: {found[-3:]}")


@pytest.mark.parametrize("is_cooperative", [False, True])
def test_a_revocation_drops_the_queue_and_commits_what_was_returned(is_cooperative: bool, tier: Tier) -> None:
    group = MemoryCoordinator(NAMES, is_cooperative)
    revoked: list[Place] = []
    with member(tier, group) as first, member(tier, group) as second:
        first.subscribe(["orders"], on_revoke=lambda consumer, places: revoked.extend(places))
        found = consume(first, 15)
        assert group.committed == {}
        second.subscribe(["orders"])
        more: list[MessageLike] = []
        for _ in range(200):
            found += first.consume(1, 0.01)
            more += second.consume(1, 0.01)
            if len(found) + len(more) == 30:
                break
        read_once = sorted((message.partition(), message.offset()) for message in [*found, *more])
        assert read_once == [(name.partition, offset) for name in NAMES for offset in range(10)]
        assert {place.partition for place in revoked} == ({1} if is_cooperative else {0, 1, 2})
    assert {name: at.offset for name, at in group.committed.items()} == dict.fromkeys(NAMES, 10)


def test_offsets_of_lost_partitions_are_not_committed(tier: Tier) -> None:
    """Another member may have them by then, and be further: a commit would set the group back."""
    group = MemoryCoordinator([NAME])
    lost: list[Place] = []
    client = group.open()
    with TieredConsumer(tier, None, ConsumerOptions(refresh_s=0.01, offset_reset="earliest"), client, AutoCommitOptions()) as consumer:
        consumer.subscribe(["orders"], on_lost=lambda consumer, places: lost.extend(places))
        consume(consumer, 3)
        group.committed[NAME] = OffsetWithLeaderEpoch(8, 0)  # the next holder's
        client.lose()
        assert consumer.assignment() == []
    assert [place.offset for place in lost] == [3]
    assert group.committed == {NAME: OffsetWithLeaderEpoch(8, 0)}


def test_only_stored_offsets_are_committed_if_the_application_stores_them(tier: Tier) -> None:
    group = MemoryCoordinator([NAME])
    with member(tier, group, AutoCommitOptions(auto_store=False)) as consumer:
        consumer.subscribe(["orders"])
        messages = consume(consumer, 5)
        consumer.store_offsets(messages[2])
        assert consumer.commit(asynchronous=False) == [Place(*NAME, 3)]
        consumer.store_offsets(offsets=[Place(*NAME, 4, leader_epoch=0)])
        with pytest.raises(UsageError, match="orders-2 is not assigned"):
            consumer.store_offsets(offsets=[Place(*NAMES[2], 1)])
    assert group.committed == {NAME: OffsetWithLeaderEpoch(4, 0)}


def test_nothing_is_committed_without_a_call_if_auto_commit_is_off(tier: Tier) -> None:
    group = MemoryCoordinator([NAME])
    with member(tier, group, AutoCommitOptions(auto_commit=False)) as consumer:
        consumer.subscribe(["orders"])
        (message,) = consume(consumer, 1)
        consumer.commit(message)
        consume(consumer, 5)
    assert group.committed == {NAME: OffsetWithLeaderEpoch(1, 0)}
    with member(tier, group) as consumer:
        assert consumer.committed([Place(*NAME), Place(*NAMES[1])])[1].offset == OFFSET_INVALID


def test_on_assign_may_choose_where_to_begin(tier: Tier) -> None:
    group = MemoryCoordinator([NAME], committed={NAME: OffsetWithLeaderEpoch(4, 0)})
    begun: list[Place] = []

    def rewind(consumer: TieredConsumer, places: list[Place]) -> None:
        begun.extend(places)
        consumer.assign([Place(*place.topic_partition, 2) for place in places])

    with member(tier, group) as consumer:
        consumer.subscribe(["orders"], on_assign=rewind)
        assert [message.offset() for message in consume(consumer, 2)] == [2, 3]
    assert begun == [Place(*NAME, 4)]


def test_a_partition_without_a_committed_offset_is_reported_if_there_is_no_reset(tier: Tier) -> None:
    with member(tier, MemoryCoordinator([NAME]), reset="error") as consumer:
        consumer.subscribe(["orders"])
        (message,) = consume(consumer, 1)
        assert "_NO_OFFSET" in repr(message)
        consumer.seek(Place(*NAME, 8))
        assert [message.offset() for message in consume(consumer, 2)] == [8, 9]


def test_an_error_of_the_group_is_a_message_like_any_other(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MemoryCoordinator([NAME]).open()
    error = TierMessage("", -1, -1, error=PartitionReadError(-147, "_MAX_POLL_EXCEEDED", "too slow"))
    monkeypatch.setattr(client, "poll_rebalances", lambda: [error])
    with TieredConsumer(tier, None, ConsumerOptions(), client, AutoCommitOptions()) as consumer:
        consumer.subscribe(["orders"])
        message = consumer.poll(0)
    assert isinstance(message, BrokerMessage)
    assert (message.topic_id(), repr(message)) == ("", "<message error=_MAX_POLL_EXCEEDED: too slow>")


def test_kafka_preferred_leaves_the_tier_where_the_broker_begins(tier: Tier, tmp_path: Path) -> None:
    broker = PlainBroker(NAME, [batch for found in read(tmp_path / str(NAME)).values() for batch in found], start=6)
    with TieredConsumer(tier, broker, ConsumerOptions(refresh_s=0.01, mode="kafka_preferred")) as consumer:
        consumer.assign([Place(*NAME, 0)])
        assert [message.offset() for message in consume(consumer, 10)] == [*range(10)]
    assert broker.handed_out == 4


def test_kafka_only_resets_below_the_log_of_the_broker(tier: Tier, tmp_path: Path) -> None:
    broker = PlainBroker(NAME, [batch for found in read(tmp_path / str(NAME)).values() for batch in found], start=6)
    with TieredConsumer(tier, broker, ConsumerOptions(refresh_s=0.01, mode="kafka_only")) as consumer:
        consumer.assign([Place(*NAME, 0)])
        assert [message.offset() for message in consume(consumer, 4)] == [6, 7, 8, 9]
        assert consumer.get_watermark_offsets(Place(*NAME)) == (6, 10)


def test_settings_are_those_of_kafka_and_of_the_tier() -> None:
    given = {
        "bootstrap.servers": "b:9092",
        "group.id": "g",
        "tier.config": "t.toml",
        "tier.mode": "kafka_preferred",
        "isolation.level": "read_uncommitted",
        "enable.auto.commit": "false",
        "auto.commit.interval.ms": 100,
        "session.timeout.ms": 6000,
        "client.id": "c",
    }
    parsed = parse_consumer_settings(given)
    assert (parsed.tier_config, parsed.bootstrap_servers, parsed.group_id) == ("t.toml", "b:9092", "g")
    assert parsed.options == ConsumerOptions(isolation="read_uncommitted", offset_reset="latest", mode="kafka_preferred")
    assert parsed.commits == AutoCommitOptions(auto_commit=False, interval_s=0.1)
    assert (parsed.properties, parsed.group_properties) == ({"client.id": "c"}, {"session.timeout.ms": 6000})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tier.modes": "x"}, "there is no setting tier.modes. Did you mean tier.mode?"),
        ({"tier.mode": "x"}, "no mode 'x'"),
        ({"auto.offset.reset": "x"}, "auto.offset.reset cannot be 'x'"),
        ({"enable.auto.commit": "x"}, "enable.auto.commit cannot be 'x'"),
        ({"tier.threads": "x"}, "tier.threads cannot be 'x'"),
        ({"isolation.level": "x"}, "isolation.level cannot be 'x'"),
        ({"error_cb": print}, "error_cb is not supported"),
        ({"tier.view": "latest", "tier.mode": "kafka_only"}, "the view latest cannot be read with mode kafka_only"),
        ({"group.id": "g", "tier.mode": "remote_only"}, "a group needs brokers, even with tier.mode remote_only"),
        ({"tier.mode": "kafka_only"}, "tier.mode kafka_only needs brokers"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as refused:
        open_consumer(given)
    assert why in str(refused.value)


def test_messages_show_their_place_key_and_value() -> None:
    message = TierMessage("orders", 1, 42, b"k", b"v" * 70, timestamp=(1, 1000), epoch=3)
    shown = f"<message orders-1@42 key=b'k' value={b'v' * 60!r}... (70 bytes) timestamp=1000>"
    assert repr(message) == shown
    (wrapped,) = to_broker_messages([message], "id")
    assert (repr(wrapped), wrapped.topic_id(), wrapped.leader_epoch()) == (shown, "id", 3)


@pytest.mark.parametrize("is_committed_between", [False, True])
def test_a_member_that_seeks_back_to_where_it_began_commits_that_place(is_committed_between: bool, tier: Tier) -> None:
    group = MemoryCoordinator(NAMES[:1], is_cooperative=False)
    group.committed[NAME] = OffsetWithLeaderEpoch(4)
    with member(tier, group) as only:
        only.subscribe(["orders"])
        assert [message.offset() for message in consume(only, 4)] == [4, 5, 6, 7]
        if is_committed_between:
            only.commit(asynchronous=True)
        else:
            only.commit(asynchronous=False)
        only.seek(Place(*NAME, 4))
    assert group.committed[NAME].offset == 4
