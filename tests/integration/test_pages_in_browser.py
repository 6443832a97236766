"""The pages as a browser draws them: nothing overflows, everything can be read, with and without a script, by day and by night.

What was drawn is kept in build/screenshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from compactor.daemon.status import DaemonStatus
from compactor.web.console import RequestRouter
from compactor.web.pages import AgentPages, DaemonPages
from compactor.web.server import serve_pages
from tests.support import console_samples
from tests.support.tools_for_tests import program

pytestmark = pytest.mark.xdist_group("browser")
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
WIDTHS = (360, 768, 1600)
SCHEMES = ("light", "dark")
DRAWN = [
    *product(("status", "topics", "partition", "agent", "upload"), WIDTHS, SCHEMES),
    ("trouble", 360, "dark"),
    ("trouble", 1600, "light"),
]
DRAWN += [("long", 360, "light"), ("long", 768, "dark")]
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@dataclass
class Site:
    """A daemon's pages and an agent's; ``status`` is what the daemon says now."""

    status: DaemonStatus = field(default_factory=lambda: console_samples.daemon_status(60))
    daemon: str = ""
    agent: str = ""

    def urls(self) -> dict[str, str]:
        return {
            "status": f"{self.daemon}/?per_page=12",
            "topics": f"{self.daemon}/topics",
            "partition": f"{self.daemon}/partitions/orders-17",
            "trouble": f"{self.daemon}/partitions/orders-1",
            "long": f"{self.daemon}/?q={console_samples.LONGEST}",
            "agent": f"{self.agent}/?per_page=12",
            "upload": f"{self.agent}/partitions/{console_samples.agent_status(4).upload_states[3].partition}",
        }


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site()
    agent_status = console_samples.agent_status(30)
    daemon = DaemonPages(lambda: made.status, lambda name: console_samples.picture(trouble=name.partition == 1), "/etc/compactor.toml")
    with ExitStack() as stack:
        made.daemon = "http://" + stack.enter_context(serve_pages("127.0.0.1:0", RequestRouter(daemon, lambda: 0, 1000)))
        made.agent = "http://" + stack.enter_context(
            serve_pages("127.0.0.1:0", RequestRouter(AgentPages(lambda: agent_status), lambda: 0, 1000))
        )
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = program("chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@dataclass
class Visit:
    """A page that was opened, and what went wrong in it meanwhile."""

    page: Page
    wrong: list[str]


@pytest.fixture
def visits(browser: Browser) -> Iterator[type[Visit]]:
    yield Visit
    for context in browser.contexts:
        context.close()


def opened(browser: Browser, url: str, width: int = 1200, scheme: str = "light", *, script: bool = True, inspected: bool = False) -> Visit:
    """``inspected``: for axe, which the pages' own Content-Security-Policy would not let in."""
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        java_script_enabled=script,
        bypass_csp=inspected,
    )
    page, wrong = context.new_page(), list[str]()
    host = url.split("/")[2]
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
    page.on("request", lambda request: wrong.append(f"asks {request.url}") if request.url.split("/")[2] != host else None)
    page.goto(url)
    return Visit(page, wrong)


OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width > 0 && !e.closest(".skip") && (box.right > innerWidth + 1 || box.left < -1);
}).map(e => e.tagName + "." + (e.className.baseVal ?? e.className) + ": " + e.textContent.trim().slice(0, 60))"""


@pytest.mark.parametrize(("name", "width", "scheme"), DRAWN)
@pytest.mark.usefixtures("visits")
def test_it_fits_and_can_be_read(browser: Browser, site: Site, name: str, width: int, scheme: str) -> None:
    visit = opened(browser, site.urls()[name], width, scheme, inspected=True)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    visit.page.screenshot(path=SCREENSHOTS / f"{name}-{width}-{scheme}.png", full_page=True)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.page.evaluate(OVERFLOWING) == []
    # WCAG A and AA, the contrast of texts among it.
    found = Axe().run(visit.page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]})
    told = [(rule["id"], [node["html"] for node in rule["nodes"]][:3]) for rule in found.response["violations"]]
    assert told == []
    assert any(rule["id"] == "color-contrast" for rule in found.response["passes"])
    assert visit.wrong == []


@pytest.mark.usefixtures("visits")
def test_without_a_script_everything_is_there(browser: Browser, site: Site) -> None:
    visit = opened(browser, site.daemon, script=False)
    page = visit.page
    assert page.locator("h1").inner_text() == "2 partitions need you"
    assert page.locator(".trouble").count() == 2
    assert page.locator("button[data-copy]:visible").count() == 0
    page.fill("input[name=q]", "payments")
    page.click("form button[type=submit]")
    assert page.locator("tbody tr").count() == 9
    page.click("nav.chips a.is-due")
    names = page.locator("tbody th").all_inner_texts()
    assert names
    assert all(name.startswith("payments") for name in names)
    page.click("tbody th a >> nth=0")
    assert page.locator("figure.axis svg rect").count() > 30
    assert visit.wrong == []


@pytest.mark.usefixtures("visits")
def test_what_comes_from_outside_is_text(browser: Browser, site: Site) -> None:
    visit = opened(browser, site.daemon)
    assert console_samples.HARM in visit.page.locator(".trouble .reason").all_inner_texts()[0]
    assert visit.page.locator("main script").count() == 0
    assert visit.wrong == []


@pytest.mark.usefixtures("visits")
def test_search_as_one_types_and_copied_commands(browser: Browser, site: Site) -> None:
    visit = opened(browser, site.daemon)
    page = visit.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("button[data-copy]").first.click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.locator(".command code").first.inner_text()
    page.locator("input[name=q]").press_sequentially("sessions-3")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert page.locator("tbody th").inner_text() == "sessions-3"
    assert "q=sessions-3" in page.url
    assert visit.wrong == []


@pytest.mark.usefixtures("visits")
def test_it_renews_itself(browser: Browser, site: Site) -> None:
    before = site.status
    visit = opened(browser, "about:blank//")
    page = visit.page
    page.clock.install()
    page.goto(site.daemon)
    assert page.locator("h1").inner_text() == "2 partitions need you"
    site.status = replace(before, problem="the store does not answer", ready=False)
    try:
        page.clock.fast_forward(11_000)
        page.get_by_text("It cannot work").wait_for()
        assert "the store does not answer" in page.locator(".verdict").inner_text()
    finally:
        site.status = before


@pytest.mark.parametrize(("width", "scheme"), [*product(WIDTHS, SCHEMES)])
@pytest.mark.usefixtures("visits")
def test_pages_of_five_thousand_partitions_fit(browser: Browser, site: Site, width: int, scheme: str) -> None:
    before, site.status = site.status, console_samples.daemon_status(5_000)
    try:
        for path in ("/", "/topics"):
            visit = opened(browser, site.daemon + path, width, scheme)
            assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
            assert visit.page.evaluate(OVERFLOWING) == []
            assert visit.wrong == []
    finally:
        site.status = before


@pytest.mark.usefixtures("visits")
def test_the_first_page_remembers_a_week_and_leads_to_topics(browser: Browser, site: Site) -> None:
    visit = opened(browser, site.daemon)
    page = visit.page
    labels = [str(svg.get_attribute("aria-label")).split(":")[0] for svg in page.locator(".week svg").all()]
    assert labels == ["Stored", "Dirty", "Reclaimed an hour"]
    assert "9.0 TiB → 7.0 TiB" in page.locator(".week").inner_text()
    assert page.locator(".recent li").count() == 8
    assert "at this pace" in page.locator(".tiles").first.inner_text()
    page.click("footer a:text('Topics')")
    names = page.locator("tbody th").all_inner_texts()
    assert sorted(names) == sorted({*console_samples.TOPICS, console_samples.LONGEST.topic})
    assert "dirty ratio 0.5" in page.locator("tbody").inner_text()
    page.click("tbody th a:text-is('orders')")
    assert all(name.startswith("orders-") for name in page.locator("tbody th").all_inner_texts())
    assert visit.wrong == []
