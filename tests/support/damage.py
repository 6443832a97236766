"""A round of `clean`, its output damaged under right checksums and right indexes, and the gate's word on it.

Whatever is changed here, CRCs, lengths and index files fit again afterwards: only the comparison with the sources can notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from compactor.cleaner.gate.batch_checks import GateFailed
from compactor.cleaner.gate.gate import CleanedSegmentCheckParameters, CleanedSegmentCheckReport, Gate
from compactor.cleaner.gate.parser import LatestRecordTable
from compactor.cleaner.offline import LogDirectoryWithRangeToClean, OfflineCleanOptions, clean_log_directory, open_for_round
from compactor.cleaner.rewrite import CleanedSegment, GroupRewriter, group_segments
from compactor.cleaner.source import SourceSegment
from compactor.records.codecs import compress_body
from compactor.records.encode import ProducerFields, RecordToEncode, encode_batch, prepend_batch_header
from compactor.round import pass_two as worker
from tests.builders import read
from tests.plain_format import Batch, Record, read_batches, segment_paths
from tests.plain_log import indexes_of

AMPLE = 1 << 20
TINY = 1
"""Bytes of memory for eight cells, so that the keys of one range of many are looked up."""

GATE_KEY = b"the gate's own  "


@dataclass(frozen=True, slots=True)
class _AtPoint(CleanedSegmentCheckParameters):
    """Terms that choose the range of keys."""

    fixed_point: int = 0

    @property
    @override
    def checked_hash_value(self) -> int:
        return self.fixed_point


@dataclass
class Round:
    """One log directory, cleaned into another."""

    log_dir: Path
    out_dir: Path
    request: OfflineCleanOptions
    next_dirty_offset: int

    @staticmethod
    def of(log_dir: Path, out_dir: Path, request: dict[str, Any]) -> Round:
        asked = OfflineCleanOptions(**request)
        return Round(log_dir, out_dir, asked, clean_log_directory(log_dir, out_dir, asked).next_dirty_offset)

    def gate(
        self, budget_bytes: int = AMPLE, point: int | None = None, opened: LogDirectoryWithRangeToClean | None = None
    ) -> tuple[Gate, list[list[SourceSegment]]]:
        """A gate that has read the dirty range, and the groups to be compared. ``point``: in the range of keys that is looked up."""
        opened = opened or open_for_round(self.log_dir, self.request)
        rules = replace(opened.rules, latest_offset=self.next_dirty_offset - 1)
        terms = CleanedSegmentCheckParameters(rules, opened.first_dirty, GATE_KEY, 1 << 24)
        if point is not None:
            terms = _AtPoint(rules, opened.first_dirty, GATE_KEY, 1 << 24, fixed_point=point)
        gate = Gate(terms, LatestRecordTable(budget_bytes, 10_000))
        gate.read_dirty_range(opened.sources)
        inputs = [source for source in opened.sources if source.base < self.next_dirty_offset]
        return gate, group_segments(inputs, self.request.segment_bytes, self.request.segment_index_bytes, opened.upper)

    def judged(
        self, *, end_offset: int | None = None, budget_bytes: int = AMPLE, point: int | None = None
    ) -> list[CleanedSegmentCheckReport]:
        """Raises GateFailed. ``end_offset``: where the one cleaned segment must end."""
        gate, groups = self.gate(budget_bytes, point)
        return [gate.check_cleaned_group(members, self.paths(members[0].base), end_offset=end_offset) for members in groups]

    def judged_in_turn(self, budget_bytes: int) -> list[CleanedSegmentCheckReport]:
        """One gate for each range of the keys, of as many as fit the memory, in turn: what a gate with ample memory does at once."""
        reports, point, opened = list[CleanedSegmentCheckReport](), 0, open_for_round(self.log_dir, self.request)
        while point < 2**64:
            gate, groups = self.gate(budget_bytes, point, opened)
            reports += [gate.check_cleaned_group(members, self.paths(members[0].base), end_offset=None) for members in groups]
            ranges = round(1 / gate.checked_key_share)
            point = ((point * ranges >> 64) + 1) * 2**64 // ranges
        return reports

    def paths(self, base: int) -> dict[str, Path]:
        log = self.out_dir / f"{base:020}.log"
        return {p.suffix[1:]: p for p in (log, *(log.with_suffix(s) for s in (".index", ".timeindex", ".txnindex"))) if p.exists()}

    def refusal(self, *, end_offset: int | None = None, budget_bytes: int = AMPLE) -> str:
        """Why the gate refuses it; empty where it does not. With little memory one gate after the other looks at its range of the keys."""
        try:
            if budget_bytes == AMPLE:
                self.judged(end_offset=end_offset)
            else:
                self.judged_in_turn(budget_bytes)
        except GateFailed as refused:
            return refused.cause
        return ""

    def sources(self) -> list[Batch]:
        return [each for batches in read(self.log_dir).values() for each in batches]

    def outputs(self) -> dict[int, list[Batch]]:
        return read(self.out_dir)

    def put(self, base: int, batches: Iterable[Batch]) -> None:
        """Other batches in the place of a segment's, with the indexes that they must have."""
        log = self.out_dir / f"{base:020}.log"
        data = b"".join(encoded(each) for each in batches)
        log.write_bytes(data)
        interval = self.request.index_interval_bytes
        for suffix, index in zip((".index", ".timeindex"), indexes_of(read_batches(data, check_crc=False), base, interval), strict=True):
            log.with_suffix(suffix).write_bytes(index)

    def change(self, what: Callable[[list[Batch]], list[Batch]]) -> None:
        """Changes the only cleaned segment there is."""
        (base,) = segment_paths(self.out_dir)
        self.put(base, what(self.outputs()[base]))


