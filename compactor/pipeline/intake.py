"""``import``: the sealed segments of a Kafka log directory into the tier (register ids < upload < tiered).

Everything is read and checked before the first request is made: what a cleaner could not read later does not come in.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, extend
from compactor.cleaner.describe import content_of, epochs_within, lineage_of
from compactor.cleaner.offline import open_directory
from compactor.cleaner.source import SourceSegment
from compactor.cleaner.transactions import fold
from compactor.errors import BadData, StoreError
from compactor.metadata.state import PartitionState
from compactor.model.ids import TopicPartition, segment_id
from compactor.model.policy import CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.pipeline.importing import register, tier
from compactor.pipeline.staging import digest
from compactor.pipeline.tier import Tier
from compactor.pipeline.worker import upload
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY, build
from compactor.records.producers import ProducerStates, format_snapshot, parse_snapshot

MOST_ATTEMPTS = 1000


@dataclass(frozen=True)
class ImportReport:
    """``end_offset`` is inclusive. ``repeated``: the same import was done before; nothing was written."""

    segments: int
    bytes: int
    start_offset: int
    end_offset: int
    repeated: bool = False


@dataclass(frozen=True)
class _Member:
    """One segment to be: the source with bytes, and where its coverage ends (zero-byte neighbours included)."""

    source: SourceSegment
    start: int
    end: int
    states: ProducerStates


def import_directory(
    opened: Tier, log_dir: Path, name: TopicPartition, policy: CleanerPolicy, on_bytes: Callable[[int], None] = lambda size: None
) -> ImportReport:
    """Copies all segments of ``log_dir`` behind the partition's end.

    Raises UsageError, BadData (a segment that cannot be read; a gap or an overlap), Fenced (the import was voided because it
    slept too long), StoreError.
    """
    sources = open_directory(log_dir, policy.index_interval_bytes, policy.max_decompressed_batch_bytes)
    for source in sources:
        source.verify(0, len(source.table))
    members = _members(log_dir, sources)
    identity = _identity(members)
    opened.create()
    log = opened.open(name)
    state = log.refresh()
    report = ImportReport(len(members), sum(m.source.size for m in members), members[0].start, members[-1].end)
    import_id, ids = _attempt(opened, state, identity, len(members))
    if not ids:
        return ImportReport(report.segments, report.bytes, report.start_offset, report.end_offset, repeated=True)
    _check_position(state, name, members)
    lineage = _lineage(log_dir, members, state)
    register(opened.ports, log, import_id, ids)
    # Listed before the upload: what a killed import leaves behind is found by `retire`.
    opened.note_change(name)
    segments = []
    with tempfile.TemporaryDirectory(prefix="import-") as scratch:
        for number, (member, new_id) in enumerate(zip(members, ids, strict=True)):
            metadata, paths = _prepared(log_dir, member, new_id, lineage, policy, Path(scratch) / str(number), sources)
            problem = upload(opened.ports.data, str(name), metadata, paths)
            if problem:
                raise StoreError(problem, hint="Two imports of the same directory met; run it again")
            segments.append(metadata)
            on_bytes(member.source.size)
    tier(opened.ports, log, import_id, segments, lineage)
    opened.note_change(name)
    return report


def _members(log_dir: Path, sources: list[SourceSegment]) -> list[_Member]:
    """Segments that hold batches; a zero-byte one joins the one before it, or the one behind it where it is the first."""
    found: list[_Member] = []
    start = sources[0].base
    states = ProducerStates.none()
    covered = 0
    for source in sources:
        given = _given_snapshot(log_dir, source.base)
        if given is not None and not found:
            states, covered = given, source.base  # the log before this directory is known by its snapshot only
        states = states.replay(source.table, covered)
        if source.size == 0:
            if found:
                found[-1] = _Member(found[-1].source, found[-1].start, source.end - 1, states)
            continue
        end = source.end - 1 if source is not sources[-1] else int(source.table.last_offset[-1])
        found.append(_Member(source, start, end, _given_snapshot(log_dir, end + 1) or states))
        start = source.end
    if not found:
        raise BadData("all its segments are empty", segment=str(log_dir), hint="There is nothing to import")
    if sources[-1].size == 0:
        # Nobody knows where an empty last segment ends: it may still be written to.
        last = found[-1]
        found[-1] = _Member(last.source, last.start, sources[-1].base - 1, last.states)
    return found


def _given_snapshot(log_dir: Path, offset: int) -> ProducerStates | None:
    path = log_dir / f"{offset:020d}.snapshot"
    if not path.exists():
        return None
    try:
        return parse_snapshot(path.read_bytes(), path.name)
    except BadData:
        return None  # it is rebuilt from the log, as Kafka does


def _identity(members: Sequence[_Member]) -> bytes:
    """What makes two imports the same: the segments' offsets and bytes."""
    whole = hashlib.sha256()
    for member in members:
        whole.update(f"{member.start} {member.end} {member.source.size} ".encode())
        whole.update(hashlib.sha256(memoryview(member.source.buf)).digest())
    return whole.digest()


