"""Export of a partition's current view as a Kafka log directory (``export``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, merge_segment_lineages, truncate_lineage_at
from checkpoint.offsets import first_dirty_offset_in
from compactor.access.tier import Tier
from compactor.cleaner.source import lineage_of_tables
from compactor.constants import LeaderEpoch, Offset, TopicId
from compactor.control.logs import retry_if_object_missing
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound, UsageError
from compactor.kernels.common import Flags
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.read.outcomes import DamagedOffsetRange
from compactor.read.reading import OffsetRangeReader, OffsetRangeToRead, ReadOptions
from compactor.records.batches import NOT_CONTROL, BatchTable, Int64s, memory_map_file, parse_batch_headers
from compactor.records.indexes import encode_indexes
from compactor.records.producers import ProducerStates, format_producer_snapshot, parse_producer_snapshot_file
from compactor.tier.contents import download_segment_file
from compactor.upkeep.log_root import CLEANED, LOG_STARTS, CheckpointLine, publish_directory, unfinished_directory

# What brokers need of a log directory that their cluster has not written (docs/migrating.md):
#
# - Producer snapshots: the copy to remote storage fails for ever at a segment without one. They are empty, because a fresh cluster gives
#   out producer ids from 0 again, and would refuse new producers for the sequence numbers of old ones.
# - Leader epochs: a fresh partition leads at epoch 0. Under batches with higher epochs its lineage collapses, and consumers that resume
#   from a commit get nothing. The epoch of a batch lies outside its CRC.
# - Open transactions: nobody will end them, and the last stable offset would stand still. Their records are left out, as if they had
#   been aborted. The log is not cut before them: most transactions that are open there end later.


EPOCH_POSITION = 12
"""Position of the leader epoch in a batch of version 2 (Kafka: DefaultRecordBatch.PARTITION_LEADER_EPOCH_OFFSET), 4 bytes."""


@dataclass(frozen=True)
class OpenTransaction:
    """Transaction whose records were left out. Both offsets are inclusive."""

    producer_id: int
    producer_epoch: int
    first_offset: int
    last_offset: int
    records: int


def prepare_for_cluster(folder: Path, log_start_offset: int, index_interval_bytes: int) -> tuple[OpenTransaction, ...]:
    """Change a log directory so that a new cluster can load it: without the batches of open transactions, which are returned, with empty
    producer snapshots, and with leader epoch 0.

    :raises UsageError: if nothing is left.
    """
    tables = {log: parse_batch_headers(memory_map_file(log), log.name, -1) for log in sorted(folder.glob("*.log"))}
    states = _producer_states_at_end(folder, tables.values())
    open_flags = {log: _flag_open_batches(table, states) for log, table in tables.items()}
    for path in folder.glob("*.snapshot"):
        path.unlink()
    end = -1
    for log, table in tables.items():
        kept = np.flatnonzero(~open_flags[log])
        if not len(kept):
            for path in folder.glob(f"{log.stem}.*"):
                path.unlink()
            continue
        left = table if len(kept) == len(table) else _keep_batches(log, table, kept, index_interval_bytes)
        _zero_leader_epochs(log, left)
        end = int(left.last_offset[-1]) + 1
    if end < 0:
        raise UsageError("all records belong to transactions that are open", hint="End them, and export again")
    bases = [int(log.stem) for log in sorted(folder.glob("*.log"))]
    for offset in (*bases[1:], end):
        (folder / f"{offset:020d}.snapshot").write_bytes(format_producer_snapshot(ProducerStates.empty_producer_states()))
    lineage = format_leader_epoch_checkpoint((EpochEntry(LeaderEpoch(0), Offset(log_start_offset)),))
    (folder / "leader-epoch-checkpoint").write_text(lineage, encoding="utf-8")
    return _describe_open_transactions([table.select_rows(np.flatnonzero(open_flags[log])) for log, table in tables.items()])


def _producer_states_at_end(folder: Path, tables: Iterable[BatchTable]) -> ProducerStates:
    """Replay the batches after the newest producer snapshot: brokers record no open transaction in segment metadata."""
    newest = max(folder.glob("*.snapshot"), default=None)
    states = ProducerStates.empty_producer_states() if newest is None else parse_producer_snapshot_file(newest.read_bytes(), newest.name)
    for table in tables:
        states = states.replay_batches(table, 0 if newest is None else int(newest.stem))
    return states


def _flag_open_batches(table: BatchTable, states: ProducerStates) -> Flags:
    opened = states.entries[states.entries["txn_first_offset"] >= 0]
    data = table.transactional_flags & (table.control == NOT_CONTROL)
    if not len(opened):
        return np.zeros(len(table), np.bool_)
    row = np.minimum(np.searchsorted(opened["producer_id"], table.producer_id), len(opened) - 1)
    mine: Flags = data & (opened["producer_id"][row] == table.producer_id) & (table.base_offset >= opened["txn_first_offset"][row])
    return mine


def _describe_open_transactions(tables: Sequence[BatchTable]) -> tuple[OpenTransaction, ...]:
    batches = BatchTable(*(np.concatenate(columns) for columns in zip(*tables, strict=True)))
    found = []
    for producer in np.unique(batches.producer_id):
        mine = batches.select_rows(np.flatnonzero(batches.producer_id == producer))
        first, last, records = int(mine.base_offset[0]), int(mine.last_offset[-1]), int(mine.count.sum())
        found.append(OpenTransaction(int(producer), int(mine.producer_epoch[-1]), first, last, records))
    return tuple(sorted(found, key=lambda one: one.first_offset))


def write_topic_id(folder: Path, topic_id: TopicId) -> None:
    """Write ``partition.metadata``. A broker renames a directory with another topic's id to ``-stray``."""
    (folder / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}", encoding="utf-8")


