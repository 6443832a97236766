"""Segments that are read in part come out as if they had been read whole: random logs over several rounds, each round done both ways."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, event, given, strategies as st

from compactor.storage.local import LocalStore
from compactor.storage.port import CopyLimits
from tests.builders import LZ4, NONE, LogBuilder
from tests.support.depth import examples
from tests.support.splices import live_objects, run_whole_on_copy, small_copies
from tests.support.tier_cli import TierCli, contents

RETENTION = 1_000

BATCH = st.one_of(
    st.tuples(
        st.just("put"),
        st.lists(st.tuples(st.integers(0, 400), st.sampled_from([0, 1, 1, 1, 1, 1, 2])), min_size=1, max_size=12),
        st.sampled_from([-1, -1, -1, -1, 1, 2]),
        st.sampled_from([NONE, LZ4]),
    ),
    st.tuples(st.just("end"), st.integers(1, 2), st.sampled_from([True, True, True, False])),
    st.tuples(st.just("gap"), st.integers(1, 20), st.just(0)),
)
FIRST = st.lists(BATCH, min_size=15, max_size=60)
LATER = st.lists(BATCH, min_size=1, max_size=4)


def add(log: LogBuilder, steps: list[Any]) -> None:
    if log.segments[-1][1]:
        log.roll()
    for step in steps:
        if step[0] == "put":
            texts = [{0: f"k{key}", 1: f"k{key}={log.next_offset}{'v' * 30}", 2: f"={key}"}[kind] for key, kind in step[1]]
            log.put(*texts, pid=step[2], txn=step[2] > 0, codec=step[3])
        elif step[0] == "end":
            log.end(step[1], commit=step[2])
        else:
            log.skip(step[1])
    for producer in (1, 2):
        log.end(producer, commit=True)
    log.put(f"last={log.next_offset}")


@examples(12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    first=FIRST,
    rounds=st.lists(st.tuples(LATER, st.sampled_from([0, 1, RETENTION + 1])), min_size=1, max_size=3),
    least=st.sampled_from([0, 0, 400]),
    threads=st.sampled_from([1, 2]),
    keyless=st.sampled_from(["drop", "keep"]),
)
@pytest.mark.timeout(900)
def test_parts_come_out_as_wholes(first: list[Any], rounds: list[Any], least: int, threads: int, keyless: str) -> None:
    """``least``: bytes of the shortest range that the store copies, as S3 has such a bound."""
    with tempfile.TemporaryDirectory() as scratch, small_copies(150) as patch:
        patch.setattr(LocalStore, "server_copy_limits", property(lambda store: CopyLimits(least, 1 << 30)))
        folder = Path(scratch)
        cleaner = {"delete_retention_ms": RETENTION, "min_cleanable_dirty_ratio": 0.0, "keyless_records": keyless}
        tier = TierCli(folder / "tier", {"cleaner": cleaner, "publish": {"grace_ms": 0}, "daemon": {"threads": threads}})
        log, now, copied = LogBuilder(), 1_000_000, 0
        add(log, first)
        tier.bring(log.write(folder / "log"))
        tier.run("--now", now)
        for number, (steps, passes) in enumerate(rounds):
            add(log, steps)
            now += passes
            # Offsets that the log skips are signs of a log cleaner.
            tier.do("import", log.write(folder / f"log-{number}"), "--topic", "orders", "--partition", "0", "--accept-loss")
            twin, whole = run_whole_on_copy(tier, folder / f"twin-{number}", "--now", now)
            row = tier.run("--now", now)
            for figure in ("segments_out", "records_read", "records_kept", "bytes_written", "next_dirty_offset"):
                assert row[figure] == whole[figure], figure
            assert live_objects(tier) == live_objects(twin)
            assert contents(tier.export(folder / f"out-{number}")) == contents(twin.export(folder / f"out-of-twin-{number}"))
            copied += row["bytes_read"] < whole["bytes_read"]
            tier.do("verify", "--deep")
            shutil.rmtree(twin.folder)
        event(f"rounds that read less: {copied}")
        tier.do("retire")
        tier.do("verify", "--deep")
