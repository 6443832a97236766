"""Spark as it is in life, in processes of its own: executors and drivers killed, a cluster under spark-submit, millions of records.

SPARK_ORDEALS_RECORDS sets how many records the large partition has.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyspark
import pytest

from benchmarks.spark import write_log
from compactor.access.rounds import compact
from compactor.control.state import PartitionState
from compactor.features.spark.session import DAEMON_MODULE
from compactor.model.ids import TopicPartition
from compactor.upkeep.retire import retire_partition
from tests.builders import LZ4, NONE, LogBuilder
from tests.support.cloud_servers import KEY, CloudBucket
from tests.support.deployment import ROOT, Deployment, GrowingLog, Running
from tests.support.spark_tier import NAME, NOW_MS, Twins, scratch_of, state_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("spark")]

SPARK_HOME = Path(pyspark.__file__).parent
TTL_MS = 2_000
SEGMENT_BYTES = 4_000_000
RECORDS = int(os.environ.get("SPARK_ORDEALS_RECORDS", "2000000"))


@pytest.fixture(autouse=True)
def short_lived_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM that lives for seconds is better off without its thorough compiler and its parallel collector."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def large(folder: Path, segments: int = 8, records: int = 30_000, *, last: int = 1) -> Path:
    """Enough for some seconds of work. ``last``: how many times as large the last segment is."""
    dice = np.random.default_rng(4)
    log = LogBuilder(time=1_700_000_000_000)
    for number in range(segments):
        for _ in range(records // 500 * (last if number == segments - 1 else 1)):
            keys = dice.integers(0, records, 500).tolist()
            log.put(*[f"key-{key}={'v' * 40}{key}" for key in keys], codec=NONE if dice.random() < 0.7 else LZ4)
        log.roll()
    log.segments.pop()
    return log.write(folder)


def twin_of(tmp_path: Path, log_dir: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Twins:
    """What the local engine makes of it."""
    twins = Twins(tmp_path / "twins", f"[cleaner]\nsegment_bytes = {segment_bytes}")
    twins.bring(log_dir)
    compact(twins.local, NAME, NOW_MS, force=True)
    return twins


def compare(twins: Twins, deployment: Deployment) -> str:
    twins.remote = deployment.opened()
    return twins.difference()


def deployment_of(tmp_path: Path, master: str, log_dir: Path, *, segment_bytes: int = SEGMENT_BYTES, **spark: object) -> Deployment:
    sections: dict[str, dict[str, Any]] = {
        "cleaner": {"map_engine": "spark", "segment_bytes": segment_bytes},
        "spark": {"master": master, "partitions": 8, **spark},
        "lease": {"ttl_ms": TTL_MS},
        "publish": {"grace_ms": 0, "orphan_age_ms": 0},
    }
    deployment = Deployment(tmp_path / "tier", sections)
    deployment.bring(log_dir)
    return deployment


def wait_until(process: Running, what: Any, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.said()
        assert time.monotonic() < deadline, process.said()
        time.sleep(0.05)


def executors(master: int) -> list[int]:
    """Processes of Spark's executors below a driver."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"CoarseGrainedExecutorBackend" in command and _descends(int(entry.name), master):
                found.append(int(entry.name))
    return found


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(re.findall(r"\) . (\d+)", Path(f"/proc/{pid}/stat").read_text())[0])
        except (OSError, IndexError):
            return False
    return False


def test_an_executor_is_killed_in_mid_job(tmp_path: Path) -> None:
    log_dir = large(tmp_path / "log")
    deployment = deployment_of(tmp_path, "local-cluster[2,1,1024]", log_dir)
    process = deployment.start("recompact", "--now", NOW_MS)
    try:
        wait_until(process, lambda: any("keys-" in key for key in scratch_of(deployment.opened())))
        victims = executors(process.pid)
        assert len(victims) == 2
        os.kill(victims[0], signal.SIGKILL)
        assert process.wait(timeout=600) == 0, process.said()
    finally:
        process.put_down()
    assert compare(twin_of(tmp_path, log_dir), deployment) == ""
    assert scratch_of(deployment.opened()) == []


