"""``import``: a Kafka log directory into the tier, as far as the tier does not have it yet.

    listed -> opened from where the tier ends -> the same log? -> checked -> taken in (transfer.intake)

The position is the last offset that the control log has, plus one; never a file's name. Everything that one import brings is read and
checked before the first thing of it is written.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from bloom.sidecar import Sidecar
from checkpoint.lineage import EpochEntry, Lineage, epoch_at, extend, merge
from compactor.bootstrap import Tier
from compactor.cleaner.passes.lanes import Lanes
from compactor.cleaner.passes.portraits import Sitting, portray
from compactor.cleaner.passes.source import SourceSegment
from compactor.control import ordering
from compactor.control.fold import TAIL
from compactor.control.logs import HASH_KEY_BYTES, PartitionLog
from compactor.control.state import PartitionState
from compactor.errors import BadData, OutOfBudget, UsageError
from compactor.local.spool import process_folder
from compactor.model.ids import TopicPartition
from compactor.model.policy import CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.balance import BalanceKey
from compactor.records.producers import ProducerStates
from compactor.round.sources import producers_at_end
from compactor.storage.factory import is_s3, local_path
from compactor.tier.sidecars import Sidecars
from compactor.transfer.intake import Arrival, take_in
from compactor.transfer.log_directory import (
    CHECKPOINT,
    CheckedPiece,
    Checks,
    LogPiece,
    Member,
    check,
    check_indexes,
    check_lineage,
    check_missing,
    check_unchanged,
    given_lineage,
    members,
    prepare,
    room_for,
    tail_of,
    told_lineage,
)
from compactor.transfer.seam import Listing, above, below, check_tail, check_within, listing, opened, parting
from compactor.transfer.truncation import accept_truncation

LIVE_BYTES = 256 << 20
"""Of a live log, whose segments are held in memory while they are imported, so much goes at once, and at least one segment."""

LARGE_BYTES = 16 << 20
"""An import of more goes alone: it has enough to do by itself, and a live one is in memory."""

LOOKS = 3
"""How often a live directory is looked at anew because a segment was gone when it was to be read."""


@dataclass(frozen=True)
class ImportOptions:
    """How a log directory is taken.

    ``live``: a broker is at work there; its newest segment is left out. ``gaps``: the caller knows that the log was compacted before, so
    that gaps are in order. ``accept_truncation``: what the broker's leader epochs disown is discarded in the tier, too.
    ``below``: an exclusive bound, such as the high watermark; a segment that reaches it is left for later. ``lineage``: the
    broker's, where the caller knows better than the directory's file. ``older``: offsets before the tier's first are wanted, and a
    directory that ends before what is remembered is held against the tier's records; for an agent, who looks again and again, neither.
    ``refill``: a partition that was deleted is begun anew. ``may_be_empty``: a directory without records is nothing to say.
    """

    live: bool = False
    gaps: bool = False
    accept_truncation: bool = False
    below: int | None = None
    lineage: Lineage = ()
    older: bool = True
    refill: bool = True
    may_be_empty: bool = False


@dataclass(frozen=True)
class ImportReport:
    """What was added; ``end_offset`` is inclusive. Where nothing was, both offsets stand around the tier's end. ``notes``: for people."""

    segments: int
    bytes: int
    start_offset: int
    end_offset: int
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        return "imported" if self.segments else "up_to_date"


@dataclass(frozen=True)
class ImportProgress:
    """Who wants to know: each step with the bytes that it is about, then the bytes as they are done."""

    at: Callable[[str, int], None] = lambda step, size: None
    advance: Callable[[int], None] = lambda size: None


@dataclass(frozen=True)
class Company:
    """What one import may use beside others of this process.

    ``note_change``: tells others of a partition; there is one catalog. ``large``: held while more than LARGE_BYTES are imported.
    """

    threads: int
    note_change: Callable[[PartitionLog], None]
    large: AbstractContextManager[object] = field(default_factory=nullcontext)


