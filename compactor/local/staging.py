"""What one round has on the local disk: objects fetched from the tier and segments written for it, all within the budget (I10)."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import TypeVar

from compactor.errors import BadData, OutOfBudget
from compactor.local.budget import BLOCK, Account, Grant, Kept, blocks, patiently
from compactor.local.budget import Budget as Budget
from compactor.model.ids import TopicPartition
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile
from compactor.stages import WorkStage, measured
from compactor.tier import recorded
from compactor.tier.contents import Digests
from compactor.tier.ports import SegmentLayout

T = TypeVar("T")

FileOf = tuple[str, str]
"""Segment id and kind."""

READ_BYTES = 1 << 20
RANGE_BYTES = 8 << 20
RANGES_AT_ONCE = 4
"""Requests of one file whose parts are fetched, of so many bytes at most: they are in memory on their way."""


@dataclass(frozen=True)
class Wanted:
    """One file of a segment, and the name that it has below a broker's log directory (empty: none).

    ``ranges``: positions and lengths of what is wanted of it, one behind the other; of these nobody has recorded a digest. None: all.
    """

    name: TopicPartition
    segment: RemoteLogSegmentMetadata
    kind: str
    local_name: str = ""
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def file(self) -> SegmentFile:
        """What was recorded of it."""
        return self.segment.file(self.kind)

    @property
    def what(self) -> FileOf:
        return self.segment.id, self.kind if self.ranges is None else f"part of {self.kind}"

    @property
    def size(self) -> int:
        return self.file.size if self.ranges is None else sum(length for _, length in self.ranges)

    @property
    def room(self) -> int:
        return blocks(self.size)


class Staging:
    """One round's folder; removed with everything in it by ``close``. Usable by several threads, an object by one at a time.

    :param local_log_dirs: brokers' log directories on this machine; what lies there with a digest that was recorded is not fetched.
    :param sleep: waits while somebody else's files fill the disk; ``on_pause`` is told.
    """

    def __init__(
        self,
        folder: Path,
        layout: SegmentLayout,
        budget: Budget,
        *,
        sleep: Callable[[float], None] = time.sleep,
        local_log_dirs: Sequence[Path] = (),
        on_pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.layout = layout
        self.budget = budget
        self.account = Account()
        self.bytes_fetched = 0
        """Of segments, from the store; what a broker's log directory had instead is not counted."""
        self._sleep = sleep
        self._on_pause = on_pause
        self._local = tuple(local_log_dirs)
        self._kept: dict[FileOf, tuple[Path, Kept]] = {}
        self._coming: dict[FileOf, Future[None]] = {}
        self._numbers = count()
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, "fetch-ahead")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    @contextmanager
    def opened(self, wanted: Wanted, grant: Grant | None = None) -> Iterator[Path]:
        """It as a local file, checked against its recorded size and digest, while the block runs.

        Afterwards it is kept until somebody needs the room.

        :param grant: where its room comes from; without one it is asked and waited for here, by a thread that holds none.
        :raises OutOfBudget: also Overrun, where the grant is too small.
        :raises StoreError:
        :raises BadData: the object is not what was recorded.
        """
        coming = self._coming.get(wanted.what)
        if coming is not None:
            coming.result()
        found = self._kept.get(wanted.what)
        if found is not None and self.budget.pin(found[1]):
            try:
                yield found[0]
            finally:
                self.budget.unpin(found[1])
            return
        path = self.folder / f"{next(self._numbers)}"
        if grant is None:
            with self.budget.grant(self.account, wanted.room, self.where(wanted)) as own:
                self._bring(wanted, path)
                try:
                    yield path
                finally:
                    self._keep(wanted.what, path, self.budget.settle(own, lambda: path.unlink(missing_ok=True)))
            return
        grant.take(wanted.room)
        try:
            self._bring(wanted, path)
            yield path
        finally:
            kept = self.budget.keep(self.account, wanted.room, lambda: path.unlink(missing_ok=True)) if path.exists() else None
            if kept is None:
                path.unlink(missing_ok=True)
            else:
                self._keep(wanted.what, path, kept)
            grant.give(wanted.room)

    def fetch_ahead(self, wanted: Wanted) -> None:
        """Begins to fetch it in the background, if there is room that nobody uses. ``opened`` will meet what goes wrong there again."""
        if wanted.what in self._coming or not self.missing([wanted]):
            return
        own = self.budget.spare(self.account, wanted.room)
        if own is None:
            return
        with self._lock:
            self._coming[wanted.what] = self._ahead.submit(self._fetch_ahead, wanted, own)

    @contextmanager
    def room(self, size: int, what: str, inputs: Sequence[Wanted] = ()) -> Iterator[Grant]:
        """A grant of ``size`` bytes, and besides it those inputs that are here already, which stay."""
        here = [self._kept[wanted.what][1] for wanted in inputs if wanted.what in self._kept]
        with self.budget.grant(self.account, size, what, here) as grant:
            pinned = [kept for kept in here if not kept.dropped]
            try:
                yield grant
            finally:
                for kept in pinned:
                    self.budget.unpin(kept)

    @contextmanager
    def reserved(self, size: int, what: str) -> Iterator[None]:
        """More room for one who has some already: never waits. Raises OutOfBudget."""
        if not self.budget.take(self.account, size):
            raise OutOfBudget(
                f"{what} needs {size} bytes of local disk, and {self.budget.used} of {self.budget.total} are in use",
                hint=f"Set disk_budget_bytes to at least {size + self.budget.used}",
            )
        try:
            yield
        finally:
            self.budget.give(self.account, size)

    def patiently(self, work: Callable[[], T]) -> T:
        """Does ``work``, which cleans up before it raises; while somebody else's files fill the disk it waits and does it again."""
        return patiently(work, self.budget, self._sleep, self._on_pause)

    @property
    def peak_bytes(self) -> int:
        return self.account.peak

    def missing(self, inputs: Sequence[Wanted]) -> list[Wanted]:
        """Those that would have to be fetched."""
        return [wanted for wanted in inputs if wanted.what not in self._kept or self._kept[wanted.what][1].dropped]

    def forget(self, inputs: Sequence[Wanted]) -> None:
        """These will not be asked for again."""
        self.budget.forget([self._kept.pop(wanted.what)[1] for wanted in inputs if wanted.what in self._kept])

    def where(self, wanted: Wanted) -> str:
        """Its object, for messages."""
        return self.layout.where(wanted.name, wanted.segment, wanted.kind)

    def content(self, wanted: Wanted) -> bytes:
        """A small object besides the segments themselves, in memory. Raises BadData where it is not what was recorded."""
        return recorded.content(self.layout, wanted.name, wanted.segment, wanted.kind)

    def close(self) -> None:
        self._ahead.shutdown(cancel_futures=True)
        self.budget.forget([kept for _, kept in self._kept.values()])
        self._kept.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.budget.give(self.account, self.account.used)  # of work that was broken off

    def _keep(self, key: FileOf, path: Path, kept: Kept) -> None:
        self._kept[key] = (path, kept)

    def _fetch_ahead(self, wanted: Wanted, own: Grant) -> None:
        path = self.folder / f"{next(self._numbers)}"
        with own:
            try:
                self._once(wanted, path)
                self._keep(wanted.what, path, self.budget.settle(own, lambda: path.unlink(missing_ok=True)))
            except Exception:  # noqa: BLE001 - whoever wants it will meet the same and say so
                path.unlink(missing_ok=True)
            finally:
                with self._lock:
                    self._coming.pop(wanted.what, None)

    def _bring(self, wanted: Wanted, path: Path) -> None:
        self.patiently(lambda: self._once(wanted, path))

    @measured(WorkStage.FETCH, lambda self, wanted, path: wanted.size)
    def _once(self, wanted: Wanted, path: Path) -> None:
        try:
            if wanted.ranges is not None:
                self._fetch_ranges(wanted, wanted.ranges, path)
                return
            if self._from_log_directory(wanted, path):
                return
            arrived = recorded.download(self.layout, wanted.name, wanted.segment, wanted.kind, path)
            with self._lock:
                self.bytes_fetched += arrived.travelled
            arrived.require(self.where(wanted), wanted.file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _fetch_ranges(self, wanted: Wanted, ranges: Sequence[tuple[int, int]], path: Path) -> None:
        """Into one file, one behind the other, some requests at a time. Raises BadData where the object ends before a range does."""
        places = [0, *accumulate(length for _, length in ranges)]
        pieces = [
            (place + at, start + at, min(RANGE_BYTES, length - at))
            for place, (start, length) in zip(places, ranges, strict=False)
            for at in range(0, length, RANGE_BYTES)
        ]

        def fetch(piece: tuple[int, int, int]) -> None:
            place, start, length = piece
            data = self.layout.read(wanted.name, wanted.segment, wanted.kind, start, length)
            if len(data) != length:
                raise BadData("the object ends before its recorded size", segment=self.where(wanted), position=start + len(data))
            write_at(file.fileno(), data, place)
            with self._lock:
                self.bytes_fetched += length

        pool = ThreadPoolExecutor(min(len(pieces), RANGES_AT_ONCE) or 1, "ranges")
        with path.open("xb") as file:
            try:
                for done in [pool.submit(fetch, piece) for piece in pieces]:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _from_log_directory(self, wanted: Wanted, path: Path) -> bool:
        """Copies the file, so that the broker may do with it what it likes; the copy is what is checked."""
        for folder in self._local if wanted.local_name and wanted.file.has_digest else ():
            source = folder / wanted.local_name
            try:
                if source.stat().st_size != wanted.file.size:
                    continue
                with source.open("rb") as file:
                    found = _copy(file.read, path, wanted.file)
            except (FileNotFoundError, PermissionError):
                continue
            if found.is_same(wanted.file):
                return True
            path.unlink()
        return False


def write_at(file: int, data: bytes, position: int) -> None:
    """All of it."""
    left = memoryview(data)
    while left:
        done = os.pwrite(file, left, position)
        left, position = left[done:], position + done


def _copy(read: Callable[[int], bytes], path: Path, expected: SegmentFile) -> SegmentFile:
    """Writes what ``read`` gives; what that is, with the digest that can be compared."""
    digests = Digests(expected)
    with path.open("wb") as target:
        while data := read(READ_BYTES):
            digests.update(data)
            target.write(data)
    return digests.found()


def group_room(
    sources: Sequence[RemoteLogSegmentMetadata],
    index_interval_bytes: int,
    to_fetch: Sequence[Wanted] | None = None,
    *,
    most_bytes: int = 0,
) -> int:
    """Bytes of disk that a group needs at once: one source after the other, its output and the output's indexes.

    The output is at most as large as its sources; where recompression makes it larger, the group overruns its grant and goes alone.
    :param to_fetch: only these sources need room (the others are here already); None: all.
    :param most_bytes: no more is left of them; 0: nobody knows.
    """
    written = most_bytes or sum(source.size_bytes for source in sources)
    # Index entries have 8 and 12 bytes, at most one of each every interval, and no batch has fewer than 61 bytes.
    indexes = written // max(index_interval_bytes, 61) * 20
    largest = max((source.size_bytes for source in sources), default=0) if to_fetch is None else max((w.size for w in to_fetch), default=0)
    return blocks(largest) + blocks(written) + blocks(indexes) + len(FILE_KINDS) * BLOCK
