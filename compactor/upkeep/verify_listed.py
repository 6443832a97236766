"""``verify`` of a tier of Pinterest's layout: LIST, ``_metadata`` and ``offset.wm`` against each other and against the logs.

What counts is what the consumer makes of it (S3PartitionConsumer): it takes three files for a segment, wants it named in ``_metadata``,
reads the one with the greatest base offset at or below its position, and its position is the last record that it was given, plus one. So it
stays for ever where the next segment begins above that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from compactor.bootstrap import Tier
from compactor.cleaner.passes.describe import last_record
from compactor.cleaner.passes.source import open_source
from compactor.errors import BadData, NotFound
from compactor.local.spool import process_folder
from compactor.model.ids import TopicPartition
from compactor.records.indexes import OFFSET_ENTRY
from compactor.tier.layouts.pinterest.keys import KINDS, METADATA, WATERMARK, file_name
from compactor.tier.layouts.pinterest.listing import ListedSegment, ListedTier, PartitionListing, described
from compactor.upkeep.verify_tier import Problem, check_room, problems_beside

ENDLESS_ENTRIES: Final = 2
"""Of so many index entries the consumer's search (S3OffsetIndexHandler) finds no end below the first one."""


def verify_listed(opened: Tier, name: TopicPartition, on_bytes: Callable[[int], None] = lambda size: None) -> list[Problem]:
    """All problems and notes of one partition. Raises OutOfBudget, StoreError."""
    if opened.listed is None:
        raise ValueError("this tier has a log of its own")
    return list(_Look(opened, opened.listed, name).problems(on_bytes))


@dataclass(frozen=True)
class _Look:
    opened: Tier
    listed: ListedTier
    name: TopicPartition

    def problems(self, on_bytes: Callable[[int], None]) -> Iterator[Problem]:
        listing = self.listed.listing(self.name)
        yield from self._names(listing)
        limit = self.opened.settings.cleaner_for(self.name.topic).max_decompressed_batch_bytes
        ends: dict[int, int] = {}
        for segment in listing.segments:
            if "log" not in segment.files:
                continue
            found, end = self._content(segment, limit)
            on_bytes(segment.files["log"].size)
            if found and self._gone(segment):
                continue  # it expired while we looked
            yield from found
            if end is not None:
                ends[segment.base] = end
        for segment, following in pairwise(listing.consumed):
            end = ends.get(segment.base)
            if end is not None and following.base > end:
                detail = f"a consumer that has read it stands at {end} and stays there: the next segment begins at {following.base}"
                yield self._error("gap", file_name(segment.base, "log"), detail)

    def _names(self, listing: PartitionListing) -> Iterator[Problem]:
        """What LIST and the two files beside the segments say."""
        for problem in listing.problems:
            yield self._error("metadata", problem.segment.rpartition("/")[2], problem.cause)
        readable = {segment.base for segment in listing.readable}
        for segment in listing.segments:
            missing = [kind for kind in KINDS if kind not in segment.files]
            if missing:
                detail = f"there is no .{' and no .'.join(missing)} beside it: consumers leave the segment out"
                yield self._error("missing", file_name(segment.base, min(segment.files)), detail)
            elif listing.times is not None and segment not in listing.consumed:
                if segment.base in readable:
                    yield self._error("unlisted", file_name(segment.base, "log"), f"{METADATA} does not name it: consumers leave it out")
                else:
                    yield self._note(
                        "waiting", file_name(segment.base, "log"), f"it lies below what {METADATA} names: the uploader expires it"
                    )
        if listing.times is None:
            yield self._note("metadata", METADATA, "there is none that can be read: consumers go by LIST")
        there = {segment.base for segment in listing.segments}
        for time in listing.times or ():
            if time.base_offset not in there:
                yield self._error("dangling", METADATA, f"it names a segment at {time.base_offset}, of which there is no object")
        newest = max((segment.base for segment in listing.segments if "log" in segment.files), default=-1)
        if listing.watermark is None:
            yield self._note(
                "watermark", WATERMARK, "there is none that can be read: the uploader would upload all again that the broker has"
            )
        elif listing.watermark > newest:
            yield self._error("watermark", WATERMARK, f"it says {listing.watermark}, and the newest log is that of {newest}")
        elif listing.watermark < newest:
            yield self._note("watermark", WATERMARK, f"it says {listing.watermark}, and there is a log of {newest}: an upload is under way")
        for key in listing.strangers:
            yield Problem("note", "stranger", *self.name, key, "it is none of this layout's objects")

    def _content(self, segment: ListedSegment, limit: int) -> tuple[list[Problem], int | None]:
        """(problems, where the consumer stands when it has read all of it; None where nobody knows)."""
        metadata = described(segment, segment.base)
        cleaner = self.opened.settings.cleaner_for(self.name.topic)
        check_room(self.opened, cleaner, metadata)
        log = file_name(segment.base, "log")
        layout = self.opened.ports.layout
        with tempfile.TemporaryDirectory(prefix="verify-", dir=process_folder(self.opened.state_dir)) as scratch:
            paths = {kind: Path(scratch) / file_name(segment.base, kind) for kind in segment.files}
            try:
                for kind, path in paths.items():
                    layout.download(self.name, metadata, kind, path)
                source = open_source(0, paths["log"], segment.base, None, segment.modified_ms, -1, limit)
                source.verify(0, len(source.table))
                end = last_record(source, limit) + 1
            except NotFound as error:
                return [self._error("missing", log, error.message)], None
            except BadData as error:
                return [self._error("log", log, error.cause)], None
            files = {kind: path.read_bytes() for kind, path in paths.items() if kind != "log"}
            found = [self._error(kind, file_name(segment.base, kind), detail) for kind, detail in problems_beside(source, files)]
            if len(files.get("index", b"")) == ENDLESS_ENTRIES * OFFSET_ENTRY.itemsize and any(files["index"][:4]):
                detail = "it has two entries: a consumer that looks for an offset before the first one searches for ever"
                found.append(self._error("endless", file_name(segment.base, "index"), detail))
        return found, max(end, segment.base)

    def _gone(self, segment: ListedSegment) -> bool:
        now = {found.base: found for found in self.listed.listing(self.name).segments}
        return segment.base not in now or set(now[segment.base].files) < set(segment.files)

    def _error(self, kind: str, file: str, detail: str) -> Problem:
        return Problem("error", kind, *self.name, self.listed.keys.folder(self.name) + file, detail)

    def _note(self, kind: str, file: str, detail: str) -> Problem:
        return Problem("note", kind, *self.name, self.listed.keys.folder(self.name) + file, detail)
