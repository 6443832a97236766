"""A round of `clean`, its output damaged under right checksums and right indexes, and the gate's word on it.

Whatever is changed here, CRCs, lengths and index files fit again afterwards: only the comparison with the sources can notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from compactor.cleaner.gate.judge import Gate, GateFailed, GateReport, GateTerms
from compactor.cleaner.gate.ranges import OpenSpool
from compactor.cleaner.gate.spool import RowSpool
from compactor.cleaner.offline import CleanRequest, clean_directory, open_round
from compactor.cleaner.passes.grouping import group
from compactor.cleaner.passes.rewrite import CleanedSegment, RewritePass
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.spool_file import NO_LIMIT
from compactor.records.build import Producer, Row, batch, seal
from compactor.records.codecs import compress
from compactor.round import rewrite as worker
from tests.builders import read
from tests.plain_format import Batch, Record, read_batches, segment_paths
from tests.plain_log import indexes_of

AMPLE = 1 << 20
TINY = 1
"""Bytes of memory for eight cells, so that rows go to the disk and ranges are read in many parts."""

GATE_KEY = b"the gate's own  "


def open_spool(path: Path) -> OpenSpool:
    """On a disk that is as large as it likes."""
    return lambda ranges, part, parts: RowSpool(path, NO_LIMIT, ranges=ranges, part=part, parts=parts)


@dataclass
class Round:
    """One log directory, cleaned into another."""

    log_dir: Path
    out_dir: Path
    request: CleanRequest
    next_dirty_offset: int

    @staticmethod
    def of(log_dir: Path, out_dir: Path, request: dict[str, Any]) -> Round:
        asked = CleanRequest(**request)
        return Round(log_dir, out_dir, asked, clean_directory(log_dir, out_dir, asked).next_dirty_offset)

    def gate(self, budget_bytes: int = AMPLE) -> tuple[Gate, list[list[SourceSegment]]]:
        """A gate that has read the dirty range, and the groups to be compared."""
        opened = open_round(self.log_dir, self.request)
        rules = replace(opened.rules, latest_offset=self.next_dirty_offset - 1)
        terms = GateTerms(rules, opened.first_dirty, GATE_KEY, 1 << 24)
        gate = Gate.over(opened.sources, terms, budget_bytes, open_spool(self.out_dir.with_suffix(".gate")))
        inputs = [source for source in opened.sources if source.base < self.next_dirty_offset]
        for source in gate.dirty:
            gate.read(source)
        if gate.on_disk:
            for source in inputs:
                gate.read_below(source)
            gate.finish()
        return gate, group(inputs, self.request.segment_bytes, self.request.segment_index_bytes, opened.upper)

    def judged(self, *, end_offset: int | None = None, budget_bytes: int = AMPLE) -> list[GateReport]:
        """Raises GateFailed. ``end_offset``: where the one cleaned segment must end."""
        gate, groups = self.gate(budget_bytes)
        return [gate.check(members, self.paths(members[0].base), end_offset=end_offset) for members in groups]

    def paths(self, base: int) -> dict[str, Path]:
        log = self.out_dir / f"{base:020}.log"
        return {p.suffix[1:]: p for p in (log, *(log.with_suffix(s) for s in (".index", ".timeindex", ".txnindex"))) if p.exists()}

    def refusal(self, *, end_offset: int | None = None, budget_bytes: int = AMPLE) -> str:
        """Why the gate refuses it; empty where it does not."""
        try:
            self.judged(end_offset=end_offset, budget_bytes=budget_bytes)
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
    rows = [Row(r.offset, r.timestamp, r.key, r.value, r.headers) for r in each.records]
    body = b""
    if rows:
        plain = batch(rows, base_offset=each.base_offset, last_offset=each.last_offset, delete_horizon=each.base_timestamp)
        body = compress(each.codec, plain[61:]) if each.codec else plain[61:]
    producer = Producer(each.producer_id, each.producer_epoch, each.base_sequence)
    return seal(
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

    class Wrong(RewritePass):
        def rewrite(self, *arguments: Any, **options: Any) -> CleanedSegment:
            cleaned = super().rewrite(*arguments, **options)
            batches = damage(list(read_batches(cleaned.paths["log"].read_bytes())))
            data = b"".join(encoded(each) for each in batches)
            cleaned.paths["log"].write_bytes(data)
            index, timeindex = indexes_of(read_batches(data), cleaned.base, self.index_interval_bytes)
            cleaned.paths["index"].write_bytes(index)
            cleaned.paths["timeindex"].write_bytes(timeindex)
            return replace(cleaned, size=len(data))

    monkeypatch.setattr(worker, "RewritePass", Wrong)
