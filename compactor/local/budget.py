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

from compactor.errors import OutOfBudget

T = TypeVar("T")

BLOCK: Final = 4096
"""Unit in which file systems and tmpfs allocate space, in bytes."""

RETRY_S: Final = 1.0
"""Interval, in seconds, at which a waiting thread checks whether it should stop waiting and whether a full disk has space again."""

PATIENCE_S: Final = 60.0
"""Longest time, in seconds, for which a full disk is waited for."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Overrun(OutOfBudget):
    """Raised if more is written than was reserved and the budget has no spare bytes. The work must be repeated without other work at the
    same time.
    """


def blocks(size: int) -> int:
    """Return the bytes of disk that a file of ``size`` bytes occupies: ``size`` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


class Account:
    """Disk usage of one round in bytes: what it has reserved now, and the highest value so far."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0


class Kept:
    """Entry of a cached file in the disk budget. The file is deleted when its bytes are needed, unless it is pinned."""

    def __init__(self, account: Account, size: int, drop: Callable[[], None]) -> None:
        self.account = account
        self.size = size
        self.drop = drop
        self.pins = 0
        self.dropped = False


class Budget:
    """Disk budget of a process. It hands out reservations and caches files in the remaining bytes. Thread-safe. ``total``:
    its size in bytes.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.peak = 0
        """The most that was ever granted and kept at once."""
        self.changed = threading.Condition()
        self._kept: OrderedDict[Kept, None] = OrderedDict()
        self._queue: deque[object] = deque()

    def reserve(self, account: Account, size: int, what: str, keeping: Sequence[Kept] = ()) -> SpaceReservation:
        """Reserve disk space, waiting until it is free. Requests are served in the order of arrival.

        :param account: usage of the round that asks.
        :param what: name of the work for messages, such as "group 3 of orders-0".
        :param keeping: cached files to pin together with the reservation, if they still exist.
        :raises OutOfBudget: if ``size`` exceeds the whole budget.
        """
        if size > self.total:
            raise OutOfBudget(
                f"{what} needs {size} bytes of local disk, and the disk budget is {self.total}",
                hint=f"Set disk_budget_bytes to at least {size}, or lower segment_bytes",
            )
        ticket = object()
        with self.changed:
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket or not self._free_bytes_by_deleting_files(size, keeping):
                    self.changed.wait(RETRY_S)
                self._pin_existing_files(keeping)
                return self._create_reservation(account, size)
            finally:
                self._queue.remove(ticket)
                self.changed.notify_all()

    def reserve_spare_bytes(self, account: Account, size: int) -> SpaceReservation | None:
        """Reserve bytes for prefetching if they are free and no other request waits for bytes; otherwise return None.

        No cached file is deleted.
        """
        with self.changed:
            return None if self._queue or self.used + size > self.total else self._create_reservation(account, size)

    def take_free_bytes(self, account: Account, size: int) -> bool:
        """Extend a reservation by ``size`` bytes without waiting. Return False if they are not free."""
        with self.changed:
            if not self._free_bytes_by_deleting_files(size, ()):
                return False
            self._count_bytes(account, size)
            return True

    def free_bytes(self, account: Account, size: int) -> None:
        """Shorten a reservation by ``size`` bytes, which become free in the budget."""
        with self.changed:
            self._count_bytes(account, -size)
            self.changed.notify_all()

    def cache_file(self, account: Account, size: int, drop: Callable[[], None]) -> Kept | None:
        """Cache an existing file by reserving bytes for it, in addition to the reservation under which it was written. Return None if it
        must be deleted instead.

        :param drop: removes the file. It is called from any thread and must not wait for anything.
        """
        with self.changed:
            if self._queue or not self._free_bytes_by_deleting_files(size, ()):
                return None
            self._count_bytes(account, size)
            return self._add_cached_file(account, size, drop)

    def convert_to_cached_file(self, reservation: SpaceReservation, drop: Callable[[], None]) -> Kept:
        """Convert a reservation to a cached file of the same size, and return the file's entry. ``drop`` removes the file."""
        with self.changed:
            kept = self._add_cached_file(reservation.account, reservation.size, drop)
            reservation.size = reservation.taken = 0
            self.changed.notify_all()
            return kept

    def pin(self, kept: Kept) -> bool:
        """Pin a cached file, so that it is not deleted. Return False if it was deleted already."""
        with self.changed:
            return bool(self._pin_existing_files((kept,)))

    def unpin(self, kept: Kept) -> None:
        """Undo one ``pin`` of a cached file. Without pins it may be deleted when its bytes are needed."""
        with self.changed:
            kept.pins -= 1
            self.changed.notify_all()

    def delete_cached_files(self, some: Iterable[Kept] | None = None) -> None:
        """Delete these cached files, or all of them, except those that are pinned."""
        with self.changed:
            for kept in list(self._kept if some is None else some):
                if kept.pins == 0:
                    self._delete_cached_file(kept)
            self.changed.notify_all()

    def _add_cached_file(self, account: Account, size: int, drop: Callable[[], None]) -> Kept:
        kept = Kept(account, size, drop)
        self._kept[kept] = None
        return kept

    def _create_reservation(self, account: Account, size: int) -> SpaceReservation:
        self._count_bytes(account, size)
        return SpaceReservation(self, account, size)

    def _count_bytes(self, account: Account, size: int) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)
        account.used += size
        account.peak = max(account.peak, account.used)

    def _free_bytes_by_deleting_files(self, size: int, keeping: Sequence[Kept]) -> bool:
        """Delete unpinned files until ``size`` bytes are free; those in ``keeping`` go last. Return False, deleting nothing, if that would
        not be enough.
        """
        idle = [kept for kept in self._kept if kept.pins == 0]
        if self.used + size - sum(kept.size for kept in idle) > self.total:
            return False
        for kept in sorted(idle, key=lambda kept: kept in keeping):
            if self.used + size <= self.total:
                break
            self._delete_cached_file(kept)
        return True

    def _delete_cached_file(self, kept: Kept) -> None:
        if not kept.dropped:
            kept.dropped = True
            del self._kept[kept]
            kept.drop()
            self._count_bytes(kept.account, -kept.size)

    def _pin_existing_files(self, some: Sequence[Kept]) -> int:
        there = [kept for kept in some if not kept.dropped]
        for kept in there:
            kept.pins += 1
            self._kept.move_to_end(kept)
        return len(there)


