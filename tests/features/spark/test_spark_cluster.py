"""Real local Spark, one session for all: the data source, the distributed map, recompact, errors, fencing.

What needs processes of its own is in test_spark_ordeals.py.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.functions import unix_micros

import compactor.spark
from compactor.access.rounds import create_round
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.control.leadership import acquire_leadership, hold_leadership
from compactor.control.ports import LeaseDurations
from compactor.control.state import PartitionState
from compactor.errors import Fenced, UsageError
from compactor.features.imports.import_ import import_directory
from compactor.features.spark.jobs import JobListener, TaskOutcome
from compactor.features.spark.rewrite import PartitionCleaningWork
from compactor.features.spark.session import DAEMON_MODULE, StartedCluster, start_cluster
from compactor.features.spark.shared_jobs import clean_partition_bin
from compactor.model.ids import TopicPartition
from compactor.read.columns import LATEST_MS
from compactor.round.ports import Costs
from compactor.spark import register
from tests.builders import LZ4, NONE, ZSTD, LogBuilder
from tests.golden_cases import cleaner_round, client_rounds, unpack
from tests.plain_format import Record
from tests.support.cloud_servers import AnyBucket
from tests.support.deployment import ROOT
from tests.support.keys import object_key
from tests.support.s3_server import Bucket, S3Server
from tests.support.servers import BUCKETS
from tests.support.spark_tier import NAME, NOW_MS, Twins, scratch_of, session_of, spark_runner, state_of
from tests.support.tier_cli import TierCli, batches_of, latest, visible

pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[StartedCluster]:
    """What executors know of credentials they have from the environment in which Spark was started."""
    folder = tmp_path_factory.mktemp("spark")
    environ = {"TIERED_COMPACTOR__SPARK__MASTER": "local[2]", "TIERED_COMPACTOR__TIER__STATE_DIR": str(folder / "state dir")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment().items():
            patch.setenv(name, value)
        with start_cluster(load_settings(None, environ)) as started:
            register(session_of(started.cluster))
            yield started
    assert not list((folder / "state dir" / "spark").glob("local-*"))


def write(folder: Path, seed: int, segments: int = 5) -> Path:
    dice = random.Random(seed)
    log = LogBuilder(time=1_700_000_000_000)
    for _ in range(segments):
        for _ in range(dice.randint(5, 15)):
            producer = dice.choice((-1, -1, -1, 5, 6))
            pairs = [dice.choice((f"k{dice.randrange(50)}={dice.random()}", f"k{dice.randrange(50)}")) for _ in range(dice.randint(1, 9))]
            headers = [("h", b"v")] if dice.random() < 0.3 else []
            log.put(*pairs, codec=dice.choice((NONE, LZ4, ZSTD)), pid=producer, txn=producer >= 0, headers=headers)
            if dice.random() < 0.4:
                log.end(dice.choice((5, 6)), commit=dice.random() < 0.6)
        log.roll()
    log.commit(5)
    log.commit(6)
    return log.write(folder)


# ---- the data source --------------------------------------------------------------------------------------------------------


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return write(tmp_path / "log", 1)


@pytest.fixture
def twins(tmp_path: Path, log_dir: Path) -> Twins:
    twins = Twins(tmp_path / "twins", "[cleaner]\nsegment_bytes = 5000")
    twins.bring(log_dir)
    return twins


def frame(started: StartedCluster, tier: Tier, **options: object) -> Any:
    reader = session_of(started.cluster).read.format("kafka-tiered").option("url", tier.settings.tier_url).option("topic", NAME.topic)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


def test_workers_are_forks_of_a_daemon_that_has_loaded_the_tasks(started: StartedCluster) -> None:
    def describe_worker(_: int) -> tuple[str, bool]:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text(), "compactor.features.spark.worker" in sys.modules

    for parent, loaded in started.cluster.context.parallelize(range(4), 4).map(describe_worker).collect():
        assert DAEMON_MODULE in parent.split("\0")
        assert loaded


def test_records_as_a_data_frame(started: StartedCluster, twins: Twins, log_dir: Path) -> None:
    truth = visible(log_dir)
    df = frame(started, twins.local, splitBytes=500)
    assert df.rdd.getNumPartitions() > 5
    rows = sorted(df.collect(), key=lambda row: row["offset"])
    assert [(row["offset"], bytes(row["key"]), row["value"] and bytes(row["value"])) for row in rows] == [
        record[:1] + record[2:4] for record in truth
    ]
    assert [[(h["key"].encode(), bytes(h["value"])) for h in row["headers"] or []] for row in rows] == [list(record[4]) for record in truth]
    assert df.agg({"timestamp": "max"}).collect()[0][0].timestamp() * 1000 == max(record[1] for record in truth)


def test_one_frame_answers_several_questions(started: StartedCluster, twins: Twins, log_dir: Path) -> None:
    """With `pushFilters` Spark would plan each of these with the filters of the one before."""
    truth = visible(log_dir)
    df = frame(started, twins.local)
    middle = truth[len(truth) // 2][0]
    assert df.where(f"offset < {middle}").count() == sum(record[0] < middle for record in truth)
    assert df.count() == len(truth)
    assert df.where("offset < 5").union(df.where("offset >= 5")).count() == len(truth)
    since = datetime.fromtimestamp(truth[10][1] / 1000, UTC)
    assert df.where(df.timestamp >= since).count() == sum(record[1] >= truth[10][1] for record in truth)


@pytest.mark.damages
def test_ranges_are_options(started: StartedCluster, twins: Twins, log_dir: Path) -> None:
    live, truth = state_of(twins.local).live, visible(log_dir)
    twins.local.ports.data.delete([object_key(NAME, live[0])])
    first, last = live[1].start_offset, truth[-5][0]
    df = frame(started, twins.local, startingOffset=first, endingTimestamp=truth[-4][1])
    assert sorted(row.offset for row in df.collect()) == [record[0] for record in truth if first <= record[0] <= last]
    with pytest.raises(Exception, match=f"BadData: bad data in .*{live[0].id}.*: a live segment is missing in the store"):
        frame(started, twins.local).count()


def test_the_latest_view_and_columns(started: StartedCluster, twins: Twins, log_dir: Path) -> None:
    df = frame(started, twins.local, view="latest", keyRanges=2, columns="value,key")
    assert df.columns == ["value", "key"]
    assert {bytes(row.key): bytes(row.value) for row in df.collect()} == latest(log_dir)
    reader = session_of(started.cluster).read.format("kafka-tiered").schema("offset bigint")
    assert reader.options(url=twins.local.settings.tier_url, topic="orders").load().count() == len(visible(log_dir))


def test_a_table_over_the_source(started: StartedCluster, twins: Twins, log_dir: Path) -> None:
    spark = session_of(started.cluster)
    spark.sql(f"CREATE TABLE kept USING `kafka-tiered` OPTIONS (url '{twins.local.settings.tier_url}', topic 'orders')")
    try:
        assert spark.sql("SELECT count(*), max(offset) FROM kept").collect()[0] == (len(visible(log_dir)), visible(log_dir)[-1][0])
    finally:
        spark.sql("DROP TABLE kept")


def test_a_stream_of_what_comes_to_the_tier(started: StartedCluster, twins: Twins, log_dir: Path, tmp_path: Path) -> None:
    spark, url = session_of(started.cluster), twins.local.settings.tier_url
    stream = spark.readStream.format("kafka-tiered").options(url=url, topic="orders", columns="offset").load()
    query = (
        stream.writeStream.format("memory").queryName("came").option("checkpointLocation", str(tmp_path / "at")).trigger(availableNow=True)
    )
    query.start().awaitTermination()
    assert sorted(row[0] for row in spark.sql("SELECT offset FROM came").collect()) == [record[0] for record in visible(log_dir)]


def test_a_path_is_refused(started: StartedCluster, twins: Twins) -> None:
    with pytest.raises(Exception, match="kafka-tiered takes no path"):
        session_of(started.cluster).read.format("kafka-tiered").option("topic", "orders").load(twins.local.settings.tier_url)


def test_a_wrong_option_is_one_clear_message(started: StartedCluster, twins: Twins) -> None:
    with pytest.raises(Exception, match="kafka-tiered has no option 'vieww'. Did you mean view?"):
        frame(started, twins.local, vieww="latest")


@pytest.mark.parametrize("server", ["moto", "fake-gcs-server", "Azurite", pytest.param("HDFS", marks=pytest.mark.slow)])
def test_a_tier_on_a_server(request: pytest.FixtureRequest, started: StartedCluster, server: str, tmp_path: Path, log_dir: Path) -> None:
    """Executors read the store through the same port; their credentials come from their own environment, or from a file."""
    bucket: AnyBucket = request.getfixturevalue(BUCKETS[server])
    cli = TierCli(tmp_path / "on a server", bucket.sections())
    cli.bring(log_dir)
    options = {"config": str(cli.config), "topic": "orders"}
    assert session_of(started.cluster).read.format("kafka-tiered").options(**options).load().count() == len(visible(log_dir))
    cli.set(cleaner={"map_engine": "spark", "segment_bytes": 5000})
    (row,) = cli.do("recompact", "--now", NOW_MS)["partitions"]
    assert (row["status"], row["map_engine"]) == ("cleaned", "spark")
    exported = cli.export(tmp_path / "exported")
    assert latest(exported) == latest(log_dir)
    twins = Twins(tmp_path / "twins", "[cleaner]\nsegment_bytes = 5000")
    twins.bring(log_dir)
    create_round(twins.local, NAME, NOW_MS, force=True).run(twins.local.open_partition_log(NAME))
    assert _digests(state_of(open_tier(load_settings(str(cli.config))))) == _digests(state_of(twins.local))
    cli.set(cleaner={"map_engine": "auto", "segment_bytes": 1 << 20})
    (row,) = cli.do("recompact", "--force", "--now", NOW_MS)["partitions"]
    assert (row["status"], latest(cli.export(tmp_path / "again"))) == ("cleaned", latest(log_dir)), "small partitions share Spark jobs"
    assert cli.do("verify")["ok"]


def test_a_round_asks_filters_in_s3(started: StartedCluster, s3_bucket: Bucket, tmp_path: Path) -> None:
    dice, log = random.Random(1), LogBuilder()
    for number in range(5):
        for first in range(0, 60, 20):
            log.put(*[b"s%d-k%d=" % (number, key) + dice.randbytes(330) for key in range(first, first + 20)])
        log.roll()
    settings = {"segment_bytes": 26_000, "min_cleanable_dirty_ratio": 0.0, "bloom_design_keys": 1000}
    s3 = {"endpoint_url": s3_bucket.server.endpoint, "region": "us-east-1"}
    cli = TierCli(tmp_path / "s3", {"s3": s3, "tier": {"url": s3_bucket.url}, "cleaner": settings})
    cli.bring(log.write(tmp_path / "first"))
    cli.run("--now", NOW_MS)
    log.put("s2-k7=new", "s2-k8", "tail=1")
    cli.bring(log.write(tmp_path / "then"))
    before = cli.export(tmp_path / "before")
    tier = open_tier(load_settings(str(cli.config)))
    runner = spark_runner(started.cluster, tier, Costs())
    report = create_round(tier, NAME, NOW_MS, runner=runner).run(tier.open_partition_log(NAME))
    assert (report.status, report.segments_skipped, report.filters.asked, report.filters.skipped) == ("cleaned", 4, 5, 4)
    assert latest(cli.export(tmp_path / "after")) == latest(before)
    assert cli.do("verify")["ok"]


def _digests(state: PartitionState) -> list[dict[str, str]]:
    return [{kind: file.sha256 for kind, file in segment.files.items()} for segment in state.live]


@pytest.mark.parametrize("name", ["append-time", "cdc-java", "odd-records"])
def test_every_column_of_what_real_clients_wrote(name: str, started: StartedCluster, twins: Twins, tmp_path: Path) -> None:
    """Against a reader of our own. The other clients are read without Spark: tests/features/spark/test_spark_reading.py."""
    case = client_rounds(unpack("clients", tmp_path / "golden") / name, "keep", tmp_path)[0]
    golden = Twins(tmp_path / "golden twins")
    golden.bring(case.log_dir)
    df = frame(started, golden.local, splitBytes=50_000, isolation="read_uncommitted")
    # Python's datetime ends with the year 9999, and clients go beyond it.
    rows = df.withColumn("micros", unix_micros("timestamp")).drop("timestamp").orderBy("offset").collect()
    expected = [
        (
            r.offset,
            None if r.timestamp == -1 else min(r.timestamp, LATEST_MS) * 1000,
            r.key,
            r.value,
            headers(r),
            batch.attributes >> 3 & 1,
            batch.leader_epoch,
        )
        for batch in batches_of(case.log_dir)
        if not batch.control
        for r in batch.records
    ]
    assert len(expected) > 100
    for row, truth in zip(rows, expected, strict=True):
        told = (row["headers"] or []) and [(h["key"], plain(h["value"])) for h in row["headers"]]
        stamp = (row["offset"], row["micros"], plain(row["key"]), plain(row["value"]))
        assert (*stamp, told, row["timestampType"], row["leaderEpoch"]) == truth
        assert (row["topic"], row["partition"]) == (NAME.topic, NAME.partition)


def headers(record: Record) -> list[tuple[str, bytes | None]]:
    return [(name.decode("utf-8", "replace"), value) for name, value in record.headers]


def plain(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


@pytest.mark.damages
def test_the_example_in_the_docs(
    started: StartedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three years of orders; the first year is over before `--since`, and its segments are gone without anybody's notice."""
    years = [1_600_000_000_000 + year * 31_557_600_000 for year in range(3)]
    log = LogBuilder()
    for number, began in enumerate(years):
        log.time = began
        for order in range(40):
            log.put(f"order-{order % (40 - 10 * number)}=v{order:02}")
        log.put("order-39")
        log.roll()
    cli = TierCli(tmp_path / "tier")
    cli.bring(log.write(tmp_path / "log"))
    script = str(ROOT / "docs" / "examples" / "orders_by_year.py")

    def ask(*more: str) -> list[str]:
        monkeypatch.setattr("sys.argv", [script, "--config", str(cli.config), "--topic", "orders", *more])
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out.splitlines()

    header = "year,records,keys,bytes,current"
    # order-30 .. order-38 were last written in the first year, order-20 .. order-29 in the second; order-39 is deleted.
    assert ask() == [header, "2020,41,40,120,9", "2021,41,31,120,10", "2022,41,21,120,20"]
    tier = open_tier(load_settings(str(cli.config)))
    tier.ports.data.delete([object_key(NAME, state_of(tier).live[0])])
    assert ask("--since", str(years[1])) == [header, "2021,41,31,120,10", "2022,41,21,120,20"]


