"""Random schedules of the real code: none may end in a violation. ``make simulate SEEDS=100000`` runs many more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from unittest.mock import patch

import pytest

from compactor.adapters.stores.cloud import RequestRunnerWithRetries
from compactor.adapters.stores.hdfs import UNDATED_MS
from compactor.storage.port import ObjectInfo
from tests.simulation.schedule import run_schedule
from tests.simulation.store_kinds import CLOUD_KINDS, SimulatedClient
from tests.support.depth import seeds


@seeds(100, 600)
def test_random_schedules_end_without_a_violation(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        outcome = run_schedule(seed)
        assert not outcome.violations, f"python -m tests.simulation --trace {seed}"
        counts.update(outcome.counts)
    # The schedules are about something: everything that can be in a log was in some of them.
    assert all(counts[kind] > len(seeds) / 50 for kind in counts)
    assert len(counts) == 16


@pytest.mark.parametrize("scheme", sorted(CLOUD_KINDS))
@seeds(20, 60)
def test_random_schedules_on_each_kind_of_store_end_without_a_violation(scheme: str, seeds: range) -> None:
    for seed in seeds:
        assert not run_schedule(seed, scheme=scheme).violations, f"python -m tests.simulation --store {scheme} --trace {seed}"


@pytest.mark.parametrize("scheme", ["s3", "hdfs"])
def test_a_seed_gives_one_schedule(scheme: str) -> None:
    assert run_schedule(7, trace=True, scheme=scheme) == run_schedule(7, trace=True, scheme=scheme)


def test_grace_that_counts_from_staging_is_noticed_on_hdfs() -> None:
    def keep_staging_time(client: SimulatedClient, key: str) -> int:
        stored = client._store.objects.get(key)
        if stored is None:
            return 0
        stored.modified_ms %= UNDATED_MS
        return stored.modified_ms

    with patch.object(SimulatedClient, "_set_time", keep_staging_time):
        found = [run_schedule(seed, scheme="hdfs").violations for seed in (14, 63, 129)]
    assert any(found)


def test_creates_that_overwrite_are_noticed_on_azure() -> None:
    def overwrite(
        client: SimulatedClient, key: str, data: bytes, metadata: Mapping[str, str], retried: RequestRunnerWithRetries
    ) -> ObjectInfo:
        client._store.objects.pop(key, None)
        return retried(lambda: client._store.create(key, data, metadata))

    with patch.object(SimulatedClient, "create", overwrite):
        assert any(run_schedule(seed, scheme="az").violations for seed in range(10))
