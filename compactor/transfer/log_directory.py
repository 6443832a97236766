"""A Kafka log directory as what it becomes in the tier: which segments, what each covers, and all that can be wrong with it.

Everything here only reads the directory. What a cleaner could not read later is refused now (``check``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, Lineage
from compactor.cleaner.passes.describe import NO_TIMESTAMP, content_of, due_as_seen, due_ms, epochs_within, lineage_of
from compactor.cleaner.passes.lanes import Lane, Lanes
from compactor.cleaner.passes.portraits import Glimpse, Sitting
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import fold, txnindex_misfit
from compactor.control.records import TailBatch
from compactor.errors import BadData
from compactor.local.budget import BLOCK, blocks
from compactor.model.policy import MAX32, CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.records.balance import BalanceKey, content_sum
from compactor.records.batches import HEADER, HORIZON, BatchTable
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY, TXN_ENTRY, TxnEntries, build, index_misfit, timeindex_misfit
from compactor.records.producers import ProducerStates, format_snapshot, parse_snapshot
from compactor.records.rows import parse
from compactor.tier.recorded import digest

CHECKPOINT = "leader-epoch-checkpoint"
DELETED = ".deleted"

_INDEX_NAME = re.compile(r"(\d{20})\.(index|timeindex|txnindex)")


def log_path(log_dir: Path, base: int) -> Path:
    """Where a segment lies in a log directory."""
    return log_dir / f"{base:020d}.log"


@dataclass(frozen=True)
class LogPiece:
    """A segment file, or those of its batches that are taken. ``skipped``: bytes before them; ``file_size``: of the whole file."""

    source: SourceSegment
    path: Path
    skipped: int
    file_size: int

    @property
    def whole(self) -> bool:
        """Whether all of the file is taken, as it is."""
        return self.source.size == self.file_size and self.path.name == f"{self.source.base:020d}.log"


@dataclass(frozen=True)
class CheckedPiece:
    """A piece whose bytes were all read. ``negative_timestamps``: as the segment's metadata has it; ``sha256``: of the bytes.

    ``sitting``: has seen every record, where a sidecar is wanted.
    """

    piece: LogPiece
    negative_timestamps: int
    sha256: str
    sitting: Sitting | None


@dataclass(frozen=True)
class Member:
    """One remote segment to be. ``start`` and ``end`` (inclusive) are what it covers, zero-byte neighbours included.

    ``states``: the producers at its end.
    """

    checked: CheckedPiece
    start: int
    end: int
    states: ProducerStates
    txn_entries: TxnEntries

    @property
    def piece(self) -> LogPiece:
        return self.checked.piece

    @property
    def source(self) -> SourceSegment:
        return self.piece.source


# ---- what can be wrong ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checks:
    """How a segment is read. ``limit``: bytes that one batch may inflate to; ``portray``: begins its sidecar, None where none is wanted."""

    limit: int
    threads: int
    portray: Callable[[SourceSegment], Sitting | None] = lambda source: None
    on_bytes: Callable[[int], None] = lambda size: None


def check(pieces: Sequence[LogPiece], checks: Checks) -> list[CheckedPiece]:
    """Reads every byte and every record once; a negative timestamp that is none of Kafka's is counted (-1: there is none).

    :raises BadData: a wrong CRC, a batch that is not what it says, a transaction index that lies.
    """
    for piece in pieces:
        problem = txnindex_misfit(piece.source.txn_entries, piece.source)
        if problem:
            raise BadData(
                problem,
                segment=piece.path.with_suffix(".txnindex").name,
                hint="Delete this index file: it is rebuilt from the control records",
            )
    with Lanes(checks.threads) as lanes:
        return [_checked(piece, checks, lanes) for piece in pieces]


def _checked(piece: LogPiece, checks: Checks, lanes: Lanes) -> CheckedPiece:
    source, table = piece.source, piece.source.table
    sitting = checks.portray(source)
    sha256 = hashlib.sha256()
    negative = done = 0

    def read(lane: Lane, job: tuple[int, int]) -> tuple[int, int, list[Glimpse]]:
        first, last = job
        found, seen = 0, []
        for chunk in source.chunks(first, last, np.ones(last - first, np.bool_), checks.limit, lane.bodies):
            rows, first_row = parse(table, chunk, lane.rows, source.name)
            found += int(np.count_nonzero(rows.timestamp < NO_TIMESTAMP))
            if sitting is not None:
                seen.append(sitting.look(chunk, rows, first_row))
        return int(table.position[last - 1] + table.size[last - 1]), found, seen

    try:
        for until, found, looks in lanes.run(read, source.ranges()):
            sha256.update(source.buf.data[done:until])  # while it is in the processor's cache
            negative += found
            if sitting is not None:
                for seen in looks:
                    sitting.take(seen)
            checks.on_bytes(until - done)
            done = until
    except BadData as error:
        raise _placed(error, piece) from None
    sha256.update(source.buf.data[done:])
    return CheckedPiece(piece, negative, sha256.hexdigest(), sitting)


def _placed(error: BadData, piece: LogPiece) -> BadData:
    """The same with its position in the file."""
    if error.position < 0 or not piece.skipped:
        return error
    return BadData(error.cause, segment=error.segment, position=error.position + piece.skipped, offset=error.offset, hint=error.hint)


def check_indexes(log_dir: Path, bases: Sequence[int]) -> None:
    """Raises BadData for an index whose segment is missing."""
    known = set(bases)
    for path in sorted(log_dir.iterdir()):
        match = _INDEX_NAME.fullmatch(path.name)
        if match and int(match[1]) not in known:
            raise BadData(
                f"an index without its segment {match[1]}.log",
                segment=path.name,
                hint="Restore the segment, or delete the index if it is a leftover",
            )


def check_missing(sources: Sequence[SourceSegment]) -> None:
    """Raises BadData for a gap between segments in which nothing shows that the log was ever compacted."""
    hole = _hole(sources)
    if hole is not None:
        before, after, last = hole
        raise BadData(
            f"offsets {last + 1} to {after.base - 1} are missing between it and {after.name}, though no other offset of this log is",
            segment=before.name,
            hint="Restore the segment in between; if a cleaner took them away, say --allow-gaps",
        )


def _hole(sources: Sequence[SourceSegment]) -> tuple[SourceSegment, SourceSegment, int] | None:
    """(segment, next segment, last offset before the gap), in a log in which nothing else shows that it was ever compacted."""
    holes = []
    for source, after in zip(sources, [*sources[1:], None], strict=True):
        table = source.table
        if not len(table):
            if after is not None:
                return None
            continue
        follows = np.concatenate(([source.base], table.last_offset[:-1] + 1))
        dense = (table.magic == 2) & (table.base_offset == follows) & (table.count == table.last_offset - table.base_offset + 1)
        if not dense.all() or np.any(table.attributes & np.int16(HORIZON)):
            return None
        if after is not None and source.end != int(table.last_offset[-1]) + 1:
            holes.append((source, after, int(table.last_offset[-1])))
    return holes[0] if holes else None


# ---- what its segments cover ------------------------------------------------------------------------------------------------


def members(log_dir: Path, pieces: Sequence[CheckedPiece], before: ProducerStates) -> list[Member]:
    """Segments that hold batches; a zero-byte one joins the one before it, or the one behind it where it is the first.

    :param before: the producers where the pieces begin, as far as anybody but the directory's snapshots knows. Raises BadData.
    """
    sources = [checked.piece.source for checked in pieces]
    states = _states_at(log_dir, sources[0].base, before)
    # Verdicts stand in the order of the sources.
    verdicts = fold([replace(source, ordinal=place) for place, source in enumerate(sources)], _open_transactions(states))
    found: list[Member] = []
    start = sources[0].base
    for checked, source, verdict in zip(pieces, sources, verdicts, strict=True):
        # Nobody knows where an empty last segment ends: it may still be written to.
        end = (int(source.table.last_offset[-1]) if source.size else source.base - 1) if source.is_last else source.end - 1
        states = _states_at(log_dir, end + 1, states.replay(source.table))
        if source.size:
            # Indexes count from the segment's start in 32 bits.
            start = max(start, int(source.table.last_offset[-1]) - MAX32)
            entries = _joined(verdict.txn_entries, source.txn_entries)
            found.append(Member(checked, start, end, states, entries))
            start = end + 1
        elif found:
            found[-1] = replace(found[-1], end=end, states=states)
            start = end + 1
    return found


def tail_of(sources: Sequence[SourceSegment], batches: int) -> tuple[TailBatch, ...]:
    """The last batches of these segments, so that they are known again. A header holds the CRC of what follows it."""
    found: list[TailBatch] = []
    for source in reversed(sources):
        first = max(0, len(source.table) - batches + len(found))
        found += [batch_of(source, batch) for batch in reversed(range(first, len(source.table)))]
    return tuple(reversed(found))


def batch_of(source: SourceSegment, batch: int) -> TailBatch:
    """One batch by its header; of a wrapper of v0 or v1 only the last offset is known."""
    table = source.table
    last, base = int(table.last_offset[batch]), int(table.base_offset[batch])
    position, size = int(table.position[batch]), int(table.size[batch])
    header = source.buf[position : position + min(size, HEADER)].tobytes()
    return TailBatch(base_offset=base if base >= 0 else last, last_offset=last, digest=hashlib.sha256(header).hexdigest()[:32])


def _states_at(log_dir: Path, offset: int, replayed: ProducerStates) -> ProducerStates:
    """By the broker's snapshot, which knows of more than the log may still have; one that is broken or another's is made anew."""
    path = log_dir / f"{offset:020d}.snapshot"
    if not path.exists():
        return replayed
    try:
        given = parse_snapshot(path.read_bytes(), path.name)
    except BadData:
        return replayed  # as Kafka does
    return given if given.is_of(offset, replayed) else replayed


def _open_transactions(states: ProducerStates) -> dict[int, int]:
    opened = states.entries[states.entries["txn_first_offset"] >= 0]
    return {int(entry["producer_id"]): int(entry["txn_first_offset"]) for entry in opened}


def _joined(told: TxnEntries, given: TxnEntries) -> TxnEntries:
    """Aborted transactions by the control records, which tell of those that brokers lose, and those whose data is gone already."""
    known = set(zip(told["producer_id"].tolist(), told["last_offset"].tolist(), strict=True))
    other = [pair not in known for pair in zip(given["producer_id"].tolist(), given["last_offset"].tolist(), strict=True)]
    both = np.concatenate((told, given[np.array(other, np.bool_)])).astype(TXN_ENTRY)  # concatenate swaps bytes
    return both[np.argsort(both["last_offset"].astype(np.int64), kind="stable")]


def given_lineage(log_dir: Path) -> Lineage:
    """The directory's ``leader-epoch-checkpoint``; empty where there is none. Raises BadData."""
    path = log_dir / CHECKPOINT
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    return parse_leader_epoch_checkpoint(text, str(path))


