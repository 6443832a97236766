"""Metrics as Prometheus sees them, and what conf/monitoring makes of them: dashboard, alerts, runbook.

``python -m tests.unit.test_monitoring`` writes docs/reference/metrics.md from the help texts of the metrics.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.daemon.status import BOUNDS_S, DurationHistogram
from compactor.features.serve.endpoint import Endpoint
from compactor.features.serve.pages import EndpointPages
from compactor.service_metrics import MOST_LABELLED, OWN
from compactor.web.console import PartitionListQuery, RequestRouter
from compactor.web.pages import AgentPages, DaemonPages
from tests.builders import log_of
from tests.support import console_samples
from tests.support.tier_cli import TierCli
from tests.support.tools_for_tests import program

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf" / "monitoring"
PAGE = ROOT / "docs" / "reference" / "metrics.md"
KAFKAS = {
    "uncleanable_partitions_count",
    "uncleanable_bytes",
    "max_dirty_percent",
    "max_compaction_delay_secs",
    "time_since_last_run_ms",
    "max_clean_time_secs",
    "cleaner_recopy_percent",
    "max_buffer_utilization_percent",
}
"""Outside contracts: who has them in a dashboard keeps them."""


def daemon_metrics(target: str = "/metrics", partitions: int = 30) -> str:
    status = console_samples.daemon_status(partitions)
    pages = DaemonPages(lambda: status, lambda name: None)
    return RequestRouter(pages, lambda: 0, 1000).respond_to_request(target).body.decode()


def agent_metrics() -> str:
    status = console_samples.agent_status(30)
    return RequestRouter(AgentPages(lambda: status), lambda: 0, 1000).respond_to_request("/metrics").body.decode()


def samples(text: str) -> set[str]:
    """Names as queries have them: with _total, _bucket, _sum, _count."""
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def metrics_page() -> str:
    head = """# Metrics