COUNT = """
import sys
from compactor.config.settings import load_settings
from compactor.spark import register
from compactor.features.spark.session import start_cluster
from tests.support.spark_tier import session_of
with start_cluster(load_settings(sys.argv[1])) as started:
    register(session_of(started.cluster))
    print("records:", session_of(started.cluster).read.format("kafka-tiered").options(config=sys.argv[1], topic="orders").load().count())
"""


@pytest.mark.damages  # the key is gone when the test is over
def test_executors_reach_azure_with_credentials_of_their_own(
    azure_container: CloudBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has the account's key in its environment. What executors have is theirs: none of the driver's is passed on."""
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    sections = azure_container.sections()
    sections["azure"]["credentials_file"] = ""
    sections |= {"cleaner": {"map_engine": "spark", "segment_bytes": 5000}, "spark": {"master": "local-cluster[1,1,1024]"}}
    sections |= {"lease": {"ttl_ms": TTL_MS}}
    deployment = Deployment(tmp_path / "tier", sections)
    log = GrowingLog("orders", 0, tmp_path, random.Random(1))
    deployment.bring(log.write_part(segments=2, batches=10))

    def give_executors(key: str) -> None:
        deployment.set(**{"spark.properties": {'"spark.executorEnv.AZURE_STORAGE_KEY"': key}})

    def count() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", COUNT, str(deployment.config)]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)

    give_executors("b3RoZXI=")
    refused = deployment.process("recompact", timeout=400)
    assert refused.code == 5
    (line,) = [line for line in refused.err.splitlines() if line.startswith("error: ")]
    assert re.search(f"cannot .* {re.escape(azure_container.url)}/.*(the credentials are refused|access denied)", line)
    give_executors(KEY)
    (row,) = deployment.process("recompact", timeout=400).document["partitions"]
    assert (row["status"], row["map_engine"]) == ("resumed", "spark")
    assert log.wrong_in(deployment.export(tmp_path / "out"), clean=True) == []
    read = count()
    assert read.stdout.splitlines()[-1] == f"records: {len(log.truth)}", read.stderr[-3000:]


def test_a_driver_that_is_killed_again_and_again_is_taken_up_again(tmp_path: Path) -> None:
    """Killed while keys are exchanged, when survivors are known, and when the first groups are done: each goes on from there."""
    log_dir = large(tmp_path / "log")
    deployment = deployment_of(tmp_path, "local[2]", log_dir)
    tier = deployment.opened()

    def written(what: str) -> bool:
        return state_of(tier).intent is not None and any(what in key for key in scratch_of(tier))

    def receipts() -> int:
        intent = state_of(tier).intent
        return len(intent.receipts) if intent else 0

    runs = set()
    for reached in (lambda: written("keys-"), lambda: written("survivors-"), lambda: receipts() > 0):
        process = deployment.start("recompact", "--now", NOW_MS)
        try:
            wait_until(process, reached)
        finally:
            process.put_down()
        intent = state_of(tier).intent
        assert intent is not None
        runs.add(intent.plan.run_id)
    again = deployment.process("recompact", "--now", NOW_MS, timeout=600)
    assert again.code == 0, again.err
    (row,) = again.document["partitions"]
    assert (row["status"], len(runs)) == ("resumed", 1)
    assert compare(twin_of(tmp_path, log_dir), deployment) == ""
    retire_partition(tier.ports, tier.open_partition_log(NAME), tier.lease, tier.retention)
    assert scratch_of(tier) == []
    assert deployment.do("verify")["ok"]


def test_a_second_driver_takes_over_from_one_that_is_held_up(tmp_path: Path) -> None:
    """It goes on with what is there, once the first one's lease has run out; and that, when it continues, finds itself fenced."""
    log_dir = large(tmp_path / "log", segments=4)
    deployment = deployment_of(tmp_path, "local[2]", log_dir)
    tier = deployment.opened()
    first, second = deployment.start("recompact", "--now", NOW_MS), None
    try:
        wait_until(first, lambda: state_of(tier).intent is not None)
        os.kill(first.pid, signal.SIGSTOP)
        began = state_of(tier)
        second = deployment.start("recompact", "--now", NOW_MS)
        assert second.wait(timeout=300) == 0, second.said()
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(timeout=300) == 4, first.said()
    finally:
        first.put_down()
        if second is not None:
            second.put_down()
    state = state_of(tier)
    assert began.intent is not None
    assert state.last_compactor_epoch == began.next_compactor_epoch
    assert [(run.run_id, run.status) for run in state.runs] == [(began.intent.plan.run_id, "resumed")]
    assert compare(twin_of(tmp_path, log_dir), deployment) == ""
    assert deployment.do("verify")["ok"]


def test_recompact_beside_a_daemon(tmp_path: Path) -> None:
    """Both work on all partitions, over and over, while the logs grow: whoever leads one keeps the other out of it, and nothing is lost."""
    cleaner = {"segment_bytes": 20_000, "min_cleanable_dirty_ratio": 0.1, "delete_retention_ms": 10**12}
    publish = {"grace_ms": 0, "orphan_age_ms": 60_000}  # with 0 the daemon voids an import that it meets at work
    sections: dict[str, dict[str, Any]] = {
        "cleaner": cleaner,
        "publish": publish,
        "spark": {"master": "local[2]"},
        "lease": {"ttl_ms": TTL_MS},
    }
    deployment = Deployment(tmp_path / "tier", {**sections, "daemon": {"interval_ms": 300, "listen": "127.0.0.1:0"}})
    dice = random.Random(6)
    logs = [GrowingLog("orders", number, tmp_path, dice) for number in range(6)]

    def grow() -> None:
        for log in logs:
            deployment.do("import", log.write_part(), "--topic", log.topic, "--partition", log.partition)

    grow()
    daemon = deployment.start("daemon")
    try:
        for _ in range(2):
            grow()
            beside = deployment.process("recompact", "--force", timeout=300)
            statuses = [row["status"] for row in beside.document["partitions"]]
            assert beside.code == 0 or (beside.code == 4 and "leased" in statuses), beside.err
            assert set(statuses) <= {"cleaned", "resumed", "nothing_to_do", "leased"}, statuses
            assert statuses.count("cleaned") >= 1
        assert daemon.poll() is None, daemon.said()
        daemon.terminate()
        assert daemon.wait(timeout=60) == 0, daemon.said()
    finally:
        daemon.put_down()
    assert "a bug" not in daemon.said()
    runs = {
        run.status
        for log in logs
        for run in deployment.opened().open_partition_log(TopicPartition(log.topic, log.partition)).refresh().runs
    }
    assert runs <= {"cleaned", "resumed", "published"}, runs
    for log in logs:
        deployment.do("run", log.name, "--force")
        deployment.do("export", log.name, tmp_path / f"view-{log.name}")
        assert log.wrong_in(tmp_path / f"view-{log.name}", clean=True) == []
    deployment.do("retire")
    assert deployment.do("verify")["ok"]


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A master and two workers of one core each, on this machine only; to Spark they are two hosts."""
    environ = {
        **os.environ, "SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(folder / "work"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "PYSPARK_PYTHON": sys.executable,
    }  # fmt: skip
    spark_class = [str(SPARK_HOME / "bin" / "spark-class")]
    processes = []
    try:
        log = folder / "master.log"
        master = [*spark_class, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        processes.append(_service(master, log, environ))
        url = _said(processes[0], log, r"Starting Spark master at (spark://\S+)")
        for number in range(2):
            worker_log = folder / f"worker-{number}.log"
            host = f"127.0.0.{number + 1}"
            sizes = ["--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0"]
            worker = [*spark_class, "org.apache.spark.deploy.worker.Worker", *sizes, url]
            processes.append(_service(worker, worker_log, environ | {"SPARK_LOCAL_IP": host}))
            _said(processes[-1], worker_log, "Successfully registered with master")
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=60)


def _service(command: list[str], log: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ)


def _said(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    for _ in range(1200):
        found = re.search(pattern, log.read_text())
        if found:
            return found[found.re.groups]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def test_spark_submit_on_a_standalone_cluster(tmp_path: Path) -> None:
    """The documented entry point, with the package sent along as --py-files from a place that is no checkout."""
    log_dir = large(tmp_path / "log", segments=4)
    deployment = deployment_of(tmp_path, "not used: spark-submit says where", log_dir)
    package = tmp_path / "packages.zip"
    pack(package)
    with standalone(tmp_path) as url:
        command = [
            str(SPARK_HOME / "bin" / "spark-submit"), "--master", url, "--py-files", str(package), "--conf", "spark.ui.enabled=false",
            "--conf", f"spark.pyspark.python={sys.executable}", str(ROOT / "compactor" / "spark" / "recompact.py"),
            "--config", str(deployment.config), "--output", "json", "--now", str(NOW_MS),
        ]  # fmt: skip
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout[done.stdout.index("\n{\n") :])  # spark-submit makes one stream of both
    assert document["spark"]["master"] == url
    assert document["spark"]["slots"] == 2
    (row,) = document["partitions"]
    assert (row["status"], row["map_engine"]) == ("cleaned", "spark")
    assert compare(twin_of(tmp_path, log_dir), deployment) == ""


def test_workers_of_a_standalone_cluster_are_forks_of_the_daemon_that_is_set(tmp_path: Path) -> None:
    """With a module that executors do not have, no worker starts: the command says so, and has changed nothing."""
    log_dir = large(tmp_path / "log", segments=4)
    with standalone(tmp_path) as url:
        deployment = deployment_of(tmp_path, url, log_dir)
        before = deployment.do("topics")
        deployment.set(**{"spark.properties": {'"spark.python.daemon.module"': "compactor.features.spark.absent"}})
        refused = deployment.process("recompact", "--now", NOW_MS, timeout=600)
        assert refused.code == 2, refused.err
        assert "Spark's executors do not run our tasks" in refused.err
        assert deployment.do("topics") == before
        deployment.set(**{"spark.properties": {'"spark.python.daemon.module"': DAEMON_MODULE}})
        process = deployment.start("recompact", "--now", NOW_MS)
        try:
            wait_until(process, lambda: len(_forks_of_daemon()) > 1)
            assert process.wait(timeout=600) == 0, process.said()
        finally:
            process.put_down()
    assert compare(twin_of(tmp_path, log_dir), deployment) == ""


def _forks_of_daemon() -> list[int]:
    """Processes whose parent has the same command, that of our daemon."""
    commands, parents = dict[int, bytes](), dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                commands[int(entry.name)] = (entry / "cmdline").read_bytes()
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
    ours = {pid for pid, command in commands.items() if DAEMON_MODULE.encode() in command.split(b"\0")}
    return [pid for pid in ours if parents.get(pid) in ours]


SPECULATION = """
spark.speculation true
spark.speculation.interval 10ms
spark.speculation.quantile 0.1
spark.speculation.multiplier 1.0
spark.speculation.minTaskRuntime 1ms
spark.speculation.efficiency.enabled false
spark.eventLog.enabled true
spark.eventLog.compress false
"""


def test_tasks_that_are_tried_twice_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation: the slower attempt ends late or is killed, and both write what the other one writes."""
    log_dir = large(tmp_path / "log", segments=20, records=6_000, last=15)
    events = tmp_path / "events"
    events.mkdir()
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(f"{SPECULATION}spark.eventLog.dir {events.as_uri()}\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(conf))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    with standalone(tmp_path) as url:
        deployment = deployment_of(tmp_path, url, log_dir, segment_bytes=600_000)
        done = deployment.process("recompact", "--now", NOW_MS, timeout=600)
    assert done.code == 0, done.err
    assert compare(twin_of(tmp_path, log_dir, segment_bytes=600_000), deployment) == ""
    deployment.do("retire")
    assert scratch_of(deployment.opened()) == []
    assert deployment.do("verify")["ok"]
    said = [json.loads(line) for file in events.rglob("events_*") for line in file.read_text().splitlines()]
    tasks = [(event["Stage ID"], event["Task Info"]["Speculative"]) for event in said if event["Event"] == "SparkListenerTaskStart"]
    assert len(tasks) > 20
    if not any(speculative for stage, speculative in tasks if stage > 1):
        pytest.skip("Spark had no reason to try a task twice this time")


def test_the_daemon_sends_a_large_partition_to_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One large partition and many small ones: it cleans the small ones itself, and ends Spark when that is idle."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    log_dir = large(tmp_path / "log", segments=2, records=15_000)
    dice = random.Random(3)
    with standalone(tmp_path) as url:
        deployment = deployment_of(tmp_path, url, log_dir, above_bytes=500_000, idle_ms=5_000)
        deployment.set(cleaner={"map_engine": "auto", "segment_bytes": SEGMENT_BYTES}, daemon={"interval_ms": 500, "listen": "127.0.0.1:0"})
        small = [GrowingLog("small", number, tmp_path, dice) for number in range(6)]
        for log in small:
            deployment.do("import", log.write_part(), "--topic", log.topic, "--partition", log.partition)
        rows = {f"{row['topic']}-{row['partition']}": row["map_engine"] for row in deployment.do("plan", "--sample", 0)["partitions"]}
        assert [name for name, engine in rows.items() if engine == "spark"] == [str(NAME)]
        daemon = deployment.start("daemon")
        try:
            wait_until(daemon, lambda: bool(_drivers(daemon.pid)))
            wait_until(daemon, lambda: all(partition_state(deployment, name).first_dirty_offset for name in rows))
            wait_until(daemon, lambda: not _drivers(daemon.pid))
            assert daemon.poll() is None, daemon.said()
            daemon.terminate()
            assert daemon.wait(timeout=60) == 0, daemon.said()
        finally:
            daemon.put_down()
    assert [line for line in daemon.said().splitlines() if "goes to Spark" in line and f"{NAME} goes to Spark on {url}: " not in line] == []
    assert f"{NAME} goes to Spark on {url}: " in daemon.said()
    assert "Spark did not start" not in daemon.said()
    for log in small:
        deployment.do("export", log.name, tmp_path / f"view-{log.name}")
        assert log.wrong_in(tmp_path / f"view-{log.name}", clean=True) == []
    assert deployment.do("verify")["ok"]


def partition_state(deployment: Deployment, name: str) -> PartitionState:
    return deployment.opened().open_partition_log(TopicPartition.parse(name)).refresh()


def _drivers(ancestor: int) -> list[int]:
    """Java processes that this process or a child of it has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == "java" and _descends(int(entry.name), ancestor):
                found.append(int(entry.name))
    return found


def test_a_cluster_that_is_not_there_leaves_the_work_to_this_process(tmp_path: Path) -> None:
    deployment = deployment_of(tmp_path, "no-such-cluster://anywhere", large(tmp_path / "log", segments=2, records=2_000), above_bytes=1)
    deployment.set(cleaner={"map_engine": "auto"})
    done = deployment.process("run", "--now", NOW_MS, timeout=300)
    assert done.code == 0, done.err
    (row,) = done.document["partitions"]
    assert (row["status"], row["map_engine"]) == ("cleaned", "memory")
    assert row["reason"].startswith("cleaned by this process, because Spark did not start: ")
    assert "no-such-cluster" in done.err
    assert deployment.do("verify")["ok"]


def pack(target: Path) -> None:
    """As docs/spark.md has it."""
    import zipfile

    with zipfile.ZipFile(target, "w") as archive:
        for name in ("compactor", "bloom", "checkpoint"):
            for file in sorted((ROOT / name).rglob("*.py")):
                archive.write(file, file.relative_to(ROOT))


def test_a_partition_of_millions_of_records(tmp_path: Path) -> None:
    log_dir = write_log(tmp_path / "log", records=RECORDS, keys=RECORDS // 3, segments=8, value_bytes=60)
    segment_bytes = max(file.stat().st_size for file in log_dir.iterdir())
    sections: dict[str, dict[str, Any]] = {
        "cleaner": {"map_engine": "spark", "segment_bytes": segment_bytes},
        "spark": {"master": "local[2]"},
    }
    deployment = Deployment(tmp_path / "tier", sections)
    deployment.bring(log_dir)
    done = deployment.process("recompact", "--now", NOW_MS, timeout=900)
    assert done.code == 0, done.err
    (row,) = done.document["partitions"]
    assert row["records_read"] == RECORDS
    spark = done.document["spark"]
    assert spark["exchanged_bytes"] / spark["exchanged_rows"] < 48
    twins = Twins(tmp_path / "twins", f"[cleaner]\nsegment_bytes = {segment_bytes}")
    twins.bring(log_dir)
    report = compact(twins.local, NAME, NOW_MS, force=True)
    assert report.records_kept == row["records_kept"]
    assert compare(twins, deployment) == ""
