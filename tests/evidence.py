"""Evidence of reliability: records that test programs write, and the page that is generated from them.

    python -m tests.evidence            writes docs/reliability.md from docs/evidence/*.json
    python -m tests.evidence --check    ends with exit code 1 if the page is not what the records give

A record is the JSON of one run (``write_record``). The page names no figure that is not in a record, and lists what no record covers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "evidence"
PAGE = ROOT / "docs" / "reliability.md"
Record = Mapping[str, Any]


def write_record(path: Path | None, kind: str, fields: Record) -> None:
    """Write the record of a run; do nothing if ``path`` is None.

    kind: which program ran, one of the keys of ``SECTIONS``.
    fields: figures of the run. ``violations`` is the list or the number of what was violated.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"kind": kind, "when": time.strftime("%Y-%m-%d"), **fields}
        path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def read_records(folder: Path = RECORDS) -> list[Record]:
    """Return all records of a folder, ordered by file name."""
    return [json.loads(path.read_text()) | {"file": path.name} for path in sorted(folder.glob("*.json"))]


@dataclass(frozen=True)
class Promise:
    """What users are promised. tests: where it is tested. kinds: kinds of records that say how much was run."""

    text: str
    tests: str
    kinds: tuple[str, ...]


PROMISES = (
    Promise(
        "A reader never misses the last committed value of a key, and never gets a record that nobody wrote",
        "`tests/read_checker.py` in `tests/broker_soak` and `tests/simulation`",
        ("broker-soak", "simulation", "soak"),
    ),
    Promise(
        "A deleted key does not come back", "`tests/read_checker.py`, `tests/property/test_cleaner_matches_naive.py`", ("broker-soak",)
    ),
    Promise("The output is what Kafka's own cleaner makes of the same log", "`tests/conformance`, `tests/golden`", ("conformance",)),
    Promise(
        "Two compactors never work against each other; a process that died or slept harms nothing",
        "`tests/simulation`, `tests/kill_test.py`",
        ("simulation", "kill-test"),
    ),
    Promise(
        "No order of records, lag or crash lets brokers lose an offset while segments are switched",
        "`tests/model/Replacement.tla`, `tests/broker`",
        ("model", "broker-soak"),
    ),
    Promise(
        "A replica built from compacted segments equals one built from the brokers' own", "`tests/broker/test_replica_from_remote.py`", ()
    ),
    Promise("Every rule that protects data is needed, and its absence is noticed", "`tests/simulation/mutations.py`", ("mutants", "model")),
)

NEVER = (
    "Amazon S3 itself: tests run against versitygw and moto, and Google Cloud Storage against an emulator.",
    "Networks between machines: all brokers of a test run on one machine, and faults of the network are made on loopback.",
    "Power failure: processes are killed, machines are not.",
)
"""What no test program can cover on one machine."""


def sections(records: Sequence[Record]) -> Iterator[str]:
    """Yield the parts of the page, in order."""
    by_kind: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_kind[record["kind"]].append(record)
    yield _promises(by_kind)
    for kind, (title, table) in SECTIONS.items():
        if by_kind[kind]:
            yield f"## {title}\n\n{table(by_kind[kind])}"
    yield _gaps(by_kind)


def page(records: Sequence[Record]) -> str:
    """Return the text of docs/reliability.md."""
    head = (
        "# Reliability: what is promised, and what was run\n\n"
        "Generated from [evidence](evidence) by `make evidence`; the records are written by the test programs themselves. "
        "Each table names the program to run again.\n"
    )
    return "\n\n".join([head.rstrip(), *sections(records)]) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows)])


