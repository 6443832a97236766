"""The named behaviours once more, with Kafka's own cleaner as a witness of every round in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.builders import Life, tell
from tests.conformance.judge import judge_product
from tests.conformance.kafka import Kafka
from tests.unit import (
    test_log_cleaner_extra,
    test_log_cleaner_map,
    test_log_cleaner_records,
    test_log_cleaner_segments,
    test_log_cleaner_transactions as transactions,
)

MODULES = (transactions, test_log_cleaner_records, test_log_cleaner_map, test_log_cleaner_segments, test_log_cleaner_extra)


def behaviours(module: ModuleType) -> Iterator[tuple[str, Callable[..., object]]]:
    """The tests that need nothing but a folder, and the stories."""
    for name, function in vars(module).items():
        if name.startswith("test_") and list(inspect.signature(function).parameters) == ["tmp_path"]:
            yield name, function
    for name, story in getattr(module, "STORIES", {}).items():
        yield name, partial(tell, story=story)


CASES = [(name, function) for module in MODULES for name, function in behaviours(module)]


@pytest.mark.parametrize("behaviour", [function for _, function in CASES], ids=[name for name, _ in CASES])
def test_kafka_does_the_same(kafka: Kafka, behaviour: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def witness(log_dir: Path, request: dict[str, Any], scratch: Path) -> None:
        scratch.mkdir()
        assert judge_product(kafka, log_dir, request, scratch).difference == ""

    monkeypatch.setattr(Life, "witness", staticmethod(witness))
    behaviour(tmp_path)
