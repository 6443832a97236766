"""Bundles of pass 1: grouping of segments, the result of indexing them, and its encoding.

A task stores its result in the tail of the object that it writes, and also returns it. A round that resumes after a crash reads the
tails instead of the segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.cleaner.keys.disk_map import KEY_ROW_BYTES
from compactor.errors import BadData
from compactor.model.keyless import KeylessRecords
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import BatchTable, Int64s
from compactor.records.indexes import TXN_ENTRY, TxnEntries
from compactor.spark.round.exchange import Arrays, StoredKeyRows
from compactor.spark.round.gate_rows import StoredGateRows

BUNDLES_PER_SLOT: Final = 2
MAX_BUNDLE_BYTES: Final = 16 << 30
"""Largest bundle. A killed executor loses one bundle; larger bundles need fewer requests per range."""

MAX_BUNDLE_RECORDS: Final = 1 << 31
"""Most records in a bundle, because ordinals have 32 bits."""

MIN_RECORD_BYTES: Final = 7
"""Smallest size of a record in a v2 batch."""
IndexRange = tuple[int, int]
"""Range of indexes [begin, end)."""


@dataclass(frozen=True)
class PassOneResultOfSegment:
    """Result of pass 1 (finding the survivors) for one segment.

    table: headers of only those batches that belong to transactions or are control batches.
    places: the batch numbers of these headers. batches: number of all batches.
    undecided: whether keys can be indexed only once it is known which transactions were aborted.
    first, ordinals: the key rows of the segment have the numbers [first, first + ordinals) within the object that holds the rows of all
        segments of a task; ``first`` is -1 if no keys were indexed.
    rows: number of key rows; smaller than ``ordinals`` if some records have no key.
    keyless: of the segment's records in the dirty range, those without a key.
    """

    id: str
    batches: int
    places: npt.NDArray[np.int64]
    table: BatchTable
    txn_entries: TxnEntries
    undecided: bool
    first: int = -1
    ordinals: int = 0
    rows: int = 0
    keyless: KeylessRecords = KeylessRecords()  # noqa: RUF009 - frozen

    @property
    def has_key_rows(self) -> bool:
        """Return whether keys of the segment were indexed."""
        return self.first >= 0


@dataclass(frozen=True)
class BatchScanSummary:
    """Facts about each batch of a segment, found while its records were scanned.

    tombstones: by batch, whether it contains a tombstone.
    counts: by batch, the number of its records; empty if the batch headers state it.
    keyless: by batch, the number of its records without a key; empty if all have one.
    """

    tombstones: npt.NDArray[np.bool_]
    counts: Int64s
    keyless: Int64s


@dataclass(frozen=True)
class PassOneResultOfSegmentBundle:
    """Result of one pass 1 task over a bundle (neighbouring segments that one task reads).

    keys: where the bundle's key rows (key hash and row number of each record) are stored; None if no keys were wanted.
    gate: where the rows for the gate (the independent check of the output) are stored; None without a gate.
    """

    segments: tuple[PassOneResultOfSegment, ...]
    keys: StoredKeyRows | None
    gate: StoredGateRows | None = None


@dataclass(frozen=True)
class RowNumberRange:
    """Range of row numbers [first, end) within one bundle (the rows of neighbouring segments that one task has read).

    place: index of the bundle.
    """

    place: int
    first: int
    end: int


def record_count_upper_bound_of_segment(segment: RemoteLogSegmentMetadata) -> int:
    """Return an upper bound of a segment's record count, because brokers do not report the count."""
    return segment.records or min(segment.end_offset - segment.start_offset + 1, segment.size_bytes // MIN_RECORD_BYTES + 1)


def plan_segment_bundles(
    segments: Sequence[RemoteLogSegmentMetadata], task_slots: int, disk_bytes: int, row_bytes_per_record: int = KEY_ROW_BYTES
) -> list[IndexRange]:
    """Divide segments into bundles (neighbours that one task reads) of about equal bytes, BUNDLES_PER_SLOT of them for each task slot of
    the cluster. Return each bundle as a range of indexes [begin, end) of ``segments``.

    :param task_slots: number of tasks that run at the same time.
    :param disk_bytes: disk budget of one task; it must hold one segment and the bundle's rows twice, because they are sorted.
    :param row_bytes_per_record: bytes of rows per record, including the rows for the gate (the independent check of the output).
    """
    sizes = np.array([max(1, segment.size_bytes) for segment in segments], np.int64)
    records = np.array([record_count_upper_bound_of_segment(segment) for segment in segments], np.int64)
    if not len(sizes):
        return []
    ideal = min(MAX_BUNDLE_BYTES, -(-int(sizes.sum()) // (task_slots * BUNDLES_PER_SLOT)))
    space = max(1, min(MAX_BUNDLE_RECORDS, (disk_bytes - 2 * int(sizes.max())) // (2 * row_bytes_per_record)))
    runs: list[tuple[int, int]] = []
    begin, size, rows = 0, 0, 0
    for place in range(len(sizes)):
        # A segment goes to the run in which its middle lies.
        if place > begin and (size + int(sizes[place]) // 2 >= ideal or rows + int(records[place]) > space):
            runs.append((begin, place))
            begin, size, rows = place, 0, 0
        size += int(sizes[place])
        rows += int(records[place])
    return [*runs, (begin, len(sizes))]


def merge_segments_into_row_number_ranges(
    indexed_segments_newest_first: Sequence[tuple[int, PassOneResultOfSegment]],
) -> tuple[RowNumberRange, ...]:
    """Return the ranges of row numbers that belong to these segments, newest first.

    Neighbours in one bundle (the segments that one task has read) are merged, so most bundles have a single range.

    :param indexed_segments_newest_first: (bundle index, segment) pairs.
    """
    found: list[RowNumberRange] = []
    for place, segment in indexed_segments_newest_first:
        last = found[-1] if found else None
        if last is not None and last.place == place and last.end <= segment.first:
            found[-1] = RowNumberRange(place, last.first, segment.first + segment.ordinals)
        else:
            found.append(RowNumberRange(place, segment.first, segment.first + segment.ordinals))
    return tuple(found)


# ---- the tail of a bundle ---------------------------------------------------------------------------------------------------

_TABLE_COLUMNS: Final = BatchTable._fields


def encode_pass_one_result_of_bundle(bundle: PassOneResultOfSegmentBundle, scan_summaries: Mapping[str, BatchScanSummary]) -> Arrays:
    """Encode the result of a pass 1 task as arrays, which ``decode_pass_one_result_of_bundle`` and ``decode_scan_summaries`` restore.

    :param bundle: the result for the segments that the task has read.
    :param scan_summaries: facts about batches by segment id, for the segments whose keys were indexed.
    """
    segments, keys, gate = bundle.segments, bundle.keys, bundle.gate
    some = [scan_summaries[segment.id] for segment in segments if segment.has_key_rows]
    numbers = {name: np.array([getattr(segment, name) for segment in segments], np.int64) for name in _NUMBER_FIELDS}
    return {
        "ids": _encode_lines([segment.id for segment in segments]),
        **numbers,
        "lengths": np.array([(len(segment.places), len(segment.txn_entries)) for segment in segments], np.int64).reshape(-1, 2),
        "places": _concatenate_arrays([segment.places for segment in segments], np.int64),
        "txn_entries": _concatenate_arrays([np.frombuffer(segment.txn_entries.tobytes(), np.uint8) for segment in segments], np.uint8),
        **{f"table_{name}": np.concatenate([getattr(segment.table, name) for segment in segments]) for name in _TABLE_COLUMNS},
        "keys": np.array([keys.ranges, keys.ordinals, keys.dirty_rows, keys.clean_rows] if keys else [], np.int64),
        "gate": _encode_lines([gate.key] if gate else []),
        "gate_rows": np.array([gate.size, gate.ranges, gate.dirty_rows, gate.rows_below] if gate else [], np.int64),
        "tombstones": np.packbits(np.concatenate([np.empty(0, np.bool_), *(fact.tombstones for fact in some)])),
        "counted": np.array([len(fact.counts) for fact in some], np.int64),
        "counts": _concatenate_arrays([fact.counts for fact in some], np.int64),
        "keyless_counted": np.array([len(fact.keyless) for fact in some], np.int64),
        "keyless": _concatenate_arrays([fact.keyless for fact in some], np.int64),
        "keyless_records": np.array(
            [(segment.keyless.count, segment.keyless.records, segment.keyless.last_offset) for segment in segments], np.int64
        ).reshape(-1, 3),
    }  # fmt: skip


_NUMBER_FIELDS: Final = ("batches", "undecided", "first", "ordinals", "rows")


def decode_pass_one_result_of_bundle(stored_arrays: Arrays, object_key: str, object_bytes: int) -> PassOneResultOfSegmentBundle:
    """Restore the result of a pass 1 task from the arrays that are stored at the end of its scratch object.

    :param object_key: key of the scratch object.
    :param object_bytes: its size in bytes.
    :raises BadData: if another version wrote the arrays.
    """
    if "keyless_records" not in stored_arrays:
        raise BadData("the end of a scratch object is of another version", segment=object_key, hint="Run it again")
    places, entries = np.cumsum(stored_arrays["lengths"], axis=0).T if len(stored_arrays["lengths"]) else np.zeros((2, 0), np.int64)
    segments = []
    for at, name in enumerate(_decode_lines(stored_arrays["ids"])):
        begins = (int(places[at - 1]), int(entries[at - 1])) if at else (0, 0)
        some = slice(begins[0], int(places[at]))
        raw = stored_arrays["txn_entries"][begins[1] * TXN_ENTRY.itemsize : int(entries[at]) * TXN_ENTRY.itemsize]
        batches, undecided, first, ordinals, rows = (int(stored_arrays[number][at]) for number in _NUMBER_FIELDS)
        table = BatchTable(**{column: stored_arrays[f"table_{column}"][some] for column in _TABLE_COLUMNS})
        txn = np.frombuffer(raw.tobytes(), TXN_ENTRY)
        count, records, last = (int(number) for number in stored_arrays["keyless_records"][at])
        keyless = KeylessRecords(count=count, records=records, last_offset=last)
        segments.append(
            PassOneResultOfSegment(
                name, batches, stored_arrays["places"][some], table, txn, bool(undecided), first, ordinals, rows, keyless
            )
        )
    ranges, ordinals, dirty, clean = (int(number) for number in stored_arrays["keys"])
    gate = [StoredGateRows(name, *(int(number) for number in stored_arrays["gate_rows"])) for name in _decode_lines(stored_arrays["gate"])]
    return PassOneResultOfSegmentBundle(
        tuple(segments), StoredKeyRows(object_key, object_bytes, ranges, ordinals, dirty, clean), gate[0] if gate else None
    )


def decode_scan_summaries(stored_arrays: Arrays) -> dict[str, BatchScanSummary]:
    """Restore the facts about batches, by segment id, for the segments whose keys were indexed."""
    names = [name for name, first in zip(_decode_lines(stored_arrays["ids"]), stored_arrays["first"], strict=True) if first >= 0]
    batches = stored_arrays["batches"][stored_arrays["first"] >= 0]
    flags = np.split(np.unpackbits(stored_arrays["tombstones"], count=int(batches.sum())).astype(np.bool_), np.cumsum(batches)[:-1])
    counts = np.split(stored_arrays["counts"], np.cumsum(stored_arrays["counted"])[:-1])
    keyless = np.split(stored_arrays["keyless"], np.cumsum(stored_arrays["keyless_counted"])[:-1])
    return {name: BatchScanSummary(*columns) for name, *columns in zip(names, flags, counts, keyless, strict=False)}


def _concatenate_arrays(parts: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    """Return the arrays joined to one; an empty array of type ``dtype`` if there are none."""
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _encode_lines(lines: list[str]) -> npt.NDArray[np.uint8]:
    """Return text lines as bytes in an array."""
    return np.frombuffer("\n".join(lines).encode(), np.uint8)


def _decode_lines(text: npt.NDArray[np.uint8]) -> list[str]:
    """Return the text lines that ``_encode_lines`` has turned into bytes."""
    return text.tobytes().decode().split("\n") if len(text) else []


# ---- survivors of a bundle --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredSurvivorLocations:
    """Position, size and SHA-256 of each segment's surviving records within one scratch object, by segment id."""

    parts: Mapping[str, tuple[int, int, str]]

    def encode_locations_as_arrays(self) -> Arrays:
        """Return the locations as arrays, which are stored at the end of the scratch object."""
        places = np.array([part[:2] for part in self.parts.values()], np.int64).reshape(-1, 2)
        digests = b"".join(bytes.fromhex(part[2]) for part in self.parts.values())
        return {"ids": _encode_lines(list(self.parts)), "places": places, "sha256": np.frombuffer(digests, np.uint8)}

    @staticmethod
    def decode_locations_from_arrays(stored_arrays: Arrays) -> StoredSurvivorLocations:
        """Restore the locations from the arrays that are stored at the end of the scratch object."""
        parts = zip(_decode_lines(stored_arrays["ids"]), stored_arrays["places"], stored_arrays["sha256"].reshape(-1, 32), strict=True)
        return StoredSurvivorLocations({name: (int(place[0]), int(place[1]), digest.tobytes().hex()) for name, place, digest in parts})
