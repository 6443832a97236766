"""A metadata topic of 1,000,000 records folded into local state: time and memory, of the first start and of the second.

    python benchmarks/metadata_topic.py [--records N] [--partitions N] [--directory DIR]

The topic is made on the fly, record by record, as brokers write it: segments of many user partitions in turn, every third one deleted
later. Its source costs no network; each start is a process of its own, so that the memory is that of one start.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from checkpoint.lineage import EpochEntry
from compactor.brokers.metadata_topic.chain import segment_read_ranges
from compactor.brokers.metadata_topic.codec import (
    TOPIC,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    TopicIdPartition,
    encode_record,
)
from compactor.brokers.metadata_topic.follow import FoldedMetadataTopic, metadata_partition
from compactor.brokers.metadata_topic.persisted_state import PersistedStates
from compactor.brokers.metadata_topic.ports import PollResult, TopicBounds, TopicIdentity, TopicRecord
from compactor.local.rocks import RocksDatabase
from compactor.model.segment import SegmentState

METADATA_PARTITIONS = 50
LIVE = 60
"""Segments of a partition before the oldest ones begin to go."""
FINISHED, DELETING, GONE = SegmentState.COPY_SEGMENT_FINISHED, SegmentState.DELETE_SEGMENT_STARTED, SegmentState.DELETE_SEGMENT_FINISHED


class GeneratedTopic:
    """The MetadataTopic port over records that are made when they are polled. Nothing is kept of them."""

    name = TOPIC

    def __init__(self, records: int, partitions: int) -> None:
        names = [TopicIdPartition((number // 8).to_bytes(16, "big"), f"topic-{number // 8}", number % 8) for number in range(partitions)]
        self._names: list[list[TopicIdPartition]] = [[] for _ in range(METADATA_PARTITIONS)]
        for name in names:
            self._names[metadata_partition(name.topic_id, name.partition, METADATA_PARTITIONS)].append(name)
        per_name = records // partitions
        self._per_name = per_name
        self._ends = [len(found) * per_name for found in self._names]
        self._sources: dict[int, Iterator[TopicRecord]] = {}

    def identity(self) -> TopicIdentity:
        return TopicIdentity("cluster", "topic", METADATA_PARTITIONS)

    def bounds(self) -> Mapping[int, TopicBounds]:
        return {number: TopicBounds(0, end) for number, end in enumerate(self._ends)}

    def seek(self, positions: Mapping[int, int]) -> None:
        self._sources = {}
        for number, position in positions.items():
            self._sources[number] = self._records(number, position)

    def poll(self, limit: int, timeout_s: float) -> PollResult:
        found: list[TopicRecord] = []
        reached: dict[int, int] = {}
        share = max(1, limit // max(1, len(self._sources)))
        for number, source in list(self._sources.items()):
            for _ in range(share):
                record = next(source, None)
                if record is None:
                    reached[number] = self._ends[number]
                    del self._sources[number]
                    break
                found.append(record)
        return PollResult(found, reached)

    def append(self, partition: int, value: bytes) -> int:
        raise AssertionError("nothing is appended here")

    def close(self) -> None:
        self._sources = {}

    def _records(self, number: int, position: int) -> Iterator[TopicRecord]:
        """From a position on; quick at the beginning and at the end."""
        names, end = self._names[number], self._ends[number]
        lives = {}
        for offset in range(position, end):
            at, index = offset % len(names), offset // len(names)
            if at not in lives:
                lives[at] = islice(_life(names[at], self._per_name), index, None)
            yield TopicRecord(number, offset, None, next(lives[at]))


def _life(name: TopicIdPartition, records: int) -> Iterator[bytes]:
    """Segments of 1000 offsets; from ``LIVE`` on each new one takes the oldest away."""
    for number in range(records):
        epochs = (EpochEntry(number // 100, number * 1000),)
        raw_id = _raw_id(name, number)
        yield encode_record(
            RemoteLogSegmentMetadataRecord(name, raw_id, number * 1000, number * 1000 + 999, 1, number, number, epochs, 1 << 30)
        )
        yield encode_record(RemoteLogSegmentMetadataUpdateRecord(name, raw_id, 1, number, FINISHED))
        if number >= LIVE:
            for state in (DELETING, GONE):
                yield encode_record(RemoteLogSegmentMetadataUpdateRecord(name, _raw_id(name, number - LIVE), 1, number, state))


def _raw_id(name: TopicIdPartition, number: int) -> bytes:
    return name.topic_id[8:] + name.partition.to_bytes(2, "big") + number.to_bytes(6, "big")


def start(records: int, partitions: int, folder: Path) -> dict[str, object]:
    """One process from its start to the answer for one partition."""
    topic = GeneratedTopic(records, partitions)
    began, used = time.perf_counter(), time.process_time()
    store = RocksDatabase(folder)
    followed = FoldedMetadataTopic(topic, PersistedStates(store), clock_ms=lambda: 0)
    progress = followed.catch_up(3600)
    caught_up = time.perf_counter() - began
    listed = followed.tiered_partitions()
    all_s = time.perf_counter() - began
    one = listed[len(listed) // 2].partition
    folded = followed.folded_partition(one.topic_id, one.partition)
    assert folded is not None
    last = max(folded.cache.epochs)
    links = segment_read_ranges(folded.cache, [EpochEntry(epoch, epoch * 100_000) for epoch in range(last + 1)])
    store.close()
    return {
        "records": progress.records,
        "behind": sum(progress.unread.values()),
        "seconds": round(caught_up, 2),
        "seconds_with_list": round(all_s, 2),
        "partitions": len(listed),
        "segments": sum(found.finished + found.other for found in listed),
        "links": len(links),
        "cpu": round(time.process_time() - used, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "state_mib": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) >> 20,
    }


def drain(records: int, partitions: int) -> dict[str, object]:
    """What of the first start's time is the source's."""
    topic = GeneratedTopic(records, partitions)
    began, used = time.perf_counter(), time.process_time()
    topic.seek(dict.fromkeys(range(METADATA_PARTITIONS), 0))
    while len(topic.poll(10_000, 0).records):
        pass
    return {"seconds": round(time.perf_counter() - began, 2), "cpu": round(time.process_time() - used, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=5_000)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(options.records, options.partitions, options.directory)))
        return
    print(f"the source alone: {json.dumps(drain(options.records, options.partitions))}")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for name in ("first", "second"):
            sizes = ["--records", str(options.records), "--partitions", str(options.partitions)]
            command = [sys.executable, "-m", "benchmarks.metadata_topic", "--start", *sizes, "--directory", f"{folder}/state"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print(f"{name} start: {done.stdout.strip()}")


if __name__ == "__main__":
    main()
