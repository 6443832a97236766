"""The agent as a process: what it asks of its configuration, and how it lives without a broker."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deployment import Deployment, Running
from tests.support.side_broker import PartitionStory, SideBroker, SideCluster
from tests.support.waiting import wait_for


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
    broker = SideBroker(tmp_path / "a broker")
    story = PartitionStory(SideCluster())
    story.lead(1)
    story.write(broker.replica())
    agent = {"listen": "127.0.0.1:0", "log_dirs": [str(broker.root)], "topics": ["orders"], "interval_ms": 200}
    return Deployment(tmp_path / "deployment", {"kafka": {"bootstrap_servers": nobody}, "agent": agent})


@pytest.fixture
def running(deployment: Deployment) -> Iterator[Running]:
    process = deployment.start("agent")
    try:
        yield process
    finally:
        process.put_down()


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_without_a_broker_it_waits_says_so_and_ends_when_asked(deployment: Deployment, running: Running) -> None:
    wait_for(lambda: "no broker answers" in running.said() or running.poll() is not None)
    address = re.search(r"status at (http://[^ ]+/)", running.said())
    assert address, running.said()
    wait_for(lambda: "no broker answers" in get(address[1], "readyz")[1])  # until then it is starting
    assert get(address[1], "readyz")[0] == 503
    assert get(address[1], "healthz")[0] == 200
    assert "tiered_compactor_agent_partitions 1.0" in get(address[1], "metrics")[1]
    assert "partitions led here" in get(address[1], "")[1]
    deployment.set(agent={"topics": ["nothing"]})
    running.send_signal(signal.SIGHUP)
    wait_for(lambda: "tiered_compactor_agent_partitions 0.0" in get(address[1], "metrics")[1])
    assert "agent.topics: ['orders'] -> ['nothing']" in running.said()
    deployment.set(agent={"topics": []})
    running.send_signal(signal.SIGHUP)
    wait_for(lambda: "the old one stays in force" in running.said())
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0
    assert "stopped" in running.said()


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("agent", {"log_dirs": []}, "no log directory is named"),
        ("agent", {"topics": []}, "no topic is named"),
        ("agent", {"topics": ["("]}, "not a regular expression"),
        ("agent", {"listen": "127.0.0.1:1:x"}, "host and port"),
    ],
)
def test_a_configuration_with_nothing_to_do(deployment: Deployment, section: str, values: dict[str, object], said: str) -> None:
    deployment.set(**{section: values})
    answer = deployment.process("agent")
    assert answer.code == 2
    assert json.loads(answer.out)["error"]["kind"] == "UsageError"
    assert said in answer.err
