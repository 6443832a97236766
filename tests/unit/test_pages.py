"""What pages are made of: documents, lists, axes, words; what is asked of whom while they are drawn."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from compactor.config import times, units
from compactor.constants import NEVER_MS
from compactor.daemon.daemon import Daemon
from compactor.daemon.partition_cache import deserialize_history, partition_history, serialize_history
from compactor.daemon.scheduling import (
    DaemonAction,
    PartitionCondition,
    PartitionSchedule,
    action_to_take_now,
    partition_condition,
    planned_action,
)
from compactor.errors import BlockedCause
from compactor.model.ids import TopicPartition
from compactor.views.verdict import Block
from compactor.web.console import (
    MOST_SPANS,
    SILENT_MS,
    PartitionListQuery,
    RequestRouter,
    offset_axis_ticks,
    offset_position_percent,
    parse_list_query,
)
from compactor.web.pages import RUNBOOK_FILE, DaemonPages, service_verdict
from tests.support import console_samples
from tests.support.console_samples import NOW
from tests.support.dues import changed, quarantine
from tests.support.idle_tier import HOUR, Idle


def console(partitions: int = 60, *, trouble: bool = True) -> RequestRouter:
    status = console_samples.daemon_status(partitions, trouble=trouble)
    return RequestRouter(DaemonPages(lambda: status, lambda name: console_samples.picture()), lambda: 0, 1000)


def names_of(pages: RequestRouter, query: str) -> list[str]:
    return [row["partition"] for row in json.loads(pages.respond_to_request(f"/api/status{query}").body)["partitions"]["rows"]]


def test_no_page_asks_the_store(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 20)
    daemon = Daemon(idle.tier(local=True), seed=1)
    daemon.scan()
    pages = RequestRouter(DaemonPages(daemon.status, daemon.partition_details), daemon.loop_age_ms, 1000)
    before = idle.counters.usage()
    for path in ("/", "/?sort=dirty", "/partitions/orders-3", "/api/partitions/orders-4", "/api/status", "/metrics", "/readyz", "/healthz"):
        assert pages.respond_to_request(path).code == 200, path
    assert idle.counters.usage().usage_since(before).total_requests == 0


def test_a_daemon_that_begins_with_local_state_shows_what_that_knows(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 5)
    tier = idle.tier(local=True)
    Daemon(tier, seed=1).scan()
    assert tier.local
    tier.local.close()
    idle.clock.now_ms += HOUR // 4
    again = Daemon(idle.tier(local=True), seed=2)
    again.scan()
    found = again.partition_details(idle.names[2])
    assert found is not None
    assert len(found.segments) == 1
    assert found.history is not None
    assert again.partition_details(TopicPartition("nobody", 0)) is None


def test_ten_thousand_partitions_are_one_small_page_at_a_time() -> None:
    pages = console(10_000)
    document = json.loads(pages.respond_to_request("/api/status?page=3").body)
    assert document["partitions"]["pages"] == 200
    assert len(document["partitions"]["rows"]) == 50
    assert sum(document["conditions"].values()) == document["partitions"]["matching"] == 10_000
    assert len(pages.respond_to_request("/").body) < 100_000


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


def test_numbers_beside_states_are_those_of_what_the_search_finds() -> None:
    listed = json.loads(console(60).respond_to_request("/api/status?q=payments").body)
    assert sum(listed["partitions"]["conditions"].values()) == listed["partitions"]["matching"] == 9
    assert sum(listed["conditions"].values()) == 60
    assert "All <b>9</b>" in console(60).respond_to_request("/?q=payments&state=due").body.decode()


def test_links_of_a_list_keep_what_was_chosen_and_begin_at_the_first_page() -> None:
    query = parse_list_query("q=a%26b&state=due&sort=size&dir=asc&page=4&per_page=20")
    assert query == PartitionListQuery("a&b", "due", "size", False, 4, 20)
    assert parse_list_query(query.query_with(page=5)[1:]) == replace(query, page=5)
    assert parse_list_query(query.query_with(condition="")[1:]) == replace(query, condition="", page=1)


@pytest.mark.parametrize("path", ["/", "/partitions/orders-1", "/?q=%3Cscript%3E%22%27"])
def test_what_comes_from_outside_is_escaped(path: str) -> None:
    status = console_samples.daemon_status(60)
    status = replace(status, tier=f"file:///{console_samples.HARM}", holder=console_samples.HARM, problem=console_samples.HARM)
    pages = RequestRouter(DaemonPages(lambda: status, lambda name: console_samples.picture(trouble=True), "it's; rm"), lambda: 0, 1000)
    text = pages.respond_to_request(path).body.decode()
    assert "<script>" not in text
    assert '"quoted"' not in text
    assert "tiered-compactor explain" in text
    assert "&#39;it&#39;" in text  # quoted for the shell, then for HTML


def test_states_are_named_with_their_time_and_reasons_linked_to_the_runbook() -> None:
    status = console_samples.daemon_status(60, trouble=True)
    documents = [
        DaemonPages(lambda: status, lambda name: None, runbook_url=url).status_page_document(PartitionListQuery(per_page=60))
        for url in (RUNBOOK_FILE, "https://ops.example/operating.md")
    ]
    (waiting, *_) = [row for row in documents[0].partitions.rows if row.condition == "waiting"]
    assert waiting.next.at_ms is not None
    until = times.format_clock_time(waiting.next.at_ms, status.now_ms)
    assert waiting.state == f"Clean, {units.format_size(waiting.waiting_bytes)} in grace until {until}"
    headings = Path("docs/operating.md").read_text(encoding="utf-8").lower()
    for each in documents[0].needs_attention:
        assert f"# {each.runbook.partition('#')[2]}".replace("-", " ") in headings.replace(":", "")
    pages = RequestRouter(DaemonPages(lambda: status, lambda name: None, runbook_url="https://ops.example/x.md"), lambda: 0, 1000)
    page = pages.respond_to_request("/")[2].decode()
    word, time_text = waiting.state.split(", ")
    assert f'<span class="badge is-waiting">{word}</span><small>{time_text}</small>' in page, "the pill keeps one line"
    assert '<a href="https://ops.example/x.md#when-a-partition-is-quarantined">' in page
    assert documents[1].needs_attention[0].runbook.startswith("https://ops.example/operating.md#")


def test_nothing_comes_from_elsewhere() -> None:
    pages = console()
    for path in ("/", "/partitions/orders-1"):
        text = pages.respond_to_request(path).body.decode()
        assert not re.search(r"""(?:src|href|action)=["'](?:https?:)?//""", text)
        assert " style=" not in text
        for name in re.findall(r'(?:src|href)="(?:\.\./)?(static/[^"]+)"', text):
            kept = pages.respond_to_request(f"/{name}")
            assert (kept.code, kept.cache_control.partition(",")[0]) == (200, "public")
    assert pages.respond_to_request("/static/../console.py").code == 404
    assert pages.respond_to_request("/static/unknown.css").code == 404


