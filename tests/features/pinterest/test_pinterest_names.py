"""Pinterest's layout: names, ``_metadata`` and ``offset.wm``, against values of its own code."""

from __future__ import annotations

import json
import struct

import pytest
from pydantic import ValidationError

from compactor.config.settings import PinterestSettings
from compactor.errors import BadData, UsageError
from compactor.features.pinterest.generations import (
    Generation,
    PublishedSegment,
    rebase_offset_index,
    rebase_time_index,
)
from compactor.features.pinterest.layout import (
    PinterestObjectKeys,
    SegmentTimestampBound,
    derive_segment_id,
    encode_metadata_file,
    entropy_prefix,
    format_watermark_file,
    parse_file_name,
    parse_metadata_file,
    parse_watermark_base_offset,
)
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from tests.support.plain_pinterest import Endless, byte_position
from tests.support.segments import files_of, segment_of

pytestmark = pytest.mark.quick

ORDERS = TopicPartition("orders", 3)


def test_the_binary_digits_are_those_of_its_own_code() -> None:
    assert entropy_prefix("test-cluster", TopicPartition("test-topic", 0), 5) == "10110"
    assert entropy_prefix("my-cluster", TopicPartition("my-topic", 3), 12) == "000010111001"
    assert entropy_prefix("my-cluster", TopicPartition("my-topic", 3), 128)[:12] == "000010111001"


def test_keys() -> None:
    plain, spread = PinterestObjectKeys("my-cluster"), PinterestObjectKeys("my-cluster", 12)
    name = TopicPartition("my-topic", 3)
    assert plain.file_key(name, 42, "log") == "my-cluster/my-topic-3/00000000000000000042.log"
    assert spread.file_key(name, 42, "index") == "000010111001/my-cluster/my-topic-3/00000000000000000042.index"
    for keys in (plain, spread):
        assert keys.partition_of_object_key(keys.file_key(name, 42, "log")) == name
        assert keys.partition_of_object_key(keys.partition_folder(name) + "_metadata") == name


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
    assert PinterestObjectKeys("my-cluster").partition_of_object_key(key) is None


def test_without_a_cluster_there_are_no_keys() -> None:
    for cluster in ("", "a/b", "a b"):
        with pytest.raises(UsageError, match="names no cluster"):
            PinterestObjectKeys(cluster)


def test_names_of_files() -> None:
    assert parse_file_name("00000000000000000042.timeindex") == (42, "timeindex")
    for name in ("0000000000000000042.log", "00000000000000000042.txnindex", "00000000000000000042.log.deleted", "_metadata"):
        assert parse_file_name(name) is None


def test_ids_are_the_same_for_the_same_segment_and_no_option_on_a_command_line() -> None:
    ids = [derive_segment_id(base) for base in range(500)]
    assert ids == [derive_segment_id(base) for base in range(500)]
    assert len(set(ids)) == 500
    assert not [one for one in ids if one.startswith("-") or len(one) != 22]


def test_metadata_is_what_its_own_code_reads_and_writes() -> None:
    entries = [SegmentTimestampBound(2000, 10), SegmentTimestampBound(1000, 0)]
    written = encode_metadata_file(ORDERS, entries)
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
    assert parse_metadata_file(written, ORDERS) == (SegmentTimestampBound(1000, 0), SegmentTimestampBound(2000, 10))
    with pytest.raises(BadData, match="it is of orders-3"):
        parse_metadata_file(written, TopicPartition("orders", 30))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"topicPartition":{"topic":"orders","partition":3},"metadata":{"timeindex":{"entries":[{"x":1}]}}}']
)
def test_what_is_no_metadata_is_refused(text: str) -> None:
    with pytest.raises(BadData, match="not a partition's metadata"):
        parse_metadata_file(text.encode(), ORDERS)


def test_the_watermark() -> None:
    assert format_watermark_file(42) == b"00000000000000000042"
    assert parse_watermark_base_offset(b"00000000000000000042\n", ORDERS) == 42
    for text in (b"", b"42", b"0000000000000000004x", b"\xff" * 20):
        with pytest.raises(BadData, match="not a base offset"):
            parse_watermark_base_offset(text, ORDERS)


def entries(data: bytes, form: str) -> list[tuple[int, int]]:
    return list(struct.iter_unpack(form, data))


def test_indexes_for_a_lower_base() -> None:
    index = b"".join(struct.pack(">ii", offset, 100 * offset) for offset in (5, 7, 9))
    assert entries(rebase_offset_index(index, 10), ">ii") == [(15, 500), (17, 700), (19, 900)]
    assert rebase_offset_index(b"", 10) == b""
    times = b"".join(struct.pack(">qi", 1000 + offset, offset) for offset in (5, 9))
    assert entries(rebase_time_index(times, 10), ">qi") == [(1005, 15), (1009, 19)]


def test_an_index_never_has_the_two_entries_that_the_consumer_cannot_search() -> None:
    two = struct.pack(">iiii", 5, 500, 7, 700)
    assert entries(rebase_offset_index(two, 1), ">ii") == [(8, 700)]
    with pytest.raises(Endless):
        byte_position(two, 3)
    for count in (0, 1, 3, 4, 5, 6, 7, 20):
        index = b"".join(struct.pack(">ii", 10 * n + 5, 100 * n) for n in range(count))
        for offset in range(10 * count + 10):
            below = [position for at, position in entries(index, ">ii") if at <= offset]
            assert byte_position(index, offset) == (below[-1] if below else 0)


def test_what_lies_too_far_from_the_base_is_found_by_scanning() -> None:
    index = b"".join(struct.pack(">ii", offset, 100 * offset) for offset in (1, 2, 3, 4, 5))
    far = 2**31 - 1 - 3
    assert entries(rebase_offset_index(index, far), ">ii") == [(2**31 - 3, 100), (2**31 - 2, 200), (2**31 - 1, 300)]
    times = struct.pack(">qi", 1009, 9)
    assert entries(rebase_time_index(times, far), ">qi") == [(1009, 2**31 - 1)]


def live(*ids: str) -> list[RemoteLogSegmentMetadata]:
    return [segment_of(files_of(100), id=one) for one in ids]


def test_a_generation_goes_on_only_where_nothing_before_has_changed() -> None:
    generation = Generation(
        name="g", number=3, began=1, whole=1, slot=9, parts=(PublishedSegment(segment="a", base=0, last=4), PublishedSegment(segment="b"))
    )
    assert [s.id for s in generation.segments_to_append(live("a", "b", "c"), 0) or []] == ["c"]
    assert generation.segments_to_append(live("a", "b"), 0) == []
    assert generation.segments_to_append(live("a", "b"), 1) is None, "its first object holds records below the log start"
    for changed in (("a",), ("a", "x"), ("x", "b", "c"), (), ("b", "c")):
        assert generation.segments_to_append(live(*changed), 0) is None
    assert generation.timestamp_bounds == (SegmentTimestampBound(0, 0),)


@pytest.mark.parametrize("url", ["s3://bucket/by agents", "s3://bucket/%20", "s3://bucket/für", "bucket"])
def test_a_prefix_that_their_endpoint_refuses_is_no_target(url: str) -> None:
    with pytest.raises(ValidationError):
        PinterestSettings(cluster="prod", target=url)


@pytest.mark.parametrize("url", ["", "s3://bucket", "s3://bucket/a/b.c-d_e/", "file:///any where"])
def test_targets(url: str) -> None:
    assert PinterestSettings(target=url).target == url