def encoded(each: Batch) -> bytes:
    """A batch as it is, or, where it was changed, with these header fields, these records and a right CRC."""
    if each.raw:
        return each.raw
    rows = [RecordToEncode(r.offset, r.timestamp, r.key, r.value, r.headers) for r in each.records]
    body = b""
    if rows:
        plain = encode_batch(rows, base_offset=each.base_offset, last_offset=each.last_offset, delete_horizon_ms=each.base_timestamp)
        body = compress_body(each.codec, plain[61:]) if each.codec else plain[61:]
    producer = ProducerFields(each.producer_id, each.producer_epoch, each.base_sequence)
    return prepend_batch_header(
        each.base_offset, each.last_offset - each.base_offset, each.leader_epoch, each.attributes, each.base_timestamp,
        each.max_timestamp, producer, each.count, body,
    )  # fmt: skip


def changed(each: Batch, records: Sequence[Record] | None = None, /, **fields: int) -> Batch:
    """The same batch with other records or other header fields."""
    kept = each.records if records is None else tuple(records)
    base = fields.pop("base_offset", each.base_offset)
    return replace(each, raw=b"", known_records=kept, known_base=base, count=len(kept), **fields)


def settled(each: Batch, records: Sequence[Record]) -> Batch:
    """The same batch with other records and the timestamps that a header has for them."""
    base = records[0].timestamp if records and each.horizon is None else each.base_timestamp
    highest = max((r.timestamp for r in records), default=each.max_timestamp)
    return changed(each, records, base_timestamp=base, max_timestamp=each.max_timestamp if each.append_time else highest)


Damage = Callable[[list[Batch]], list[Batch]]


def misbehave(monkeypatch: pytest.MonkeyPatch, damage: Damage) -> None:
    """What the cleaner wrote is changed on disk before anybody looks at it; CRCs and indexes fit."""

    class Wrong(GroupRewriter):
        @override
        def rewrite_group(self, *arguments: Any, **options: Any) -> CleanedSegment:
            cleaned = super().rewrite_group(*arguments, **options)
            batches = damage(list(read_batches(cleaned.paths["log"].read_bytes())))
            data = b"".join(encoded(each) for each in batches)
            cleaned.paths["log"].write_bytes(data)
            index, timeindex = indexes_of(read_batches(data), cleaned.base, self.index_interval_bytes)
            cleaned.paths["index"].write_bytes(index)
            cleaned.paths["timeindex"].write_bytes(timeindex)
            return replace(cleaned, size=len(data))

    monkeypatch.setattr(worker, "GroupRewriter", Wrong)
