"""Files staged for deletion that the agent holds open until they are in the tier: unlinking them does not take their bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from compactor.model.ids import TopicPartition
from compactor.transfer.staged import StagedFile
from compactor.transfer.staged_files import HeldFiles

MIN_FREE_SHARE = 0.1
"""Share of a broker's disk that must be free while files are held which the broker has deleted, because they still take up space."""


def has_space(log_dir: Path) -> bool:
    """Return whether the disk of a log directory has room for deleted files. Raises OSError."""
    usage = shutil.disk_usage(log_dir)
    return usage.free >= MIN_FREE_SHARE * usage.total


class StagedHolder:
    """The staged files that an agent holds open, of all its partitions. All methods are for the thread of the agent's loop.

    A file is held from when it is first seen until it is in the tier, or is refused for good.
    """

    def __init__(self) -> None:
        self._held: dict[TopicPartition, HeldFiles] = {}
        self._reported: set[tuple[str, StagedFile]] = set()

    def held(self, name: TopicPartition) -> HeldFiles | None:
        """Return the partition's files, for its upload; None if there are none."""
        return self._held.get(name)

    def known(self, name: TopicPartition, listed: Sequence[StagedFile], *, running: bool) -> tuple[StagedFile, ...]:
        """Return the partition's files, without those that others have replaced.

        :param listed: the files in the partition's directory.
        :param running: whether an upload reads the files now, so that none may be closed.
        """
        files = self._held.get(name)
        if files is None:
            return ()
        if not running:
            try:
                files.close_outdated(listed)
            except OSError:
                files.close()
        return tuple(each.file for each in files.files)

    def hold(
        self, name: TopicPartition, log_dir: Path, wanted: Sequence[StagedFile], *, running: bool, space: bool = True
    ) -> tuple[StagedFile, ...]:
        """Open the files that are wanted, close all others and those that were refused and are deleted by now, and return what is held.

        :param running: as above.
        :param space: whether the disk has room for files that its broker has deleted; if not, these are closed.
        """
        if name not in self._held and not wanted:
            return ()
        files = self._held.setdefault(name, HeldFiles(log_dir))
        files.hold(wanted)
        if not running:
            inodes = {file.inode for file in wanted}
            files.keep(
                lambda each: each.file.inode in inodes and not (each.is_unlinked and (not space or each.file.base in files.refusals))
            )
            if not files.files:
                del self._held[name]
        return tuple(each.file for each in files.files)

    def report(self, what: str, files: Iterable[StagedFile]) -> list[StagedFile]:
        """Return those of the files for which this was not reported before. ``what``: names the report."""
        new = [file for file in files if (what, file) not in self._reported]
        self._reported |= {(what, file) for file in new}
        return new

    def forget(self, name: TopicPartition) -> None:
        """Close the files of a partition that is gone."""
        files = self._held.pop(name, None)
        if files is not None:
            files.close()
