"""A Kafka log directory as segments of the tier.

The directory is only read. Data that a later round could not read is refused here (``check_file_parts``).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint, parse_cleaner_offset_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, Lineage, restore_truncated_front
from compactor.cleaner.retention import transaction_verdicts_by_source, txn_index_problem
from compactor.cleaner.rewrite import ChunkSummaryForSidecar, SidecarBuilder
from compactor.cleaner.source import (
    SourceSegment,
    earliest_delete_horizon_ms,
    lineage_of_range,
    lineage_of_tables,
    read_earliest_horizon_ms,
    summarize_timestamps,
)
from compactor.cleaner.worker_threads import ReusableJobBuffers, WorkerThreads
from compactor.constants import NEVER_MS, NO_TIMESTAMP, Offset, TimestampMs
from compactor.control.records import LastImportedBatch
from compactor.errors import BadData, UsageError
from compactor.kernels.common import FirstAndEndBatch
from compactor.local.budget import BLOCK, round_up_to_blocks
from compactor.model.ids import TopicPartition
from compactor.model.plan import MAX32, CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.records.batches import HEADER, HORIZON, BatchTable
from compactor.records.encode import BalanceDigestKey, segment_digest_sum
from compactor.records.indexes import (
    OFFSET_ENTRY,
    TIME_ENTRY,
    TXN_ENTRY,
    TxnEntries,
    encode_indexes,
    offset_index_problem,
    time_index_problem,
)
from compactor.records.producers import ProducerStates, format_producer_snapshot, parse_producer_snapshot_file
from compactor.records.rows import parse_records
from compactor.tier.contents import file_sha256
from compactor.upkeep.log_root import CLEANED, LOG_STARTS

# ---- compacted logs ---------------------------------------------------------------------------------------------------------
#
# The tier is not continued from a log that was compacted beyond the tier's end: a tombstone that was dropped there can no longer delete a
# value that the tier has from earlier imports, and a dropped transaction marker can no longer abort a record of it. A broker's checkpoint
# states how far *its* cleaner has compacted the log. What a follower has fetched from a cleaned leader is compacted as well, and so is a
# copy without the checkpoint; there only the batches show it (``find_cleaning_signs``).


def read_broker_cleaner_offset(partition_dir: Path, partition: TopicPartition) -> int:
    """First offset that the broker's log cleaner has not cleaned; 0 if none is recorded. The checkpoint file lies in the parent of
    ``partition_dir``; ``partition`` counts if the directory's name is no partition's. Raises UsageError if the file cannot be read, BadData
    if it is not a checkpoint file.
    """
    return _read_checkpointed_offset(partition_dir, partition, CLEANED) or 0


def read_broker_log_start(partition_dir: Path, partition: TopicPartition) -> int:
    """Same as ``read_checkpointed_log_start``, or 0 if the log starts with its first segment."""
    return read_checkpointed_log_start(partition_dir, partition) or 0


def read_checkpointed_log_start(partition_dir: Path, partition: TopicPartition) -> int | None:
    """Return the broker's log start offset, read as ``read_broker_cleaner_offset``; None if none is recorded. A log start below the first
    segment is recorded only for a topic with remote storage (LogManager.checkpointLogStartOffsetsInDir).
    """
    return _read_checkpointed_offset(partition_dir, partition, LOG_STARTS)


def _read_checkpointed_offset(partition_dir: Path, partition: TopicPartition, file_name: str) -> int | None:
    folder = Path(os.path.abspath(partition_dir))
    path = folder.parent / file_name
    try:
        partition = TopicPartition.parse(folder.name)
    except UsageError:
        pass  # the directory has another name than the broker gave it
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="Check its owner and its mode") from error
    return parse_cleaner_offset_checkpoint(text, str(path)).get((partition.topic, partition.partition))


class CleaningSign(NamedTuple):
    """Sign that a log cleaner has removed records.

    kind: ``missing``: offsets inside a segment. ``boundary``: at its end, as if a segment file is lost. ``incomplete``: records of a batch.
        ``horizon``: the batch has a delete horizon, which only cleaners set.
    first, last: missing offsets, or the batch's; inclusive.
    """

    kind: Literal["missing", "boundary", "incomplete", "horizon"]
    first: int
    last: int
    segment: str


def find_cleaning_signs(sources: Sequence[SourceSegment]) -> list[CleaningSign]:
    """Signs in consecutive segments, ascending.

    1. A broker gives consecutive offsets to the records that it appends (UnifiedLog.append), so missing offsets were removed.
    2. That a log begins late is no sign, because retention deletes its beginning.
    3. Nor is a zero-byte segment at the end; before later batches, the cleaner has emptied it.
    4. Offsets before a compressed batch of v0 or v1 are not known to be missing: its header does not state its first offset.
    """
    found: list[CleaningSign] = []
    end, before = sources[0].base if sources else 0, ""
    is_emptied = False
    for source in sources:
        table = source.table
        if not len(table):
            is_emptied = True
            continue
        if end < source.base:
            found.append(CleaningSign("missing" if is_emptied else "boundary", end, source.base - 1, before or source.name))
        before, is_emptied = source.name, False
        expected = np.concatenate(([max(end, source.base)], table.last_offset[:-1] + 1))
        missing = (table.base_offset >= 0) & (table.base_offset > expected)
        incomplete = (table.magic == 2) & (table.count < table.last_offset - table.base_offset + 1)
        horizon = (table.magic == 2) & ((table.attributes & np.int16(HORIZON)) != 0)
        for batch in np.flatnonzero(missing | incomplete | horizon).tolist():
            first, last = int(table.base_offset[batch]), int(table.last_offset[batch])
            if missing[batch]:
                found.append(CleaningSign("missing", int(expected[batch]), first - 1, source.name))
            if incomplete[batch] or horizon[batch]:
                found.append(CleaningSign("incomplete" if incomplete[batch] else "horizon", first, last, source.name))
        end = int(table.last_offset[-1]) + 1
    return found


SHOWN_SIGNS = 3
"""How many signs a message names."""


def describe_cleaning_signs(signs: Sequence[CleaningSign]) -> str:
    words = {
        "missing": "offsets {} to {} are missing",
        "boundary": "offsets {} to {} are missing",
        "incomplete": "the batch of offsets {} to {} lacks records",
        "horizon": "the batch of offsets {} to {} has a delete horizon",
    }
    shown = [words[sign.kind].format(sign.first, sign.last) for sign in signs[:SHOWN_SIGNS]]
    more = [f"{len(signs) - SHOWN_SIGNS} more such places"] if len(signs) > SHOWN_SIGNS else []
    return ", ".join([*shown, *more])


def require_not_compacted_beyond(
    partition: TopicPartition, continuation_offset: int, first_uncleaned_offset: int, *, cleaned_by: str, source_name: str
) -> None:
    """Raise BadData if a log was compacted beyond ``continuation_offset``: deleted keys could come back.

    :param continuation_offset: the tier's end + 1, or where its end is cut; 0 for an empty tier, in which no value can come back.
    """
    if 0 < continuation_offset < first_uncleaned_offset:
        what = f"{cleaned_by} has cleaned {partition} up to offset {first_uncleaned_offset}"
        raise compacted_log_error(partition, continuation_offset, what, source_name)


def compacted_log_error(partition: TopicPartition, continuation_offset: int, what: str, source_name: str) -> BadData:
    error = BadData(
        f"{what}, and the tier ends at {continuation_offset - 1}: tombstones may be missing that delete keys in the tier, and markers that"
        " abort transactions in it",
        segment=source_name,
        hint=f"`topics delete {partition}` and import the whole log again; or `import --accept-loss`, which is recorded and leaves these"
        " keys and transactions in the tier. To prevent this, import before the log is cleaned: cleanup.policy=delete, or a"
        " min.compaction.lag.ms beyond the longest time between two imports",
    )
    error.is_compacted = True
    return error


CHECKPOINT = "leader-epoch-checkpoint"
DELETED = ".deleted"

_INDEX_NAME = re.compile(r"(\d{20})\.(index|timeindex|txnindex)")


def segment_log_path(log_dir: Path, base_offset: int) -> Path:
    return log_dir / f"{base_offset:020d}.log"


def staged_segment_path(log_dir: Path, base_offset: int) -> Path:
    path = segment_log_path(log_dir, base_offset)
    return path.with_name(path.name + DELETED)


@contextmanager
def convert_directory_errors(log_dir: Path) -> Iterator[None]:
    """System errors become UsageError, except those of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(
            f"cannot read {error.filename or log_dir}: {error.strerror}", hint="Check the path, its owner and its mode"
        ) from error


