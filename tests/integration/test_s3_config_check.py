"""What `config check` finds on a bucket, as a user sees it, and what follows for `plan`; [limits] and progress over a whole command."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compactor import bootstrap
from compactor.cli.commands import config_check as config_command
from compactor.config.settings import RateLimitSettings
from compactor.storage import factory
from compactor.storage.factory import RateLimits
from tests.support.bucket_cli import BucketCli, Minutes, through
from tests.support.cloud_servers import AnyBucket
from tests.support.deployment import GrowingLog
from tests.support.fault_proxy import BUSY, CONDITIONS, Fault, FaultProxy
from tests.support.s3_server import Bucket
from tests.support.servers import ON_ALL_SERVERS, ON_SERVERS_THAT_SIGN_NOTHING
from tests.support.tier_cli import TierCli

VERSIONING: dict[str, Callable[[Bucket], object]] = {
    "versioning": lambda bucket: bucket.server.client().put_bucket_versioning(
        Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
    ),
    "versioning that was suspended": lambda bucket: bucket.server.client().put_bucket_versioning(
        Bucket=bucket.name, VersioningConfiguration={"Status": "Suspended"}
    ),
    "object lock": lambda bucket: bucket.server.client().put_object_lock_configuration(
        Bucket=bucket.name, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled"}
    ),
}


DELETION = {"s3": "s3:DeleteObject", "gs": "storage.objects.delete", "az": "blobs/delete", "hdfs": "w and x on the directory"}


@pytest.fixture
def proxy(proxied_bucket: tuple[FaultProxy, AnyBucket]) -> FaultProxy:
    return proxied_bucket[0]


@pytest.fixture
def server_cli(tmp_path: Path, proxied_bucket: tuple[FaultProxy, AnyBucket]) -> BucketCli:
    return through(tmp_path / "cli", proxied_bucket)


@pytest.fixture
def cli(tmp_path: Path, s3_proxy: tuple[FaultProxy, Bucket]) -> BucketCli:
    return through(tmp_path / "cli", s3_proxy)


def check(cli: TierCli) -> dict[str, dict[str, Any]]:
    document = cli.ask("config", "check").document
    return {problem["kind"]: problem for problem in document["problems"]}


def errors(cli: TierCli) -> dict[str, dict[str, Any]]:
    """A server may not know what S3 keeps of deleted objects: that is no more than a note."""
    return {kind: problem for kind, problem in check(cli).items() if problem["severity"] != "note"}


def cleaned_once_and_due_again(cli: TierCli, tmp_path: Path) -> None:
    """So that there is a round to judge the next one by."""
    log = GrowingLog("orders", 0, tmp_path / "logs", random.Random(3))
    cli.bring(log.write_part(segments=2, batches=10))
    assert cli.run()["status"] == "cleaned"
    cli.bring(log.write_part(segments=2, batches=10))


def planned(cli: TierCli) -> dict[str, Any]:
    (row,) = cli.do("plan", "--force")["partitions"]
    assert row["due"]
    return dict(row)


# ---- does deleting save anything? --------------------------------------------------------------------------------------------


def test_a_plain_bucket_saves_what_the_last_round_lets_expect(cli: BucketCli, tmp_path: Path) -> None:
    cleaned_once_and_due_again(cli, tmp_path)
    row = planned(cli)
    assert 0 < row["expected_saving_bytes"] < row["bytes_to_write"]
    assert "last round" in row["expected_saving_why"]
    assert check(cli) == {}


@pytest.mark.parametrize("state", VERSIONING)
def test_a_bucket_that_keeps_what_is_deleted_promises_nothing(cli: BucketCli, tmp_path: Path, state: str) -> None:
    if state == "object lock":
        name = f"{cli.bucket.name}-locked"
        cli.bucket.server.client().create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
        cli.set(tier={"url": f"s3://{name}/tier"})
        VERSIONING[state](Bucket(cli.bucket.server, name))
    else:
        VERSIONING[state](cli.bucket)
    cleaned_once_and_due_again(cli, tmp_path)
    row = planned(cli)
    assert row["expected_saving_bytes"] is None
    assert "keeps deleted objects" in row["expected_saving_why"]
    found = check(cli)
    assert found["object-lock" if state == "object lock" else "versioning"]["severity"] == "warning"
    answer = cli.ask("plan", "--force", output="table")
    assert "keeps deleted objects" in str(answer.document)


def test_a_bucket_that_does_not_say_promises_nothing(cli: BucketCli, s3_proxy: tuple[FaultProxy, Bucket], tmp_path: Path) -> None:
    cleaned_once_and_due_again(cli, tmp_path)
    s3_proxy[0].faults = [Fault("denied", ("other",))]
    row = planned(cli)
    assert row["expected_saving_bytes"] is None
    assert "does not show" in row["expected_saving_why"]
    found = check(cli)["versioning-unknown"]
    assert (found["severity"], "s3:GetBucketVersioning" in found["hint"]) == ("note", True)
    assert cli.ask("config", "check").code == 0


def test_what_plan_says_of_requests_is_near_what_run_needs(cli: BucketCli, tmp_path: Path) -> None:
    cleaned_once_and_due_again(cli, tmp_path)
    row = planned(cli)
    assert row["cost_usd"] > 0
    done = cli.run()
    assert row["requests"] / 3 < done["requests"] < row["requests"] * 3


# ---- the rest of config check ------------------------------------------------------------------------------------------------


@ON_ALL_SERVERS
def test_the_race_is_run_once_for_a_bucket(server_cli: BucketCli, proxy: FaultProxy) -> None:
    assert errors(server_cli) == {}
    first = proxy.seen.requests["put"]
    assert errors(server_cli) == {}
    assert first > 200
    assert proxy.seen.requests["put"] - first < 20
    assert list(server_cli.objects()) == [".tiered-compactor/probe/conditional-puts-raced-1"]


@ON_SERVERS_THAT_SIGN_NOTHING
def test_a_store_without_conditional_puts_is_refused(server_cli: BucketCli, proxy: FaultProxy) -> None:
    proxy.strip = CONDITIONS
    for _ in range(2):
        answer = server_cli.ask("config", "check")
        assert answer.code == 5
        assert "ignores conditional requests" in str(answer.document["problems"])
    assert server_cli.objects() == {}, "nothing remembers a race that was lost"


@ON_ALL_SERVERS
def test_missing_permissions_are_named_all_at_once(server_cli: BucketCli, proxy: FaultProxy) -> None:
    proxy.faults = [Fault("denied", ("put", "delete"))]
    answer = server_cli.ask("config", "check")
    found = check(server_cli)
    assert answer.code == 5
    assert {"cannot-write", "cannot-overwrite", "cannot-delete"} <= found.keys()
    assert DELETION[server_cli.bucket.url.partition(":")[0]] in found["cannot-delete"]["hint"]


@ON_ALL_SERVERS
@pytest.mark.parametrize("minutes_ahead", [-20, 20])
def test_a_clock_that_differs_is_told(server_cli: BucketCli, monkeypatch: pytest.MonkeyPatch, minutes_ahead: int) -> None:
    really = bootstrap.wall_clock_ms
    monkeypatch.setattr(config_command, "wall_clock_ms", lambda: really() - minutes_ahead * 60_000)
    found = check(server_cli)["clock"]
    assert found["severity"] == "warning"
    assert ("ahead of" if minutes_ahead > 0 else "behind") in found["detail"]
    assert server_cli.ask("config", "check").code == 0


@ON_ALL_SERVERS
def test_a_store_that_is_down_is_said_once(server_cli: BucketCli, proxy: FaultProxy, minutes: Minutes) -> None:
    proxy.faults = [Fault("slow_down")]
    answer = server_cli.ask("config", "check")
    assert (answer.code, len(answer.document["problems"])) == (5, 1)
    assert re.search(BUSY, answer.document["problems"][0]["detail"])


# ---- [limits] ----------------------------------------------------------------------------------------------------------------


class Slept:
    """Time that passes by sleeping only; buckets that the whole process shares, as it is in a command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.made: dict[RateLimitSettings, RateLimits] = {}
        self.sleepers: set[str] = set()
        monkeypatch.setattr(factory, "_shared_rate_limits", self.buckets)

    def buckets(self, limits: RateLimitSettings) -> RateLimits:
        if limits not in self.made:
            self.made[limits] = RateLimits(limits, clock=lambda: self.seconds, sleep=self.sleep)
        return self.made[limits]

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.sleepers.add(threading.current_thread().name)


