"""Pinterest's layout: names, ``_metadata`` and ``offset.wm``, against values of its own code."""

from __future__ import annotations

import json

import pytest

from compactor.errors import BadData, UsageError
from compactor.model.ids import TopicPartition
from compactor.tier.layouts.pinterest.keys import PartitionKeys, entropy, id_of, parsed
from compactor.tier.layouts.pinterest.metadata import SegmentTime, format_metadata, format_watermark, parse_metadata, parse_watermark

ORDERS = TopicPartition("orders", 3)


def test_the_binary_digits_are_those_of_its_own_code() -> None:
    assert entropy("test-cluster", TopicPartition("test-topic", 0), 5) == "10110"
    assert entropy("my-cluster", TopicPartition("my-topic", 3), 12) == "000010111001"
    assert entropy("my-cluster", TopicPartition("my-topic", 3), 128)[:12] == "000010111001"


def test_keys() -> None:
    plain, spread = PartitionKeys("my-cluster"), PartitionKeys("my-cluster", 12)
    name = TopicPartition("my-topic", 3)
    assert plain.file(name, 42, "log") == "my-cluster/my-topic-3/00000000000000000042.log"
    assert spread.file(name, 42, "index") == "000010111001/my-cluster/my-topic-3/00000000000000000042.index"
    for keys in (plain, spread):
        assert keys.named(keys.file(name, 42, "log")) == name
        assert keys.named(keys.folder(name) + "_metadata") == name


@pytest.mark.parametrize(
    "key",
    [
        "my-cluster/my-topic-3/deeper/00000000000000000042.log",
        "another/my-topic-3/00000000000000000042.log",
        "0/my-cluster/my-topic-3/00000000000000000042.log",
        "my-cluster/my-topic-03/00000000000000000042.log",
        "my-cluster/notes/00000000000000000042.log",
        "00000000000000000042.log",
    ],
)
def test_what_lies_elsewhere_is_no_partition_of_this_cluster(key: str) -> None:
    assert PartitionKeys("my-cluster").named(key) is None


def test_without_a_cluster_there_are_no_keys() -> None:
    for cluster in ("", "a/b", "a b"):
        with pytest.raises(UsageError, match="names no cluster"):
            PartitionKeys(cluster)


def test_names_of_files() -> None:
    assert parsed("00000000000000000042.timeindex") == (42, "timeindex")
    for name in ("0000000000000000042.log", "00000000000000000042.txnindex", "00000000000000000042.log.deleted", "_metadata"):
        assert parsed(name) is None


def test_ids_are_the_same_for_the_same_segment_and_no_option_on_a_command_line() -> None:
    ids = [id_of(base) for base in range(500)]
    assert ids == [id_of(base) for base in range(500)]
    assert len(set(ids)) == 500
    assert not [one for one in ids if one.startswith("-") or len(one) != 22]


def test_metadata_is_what_its_own_code_reads_and_writes() -> None:
    entries = [SegmentTime(2000, 10), SegmentTime(1000, 0)]
    written = format_metadata(ORDERS, entries)
    assert json.loads(written) == {
        "topicPartition": {"topic": "orders", "partition": 3},
        "metadata": {
            "timeindex": {
                "entries": [
                    {"timestamp": 1000, "relativeOffset": 0, "baseOffset": 0},
                    {"timestamp": 2000, "relativeOffset": 0, "baseOffset": 10},
                ],
                "timeIndexType": "TOPIC_PARTITION",
                "size": 2,
            }
        },
    }
    assert parse_metadata(written, ORDERS) == (SegmentTime(1000, 0), SegmentTime(2000, 10))
    with pytest.raises(BadData, match="it is of orders-3"):
        parse_metadata(written, TopicPartition("orders", 30))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"topicPartition":{"topic":"orders","partition":3},"metadata":{"timeindex":{"entries":[{"x":1}]}}}']
)
def test_what_is_no_metadata_is_refused(text: str) -> None:
    with pytest.raises(BadData, match="no partition's metadata"):
        parse_metadata(text.encode(), ORDERS)


def test_the_watermark() -> None:
    assert format_watermark(42) == b"00000000000000000042"
    assert parse_watermark(b"00000000000000000042\n", ORDERS) == 42
    for text in (b"", b"42", b"0000000000000000004x", b"\xff" * 20):
        with pytest.raises(BadData, match="no base offset"):
            parse_watermark(text, ORDERS)
