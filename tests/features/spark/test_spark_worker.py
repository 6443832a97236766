"""The distributed map without Spark: the same tasks, run here; the same segments as the local engine, byte for byte."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from compactor.access.rounds import compact, create_round
from compactor.access.tier import Tier
from compactor.errors import BadData, OutOfBudget, StoreError, Unavailable
from compactor.features.spark import exchange, jobs, pass_one as gate_ranges
from compactor.features.spark.exchange import (
    ExpectedRecordSums,
    StoredGateRows,
    create_scratch_object_idempotently,
    encode_surviving_row_numbers,
    set_row_bits,
)
from compactor.round.ports import Costs
from compactor.upkeep.retire import retire_partition
from tests.builders import LZ4, NONE, ZSTD, LogBuilder, entry, wrapper
from tests.golden_cases import cleaner_round, names, unpack
from tests.support.keys import object_key
from tests.support.spark_tier import NAME, NOW_MS, HereCluster, Twins, scratch_of, spark_runner, state_of

pytestmark = pytest.mark.quick

SMALL = "[cleaner]\nsegment_bytes = 20000"
TINY = "[cleaner]\nsegment_bytes = 4000"


def growing(folder: Path, seed: int, *, start: LogBuilder | None = None, segments: int = 6) -> tuple[LogBuilder, Path]:
    """Some segments more: keys again and again, deletes, keyless records, transactions of both ends that cross segments, every codec."""
    dice = random.Random(seed)
    log = start or LogBuilder()
    for _ in range(segments):
        for _ in range(dice.randint(3, 25)):
            pairs = [_pair(dice) for _ in range(dice.randint(1, 9))]
            producer = dice.choice((-1, -1, -1, 5, 6))
            log.put(*pairs, codec=dice.choice((NONE, NONE, LZ4, ZSTD)), pid=producer, txn=producer >= 0)
            if dice.random() < 0.3:
                log.end(dice.choice((5, 6)), commit=dice.random() < 0.6)
        log.roll()
    for producer in (5, 6):
        log.commit(producer)
    return log, log.write(folder)


def _pair(dice: random.Random) -> str:
    if dice.random() < 0.05:
        return "=no key"
    key = f"k{dice.randrange(120)}"
    return key if dice.random() < 0.15 else f"{key}={dice.random()}"


@pytest.mark.parametrize("seed", range(6))
def test_two_rounds_are_those_of_the_local_engine(seed: int, tmp_path: Path) -> None:
    twins = Twins(tmp_path, SMALL + ("\n[spark]\npartitions = 7" if seed % 2 else ""))
    log, folder = growing(tmp_path / "one", seed)
    twins.bring(folder)
    for number in (1, 2):
        here, there = twins.round(HereCluster())
        assert twins.difference() == ""
        assert there.status == "cleaned"
        for field in ("first_dirty_offset", "next_dirty_offset", "segments_out", "records_read", "records_kept", "bytes_written"):
            assert getattr(there, field) == getattr(here, field)
        assert (here.map_engine, there.map_engine) == ("memory", "spark")
        if number == 1:
            log, folder = growing(tmp_path / "two", seed + 100, start=log, segments=3)
            twins.bring(folder)
    assert scratch_of(twins.remote) == []


@pytest.mark.parametrize("gate", ["true", "false"])
def test_records_without_a_key_are_kept_as_by_the_local_engine(gate: str, tmp_path: Path) -> None:
    twins = Twins(tmp_path, f"{SMALL}\nverify_before_publish = {gate}", keyless="keep")
    log, folder = growing(tmp_path / "one", 2)
    twins.bring(folder)
    twins.round(HereCluster())
    twins.bring(growing(tmp_path / "two", 102, start=log, segments=3)[1])
    here, there = twins.round(HereCluster())
    assert twins.difference() == ""
    assert here.records_kept == there.records_kept
    assert [run.stats["keyless_records"] for run in state_of(twins.remote).runs] == [
        run.stats["keyless_records"] for run in state_of(twins.local).runs
    ]


@pytest.mark.parametrize("bloom", ["true", "false"])
def test_records_without_a_key_are_refused_before_there_is_a_plan(bloom: str, tmp_path: Path) -> None:
    twins = Twins(tmp_path, f"{SMALL}\nbloom = {bloom}", keyless="refuse")
    twins.bring(growing(tmp_path / "one", 2)[1])
    here, there = twins.round(HereCluster())
    assert "have no key" in there.reason
    assert (there.status, there.reason) == (here.status, here.reason)
    for tier in (twins.local, twins.remote):
        assert state_of(tier).intent is None
    assert scratch_of(twins.remote) == []


def test_what_was_read_to_count_records_without_a_key_serves_the_round(tmp_path: Path) -> None:
    log = LogBuilder()
    for number in range(6):
        log.put(f"a={number}", f"b{number}=1")
        log.roll()
    twins = Twins(tmp_path, SMALL, keyless="refuse")
    twins.bring(log.write(tmp_path / "log"))
    cluster = HereCluster()
    twins.round(cluster)
    assert twins.difference() == ""
    assert sum("pass 1" in what for what in cluster.said) == 1


def test_a_round_that_begins_inside_a_segment(tmp_path: Path) -> None:
    twins = Twins(tmp_path, SMALL)
    _, folder = growing(tmp_path / "log", 3)
    twins.bring(folder)
    segment = state_of(twins.remote).live[2]
    twins.round(HereCluster(), first_dirty=(segment.start_offset + segment.end_offset) // 2)
    assert twins.difference() == ""


def test_legacy_segments(tmp_path: Path) -> None:
    """Wrappers do not say how many messages they hold; their counts travel with the survivors."""
    dice = random.Random(8)
    log = LogBuilder()
    for _ in range(4):
        for _ in range(12):
            base, count = log.next_offset, dice.randint(1, 5)
            inner = [entry(1, number, f"k{dice.randrange(20)}={number}", timestamp=7) for number in range(count)]
            if dice.random() < 0.7:
                log.raw(wrapper(1, base + count - 1, inner, LZ4, timestamp=7), base + count - 1)
            else:
                log.raw(entry(1, base, f"k{dice.randrange(20)}=plain", timestamp=7), base)
        log.roll()
    log.put("k1=new", "k2", "k3=3")
    twins = Twins(tmp_path, SMALL)
    twins.bring(log.write(tmp_path / "log"))
    here, _ = twins.round(HereCluster())
    assert twins.difference() == ""
    assert here.records_kept < here.records_read


@pytest.mark.parametrize("name", names("cleaner"))
def test_golden_logs(name: str, tmp_path: Path, golden: Path) -> None:
    """Every profile of Kafka's log layer. What Kafka's own cleaner made of them is compared with the local engine elsewhere."""
    case = cleaner_round(golden / name, tmp_path)
    if case.refused:
        pytest.skip("Kafka refuses it, so import does")
    params = case.params
    deciding = ("delete_retention_ms", "segment_bytes", "segment_index_bytes", "index_interval_bytes")
    keep = {key: params[key] for key in deciding if key in params}
    # With sidecars the local engine would leave segments without keys alone; a spread round reads everything.
    twins = Twins(tmp_path / "twins", "[cleaner]\nbloom = false\n" + "\n".join(f"{key} = {value}" for key, value in keep.items()))
    try:
        twins.bring(case.log_dir)
    except BadData as error:
        pytest.skip(f"import refuses it: {error.cause}")
    start = state_of(twins.remote).start_offset
    here, there = twins.round(HereCluster(), first_dirty=max(params.get("first_dirty_offset", 0), start), now_ms=params["now"])
    assert twins.difference() == ""
    assert (there.status, there.reason) == (here.status, here.reason)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("cleaner", tmp_path_factory.mktemp("golden"))


# ---- the gate ---------------------------------------------------------------------------------------------------------------


def test_the_gate_looks_up_every_key(tmp_path: Path) -> None:
    """Where it is switched off, nothing of it is exchanged."""
    rows = {}
    for gate in ("true", "false"):
        twins = Twins(tmp_path / gate, f"{SMALL}\nverify_before_publish = {gate}")
        growing(tmp_path / gate / "log", 2)
        twins.bring(tmp_path / gate / "log")
        cost, cluster = Costs(), HereCluster()
        create_round(twins.local, NAME, NOW_MS, force=True).run(twins.local.open_partition_log(NAME))
        _spark_round(twins, cost, cluster)
        assert twins.difference() == ""
        assert scratch_of(twins.remote) == []
        rows[gate] = (cost.gate_keys == cost.map_entries, cost.exchanged_bytes, any("for the gate" in said for said in cluster.said))
    assert [(every, said) for every, _, said in rows.values()] == [(True, True), (False, False)]
    assert rows["false"][1] < rows["true"][1]


class _Losing:
    """Survivors are written down, all but one: the ``number``-th of the keys."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, rows: Any, kept: Any) -> bytes:
        chosen = np.flatnonzero(np.unpackbits(kept, count=len(rows)))
        kept = kept.copy()
        if 0 <= self.left < len(chosen):
            lost = chosen[self.left]
            kept[lost >> 3] ^= 128 >> (lost & 7)
        self.left -= len(chosen)
        return encode_surviving_row_numbers(rows, kept)