def _keep_batches(log: Path, table: BatchTable, kept: Int64s, index_interval_bytes: int) -> BatchTable:
    """Keep only the batches with the numbers ``kept``, and return their table.

    The indexes of offsets and times are written again; that of aborted transactions has no positions and stays.
    """
    modified, buf = log.stat().st_mtime_ns, memory_map_file(log)
    data = b"".join(
        buf[int(table.position[run[0]]) : int(table.position[run[-1]] + table.size[run[-1]])].tobytes()
        for run in np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1)
    )
    del buf
    log.unlink()
    log.write_bytes(data)
    os.utime(log, ns=(modified, modified))
    left = table.select_rows(kept)
    left = left.replace_columns(position=np.cumsum(left.size) - left.size)
    indexes = encode_indexes(int(log.stem), left.size, left.last_offset, left.max_timestamp, index_interval_bytes)
    for suffix, index in zip((".index", ".timeindex"), indexes, strict=True):
        log.with_suffix(suffix).write_bytes(index)
    return left


def _zero_leader_epochs(log: Path, table: BatchTable) -> None:
    """Batches before version 2 have no leader epoch."""
    modified = log.stat().st_mtime_ns
    positions = table.position[table.magic == 2]
    data = np.memmap(log, np.uint8, "r+")
    data[positions[:, None] + np.arange(EPOCH_POSITION, EPOCH_POSITION + 4)] = 0
    data.flush()
    os.utime(log, ns=(modified, modified))


# ``export --skip-damaged``.


@dataclass(frozen=True)
class SkippedOffsets:
    first_offset: int
    last_offset: int
    reason: str


