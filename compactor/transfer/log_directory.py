"""A Kafka log directory as what it becomes in the tier: which segments, what each covers, and all that can be wrong with it.

Everything here only reads the directory. What a cleaner could not read later is refused now (``check``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, Lineage, extend
from compactor.cleaner.passes.describe import content_of, due_ms, epochs_within, lineage_of
from compactor.cleaner.passes.lanes import Lane, Lanes
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import fold, txnindex_misfit
from compactor.errors import BadData
from compactor.local.budget import BLOCK, blocks
from compactor.model.policy import MAX32, CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.records.batches import HORIZON
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY, TXN_ENTRY, TxnEntries, build, index_misfit, timeindex_misfit
from compactor.records.producers import ProducerStates, format_snapshot, parse_snapshot
from compactor.records.rows import parse
from compactor.tier.recorded import digest

_INDEX_NAME = re.compile(r"(\d{20})\.(index|timeindex|txnindex)")


@dataclass(frozen=True)
class Member:
    """One remote segment to be. ``start`` and ``end`` (inclusive) are what it covers, zero-byte neighbours included.

    ``states``: the producers at its end. ``sha256``: of its bytes as they were checked.
    """

    source: SourceSegment
    start: int
    end: int
    states: ProducerStates
    txn_entries: TxnEntries
    sha256: str


# ---- what can be wrong ------------------------------------------------------------------------------------------------------


def check(
    log_dir: Path, sources: Sequence[SourceSegment], limit: int, threads: int, *, gaps: bool, on_bytes: Callable[[int], None]
) -> None:
    """Reads every record. Raises BadData: a wrong CRC, a batch that is not what it says, a missing segment, a transaction index that lies.

    :param limit: bytes that one batch may inflate to.
    :param gaps: the caller knows that the log was compacted before, so that gaps between its segments are in order.
    """
    _check_missing(log_dir, sources, gaps)
    for source in sources:
        problem = txnindex_misfit(source.txn_entries, source)
        if problem:
            raise BadData(
                problem,
                segment=Path(source.name).with_suffix(".txnindex").name,
                hint="Delete this index file: it is rebuilt from the control records",
            )
    with Lanes(threads) as lanes:
        for source in sources:

            def read(lane: Lane, job: tuple[int, int], source: SourceSegment = source) -> int:
                first, last = job
                for chunk in source.chunks(first, last, np.ones(last - first, np.bool_), limit, lane.bodies):
                    parse(source.table, chunk, lane.rows, source.name)
                return int(source.table.size[first:last].sum())

            for size in lanes.run(read, source.ranges()):
                on_bytes(size)


def _check_missing(log_dir: Path, sources: Sequence[SourceSegment], gaps: bool) -> None:
    bases = {source.base for source in sources}
    for path in sorted(log_dir.iterdir()):
        match = _INDEX_NAME.fullmatch(path.name)
        if match and int(match[1]) not in bases:
            raise BadData(
                f"an index without its segment {match[1]}.log",
                segment=path.name,
                hint="Restore the segment, or delete the index if it is a leftover",
            )
    hole = None if gaps else _hole(sources)
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


def members(log_dir: Path, sources: Sequence[SourceSegment], before: ProducerStates) -> list[Member]:
    """Segments that hold batches; a zero-byte one joins the one before it, or the one behind it where it is the first.

    :param before: the producers where the directory begins, as far as anybody but its own snapshots knows. Raises BadData.
    """
    if not any(source.size for source in sources):
        raise BadData("all its segments are empty", segment=str(log_dir), hint="There is nothing to import")
    states = _states_at(log_dir, sources[0].base, before)
    verdicts = fold(list(sources), _open_transactions(states))
    found: list[Member] = []
    start = sources[0].base
    for source in sources:
        # Nobody knows where an empty last segment ends: it may still be written to.
        end = (int(source.table.last_offset[-1]) if source.size else source.base - 1) if source is sources[-1] else source.end - 1
        states = _states_at(log_dir, end + 1, states.replay(source.table))
        if source.size:
            # Indexes count from the segment's start in 32 bits.
            start = max(start, int(source.table.last_offset[-1]) - MAX32)
            entries = _joined(verdicts[source.ordinal].txn_entries, source.txn_entries)
            found.append(Member(source, start, end, states, entries, hashlib.sha256(source.buf.data).hexdigest()))
            start = end + 1
        elif found:
            last = found[-1]
            found[-1] = Member(last.source, last.start, end, states, last.txn_entries, last.sha256)
            start = end + 1
    return found


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


def lineage_for(log_dir: Path, found: Sequence[Member], known: Lineage) -> Lineage:
    """The broker's whole lineage: as given, else what the tier knows and the batches add to it. Raises BadData."""
    path = log_dir / "leader-epoch-checkpoint"
    if path.exists():
        given = parse_leader_epoch_checkpoint(path.read_text(encoding="utf-8", errors="replace"), str(path))
        if given:
            _check_lineage(path, given, found)
            return tuple(entry for entry in given if entry.start_offset <= found[-1].end)
    told = lineage_of([member.source.table for member in found])
    return extend(known, (EpochEntry(told[0].epoch, found[0].start), *told[1:]))


