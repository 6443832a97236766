"""Import of many partitions: from another tier (``import --from-tier``), or from a broker's log directory (``import LOG_ROOT``).

Segments of another tier, which is only read, are downloaded a few at a time into a temporary log directory and imported as from a broker:
with the same checks, the same position (last offset + 1) and the same recovery after a crash.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from checkpoint.offsets import first_dirty_offset_in
from compactor.access.tier import Tier
from compactor.constants import MAX_OFFSET
from compactor.control.logs import publish_hints
from compactor.control.state import CatalogState, PartitionState
from compactor.errors import BadData, NotFound, OutOfBudget, UsageError
from compactor.features.imports.import_ import ImportOptions, ImportProgressCallbacks, ImportReport, ImportResources, import_directory
from compactor.features.imports.incarnations import find_or_open_incarnation
from compactor.features.imports.log_directory import require_not_compacted_beyond, segment_log_path
from compactor.features.imports.seam import find_divergence
from compactor.local.budget import spool_folder
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import disk_budget_bytes
from compactor.upkeep.export import download_segment_files

IMPORTS_PER_THREAD = 8
"""Partitions that are imported at the same time, for each thread of ``daemon.threads``."""

METADATA_LOG = "__cluster_metadata"
"""Directory name of KRaft's metadata log, which is no topic."""

ALL_TOPICS = ".*"
"""Expression for topic names that is used if none is given."""

_SEGMENT = re.compile(r"\d{20}\.log")


@dataclass(frozen=True)
class PartitionImportResult:
    partition: TopicPartition
    report: ImportReport | None
    error: Exception | None = None

    @property
    def import_status(self) -> str:
        return self.report.import_status if self.report else "refused"

    @property
    def import_result_message(self) -> str:
        if self.error is not None:
            return str(self.error)
        return "; ".join(self.report.notes) if self.report else ""


def has_partition_directories(path: Path) -> bool:
    """False if it contains segments itself. Raises UsageError if it cannot be read."""
    try:
        entries = list(path.iterdir()) if path.is_dir() else []
        return not any(_SEGMENT.fullmatch(entry.name) for entry in entries) and any(
            partition_of_directory(entry) is not None and entry.is_dir() for entry in entries
        )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="Check the path, its owner and its mode") from error


def partition_of_directory(log_dir: Path) -> TopicPartition | None:
    """Partition that a directory, or a symbolic link itself, is named after."""
    try:
        return TopicPartition.parse(Path(os.path.abspath(log_dir)).name)
    except UsageError:
        return None


def is_topic_chosen(topic: str, topic_regexes: Sequence[str], topics_in_tier: Container[str] = ()) -> bool:
    """Regular expressions match whole topic names."""
    matching = [regex for regex in topic_regexes if re.fullmatch(regex, topic)]
    if not is_internal_topic_name(topic):
        return bool(matching)
    # General expressions rarely mean internal topics, some of which hold nothing but records without a key.
    return bool(matching) and (topic in topics_in_tier or any(is_internal_topic_name(regex) for regex in matching))


def topics_in_catalog(catalog: CatalogState) -> set[str]:
    return {TopicPartition.parse_partition_store_prefix(name).topic for name in catalog.partitions}


def is_internal_topic_name(name: str) -> bool:
    return name.startswith("__")


def topic_name_filter(topic_regex: str | None) -> Callable[[TopicPartition], bool]:
    """Expression for whole names (None: all). Raises UsageError if it is invalid."""
    try:
        wanted = re.compile(topic_regex) if topic_regex is not None else None
    except re.error as error:
        raise UsageError(
            f"--topics: {topic_regex!r} is not a regular expression: {error}", hint="It is matched against whole names"
        ) from None
    return lambda name: wanted is None or wanted.fullmatch(name.topic) is not None


def list_partition_directories(
    root: Path, topic_regex: str | None = None, topics_in_tier: Container[str] = ()
) -> list[tuple[TopicPartition, Path]]:
    """Directories that ``is_topic_chosen`` chooses, sorted, without those that a broker is creating or deleting. Raises UsageError for an
    invalid expression.
    """
    topic_name_filter(topic_regex)  # refuses what is no expression
    regexes = [ALL_TOPICS if topic_regex is None else topic_regex]
    found = [(name, path) for path in root.iterdir() if (name := partition_of_directory(path)) is not None and path.is_dir()]
    return sorted(
        (name, path) for name, path in found if name.topic != METADATA_LOG and is_topic_chosen(name.topic, regexes, topics_in_tier)
    )


