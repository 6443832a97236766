"""``python -m tests.simulation --seeds N``: runs that many schedules and prints every violation with its seed."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.evidence import ROOT, write_record
from tests.simulation.kafka_schedule import EXPIRY_MUTATIONS, KAFKA_MUTATIONS, RARE_EXPIRY_MUTATIONS, kafka_bites, run_kafka_schedule
from tests.simulation.life_mutations import COVERED_MUTATIONS, DELETION_MUTATIONS, LIFE_MUTATIONS, OPENING_MUTATIONS, life_bites
from tests.simulation.lives import run_life
from tests.simulation.mutations import COVERED, MUTATIONS, NEAR, Mutation, bites
from tests.simulation.schedule import Outcome, run_schedule
from tests.simulation.store_kinds import CLOUD_KINDS
from tests.simulation.way_in import run_way_in
from tests.simulation.way_in_mutations import WAY_IN_MUTATIONS, way_in_bites

CHUNK = 100
SHOWN = 3


Schedule = Callable[..., Outcome]


def outcomes(schedule: Schedule, seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(schedule, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(schedule, seeds, CHUNK)


Bites = Callable[[Mutation, range], Iterator[tuple[int, str]]]


RULES: Mapping[str, Mapping[str, Mutation]] = {
    "": MUTATIONS,
    "--brokers": {**KAFKA_MUTATIONS, **EXPIRY_MUTATIONS, **RARE_EXPIRY_MUTATIONS},
    "--way-in": WAY_IN_MUTATIONS,
    "--lives": {**LIFE_MUTATIONS, **OPENING_MUTATIONS, **COVERED_MUTATIONS, **DELETION_MUTATIONS},
}
"""Rules that can be dropped, by the option that chooses their suite."""


def failing_test(name: str, suite: Sequence[str]) -> str:
    """Run the tests near a rule's code without the rule, in a process of their own. Returns one that fails, or an empty string."""
    command = [sys.executable, "-m", "tests.simulation", *suite, "--drop", name, "--tests", f"tests/{NEAR[name]}"]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    failed = re.search(r"^FAILED (.+?)(?: - |$)", ran.stdout, re.MULTILINE)
    return failed[1] if failed and ran.returncode == pytest.ExitCode.TESTS_FAILED else ""


def show_bites(wanted: str, seeds: range, mutations: Mapping[str, Mutation], bites_of: Bites, suite: Sequence[str]) -> list[dict[str, Any]]:
    """Print the first seeds whose schedule ends in a violation under each mutation, and the first violation. If there is none, print the
    test that fails. Returns all of it as values. ``suite``: the options that choose the suite.
    """
    rules = []
    for name, mutation in mutations.items():
        if wanted == "all" or wanted in name:
            found = list(islice(bites_of(mutation, seeds), SHOWN))
            test = failing_test(name, suite) if name in NEAR and not found else ""
            said = f"; {found[0][1]}" if found else test and f"; fails: {test}"
            print(f"{name}: {', '.join(str(seed) for seed, _ in found) or 'nothing'} of {len(seeds)} seeds{said}", flush=True)
            rules.append(
                {
                    "name": name,
                    "seeds": [seed for seed, _ in found],
                    "violation": found[0][1][:160] if found else "",
                    "test": test,
                    "covered_by": COVERED.get(name, ""),
                }
            )
    return rules


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many schedules")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--trace", type=int, help="show everything that happens in this one schedule")
    parser.add_argument("--drop", metavar="RULE", help="drop rules of mutations.py by name (or 'all') and show which seeds notice")
    parser.add_argument("--tests", metavar="FILE", help="with the whole name of a rule to drop: run these tests without it")
    parser.add_argument("--brokers", action="store_true", help="broker-managed tiers")
    parser.add_argument("--way-in", action="store_true", help="lives of brokers' directories, and what imports them")
    parser.add_argument("--lives", action="store_true", help="lives of a topic that expires, is deleted and is created again")
    parser.add_argument("--store", choices=sorted(CLOUD_KINDS), help="compactor-managed tiers on another kind of store than S3")
    parser.add_argument("--record", type=Path, help="write what was found here, as JSON")
    arguments = parser.parse_args()
    suite = "broker-managed tiers" if arguments.brokers else "importing directories" if arguments.way_in else "compactor-managed tiers"
    suite = "lives of topics" if arguments.lives else suite
    suite += f" on {arguments.store}://" if arguments.store else ""
    schedule: Schedule = partial(run_schedule, scheme=arguments.store) if arguments.store else run_schedule
    dropped: tuple[Mapping[str, Mutation], Bites] = RULES[""], bites
    if arguments.brokers:
        schedule, dropped = run_kafka_schedule, (RULES["--brokers"], kafka_bites)
    if arguments.way_in:
        schedule, dropped = run_way_in, (RULES["--way-in"], way_in_bites)
    if arguments.lives:
        schedule, dropped = run_life, (RULES["--lives"], life_bites)
    if arguments.tests:
        with dropped[0][arguments.drop]():
            return pytest.main(["-x", "-q", "-p", "no:cacheprovider", arguments.tests])
    if arguments.drop is not None:
        chosen = [option for option in ("--brokers", "--way-in", "--lives") if getattr(arguments, option[2:].replace("-", "_"))]
        rules = show_bites(arguments.drop, range(arguments.start, arguments.start + arguments.seeds), *dropped, chosen)
        write_record(arguments.record, "mutants", {"suite": suite, "seeds": arguments.seeds, "rules": rules})
        return 0
    if arguments.trace is not None:
        outcome = schedule(arguments.trace, trace=True)
        print("\n".join(outcome.trace))
        return 1 if outcome.violations else 0
    began = time.monotonic()
    failed, steps, counts = 0, 0, Counter[str]()
    for number, outcome in enumerate(outcomes(schedule, range(arguments.start, arguments.start + arguments.seeds), arguments.jobs), 1):
        steps += outcome.steps
        counts.update(outcome.counts)
        for violation in outcome.violations:
            print(f"seed {outcome.seed}: {violation}", flush=True)
        failed += bool(outcome.violations)
        if number % 5000 == 0:
            print(f"{number} schedules, {failed} with a violation, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"{arguments.seeds} schedules, {steps} steps, {failed} with a violation, {time.monotonic() - began:.0f} s")
    print("records that counted: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    fields = {
        "suite": suite,
        "start": arguments.start,
        "seeds": arguments.seeds,
        "steps": steps,
        "violations": failed,
        "counts": dict(counts),
    }
    write_record(arguments.record, "simulation", fields)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
