"""The main job on servers of objects: the same result as on a directory, requests and bytes reported, the same over a bad network."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from compactor import demo, demo as demo_data
from compactor.cli.main import entry
from compactor.errors import StoreError
from tests.support.bucket_cli import BucketCli, through
from tests.support.cloud_servers import AnyBucket
from tests.support.deployment import GrowingLog
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import Bucket
from tests.support.servers import ON_ALL_SERVERS, ON_SERVERS
from tests.support.tier_cli import TierCli, contents, latest, visible

pytestmark = pytest.mark.quick

NOW = "1700000100000"
NETWORK = [
    Fault("slow_down", rate=0.04),
    Fault("internal", rate=0.03),
    Fault("reset", rate=0.03),
    Fault("lost", rate=0.05),
    Fault("torn", rate=0.02),
    Fault("cut", rate=0.03),
    Fault("delay", rate=0.02, seconds=0.05),
]


@pytest.fixture
def log_dirs(tmp_path: Path) -> list[Path]:
    """Two imports of one log: plain and compressed batches, tombstones, transactions."""
    log = GrowingLog("orders", 0, tmp_path / "logs", random.Random(11))
    return [log.write_part(), log.write_part()]


@pytest.fixture
def directory(tmp_path: Path) -> TierCli:
    return TierCli(tmp_path / "on a directory", {"publish": {"grace_ms": 0}})


def live_objects(cli: TierCli) -> dict[tuple[int, str], str]:
    """Digest of each object that readers read, by start offset and kind: ids are random."""
    listed = cli.do("segments", "list", "orders-0")["segments"]
    start = {segment["id"]: segment["start_offset"] for segment in listed if not segment["replaced_by"]}
    if isinstance(cli, BucketCli):
        found = cli.objects()
    else:
        found = {path.relative_to(cli.tier).as_posix(): path.read_bytes() for path in (cli.tier / "orders-0").rglob("*") if path.is_file()}
    digests = {}
    for key, data in found.items():
        if key.startswith("orders-0/") and ".object-store" not in key:
            base, _, kind = key.removeprefix("orders-0/").partition(".")
            if base[21:] in start:
                digests[start[base[21:]], kind] = hashlib.sha256(data).hexdigest()
    return digests


def whole_job(cli: TierCli, log_dirs: list[Path]) -> list[dict[tuple[int, str], str]]:
    """Import, plan, run, import, run, verify, retire; what readers had after each step."""
    seen = []
    for log_dir in log_dirs:
        cli.bring(log_dir)
        seen.append(live_objects(cli))
        (plan,) = cli.do("plan", "--now", NOW)["partitions"]
        assert plan["due"]
        (row,) = cli.do("run", "--now", NOW)["partitions"]
        assert row["status"] == "cleaned"
        seen.append(live_objects(cli))
    assert cli.do("verify")["ok"]
    assert cli.retire_everything()
    seen.append(live_objects(cli))
    return seen


@ON_ALL_SERVERS
def test_the_same_objects_as_on_a_directory(
    proxied_bucket: tuple[FaultProxy, AnyBucket], directory: TierCli, log_dirs: list[Path], tmp_path: Path
) -> None:
    cli = through(tmp_path / "on a bucket", proxied_bucket)
    assert whole_job(cli, log_dirs) == whole_job(directory, log_dirs)
    exported, other = cli.export(tmp_path / "exported"), directory.export(tmp_path / "exported here")
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == {path.name: path.read_bytes() for path in other.iterdir()}
    keys = {key.partition("/")[0] for key in cli.objects()}
    assert keys == {".tiered-compactor", "orders-0", "tier-id.json"}


@ON_ALL_SERVERS
def test_requests_and_bytes_are_those_that_went_over_the_wire(
    proxied_bucket: tuple[FaultProxy, AnyBucket], log_dirs: list[Path], tmp_path: Path
) -> None:
    proxy = proxied_bucket[0]
    cli = through(tmp_path / "on a bucket", proxied_bucket)
    for log_dir in log_dirs:
        cli.bring(log_dir)
        requests, read, written, paths = (
            Counter(proxy.seen.requests), proxy.seen.bytes_read, proxy.seen.bytes_written, Counter(proxy.seen.read),
        )  # fmt: skip
        document = cli.do("run", "--now", NOW)
        store, (row,) = document["store"], document["partitions"]
        assert store["requests"] == dict(proxy.seen.requests - requests)
        assert store["bytes_read"] == proxy.seen.bytes_read - read
        assert store["bytes_written"] == proxy.seen.bytes_written - written
        segments = {path: size for path, size in (proxy.seen.read - paths).items() if path.endswith(".log")}
        assert row["bytes_read"] == sum(segments.values()) > 0
        assert 0 < row["requests"] <= sum(store["requests"].values())
        assert "other" not in store["requests"]


@ON_ALL_SERVERS
def test_the_same_result_over_a_bad_network(
    proxied_bucket: tuple[FaultProxy, AnyBucket], directory: TierCli, log_dirs: list[Path], tmp_path: Path, brisk: None
) -> None:
    proxy = proxied_bucket[0]
    truth = whole_job(directory, log_dirs)
    cli = through(tmp_path / "on a bucket", proxied_bucket)
    proxy.faults = [*NETWORK]
    assert whole_job(cli, log_dirs) == truth
    assert proxy.seen.faults.keys() == {fault.kind for fault in NETWORK}, "or this test shows little"
    exported = cli.export(tmp_path / "exported")
    other = directory.export(tmp_path / "exported here")
    assert (contents(exported), latest(exported), visible(exported)) == (contents(other), latest(other), visible(other))


@ON_SERVERS
@pytest.mark.parametrize("damage", ["flip", "short", "cut", "lost"])
def test_everything_arrives_damaged_once(
    proxied_bucket: tuple[FaultProxy, AnyBucket], directory: TierCli, log_dirs: list[Path], tmp_path: Path, brisk: None, damage: str
) -> None:
    """Also where the server names no checksum: records, indexes and segments are judged by their own."""
    proxy = proxied_bucket[0]
    cli = through(tmp_path / "on a bucket", proxied_bucket)
    for each in (cli, directory):
        each.bring(log_dirs[0])
    objects = sorted(cli.objects())
    proxy.faults = [Fault(damage, ("get",), match=f"{re.escape(key)}$", times=1) for key in objects]
    for each in (cli, directory):
        assert each.do("run", "--now", NOW)["partitions"][0]["status"] == "cleaned"
    assert live_objects(cli) == live_objects(directory)
    assert proxy.seen.faults[damage] > 10
    proxy.faults = [Fault(damage, ("get",), match=f"{re.escape(key)}$", times=1) for key in cli.objects()]
    assert cli.do("verify")["ok"]
    assert latest(cli.export(tmp_path / "exported")) == latest(directory.export(tmp_path / "exported here"))


def test_demo_on_a_bucket(s3_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make = demo_data.DemoTopicSettings.__init__
    small = {"records": 4_000, "keys": 400, "segment_bytes": 1 << 17, "transactions": 4}
    monkeypatch.setattr(demo_data.DemoTopicSettings, "__init__", lambda self, now_ms: make(self, now_ms, **small))
    monkeypatch.setenv("TIERED_COMPACTOR__S3__ENDPOINT_URL", s3_bucket.server.endpoint)
    monkeypatch.setenv("TIERED_COMPACTOR__S3__REGION", s3_bucket.server.region)
    monkeypatch.chdir(tmp_path)
    assert entry(["demo", "--tier", s3_bucket.url, "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert {key.partition("/")[0] for key in BucketCli(tmp_path / "cli", s3_bucket).objects()} == {
        ".tiered-compactor",
        "customers-0",
        "tier-id.json",
    }
    assert entry(["demo", "--tier", s3_bucket.url]) == 2
    assert "there is a tier" in capsys.readouterr().err


def test_demo_tries_the_store_before_it_generates_a_topic(
    s3_proxy: tuple[FaultProxy, Bucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy, bucket = s3_proxy
    proxy.strip = {"if-none-match"}
    monkeypatch.setenv("TIERED_COMPACTOR__S3__ENDPOINT_URL", bucket.server.endpoint)
    monkeypatch.setenv("TIERED_COMPACTOR__S3__REGION", bucket.server.region)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "write_demo_topic", pytest.fail)
    assert entry(["demo", "--tier", bucket.url]) == StoreError.exit_code
    assert "ignores conditional requests" in capsys.readouterr().err


def test_nothing_of_the_configuration_is_a_secret(s3_bucket: Bucket, tmp_path: Path) -> None:
    cli = BucketCli(tmp_path / "on a bucket", s3_bucket)
    shown = json.dumps(cli.do("config", "show"))
    assert s3_bucket.url in shown
    assert s3_bucket.server.secret_key not in shown
