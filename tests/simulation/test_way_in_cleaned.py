"""Lives that are told on purpose: logs that a cleaner has compacted, where no checkpoint tells. Without the signs in the batches, the judge
notices that deleted keys come back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation.directories import DiskReplica
from tests.simulation.test_way_in_staged import ToldLife, violations
from tests.simulation.way_in_mutations import WAY_IN_MUTATIONS

RULE = "signs of a cleaner are not noticed"


def leader_is_cleaned_after_an_import(life: ToldLife) -> DiskReplica:
    """The tier has the beginning of the log; the leader then writes, deletes and cleans, and seals what is left."""
    one = life.way.brokers.led
    life.write(40)
    for disk in life.disks:
        life.follow(disk)
    life.roll(one)
    life.write(1)
    life.bring(one)
    life.write(160)
    life.roll(one)
    life.write(20)
    life.settle()
    life.way.brokers.clean(one, 2)
    life.settle()
    return one


def a_replica_that_was_away_leads(life: ToldLife) -> None:
    leader_is_cleaned_after_an_import(life)
    two = life.disks[1]
    life.follow(two)
    life.lead(1)
    life.write(5)
    life.bring(two)


def a_replica_that_was_built_anew_leads(life: ToldLife) -> None:
    leader_is_cleaned_after_an_import(life)
    two = life.disks[1]  # the last batches that the tier remembers are gone there, too: another rule notices
    two.log, two.bases = [], [0]
    life.follow(two)
    life.lead(1)
    life.write(5)
    life.bring(two)


def a_copy_without_a_checkpoint_is_imported(life: ToldLife) -> None:
    one = leader_is_cleaned_after_an_import(life)
    one.has_checkpoint = False
    life.bring(one)


def what_was_staged_goes_before_what_was_fetched_from_a_cleaned_leader(life: ToldLife) -> None:
    """An empty tier: a follower stages its beginning, after it has fetched the rest of the log from a leader that had cleaned it."""
    one, two = life.disks[:2]
    life.write(40)
    for disk in life.disks:
        life.follow(disk)
    life.write(160)
    life.roll(one)
    life.write(20)
    life.way.brokers.clean(one, 2)
    life.settle()
    life.roll(two)
    life.follow(two)
    life.roll(two)
    life.lead(1)
    life.write(1)
    life.settle()
    two.start = two.bases[1]
    two.bases = two.bases[1:]
    life.bring(two)


NOTICED = (
    a_replica_that_was_away_leads,
    a_copy_without_a_checkpoint_is_imported,
    what_was_staged_goes_before_what_was_fetched_from_a_cleaned_leader,
)


@pytest.mark.parametrize("tell", [*NOTICED, a_replica_that_was_built_anew_leads])
def test_a_cleaned_log_does_not_bring_back_deleted_keys(tell: Callable[[ToldLife], None], tmp_path: Path) -> None:
    assert violations(tell, tmp_path) == []


@pytest.mark.parametrize("tell", NOTICED)
def test_dropped_rule_of_cleaned_logs_is_noticed(tell: Callable[[ToldLife], None], tmp_path: Path) -> None:
    with WAY_IN_MUTATIONS[RULE]():
        assert any("key " in text for text in violations(tell, tmp_path))
