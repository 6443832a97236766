"""What `run` on a directory writes, syncs and costs: ten segments of records of 1 KB without a codec, of which half are superseded.

    python -m benchmarks.directory_round [--records 30000] [--rounds 5] [--beside CHECKOUT]

Each build imports the log into a tier of its own, then runs a round in a process of its own; builds take turns, and the medians count.
``--beside``: the directory of another commit with its own ``.venv`` (``make setup``). Bytes written are those of all write requests
(``wchar``) for each byte of the sources; CPU seconds are the process's, start-up included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.doc_tables import ROOT, BenchmarkTable, report_table
from benchmarks.logs import write_log

SEGMENTS: Final = 10
CHILD: Final = """
import json, os, resource, runpy, sys
syncs, sync = [], os.fsync
os.fsync = lambda descriptor: (syncs.append(1), sync(descriptor))[1]
sys.argv = ["compactor", *sys.argv[1:]]
try:
    runpy.run_module("compactor", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code, ended.code
written = next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("wchar"))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([written, len(syncs), used.ru_utime + used.ru_stime]), file=sys.stderr)
"""


def measure(build: Path, log: Path, folder: Path) -> tuple[float, ...]:
    """Bytes written for each byte of the sources, syncs, CPU seconds."""
    config = folder / "tiered-compactor.toml"
    sizes = sorted(path.stat().st_size for path in log.glob("*.log"))[1:]
    config.write_text(
        f'[tier]\nurl = "{(folder / "tier").as_uri()}"\nstate_dir = "{folder / "state"}"\n[cleaner]\nsegment_bytes = {max(sizes)}\n'
    )
    python = str(build / ".venv/bin/python")
    environment = os.environ | {"PYTHONPATH": str(build)}

    def run(*arguments: object) -> list[float]:
        done = subprocess.run(
            [python, "-c", CHILD, *map(str, arguments), "--config", str(config)],
            env=environment, cwd=folder, check=True, capture_output=True, text=True,
        )  # fmt: skip
        found: list[float] = json.loads(done.stderr.splitlines()[-1])
        return found

    run("import", log, "--topic", "t", "--partition", 0, "--live")
    written, syncs, cpu = run("run", "--force")
    return written / sum(sizes), syncs, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=30_000, help="of a segment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path)
    args = parser.parse_args()
    builds = {"this one": ROOT} | ({args.beside.name: args.beside.resolve()} if args.beside else {})
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in builds}
    keys = np.arange(args.records)
    with tempfile.TemporaryDirectory() as scratch:
        segments = [keys + number % (SEGMENTS // 2) * args.records for number in range(SEGMENTS)]
        # The newest segment is not cleaned.
        write_log(Path(scratch, "log"), [*segments, np.arange(100)], value_bytes=1000)
        for turn in range(args.rounds + 1):
            for name, build in builds.items():
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    costs = measure(build, Path(scratch, "log"), Path(folder))
                if turn:  # the first one compiles
                    found[name].append(costs)
    rows = []
    for name, measured in found.items():
        written, syncs, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
        rows.append((name, f"{written:.2f}", f"{syncs:.0f}", f"{cpu:.2f}"))
    report_table(BenchmarkTable("directory_round", ("build", "bytes written", "syncs", "CPU s"), rows, compared=("bytes written", "syncs")))


if __name__ == "__main__":
    main()
