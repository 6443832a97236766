"""What daemon and agent say on stderr: levels, fields, JSON; nothing secret, whatever they are asked to tell."""

from __future__ import annotations

import json
import random
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import Deployment, GrowingLog, Running
from tests.support.waiting import wait_for

SECRETS = {"sasl.password": "hunter2-of-the-broker", "ssl.key.password": "key-phrase-7731", "sasl.oauthbearer.client.secret": "oauth-4455"}
FAST: dict[str, dict[str, Any]] = {
    "daemon": {"interval_ms": 200, "listen": "127.0.0.1:0"},
    "cleaner": {"segment_bytes": 16_384, "delete_retention_ms": 0},
    "publish": {"grace_ms": 200},
    "kafka": {"bootstrap_servers": "127.0.0.1:1"},
    "kafka.properties": {f'"{name}"': value for name, value in SECRETS.items()},
}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path, {name: dict(values) for name, values in FAST.items()})


@pytest.fixture
def started() -> Iterator[list[Running]]:
    running: list[Running] = []
    yield running
    for process in running:
        process.put_down()


def lines_of(process: Running) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.said().splitlines()]


def test_a_round_is_told_step_by_step_and_nothing_secret(
    deployment: Deployment, started: list[Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret-9981")
    log = GrowingLog("orders", 0, deployment.folder, random.Random(1))
    deployment.do("import", log.write_part(3), "--topic", log.topic, "--partition", log.partition)
    daemon = deployment.start("daemon", "--log-format", "json", "-v")
    started.append(daemon)
    wait_for(lambda: '"message": "cleaned' in daemon.said() or daemon.poll() is not None)
    deployment.set(**{"kafka.properties": {'"sasl.password"': "hunter3-of-the-broker"}})
    daemon.send_signal(signal.SIGHUP)
    wait_for(lambda: "the configuration was read again" in daemon.said())
    deployment.set(kafka={"bootstrap_servers": 7})
    daemon.send_signal(signal.SIGHUP)
    wait_for(lambda: "the old one stays in force" in daemon.said())
    deployment.set(kafka={"bootstrap_servers": "127.0.0.1:1"})
    address = re.search(r"status at (http://[^ ]+/)", daemon.said())
    assert address
    shown = ""
    for path in ("", "api/status", "partitions/orders-0", "api/partitions/orders-0", "metrics", "readyz"):
        with urllib.request.urlopen(address[1] + path, timeout=10) as answer:
            shown += answer.read().decode()
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(30) == 0
    for secret in (*SECRETS.values(), "hunter3-of-the-broker", "aws-secret-9981"):
        assert secret not in daemon.said()
        assert secret not in shown
    lines = lines_of(daemon)
    assert all(set(line) >= {"time", "level", "message"} for line in lines)
    assert {line["level"] for line in lines} >= {"info", "debug", "error"}
    of_run = [line for line in lines if "run" in line]
    assert {line["partition"] for line in of_run} == {"orders-0"}
    first = [line["message"].partition(",")[0] for line in of_run if line["run"] == of_run[0]["run"]]
    assert [word for word in first if word in ("announced", "uploaded", "verified", "published", "cleaned")][-3:] == [
        "verified",
        "published",
        "cleaned",
    ]
    assert first[0] == "announced"


def test_lines_for_people_have_time_level_and_partition(deployment: Deployment, started: list[Running]) -> None:
    log = GrowingLog("orders", 0, deployment.folder, random.Random(1))
    deployment.do("import", log.write_part(3), "--topic", log.topic, "--partition", log.partition)
    daemon = deployment.start("daemon")
    started.append(daemon)
    wait_for(lambda: ": cleaned, " in daemon.said() or daemon.poll() is not None)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(30) == 0
    shape = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (DEBUG|INFO|WARNING|ERROR) +\S.*")
    assert [line for line in daemon.said().splitlines() if not shape.fullmatch(line)] == []
    assert re.search(r"Z INFO    orders-0: cleaned, .* run=[\w-]{22}", daemon.said())
    assert "DEBUG" not in daemon.said()


def test_an_agent_whose_broker_refuses_tells_no_secret(deployment: Deployment, started: list[Running], tmp_path: Path) -> None:
    (tmp_path / "kafka").mkdir()
    login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "agent"}
    deployment.set(**{"kafka.properties": {f'"{name}"': value for name, value in login.items()}})
    deployment.set(
        agent={"listen": "127.0.0.1:0", "log_dirs": [str(tmp_path / "kafka")], "topics": ["orders"], "interval_ms": 200},
    )
    agent = deployment.start("agent", "--log-format", "json", "-v")
    started.append(agent)
    wait_for(lambda: '"level": "error"' in agent.said() or agent.poll() is not None)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(30) == 0
    assert lines_of(agent)[-1]["message"] == "stopped"
    assert [secret for secret in SECRETS.values() if secret in agent.said()] == []


def test_an_error_of_a_command_is_a_line_of_json_too(deployment: Deployment) -> None:
    ran = deployment.start("topics", "--log-format", "json")
    ran.wait(60)
    (line,) = lines_of(ran)
    assert line["level"] == "error"
    assert "there is no tier" in line["message"]


def test_run_tells_its_steps_where_that_was_asked_for(deployment: Deployment) -> None:
    log = GrowingLog("orders", 0, deployment.folder, random.Random(1))
    deployment.do("import", log.write_part(3), "--topic", log.topic, "--partition", log.partition)
    ran = deployment.start("run", "-v", "--log-format", "json")
    assert ran.wait(120) == 0
    steps = [line for line in lines_of(ran) if line.get("partition") == "orders-0"]
    assert {line["run"] for line in steps} == {steps[0]["run"]}
    assert [line["message"].partition(",")[0] for line in steps if line["level"] == "info"] == ["announced", "verified", "published"]
