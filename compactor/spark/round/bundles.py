"""Bundles of pass 1: which segments go together, what is known of each afterwards, in which order their rows are looked at.

What a task found out lies in the tail of the object that it wrote, as well as in its answer: whoever takes up a round that broke off
reads tails instead of segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.cleaner.keys.buckets import ROW_BYTES
from compactor.errors import BadData
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import BatchTable, Int64s
from compactor.records.indexes import TXN_ENTRY, TxnEntries
from compactor.spark.round.exchange import Arrays, KeyBundle
from compactor.spark.round.gate import GateBundle

BUNDLES_PER_SLOT: Final = 2
MOST_BYTES: Final = 16 << 30
"""A bundle is what a killed executor loses, and what one task reads; the fewer there are, the fewer requests each range makes."""

MOST_RECORDS: Final = 1 << 31
"""Ordinals have 32 bits."""

FEWEST_RECORD_BYTES: Final = 7
"""What a record takes at least in a v2 batch."""


@dataclass(frozen=True)
class Indexed:
    """What pass 1 says of a segment. ``table``: only the batches that decide about transactions, at ``places`` of ``batches``.

    Its keys have ``rows`` rows in the bundle, with ordinals from ``first`` on, below ``first + ordinals``. ``first`` is -1 where the keys
    were not wanted, or have to wait for the verdicts (``undecided``).
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

    @property
    def has_rows(self) -> bool:
        return self.first >= 0


@dataclass(frozen=True)
class RowFacts:
    """Per batch of a segment with rows: whether a tombstone is in it; ``counts``: rows where a header does not tell (else empty)."""

    tombstones: npt.NDArray[np.bool_]
    counts: Int64s


@dataclass(frozen=True)
class IndexedBundle:
    """The answer of one task of pass 1. ``keys`` None: no keys were wanted. ``gate``: what the gate saw."""

    segments: tuple[Indexed, ...]
    keys: KeyBundle | None
    gate: GateBundle | None = None


@dataclass(frozen=True)
class Neighbours:
    """Rows of bundle ``place`` with ordinals in [first, end): neighbouring segments of one bundle."""

    place: int
    first: int
    end: int


