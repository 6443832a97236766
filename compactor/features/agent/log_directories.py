"""Listing of a broker's log directories. Reads names, sizes, times and small files only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from checkpoint.files import parse_leader_epoch_checkpoint
from compactor.constants import EMPTY_TOPIC_ID, NO_LEADER_EPOCH, LeaderEpoch
from compactor.errors import BadData, UsageError
from compactor.features.agent.plan import PartitionDirectoryListing, SealedSegmentFile, is_listing_current
from compactor.features.imports.from_tier import METADATA_LOG, is_topic_chosen
from compactor.features.imports.log_directory import segment_log_path
from compactor.features.imports.log_identity import read_topic_id
from compactor.features.imports.staged_files import list_staged_files
from compactor.model.ids import TopicPartition
from compactor.records.indexes import TIME_ENTRY

META = "meta.properties"
EPOCHS = "leader-epoch-checkpoint"

_SEGMENT = re.compile(r"(\d{20})\.log")


@dataclass(frozen=True)
class BrokerIdentity:
    """Ids from ``meta.properties``: ``node.id`` in KRaft mode, ``broker.id`` in ZooKeeper mode."""

    broker_id: int
    cluster_id: str


def read_broker_identity(log_dir: Path) -> BrokerIdentity:
    """Raises UsageError if it is not a broker's log directory, or cannot be read."""
    try:
        text = (log_dir / META).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"{log_dir} is not a broker's log directory: {META}: {error.strerror}",
            hint="Name the broker's log.dirs, and run as a user who may read",
        ) from error
    values = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line and not line.startswith("#"))
    known = {name.strip(): value.strip() for name, value in values.items()}
    number = known.get("node.id", known.get("broker.id", ""))
    if not number.isdigit() or not known.get("cluster.id"):
        raise UsageError(f"{log_dir / META} names no broker and cluster", hint="It has node.id or broker.id, and cluster.id")
    return BrokerIdentity(int(number), known["cluster.id"])


def scan_log_directory(
    log_dir: Path,
    topics: Sequence[str],
    last_listings: Mapping[TopicPartition, PartitionDirectoryListing],
    now_ms: int,
    topics_in_tier: Container[str] = (),
    on_left_out: Callable[[str], None] = lambda topic: None,
) -> Iterator[PartitionDirectoryListing]:
    """Yield the listing of each partition directory whose topic is chosen, in order of names; the latest listing if it has not changed
    since. Directories that the broker deletes, or moves between disks, are left out.

    :param topics: regular expressions for whole topic names.
    :param on_left_out: called with each matching topic that is left out because its name begins with __.
    :raises UsageError: if ``log_dir`` cannot be read.
    """
    try:
        with os.scandir(log_dir) as entries:
            names = [entry.name for entry in entries]
    except OSError as error:
        raise UsageError(f"{log_dir} cannot be read: {error.strerror}", hint="Check its owner and its mode") from error
    for text in sorted(names):
        name = _parse_directory_name(text)
        if name is None or name.topic == METADATA_LOG:
            continue
        if not is_topic_chosen(name.topic, topics, topics_in_tier):
            if any(re.fullmatch(regex, name.topic) for regex in topics):
                on_left_out(name.topic)
            continue
        path = log_dir / text
        try:
            mtime_ms = path.stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            continue
        except OSError as error:
            yield PartitionDirectoryListing(name, str(path), 0, now_ms, problem=f"{path} cannot be read: {error.strerror}")
            continue
        before = last_listings.get(name)
        same = before is not None and before.path == str(path) and is_listing_current(before, mtime_ms)
        yield before if same and before is not None else scan_partition_directory(name, path, mtime_ms, now_ms)


def scan_partition_directory(partition: TopicPartition, path: Path, mtime_ms: int, now_ms: int) -> PartitionDirectoryListing:
    """Listing of one partition's directory: empty if it is gone, with a ``problem`` if it cannot be read. mtime_ms: before it is listed."""
    bases: dict[int, os.stat_result] = {}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                match = _SEGMENT.fullmatch(entry.name)
                if match:
                    try:
                        bases[int(match[1])] = entry.stat()
                    except FileNotFoundError:
                        continue
    except FileNotFoundError:
        return PartitionDirectoryListing(partition, str(path), mtime_ms, now_ms)
    except OSError as error:
        return PartitionDirectoryListing(partition, str(path), mtime_ms, now_ms, problem=f"{path} cannot be read: {error.strerror}")
    ordered = sorted(bases)
    try:
        staged = list_staged_files(path, ordered)
    except OSError:
        staged = []  # the directory has changed, and is listed again
    sealed = [SealedSegmentFile(base, end, bases[base].st_size, bases[base].st_mtime_ns // 1_000_000) for base, end in pairwise(ordered)]
    active_base = ordered[-1] if ordered else -1
    try:
        topic_id = read_topic_id(path)
    except (BadData, OSError):
        topic_id = EMPTY_TOPIC_ID  # an import says what is wrong with it
    return PartitionDirectoryListing(
        partition, str(path), mtime_ms, now_ms, tuple(sealed), active_base, staged=tuple(staged), topic_id=topic_id
    )


def indexed_timestamp_ms(partition_dir: Path, base_offset: int) -> int:
    """Largest timestamp of a sealed segment by its time index; -1 if the index is empty or gone."""
    try:
        data = segment_log_path(partition_dir, base_offset).with_suffix(".timeindex").read_bytes()
    except OSError:
        return -1
    complete = len(data) - len(data) % TIME_ENTRY.itemsize
    return int(np.frombuffer(data[:complete], TIME_ENTRY)["timestamp"][-1]) if complete else -1


def last_leader_epoch(partition_dir: Path) -> LeaderEpoch:
    """Latest leader epoch of the replica; -1 if there is none. Raises BadData, OSError."""
    path = partition_dir / EPOCHS
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return NO_LEADER_EPOCH
    lineage = parse_leader_epoch_checkpoint(text, str(path))
    return lineage[-1].epoch if lineage else NO_LEADER_EPOCH


def _parse_directory_name(text: str) -> TopicPartition | None:
    try:
        return TopicPartition.parse(text)
    except UsageError:
        return None
