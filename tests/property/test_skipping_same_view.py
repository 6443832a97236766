"""With and without filters readers see the same, always: random logs over several rounds, horizons passing, transactions, small budgets."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, example, given, strategies as st

from compactor.cleaner import keys as key_set
from compactor.cleaner.gate.parser import LatestRecordTable
from compactor.round import pass_one as index, roles
from tests.builders import LZ4, NONE, LogBuilder, entry, wrapper
from tests.plain_log import control_type
from tests.support.depth import examples
from tests.support.tier_cli import TierCli, batches_of, visible

RETENTION = 1_000
Seen = list[tuple[Any, ...]]


@st.composite
def additions(draw: st.DrawFn) -> list[list[tuple[Any, ...]]]:
    """What comes between two rounds, as steps per segment; keys are few in some rounds and many in others."""
    keys = draw(st.sampled_from([4, 40, 400]))
    first = draw(st.sampled_from([0, 0, 1_000]))
    step = st.one_of(
        st.tuples(
            st.just("put"),
            st.lists(st.tuples(st.integers(first, first + keys), st.sampled_from([0, 1, 1, 1, 2])), min_size=1, max_size=12),
            st.sampled_from([-1, -1, -1, 1, 2]),
            st.sampled_from([NONE, LZ4]),
        ),
        st.tuples(st.just("end"), st.integers(1, 2), st.booleans()),
        st.tuples(st.just("wrapped"), st.lists(st.integers(first, first + keys), min_size=1, max_size=30)),
        st.tuples(st.just("old"), st.integers(first, first + keys), st.booleans()),
    )
    return draw(st.lists(st.lists(step, min_size=1, max_size=4), min_size=1, max_size=4))


def add(log: LogBuilder, segments: list[list[tuple[Any, ...]]], open_: set[int], *, legacy: bool) -> None:
    for steps in segments:
        if log.segments[-1][1] or len(log.segments) == log.written:
            log.roll()
        for step in steps:
            if step[0] == "put":
                texts = [{0: f"k{key}", 1: f"k{key}={log.next_offset}", 2: f"={key}"}[kind] for key, kind in step[1]]
                log.put(*texts, pid=step[2], txn=step[2] > 0, codec=step[3])
                open_.update({step[2]} if step[2] > 0 else ())
            elif step[0] == "end":
                log.end(step[1], commit=step[2])
                open_.discard(step[1])
            elif legacy and step[0] == "wrapped":
                base, last = log.next_offset, log.next_offset + len(step[1]) - 1
                inner = [entry(1, n, f"k{key}" + ("" if key % 5 == 0 else f"={base}"), timestamp=log.time) for n, key in enumerate(step[1])]
                log.raw(wrapper(1, last, inner, LZ4, timestamp=log.time), last)
            elif legacy and step[0] == "old":
                log.raw(entry(1, log.next_offset, f"k{step[1]}" + ("" if step[2] else "=old"), timestamp=log.time), log.next_offset)
        if not log.segments[-1][1]:
            log.put("filler=1")


def seen(folder: Path) -> tuple[Seen, Seen]:
    """Every record, also those of aborted transactions, with its batch's delete horizon; every marker."""
    records, markers = [], []
    for batch in batches_of(folder):
        horizon = batch.horizon if batch.magic == 2 else None
        if batch.control:
            markers += [(batch.base_offset, control_type(batch), horizon) for _ in batch.records]
            continue
        tombstones = any(r.value is None and r.key is not None for r in batch.records)
        due = horizon if tombstones else None
        records += [(r.offset, r.timestamp, r.key, r.value, r.headers, due) for r in batch.records]
    return records, markers


def assert_none_early(markers: Seen, plain: Seen) -> None:
    """A marker may stay longer, or get its horizon later: the emptied batch before it waits for the next time that its segment is read."""
    ours = {offset: (kind, horizon) for offset, kind, horizon in markers}
    for offset, kind, horizon in plain:
        assert offset in ours, f"the marker at {offset} went too early"
        assert ours[offset][0] == kind
        later = ours[offset][1]
        assert later is None or (horizon is not None and later >= horizon), f"the marker at {offset} was dated too early"


@examples(15)
@example(
    rounds=[([[("old", 0, False)]], 0), ([[("put", [(0, 0)], -1, 0)]], 0)],
    legacy=True,
    engine="auto",
    threads=1,
    small_gate=True,
    keyless="drop",
)
@example(
    rounds=[([[("put", [(0, 0)], -1, 0)]], 0), ([[("end", 1, False)]], 0)],
    legacy=False,
    engine="partitioned",
    threads=1,
    small_gate=False,
    keyless="keep",
)
@given(
    rounds=st.lists(st.tuples(additions(), st.sampled_from([0, 1, RETENTION, 3 * RETENTION])), min_size=2, max_size=4),
    legacy=st.sampled_from([False, False, True]),
    engine=st.sampled_from(["auto", "partitioned", "changes over"]),
    threads=st.sampled_from([1, 3]),
    small_gate=st.booleans(),
    keyless=st.sampled_from(["drop", "keep"]),
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_same_view_with_and_without_filters(
    rounds: list[Any], legacy: bool, engine: str, threads: int, small_gate: bool, keyless: str
) -> None:
    """``changes over``: the estimate is wrong, and the set of keys full after some dozens."""
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        if small_gate:
            patch.setattr(index, "LatestRecordTable", lambda budget_bytes, rows: LatestRecordTable(24 * 20, rows))
        if engine == "changes over":
            patch.setattr(roles, "estimate_distinct_keys", lambda heads, records: 1)
            patch.setattr(index, "MIN_MAP_BYTES", (16 + key_set.SPACE) * key_set.ENTRY_BYTES)
            patch.setattr(key_set, "SMALLEST", 16)
        tiers = []
        for bloom in (True, False):
            cleaner = {
                "bloom": bloom,
                "delete_retention_ms": RETENTION,
                "segment_bytes": 900,
                "map_engine": "partitioned" if bloom and engine == "partitioned" else "auto",
                "min_cleanable_dirty_ratio": 0.0,
                "keyless_records": keyless,
            }
            tiers.append(
                TierCli(Path(scratch) / str(bloom), {"cleaner": cleaner, "publish": {"grace_ms": 0}, "daemon": {"threads": threads}})
            )
        log = LogBuilder()
        now, open_ = 1_000_000, set[int]()
        skipped = 0
        for number, (segments, passes) in enumerate(rounds):
            add(log, segments, open_, legacy=legacy)
            if engine == "changes over":
                log.roll()
                log.put(*(f"k{key}={number}" for key in range(50 * number, 50 * number + 120)))
            folder = log.write(Path(scratch) / f"log-{number}")
            now += passes
            rows: list[dict[str, Any]] = []
            for tier in tiers:
                tier.bring(folder)
                rows.append(tier.run("--now", now))
            event(f"{engine}: {rows[0]['map_engine']}")
            views = []
            for tier in tiers:
                out = tier.export(Path(scratch) / f"out-{number}-{tier.folder.name}")
                views.append((seen(out), visible(out)))
            for ours, plain in zip((views[0][0][0], views[0][1]), (views[1][0][0], views[1][1]), strict=True):
                assert [row for row in ours if row not in plain] == []
                assert [row for row in plain if row not in ours] == []
                assert ours == plain
            assert_none_early(views[0][0][1], views[1][0][1])
            skipped += rows[0]["segments_skipped"]
        for tier in tiers:
            tier.do("retire")
            tier.do("verify")
        event(f"segments skipped: {min(skipped, 3)}")
