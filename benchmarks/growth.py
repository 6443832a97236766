"""Whether a record costs the same whatever the number of keys: one round over 1 to 100 million keys, with the gate and without it.

    python -m benchmarks.growth [--millions 1 3 10 30 100] [--dir D] [--rows FILE] [--plot docs/growth.svg]

Each key comes once, in an order of its own, in records of 60 bytes and segments of a million: the worst case for a map, as none is
superseded. The map budget is the default (512 MiB), so that with more and more
keys first the gate looks up a part of them and then the cleaner's go to the disk.
Each round is a process of its own. Start-up is measured by a round that finds nothing to do, and taken off. ``--rows`` adds to a file
what was measured, and the table and the plot are of all rows in it: sizes may be measured one at a time. About 200 bytes of disk a key.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.budget import NAME, run, write_config
from benchmarks.logs import write_log
from benchmarks.many_keys import shuffled
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.transfer.import_ import import_directory

VALUE_BYTES, PER_BATCH = 34, 500
MIB = 1 << 20


@dataclass(frozen=True)
class Grown:
    """One round. Microseconds a record, bytes of memory (``resident``: the most that the process had) and of disk a key."""

    keys: int
    gate: bool
    engine: str
    cpu_us: float
    wall_us: float
    map_bytes: float
    resident_bytes: float
    gate_coverage: float


def measure(folder: Path, keys: int, map_budget_bytes: int) -> list[Grown]:
    write_log(folder / "log", shuffled(keys), value_bytes=VALUE_BYTES, per_batch=PER_BATCH)
    sizes = [path.stat().st_size for path in (folder / "log").glob("*.log")]
    found = []
    for gate in (False, True):
        tier = folder / f"tier-{gate}"
        config = write_config(
            tier, segment_bytes=max(sizes) + 100_000, disk_budget_bytes=3 * max(sizes) + keys * 60 + 64 * MIB,
            map_budget_bytes=map_budget_bytes, verify_before_publish=gate, bloom=False, threads=1,
        )  # fmt: skip
        opened = open_tier(load_settings(str(config), {}))
        import_directory(opened, folder / "log", NAME, opened.settings.cleaner.cleaner_policy())
        begin = time.perf_counter()
        row, resident, cpu = run(config)
        seconds = time.perf_counter() - begin
        (last,) = opened.open_partition_log(NAME).refresh().runs[-1:]
        if row["records_kept"] != keys or (last.stats["gate_keys"] == keys) != (last.stats["gate_coverage"] == 1.0):
            raise SystemExit(f"{row['records_kept']} of {keys} records were kept, and the gate looked up {last.stats['gate_keys']}")
        begin = time.perf_counter()
        _, idle_bytes, idle_cpu = run(config)
        idle = time.perf_counter() - begin
        found.append(
            Grown(
                keys, gate, row["map_engine"], (cpu - idle_cpu) / keys * 1e6, (seconds - idle) / keys * 1e6, row["peak_map_bytes"] / keys,
                (resident - idle_bytes) / keys, float(last.stats["gate_coverage"]),
            )
        )  # fmt: skip
        shutil.rmtree(tier)
        shutil.rmtree(tier.with_suffix(".state"), ignore_errors=True)
    shutil.rmtree(folder / "log")
    return found


def table(rows: Sequence[Grown]) -> str:
    lines = [
        "| million keys | gate | cleaner's keys | gate's keys | CPU, us a record | its share | map, bytes a key | RSS, bytes a key |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = {row.keys: row for row in rows if not row.gate}
    for row in sorted(rows, key=lambda row: (row.keys, row.gate)):
        share = f"{100 * (1 - plain[row.keys].cpu_us / row.cpu_us):.0f} %" if row.gate and row.keys in plain else ""
        checked = f"{100 * row.gate_coverage:.0f} %"
        lines.append(
            f"| {row.keys / 1e6:g} | {'on' if row.gate else 'off'} | {'disk' if row.engine == 'partitioned' else 'memory'} "
            f"| {checked if row.gate else ''} | {row.cpu_us:.2f} | {share} | {row.map_bytes:.1f} | {row.resident_bytes:.0f} |"
        )
    return "\n".join(lines)


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 300, 50, 250, 30


def plot(rows: Sequence[Grown]) -> str:
    """CPU a record over the number of keys, which grows to the right by powers of ten; one line with the gate, one without."""
    most = max(row.cpu_us for row in rows) * 1.2
    low, high = (math.log10(end(row.keys for row in rows)) for end in (min, max))

    def x(keys: int) -> float:
        return _LEFT + 40 + (math.log10(keys) - low) / max(high - low, 0.1) * (_WIDTH - _LEFT - 140)

    def y(value: float) -> float:
        return _BOTTOM - value / most * (_BOTTOM - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<text x="{_LEFT}" y="16">CPU microseconds a record, by million keys of one round</text>',
        f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_WIDTH - 60}" fill="none" stroke="#888"/>',
    ]
    parts += [
        f'<text x="{x(keys):.0f}" y="{_BOTTOM + 18}" text-anchor="middle">{keys / 1e6:g}</text>'
        for keys in sorted({row.keys for row in rows})
    ]
    for number in range(5):
        value = most * number / 4
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.0f}" text-anchor="end">{value:.1f}</text>')
    for gate, colour, name in ((True, "#c0392b", "with the gate"), (False, "#2c6fbb", "without")):
        line = sorted((row for row in rows if row.gate is gate), key=lambda row: row.keys)
        points = [(x(row.keys), y(row.cpu_us)) for row in line]
        parts.append(
            f'<polyline points="{" ".join(f"{a:.0f},{b:.0f}" for a, b in points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [f'<circle cx="{a:.0f}" cy="{b:.0f}" r="3" fill="{colour}"/>' for a, b in points]
        parts.append(f'<text x="{points[-1][0] + 8:.0f}" y="{points[-1][1] + 4:.0f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="*", default=[1, 3, 10, 30, 100])
    parser.add_argument("--map-budget-mib", type=int, default=512, help="default 512; with less, keys go to the disk sooner")
    parser.add_argument("--dir", type=Path, help="where the logs are made (default: a temporary directory)")
    parser.add_argument("--rows", type=Path, help="a file of earlier rows, to which these are added")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where the SVG goes")
    args = parser.parse_args()
    known = args.rows.read_text(encoding="utf-8").splitlines() if args.rows and args.rows.exists() else []
    rows = {(row.keys, row.gate): row for row in (Grown(**json.loads(line)) for line in known)}
    with tempfile.TemporaryDirectory(prefix="growth-", dir=args.dir) as folder:
        for millions in args.millions:
            for row in measure(Path(folder), round(millions * 1e6), args.map_budget_mib * MIB):
                rows[row.keys, row.gate] = row
                print(row, flush=True)
                if args.rows:
                    with args.rows.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
    print(table(list(rows.values())))
    if args.plot:
        args.plot.write_text(plot(list(rows.values())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