# ---- the distributed map ----------------------------------------------------------------------------------------------------


def test_the_same_segments_as_the_local_engine(started: StartedCluster, twins: Twins, tmp_path: Path) -> None:
    here, there = twins.round(started.cluster)
    assert twins.difference() == ""
    assert (there.status, there.records_kept, there.map_engine) == ("cleaned", here.records_kept, "spark")
    assert scratch_of(twins.remote) == []


def test_an_ordinary_round_on_spark(started: StartedCluster, twins: Twins) -> None:
    """`run` with map_engine = "spark": Spark comes in when there is work, and the next round finds nothing to do without it."""
    cli = TierCli(twins.folder / "spark")
    cli.config = twins.folder / "spark" / "settings.toml"
    cli.config.write_text(cli.config.read_text().replace("[cleaner]", '[cleaner]\nmap_engine = "spark"'))
    row = cli.run("--now", NOW_MS)
    create_round(twins.local, NAME, NOW_MS, force=True).run(twins.local.open_partition_log(NAME))
    assert (row["status"], row["map_engine"], row["segments_out"]) == ("cleaned", "spark", len(state_of(twins.local).live))
    assert twins.difference() == ""
    assert scratch_of(twins.remote) == []
    assert cli.run("--now", NOW_MS)["status"] == "nothing_to_do"


