"""Random logs by Kafka's own builders, cleaned by Kafka's own cleaner and by ours.

    python -m tests.conformance --seeds 1000                    every profile in turn
    python -m tests.conformance --profile txn --seed 17 --seeds 1    one case again
    python -m tests.conformance --profile growing --seeds 50    ten rounds each over a growing log

A failing case is shrunk and printed in words; --keep DIR keeps it as a log directory. Exit 0: all agree; 1: some do not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from compactor.errors import UsageError
from tests.chunking import SIZES, chunks_of
from tests.conformance.growing import live_through_rounds
from tests.conformance.judge import Judge, Verdict, judge_naive, judge_product
from tests.conformance.kafka import Kafka, KafkaFailed, Unavailable
from tests.conformance.shrink import Case, shrink
from tests.evidence import write_record
from tests.plain_format import segment_paths
from tests.support.kafka_jars import VERSIONS

PROFILES = ("plain", "txn", "gaps", "legacy", "keyless", "logappend", "tiny", "mixed")
GROWING = ("growing", "growing-plain")
ROUNDS = 10


def run_seed(kafka: Kafka, seed: int, profile: str, judge: Judge = judge_product, keep: Path | None = None) -> Verdict:
    """One case. Where it fails, the difference says it in words, with the shrunk case behind it."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        scratch = Path(name)
        if profile in GROWING:
            verdict = live_through_rounds(kafka, seed, profile, ROUNDS, scratch)
            return Verdict(verdict.difference, verdict.note)
        request = kafka.generate(seed, profile, scratch / "in")["request"]
        _lose_indexes(random.Random(seed), scratch / "in")
        with chunks_of(SIZES[seed % len(SIZES)]):
            verdict = judge(kafka, scratch / "in", request, scratch)
        if not verdict.difference:
            return verdict
        if keep:
            shutil.copytree(scratch / "in", keep / f"{profile}-{seed}")
            (keep / f"{profile}-{seed}" / "request.json").write_text(json.dumps(request, indent=1))
        with chunks_of(SIZES[seed % len(SIZES)]):
            return Verdict(f"{verdict.difference}\n{_shrunk(kafka, Case.load(scratch / 'in', request), judge, scratch)}")


def _lose_indexes(dice: random.Random, folder: Path) -> None:
    """Now and then segments come without index files. Kafka, and we, rebuild them, which decides the grouping.

    A transaction index never goes alone: to Kafka that means that nothing was aborted (docs/compatibility.md).
    """
    if dice.random() < 0.7:
        return
    lost = dice.choice([(".timeindex",), (".index", ".timeindex", ".txnindex"), (".index", ".txnindex")])
    for base in segment_paths(folder):
        if dice.random() < 0.5:
            for suffix in lost:
                (folder / f"{base:020}{suffix}").unlink(missing_ok=True)


def _shrunk(kafka: Kafka, case: Case, judge: Judge, scratch: Path) -> str:
    def difference(candidate: Case) -> str:
        trial = scratch / "trial"
        shutil.rmtree(trial, ignore_errors=True)
        trial.mkdir()
        try:
            return judge(kafka, candidate.write(trial / "in"), candidate.request, trial).difference
        except (KafkaFailed, UsageError):
            return ""

    if not difference(case):
        return f"It needs the indexes or snapshots as they were (--keep DIR keeps them).\n{case.words()}"
    small = shrink(case, lambda candidate: bool(difference(candidate)))
    return f"Shrunk from {case.batches()} to {small.batches()} batches: {difference(small)}\n{small.words()}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds of each profile (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="the first one (default 1)")
    parser.add_argument("--profile", choices=[*PROFILES, *GROWING], action="append", help="may be given several times; default: all")
    parser.add_argument("--naive", action="store_true", help="judge tests/naive_cleaner.py instead of the product")
    parser.add_argument("--keep", type=Path, help="a folder for the logs of failing cases")
    parser.add_argument("--most-failures", type=int, default=5, help="stop after so many (default 5)")
    parser.add_argument("--record", type=Path, help="write the counts here, as JSON")
    asked = parser.parse_args(arguments)
    profiles = asked.profile or [*PROFILES, *([] if asked.naive else GROWING)]
    try:
        with Kafka() as kafka:
            return _run(kafka, asked, profiles)
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 5


def _run(kafka: Kafka, asked: argparse.Namespace, profiles: list[str]) -> int:
    failures = 0
    found: dict[str, dict[str, int]] = {}
    judge = judge_naive if asked.naive else judge_product
    for profile in profiles:
        notes: Counter[str] = Counter()
        seeds = max(1, asked.seeds // 10) if profile in GROWING else asked.seeds
        for seed in range(asked.seed, asked.seed + seeds):
            verdict = run_seed(kafka, seed, profile, judge, asked.keep)
            notes[verdict.note or "same"] += not verdict.difference
            if verdict.difference:
                failures += 1
                print(f"--profile {profile} --seed {seed}: {verdict.difference}\n", flush=True)
                if failures >= asked.most_failures:
                    return 1
        same = notes["same"]
        found[profile] = {"seeds": seeds, "same": same, "documented": notes.total() - same, "failed": seeds - notes.total()}
        print(f"{profile}: {seeds} seeds; " + ", ".join(f"{name} {count}" for name, count in notes.most_common() if count), flush=True)
    write_record(asked.record, "conformance", {"kafka": VERSIONS[0], "seed": asked.seed, "profiles": found, "violations": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
