"""Rounds within a disk budget: watched while they run, on a file system of that very size, with a full disk, next to a broker's logs."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compactor.local import budget as disk
from compactor.local.budget import BLOCK
from tests.builders import LZ4, NONE, LogBuilder
from tests.support.tier_cli import TierCli, latest
from tests.support.watching import Watch, used

SEGMENT = 300_000


def log_of(segments: int, *, keys: int = 3_000, codec: int = NONE, seed: int = 1, start: int = 0) -> LogBuilder:
    """About SEGMENT bytes a segment, of records that do not compress."""
    rng = random.Random(seed)
    log = LogBuilder(next_offset=start)
    for number in range(segments):
        if number:
            log.roll()
        size = 0
        while size < SEGMENT - 30_000:
            batch = [b"k%d=" % rng.randrange(keys) + rng.randbytes(500) for _ in range(20)]
            size += sum(map(len, batch))
            log.put(*batch, codec=codec)
    return log


def tier_with(folder: Path, log: LogBuilder, **cleaner: Any) -> TierCli:
    tier = TierCli(folder, {"cleaner": {"segment_bytes": SEGMENT, **cleaner}})
    tier.bring(log.write(folder / "log"))
    return tier


def needed(tier: TierCli) -> int:
    """What a budget that is too small is told."""
    before = tier.digest()
    tier.set(cleaner={"disk_budget_bytes": 3 * BLOCK})
    answer = tier.ask("run", "--force")
    assert answer.code == 6, answer
    assert answer.document["partitions"][0]["status"] == "quarantined"
    figure = int(answer.stderr.partition("Set disk_budget_bytes to at least ")[2].split(",")[0])
    assert {name: data for name, data in tier.digest().items() if "/segments/" in name or name.startswith("orders")} == {
        name: data for name, data in before.items() if "/segments/" in name or name.startswith("orders")
    }
    return figure


def test_too_small_a_budget_is_refused_with_the_figure_and_that_figure_is_enough(tmp_path: Path) -> None:
    tier = tier_with(tmp_path, log_of(4))
    figure = needed(tier)
    assert figure <= 2.1 * SEGMENT
    tier.set(cleaner={"disk_budget_bytes": figure})
    with Watch(tmp_path / "state" / "spool") as watch:
        row = tier.run()
    assert row["status"] == "cleaned"
    assert BLOCK < watch.most <= figure
    assert row["peak_disk_bytes"] <= figure
    assert tier.ask("verify").code == 0


def test_who_looks_into_segments_stays_within_the_budget(tmp_path: Path) -> None:
    tier = tier_with(tmp_path, log_of(4))
    segment = tier.do("segments", "list", "orders-0")["segments"][0]["id"]
    tier.set(cleaner={"disk_budget_bytes": 2 * SEGMENT})
    looks = [("explain", "orders-0", "--key", "key-1"), ("segments", "dump", "orders-0", segment), ("verify",)]
    for look in looks:
        with Watch(tmp_path / "state" / "spool") as watch:
            tier.do(*look)
        assert watch.most <= 2 * SEGMENT
    tier.set(cleaner={"disk_budget_bytes": 3 * BLOCK})
    for look in looks:
        answer = tier.ask(*look)
        assert answer.code == 6, look
        assert "Set disk_budget_bytes to at least " in answer.stderr


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("segments", [2.1, 3, 5, 40])
def test_what_is_staged_never_exceeds_the_budget(tmp_path: Path, segments: float, threads: int) -> None:
    """Whatever the number of threads; and the result is the same whatever the budget."""
    budget = int(segments * SEGMENT)
    log = log_of(8)
    want = latest(log.write(tmp_path / "log"))
    tier = TierCli(tmp_path, {"cleaner": {"segment_bytes": SEGMENT, "disk_budget_bytes": budget}, "daemon": {"threads": threads}})
    tier.bring(tmp_path / "log")
    with Watch(tmp_path / "state" / "spool") as watch:
        row = tier.run()
    assert watch.looks > 20
    assert 0 < watch.most <= budget
    assert watch.most <= row["peak_disk_bytes"] <= budget
    assert latest(tier.export(tmp_path / "out")) == want


def test_a_budget_for_everything_means_that_everything_is_fetched_once(tmp_path: Path) -> None:
    tier = tier_with(tmp_path, log_of(6), disk_budget_bytes=20 * SEGMENT)
    size = sum(path.stat().st_size for path in (tmp_path / "log").glob("*.log"))
    assert tier.run()["bytes_read"] == size


def test_the_budget_does_not_change_the_result(tmp_path: Path) -> None:
    views = []
    for number, segments in enumerate((2.1, 30)):
        folder = tmp_path / str(number)
        folder.mkdir()
        tier = tier_with(folder, log_of(5), disk_budget_bytes=int(segments * SEGMENT))
        tier.run("--now", 1_000_000)
        out = tier.export(folder / "out")
        views.append({path.name: path.read_bytes() for path in sorted(out.glob("*.log"))})
    assert views[0] == views[1]


@contextmanager
def small_file_system(folder: Path, size: int) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_file_system_of_the_very_size_of_the_budget_is_enough(tmp_path: Path) -> None:
    """A deleted file that somebody still had open would count here, though no directory shows it."""
    log = log_of(8, codec=LZ4)
    want = latest(log.write(tmp_path / "log"))
    budget = int(2.3 * SEGMENT) // BLOCK * BLOCK
    with small_file_system(tmp_path / "small", budget) as small:
        tier = TierCli(
            tmp_path,
            {
                "cleaner": {"segment_bytes": SEGMENT, "disk_budget_bytes": budget},
                "tier": {"state_dir": str(small)},
                "daemon": {"threads": 3},
            },
        )
        tier.bring(tmp_path / "log")
        assert tier.run()["status"] == "cleaned"
    assert latest(tier.export(tmp_path / "out")) == want


def test_a_disk_that_somebody_else_has_filled_pauses_the_round(tmp_path: Path) -> None:
    log = log_of(4)
    want = latest(log.write(tmp_path / "log"))
    with small_file_system(tmp_path / "small", 4 * SEGMENT) as small:
        tier = TierCli(
            tmp_path, {"cleaner": {"segment_bytes": SEGMENT, "disk_budget_bytes": 3 * SEGMENT}, "tier": {"state_dir": str(small)}}
        )
        tier.bring(tmp_path / "log")
        (small / "foreign").write_bytes(bytes(4 * SEGMENT - 40 * BLOCK))
        timer = threading.Timer(3, (small / "foreign").unlink)
        timer.start()
        begun = time.monotonic()
        assert tier.run()["status"] == "cleaned"
        assert time.monotonic() - begun > 2
        timer.join()
    assert latest(tier.export(tmp_path / "out")) == want


def test_one_that_stays_full_ends_the_round_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PATIENCE_S", 2.0)
    with small_file_system(tmp_path / "small", 4 * SEGMENT) as small:
        tier = TierCli(
            tmp_path, {"cleaner": {"segment_bytes": SEGMENT, "disk_budget_bytes": 3 * SEGMENT}, "tier": {"state_dir": str(small)}}
        )
        tier.bring(log_of(4).write(tmp_path / "log"))
        (small / "foreign").write_bytes(bytes(4 * SEGMENT - 40 * BLOCK))
        tier.refused("run", "--force", code=6, says=" is full, and was so for ")
        assert used(small) - used(small / "foreign") < 4 * SEGMENT
        (small / "foreign").unlink()
        assert tier.run()["status"] in ("resumed", "cleaned")
    assert tier.ask("verify").code == 0


class TestBrokerLogs:
    def test_a_segment_that_lies_in_a_brokers_log_directory_is_not_fetched(self, tmp_path: Path) -> None:
        log = log_of(4).write(tmp_path / "kafka-logs" / "orders-0")
        tier = TierCli(tmp_path, {"cleaner": {"segment_bytes": SEGMENT, "local_log_dirs": [str(tmp_path / "kafka-logs")]}})
        tier.bring(log)
        damaged, gone, *same = sorted(log.glob("*.log"))
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1  # the broker's is another one: same length, other bytes
        damaged.write_bytes(data)
        gone_size = gone.stat().st_size
        gone.unlink()
        row = tier.run()
        assert row["bytes_read"] == len(data) + gone_size
        assert row["status"] == "cleaned"
        assert len(same) == 2
        assert tier.ask("verify").code == 0

    def test_a_directory_that_is_not_there_is_no_problem(self, tmp_path: Path) -> None:
        tier = tier_with(tmp_path, log_of(2), local_log_dirs=[str(tmp_path / "nowhere")])
        assert tier.run()["status"] == "cleaned"


def test_nothing_stays_behind(tmp_path: Path) -> None:
    tier = tier_with(tmp_path, log_of(3))
    tier.run()
    spool = tmp_path / "state" / "spool"
    assert [path.name for path in spool.rglob("*") if path.is_file()].count("lock") == len(
        [path for path in spool.rglob("*") if path.is_file()]
    )
    shutil.rmtree(spool)
