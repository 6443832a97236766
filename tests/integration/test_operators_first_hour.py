"""What an operator types in the first hour, and what the answer has to say: names, amounts, remedies, the next command."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from compactor.daemon.metrics import daemon_metrics
from compactor.daemon.status import read_daemon_status
from compactor.service_metrics import render_metrics
from tests.support.deployment import Deployment, GrowingLog

ANSWERS = {
    "a misspelt command": ("topcs", 2, r"^error: argument COMMAND: invalid choice: 'topcs'. Did you mean topics\? See .*\n$"),
    "a misspelt partition": ("plan order-0", 2, r"the tier holds no partition order-0\. Did you mean orders-0\?\n"),
    "a misspelt topic": ("runs list order", 2, r"Did you mean orders\?\n"),
    "a misspelt setting's option": ("config show --topci orders", 2, r"Did you mean --topic\?\n"),
    "offsets after the end": ("cat orders-0 --from 999999999", 0, r"orders-0 has no such record; it holds offsets 0 to \d+\n"),
    "a plan says what it saves": ("plan orders", 0, r"1 round is due: about \S+ KiB of \S+ KiB read will be saved"),
    "a topic in place of a partition: rounds": ("runs list orders", 0, r"orders-0 +\S{8} +cleaned"),
    "a topic in place of a partition: segments": ("segments list orders", 0, r"\d+ - \d+ +\d[\d.]* KiB"),
    "a topic in place of a partition: request": ("wake orders", 0, r"orders-0 is taken up by a daemon within daemon\.interval_ms \(15 s\)"),
    "a topic in place of a partition: reasons": ("explain orders", 0, r"dirty ratio \d\.\d\d"),
    "a topic in place of a partition: check": ("verify orders", 0, r"all is well"),
    "a partition in place of a round": (
        "undo orders-0",
        2,
        r"the latest round that can be undone is that of orders-0 at .*Z\. tiered-compactor undo \S{22} --config \S+\n",
    ),
    "a topic in place of a round": ("undo orders", 2, r"is that of orders-0 at .*Z\. tiered-compactor undo \S{22} --config \S+\n"),
    "a pattern in place of a round": ("undo ord.*", 2, r"is that of orders-0 at .*Z\. tiered-compactor undo \S{22} --config \S+\n"),
    "a misspelt partition in place of a round": ("undo order-0", 2, r"no partition remembers a run order-0\. Did you mean orders-0\?\n"),
    "a topic without rounds in place of a round": ("undo payments", 2, r"no round of payments can be undone\. `runs list payments` shows"),
    "a pattern in place of a partition: reasons": ("explain .*", 0, r"(?s)^orders-0: .+^payments-0: .*the brokers move"),
    "an option that is like no other": (
        "cat orders-0 --max 3",
        2,
        r"unrecognized arguments: --max 3\. See `tiered-compactor cat --help`\n",
    ),
    "durations in words": ("config show", 0, r"publish\.grace_ms +600000 \(10 min\)"),
    "a duration without a bound": ("config show", 0, r"cleaner\.max_compaction_lag_ms +9223372036854775807 \(no limit\)"),
    "a setting given as a duration": ("config show", 0, r"daemon\.interval_ms +15000 \(15 s\)"),
    "a setting given as a size": ("config show", 0, r"cleaner\.map_budget_bytes +67108864 \(64\.0 MiB\)"),
    "sizes of what waits": (
        "retire --dry-run",
        0,
        r"0 objects to be deleted, 0 to be swept \(0 B\), \d+ wait for grace \(\d[^)]*iB\)\. The next are due at .*Z",
    ),
    "filters that nobody asked yet": ("bloom show orders-0", 0, r"(?s)^(?!.*useless).*filter made for"),
    "re-compaction gives its reasons": (
        "recompact --dry-run",
        0,
        r"(?s)orders-0 +would_be_cleaned +\S+ KiB +\S+ KiB of \S+ KiB is dirty; \d+ segments.*nothing was changed",
    ),
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A partition with a round in its history and dirty records; another topic is paused and as dirty."""
    folder = tmp_path_factory.mktemp("tier")
    made = Deployment(folder, {"cleaner": {"segment_bytes": 16_384, "map_budget_bytes": "64 MiB"}, "daemon": {"interval_ms": "15s"}})
    log = GrowingLog("orders", 0, folder, random.Random(5))
    made.bring(log.write_part())
    made.do("run", "--force")
    made.bring(log.write_part())
    made.do("import", GrowingLog("payments", 0, folder, random.Random(6)).write_part(), "--topic", "payments", "--partition", 0)
    made.do("pause", "payments", "--reason", "the brokers move")
    return made


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_says_what_an_operator_needs(deployment: Deployment, question: str) -> None:
    words, code, wanted = ANSWERS[question]
    answer = deployment.ask(*words.split(), output="table")
    shown = (answer.document or "") + "".join(f"{line}\n" for line in answer.remarks)
    assert (answer.code, bool(re.search(wanted, shown, re.MULTILINE))) == (code, True), shown


def test_page_and_metrics_count_the_same_due_partitions(deployment: Deployment) -> None:
    status = read_daemon_status(deployment.opened(), lambda: None)
    assert [str(schedule.partition) for schedule in status.schedules if schedule.startable is not None] == ["orders-0"]
    assert b"\ntiered_compactor_partitions_due 1.0\n" in render_metrics(daemon_metrics(status, include_kafka_names=False))
    assert deployment.do("status")["totals"]["due_partitions"] == 1


@pytest.mark.damages
def test_damage_in_a_live_segment_is_named_and_a_remedy_with_it(tmp_path: Path) -> None:
    made = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}})
    made.bring(GrowingLog("orders", 0, tmp_path, random.Random(7)).write_part())
    segment = next(each for each in made.do("segments", "list", "orders-0")["segments"] if each["start_offset"])
    log = next(made.tier.rglob(f"*{segment['id']}.log"))
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.chmod(0o644)
    log.write_bytes(bytes(data))
    assert made.ask("run", "--force").code == 3
    read = made.ask("cat", "orders-0", "--format", "json", output="table")
    assert read.code == 3
    assert read.document.count("\n") > 10
    assert "cannot be read" in read.stderr
    explained = made.ask("explain", "orders-0", output="table").document
    assert "repair orders-0 --from" in explained
    assert "not in the log any more" not in explained
    assert made.ask("verify", output="table").document.endswith("1 problem\n")
