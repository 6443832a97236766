"""Laws of the fold: any records in any order leave a sound state, and a snapshot at any slot is as good as the log before it.

The records are drawn from what real operations write (several processes over a store, in every interleaving that the
simulation's scheduler makes), then damaged: repeated, reordered, from other epochs, from other incarnations.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from typing import Any

from hypothesis import given, strategies as st

from checkpoint.offsets import (
    CleanerOffset,
    advance_cleaner_vector,
    cleaner_vector_problem,
    drop_unreferenced_epochs,
    first_dirty_offset_in,
    has_epoch_cleaned_below,
)
from compactor.constants import CompactorEpoch
from compactor.control import records
from compactor.control.logs import fold_partition_record
from compactor.control.records import PartitionRecord
from compactor.control.state import PartitionState
from tests.simulation.actors import Actors
from tests.simulation.oracle import Oracle
from tests.simulation.symbolic import NAME, broker_log
from tests.simulation.world import Faults, World
from tests.support.depth import examples

EMPTY = PartitionState(topic=NAME.topic, partition=NAME.partition)
SEEDS = 12


@cache
def history(seed: int) -> tuple[PartitionRecord, ...]:
    """The control log that some processes wrote."""
    world = World(seed, Faults(crash=0.01, stop=0.05))
    broker = broker_log(world.rng, 7)
    oracle = Oracle(world, broker)
    actors = Actors(world, oracle, broker)
    bodies = {"importer": actors.importer, "compactor-1": actors.compactor, "compactor-2": actors.compactor}
    for name, body in bodies.items():
        world.spawn(name, actors.restarting(name, name, body))
    world.run(700)
    world.stop()
    objects = world.control.objects
    slots = sorted(key for key in objects if key.startswith(f"partitions/{NAME}/log/"))
    return tuple(records.decode_checksummed_json(PartitionRecord, objects[key].data, key) for key in slots)


def sound(state: PartitionState) -> None:
    for earlier, later in pairwise(state.live):
        assert later.start_offset == earlier.end_offset + 1
    assert cleaner_vector_problem(state.vector) == ""
    ids = [segment.id for segment in state.live]
    ids += [segment.id for group in state.waiting for segment in group.segments]
    ids += [segment.id for segment in state.retiring]
    assert len(ids) == len(set(ids)), "a segment is in two places"
    assert set(state.published_by) <= set(ids)
    if state.intent:
        assert state.intent.plan.vector is not None


damage = st.lists(st.tuples(st.sampled_from(["repeat", "swap", "drop", "epoch", "incarnation"]), st.integers(0, 10_000)), max_size=6)


@examples(150)
@given(st.integers(0, SEEDS - 1), damage)
def test_whatever_is_in_the_slots_the_state_stays_sound(seed: int, damages: list[tuple[str, int]]) -> None:
    log = list(history(seed))
    for kind, number in damages:
        if not log:
            break
        at = number % len(log)
        if kind == "repeat":
            log.insert(random.Random(number).randrange(len(log)), log[at])
        elif kind == "swap":
            other = (at * 7 + 3) % len(log)
            log[at], log[other] = log[other], log[at]
        elif kind == "drop":
            del log[at]
        elif kind == "epoch" and hasattr(log[at].body, "leader_epoch"):
            body: Any = log[at].body
            log[at] = log[at].model_copy(update={"body": body.model_copy(update={"leader_epoch": body.leader_epoch + number % 3 - 1})})
        elif kind == "incarnation":
            log[at] = log[at].model_copy(update={"incarnation": "somebody"})
    state = EMPTY
    for slot, record in enumerate(log, 1):
        state = fold_partition_record(state, record.model_copy(update={"slot": slot}))
        sound(state)


@examples(60)
@given(st.integers(0, SEEDS - 1), st.integers(0, 10_000))
def test_a_snapshot_is_as_good_as_the_log_before_it(seed: int, cut: int) -> None:
    log = history(seed)
    at = cut % (len(log) + 1)
    state = EMPTY
    for record in log[:at]:
        state = fold_partition_record(state, record)
    restored = PartitionState.model_validate_json(state.model_dump_json())
    assert restored == state
    for record in log[at:]:
        state, restored = fold_partition_record(state, record), fold_partition_record(restored, record)
    assert restored == state


entries = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50)), max_size=5)


def vector_of(pairs: list[tuple[int, int]]) -> tuple[CleanerOffset, ...]:
    vector: tuple[CleanerOffset, ...] = ()
    for epoch, offset in sorted(pairs):
        if not vector or offset >= vector[-1].offset:
            vector = advance_cleaner_vector(vector, CompactorEpoch(epoch), offset)
    return vector


@given(entries.map(vector_of), st.sets(st.integers(0, 6).map(CompactorEpoch)))
def test_folding_never_moves_the_clean_end_and_never_grants_more(vector: tuple[CleanerOffset, ...], named: set[CompactorEpoch]) -> None:
    folded = drop_unreferenced_epochs(vector, named)
    assert first_dirty_offset_in(folded) == first_dirty_offset_in(vector)
    assert cleaner_vector_problem(folded) == ""
    assert all(has_epoch_cleaned_below(vector, entry.leader_epoch, entry.offset) for entry in folded)