LOCK_FILE = ".lock"
_FLOCK = struct.Struct("hhqqi")
"""``struct flock`` of Linux: type, whence, start, length, process."""


def is_locked_by_broker(broker_dir: Path) -> bool:
    """Return whether a process of this machine holds the lock (LogManager, FileLock). False where the system cannot tell: another host, no
    locks, or not Linux.
    """
    # The lock is queried and never taken, because a broker that starts in that moment would fail.
    if not sys.platform.startswith("linux"):
        return False
    import fcntl

    try:
        with (broker_dir / LOCK_FILE).open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return False
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


@dataclass(frozen=True)
class SegmentFilePart:
    """Consecutive batches of a segment file that are imported. skipped: bytes of the file before them."""

    source: SourceSegment
    path: Path
    skipped: int
    file_size: int

    @property
    def is_whole_file(self) -> bool:
        return self.source.size == self.file_size and self.path.name == f"{self.source.base:020d}.log"


@dataclass(frozen=True)
class CheckedFilePart:
    """Part of a segment file whose bytes were all read and checked.

    negative_timestamps, late_timestamps: numbers of timestamps below -1, and too far in the future.
    builder: has received every record.
    """

    piece: SegmentFilePart
    negative_timestamps: int
    sha256: str
    builder: SidecarBuilder | None
    late_timestamps: int = 0