[daemon](../commands/daemon.md) and [agent](../commands/agent.md) serve these metrics at `/metrics`, in base units. Metrics without the
prefix `tiered_compactor_` have the names and units of Kafka's LogCleaner and LogCleanerManager; `/metrics?names=own` leaves them out.
`python -m tests.unit.test_monitoring` writes this page.
"""
    parts = [head]
    for title, text in (("Daemon", daemon_metrics()), ("Agent", agent_metrics())):
        parts.append(f"## {title}\n\n| metric | type | labels | |\n|---|---|---|---|")
        for family in families(text).values():
            if not family.name.startswith("process_"):
                labels = sorted({f"`{label}`" for sample in family.samples for label in sample.labels} - {"`le`"})
                name = family.name + ("_total" if family.type == "counter" else "")
                parts.append(f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |")
        parts.append("")
    return "\n".join(parts)


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)


def test_the_reference_lists_every_metric_with_its_help_text() -> None:
    assert PAGE.read_text(encoding="utf-8") == metrics_page(), "python -m tests.unit.test_monitoring writes the page"


def test_own_names_have_one_prefix_and_kafkas_are_there_beside_them() -> None:
    own = {name for name in families(daemon_metrics("/metrics?names=own")) if not name.startswith("process_")}
    assert {name for name in own if not name.startswith(f"{OWN}_")} == set()
    everything = {name for name in families(daemon_metrics()) if not name.startswith("process_")}
    assert everything - own == KAFKAS


def test_aliases_say_the_same_in_kafkas_units() -> None:
    found = {name: family.samples[0].value for name, family in families(daemon_metrics()).items() if family.samples}
    assert found["uncleanable_partitions_count"] == found[f"{OWN}_uncleanable_partitions"] == 2
    assert found["max_dirty_percent"] == pytest.approx(100 * found[f"{OWN}_max_dirty_ratio"])
    assert found["cleaner_recopy_percent"] == pytest.approx(100 * found[f"{OWN}_last_round_recopy_ratio"]) == 31
    assert found["max_clean_time_secs"] == found[f"{OWN}_last_round_seconds"] == 48
    assert found["time_since_last_run_ms"] == 6_000


@pytest.mark.parametrize("text", [daemon_metrics("/metrics?names=own"), agent_metrics()], ids=["daemon", "agent"])
def test_promtool_has_nothing_to_say(text: str) -> None:
    ran = promtool("check", "metrics", text=text)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_promtool_minds_only_names_of_kafka() -> None:
    ran = promtool("check", "metrics", text=daemon_metrics())
    assert {line.split()[0] for line in (ran.stdout + ran.stderr).splitlines()} <= KAFKAS


def test_partitions_with_series_of_their_own_are_bounded_and_the_bad_ones_are_among_them() -> None:
    found = families(daemon_metrics(partitions=2_000))
    labelled = found[f"{OWN}_dirty_bytes"].samples
    assert len(labelled) == MOST_LABELLED == found[f"{OWN}_partitions_labelled"].samples[0].value
    assert found[f"{OWN}_partitions"].samples[0].value == 2_000
    bad = {("inventory.levels", "0"), ("inventory.levels", "1")}
    assert bad <= {(sample.labels["topic"], sample.labels["partition"]) for sample in labelled}


def test_histograms_count_what_took_how_long() -> None:
    taken = DurationHistogram().with_duration(0.05).with_duration(BOUNDS_S[0]).with_duration(7.0).with_duration(1e9)
    buckets = dict(taken.prometheus_buckets)
    assert buckets[str(BOUNDS_S[0])] == 2
    assert buckets["5.0"] == 2
    assert buckets["10.0"] == 3
    assert buckets["+Inf"] == 4
    assert taken.total == pytest.approx(1e9 + 7.15)
    found = families(daemon_metrics())
    counts = {
        sample.labels["phase"]: sample.value for sample in found[f"{OWN}_round_phase_duration_seconds"].samples if "_count" in sample.name
    }
    assert counts == {"index": 1, "rewrite": 1}


def test_the_build_is_named() -> None:
    (sample,) = families(daemon_metrics())[f"{OWN}_build_info"].samples
    assert set(sample.labels) == {"version", "python"}


def queries() -> Iterator[tuple[str, str]]:
    """(where, expression) of everything that dashboard and rules ask."""
    dashboard = json.loads((CONF / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    yield from ((rule["alert"], rule["expr"]) for rule in rules())


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((CONF / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def serve_metrics(folder: Path) -> str:
    cli = TierCli(folder)
    log = log_of("a=1")
    cli.bring(log.write(folder / "log"))
    settings = load_settings(str(cli.config), {})
    endpoint = Endpoint(open_tier(settings), settings, "127.0.0.1:0")
    endpoint._socket.close()
    return EndpointPages(endpoint).respond_to_request("/metrics").body.decode()


def test_every_metric_of_dashboard_and_alerts_exists(tmp_path: Path) -> None:
    known = samples(daemon_metrics("/metrics?names=own")) | samples(agent_metrics()) | samples(serve_metrics(tmp_path)) | {"up"}
    lost = {}
    for where, expression in queries():
        names = set(re.findall(r"\b(?:tiered_compactor_\w+|process_\w+|up\b(?=\{))", expression))
        assert names, (where, expression)
        if names - known:
            lost[where] = names - known
    assert lost == {}


def test_labels_of_dashboard_and_alerts_exist() -> None:
    given: dict[str, set[str]] = {}
    for text in (daemon_metrics(), agent_metrics()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                given.setdefault(sample.name, set()).update(sample.labels)
    for where, expression in queries():
        for name, chosen in re.findall(r"\b(tiered_compactor_\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)\s*=~?", chosen))
            assert labels <= given[name] | {"job", "instance"}, where


def test_alerts_are_well_formed_and_fire_when_they_should() -> None:
    checked = promtool("check", "rules", str(CONF / "alerts.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ran = promtool("test", "rules", str(CONF / "alerts.test.yml"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tested = re.findall(r"alertname: (\w+)\n +exp_alerts:\n", (CONF / "alerts.test.yml").read_text())
    assert set(tested) == {rule["alert"] for rule in rules()}


def test_every_alert_has_a_section_in_the_runbook() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    titles = {line.removeprefix("### ").lower().replace(":", "").replace(" ", "-") for line in page.splitlines() if line.startswith("### ")}
    for rule in rules():
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert file == "docs/operating.md"
        assert anchor in titles, rule["alert"]
    assert {title for title in titles if title.startswith("alert-")} == {f"alert-{rule['alert'].lower()}" for rule in rules()}


def test_what_happened_long_ago_is_not_reclaimed_today() -> None:
    status = console_samples.daemon_status(3, trouble=False)
    totals = DaemonPages(lambda: status, lambda name: None).status_page_document(PartitionListQuery()).totals
    sights = [schedule.due for schedule in status.schedules if schedule.due is not None]
    assert totals.reclaimed_24h_bytes == sum(judged.freed[1][1] for judged in sights) > 0


if __name__ == "__main__":
    PAGE.write_text(metrics_page(), encoding="utf-8")
