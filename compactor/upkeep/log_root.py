"""A new log directory among a broker's log directories (its ``log.dirs``), with the lines that the broker needs beside it.

1. The directory is filled under another name. A broker that starts after a kill deletes it, and so does the next export to the same name.
2. Its files are flushed to disk.
3. The lines of the checkpoint files are set. Without them a broker would show deleted records, or delete what was exported.
4. The directory gets its name.

Steps 3 and 4 hold a lock on the parent directory. Brokers ignore lines of a partition that is not there.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from checkpoint.files import format_offsets_as_checkpoint, parse_cleaner_offset_checkpoint
from compactor.errors import OutOfBudget, UsageError
from compactor.local.budget import exclusive_lock, is_locked
from compactor.model.ids import TopicPartition

CLEANED = "cleaner-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
"""Has the format of the cleaner's checkpoint (Kafka: OffsetCheckpointFile)."""


class CheckpointLine(NamedTuple):
    """A partition's line in a checkpoint file. consequence: of a missing line, for messages."""

    file_name: str
    partition: TopicPartition
    offset: int
    consequence: str


@contextmanager
def unfinished_directory(folder: Path, suffix: str) -> Iterator[Path]:
    """Provide a new directory beside ``folder``, which is deleted after the ``with`` block unless it was renamed (``publish_directory``).
    Those of killed processes are deleted first.

    :raises UsageError: if ``folder`` exists, or its parent cannot be written.
    :raises OutOfBudget: if the disk is full.
    """
    folder = folder.absolute()
    # Kafka does not start beside a directory that is not named like a partition, and deletes one with this ending
    # (UnifiedLog.DELETE_DIR_PATTERN). File names have at most 255 bytes.
    begin, end = f"{folder.name[:50]}.unfinished-", "-delete"
    partial = folder.with_name(f"{begin}{suffix}{end}")
    try:
        with ExitStack() as locks:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with exclusive_lock(folder.parent):
                _require_absent(folder)
                for left in folder.parent.iterdir():
                    if left.name.startswith(begin) and left.name.endswith(end) and not is_locked(left):
                        shutil.rmtree(left, ignore_errors=True)
                partial.mkdir()
                locks.enter_context(exclusive_lock(partial))
            yield partial
    except OSError as error:
        where = f"cannot write {error.filename or folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfBudget(where, hint="Free space or choose another disk, then run it again") from error
        raise UsageError(where, hint="Name another directory, or check the owner and mode of this one") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish_directory(partial: Path, folder: Path, lines: Sequence[CheckpointLine]) -> None:
    """Set lines in the checkpoint files, where other partitions' stay, and rename ``partial`` to ``folder``.

    :raises UsageError: if ``folder`` exists, or a checkpoint file cannot be written.
    :raises BadData: if a file is not a checkpoint file.
    """
    folder = folder.absolute()
    for path in partial.iterdir():
        _flush_to_disk(path)
    _flush_to_disk(partial)
    with exclusive_lock(folder.parent):
        _require_absent(folder)  # a rename would replace an empty directory
        for line in lines:
            _set_line(folder.parent, line)
        _flush_to_disk(folder.parent)
        partial.rename(folder)
        _flush_to_disk(folder.parent)


def _require_absent(folder: Path) -> None:
    if os.path.lexists(folder):
        raise UsageError(f"{folder} exists already", hint="Name a directory that does not exist; nothing is overwritten")


def _set_line(root: Path, line: CheckpointLine) -> None:
    """A broker sees the earlier or the new content. The caller holds the lock."""
    path, name = root / line.file_name, line.partition
    try:
        known = parse_cleaner_offset_checkpoint(path.read_text(encoding="utf-8"), str(path)) if path.exists() else {}
        text = format_offsets_as_checkpoint(known | {(name.topic, name.partition): line.offset})
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=root, prefix=f"{line.file_name}.", delete=False) as file:
            written = Path(file.name)
            try:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777 if path.exists() else 0o644)
                os.fsync(file.fileno())
                written.replace(path)
            finally:
                written.unlink(missing_ok=True)
    except OSError as error:
        hint = f"A broker needs the line {name.topic} {name.partition} {line.offset} in it, or {line.consequence}"
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError) if path.is_dir() else ExitStack():  # not all file systems flush directories
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
