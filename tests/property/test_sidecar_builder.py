"""A segment's stand-in tells the transaction fold what the segment itself would; its sidecar tells what is in it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, strategies as st

from bloom.filter import hash_keys, siphash_key_halves
from bloom.sidecar import decode_sidecar, encode_sidecar
from bloom.sizing import design_filter
from compactor.cleaner.offline import open_log_directory
from compactor.cleaner.retention import transaction_verdicts_by_source
from compactor.cleaner.rewrite import build_sidecar, substitute_segment, verdicts_from_substitute
from compactor.cleaner.worker_threads import WorkerThreads
from compactor.constants import NEVER_MS, TimestampMs
from compactor.records.batches import NOT_CONTROL
from tests.builders import GZIP, LZ4, NONE, LogBuilder, entry
from tests.property.test_cleaner_matches_naive import logs
from tests.support.depth import examples

KEY = bytes(range(16))
LIMIT = 1 << 20
ID = "AAECAwQFBgcICQoLDA0ODw"


@examples(150)
@given(logs(), st.sets(st.integers(0, 10)))
def test_verdicts_are_the_same_whoever_is_stood_in_for(log: LogBuilder, hidden: set[int]) -> None:
    with tempfile.TemporaryDirectory() as scratch, WorkerThreads(1) as workers:
        sources = open_log_directory(log.write(Path(scratch) / "log"), 4096, LIMIT)
        whole = transaction_verdicts_by_source(sources)
        mixed = list(sources)
        for source in sources:
            if source.ordinal in hidden:
                sidecar = build_sidecar(ID, source, None, KEY, LIMIT, workers, counts_distinct_keys=False)
                mixed[source.ordinal] = substitute_segment(source.ordinal, source.name, source.base, source.end, source.mtime_ms, sidecar)
        for source, mine, verdicts, truth in zip(sources, mixed, transaction_verdicts_by_source(mixed), whole, strict=True):
            found = verdicts_from_substitute(source, mine, verdicts) if mine is not source else verdicts
            # An event has no batches that were emptied before: of those nothing is left to be removed.
            data = (source.table.control == NOT_CONTROL) & (source.table.producer_id >= 0)
            markers = (source.table.control != NOT_CONTROL) & (source.table.producer_id >= 0)
            for name in ("aborted", "discardable", "indexed"):
                ours, theirs = getattr(found, name), getattr(truth, name)
                assert ours[data].tolist() == theirs[data].tolist(), name
                assert ours[markers].tolist() == theirs[markers].tolist(), name
            assert found.txn_entries.tolist() == truth.txn_entries.tolist()


@examples(60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.sampled_from([NONE, LZ4, GZIP]), st.sampled_from([None, 7, 9])),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([1, 3]),
)
def test_a_portrait_has_every_key_and_everything_that_will_be_due(batches: list[tuple[list[int], int, int | None]], threads: int) -> None:
    log = LogBuilder()
    tombstones, undated, earliest, keyless, keys = 0, 0, NEVER_MS, 0, set()
    for some, codec, horizon in batches:
        texts = []
        for number in some:
            if number % 5 == 0:
                texts.append("=v")
                keyless += 1
                continue
            deleted = number % 3 == 0
            texts.append(f"k{number}" + ("" if deleted else "=v"))
            keys.add(f"k{number}")
            tombstones += deleted
            undated += deleted and horizon is None
            earliest = TimestampMs(min(earliest, horizon) if deleted and horizon is not None else earliest)
        log.put(*texts, codec=codec, horizon=horizon)
    with tempfile.TemporaryDirectory() as scratch, WorkerThreads(threads) as workers:
        (source,) = open_log_directory(log.write(Path(scratch) / "log"), 4096, LIMIT)
        made = build_sidecar(ID, source, design_filter(1_000, 100, 1 << 30), KEY, LIMIT, workers, counts_distinct_keys=True)
    records = sum(len(some) for some, _, _ in batches)
    assert (made.records, made.distinct_keys) == (records, len(keys))
    due = made.due
    assert (due.tombstones, due.tombstones_without_horizon, due.earliest_tombstone_horizon_ms, due.keyless_records) == (
        tombstones,
        undated,
        earliest,
        keyless,
    )
    back = decode_sidecar(encode_sidecar(made, KEY), ID, KEY)
    met = [key for key in sorted(keys) if back.filter is None or back.filter.flag_possible_keys(hash_of(key)).all()]
    assert met == sorted(keys)
    assert not keys or back.filter is not None
    assert back.filter is None or not back.filter.flag_possible_keys(hash_of("another")).any()


def hash_of(key: str) -> np.ndarray:
    hashes = np.empty((1, 2), np.uint64)
    buf = np.frombuffer(key.encode(), np.uint8)
    hash_keys(buf, np.array([0], np.int64), np.array([len(key)], np.int32), *siphash_key_halves(KEY), hashes)
    return hashes


def test_tombstones_of_old_formats_never_have_a_horizon(tmp_path: Path) -> None:
    log = LogBuilder()
    log.raw(entry(1, 0, "a", timestamp=5), 0)
    log.raw(entry(0, 1, "b=1"), 1)
    with WorkerThreads(1) as workers:
        (source,) = open_log_directory(log.write(tmp_path / "log"), 4096, LIMIT)
        due = build_sidecar(ID, source, None, KEY, LIMIT, workers, counts_distinct_keys=False).due
    assert (due.tombstones, due.tombstones_without_horizon) == (1, 1)
