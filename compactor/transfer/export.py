"""Export of a partition: its current view is written as a Kafka log directory that a broker can open (``export``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, merge_segment_lineages, truncate_lineage_at
from checkpoint.offsets import first_dirty_offset_of_vector
from compactor.access.tier import Tier
from compactor.cleaner.passes.describe import leader_epoch_lineage_from_batch_tables
from compactor.constants import Offset, TopicId
from compactor.control.logs import retry_if_object_missing
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import memory_map_file, parse_batch_headers_of_segment
from compactor.records.producers import ProducerStates, format_producer_snapshot
from compactor.tier.contents import download_segment_file
from compactor.transfer.broker_cleaning import CLEANED, LOG_STARTS
from compactor.transfer.fresh_cluster import OpenTransaction, prepare_log_directory_for_new_cluster, write_topic_id
from compactor.transfer.log_root import CheckpointLine, publish_directory, unfinished_directory
from compactor.transfer.salvage import SkippedOffsets, write_readable_batches

_SUFFIXED = ("log", "index", "timeindex", "txnindex")


@dataclass(frozen=True)
class ExportReport:
    """Result of an export: number of segments, bytes, and first and last offset (inclusive) that the exported log holds.

    skipped: offsets that were left out because they cannot be read.
    open_transactions: transactions whose records were left out because they have not ended.
    """

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

    Beside the folder, where a broker keeps them, the partition's log start is written, and its cleaner offset if the broker's
    ``cleaner-offset-checkpoint`` is there.

    :param new_cluster_topic_id: prepare the directory for a cluster that has not written it, in which the topic has this id (empty if
        unknown); None to write the log as it is.
    :param on_bytes: called with the size of each segment when it is written.
    :param on_total_bytes: called with the total number of bytes; again if the export restarts.
    :param skip_damaged: leave out batches that cannot be read, and name their offsets in the report.
    :raises UsageError: if the folder exists or cannot be written, or the partition has no segments.
    :raises BadData: if an object is missing or does not match its recorded digest.
    :raises OutOfBudget: if the disk is full.
    """

    def write_log_directory(*, skip_damaged: bool) -> ExportReport:
        return retry_if_object_missing(
            partition,
            lambda: _write_log_directory(
                tier,
                tier.open_control_log_of_partition(partition).refresh(),
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
    """Write all live segments of a state, with their other files and checkpoints, into ``folder``.

    :param on_bytes: called with the size of each segment when it is written.
    :param on_total_bytes: called once, with the total number of bytes.
    :param new_cluster_topic_id: topic id (empty if unknown) in the cluster that will load the directory; None to write the log as it is.
    :param skip_damaged: leave out batches that cannot be read.
    :raises UsageError: if the folder exists or cannot be written, or the state has no segments.
    :raises BadData: if an object does not match its recorded digest, or nothing can be read.
    :raises NotFound: if an object is missing.
    """
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
            left_out = prepare_log_directory_for_new_cluster(
                partial, state.log_start, tier.cleaner_settings_for_topic(partition.topic).index_interval_bytes
            )
            if new_cluster_topic_id:
                write_topic_id(partial, new_cluster_topic_id)
        logs = sorted(partial.glob("*.log"))
        end = state.end_offset
        if skipped or left_out:
            end = int(parse_batch_headers_of_segment(memory_map_file(logs[-1]), logs[-1].name, -1).last_offset[-1])
        report = ExportReport(len(logs), sum(log.stat().st_size for log in logs), int(logs[0].stem), end, skipped, left_out)
        lines = [CheckpointLine(LOG_STARTS, partition, state.log_start, "it shows deleted records again, or deletes what was exported")]
        if (folder.absolute().parent / CLEANED).exists():
            clean_end = min(first_dirty_offset_of_vector(state.vector), end + 1)
            lines.append(CheckpointLine(CLEANED, partition, clean_end, "its cleaner begins elsewhere than after what is clean"))
        publish_directory(partial, folder, lines)
    return report


def _first_offsets(state: PartitionState) -> list[int]:
    """Return for each live segment the first offset that readers read from it: the offset after the segment before it, if they overlap."""
    ends = [segment.end_offset for segment in state.live]
    return [max(segment.start_offset, before + 1) for segment, before in zip(state.live, (-1, *ends), strict=False)]


def _write_segments(tier: Tier, state: PartitionState, folder: Path, on_bytes: Callable[[int], None]) -> tuple[SkippedOffsets, ...]:
    """Write all live segments with their other files. ``on_bytes`` is called with the size of each segment. Raises BadData, NotFound."""
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
    """Write the readable batches of all live segments, and the other files of those segments of which nothing is left out. Return the
    offsets that are missing. ``on_bytes`` is called with the size of each segment. Raises BadData if nothing can be read.
    """
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
        table = parse_batch_headers_of_segment(memory_map_file(log), log.name, -1)
        states, end = states.replay_batches(table), int(table.last_offset[-1]) + 1
    (folder / f"{end:020d}.snapshot").write_bytes(format_producer_snapshot(states))
    return tuple(skipped)


def _unreadable_segment_error(
    partition: TopicPartition, segment: RemoteLogSegmentMetadata, first_offset: int, error: BadData | NotFound
) -> BadData | NotFound:
    """Return the error to raise for a damaged segment. The text of a BadData error names the segment's offsets from ``first_offset``
    on. The error of a missing object stays as it is, so that the caller reads the control log again.
    """
    if isinstance(error, NotFound):
        return error
    hint = f"`repair {partition}` makes it good; --skip-damaged writes what can be read. {error.hint}"
    return BadData(f"offsets {first_offset} to {segment.end_offset} cannot all be read: {error.cause}", segment=error.segment, hint=hint)


def download_segment_files(
    tier: Tier, partition: TopicPartition, segment: RemoteLogSegmentMetadata, folder: Path, first_offset: int
) -> None:
    """Download a segment's files into a log directory, named as a broker names them. Raises NotFound, BadData, StoreError.

    :param first_offset: first offset that readers read from this segment; earlier batches are cut off.
    """
    layout = tier.ports.layout
    segment = segment.model_copy(update={"files": dict(layout.segment_files(partition, segment))})
    # Segments of brokers may overlap, because two leaders may tier the same offsets; a log directory has each offset once.
    whole = not segment.has_offsets_after_end_offset and first_offset <= segment.start_offset
    begin = segment.start_offset if whole else max(first_offset, segment.start_offset)
    for kind, file in segment.files.items():
        if kind == "log" or (kind in _SUFFIXED and whole):
            path = folder / f"{begin:020d}.{kind}"
        elif kind == "snapshot" and whole:
            path = folder / f"{segment.end_offset + 1:020d}.snapshot"
        else:
            continue
        download_segment_file(layout, partition, segment, kind, path).require_match_with_recorded_content(
            layout.object_name(partition, segment, kind), file
        )
        if not whole:
            _keep_batches_of_offset_range(path, layout.object_name(partition, segment, kind), begin, segment.end_offset)
        os.utime(path, ns=(max(segment.mtime_ms, 0) * 1_000_000,) * 2)
    if not tier.kind.describes_segments:
        _remove_batches_after_end(folder / f"{begin:020d}.log", layout.object_name(partition, segment, "log"), segment)


def _remove_batches_after_end(path: Path, source_name: str, segment: RemoteLogSegmentMetadata) -> None:
    """Remove the batches after the segment's end from a downloaded log, because readers read these offsets from the next segment. In
    a listed tier, only the downloaded log shows where a segment ends.
    """
    table = parse_batch_headers_of_segment(memory_map_file(path), source_name, -1)
    if len(table) and table.last_offset[-1] > segment.end_offset:
        _keep_batches_of_offset_range(path, source_name, segment.start_offset, segment.end_offset)
        os.utime(path, ns=(segment.mtime_ms * 1_000_000,) * 2)
        for kind in ("index", "timeindex"):
            path.with_suffix(f".{kind}").unlink(missing_ok=True)


def _keep_batches_of_offset_range(path: Path, source_name: str, first_offset: int, last_offset: int) -> None:
    """Keep only the batches of a file that contain an offset from ``first_offset`` to ``last_offset`` (inclusive). Indexes are not written;
    the broker rebuilds them.
    """
    buf = memory_map_file(path)
    table = parse_batch_headers_of_segment(buf, source_name, -1)
    mine = np.flatnonzero((table.last_offset >= first_offset) & (table.base_offset <= last_offset))
    begin, end = (int(table.position[mine[0]]), int(table.position[mine[-1]] + table.size[mine[-1]])) if len(mine) else (0, 0)
    data = bytes(buf[begin:end])
    path.unlink()
    path.write_bytes(data)


def _write_epoch_checkpoint(tier: Tier, state: PartitionState, folder: Path) -> None:
    """Write the leader epochs of the exported log to its leader-epoch-checkpoint file."""
    if tier.kind.describes_segments:
        entries = truncate_lineage_at(state.lineage, state.end_offset + 1) or merge_segment_lineages(
            [segment.leader_epochs for segment in state.live]
        )
    else:  # a listed tier has the epochs only in the batches
        paths = sorted(folder.glob("*.log"))
        entries = leader_epoch_lineage_from_batch_tables(
            [parse_batch_headers_of_segment(memory_map_file(path), path.name) for path in paths]
        )
    # As in Kafka (LeaderEpochFileCache.truncateFromStart), the lineage begins at the log start.
    begun = [entry for entry in entries if entry.start_offset <= state.log_start][-1:]
    entries = (
        *(EpochEntry(entry.epoch, Offset(state.log_start)) for entry in begun),
        *(e for e in entries if e.start_offset > state.log_start),
    )
    text = format_leader_epoch_checkpoint(tuple(entry for entry in entries if entry.start_offset <= state.end_offset))
    (folder / "leader-epoch-checkpoint").write_text(text, encoding="utf-8")
