"""Spool folders below ``state_dir/spool``: each process has one, locked while it lives. Folders of killed processes are deleted by the next
process.

    spool/lock              held while folders are created or deleted
    spool/<pid>-<random>/   contains a ``lock`` of its own, which the system releases however the process ends
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from compactor.errors import UsageError
from compactor.local.locks import exclusive_lock, is_locked

_folders: dict[tuple[Path, int], Path] = {}
_one_at_a_time = threading.Lock()


def spool_folder_of_this_process(state_dir: Path) -> Path:
    """Return this process's folder for temporary files below ``state_dir/spool``. The first call creates it and deletes the folders of
    killed processes. Raises UsageError if it cannot be created.
    """
    key = (state_dir, os.getpid())
    with _one_at_a_time:
        if key not in _folders or not _folders[key].is_dir():
            try:
                _folders[key] = _create_spool_folder_of_process(state_dir / "spool")
            except OSError as error:
                raise UsageError(
                    f"state_dir cannot be used: {error.filename or state_dir}: {error.strerror}",
                    hint="Set tier.state_dir to a directory of your own",
                ) from error
        return _folders[key]


def check_spool_folder_is_writable(state_dir: Path) -> None:
    """Raise UsageError if this process cannot write to its spool folder (temporary files below ``state_dir/spool``). Creates the folder if
    necessary, and deletes the folders of killed processes.
    """
    folder = spool_folder_of_this_process(state_dir)
    try:
        with exclusive_lock(folder.parent / "lock"):
            _delete_spool_folders_of_dead_processes(folder.parent)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"may a round write here?")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(
            f"state_dir cannot be written: {folder}: {error.strerror}", hint="Free space on that file system, or mount it for writing"
        ) from error


def _create_spool_folder_of_process(spool_root: Path) -> Path:
    """Create this process's spool folder, lock it, register its removal at exit, and return its path."""
    spool_root.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(spool_root / "lock"):
        _delete_spool_folders_of_dead_processes(spool_root)
        mine = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=spool_root))
        lock = os.open(mine / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # never closed: the process holds it
        with suppress(OSError):  # a file system without locks: then nobody sweeps
            fcntl.flock(lock, fcntl.LOCK_EX)
        atexit.register(_delete_folder_at_process_exit, mine, os.getpid())
        return mine


def _delete_spool_folders_of_dead_processes(spool_root: Path) -> None:
    """Delete the folders of killed processes. The caller holds ``spool_root/lock``."""
    for folder in spool_root.iterdir():
        if folder.is_dir() and not _is_spool_folder_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _delete_folder_at_process_exit(folder: Path, process_id: int) -> None:
    """Delete a spool folder at the exit of the process ``process_id``, but not of its forked children."""
    if os.getpid() == process_id:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _is_spool_folder_locked(folder: Path) -> bool:
    """Return whether the process that created a spool folder may still run. Until it ends, it holds a lock on the file ``lock`` in the
    folder.

    The caller holds ``spool/lock``. A new process locks its folder before it releases ``spool/lock``, so a folder without a lock belongs to
    no running process.
    """
    try:
        return is_locked(folder / "lock")
    except OSError:
        return False