def test_health_is_told_by_the_same_code_for_all() -> None:
    status = console_samples.daemon_status(3, trouble=False)
    silent = [0]
    down = replace(status, ready=False, problem="the store does not answer")
    pages = RequestRouter(DaemonPages(lambda: down, lambda name: None), lambda: silent[0], 1000)
    assert pages.respond_to_request("/readyz")[::2] == (503, b"the store does not answer\n")
    assert pages.respond_to_request("/healthz").code == 200
    silent[0] = SILENT_MS + 1001
    assert pages.respond_to_request("/healthz").body.startswith(b"it has not scanned for work since")
    assert json.loads(pages.respond_to_request("/api/status").body)["verdict"]["level"] == "down"


def test_verdicts() -> None:
    well = {
        "ready": True,
        "stopping": False,
        "problem": "",
        "has_scanned": True,
        "failing_partitions": 0,
        "running_jobs": 0,
        "due_partitions": 0,
    }

    def told(**changes: object) -> tuple[str, str]:
        found = service_verdict(**{**well, **changes})  # type: ignore[arg-type]
        return found.level, found.text

    assert told() == ("ok", "All well")
    assert told(failing_partitions=1) == ("attention", "1 partition needs you")
    assert told(failing_partitions=1200) == ("attention", "1,200 partitions need you")
    assert told(has_scanned=False, ready=False) == ("starting", "Starting")
    assert told(stopping=True, ready=False) == ("stopping", "Stopping")
    assert told(problem="x", ready=False, failing_partitions=3) == ("down", "It cannot work")
    assert service_verdict(**{**well, "running_jobs": 1, "due_partitions": 2}).detail == "1 job at work, 2 partitions due"  # type: ignore[arg-type]


