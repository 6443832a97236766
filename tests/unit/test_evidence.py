"""The tables of the reliability page say what the records say, and what has no record."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import evidence
from tests.evidence import CODE, PAGE, ROOT, has_latest_code, page, read_records, write_record

SIMULATION: dict[str, Any] = {"suite": "tiers in general", "start": 0, "seeds": 12, "steps": 3456, "violations": 0}
EMPTY = (
    "# Page\n\n<!-- make evidence: broker soaks -->\n\nText.\n\n<!-- make evidence: other programs -->\n| old |\n|---|\n| row |\n\nEnd.\n"
)


def test_the_tables_of_the_reliability_page_are_generated_from_the_records() -> None:
    shown, made = PAGE.read_text(), page(PAGE.read_text(), read_records())
    asked = subprocess.run(("git", "rev-parse", "--is-shallow-repository"), cwd=ROOT, check=False, capture_output=True, text=True)
    if asked.stdout.strip() != "false":  # without its history, nobody knows which runs are older than the code
        shown, made = shown.replace(", older", ""), made.replace(", older", "")
    assert shown == made


def test_tables_are_replaced_and_text_stays(tmp_path: Path) -> None:
    write_record(tmp_path / "one.json", "simulation", SIMULATION | {"commit": "0123456789abcdef"})
    text = page(EMPTY, read_records(tmp_path))
    assert ", 0123456789ab, older | tiers in general: 12 seeds, 3,456 steps | 0 |\n" in text
    assert "| `make model` | never | no record | - |" in text
    assert "\nText.\n" in text
    assert text.endswith("\n\nEnd.\n")
    assert "| old |" not in text
    assert page(text, read_records(tmp_path)) == text


def test_a_run_of_files_that_differ_from_their_commit_is_shown_as_such(tmp_path: Path) -> None:
    write_record(tmp_path / "one.json", "simulation", SIMULATION | {"commit": "0123456789ab+"})
    assert ", 0123456789ab+, older | tiers in general" in page(EMPTY, read_records(tmp_path))


def test_a_run_is_older_unless_its_commit_has_the_last_change_to_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        login = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(("git", *login, *words), cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    def committed(name: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("changed")
        git("add", ".")
        git("commit", "-qm", name)
        return git("rev-parse", "HEAD")

    git("init", "-q")
    commits = [committed(name) for name in (f"{CODE[0]}/a.py", f"{CODE[1]}/b.py", "docs/page.md")]
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    has_latest_code.cache_clear()
    assert [has_latest_code(commit) for commit in (*commits, f"{commits[2][:12]}+", "", "0" * 40)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    has_latest_code.cache_clear()


def test_the_code_that_makes_runs_older_exists() -> None:
    assert [name for name in CODE if not (ROOT / name).is_dir()] == []


def test_the_page_names_rules_whose_absence_nothing_notices(tmp_path: Path) -> None:
    rules = [
        {"name": "noticed", "seeds": [3], "violation": "a lost record", "covered_by": ""},
        {"name": "covered", "seeds": [], "violation": "", "covered_by": "another rule"},
        {"name": "bare", "seeds": [], "violation": "", "covered_by": ""},
    ]
    write_record(tmp_path / "one.json", "mutants", {"suite": "tiers in general", "seeds": 1000, "rules": rules})
    text = page(EMPTY, read_records(tmp_path))
    assert "| tiers in general: 1 of 3 noticed, 1 harmless alone, **not noticed: bare** | 0 |" in text


def test_violations_and_the_commit_of_a_run_are_recorded(tmp_path: Path) -> None:
    write_record(tmp_path / "one.json", "simulation", SIMULATION | {"violations": ["a", "b"]})
    assert "3,456 steps | 2 |" in page(EMPTY, read_records(tmp_path))
    assert json.loads((tmp_path / "one.json").read_text()).keys() >= {"kind", "when", "commit"}


def test_deleted_records_count_as_faults_and_discarded_ones_do_not() -> None:
    [run] = (record for record in read_records() if record["file"] == "broker-soak-4.4.0-seed-59.json")
    assert run["faults"]["records deleted"] == 20
    assert "| 59 | 60.0 | 14,600,939 | 246 | 0 |" in page(EMPTY, [run])
