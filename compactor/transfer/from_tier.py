"""Import from another tier: copies its partitions into this one, as far as this one does not have them yet (``import --from-tier``).

Segments are downloaded a few at a time into a temporary log directory and imported as from a broker (``transfer.import_``): with the same
checks, the same position (last offset + 1) and the same recovery after a crash. The other tier is only read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from checkpoint.offsets import first_dirty_offset_of_vector
from compactor.access.tier import Tier
from compactor.constants import MAX_OFFSET
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound, OutOfBudget, UsageError
from compactor.local.spool import spool_folder_of_this_process
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import disk_budget_bytes
from compactor.tier.ports import SegmentCount
from compactor.transfer.broker_cleaning import require_not_compacted_beyond
from compactor.transfer.export import download_segment_files
from compactor.transfer.import_ import import_directory
from compactor.transfer.import_options import ImportOptions, ImportProgressCallbacks, ImportReport, ImportResources
from compactor.transfer.import_root import PartitionImportResult, import_partitions, topic_name_filter
from compactor.transfer.incarnations import find_or_open_incarnation
from compactor.transfer.log_directory import segment_log_path
from compactor.transfer.seam import find_divergence

MAX_TRANSFER_ATTEMPTS = 3
"""How many times the other tier's state is read again because a segment was replaced or expired while it was downloaded."""
MOST_AT_ONCE = 1 << 30
"""Bytes of segments downloaded before they are imported. At least one new segment is, beside those at the seam."""


def partitions_to_import(source: Tier, topic_regex: str | None) -> list[TopicPartition]:
    """Return the partitions of the other tier whose topics match an expression.

    :param topic_regex: a regular expression for whole topic names; None for all. Raises UsageError if it is invalid.
    """
    wanted = topic_name_filter(topic_regex)
    return [name for name in source.list_partitions_in_latest_incarnation() if wanted(name)]


def import_tier(
    source: Tier,
    target: Tier,
    partitions: Sequence[TopicPartition],
    options: ImportOptions,
    *,
    on_partition: Callable[[PartitionImportResult], None] = lambda done: None,
    on_bytes: Callable[[TopicPartition, int], None] = lambda name, size: None,
) -> list[PartitionImportResult]:
    """Import partitions of another tier, several at a time (``daemon.threads``). One that fails does not stop the others (isolation, I9).

    :param on_partition: called with the result of each partition.
    :param on_bytes: called with the size of each new segment twice: when it was checked and when it was uploaded.
    :raises UsageError: if both tiers are the same.
    """
    if source.ports.layout.url == target.ports.layout.url:
        raise UsageError(f"both configurations name the tier at {target.ports.layout.url}", hint="--config is where the segments go")
    threads = target.settings.daemon.threads

    def import_one_partition(partition: TopicPartition, origin: Tier, shared: ImportResources) -> ImportReport:
        progress = ImportProgressCallbacks(advance=partial(on_bytes, partition))
        return _PartitionImportFromTier(origin, target, partition, options, shared, threads, progress).transfer_partition()

    return import_partitions(
        target, [(name, source) for name in partitions], import_one_partition, max_parallel=threads, on_partition=on_partition
    )