@pytest.mark.parametrize("number", [0, 31, 77, 101])
def test_whatever_key_it_is_its_lost_record_is_missed(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(tmp_path, SMALL)
    _, folder = growing(tmp_path / "log", 5)
    twins.bring(folder)
    before = state_of(twins.remote)
    losing = _Losing(number)
    monkeypatch.setattr("compactor.features.spark.pass_one.encode_surviving_row_numbers", losing)
    report = _spark_round(twins, Costs())
    assert losing.left < 0, "there are as many keys"
    assert report.status == "quarantined"
    assert "the last record of a key is missing" in report.reason
    assert ", key b'k" in report.reason
    assert state_of(twins.remote).live == before.live


def test_rows_of_the_gate_that_the_store_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(tmp_path, SMALL)
    _, folder = growing(tmp_path / "log", 5)
    twins.bring(folder)
    before = state_of(twins.remote)
    rows = StoredGateRows.read_stored_rows

    def changed(self: StoredGateRows, *place: Any) -> Any:
        found = rows(self, *place).copy()
        found[0, 2] ^= np.uint64(1)
        return found

    monkeypatch.setattr(StoredGateRows, "read_stored_rows", changed)
    report = _spark_round(twins, Costs())
    assert report.status == "quarantined"
    assert "the gate's rows in a scratch object are not what was written" in report.reason
    assert state_of(twins.remote).live == before.live


def _nothing_survives(rows: Any, kept: Any) -> bytes:
    return b""


def _all_survive(rows: Any, kept: Any) -> bytes:
    return encode_surviving_row_numbers(rows, np.full_like(kept, 255))


def _no_aborted_transactions(arrays: Any, batches: int) -> Any:
    known = exchange.decode_transaction_verdicts(arrays, batches)
    return replace(known, txn_entries=known.txn_entries[:0])


@pytest.mark.parametrize(
    ("what", "wrong", "cause"),
    [
        ("pass_one.encode_surviving_row_numbers", _nothing_survives, "the last record of a key is missing"),
        ("pass_one.encode_surviving_row_numbers", _all_survive, "records are left that must not be"),
        (
            "rewrite.decode_transaction_verdicts",
            _no_aborted_transactions,
            "the transaction index does not name the aborted transactions",
        ),
    ],
)
def test_the_gate_refuses_what_executors_got_wrong(
    what: str, wrong: Any, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs of pass 1, of the exchange, of pass 2: nothing is uploaded, and the partition stays as it was."""
    twins = Twins(tmp_path, SMALL)
    _, folder = growing(tmp_path / "log", 1)
    twins.bring(folder)
    before = state_of(twins.remote)
    monkeypatch.setattr(f"compactor.features.spark.{what}", wrong)
    runner = spark_runner(HereCluster(), twins.remote, Costs())
    report = create_round(twins.remote, NAME, NOW_MS, force=True, runner=runner).run(twins.remote.open_partition_log(NAME))
    assert report.status == "quarantined"
    assert "the gate refuses" in report.reason
    assert cause in report.reason
    assert state_of(twins.remote).live == before.live


@pytest.mark.parametrize("bloom", [True, False])
def test_new_segments_get_their_sidecars(bloom: bool, tmp_path: Path) -> None:
    """The same ones as from the local engine, but for what they were designed for, which is the round's own keys there."""
    twins = Twins(tmp_path, f"{SMALL}\nbloom = {str(bloom).lower()}\nbloom_design_keys = 1000")
    _, folder = growing(tmp_path / "log", 4)
    twins.bring(folder)
    twins.round(HereCluster())
    assert twins.difference() == ""
    here, there = (_sidecars(tier) for tier in (twins.local, twins.remote))
    assert there == here
    assert all(there) == any(there) == bloom


def _sidecars(tier: Tier) -> list[Any]:
    found = [tier.open_sidecar_store(NAME).load_sidecar(segment.id) for segment in state_of(tier).live]
    return [known and (known.distinct_keys, known.made_for, known.due, len(known.producer_runs), len(known.markers)) for known in found]


# ---- budgets ----------------------------------------------------------------------------------------------------------------


def many_keys(folder: Path, keys: int) -> Path:
    log = LogBuilder()
    for part in range(4):
        for base in range(0, keys, 500):
            log.put(*[f"key-{number}={part}" for number in range(base, base + 500) if number % 4 >= part])
        log.roll()
    return log.write(folder)


def test_a_range_whose_keys_exceed_the_budget_is_read_in_parts(tmp_path: Path) -> None:
    twins = Twins(tmp_path, "[spark]\npartitions = 1\n[cleaner]\nmap_budget_bytes = 65536\nmap_engine = 'memory'")
    twins.bring(many_keys(tmp_path / "log", 6000))
    with pytest.raises(OutOfBudget):
        twins.round(HereCluster())  # the local engine has no room for so many keys
    generous = Twins(tmp_path / "generous")
    generous.bring(tmp_path / "log")
    generous.round(HereCluster())
    twins.local = generous.local
    cost = Costs()
    _spark_round(twins, cost)
    assert twins.difference() == ""
    assert cost.map_entries == 6000
    assert cost.peak_map_bytes <= 65536


def test_rows_that_exceed_a_block_are_sorted_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BLOCK_ROWS", 333)
    twins = Twins(tmp_path, "[spark]\npartitions = 5")
    twins.bring(many_keys(tmp_path / "log", 3000))
    twins.round(HereCluster())
    assert twins.difference() == ""


def test_a_disk_budget_too_small_is_refused_in_words(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    twins.bring(many_keys(tmp_path / "log", 3000))
    twins.toml = "[cleaner]\ndisk_budget_bytes = 60000"
    twins.remote = twins._tier("spark")
    with pytest.raises(OutOfBudget, match="disk budget"):
        _spark_round(twins, Costs())


@pytest.mark.parametrize(("gate", "least"), [("true", 16 + 24), ("false", 16)])
def test_at_most_24_bytes_a_record_are_exchanged_and_as_many_for_the_gate(gate: str, least: int, tmp_path: Path) -> None:
    twins = Twins(tmp_path, f"[cleaner]\nverify_before_publish = {gate}")
    twins.bring(many_keys(tmp_path / "log", 20_000))
    cost = Costs()
    report = _spark_round(twins, cost)
    assert cost.rows == report.records_read
    assert least <= cost.exchanged_bytes / cost.rows < least + 8


def _spark_round(twins: Twins, cost: Costs, cluster: Any = None) -> Any:
    runner = spark_runner(cluster or HereCluster(), twins.remote, cost)
    return create_round(twins.remote, NAME, NOW_MS, force=True, runner=runner).run(twins.remote.open_partition_log(NAME))


# ---- what goes wrong --------------------------------------------------------------------------------------------------------


def test_bad_data_names_segment_and_offset_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    twins.bring(many_keys(tmp_path / "log", 3000))
    before = state_of(twins.remote)
    path = tmp_path / "spark" / "a tier" / object_key(NAME, before.live[1])
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    report = _spark_round(twins, Costs())
    assert report.status == "quarantined"
    assert before.live[1].id in report.segment
    after = state_of(twins.remote)
    assert (after.live, after.vector, after.intent) == (before.live, before.vector, None)
    assert scratch_of(twins.remote) == []


def test_an_executor_of_another_version_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(tmp_path)
    twins.bring(many_keys(tmp_path / "log", 3000))
    monkeypatch.setattr(jobs, "versions_fingerprint", lambda: "tiered-compactor=0 zstd=other")
    report = _spark_round(twins, Costs())
    assert report.status == "quarantined"
    assert "an executor is tiered-compactor=0 zstd=other" in report.reason


class Dying(HereCluster):
    """A driver that dies when it has got so many results of a job whose name holds this."""

    def __init__(self, what: str, after: int) -> None:
        super().__init__()
        self._what, self._after = what, after

    @override
    def run_job(self, description: str, *arguments: Any, **more: Any) -> Any:
        for number, outcome in enumerate(super().run_job(description, *arguments, **more)):
            if self._what in description and number >= self._after:
                raise Unavailable("the driver is gone")
            yield outcome


@pytest.mark.parametrize(("what", "after"), [("pass 1", 2), ("offset map", 1), ("pass 2", 1)])
def test_a_driver_that_died_is_followed_by_one_that_goes_on(what: str, after: int, tmp_path: Path) -> None:
    twins = Twins(tmp_path, TINY + "\n[lease]\nttl_ms = 100")
    _, folder = growing(tmp_path / "log", 11)
    twins.bring(folder)
    dying = Dying(what, after)
    with pytest.raises(Unavailable):
        twins.round(dying)
    cluster = HereCluster()
    report = _spark_round(twins, Costs(), cluster)
    assert report.status == "resumed"
    if what == "pass 1":
        before, again = (int(said.said[0].rpartition(" in ")[2].partition(" ")[0]) for said in (dying, cluster))
        assert again < before, "bundles that are there are not made again"
    assert twins.difference() == ""
    done = " ".join(cluster.said)
    assert ("pass 1" in done) == (what == "pass 1")  # what is there is not done again
    # An object whose writing nobody heard of any more is all that may be left.
    assert len(scratch_of(twins.remote)) <= 1
    retire_partition(twins.remote.ports, twins.remote.open_partition_log(NAME), twins.remote.lease, twins.remote.retention)
    assert scratch_of(twins.remote) == []


def test_what_an_earlier_version_recorded_for_the_gate_is_not_taken_for_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(tmp_path, TINY + "\n[lease]\nttl_ms = 100")
    _, folder = growing(tmp_path / "log", 13)
    twins.bring(folder)
    with monkeypatch.context() as earlier:
        earlier.setattr(gate_ranges, "GATE_SUMS_NAME", "sample")
        earlier.setattr(ExpectedRecordSums, "as_arrays", lambda self: {"hashes": np.zeros(3, np.uint64)})
        with pytest.raises(Unavailable):
            twins.round(Dying("pass 2", 0))
    assert _spark_round(twins, Costs(), HereCluster()).status == "resumed"
    assert twins.difference() == ""


def test_a_local_run_finishes_what_spark_began(tmp_path: Path) -> None:
    twins = Twins(tmp_path, TINY)
    _, folder = growing(tmp_path / "log", 12)
    twins.bring(folder)
    with pytest.raises(Unavailable):
        twins.round(Dying("pass 2", 1))
    assert compact(twins.remote, NAME, NOW_MS).status == "resumed"
    assert twins.difference() == ""


def test_two_attempts_at_one_object(tmp_path: Path) -> None:
    store = Twins(tmp_path).remote.ports.control
    first = create_scratch_object_idempotently(store, "scratch/a", b"the same")
    assert create_scratch_object_idempotently(store, "scratch/a", b"the same") == first
    (tmp_path / "file").write_bytes(b"the same")
    assert create_scratch_object_idempotently(store, "scratch/a", tmp_path / "file") == first
    with pytest.raises(StoreError, match="exists already with other content"):
        create_scratch_object_idempotently(store, "scratch/a", b"another")


# ---- bits -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 1.0])
def test_ordinals_as_gaps(share: float) -> None:
    dice = np.random.default_rng(1)
    ordinals = np.flatnonzero(dice.random(300_000) < 0.3).astype(np.uint32)
    rows = np.column_stack([ordinals, ordinals, ordinals, ordinals])
    kept = dice.random(len(rows)) < share
    encoded = encode_surviving_row_numbers(rows, np.packbits(kept))
    assert len(encoded) <= kept.sum() * 2 + 8
    bitmap = np.zeros(300_000 // 8 + 1, np.uint8)
    assert set_row_bits(np.frombuffer(encoded, np.uint8), bitmap)
    assert np.array_equal(np.flatnonzero(np.unpackbits(bitmap)), ordinals[kept])


def test_gaps_that_do_not_fit_are_noticed() -> None:
    encoded = encode_surviving_row_numbers(np.full((1, 4), 23, np.uint32), np.array([128], np.uint8))
    assert not set_row_bits(np.frombuffer(encoded, np.uint8), np.zeros(2, np.uint8))
    assert not set_row_bits(np.frombuffer(encoded[:-1] + b"\x80", np.uint8), np.zeros(3, np.uint8))


DAEMON = """
import os, runpy, sys
import pyspark.daemon
pyspark.daemon.manager = lambda: print(len(os.listdir("/proc/self/task")), "compactor.features.spark.worker" in sys.modules)
runpy.run_module("compactor.features.spark.daemon", run_name="__main__")
"""


def test_the_daemon_that_forks_workers_has_no_threads() -> None:
    ran = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["1", "True"]
