"""`clean` gives what Kafka's cleaner gave: logs that its log layer wrote, every profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.judge import agrees
from tests.golden_cases import cleaner_round, names


@pytest.mark.parametrize("name", names("cleaner"))
def test_clean_agrees_with_kafka(name: str, cleaner_cases: Path, tmp_path: Path) -> None:
    agrees(cleaner_round(cleaner_cases / name, tmp_path), tmp_path / "out")


@pytest.mark.parametrize("name", ["gaps-11", "legacy-6", "txn-3"])
def test_threads_change_nothing(name: str, cleaner_cases: Path, tmp_path: Path) -> None:
    agrees(cleaner_round(cleaner_cases / name, tmp_path), tmp_path / "out", threads=3)
