"""The simulation notices when a rule is missing. Rules that others cover are dropped together with those."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from tests.evidence import RECORDS
from tests.simulation import test_directed
from tests.simulation.__main__ import RULES, failing_test
from tests.simulation.mutations import COVERED, MUTATIONS, NEAR, bites, blind_import, tiered_unregistered
from tests.simulation.play import playing

SEEDS = range(1000)
NOTICED = {
    rule["name"]: rule["seeds"][0] for rule in json.loads((RECORDS / "mutants-compactor.json").read_text())["rules"] if rule["seeds"]
}
"""Mutation -> the seed that noticed it when the record was written. The search begins there: schedules change with the code."""


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in {*COVERED, *NEAR}])
def test_a_missing_rule_is_noticed(name: str) -> None:
    first = NOTICED.get(name, 0)
    seeds = (SEEDS[first:], SEEDS[:first])
    assert next(chain.from_iterable(bites(MUTATIONS[name], part) for part in seeds), None) is not None


def test_the_tests_near_rules_are_there() -> None:
    assert [name for name, path in NEAR.items() if not Path("tests", path).is_file()] == []
    assert set(NEAR) <= set(chain.from_iterable(RULES.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NEAR)
def test_without_a_rule_a_test_near_it_fails(name: str) -> None:
    option = next(option for option, rules in RULES.items() if name in rules)
    assert failing_test(name, [option] if option else [])


def test_a_voided_import_that_counted_would_be_noticed() -> None:
    """Rare among random schedules, so directed: the importer sleeps until its objects are swept, and is believed."""
    with pytest.raises((AssertionError, pytest.fail.Exception)), playing() as play, tiered_unregistered(), blind_import():
        test_directed.TestImports().test_an_importer_that_sleeps_between_upload_and_append(play)
    assert any("has no object" in violation for violation in play.world.violations)