def told_lineage(sources: Sequence[SourceSegment]) -> Lineage:
    """The epochs that the batches name, from the beginning of the first segment on."""
    told = lineage_of([source.table for source in sources])
    return (EpochEntry(told[0].epoch, sources[0].base), *told[1:]) if told else ()


def check_lineage(path: Path, given: Lineage, sources: Sequence[SourceSegment]) -> None:
    """Another partition's file, or a stale one, would cut off clean offsets and hide segments from readers. Raises BadData.

    Batches that name no epoch, and those before the first entry (Kafka forgets the epochs before a batch of v0 or v1), fit any.
    """
    epochs = np.array([entry.epoch for entry in given], np.int64)
    starts = np.array([entry.start_offset for entry in given], np.int64)
    for source in sources:
        table = source.table
        place = np.searchsorted(starts, table.base_offset, side="right") - 1
        wrong = np.flatnonzero((table.leader_epoch >= 0) & (place >= 0) & (epochs[place] != table.leader_epoch))
        if len(wrong):
            batch = int(wrong[0])
            offset, told, written = int(table.base_offset[batch]), int(epochs[place[batch]]), int(table.leader_epoch[batch])
            raise BadData(
                f"it gives offset {offset} to leader epoch {told}, and the batch there was written in epoch {written}",
                segment=str(path),
                hint="Restore the file that belongs to this log, or delete it: the epochs are then taken from the batches",
            )


