"""Disk budget of one process (I10): all its partitions and threads together never use more bytes of local disk than the budget allows.

Before a thread writes anything, it reserves all the bytes that it will use at once. A reservation is granted in full or not at all, and
only to a thread that holds none, so threads cannot wait for each other in a circle. Sizes are rounded up to whole blocks, as file systems
allocate them.

Unreserved bytes are used to *cache* files that could be fetched again. If a reservation needs them, the least recently used files are
deleted.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from compactor.config.units import format_size
from compactor.errors import OutOfBudget

T = TypeVar("T")

BLOCK: Final = 4096
"""Unit in which file systems and tmpfs allocate space, in bytes."""

RETRY_S: Final = 1.0
"""Interval, in seconds, at which a waiting thread checks whether it should stop waiting and whether a full disk has space again."""

PATIENCE_S: Final = 60.0
"""Longest time, in seconds, for which a full disk is waited for."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class DiskReservationExceeded(OutOfBudget):
    """Raised if more is written than was reserved and the budget has no spare bytes. The work must be repeated without other work at the
    same time.
    """


def round_up_to_disk_blocks(size_bytes: int) -> int:
    """Return the bytes of disk that a file of ``size_bytes`` bytes occupies: ``size_bytes`` rounded up to whole file-system blocks."""
    return -(-size_bytes // BLOCK) * BLOCK


class DiskUsage:
    """Disk usage of one round in bytes: what it has reserved now, and the highest value so far."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0


class CachedFile:
    """Entry of a cached file in the disk budget. ``drop`` deletes the file; the budget calls it when it needs the bytes, unless the file is
    pinned.
    """

    def __init__(self, usage: DiskUsage, size_bytes: int, delete_file: Callable[[], None]) -> None:
        self.usage = usage
        self.size = size_bytes
        self.drop = delete_file
        self.pins = 0
        self.dropped = False


class DiskBudget:
    """Disk budget of a process: gives out reservations and caches files in the remaining bytes. Thread-safe. ``total``: its size in
    bytes.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total = total_bytes
        self.used = 0
        self.peak = 0
        """The most that was ever granted and cached_file at once."""
        self.changed = threading.Condition()
        self._kept: OrderedDict[CachedFile, None] = OrderedDict()
        self._queue: deque[object] = deque()

    def reserve_space(
        self, usage: DiskUsage, size_bytes: int, work_name: str, files_to_pin: Sequence[CachedFile] = ()
    ) -> DiskSpaceReservation:
        """Reserve ``size_bytes`` bytes of disk space and return the reservation, waiting until they are free. Requests are served in the
        order of arrival.

        :param usage: disk usage of the round that asks; the bytes are added to it.
        :param work_name: name of the work for messages, such as "group 3 of orders-0".
        :param files_to_pin: cached files to pin together with the reservation, if they still exist.
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
                while self._queue[0] is not ticket or not self._free_bytes_by_deleting_files(size_bytes, files_to_pin):
                    self.changed.wait(RETRY_S)
                self._pin_existing_files(files_to_pin)
                return self._create_reservation(usage, size_bytes)
            finally:
                self._queue.remove(ticket)
                self.changed.notify_all()

    def reserve_spare_bytes_or_none(self, usage: DiskUsage, size_bytes: int) -> DiskSpaceReservation | None:
        """Reserve bytes for prefetching if they are free and no other request waits for bytes; otherwise return None.

        No cached file is deleted.
        """
        with self.changed:
            return None if self._queue or self.used + size_bytes > self.total else self._create_reservation(usage, size_bytes)

    def extend_reservation_without_waiting(self, usage: DiskUsage, size_bytes: int) -> bool:
        """Add ``size_bytes`` bytes to what a round has reserved, deleting unpinned cached files if necessary, but without waiting. Return
        False, changing nothing, if so many bytes cannot be freed.
        """
        with self.changed:
            if not self._free_bytes_by_deleting_files(size_bytes, ()):
                return False
            self._add_to_used_bytes(usage, size_bytes)
            return True

    def give_back_reserved_bytes(self, usage: DiskUsage, size_bytes: int) -> None:
        """Give ``size_bytes`` of the bytes that a round has reserved back to the budget, for other requests."""
        with self.changed:
            self._add_to_used_bytes(usage, -size_bytes)
            self.changed.notify_all()

    def cache_file_if_bytes_are_free(self, usage: DiskUsage, size_bytes: int, delete_file: Callable[[], None]) -> CachedFile | None:
        """Cache an existing file by reserving ``size_bytes`` bytes for it, in addition to the reservation under which it was written.
        Return the file's entry, or None if no bytes are free for it; the caller must then delete the file.

        :param delete_file: deletes the file. It is called from any thread and must not wait for anything.
        """
        with self.changed:
            if self._queue or not self._free_bytes_by_deleting_files(size_bytes, ()):
                return None
            self._add_to_used_bytes(usage, size_bytes)
            return self._add_cached_file(usage, size_bytes, delete_file)

    def convert_reservation_to_cached_file(self, reservation: DiskSpaceReservation, delete_file: Callable[[], None]) -> CachedFile:
        """Convert a reservation to a cached file of the same size, and return the file's entry. ``delete_file`` removes the file."""
        with self.changed:
            cached_file = self._add_cached_file(reservation.usage, reservation.size, delete_file)
            reservation.size = reservation.taken = 0
            self.changed.notify_all()
            return cached_file

    def pin_file_unless_deleted(self, cached_file: CachedFile) -> bool:
        """Pin a cached file, so that it is not deleted. Return False if it was deleted already."""
        with self.changed:
            return bool(self._pin_existing_files((cached_file,)))

    def unpin_file(self, cached_file: CachedFile) -> None:
        """Undo one call of ``pin_file_unless_deleted``. A cached file without pins may be deleted when its bytes are needed."""
        with self.changed:
            cached_file.pins -= 1
            self.changed.notify_all()

    def delete_unpinned_files(self, files: Iterable[CachedFile] | None = None) -> None:
        """Delete these cached files, or all of them, except those that are pinned."""
        with self.changed:
            for cached_file in list(self._kept if files is None else files):
                if cached_file.pins == 0:
                    self._delete_cached_file(cached_file)
            self.changed.notify_all()

    def _add_cached_file(self, usage: DiskUsage, size_bytes: int, delete_file: Callable[[], None]) -> CachedFile:
        """Add the entry of a cached file whose bytes are reserved already, and return it."""
        cached_file = CachedFile(usage, size_bytes, delete_file)
        self._kept[cached_file] = None
        return cached_file

    def _create_reservation(self, usage: DiskUsage, size_bytes: int) -> DiskSpaceReservation:
        """Reserve ``size_bytes`` bytes, which the caller knows to be free, and return the reservation."""
        self._add_to_used_bytes(usage, size_bytes)
        return DiskSpaceReservation(self, usage, size_bytes)

    def _add_to_used_bytes(self, usage: DiskUsage, size_bytes: int) -> None:
        """Add ``size_bytes`` bytes, negative to subtract, to the used bytes of the budget and of a round."""
        self.used += size_bytes
        self.peak = max(self.peak, self.used)
        usage.used += size_bytes
        usage.peak = max(usage.peak, usage.used)

    def _free_bytes_by_deleting_files(self, size_bytes: int, files_to_pin: Sequence[CachedFile]) -> bool:
        """Delete unpinned cached files until ``size_bytes`` bytes are free, those in ``files_to_pin`` last. Return False, deleting nothing,
        if deleting all of them would not free enough.
        """
        idle = [cached_file for cached_file in self._kept if cached_file.pins == 0]
        if self.used + size_bytes - sum(cached_file.size for cached_file in idle) > self.total:
            return False
        for cached_file in sorted(idle, key=lambda cached_file: cached_file in files_to_pin):
            if self.used + size_bytes <= self.total:
                break
            self._delete_cached_file(cached_file)
        return True

    def _delete_cached_file(self, cached_file: CachedFile) -> None:
        """Delete a cached file, unless that was done before, and give its bytes back."""
        if not cached_file.dropped:
            cached_file.dropped = True
            del self._kept[cached_file]
            cached_file.drop()
            self._add_to_used_bytes(cached_file.usage, -cached_file.size)

    def _pin_existing_files(self, files: Sequence[CachedFile]) -> int:
        """Pin those cached files that were not deleted, and return their number."""
        there = [cached_file for cached_file in files if not cached_file.dropped]
        for cached_file in there:
            cached_file.pins += 1
            self._kept.move_to_end(cached_file)
        return len(there)


class DiskSpaceReservation:
    """Reservation of disk space for one piece of work. Used as a context manager, in one thread."""

    def __init__(self, budget: DiskBudget, usage: DiskUsage, size_bytes: int) -> None:
        self._budget = budget
        self.usage = usage
        self.size = size_bytes
        self.taken = 0

    def reserve_bytes(self, size_bytes: int) -> None:
        """Add ``size_bytes`` bytes to the used part of the reservation; called before they are written. Raises DiskReservationExceeded if
        neither the reservation nor the budget has them.
        """
        missing = self.taken + size_bytes - self.size
        if missing > 0:
            if not self._budget.extend_reservation_without_waiting(self.usage, missing):
                raise DiskReservationExceeded(
                    f"{format_size(self.taken + size_bytes)} of local disk were needed where {format_size(self.size)} were foreseen",
                    hint=f"Set disk_budget_bytes to at least {self.taken + size_bytes}",
                )
            self.size += missing
        self.taken += size_bytes

    def release_bytes(self, size_bytes: int) -> None:
        """Subtract ``size_bytes`` bytes from the used part of the reservation, after their file was deleted or cached."""
        self.taken -= size_bytes

    def move_used_bytes_to_new_reservation(self) -> DiskSpaceReservation:
        """Move the used bytes to a new reservation and return it. Unused bytes are given back to the budget, and this reservation is empty
        afterwards.
        """
        other = DiskSpaceReservation(self._budget, self.usage, self.taken)
        other.taken = self.taken
        self._budget.give_back_reserved_bytes(self.usage, self.size - self.taken)
        self.size = self.taken = 0
        return other

    def release_all_reserved_bytes(self) -> None:
        """End the reservation: all its bytes become free in the budget."""
        self._budget.give_back_reserved_bytes(self.usage, self.size)
        self.size = self.taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release_all_reserved_bytes()


def is_disk_full_error(error: BaseException) -> bool:
    """Return whether an error means that the file system is full or its quota is used up, because of files outside the disk budget."""
    while not (isinstance(error, OSError) and error.errno in _FULL):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True


def retry_until_disk_has_space(work: Callable[[], T], budget: DiskBudget, sleep: Callable[[float], None]) -> T:
    """Call ``work`` and return its result. While the file system is full, delete all cached files, wait, and call ``work`` again.

    ``work`` must remove what it has written before it raises.

    :param budget: the disk budget whose cached files are deleted.
    :param sleep: waits for a number of seconds.
    :raises OutOfBudget: if the disk is still full after PATIENCE_S seconds.
    """
    waited = 0.0
    while True:
        try:
            return work()
        except (OSError, OutOfBudget) as error:
            if not is_disk_full_error(error):
                raise
            if waited >= PATIENCE_S:
                raise OutOfBudget(
                    f"the file system of state_dir is full, and was so for {waited:.0f} seconds ({error})",
                    hint="Free space there and run the command again: finished work is not repeated",
                ) from error
        budget.delete_unpinned_files()
        sleep(RETRY_S)
        waited += RETRY_S