def import_directory(
    tier: Tier,
    log_dir: Path,
    name: TopicPartition,
    policy: CleanerPolicy,
    progress: ImportProgress | None = None,
    options: ImportOptions | None = None,
    company: Company | None = None,
) -> ImportReport:
    """Takes what the tier does not have of a log directory.

    :param company: where several imports are at work in this process.
    :raises UsageError: not a log directory, or one that cannot be read; a partition that was deleted, without ``refill``.
    :raises BadData: a segment that cannot be read; a gap; another log; a discarded tail. The tier is as it was.
    :raises Fenced: the import was voided because it slept too long.
    :raises StoreError: what was uploaded is found again by the next attempt, or swept.
    """
    options = options or ImportOptions()
    log = tier.open(name)
    company = company or Company(tier.settings.daemon.threads, tier.note_change)
    work = _Import(tier, log_dir, name, policy, progress or ImportProgress(), options, log, company)
    with _reading(log_dir):
        for _ in range(LOOKS if options.live else 0):
            try:
                return work.run()
            except FileNotFoundError:
                continue  # the broker has deleted a segment meanwhile: what is there now?
        return work.run()


@contextmanager
def _reading(log_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(
            f"cannot read {error.filename or log_dir}: {error.strerror}", hint="Check the path, its owner and its mode"
        ) from error


@dataclass
class _Import:
    """One import: what it brings and where to."""

    tier: Tier
    log_dir: Path
    name: TopicPartition
    policy: CleanerPolicy
    progress: ImportProgress
    options: ImportOptions
    log: PartitionLog
    company: Company
    notes: list[str] = field(default_factory=list)
    done: list[Member] = field(default_factory=list)
    bases: tuple[int, ...] = ()
    too_late: str = ""
    key_to_be: bytes = b""
    telling: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> ImportReport:
        found = listing(self.log_dir, live=self.options.live)
        if not found.bases and not self.options.live and not self.options.may_be_empty:
            raise UsageError(f"{self.log_dir} holds no segments", hint="Segments are called <20 digits>.log")
        self.bases = found.bases
        state = self.log.check_whole()
        self._check_refill(state)
        self._add_older(found, state)
        last = replace(found, bases=found.bases[-1:])
        found = found.from_offset(self._seam(state))
        if state.live and not found.bases:
            # Of a live log all that is sealed may lie below what was discarded, or below what is remembered.
            state = self._same_log(state, [], self._given([]))
            self._check_within(state, self._opened(last) if self.options.older else [])
        while found.bases:
            part = found.first(LIVE_BYTES) if self.options.live else found
            with self.company.large if part.size > LARGE_BYTES else nullcontext():
                reached = self._add_newer(part)
            if reached:
                break
            found = replace(found, bases=found.bases[len(part.bases) :])
        if self.too_late and not self.done:
            hint = "`topics delete` the partition and import the whole directory anew"
            raise BadData(self.too_late, segment=str(self.log_dir), hint=hint)
        self.notes += [self.too_late] if self.too_late else []
        return self._report()

    def _seam(self, state: PartitionState) -> int:
        """From where on the directory is looked at: the batches that are remembered, else the tier's end."""
        if not state.live:
            return 0
        return min(state.tail[0].base_offset, state.end_offset + 1) if state.tail else state.end_offset

    def _check_refill(self, state: PartitionState) -> None:
        if state.deleted_slot and not self.options.refill:
            raise UsageError(
                f"{self.name} was deleted from the tier and is not filled again by itself", hint="`import` its log directory to begin anew"
            )

    # --- at the end ---

    def _add_newer(self, found: Listing) -> bool:
        """Whether the bound was reached."""
        state = self.log.state
        sources = self._opened(found)
        given = self._given(sources)
        if state.live:
            state = self._same_log(state, sources, given)
        pieces = above(self.log_dir, sources, state.end_offset) if state.live else above(self.log_dir, sources, -1)
        bounded = self._bounded(pieces)
        reached, pieces = len(bounded) < len(pieces), bounded
        if not any(piece.source.size for piece in pieces):
            empty = len(sources) == len(self.bases) and not any(source.size for source in sources)
            if empty and not self.options.may_be_empty and not self.options.live:
                raise BadData("all its segments are empty", segment=str(self.log_dir), hint="There is nothing to import")
            return reached
        checked = self._checked(self._joined_to(state, pieces))
        before = producers_at_end(self.tier.ports.layout, state)
        found_members = members(self.log_dir, checked, before)
        told = extend(state.lineage, told_lineage([member.source for member in found_members]))
        lineage = _lineage_until(given, found_members[-1].end) or told
        tail = tail_of([member.source for member in found_members], TAIL)
        self._take(found_members, Arrival(lineage, tail, fits=self._continues(found_members[0]), listed=self._listed, noted=self._noted))
        return reached

    def _given(self, sources: Sequence[SourceSegment]) -> Lineage:
        """The lineage that goes with the directory, empty where there is none. Raises BadData where its batches contradict it."""
        given = self.options.lineage or given_lineage(self.log_dir)
        if given:
            check_lineage(self.log_dir / CHECKPOINT, given, sources)
        return given

    def _opened(self, found: Listing) -> list[SourceSegment]:
        return opened(found, self.policy, live=self.options.live)

    def _same_log(self, state: PartitionState, sources: Sequence[SourceSegment], given: Lineage) -> PartitionState:
        """Raises BadData for another log. A tail that the broker has discarded is discarded, if that is accepted."""
        parted = parting(state, sources, given)
        if parted is None:
            if not check_tail(state, sources):
                self._check_within(state, sources)
            return state
        if not (given or parted.newer) and check_tail(state, sources):
            return state  # epochs that only batches tell may go back (v0 and v1 have none): batches that are the same speak louder
        check_tail(state, sources, parted.offset)
        if not (parted.newer and self.options.accept_truncation) or parted.offset <= state.start_offset:
            raise parted.error(state, self.log_dir)
        self.notes += accept_truncation(self.tier, self.log, parted.offset, epoch_at(parted.given, parted.offset), self.policy)
        self.company.note_change(self.log)
        return self.log.state

    def _check_within(self, state: PartitionState, sources: Sequence[SourceSegment]) -> None:
        if self.options.older:
            check_within(state, sources, self._stored, self.policy.max_decompressed_batch_bytes)

    @contextmanager
    def _stored(self, segment: RemoteLogSegmentMetadata) -> Iterator[SourceSegment]:
        """A segment as the tier has it."""
        with self.tier.opening(self.name, [segment], "import") as reading, reading.opened(0, txn_index=False) as source:
            yield source

    def _bounded(self, pieces: list[LogPiece]) -> list[LogPiece]:
        """Without the first segment that reaches the bound, and what follows it."""
        limit = self.options.below
        if limit is None:
            return pieces
        reaching = (place for place, piece in enumerate(pieces) if piece.source.size and int(piece.source.table.last_offset[-1]) >= limit)
        return pieces[: next(reaching, len(pieces))]

    def _joined_to(self, state: PartitionState, pieces: list[LogPiece]) -> list[LogPiece]:
        """Raises BadData for a gap between the tier and the directory; where gaps are in order the first segment covers it."""
        first = pieces[0].source
        if not state.live or first.base == state.end_offset + 1:
            return pieces
        if not self.options.gaps:
            raise BadData(
                f"the directory begins at offset {first.base}, and {self.name} ends at {state.end_offset} in the tier: it leaves a gap",
                segment=first.name,
                hint=f"Give a directory that begins at {state.end_offset + 1} or before; if what is missing is gone, say --allow-gaps",
            )
        self.notes.append(f"offsets {state.end_offset + 1} to {first.base - 1} are missing in {self.name}, and stay so")
        return [replace(pieces[0], source=replace(first, base=state.end_offset + 1)), *pieces[1:]]

    def _continues(self, first: Member) -> Callable[[PartitionState], None]:
        def check_position(state: PartitionState) -> None:
            if state.live and first.start != state.end_offset + 1:
                raise BadData(
                    f"{self.name} ends at {state.end_offset} by now, and the import begins at {first.start}",
                    segment=first.source.name,
                    hint="Another import was faster. Import again what is still missing",
                )

        return check_position

    # --- before the beginning ---

    def _add_older(self, found: Listing, state: PartitionState) -> None:
        if not state.live or not found.bases or found.bases[0] >= state.start_offset or not self.options.older:
            return
        problem = ordering.compacted(state)
        if problem:
            self.too_late = f"offsets {found.bases[0]} to {state.start_offset - 1} cannot be added before what the tier has: {problem}"
            return
        part = found.until(state.start_offset)
        pieces = below(self.log_dir, self._opened(part), state.start_offset)
        if not any(piece.source.size for piece in pieces):
            return
        given = self._given([piece.source for piece in pieces])
        last = pieces[-1].source
        if last.end != state.start_offset and not self.options.gaps:
            raise BadData(
                f"offsets {last.end} to {state.start_offset - 1} are missing between the directory and {self.name} in the tier",
                segment=last.name,
                hint="Restore the segment in between; if a cleaner took them away, say --allow-gaps",
            )
        pieces[-1] = replace(pieces[-1], source=replace(last, end=state.start_offset, is_last=False))
        found_members = members(self.log_dir, self._checked(pieces), ProducerStates.none())
        self._check_older(state, found_members, given)
        older = merge(told_lineage([piece.source for piece in pieces if piece.source.size]), _lineage_until(given, found_members[-1].end))
        self._take(found_members, Arrival(older, before=True, listed=self._listed, noted=self._noted))

    def _check_older(self, state: PartitionState, found: list[Member], given: Lineage) -> None:
        """Raises BadData for another log, and for a transaction that would come to its end in segments which do not know of it."""
        last = (given or told_lineage([found[-1].source]))[-1].epoch
        if not given and state.lineage and last > state.lineage[0].epoch:
            raise BadData(
                f"it was written in leader epoch {last}, and {self.name} begins with epoch {state.lineage[0].epoch} in the tier",
                segment=found[-1].source.name,
                hint="This is another log",
            )
        undecided = found[-1].states.first_open_offset()
        if undecided is not None:
            raise BadData(
                f"a transaction that begins at offset {undecided} is open where the tier begins, whose indexes do not tell how it ended",
                segment=found[-1].source.name,
                hint="`topics delete` the partition and import the whole directory anew",
            )
        if given:
            parted = parting(state, [member.source for member in found], given)
            if parted is not None and parted.offset < state.start_offset:
                raise parted.error(state, self.log_dir)

    # --- both ---

    def _checked(self, pieces: Sequence[LogPiece]) -> list[CheckedPiece]:
        sources = [piece.source for piece in pieces]
        size = sum(source.size for source in sources)
        self.progress.at("checking", size)
        if not self.options.live:
            check_indexes(self.log_dir, self.bases)
        if not self.options.gaps:
            check_missing(sources)
        limit = self.policy.max_decompressed_batch_bytes
        checked = check(pieces, Checks(limit, self.company.threads, self._sitting, self.progress.advance))
        negative = sum(piece.negative_timestamps for piece in checked)
        if negative:
            self.notes.append(
                f"{negative} records of {self.name} have negative timestamps: Kafka's cleaner refuses to rewrite a batch with such a "
                "record, and so does a round here, which then leaves the partition as it is"
            )
        return checked

    def _sitting(self, source: SourceSegment) -> Sitting | None:
        """Without a filter: how many keys a round will meet, and what became of transactions without reading it again."""
        if not self.tier.cleaner_for(self.name.topic).bloom:
            return None
        return Sitting(source, None, self._key(), sketch=True)

    def _key(self) -> bytes:
        """The tier's hash key, or what is to be that of the tier that this import makes: it is needed before anything is written."""
        if self.tier.catalog.state.tier_id:
            return self.tier.hash_key()
        self.key_to_be = self.key_to_be or self.tier.ports.random_bytes(HASH_KEY_BYTES)
        return self.key_to_be

    def _take(self, found: list[Member], arrival: Arrival) -> None:
        tier, interval = self.tier, self.policy.index_interval_bytes
        _check_room(tier.ports.layout.url, sum(room_for(member, interval) for member in found))
        if not tier.catalog.state.tier_id:
            tier.create(self.key_to_be)
            tier.catalog.refresh()
        self.progress.at("uploading", sum(member.source.size for member in found))
        sidecars = tier.sidecars(self.name) if tier.cleaner_for(self.name.topic).bloom else None
        older = arrival.lineage if arrival.before else merge(self.log.state.lineage, arrival.lineage)
        incoming = [_File(self, member, older, sidecars) for member in found]
        if take_in(tier.ports, self.log, incoming, replace(arrival, at_once=self.company.threads)):
            self.done += found

    def _listed(self) -> None:
        if str(self.name) not in self.tier.catalog.state.partitions:
            self.company.note_change(self.log)

    def _noted(self) -> None:
        self.company.note_change(self.log)

    def _report(self) -> ImportReport:
        state = self.log.state
        if not self.done:
            return ImportReport(0, 0, state.end_offset + 1, state.end_offset, tuple(self.notes))
        size = sum(member.source.size for member in self.done)
        start, end = min(member.start for member in self.done), max(member.end for member in self.done)
        return ImportReport(len(self.done), size, start, end, tuple(self.notes))


@dataclass(frozen=True)
class _File:
    """Incoming (transfer.intake): a segment of the directory."""

    work: _Import
    member: Member
    lineage: tuple[EpochEntry, ...]
    sidecars: Sidecars | None

    @property
    def identity(self) -> str:
        return f"{self.member.start} {self.member.end} {self.member.checked.sha256}"

    def bring(self, registered: str) -> RemoteLogSegmentMetadata | None:
        work = self.work
        with tempfile.TemporaryDirectory(prefix="import-", dir=process_folder(work.tier.state_dir)) as scratch:
            metadata, paths = prepare(self.member, registered, self.lineage, work.policy, BalanceKey(work.tier.hash_key()), Path(scratch))
            if work.tier.ports.layout.upload(work.name, metadata, paths):
                return None
        if self.sidecars is not None:
            self.sidecars.add(self._sidecar(metadata.id, self.sidecars.hash_key))
        with work.telling:
            work.progress.advance(metadata.size_bytes)
        return metadata

    def _sidecar(self, registered: str, hash_key: bytes) -> Sidecar:
        sitting, work = self.member.checked.sitting, self.work
        if sitting is not None and sitting.hash_key == hash_key:
            return sitting.sidecar(registered)
        # Another process has made the tier meanwhile: what was seen was hashed under a key that nobody knows.
        with Lanes(work.company.threads) as lanes:
            return portray(registered, self.member.source, None, hash_key, work.policy.max_decompressed_batch_bytes, lanes, sketch=True)

    def check_unchanged(self) -> None:
        check_unchanged(self.member)


def _lineage_until(given: Lineage, end: int) -> Lineage:
    return tuple(entry for entry in given if entry.start_offset <= end)


def _check_room(url: str, needed: int) -> None:
    """Where the tier is a directory: whether so much fits on its disk. Else it would be left with half of it. Raises OutOfBudget."""
    if is_s3(url):
        return
    root = local_path(url)
    disk = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    if free < needed:
        raise OutOfBudget(
            f"this import needs {needed} bytes, and the disk of {disk} has {free} left",
            hint="Free space, or move the tier to a larger disk",
        )