@dataclass(frozen=True)
class SegmentToImport:
    """start, end: offsets (inclusive), with those of adjacent zero-byte segments. states: at its end."""

    checked: CheckedFilePart
    start: int
    end: int
    states: ProducerStates
    txn_entries: TxnEntries

    @property
    def file_part(self) -> SegmentFilePart:
        return self.checked.piece

    @property
    def source(self) -> SourceSegment:
        return self.file_part.source


# ---- what can be wrong ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileCheckSettings:
    """limit: bytes that one batch may inflate to. on_bytes: bytes checked since the last call. latest_ms: records with later timestamps are
    counted.
    """

    limit: int
    threads: int
    builder_for: Callable[[SourceSegment], SidecarBuilder | None] = lambda source: None
    on_bytes: Callable[[int], None] = lambda size: None
    latest_ms: int = NEVER_MS


def check_file_parts(file_parts: Sequence[SegmentFilePart], check_settings: FileCheckSettings) -> list[CheckedFilePart]:
    """Check every byte and record once, and count records whose timestamps cannot be times. Raises BadData if a CRC is invalid, a batch
    contradicts its header, or a transaction index contradicts the log.
    """
    for piece in file_parts:
        problem = txn_index_problem(piece.source.txn_entries, piece.source)
        if problem:
            raise BadData(
                problem,
                segment=piece.path.with_suffix(".txnindex").name,
                hint="Delete this index file: it is rebuilt from the control records",
            )
    with WorkerThreads(check_settings.threads) as workers:
        return [_check_segment_file_part(piece, check_settings, workers) for piece in file_parts]


def _check_segment_file_part(file_part: SegmentFilePart, check_settings: FileCheckSettings, workers: WorkerThreads) -> CheckedFilePart:
    source, table = file_part.source, file_part.source.table
    builder = check_settings.builder_for(source)
    sha256 = hashlib.sha256()
    negative = late = done = 0

    def check_batch_range(buffers: ReusableJobBuffers, job: FirstAndEndBatch) -> tuple[int, int, int, list[ChunkSummaryForSidecar]]:
        """End position, numbers of timestamps below -1 and of too late ones, and the chunks' summaries."""
        first, last = job
        found, beyond, seen = 0, 0, []
        for chunk in source.read_chunks(first, last, np.ones(last - first, np.bool_), check_settings.limit, buffers.bodies):
            rows, first_row = parse_records(table, chunk, buffers.rows, source.name)
            found += int(np.count_nonzero(rows.timestamp < NO_TIMESTAMP))
            beyond += int(np.count_nonzero(rows.timestamp > check_settings.latest_ms))
            if builder is not None:
                seen.append(builder.summarize_chunk(chunk, rows, first_row))
        return int(table.position[last - 1] + table.size[last - 1]), found, beyond, seen

    try:
        jobs = source.split_by_kind()
        for until, found, beyond, looks in workers.run_jobs(check_batch_range, jobs):
            sha256.update(source.buf.data[done:until])  # while the bytes are in the processor's cache
            negative += found
            late += beyond
            if builder is not None:
                for seen in looks:
                    builder.add_chunk_summary(seen)
            check_settings.on_bytes(until - done)
            done = until
    except BadData as error:
        raise _error_with_file_position(error, file_part) from None
    sha256.update(source.buf.data[done:])
    return CheckedFilePart(file_part, negative, sha256.hexdigest(), builder, late)