def _cell(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _violations(record: Record) -> int:
    found = record.get("violations", 0)
    return found if isinstance(found, int) else len(found)


def _promises(by_kind: Mapping[str, Sequence[Record]]) -> str:
    rows = []
    for promise in PROMISES:
        runs = [record for kind in promise.kinds for record in by_kind.get(kind, ()) if not record.get("sabotage")]
        failed = sum(_violations(record) > 0 for record in runs)
        said = f"{len(runs)} runs, {failed} with violations" if runs else "in the test suite" if not promise.kinds else "no run recorded"
        rows.append((promise.text, promise.tests, said))
    return "## Promises\n\n" + _table(("promise", "tested by", "recorded runs"), rows)


def _broker_soak(records: Sequence[Record]) -> str:
    runs = [record for record in records if not record["sabotage"]]
    rows: list[Sequence[object]] = []
    for run in runs:
        passes = sum(count for name, count in run["passes"].items() if "read_" in name)
        where, faults = f"{run['kafka']}, {run['flavour']}", _faults(run).total()
        rows.append((run["when"], where, run["seed"], run["minutes"], passes, run["records_read"], faults, _violations(run)))
    text = _table(("when", "Kafka, tier", "seed", "minutes", "passes judged", "records read", "faults", "violations"), rows)
    damaged = Counter[str]()
    for run in runs:
        damaged.update(run["s3_requests_damaged"])
    text += "\n\nFaults by kind, all runs:\n\n" + _table(("fault", "times"), sum(map(_faults, runs), Counter[str]()).most_common())
    text += f"\n\nBesides, {sum(damaged.values()):,} requests to the S3 server failed on purpose: " + ", ".join(
        f"{name} {count:,}" for name, count in damaged.most_common()
    )
    tolerated = Counter[str]()
    for run in runs:
        tolerated.update(run["read_from_uncompacted_segments"])
    told = ", ".join(f"{name} {count:,}" for name, count in sorted(tolerated.items())) or "none"
    excused = sum(run["excused_by_unclean_elections"] for run in runs)
    text += (
        f".\n\nRecords that brokers themselves handed out against their rules, from segments that nobody had compacted: {told}. Compacted "
        "segments hold no such records, and are checked for them. Records missing from reads "
        f"because an unclean election discarded the one that had superseded them: {excused:,}. "
    )
    holes = [passes for run in runs for passes in run.get("passes_that_met_holes_made_by_brokers", {}).values()]
    text += (
        "Excused holes, which two brokers made by copying a segment from the same offset to different ends, where no round had been: "
        f"{len(holes):,}; passes that ended out of range there: {sum(holes):,}."
    )
    for run in (record for record in records if record["sabotage"]):
        found = f"{_violations(run):,} violations within {run['minutes']} minutes"
        text += f"\n\nBroken on purpose with `--sabotage {run['sabotage']}`: {found}."
    return text + "\n\n`make broker-soak MINUTES=60`"


def _faults(run: Record) -> Counter[str]:
    """Return how often each kind of fault happened. A run counts two more things among them: each storm again by its kind, and records."""
    no_faults = {name for name in run["faults"] if name == "records that unclean elections discarded" or name.startswith("S3 storm:")}
    return Counter({name: count for name, count in run["faults"].items() if name not in no_faults})


def _simulation(records: Sequence[Record]) -> str:
    rows = [
        (run["when"], run["suite"], f"{run['start']:,} to {run['start'] + run['seeds'] - 1:,}", run["steps"], _violations(run))
        for run in records
    ]
    return _table(("when", "what is simulated", "seeds", "steps", "schedules with a violation"), rows) + "\n\n`make simulate SEEDS=1000`"


def _mutants(records: Sequence[Record]) -> str:
    parts = []
    for run in records:
        rows = [(rule["name"], _first_seeds(rule), _noticed_by(rule)) for rule in run["rules"]]
        survived = sum(not rule["seeds"] and not rule.get("test") for rule in run["rules"])
        text = (
            f"{run['suite'].capitalize()}: {len(rows)} rules dropped one by one, {run['seeds']:,} seeds each, {survived} not noticed.\n\n"
        )
        parts.append(
            text + _table(("rule that was dropped", "first seeds that notice", "what they notice, or why it is harmless alone"), rows)
        )
    return "\n\n".join(parts) + "\n\n`python -m tests.simulation --drop all`"


def _noticed_by(rule: Record) -> str:
    return f"`{rule['test']}` fails" if rule.get("test") else rule["covered_by"] or rule["violation"]


def _first_seeds(rule: Record) -> str:
    return ", ".join(map(str, rule["seeds"])) or "none"


def _model(records: Sequence[Record]) -> str:
    rows = [
        (row["dropped"] or "nothing", row["states"], row["broken"] or "all promises hold", row["steps"])
        for run in records
        for row in run["rows"]
    ]
    return _table(("rule left out", "states", "what breaks", "in steps"), rows) + "\n\n`make model`"


def _conformance(records: Sequence[Record]) -> str:
    rows = [
        (run["when"], run["kafka"], profile, found["seeds"], found["same"], found["documented"], found["failed"])
        for run in records
        for profile, found in run["profiles"].items()
    ]
    head = ("when", "Kafka", "profile", "logs", "the same bytes", "documented differences", "others")
    return _table(head, rows) + "\n\n`make conformance SEEDS=1000`"


def _kill_test(records: Sequence[Record]) -> str:
    rows = [
        (run["when"], run["seed"], ", ".join(f"{name}: {count}" for name, count in sorted(run["ends"].items())), _violations(run))
        for run in records
    ]
    return _table(("when", "seed", "how processes ended", "violations"), rows) + "\n\n`make kill-test KILLS=200`"


def _soak(records: Sequence[Record]) -> str:
    rows = [(run["when"], run["seed"], run["minutes"], run["faults"], run["rounds"], run["views"], _violations(run)) for run in records]
    head = ("when", "seed", "minutes", "requests that failed", "rounds", "views compared", "violations")
    return _table(head, rows) + "\n\n`make soak MINUTES=60`"


def _gaps(by_kind: Mapping[str, Sequence[Record]]) -> str:
    """List what is not covered: what cannot be, and what no record shows."""
    gaps = list(NEVER)
    soaks = [run for run in by_kind.get("broker-soak", ()) if not run["sabotage"]]
    longest = max((run["minutes"] for run in soaks), default=0)
    if longest < 60:
        gaps.append(f"The longest recorded broker soak took {longest} minutes; an hour is meant.")
    if not any(run["flavour"] == "aiven" for run in soaks):
        gaps.append("No broker soak with Aiven's plug-in is recorded; its layouts are tested against captured tiers.")
    if len({run["kafka"] for run in soaks}) < 2:
        gaps.append("The broker soak is recorded for one Kafka version only.")
    gaps += [f"No run is recorded: {title[0].lower()}{title[1:]}." for kind, (title, _) in SECTIONS.items() if not by_kind.get(kind)]
    noticed = {(run["suite"], rule["name"]) for run in by_kind.get("mutants", ()) for rule in run["rules"] if _noticed_by(rule)}
    for run in by_kind.get("mutants", ()):
        bare = [rule["name"] for rule in run["rules"] if (run["suite"], rule["name"]) not in noticed]
        gaps += [f"Nothing notices within {run['seeds']:,} seeds that this rule is dropped ({run['suite']}): {name}." for name in bare]
    for run in soaks:
        if _violations(run):
            gaps.append(f"The broker soak of {run['when']} with seed {run['seed']} ended with violations: {run['violations'][0][:300]}")
    return "## Known gaps\n\n" + "\n".join(f"- {gap}" for gap in gaps)


def _nightly(runs: Sequence[Record]) -> str:
    rows = [(part["name"], f"`python -m {part['command']}`", part["seconds"], part["exit_code"]) for run in runs for part in run["parts"]]
    head = "\n".join(f"{run['when']}, commit {run['commit']}. `make nightly` runs it again." for run in runs)
    return f"{head}\n\n{_table(('part', 'command', 'seconds', 'exit code'), rows)}"


SECTIONS: Mapping[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "broker-soak": ("Brokers under load and faults", _broker_soak),
    "simulation": ("Random schedules of crashes, zombies and broken stores", _simulation),
    "mutants": ("What the simulation notices", _mutants),
    "model": ("The replacement protocol, exhaustively", _model),
    "conformance": ("Kafka's own cleaner on the same logs", _conformance),
    "kill-test": ("Processes killed at random moments", _kill_test),
    "soak": ("Two daemons over one tier on S3", _soak),
    "nightly": ("Everything that takes hours, one part after the other", _nightly),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    text = page(read_records())
    if arguments.check:
        return 0 if PAGE.read_text() == text else 1
    PAGE.write_text(text)
    print(f"{PAGE.relative_to(ROOT)}: {len(read_records())} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
