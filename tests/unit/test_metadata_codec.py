"""The values of ``__remote_log_metadata``: vectors that Kafka's own serializer made, and what no broker would take."""

from __future__ import annotations

import pytest

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers.codec import decode_record, encode_record
from compactor.adapters.brokers.follow import java_objects_hash_code, metadata_partition
from compactor.constants import LeaderEpoch, Offset
from compactor.errors import BadData
from compactor.model.remote_log import (
    MetadataRecord,
    PartitionDeleteState,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    RemotePartitionDeleteMetadataRecord,
    TopicIdPartition,
    uuid_bytes,
)
from compactor.model.segment import SegmentState

PARTITION = TopicIdPartition(uuid_bytes("lZ6vvmajTWKDBUTV6SQAtQ"), "topic1", 42)
ID = uuid_bytes("adh9f8BMS4anaUnD8KWfWg")
EPOCHS = (EpochEntry(LeaderEpoch(0), Offset(100)), EpochEntry(LeaderEpoch(1), Offset(200)), EpochEntry(LeaderEpoch(2), Offset(300)))
START = RemoteLogSegmentMetadataRecord(PARTITION, ID, 100, 1000, 2, 1_000_000_000, 2_000_000_000, EPOCHS, 100_500)
FINISHED = RemoteLogSegmentMetadataUpdateRecord(PARTITION, ID, 2, 2_000_000_001, SegmentState.COPY_SEGMENT_FINISHED)
NAME = "07746f70696331959eafbe66a34d62830544d5e92400b50000002a00"
START_HEAD = (
    f"010000{NAME}69d87d7fc04c4b86a76949c3f0a59f5a00000000000000006400000000000003e800000002000000003b9aca00000000007735940004"
    "000000000000000000000064000000000100000000000000c80000000002000000000000012c0000018894"
)
UPDATE_HEAD = f"010100{NAME}69d87d7fc04c4b86a76949c3f0a59f5a00000000020000000077359401"
VECTORS: dict[str, tuple[MetadataRecord, str]] = {
    "start": (START, START_HEAD + "000000"),
    "start with custom metadata": (START._replace(custom_metadata=b"\1\2\3"), START_HEAD + "040102030000"),
    "start without a transaction index": (START._replace(txn_index_empty=True), START_HEAD + "000001000101"),
    "finished": (FINISHED, UPDATE_HEAD + "000100"),
    "finished with custom metadata": (FINISHED._replace(custom_metadata=b"\1\2\3"), UPDATE_HEAD + "040102030100"),
    "delete started": (FINISHED._replace(state=SegmentState.DELETE_SEGMENT_STARTED), UPDATE_HEAD + "000200"),
    "delete finished": (FINISHED._replace(state=SegmentState.DELETE_SEGMENT_FINISHED), UPDATE_HEAD + "000300"),
    "partition marked": (
        RemotePartitionDeleteMetadataRecord(PARTITION, 2, 2_000_000_002, PartitionDeleteState.DELETE_PARTITION_MARKED),
        f"010200{NAME}0000000200000000773594020000",
    ),
}
PLAIN = bytes.fromhex(VECTORS["start"][1])


@pytest.mark.parametrize("name", VECTORS)
def test_golden_vectors(name: str) -> None:
    record, text = VECTORS[name]
    assert encode_record(record).hex() == text
    assert decode_record(bytes.fromhex(text)) == record


def test_unknown_tagged_fields_are_carried_through() -> None:
    newer = bytes.fromhex(START_HEAD + "0000" + "02" + "000101" + "0104" + "00000007")
    record = decode_record(newer)
    assert isinstance(record, RemoteLogSegmentMetadataRecord)
    assert (record.txn_index_empty, record.tags) == (True, ((1, b"\0\0\0\7"),))
    assert encode_record(record) == newer
    nested = START._replace(nested=(((5, b"in the partition"),), (), (), ((6, b""), (300, b"in an epoch")), ()))
    assert decode_record(encode_record(nested)) == nested


def test_custom_metadata_that_is_empty_is_not_none() -> None:
    empty = START._replace(custom_metadata=b"")
    assert encode_record(empty) != encode_record(START)
    assert decode_record(encode_record(empty)) == empty


