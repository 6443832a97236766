"""Steps of generations while somebody deletes those that nobody needs any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typing_extensions import override

from compactor.errors import NotFound
from compactor.features.pinterest.generations import (
    GenerationStep,
    GenerationStepLog,
    PartitionGenerations,
    PublishedSegment,
    generation_name,
)
from compactor.features.pinterest.layout import PinterestObjectKeys
from compactor.model.ids import TopicPartition
from compactor.storage.port import ObjectInfo
from compactor.storage.wrappers import RequestCounters
from tests.support.memory_store import Clock, MemoryStore

pytestmark = pytest.mark.quick

NAME = TopicPartition("orders", 0)


class Stale(MemoryStore):
    """``late``: so many lists still have what was deleted since the first one."""

    late = 0
    remembered: tuple[ObjectInfo, ...] = ()

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        found = tuple(super().list(prefix, after))
        self.remembered = self.remembered or found
        self.late -= 1
        return iter(self.remembered if self.late >= 0 else found)


def written(store: MemoryStore) -> GenerationStepLog:
    log = GenerationStepLog(store, PinterestObjectKeys("cluster", 0), NAME)
    known = PartitionGenerations()
    for number in range(2):
        step: GenerationStep = known.new_generation_step(
            generation_name(number), 5 + number, [PublishedSegment(segment="s", base=0, last=9, timestamp_ms=1)]
        )
        store.create(log.generation_step_object_key(known.next_generation_step_number), step.model_dump_json(exclude_none=True).encode())
        known = GenerationStepLog(store, PinterestObjectKeys("cluster", 0), NAME).read_generations()
    return log


@pytest.mark.parametrize(("late", "seen"), [(1, True), (4, True), (5, False)])
def test_a_step_that_has_gone_since_it_was_listed_is_none(late: int, seen: bool) -> None:
    store = Stale(Clock(), RequestCounters())
    log = written(store)
    store.remembered = tuple(MemoryStore.list(store, log.folder))
    last = GenerationStepLog(store, PinterestObjectKeys("cluster", 0), NAME).read_generations()
    assert last.current is not None
    store.delete([log.generation_step_object_key(last.current.number)])
    store.late = late
    if not seen:
        with pytest.raises(NotFound):
            log.read_generations()
        return
    found = log.read_generations()
    assert found.current is not None
    assert found.current.number == last.current.number - 1
