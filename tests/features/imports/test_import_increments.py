"""A random log imported in random increments, from replicas that roll where they like and cut where they like, equals one import."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, strategies as st

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.control.state import PartitionState
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.model.ids import TopicPartition
from compactor.upkeep.export import export_partition
from tests.builders import LogBuilder, name_topic
from tests.support.depth import examples
from tests.support.tier_cli import TierCli, batches_of, visible

pytestmark = pytest.mark.quick

ORDERS = TopicPartition("orders", 0)


def replica(folder: Path, written: list[bytes], epochs: list[tuple[int, int]], bases: list[int], start: int, count: int) -> Path:
    """The first ``count`` batches from ``start`` on, in segments that begin at the batches ``bases``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    begin = int.from_bytes(written[start][:8], "big")
    path = folder / f"{begin:020}.log"
    for place in range(start, count):
        offset = int.from_bytes(written[place][:8], "big")
        if place in bases:
            path = folder / f"{offset:020}.log"
        with path.open("ab") as file:
            file.write(written[place])
    known = [(epoch, place) for epoch, place in epochs if place < count]
    kept = [(epoch, max(int.from_bytes(written[place][:8], "big"), begin)) for epoch, place in known]
    cut = [entry for number, entry in enumerate(kept) if number == len(kept) - 1 or kept[number + 1][1] > begin]
    (folder / "leader-epoch-checkpoint").write_text("".join(["0\n", f"{len(cut)}\n", *(f"{e} {o}\n" for e, o in cut)]))
    return name_topic(folder)


def imported(tier: Tier, folder: Path, options: ImportOptions | None = None) -> PartitionState:
    import_directory(tier, folder, ORDERS, tier.settings.cleaner_settings_for_topic("orders").cleaner_policy(), options=options)
    return tier.open_partition_log(ORDERS).refresh()


@examples(25, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_increments_equal_one_import(seed: int) -> None:
    rng = random.Random(seed)
    log = LogBuilder()
    epochs = [(0, 0)]
    open_txns: set[int] = set()
    for place in range(rng.randint(3, 24)):
        if rng.random() < 0.15:
            log.leader_epoch += rng.randint(1, 2)
            epochs.append((log.leader_epoch, place))
        pid = rng.choice((-1, -1, 7, 8))
        if pid >= 0 and pid in open_txns and rng.random() < 0.5:
            log.end(pid, commit=rng.random() < 0.5)
            open_txns.discard(pid)
        else:
            log.put(*(f"k{rng.randint(0, 5)}={rng.random()}" for _ in range(rng.randint(1, 3))), pid=pid, txn=pid >= 0)
            open_txns |= {pid} if pid >= 0 else set()
    written = [batch for _, parts in log.segments for batch in parts]
    with tempfile.TemporaryDirectory() as scratch, patch("os.fsync", lambda descriptor: None):
        one, many = (open_tier(load_settings(str(TierCli(Path(scratch) / name).config))) for name in ("one", "many"))
        rolls = sorted(rng.sample(range(len(written)), rng.randint(0, min(4, len(written)))))
        whole = replica(Path(scratch) / "whole", written, epochs, rolls, 0, len(written))
        expected = imported(one, whole)
        have = 0
        while have < len(written):
            count = rng.randint(have + 1, len(written))
            rolls = sorted(rng.sample(range(count), rng.randint(0, min(4, count))))
            start = rng.choice((0, rng.randint(0, have)))
            folder = replica(Path(scratch) / "part", written, epochs, rolls, start, count)
            state = imported(many, folder, ImportOptions(live=rng.random() < 0.3))
            have = next((n for n, raw in enumerate(written) if int.from_bytes(raw[:8], "big") > state.end_offset), len(written))
        state = many.open_partition_log(ORDERS).refresh()
        assert (state.end_offset, state.lineage, state.tail) == (expected.end_offset, expected.lineage, expected.tail)
        out = {name: Path(scratch) / f"out-{name}" for name in ("one", "many")}
        for name, tier in (("one", one), ("many", many)):
            export_partition(tier, ORDERS, out[name])
        assert [batch.raw for batch in batches_of(out["many"])] == written
        for by_index in (False, True):
            assert visible(out["many"], by_index=by_index) == visible(out["one"], by_index=by_index)
        assert (out["one"] / "leader-epoch-checkpoint").read_text() == (out["many"] / "leader-epoch-checkpoint").read_text()