@pytest.mark.parametrize(
    ("limit", "rate", "used"),
    [
        ("max_requests_per_s", 10, lambda store: sum(store["requests"].values())),
        ("max_read_bytes_per_s", 2_000, lambda store: store["bytes_read"]),
        ("max_write_bytes_per_s", 1_000, lambda store: store["bytes_written"]),
    ],
)
def test_limits_hold_over_a_whole_run(
    cli: BucketCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, rate: int, used: Callable[[dict[str, Any]], int]
) -> None:
    """Data and control store and the threads of a round draw on one bucket; the first second's worth is free."""
    cleaned_once_and_due_again(cli, tmp_path)
    slept = Slept(monkeypatch)
    cli.set(limits={limit: rate}, lease={"ttl_ms": 600_000})
    document = cli.do("run", "--force")
    assert document["partitions"][0]["status"] == "cleaned"
    assert len(slept.made.keys() - {RateLimitSettings()}) == 1
    amount = used(document["store"])
    assert amount > 3 * rate, "or this test shows nothing"
    # Before each request or transfer that is over the limit somebody slept until its share was there.
    assert slept.seconds >= (amount - rate) / rate - 0.5


def test_a_heartbeat_does_not_wait_for_its_turn(
    cli: BucketCli, s3_proxy: tuple[FaultProxy, Bucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind gigabytes that do, it would come too late, and another compactor would take over from one that is alive."""
    cleaned_once_and_due_again(cli, tmp_path)
    slept = Slept(monkeypatch)
    cli.set(limits={"max_requests_per_s": 2, "max_write_bytes_per_s": 100}, lease={"ttl_ms": 150})
    beats: list[str] = []
    s3_proxy[0].before = lambda request, path: beats.append(path) if "/heartbeat/" in path and request == "put" else None
    s3_proxy[0].faults = [Fault("delay", ("put",), match=r"orders-0/.*\.log$", seconds=0.5)]
    before = s3_proxy[0].seen.requests.copy()
    document = cli.do("run", "--force")
    assert document["partitions"][0]["status"] == "cleaned"
    assert beats
    assert slept.sleepers
    assert "heartbeat" not in slept.sleepers
    assert document["store"]["requests"] == dict(s3_proxy[0].seen.requests - before), "but it is counted"


def test_threads_that_fetch_parts_share_the_limit(s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = Slept(monkeypatch)
    store = s3_bucket.open(limits=RateLimitSettings(max_read_bytes_per_s=4 << 20))
    (tmp_path / "large").write_bytes(random.Random(1).randbytes(20 << 20))
    store.create_from_file("large", tmp_path / "large")
    other = s3_bucket.open(limits=RateLimitSettings(max_read_bytes_per_s=4 << 20))
    assert slept.seconds == 0
    for each in (store, other):
        each.download("large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "large").read_bytes()
    assert slept.seconds >= (40 - 4) / 4 - 0.5


# ---- progress ----------------------------------------------------------------------------------------------------------------


def test_long_commands_say_how_far_they_are(cli: BucketCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no patience at all: every command over partitions tells what it is doing, and a round tells of bytes."""
    from compactor.cli import output

    cleaned_once_and_due_again(cli, tmp_path)
    monkeypatch.setattr(output, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(output, "_LINE_SECONDS", 0.0)
    first = cli.do("segments", "list", "orders-0")["segments"][0]
    more = GrowingLog("orders", 1, tmp_path / "logs", random.Random(4)).write_part(segments=2, batches=10)
    for command in (
        ["import", more, "--topic", "orders", "--partition", "1"],
        ["segments", "dump", "orders-0", first["id"]], ["topics"], ["plan"], ["run", "--force"], ["verify"], ["retire"], ["runs", "list"],
        ["checkpoints", "list"], ["checkpoints", "verify"], ["export", "orders-0", tmp_path / "out"], ["explain", "orders-0", "--key", "k"],
    ):  # fmt: skip
        answer = cli.ask(*command)
        assert answer.code == 0, answer
        told = [json.loads(line)["progress"] for line in answer.stderr.splitlines() if line.startswith("{")]
        assert any(each["done"] > 0 for each in told), command
        if command[0] == "run":
            assert any(each["unit"] == "bytes" and "orders-0 (1 of 2)" in each["title"] and each["done"] > 0 for each in told)