def _error_with_file_position(error: BadData, file_part: SegmentFilePart) -> BadData:
    if error.position < 0 or not file_part.skipped:
        return error
    return BadData(error.cause, segment=error.segment, position=error.position + file_part.skipped, offset=error.offset, hint=error.hint)


def require_no_orphaned_indexes(log_dir: Path, base_offsets: Sequence[int]) -> None:
    known = set(base_offsets)
    for path in sorted(log_dir.iterdir()):
        match = _INDEX_NAME.fullmatch(path.name)
        if match and int(match[1]) not in known:
            raise BadData(
                f"an index without its segment {match[1]}.log",
                segment=path.name,
                hint="Restore the segment, or delete the index if it is a leftover",
            )


def require_no_offset_gaps(sources: Sequence[SourceSegment]) -> None:
    """Raise BadData if offsets between segments are missing and nothing else shows that the log may have been compacted."""
    gap = _find_first_gap(sources)
    if gap is not None:
        raise BadData(
            f"offsets {gap.first} to {gap.last} are missing after it, though no other offset of this log is",
            segment=gap.segment,
            hint="Restore the segment in between. If it is lost, use --allow-gaps; keys that were deleted in it then stay in the tier",
        )


def _find_first_gap(sources: Sequence[SourceSegment]) -> CleaningSign | None:
    """First gap; None, too, if the log may have been compacted: by its signs, a segment without batches, or batches of v0 or v1, which need
    not show it.
    """
    signs = find_cleaning_signs(sources)
    if any(sign.kind != "boundary" for sign in signs):
        return None
    if any((source.table.magic != 2).any() if len(source.table) else source is not sources[-1] for source in sources):
        return None
    return signs[0] if signs else None


# ---- what its segments cover ------------------------------------------------------------------------------------------------


def combine_parts_to_segments(
    log_dir: Path, file_parts: Sequence[CheckedFilePart], initial_states: ProducerStates
) -> list[SegmentToImport]:
    """A zero-byte segment joins the one before it, or the one after it if it is the first. Raises BadData if the log is corrupt.

    :param initial_states: used unless the directory has a snapshot for the first offset.
    """
    sources = [checked.piece.source for checked in file_parts]
    states = _producer_states_at_offset(log_dir, sources[0].base, initial_states)
    # TransactionVerdicts have the order of the sources.
    verdicts = transaction_verdicts_by_source(
        [replace(source, ordinal=place) for place, source in enumerate(sources)], _open_txn_offsets(states)
    )
    found: list[SegmentToImport] = []
    start = sources[0].base
    for checked, source, verdict in zip(file_parts, sources, verdicts, strict=True):
        # The end of an empty last segment is not known, because it may still be written to.
        end = (int(source.table.last_offset[-1]) if source.size else source.base - 1) if source.is_last else source.end - 1
        states = _producer_states_at_offset(log_dir, end + 1, states.replay_batches(source.table))
        if source.size:
            # Indexes store offsets relative to the segment's start in 32 bits.
            start = max(start, int(source.table.last_offset[-1]) - MAX32)
            entries = _merge_aborted_transactions(verdict.txn_entries, source.txn_entries)
            found.append(SegmentToImport(checked, start, end, states, entries))
            start = end + 1
        elif found:
            found[-1] = replace(found[-1], end=end, states=states)
            start = end + 1
    return found


def describe_tail_batches(sources: Sequence[SourceSegment], count: int) -> tuple[LastImportedBatch, ...]:
    """Offsets and digests of the last ``count`` batches (the tail), by which the next import recognises the log."""
    found: list[LastImportedBatch] = []
    for source in reversed(sources):
        first = max(0, len(source.table) - count + len(found))
        found += [describe_batch(source, batch) for batch in reversed(range(first, len(source.table)))]
    return tuple(reversed(found))


def describe_batch(source: SourceSegment, batch_number: int) -> LastImportedBatch:
    """Offsets and digest of the header with its CRC. A compressed wrapper of v0 or v1 states only its last offset, which then stands for
    the first, too.
    """
    table = source.table
    last, base = int(table.last_offset[batch_number]), int(table.base_offset[batch_number])
    position, size = int(table.position[batch_number]), int(table.size[batch_number])
    header = source.buf[position : position + min(size, HEADER)].tobytes()
    return LastImportedBatch(
        base_offset=Offset(base if base >= 0 else last), last_offset=Offset(last), digest=hashlib.sha256(header).hexdigest()[:32]
    )


