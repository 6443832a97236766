"""Sidecars in a store, and what this machine remembers of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from bloom.sidecar import BATCH_RUNS, MARKERS, RemovableRecordCounts, Sidecar, SidecarKeyHashCollector
from bloom.sizing import design_filter
from compactor.storage.wrappers import RequestCounters
from compactor.tier import sidecars
from compactor.tier.sidecars import SidecarStore
from tests.support.memory_store import Clock, MemoryStore

KEY = bytes(range(16))


def made(segment_id: str, keys: int = 50) -> Sidecar:
    portrait = SidecarKeyHashCollector(design_filter(keys, 1_000, 100_000))
    portrait.add_record_key_hashes(np.random.default_rng(1).integers(0, 2**64, (keys, 2), np.uint64))
    return portrait.build_sidecar(segment_id, keys, RemovableRecordCounts(), np.zeros(0, BATCH_RUNS), np.zeros(0, MARKERS))


class CachedFile:
    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def cached_sidecar_heads(self, ids: Sequence[str]) -> dict[str, bytes]:
        return {name: self.data[name] for name in ids if name in self.data}

    def cache_sidecar_heads(self, heads: Mapping[str, bytes]) -> None:
        self.data |= heads


def test_heads_that_are_remembered_are_not_fetched_again() -> None:
    store, kept = MemoryStore(Clock(), RequestCounters()), CachedFile()
    SidecarStore(store, "p", KEY).add_sidecar(made("a"))
    first = SidecarStore(store, "p", KEY, kept).load_sidecar_heads(["a", "b"])
    assert (first["a"].problem, first["b"].problem) == ("", "it has no sidecar")
    assert first["a"].bytes > 0
    store.delete(["p/sidecars/a.bloom"])
    again = SidecarStore(store, "p", KEY, kept).load_sidecar_heads(["a", "b"])
    assert again["a"].sidecar is not None
    assert again["a"].sidecar.distinct_keys == 50
    assert again["a"].bytes == 0
    assert SidecarStore(store, "p", KEY, kept).load_sidecar("a") is None, "its filter is asked of the store alone"


def test_filters_are_fetched_ahead_and_never_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "MAX_FILTER_BYTES", 1)
    store, names = MemoryStore(Clock(), RequestCounters()), [f"s{number}" for number in range(20)]
    ours = SidecarStore(store, "p", KEY)
    for name in names[1:]:
        ours.add_sidecar(made(name))
    known = np.random.default_rng(1).integers(0, 2**64, (50, 2), np.uint64)
    loaded: list[str] = []
    behind: list[int] = []
    load = ours.load_sidecar

    def noted(name: str) -> Sidecar | None:
        loaded.append(name)
        return load(name)

    def keys() -> list[object]:
        behind.append(len(loaded))
        return [known[:1]]

    monkeypatch.setattr(ours, "load_sidecar", noted)
    met, fetched = ours.find_possible_segments(names, keys)  # type: ignore[arg-type]
    assert met == {"s0": "its filter cannot be read"} | dict.fromkeys(names[1:], sidecars.FILTER_MATCHES)
    assert fetched > 0
    assert len(behind) == 19, "one filter at a time, as none is smaller than the bound"
    assert all(count <= number + 2 + sidecars.MAX_PREFETCHED for number, count in enumerate(behind))
    assert behind[0] > 2, "what comes next is on its way"


@pytest.mark.parametrize("spoil", [lambda data: data[:50], lambda data: b"", lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_memory_that_is_damaged_is_not_believed(spoil: object) -> None:
    store, kept = MemoryStore(Clock(), RequestCounters()), CachedFile()
    SidecarStore(store, "p", KEY).add_sidecar(made("a"))
    SidecarStore(store, "p", KEY, kept).load_sidecar_heads(["a"])
    kept.data["a"] = spoil(kept.data["a"])  # type: ignore[operator]
    found = SidecarStore(store, "p", KEY, kept).load_sidecar_heads(["a"])["a"]
    assert found.sidecar is not None
    assert found.bytes > 0


def test_one_that_was_made_for_another_segment_or_tier_is_not_used() -> None:
    store = MemoryStore(Clock(), RequestCounters())
    SidecarStore(store, "p", KEY).add_sidecar(made("a"))
    store.put("p/sidecars/b.bloom", store.get("p/sidecars/a.bloom"))
    assert SidecarStore(store, "p", KEY).load_sidecar_heads(["b"])["b"].problem == "it was made for another segment (a)"
    assert SidecarStore(store, "p", bytes(16)).load_sidecar_heads(["a"])["a"].problem == "it was made under another hash key"


def test_the_first_one_stays_unless_it_is_rebuilt() -> None:
    store, kept = MemoryStore(Clock(), RequestCounters()), CachedFile()
    mine = SidecarStore(store, "p", KEY, kept)
    assert mine.add_sidecar(made("a", 50)) > 0
    assert mine.add_sidecar(made("a", 60)) == 0
    assert mine.load_sidecar_heads(["a"])["a"].sidecar.distinct_keys == 50  # type: ignore[union-attr]
    mine.save_sidecar(made("a", 60))
    assert mine.load_sidecar_heads(["a"])["a"].sidecar.distinct_keys == 60  # type: ignore[union-attr]
    assert set(mine.stored_sidecar_sizes()) == {"a"}
