"""A spread round asks Bloom filters before it is planned: it skips what the local engine skips, and leaves the same bytes."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from compactor.access.rounds import create_round
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.control import publication
from compactor.control.leadership import Leadership
from compactor.errors import BadData, Unavailable
from compactor.features.spark import jobs, rewrite as segment_index, worker
from compactor.features.spark.exchange import decode_bundle_result, read_tail
from compactor.round.compaction import RoundReport
from compactor.round.ports import Costs, filter_usage_of_runs
from compactor.upkeep.retire import retire_partition
from tests.builders import LZ4, NONE, LogBuilder
from tests.support.keys import object_key
from tests.support.spark_tier import NAME, NOW_MS, HereCluster, Twins, scratch_of, spark_runner, state_of

pytestmark = pytest.mark.quick

SETTINGS = "[cleaner]\nsegment_bytes = 26000\nmin_cleanable_dirty_ratio = 0.0\nbloom_design_keys = 1000\ndelete_retention_ms = 1000"
KEYS = 60
SIZE = 20_000
"""Bytes of a segment: large enough that a filter pays."""


class Growing:
    """Segments of keys of their own, and of transactions that cross them; then tails that bring some keys again."""

    def __init__(self, folder: Path, segments: int, *, seed: int = 7, transactions: bool = False, toml: str = "") -> None:
        self.folder = folder
        self.log = LogBuilder()
        self.dice = random.Random(seed)
        self.twins = Twins(folder, SETTINGS + toml)
        self.transactions = transactions
        for number in range(segments):
            self._next()
            for first in range(0, KEYS, 20):
                rows = [b"s%d-k%d=" % (number, key) + self.dice.randbytes(SIZE // KEYS) for key in range(first, first + 20)]
                producer = self.dice.choice((-1, 5, 6)) if transactions else -1
                self.log.put(*rows, pid=producer, txn=producer >= 0, codec=self.dice.choice((NONE, LZ4)))
                if transactions and self.dice.random() < 0.5:
                    self.log.end(self.dice.choice((5, 6)), commit=self.dice.random() < 0.6)
        self.bring()

    def _next(self) -> None:
        if self.log.segments[-1][1] or len(self.log.segments) == self.log.written:
            self.log.roll()

    def bring(self) -> None:
        if self.transactions:
            for producer in (5, 6):
                self.log.commit(producer)
        self.twins.bring(self.log.write(self.folder / f"log-{self.log.written}"))

    def tail(self, *rows: str, pid: int = -1) -> None:
        self._next()
        self.log.put(*rows, "tail=1", pid=pid, txn=pid >= 0)
        self.bring()


def reasons(report: RoundReport) -> list[str]:
    """Without the number of keys, which is exact on one machine only."""
    return [segment.why.partition(" of ")[0] for segment in report.segments]


def skipped(report: RoundReport) -> list[str]:
    return [segment.why for segment in report.segments if segment.action == "skipped"]


def filters_of(tier: Tier) -> Any:
    """Bytes left out: they depend on ids, which differ in length of digits only."""
    record = filter_usage_of_runs(state_of(tier).runs)
    return record.asked, record.skipped, record.useless, record.bytes_saved


def test_a_spread_round_skips_what_a_local_one_skips(tmp_path: Path) -> None:
    it = Growing(tmp_path, 6)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new", "s2-k8")
    read, cluster = Costs(), HereCluster()
    live = state_of(it.twins.remote).live
    here = create_round(it.twins.local, NAME, NOW_MS, force=True).run(it.twins.local.open_partition_log(NAME))
    there = spread(it.twins.remote, cluster, cost=read)
    assert it.twins.difference() == ""
    assert reasons(there) == reasons(here)
    assert (there.segments_skipped, there.segments_in) == (here.segments_skipped, here.segments_in)
    assert there.segments_skipped >= 5
    assert filters_of(it.twins.remote) == filters_of(it.twins.local)
    assert any("filters of 6 clean segments" in said for said in cluster.said)
    # Its own dirty segment is read for either pass, and so is the one with the keys; the others were not touched.
    assert read.bytes_fetched < sum(segment.size_bytes for segment in live) // 2
    assert scratch_of(it.twins.remote) == []


def spread(tier: Tier, cluster: HereCluster, *, cost: Costs | None = None, now_ms: int = NOW_MS) -> RoundReport:
    runner = spark_runner(cluster, tier, cost or Costs())
    return create_round(tier, NAME, now_ms, force=True, runner=runner).run(tier.open_partition_log(NAME))


@pytest.mark.parametrize("seed", range(8))
def test_rounds_over_transactions_and_horizons_are_those_of_the_local_engine(seed: int, tmp_path: Path) -> None:
    it = Growing(tmp_path, 5, seed=seed, transactions=True, toml="\n[spark]\npartitions = 5" if seed % 2 else "")
    dice = random.Random(seed)
    now, left_out = NOW_MS, 0
    for _ in range(4):
        here, there = it.twins.round(HereCluster(), now_ms=now)
        assert it.twins.difference() == ""
        assert (there.status, there.reason, len(skipped(there))) == (here.status, here.reason, len(skipped(here)))
        assert filters_of(it.twins.remote) == filters_of(it.twins.local)
        left_out += len(skipped(there))
        now += dice.choice((1, 500, 5_000))
        number = dice.randrange(5)
        keys = [f"s{number}-k{dice.randrange(KEYS)}" + dice.choice(("", "=again")) for _ in range(dice.randrange(4))]
        it.tail(*keys, pid=dice.choice((-1, 5, 6)))
    assert left_out
    assert scratch_of(it.twins.remote) == []


def test_nothing_new_but_a_horizon_that_has_passed(tmp_path: Path) -> None:
    """Only the segments in which something is due are read."""
    it = Growing(tmp_path, 4)
    it.tail("s1-k3")
    it.twins.round(HereCluster())
    here, there = it.twins.round(HereCluster(), now_ms=NOW_MS + 1_000_000)
    assert it.twins.difference() == ""
    assert (there.status, len(skipped(there))) == (here.status, len(skipped(here))) == ("cleaned", 3)


class Breaking(HereCluster):
    """Spark gives up when a step begins."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    @override
    def run_job(self, description: str, *args: Any, **kwargs: Any) -> Any:
        if self.step in description:
            raise Unavailable("Spark gave up: as it was told to", hint="")
        return super().run_job(description, *args, **kwargs)


