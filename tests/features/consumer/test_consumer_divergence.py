"""A consumer reports once that its log was truncated or its topic created again, and returns no records of the wrong log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.constants import EMPTY_TOPIC_ID, LeaderEpoch, Offset, TopicId
from compactor.consumer import ConsumerOptions, Place, TieredConsumer
from compactor.control.ports import ObjectRetention
from compactor.control.publication import delete_partition
from compactor.errors import BadData
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.read.outcomes import (
    ConsumedLogHistory,
    HistoryMismatchReason,
    LeaderEpochEnd,
    LogIdentity,
    consumed_history_before_position,
    find_log_mismatch,
    log_identity,
)
from compactor.read.reading import LogChanged, OffsetRangeReader, OffsetRangeToRead, ReadOptions
from compactor.read.records import MessageLike
from compactor.upkeep.retire import GraceClock, retire_partition
from tests.builders import TOPIC_ID, LogBuilder, read
from tests.support.plain_broker import PlainBroker
from tests.support.spark_tier import NAME, NOW_MS, Twins, state_of

pytestmark = pytest.mark.quick

OLD_ID, NEW_ID = TOPIC_ID, "AAAAAAAAAAAAAAAAAAAAAg"


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Twins(tmp_path / "twins").local


def write_log(folder: Path, *runs: tuple[int, int, int], word: str = "old") -> Path:
    """Write a log directory with segments of twenty records. Each key is its offset.

    :param runs: leader epoch, first offset and end offset (exclusive) of neighbouring stretches.
    """
    log = LogBuilder(next_offset=runs[0][1], topic_id=OLD_ID if word == "old" else NEW_ID)
    for epoch, first, end in runs:
        log.leader_epoch = epoch
        for base in range(first, end, 20):
            log.put(*(f"{offset}={word}-{epoch}" for offset in range(base, min(base + 20, end))))
            log.roll()
    return log.write(folder)


def import_log(tier: Tier, folder: Path) -> None:
    import_directory(tier, folder, NAME, tier.settings.cleaner.cleaner_policy())


def cut_and_refilled(tier: Tier, folder: Path) -> None:
    """Truncate the tier at 40, where epoch 1 begins, and import 160 new records."""
    write_log(folder, (0, 0, 40), (1, 40, 200))
    import_directory(tier, folder, NAME, tier.settings.cleaner.cleaner_policy(), options=ImportOptions(accept_truncation=True))


def messages_until(consumer: TieredConsumer, count: int) -> list[MessageLike]:
    """Return all messages until ``count`` records have come, and those that follow at once."""
    found: list[MessageLike] = []
    for _ in range(2000):
        found += consumer.consume(500, timeout=0.002)
        if sum(message.error() is None for message in found) >= count:
            break
    return found + [message for _ in range(20) for message in consumer.consume(500, timeout=0.002)]


def consumer_over(tier: Tier, broker: PlainBroker | None = None, **options: Any) -> TieredConsumer:
    return TieredConsumer(tier, broker, ConsumerOptions(**{"refresh_s": 0.002, **options}))


def errors(messages: Sequence[MessageLike]) -> list[tuple[str, int | None]]:
    return [(error.name(), message.offset()) for message in messages if (error := message.error())]


def values(messages: Sequence[MessageLike]) -> dict[int, bytes]:
    return {message.offset() or 0: message.value() or b"" for message in messages if message.error() is None}


NEW_LOG = {offset: b"old-0" if offset < 40 else b"old-1" for offset in range(200)}


@pytest.mark.parametrize("reset", ["earliest", "latest", "error"])
def test_a_truncated_log_is_reported_once_with_the_offset_up_to_which_both_agree(reset: str, tier: Tier, tmp_path: Path) -> None:
    import_log(tier, write_log(tmp_path / "old", (0, 0, 100)))
    with consumer_over(tier, offset_reset=reset) as consumer:
        consumer.assign([Place(*NAME, 0)])
        found = messages_until(consumer, 100)
        assert len(found) == 100
        (place,) = consumer.position([Place(*NAME)])
        assert (place.offset, place.leader_epoch, place.topic_id) == (100, 0, OLD_ID)
        cut_and_refilled(tier, tmp_path / "new")
        found += messages_until(consumer, 0 if reset == "error" else 160)
        assert errors(found) == [("_LOG_TRUNCATION", 40)]
        (place,) = consumer.position([Place(*NAME)])
    text = str(next(message.error() for message in found if message.error()))
    assert "up to offset 40, and the position is 100" in text
    if reset == "error":
        assert (place.offset, place.leader_epoch) == (100, 0)
    else:
        assert values(found) == NEW_LOG
        assert (place.offset, place.leader_epoch) == (200, 1)


def test_a_restored_position_is_compared_when_it_is_assigned(tier: Tier, tmp_path: Path) -> None:
    import_log(tier, write_log(tmp_path / "old", (0, 0, 100)))
    with consumer_over(tier) as consumer:
        restored = consumer.latest(Place(*NAME))
        assert (restored.next_place, restored.next_place.leader_epoch) == (Place(*NAME, 100), 0)
    cut_and_refilled(tier, tmp_path / "new")
    with consumer_over(tier) as consumer:
        consumer.assign([restored.next_place])
        found = messages_until(consumer, 160)
        assert errors(found) == [("_LOG_TRUNCATION", 40)]
        assert values(found) == dict.fromkeys(range(40, 200), b"old-1")
        consumer.seek(Place(*NAME, 40, leader_epoch=0))
        assert errors(messages_until(consumer, 160)) == []
        consumer.seek(Place(*NAME, 150))
        assert errors(messages_until(consumer, 50)) == [], "a position without an epoch is not compared"


def test_a_topic_that_was_created_again_is_out_of_range_although_its_epochs_agree(tier: Tier, tmp_path: Path) -> None:
    import_log(tier, write_log(tmp_path / "old", (0, 0, 100)))
    with consumer_over(tier) as consumer, consumer_over(tier, offset_reset="error") as careful:
        for one in (consumer, careful):
            one.assign([Place(*NAME, 0)])
        found, before = messages_until(consumer, 100), messages_until(careful, 100)
        assert {message.topic_id() for message in found} == {OLD_ID}
        kept = consumer.position([Place(*NAME)])[0]
        assert (kept.offset, kept.topic_id) == (100, OLD_ID)
        delete_partition(tier.ports, tier.open_partition_log(NAME), tier.lease)
        import_log(tier, write_log(tmp_path / "new", (0, 0, 140), word="new"))
        found, before = messages_until(consumer, 140), messages_until(careful, 0)
        assert errors(found) == errors(before) == [("OFFSET_OUT_OF_RANGE", 100)]
        assert OLD_ID in str(found[0].error())
        assert NEW_ID in str(found[0].error())
        assert values(found) == dict.fromkeys(range(140), b"new-0")
        assert {message.topic_id() for message in found[1:]} == {NEW_ID}
        assert careful.position([kept]) == [kept]
    with consumer_over(tier) as consumer:
        consumer.assign([kept])
        assert errors(messages_until(consumer, 140)) == [("OFFSET_OUT_OF_RANGE", 100)]


def broker_of(folder: Path, **options: Any) -> PlainBroker:
    return PlainBroker(NAME, [batch for batches in read(folder).values() for batch in batches], **options)


@pytest.mark.parametrize("reset", ["earliest", "error"])
def test_the_hand_over_compares_the_topic_id_of_the_broker(reset: str, tier: Tier, tmp_path: Path) -> None:
    import_log(tier, write_log(tmp_path / "old", (0, 0, 100)))
    broker = broker_of(write_log(tmp_path / "new", (0, 0, 140), word="new"), id_of_topic=NEW_ID)
    with consumer_over(tier, broker, offset_reset=reset) as consumer:
        consumer.assign([Place(*NAME, 90)])
        found = messages_until(consumer, 150 if reset == "earliest" else 10)
    assert errors(found) == [("OFFSET_OUT_OF_RANGE", 100)]
    later = list(found[11:])
    assert values(later) == (dict.fromkeys(range(140), b"new-0") if reset == "earliest" else {})
    assert {message.topic_id() for message in later} <= {NEW_ID}


def test_a_position_of_the_topic_that_the_broker_has_is_not_read_from_an_older_topics_tier(tier: Tier, tmp_path: Path) -> None:
    import_log(tier, write_log(tmp_path / "old", (0, 0, 100)))
    broker = broker_of(write_log(tmp_path / "new", (0, 0, 140), word="new"), id_of_topic=NEW_ID)
    with consumer_over(tier, broker) as consumer:
        consumer.assign([Place(*NAME, 50, 0, NEW_ID)])
        assert values(found := messages_until(consumer, 90)) == dict.fromkeys(range(50, 140), b"new-0")
        assert errors(found) == []


def test_the_hand_over_compares_leader_epochs_and_does_not_return_to_the_discarded_branch(tier: Tier, tmp_path: Path) -> None:
    import_log(tier, write_log(tmp_path / "old", (0, 0, 100)))
    broker = broker_of(write_log(tmp_path / "broker", (0, 0, 40), (1, 40, 200)))
    with consumer_over(tier, broker) as consumer:
        consumer.assign([Place(*NAME, 0)])
        found = messages_until(consumer, 260)
        assert errors(found) == [("_LOG_TRUNCATION", 40)]
        assert values(found) == NEW_LOG
        # The broker deletes what it is asked for next: the tier still holds the discarded branch there.
        consumer.seek(Place(*NAME, 80, leader_epoch=1))
        broker.start = 120
        found = messages_until(consumer, 0)
        assert errors(found) == [("OFFSET_OUT_OF_RANGE", 80)]
        assert values(found) == {}
        cut_and_refilled(tier, tmp_path / "new")
        assert values(messages_until(consumer, 120)) == dict.fromkeys(range(80, 200), b"old-1")


def test_a_range_whose_log_is_truncated_while_it_is_read_is_not_mixed(tier: Tier, tmp_path: Path) -> None:
    import_log(tier, write_log(tmp_path / "old", (0, 0, 100)))
    state = state_of(tier)
    reader = OffsetRangeReader(
        tier,
        OffsetRangeToRead(NAME, 0, 99, state.live, log_identity(tier, state)),
        ReadOptions(read_committed=False, inflate_limit=1 << 20),
    )
    read_selected_records = reader.read_selected_records()
    assert len(next(read_selected_records)) == 20
    cut_and_refilled(tier, tmp_path / "new")
    retire_partition(
        tier.ports,
        tier.open_partition_log(NAME),
        tier.lease,
        ObjectRetention(grace_ms=0),
        clock=GraceClock(NOW_MS * 2, forced=True),
    )
    with pytest.raises(LogChanged, match="offsets from 40 on were replaced while 0 to 99 were read"):
        list(read_selected_records)


def test_a_stream_refuses_a_checkpoint_of_a_truncated_log(tier: Tier, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.types import LongType, StructField, StructType

    from compactor.features.spark.datasource import KafkaTieredSource

    import_log(tier, write_log(tmp_path / "old", (0, 0, 100)))
    schema = StructType([StructField("offset", LongType())])
    stream: Any = KafkaTieredSource({"url": tier.settings.tier_url, "topic": "orders"}).streamReader(schema)
    checkpoint = json.loads(json.dumps(stream.latestOffset()))
    assert len(stream.partitions(stream.initialOffset(), checkpoint)) == 1
    cut_and_refilled(tier, tmp_path / "new")
    with pytest.raises(BadData, match="holds what was read up to offset 40, and the stream is at 100"):
        stream.partitions(checkpoint, stream.latestOffset())
    del checkpoint["history"]
    assert len(stream.partitions(checkpoint, stream.latestOffset())) == 1, "checkpoints of earlier versions have no history"


# ---- pure ------------------------------------------------------------------------------------------------------------------


def log(end: int, *entries: tuple[int, int], topic_id: str = "") -> LogIdentity:
    return LogIdentity(TopicId(topic_id), tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in entries), end)


@pytest.mark.parametrize(
    ("position", "given", "agreed"),
    [
        (consumed_history_before_position(100, 0, ""), log(200, (0, 0), (1, 40)), 40),
        (consumed_history_before_position(100, 1, ""), log(200, (0, 0), (2, 20)), 20),
        (consumed_history_before_position(100, 0, ""), log(100, (0, 0), (1, 100)), None),
        (consumed_history_before_position(100, 0, ""), log(40, (0, 0)), None),  # a tier that ends earlier
        (consumed_history_before_position(100, 3, ""), log(40, (0, 0)), None),
        (consumed_history_before_position(100, None, ""), log(200, (0, 0), (1, 40)), None),
        (consumed_history_before_position(100, -1, ""), log(200, (0, 0), (1, 40)), None),
        (consumed_history_before_position(0, 0, ""), log(200, (1, 0)), None),
        (consumed_history_before_position(100, 0, ""), log(200, (4, 60)), 60),  # its beginning has expired
        (consumed_history_before_position(50, 0, ""), log(200, (4, 60)), None),
        (consumed_history_before_position(100, 0, ""), LogIdentity(EMPTY_TOPIC_ID, (), 200), None),
        (consumed_history_before_position(150, 1, ""), log(300, (0, 0), (2, 200)), 0),  # the former leader came back, and 1 left no trace
        (log(300, (0, 0), (1, 100)).consumed_history_below_offset(150), log(300, (0, 0), (2, 200)), 100),
        (log(300, (0, 0), (1, 100)).consumed_history_below_offset(150), log(300, (0, 0), (1, 100), (2, 120)), 120),
        (log(300, (0, 0), (1, 100)).consumed_history_below_offset(100), log(300, (0, 0), (2, 200)), None),
    ],
)
def test_the_offset_up_to_which_a_log_agrees_with_a_position(position: ConsumedLogHistory, given: LogIdentity, agreed: int | None) -> None:
    assert find_log_mismatch(position, given) == (None if agreed is None else HistoryMismatchReason("truncated", agreed))


def test_a_log_of_an_earlier_leader_is_older_and_another_topic_has_no_common_prefix() -> None:
    assert find_log_mismatch(consumed_history_before_position(100, 2, ""), log(100, (0, 0), (1, 40))) == HistoryMismatchReason("older")
    same = log(200, (0, 0), topic_id=NEW_ID)
    assert find_log_mismatch(consumed_history_before_position(100, 0, OLD_ID), same) == HistoryMismatchReason("topic")
    assert find_log_mismatch(consumed_history_before_position(100, 0, NEW_ID), same) is None
    assert find_log_mismatch(consumed_history_before_position(100, 0, ""), same) is None
    assert find_log_mismatch(consumed_history_before_position(100, 0, OLD_ID), replace(same, topic_id=EMPTY_TOPIC_ID)) is None


def test_what_was_read_below_an_offset_ends_with_the_epoch_that_reaches_it() -> None:
    history = ConsumedLogHistory(EMPTY_TOPIC_ID, (LeaderEpochEnd(LeaderEpoch(0), 50), LeaderEpochEnd(LeaderEpoch(1), 100)), 100)
    assert [history.consumed_history_below_offset(offset).epochs for offset in (40, 50, 70)] == [((0, 40),), ((0, 50),), ((0, 50), (1, 70))]


def test_a_place_stays_a_tuple_of_three() -> None:
    place = Place("orders", 0, 7, leader_epoch=3, topic_id=OLD_ID)
    topic, partition, offset = place
    assert (topic, partition, offset) == ("orders", 0, 7) == place
    assert (Place("orders", 0).leader_epoch, Place("orders", 0).topic_id) == (None, "")