@pytest.mark.parametrize(
    ("value", "cause", "position"),
    [
        (None, "the value is null", 0),
        (b"", "cut short", 0),
        (PLAIN[:-1], "cut short", 130),
        (PLAIN + b"\0", "1 bytes follow the message", 131),
        (b"\0" + PLAIN[1:], "the frame's version is 0, not 1", 0),
        (b"\2" + PLAIN[1:], "the frame's version is 2, not 1", 0),
        (b"\1\3\0" + PLAIN[3:], "a snapshot record (api 3) has no place in the topic", 1),
        (b"\1\4\0" + PLAIN[3:], "unknown kind of record: api 4", 1),
        (b"\1\0\1" + PLAIN[3:], "api 0 has version 1, not 0", 2),
        (PLAIN[:-2] + b"\1\0", "in state COPY_SEGMENT_FINISHED", 131),
        (PLAIN[:-2] + b"\4\0", "unknown state 4 of a segment", 129),
        (bytes.fromhex(VECTORS["partition marked"][1])[:-2] + b"\3\0", "unknown state 3 of a partition's deletion", 43),
        (PLAIN[:3] + b"\0" + PLAIN[4:], "the topic has no name", 3),
        (PLAIN[:4] + b"\xff" + PLAIN[5:], "not UTF-8", 4),
        (b"\xff\xff\xff\xff\xff\xff", "longer than five bytes", 0),
        (PLAIN.replace(bytes.fromhex("00000000000003e8"), bytes.fromhex("0000000000000063")), "ends at 99, before it starts at 100", 131),
        (PLAIN.replace(bytes.fromhex("000000000000006400000000000003e8"), b"\xff" * 16), "the start offset is -1", 131),
        (bytes.fromhex(START_HEAD + "0000" + "02" + "010100" + "000101"), "tagged fields do not ascend", 134),
    ],
)
def test_what_stops_brokers_is_refused_with_offset_and_bytes(value: bytes | None, cause: str, position: int) -> None:
    with pytest.raises(BadData) as refused:
        decode_record(value, offset=4711, topic="__remote_log_metadata-33")
    assert cause in refused.value.cause
    assert (refused.value.segment, refused.value.offset, refused.value.position) == ("__remote_log_metadata-33", 4711, position)
    assert (f"{len(value)} bytes: {value[:20].hex()}" if value is not None else "no bytes") in refused.value.cause


@pytest.mark.parametrize("length", range(len(PLAIN)))
def test_every_cut_is_noticed(length: int) -> None:
    with pytest.raises(BadData):
        decode_record(PLAIN[:length])


@pytest.mark.parametrize(
    "record", [START._replace(state=SegmentState.COPY_SEGMENT_FINISHED), START._replace(leader_epochs=()), START._replace(end_offset=99)]
)
def test_nothing_is_encoded_that_would_not_be_decoded(record: RemoteLogSegmentMetadataRecord) -> None:
    with pytest.raises(ValueError, match="segment"):
        encode_record(record)


@pytest.mark.parametrize(
    ("topic_id", "partition", "partitions", "expected"),
    [
        ("lZ6vvmajTWKDBUTV6SQAtQ", 42, 50, 33),
        ("lZ6vvmajTWKDBUTV6SQAtQ", 0, 50, 9),
        ("MWJ6FHTfRYy67jzwZdeqSQ", 7, 50, 26),
        ("MWJ6FHTfRYy67jzwZdeqSQ", 7, 5, 1),
        ("AAAAAAAAAAAAAAAAAAAAAg", 0, 50, 47),
    ],
)
def test_partitioner(topic_id: str, partition: int, partitions: int, expected: int) -> None:
    assert metadata_partition(uuid_bytes(topic_id), partition, partitions) == expected


def test_the_hash_wraps_as_javas() -> None:
    high, low = uuid_bytes("lZ6vvmajTWKDBUTV6SQAtQ")[:8], uuid_bytes("lZ6vvmajTWKDBUTV6SQAtQ")[8:]
    halves = [int.from_bytes(half[:4], "big") ^ int.from_bytes(half[4:], "big") for half in (low, high)]
    assert java_objects_hash_code((halves[0], halves[1], 42)) == -614426227 & 0xFFFFFFFF
