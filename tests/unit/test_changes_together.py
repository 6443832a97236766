"""Changes of many partitions that threads tell at once: one record for those that wait, and everybody is told when it failed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compactor.control.logs import publish_hints
from compactor.errors import Unavailable
from compactor.features.imports.from_tier import CatalogChangeBatcher
from compactor.model.ids import TopicPartition
from tests.support.spark_tier import Twins
from tests.support.waiting import wait_for

NAMES = [TopicPartition("many", number) for number in range(9)]


class Saying:
    """Waits for leave before the first time; ``fails``: raises the second time."""

    def __init__(self, *, fails: bool = False) -> None:
        self.said: list[Mapping[TopicPartition, int]] = []
        self.leave, self.at_it = threading.Event(), threading.Event()
        self.fails = fails

    def __call__(self, slots: Mapping[TopicPartition, int]) -> None:
        self.said.append(slots)
        self.at_it.set()
        assert self.leave.wait(20)
        if self.fails and len(self.said) == 2:
            raise Unavailable("the store is away")


def told(saying: Saying) -> list[BaseException | None]:
    """The first one is being said while all others come."""
    together, came = CatalogChangeBatcher(saying), threading.Semaphore(0)

    def note(name: TopicPartition) -> None:
        came.release()
        together.record_partition_change(name, 1 + name.partition)

    with ThreadPoolExecutor(len(NAMES)) as pool:
        notes = [pool.submit(note, NAMES[0])]
        assert saying.at_it.wait(20)
        notes += [pool.submit(note, name) for name in NAMES[1:]]
        for _ in NAMES:
            assert came.acquire(timeout=20)
        wait_for(lambda: len(together._waiting) == len(NAMES) - 1)
        saying.leave.set()
        return [one.exception(20) for one in notes]


def test_what_waits_is_said_at_once() -> None:
    saying = Saying()
    assert told(saying) == [None] * len(NAMES)
    assert saying.said == [{NAMES[0]: 1}, {name: 1 + name.partition for name in NAMES[1:]}]


def test_a_failure_is_everybodys_whose_change_it_was() -> None:
    errors = told(Saying(fails=True))
    assert errors[0] is None
    assert all(isinstance(error, Unavailable) for error in errors[1:])
    saying = Saying()
    saying.leave.set()
    CatalogChangeBatcher(saying).record_partition_change(NAMES[0], 5)
    assert saying.said == [{NAMES[0]: 5}]


def test_one_record_lists_them_all(tmp_path: Path) -> None:
    tier = Twins(tmp_path).local
    tier.identity.read_or_create_catalog()
    catalog = tier.catalog
    before = catalog.refresh().slot
    publish_hints(catalog, dict.fromkeys(NAMES, 3))
    state = catalog.refresh()
    assert state.slot == before + 1
    assert set(state.partitions) == set(map(str, NAMES))
    assert set(state.reached.values()) == {3}
    publish_hints(catalog, {NAMES[0]: 4, NAMES[1]: 3})
    assert (catalog.refresh().slot, catalog.state.reached[str(NAMES[0])]) == (before + 2, 4)


@pytest.mark.parametrize("listed", [False, True])
def test_a_store_that_is_away_loses_hints_only(listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that nobody has listed would be lost to everybody."""
    tier = Twins(tmp_path).local
    tier.identity.read_or_create_catalog()
    publish_hints(tier.catalog, dict.fromkeys(NAMES[: 2 if listed else 1], 1))

    def away(*_: object, **__: object) -> None:
        raise Unavailable("the store is away")

    monkeypatch.setattr(tier.catalog, "append_due_records", away)
    if listed:
        publish_hints(tier.catalog, dict.fromkeys(NAMES[:2], 2))
    else:
        with pytest.raises(Unavailable):
            publish_hints(tier.catalog, dict.fromkeys(NAMES[:2], 2))
