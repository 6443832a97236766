"""Sources of ``repair``: log directories and tiers that may have the bytes of a segment's files, also if their segments are cut at other
offsets. The caller compares digests.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from compactor.access.tier import Tier
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import memory_map_file, parse_batch_headers_of_segment


class RepairSource(Protocol):
    """A place, such as a log directory or another tier, that may have the bytes of a segment's files."""

    @property
    def description(self) -> str:
        """Return a text that names this source in messages."""

    def write_each_copy_of_file(self, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> Iterator[None]:
        """Write the file of the segment to ``path`` once per copy that the source has, and yield after each. The caller compares the digest
        of each copy with the recorded one, and stops at the first that matches. ``path`` does not exist before.
        """


@dataclass(frozen=True)
class DirectoryRepairSource:
    """A Kafka log directory of the partition. Its segments may be cut at other offsets than the tier's."""

    folder: Path

    @property
    def description(self) -> str:
        return str(self.folder)

    def write_each_copy_of_file(self, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> Iterator[None]:
        if file_kind == "log":
            logs = sorted(one for one in self.folder.glob("*.log") if one.stem.isdecimal() and len(one.stem) == 20)
            bases = [int(one.stem) for one in logs]
            wanted = [
                one
                for one, base, after in zip(logs, bases, [*bases[1:], segment.end_offset + 1], strict=True)
                if base <= segment.end_offset and after > segment.start_offset
            ]
            _join_batches_of_offset_range(wanted, segment, path)
            yield
        beside = self.folder / (
            f"{segment.end_offset + 1:020d}.snapshot" if file_kind == "snapshot" else f"{segment.start_offset:020d}.{file_kind}"
        )
        if file_kind != "log":
            with suppress(FileNotFoundError):
                shutil.copyfile(beside, path)
                yield


@dataclass(frozen=True)
class TierRepairSource:
    """Another tier that has the partition."""

    tier: Tier
    partition: TopicPartition

    @property
    def description(self) -> str:
        return self.tier.ports.layout.url

    def write_each_copy_of_file(self, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> Iterator[None]:
        state = self.tier.open_control_log_of_partition(self.partition).refresh()
        yield from download_each_file_of_same_offsets(self.tier, state, segment, file_kind, path)
        overlapping = [one for one in state.live if one.end_offset >= segment.start_offset and one.start_offset <= segment.end_offset]
        if file_kind == "log" and overlapping:
            with suppress(NotFound, BadData):
                _join_batches_of_offset_range(self._download_logs_one_by_one(overlapping, path.with_name("piece")), segment, path)
                yield

    def _download_logs_one_by_one(self, segments: Sequence[RemoteLogSegmentMetadata], path: Path) -> Iterator[Path]:
        for one in segments:
            path.unlink(missing_ok=True)
            self.tier.ports.layout.download_file(self.partition, one, "log", path)
            yield path
        path.unlink(missing_ok=True)


def download_each_file_of_same_offsets(
    tier: Tier, state: PartitionState, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path
) -> Iterator[None]:
    """Download to ``path``, one after the other, the files of one kind of all segments of a tier that have the same offsets as ``segment``,
    whether live or replaced. Yield after each download. The file is removed when the caller continues.
    """
    layout = tier.ports.layout
    for other in (*state.live, *(one for group in state.waiting for one in group.segments)):
        if (other.start_offset, other.end_offset) == (segment.start_offset, segment.end_offset):
            with suppress(NotFound, BadData):
                if file_kind in layout.segment_files(state.topic_partition, other):
                    layout.download_file(state.topic_partition, other, file_kind, path)
                    yield
            path.unlink(missing_ok=True)


def _join_batches_of_offset_range(paths: Sequence[Path] | Iterator[Path], segment: RemoteLogSegmentMetadata, target: Path) -> None:
    """Write one file with the batches of consecutive logs whose last offsets lie within a segment's offsets. A log that cannot be parsed is
    left out; the caller notices it, because the digest of the result differs.
    """
    with target.open("wb") as file:
        for path in paths:
            with suppress(BadData, FileNotFoundError):  # a broker may delete its files meanwhile
                buf = memory_map_file(path)
                table = parse_batch_headers_of_segment(buf, path.name)
                inside = np.flatnonzero((table.last_offset >= segment.start_offset) & (table.last_offset <= segment.end_offset))
                if len(inside):
                    last = inside[-1]
                    file.write(buf[int(table.position[inside[0]]) : int(table.position[last] + table.size[last])].data)
