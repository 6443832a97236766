"""Under which names in the Host header the pages are shown."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from compactor.config.settings import load_settings
from compactor.errors import UsageError
from compactor.service import settings_after_reload
from compactor.web.console import RequestRouter
from compactor.web.pages import DaemonPages
from compactor.web.server import is_host_known, serve_pages
from tests.support import console_samples

NAMES = ("compactor.example.org", "daemon")
PAGES = ("/", "/topics", "/api/status", "/static/page.css", "/metrics/", "/readyz/x", "/nothing")
OPEN = ("/metrics", "/metrics?names=own", "/healthz", "/readyz")


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("localhost:8080", True),
        ("LocalHost.", True),
        ("127.0.0.1:8080", True),
        ("10.1.2.3", True),
        ("[::1]:8080", True),
        ("[fe80::1]", True),
        ("compactor.example.org", True),
        ("Compactor.Example.org:443", True),
        ("daemon:8080", True),
        ("evil.example.org", False),
        ("compactor.example.org.evil.example", False),
        ("x.compactor.example.org", False),
        ("localhost.evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        ("2130706433", False),
        ("", False),
        ("[::1].evil.example", False),
    ],
)
def test_pages_are_shown_under_addresses_and_configured_names(host: str, known: bool) -> None:
    assert is_host_known(host, NAMES) == known


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    status = console_samples.daemon_status(3, trouble=False)
    router = RequestRouter(DaemonPages(lambda: status, lambda name: console_samples.picture()), lambda: 0, 1000)
    with serve_pages("127.0.0.1:0", router, host_names=NAMES) as served:
        yield served


def ask(address: str, path: str, *hosts: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize("path", PAGES)
def test_a_name_that_is_not_configured_gets_no_page(path: str, address: str) -> None:
    for method in ("GET", "HEAD"):
        assert ask(address, path, "evil.example.org", method=method)[0] == 421
    assert "daemon.host_names" in ask(address, path, "evil.example.org")[1]
    assert ask(address, path, "daemon:8080", "evil.example.org")[0] == 421
    assert ask(address, path, "compactor.example.org")[0] in (200, 404)
    assert ask(address, path, address)[0] in (200, 404)


@pytest.mark.parametrize("path", OPEN)
def test_health_and_metrics_answer_under_any_name(path: str, address: str) -> None:
    assert ask(address, path, "10-1-2-3.pod.cluster.local:8080")[0] == 200


def test_a_client_without_the_header_gets_pages(address: str) -> None:
    assert ask(address, "/api/status")[0] == 200


def test_the_name_in_listen_is_known() -> None:
    status = console_samples.daemon_status(3, trouble=False)
    router = RequestRouter(DaemonPages(lambda: status, lambda name: console_samples.picture()), lambda: 0, 1000)
    with serve_pages("localhost:0", router) as served:
        assert ask(served, "/api/status", served)[0] == 200


@pytest.mark.parametrize("name", ["", "https://compactor.example.org", "compactor.example.org:8080", "a b", "a/b", "*"])
def test_what_is_no_host_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a host name"):
        load_settings(None, {"TIERED_COMPACTOR__DAEMON__HOST_NAMES": f'["{name}"]'})


@pytest.mark.parametrize("section", ["daemon", "agent"])
def test_names_change_at_the_next_start_as_the_address_does(section: str) -> None:
    before = load_settings(None, {})
    after = load_settings(None, {f"TIERED_COMPACTOR__{section.upper()}__HOST_NAMES": '["daemon"]'})
    found = settings_after_reload(before, after)
    assert (found.changed, len(found.waiting)) == ((), 1)
    assert getattr(found.settings, section).host_names == ()