@pytest.mark.parametrize("step", ["pass 1", "filters of", "offset map", "pass 2"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_round_that_broke_off_is_done_by_the_next(step: str, lost: bool, tmp_path: Path) -> None:
    """Before or after it was announced; also where the sidecars that stood for what is skipped are ``lost`` meanwhile."""
    it = Growing(tmp_path, 5, transactions=True)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new", pid=5)
    create_round(it.twins.local, NAME, NOW_MS, force=True).run(it.twins.local.open_partition_log(NAME))
    with pytest.raises(Unavailable):
        spread(it.twins.remote, Breaking(step))
    announced = step in ("offset map", "pass 2")
    assert (state_of(it.twins.remote).intent is not None) == announced
    assert bool(scratch_of(it.twins.remote)) == (step != "pass 1")  # bundles for the next attempt, and then survivors
    if lost and announced:
        sidecars = it.twins.remote.open_sidecar_store(NAME)
        for segment in state_of(it.twins.remote).live:
            (tmp_path / "spark" / "a tier" / ".tiered-compactor" / sidecars.sidecar_object_key(segment.id)).unlink(missing_ok=True)
    report = spread(it.twins.remote, HereCluster())
    assert report.status == ("resumed" if announced else "cleaned")
    assert report.segments_skipped
    assert it.twins.difference() == ""
    assert scratch_of(it.twins.remote) == []


class Killed(HereCluster):
    """A driver that is killed when it has so many bundles."""

    def __init__(self, bundles: int) -> None:
        super().__init__()
        self.bundles = bundles

    @override
    def run_job(self, description: str, *args: Any, **kwargs: Any) -> Any:
        for number, outcome in enumerate(super().run_job(description, *args, **kwargs)):
            if "pass 1" in description and number == self.bundles:
                os.kill(os.getpid(), signal.SIGKILL)
            yield outcome


def killed_driver(settings: str, now_ms: int) -> None:
    spread(open_tier(load_settings(settings, {})), Killed(2), now_ms=now_ms)


def test_what_a_killed_driver_read_before_its_plan_is_not_read_again(tmp_path: Path) -> None:
    """The bundles that were made until then stand in for their segments, also for the gate, and with them goes their time."""
    it = Growing(tmp_path, 4, transactions=True, toml="\n[lease]\nttl_ms = 100")
    it.twins.round(HereCluster())
    for number in range(6):
        it.tail(f"s2-k{number}=" + "v" * SIZE, "s1-k3" if number == 3 else "s0-k1=again")
    sizes = {segment.id: segment.size_bytes for segment in state_of(it.twins.remote).live[-6:]}
    shutil.copytree(tmp_path / "spark" / "a tier", tmp_path / "unbroken" / "a tier")
    unbroken, whole, rest = open_tier(it.twins.settings("unbroken")), Costs(), Costs()
    assert spread(unbroken, HereCluster(), cost=whole).status == "cleaned"
    create_round(it.twins.local, NAME, NOW_MS, force=True).run(it.twins.local.open_partition_log(NAME))
    driver = multiprocessing.get_context("spawn").Process(target=killed_driver, args=(str(tmp_path / "spark" / "settings.toml"), NOW_MS))
    driver.start()
    driver.join()
    assert driver.exitcode == -signal.SIGKILL
    assert state_of(it.twins.remote).intent is None
    store = it.twins.remote.ports.control
    left = [
        decode_bundle_result(read_tail(store, info.key, info.size), info.key, info.size)
        for info in store.list(f"partitions/{NAME}/scratch/")
        if "keys-" in info.key
    ]
    spared = sum(sizes[segment.id] for bundle in left for segment in bundle.segments)
    assert len(left) >= 2
    retire_partition(it.twins.remote.ports, it.twins.remote.open_partition_log(NAME), it.twins.remote.lease, it.twins.remote.retention)
    assert spread(it.twins.remote, HereCluster(), cost=rest, now_ms=NOW_MS + 500).status == "cleaned"
    assert it.twins.difference() == "", "the tombstone's horizon, too: it follows from the time of the round"
    assert rest.bytes_fetched == whole.bytes_fetched - spared
    assert scratch_of(it.twins.remote) == []


def test_what_was_read_of_another_log_is_not_taken_up(tmp_path: Path) -> None:
    it = Growing(tmp_path, 4)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new")
    with pytest.raises(Unavailable):
        spread(it.twins.remote, Breaking("filters of"))
    it.tail("s2-k8=newer")
    create_round(it.twins.local, NAME, NOW_MS, force=True).run(it.twins.local.open_partition_log(NAME))
    cluster = HereCluster()
    assert spread(it.twins.remote, cluster).status == "cleaned"
    assert "keys of 2 segments" in cluster.said[0]
    assert it.twins.difference() == ""
    assert scratch_of(it.twins.remote) == []


def test_a_round_over_another_log_has_a_time_of_its_own(tmp_path: Path) -> None:
    """By that of a pass 1 that broke off long ago its tombstones would go as soon as they are clean."""
    it = Growing(tmp_path, 4)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new")
    with pytest.raises(Unavailable):
        spread(it.twins.remote, Breaking("filters of"))
    it.tail("s2-k8")
    later = NOW_MS + 1_000_000
    create_round(it.twins.local, NAME, later, force=True).run(it.twins.local.open_partition_log(NAME))
    assert spread(it.twins.remote, HereCluster(), now_ms=later).status == "cleaned"
    assert it.twins.difference() == "", "the tombstone's horizon, too"
    assert scratch_of(it.twins.remote) == []


def test_survivors_whose_record_may_have_counted_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has it, and the writer was told that the store does not answer."""
    it = Growing(tmp_path, 3)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new")
    create_round(it.twins.local, NAME, NOW_MS, force=True).run(it.twins.local.open_partition_log(NAME))
    store = publication.record_scan_results

    def unanswered(*args: Any) -> None:
        store(*args)
        raise Unavailable("the store does not answer", hint="")

    monkeypatch.setattr(publication, "record_scan_results", unanswered)
    with pytest.raises(Unavailable):
        spread(it.twins.remote, HereCluster())
    monkeypatch.undo()
    assert spread(it.twins.remote, HereCluster()).status == "resumed"
    assert it.twins.difference() == ""
    assert scratch_of(it.twins.remote) == []


def test_a_filter_that_goes_between_the_look_and_the_question_costs_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Growing(tmp_path, 4)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new")
    before = state_of(it.twins.remote).live[0]
    gone = tmp_path / "spark" / "a tier" / ".tiered-compactor" / it.twins.remote.open_sidecar_store(NAME).sidecar_object_key(before.id)
    read = segment_index.PassOneSegmentResults.read_segments

    def read_and_lose(*args: Any) -> None:
        read(*args)
        gone.unlink(missing_ok=True)

    monkeypatch.setattr(segment_index.PassOneSegmentResults, "read_segments", read_and_lose)
    report = spread(it.twins.remote, HereCluster())
    assert next(segment.why for segment in report.segments if segment.action == "rewritten") == "its filter cannot be read"
    assert report.filters.useless == 1
    after = state_of(it.twins.remote).live[0]
    assert (after.id != before.id, after.files["log"]) == (True, before.files["log"]), "rewritten as it was"


def test_a_clean_segment_without_a_sidecar_is_read_with_its_keys(tmp_path: Path) -> None:
    """Headers of it are wanted before the plan is made, for the outcomes of transactions, and its keys behind it."""
    it = Growing(tmp_path, 4)
    it.twins.round(HereCluster())
    it.tail("s1-k3=new", "s2-k7")
    for tier, folder in ((it.twins.local, "local"), (it.twins.remote, "spark")):
        (
            tmp_path / folder / "a tier" / ".tiered-compactor" / tier.open_sidecar_store(NAME).sidecar_object_key(state_of(tier).live[1].id)
        ).unlink()
    here, there = it.twins.round(HereCluster())
    assert it.twins.difference() == ""
    assert "it has no sidecar" in reasons(there)
    assert (there.records_kept, reasons(there)) == (here.records_kept, reasons(here))


class Importing(HereCluster):
    """Somebody imports when a step begins."""

    def __init__(self, step: str, bring: Callable[[], None]) -> None:
        super().__init__()
        self.step = step
        self.bring = bring

    @override
    def run_job(self, description: str, *args: Any, **kwargs: Any) -> Any:
        if self.step in description:
            self.bring()
        return super().run_job(description, *args, **kwargs)


def test_a_log_that_grows_while_filters_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its new size keys would be cut into other ranges than they are."""
    monkeypatch.setattr(worker, "KEY_BYTES", 400)
    it = Growing(tmp_path, 5, toml="\nmap_budget_bytes = 65536")
    it.twins.round(HereCluster())
    it.tail("s2-k7=new")
    create_round(it.twins.local, NAME, NOW_MS, force=True).run(it.twins.local.open_partition_log(NAME))
    cluster = Importing("filters of", lambda: it.tail(*(f"later-{number}=1" for number in range(700))))
    assert spread(it.twins.remote, cluster).status == "cleaned"
    assert it.twins.difference() == ""


def test_the_gate_looks_up_the_keys_that_are_dirty(tmp_path: Path) -> None:
    it = Growing(tmp_path, 5)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new", "s2-k8=new")
    it.twins.round(HereCluster())
    stats = [run.stats for run in state_of(it.twins.remote).runs]
    assert [run["gate_keys"] for run in stats] == [run["map_entries"] for run in stats]
    assert stats[1]["gate_keys"] == 3, "and the tail's own"


def test_executors_of_another_version_are_met_before_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Growing(tmp_path, 3)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new")
    monkeypatch.setattr(jobs, "versions_fingerprint", lambda: "another one")
    report = spread(it.twins.remote, HereCluster())
    assert (report.status, report.reason.partition(" for ")[0]) == ("quarantined", "version: the plan is")
    assert state_of(it.twins.remote).intent is None
    assert scratch_of(it.twins.remote) == []


def test_a_store_that_fails_while_scratch_is_deleted_hides_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Growing(tmp_path, 3)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new")
    check = Leadership.refresh_and_require_leadership

    class Damaged(HereCluster):
        @override
        def run_job(self, description: str, *args: Any, **kwargs: Any) -> Any:
            if "offset map" in description:
                monkeypatch.setattr(Leadership, "refresh_and_require_leadership", unanswered)
                raise BadData("damaged: as it was told to", segment="s")
            return super().run_job(description, *args, **kwargs)

    def unanswered(leadership: Leadership, **_: object) -> None:
        monkeypatch.setattr(Leadership, "refresh_and_require_leadership", check)
        raise Unavailable("the store does not answer", hint="")

    report = spread(it.twins.remote, Damaged())
    assert (report.status, report.segment) == ("quarantined", "s")
    assert state_of(it.twins.remote).intent is None


def test_damage_that_is_met_before_the_plan_quarantines_and_leaves_nothing_behind(tmp_path: Path) -> None:
    it = Growing(tmp_path, 4)
    it.twins.round(HereCluster())
    it.tail("s2-k7=new")
    newest = state_of(it.twins.remote).live[-1]
    path = tmp_path / "spark" / "a tier" / object_key(NAME, newest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    report = spread(it.twins.remote, HereCluster())
    assert (report.status, report.segment.rpartition("/")[2].partition(".")[0].endswith(newest.id)) == ("quarantined", True)
    assert report.bytes_read >= newest.size_bytes
    assert state_of(it.twins.remote).intent is None
    assert scratch_of(it.twins.remote) == []


def test_without_filters_everything_is_read(tmp_path: Path) -> None:
    it = Growing(tmp_path, 4, toml="\nbloom = false")
    it.twins.round(HereCluster())
    it.tail("s2-k7=new")
    cluster = HereCluster()
    report = spread(it.twins.remote, cluster)
    assert report.segments_skipped == 0
    assert not any("filters" in said for said in cluster.said)
