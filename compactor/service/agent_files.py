"""What lies in a broker's log directories: whose they are, which partitions, which segments. Only names, sizes and times are read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from checkpoint.files import parse_cleaner_offset_checkpoint, parse_leader_epoch_checkpoint
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.service.agent_plan import SealedFile, SeenDirectory, is_current
from compactor.transfer.import_root import METADATA_LOG

META = "meta.properties"
CLEANED = "cleaner-offset-checkpoint"
EPOCHS = "leader-epoch-checkpoint"

_SEGMENT = re.compile(r"(\d{20})\.log")


@dataclass(frozen=True)
class BrokerIdentity:
    """By ``meta.properties``: ``node.id`` of KRaft, ``broker.id`` of brokers with ZooKeeper."""

    broker_id: int
    cluster_id: str


def identity_of(log_dir: Path) -> BrokerIdentity:
    """Raises UsageError for what is no broker's log directory, or cannot be read."""
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


def partitions_in(
    log_dir: Path, topics: Sequence[str], known: Mapping[TopicPartition, SeenDirectory], now_ms: int
) -> Iterator[SeenDirectory]:
    """The partitions whose topics match one of these whole expressions. A directory that has not changed is not listed again.

    What the broker is about to delete, or moves between disks, has another name. Raises UsageError where ``log_dir`` cannot be read.
    """
    wanted = [re.compile(topic) for topic in topics]
    try:
        with os.scandir(log_dir) as entries:
            names = [entry.name for entry in entries]
    except OSError as error:
        raise UsageError(f"{log_dir} cannot be read: {error.strerror}", hint="Check its owner and its mode") from error
    for text in sorted(names):
        name = _parsed(text)
        if name is None or name.topic == METADATA_LOG or not any(each.fullmatch(name.topic) for each in wanted):
            continue
        path = log_dir / text
        try:
            mtime_ms = path.stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            continue
        except OSError as error:
            yield SeenDirectory(name, str(path), 0, now_ms, problem=f"{path} cannot be read: {error.strerror}")
            continue
        before = known.get(name)
        same = before is not None and before.path == str(path) and is_current(before, mtime_ms)
        yield before if same and before is not None else listed(name, path, mtime_ms, now_ms)


def listed(name: TopicPartition, path: Path, mtime_ms: int, now_ms: int) -> SeenDirectory:
    """One partition's directory. What vanishes meanwhile is left out: the next look comes soon, as the directory has changed."""
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
        return SeenDirectory(name, str(path), mtime_ms, now_ms)
    except OSError as error:
        return SeenDirectory(name, str(path), mtime_ms, now_ms, problem=f"{path} cannot be read: {error.strerror}")
    ordered = sorted(bases)
    sealed = [SealedFile(base, end, bases[base].st_size, bases[base].st_mtime_ns // 1_000_000) for base, end in pairwise(ordered)]
    return SeenDirectory(name, str(path), mtime_ms, now_ms, tuple(sealed), ordered[-1] if ordered else -1)


def cleaner_offset(partition_dir: Path, name: TopicPartition) -> int | None:
    """The first offset that the broker's own cleaner has not cleaned; None where it never was there. Raises BadData, OSError."""
    path = partition_dir.parent / CLEANED
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    return parse_cleaner_offset_checkpoint(text, str(path)).get((name.topic, name.partition))


def last_epoch(partition_dir: Path) -> int:
    """The latest leader epoch that this replica knows of; -1 where it knows of none. Raises BadData, OSError."""
    path = partition_dir / EPOCHS
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return -1
    lineage = parse_leader_epoch_checkpoint(text, str(path))
    return lineage[-1].epoch if lineage else -1


def _parsed(text: str) -> TopicPartition | None:
    try:
        return TopicPartition.parse(text)
    except UsageError:
        return None
