"""Pinterest's tiered storage in a directory, in plain Python: what its uploader leaves, and what its consumer makes of it.

Written from the rules of S3StorageServiceEndpoint, DirectoryTreeWatcher, S3Utils and S3PartitionConsumer, with nothing of the project in it
but the plain reader of batches.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.plain_format import Batch, read_batches

KINDS = ("log", "index", "timeindex")


def folder_of(root: Path, cluster: str, partition: str, bits: int = 0) -> Path:
    if not bits:
        return root / cluster / partition
    digest = hashlib.md5(f"{cluster}-{partition}".encode()).digest()
    return root / "".join(f"{byte:08b}" for byte in digest)[:bits] / cluster / partition


def upload(log_dir: Path, root: Path, cluster: str = "prod", partition: str = "orders-0", bits: int = 0) -> Path:
    """All segments of a log directory, with ``_metadata`` and ``offset.wm``; what is there already stays. Empty indexes where none is."""
    folder = folder_of(root, cluster, partition, bits)
    folder.mkdir(parents=True, exist_ok=True)
    bases = sorted(path.stem for path in log_dir.glob("*.log"))
    for base in bases:
        for kind in KINDS:
            source = log_dir / f"{base}.{kind}"
            (folder / source.name).write_bytes(source.read_bytes() if source.exists() else b"")
    write_metadata(folder)
    (folder / "offset.wm").write_text(bases[-1])
    return folder


def write_metadata(folder: Path, bases: list[int] | None = None) -> None:
    """With every segment that has a log, or with these."""
    topic, _, partition = folder.name.rpartition("-")
    logs = sorted(folder.glob("*.log")) if bases is None else [folder / f"{base:020d}.log" for base in bases]
    entries = [
        {"timestamp": path.stat().st_mtime_ns // 1_000_000 if path.exists() else 0, "relativeOffset": 0, "baseOffset": int(path.stem)}
        for path in logs
    ]
    timeindex = {"entries": entries, "timeIndexType": "TOPIC_PARTITION", "size": len(entries)}
    document = {"topicPartition": {"partition": int(partition), "topic": topic}, "metadata": {"timeindex": timeindex}, "loadHash": "x"}
    (folder / "_metadata").write_text(json.dumps(document))


class Stalled(Exception):
    """The consumer would ask for the same position for ever."""


class Endless(Exception):
    """The consumer's search in an index would not end."""


@dataclass
class PlainConsumer:
    """Reads one partition's folder by the rules of S3PartitionConsumer. ``position``: the next offset that it asks for."""

    folder: Path
    position: int = 0

    def offsets(self) -> dict[int, Path]:
        """Base offset -> log: three files each, and named in ``_metadata`` where there is one. (getSortedOffsetKeyMapMerged)"""
        count: dict[int, int] = {}
        for path in self.folder.iterdir():
            if path.suffix[1:] in KINDS:
                count[int(path.stem)] = count.get(int(path.stem), 0) + 1
        found = {base: self.folder / f"{base:020d}.log" for base, files in sorted(count.items()) if files == len(KINDS)}
        if (self.folder / "_metadata").exists():
            entries = json.loads((self.folder / "_metadata").read_text())["metadata"]["timeindex"]["entries"]
            named = {entry["baseOffset"] for entry in entries}
            found = {base: path for base, path in found.items() if base in named}
        return found

    def poll(self) -> list[tuple[int, bytes | None, bytes | None]]:
        """The rest of the object that the position falls into; empty where it yields nothing."""
        objects = self.offsets()
        at_or_below = [base for base in objects if base <= self.position] or ([min(objects)] if objects and self.position == 0 else [])
        if not at_or_below:
            raise LookupError(f"offset {self.position} is out of range")
        base = max(at_or_below)
        data = objects[base].read_bytes()
        start = byte_position(objects[base].with_suffix(".index").read_bytes(), self.position - base)
        found = [(r.offset, r.key, r.value) for batch in read_batches(data[start:]) for r in batch.records if r.offset >= self.position]
        if found:
            self.position = found[-1][0] + 1
        return found

    def read_all(self, end: int) -> Iterator[tuple[int, bytes | None, bytes | None]]:
        """Up to the last record before ``end``. Raises Stalled where a poll brings nothing before that."""
        while self.position < end:
            polled = self.poll()
            if not polled:
                raise Stalled(f"at offset {self.position}")
            yield from polled

    def batches(self) -> Iterator[Batch]:
        for path in self.offsets().values():
            yield from read_batches(path.read_bytes())


def byte_position(index: bytes, relative: int) -> int:
    """getMinimumPositionForOffset, step by step."""
    entries: list[tuple[int, int]] = list(struct.iter_unpack(">ii", index))
    if not entries:
        return 0
    start, end = 0, len(entries) - 1
    middle = (start + end) // 2
    seen = set()
    while True:
        if (start, end, middle) in seen:
            raise Endless(f"{relative} in {entries}")
        seen.add((start, end, middle))
        offset, position = entries[middle]
        if offset == relative:
            return position
        if start == end:
            return 0 if start == 0 and relative < offset else entries[start][1]
        if relative < offset:
            end = middle - 1
        else:
            start = middle
        middle = (start + end + 1) // 2
