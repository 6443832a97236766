"""Rounds that leave segments alone: what is skipped and why it may be, sidecars that cannot be used, engines on disk, the commands."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compactor.round import roles
from tests.builders import LZ4, LogBuilder, entry, wrapper
from tests.support.tier_cli import TierCli, latest, visible
from tests.support.watching import Watch

NOW = 2_000_000_000
SIZE = 20_000
"""Bytes of a segment: large enough that a filter pays."""

KEYS = 60


class Growing:
    """Segments of keys of their own, then tails that bring some of them again."""

    def __init__(self, folder: Path, segments: int, **cleaner: Any) -> None:
        self.folder = folder
        self.log = LogBuilder()
        settings = {"segment_bytes": SIZE + 6_000, "min_cleanable_dirty_ratio": 0.0, "bloom_design_keys": 1000, **cleaner}
        self.tier = TierCli(folder / "some tier", {"cleaner": settings, "publish": {"grace_ms": 0}})
        rng = random.Random(7)
        for number in range(segments):
            self._next()
            for first in range(0, KEYS, 20):
                rows = [b"s%d-k%d=" % (number, key) + rng.randbytes(SIZE // KEYS) for key in range(first, first + 20)]
                self.log.put(*rows)
        self.bring()

    def _next(self) -> None:
        if self.log.segments[-1][1] or len(self.log.segments) == self.log.written:
            self.log.roll()

    def bring(self) -> None:
        self.tier.bring(self.log.write(self.folder / f"log-{self.log.written}"))

    def tail(self, *rows: str) -> None:
        self._next()
        self.log.put(*rows, "tail=1")
        self.bring()

    def all_sidecars(self) -> list[Path]:
        return sorted((self.tier.tier / ".tiered-compactor/partitions/orders-0/sidecars").glob("*.bloom"))

    def sidecars(self) -> list[Path]:
        """Of live segments."""
        live = {segment["id"] for segment in self.live()}
        return [path for path in self.all_sidecars() if path.stem in live]

    def live(self) -> list[dict[str, Any]]:
        segments = self.tier.do("segments", "list", "orders-0")["segments"]
        return [s for s in segments if s["replaced_by"] is None and s["state"] == "COPY_SEGMENT_FINISHED"]

    def view(self, name: str) -> Any:
        out = self.tier.export(self.folder / name)
        return visible(out), latest(out)


def test_a_clean_segment_that_no_dirty_key_meets_is_neither_read_nor_written(tmp_path: Path) -> None:
    it = Growing(tmp_path, 6)
    assert len(it.sidecars()) == 6, "imported segments have some, without a filter"
    first = it.tier.run("--now", NOW)
    assert (first["segments_in"], first["segments_out"], first["segments_skipped"]) == (6, 6, 0)
    assert len(it.sidecars()) == 6
    before = {s["id"]: s for s in it.live()}
    it.tail("s2-k5=new")
    (plan,) = it.tier.do("plan", "--now", NOW)["partitions"]
    assert sorted(s["action"] for s in plan["segments"]) == ["filter"] * 6 + ["rewrite"]
    assert (plan["asked"], plan["skip"], plan["map_engine"], plan["passes"], plan["map_keys"]) == (6, 3, "memory", 1, 2)
    row = it.tier.run("--now", NOW)
    assert (row["segments_in"], row["segments_skipped"], row["filters"]["asked"], row["useless_rate"]) == (7, 5, 6, 0.0)
    read = [s["bytes"] for s in before.values() if s["start_offset"] <= 2 * KEYS + 5 <= s["end_offset"]]
    assert row["bytes_read"] < sum(read) + 1_000
    assert row["bytes_read"] + row["filters"]["bytes_saved"] >= sum(s["bytes"] for s in before.values())
    why = {s["id"]: (s["action"], s["why"]) for s in row["segments"]}
    untouched = [s for s in it.live() if s["id"] in before]
    assert len(untouched) == 5
    assert {why[s["id"]] for s in untouched} == {("skipped", "its filter matches none of 2 keys")}
    assert sorted(each for each in why.values() if each[0] == "rewritten") == [
        ("rewritten", "dirty"),
        ("rewritten", "its filter matches a dirty key"),
    ]
    facts = it.tier.do("explain", "orders-0")["facts"]
    assert sum(fact["kind"] == "skipped" for fact in facts) == 5
    assert any("its filter matches a dirty key" in fact["text"] for fact in facts)
    shown = it.tier.do("bloom", "show", "orders-0")
    assert (shown["on"], shown["asked"], shown["skipped"], shown["useless"]) == (True, 6, 5, 0)
    assert {s["problem"] for s in shown["segments"]} == {""}
    assert it.tier.do("verify")["ok"]
    it.tier.do("retire")
    assert {path.stem for path in it.all_sidecars()} == {s["id"] for s in it.live()}


def test_bloom_off_makes_none_and_reads_all(tmp_path: Path) -> None:
    it = Growing(tmp_path, 3, bloom=False)
    it.tier.run("--now", NOW)
    it.tail("s0-k1=new")
    assert it.tier.run("--now", NOW)["segments_skipped"] == 0
    assert it.all_sidecars() == []
    assert it.tier.do("bloom", "show", "orders-0")["reason"] == "bloom = false"


def _cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _cut_head(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _stale(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def _future(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)


def _lying(path: Path, other: Path) -> None:
    """All bits of the filter cleared: it would say that the segment holds no key at all."""
    data = path.read_bytes()
    path.write_bytes(data[:-100] + bytes(100))


def _lying_head(path: Path, other: Path) -> None:
    """Nothing would be due, whatever it holds."""
    path.write_bytes(path.read_bytes().replace(b'"records":60', b'"records":00'))


def _gone(path: Path, other: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("spoil", [_cut, _cut_head, _stale, _future, _lying, _lying_head, _gone])
def test_a_sidecar_that_cannot_be_used_costs_a_read_and_no_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path, Path], None]
) -> None:
    it = Growing(tmp_path, 4)
    it.tier.run("--now", NOW)
    victim = next(s for s in it.live() if s["start_offset"] <= KEYS + 5 <= s["end_offset"])
    path = next(path for path in it.sidecars() if path.stem == victim["id"])
    before = path.read_bytes()
    spoil(path, next(each for each in it.sidecars() if each != path))
    assert not path.exists() or path.read_bytes() != before
    it.tail("s1-k5=new")
    caplog.clear()
    row = it.tier.run("--now", NOW)
    assert (row["status"], row["segments_skipped"]) == ("cleaned", 3)
    told = [record.getMessage() for record in caplog.records if victim["id"] in record.getMessage()]
    assert len(told) == (0 if spoil is _gone else 1), told
    _, values = it.view("out")
    assert values[b"s1-k5"] == b"new"
    dumped = [s for s in it.live() if s["start_offset"] <= KEYS + 5 <= s["end_offset"]]
    assert dumped[0]["records"] == KEYS - 1, "the superseded record is gone"
    assert {s["problem"] for s in it.tier.do("bloom", "show", "orders-0")["segments"]} == {""}


def test_rebuild_makes_what_is_missing(tmp_path: Path) -> None:
    it = Growing(tmp_path, 4)
    it.tier.run("--now", NOW)
    kept, *dropped = it.sidecars()
    for path in dropped:
        path.unlink()
    assert sum(s["problem"] != "" for s in it.tier.do("bloom", "show", "orders-0")["segments"]) == 3
    made = it.tier.do("bloom", "rebuild", "orders-0", "--missing")
    assert (len(made["written"]), made["kept"]) == (3, 1)
    assert it.tier.do("bloom", "rebuild", "orders-0")["kept"] == 0
    assert kept in it.sidecars()
    it.tail("another=1")
    assert it.tier.run("--now", NOW)["segments_skipped"] == 4


def test_what_is_due_is_read_whatever_its_filter_says(tmp_path: Path) -> None:
    """A tombstone gets its horizon, and goes when that has passed, though no dirty key ever meets its segment again."""
    it = Growing(tmp_path, 3, delete_retention_ms=1_000)
    it._next()
    it.log.put("gone", "stays=" + 10_000 * "x")
    it.bring()
    it.tier.run("--now", NOW)
    it.tail("another=1")
    row = it.tier.run("--now", NOW + 2_000)
    assert [s["why"] for s in row["segments"] if s["action"] == "rewritten"].count("a delete horizon has passed") == 1
    assert row["segments_skipped"] == 3
    assert b"gone" not in {record[1] for record in it.view("out")[0]}


@pytest.mark.parametrize("threads", [1, 3])
def test_the_engine_on_disk_gives_the_same_and_stays_within_the_budget(tmp_path: Path, threads: int) -> None:
    views = {}
    for engine in ("memory", "partitioned"):
        it = Growing(tmp_path / engine, 5, map_engine=engine, disk_budget_bytes=4 * (SIZE + 10_000))
        it.tier.set(daemon={"threads": threads})
        for tail in ("s1-k3", "s4-k9"):
            it.tail(f"{tail}=new", f"{tail}=newer")
            with Watch(it.tier.folder / "state" / "spool") as watch:
                row = it.tier.run("--now", NOW)
            assert row["map_engine"] == engine
            assert watch.most <= row["peak_disk_bytes"] <= 4 * (SIZE + 10_000)
        out = it.tier.export(tmp_path / f"out-{engine}")
        views[engine] = {path.name: path.read_bytes() for path in sorted(out.iterdir())}
    assert views["memory"] == views["partitioned"]


def test_the_smallest_map_budget_is_enough_for_the_engine_on_disk(tmp_path: Path) -> None:
    it = Growing(tmp_path, 3, map_budget_bytes=4096)
    it.tier.run("--now", NOW)
    it.log.roll()
    for first in range(0, 3_000, 100):
        it.log.put(*[f"s0-k{key}=new" for key in range(first, first + 100)])
    it.bring()
    row = it.tier.run("--now", NOW)
    assert (row["status"], row["map_engine"]) == ("cleaned", "partitioned")
    values = it.view("out")[1]
    assert sum(value == b"new" for value in values.values()) == 3_000
    assert it.tier.do("verify")["ok"]


@pytest.mark.parametrize("engine", ["auto", "memory", "partitioned"])
def test_old_wrappers_that_do_not_say_how_many_messages_they_hold(tmp_path: Path, engine: str) -> None:
    it = Growing(tmp_path, 4, map_engine=engine, map_budget_bytes=8192)
    it.tier.run("--now", NOW)
    it.log.roll()
    inner = [entry(1, number, f"s{number % 3}-k{number}=new", timestamp=7) for number in range(40)]
    base = it.log.next_offset
    it.log.raw(wrapper(1, base + 39, inner, LZ4, timestamp=7), base + 39)
    it.bring()
    assert it.live()[-1]["records"] == 0
    assert it.tier.do("plan", "--now", NOW)["partitions"][0]["map_keys"] > 0
    row = it.tier.run("--now", NOW)
    assert (row["status"], row["segments_skipped"]) == ("cleaned", 1)
    values = it.view("out")[1]
    assert sum(value == b"new" for value in values.values()) == 40
    assert sorted(s["records"] for s in it.live())[-2:] == [KEYS - 13, KEYS], "superseded records are gone"


def test_an_estimate_that_was_wrong_changes_over_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Growing(tmp_path / "plain", 20)
    plain.tail("s3-k1=new")
    assert plain.tier.run("--now", NOW)["map_engine"] == "memory"
    wrong = Growing(tmp_path / "wrong", 20, map_budget_bytes=8192)
    wrong.tail("s3-k1=new")
    (plan,) = wrong.tier.do("plan", "--now", NOW)["partitions"]
    assert plan["map_engine"] == "partitioned"
    monkeypatch.setattr(roles, "estimate_distinct_keys", lambda heads, records: 10)
    row = wrong.tier.run("--now", NOW)
    assert (row["status"], row["map_engine"]) == ("cleaned", "partitioned")
    assert row["peak_map_bytes"] <= 8192 * 2
    assert wrong.view("out") == plain.view("out")


def test_small_neighbours_are_merged_when_there_are_enough(tmp_path: Path) -> None:
    for segments, skipped in ((7, 7), (8, 0)):
        it = Growing(tmp_path / str(segments), segments)
        it.tier.run("--now", NOW)
        it.tier.set(cleaner={"segment_bytes": 9 * (SIZE + 6_000)})
        it.tail("another=1")
        row = it.tier.run("--now", NOW)
        assert row["segments_skipped"] == skipped
        merged = [s for s in row["segments"] if s["why"] == "it is merged with its small neighbours"]
        assert len(merged) == segments - skipped
        assert len(it.live()) == skipped + (2 if merged else 1)
        assert it.tier.do("verify")["ok"]
