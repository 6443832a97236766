"""A segment that meets few dirty keys is read in part: the new objects are those of a round that reads everything."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloom import directory
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.errors import CannotCopy
from compactor.round import partial as splicing
from compactor.storage.local import LocalStore
from compactor.tier.sidecars import SidecarStore
from tests.builders import LZ4, LogBuilder
from tests.support.splices import live_ids, live_objects, run_whole_on_copy, small_copies
from tests.support.tier_cli import TierCli, contents, latest

KEYS = 2_000
NOW = 1_000_000


@pytest.fixture
def tier(tmp_path: Path) -> TierCli:
    return TierCli(tmp_path / "tier", {"cleaner": {"min_cleanable_dirty_ratio": 0.0}, "publish": {"grace_ms": 0}})


def first_round(tier: TierCli, tmp_path: Path) -> LogBuilder:
    """One clean segment of 200 batches, read and described by a round."""
    log = LogBuilder()
    for first in range(0, KEYS, 10):
        log.put(*(f"k{key}={'v' * 50}{key}" for key in range(first, first + 10)), codec=LZ4)
    tier.bring(log.write(tmp_path / "first"))
    tier.run("--now", NOW)
    return log


def second(tier: TierCli, tmp_path: Path, log: LogBuilder, *records: str) -> None:
    log.roll()
    log.put(*records)
    tier.bring(log.write(tmp_path / "second"))


def test_a_segment_is_read_in_part(tier: TierCli, tmp_path: Path) -> None:
    with small_copies(most_read=2):
        log = first_round(tier, tmp_path)
        second(tier, tmp_path, log, "k5=new", "k1000=new", "k1001", "other=1")
        twin, whole = run_whole_on_copy(tier, tmp_path / "twin", "--now", NOW)
        row = tier.run("--now", NOW)
    assert row["segments_out"] == whole["segments_out"] == 2
    assert row["records_read"] == whole["records_read"]
    assert row["records_kept"] == whole["records_kept"]
    assert row["bytes_written"] == whole["bytes_written"]
    assert row["bytes_read"] < whole["bytes_read"] / 5
    for each in (tier, twin):
        stats = each.do("runs", "list", tier.named)["runs"][-1]["stats"]
        assert (stats["filter_asked"], stats["filter_useless"]) == (1, 0)
    assert live_objects(tier) == live_objects(twin)
    assert latest(tier.export(tmp_path / "out")) == latest(twin.export(tmp_path / "twin-out"))
    assert tier.do("verify", "--deep")


@pytest.mark.parametrize("design_keys", [0, 1], ids=["filter asked", "filter made for fewer keys"])
def test_keys_that_are_gone_do_not_come_up_again(tier: TierCli, tmp_path: Path, design_keys: int) -> None:
    """The filter of a segment that was put together still has them; hot keys would have it put together anew in each round."""
    tier.set(cleaner={"segment_bytes": 47_500, "bloom_design_keys": design_keys})
    with small_copies(most_read=2):
        log = first_round(tier, tmp_path)
        found = []
        for number in range(4):
            log.roll()
            log.put(*(f"k{key}={number}{'n' * 300}" for key in (5, 1000)), "other=1")
            tier.bring(log.write(tmp_path / f"hot-{number}"))
            found.append((tier.run("--now", NOW)["segments_out"], large_log(tier)))
        first = found[0][1]
        assert found == [(2, first), (1, first), (1, first), (1, first)]
        log.roll()
        log.put("k5=last", "k7=last")
        tier.bring(log.write(tmp_path / "another"))
        tier.run("--now", NOW)
        tier.do("retire")
        assert large_log(tier) != first
        view = latest(tier.export(tmp_path / "out"))
    assert (view[b"k5"], view[b"k7"], view[b"k1000"]) == (b"last", b"last", b"3" + b"n" * 300)
    assert len(view) == KEYS + 1
    assert tier.do("verify", "--deep")


def test_a_filter_that_still_has_an_erased_key_is_a_holder(tier: TierCli, tmp_path: Path) -> None:
    tier.set(cleaner={"delete_retention_ms": 0})
    with small_copies(most_read=2):
        log = first_round(tier, tmp_path)
        second(tier, tmp_path, log, "k5=new", "k1001")
        tier.run("--now", NOW)
        second(tier, tmp_path / "more", log, "k5=newer")
        tier.run("--now", NOW + 1)
        tier.do("retire")
    (sidecar,) = [path for path in objects(tier, "*.bloom") if path.stem in large_log(tier).name]
    answer = tier.ask("erasure", "orders", "--key", "k1001").document
    assert not answer["erased"]
    (holder,) = answer["holders"]
    assert (holder["state"], holder["what"]) == ("sidecar", "keyed hash")
    assert sidecar.name in holder["object"]
    assert tier.do("erasure", "orders", "--key", "never")["erased"]
    tier.do("bloom", "rebuild", tier.named)
    assert tier.do("erasure", "orders", "--key", "k1001")["erased"]


class Killed(BaseException):
    """The process is gone."""


WRITES = ("create", "create_from_file", "compose", "delete")


def killed_at(patch: pytest.MonkeyPatch, number: int, *, after: bool) -> None:
    """The process dies at its write of this number (from 0), before it or after it."""
    calls = itertools.count()

    def breaking(write: Any) -> Any:
        def broken(store: LocalStore, *arguments: Any, **options: Any) -> Any:
            here = next(calls)
            if here == number and not after:
                raise Killed
            answer = write(store, *arguments, **options)
            if here == number:
                raise Killed
            return answer

        return broken

    for name in WRITES:
        patch.setattr(LocalStore, name, breaking(getattr(LocalStore, name)))


@pytest.mark.parametrize("forgets", [False, True], ids=["with directories", "without directories"])
@pytest.mark.parametrize("after", [False, True], ids=["before a write", "after a write"])
def test_killed_at_every_write(tier: TierCli, tmp_path: Path, after: bool, forgets: bool) -> None:
    """Whoever goes on makes the same objects, whether it can read in part or not: what lies there already is found to be the same (I7)."""
    tier.set(lease={"ttl_ms": 100})
    with small_copies(most_read=2):
        log = first_round(tier, tmp_path)
        second(tier, tmp_path, log, "k5=new", "k1000=new", "k1001", "other=1")
        twin, _ = run_whole_on_copy(tier, tmp_path / "twin", "--now", NOW)
        wanted, kills = live_objects(twin), 0
        result = contents(twin.export(tmp_path / "result"))
        for number in range(100):
            folder = tmp_path / f"killed-{number}"
            shutil.copytree(tier.tier, folder / "tier", copy_function=shutil.copy2)
            other = TierCli(folder, tier.settings)
            with pytest.MonkeyPatch.context() as patch:
                killed_at(patch, number, after=after)
                try:
                    other.run("--now", NOW)
                except Killed:
                    kills += 1
                else:
                    break
            if forgets:
                for path in other.tier.rglob("*.keys"):
                    path.unlink()
            shutil.rmtree(folder / "state", ignore_errors=True)
            row = other.do("run", "--force", "--now", NOW)["partitions"][0]
            assert row["status"] in ("cleaned", "resumed", "nothing_to_do"), row
            if not forgets or row["status"] == "resumed":  # else it is another plan, and the two segments become one
                assert live_objects(other) == wanted
            assert contents(other.export(folder / "out")) == result
            other.do("verify", "--deep")
            other.do("retire")
    assert kills > 10


def objects(tier: TierCli, pattern: str) -> list[Path]:
    return sorted(path for path in tier.tier.rglob(pattern) if path.is_file())


def large_log(tier: TierCli) -> Path:
    """Of the largest live segment; what it replaced may be as large."""
    live = live_ids(tier)
    return max((path for path in tier.tier.glob(f"{tier.named}/*.log") if path.stem[21:] in live), key=lambda path: path.stat().st_size)


def flipped(path: Path, at: int) -> None:
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # its companion goes on saying what it was made as


class TestWhatDoesNotFit:
    @pytest.fixture(autouse=True)
    def small(self) -> Iterator[None]:
        with small_copies(most_read=2):
            yield

    def ready(self, tier: TierCli, tmp_path: Path) -> tuple[int, list[dict[str, object]]]:
        """Two segments, the second one dirty. Bytes of the first, and what is to come of them."""
        log = first_round(tier, tmp_path)
        second(tier, tmp_path, log, "k5=new", "k1000=new", "k1001", "other=1")
        twin, _ = run_whole_on_copy(tier, tmp_path / "twin", "--now", NOW)
        return large_log(tier).stat().st_size, contents(twin.export(tmp_path / "result"))

    @pytest.mark.parametrize("damage", ["cut", "flipped", "other segment's", "gone"])
    def test_a_directory_that_cannot_be_used(self, tier: TierCli, tmp_path: Path, damage: str) -> None:
        size, wanted = self.ready(tier, tmp_path)
        (path,) = objects(tier, "*.keys")
        data = path.read_bytes()
        if damage == "cut":
            path.write_bytes(data[:-5])
        elif damage == "flipped":
            path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
        elif damage == "gone":
            path.unlink()
        else:
            key = open_tier(load_settings(str(tier.config))).identity.hash_key()
            found = directory.decode_key_directory(data, path.stem, key)
            path.write_bytes(directory.encode_key_directory(replace(found, segment_id="A" * 22), key))
        row = tier.run("--now", NOW)
        assert (row["status"], row["bytes_read"] > size) == ("cleaned", True)
        assert contents(tier.export(tmp_path / "out")) == wanted
        assert len(objects(tier, "*.keys")) == (1 if damage == "gone" else 2)

    @pytest.mark.parametrize("there", [1, 2, 3, 4, 100])
    def test_a_directory_that_is_fetched_again(self, tier: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int) -> None:
        """Those of all segments of a round are too much for its memory. ``there``: so many times, then it is gone."""
        size, wanted = self.ready(tier, tmp_path)
        calls, found = itertools.count(), SidecarStore.load_key_directories

        def some(sidecars: SidecarStore, segment_ids: Sequence[str]) -> Iterator[tuple[Any, int]]:
            return (each if next(calls) < there else (None, 0) for each in found(sidecars, segment_ids))

        with monkeypatch.context() as patch:
            patch.setattr(splicing, "KEPT", 0)
            patch.setattr(SidecarStore, "load_key_directories", some)
            row = tier.run("--now", NOW)
        assert (row["status"], row["bytes_read"] > size) == ("cleaned", there < 100)
        assert contents(tier.export(tmp_path / "out")) == wanted
        assert next(calls) > min(there, 4)

    def test_a_store_that_does_not_copy_after_all(self, tier: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        size, wanted = self.ready(tier, tmp_path)

        def refused(*arguments: Any) -> None:
            raise CannotCopy("not here")

        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "compose", refused)
            row = tier.run("--now", NOW)
        assert (row["status"], row["bytes_read"] > size) == ("cleaned", True)
        assert contents(tier.export(tmp_path / "out")) == wanted

    @pytest.mark.damages
    def test_damage_in_what_is_read(self, tier: TierCli, tmp_path: Path) -> None:
        self.ready(tier, tmp_path)
        log = large_log(tier)
        before = log.read_bytes()
        flipped(log, len(before) - 3)  # the last batch is always read
        answer = tier.ask("run", "--force", "--now", NOW)
        (row,) = answer.document["partitions"]
        assert row["status"] == "quarantined"
        assert "changed or damaged" in row["reason"]
        log_now = large_log(tier)
        assert log_now == log
        flipped(log, len(before) - 3)
        assert tier.do("run", "--force", "--now", NOW)["partitions"][0]["status"] in ("cleaned", "resumed")
        tier.do("verify", "--deep")

    @pytest.mark.damages
    def test_damage_in_what_is_copied_is_found_before_publication(self, tier: TierCli, tmp_path: Path) -> None:
        """What was copied is not what the directory's headers say, so the segment is read whole, and named."""
        size, wanted = self.ready(tier, tmp_path)
        log = large_log(tier)
        flipped(log, size // 4)
        (row,) = tier.ask("run", "--force", "--now", NOW).document["partitions"]
        assert (row["status"], "changed or damaged" in row["reason"]) == ("quarantined", True)
        assert large_log(tier) == log
        flipped(log, size // 4)
        assert tier.do("run", "--force", "--now", NOW)["partitions"][0]["status"] == "cleaned"
        assert contents(tier.export(tmp_path / "out")) == wanted

    def test_a_file_system_that_copies_zeros(self, tier: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        size, wanted = self.ready(tier, tmp_path)

        def zeros(source: int, target: int, count: int, at: int, to: int) -> int:
            return os.pwrite(target, bytes(count), to)

        with monkeypatch.context() as patch:
            patch.setattr(os, "copy_file_range", zeros)
            row = tier.run("--now", NOW)
        assert (row["status"], row["bytes_read"] > size) == ("cleaned", True)
        assert contents(tier.export(tmp_path / "out")) == wanted
        tier.do("retire")
        tier.do("verify", "--deep")

    def test_undo_and_what_comes_after(self, tier: TierCli, tmp_path: Path) -> None:
        log = first_round(tier, tmp_path)
        before = latest(tier.export(tmp_path / "before"))
        tier.set(publish={"undo_window_ms": 3_600_000})
        second(tier, tmp_path, log, "k5=new", "k1000=new", "k1001", "other=1")
        row = tier.run("--now", NOW)
        after = latest(tier.export(tmp_path / "after"))
        tier.do("undo", tier.do("runs", "list", tier.named)["runs"][-1]["run_id"])
        assert latest(tier.export(tmp_path / "undone")) == after  # nothing is lost: the records are in the log, in their order
        again = tier.run("--now", NOW)
        assert again["bytes_read"] == row["bytes_read"]
        assert latest(tier.export(tmp_path / "again")) == after != before

    def test_many_rounds_in_part(self, tier: TierCli, tmp_path: Path) -> None:
        """A segment that was put together is read in part again; its directory is as good as one that was made of all of it."""
        log = first_round(tier, tmp_path)
        read = []
        for number in range(6):
            log.roll()
            log.put(f"k{number * 300}=new", f"k{number * 300 + 1}", "last=1")
            tier.bring(log.write(tmp_path / f"round-{number}"))
            row = tier.run("--now", NOW + number)
            read.append(row["bytes_read"])
            tier.do("retire")
            tier.do("verify", "--deep")
        assert max(read) < large_log(tier).stat().st_size / 4
        view = latest(tier.export(tmp_path / "out"))
        assert len(view) == KEYS + 1 - 6  # the last key, less the deleted ones
        assert [view[f"k{number * 300}".encode()] for number in range(6)] == [b"new"] * 6
        assert not [number for number in range(6) if f"k{number * 300 + 1}".encode() in view]

    def test_directories_are_made_anew(self, tier: TierCli, tmp_path: Path) -> None:
        size, wanted = self.ready(tier, tmp_path)
        made = {path.name: path.read_bytes() for path in objects(tier, "*.keys")}
        for path in (*objects(tier, "*.keys"), *objects(tier, "*.bloom")):
            path.unlink()
        tier.do("bloom", "rebuild", tier.named)
        assert {path.name: path.read_bytes() for path in objects(tier, "*.keys")} == made
        row = tier.run("--now", NOW)
        assert (row["status"], row["bytes_read"] < size / 2) == ("cleaned", True)
        assert contents(tier.export(tmp_path / "out")) == wanted

    def test_directories_go_with_their_segments(self, tier: TierCli, tmp_path: Path) -> None:
        self.ready(tier, tmp_path)
        (before,) = objects(tier, "*.keys")
        tier.run("--now", NOW)
        tier.do("retire")
        assert before not in objects(tier, "*.keys")
        live = {segment["id"] for segment in tier.do("segments", "list", tier.named)["segments"]}
        assert {path.stem for path in objects(tier, "*.keys")} <= live
