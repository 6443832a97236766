"""Files of one round on the local disk, within the disk budget (I10): objects fetched from the tier, and segments written for it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Protocol, TypeVar

from compactor.config.units import format_size
from compactor.errors import BadData, OutOfBudget
from compactor.local.budget import (
    BLOCK,
    CachedFile,
    DiskBudget as DiskBudget,
    DiskFullWait,
    DiskSpaceReservation,
    RoundDiskUsage,
    retry_while_disk_full,
    round_up_to_blocks,
)
from compactor.model.ids import TopicPartition
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.storage.checks import write_at_position
from compactor.storage.port import FileLease
from compactor.tier import contents
from compactor.tier.contents import DownloadedFile, FileStreamDigest
from compactor.tier.ports import SegmentLayout

T = TypeVar("T")

FileAndObjectRange = tuple[int, int, int]
"""Position in the local file, position in the object, and length in bytes."""

CachedFileKey = tuple[str, str]
"""Segment id and kind."""

COPY_BYTES = 1 << 20
RANGE_BYTES = 8 << 20
MOST_LEASES = 128
"""Number of files that the store lends at a time: each holds a descriptor."""
RANGES_AT_ONCE = 4
"""Requests of one file whose parts are fetched, of so many bytes at most: they are in memory on their way."""


@dataclass(frozen=True)
class FileToStage:
    """File of a remote segment.

    kind: such as log or index.
    local_name: path below a broker's log directory; empty if not searched there.
    ranges: (position, length) in bytes of the parts to fetch, in order; they are not compared with a digest. None for the whole file.
    """

    partition: TopicPartition
    segment: RemoteLogSegmentMetadata
    kind: str
    local_name: str = ""
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def recorded_size_and_digests(self) -> SegmentFile:
        return self.segment.recorded_size_and_digests(self.kind)

    @property
    def cache_key(self) -> CachedFileKey:
        """A file of which only ranges are fetched has another key than the whole file."""
        return self.segment.id, self.kind if self.ranges is None else f"part of {self.kind}"

    @property
    def bytes_to_fetch(self) -> int:
        return self.recorded_size_and_digests.size if self.ranges is None else sum(length for _, length in self.ranges)

    @property
    def size_on_disk_bytes(self) -> int:
        return round_up_to_blocks(self.bytes_to_fetch)


class StagingFolder:
    """Local copies of the files that one round reads. Thread-safe, but two threads must not stage the same file at once.

    :param local_log_dirs: of brokers. Files with a recorded digest are copied from there if possible.
    """

    def __init__(
        self,
        folder: Path,
        layout: SegmentLayout,
        budget: DiskBudget,
        *,
        sleep: Callable[[float], None] = time.sleep,
        local_log_dirs: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        self.layout = layout
        self.budget = budget
        self.usage = RoundDiskUsage()
        self.bytes_fetched = 0
        """Of segments, from the store; what a broker's log directory had instead is not counted."""
        self._sleep = sleep
        self._local = tuple(local_log_dirs)
        self._kept: dict[CachedFileKey, tuple[Path, CachedFile]] = {}
        self._coming: dict[CachedFileKey, Future[None]] = {}
        self._leases: dict[Path, FileLease] = {}
        self._numbers = count()
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, "fetch-ahead")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    @contextmanager
    def local_copy(self, file: FileToStage, reservation: DiskSpaceReservation | None = None) -> Iterator[Path]:
        """Size and digest were compared with the recorded ones. After the block the file stays cached until its bytes are needed.

        :param reservation: if it is None, the call waits for one of its own; the calling thread must then hold no other.
        :raises OutOfBudget: if the file exceeds the whole budget; DiskReservationExceeded, if ``reservation`` is too small.
        :raises StoreError: if the object cannot be fetched.
        :raises BadData: if the object differs from what was recorded.
        """
        coming = self._coming.get(file.cache_key)
        if coming is not None:
            coming.result()
        found = self._kept.get(file.cache_key)
        if found is not None and self.budget.try_pin(found[1]):
            try:
                with self._unchanged(found[0]):
                    yield found[0]
            finally:
                self.budget.unpin_file(found[1])
            return
        path = self.folder / f"{next(self._numbers)}"
        if reservation is None:
            with self.budget.reserve_space(self.usage, file.size_on_disk_bytes, self.object_key_of(file)) as own:
                self._fetch_with_retry(file, path)
                try:
                    with self._unchanged(path):
                        yield path
                finally:
                    self._remember_cached_file(file.cache_key, path, self.budget.convert_to_cached_file(own, lambda: self._remove(path)))
            return
        reservation.reserve_bytes_on_disk(file.size_on_disk_bytes)
        try:
            self._fetch_with_retry(file, path)
            with self._unchanged(path):
                yield path
        finally:
            kept = self.budget.try_cache_file(self.usage, file.size_on_disk_bytes, lambda: self._remove(path)) if path.exists() else None
            if kept is None:
                self._remove(path)
            else:
                self._remember_cached_file(file.cache_key, path, kept)
            reservation.release_bytes_on_disk(file.size_on_disk_bytes)

    def prefetch_file(self, file: FileToStage) -> None:
        """Do nothing unless the disk budget has unused bytes. Errors are ignored."""
        if file.cache_key in self._coming or not self.files_without_local_copy([file]):
            return
        own = self.budget.reserve_for_prefetch(self.usage, file.size_on_disk_bytes)
        if own is None:
            return
        with self._lock:
            self._coming[file.cache_key] = self._ahead.submit(self._fetch_in_prefetch_thread, file, own)

    @contextmanager
    def reserved_disk_space(
        self, size_bytes: int, work_name: str, files_to_pin: Sequence[FileToStage] = ()
    ) -> Iterator[DiskSpaceReservation]:
        """Wait until ``size_bytes`` bytes are free.

        :param files_to_pin: files that stay cached during the block.
        :raises OutOfBudget: if the whole budget is smaller than ``size_bytes``.
        """
        here = [self._kept[wanted.cache_key][1] for wanted in files_to_pin if wanted.cache_key in self._kept]
        with self.budget.reserve_space(self.usage, size_bytes, work_name, here) as reservation:
            pinned = [kept for kept in here if not kept.dropped]
            try:
                yield reservation
            finally:
                for kept in pinned:
                    self.budget.unpin_file(kept)

    @contextmanager
    def reserved_at_once(self, size_bytes: int, work_name: str) -> Iterator[None]:
        """Raise OutOfBudget, without waiting, if the bytes are not free."""
        if not self.budget.try_extend(self.usage, size_bytes):
            raise OutOfBudget(
                f"{work_name} needs {format_size(size_bytes)} of local disk, and {format_size(self.budget.used)} of "
                f"{format_size(self.budget.total)} are in use",
                hint=f"Set disk_budget_bytes to at least {size_bytes + self.budget.used}",
            )
        try:
            yield
        finally:
            self.budget.give_back(self.usage, size_bytes)

    def disk_full_wait(self) -> DiskFullWait:
        return DiskFullWait(self.budget, self._sleep)

    def retry_while_disk_full(self, work: Callable[[], T]) -> T:
        return retry_while_disk_full(work, self.budget, self._sleep)

    @property
    def peak_bytes(self) -> int:
        return self.usage.peak

    def files_without_local_copy(self, files: Sequence[FileToStage]) -> list[FileToStage]:
        return [wanted for wanted in files if wanted.cache_key not in self._kept or self._kept[wanted.cache_key][1].dropped]

    def delete_cached_copies(self, files: Sequence[FileToStage]) -> None:
        self.budget.delete_unpinned_files([self._kept.pop(wanted.cache_key)[1] for wanted in files if wanted.cache_key in self._kept])

    def object_key_of(self, file: FileToStage) -> str:
        return self.layout.object_name(file.partition, file.segment, file.kind)

    def fetch_file_into_memory(self, file: FileToStage) -> bytes:
        """Raise BadData if the file differs from what was recorded."""
        return contents.read_verified_file(self.layout, file.partition, file.segment, file.kind)

    def close(self) -> None:
        """Give all reserved bytes back to the budget."""
        self._ahead.shutdown(cancel_futures=True)
        self.budget.delete_unpinned_files([kept for _, kept in self._kept.values()])
        self._kept.clear()
        for path in list(self._leases):
            self._remove(path)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.budget.give_back(self.usage, self.usage.used)  # of work that was broken off

    def _remember_cached_file(self, key: CachedFileKey, path: Path, cached_file: CachedFile) -> None:
        self._kept[key] = (path, cached_file)

    def _fetch_in_prefetch_thread(self, file: FileToStage, reservation: DiskSpaceReservation) -> None:
        path = self.folder / f"{next(self._numbers)}"
        with reservation:
            try:
                self._fetch_file_without_retry(file, path)
                self._remember_cached_file(
                    file.cache_key, path, self.budget.convert_to_cached_file(reservation, lambda: self._remove(path))
                )
            except Exception:  # noqa: BLE001 - whoever wants it will meet the same and say so
                self._remove(path)
            finally:
                with self._lock:
                    self._coming.pop(file.cache_key, None)

    def _fetch_with_retry(self, file: FileToStage, path: Path) -> None:
        self.retry_while_disk_full(lambda: self._fetch_file_without_retry(file, path))

    @measure_stage(SegmentWorkStage.FETCH, lambda self, wanted, path: wanted.bytes_to_fetch)
    def _fetch_file_without_retry(self, file: FileToStage, path: Path) -> None:
        """Copies and whole objects are compared with the recorded digest. Removes ``path`` after an error."""
        try:
            if file.ranges is not None:
                self._fetch_ranges(file, file.ranges, path)
                return
            if self._copy_from_log_directory(file, path):
                return
            arrived = self._lend(file, path) or contents.download_segment_file(self.layout, file.partition, file.segment, file.kind, path)
            with self._lock:
                self.bytes_fetched += arrived.transferred
            arrived.require_match(self.object_key_of(file), file.recorded_size_and_digests)
        except BaseException:
            self._remove(path)
            raise

    def _lend(self, file: FileToStage, path: Path) -> DownloadedFile | None:
        """Return None if the file must be copied."""
        if len(self._leases) >= MOST_LEASES:
            return None
        lent = contents.lend_segment_file(self.layout, file.partition, file.segment, file.kind, path)
        if lent is None:
            return None
        found, self._leases[path] = lent
        return found

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if (lease := self._leases.pop(path, None)) is not None:
            lease.close()

    @contextmanager
    def _unchanged(self, path: Path) -> Iterator[None]:
        """Raise Unavailable after the block if another program may have written to a lent file meanwhile."""
        yield
        if (lease := self._leases.get(path)) is not None:
            lease.require_unbroken()

    def _fetch_ranges(self, remote_file: FileToStage, ranges: Sequence[tuple[int, int]], path: Path) -> None:
        """Ranges are (position, length). Raises BadData if the object ends too early."""
        places = [0, *accumulate(length for _, length in ranges)]
        pieces = [
            (place + at, start + at, min(RANGE_BYTES, length - at))
            for place, (start, length) in zip(places, ranges, strict=False)
            for at in range(0, length, RANGE_BYTES)
        ]

        def fetch_range_into_file(range_to_fetch: FileAndObjectRange) -> None:
            place, start, length = range_to_fetch
            data = self.layout.read_file(remote_file.partition, remote_file.segment, remote_file.kind, start, length)
            if len(data) != length:
                raise BadData(
                    "the object ends before its recorded size", segment=self.object_key_of(remote_file), position=start + len(data)
                )
            write_at_position(file.fileno(), data, place)
            with self._lock:
                self.bytes_fetched += length

        pool = ThreadPoolExecutor(min(len(pieces), RANGES_AT_ONCE) or 1, "ranges")
        with path.open("xb") as file:
            try:
                for done in [pool.submit(fetch_range_into_file, piece) for piece in pieces]:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _copy_from_log_directory(self, remote_file: FileToStage, path: Path) -> bool:
        """Return False, leaving no file, if no directory has it with the recorded size and digest."""
        for folder in self._local if remote_file.local_name and remote_file.recorded_size_and_digests.has_digest else ():
            source = folder / remote_file.local_name
            try:
                if source.stat().st_size != remote_file.recorded_size_and_digests.size:
                    continue
                with source.open("rb") as file:
                    found = _write_and_digest(file.read, path, remote_file.recorded_size_and_digests)
            except (FileNotFoundError, PermissionError):
                continue
            if found.has_same_content_as(remote_file.recorded_size_and_digests):
                return True
            path.unlink()
        return False