def write_readable_batches(tier: Tier, state: PartitionState, logs: Mapping[str, Path]) -> list[SkippedOffsets]:
    """Write the readable batches of live segments, and return the missing offsets, ascending.

    A segment of which nothing can be read gets no file. Records of a transaction whose marker may be damaged are left out, too.

    :param logs: segment id -> the file to write.
    :raises StoreError: if the store fails; NotFound if a segment was replaced meanwhile.
    """
    limit = tier.cleaner_settings_for_topic(state.topic).max_decompressed_batch_bytes
    extent = OffsetRangeToRead(state.topic_partition, state.start_offset, state.end_offset, tuple(state.live))
    damage: list[DamagedOffsetRange] = []
    reader = OffsetRangeReader(
        tier, extent, ReadOptions(read_committed=True, inflate_limit=limit, skip_damaged=True), on_damage=damage.append
    )
    for piece, copied in reader.read_intact_batches():
        if piece.metadata.id not in logs:
            raise NotFound(f"{state.topic_partition} was changed while it was read")
        table, buf = piece.source.table, piece.source.buf
        batches = np.flatnonzero(copied)
        with logs[piece.metadata.id].open("ab") as file:
            for run in np.split(batches, np.flatnonzero(np.diff(batches) > 1) + 1):
                if len(run):
                    file.write(buf[int(table.position[run[0]]) : int(table.position[run[-1]] + table.size[run[-1]])].tobytes())
    for segment in state.live:
        path = logs[segment.id]
        if path.exists() and not path.stat().st_size:
            path.unlink()
        if path.exists():
            os.utime(path, ns=(max(segment.mtime_ms, 0) * 1_000_000,) * 2)
    return [SkippedOffsets(one.first, one.last, one.reason) for one in sorted(damage)]


_SUFFIXED = ("log", "index", "timeindex", "txnindex")


@dataclass(frozen=True)
class ExportReport:
    segments: int
    bytes: int
    start_offset: int
    end_offset: int
    skipped: tuple[SkippedOffsets, ...] = ()
    open_transactions: tuple[OpenTransaction, ...] = ()


def export_partition(
    tier: Tier,
    partition: TopicPartition,
    folder: Path,
    on_bytes: Callable[[int], None] = lambda size: None,
    on_total_bytes: Callable[[int], None] = lambda size: None,
    *,
    new_cluster_topic_id: TopicId | None = None,
    skip_damaged: bool = False,
) -> ExportReport:
    """Write a partition's current view into ``folder``, which must not exist and appears complete or not at all.

    The log start is written beside the folder, and the cleaner offset if the broker's ``cleaner-offset-checkpoint`` is there.

    :param new_cluster_topic_id: prepare for a cluster that has not written the log, with this topic id (empty if unknown).
    :param on_total_bytes: called with the total; again if the export restarts.
    :param skip_damaged: leave out batches that cannot be read.
    :raises UsageError: if the folder exists or cannot be written, or the partition has no segments.
    :raises BadData: if an object is missing or does not match its recorded digest.
    :raises OutOfBudget: if the disk is full.
    """

    def write_log_directory(*, skip_damaged: bool) -> ExportReport:
        return retry_if_object_missing(
            partition,
            lambda: _write_log_directory(
                tier,
                tier.open_partition_log(partition).refresh(),
                folder,
                on_bytes,
                on_total_bytes,
                new_cluster_topic_id,
                skip_damaged=skip_damaged,
            ),
        )

    try:
        return write_log_directory(skip_damaged=False)
    except BadData:
        if not skip_damaged:
            raise
    return write_log_directory(skip_damaged=True)