# ---- its files --------------------------------------------------------------------------------------------------------------


def prepare(
    member: Member, new_id: str, lineage: Lineage, policy: CleanerPolicy, key: BalanceKey, folder: Path
) -> tuple[RemoteLogSegmentMetadata, dict[str, Path]]:
    """Metadata and files of one segment: given indexes where they fit the log, else made from it, in ``folder``.

    Raises BadData where the segment changed since it was checked.
    """
    check_unchanged(member)
    source = member.source
    log = file_of(member.piece) if member.piece.whole else _written(folder / "log", source.buf.data)
    beside = _indexes(member, policy, folder)
    if len(member.txn_entries):
        beside["txnindex"] = _written(folder / "txnindex", member.txn_entries.tobytes())
    beside["snapshot"] = _written(folder / "snapshot", format_snapshot(member.states))
    epochs = format_leader_epoch_checkpoint(tuple(entry for entry in lineage if entry.start_offset <= member.end))
    beside["leader-epoch-checkpoint"] = _written(folder / "epochs", epochs.encode())
    files = {kind: SegmentFile(size=path.stat().st_size, sha256=digest(path)) for kind, path in beside.items()}
    content, sitting = content_of(source.table), member.checked.sitting
    undecided = member.states.first_open_offset()
    metadata = RemoteLogSegmentMetadata(
        id=new_id,
        start_offset=member.start,
        end_offset=member.end,
        size_bytes=source.size,
        max_timestamp_ms=content.max_timestamp_ms,
        mtime_ms=source.mtime_ms,
        leader_epochs=epochs_within(lineage, member.start, member.end),
        files={"log": SegmentFile(size=source.size, sha256=member.checked.sha256), **files},
        first_timestamp_ms=content.first_timestamp_ms,
        due_ms=due_as_seen(source.table, sitting.due) if sitting else due_ms(source, policy.max_decompressed_batch_bytes),
        open_txn_offset=-1 if undecided is None else undecided,
        records=content.records,
        content=content_sum(source.buf, key),
        negative_timestamps=member.checked.negative_timestamps,
    )
    return metadata, {"log": log, **beside}


