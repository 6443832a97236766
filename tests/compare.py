"""Are two directories of cleaned segments the same, as far as they can be? Says in words where they are not.

    python -m tests.compare EXPECTED_DIR ACTUAL_DIR

Bytes must be equal wherever nothing was recompressed. A recompressed batch may differ in its compressed body, hence in length
and CRC; every other header field and every record must be equal. Index files must be equal where the positions are, and in any
case be the ones that belong to their own log. The transaction index, modification times and the set of files count too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

from tests.plain_format import NAMES, Batch, Record, Unreadable, read_batches, segment_paths
from tests.plain_log import indexes_of


def directories_differ(expected: Path, actual: Path, *, index_interval_bytes: int | None = None, mtimes: bool = True) -> str:
    """Empty when they are the same, else the first difference. ``index_interval_bytes``: judge our own indexes, too."""
    return next(_differences(expected, actual, index_interval_bytes, mtimes), "")


def batches_differ(expected: Iterable[Batch], actual: Iterable[Batch]) -> str:
    """Compares contents; bytes too where the expected batch has any and is not compressed."""
    for number, (one, two) in enumerate(zip_longest(expected, actual)):
        if one is None or two is None:
            batch, side = (one, "expected") if two is None else (two, "actual")
            return f"batch {number}, {describe(batch)}: only in the {side} segment"
        words = _batch_difference(one, two)
        if words:
            return f"batch {number}, {describe(one)}: {words}"
    return ""


def segments_differ(expected: Mapping[int, list[Batch]], actual: Mapping[int, list[Batch]]) -> str:
    if list(expected) != list(actual):
        return f"segments: expected {list(expected)}, actual {list(actual)}"
    for base in expected:
        words = batches_differ(expected[base], actual[base])
        if words:
            return f"segment {base}: {words}"
    return ""


def describe(batch: Batch) -> str:
    """A batch in a few words, for people who look at a failing case."""
    kind = "marker" if batch.control else "data"
    parts = [f"[{batch.base_offset}..{batch.last_offset}] v{batch.magic} {NAMES[batch.codec] if batch.codec < 5 else batch.codec} {kind}"]
    if batch.producer_id >= 0:
        parts.append(f"producer {batch.producer_id} epoch {batch.producer_epoch} sequence {batch.base_sequence}")
    parts += [word for word, on in (("transactional", batch.transactional), ("append time", batch.append_time)) if on]
    if batch.horizon is not None:
        parts.append(f"horizon {batch.horizon}")
    return ", ".join(parts)


def show(value: object) -> str:
    text = repr(value[:40] if isinstance(value, bytes) else value)
    return f"{text}... ({len(value)} bytes)" if isinstance(value, bytes) and len(value) > 40 else text


def _differences(expected: Path, actual: Path, interval: int | None, mtimes: bool) -> Iterator[str]:
    ours, theirs = segment_paths(actual), segment_paths(expected)
    if list(ours) != list(theirs):
        yield f"segments: expected {list(theirs)}, actual {list(ours)}"
        return
    for base, path in theirs.items():
        yield from (f"segment {base}: {words}" for words in _segment_differences(path, ours[base], base, interval, mtimes))


def _segment_differences(theirs: Path, ours: Path, base: int, interval: int | None, mtimes: bool) -> Iterator[str]:
    data = ours.read_bytes()
    same_bytes = theirs.read_bytes() == data
    if not same_bytes:
        words = batches_differ(read_batches(theirs.read_bytes()), read_batches(data))
        if words:
            yield words
    if _bytes(theirs, ".txnindex") != _bytes(ours, ".txnindex"):
        yield f"transaction index: expected {_bytes(theirs, '.txnindex').hex()}, actual {_bytes(ours, '.txnindex').hex()}"
    if interval is not None:
        rebuilt = dict(zip((".index", ".timeindex"), indexes_of(read_batches(data), base, interval), strict=True))
        for suffix, content in rebuilt.items():
            if same_bytes and _bytes(theirs, suffix) != _bytes(ours, suffix):
                yield f"{suffix}: expected {_bytes(theirs, suffix).hex()}, actual {_bytes(ours, suffix).hex()}"
            if content != _bytes(ours, suffix):
                yield f"{suffix}: {_bytes(ours, suffix).hex()} is not the index of its own log, {content.hex()}"
    if mtimes and _mtime(theirs) != _mtime(ours):
        yield f"modification time: expected {_mtime(theirs)}, actual {_mtime(ours)}"


def _batch_difference(one: Batch, two: Batch) -> str:
    if one.raw and two.raw and one.raw == two.raw:
        return ""
    try:
        expected, actual = one.content(), two.content()
    except Unreadable as error:
        return f"not comparable: {error}"
    for field, value in expected.items():
        if actual[field] == value:
            continue
        if field == "records":
            return _record_difference(one.records, two.records)
        return f"{field}: expected {value}, actual {actual[field]}"
    if one.raw and two.raw and (not one.codec or one.magic < 2):
        return f"the content is the same, the bytes are not: expected {one.raw.hex()}, actual {two.raw.hex()}"
    return ""


def _record_difference(expected: tuple[Record, ...], actual: tuple[Record, ...]) -> str:
    for one, two in zip_longest(expected, actual):
        if one is None or two is None:
            record, side = (one, "expected") if two is None else (two, "actual")
            return f"record {record.offset}, key {show(record.key)}: only in the {side} batch"
        for field in Record._fields:
            if getattr(one, field) != getattr(two, field):
                return f"record {one.offset}, {field}: expected {show(getattr(one, field))}, actual {show(getattr(two, field))}"
    return ""


def _bytes(log: Path, suffix: str) -> bytes:
    path = log.with_suffix(suffix)
    return path.read_bytes() if path.exists() else b""


def _mtime(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


if __name__ == "__main__":
    difference = directories_differ(Path(sys.argv[1]), Path(sys.argv[2]))
    print(difference or "same")
    sys.exit(bool(difference))