def random_watch(chance: random.Random) -> PartitionSchedule:
    def moment() -> int:
        return NOW + chance.choice((-1, 0, 1)) * chance.randrange(1, 4_000_000)

    base = console_samples.daemon_status(7, trouble=False).schedules[chance.randrange(7)]
    assert base.due is not None
    failures = chance.randrange(3)
    seen = changed(
        base.due,
        is_due=chance.random() < 0.5,
        retire_at_ms=chance.choice((NEVER_MS, moment())),
        wake_ms=chance.choice((NEVER_MS, NOW + 5_000_000)),
        quarantine=quarantine(moment(), failures) if failures else None,
        open_run=chance.choice(("", "a")),
    )
    return replace(
        base,
        due=seen,
        next_poll_ms=NOW + 6_000_000,
        next_round_ms=chance.choice((0, moment())),
        next_repeat_ms=chance.choice((0, moment())),
        retire_at_ms=chance.choice((0, moment())),
        suspended=chance.choice((None, None, Block(BlockedCause.SETTINGS, "cleanup.policy"))),
        paused=chance.choice(("", "", "somebody")),
        requested=chance.random() < 0.1,
    )


def test_the_next_step_is_what_the_scheduler_will_want() -> None:
    chance = random.Random(11)
    told = set()
    for _ in range(3_000):
        schedule = random_watch(chance)
        step = planned_action(schedule, NOW)
        told.add(step.action)
        assert step.at_ms >= NOW
        assert action_to_take_now(schedule, step.at_ms) is step.action, (schedule, step)
        if step.at_ms > NOW:
            assert action_to_take_now(schedule, step.at_ms - 1) is None, (schedule, step)
    assert told == {DaemonAction.POLL, DaemonAction.ROUND, DaemonAction.RETIRE}


def test_a_paused_partition_is_no_trouble_and_a_broken_one_is_even_while_work_is_at_it() -> None:
    schedule = console_samples.daemon_status(3, trouble=False).schedules[0]
    assert partition_condition(replace(schedule, paused="by somebody"), is_job_running=False) is PartitionCondition.PAUSED
    assert partition_condition(replace(schedule, problem="x"), is_job_running=True) is PartitionCondition.ATTENTION
    assert partition_condition(schedule, is_job_running=True) is PartitionCondition.WORKING
    assert partition_condition(replace(schedule, due=None), is_job_running=False) is PartitionCondition.UNSEEN


def test_the_axis_is_to_scale_and_bounded() -> None:
    for segments in (36, 5_000):
        found = json.loads(RequestRouter(pages_of(segments), lambda: 0, 1000).respond_to_request("/api/partitions/orders-17").body)["axis"]
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
    document = pages_of(36).partition_document(TopicPartition("orders", 17))
    assert document is not None
    axis = document.axis
    assert axis is not None
    assert offset_position_percent(axis, axis.start_offset) == 0
    assert offset_position_percent(axis, axis.end_offset) == 100
    assert 2 <= len(offset_axis_ticks(axis)) <= 10
    assert all(axis.start_offset < offset < axis.end_offset for offset in offset_axis_ticks(axis))


def test_a_story_is_small_and_comes_back(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 1)
    log = idle.tier().open_partition_log(idle.names[0])
    story = partition_history(log.refresh())
    assert deserialize_history(serialize_history(story)) == story
    told = console_samples.picture().history
    assert told is not None
    assert len(serialize_history(told)) < 2_000


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
    assert units.format_duration(milliseconds) == text


def test_sizes() -> None:
    assert [units.format_size(count) for count in (0, 1023, 1024, 1_048_575, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "5.0 TiB",
    ]
