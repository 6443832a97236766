"""``import --from-tier``: the partitions of another tier into this one, as far as this one does not have them yet.

Segments are fetched a few at a time into a log directory of this process, and taken from there as from a broker's
(``transfer.import_``): the same checks, the same position (last offset + 1), the same way back after a crash. The other tier is only read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from compactor.bootstrap import Tier
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound, OutOfBudget, UsageError
from compactor.local.spool import process_folder
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import disk_budget
from compactor.transfer.export import fetch
from compactor.transfer.import_ import Company, ImportOptions, ImportProgress, ImportReport, import_directory
from compactor.transfer.import_root import PartitionImport, each_for_itself, of_topics
from compactor.transfer.log_directory import log_path

LOOKS = 3
"""How often the other tier is asked anew because a segment was replaced or expired while it was fetched."""
MOST_AT_ONCE = 1 << 30
"""Bytes of logs that lie in the directory at once, and at least one segment beside the one at the seam."""

MAX_OFFSET = 2**63 - 1


def names_of(source: Tier, topics: str | None) -> list[TopicPartition]:
    """The other tier's partitions. ``topics``: a regular expression over whole topic names. Raises UsageError."""
    wanted = of_topics(topics)
    return [name for name in source.partitions() if wanted(name)]


def import_tier(
    source: Tier,
    target: Tier,
    names: Sequence[TopicPartition],
    options: ImportOptions,
    *,
    on_partition: Callable[[PartitionImport], None] = lambda done: None,
) -> list[PartitionImport]:
    """Each partition for itself; one that is refused does not stop the others (I9). ``daemon.threads`` at a time."""
    if source.ports.layout.url == target.ports.layout.url:
        raise UsageError(f"both configurations name the tier at {target.ports.layout.url}", hint="--config is where the segments go")
    threads = target.settings.daemon.threads

    def bring(name: TopicPartition, origin: Tier, company: Company) -> ImportReport:
        return _Transfer(origin, target, name, options, company, threads).run()

    return each_for_itself(target, [(name, source) for name in names], bring, at_once=threads, on_partition=on_partition)


class _Transfer:
    """One partition. ``threads``: as many transfers share the disk budget."""

    def __init__(
        self,
        source: Tier,
        target: Tier,
        name: TopicPartition,
        options: ImportOptions,
        company: Company,
        threads: int,
    ) -> None:
        self._source, self._target, self._name, self._company = source, target, name, company
        # Between segments of our own tiers nothing is missing that a round did not take away: the other tier's fold has seen to it.
        self._options = replace(options, gaps=options.gaps or source.listed is None, older=False, may_be_empty=True)
        cleaner = target.settings.cleaner_for(name.topic)
        self._policy = cleaner.policy()
        self._room = disk_budget(cleaner, target.state_dir) // threads
        self._reports: list[ImportReport] = []
        self._firsts: dict[str, int] = {}

    def run(self) -> ImportReport:
        for look in range(LOOKS):
            try:
                with tempfile.TemporaryDirectory(prefix="transfer-", dir=process_folder(self._target.state_dir)) as scratch:
                    self._look(Path(scratch) / str(self._name))
                break
            except NotFound as error:
                if look == LOOKS - 1:
                    raise BadData(f"a segment of the other tier is missing: {error.message}", segment=str(self._name)) from error
        return self._report()

    def _look(self, folder: Path) -> None:
        folder.mkdir()
        theirs = self._source.open(self._name).refresh()
        ends = [segment.end_offset for segment in theirs.live]
        # Where segments of brokers overlap, each is read from where the one before it ends.
        self._firsts = {s.id: max(s.start_offset, end + 1) for s, end in zip(theirs.live, [-1, *ends], strict=False)}
        options = replace(self._options, lineage=theirs.lineage)
        segments = list(theirs.live)
        while True:
            mine = self._target.open(self._name).check_whole()
            seam = _seam(mine)
            segments = [segment for segment in segments if segment.end_offset >= seam]
            _keep_only(folder, self._firsts[segments[0].id] if segments else MAX_OFFSET)
            fetched = self._fetched(segments, mine, folder)
            if not fetched:
                return
            report = import_directory(self._target, folder, self._name, self._policy, ImportProgress(), options, self._company)
            self._reports.append(report)
            if fetched == len(segments):
                return
            if self._target.open(self._name).check_whole().end_offset <= mine.end_offset:
                raise BadData(
                    f"segment {segments[fetched - 1].id} adds nothing behind offset {mine.end_offset}",
                    segment=self._where(segments[fetched - 1]),
                    hint="See `verify` of the other tier",
                )

    def _fetched(self, segments: Sequence[RemoteLogSegmentMetadata], mine: PartitionState, folder: Path) -> int:
        """How many of the segments lie in the folder: those at the seam and what follows them, as far as there is room."""
        if not segments or segments[-1].end_offset <= mine.end_offset:
            return 0
        total, count, new = 0, 0, 0
        for segment in segments:
            total += sum(file.size for file in segment.files.values())
            if new and total > min(MOST_AT_ONCE, self._room // 2):
                break
            if total > self._room:
                raise OutOfBudget(
                    f"segment {segment.id} and those at the seam take {total} bytes of local disk, and there are {self._room}",
                    hint="Raise [cleaner] disk_budget_bytes, or lower [daemon] threads",
                )
            first = self._firsts[segment.id]
            path = log_path(folder, first)
            if not path.exists() or not path.stat().st_size:
                path.unlink(missing_ok=True)
                fetch(self._source, self._name, segment, folder, first)
            count += 1
            new += segment.end_offset > mine.end_offset
        if count < len(segments):
            # Its name says where the segment before it ends; it is fetched next.
            log_path(folder, self._firsts[segments[count].id]).touch()
        return count

    def _where(self, segment: RemoteLogSegmentMetadata) -> str:
        return self._source.ports.layout.where(self._name, segment, "log")

    def _report(self) -> ImportReport:
        if not self._reports:
            end = self._target.open(self._name).check_whole().end_offset
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


def _seam(state: PartitionState) -> int:
    """From where on segments are needed: the batches that the last import remembers, else the tier's end."""
    if not state.live:
        return 0
    return min(state.tail[0].base_offset, state.end_offset + 1) if state.tail else state.end_offset


def _keep_only(folder: Path, first: int) -> None:
    """What the tier has is not needed any more, but for the seam."""
    for path in list(folder.iterdir()):
        if int(path.name[:20]) < first:
            path.unlink()