@pytest.mark.parametrize("name", ["gaps-11", "legacy-6", "txn-3", "keyless-1"])
def test_golden_logs_on_spark(name: str, started: StartedCluster, tmp_path: Path, golden: Path) -> None:
    """The other golden logs go through the same tasks without Spark: tests/features/spark/test_spark_runner.py."""
    case = cleaner_round(golden / name, tmp_path)
    twins = Twins(tmp_path / "twins", f"[cleaner]\nsegment_bytes = {case.params.get('segment_bytes', 1 << 30)}")
    twins.bring(case.log_dir)
    first = max(case.params.get("first_dirty_offset", 0), state_of(twins.remote).start_offset)
    twins.round(started.cluster, first_dirty=first, now_ms=case.params["now"])
    assert twins.difference() == ""


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("cleaner", tmp_path_factory.mktemp("golden"))


def test_jobs_say_what_they_do_to_which_partition(started: StartedCluster, twins: Twins) -> None:
    steps: list[tuple[str, int]] = []
    tasks: list[None] = []
    job_listener = JobListener(lambda step, count: steps.append((step, count)), lambda: tasks.append(None))
    cost = Costs()
    runner = replace(spark_runner(started.cluster, twins.remote, cost), job_listener=job_listener)
    report = create_round(twins.remote, NAME, NOW_MS, force=True, runner=runner).run(twins.remote.open_partition_log(NAME))
    assert [step.partition(",")[0] for step, _ in steps] == [
        "orders-0: pass 1",
        "orders-0: pass 1",
        "orders-0: offset map",
        "orders-0: pass 2",
    ]
    assert len(tasks) == sum(count for _, count in steps)
    jobs = started.cluster.context._jsc.sc().statusStore().jobsList(None)
    texts = [jobs.apply(number).description() for number in range(jobs.size())]
    described = {text.get() for text in texts if text.isDefined()}
    assert {step for step, _ in steps} <= described
    store = started.cluster.context._jsc.sc().statusStore()
    stages = ",".join(jobs.apply(number).stageIds().mkString(",") for number in range(jobs.size()) if texts[number].isDefined())
    named = {store.lastStageAttempt(int(stage)).name() for stage in stages.split(",")}
    assert {*(step for step, _ in steps), "orders-0: 2 ranges answered"} <= named
    assert cost.rows > 0
    assert 16 <= cost.exchanged_bytes / cost.rows < 1000  # so few records pay for headers too
    assert cost.peak_memory_bytes > 10 << 20
    assert report.bytes_read == cost.bytes_fetched > 0


