"""Hypothesis writes logs; the fast cleaner must make of them what the naive one makes, with and without records that have no key."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st

from compactor.records.encode import ProducerFields, encode_batch
from tests.against_naive import compare_with_naive
from tests.builders import GZIP, LZ4, NONE, SNAPPY, ZSTD, LogBuilder, entry, snapshot, wrapper
from tests.chunking import SIZES, chunks_of
from tests.plain_format import read_batches
from tests.support.depth import examples

HOUR = 3_600_000
GATES = st.sampled_from([0, 1, 1, 200, 400, 1 << 20, 1 << 20, 1 << 20])
"""Budgets of the equivalence gate: none, room for a few keys only, room for all."""
CODECS = st.sampled_from([NONE, NONE, NONE, GZIP, SNAPPY, LZ4, ZSTD])
KEYS = st.sampled_from(["a", "b", "c", "d", "@", ""])
VALUES = st.sampled_from(["=1", "=2", "=", "", "=" + "long " * 30])
TEXTS = st.lists(st.builds(lambda key, value: key + value, KEYS, VALUES), min_size=1, max_size=5)
TIMES = st.sampled_from([1_000, 1_001, 2_000, 50_000, -1])
HEADERS = st.lists(
    st.tuples(st.sampled_from([b"h", b"", b"\xc3\xbc", b"\xed\xa0\x80", b"\xff\xfe"]), st.none() | st.binary(max_size=4)), max_size=2
)


def _data(draw: st.DrawFn, log: LogBuilder) -> None:
    texts = draw(TEXTS)
    pid = draw(st.sampled_from([-1, -1, 1, 2, 3]))
    steps = draw(st.lists(st.integers(1, 3), min_size=len(texts), max_size=len(texts)))
    offsets = [log.next_offset + sum(steps[:n]) - 1 for n in range(1, len(texts) + 1)]
    last = offsets[-1] + draw(st.sampled_from([0, 0, 0, 2]))
    log.put(
        *texts,
        pid=pid,
        txn=pid >= 0 and draw(st.booleans()),
        codec=draw(CODECS),
        headers=draw(HEADERS),
        append_time=draw(st.sampled_from([None, None, None, 7_000])),
        times=draw(st.lists(TIMES, min_size=len(texts), max_size=len(texts))),
        offsets=offsets,
        last_offset=last,
        horizon=draw(st.sampled_from([None, None, 5_000, 100_000])),
    )


def _marker(draw: st.DrawFn, log: LogBuilder) -> None:
    pid = draw(st.integers(1, 3))
    bump = draw(st.sampled_from([0, 0, 1]))
    log.end(
        pid, commit=draw(st.booleans()), epoch=log.epochs.get(pid, 0) + bump, horizon=draw(st.sampled_from([None, None, 5_000, 100_000]))
    )


def _legacy(draw: st.DrawFn, log: LogBuilder) -> None:
    magic, codec = draw(st.integers(0, 1)), draw(st.sampled_from([NONE, GZIP, SNAPPY, LZ4]))
    texts = draw(TEXTS)
    if codec == NONE:
        for text in texts:
            log.raw(
                entry(magic, log.next_offset, text, timestamp=draw(TIMES), attributes=draw(st.sampled_from([0, 8])) * magic),
                log.next_offset,
            )
        return
    base = log.next_offset
    inner_magic = magic if draw(st.integers(0, 9)) else 0
    inner = [entry(inner_magic, n if magic else base + n, text, timestamp=draw(TIMES)) for n, text in enumerate(texts)]
    if base or magic == 0 or len(texts) == 1:  # a v1 wrapper at offset 0 is read from 0, whatever it holds
        last = base + len(texts) - 1
        log.raw(wrapper(magic, last, inner, codec, timestamp=9_000, append_time=bool(magic) and draw(st.booleans())), last)


def _header_only(draw: st.DrawFn, log: LogBuilder) -> None:
    last = log.next_offset + draw(st.integers(0, 3))
    pid = draw(st.sampled_from([-1, 1, 2]))
    producer = ProducerFields(pid, log.epochs.get(pid, 0), 0, draw(st.booleans())) if pid >= 0 else ProducerFields()
    log.raw(encode_batch([], base_offset=log.next_offset, last_offset=last, producer=producer, max_timestamp=3), last)


def _gap(draw: st.DrawFn, log: LogBuilder) -> None:
    gap = draw(st.sampled_from([1, 7, 2**31 - 5]))
    if gap > 7 and log.next_offset > log.segments[-1][0]:
        log.roll()  # a broker rolls before offsets no longer fit the index
    log.skip(gap)


def _roll(draw: st.DrawFn, log: LogBuilder) -> None:
    if log.next_offset > log.segments[-1][0]:
        log.roll(log.next_offset + draw(st.sampled_from([0, 0, 3])))
        log.mtimes[log.next_offset] = draw(st.sampled_from([10 * HOUR, 10 * HOUR + 1, 20 * HOUR]))


STEPS = {"data": _data, "marker": _marker, "legacy": _legacy, "header only": _header_only, "gap": _gap, "roll": _roll}
WEIGHTED = ["data"] * 6 + ["marker"] * 3 + ["legacy"] * 2 + ["header only", "gap"] + ["roll"] * 2


@st.composite
def logs(draw: st.DrawFn) -> LogBuilder:
    log = LogBuilder(next_offset=draw(st.sampled_from([0, 0, 5, 2**33])))
    log.mtimes[log.next_offset] = 10 * HOUR
    for step in draw(st.lists(st.sampled_from(WEIGHTED), min_size=1, max_size=25)):
        if log.next_offset - log.segments[-1][0] > 2**30:
            log.roll()
        STEPS[step](draw, log)
    return log


@st.composite
def requests(draw: st.DrawFn, log: LogBuilder) -> dict[str, Any]:
    bases = [base for base, _ in log.segments]
    last = list(read_batches(b"".join(log.segments[-1][1]), check_crc=False))
    end = last[-1].last_offset + 1 if last else bases[-1] + 1  # offsets that were left out behind it belong to no log
    upper = draw(st.sampled_from([None, None, end, *bases[1:]]))
    request: dict[str, Any] = {
        "now_ms": draw(st.sampled_from([4_999, 5_000, 100_000, 10**12])),
        "delete_retention_ms": draw(st.sampled_from([0, HOUR, 10 * HOUR])),
        "segment_bytes": draw(st.sampled_from([1 << 30, 1, 400])),
        "index_interval_bytes": draw(st.sampled_from([4096, 1, 100])),
    }
    if upper is not None:
        request["first_uncleanable_offset"] = upper
    first = draw(st.sampled_from([None, None, *bases, bases[0] + 1, bases[0] + 3]))
    if first is not None and first < (end if upper is None else upper):
        request["first_dirty_offset"] = first
    if draw(st.booleans()):
        request["map_entries"] = draw(st.integers(1, 5))
    if draw(st.integers(0, 3)) == 0:
        request["high_watermark"] = draw(st.sampled_from([end + 1, bases[-1], end - 1]))
    if draw(st.integers(0, 4)) == 0:
        request["segment_index_bytes"] = 60
    if draw(st.booleans()):
        request["drops_keyless"] = False
    return request


@examples(400)
@given(st.data())
def test_fast_and_naive_cleaner_agree(data: st.DataObject) -> None:
    log = data.draw(logs())
    request = data.draw(requests(log))
    with tempfile.TemporaryDirectory() as name:
        folder = log.write(Path(name) / "log", indexes=data.draw(st.booleans()), index_interval_bytes=100)
        if data.draw(st.booleans()):
            number = data.draw(st.sampled_from([log.next_offset, *(base for base, _ in log.segments)]))
            snapshot(folder, number, [(1, log.epochs.get(1, 0), -1), (2, 0, log.segments[0][0])])
        with chunks_of(data.draw(st.sampled_from(SIZES))):
            outcome = compare_with_naive(folder, Path(name) / "out", request, threads=data.draw(st.integers(1, 3)), gate=data.draw(GATES))
    assert outcome.difference == ""
    assert bool(outcome.ours) == bool(outcome.naive), f"ours: {outcome.ours or 'cleaned'}; naive: {outcome.naive or 'cleaned'}"