Source = TypeVar("Source")


class CatalogChangeBatcher:
    """Writer of catalog records for several threads: changes that arrive meanwhile are combined in the next record."""

    def __init__(self, publish: Callable[[Mapping[TopicPartition, int]], None]) -> None:
        self._say = publish
        self._forward_write_request = threading.Lock()
        self._changed = threading.Lock()
        self._waiting: list[tuple[TopicPartition, int, Future[None]]] = []

    def record_partition_change(self, partition: TopicPartition, slot: int) -> None:
        """Return once the catalog records that a control log has reached a slot."""
        reported: Future[None] = Future()
        with self._changed:
            self._waiting.append((partition, slot, reported))
        with self._forward_write_request:
            if not reported.done():
                self._write_pending_changes()
        reported.result()

    def _write_pending_changes(self) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, []
        try:
            self._say({name: slot for name, slot, _ in waiting})
        except BaseException as error:  # noqa: BLE001 - raised again in every thread whose change it was
            for _, _, reported in waiting:
                reported.set_exception(error)
        else:
            for _, _, reported in waiting:
                reported.set_result(None)


def import_partitions(
    tier: Tier,
    sources: Sequence[tuple[TopicPartition, Source]],
    import_one_partition: Callable[[TopicPartition, Source, ImportResources], ImportReport],
    *,
    max_parallel: int,
    on_partition: Callable[[PartitionImportResult], None],
) -> list[PartitionImportResult]:
    """Return results in order. A partition that fails does not stop the others (isolation, I9). ``on_partition`` is called by one thread at
    a time.
    """
    one_at_a_time = threading.Lock()
    changes = CatalogChangeBatcher(lambda slots: publish_hints(tier.catalog, slots))

    def import_source(source: tuple[TopicPartition, Source]) -> PartitionImportResult:
        try:
            done = PartitionImportResult(source[0], import_one_partition(*source, company))
        except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
            done = PartitionImportResult(source[0], None, error)
        with one_at_a_time:
            on_partition(done)
        return done

    company = ImportResources(
        1, lambda log: changes.record_partition_change(log.state.topic_partition, log.confirmed_slot()), threading.Lock()
    )
    if sources:
        tier.identity.read_or_create_catalog()
        tier.identity.read_catalog()
    with ThreadPoolExecutor(max_parallel, "import") as pool:
        return list(pool.map(import_source, sources))


def import_partition_directories(
    tier: Tier,
    directories: Sequence[tuple[TopicPartition, Path]],
    options: ImportOptions,
    *,
    on_partition: Callable[[PartitionImportResult], None] = lambda done: None,
    on_bytes: Callable[[TopicPartition, int], None] = lambda name, size: None,
) -> list[PartitionImportResult]:
    """Several at a time, each with one thread, because a small one mostly waits for the store. Large imports run one at a time.

    :param on_bytes: receives the size of each new segment twice: checked and uploaded.
    """
    options = replace(options, may_be_empty=True)

    def import_one_partition(partition: TopicPartition, path: Path, shared: ImportResources) -> ImportReport:
        policy = tier.cleaner_settings_for_topic(partition.topic).cleaner_policy()
        progress = ImportProgressCallbacks(advance=partial(on_bytes, partition))
        return import_directory(tier, path, partition, policy, progress, options, shared)

    return import_partitions(
        tier, directories, import_one_partition, max_parallel=IMPORTS_PER_THREAD * tier.settings.daemon.threads, on_partition=on_partition
    )


MAX_TRANSFER_ATTEMPTS = 3
"""How many times the other tier's state is read again because a segment was replaced or expired while it was downloaded."""
MOST_AT_ONCE = 1 << 30
"""Bytes of segments downloaded before they are imported. At least one new segment is, beside those at the seam."""


def partitions_to_import(source: Tier, topic_regex: str | None) -> list[TopicPartition]:
    wanted = topic_name_filter(topic_regex)
    return [name for name in source.list_latest_incarnations() if wanted(name)]


