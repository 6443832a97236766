"""The daemon as a process: work, metrics, health, a bad partition beside good ones, and how it ends."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.builders import LogBuilder
from tests.support.deployment import Deployment, GrowingLog, Running
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import S3Server

FAST: dict[str, dict[str, Any]] = {
    "daemon": {"interval_ms": 200, "listen": "127.0.0.1:0"},
    "cleaner": {"segment_bytes": 16_384, "delete_retention_ms": 0},
    "publish": {"grace_ms": 200},
    "lease": {"ttl_ms": 500},
}


@dataclass
class Service:
    """A deployment with daemons that are put down at the test's end."""

    deployment: Deployment
    running: list[Running] = field(default_factory=list)

    def start(self) -> Daemon:
        process = self.deployment.start("daemon")
        self.running.append(process)
        wait_for(lambda: "status at http://" in process.said() or process.poll() is not None)
        address = re.search(r"status at (http://[^ ]+/)", process.said())
        assert address, process.said()
        return Daemon(process, address[1])

    def log(self, partition: int, segments: int = 3) -> GrowingLog:
        """A partition with something to clean."""
        made = GrowingLog("orders", partition, self.deployment.folder, random.Random(partition))
        self.bring(made, segments)
        return made

    def bring(self, log: GrowingLog, segments: int = 3) -> None:
        self.deployment.do("import", log.write_part(segments), "--topic", log.topic, "--partition", log.partition)

    def state(self, log: GrowingLog) -> Any:
        return self.deployment.do("checkpoints", "show", log.name)

    def is_clean(self, log: GrowingLog) -> bool:
        found = self.state(log)
        return bool(found["first_dirty_offset"] == found["end_offset"] + 1)


