"""Disk budget of one process (I10): all its partitions and threads together never use more bytes of local disk than the budget allows.

Before a thread writes anything, it reserves all the bytes that it will use at once. A reservation is made in full or not at all, and only
by a thread that holds none, so threads cannot wait for each other in a circle. Unreserved bytes *cache* files that could be fetched again;
the least recently used ones are deleted when a reservation needs their bytes.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from compactor.config.units import format_size
from compactor.errors import OutOfBudget, UsageError

# glibc gives each new thread a heap of its own, up to eight per processor, which keeps its peak memory. A service starts threads all the
# time, so every heap would grow to the size of the largest job.


HEAPS = 2
_M_ARENA_MAX = -8


@cache
def _load_c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None


def limit_malloc_heaps() -> bool:
    """Return False if the C library is not glibc. Must be called before the first thread starts."""
    tell = getattr(_load_c_library(), "mallopt", None)
    return tell is not None and tell(_M_ARENA_MAX, HEAPS) == 1


def trim_memory() -> bool:
    """Takes a few milliseconds. Return whether memory was given back; always False unless the C library is glibc."""
    trim = getattr(_load_c_library(), "malloc_trim", None)
    return trim is not None and trim(0) == 1


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes, on a directory or on a file that is created if necessary. On file systems without locks the block runs
    without one.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path.is_dir() else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def is_locked(path: Path) -> bool:
    """Return True, too, if the file system knows no locks."""
    file = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


# Spool folders below ``state_dir/spool``: each process has one, locked while it lives. Folders of killed processes are deleted by the next
# process.
#
#     spool/lock              held while folders are created or deleted
#     spool/<pid>-<random>/   contains a ``lock`` of its own, which the system releases however the process ends


_folders: dict[tuple[Path, int], Path] = {}
_one_at_a_time = threading.Lock()


def spool_folder(state_dir: Path) -> Path:
    """The first call creates the folder and deletes the folders of killed processes. Raises UsageError if the folder cannot be created."""
    key = (state_dir, os.getpid())
    with _one_at_a_time:
        if key not in _folders or not _folders[key].is_dir():
            try:
                _folders[key] = _create_spool_folder(state_dir / "spool")
            except OSError as error:
                raise UsageError(
                    f"state_dir cannot be used: {error.filename or state_dir}: {error.strerror}",
                    hint="Set tier.state_dir to a directory of your own",
                ) from error
        return _folders[key]


def check_spool_writable(state_dir: Path) -> None:
    """Raise UsageError if this process cannot write to its spool folder."""
    folder = spool_folder(state_dir)
    try:
        with exclusive_lock(folder.parent / "lock"):
            _delete_dead_spool_folders(folder.parent)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"may a round write here?")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(
            f"state_dir cannot be written: {folder}: {error.strerror}", hint="Free space on that file system, or mount it for writing"
        ) from error


def _create_spool_folder(spool_root: Path) -> Path:
    spool_root.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(spool_root / "lock"):
        _delete_dead_spool_folders(spool_root)
        mine = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=spool_root))
        lock = os.open(mine / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # never closed: the process holds it
        with suppress(OSError):  # a file system without locks: then nobody sweeps
            fcntl.flock(lock, fcntl.LOCK_EX)
        atexit.register(_delete_at_exit, mine, os.getpid())
        return mine


def _delete_dead_spool_folders(spool_root: Path) -> None:
    """The caller holds ``spool_root/lock``."""
    for folder in spool_root.iterdir():
        if folder.is_dir() and not _is_spool_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _delete_at_exit(folder: Path, process_id: int) -> None:
    if os.getpid() == process_id:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _is_spool_locked(folder: Path) -> bool:
    """The caller holds ``spool/lock``. A new process locks its folder before it releases ``spool/lock``, so a folder without a lock belongs
    to no running process.
    """
    try:
        return is_locked(folder / "lock")
    except OSError:
        return False


T = TypeVar("T")

BLOCK: Final = 4096
"""Unit in which file systems and tmpfs allocate space, in bytes."""

RETRY_S: Final = 1.0
"""Interval, in seconds, at which a waiting thread checks whether it should stop waiting and whether a full disk has space again."""

PATIENCE_S: Final = 60.0
"""Longest time, in seconds, for which a full disk is waited for."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class DiskReservationExceeded(OutOfBudget):
    """Raised if work writes more than it reserved and the disk budget has no free bytes. The work must then be repeated while no other work
    uses the budget.
    """


def round_up_to_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK) * BLOCK


class RoundDiskUsage:
    def __init__(self) -> None:
        self.used = 0
        self.peak = 0