@pytest.mark.damages
def test_bad_data_in_one_task_is_one_line(started: StartedCluster, twins: Twins) -> None:
    before = state_of(twins.remote)
    damage(twins.remote, object_key(NAME, before.live[2]))
    runner = spark_runner(started.cluster, twins.remote, Costs())
    report = create_round(twins.remote, NAME, NOW_MS, force=True, runner=runner).run(twins.remote.open_partition_log(NAME))
    assert report.status == "quarantined"
    assert before.live[2].id in report.reason
    assert "\n" not in report.reason
    assert state_of(twins.remote).live == before.live


def damage(tier: Tier, key: str) -> None:
    data = bytearray(tier.ports.data.get(key))
    data[len(data) // 2] ^= 1
    tier.ports.data.delete([key])
    tier.ports.data.create(key, bytes(data))


def test_a_zombie_driver_is_fenced_and_its_successor_goes_on(started: StartedCluster, twins: Twins) -> None:
    """The driver's heart stops while its tasks run; another one takes over; what the first one still does is void."""
    silent = replace(twins.remote.ports, keep_alive=lambda beat, interval: nullcontext())
    zombie = replace(twins.remote, ports=silent)
    taken: list[int] = []

    def take_over(step: str, count: int) -> None:
        if "pass 2" in step:
            taken.append(acquire_leadership(twins.remote.ports, twins.remote.open_partition_log(NAME), LeaseDurations(ttl_ms=30_000)).epoch)

    settings = twins.remote.settings
    short = replace(zombie, settings=settings.model_copy(update={"lease": settings.lease.model_copy(update={"ttl_ms": 100})}))
    runner = replace(spark_runner(started.cluster, short, Costs()), job_listener=JobListener(on_step=take_over))
    with pytest.raises(Fenced):
        create_round(short, NAME, NOW_MS, force=True, runner=runner).run(short.open_partition_log(NAME))
    state = state_of(twins.remote)
    assert (len(taken), state.vector, state.intent is not None) == (1, (), True)
    # The successor's own process has ended meanwhile: the next one waits for nobody's heartbeat here.
    runner = spark_runner(started.cluster, twins.remote, Costs())
    next_log = twins.remote.open_partition_log(NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compactor.control.leadership._last_heartbeat_ms", lambda *_: 0)
        report = create_round(twins.remote, NAME, NOW_MS, force=True, runner=runner).run(next_log)
    assert report.status == "resumed"
    create_round(twins.local, NAME, NOW_MS, force=True).run(twins.local.open_partition_log(NAME))
    assert twins.difference() == ""


# ---- recompact --------------------------------------------------------------------------------------------------------------


@pytest.mark.damages
def test_a_wave_with_one_that_fails(started: StartedCluster, tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "tier", {"cleaner": {"segment_bytes": 5000}, "publish": {"grace_ms": 0}})
    for number in range(5):
        cli.named = f"orders-{number}"
        cli.bring(write(tmp_path / f"log-{number}", number + 10, segments=2 + number))
    cli.do("run", "--force")  # everything is clean: a full re-compaction does it all the same
    tier = open_tier(load_settings(str(cli.config)))
    states = [tier.open_partition_log(TopicPartition("orders", number)).refresh() for number in range(5)]
    damage(tier, object_key(TopicPartition("orders", 3), states[3].live[0]))
    answer = cli.ask("recompact", "--force")
    assert answer.code == 3
    rows = {row["partition"]: row for row in answer.document["partitions"]}
    assert [rows[number]["status"] for number in range(5)] == ["cleaned", "cleaned", "cleaned", "quarantined", "cleaned"]
    assert all(rows[number]["first_dirty_offset"] == 0 for number in (0, 1, 2, 4))
    assert all(rows[number]["next_dirty_offset"] == states[number].end_offset + 1 for number in (0, 1, 2, 4))
    assert answer.document["spark"].keys() >= {"master", "startup_seconds", "exchanged_bytes", "peak_worker_bytes"}
    lines = answer.stderr.splitlines()
    (told,) = [line for line in lines if line.startswith("error: ")]
    assert told.startswith("error: orders-3 is quarantined: bad data in ")
    assert states[3].live[0].id in told
    assert len(lines) < 20
    assert not [line for line in lines if "Traceback" in line or line.lstrip().startswith("at ")]
    for number in (0, 1, 2, 4):
        cli.named = f"orders-{number}"
        assert latest(cli.export(tmp_path / f"out-{number}")) == latest(tmp_path / f"log-{number}")


def test_a_wave_of_many_small_partitions(started: StartedCluster, tmp_path: Path) -> None:
    """More than are led at a time."""
    cli = TierCli(tmp_path / "tier")
    tier = open_tier(load_settings(str(cli.config)))
    many = 20
    for number in range(many):
        log = LogBuilder()
        for batch in range(5 + number % 7):
            log.put(*[f"k{key}={batch}" for key in range(number % 5 + 1)])
        import_directory(
            tier, log.write(tmp_path / f"log-{number}"), TopicPartition("small", number), tier.settings.cleaner.cleaner_policy()
        )
    answer = cli.ask("recompact")
    assert answer.code == 0, answer.stderr
    rows = answer.document["partitions"]
    assert [(row["partition"], row["status"]) for row in rows] == [(number, "cleaned") for number in range(many)]
    assert all(row["records_kept"] == row["partition"] % 5 + 1 for row in rows)
    assert cli.do("verify")["ok"]


def test_one_line_of_pyspark(started: StartedCluster, tmp_path: Path) -> None:
    """Rows with Iceberg's names; what was left alone and what failed among them."""
    cli = TierCli(tmp_path / "tier", {"cleaner": {"segment_bytes": 5000}})
    for number in range(2):
        cli.named = f"orders-{number}"
        cli.bring(write(tmp_path / f"log-{number}", number + 40, segments=2))
    spark = session_of(started.cluster)
    first = compactor.spark.recompact(spark, str(cli.config), topics="ord.*").collect()
    assert [(row.partition, row.status, row.failed_data_files_count) for row in first] == [(0, "cleaned", 0), (1, "cleaned", 0)]
    assert all(row.rewritten_data_files_count > row.added_data_files_count > 0 for row in first)
    assert all(row.rewritten_bytes_count > row.bytes_written for row in first)
    with pytest.raises(UsageError, match="holds no topic that matches nothing"):
        compactor.spark.recompact(spark, str(cli.config), topics="nothing")


def test_a_partition_that_is_leased_does_not_hold_up_the_others(started: StartedCluster, tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "tier", {"lease": {"ttl_ms": 3000}})
    for number in range(3):
        cli.named = f"orders-{number}"
        cli.bring(write(tmp_path / f"log-{number}", number + 20, segments=2))
    tier = open_tier(load_settings(str(cli.config)))
    with hold_leadership(tier.ports, tier.open_partition_log(TopicPartition("orders", 1)), LeaseDurations(ttl_ms=3000)):
        answer = cli.ask("recompact")
    assert answer.code == 0
    assert [row["status"] for row in answer.document["partitions"]] == ["cleaned", "leased", "cleaned"]


def test_where_spark_gives_up_the_others_are_done_alone(started: StartedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that takes its Python worker with it, whenever it comes: Spark tries it four times and aborts the job."""
    monkeypatch.setattr("compactor.features.spark.shared_jobs.clean_partition_bin", deadly_bin)
    cli = TierCli(tmp_path / "tier")
    for number in range(3):
        cli.named = f"orders-{number}"
        cli.bring(write(tmp_path / f"log-{number}", number + 30, segments=2))
    answer = cli.ask("recompact")
    assert answer.code == 5
    assert [row["status"] for row in answer.document["partitions"]] == ["cleaned", "failed", "cleaned"]
    assert "Spark gave up" in answer.stderr
    assert "\tat " not in answer.stderr


def deadly_bin(place: int, items: Sequence[tuple[int, PartitionCleaningWork]], cost: Costs) -> list[TaskOutcome]:
    if any(item.shared.partition == "orders-1" for _, item in items):
        os._exit(9)
    return clean_partition_bin(place, items, cost)


def test_a_second_full_round_changes_nothing(started: StartedCluster, tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "tier", {"cleaner": {"map_engine": "spark", "segment_bytes": 5000}})
    cli.bring(write(tmp_path / "log", 3))
    (before,) = cli.do("topics")["partitions"]
    (first,) = cli.do("recompact", "--now", NOW_MS)["partitions"]
    (after,) = cli.do("topics")["partitions"]
    assert first["saved_bytes"] == before["bytes"] - after["bytes"] > 0
    (second,) = cli.do("recompact", "--now", NOW_MS)["partitions"]  # markers whose records went in the first get their horizon
    (left,) = cli.do("recompact", "--now", NOW_MS, "--dry-run")["partitions"]
    assert (left["status"], left["reason"]) == ("left_alone", "a round would gain about 0 B, less than 1 B")
    assert (first["status"], second["status"]) == ("cleaned", "cleaned")
    assert second["records_read"] == second["records_kept"] == first["records_kept"]
    assert cli.do("recompact", "orders-0", "--now", NOW_MS)["partitions"][0]["status"] == "left_alone"
    assert second["next_dirty_offset"] == first["next_dirty_offset"]
    (before,) = cli.do("topics")["partitions"]
    (forced,) = cli.do("recompact", "--force", "--now", NOW_MS)["partitions"]
    (after,) = cli.do("topics")["partitions"]
    assert (forced["status"], forced["saved_bytes"]) == ("cleaned", before["bytes"] - after["bytes"])
