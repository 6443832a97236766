"""Files staged for deletion, opened when they are first seen and held open: unlinking a file does not take its bytes from its readers."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoint.lineage import EpochEntry, Lineage, leader_epoch_at
from compactor.cleaner.passes.source import SourceSegment, open_source_segment
from compactor.constants import LeaderEpoch, Offset
from compactor.model.policy import CleanerPolicy
from compactor.records.batches import BatchTable, Bytes, read_only_view
from compactor.records.indexes import parse_txn_index
from compactor.transfer.log_directory import DELETED, path_of_segment_staged_for_deletion, read_epoch_checkpoint, segment_log_path
from compactor.transfer.staged_file_rules import FileStagedForDeletion, SegmentStagedForDeletion

STAGED_NAME = re.compile(r"(\d{20})\.log\.deleted")
_MAGIC, _EPOCH = 16, slice(12, 16)


@dataclass(frozen=True)
class HeldFileStagedForDeletion:
    """Staged file that this process holds open, with the bytes of its transaction index."""

    file: FileStagedForDeletion
    descriptor: int
    txn_index: bytes

    @property
    def is_unlinked(self) -> bool:
        """Return whether the broker has deleted the file, so that only this process can still read it."""
        return os.fstat(self.descriptor).st_nlink == 0

    def map_bytes(self) -> Bytes:
        """Return the file's bytes, mapped into memory. The mapping stays valid because a broker never changes a staged file."""
        if not self.file.size:
            return read_only_view(np.empty(0, np.uint8))
        return np.frombuffer(mmap.mmap(self.descriptor, self.file.size, access=mmap.ACCESS_READ), np.uint8)

    def open_segment(self, log_dir: Path, next_base_offset: int | None, policy: CleanerPolicy) -> SourceSegment:
        """Return the segment with its batch table. Raises BadData.

        :param next_base_offset: base offset of the segment after this one, None if it is not known yet.
        """
        file, limit, path = self.file, policy.max_decompressed_batch_bytes, path_of_segment_staged_for_deletion(log_dir, self.file.base)
        entries = parse_txn_index(self.txn_index, path.name.replace(".log", ".txnindex"))

        def read_from_open_file(path: Path) -> Bytes:
            return self.map_bytes()

        return open_source_segment(
            0, path, file.base, next_base_offset, file.mtime_ms, -1, limit, txn_entries=entries, read_bytes=read_from_open_file
        )

    def describe_segment(self, log_dir: Path, policy: CleanerPolicy) -> SegmentStagedForDeletion:
        """Return the file's offsets and leader epochs, read from the headers of its batches. Raises BadData."""
        table = self.open_segment(log_dir, None, policy).table
        last = int(table.last_offset[-1]) if len(table) else self.file.base - 1
        return SegmentStagedForDeletion(self.file.base, last, epochs_of_batches(table))


def inode_change_ms(stat: os.stat_result) -> int:
    """Return the change time of a file's inode, in milliseconds. For a staged file it is the time of its renaming."""
    return stat.st_ctime_ns // 1_000_000


def describe_staged_file(base_offset: int, stat: os.stat_result) -> FileStagedForDeletion:
    """Return the description of a staged file, from its base offset and its ``stat`` result."""
    return FileStagedForDeletion(
        base_offset, stat.st_size, stat.st_mtime_ns // 1_000_000, inode_change_ms(stat), (stat.st_dev, stat.st_ino)
    )


def list_staged_files_before_live_log(log_dir: Path, live_base_offsets: Sequence[int]) -> list[FileStagedForDeletion]:
    """List the files staged for deletion that begin before the live log (its lowest base offset), ascending by base offset.

    Raises OSError.
    """
    found = []
    with os.scandir(log_dir) as entries:
        for entry in entries:
            match = STAGED_NAME.fullmatch(entry.name)
            if match and int(match[1]) < min(live_base_offsets, default=0):
                with suppress(FileNotFoundError):
                    found.append(describe_staged_file(int(match[1]), entry.stat()))
    return sorted(found, key=lambda file: file.base)


