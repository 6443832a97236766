"""Plans of changes to an Iceberg table: which data files replace which. Pure.

The compacted view lies between log start and cleaner offset. Each live segment contributes one slice, and each slice is one data file,
whose name states it. A round that replaces segments replaces exactly their files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final, NamedTuple, Self
from uuid import UUID

from pydantic import ValidationError
from typing_extensions import override

from checkpoint.offsets import first_dirty_offset_in
from compactor.control.state import PartitionState
from compactor.errors import BadData
from compactor.model.ids import RunHistoryStatus
from compactor.model.segment import StrictFrozenModel

ENTRY_PREFIX = "tiered-compactor.partition."
"""Prefix of the keys in a snapshot's summary under which the entries of partitions are stored."""

_FILE_NAME = re.compile(r"(?:[01]+-)?(\d+)\.(\d+)\.(\d+)\.(\d+)\.([A-Za-z0-9_-]{22})\.([0-9a-f]{32})\.parquet")
_MANIFEST_NAME = re.compile(r"(?:snap-\d+-\d+-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:-m\d+)?\.avro")
_MARK_DIGITS: Final = 12
_EARLIER_COMMITS: Final = b"tiered".hex()
"""First digits of the commit ids of earlier versions, which marked the program but not the table."""
SnapshotExpiryPlan = tuple[list[int], int | None]
"""Ids of the snapshots that may expire now, and when the next one may, in milliseconds; None if none waits."""
SnapshotOrder = tuple[int, int, int]
"""Numbers that rise from one snapshot of a table to the next."""


class FileOrigin(Enum):
    THIS_TABLE = "this table's writer"
    UNMARKED = "an earlier version of this program, for this table or for another one"
    OTHER = "another program, or this program for another table"


def marked_file_id(table_uuid: UUID, random_digits: str) -> UUID:
    """UUID of version 8 for file names, which begins with the table's own first digits: a renamed table keeps its location, and another
    table may take the same one.

    :param random_digits: 32 hexadecimal digits that no other file has.
    """
    return UUID(f"{table_uuid.hex[:_MARK_DIGITS]}8{random_digits[_MARK_DIGITS + 1 :]}")


def file_origin(name: str, table_uuid: UUID) -> FileOrigin:
    """Earlier versions gave data files a UUID of version 4."""
    is_data = (found := _FILE_NAME.fullmatch(name)) is not None
    if found is None and (found := _MANIFEST_NAME.fullmatch(name)) is None:
        return FileOrigin.OTHER
    digits = found[6] if is_data else found[1].replace("-", "")
    mark, version = digits[:_MARK_DIGITS], digits[_MARK_DIGITS]
    if (mark, version) == (table_uuid.hex[:_MARK_DIGITS], "8"):
        return FileOrigin.THIS_TABLE
    is_unmarked = version == "4" if is_data else (mark, version) == (_EARLIER_COMMITS, "8")
    return FileOrigin.UNMARKED if is_unmarked else FileOrigin.OTHER


class ViewSlice(NamedTuple):
    """Part of the compacted view in one segment. first, last: offsets, inclusive."""

    segment_id: str
    first: int
    last: int

    @override
    def __str__(self) -> str:
        return f"{self.first}.{self.last}.{self.segment_id}"


class DataFileName(NamedTuple):
    """Fields of a data file's name. incarnation: the topic's life from creation to deletion."""

    partition: int
    incarnation: int
    slice: ViewSlice

    @classmethod
    def from_data_file_path(cls, path: str) -> Self | None:
        found = _FILE_NAME.fullmatch(path.rpartition("/")[2])
        if found is None:
            return None
        return cls(int(found[1]), int(found[2]), ViewSlice(found[5], int(found[3]), int(found[4])))

    def file_name_with_nonce(self, nonce: str) -> str:
        """Name with a nonce of 32 hexadecimal digits that no other file has."""
        return f"{self.partition}.{self.incarnation}.{self.slice}.{nonce}.parquet"


class SnapshotReference(NamedTuple):
    """A branch or tag of a table. max_age_ms: of the snapshot that it names; None if it never expires."""

    name: str
    snapshot_id: int
    max_age_ms: int | None


class PartitionEntryInSnapshot(StrictFrozenModel):
    """One partition's rows in a snapshot.

    log_start: first offset that readers may see.
    cleaner_offset: the rows are the last values of all keys below this offset.
    leader_epochs: below the cleaner offset, with first offsets.
    slot: position in the control log of the shown state.
    empty: slices without rows, which have no file.
    checked: share of the written keys that were checked to occur once.
    """

    topic_id: str
    incarnation: int
    log_start: int
    cleaner_offset: int
    leader_epochs: tuple[tuple[int, int], ...]
    slot: int
    run: str
    empty: tuple[str, ...] = ()
    checked: float = 1.0

    @property
    def snapshot_ordering_key(self) -> SnapshotOrder:
        """Must not decrease from one snapshot to the next. Brokers may raise the log start without a new record in the control log, so that
        the slot stays the same.
        """
        return self.incarnation, self.slot, self.log_start

    def describes_same_rows(self, other: PartitionEntryInSnapshot) -> bool:
        """Not every record of the control log changes rows."""
        unimportant = {"slot", "run", "checked"}
        return self.model_dump(exclude=unimportant) == other.model_dump(exclude=unimportant)


def summary_key(partition: int) -> str:
    return f"{ENTRY_PREFIX}{partition}"


def parse_snapshot_entry(text: str | None, table_name: str) -> PartitionEntryInSnapshot | None:
    """Raises BadData if it is invalid or was written by a newer version."""
    try:
        return PartitionEntryInSnapshot.model_validate_json(text) if text else None
    except ValidationError as error:
        raise BadData(f"its summary is not valid: {error.errors()[0]['msg']}", segment=f"table {table_name}") from None


