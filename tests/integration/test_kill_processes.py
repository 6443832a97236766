"""Real processes: killed at random moments, stopped beyond their lease, two daemons on one tier. For longer: tests/kill_test.py."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compactor.control.state import PartitionState
from compactor.model.ids import TopicPartition
from compactor.views.checkpoints import read_only_copy
from tests.kill_test import Ordeal
from tests.support.cloud_servers import AnyBucket
from tests.support.deployment import Deployment, GrowingLog
from tests.support.servers import BUCKETS

ORDERS = TopicPartition("orders", 0)
TTL_MS = 800


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments_nothing_is_lost_and_nothing_left_over(tmp_path: Path) -> None:
    ordeal = Ordeal.over(tmp_path, seed=20261121, tell=print, partitions=2)
    ordeal.kill(20)
    assert ordeal.finish() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_while_segments_expire_and_a_topic_is_created_again(tmp_path: Path) -> None:
    ordeal = Ordeal.over(tmp_path, seed=20261125, tell=print, partitions=1, retention=True)
    ordeal.kill(6)
    assert ordeal.finish() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("server", ["moto", "versitygw", "fake-gcs-server", "Azurite", "HDFS"])
def test_killed_over_a_server(request: pytest.FixtureRequest, tmp_path: Path, server: str) -> None:
    bucket: AnyBucket = request.getfixturevalue(BUCKETS[server])
    ordeal = Ordeal.over(tmp_path, 20261123, print, sections=bucket.sections(), partitions=2)
    ordeal.kill(2)
    assert ordeal.finish() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_daemons_share_a_tier_while_one_is_killed_now_and_then(tmp_path: Path) -> None:
    ordeal = Ordeal.over(tmp_path, seed=20261122, tell=print, partitions=4)
    ordeal.share(daemons=2, seconds=25)
    assert ordeal.finish() == []


class Slow:
    """A `run` over one partition that takes some seconds, so that it can be stopped in the middle."""

    def __init__(self, folder: Path) -> None:
        sections = {"lease": {"ttl_ms": TTL_MS}, "cleaner": {"segment_bytes": 16_384}}
        self.deployment = Deployment(folder, {name: dict(values) for name, values in sections.items()})
        self.log = GrowingLog("orders", 0, folder, random.Random(5))
        self.deployment.bring(self.log.write_part(segments=12))
        # The limit is this process's alone: the one that takes over is fast.
        slow = {"TIERED_COMPACTOR__LIMITS__MAX_REQUESTS_PER_S": "15"}
        os.environ.update(slow)
        try:
            self.process = self.deployment.start("run", "orders-0")
        finally:
            for name in slow:
                del os.environ[name]

    def state(self) -> PartitionState:
        return read_only_copy(self.deployment.opened()).open_partition_log(ORDERS).refresh()

    def wait_for(self, what: Callable[[PartitionState], bool]) -> None:
        until = time.monotonic() + 60
        while not (self.deployment.tier.exists() and what(self.state())):
            assert self.process.poll() is None, self.process.said()
            assert time.monotonic() < until, self.state()
            time.sleep(0.05)

    def stop(self) -> None:
        """In the middle of its work, for longer than its lease."""
        self.wait_for(lambda state: state.intent is not None and len(state.intent.receipts) > 0)
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(2 * TTL_MS / 1000)
        assert self.state().intent is not None  # or it had done already what it is to be stopped at

    def go_on(self) -> int:
        self.process.send_signal(signal.SIGCONT)
        return self.process.wait(60)

    def objects(self) -> dict[str, str]:
        """Whatever anybody could read or act upon; a heartbeat is neither."""
        return {key: value for key, value in self.deployment.digest().items() if "/heartbeat/" not in key and ".object-store" not in key}


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    made = Slow(tmp_path)
    yield made
    made.process.put_down()


def test_one_that_was_stopped_while_another_took_over_changes_nothing_and_exits_with_4(slow: Slow) -> None:
    slow.stop()
    (row,) = slow.deployment.do("run", "orders-0")["partitions"]
    assert row["status"] == "resumed"
    before = slow.objects()
    assert slow.go_on() == 4
    assert "fenced" in slow.process.said()
    assert slow.objects() == before
    epochs = slow.deployment.do("checkpoints", "lineage", "orders-0")["epochs"]
    assert [(epoch["leader_epoch"], epoch["ended"]) for epoch in epochs] == [(0, "replaced"), (1, "released")]
    assert epochs[0]["cut_off"]["leader_epoch"] == 1
    assert [(run["status"], run["announced_by"] == epochs[0]["holder"]) for run in epochs[1]["runs"]] == [("resumed", True)]
    assert slow.deployment.do("verify")["ok"]
    assert slow.log.wrong_in(slow.deployment.export(slow.deployment.folder / "out"), clean=True) == []


def test_one_that_nobody_replaced_goes_on_however_late(slow: Slow) -> None:
    slow.stop()
    assert slow.go_on() == 0
    state = slow.state()
    assert [run.status for run in state.runs] == ["cleaned"]
    assert [(epoch.epoch, epoch.ended) for epoch in state.epochs] == [(0, "released")]
    assert slow.log.wrong_in(slow.deployment.export(slow.deployment.folder / "out"), clean=True) == []
