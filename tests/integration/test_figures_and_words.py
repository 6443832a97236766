"""Figures and words of commands: what is counted is what is named, and a hint can be followed as it stands."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from compactor.cli.output import Table, table_lines
from compactor.config.settings import load_settings
from compactor.control import audit
from compactor.errors import OutOfBudget, Refused, UsageError
from compactor.local import budget as disk
from compactor.local.budget import DiskBudget, retry_while_disk_full
from compactor.model.ids import TopicPartition
from compactor.round.mirroring import complete_metadata
from compactor.round.ports import estimate_record_count
from compactor.storage.factory import open_store
from compactor.storage.schemes import bucket_and_prefix
from tests.builders import LogBuilder
from tests.support.deployment import ROOT, Deployment, GrowingLog
from tests.support.memory_brokers import MemoryBrokers


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    made = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}})
    made.bring(GrowingLog("orders", 0, tmp_path, random.Random(3)).write_part())
    return made


def test_a_segment_has_no_more_records_than_offsets(tmp_path: Path) -> None:
    """Brokers record no number of records, so that the size alone gave three times as many."""
    brokers = MemoryBrokers(tmp_path, {})
    brokers.topic("orders")
    name = TopicPartition("orders", 0)
    brokers.tier(name, GrowingLog(*name, tmp_path, random.Random(0)).write_part(3))
    state = brokers.opened().open_partition_log(name).refresh()
    for segment in state.live:
        offsets = segment.end_offset - segment.start_offset + 1
        assert segment.records == 0
        assert 0 < estimate_record_count(segment) <= offsets
        assert estimate_record_count(segment.model_copy(update={"size_bytes": 1 << 30})) == offsets


def test_commands_that_are_shown_have_the_configuration_that_was_given(deployment: Deployment) -> None:
    run_id = deployment.run()["partition"] is not None and deployment.do("runs", "list")["runs"][-1]["run_id"]
    command = f"tiered-compactor undo {run_id} --config {shlex.quote(str(deployment.config))}"
    assert command in deployment.ask("runs", "show", run_id, output="table").document
    answer = deployment.ask("undo", "orders-0")
    assert (answer.code, command in answer.stderr) == (2, True)


def test_a_configuration_that_is_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(f'[tier]\nurl = "{tmp_path.as_uri()}"\n'))
    writer.start()
    first = load_settings(str(pipe), {})
    writer.join()
    assert load_settings(str(pipe), {}) == first
    assert first.tier_url == tmp_path.as_uri()


def test_a_process_substitution_is_a_configuration(deployment: Deployment) -> None:
    command = f"{shlex.quote(sys.executable)} -m compactor repair orders-0 --dry-run --config <(cat {shlex.quote(str(deployment.config))})"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "every object is as recorded" in done.stdout) == (0, True), done


def test_the_audit_is_filtered_before_it_is_limited(deployment: Deployment) -> None:
    control = open_store((deployment.tier / ".tiered-compactor").as_uri())
    for number in range(5):
        target = "payments-0" if number == 0 else "orders-0"
        action = audit.ManualAction(at_ms=1_700_000_000_000 + number, user="a", host="h", process=1, command="undo", targets=(target,))
        audit.record_action(control, action, str(number))
    found = deployment.do("audit", "list", "payments", "--limit", 2)["actions"]
    assert [row["action"]["targets"] for row in found] == [["payments-0"]]
    assert len(deployment.do("audit", "list", "orders", "--limit", 2)["actions"]) == 2


@pytest.mark.damages
def test_a_repair_that_is_only_tried_reports_nothing_as_created(deployment: Deployment) -> None:
    index = next(deployment.tier.glob("orders-0/*.timeindex"))
    index.chmod(0o644)
    index.unlink()
    shown = deployment.ask("repair", "orders-0", "--dry-run", output="table").document
    assert "would be " in shown
    assert " created " not in shown.replace("would be created", "")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(28, "No space left on device"), "the file system of state_dir is full"),
        (OSError(28, "No space left on device", "/srv/tier/orders-0/x.log"), "a disk is full, and was so for 0 seconds: .*/srv/tier"),
    ],
)
def test_a_full_disk_is_named_by_what_lies_on_it(error: OSError, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PATIENCE_S", 0.0)

    def fail() -> None:
        raise error

    with pytest.raises(OutOfBudget, match=named):
        retry_while_disk_full(fail, DiskBudget(1), lambda seconds: None)


def test_a_table_says_which_columns_a_narrow_terminal_leaves_out() -> None:
    table = Table("", ("partition", "written", "reason"), [("orders-0", "12 MiB", "x" * 60)], minor=("written",))
    assert any(line.startswith(" not shown for lack of width: written;") for line in table_lines(table, 70))
    assert not any("not shown" in line for line in (*table_lines(table, 120), *table_lines(table, None)))


def test_runs_fit_a_terminal_of_80_columns(deployment: Deployment) -> None:
    deployment.run()
    from tests.support.terminal import on_terminal, without_colours

    def write(terminal: Any) -> None:
        import contextlib

        from compactor.cli.main import entry

        with contextlib.redirect_stdout(terminal):
            assert entry(["runs", "list", "--config", str(deployment.config)]) == 0

    assert max(map(len, without_colours(on_terminal(80, write)).splitlines())) <= 80


def test_a_torn_last_segment_is_told_how_to_be_left_out(deployment: Deployment, tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a=1")
    log.roll()
    log.put("b=1", "c=1")
    folder = log.write(tmp_path / "torn" / "payments-0")
    last = max(folder.glob("*.log"))
    last.write_bytes(last.read_bytes()[:-3])
    answer = deployment.ask("import", folder)
    assert (answer.code, "--live" in answer.stderr) == (3, True)
    first = min(folder.glob("*.log"))
    first.write_bytes(first.read_bytes()[:-3])
    assert "--live" not in deployment.ask("import", folder).stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://b/p", "'b' is not a valid bucket \\(3 to 255 letters"),
        ("s3:///p", "names no bucket"),
        ("gs://Big/p", "'Big' is not a valid bucket"),
        ("az://account/C", "'account/C' is not a valid account and container"),
    ],
)
def test_a_bucket_that_is_named_is_not_called_missing(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bucket_and_prefix(url)


def test_a_wrong_url_of_a_broker_managed_tier_is_not_damage(tmp_path: Path) -> None:
    brokers = MemoryBrokers(tmp_path, {})
    brokers.topic("orders")
    name = TopicPartition("orders", 0)
    brokers.tier(name, GrowingLog(*name, tmp_path, random.Random(0)).write_part(3))
    opened = brokers.opened()
    (segment, *_) = opened.open_partition_log(name).refresh().live
    elsewhere = opened.ports.layout
    for path in (tmp_path / "objects").rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(Refused, match="nothing of orders-0 lies at") as refused:
        complete_metadata(elsewhere, name, segment.model_copy(update={"files": {}}))
    assert "Correct url" in refused.value.hint
    assert "repair" not in str(refused.value)
