"""A failing case made small: as few batches, records and settings as still fail, told in words."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compactor.records.encode import ProducerFields, RecordToEncode, encode_batch
from tests.compare import describe, show
from tests.plain_format import Batch, Unreadable, read_batches, segment_paths

MOST_TRIALS = 600
MOST_LINES = 80


@dataclass(frozen=True)
class Case:
    """Batches by segment (base, modification time, raw batches), and what is asked. Indexes are left to be rebuilt."""

    segments: tuple[tuple[int, int, tuple[bytes, ...]], ...]
    request: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def load(folder: Path, request: dict[str, Any]) -> Case:
        found = []
        for base, path in segment_paths(folder).items():
            batches = tuple(each.raw for each in read_batches(path.read_bytes(), check_crc=False))
            found.append((base, path.stat().st_mtime_ns, batches))
        return Case(tuple(found), dict(request))

    def write(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for base, mtime, batches in self.segments:
            path = folder / f"{base:020}.log"
            path.write_bytes(b"".join(batches))
            os.utime(path, ns=(mtime, mtime))
        return folder

    def batches(self) -> int:
        return sum(len(batches) for _, _, batches in self.segments)

    def words(self) -> str:
        lines = [f"clean with {', '.join(f'{name}={value}' for name, value in self.request.items())}"]
        for base, mtime, batches in self.segments:
            lines.append(f"segment {base}, modified {mtime // 1_000_000}:")
            for each in read_batches(b"".join(batches), check_crc=False):
                lines.append(f"  {describe(each)}, {len(each.raw)} bytes")
                lines += _records(each)
        left_out = [f"... {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
        return "\n".join(lines[:MOST_LINES] + left_out)


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Greedy: whatever can go while the case still fails goes. ``case`` itself must fail."""
    trials = 0
    changed = True
    while changed and trials < MOST_TRIALS:
        changed = False
        for candidate in _smaller(case):
            trials += 1
            if trials > MOST_TRIALS:
                break
            if fails(candidate):
                case, changed = candidate, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    yield from _without_batches(case)
    yield from _with_fewer_segments(case)
    for name in case.request:
        if name != "now_ms":
            yield replace(case, request={key: value for key, value in case.request.items() if key != name})
    if case.batches() <= 12:
        yield from _with_simpler_batches(case)


def _without_batches(case: Case) -> Iterator[Case]:
    total = case.batches()
    run = total // 2
    while run >= 1:
        for first in range(0, total, run):
            number, kept = 0, []
            for base, mtime, batches in case.segments:
                rest = tuple(raw for at, raw in enumerate(batches, start=number) if not first <= at < first + run)
                number += len(batches)
                kept.append((base, mtime, rest))
            yield replace(case, segments=tuple(kept))
        run //= 2


def _with_fewer_segments(case: Case) -> Iterator[Case]:
    for at, (_, _, batches) in enumerate(case.segments):
        others = case.segments[:at] + case.segments[at + 1 :]
        if not batches and others:
            yield replace(case, segments=others)
        if at:
            before = case.segments[at - 1]
            merged = (before[0], before[1], before[2] + batches)
            yield replace(case, segments=(*case.segments[: at - 1], merged, *case.segments[at + 1 :]))


def _with_simpler_batches(case: Case) -> Iterator[Case]:
    for at, (base, mtime, batches) in enumerate(case.segments):
        for number, raw in enumerate(batches):
            for simpler in _simpler(raw):
                new = (*batches[:number], simpler, *batches[number + 1 :])
                yield replace(case, segments=(*case.segments[:at], (base, mtime, new), *case.segments[at + 1 :]))


def _simpler(raw: bytes) -> Iterator[bytes]:
    """The batch uncompressed, with fewer records, with short values: only magic 2, whose encoder is at hand."""
    (each,) = read_batches(raw, check_crc=False)
    if each.magic != 2 or each.control:
        return
    try:
        rows = [RecordToEncode(*record) for record in each.records]
    except Unreadable:
        return
    for fewer in (rows[: len(rows) // 2], rows[len(rows) // 2 :], *(rows[:n] + rows[n + 1 :] for n in range(len(rows)))):
        if fewer and len(fewer) < len(rows):
            yield _again(each, fewer)
    short = [row._replace(value=row.value and row.value[:1], headers=()) for row in rows]
    if each.codec or short != rows:
        yield _again(each, short)


def _again(each: Batch, rows: list[RecordToEncode]) -> bytes:
    return encode_batch(
        rows,
        producer=ProducerFields(each.producer_id, each.producer_epoch, each.base_sequence, each.transactional),
        leader_epoch=each.leader_epoch,
        base_offset=each.base_offset,
        last_offset=each.last_offset,
        append_time_ms=each.max_timestamp if each.append_time else None,
        delete_horizon_ms=each.horizon,
    )


def _records(each: Batch) -> list[str]:
    try:
        return [
            f"    {r.offset} at {r.timestamp}: {show(r.key)} = {show(r.value)}" + (f", headers {r.headers}" if r.headers else "")
            for r in each.records
        ]
    except Unreadable as error:
        return [f"    records unreadable: {error}"]
