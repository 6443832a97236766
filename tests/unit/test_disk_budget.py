"""The disk budget: what is granted, kept and waited for; a full disk; what killed processes leave behind."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compactor.errors import OutOfBudget
from compactor.local import budget as disk
from compactor.local.budget import (
    BLOCK,
    DiskBudget,
    DiskReservationExceeded,
    DiskSpaceReservation,
    RoundDiskUsage,
    is_disk_full_error,
    retry_while_disk_full,
    round_up_to_blocks,
    spool_folder,
)


class TestGrants:
    def test_a_file_counts_in_whole_blocks(self) -> None:
        assert [round_up_to_blocks(size) for size in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK, BLOCK, 2 * BLOCK]

    def test_more_than_the_whole_budget_is_refused_with_the_figure(self) -> None:
        with pytest.raises(OutOfBudget, match="group 3 needs 101 B of local disk.* at least 101"):
            DiskBudget(100).reserve_space(RoundDiskUsage(), 101, "group 3")

    def test_waits_until_somebody_gives_back(self) -> None:
        budget, mine = DiskBudget(100), RoundDiskUsage()
        first = budget.reserve_space(mine, 60, "a")
        got: list[DiskSpaceReservation] = []
        waiter = threading.Thread(target=lambda: got.append(budget.reserve_space(RoundDiskUsage(), 50, "b")))
        waiter.start()
        waiter.join(0.2)
        assert not got
        first.release_all()
        waiter.join(10)
        assert got[0].size == budget.used == 50
        assert (budget.peak, mine.peak, mine.used) == (60, 60, 0)

    def test_first_come_first_served_so_that_a_large_one_is_not_passed_by_small_ones(self) -> None:
        budget = DiskBudget(100)
        held = budget.reserve_space(RoundDiskUsage(), 50, "held")
        order: list[str] = []

        def wait_for(size: int, name: str) -> threading.Thread:
            def run() -> None:
                with budget.reserve_space(RoundDiskUsage(), size, name):
                    order.append(name)

            thread = threading.Thread(target=run)
            thread.start()
            while len(budget._queue) < len(threads) + 1:
                time.sleep(0.01)
            return thread

        threads: list[threading.Thread] = []
        threads.append(wait_for(100, "large"))
        threads.append(wait_for(10, "small"))
        assert budget.reserve_for_prefetch(RoundDiskUsage(), 10) is None  # nor by what could wait
        held.release_all()
        for thread in threads:
            thread.join(10)
        assert order == ["large", "small"]

    def test_more_than_foreseen_is_taken_from_what_is_free_or_overruns(self) -> None:
        budget = DiskBudget(100)
        with budget.reserve_space(RoundDiskUsage(), 40, "a") as grant:
            grant.reserve_bytes_on_disk(70)
            assert budget.used == 70
            with pytest.raises(DiskReservationExceeded, match="at least 110"):
                grant.reserve_bytes_on_disk(40)
        assert budget.used == 0

    def test_what_is_handed_over_is_what_was_taken(self) -> None:
        budget = DiskBudget(100)
        with budget.reserve_space(RoundDiskUsage(), 90, "a") as grant:
            grant.reserve_bytes_on_disk(30)
            other = grant.split_off_used()
            assert budget.used == 30
        assert budget.used == 30
        other.release_all()
        assert budget.used == 0


class TestKeeping:
    def test_what_was_not_used_for_longest_goes_first(self) -> None:
        budget, gone = DiskBudget(100), list[str]()

        def dropping(name: str) -> Callable[[], None]:
            return lambda: gone.append(name)

        kept = {name: budget.try_cache_file(RoundDiskUsage(), 30, dropping(name)) for name in "abc"}
        assert kept["a"] is not None
        assert budget.try_pin(kept["a"])
        budget.unpin_file(kept["a"])
        budget.reserve_space(RoundDiskUsage(), 40, "x")
        assert gone == ["b"]
        assert kept["b"] is not None
        assert not budget.try_pin(kept["b"])

    def test_pinned_files_stay_and_are_waited_for(self) -> None:
        budget, gone = DiskBudget(100), list[int]()
        kept = budget.try_cache_file(RoundDiskUsage(), 60, lambda: gone.append(1))
        assert kept is not None
        assert budget.try_pin(kept)
        with budget.reserve_space(RoundDiskUsage(), 40, "x") as grant, pytest.raises(DiskReservationExceeded):
            grant.reserve_bytes_on_disk(41)
        threading.Timer(0.2, budget.unpin_file, (kept,)).start()
        budget.reserve_space(RoundDiskUsage(), 50, "y")
        assert gone == [1]

    def test_files_that_are_wanted_go_last(self) -> None:
        budget, gone = DiskBudget(100), list[str]()
        wanted = budget.try_cache_file(RoundDiskUsage(), 30, lambda: gone.append("wanted"))
        budget.try_cache_file(RoundDiskUsage(), 30, lambda: gone.append("other"))
        assert wanted is not None
        with budget.reserve_space(RoundDiskUsage(), 60, "x", (wanted,)):
            assert gone == ["other"]
            assert wanted.pins == 1
            budget.unpin_file(wanted)

    def test_any_number_of_threads_never_hold_more_than_the_budget(self) -> None:
        total = 50 * BLOCK
        budget = DiskBudget(total)
        held = [0]
        worst = [0]
        lock = threading.Lock()

        def change(size: int) -> None:
            with lock:
                held[0] += size
                worst[0] = max(worst[0], held[0])

        def work(seed: int) -> None:
            rng = random.Random(seed)
            usage = RoundDiskUsage()
            for _ in range(300):
                size = rng.randrange(1, 20) * BLOCK
                with budget.reserve_space(usage, size, "x") as grant:
                    change(size)
                    if rng.random() < 0.5:
                        change(-size)
                        continue
                    more = rng.randrange(1, 30) * BLOCK
                    try:
                        grant.reserve_bytes_on_disk(size)
                        grant.reserve_bytes_on_disk(more)
                        change(more)
                        size += more
                    except DiskReservationExceeded:
                        pass
                    change(-size)
                    kept = rng.randrange(1, 10) * BLOCK
                    change(kept)  # written within the grant, then kept besides it or gone
                    if budget.try_cache_file(usage, kept, lambda kept=kept: change(-kept)) is None:  # type: ignore[misc]
                        change(-kept)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        budget.delete_unpinned_files()
        assert worst[0] <= total
        assert budget.peak <= total
        assert (budget.used, held[0]) == (0, 0)


class TestFullDisk:
    def test_is_told_from_a_budget_that_is_used_up(self) -> None:
        wrapped = OutOfBudget("wrapped")
        wrapped.__cause__ = OSError(errno.ENOSPC, "full")
        assert is_disk_full_error(wrapped)
        assert not is_disk_full_error(OutOfBudget("too small"))

    def test_pauses_gives_what_it_can_and_goes_on(self) -> None:
        budget, events = DiskBudget(100), list[str]()
        budget.try_cache_file(RoundDiskUsage(), 10, lambda: events.append("dropped"))
        attempts = iter([OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota"), None])

        def work() -> int:
            problem = next(attempts)
            if problem:
                raise problem
            return 7

        assert retry_while_disk_full(work, budget, lambda seconds: events.append("slept")) == 7
        assert events == ["dropped", "slept", "slept"]

    def test_gives_up_after_a_while_with_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "PATIENCE_S", 3.0)
        slept = list[float]()

        def work() -> None:
            raise OSError(errno.ENOSPC, "full")

        with pytest.raises(OutOfBudget, match=r"full, and was so for 3 seconds.*finished work is not repeated"):
            retry_while_disk_full(work, DiskBudget(100), slept.append)
        assert sum(slept) == 3

    def test_other_errors_are_no_reason_to_wait(self) -> None:
        def work() -> None:
            raise OSError(errno.EACCES, "no")

        with pytest.raises(PermissionError):
            retry_while_disk_full(work, DiskBudget(100), lambda _: pytest.fail("slept"))


class TestSpool:
    PROGRAM = (
        "import sys, time, pathlib; from compactor.local.budget import spool_folder; "
        "p = spool_folder(pathlib.Path(sys.argv[1])); (p / 'data').write_bytes(bytes(9)); print(p, flush=True); {}"
    )

    def start(self, state_dir: Path, then: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen([sys.executable, "-c", self.PROGRAM.format(then), str(state_dir)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    def test_what_a_killed_process_left_is_swept_what_a_living_one_has_is_not(self, tmp_path: Path) -> None:
        living, its = self.start(tmp_path, "time.sleep(60)")
        killed, left = self.start(tmp_path, "time.sleep(60)")
        try:
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait()
            assert (left / "data").exists()
            ended, ours = self.start(tmp_path, "pass")
            ended.wait()
            assert not left.exists()
            assert (its / "data").exists()
            assert not ours.exists()  # a process that ends takes its folder with it
        finally:
            for process in (living, killed):
                process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()
            if ended.stdout:
                ended.stdout.close()

    def test_one_folder_per_process(self, tmp_path: Path) -> None:
        (tmp_path / "spool" / "left-behind").mkdir(parents=True)
        folder = spool_folder(tmp_path)
        assert folder == spool_folder(tmp_path)
        assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == sorted([folder.name, "lock"])
