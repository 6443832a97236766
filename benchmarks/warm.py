"""What segments cost that did not change: ``python -m benchmarks.warm --beside CHECKOUT [--dir D]``.

A tier's control logs are written as snapshots of states as rounds leave them, nine tenths clean; a second one is due as a whole. `topics`
and `plan` run with warm local state, and so does a daemon's first pass. Then partitions get a record each, and `topics` runs again. All of
it is done here and in another checkout with a .venv of its own, in turns: CPU microseconds of the process tree a segment, beyond those of
the same command on an empty tier; medians of ROUNDS.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.start_up import cpu_of_children
from checkpoint.lineage import EpochEntry
from checkpoint.offsets import CleanerOffset
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.constants import CompactorEpoch, LeaderEpoch, Offset, TimestampMs, TopicId
from compactor.control import records
from compactor.control.control_log import LogDeletionBoundary, StateSnapshot
from compactor.control.importing import record_topic_id_adoption
from compactor.control.logs import publish_hints
from compactor.control.state import PartitionState
from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.model.segment import CountAndDigestSum, RemoteLogSegmentMetadata, SegmentFile

HERE = Path(__file__).resolve().parent.parent
ROUNDS, SLOT, NOW = 5, 64, 1_790_000_000_000
SHAPES = ((200, 1000), (20, 10_000))
EXTRAPOLATED = 10_000_000
"""Segments, in partitions of 1,000."""
COLUMNS = ("partitions x segments", "microseconds a segment", "now", "beside", "ratio")
KINDS = ("log", "index", "timeindex", "leader-epoch-checkpoint", "snapshot")
OPEN_STATE = """
import sys, tracemalloc
from compactor.control.state import PartitionState
data = open(sys.argv[1], "rb").read()
PartitionState.model_validate_json(data)
tracemalloc.start()
state = PartitionState.model_validate_json(data)
print(tracemalloc.get_traced_memory()[0] / len(state.live))
"""
FIRST_PASS = """
import sys
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.daemon.daemon import Daemon
daemon = Daemon(open_tier(load_settings(sys.argv[1], {}), local_state=True), seed=1)
daemon.scan()
if not daemon.status().ready:
    raise SystemExit("the pass is not complete")