def _producer_states_at_offset(log_dir: Path, offset: int, replayed: ProducerStates) -> ProducerStates:
    """The broker's snapshot may know producers that the log no longer has. It is ignored if unreadable or of another log."""
    path = log_dir / f"{offset:020d}.snapshot"
    if not path.exists():
        return replayed
    try:
        given = parse_producer_snapshot_file(path.read_bytes(), path.name)
    except BadData:
        return replayed  # as Kafka does
    return given if given.is_consistent_with(offset, replayed) else replayed


def _open_txn_offsets(states: ProducerStates) -> dict[int, int]:
    open_entries = states.entries[states.entries["txn_first_offset"] >= 0]
    return {int(entry["producer_id"]): int(entry["txn_first_offset"]) for entry in open_entries}


def _merge_aborted_transactions(from_markers: TxnEntries, from_index: TxnEntries) -> TxnEntries:
    """Brokers lose index entries, and compaction removes data."""
    known = set(zip(from_markers["producer_id"].tolist(), from_markers["last_offset"].tolist(), strict=True))
    other = [pair not in known for pair in zip(from_index["producer_id"].tolist(), from_index["last_offset"].tolist(), strict=True)]
    both = np.concatenate((from_markers, from_index[np.array(other, np.bool_)])).astype(TXN_ENTRY)  # concatenate changes the byte order
    return both[np.argsort(both["last_offset"].astype(np.int64), kind="stable")]


def read_epoch_checkpoint(log_dir: Path) -> Lineage:
    """Empty if there is no ``leader-epoch-checkpoint``. Raises BadData."""
    path = log_dir / CHECKPOINT
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    return parse_leader_epoch_checkpoint(text, str(path))


def lineage_from_batches(sources: Sequence[SourceSegment]) -> Lineage:
    """The first epoch begins at the start of the first segment."""
    reported = lineage_of_tables([source.table for source in sources])
    return (EpochEntry(reported[0].epoch, Offset(sources[0].base)), *reported[1:]) if reported else ()


def lineage_with_staged_epochs(log_lineage: Lineage, sources: Sequence[SourceSegment]) -> Lineage:
    """Kafka removes the epochs of staged segments from the checkpoint. An empty lineage stays empty."""
    staged = [source for source in sources if source.name.endswith(DELETED) and (source.table.leader_epoch >= 0).all()]
    return restore_truncated_front(lineage_from_batches(staged), log_lineage) if log_lineage else log_lineage


def require_lineage_matches_batches(path: Path, log_lineage: Lineage, sources: Sequence[SourceSegment]) -> None:
    """Raise BadData if batches contradict the checkpoint: another partition's file would hide segments from readers.

    Batches without an epoch match any, as do those before the first entry (Kafka forgets the epochs before a batch of v0 or v1).
    """
    epochs = np.array([entry.epoch for entry in log_lineage], np.int64)
    starts = np.array([entry.start_offset for entry in log_lineage], np.int64)
    for source in sources:
        table = source.table
        place = np.searchsorted(starts, table.base_offset, side="right") - 1
        wrong = np.flatnonzero((table.leader_epoch >= 0) & (place >= 0) & (epochs[place] != table.leader_epoch))
        if len(wrong):
            batch = int(wrong[0])
            offset, reported, written = int(table.base_offset[batch]), int(epochs[place[batch]]), int(table.leader_epoch[batch])
            raise BadData(
                f"it gives offset {offset} to leader epoch {reported}, and the batch there was written in epoch {written}",
                segment=str(path),
                hint="Restore the file that belongs to this log, or delete it: the epochs are then taken from the batches",
            )


# ---- its files --------------------------------------------------------------------------------------------------------------


