"""Random schedules in which processes begin from states that others folded earlier, as machines with local state do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from compactor.control.control_log import ControlLog, StateIdentity
from compactor.control.logs import PartitionLog, open_partition_log
from compactor.control.ports import EnvironmentPorts
from compactor.control.state import PartitionState
from compactor.model.ids import TopicPartition
from tests.simulation import actors, schedule
from tests.simulation.schedule import run_schedule
from tests.support.depth import seeds


@contextmanager
def remembering(seed: int) -> Iterator[list[int]]:
    """Yields the ages, in slots, of the states that were gone on from."""
    rng, settle = random.Random(seed), ControlLog._fold_to_end
    kept: list[tuple[PartitionState, StateIdentity]] = []
    ages: list[int] = []

    def keeping(log: ControlLog[Any], appended: Any) -> Any:
        state = settle(log, appended)
        if isinstance(state, PartitionState) and rng.random() < 0.3 and (mark := log.state_identity()):
            kept.append((state, StateIdentity.model_validate_json(mark.model_dump_json())))
        return state

    def opened(ports: EnvironmentPorts, name: TopicPartition) -> PartitionLog:
        log = open_partition_log(ports, name)
        if kept and rng.random() < 0.8:
            chosen = rng.choice(kept)
            ages.append(kept[-1][0].slot - chosen[0].slot)
            log.continue_from_cached_state(*chosen)
        return log

    with (
        patch.object(ControlLog, "_fold_to_end", keeping),
        patch.object(actors, "open_partition_log", opened),
        patch.object(schedule, "open_partition_log", opened),
    ):
        yield ages


@seeds(50, 300)
def test_states_of_any_age_may_be_gone_on_from(seeds: range) -> None:
    ages: list[int] = []
    for seed in seeds:
        with remembering(seed) as used:
            outcome = run_schedule(seed)
        assert not outcome.violations, seed
        ages += used
    assert len(ages) > len(seeds)
    assert sum(age > 10 for age in ages) > len(seeds) / 6, "or this test shows little"
