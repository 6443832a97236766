"""`clean` gives what Kafka's cleaner gave: logs that a broker wrote for real clients, two rounds each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.judge import agrees
from tests.golden_cases import client_rounds, names


@pytest.mark.parametrize("parameters", ["keep", "drop"])
@pytest.mark.parametrize("name", names("clients"))
def test_clean_agrees_with_kafka_on_clients(name: str, parameters: str, client_cases: Path, tmp_path: Path) -> None:
    for number, each in enumerate(client_rounds(client_cases / name, parameters, tmp_path)):
        agrees(each, tmp_path / f"out{number}")