def prepare_segment_upload(
    segment: SegmentToImport, new_id: str, lineage: Lineage, policy: CleanerPolicy, key: BalanceDigestKey, folder: Path
) -> tuple[RemoteLogSegmentMetadata, dict[str, Path]]:
    """Metadata and files by kind. Indexes are copied if they match the log, else built in ``folder``. Raises BadData if the segment changed
    since it was checked.

    :param lineage: leader epochs after the segment's end are left out.
    """
    require_file_unchanged(segment)
    source = segment.source
    log = segment_file_path(segment.file_part) if segment.file_part.is_whole_file else _write_file(folder / "log", source.buf.data)
    beside = _copy_or_build_indexes(segment, policy, folder)
    if len(segment.txn_entries):
        beside["txnindex"] = _write_file(folder / "txnindex", segment.txn_entries.tobytes())
    beside["snapshot"] = _write_file(folder / "snapshot", format_producer_snapshot(segment.states))
    epochs = format_leader_epoch_checkpoint(tuple(entry for entry in lineage if entry.start_offset <= segment.end))
    beside["leader-epoch-checkpoint"] = _write_file(folder / "epochs", epochs.encode())
    files = {kind: SegmentFile(size=path.stat().st_size, sha256=file_sha256(path)) for kind, path in beside.items()}
    content, builder = summarize_timestamps(source.table), segment.checked.builder
    undecided = segment.states.first_open_offset()
    metadata = RemoteLogSegmentMetadata(
        id=new_id,
        start_offset=Offset(segment.start),
        end_offset=Offset(segment.end),
        size_bytes=source.size,
        max_timestamp_ms=TimestampMs(content.max_timestamp_ms),
        mtime_ms=source.mtime_ms,
        leader_epochs=lineage_of_range(lineage, segment.start, segment.end),
        files={"log": SegmentFile(size=source.size, sha256=segment.checked.sha256), **files},
        first_timestamp_ms=content.first_timestamp_ms,
        due_ms=earliest_delete_horizon_ms(source.table, builder.due)
        if builder
        else read_earliest_horizon_ms(source, policy.max_decompressed_batch_bytes),
        open_txn_offset=-1 if undecided is None else undecided,
        records=content.records,
        content=segment_digest_sum(source.buf, key),
        negative_timestamps=segment.checked.negative_timestamps,
    )
    return metadata, {"log": log, **beside}


def segment_file_path(file_part: SegmentFilePart) -> Path:
    """Path ``NNN.log``, or ``NNN.log.deleted`` once the broker has staged it."""
    return file_part.path if file_part.path.exists() else file_part.path.with_name(file_part.path.name + DELETED)


def require_file_unchanged(segment: SegmentToImport) -> None:
    """Raise BadData unless the file is the one that was checked. A staged file never changes."""
    piece = segment.file_part
    if piece.path.name.endswith(DELETED):
        return
    try:
        now = segment_file_path(piece).stat()
    except FileNotFoundError:
        now = None
    if now is None or (now.st_size, now.st_mtime_ns // 1_000_000) != (piece.file_size, piece.source.mtime_ms):
        raise BadData(
            "it changed while it was imported",
            segment=piece.path.name,
            hint="If a broker is writing there, use --live, which leaves out the newest segment; else import a copy",
        )


def max_segment_disk_bytes(segment: SegmentToImport, index_interval_bytes: int) -> int:
    """An upper bound: the log, its indexes and one block for each small file."""
    batches = min(len(segment.source.table), segment.source.size // max(1, index_interval_bytes) + 1)
    per_batch = OFFSET_ENTRY.itemsize + TIME_ENTRY.itemsize
    return (
        round_up_to_blocks(segment.source.size)
        + batches * per_batch
        + segment.states.entries.nbytes
        + segment.txn_entries.nbytes
        + 6 * BLOCK
    )


def _copy_or_build_indexes(segment: SegmentToImport, policy: CleanerPolicy, folder: Path) -> dict[str, Path]:
    table = segment.source.table
    made = encode_indexes(segment.start, table.size, table.last_offset, table.max_timestamp, policy.index_interval_bytes)
    paths = {}
    for kind, data, mismatch_of in (
        ("index", made[0], offset_index_problem),
        ("timeindex", made[1], time_index_problem),
    ):
        given = segment.file_part.path.with_suffix(f".{kind}")
        usable = (
            segment.file_part.is_whole_file
            and segment.start == segment.source.base
            and _is_index_of_log(given, mismatch_of, segment.start, table)
        )
        # The index is copied, because a broker that deletes the segment deletes it, too.
        paths[kind] = _write_file(folder / kind, given.read_bytes() if usable else data)
    return paths


def _is_index_of_log(index_path: Path, mismatch_of: Callable[[bytes, int, BatchTable], str], start: int, table: BatchTable) -> bool:
    try:
        return not mismatch_of(index_path.read_bytes(), start, table)
    except FileNotFoundError:
        return False


def _write_file(path: Path, data: bytes | memoryview) -> Path:
    path.write_bytes(data)
    return path