def records_of(segment: RemoteLogSegmentMetadata) -> int:
    """How many it has at most: brokers do not say how many it has."""
    return segment.records or min(segment.end_offset - segment.start_offset + 1, segment.size_bytes // FEWEST_RECORD_BYTES + 1)


def bundled(segments: Sequence[RemoteLogSegmentMetadata], slots: int, disk_bytes: int, row_bytes: int = ROW_BYTES) -> list[tuple[int, int]]:
    """Which neighbours go together, as [begin, end): runs of about equal bytes, some for each slot, within what one task has room for.

    :param disk_bytes: for the rows of a bundle, which lie there twice while they are sorted, and one segment.
    :param row_bytes: of a record, the gate's included.
    """
    sizes = np.array([max(1, segment.size_bytes) for segment in segments], np.int64)
    records = np.array([records_of(segment) for segment in segments], np.int64)
    if not len(sizes):
        return []
    ideal = min(MOST_BYTES, -(-int(sizes.sum()) // (slots * BUNDLES_PER_SLOT)))
    room = max(1, min(MOST_RECORDS, (disk_bytes - 2 * int(sizes.max())) // (2 * row_bytes)))
    runs: list[tuple[int, int]] = []
    begin, size, rows = 0, 0, 0
    for place in range(len(sizes)):
        # A segment goes to the run in which its middle lies.
        if place > begin and (size + int(sizes[place]) // 2 >= ideal or rows + int(records[place]) > room):
            runs.append((begin, place))
            begin, size, rows = place, 0, 0
        size += int(sizes[place])
        rows += int(records[place])
    return [*runs, (begin, len(sizes))]


def pieces(newest_first: Sequence[tuple[int, Indexed]]) -> tuple[Neighbours, ...]:
    """The rows of segments, each with its bundle's place: of neighbours in one bundle at once, so that most bundles are one piece."""
    found: list[Neighbours] = []
    for place, segment in newest_first:
        last = found[-1] if found else None
        if last is not None and last.place == place and last.end <= segment.first:
            found[-1] = Neighbours(place, last.first, segment.first + segment.ordinals)
        else:
            found.append(Neighbours(place, segment.first, segment.first + segment.ordinals))
    return tuple(found)


# ---- the tail of a bundle ---------------------------------------------------------------------------------------------------

_TABLE: Final = tuple(field.name for field in fields(BatchTable))


def tail_of(bundle: IndexedBundle, facts: Mapping[str, RowFacts]) -> Arrays:
    """Everything that ``bundle_from`` and ``facts_from`` want to know. ``facts``: of the segments with rows, by id."""
    segments, keys, gate = bundle.segments, bundle.keys, bundle.gate
    some = [facts[segment.id] for segment in segments if segment.has_rows]
    numbers = {name: np.array([getattr(segment, name) for segment in segments], np.int64) for name in _NUMBERS}
    return {
        "ids": _text([segment.id for segment in segments]),
        **numbers,
        "lengths": np.array([(len(segment.places), len(segment.txn_entries)) for segment in segments], np.int64).reshape(-1, 2),
        "places": _joined([segment.places for segment in segments], np.int64),
        "txn_entries": _joined([np.frombuffer(segment.txn_entries.tobytes(), np.uint8) for segment in segments], np.uint8),
        **{f"table_{name}": np.concatenate([getattr(segment.table, name) for segment in segments]) for name in _TABLE},
        "keys": np.array([keys.ranges, keys.ordinals, keys.dirty_rows, keys.clean_rows] if keys else [], np.int64),
        "gate": _text([gate.key] if gate else []),
        "gate_rows": np.array([gate.size, gate.ranges, gate.dirty_rows, gate.rows_below] if gate else [], np.int64),
        "tombstones": np.packbits(np.concatenate([np.empty(0, np.bool_), *(fact.tombstones for fact in some)])),
        "counted": np.array([len(fact.counts) for fact in some], np.int64),
        "counts": _joined([fact.counts for fact in some], np.int64),
    }  # fmt: skip


_NUMBERS: Final = ("batches", "undecided", "first", "ordinals", "rows")


def bundle_from(tail: Arrays, key: str, size: int) -> IndexedBundle:
    """What the task answered. Raises BadData where another version wrote it."""
    if "gate_rows" not in tail:
        raise BadData("the end of a scratch object is of another version", segment=key, hint="Run it again")
    places, entries = np.cumsum(tail["lengths"], axis=0).T if len(tail["lengths"]) else np.zeros((2, 0), np.int64)
    segments = []
    for at, name in enumerate(_lines(tail["ids"])):
        begins = (int(places[at - 1]), int(entries[at - 1])) if at else (0, 0)
        some = slice(begins[0], int(places[at]))
        raw = tail["txn_entries"][begins[1] * TXN_ENTRY.itemsize : int(entries[at]) * TXN_ENTRY.itemsize]
        batches, undecided, first, ordinals, rows = (int(tail[number][at]) for number in _NUMBERS)
        table = BatchTable(**{column: tail[f"table_{column}"][some] for column in _TABLE})
        txn = np.frombuffer(raw.tobytes(), TXN_ENTRY)
        segments.append(Indexed(name, batches, tail["places"][some], table, txn, bool(undecided), first, ordinals, rows))
    ranges, ordinals, dirty, clean = (int(number) for number in tail["keys"])
    gate = [GateBundle(name, *(int(number) for number in tail["gate_rows"])) for name in _lines(tail["gate"])]
    return IndexedBundle(tuple(segments), KeyBundle(key, size, ranges, ordinals, dirty, clean), gate[0] if gate else None)


def facts_from(tail: Arrays) -> dict[str, RowFacts]:
    """By segment id, of those with rows."""
    names = [name for name, first in zip(_lines(tail["ids"]), tail["first"], strict=True) if first >= 0]
    batches = tail["batches"][tail["first"] >= 0]
    flags = np.split(np.unpackbits(tail["tombstones"], count=int(batches.sum())).astype(np.bool_), np.cumsum(batches)[:-1])
    counts = np.split(tail["counts"], np.cumsum(tail["counted"])[:-1])
    return {name: RowFacts(*both) for name, *both in zip(names, flags, counts, strict=False)}


def _joined(parts: list[npt.NDArray[np.generic]], kind: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.concatenate(parts) if parts else np.empty(0, kind)


def _text(lines: list[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer("\n".join(lines).encode(), np.uint8)


def _lines(text: npt.NDArray[np.uint8]) -> list[str]:
    return text.tobytes().decode().split("\n") if len(text) else []


# ---- survivors of a bundle --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartsOf:
    """Where in one object the survivors of each segment lie, by id: (position, size, SHA-256)."""

    parts: Mapping[str, tuple[int, int, str]]

    def tail(self) -> Arrays:
        places = np.array([part[:2] for part in self.parts.values()], np.int64).reshape(-1, 2)
        digests = b"".join(bytes.fromhex(part[2]) for part in self.parts.values())
        return {"ids": _text(list(self.parts)), "places": places, "sha256": np.frombuffer(digests, np.uint8)}

    @staticmethod
    def of(tail: Arrays) -> PartsOf:
        parts = zip(_lines(tail["ids"]), tail["places"], tail["sha256"].reshape(-1, 32), strict=True)
        return PartsOf({name: (int(place[0]), int(place[1]), digest.tobytes().hex()) for name, place, digest in parts})