"""


def segment(partition: int, number: int) -> RemoteLogSegmentMetadata:
    def digest(kind: str) -> str:
        return hashlib.sha256(f"{partition} {number} {kind}".encode()).hexdigest()

    return RemoteLogSegmentMetadata(
        id=encode_segment_id(bytes.fromhex(digest("id"))[:16]), start_offset=Offset(number * 1000), end_offset=Offset(number * 1000 + 999),
        size_bytes=10_000_000, max_timestamp_ms=TimestampMs(NOW + number), mtime_ms=NOW + number, first_timestamp_ms=NOW + number,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(number * 1000)),), records=1000,
        files={kind: SegmentFile(size=1000 + number, sha256=digest(kind)) for kind in KINDS},
        content=CountAndDigestSum(count=10, digest=digest("content")[:32]),
    )  # fmt: skip


def write_tier(folder: Path, partitions: int, segments: int, *, clean_tenths: int = 9) -> None:
    """Snapshots of control logs without records. No object of a segment exists, as none is read."""
    folder.mkdir()
    for name in ("here", "beside"):
        config = f'[tier]\nurl = "file://{folder}/tier"\nstate_dir = "{folder}/{name}.state"\n'
        (folder / f"{name}.toml").write_text(config)
    tier = open_tier(load_settings(str(folder / "here.toml"), {}))
    tier.identity.read_or_create_catalog()
    clean = CleanerOffset(leader_epoch=CompactorEpoch(0), offset=Offset(segments * clean_tenths // 10 * 1000))
    for number in range(partitions):
        log = tier.open_partition_log(TopicPartition("orders", number))
        live = tuple(segment(number, each) for each in range(segments))
        state = PartitionState(topic="orders", partition=number, slot=SLOT, live=live, vector=(clean,) if clean_tenths else ())
        snapshot = StateSnapshot[PartitionState](version=records.VERSION, log=log.name, state=state)
        boundary = LogDeletionBoundary(version=records.VERSION, log=log.name, number=1, slot=SLOT)
        for key, value in ((f"snapshot/{SLOT:020d}", snapshot), (f"boundary/{1:020d}", boundary)):
            tier.ports.control.put(f"{log.prefix}/{key}.json", records.append_checksum(value.model_dump_json().encode()))
        (folder / "state.json").write_text(state.model_dump_json())
    if partitions:
        publish_hints(tier.catalog, {TopicPartition("orders", number): SLOT for number in range(partitions)})


def change(folder: Path, partitions: int) -> None:
    """One record in the log of each of so many partitions."""
    tier = open_tier(load_settings(str(folder / "here.toml"), {}))
    tier.identity.read_catalog()
    for number in range(partitions):
        log = tier.open_partition_log(TopicPartition("orders", number))
        topic_id, before = TopicId(f"topic-{log.refresh().slot}"), log.state.topic_id
        record_topic_id_adoption(log, records.TopicAdopted(topic_id=topic_id, previous_id=before, seam=-1, by="benchmark", why="a record"))
        tier.change_notifier.announce_changed_control_logs([log])


def cpu_s(checkout: Path, *arguments: str | Path) -> float:
    before = cpu_of_children()
    quiet = subprocess.DEVNULL
    subprocess.run([checkout / ".venv/bin/python", *arguments], cwd=checkout, check=True, stdout=quiet, stderr=quiet)
    return cpu_of_children() - before


Seconds = dict[str, dict[str, float]]
"""By what was done and the name of the checkout."""


def measure(folder: Path, checkouts: Mapping[str, Path], changed: tuple[int, ...] = ()) -> Seconds:
    """Medians. The first turn fills local state and does not count. ``changed``: numbers of partitions that get a record."""
    found: dict[str, dict[str, list[float]]] = {}

    def run(what: str, *arguments: str | Path, counts: bool = True) -> None:
        for name, checkout in checkouts.items():
            seconds = cpu_s(checkout, *arguments, folder / f"{name}.toml")
            if counts:
                found.setdefault(what, {}).setdefault(name, []).append(seconds)

    for turn in range(ROUNDS + 1):
        run("`topics`", "-m", "compactor", "topics", "--config", counts=turn > 0)
        run("`plan`", "-m", "compactor", "plan", "--sample", "0", "--config", counts=turn > 0)
        run("a daemon's first pass", "-c", FIRST_PASS, counts=turn > 0)
        for partitions in changed if turn else ():
            change(folder, partitions)
            run(f"{partitions} changed", "-m", "compactor", "topics", "--config")
    return {what: {name: statistics.median(each) for name, each in names.items()} for what, names in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout with its .venv (make setup); else nothing is compared")
    parser.add_argument("--dir", type=Path, help="where the tiers are made, 1 KB a segment (default: a temporary directory)")
    args = parser.parse_args()
    checkouts, rows = {"here": HERE} | ({"beside": args.beside.resolve()} if args.beside else {}), []

    def row(shape: str, what: str, figures: Mapping[str, float], unit: str = "", digits: int = 1) -> None:
        here, beside = figures["here"], figures.get("beside")
        compared = ("", "") if beside is None else (f"{beside:,.{digits}f}{unit}", f"{here / beside:.2f}")
        rows.append((shape, what, f"{here:,.{digits}f}{unit}", *compared))
        print(*rows[-1], sep=" | ", flush=True)

    with tempfile.TemporaryDirectory(prefix="warm-", dir=args.dir) as scratch:
        write_tier(Path(scratch) / "empty", 0, 0)
        empty = measure(Path(scratch) / "empty", checkouts)
        for partitions, segments in SHAPES:
            for clean_tenths in (9, 0):
                folder, shape = Path(scratch) / "tier", f"{partitions} x {segments:,}"
                changed = (partitions // 20, partitions // 4) if clean_tenths else ()
                write_tier(folder, partitions, segments, clean_tenths=clean_tenths)
                found = measure(folder, checkouts, changed)
                for what, before in empty.items():
                    if not clean_tenths and what != "`plan`":
                        continue
                    each = {name: 1e6 * (found[what][name] - before[name]) / partitions / segments for name in checkouts}
                    row(shape, what if clean_tenths else f"{what}, all due", each)
                    if clean_tenths and (partitions, segments) == SHAPES[0]:
                        all_s = {name: before[name] + each[name] * EXTRAPOLATED / 1e6 for name in checkouts}
                        row("10,000 x 1,000, extrapolated", what, all_s, " s", 0)
                for count in changed:
                    again = found[f"{count} changed"]
                    each = {name: 1e6 * (again[name] - found["`topics`"][name]) / count / segments for name in checkouts}
                    row(shape, f"`topics`, of {count} partitions that changed", each)
                if clean_tenths:
                    state = {
                        name: float(subprocess.check_output([path / ".venv/bin/python", "-c", OPEN_STATE, folder / "state.json"], cwd=path))
                        for name, path in checkouts.items()
                    }
                    row(shape, "bytes of an open state a segment", state, digits=0)
                shutil.rmtree(folder)
    if args.beside:
        report_table(BenchmarkTable("warm", COLUMNS, rows, compared=COLUMNS[-1:], label_columns=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
