"""Verification of listed tiers: LIST, ``_metadata``, ``offset.wm`` and the logs against each other.

The consumer (S3PartitionConsumer) reads the segment with the greatest base offset at or below its position (its last record plus one). It
never advances if the next segment begins after that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from compactor.access.tier import Tier
from compactor.cleaner.source import open_source_segment, read_last_record_offset
from compactor.errors import BadData, NotFound, UsageError
from compactor.features.pinterest.layout import (
    ENDLESS_SEARCH_ENTRIES,
    METADATA_FILE,
    OBJECT_KINDS,
    WATERMARK,
    ListedSegment,
    PartitionListing,
    PinterestListing,
    file_name,
    segment_metadata,
)
from compactor.local.budget import spool_folder
from compactor.model.finding import Finding
from compactor.model.ids import TopicPartition
from compactor.records.indexes import OFFSET_ENTRY
from compactor.upkeep.verify import require_disk_budget, segment_file_problems


def verify_listed_partition(tier: Tier, partition: TopicPartition, on_bytes: Callable[[int], None] = lambda size: None) -> list[Finding]:
    """Problems and notes of one partition. Raises OutOfBudget, StoreError. ``on_bytes``: size of each checked log."""
    listed = tier.listed_tier
    if not isinstance(listed, PinterestListing):
        raise UsageError(f"the tier at {tier.ports.layout.url} has another layout than Pinterest's")
    return list(_ListedPartitionVerifier(tier, listed, partition).find_partition_problems(on_bytes))


@dataclass(frozen=True)
class _ListedPartitionVerifier:
    tier: Tier
    listed: PinterestListing
    partition: TopicPartition

    def find_partition_problems(self, on_bytes: Callable[[int], None]) -> Iterator[Finding]:
        listing = self.listed.list_partition(self.partition)
        yield from self._find_listing_problems(listing)
        limit = self.tier.settings.cleaner_settings_for_topic(self.partition.topic).max_decompressed_batch_bytes
        ends: dict[int, int] = {}
        for segment in listing.segments:
            if "log" not in segment.files:
                continue
            found, end = self._check_segment(segment, limit)
            on_bytes(segment.files["log"].size)
            if found and self._has_vanished(segment):
                continue  # it expired during the check
            yield from found
            if end is not None:
                ends[segment.base] = end
        for segment, following in pairwise(listing.segments_for_consumers):
            end = ends.get(segment.base)
            if end is not None and following.base > end:
                detail = f"a consumer that has read it stands at {end} and stays there: the next segment begins at {following.base}"
                yield self._listing_problem_as_error("gap", file_name(segment.base, "log"), detail)

    def _find_listing_problems(self, listing: PartitionListing) -> Iterator[Finding]:
        for problem in listing.problems:
            yield self._listing_problem_as_error("metadata", problem.segment.rpartition("/")[2], problem.cause)
        readable = {segment.base for segment in listing.readable_segments}
        for segment in listing.segments:
            missing = [kind for kind in OBJECT_KINDS if kind not in segment.files]
            if missing:
                detail = f"there is no .{' and no .'.join(missing)} beside it: consumers leave the segment out"
                yield self._listing_problem_as_error("missing", file_name(segment.base, min(segment.files)), detail)
            elif listing.times is not None and segment not in listing.segments_for_consumers:
                if segment.base in readable:
                    yield self._listing_problem_as_error(
                        "unlisted", file_name(segment.base, "log"), f"{METADATA_FILE} does not name it: consumers leave it out"
                    )
                else:
                    yield self._listing_problem_as_note(
                        "waiting", file_name(segment.base, "log"), f"it lies below what {METADATA_FILE} names: the uploader expires it"
                    )
        if listing.times is None:
            yield self._listing_problem_as_note("metadata", METADATA_FILE, "it is missing or cannot be read: consumers use LIST")
        there = {segment.base for segment in listing.segments}
        for time in listing.times or ():
            if time.base_offset not in there:
                yield self._listing_problem_as_error(
                    "dangling", METADATA_FILE, f"it names a segment at {time.base_offset}, of which there is no object"
                )
        newest = max((segment.base for segment in listing.segments if "log" in segment.files), default=-1)
        if listing.watermark is None:
            yield self._listing_problem_as_note(
                "watermark", WATERMARK, "it is missing or cannot be read: the uploader would upload all segments of the broker again"
            )
        elif listing.watermark > newest:
            yield self._listing_problem_as_error(
                "watermark", WATERMARK, f"it says {listing.watermark}, and the newest log is that of {newest}"
            )
        elif listing.watermark < newest:
            yield self._listing_problem_as_note(
                "watermark", WATERMARK, f"it says {listing.watermark}, and there is a log of {newest}: an upload is under way"
            )
        for key in listing.other_keys:
            yield Finding("note", "stranger", key, "it is not an object of this layout", where=self.partition)

    def _check_segment(self, segment: ListedSegment, max_inflated_bytes: int) -> tuple[list[Finding], int | None]:
        """Problems, and where a consumer continues; None if the segment cannot be read."""
        metadata = segment_metadata(segment, segment.base)
        require_disk_budget(self.tier, self.partition, metadata)
        log = file_name(segment.base, "log")
        layout = self.tier.ports.layout
        with tempfile.TemporaryDirectory(prefix="verify-", dir=spool_folder(self.tier.state_dir)) as scratch:
            paths = {kind: Path(scratch) / file_name(segment.base, kind) for kind in segment.files}
            try:
                for kind, path in paths.items():
                    layout.download_file(self.partition, metadata, kind, path)
                source = open_source_segment(0, paths["log"], segment.base, None, segment.modified_ms, -1, max_inflated_bytes)
                source.verify_batches(0, len(source.table))
                end = read_last_record_offset(source, max_inflated_bytes) + 1
            except NotFound as error:
                return [self._listing_problem_as_error("missing", log, error.message)], None
            except BadData as error:
                return [self._listing_problem_as_error("log", log, error.cause)], None
            files = {kind: path.read_bytes() for kind, path in paths.items() if kind != "log"}
            found = [
                self._listing_problem_as_error(kind, file_name(segment.base, kind), detail)
                for kind, detail in segment_file_problems(source, files)
            ]
            if len(files.get("index", b"")) == ENDLESS_SEARCH_ENTRIES * OFFSET_ENTRY.itemsize and any(files["index"][:4]):
                detail = "it has two entries: a consumer that searches for an offset before the first one never ends"
                found.append(self._listing_problem_as_error("endless", file_name(segment.base, "index"), detail))
        return found, max(end, segment.base)

    def _has_vanished(self, segment: ListedSegment) -> bool:
        now = {found.base: found for found in self.listed.list_partition(self.partition).segments}
        return segment.base not in now or set(now[segment.base].files) < set(segment.files)

    def _listing_problem_as_error(self, finding_kind: str, file: str, detail: str) -> Finding:
        return Finding("error", finding_kind, self.listed.keys.partition_folder(self.partition) + file, detail, where=self.partition)

    def _listing_problem_as_note(self, finding_kind: str, file: str, detail: str) -> Finding:
        return Finding("note", finding_kind, self.listed.keys.partition_folder(self.partition) + file, detail, where=self.partition)
