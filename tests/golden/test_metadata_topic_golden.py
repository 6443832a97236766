"""What brokers wrote into ``__remote_log_metadata``: decoded, folded, and looked up as the tier beside it says."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers import chain
from compactor.adapters.brokers.cache import RemoteLogMetadataCache
from compactor.adapters.brokers.codec import decode_record, encode_record
from compactor.adapters.brokers.follow import metadata_partition
from compactor.constants import LeaderEpoch, Offset
from compactor.model.segment import SegmentState
from tests.golden_cases import names, unpack
from tests.support.broker_lookups import earliest_offset, latest_tiered
from tests.support.lookup_holes import lookup_holes

CAPTURES = [
    *(("tiered", name, "metadata.jsonl") for name in names("tiered")),
    *(("aiven", name, "metadata-topic.jsonl") for name in names("aiven")),
]


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def folded(path: Path) -> RemoteLogMetadataCache:
    cache = None
    for event in events(path):
        record = decode_record(base64.b64decode(event["value"]), offset=event["offset"])
        cache = cache or RemoteLogMetadataCache(record.partition)
        assert cache.apply_record(record, event["offset"]) is None
    assert cache is not None
    return cache


@pytest.mark.parametrize(("kind", "name", "file"), CAPTURES)
def test_every_record_encodes_to_the_bytes_it_came_from(kind: str, name: str, file: str, tmp_path: Path) -> None:
    captured = events(unpack(kind, tmp_path) / name / file)
    assert len(captured) >= 10
    for event in captured:
        value = base64.b64decode(event["value"])
        record = decode_record(value, offset=event["offset"])
        assert encode_record(record) == value
        assert event["key"] is None
        assert metadata_partition(record.partition.topic_id, record.partition.partition, 5) == event["partition"]


@pytest.mark.parametrize("version", names("tiered"))
def test_the_fold_names_the_segments_that_lie_in_the_tier(version: str, tmp_path: Path) -> None:
    case = unpack("tiered", tmp_path) / version
    cache = folded(case / "metadata.jsonl")
    logs = {path.name.removesuffix(".log"): path for path in (case / "tier").rglob("*.log")}
    assert {f"{segment.start_offset:020d}-{segment.id}" for segment in cache.list_segments()} == set(logs)
    for segment in cache.list_segments():
        assert segment.size_bytes == logs[f"{segment.start_offset:020d}-{segment.id}"].stat().st_size
        assert segment.state is SegmentState.COPY_SEGMENT_FINISHED
    lineage = tuple(
        EpochEntry(LeaderEpoch(int(epoch)), Offset(int(start)))
        for epoch, start in map(str.split, last_checkpoint(case / "tier").splitlines()[2:])
    )
    links = chain.segment_read_ranges(cache, lineage)
    assert [link.segment.id for link in links] == [
        segment.id for segment in sorted(cache.list_segments(), key=lambda one: one.start_offset)
    ]
    assert (links[0].first, links[-1].last, chain.offset_gaps(links), list(lookup_holes(cache))) == (0, 3209, [], [])
    assert latest_tiered(cache, lineage, 4000) == (3209, 6)
    assert earliest_offset(cache, lineage) == 0


def last_checkpoint(tier: Path) -> str:
    return max(tier.rglob("*.leader_epoch_checkpoint"), key=lambda path: path.name[:20]).read_text()