class CachedFile:
    def __init__(self, usage: RoundDiskUsage, size_bytes: int, delete_file: Callable[[], None]) -> None:
        self.usage = usage
        self.size = size_bytes
        self.drop = delete_file
        self.pins = 0
        self.dropped = False


class DiskBudget:
    """Bytes of local disk for the rounds of a process. Thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self.total = total_bytes
        self.used = 0
        self.peak = 0
        """The most that was ever granted and cached_file at once."""
        self.changed = threading.Condition()
        self._kept: OrderedDict[CachedFile, None] = OrderedDict()
        self._queue: deque[object] = deque()

    def reserve_space(
        self, usage: RoundDiskUsage, size_bytes: int, work_name: str, files_to_pin: Sequence[CachedFile] = ()
    ) -> DiskSpaceReservation:
        """Requests are served in the order of arrival. If the bytes are not free, unpinned cached files are deleted, and the call waits if
        that is not enough.

        :param work_name: for messages.
        :param files_to_pin: pinned once the bytes are reserved, unless deleted before.
        :raises OutOfBudget: if ``size_bytes`` exceeds the whole budget.
        """
        if size_bytes > self.total:
            raise OutOfBudget(
                f"{work_name} needs {format_size(size_bytes)} of local disk, and the disk budget is {format_size(self.total)}",
                hint=f"Set disk_budget_bytes to at least {size_bytes}, or lower segment_bytes",
            )
        ticket = object()
        with self.changed:
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket or not self._try_free_bytes(size_bytes, files_to_pin):
                    self.changed.wait(RETRY_S)
                self._pin_existing(files_to_pin)
                return self._create_reservation(usage, size_bytes)
            finally:
                self._queue.remove(ticket)
                self.changed.notify_all()

    def reserve_for_prefetch(self, usage: RoundDiskUsage, size_bytes: int) -> DiskSpaceReservation | None:
        """Return None if the bytes are not free or another request is waiting. No cached file is deleted for it."""
        with self.changed:
            return None if self._queue or self.used + size_bytes > self.total else self._create_reservation(usage, size_bytes)

    def try_extend(self, usage: RoundDiskUsage, size_bytes: int) -> bool:
        """Delete unpinned cached files if necessary. Return False, changing nothing, if too few bytes can be freed."""
        with self.changed:
            if not self._try_free_bytes(size_bytes, ()):
                return False
            self._add_to_used_bytes(usage, size_bytes)
            return True

    def give_back(self, usage: RoundDiskUsage, size_bytes: int) -> None:
        with self.changed:
            self._add_to_used_bytes(usage, -size_bytes)
            self.changed.notify_all()

    def try_cache_file(self, usage: RoundDiskUsage, size_bytes: int, delete_file: Callable[[], None]) -> CachedFile | None:
        """The file's bytes are reserved in addition to the reservation under which it was written. Return None if they cannot be freed or
        another request is waiting; the caller must then delete the file.

        :param delete_file: called from any thread; must not wait for anything.
        """
        with self.changed:
            if self._queue or not self._try_free_bytes(size_bytes, ()):
                return None
            self._add_to_used_bytes(usage, size_bytes)
            return self._add_cached_file(usage, size_bytes, delete_file)

    def convert_to_cached_file(self, reservation: DiskSpaceReservation, delete_file: Callable[[], None]) -> CachedFile:
        """The reservation is empty afterwards. ``delete_file``: as for ``try_cache_file``."""
        with self.changed:
            cached_file = self._add_cached_file(reservation.usage, reservation.size, delete_file)
            reservation.size = reservation.taken = 0
            self.changed.notify_all()
            return cached_file

    def try_pin(self, cached_file: CachedFile) -> bool:
        """Return False if the file was deleted already."""
        with self.changed:
            return bool(self._pin_existing((cached_file,)))

    def unpin_file(self, cached_file: CachedFile) -> None:
        with self.changed:
            cached_file.pins -= 1
            self.changed.notify_all()

    def delete_unpinned_files(self, files: Iterable[CachedFile] | None = None) -> None:
        """:param files: None for all."""
        with self.changed:
            for cached_file in list(self._kept if files is None else files):
                if cached_file.pins == 0:
                    self._delete_cached_file(cached_file)
            self.changed.notify_all()

    def _add_cached_file(self, usage: RoundDiskUsage, size_bytes: int, delete_file: Callable[[], None]) -> CachedFile:
        cached_file = CachedFile(usage, size_bytes, delete_file)
        self._kept[cached_file] = None
        return cached_file

    def _create_reservation(self, usage: RoundDiskUsage, size_bytes: int) -> DiskSpaceReservation:
        self._add_to_used_bytes(usage, size_bytes)
        return DiskSpaceReservation(self, usage, size_bytes)

    def _add_to_used_bytes(self, usage: RoundDiskUsage, size_bytes: int) -> None:
        self.used += size_bytes
        self.peak = max(self.peak, self.used)
        usage.used += size_bytes
        usage.peak = max(usage.peak, usage.used)

    def _try_free_bytes(self, size_bytes: int, files_to_pin: Sequence[CachedFile]) -> bool:
        """Delete ``files_to_pin`` last. Return False, deleting nothing, if that would not be enough."""
        idle = [cached_file for cached_file in self._kept if cached_file.pins == 0]
        if self.used + size_bytes - sum(cached_file.size for cached_file in idle) > self.total:
            return False
        for cached_file in sorted(idle, key=lambda cached_file: cached_file in files_to_pin):
            if self.used + size_bytes <= self.total:
                break
            self._delete_cached_file(cached_file)
        return True

    def _delete_cached_file(self, cached_file: CachedFile) -> None:
        if not cached_file.dropped:
            cached_file.dropped = True
            del self._kept[cached_file]
            cached_file.drop()
            self._add_to_used_bytes(cached_file.usage, -cached_file.size)

    def _pin_existing(self, files: Sequence[CachedFile]) -> int:
        there = [cached_file for cached_file in files if not cached_file.dropped]
        for cached_file in there:
            cached_file.pins += 1
            self._kept.move_to_end(cached_file)
        return len(there)


class DiskSpaceReservation:
    """Used in one thread. As a context manager it gives its bytes back at the end."""

    def __init__(self, budget: DiskBudget, usage: RoundDiskUsage, size_bytes: int) -> None:
        self._budget = budget
        self.usage = usage
        self.size = size_bytes
        self.taken = 0

    def reserve_bytes_on_disk(self, size_bytes: int) -> None:
        """Called before the bytes are written. If too few are unused, the reservation is extended from the budget. Raises
        DiskReservationExceeded if the budget does not have enough free bytes either.
        """
        missing = self.taken + size_bytes - self.size
        if missing > 0:
            if not self._budget.try_extend(self.usage, missing):
                raise DiskReservationExceeded(
                    f"{format_size(self.taken + size_bytes)} of local disk were needed where {format_size(self.size)} were foreseen",
                    hint=f"Set disk_budget_bytes to at least {self.taken + size_bytes}",
                )
            self.size += missing
        self.taken += size_bytes

    def release_bytes_on_disk(self, size_bytes: int) -> None:
        """Called after the file was deleted or cached."""
        self.taken -= size_bytes

    def split_off_used(self) -> DiskSpaceReservation:
        """Unused bytes are given back to the budget."""
        other = DiskSpaceReservation(self._budget, self.usage, self.taken)
        other.taken = self.taken
        self._budget.give_back(self.usage, self.size - self.taken)
        self.size = self.taken = 0
        return other

    def release_all(self) -> None:
        self._budget.give_back(self.usage, self.size)
        self.size = self.taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release_all()


def is_disk_full_error(error: BaseException) -> bool:
    """Inspect the causes, too. A quota that is used up counts."""
    while not (isinstance(error, OSError) and error.errno in _FULL):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True


@dataclass
class DiskFullWait:
    """Waits of one piece of work while the file system is full."""

    budget: DiskBudget
    sleep: Callable[[float], None]
    waited_s: float = 0.0

    def before_retry(self, error: OSError | OutOfBudget) -> None:
        """Delete all cached files, and wait. The work must have removed what it has written.

        :raises OutOfBudget: if the disk is still full after PATIENCE_S seconds. Any other error is raised again.
        """
        if not is_disk_full_error(error):
            raise error
        if self.waited_s >= PATIENCE_S:
            # A tier that is a directory may be full as well. Its errors name the file; those of open files in state_dir do not.
            is_named = isinstance(error, OutOfBudget) or error.filename is not None
            disk = "a disk" if is_named else "the file system of state_dir"
            raise OutOfBudget(
                f"{disk} is full, and was so for {self.waited_s:.0f} seconds: {error}",
                hint="Free space there and run the command again: finished work is not repeated",
            ) from error
        self.budget.delete_unpinned_files()
        self.sleep(RETRY_S)
        self.waited_s += RETRY_S


def retry_while_disk_full(work: Callable[[], T], budget: DiskBudget, sleep: Callable[[float], None]) -> T:
    """Call ``work`` again while the file system is full; see DiskFullWait."""
    wait = DiskFullWait(budget, sleep)
    while True:
        try:
            return work()
        except (OSError, OutOfBudget) as error:
            wait.before_retry(error)