def _write_log_directory(
    tier: Tier,
    state: PartitionState,
    folder: Path,
    on_bytes: Callable[[int], None],
    on_total_bytes: Callable[[int], None],
    new_cluster_topic_id: TopicId | None,
    *,
    skip_damaged: bool,
) -> ExportReport:
    partition = state.topic_partition
    if not state.has_segments:
        raise UsageError(f"{partition} holds no segments yet", hint="`topics` lists what the tier holds")
    on_total_bytes(state.bytes)
    with unfinished_directory(folder, tier.ports.new_id()) as partial:
        write_segments = _write_readable_segments if skip_damaged else _write_segments
        skipped = write_segments(tier, state, partial, on_bytes)
        _write_epoch_checkpoint(tier, state, partial)
        left_out: tuple[OpenTransaction, ...] = ()
        if new_cluster_topic_id is not None:
            left_out = prepare_for_cluster(partial, state.log_start, tier.cleaner_settings_for_topic(partition.topic).index_interval_bytes)
            if new_cluster_topic_id:
                write_topic_id(partial, new_cluster_topic_id)
        logs = sorted(partial.glob("*.log"))
        end = state.end_offset
        if skipped or left_out:
            end = int(parse_batch_headers(memory_map_file(logs[-1]), logs[-1].name, -1).last_offset[-1])
        report = ExportReport(len(logs), sum(log.stat().st_size for log in logs), int(logs[0].stem), end, skipped, left_out)
        lines = [CheckpointLine(LOG_STARTS, partition, state.log_start, "it shows deleted records again, or deletes what was exported")]
        if (folder.absolute().parent / CLEANED).exists():
            clean_end = min(first_dirty_offset_in(state.vector), end + 1)
            lines.append(CheckpointLine(CLEANED, partition, clean_end, "its cleaner begins elsewhere than after what is clean"))
        publish_directory(partial, folder, lines)
    return report


def _first_offsets(state: PartitionState) -> list[int]:
    ends = [segment.end_offset for segment in state.live]
    return [max(segment.start_offset, before + 1) for segment, before in zip(state.live, (-1, *ends), strict=False)]


def _write_segments(tier: Tier, state: PartitionState, folder: Path, on_bytes: Callable[[int], None]) -> tuple[SkippedOffsets, ...]:
    for segment, first_offset in zip(state.live, _first_offsets(state), strict=True):
        try:
            download_segment_files(tier, state.topic_partition, segment, folder, first_offset)
        except (BadData, NotFound) as error:
            raise _unreadable_segment_error(state.topic_partition, segment, first_offset, error) from error
        on_bytes(segment.size_bytes)
    return ()


def _write_readable_segments(
    tier: Tier, state: PartitionState, folder: Path, on_bytes: Callable[[int], None]
) -> tuple[SkippedOffsets, ...]:
    """Write the other files of complete segments only."""
    partition, begins = state.topic_partition, _first_offsets(state)
    logs = {segment.id: folder / f"{begin:020d}.log" for segment, begin in zip(state.live, begins, strict=True)}
    skipped = write_readable_batches(tier, state, logs)
    if not any(log.exists() for log in logs.values()):
        raise BadData(f"none of its offsets can be read: {skipped[0].reason}", segment=str(partition), hint=f"`repair {partition}`")
    for segment, begin in zip(state.live, begins, strict=True):
        is_complete = not any(one.first_offset <= segment.end_offset and begin <= one.last_offset for one in skipped)
        if is_complete and logs[segment.id].exists():
            readable = logs[segment.id].rename(folder / "readable")
            try:
                download_segment_files(tier, partition, segment, folder, begin)
            except (BadData, NotFound):  # one of its other files is damaged
                for path in folder.glob(f"{begin:020d}.*"):
                    path.unlink()
                readable.rename(logs[segment.id])
            else:
                readable.unlink()
        on_bytes(segment.size_bytes)
    # The tier's snapshots may name transactions whose markers are left out, at which readers would stop for ever.
    for path in folder.glob("*.snapshot"):
        path.unlink()
    states, end = ProducerStates.empty_producer_states(), 0
    for log in sorted(folder.glob("*.log")):
        table = parse_batch_headers(memory_map_file(log), log.name, -1)
        states, end = states.replay_batches(table), int(table.last_offset[-1]) + 1
    (folder / f"{end:020d}.snapshot").write_bytes(format_producer_snapshot(states))
    return tuple(skipped)


def _unreadable_segment_error(
    partition: TopicPartition, segment: RemoteLogSegmentMetadata, first_offset: int, error: BadData | NotFound
) -> BadData | NotFound:
    """Keep a NotFound, so that the caller reads the control log again."""
    if isinstance(error, NotFound):
        return error
    hint = f"`repair {partition}` makes it good; --skip-damaged writes what can be read. {error.hint}"
    return BadData(f"offsets {first_offset} to {segment.end_offset} cannot all be read: {error.cause}", segment=error.segment, hint=hint)


