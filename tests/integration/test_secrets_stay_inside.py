"""A credential in the text of a library's exception: it is not in the log, on the pages, in the history of runs or in the audit."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from compactor.adapters.stores.cloud import ErrorHints, connection_error
from compactor.storage.local import LocalStore
from tests.builders import LogBuilder
from tests.support.deployment import Deployment, Running
from tests.support.tier_cli import TierCli
from tests.support.waiting import wait_for

SECRET = "c2VjcmV0-of-the-store"
PATHS = ("", "api/status", "readyz", "metrics", "topics", "api/topics")


def get(address: str) -> str:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return str(error.read().decode())


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    """Its store's port is closed, and a library's exception repeats the signature with which it asks."""
    (tmp_path / "sas").write_text(f"sv=2024-11-04&sp=racwdl&sig={SECRET}")
    azure = {"endpoint_url": "http://127.0.0.1:1/acc", "credentials_file": str(tmp_path / "sas")}
    settings: dict[str, dict[str, Any]] = {
        "tier": {"url": "az://acc/container/tier"},
        "azure": azure,
        "daemon": {"interval_ms": 200, "listen": "127.0.0.1:0"},
    }
    running = Deployment(tmp_path / "here", settings).start("daemon", "--log-format", "json", "-v")
    yield running
    running.put_down()


@pytest.mark.damages  # nobody can verify this tier
def test_a_daemon_tells_no_secret_of_a_store_that_fails(daemon: Running) -> None:
    wait_for(lambda: "status at http://" in daemon.said() or daemon.poll() is not None, seconds=120)
    address = re.search(r"status at (http://[^ ]+/)", daemon.said())
    assert address, daemon.said()
    wait_for(lambda: "cannot read az://acc/container/tier" in get(f"{address[1]}readyz"), seconds=120)
    shown = [get(address[1] + path) for path in PATHS]
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(30) == 0
    assert "url: /" in daemon.said(), "the request is named"
    assert [text for text in (daemon.said(), *shown) if SECRET in text] == []


KINDS: dict[str, Callable[[str], Exception]] = {
    "the store's error": lambda text: connection_error(
        requests.ConnectionError(text), "cannot read x", ErrorHints("", "", "", ""), answered_before=True
    ),
    "a bug": ValueError,
}


@pytest.mark.parametrize("kind", KINDS)
def test_runs_and_audit_hold_no_secret_of_an_error(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogBuilder()
    for number in range(3):
        log.put(f"a={number}", "b=1")
        log.roll()
    cli = TierCli(tmp_path / "cli")
    cli.bring(log.write(tmp_path / "orders-0"))
    text = f"Max retries exceeded with url: /container/k?sv=2024-11-04&sig={SECRET} (https://user:{SECRET}@proxy:3128)"

    def fail(*_: object, **__: object) -> None:
        raise KINDS[kind](text)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "download", fail)
        patched.setattr(LocalStore, "get", fail)
        run = cli.ask("run", "--force")
        repair = cli.ask("repair", "orders-0")
    assert run.code == (1 if kind == "a bug" else 5)
    assert "Max retries exceeded with url: /container/k" in run.stderr
    told = [run.stderr, json.dumps(run.document), repair.stderr, json.dumps(repair.document)]
    told += [cli.ask(*words, output=output).stderr for words in (("runs", "list"), ("audit", "list")) for output in ("json", "table")]
    told += [json.dumps(cli.do(*words)) for words in (("runs", "list"), ("audit", "list"), ("status",), ("explain", "orders-0"))]
    told += [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert [one for one in told if SECRET in one] == []
