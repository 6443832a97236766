"""The golden tiers of real brokers: what their metadata events say, decoded by itself, and the stores over their objects."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from compactor.config.settings import AivenSettings
from compactor.constants import LeaderEpoch, Offset, TimestampMs, TopicId
from compactor.model.ids import TopicPartition
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata
from tests.golden_cases import unpack

ORDERS = TopicPartition("orders", 0)


@dataclass(frozen=True)
class BrokerTier:
    """``objects``: the directory that the layout's store has as its root. ``unfinished``: announced and never finished."""

    folder: Path
    objects: Path
    topic_id: str
    segments: tuple[RemoteLogSegmentMetadata, ...]
    unfinished: tuple[RemoteLogSegmentMetadata, ...]

    def topic(self, name: TopicPartition) -> TopicId:
        assert name == ORDERS
        return TopicId(self.topic_id)

    def local_files(self) -> dict[int, dict[str, dict[str, Any]]]:
        """Base offset -> suffix -> size and sha256 of what the broker had on disk, for most segments of a tier of Aiven's plug-in."""
        rows = [json.loads(line) for line in (self.folder / "local-segments.jsonl").read_text().splitlines()]
        return {row["base_offset"]: {Path(name).suffix[1:]: about for name, about in row["files"].items()} for row in rows}

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "records.jsonl").read_text().splitlines()]

    def settings(self) -> AivenSettings:
        """[tier.aiven] as it fits the brokers' ``rsm.config``."""
        broker = json.loads((self.folder / "config.json").read_text())["broker"]
        given = {key.removeprefix("rsm.config."): value for key, value in broker.items() if key.startswith("rsm.config.")}
        pairs = [name for name in given.get("encryption.key.pairs", "").split(",") if name]
        if given.get("compression.enabled") == "true":
            compression = "heuristic" if given.get("compression.heuristic.enabled") == "true" else "zstd"
        else:
            compression = "none"
        fields = [name for name in given.get("custom.metadata.fields.include", "").split(",") if name]
        return AivenSettings.model_validate(
            {
                "key_prefix": given.get("key.prefix", ""),
                "key_pairs": {name: str(self.folder / "keys" / f"{name}.private.pem") for name in pairs},
                "active_key_pair": given.get("encryption.key.pair.id", ""),
                "chunk_size": int(given["chunk.size"]),
                "compression": compression,
                "custom_metadata_fields": fields,
            }
        )


def local_tier(version: str, scratch: Path) -> BrokerTier:
    """What LocalTieredStorage of this Kafka wrote; ``objects`` stands for ``rsm.config.dir``, so it may be written into."""
    case = unpack("tiered", scratch) / version
    root = scratch / f"rsm {version}"
    if not root.exists():
        root.mkdir()
        (case / "tier").rename(root / "kafka-tiered-storage")
    return _tier(case, root, "metadata.jsonl")


def aiven_tier(case: str, scratch: Path) -> BrokerTier:
    folder = unpack("aiven", scratch) / case
    return _tier(folder, folder / "objects", "metadata-topic.jsonl")


def _tier(folder: Path, objects: Path, events: str) -> BrokerTier:
    finished, announced, topic_ids = _folded(folder / events)
    assert len(topic_ids) == 1
    return BrokerTier(folder, objects, next(iter(topic_ids)), finished, announced)


@cache
def _folded(path: Path) -> tuple[tuple[RemoteLogSegmentMetadata, ...], tuple[RemoteLogSegmentMetadata, ...], set[str]]:
    started: dict[str, RemoteLogSegmentMetadata] = {}
    finished: dict[str, RemoteLogSegmentMetadata] = {}
    topic_ids = set()
    for line in path.read_text().splitlines():
        event = _Event(base64.b64decode(json.loads(line)["value"]))
        assert event.uvarint() == 1
        kind, version = event.uvarint(), event.uvarint()
        assert (kind in (0, 1), version) == (True, 0)
        name, topic_id, partition = event.text(), event.uuid(), event.number(">i")
        event.tags()
        segment_id = event.uuid()
        event.tags()
        if (name, partition) != ORDERS:
            continue
        topic_ids.add(topic_id)
        if kind == 0:
            started[segment_id] = event.announced(segment_id)
        else:
            event.number(">i"), event.number(">q")
            custom = event.blob()
            assert event.number(">b") == 1
            finished[segment_id] = started.pop(segment_id).model_copy(update={"custom_metadata": custom})
    in_order = [tuple(sorted(some.values(), key=lambda segment: segment.start_offset)) for some in (finished, started)]
    return in_order[0], in_order[1], topic_ids


class _Event:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def uvarint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def text(self) -> str:
        return self.take(self.uvarint() - 1).decode()

    def uuid(self) -> str:
        return base64.urlsafe_b64encode(self.take(16)).decode().rstrip("=")

    def blob(self) -> str:
        size = self.uvarint()
        return base64.b64encode(self.take(size - 1)).decode() if size else ""

    def tags(self) -> None:
        for _ in range(self.uvarint()):
            self.uvarint()
            self.take(self.uvarint())

    def announced(self, segment_id: str) -> RemoteLogSegmentMetadata:
        start, end, _, max_timestamp, event_time = (self.number(form) for form in (">q", ">q", ">i", ">q", ">q"))
        epochs = []
        for _ in range(self.uvarint() - 1):
            epochs.append(EpochEntry(epoch=LeaderEpoch(self.number(">i")), start_offset=Offset(self.number(">q"))))
            self.tags()
        return RemoteLogSegmentMetadata(
            id=segment_id,
            start_offset=Offset(start),
            end_offset=Offset(end),
            size_bytes=self.number(">i"),
            max_timestamp_ms=TimestampMs(max_timestamp),
            mtime_ms=event_time,
            leader_epochs=tuple(epochs),
            files={},
            custom_metadata=self.blob(),
        )