def download_segment_files(
    tier: Tier, partition: TopicPartition, segment: RemoteLogSegmentMetadata, folder: Path, first_offset: int
) -> None:
    """Download files under a broker's names. first_offset: earlier batches are cut off. Raises NotFound, BadData, StoreError."""
    layout = tier.ports.layout
    segment = segment.model_copy(update={"files": dict(layout.segment_files(partition, segment))})
    # Segments of brokers may overlap, because two leaders may tier the same offsets; a log directory has each offset once.
    whole = not segment.has_unread_tail and first_offset <= segment.start_offset
    begin = segment.start_offset if whole else max(first_offset, segment.start_offset)
    for kind, file in segment.files.items():
        if kind == "log" or (kind in _SUFFIXED and whole):
            path = folder / f"{begin:020d}.{kind}"
        elif kind == "snapshot" and whole:
            path = folder / f"{segment.end_offset + 1:020d}.snapshot"
        else:
            continue
        download_segment_file(layout, partition, segment, kind, path).require_match(layout.object_name(partition, segment, kind), file)
        if not whole:
            _keep_range(path, layout.object_name(partition, segment, kind), begin, segment.end_offset)
        os.utime(path, ns=(max(segment.mtime_ms, 0) * 1_000_000,) * 2)
    if not tier.kind.describes_segments:
        _remove_batches_after_end(folder / f"{begin:020d}.log", layout.object_name(partition, segment, "log"), segment)


def _remove_batches_after_end(path: Path, source_name: str, segment: RemoteLogSegmentMetadata) -> None:
    """Readers read these offsets from the next segment. In a listed tier, only the log shows where a segment ends."""
    table = parse_batch_headers(memory_map_file(path), source_name, -1)
    if len(table) and table.last_offset[-1] > segment.end_offset:
        _keep_range(path, source_name, segment.start_offset, segment.end_offset)
        os.utime(path, ns=(segment.mtime_ms * 1_000_000,) * 2)
        for kind in ("index", "timeindex"):
            path.with_suffix(f".{kind}").unlink(missing_ok=True)


def _keep_range(path: Path, source_name: str, first_offset: int, last_offset: int) -> None:
    """Both offsets are inclusive. The broker rebuilds the indexes."""
    buf = memory_map_file(path)
    table = parse_batch_headers(buf, source_name, -1)
    mine = np.flatnonzero((table.last_offset >= first_offset) & (table.base_offset <= last_offset))
    begin, end = (int(table.position[mine[0]]), int(table.position[mine[-1]] + table.size[mine[-1]])) if len(mine) else (0, 0)
    data = bytes(buf[begin:end])
    path.unlink()
    path.write_bytes(data)


def _write_epoch_checkpoint(tier: Tier, state: PartitionState, folder: Path) -> None:
    if tier.kind.describes_segments:
        entries = truncate_lineage_at(state.lineage, state.end_offset + 1) or merge_segment_lineages(
            [segment.leader_epochs for segment in state.live]
        )
    else:  # a listed tier has the epochs only in the batches
        paths = sorted(folder.glob("*.log"))
        entries = lineage_of_tables([parse_batch_headers(memory_map_file(path), path.name) for path in paths])
    # As in Kafka (LeaderEpochFileCache.truncateFromStart), the lineage begins at the log start.
    begun = [entry for entry in entries if entry.start_offset <= state.log_start][-1:]
    entries = (
        *(EpochEntry(entry.epoch, Offset(state.log_start)) for entry in begun),
        *(e for e in entries if e.start_offset > state.log_start),
    )
    text = format_leader_epoch_checkpoint(tuple(entry for entry in entries if entry.start_offset <= state.end_offset))
    (folder / "leader-epoch-checkpoint").write_text(text, encoding="utf-8")
