"""An import reads each batch once: what it checks is also what the sidecars are made of, in a tier that may not be there yet."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compactor.access.tier import Tier
from compactor.cleaner.offline import open_log_directory
from compactor.cleaner.rewrite import build_sidecar
from compactor.cleaner.worker_threads import WorkerThreads
from compactor.errors import Unavailable
from compactor.features.imports import import_
from compactor.features.imports.log_directory import check_file_parts
from compactor.model.ids import TopicPartition
from compactor.records import codecs
from compactor.tier.ports import SegmentLayout
from tests.builders import GZIP, LZ4, NONE, LogBuilder, entry, wrapper
from tests.support.tier_cli import TierCli

ORDERS = TopicPartition("orders", 0)


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Of each kind of batch some: plain, packed, old, aborted, dated, tombstones, keyless, control records."""
    log = LogBuilder()
    for codec in (NONE, LZ4, GZIP, LZ4):
        log.put(*(f"k{number}={log.next_offset}" for number in range(40)), codec=codec)
        log.put("k1=", f"k2 {log.next_offset}", codec=codec, pid=7, txn=True)
        log.end(7, commit=codec == LZ4)
        log.put("k3", f"k4={log.next_offset}", codec=codec, horizon=1_700_000_000_000)
        log.put(f"=keyless {log.next_offset}", codec=codec)
        offset = log.next_offset
        log.raw(wrapper(1, offset + 2, [entry(1, number, f"k{number}={offset}") for number in range(3)], GZIP), offset + 2)
        log.roll()
    log.put("last=1")
    return log.write(tmp_path / "orders-0")


def brought(tier: Tier, log_dir: Path) -> int:
    return import_.import_directory(tier, log_dir, ORDERS, tier.settings.cleaner.cleaner_policy()).segments


def facts(sidecar: Any) -> tuple[Any, ...]:
    """All that it says."""
    return (
        sidecar.records,
        sidecar.distinct_keys,
        sidecar.due,
        sidecar.producer_runs.tolist(),
        sidecar.markers.tolist(),
        sidecar.sketch.tolist(),
    )


def check_sidecars(tier: Tier, log_dir: Path) -> None:
    """They are what a reader of the segments makes of them, under the tier's key."""
    key, state = tier.identity.hash_key(), tier.open_partition_log(ORDERS).refresh()
    sources = open_log_directory(log_dir, 4096, 1 << 20)
    heads = tier.open_sidecar_store(ORDERS).load_sidecar_heads([segment.id for segment in state.live])
    with WorkerThreads(1) as workers:
        for segment, source in zip(state.live, sources, strict=True):
            found = heads[segment.id]
            assert found.sidecar is not None, found.problem
            assert facts(found.sidecar) == facts(build_sidecar(segment.id, source, None, key, 1 << 20, workers, counts_distinct_keys=True))


def test_each_batch_is_inflated_once(cli: TierCli, log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inflate, seen = codecs.decompress_body_into, Counter[bytes]()

    def counted(codec: int, data: memoryview, *rest: Any) -> None:
        if codec != NONE:  # markers come along, and are alike
            seen[bytes(data)] += 1
        inflate(codec, data, *rest)

    monkeypatch.setattr(codecs, "decompress_body_into", counted)
    tier = cli.open()
    assert brought(tier, log_dir) == 5
    assert len(seen) >= 8  # those of gzip; what kernels inflate goes the same way
    assert set(seen.values()) == {1}
    check_sidecars(tier, log_dir)


def test_another_process_makes_the_tier_while_this_one_reads(cli: TierCli, log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the keys were hashed under a key that is not the tier's."""
    read = check_file_parts

    def read_and_overtaken(*arguments: Any) -> Any:
        found = read(*arguments)
        cli.open().identity.read_or_create_catalog()
        return found

    monkeypatch.setattr(import_, "check_file_parts", read_and_overtaken)
    tier = cli.open()
    assert brought(tier, log_dir) == 5
    check_sidecars(tier, log_dir)


def test_a_refused_import_makes_no_tier(cli: TierCli, log_dir: Path) -> None:
    damaged = max(log_dir.glob("*.log"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert cli.ask("import", log_dir).code == 3
    assert not cli.tier.exists()


class Meeting:
    """A layout whose uploads wait for each other in pairs; the one of the third segment fails as often as ``failures`` says."""

    def __init__(self, inner: SegmentLayout, failures: int = 0) -> None:
        self._inner, self.failures = inner, failures
        self.both = threading.Barrier(2)
        self.met = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def upload_segment(self, name: TopicPartition, segment: Any, contents: Any, scratch: Path | None = None) -> str:
        with suppress(threading.BrokenBarrierError):
            self.met += self.both.wait(5) == 0
        if self.failures and segment.start_offset > 90:
            self.failures -= 1
            raise Unavailable("the store is away")
        return self._inner.upload_segment(name, segment, contents)


def test_two_segments_go_up_at_a_time(cli: TierCli, log_dir: Path) -> None:
    max(log_dir.glob("*.log")).unlink()
    tier = cli.open()
    meeting = Meeting(tier.ports.layout)
    assert brought(replace(tier, ports=replace(tier.ports, layout=meeting)), log_dir) == 4
    assert meeting.met == 2
    check_sidecars(cli.open(), log_dir)


def test_one_that_fails_lets_none_become_readable(cli: TierCli, log_dir: Path) -> None:
    max(log_dir.glob("*.log")).unlink()
    tier = cli.open()
    with pytest.raises(Unavailable):
        brought(replace(tier, ports=replace(tier.ports, layout=Meeting(tier.ports.layout, failures=1))), log_dir)
    assert not cli.open().open_partition_log(ORDERS).refresh().live
    assert brought(cli.open(), log_dir) == 4
    check_sidecars(cli.open(), log_dir)
