"""What a large clean segment costs that meets few dirty keys: a partial rewrite, where the store copies the rest, against a full one.

    python -m benchmarks.partial_rewrite [--mib 512] [--percent 0.01 0.1 1 10] [--store directory S3] [--dir D]

One segment (records of 1 KB, 15 to a batch) is imported and cleaned once. For each share of its batches a tail is imported that has one key
of each of those batches again, all over the segment (``spread``) or next to each other (``together``); the round over it is run on a copy
of the tier, and once with ``splice`` off. ``through this machine`` is what was fetched and sent, of segments, sidecars and records;
``copied`` what the store copied within itself; USD are of S3's requests. S3 is versitygw, whose own processor time is not counted; it
reads and writes what it copies, where S3 itself does not: the seconds of S3 are not these.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.logs import write_log
from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition
from compactor.views.forecast import price_table_of_tier
from tests.support.s3_server import running_versitygw, versitygw_binary

NAME = TopicPartition("orders", 0)
NOW_MS = 1_900_000_000_000
VALUE_BYTES, PER_BATCH = 1_000, 15
BATCH_BYTES = 15_600
MIB = 1 << 20
COLUMNS = ("store", "dirty batches", "where", "through this machine, MiB", "copied, MiB", "requests", "USD", "CPU s", "seconds")
Row = tuple[str, ...]
WRITES = ("put", "copy", "list", "delete")
"""Requests that S3 bills as such; deleting is free, and few."""


class Cost(NamedTuple):
    through: int
    copied: int
    requests: int
    usd: float
    cpu: float
    wall: float


Place = Callable[[str], str]
"""Name of a copy of the tier -> its URL."""


def opened(url: str, folder: Path, settings: str, *, local_state: bool = False) -> Tier:
    """Open a tier with ``settings`` (text of TOML), its configuration and state being in ``folder``."""
    name = url.rstrip("/").rpartition("/")[2]
    config = folder / f"{name}.toml"
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", "")
    config.write_text(
        f'[tier]\nurl = "{url}"\nstate_dir = "{folder / "state" / name}"\n'
        + (f'[s3]\nendpoint_url = "{endpoint}"\n' if url.startswith("s3:") else "")
        + settings
    )
    return open_tier(load_settings(str(config), {}), local_state=local_state)


def cleaner_settings(*, splice: bool) -> str:
    return f"[cleaner]\nmin_cleanable_dirty_ratio = 0.0\nsplice = {str(splice).lower()}\n"


def compacted(tier: Tier) -> Cost:
    before, cpu, wall = tier.counters.usage(), time.process_time(), time.perf_counter()
    report = compact(tier, NAME, NOW_MS, force=True)
    cost, used = time.process_time() - cpu, tier.counters.usage().usage_since(before)
    assert report.status == "cleaned", report
    run = tier.open_partition_log(NAME).refresh().runs[-1].stats
    writes = sum(count for kind, count in used.requests.items() if kind in WRITES)
    usd = price_table_of_tier("s3://bucket").requests_usd(used.total_requests - writes, writes)
    through = used.bytes_read + used.bytes_written
    return Cost(through, int(run.get("bytes_copied", 0)), used.total_requests, usd, cost, time.perf_counter() - wall)


def tail(batches: int, percent: float, *, together: bool) -> np.ndarray:
    """One key of each batch concerned, as often as it takes to fill batches."""
    concerned = max(1, round(batches * percent / 100))
    some = batches // 2 + np.arange(concerned) if together else np.random.default_rng(7).choice(batches, concerned, replace=False)
    keys = np.sort(some) * PER_BATCH
    return np.resize(keys, -(-len(keys) // PER_BATCH) * PER_BATCH)


def measure(store: str, url_of: Place, copy: Callable[[str, str], None], folder: Path, mib: int, percents: list[float]) -> Iterator[Row]:
    batches = mib * MIB // BATCH_BYTES
    end = write_log(folder / "log", [np.arange(batches * PER_BATCH)], value_bytes=VALUE_BYTES, per_batch=PER_BATCH)
    base = opened(url_of("base"), folder, cleaner_settings(splice=True))
    import_directory(base, folder / "log", NAME, base.settings.cleaner.cleaner_policy())
    compact(base, NAME, NOW_MS, force=True)
    shutil.rmtree(folder / "log")
    cases = [(percents[0], False, False), *((percent, together, True) for percent in percents for together in (False, True))]
    for number, (percent, together, splice) in enumerate(cases):
        part, name = folder / f"tail-{number}", f"copy-{number}"
        write_log(part, [tail(batches, percent, together=together)], value_bytes=VALUE_BYTES, per_batch=PER_BATCH, first_offset=end)
        copy("base", name)
        tier = opened(url_of(name), folder, cleaner_settings(splice=splice))
        import_directory(tier, part, NAME, tier.settings.cleaner.cleaner_policy())
        cost = compacted(tier)
        copy("", name)
        shutil.rmtree(part)
        dirty = f"{percent:g} % ({max(1, round(batches * percent / 100)):,})" if splice else "any"
        where = ("together" if together else "spread") if splice else "full rewrite"
        usd = f"{cost.usd:.5f}" if store == "S3" else ""
        yield (
            store, dirty, where, f"{cost.through / MIB:.0f}", f"{cost.copied / MIB:.0f}", str(cost.requests), usd, f"{cost.cpu:.2f}",
            f"{cost.wall:.1f}",
        )  # fmt: skip


def linked(root: Path) -> Callable[[str, str], None]:
    """(tier, its copy): by hard links, as objects never change. ("", tier): that one is no longer wanted."""

    def copy(source: str, target: str) -> None:
        if source:
            shutil.copytree(root / source, root / target, copy_function=os.link)
        else:
            shutil.rmtree(root / target)

    return copy


@contextlib.contextmanager
def on_s3(folder: Path) -> Iterator[tuple[Place, Callable[[str, str], None]]]:
    buckets = folder / "buckets"
    buckets.mkdir()
    with (
        running_versitygw(versitygw_binary(), buckets) as server,
        patch.dict(os.environ, server.environment() | {"AWS_ENDPOINT_URL_S3": server.endpoint}),
    ):
        bucket = server.make_bucket().name
        yield lambda name: f"s3://{bucket}/{name}", linked(buckets / bucket)


@contextlib.contextmanager
def on_disk(folder: Path) -> Iterator[tuple[Place, Callable[[str, str], None]]]:
    yield lambda name: (folder / name).as_uri(), linked(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of the segment")
    parser.add_argument("--percent", type=float, nargs="+", default=[0.01, 0.1, 1.0, 10.0], help="of its batches that are concerned")
    parser.add_argument("--store", nargs="+", choices=("directory", "S3"), default=["directory", "S3"])
    parser.add_argument("--dir", type=Path, help="where the tiers are made (default: a temporary directory)")
    args = parser.parse_args()
    rows: list[Row] = []
    for store in args.store:
        with tempfile.TemporaryDirectory(prefix="partial-rewrite-", dir=args.dir) as place:
            folder = Path(place)
            with on_s3(folder) if store == "S3" else on_disk(folder) as (url_of, copy):
                rows += measure(store, url_of, copy, folder, args.mib, args.percent)
    report_table(BenchmarkTable("partial_rewrite", COLUMNS, rows, compared=COLUMNS[3:6], label_columns=3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