def _check_lineage(path: Path, given: Lineage, found: Sequence[Member]) -> None:
    """Another partition's file, or a stale one, would cut off clean offsets and hide segments from readers. Raises BadData.

    Batches that name no epoch, and those before the first entry (Kafka forgets the epochs before a batch of v0 or v1), fit any.
    """
    epochs = np.array([entry.epoch for entry in given], np.int64)
    starts = np.array([entry.start_offset for entry in given], np.int64)
    for member in found:
        table = member.source.table
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
    log_dir: Path, member: Member, new_id: str, lineage: Lineage, policy: CleanerPolicy, folder: Path
) -> tuple[RemoteLogSegmentMetadata, dict[str, Path]]:
    """Metadata and files of one segment: given indexes where they fit the log, else made from it, in ``folder``.

    Raises BadData where the segment changed since it was checked.
    """
    check_unchanged(log_dir, member)
    source = member.source
    log = log_dir / source.name
    beside = _indexes(log, member, policy, folder)
    if len(member.txn_entries):
        beside["txnindex"] = _written(folder / "txnindex", member.txn_entries.tobytes())
    beside["snapshot"] = _written(folder / "snapshot", format_snapshot(member.states))
    epochs = format_leader_epoch_checkpoint(tuple(entry for entry in lineage if entry.start_offset <= member.end))
    beside["leader-epoch-checkpoint"] = _written(folder / "epochs", epochs.encode())
    files = {kind: SegmentFile(size=path.stat().st_size, sha256=digest(path)) for kind, path in beside.items()}
    content = content_of(source.table)
    undecided = member.states.first_open_offset()
    metadata = RemoteLogSegmentMetadata(
        id=new_id,
        start_offset=member.start,
        end_offset=member.end,
        size_bytes=source.size,
        max_timestamp_ms=content.max_timestamp_ms,
        mtime_ms=source.mtime_ms,
        leader_epochs=epochs_within(lineage, member.start, member.end),
        files={"log": SegmentFile(size=source.size, sha256=member.sha256), **files},
        first_timestamp_ms=content.first_timestamp_ms,
        due_ms=due_ms(source, policy.max_decompressed_batch_bytes),
        open_txn_offset=-1 if undecided is None else undecided,
        records=content.records,
    )
    return metadata, {"log": log, **beside}


def check_unchanged(log_dir: Path, member: Member) -> None:
    """Whether the segment is still what was checked. Raises BadData."""
    source = member.source
    try:
        now = (log_dir / source.name).stat()
    except FileNotFoundError:
        now = None
    if now is None or (now.st_size, now.st_mtime_ns // 1_000_000) != (source.size, source.mtime_ms):
        raise BadData(
            "it changed while it was imported", segment=source.name, hint="Stop the broker, or import a copy without the active segment"
        )


def room_for(member: Member, index_interval_bytes: int) -> int:
    """Bytes that the segment takes up in a directory, at most: the log, its indexes, and a block for each small file."""
    batches = min(len(member.source.table), member.source.size // max(1, index_interval_bytes) + 1)
    per_batch = OFFSET_ENTRY.itemsize + TIME_ENTRY.itemsize
    return blocks(member.source.size) + batches * per_batch + member.states.entries.nbytes + member.txn_entries.nbytes + 6 * BLOCK


def _indexes(log: Path, member: Member, policy: CleanerPolicy, folder: Path) -> dict[str, Path]:
    table = member.source.table
    made = build(member.start, table.size, table.last_offset, table.max_timestamp, policy.index_interval_bytes)
    paths = {}
    for kind, data, misfit_of in (("index", made[0], index_misfit), ("timeindex", made[1], timeindex_misfit)):
        given = log.with_suffix(f".{kind}")
        usable = member.start == member.source.base and given.exists() and not misfit_of(given.read_bytes(), member.start, table)
        paths[kind] = given if usable else _written(folder / kind, data)
    return paths


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
