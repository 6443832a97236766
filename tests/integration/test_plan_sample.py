"""`plan` says unasked what compaction saves."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.deployment import Deployment, GrowingLog


def test_plan_estimates_the_saving_where_no_round_is_known(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}})
    deployment.bring(GrowingLog("orders", 0, tmp_path, random.Random(5)).write_part())
    before = deployment.digest()
    (unasked,) = deployment.do("plan", "--sample", "0")["partitions"]
    assert unasked["expected_saving_bytes"] is None
    (asked,) = deployment.do("plan")["partitions"]
    assert 0 < asked["expected_saving_bytes"] < asked["bytes_to_read"]
    assert asked["expected_saving_error_bytes"] is not None
    assert "1 round is due: at least" in deployment.ask("plan", output="table").document
    assert deployment.digest() == before
    (live,) = deployment.do("topics")["partitions"]
    deployment.run()
    (cleaned,) = deployment.do("topics")["partitions"]
    assert live["bytes"] - cleaned["bytes"] >= asked["expected_saving_bytes"] * 0.8


def test_plan_goes_on_where_a_sample_cannot_be_read(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}})
    deployment.bring(GrowingLog("orders", 0, tmp_path, random.Random(5)).write_part())
    hidden = {path: path.rename(path.with_suffix(".hidden")) for path in deployment.tier.rglob("*.log")}
    (row,) = deployment.do("plan")["partitions"]
    for path, away in hidden.items():
        away.rename(path)
    assert row["expected_saving_bytes"] is None
    assert "a sample cannot be read" in row["expected_saving_why"]