class _PartitionImportFromTier:
    """Import of one partition from another tier by downloading its segments. threads: number of imports that share the disk budget."""

    def __init__(
        self,
        source: Tier,
        target: Tier,
        partition: TopicPartition,
        options: ImportOptions,
        shared: ImportResources,
        threads: int,
        progress: ImportProgressCallbacks,
    ) -> None:
        self._source, self._target, self._name, self._company = source, target, partition, shared
        self._progress = progress
        # In a compactor-managed tier, offsets are only missing because a round removed them: the fold refuses other gaps.
        self._options = replace(options, gaps=options.gaps or source.kind.describes_segments, older=False, may_be_empty=True)
        cleaner = target.settings.cleaner_settings_for_topic(partition.topic)
        self._policy = cleaner.cleaner_policy()
        self._segment_budget = disk_budget_bytes(cleaner, target.state_dir) // threads
        self._reports: list[ImportReport] = []
        self._firsts: dict[str, int] = {}

    def transfer_partition(self) -> ImportReport:
        """Import what the target does not have yet, a few segments at a time, and return the sum of what was added."""
        for attempt in range(MAX_TRANSFER_ATTEMPTS):
            try:
                with tempfile.TemporaryDirectory(prefix="transfer-", dir=spool_folder_of_this_process(self._target.state_dir)) as scratch:
                    self._download_and_import_next_segments(Path(scratch) / str(self._name))
                break
            except NotFound as error:
                if attempt == MAX_TRANSFER_ATTEMPTS - 1:
                    raise BadData(f"a segment of the other tier is missing: {error.message}", segment=str(self._name)) from error
        return self._sum_import_reports()

    def _download_and_import_next_segments(self, folder: Path) -> None:
        folder.mkdir()
        theirs = self._source.open_control_log_of_partition(self._name).refresh()
        place = self._find_target_incarnation(theirs)
        ends = [segment.end_offset for segment in theirs.live]
        end = ends[-1] + 1 if ends else 0
        # Segments of brokers may overlap: each is read from the end of the one before it.
        self._firsts = {s.id: max(s.start_offset, end + 1) for s, end in zip(theirs.live, [-1, *ends], strict=False)}
        clean = first_dirty_offset_of_vector(theirs.vector)
        start = self._source.first_readable_offset(theirs)
        options = replace(self._options, lineage=theirs.lineage, rewritten=clean, topic_id=theirs.topic_id, log_start=start)
        segments, checked = list(theirs.live), False
        while True:
            mine = self._target.open_control_log_of_partition(place).refresh_and_check_gaps()
            diverged = find_divergence(mine, theirs.lineage, end)
            # Up to this offset the target keeps its data; segments after it are new.
            kept = mine.end_offset if diverged is None else min(mine.end_offset, diverged.offset - 1)
            if not checked:
                is_begun = not mine.has_segments or _is_interrupted_transfer(mine, theirs)
                if not is_begun and not options.accept_loss:
                    require_not_compacted_beyond(
                        self._name, kept + 1, clean, cleaned_by="the other tier's compactor", source_name=self._source.ports.layout.url
                    )
                options, checked = replace(options, continues_cleaned_source=is_begun), True
            # An empty partition begins with the segment that contains the log start, or with the newest one if all records are
            # deleted.
            seam = _first_offset_to_download(mine, kept) if mine.has_segments else min(start, ends[-1] if ends else 0)
            segments = [segment for segment in segments if segment.end_offset >= seam]
            _delete_downloaded_segments_below(folder, self._firsts[segments[0].id] if segments else MAX_OFFSET)
            fetched = self._download_segments_that_fit_on_disk(segments, kept, folder) if kept < end - 1 or kept < mine.end_offset else 0
            if not fetched:
                return
            options = replace(options, fetched_from=seam)
            report = import_directory(self._target, folder, place, self._policy, self._progress, options, self._company)
            self._reports.append(report)
            if fetched == len(segments):
                return
            if self._target.open_control_log_of_partition(place).refresh_and_check_gaps().end_offset <= kept:
                raise BadData(
                    f"segment {segments[fetched - 1].id} adds nothing after offset {kept}",
                    segment=self._log_object_key(segments[fetched - 1]),
                    hint="See `verify` of the other tier",
                )

    def _find_target_incarnation(self, source_state: PartitionState) -> TopicPartition:
        """Return the topic incarnation in the target tier to which the other tier's log belongs, by topic id. Raises BadData if there is
        none and none may be opened.
        """
        mine = self._target.open_control_log_of_partition(self._target.latest_incarnation(self._name)).refresh_and_check_gaps()
        same = {batch.digest for batch in source_state.tail}.intersection(batch.digest for batch in mine.tail)
        where = self._source.ports.layout.url
        return find_or_open_incarnation(self._target, mine, source_state.topic_id, where, self._options.opening, lambda: len(same))

    def _download_segments_that_fit_on_disk(
        self, segments: Sequence[RemoteLogSegmentMetadata], last_kept_offset: int, folder: Path
    ) -> SegmentCount:
        """Download segments into the folder, as far as there is space, and return the number of segments. Those at the offset where the
        log continues the tier (the seam) are downloaded first.

        :param last_kept_offset: last offset of the target that stays as it is.
        :raises OutOfBudget: if there is no space for a new segment beside those at the seam.
        """
        total, count, new = 0, 0, 0
        for segment in segments:
            total += sum(file.size for file in segment.files.values())
            if new and total > min(MOST_AT_ONCE, self._segment_budget // 2):
                break
            if total > self._segment_budget:
                raise OutOfBudget(
                    f"segment {segment.id} and those at the seam take {total} bytes of local disk, and there are {self._segment_budget}",
                    hint="Raise [cleaner] disk_budget_bytes, or lower [daemon] threads",
                )
            first = self._firsts[segment.id]
            path = segment_log_path(folder, first)
            if not path.exists() or not path.stat().st_size:
                path.unlink(missing_ok=True)
                download_segment_files(self._source, self._name, segment, folder, first)
            count += 1
            new += segment.end_offset > last_kept_offset
        if count < len(segments):
            # An empty file with the next segment's name shows where the segment before it ends.
            segment_log_path(folder, self._firsts[segments[count].id]).touch()
        return count

    def _log_object_key(self, segment: RemoteLogSegmentMetadata) -> str:
        """Return the object key of a segment's log in the source tier."""
        return self._source.ports.layout.object_name(self._name, segment, "log")

    def _sum_import_reports(self) -> ImportReport:
        if not self._reports:
            end = (
                self._target.open_control_log_of_partition(self._target.latest_incarnation(self._name)).refresh_and_check_gaps().end_offset
            )
            return ImportReport(0, 0, end + 1, end)
        added = [report for report in self._reports if report.segments]
        notes = tuple(note for report in self._reports for note in report.notes)
        if not added:
            return replace(self._reports[-1], notes=notes)
        return ImportReport(
            sum(report.segments for report in added),
            sum(report.bytes for report in added),
            added[0].start_offset,
            added[-1].end_offset,
            notes,
        )


def _first_offset_to_download(state: PartitionState, last_kept_offset: int) -> int:
    """Return the offset from which the other tier's segments must be downloaded.

    That is the start of the tail (the target's last batches, by which the log is recognised), or the target's end if no tail is recorded.
    If the target's end is to be cut, it is the start of the segment with the last offset that stays, whose records are compared.

    :param last_kept_offset: last offset of the target that stays as it is.
    """
    if last_kept_offset < state.end_offset:
        return next((segment.start_offset for segment in state.live if segment.end_offset >= last_kept_offset), 0)
    return min(state.tail[0].base_offset, state.end_offset + 1) if state.tail else state.end_offset


def _is_interrupted_transfer(state: PartitionState, source_state: PartitionState) -> bool:
    """Return whether the target's state is that of an interrupted transfer from the same tier: its segments have the digests of the
    source's first segments. Segments that either tier has deleted from the front are not compared.
    """
    first = max(state.start_offset, source_state.start_offset)
    live = ([segment for segment in one.live if segment.end_offset >= first] for one in (state, source_state))
    mine, other = ([(s.start_offset, s.end_offset, s.files["log"].sha256) for s in segments] for segments in live)
    return mine == other[: len(mine)] and all(digest for _, _, digest in mine) and bool(mine or not state.has_segments)


def _delete_downloaded_segments_below(folder: Path, offset: int) -> None:
    """Delete the downloaded segments that begin before ``offset``: the tier has them by now, and the offset at which the log continues
    the tier (the seam) is after them.
    """
    for path in list(folder.iterdir()):
        if int(path.name[:20]) < offset:
            path.unlink()
