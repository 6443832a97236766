"""Pinterest's own consumer reads originals and generations over HTTP: nothing of this project's judges here."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest

from tests.builders import LogBuilder
from tests.plain_format import read_batches
from tests.support.pinterest_consumer import ConsumerUnavailable, Record, class_path, read_partition
from tests.support.plain_pinterest import upload
from tests.support.s3_server import Bucket
from tests.support.side_broker import PartitionStory, SideBroker, SideCluster, SideTier, settle
from tests.support.tier_cli import TierCli, batches_of

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module", autouse=True)
def _jars() -> None:
    try:
        class_path()
    except ConsumerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to run Pinterest's consumer: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture
def log() -> LogBuilder:
    """In which a round takes away whole segments, and the tails of others."""
    made = LogBuilder()
    for number in range(6):
        for record in (f"x{number}=1", "gone=1"):
            made.put(record)
        made.roll()
        for record in ("gone=2", f"w{number}=1", "gone=3"):
            made.put(record)
        made.roll()
        made.put(f"y{number}=1", "gone=", pid=7, txn=True)
        made.add("7 commits; /")
    made.add("last=1; /")
    return made


def records(folder: Path) -> list[Record]:
    return [(r.offset, r.key, r.value) for batch in batches_of(folder) for r in batch.records]


def put_tree(bucket: Bucket, root: Path, prefix: str) -> None:
    client = bucket.server.client()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=bucket.name, Key=f"{prefix}/{path.relative_to(root)}", Body=path.read_bytes())


def check(bucket: Bucket, prefix: str, expected: list[Record], *, bits: int = 0) -> None:
    """From every seventh position: each record once, to the end."""
    end = expected[-1][0] + 1
    runs = read_partition(bucket, prefix, "orders-0", range(expected[0][0], end, 7), end, bits=bits)
    assert len(runs) == len(range(expected[0][0], end, 7))
    for run in runs:
        assert not run.stalled, run.position
        assert run.records == [record for record in expected if record[0] >= run.position]


@pytest.fixture
def own(s3_bucket: Bucket, tmp_path: Path) -> TierCli:
    cli = TierCli(tmp_path / "own", {"s3": {"endpoint_url": s3_bucket.server.endpoint, "region": "us-east-1"}})
    cli.set(cleaner={"segment_bytes": 200, "delete_retention_ms": 0}, publish={"grace_ms": 0})
    target = f"s3://{s3_bucket.name}/some/compacted"
    cli.set(tier={"url": f"s3://{s3_bucket.name}/own"}, **{"tier.pinterest": {"cluster": "prod", "entropy_bits": 5, "target": target}})
    return cli


@pytest.mark.slow
def test_originals_and_the_compacted_partition(s3_bucket: Bucket, own: TierCli, log: LogBuilder, tmp_path: Path) -> None:
    log.write(tmp_path / "log", indexes=True, index_interval_bytes=200)
    upload(tmp_path / "log", tmp_path / "upstream", bits=5)
    put_tree(s3_bucket, tmp_path / "upstream", "originals")
    check(s3_bucket, "originals", records(tmp_path / "log"), bits=5)

    upstream = TierCli(tmp_path / "up", {"s3": own.settings["s3"], "tier.pinterest": {"cluster": "prod", "entropy_bits": 5}})
    upstream.set(tier={"url": f"s3://{s3_bucket.name}/originals", "layout": "pinterest"})
    before = {info.key: info.etag for info in s3_bucket.open().list("")}
    (row,) = own.do("import", "--from-tier", upstream.config)["partitions"]
    assert row["status"] == "imported"
    own.run("--now", 10**15)
    own.run("--now", 2 * 10**15)
    (row,) = own.do("generations", "write")["partitions"]
    assert row["status"] == "written"
    expected = records(own.export(tmp_path / "compacted"))
    assert len(expected) < len(records(tmp_path / "log")) - 10
    pointer = "some/compacted/.generations/prod/orders-0/current.json"
    check(s3_bucket, pointer, expected, bits=5)
    assert {info.key: info.etag for info in s3_bucket.open().list("")} == before

    for record in ("more=1", "more=2"):
        log.put(record)
        log.roll()
    log.write(tmp_path / "log", indexes=True, index_interval_bytes=200)
    own.bring(tmp_path / "log")
    (row,) = own.do("generations", "write")["partitions"]
    assert (row["status"], row["objects"]) == ("appended", 2)
    check(s3_bucket, pointer, records(own.export(tmp_path / "appended")), bits=5)


def test_what_agents_have_written(s3_bucket: Bucket, tmp_path: Path) -> None:
    """Beside two brokers between which the leader moves, whose segments roll at different offsets."""
    cluster = SideCluster()
    story = PartitionStory(cluster)
    tier = SideTier(tmp_path)
    target = f"s3://{s3_bucket.name}/by-agents"
    tier.cli.set(tier={"url": f"s3://{s3_bucket.name}/own"}, s3={"endpoint_url": s3_bucket.server.endpoint, "region": "us-east-1"})
    tier.cli.set(**{"tier.pinterest": {"cluster": "prod", "entropy_bits": 5, "target": target}})
    brokers = [SideBroker(tmp_path / f"broker {number}", number) for number in (1, 2)]
    replicas = [broker.replica() for broker in brokers]
    agents = [tier.agent(broker, cluster) for broker in brokers]
    for leader, rolls in ((1, 4), (2, 3), (1, 5)):
        for replica in replicas:
            story.follow(replica)
        story.lead(leader)
        story.write(replicas[leader - 1], 11, per_segment=rolls)
        for agent in agents:
            tier.hurry(70_000)
            watch = settle(agent)
            assert watch is not None
            assert watch.trouble is None
    end = replicas[0].bases[-1]
    expected = [(r.offset, r.key, r.value) for raw in story.written for batch in read_batches(raw) for r in batch.records if r.offset < end]
    check(s3_bucket, "by-agents/.generations/prod/orders-0/current.json", expected, bits=5)


def test_what_the_rules_forbid_does_stall_it(s3_bucket: Bucket, log: LogBuilder, tmp_path: Path) -> None:
    """A hole at an object's end: the reason for the names in a generation."""
    log.write(tmp_path / "log", indexes=True)
    folder = upload(tmp_path / "log", tmp_path / "upstream")
    for kind in ("log", "index", "timeindex"):
        (folder / f"{2:020d}.{kind}").unlink()
    put_tree(s3_bucket, tmp_path / "upstream", "holed")
    (run,) = read_partition(s3_bucket, "holed", "orders-0", [0], 20)
    assert run.stalled
    assert [offset for offset, _, _ in run.records] == [0, 1]


def test_two_index_entries_end_its_search_never(s3_bucket: Bucket, log: LogBuilder, tmp_path: Path) -> None:
    log.write(tmp_path / "log", indexes=True)
    folder = upload(tmp_path / "log", tmp_path / "upstream")
    index = folder / f"{2:020d}.index"
    sizes = [len(batch.raw) for batch in batches_of(tmp_path / "log")]
    index.write_bytes(struct.pack(">iiii", 1, sizes[2], 2, sizes[2] + sizes[3]))
    put_tree(s3_bucket, tmp_path / "upstream", "two")
    with pytest.raises(subprocess.TimeoutExpired):
        read_partition(s3_bucket, "two", "orders-0", [2], 5, seconds=20)
    index.write_bytes(struct.pack(">ii", 2, sizes[2] + sizes[3]))
    put_tree(s3_bucket, tmp_path / "upstream", "one")
    (run,) = read_partition(s3_bucket, "one", "orders-0", [2], 5)
    assert [offset for offset, _, _ in run.records] == [2, 3, 4]
    assert json.loads((folder / "_metadata").read_text())
