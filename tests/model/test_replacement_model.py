"""The protocol keeps its promises in every state that it can reach; without any one of its rules it does not."""

from __future__ import annotations

import os

import pytest

from tests.model.checker import Size, Unavailable, check, jar
from tests.model.rules import RULES, WHOLE


@pytest.fixture(scope="module", autouse=True)
def checker() -> None:
    try:
        jar()
    except Unavailable as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


@pytest.mark.slow
@pytest.mark.parametrize("size", WHOLE[:4], ids=["the broker deletes", "a round is taken back", "segments expire", "a zombie"])
def test_every_promise_holds(size: Size) -> None:
    found = check(size)
    assert found.broken == "", found.told
    assert found.states > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_without_a_rule_a_promise_breaks(name: str) -> None:
    rule = RULES[name]
    found = check(rule.size)
    assert found.broken == rule.breaks
