"""What takes hours, one part after the other, and the record that it was run: ``make nightly``.

    python -m tests.nightly                 runs all parts and writes docs/evidence/nightly.json
    python -m tests.nightly simulation      only those parts whose names begin so; nothing is recorded
    python -m tests.nightly --age           says of which commit and how old the record is

A part that fails does not keep the others from being run. The exit code is the number of parts that failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.evidence import RECORDS, write_record

ROOT = Path(__file__).parents[1]
RECORD = RECORDS / "nightly.json"
PARTS: Mapping[str, tuple[str, ...]] = {
    "slow tests": ("pytest", "-m", "slow or slow_broker", "tests"),
    "simulation": ("tests.simulation",),
    "simulation on Google Cloud Storage": ("tests.simulation", "--store", "gs"),
    "simulation on Azure": ("tests.simulation", "--store", "az"),
    "simulation on HDFS": ("tests.simulation", "--store", "hdfs"),
    "simulation of broker-managed tiers": ("tests.simulation", "--brokers"),
    "simulation of brokers' directories": ("tests.simulation", "--way-in"),
    "simulation of lives": ("tests.simulation", "--lives"),
    "mutations": ("tests.simulation", "--drop", "all"),
    "conformance": ("tests.conformance", "--seeds", "1000"),
    "model": ("tests.model",),
    "kill test": ("tests.kill_test", "--kills", "200", "--seed", "1"),
    "agent soak": ("tests.agent_soak", "--minutes", "10"),
    "broker soak": ("tests.broker_soak", "--minutes", "10"),
}
"""Name of a part -> the module that is run and its arguments."""


def git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def run(parts: Mapping[str, tuple[str, ...]], workers: int) -> list[dict[str, Any]]:
    """Run the parts, and return name, command, seconds and exit code of each."""
    done = []
    for name, words in parts.items():
        command = [*words, *(("-n", str(workers)) if words[0] == "pytest" else ())]
        print(f"--- {name}: python -m {' '.join(command)}", flush=True)
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode
        done.append({"name": name, "command": " ".join(command), "seconds": round(time.monotonic() - began), "exit_code": code})
    return done


def failed(parts: list[dict[str, Any]]) -> list[str]:
    return [f"{part['name']} (exit code {part['exit_code']})" for part in parts if part["exit_code"]]


def age(now: float) -> str:
    """Return one line about the record."""
    if not RECORD.exists():
        return "nightly: no run is recorded; `make nightly` writes docs/evidence/nightly.json, which `make release` asks for"
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    days = int((now - time.mktime(time.strptime(record["when"], "%Y-%m-%d"))) // 86_400)
    wrong = failed(record["parts"])
    return f"nightly: {days} days ago, of commit {record['commit'][:12]}; " + (f"failed: {', '.join(wrong)}" if wrong else "nothing failed")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", help="how the names of the parts begin (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="test processes (default 2)")
    parser.add_argument("--age", action="store_true", help="only say how old the record is")
    arguments = parser.parse_args()
    if arguments.age:
        print(age(time.time()))
        return 0
    chosen = {name: words for name, words in PARTS.items() if not arguments.part or name.startswith(tuple(arguments.part))}
    commit, clean = git("rev-parse", "HEAD"), not git("status", "--porcelain", "--untracked-files=no")
    done = run(chosen, arguments.workers)
    for part in done:
        print(f"{part['seconds']:7,} s  exit code {part['exit_code']}  {part['name']}")
    if not arguments.part and clean:
        write_record(RECORD, "nightly", {"commit": commit, "parts": done, "violations": failed(done)})
        print(f"written: {RECORD.relative_to(ROOT)}; `make evidence` brings it into docs/reliability.md, then commit both")
    elif not arguments.part:
        print("nothing is recorded: there were uncommitted changes")
    return len(failed(done))


if __name__ == "__main__":
    sys.exit(main())
