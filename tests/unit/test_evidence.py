"""The page of evidence says what the records say, and what they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.evidence import PAGE, page, read_records, write_record

SIMULATION: dict[str, Any] = {"suite": "tiers in general", "start": 0, "seeds": 12, "steps": 3456, "violations": 0}


def test_the_reliability_page_is_generated_from_the_records() -> None:
    assert PAGE.read_text() == page(read_records())


def test_the_page_shows_figures_of_records_and_names_what_has_no_record(tmp_path: Path) -> None:
    write_record(tmp_path / "one.json", "simulation", SIMULATION)
    text = page(read_records(tmp_path))
    assert "| tiers in general | 0 to 11 | 3,456 | 0 |" in text
    assert "- No run is recorded: the replacement protocol, exhaustively." in text
    assert "random schedules" not in text.partition("## Known gaps")[2]


def test_the_page_names_rules_whose_absence_nothing_notices(tmp_path: Path) -> None:
    rules = [
        {"name": "noticed", "seeds": [3], "violation": "a lost record", "covered_by": ""},
        {"name": "covered", "seeds": [], "violation": "", "covered_by": "another rule"},
        {"name": "bare", "seeds": [], "violation": "", "covered_by": ""},
    ]
    write_record(tmp_path / "one.json", "mutants", {"suite": "tiers in general", "seeds": 1000, "rules": rules})
    gaps = page(read_records(tmp_path)).partition("## Known gaps")[2]
    assert "this rule is dropped (tiers in general): bare." in gaps
    assert "covered." not in gaps


def test_a_run_with_violations_is_counted_against_its_promise(tmp_path: Path) -> None:
    write_record(tmp_path / "one.json", "simulation", SIMULATION | {"violations": 2})
    assert "| 1 runs, 1 with violations |" in page(read_records(tmp_path))
    assert json.loads((tmp_path / "one.json").read_text())["kind"] == "simulation"


def test_deleted_records_count_as_faults_and_discarded_ones_do_not() -> None:
    [run] = (record for record in read_records() if record["file"] == "broker-soak-4.4.0-seed-59.json")
    text = page([run])
    assert "| 59 | 60.0 | 4,466 | 14,600,939 | 246 | 0 |" in text
    assert "| records deleted | 20 |" in text
    assert "unclean elections discarded |" not in text
