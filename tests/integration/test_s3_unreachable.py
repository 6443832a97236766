"""A store that never answers: one deadline for a whole command, every further try is said, and what cannot heal ends at once."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from compactor.adapters.kafka_client import KafkaConnection
from compactor.adapters.stores import cloud
from compactor.cli.commands import config_check
from compactor.cli.commands.config_check import CHECK_FIRST_ANSWER_MS
from compactor.storage.schemes import store_kind
from tests.support.cloud_servers import KEY
from tests.support.tier_cli import TierCli

pytestmark = pytest.mark.damages  # nobody can reach these tiers


PLACES = {"s3": "s3://bucket/tier", "gs": "gs://bucket/tier", "az": "az://account/container/tier", "hdfs": "hdfs://namenode/tier"}
ON_STORES = pytest.mark.parametrize("cli", PLACES, indirect=True)


@pytest.fixture
def cli(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TierCli:
    """A tier on a store of the kind that the test's parameter names; S3 if there is none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    monkeypatch.setattr(cloud, "FIRST_ANSWER_S", 1.4)
    cli = TierCli(tmp_path)
    cli.set(tier={"url": PLACES[getattr(request, "param", "s3")]})
    return cli


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody else will."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def silence() -> Iterator[str]:
    """An address where connections are accepted and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as held:
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def setting_of(cli: TierCli) -> tuple[str, str]:
    """The section and the key with the address of the tier's store."""
    section = store_kind(cli.settings["tier"]["url"]).section
    return section, "webhdfs_url" if section == "hdfs" else "endpoint_url"


def settings_of(cli: TierCli, endpoint: str, first_answer_ms: int = 700) -> None:
    section, key = setting_of(cli)
    cli.set(**{section: {key: endpoint, **({"first_answer_ms": first_answer_ms} if section == "s3" else {})}})


@ON_STORES
@pytest.mark.parametrize("command", [("topics",), ("verify",), ("runs", "list")])
def test_a_command_waits_for_the_first_answer_once(cli: TierCli, nobody: str, command: tuple[str, ...]) -> None:
    settings_of(cli, nobody)
    answer = cli.ask(*command)
    assert answer.code == 5
    last, *said = reversed(answer.stderr.splitlines())
    assert last.startswith(f"error: cannot read {cli.settings['tier']['url']}/.tiered-compactor/")
    assert re.search("Could not connect|Connection refused", last)
    section, key = setting_of(cli)
    assert f"[{section}] {key}" in last
    assert all("; try " in line for line in said)


@ON_STORES
def test_a_server_that_accepts_connections_and_says_nothing_is_given_up_too(
    cli: TierCli, silence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "FIRST_ANSWER_S", 2.6)
    settings_of(cli, silence, first_answer_ms=2_600)
    answer = cli.ask("topics")
    assert answer.code == 5
    section, key = setting_of(cli)
    first, *_, last = answer.stderr.splitlines()
    assert re.search(r"; try 2 in \d\.\d s$", first)
    assert f"[{section}] {key}" in last


def test_every_further_try_is_said(cli: TierCli, nobody: str) -> None:
    settings_of(cli, nobody)
    said = [line for line in cli.ask("topics").stderr.splitlines() if "; try " in line]
    assert re.search(r"; try 3 in \d\.\d s$", said[0])


@ON_STORES
def test_an_unknown_host_ends_at_once(cli: TierCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    settings_of(cli, "http://nobody.invalid:9000")
    answer = cli.ask("topics")
    assert answer.code == 5
    (line,) = answer.remarks
    assert "the host name is unknown" in line
    section, key = setting_of(cli)
    assert f"[{section}] {key}" in line
    assert "tried" not in line


@ON_STORES
def test_an_address_that_is_none_is_the_configuration_s_fault(cli: TierCli) -> None:
    settings_of(cli, "127.0.0.1:9000")
    assert cli.ask("topics").code == 2


def test_config_check_of_a_closed_port_ends_within_fifteen_seconds_by_its_own_deadlines(cli: TierCli, nobody: str) -> None:
    cli.set(tier={"url": "s3://bucket/tier"}, s3={"endpoint_url": nobody})
    began = time.monotonic()
    answer = cli.ask("config", "check")
    assert (answer.code, answer.document["ok"]) == (5, False)
    assert time.monotonic() - began < 2 * CHECK_FIRST_ANSWER_MS / 1000 + 7


def test_config_check_does_not_wait_as_long_as_other_commands_for_brokers(
    cli: TierCli, nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_check, "CHECK_BROKERS_S", 1.0)
    (tmp_path / "segments").mkdir()
    urls = {"url": (tmp_path / "segments").as_uri(), "control_url": (tmp_path / "control").as_uri()}
    servers = nobody.removeprefix("http://")
    cli.set(tier={"kind": "kafka", "layout": "kafka-local", **urls}, kafka={"bootstrap_servers": servers, "topics": [".*"]})
    began = time.monotonic()
    answer = cli.ask("config", "check")
    assert time.monotonic() - began < KafkaConnection("none").timeout_s
    assert [problem["kind"] for problem in answer.document["problems"]] == ["brokers"]
    assert answer.code == 5
    assert "no broker answers" in answer.document["problems"][0]["detail"]


def test_status_exits_with_5_when_the_store_cannot_be_reached(cli: TierCli, nobody: str) -> None:
    settings_of(cli, nobody)
    assert cli.ask("status").code == 5
