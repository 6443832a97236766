"""`status`: the verdict on a tier, and its exit codes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.deployment import Deployment, GrowingLog


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    made = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}})
    made.bring(GrowingLog("orders", 0, tmp_path, random.Random(3)).write_part())
    return made


def test_status_of_a_healthy_tier_says_what_is_due_and_what_waits(deployment: Deployment) -> None:
    found = deployment.do("status")
    assert (found["verdict"]["level"], found["totals"]["due_partitions"]) == ("ok", 1)
    deployment.do("pause", "orders")
    paused = deployment.do("status")
    assert (paused["totals"]["due_partitions"], paused["partitions"]["rows"][0]["condition"]) == (0, "paused")
    deployment.do("resume", "orders")
    deployment.do("run", "--force")
    cleaned = deployment.do("status")
    assert cleaned["partitions"]["rows"][0]["condition"] == "waiting"
    shown = deployment.ask("status", output="table")
    assert shown.code == 0
    assert "All well" in shown.document
    assert "in grace" in shown.document
    assert "saved, not deleted yet" in shown.document


@pytest.mark.damages
def test_status_exits_with_3_and_names_the_command_when_a_partition_needs_help(deployment: Deployment) -> None:
    log = next(path for path in deployment.tier.rglob("*.log") if path.stat().st_size > 1000)
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.chmod(0o644)
    log.write_bytes(bytes(data))
    assert deployment.ask("run", "--force").code == 3
    before = deployment.digest()
    answer = deployment.ask("status", output="table")
    assert answer.code == 3
    assert "1 partition needs you" in answer.document
    assert "tiered-compactor explain orders-0" in answer.document
    assert deployment.ask("status").document["needs_attention"][0]["kind"] == "quarantined"
    assert deployment.digest() == before
