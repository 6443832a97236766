"""What pages are made of: documents, lists, axes, words; what is asked of whom while they are drawn."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from compactor.model.ids import TopicPartition
from compactor.service.daemon import Daemon
from compactor.service.outlook import Condition, condition, next_step
from compactor.service.pages.axis import MOST_SPANS, percent, ticks
from compactor.service.pages.console import SILENT_MS, Console
from compactor.service.pages.daemon_pages import DaemonPages
from compactor.service.pages.listing import ListQuery, parsed
from compactor.service.pages.verdicts import verdict
from compactor.service.scheduling import NEVER, Action, PartitionWatch, wanted
from compactor.service.story import packed, story_of, unpacked
from compactor.views import words
from tests.support import console_samples
from tests.support.console_samples import NOW
from tests.support.idle_tier import HOUR, Idle


def console(partitions: int = 60, *, trouble: bool = True) -> Console:
    status = console_samples.daemon_status(partitions, trouble=trouble)
    return Console(DaemonPages(lambda: status, lambda name: console_samples.picture()), lambda: 0, 1000)


def names_of(pages: Console, query: str) -> list[str]:
    return [row["partition"] for row in json.loads(pages.answer(f"/api/status{query}").body)["partitions"]["rows"]]


def test_no_page_asks_the_store(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 20)
    daemon = Daemon(idle.tier(local=True), seed=1)
    daemon.scan()
    pages = Console(DaemonPages(daemon.status, daemon.picture), daemon.silent_ms, 1000)
    before = idle.counters.usage()
    for path in ("/", "/?sort=dirty", "/partitions/orders-3", "/api/partitions/orders-4", "/api/status", "/metrics", "/readyz", "/healthz"):
        assert pages.answer(path).code == 200, path
    assert idle.counters.usage().since(before).total_requests == 0


def test_a_daemon_that_begins_with_local_state_shows_what_that_knows(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 5)
    tier = idle.tier(local=True)
    Daemon(tier, seed=1).scan()
    assert tier.local
    tier.local.close()
    idle.clock.now_ms += HOUR // 4
    again = Daemon(idle.tier(local=True), seed=2)
    again.scan()
    found = again.picture(idle.names[2])
    assert found is not None
    assert len(found.segments) == 1
    assert found.story is not None
    assert again.picture(TopicPartition("nobody", 0)) is None


def test_ten_thousand_partitions_are_one_small_page_at_a_time() -> None:
    pages = console(10_000)
    document = json.loads(pages.answer("/api/status?page=3").body)
    assert document["partitions"]["pages"] == 200
    assert len(document["partitions"]["rows"]) == 50
    assert sum(document["conditions"].values()) == document["partitions"]["matching"] == 10_000
    assert len(pages.answer("/").body) < 100_000


def test_every_partition_is_on_exactly_one_page() -> None:
    pages = console(120)
    seen = [name for page in range(1, 4) for name in names_of(pages, f"?page={page}&sort=dirty")]
    assert len(seen) == len(set(seen)) == 120
    assert names_of(pages, "?page=99") == names_of(pages, "?page=3")


def test_search_order_and_states() -> None:
    pages = console()
    assert set(names_of(pages, "?q=ORDERS-")) == {f"orders-{number}" for number in range(9)}
    assert names_of(pages, "?q=nothing+like+that") == []
    assert names_of(pages, "?state=attention") == ["inventory.levels-0", "inventory.levels-1"]
    assert names_of(pages, "")[:2] == ["inventory.levels-0", "inventory.levels-1"]
    by_name = names_of(pages, "?sort=name&per_page=100")
    assert by_name == [str(name) for name in sorted(map(TopicPartition.parse, by_name))]
    assert names_of(pages, "?sort=name&dir=desc&per_page=100") == by_name[::-1]
    assert names_of(pages, "?sort=nonsense&state=nonsense&page=-1&per_page=x") == names_of(pages, "")


def test_links_of_a_list_keep_what_was_chosen_and_begin_at_the_first_page() -> None:
    query = parsed("q=a%26b&state=due&sort=size&dir=asc&page=4&per_page=20")
    assert query == ListQuery("a&b", "due", "size", False, 4, 20)
    assert parsed(query.url(page=5)[1:]) == replace(query, page=5)
    assert parsed(query.url(condition="")[1:]) == replace(query, condition="", page=1)


@pytest.mark.parametrize("path", ["/", "/partitions/orders-1", "/?q=%3Cscript%3E%22%27"])
def test_what_comes_from_outside_is_escaped(path: str) -> None:
    status = console_samples.daemon_status(60)
    status = replace(status, tier=f"file:///{console_samples.HARM}", holder=console_samples.HARM, problem=console_samples.HARM)
    pages = Console(DaemonPages(lambda: status, lambda name: console_samples.picture(trouble=True), "it's; rm"), lambda: 0, 1000)
    text = pages.answer(path).body.decode()
    assert "<script>" not in text
    assert '"quoted"' not in text
    assert "tiered-compactor explain" in text
    assert "&#39;it&#39;" in text  # quoted for the shell, then for HTML


def test_nothing_comes_from_elsewhere() -> None:
    pages = console()
    for path in ("/", "/partitions/orders-1"):
        text = pages.answer(path).body.decode()
        assert not re.search(r"""(?:src|href|action)=["'](?:https?:)?//""", text)
        assert " style=" not in text
        for name in re.findall(r'(?:src|href)="(?:\.\./)?(static/[^"]+)"', text):
            kept = pages.answer(f"/{name}")
            assert (kept.code, kept.keep.partition(",")[0]) == (200, "public")
    assert pages.answer("/static/../console.py").code == 404
    assert pages.answer("/static/unknown.css").code == 404