def import_tier(
    source: Tier,
    target: Tier,
    partitions: Sequence[TopicPartition],
    options: ImportOptions,
    *,
    on_partition: Callable[[PartitionImportResult], None] = lambda done: None,
    on_bytes: Callable[[TopicPartition, int], None] = lambda name, size: None,
) -> list[PartitionImportResult]:
    """Several at a time (``daemon.threads``). ``on_bytes``: as for directories. Raises UsageError if both tiers are the same."""
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
    """Import of one partition, a few downloaded segments at a time. threads: number of imports that share the disk budget."""

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
        for attempt in range(MAX_TRANSFER_ATTEMPTS):
            try:
                with tempfile.TemporaryDirectory(prefix="transfer-", dir=spool_folder(self._target.state_dir)) as scratch:
                    self._import_next_segments(Path(scratch) / str(self._name))
                break
            except NotFound as error:
                if attempt == MAX_TRANSFER_ATTEMPTS - 1:
                    raise BadData(f"a segment of the other tier is missing: {error.message}", segment=str(self._name)) from error
        return self._sum_import_reports()

    def _import_next_segments(self, folder: Path) -> None:
        folder.mkdir()
        theirs = self._source.open_partition_log(self._name).refresh()
        place = self._find_target_incarnation(theirs)
        ends = [segment.end_offset for segment in theirs.live]
        end = ends[-1] + 1 if ends else 0
        # Segments of brokers may overlap: each is read from the end of the one before it.
        self._firsts = {s.id: max(s.start_offset, end + 1) for s, end in zip(theirs.live, [-1, *ends], strict=False)}
        clean = first_dirty_offset_in(theirs.vector)
        start = self._source.first_readable_offset(theirs)
        options = replace(self._options, lineage=theirs.lineage, rewritten=clean, topic_id=theirs.topic_id, log_start=start)
        segments, checked = list(theirs.live), False
        while True:
            mine = self._target.open_partition_log(place).refresh_and_check_gaps()
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
            fetched = self._download_segments(segments, kept, folder) if kept < end - 1 or kept < mine.end_offset else 0
            if not fetched:
                return
            options = replace(options, fetched_from=seam)
            report = import_directory(self._target, folder, place, self._policy, self._progress, options, self._company)
            self._reports.append(report)
            if fetched == len(segments):
                return
            if self._target.open_partition_log(place).refresh_and_check_gaps().end_offset <= kept:
                raise BadData(
                    f"segment {segments[fetched - 1].id} adds nothing after offset {kept}",
                    segment=self._log_object_key(segments[fetched - 1]),
                    hint="See `verify` of the other tier",
                )

    def _find_target_incarnation(self, source_state: PartitionState) -> TopicPartition:
        mine = self._target.open_partition_log(self._target.latest_incarnation(self._name)).refresh_and_check_gaps()
        same = {batch.digest for batch in source_state.tail}.intersection(batch.digest for batch in mine.tail)
        where = self._source.ports.layout.url
        return find_or_open_incarnation(self._target, mine, source_state.topic_id, where, self._options.opening, lambda: len(same))

    def _download_segments(self, segments: Sequence[RemoteLogSegmentMetadata], last_kept_offset: int, folder: Path) -> int:
        """Segments at the seam (where the log continues the tier) come first. Raises OutOfBudget if there is no space for a new one beside
        these.
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
        return self._source.ports.layout.object_name(self._name, segment, "log")

    def _sum_import_reports(self) -> ImportReport:
        if not self._reports:
            end = self._target.open_partition_log(self._target.latest_incarnation(self._name)).refresh_and_check_gaps().end_offset
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
    """Start of the tail (the target's last batches), or the target's end. If the end is to be cut, the start of the segment with the last
    offset that stays, whose records are compared.
    """
    if last_kept_offset < state.end_offset:
        return next((segment.start_offset for segment in state.live if segment.end_offset >= last_kept_offset), 0)
    return min(state.tail[0].base_offset, state.end_offset + 1) if state.tail else state.end_offset


def _is_interrupted_transfer(state: PartitionState, source_state: PartitionState) -> bool:
    """Return whether the target's segments have the digests of the source's first segments, apart from those that either has deleted from
    the front.
    """
    first = max(state.start_offset, source_state.start_offset)
    live = ([segment for segment in one.live if segment.end_offset >= first] for one in (state, source_state))
    mine, other = ([(s.start_offset, s.end_offset, s.files["log"].sha256) for s in segments] for segments in live)
    return mine == other[: len(mine)] and all(digest for _, _, digest in mine) and bool(mine or not state.has_segments)


def _delete_downloaded_segments_below(folder: Path, offset: int) -> None:
    """The seam is after the downloaded segments that the tier has by now."""
    for path in list(folder.iterdir()):
        if int(path.name[:20]) < offset:
            path.unlink()