def _write_and_digest(read_bytes: Callable[[int], bytes], path: Path, expected: SegmentFile) -> SegmentFile:
    """:param expected: decides which kind of digest is computed."""
    digests = FileStreamDigest(expected)
    with path.open("wb") as target:
        while data := read_bytes(COPY_BYTES):
            digests.update(data)
            target.write(data)
    return digests.size_and_digest()


class SizedSegment(Protocol):
    @property
    def size_bytes(self) -> int: ...


def rewrite_disk_bytes(
    sources: Sequence[SizedSegment],
    index_interval_bytes: int,
    files_to_fetch: Sequence[FileToStage] | None = None,
    *,
    max_output_bytes: int = 0,
) -> int:
    """Return the bytes in use at the same time: the largest source, the output, and its indexes.

    The output is assumed to be no larger than the sources together. If recompression makes it larger, the group exceeds its reservation and
    is repeated alone.

    :param files_to_fetch: that still need disk space; None for all.
    :param max_output_bytes: 0 if unknown.
    """
    written = max_output_bytes or sum(source.size_bytes for source in sources)
    # Index entries have 8 and 12 bytes, at most one of each every interval, and no batch has fewer than 61 bytes.
    indexes = written // max(index_interval_bytes, 61) * 20
    largest = (
        max((source.size_bytes for source in sources), default=0)
        if files_to_fetch is None
        else max((w.bytes_to_fetch for w in files_to_fetch), default=0)
    )
    return round_up_to_blocks(largest) + round_up_to_blocks(written) + round_up_to_blocks(indexes) + len(FILE_KINDS) * BLOCK