def file_of(piece: LogPiece) -> Path:
    """Where the segment lies: a broker that deletes it renames it first."""
    return piece.path if piece.path.exists() else piece.path.with_name(piece.path.name + DELETED)


def check_unchanged(member: Member) -> None:
    """Whether the segment is still what was checked. Raises BadData."""
    piece = member.piece
    try:
        now = file_of(piece).stat()
    except FileNotFoundError:
        now = None
    if now is None or (now.st_size, now.st_mtime_ns // 1_000_000) != (piece.file_size, piece.source.mtime_ms):
        raise BadData(
            "it changed while it was imported",
            segment=piece.path.name,
            hint="Where a broker is at work say --live, which leaves its newest segment out; else import a copy",
        )


def room_for(member: Member, index_interval_bytes: int) -> int:
    """Bytes that the segment takes up in a directory, at most: the log, its indexes, and a block for each small file."""
    batches = min(len(member.source.table), member.source.size // max(1, index_interval_bytes) + 1)
    per_batch = OFFSET_ENTRY.itemsize + TIME_ENTRY.itemsize
    return blocks(member.source.size) + batches * per_batch + member.states.entries.nbytes + member.txn_entries.nbytes + 6 * BLOCK


def _indexes(member: Member, policy: CleanerPolicy, folder: Path) -> dict[str, Path]:
    table = member.source.table
    made = build(member.start, table.size, table.last_offset, table.max_timestamp, policy.index_interval_bytes)
    paths = {}
    for kind, data, misfit_of in (("index", made[0], index_misfit), ("timeindex", made[1], timeindex_misfit)):
        given = member.piece.path.with_suffix(f".{kind}")
        usable = member.piece.whole and member.start == member.source.base and _fits(given, misfit_of, member.start, table)
        # Copied, as a broker that deletes the segment deletes it too.
        paths[kind] = _written(folder / kind, given.read_bytes() if usable else data)
    return paths


def _fits(given: Path, misfit_of: Callable[[bytes, int, BatchTable], str], start: int, table: BatchTable) -> bool:
    try:
        return not misfit_of(given.read_bytes(), start, table)
    except FileNotFoundError:
        return False


def _written(path: Path, data: bytes | memoryview) -> Path:
    path.write_bytes(data)
    return path