def unfinished_round_end(state: PartitionState) -> int:
    """Offset up to which a round must clean before the view is complete again; -1 if it is complete. A round that was cut off or undone in
    part has dropped values whose successors lie above the cleaner offset.
    """
    needed = max(
        (
            max(run.cut_off_offset, run.next_dirty_offset if run.status == RunHistoryStatus.REVERTED_IN_PART else -1)
            for run in state.runs
            if run.published_slot and run.status != RunHistoryStatus.REVERTED
        ),
        default=-1,
    )
    return needed if needed > first_dirty_offset_in(state.vector) else -1


def view_slices(state: PartitionState, log_start_offset: int) -> tuple[ViewSlice, ...]:
    """Slices of the compacted view, ascending."""
    end = first_dirty_offset_in(state.vector)
    slices = (
        ViewSlice(segment.id, max(segment.start_offset, log_start_offset), min(segment.end_offset, end - 1)) for segment in state.live
    )
    return tuple(each for each in slices if each.first <= each.last)


def view_snapshot_entry(state: PartitionState, log_start_offset: int) -> PartitionEntryInSnapshot:
    """Entry of the compacted view. Empty slices are known only after the files were written."""
    end = max(first_dirty_offset_in(state.vector), log_start_offset)
    shown = [run for run in state.runs if run.published_slot and run.status != RunHistoryStatus.REVERTED]
    return PartitionEntryInSnapshot(
        topic_id=state.topic_id,
        incarnation=state.incarnation,
        log_start=log_start_offset,
        cleaner_offset=end,
        leader_epochs=tuple((entry.epoch, entry.start_offset) for entry in state.lineage if entry.start_offset < end),
        slot=state.slot,
        run=max(shown, key=lambda run: run.published_slot).run_id if shown else "",
    )


def foreign_rows_error(path: str) -> BadData:
    """For a data file of another program, or one of two files with the same rows."""
    hint = "Only this program may write into the table; roll it back to a snapshot before, or drop it to have it written anew"
    return BadData("it was not written by this program, or its rows are there twice", segment=path, hint=hint)


@dataclass(frozen=True)
class TableUpdatePlan:
    """Changes of a partition's data files.

    keep, remove: paths of data files.
    empty: slices without rows.
    """

    keep: tuple[str, ...]
    remove: tuple[str, ...]
    write: tuple[ViewSlice, ...]
    empty: tuple[ViewSlice, ...]


def plan_table_update(
    partition: int,
    view_entry: PartitionEntryInSnapshot,
    slices: Sequence[ViewSlice],
    present_paths: Iterable[str],
    known_entry: PartitionEntryInSnapshot | None,
) -> TableUpdatePlan:
    """Changes from the table's current snapshot (``present_paths``, ``known_entry``) to a view (``view_entry``, ``slices``). Raises BadData
    if another program wrote a file, or two files have the same rows.
    """
    wanted = {DataFileName(partition, view_entry.incarnation, each) for each in slices}
    keep: dict[DataFileName, str] = {}
    remove: list[str] = []
    for path in present_paths:
        name = DataFileName.from_data_file_path(path)
        if name is None or name in keep:
            raise foreign_rows_error(path)
        if name in wanted:
            keep[name] = path
        else:
            remove.append(path)
    known_empty = set(known_entry.empty) if known_entry is not None and known_entry.incarnation == view_entry.incarnation else set()
    absent = [each for each in slices if DataFileName(partition, view_entry.incarnation, each) not in keep]
    return TableUpdatePlan(
        tuple(keep.values()),
        tuple(remove),
        tuple(each for each in absent if str(each) not in known_empty),
        tuple(each for each in absent if str(each) in known_empty),
    )


@dataclass(frozen=True)
class SnapshotCommitTime:
    """Commit time of one snapshot of a table.

    is_held: a branch or a tag names it, or it holds entries that no later one has.
    parent_id: None if there was none or it has expired.
    """

    snapshot_id: int
    made_ms: int
    is_held: bool
    parent_id: int | None = None


def plan_snapshot_expiry(snapshots: Iterable[SnapshotCommitTime], keep_ms: int, now_ms: int) -> SnapshotExpiryPlan:
    """A snapshot may expire ``keep_ms`` after its successor was committed, unless it is held. With a branch, it has several successors, and
    the last one counts. If it has none, because the table was rolled back, the next snapshot of the table counts.
    """
    expired, next_ms = [], None
    ordered = sorted(snapshots, key=lambda one: one.made_ms)
    followed_ms = {one.parent_id: one.made_ms for one in ordered if one.parent_id is not None}
    for one, later in pairwise(ordered):
        due_ms = followed_ms.get(one.snapshot_id, later.made_ms) + keep_ms
        if one.is_held:
            continue
        if due_ms <= now_ms:
            expired.append(one.snapshot_id)
        elif next_ms is None or due_ms < next_ms:
            next_ms = due_ms
    return expired, next_ms


def split_expired_references(
    references: Iterable[SnapshotReference], made_ms: Mapping[int, int], now_ms: int
) -> tuple[set[str], int | None]:
    """Names of the branches and tags that are older than they may become, and when the next one is. Age is that of the named snapshot
    (``made_ms``: by id), as in Iceberg's own library. The branch ``main`` never expires.
    """
    due = {
        one.name: made_ms[one.snapshot_id] + one.max_age_ms + 1
        for one in references
        if one.max_age_ms is not None and one.name != "main" and one.snapshot_id in made_ms
    }
    return {name for name, due_ms in due.items() if due_ms <= now_ms}, min((ms for ms in due.values() if ms > now_ms), default=None)
