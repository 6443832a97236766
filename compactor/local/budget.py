"""The disk budget of one process (I10): all its partitions and threads together never hold more bytes on the local disk than it says.

Whoever is about to write asks for a *grant* over everything that he will hold at once, before the first byte. A grant is given whole, and
only to one who holds none: nobody who waits has what another one waits for. Files count in whole blocks, as the disk counts them.

What is not granted is used to *keep* files that could be fetched again; whoever needs the room takes the one that was not used for longest.
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
"""What file systems and tmpfs give room in."""

LOOK_S: Final = 1.0
"""Between two looks of one who waits, at whether he should go on waiting and whether a full disk has room again."""

PATIENCE_S: Final = 60.0
"""How long a full disk is waited for."""

FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Overrun(OutOfBudget):
    """More was written than the grant foresaw, and nobody has room to spare. The work is to be done again, alone."""


def blocks(size: int) -> int:
    """Bytes that a file of ``size`` bytes takes up."""
    return -(-size // BLOCK) * BLOCK


class Account:
    """What one round has of the budget, and the most it ever had. Bytes."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0


class Kept:
    """A file that may stay until its room is needed. While it is pinned it stays."""

    def __init__(self, account: Account, size: int, drop: Callable[[], None]) -> None:
        self.account = account
        self.size = size
        self.drop = drop
        self.pins = 0
        self.dropped = False


class Budget:
    """:param total: bytes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.peak = 0
        """The most that was ever granted and kept at once."""
        self.changed = threading.Condition()
        self._kept: OrderedDict[Kept, None] = OrderedDict()
        self._queue: deque[object] = deque()

    def grant(
        self, account: Account, size: int, what: str, keeping: Sequence[Kept] = (), check: Callable[[], None] = lambda: None
    ) -> Grant:
        """Waits until so many bytes are free; first come, first served.

        :param account: of the round that asks.
        :param what: for the message, "group 3 of orders-0".
        :param keeping: files that are to stay and are pinned with the grant, as long as they are there.
        :param check: asked while waiting; what it raises ends the wait.
        :raises OutOfBudget: more than the whole budget.
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
                while self._queue[0] is not ticket or not self._make_room(size, keeping):
                    self.changed.wait(LOOK_S)
                    check()
                self._pin(keeping)
                return self._granted(account, size)
            finally:
                self._queue.remove(ticket)
                self.changed.notify_all()

    def spare(self, account: Account, size: int) -> Grant | None:
        """The same out of what nobody uses or waits for: no file has to go for it. For what is fetched ahead."""
        with self.changed:
            return None if self._queue or self.used + size > self.total else self._granted(account, size)

    def take(self, account: Account, size: int) -> bool:
        """For one who holds a grant and needs more: never waits."""
        with self.changed:
            if not self._make_room(size, ()):
                return False
            self._count(account, size)
            return True

    def give(self, account: Account, size: int) -> None:
        with self.changed:
            self._count(account, -size)
            self.changed.notify_all()

    def keep(self, account: Account, size: int, drop: Callable[[], None]) -> Kept | None:
        """Room for a file that is there already, besides the grant under which it was written; None: it has to go.

        ``drop`` removes the file; it is called from any thread and must not wait for anything.
        """
        with self.changed:
            if self._queue or not self._make_room(size, ()):
                return None
            self._count(account, size)
            return self._keep(account, size, drop)

    def settle(self, grant: Grant, drop: Callable[[], None]) -> Kept:
        """What a grant was for is there and may be kept: its room changes hands."""
        with self.changed:
            kept = self._keep(grant.account, grant.size, drop)
            grant.size = grant.taken = 0
            self.changed.notify_all()
            return kept

    def pin(self, kept: Kept) -> bool:
        """False where it is gone."""
        with self.changed:
            return bool(self._pin((kept,)))

    def unpin(self, kept: Kept) -> None:
        with self.changed:
            kept.pins -= 1
            self.changed.notify_all()

    def forget(self, some: Iterable[Kept] | None = None) -> None:
        """Drops these files, or all that nobody is using."""
        with self.changed:
            for kept in list(self._kept if some is None else some):
                if kept.pins == 0:
                    self._drop(kept)
            self.changed.notify_all()

    def _keep(self, account: Account, size: int, drop: Callable[[], None]) -> Kept:
        kept = Kept(account, size, drop)
        self._kept[kept] = None
        return kept

    def _granted(self, account: Account, size: int) -> Grant:
        self._count(account, size)
        return Grant(self, account, size)

    def _count(self, account: Account, size: int) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)
        account.used += size
        account.peak = max(account.peak, account.used)

    def _make_room(self, size: int, keeping: Sequence[Kept]) -> bool:
        """Whether so much is free once files nobody uses are gone; ``keeping`` go last of all."""
        idle = [kept for kept in self._kept if kept.pins == 0]
        if self.used + size - sum(kept.size for kept in idle) > self.total:
            return False
        for kept in sorted(idle, key=lambda kept: kept in keeping):
            if self.used + size <= self.total:
                break
            self._drop(kept)
        return True

    def _drop(self, kept: Kept) -> None:
        if not kept.dropped:
            kept.dropped = True
            del self._kept[kept]
            kept.drop()
            self._count(kept.account, -kept.size)

    def _pin(self, some: Sequence[Kept]) -> int:
        there = [kept for kept in some if not kept.dropped]
        for kept in there:
            kept.pins += 1
            self._kept.move_to_end(kept)
        return len(there)


class Grant:
    """Room for one piece of work; to be used in a ``with``, by one thread."""

    def __init__(self, budget: Budget, account: Account, size: int) -> None:
        self._budget = budget
        self.account = account
        self.size = size
        self.taken = 0

    def take(self, size: int) -> None:
        """Before ``size`` bytes are written. Raises Overrun where neither the grant nor the budget has them."""
        missing = self.taken + size - self.size
        if missing > 0:
            if not self._budget.take(self.account, missing):
                raise Overrun(
                    f"{self.taken + size} bytes of local disk were needed where {self.size} were foreseen",
                    hint=f"Set disk_budget_bytes to at least {self.taken + size}",
                )
            self.size += missing
        self.taken += size

    def give(self, size: int) -> None:
        """After they were deleted, or are kept."""
        self.taken -= size

    def handed_over(self) -> Grant:
        """What was taken of it as a grant of its own, for whoever goes on; this one keeps nothing."""
        other = Grant(self._budget, self.account, self.taken)
        other.taken = self.taken
        self._budget.give(self.account, self.size - self.taken)
        self.size = self.taken = 0
        return other

    def release(self) -> None:
        self._budget.give(self.account, self.size)
        self.size = self.taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def is_full(error: BaseException) -> bool:
    """Whether the file system has no room: not our budget, but somebody else's files."""
    while not (isinstance(error, OSError) and error.errno in FULL):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True


def patiently(work: Callable[[], T], budget: Budget, sleep: Callable[[float], None], on_pause: Callable[[], None]) -> T:
    """Does ``work``; where the file system is full, gives it all that is only kept, waits, and does the work again from its beginning.

    ``work`` removes what it has written before it raises. Raises OutOfBudget once patience is over: nothing is lost, the next run goes on.
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
                    hint="Free space there and run it again: what is done is not done twice",
                ) from error
        budget.forget()
        on_pause()
        sleep(LOOK_S)
        waited += LOOK_S