def epochs_of_batches(table: BatchTable) -> Lineage:
    """Return the leader epochs in these batches, in order, each with the offset of its first batch."""
    epochs = table.leader_epoch
    changes = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist()] if len(epochs) else []
    return tuple(EpochEntry(LeaderEpoch(int(epochs[batch])), Offset(int(table.base_offset[batch]))) for batch in changes)


def first_epoch_of_live_log(log_dir: Path, live_base_offsets: Sequence[int]) -> LeaderEpoch:
    """Return the leader epoch at the beginning of the live log, -1 if it is unknown. Raises BadData, OSError.

    It is the epoch of the first batch; if the live segments have no batch, it is taken from the leader-epoch-checkpoint.
    """
    for base in live_base_offsets:
        with segment_log_path(log_dir, base).open("rb") as file:
            header = file.read(_MAGIC + 1)
        if len(header) > _MAGIC:
            return LeaderEpoch(int.from_bytes(header[_EPOCH], "big", signed=True) if header[_MAGIC] == 2 else -1)
    return leader_epoch_at(read_epoch_checkpoint(log_dir), live_base_offsets[0])


class OpenFilesStagedForDeletion:
    """Files of one partition that the broker has staged for deletion and that this process holds open, so that they can be read after the
    broker deletes them.

    Any thread may open files; only the thread that reads them, or one that knows that none reads them, may close any.

    refusals: why the latest import did not take a file, by base offset.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.refusals: dict[int, str] = {}
        self._directory = -1
        self._held: dict[tuple[int, int], HeldFileStagedForDeletion] = {}
        self._changing = threading.RLock()

    @property
    def held_files(self) -> tuple[HeldFileStagedForDeletion, ...]:
        """Return the staged files that are open now, ascending by base offset."""
        with self._changing:
            return tuple(sorted(self._held.values(), key=lambda held: held.file.base))

    def open_files(self, files: Sequence[FileStagedForDeletion]) -> None:
        """Open those of these files that are not open yet; other open files stay open. A file that was deleted or replaced meanwhile is
        left out.
        """
        for file in files:
            with self._changing, suppress(OSError):
                if file.inode not in self._held:
                    self._open_file(file)

    def close_outdated_files(self, listed_files: Sequence[FileStagedForDeletion]) -> None:
        """Close the open files whose names other files have taken. Close all if another directory has taken the place of the log directory,
        because the topic was created again.

        :param listed_files: the files in the directory now.
        :raises OSError: if the directory is gone.
        """
        moved = self._directory >= 0 and not os.path.samestat(os.fstat(self._directory), self.log_dir.stat())
        inodes = {file.base: file.inode for file in listed_files}
        self.close_unwanted_files(lambda held: not moved and inodes.get(held.file.base, held.file.inode) == held.file.inode)

    def close_unwanted_files(self, is_wanted: Callable[[HeldFileStagedForDeletion], bool]) -> None:
        """Close all staged files for which ``is_wanted`` returns False."""
        with self._changing:
            for inode, held in list(self._held.items()):
                if not is_wanted(held):
                    del self._held[inode]
                    os.close(held.descriptor)
            if not self._held and self._directory >= 0:
                os.close(self._directory)
                self._directory = -1

    def close(self) -> None:
        """Close all staged files that are held open."""
        self.close_unwanted_files(lambda held: False)

    def _open_file(self, file: FileStagedForDeletion) -> None:
        """Open one staged file and add it to the open ones. Raises OSError, also if it is not the file that was listed."""
        descriptor = os.open(path_of_segment_staged_for_deletion(self.log_dir, file.base), os.O_RDONLY)
        try:
            stat = os.fstat(descriptor)
            if stat.st_nlink == 0 or describe_staged_file(file.base, stat) != file:
                raise FileNotFoundError(file.base)
            index = segment_log_path(self.log_dir, file.base).with_suffix(f".txnindex{DELETED}")
            txn_index = index.read_bytes() if index.exists() else b""
            if self._directory < 0:
                self._directory = os.open(self.log_dir, os.O_RDONLY)
        except OSError:
            os.close(descriptor)
            raise
        self._held[file.inode] = HeldFileStagedForDeletion(file, descriptor, txn_index)
