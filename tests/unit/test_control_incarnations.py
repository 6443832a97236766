"""Control logs of topics that are created again: what may open one, and whose log a deletion may delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compactor.constants import CompactorEpoch, LeaderEpoch, Offset, TimestampMs, TopicId
from compactor.control import fold, ordering, records
from compactor.control.incarnations import changes_by_topic_record, topic_recreation_problem
from compactor.control.state import CatalogState, PartitionState
from compactor.model.ids import partition_of_incarnation
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from tests.simulation.life_mutations import COVERED_MUTATIONS

REGISTERED = records.SegmentIdsRegistered(import_id="i", ids=("a",), holder="me")
OPENED = records.IncarnationOpened(topic_id=TopicId("new"), by="me")
SEGMENT = RemoteLogSegmentMetadata(
    id="a", start_offset=Offset(0), end_offset=Offset(9), size_bytes=9, max_timestamp_ms=TimestampMs(-1), mtime_ms=0,
    leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(0)),), files={"log": SegmentFile(size=9, sha256="0" * 64)},
)  # fmt: skip
TIERED = records.SegmentsTiered(import_id="i", segments=(SEGMENT,), topic_id=TopicId("new"))
ACQUIRED = records.LeadershipAcquired(leader_epoch=CompactorEpoch(0), holder="me", ttl_ms=1)


def folded(number: int, *bodies: Any) -> PartitionState:
    name, state = (
        str(partition_of_incarnation("orders", 0, number)),
        PartitionState(topic="orders", partition=0, incarnation=number),
    )
    for slot, body in enumerate(bodies, start=1):
        record = records.PartitionRecord(
            version=records.VERSION,
            log=name,
            slot=slot,
            incarnation="me",
            attempt=slot,
            at_ms=0,
            body=body,
        )
        state = fold.apply_partition_record(state, record, ordering.find_rule_violation)
    return state


def reasons(state: PartitionState) -> list[str]:
    return [fenced.reason for fenced in state.fenced]


def test_nothing_comes_into_a_later_incarnation_before_it_is_opened_for_a_topic() -> None:
    state = folded(2, REGISTERED)
    assert (state.registrations, reasons(state)) == ({}, ["no topic id was recorded for orders-0~2"])
    assert set(folded(2, OPENED, REGISTERED).registrations) == {"i"}
    assert set(folded(1, REGISTERED).registrations) == {"i"}, "the first incarnation needs no opening"


def test_an_incarnation_is_opened_once() -> None:
    again = OPENED.model_copy(update={"topic_id": "third"})
    state = folded(2, OPENED, again)
    assert (state.topic_id, reasons(state)) == ("new", ["orders-0~2 is in use for topic id new"])
    state = folded(2, OPENED, REGISTERED, TIERED, again)
    assert (state.topic_id, len(state.live), len(state.fenced)) == ("new", 1, 1)


@pytest.mark.parametrize(("number", "topic_id"), [(1, "new"), (2, "")])
def test_only_a_later_incarnation_is_opened_and_for_a_topic(number: int, topic_id: str) -> None:
    state = folded(number, OPENED.model_copy(update={"topic_id": topic_id}))
    assert (state.topic_id, reasons(state)) == ("", ["only a later incarnation is opened, and for a topic id"])


@pytest.mark.parametrize(("deleted_id", "is_deleted"), [("new", True), ("", True), ("old", False)])
def test_the_deletion_of_a_topic_deletes_the_log_of_its_own_id_only(deleted_id: str, is_deleted: bool) -> None:
    deleted = records.PartitionDeleted(leader_epoch=CompactorEpoch(0), deleted_topic_id=TopicId(deleted_id))
    state = folded(2, OPENED, REGISTERED, TIERED, ACQUIRED, deleted)
    assert (not state.live, bool(state.fenced)) == (is_deleted, not is_deleted)


@pytest.mark.parametrize(
    ("cluster_id", "is_superseded"),
    [("mine", True), ("another", False), ("", True)],
    ids=["its own cluster", "another cluster", "a person"],
)
def test_only_its_own_cluster_or_a_person_declares_a_topic_re_created(cluster_id: str, is_superseded: bool) -> None:
    known = CatalogState(topic_clusters={TopicId("old"): "mine"})
    body = records.TopicRecreated(topic="orders", superseded_id=TopicId("old"), topic_id=TopicId("new"), cluster_id=cluster_id, by="me")
    assert bool(topic_recreation_problem(known, body)) is not is_superseded
    assert bool(changes_by_topic_record(known, body)) is is_superseded


def test_a_topic_whose_cluster_is_unknown_is_declared_re_created_by_a_person_only() -> None:
    body = records.TopicRecreated(topic="orders", superseded_id=TopicId("old"), topic_id=TopicId("new"), cluster_id="any", by="me")
    assert topic_recreation_problem(CatalogState(), body) == "topic id old is recorded as one of cluster unknown, and cluster any was asked"


@pytest.mark.parametrize(
    ("rule", "noticed_by"),
    [
        ("incarnations are opened twice", test_an_incarnation_is_opened_once),
        ("incarnations need not be opened", test_nothing_comes_into_a_later_incarnation_before_it_is_opened_for_a_topic),
        ("a deletion is any topic's", lambda: test_the_deletion_of_a_topic_deletes_the_log_of_its_own_id_only("old", False)),
    ],
)
def test_missing_rule_about_incarnations_is_noticed(rule: str, noticed_by: Callable[[], None]) -> None:
    with COVERED_MUTATIONS[rule](), pytest.raises(AssertionError):
        noticed_by()