def test_health_is_told_by_the_same_code_for_all() -> None:
    status = console_samples.daemon_status(3, trouble=False)
    silent = [0]
    down = replace(status, ready=False, problem="the store does not answer")
    pages = Console(DaemonPages(lambda: down, lambda name: None), lambda: silent[0], 1000)
    assert pages.answer("/readyz")[::2] == (503, b"the store does not answer\n")
    assert pages.answer("/healthz").code == 200
    silent[0] = SILENT_MS + 1001
    assert pages.answer("/healthz").body.startswith(b"it has not looked for work since")
    assert json.loads(pages.answer("/api/status").body)["verdict"]["level"] == "down"


def test_verdicts() -> None:
    well = {"ready": True, "stopping": False, "problem": "", "looked": True, "bad": 0, "at_work": 0, "due": 0}

    def told(**changes: object) -> tuple[str, str]:
        found = verdict(**{**well, **changes})  # type: ignore[arg-type]
        return found.level, found.text

    assert told() == ("ok", "All well")
    assert told(bad=1) == ("attention", "1 partition needs you")
    assert told(bad=1200) == ("attention", "1,200 partitions need you")
    assert told(looked=False, ready=False) == ("starting", "Starting")
    assert told(stopping=True, ready=False) == ("stopping", "Stopping")
    assert told(problem="x", ready=False, bad=3) == ("down", "It cannot work")
    assert verdict(**{**well, "at_work": 1, "due": 2}).detail == "1 job at work, 2 partitions due"  # type: ignore[arg-type]


def random_watch(chance: random.Random) -> PartitionWatch:
    def moment() -> int:
        return NOW + chance.choice((-1, 0, 1)) * chance.randrange(1, 4_000_000)

    base = console_samples.daemon_status(7, trouble=False).watches[chance.randrange(7)]
    assert base.sight is not None
    seen = replace(
        base.sight,
        due=chance.random() < 0.5,
        retire_at_ms=chance.choice((NEVER, moment())),
        wake_ms=chance.choice((NEVER, NOW + 5_000_000)),
        quarantine_ms=chance.choice((0, moment())),
        quarantine_failures=chance.randrange(3),
        open_run=chance.choice(("", "a")),
    )
    return replace(
        base,
        sight=seen,
        look_at_ms=NOW + 6_000_000,
        round_at_ms=chance.choice((0, moment())),
        repeat_at_ms=chance.choice((0, moment())),
        retire_at_ms=chance.choice((0, moment())),
        suspended=chance.choice(("", "", "cleanup.policy")),
        paused=chance.choice(("", "", "somebody")),
        urgent=chance.random() < 0.1,
    )


def test_the_next_step_is_what_the_scheduler_will_want() -> None:
    chance = random.Random(11)
    told = set()
    for _ in range(3_000):
        watch = random_watch(chance)
        step = next_step(watch, NOW)
        told.add(step.action)
        assert step.at_ms >= NOW
        assert wanted(watch, step.at_ms) is step.action, (watch, step)
        if step.at_ms > NOW:
            assert wanted(watch, step.at_ms - 1) is None, (watch, step)
    assert told == {Action.LOOK, Action.ROUND, Action.RETIRE}


def test_a_paused_partition_is_no_trouble_and_a_broken_one_is_even_while_work_is_at_it() -> None:
    watch = console_samples.daemon_status(3, trouble=False).watches[0]
    assert condition(replace(watch, paused="by somebody"), working=False) is Condition.PAUSED
    assert condition(replace(watch, problem="x"), working=True) is Condition.ATTENTION
    assert condition(watch, working=True) is Condition.WORKING
    assert condition(replace(watch, sight=None), working=False) is Condition.UNSEEN


def test_the_axis_is_to_scale_and_bounded() -> None:
    for segments in (36, 5_000):
        found = json.loads(Console(pages_of(segments), lambda: 0, 1000).answer("/api/partitions/orders-17").body)["axis"]
        assert len(found["segments"]) <= MOST_SPANS + 4
        assert sum(each["segments"] for each in found["segments"]) == segments
        spans = [(each["start_offset"], each["end_offset"] + 1) for each in found["segments"]]
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert [band["state"] for band in found["bands"]] == ["cleaned", "dirty", "uncleanable"]
        assert {each["state"] for each in found["segments"]} == {"cleaned", "dirty", "uncleanable"}
        assert (found["bands"][0]["start_offset"], found["bands"][-1]["end_offset"]) == (spans[0][0], spans[-1][1])


def pages_of(segments: int) -> DaemonPages:
    status = console_samples.daemon_status(3, trouble=False)
    return DaemonPages(lambda: status, lambda name: console_samples.picture(segments))


def test_places_on_the_axis() -> None:
    document = pages_of(36).partition(TopicPartition("orders", 17))
    assert document is not None
    axis = document.axis
    assert axis is not None
    assert percent(axis, axis.start_offset) == 0
    assert percent(axis, axis.end_offset) == 100
    assert 2 <= len(ticks(axis)) <= 10
    assert all(axis.start_offset < offset < axis.end_offset for offset in ticks(axis))


def test_a_story_is_small_and_comes_back(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 1)
    log = idle.tier().open(idle.names[0])
    story = story_of(log.refresh())
    assert unpacked(packed(story)) == story
    told = console_samples.picture().story
    assert told is not None
    assert len(packed(told)) < 2_000


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0 s"),
        (400, "0.4 s"),
        (59_400, "59 s"),
        (90_000, "1 min 30 s"),
        (11 * 60_000, "11 min"),
        (3_700_000, "1 h 1 min"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_durations(milliseconds: float, text: str) -> None:
    assert words.duration(milliseconds) == text


def test_sizes() -> None:
    assert [words.size(count) for count in (0, 1023, 1024, 1_048_575, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "5.0 TiB"]
