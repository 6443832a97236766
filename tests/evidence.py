"""Evidence of reliability: records that test programs write, and the tables of docs/reliability.md that are generated from them.

    python -m tests.evidence            writes the tables of docs/reliability.md from docs/evidence/*.json
    python -m tests.evidence --check    ends with exit code 1 if the tables are not what the records give

A record is the JSON of one run (``write_record``). The page's text is written by hand; a table follows a line
``<!-- make evidence: NAME -->`` and names no figure that is not in a record. A run of a commit before the last change to ``CODE``, or of an
unknown one, is shown as older.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "evidence"
PAGE = ROOT / "docs" / "reliability.md"
CODE = tuple(f"compactor/{name}" for name in ("adapters/brokers", "round", "control", "cleaner", "tier"))
"""What a run is evidence of: a change here makes all earlier runs older."""
Record = Mapping[str, Any]


def write_record(path: Path | None, kind: str, fields: Record) -> None:
    """Write the record of a run; do nothing if ``path`` is None.

    kind: which program ran, ``broker-soak`` or one of the keys of ``AMOUNTS``.
    fields: figures of the run. ``violations`` is the list or the number of what was violated.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"kind": kind, "when": time.strftime("%Y-%m-%d"), "commit": _commit(), **fields}
        path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def _commit() -> str:
    """Return the commit that runs, with ``+`` if files differ from it; empty outside of a repository."""
    return _git("describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")[1]


def _git(*words: str) -> tuple[int, str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


@cache
def has_latest_code(commit: str) -> bool:
    """Return whether the last change to ``CODE`` is in a commit; False for one that this repository does not have."""
    _, changed = _git("log", "-1", "--format=%H", "--", *CODE)
    return bool(commit and changed) and _git("merge-base", "--is-ancestor", changed, commit.removesuffix("+"))[0] == 0


def read_records(folder: Path = RECORDS) -> list[Record]:
    """Return all records of a folder, ordered by file name."""
    return [json.loads(path.read_text()) | {"file": path.name} for path in sorted(folder.glob("*.json"))]


def page(text: str, records: Sequence[Record]) -> str:
    """Return ``text`` with its generated tables as the records give them."""
    tables = {"broker soaks": _broker_soaks(records), "other programs": _other_programs(records)}
    return re.sub(r"(<!-- make evidence: ([\w ]+) -->\n)(?:\|.*\n)*", lambda found: f"{found[1]}{tables[found[2]]}\n", text)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows)])


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _violations(record: Record) -> int:
    found = record.get("violations", 0)
    return found if isinstance(found, int) else len(found)


def _when(record: Record) -> str:
    commit = record.get("commit", "")
    changed = "+" * commit.endswith("+")  # nightly records whole hashes, which are cut; that files differed must stay
    older = "" if has_latest_code(commit) else ", older"
    return (f"{record['when']}, {commit.removesuffix('+')[:12]}{changed}" if commit else str(record["when"])) + older


def _broker_soaks(records: Sequence[Record]) -> str:
    runs = sorted((record for record in records if record["kind"] == "broker-soak"), key=lambda run: str(run["when"]), reverse=True)
    rows: list[Sequence[object]] = []
    for run in runs:
        where = f"{run['kafka']} {run['flavour']}" + (f", `--sabotage {run['sabotage']}`" if run["sabotage"] else "")
        rows.append((_when(run), where, run["seed"], run["minutes"], run["records_read"], _faults(run).total(), _violations(run)))
    return _table(("when", "Kafka, tier", "seed", "minutes", "records read", "faults", "violations"), rows)


def _faults(run: Record) -> Counter[str]:
    """Return how often each kind of fault happened. A run counts two more things among them: each storm again by its kind, and records."""
    no_faults = {name for name in run["faults"] if name == "records that unclean elections discarded" or name.startswith("S3 storm:")}
    return Counter({name: count for name, count in run["faults"].items() if name not in no_faults})


def _other_programs(records: Sequence[Record]) -> str:
    rows: list[Sequence[object]] = []
    for kind, (command, amount) in AMOUNTS.items():
        runs = [record for record in records if record["kind"] == kind]
        rows += [(f"`{command}`", _when(run), amount(run), _violations(run)) for run in runs] or [
            (f"`{command}`", "never", "no record", "-")
        ]
    return _table(("command", "when", "how much", "violations"), rows)


def _mutants(run: Record) -> str:
    seen = sum(bool(rule["seeds"]) for rule in run["rules"])
    tests = sum(not rule["seeds"] and bool(rule.get("test")) for rule in run["rules"])
    covered = sum(not rule["seeds"] and not rule.get("test") and bool(rule["covered_by"]) for rule in run["rules"])
    unnoticed = [rule["name"] for rule in run["rules"] if not rule["seeds"] and not rule.get("test") and not rule["covered_by"]]
    parts = (
        f"{seen} of {len(run['rules'])} noticed",
        f"{tests} by a test alone" * bool(tests),
        f"{covered} harmless alone" * bool(covered),
    )
    return f"{run['suite']}: " + ", ".join(filter(None, [*parts, *(f"**not noticed: {name}**" for name in unnoticed)]))


def _model(run: Record) -> str:
    whole = [row for row in run["rows"] if not row["dropped"]]
    broken = sum(bool(row["broken"]) for row in run["rows"] if row["dropped"])
    return f"{sum(row['states'] for row in whole):,} states; {broken} of {len(run['rows']) - len(whole)} dropped rules break a promise"


def _conformance(run: Record) -> str:
    profiles = run["profiles"].values()
    same, documented = (sum(found[name] for found in profiles) for name in ("same", "documented"))
    return f"{sum(found['seeds'] for found in profiles)} logs: {same} the same bytes, {documented} documented differences"


def _kills(run: Record) -> str:
    return f"{sum(count for name, count in run['ends'].items() if name.endswith('killed'))} processes killed"


AMOUNTS: Mapping[str, tuple[str, Callable[[Record], str]]] = {
    "simulation": ("make simulate", lambda run: f"{run['suite']}: {run['seeds']} seeds, {run['steps']:,} steps"),
    "mutants": ("--drop all", _mutants),
    "model": ("make model", _model),
    "conformance": ("make conformance", _conformance),
    "kill-test": ("make kill-test", _kills),
    "soak": ("make soak", lambda run: f"{run['minutes']} minutes, {run['faults']:,} failed requests, {run['rounds']} rounds"),
    "agent-soak": (
        "make agent-soak",
        lambda run: f"{run['minutes']} minutes, {sum(run['faults'].values())} faults, {run['rounds']} rounds",
    ),
    "nightly": ("make nightly", lambda run: f"{len(run['parts'])} parts"),
}
"""Kind of record -> the command that runs it again, and how much one run was."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    text = PAGE.read_text()
    current = page(text, read_records())
    if arguments.check:
        return 0 if text == current else 1
    PAGE.write_text(current)
    print(f"{PAGE.relative_to(ROOT)}: {len(read_records())} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
