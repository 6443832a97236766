"""A few dozen random logs through Kafka's own cleaner and ours; `make conformance` runs thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from tests.builders import next_directory
from tests.conformance.__main__ import GROWING, PROFILES, run_seed
from tests.conformance.kafka import Kafka


@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("profile", PROFILES)
def test_agrees_with_kafkas_cleaner(kafka: Kafka, profile: str, seed: int) -> None:
    assert run_seed(kafka, seed, profile).difference == ""


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("profile", GROWING)
def test_ten_rounds_over_a_growing_log(kafka: Kafka, profile: str, seed: int) -> None:
    assert run_seed(kafka, seed, profile).difference == ""


@pytest.mark.parametrize("profile", ["plain", "txn", "legacy", "mixed"])
def test_kafka_reads_what_we_wrote(kafka: Kafka, profile: str, tmp_path: Path) -> None:
    """Opened as after a crash, so that Kafka checks every batch: the views are those of its own cleaner's output."""
    request = kafka.generate(99, profile, tmp_path / "in")["request"]
    summary = clean_log_directory(tmp_path / "in", tmp_path / "ours", OfflineCleanOptions(**request))
    theirs = kafka.clean(tmp_path / "in", tmp_path / "theirs", request)
    views = []
    for name, end in (("ours", summary.next_dirty_offset), ("theirs", theirs["next_dirty_offset"])):
        after = next_directory(tmp_path / "in", tmp_path / name, end, tmp_path / f"after-{name}")
        views.append((kafka.read(after), kafka.read(after, recover=True)))
    for ours, kafkas in zip(*views, strict=True):
        for what in ("log_end_offset", "last_stable_offset", "producers", "read_committed", "read_uncommitted"):
            assert ours[what] == kafkas[what], what
