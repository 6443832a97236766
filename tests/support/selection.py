"""Which command runs a test, by rule: ``make test``, ``make check`` or ``make nightly``.

1. ``slow``, ``slow_broker``: ``make nightly`` only.
2. A test that needs a program from outside Python (brokers, Kafka's jars, Spark, a browser, an emulator other than moto) is ``check``, by
   the fixtures that it takes and the servers that its parameters name. So is every test of the folders that are not in QUICK_FOLDERS,
   unless its module marks it ``quick``. The folder of a test is a marker as well: ``pytest -m contract``.
3. Everything else runs in ``make test``. Hypothesis tests run there with few examples, and in ``make check`` with all: they are ``deep``.

A test that runs in ``make test`` and starts such a program all the same fails, and says which marker is missing. Whoever needs a server
shares it with the other tests of the run: they run in one worker, which owns the server.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
QUICK_FOLDERS = frozenset({"unit", "golden", "contract", "property", "simulation"})
OWN_SERVERS = frozenset({"new_cluster", "gofakes3_bucket"})
"""Fixtures with which each test starts servers of its own."""
GROUPS = {
    **dict.fromkeys(("broker", "broker_admin", "told"), "broker"),
    **{
        name: name
        for name in ("kafka", "versity_server", "s3proxy_server", "ministack_server", "fake_gcs", "azurite", "hdfs", "kerberos_hdfs")
    },
}
"""Fixture of a server that a run starts once -> the xdist group of the tests that use it."""
SERVER_OF = {
    "versitygw": "versity_server",
    "S3Proxy": "s3proxy_server",
    "MiniStack": "ministack_server",
    "fake-gcs-server": "fake_gcs",
    "Azurite": "azurite",
    "HDFS": "hdfs",
}
"""Name of a server in a test's parameters -> its fixture."""
PROGRAMS = frozenset(
    {"java", "mvn", "go", "npm", "node", "chromium", "helm", "spark-submit"} | {"fake-gcs-server", "azurite-blob", "versitygw", "gofakes3"}
)
COMMANDS = {"check": "make check", "slow": "make nightly", "slow_broker": "make nightly"}

_LEFT_OUT = pytest.StashKey[dict[str, int]]()
_running: list[pytest.Item] = []


def servers_of(item: pytest.Item) -> set[str]:
    """Return the fixtures of servers that a test takes, or gets by ``getfixturevalue`` for one of its parameters."""
    defined = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    # A module may have a fixture or a parameter of its own with such a name.
    taken = {name for name, definitions in defined.items() if definitions[-1].func.__module__.startswith("tests.support")}
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    named = {SERVER_OF.get(str(value).removeprefix("faulty "), "") for value in parameters}
    return (taken | named) & {*OWN_SERVERS, *GROUPS}


def mark(item: pytest.Item) -> None:
    """Set the markers that follow from a test's folder, fixtures and parameters."""
    folder = item.path.relative_to(TESTS).parts[0]
    item.add_marker(folder)
    servers = servers_of(item)
    groups = sorted({GROUPS[name] for name in servers if name in GROUPS} | ({"broker"} if item.get_closest_marker("broker") else set()))
    if groups and not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group(groups[0]))
    if "broker" in groups or "new_cluster" in servers:
        item.add_marker("broker")
    if servers or groups or (folder not in QUICK_FOLDERS and not item.get_closest_marker("quick")):
        item.add_marker("check")
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        item.add_marker("deep")


@pytest.hookimpl(tryfirst=True)  # before pytest's own -m looks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        mark(item)
    if "slow_broker" not in str(config.option.markexpr):
        left_out = [item for item in items if item.get_closest_marker("slow_broker")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("slow_broker")]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = Counter[str]()
    start = subprocess.Popen.__init__

    def checked(process: subprocess.Popen[Any], arguments: Any, *others: Any, **options: Any) -> None:
        program = Path(os.fsdecode(arguments if isinstance(arguments, str | bytes | os.PathLike) else arguments[0]))
        real = program.name in PROGRAMS and not program.is_relative_to(tempfile.gettempdir())  # those that tests write stand in for it
        needs = f"{program} is started, so the test needs the marker `check`, or a fixture of tests/support/selection.py"
        assert not (real and _running and not set(COMMANDS) & set(_running[-1].keywords)), needs
        start(process, arguments, *others, **options)

    subprocess.Popen.__init__ = checked  # type: ignore[assignment, method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        command = next((COMMANDS[name] for name in reversed(COMMANDS) if item.get_closest_marker(name)), "make test")
        item.config.stash[_LEFT_OUT][command] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        counts = session.config.stash[_LEFT_OUT]
        output["left_out"] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker collects the same tests: one of them says what was left out."""
    for command, count in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        node.config.stash[_LEFT_OUT][command] = count


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for command, count in sorted(config.stash[_LEFT_OUT].items()) if config.option.markexpr else ():
        terminalreporter.write_line(f"left out: {count:,} tests, which `{command}` runs")