@dataclass
class Daemon:
    process: Running
    address: str

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.address + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """The sum over its labels."""
        text = self.get("metrics")[1]
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))

    def end(self) -> int:
        """Its exit code. Ten seconds are what it has on an idle machine; the work that some tests leave it would take minutes."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.1)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(Deployment(tmp_path, {name: dict(values) for name, values in FAST.items()}))
    yield made
    for process in made.running:
        process.put_down()


def test_it_cleans_what_comes_deletes_what_was_replaced_and_tells_how_it_goes(service: Service) -> None:
    logs = [service.log(0), service.log(1)]
    daemon = service.start()
    wait_for(lambda: daemon.get("readyz")[0] == 200)
    wait_for(lambda: all(service.is_clean(log) for log in logs))
    service.bring(logs[0])
    wait_for(lambda: service.is_clean(logs[0]))
    wait_for(lambda: service.deployment.do("verify")["problems"] == [])  # the metric may still be that of the round before
    wait_for(lambda: daemon.metric("tiered_compactor_waiting_bytes") == 0)
    assert daemon.metric("tiered_compactor_objects_deleted_total") > 0
    assert daemon.metric("tiered_compactor_partitions") == 2
    assert daemon.metric("uncleanable_partitions_count") == 0
    assert daemon.metric("max_dirty_percent") == 0
    assert daemon.metric("tiered_compactor_requests_total") > 0
    assert daemon.get("healthz") == (200, "ok\n")
    assert daemon.get("nonsense")[0] == 404
    page = daemon.get("")[1]
    for log in logs:
        assert f'<a href="partitions/{log.name}">{log.name}</a>' in page
        told = json.loads(daemon.get(f"api/partitions/{log.name}")[1])
        assert told["row"]["cleaner_offsets"] == [
            [entry["leader_epoch"], entry["offset"]] for entry in service.state(log)["cleaner_offsets"]
        ]
        assert {run["status"] for run in told["rounds"]} == {"cleaned"}
        assert f'<h1 class="name">{log.name}</h1>' in daemon.get(f"partitions/{log.name}")[1]
    assert daemon.end() == 0
    assert all(service.state(log)["lease"] is None for log in logs)
    for log in logs:
        exported = service.deployment.folder / f"exported-{log.name}"
        service.deployment.do("export", log.name, exported)
        assert log.wrong_in(exported, clean=True) == []
    assert service.deployment.do("verify") == {"ok": True, "problems": []}


@pytest.mark.damages
def test_a_partition_that_fails_is_quarantined_and_the_others_go_on(service: Service) -> None:
    bad, good = service.log(0), service.log(1)
    (victim,) = [path for path in service.deployment.tier.glob("orders-0/*.log") if path.name.startswith("0" * 20)]
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    daemon = service.start()
    wait_for(lambda: service.is_clean(good))
    wait_for(lambda: daemon.metric("uncleanable_partitions_count") == 1)
    assert daemon.get("readyz")[0] == 200
    assert daemon.metric("uncleanable_bytes") > 0
    found = service.state(bad)
    assert "bad data" in found["quarantine"]
    assert found["cleaner_offsets"] == []
    assert "bad data" in daemon.get("")[1]
    assert "It is quarantined" in service.deployment.do("explain", bad.name)["answer"]
    time.sleep(1.5)
    assert daemon.metric("tiered_compactor_jobs_total") < 20  # it is not tried over and over
    assert daemon.end() == 0


def test_a_round_at_work_is_given_back_and_the_next_run_resumes_it(service: Service) -> None:
    log = service.log(0, segments=12)
    service.deployment.set(limits={"max_requests_per_s": 12})
    daemon = service.start()
    wait_for(lambda: service.state(log)["open_run"] is not None)
    assert daemon.end() == 0
    found = service.state(log)
    assert found["open_run"] is not None
    assert found["lease"] is None
    assert "interrupted, to be resumed" not in daemon.process.said()
    service.deployment.set(limits={"max_requests_per_s": 0})
    (row,) = service.deployment.do("run")["partitions"]
    assert row["status"] == "resumed"
    assert log.wrong_in(service.deployment.export(service.deployment.folder / "out"), clean=True) == []


def test_work_that_does_not_stop_is_left_as_a_crash_would_leave_it(service: Service, tmp_path: Path) -> None:
    log = LogBuilder()
    log.put(f"k={'x' * 600_000}")
    service.deployment.bring(log.write(tmp_path / "large"))
    service.deployment.set(limits={"max_write_bytes_per_s": 5_000})  # two minutes in one request
    daemon = service.start()
    wait_for(lambda: service.deployment.do("checkpoints", "show", "orders-0")["open_run"] is not None)
    time.sleep(0.5)
    assert daemon.end() == 0
    assert "interrupted, to be resumed by the next start: orders-0" in daemon.process.said()
    service.deployment.set(limits={"max_write_bytes_per_s": 0})
    (row,) = service.deployment.do("run")["partitions"]
    assert row["status"] == "resumed"


def test_it_waits_for_a_tier_and_is_not_ready_until_then(service: Service) -> None:
    daemon = service.start()
    wait_for(lambda: "no tier at" in daemon.get("readyz")[1])
    assert daemon.get("readyz")[0] == 503
    log = service.log(0)
    wait_for(lambda: daemon.get("readyz")[0] == 200)
    wait_for(lambda: service.is_clean(log))
    assert daemon.end() == 0


def test_an_address_that_is_taken_is_said_so(service: Service) -> None:
    service.log(0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        service.deployment.set(daemon={"listen": f"127.0.0.1:{taken.getsockname()[1]}"})
        done = service.deployment.process("daemon")
    assert done.code == 2
    assert "cannot listen on 127.0.0.1" in done.err
    assert "daemon.listen" in done.err


def test_it_is_not_ready_where_state_dir_takes_nothing(service: Service) -> None:
    log = service.log(0)
    blocked = service.deployment.folder / "no directory"
    blocked.write_text("")
    service.deployment.set(tier={"state_dir": str(blocked / "state")})
    daemon = service.start()
    wait_for(lambda: "nothing can be written" in daemon.get("readyz")[1])
    assert daemon.get("readyz")[0] == 503
    assert daemon.get("healthz")[0] == 200
    assert daemon.metric("tiered_compactor_ready") == 0
    assert "nothing can be written" in daemon.get("")[1]
    assert "No round begins until this is solved" in daemon.process.said()
    blocked.unlink()
    wait_for(lambda: daemon.get("readyz")[0] == 200)
    wait_for(lambda: service.is_clean(log))
    assert "writing works again" in daemon.process.said()
    assert daemon.end() == 0


def test_sighup_rereads_the_configuration(service: Service) -> None:
    log = service.log(0)
    service.deployment.set(cleaner={"min_cleanable_dirty_ratio": 1.0})
    daemon = service.start()
    wait_for(lambda: daemon.get("readyz")[0] == 200)
    assert not service.is_clean(log)
    service.deployment.set(cleaner={"min_cleanable_dirty_ratio": 7})
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "the configuration is invalid, and the old one stays in force" in daemon.process.said())
    assert daemon.get("readyz")[0] == 200
    service.deployment.set(cleaner={"min_cleanable_dirty_ratio": 0.1}, limits={"max_requests_per_s": 10_000})
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "the configuration was read again: cleaner.min_cleanable_dirty_ratio: 1.0 -> 0.1" in daemon.process.said())
    assert "changed, but only from the next start on: limits.max_requests_per_s: 0 -> 10000" in daemon.process.said()
    wait_for(lambda: service.is_clean(log))
    service.deployment.set(publish={"retire": False, "grace_ms": 0})
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "publish.retire: true -> false" in daemon.process.said())
    wait_for(lambda: daemon.process.said().count("this process deletes no segments") == 1)
    assert daemon.end() == 0


@pytest.mark.damages
def test_a_store_that_refuses_at_the_start_is_waited_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3Server("").environment().items():
        monkeypatch.setenv(name, value)
    with FaultProxy("http://127.0.0.1:1").running() as proxy:
        proxy.faults = [Fault("denied")]
        service.deployment.set(tier={"url": "s3://bucket/tier"}, s3={"endpoint_url": proxy.url})
        daemon = service.start()
        wait_for(lambda: "the tier cannot be read" in daemon.process.said())
        assert "; waiting for it" in daemon.process.said()
        assert daemon.get("readyz")[0] == 503
        assert daemon.process.poll() is None