class SpaceReservation:
    """Reservation of disk space for one piece of work. Used as a context manager, in one thread."""

    def __init__(self, budget: Budget, account: Account, size: int) -> None:
        self._budget = budget
        self.account = account
        self.size = size
        self.taken = 0

    def reserve_bytes(self, size: int) -> None:
        """Add ``size`` bytes to the used part of the reservation; called before they are written. Raises Overrun if neither the reservation
        nor
        the budget has them.
        """
        missing = self.taken + size - self.size
        if missing > 0:
            if not self._budget.take_free_bytes(self.account, missing):
                raise Overrun(
                    f"{self.taken + size} bytes of local disk were needed where {self.size} were foreseen",
                    hint=f"Set disk_budget_bytes to at least {self.taken + size}",
                )
            self.size += missing
        self.taken += size

    def release_bytes(self, size: int) -> None:
        """Take ``size`` bytes off the used part of the reservation, after their file was deleted or cached."""
        self.taken -= size

    def handed_over(self) -> SpaceReservation:
        """Move the used bytes to a new reservation, which is returned, and release the rest. This reservation is empty afterwards."""
        other = SpaceReservation(self._budget, self.account, self.taken)
        other.taken = self.taken
        self._budget.free_bytes(self.account, self.size - self.taken)
        self.size = self.taken = 0
        return other

    def release(self) -> None:
        """End the reservation: all its bytes become free in the budget."""
        self._budget.free_bytes(self.account, self.size)
        self.size = self.taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def is_full(error: BaseException) -> bool:
    """Return whether an error means that the file system is full or its quota is used up, because of files outside the disk budget."""
    while not (isinstance(error, OSError) and error.errno in _FULL):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True


def retry_until_space(work: Callable[[], T], budget: Budget, sleep: Callable[[float], None]) -> T:
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
            if not is_full(error):
                raise
            if waited >= PATIENCE_S:
                raise OutOfBudget(
                    f"the file system of state_dir is full, and was so for {waited:.0f} seconds ({error})",
                    hint="Free space there and run the command again: finished work is not repeated",
                ) from error
        budget.delete_cached_files()
        sleep(RETRY_S)
        waited += RETRY_S