def _attempt(opened: Tier, state: PartitionState, identity: bytes, count: int) -> tuple[str, tuple[str, ...]]:
    """The import's id and the segments' ids: those of an attempt that a crash cut short, else new ones; none where it is done."""
    closed = {entry.import_id: entry for entry in state.closed_imports}
    for attempt in range(MOST_ATTEMPTS):
        import_id = segment_id(hashlib.sha256(identity + attempt.to_bytes(4, "big")).digest()[:16])
        if import_id in state.registrations:
            return import_id, state.registrations[import_id].ids
        if import_id not in closed:
            return import_id, tuple(opened.ports.new_id() for _ in range(count))
        if not closed[import_id].voided:
            return import_id, ()
    raise StoreError("this import was voided too often", hint="See why with `explain`, or raise publish.orphan_age_ms")


def _check_position(state: PartitionState, name: TopicPartition, members: Sequence[_Member]) -> None:
    start = members[0].start
    if not state.live or start == state.end_offset + 1:
        return
    what = "overlaps what the tier holds" if start <= state.end_offset else "leaves a gap"
    raise BadData(
        f"the directory begins at offset {start} and {name} ends at {state.end_offset} in the tier: it {what}",
        segment=members[0].source.name,
        hint=f"Give a directory whose first segment begins at {state.end_offset + 1}",
    )


def _lineage(log_dir: Path, members: Sequence[_Member], state: PartitionState) -> tuple[EpochEntry, ...]:
    """The broker's whole lineage: as given, else what the tier knows and the batches add to it."""
    path = log_dir / "leader-epoch-checkpoint"
    if path.exists():
        given = parse_leader_epoch_checkpoint(path.read_text(encoding="utf-8", errors="replace"), str(path))
        if given:
            return tuple(entry for entry in given if entry.start_offset <= members[-1].end)
    found = lineage_of([member.source.table for member in members])
    return extend(state.lineage, (EpochEntry(found[0].epoch, members[0].start), *found[1:]))


def _prepared(
    log_dir: Path, member: _Member, new_id: str, lineage: tuple[EpochEntry, ...], policy: CleanerPolicy, folder: Path, sources: list[SourceSegment]
) -> tuple[RemoteLogSegmentMetadata, dict[str, Path]]:
    """Metadata and files of one segment: given indexes where they fit the log, else made from it."""
    source = member.source
    log = log_dir / source.name
    folder.mkdir()
    paths = {"log": log}
    table = source.table
    index, timeindex = build(member.start, table.size, table.last_offset, table.max_timestamp, policy.index_interval_bytes)
    for kind, made, fits in (("index", index, _index_fits), ("timeindex", timeindex, _timeindex_fits)):
        given = log.with_suffix(f".{kind}")
        if member.start == source.base and given.exists() and fits(given.read_bytes(), member):
            paths[kind] = given
        else:
            paths[kind] = folder / kind
            paths[kind].write_bytes(made)
    entries = source.txn_entries
    if not len(entries) and not log.with_suffix(".index").exists():
        entries = fold(sources)[source.ordinal].txn_entries
    if len(entries):
        paths["txnindex"] = folder / "txnindex"
        paths["txnindex"].write_bytes(entries.tobytes())
    paths["snapshot"] = folder / "snapshot"
    paths["snapshot"].write_bytes(format_snapshot(member.states))
    paths["leader-epoch-checkpoint"] = folder / "epochs"
    upto = tuple(entry for entry in lineage if entry.start_offset <= member.end)
    paths["leader-epoch-checkpoint"].write_text(format_leader_epoch_checkpoint(upto), encoding="utf-8")
    content = content_of(table)
    metadata = RemoteLogSegmentMetadata(
        id=new_id,
        start_offset=member.start,
        end_offset=member.end,
        size_bytes=source.size,
        max_timestamp_ms=content.max_timestamp_ms,
        mtime_ms=source.mtime_ms,
        leader_epochs=epochs_within(lineage, member.start, member.end),
        files={kind: SegmentFile(size=path.stat().st_size, sha256=digest(path)) for kind, path in paths.items()},
        first_timestamp_ms=content.first_timestamp_ms,
        open_txn_offset=member.states.first_open_offset() if member.states.first_open_offset() is not None else -1,
        records=content.records,
    )
    return metadata, paths


def _index_fits(data: bytes, member: _Member) -> bool:
    """Whole entries, ascending, each the last offset and the position of a batch."""
    if len(data) % OFFSET_ENTRY.itemsize:
        return False
    entries = np.frombuffer(data, OFFSET_ENTRY)
    table = member.source.table
    batch = np.searchsorted(table.position, entries["position"])
    if np.any(batch >= len(table)) or np.any(np.diff(entries["position"].astype(np.int64)) <= 0):
        return False
    offsets = entries["offset"].astype(np.int64) + member.start
    return bool(np.all(table.position[batch] == entries["position"]) and np.all(offsets <= table.last_offset[batch]) and np.all(np.diff(offsets) > 0))


def _timeindex_fits(data: bytes, member: _Member) -> bool:
    if len(data) % TIME_ENTRY.itemsize:
        return False
    entries = np.frombuffer(data, TIME_ENTRY)
    offsets = entries["offset"].astype(np.int64) + member.start
    ascending = np.all(np.diff(entries["timestamp"].astype(np.int64)) > 0)
    return bool(ascending and np.all(offsets <= member.end) and np.all(offsets >= member.start))
