"""Kafka's own decoder, RemoteLogMetadataCache, lineage check and partitioner on the same records as ours."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest

from compactor.adapters.brokers.cache import RemoteLogMetadataCache
from compactor.adapters.brokers.chain import without_empty_epochs
from compactor.adapters.brokers.codec import encode_record
from compactor.adapters.brokers.follow import metadata_partition
from compactor.errors import BadData, NotFound
from compactor.model.remote_log import MetadataRecord, RemoteLogSegmentMetadataRecord, uuid_text
from tests.conformance.kafka import Kafka
from tests.metadata_events import EPOCHS, LAST_OFFSET, LINEAGES, PARTITION, script
from tests.support.broker_lookups import highest_offset, list_epoch, within_lineage

LOG_END = 50


def kafkas(kafka: Kafka, events: list[MetadataRecord]) -> dict[str, Any]:
    question = {"epochs": list(EPOCHS), "first": 0, "last": LAST_OFFSET + 1, "lineages": LINEAGES, "log_end": LOG_END}
    answer = kafka.fold([encode_record(event) for event in events], question)
    assert answer["written"] == [base64.b64encode(encode_record(event)).decode() for event in events], "Kafka writes it in other bytes"
    return answer


@pytest.mark.parametrize("block", range(4))
def test_kafka_folds_the_same(kafka: Kafka, block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        events = script(random.Random(seed))
        theirs = kafkas(kafka, events)
        cache = RemoteLogMetadataCache(PARTITION)
        stopped = set()
        for offset, event in enumerate(events):
            try:
                cache.apply_record(event, offset)
            except BadData:
                stopped.add(str(offset))
        assert stopped == set(theirs["errors"]), seed
        assert sorted(map(told, cache.list_segments()), key=str) == sorted(theirs["all"], key=str), seed
        for epoch in EPOCHS:
            agrees(cache, epoch, theirs["epochs"][str(epoch)])
        for lineage, valid in zip(LINEAGES, theirs["within"], strict=True):
            ours = {one.id for one in cache.list_segments() if within_lineage(one, LOG_END, without_empty_epochs(lineage))}
            assert ours == set(valid), (seed, lineage)


def agrees(cache: RemoteLogMetadataCache, epoch: int, theirs: dict[str, Any]) -> None:
    found = [cache.find_segment(epoch, offset) for offset in range(LAST_OFFSET + 2)]
    assert [one.id if one else "" for one in found] == theirs["lookups"]
    assert highest_offset(cache, epoch) == theirs.get("highest")
    try:
        assert sorted(one.id for one in list_epoch(cache, epoch)) == sorted(theirs["list"])
    except NotFound:
        assert theirs["lost"]


def told(segment: RemoteLogSegmentMetadataRecord) -> dict[str, Any]:
    custom = {} if segment.custom_metadata is None else {"custom": base64.b64encode(segment.custom_metadata).decode()}
    return {
        "id": segment.id, "state": segment.state.value, "start": segment.start_offset, "end": segment.end_offset,
        "broker": segment.broker_id, "event_ms": segment.event_timestamp_ms, "max_timestamp_ms": segment.max_timestamp_ms,
        "size": segment.size_bytes, "txn_index_empty": segment.txn_index_empty, **custom,
    }  # fmt: skip


def test_kafka_partitions_the_same(kafka: Kafka) -> None:
    rng = random.Random(1)
    for _ in range(300):
        topic_id, partition, partitions = rng.randbytes(16), rng.randrange(2**31), rng.randint(1, 200)
        theirs = kafka.metadata_partition(uuid_text(topic_id), partition, partitions)
        assert metadata_partition(topic_id, partition, partitions) == theirs
