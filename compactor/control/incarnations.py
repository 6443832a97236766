"""The rule about topics that are deleted and created again under the same name. Pure; everything that asks which topic a name is asks here.

A topic name has one control log and one data prefix per incarnation and partition. Each log holds the records of one topic id
(``check_topic_id_unchanged``), so that two topics cannot mix. What remains to be decided is which incarnation a name means:

* an id that was superseded never becomes current again, for no partition of the topic, unless a person takes back what a person has said:
  a supersession that no cluster has confirmed, as a stale directory and ``import --new-incarnation`` make it;
* a new id supersedes the current one only if the cluster that is recorded for the current id has said that the name has the new id now, or
  if a person has said so;
* a topic is deleted only by its id: its recorded cluster has said UNKNOWN_TOPIC_ID at least twice, an hour or more apart, and has not
  contradicted in between. Topics that are not listed, refused requests and other clusters decide nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any

from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.control.records import ControlRecord, TopicAdopted, TopicRecreated, TopicsConfirmed, TopicsInspected
from compactor.control.state import CatalogState, MissingTopicReports, PartitionState
from compactor.model.ids import TopicPartition

CONFIRMATION_MS = 3_600_000
"""Least time between the first and the last answer that a topic does not exist."""


class TopicIdRelationToTier(StrEnum):
    """Relation of a log of some topic id to the tier's log of the same name.

    CURRENT: it is the tier's log, or the first log of an empty partition.
    SUPERSEDED: it is the log of a topic that a later topic has replaced; it is refused.
    NEXT: its topic is recorded as the successor of the tier's topic; it gets the next incarnation.
    OTHER: it is the log of another topic about which nothing is recorded.
    """

    CURRENT = "current"
    SUPERSEDED = "superseded"
    NEXT = "next"
    OTHER = "other"


def classify_topic_id(recorded_id: TopicId, given_id: TopicId, superseded: Mapping[TopicId, TopicId]) -> TopicIdRelationToTier:
    """An empty id is unknown.

    :param superseded: for this topic name: former topic id -> the topic id of the topic that was created in its place.
    """
    if (given_id or recorded_id) in superseded:
        return TopicIdRelationToTier.SUPERSEDED
    if not given_id or not recorded_id or given_id == recorded_id:
        return TopicIdRelationToTier.CURRENT
    return TopicIdRelationToTier.NEXT if newest_successor_topic_id(recorded_id, superseded) == given_id else TopicIdRelationToTier.OTHER


def newest_successor_topic_id(topic_id: TopicId, superseded: Mapping[TopicId, TopicId]) -> TopicId:
    """Return the id itself if none has superseded it."""
    return (ids_that_superseded_topic(topic_id, superseded) or [topic_id])[-1]


def superseding_topic_id(state: CatalogState, topic: str, topic_id: TopicId) -> TopicId:
    """Return an empty id if ``topic_id`` was not superseded."""
    former = state.superseded.get(topic, {})
    return newest_successor_topic_id(topic_id, former) if topic_id in former else EMPTY_TOPIC_ID


def latest_incarnation_among(
    partition: TopicPartition, incarnations: Iterable[TopicPartition], withdrawn: Collection[str]
) -> TopicPartition:
    """Return the first incarnation, with the plain name, if none is of this partition.

    :param withdrawn: incarnations that were opened by mistake (``CatalogState.withdrawn_partitions``), returned only if there is no other.
    """
    same = (each for each in incarnations if each.first_incarnation == partition.first_incarnation)
    return max(same, key=lambda each: (str(each) not in withdrawn, each.incarnation), default=partition.first_incarnation)


def latest_incarnations(incarnations: Iterable[TopicPartition], withdrawn: Collection[str]) -> list[TopicPartition]:
    """Ascending by partition. ``withdrawn``: as for ``latest_incarnation_among``."""
    ascending = sorted(incarnations, key=lambda name: (str(name) not in withdrawn, name.incarnation))
    return sorted({name.first_incarnation: name for name in ascending}.values())


def ids_that_superseded_topic(topic_id: TopicId, superseded: Mapping[TopicId, TopicId]) -> list[TopicId]:
    """Directly or through others, in this order."""
    found = []
    while topic_id in superseded:
        topic_id = superseded[topic_id]
        found.append(topic_id)
    return found


def topic_recreation_problem(state: CatalogState, body: TopicRecreated) -> str:
    """Return why a record stating that one topic id supersedes another has no effect; empty: it counts."""
    former = state.superseded.get(body.topic, {})
    if body.withdrawn is not None:
        return _topic_reinstatement_problem(state, body)
    for topic_id in (body.superseded_id, body.topic_id):
        if topic_id in former:
            return f"topic id {topic_id} was superseded by {former[topic_id]}"
    if not body.topic_id or not body.superseded_id or body.topic_id == body.superseded_id:
        return "one of the two topic ids is unknown, or they are the same"
    known = state.topic_clusters.get(body.superseded_id, "")
    if body.cluster_id and body.cluster_id != known:
        return f"topic id {body.superseded_id} is recorded as one of cluster {known or 'unknown'}, and cluster {body.cluster_id} was asked"
    return ""


def _topic_reinstatement_problem(state: CatalogState, body: TopicRecreated) -> str:
    """A cluster's report is not taken back: the former topic is deleted there."""
    later = ids_that_superseded_topic(body.topic_id, state.superseded.get(body.topic, {}))
    if not later or later[-1] != body.superseded_id:
        return f"topic id {body.topic_id} was not superseded by {body.superseded_id}"
    for topic_id in later:
        if topic_id in state.topic_clusters:
            return f"cluster {state.topic_clusters[topic_id]} has confirmed topic id {topic_id}, which superseded it"
    return "" if not body.cluster_id else "only a person takes back what a person has said"


def topic_ids_of_cluster(state: CatalogState, topic_ids: Iterable[TopicId], cluster_id: str) -> set[TopicId]:
    """Only this cluster can report whether these topics exist."""
    return {topic_id for topic_id in topic_ids if state.topic_clusters.get(topic_id) == cluster_id}


def is_topic_deletion_confirmed(state: CatalogState, topic_id: TopicId) -> bool:
    """Return whether the topic's cluster has reported twice, CONFIRMATION_MS apart and without contradiction, that the topic does not
    exist.
    """
    found = state.missing.get(topic_id)
    return found is not None and found.last_ms - found.first_ms >= CONFIRMATION_MS


def check_topic_id_unchanged(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires the tier's topic id, if the record names an id (a partition that has segments but no topic id gets one only by `topics
    adopt`).
    """
    return topic_id_mismatch_problem(state, record.body.topic_id)


def topic_id_mismatch_problem(state: PartitionState, topic_id: TopicId) -> str:
    """An empty id conflicts with none."""
    if not topic_id or topic_id == state.topic_id:
        return ""
    if state.topic_id:
        return f"it is of topic id {topic_id}, and the tier has the log of topic id {state.topic_id}"
    return f"it is of topic id {topic_id}, and the tier holds segments of a topic whose id it does not know" if state.has_segments else ""


def check_topic_id_adoptable(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires that the record names a topic id, or the end of the tier as the seam (the offset at which the next import continues), and
    that the tier's topic id is still the one that the record's writer saw.
    """
    body: TopicAdopted = record.body
    if not state.has_segments and not state.topic_id:
        return "the partition is empty: the first import brings its topic id"
    if body.previous_id != state.topic_id:
        return f"the tier has the log of topic id {state.topic_id or 'none'} by now"
    if body.seam >= 0 and body.seam != state.end_offset + 1:
        return f"the seam is {body.seam}, and the tier ends at {state.end_offset}"
    return "" if body.topic_id or body.seam >= 0 else "it names neither a topic id nor a seam"


def check_incarnation_opened(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires, in the log of a later incarnation, that it was opened for a topic id, or that the partition was deleted since."""
    unopened = state.incarnation > 1 and not state.topic_id and not state.deleted_slot
    return f"no topic id was recorded for {state.topic_partition}" if unopened else ""


def check_incarnation_unused(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires the log of a later incarnation that holds nothing of another topic: no topic id, segments or open imports."""
    if state.incarnation == 1 or not record.body.topic_id:
        return "only a later incarnation is opened, and for a topic id"
    used = state.topic_id or state.has_segments or state.registrations
    return f"{state.topic_partition} is in use for topic id {state.topic_id or 'unknown'}" if used else ""


def check_deleted_topic(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires the tier's topic id, if the record names the topic that the cluster has deleted."""
    given: str = record.body.deleted_topic_id
    return "" if given in ("", state.topic_id) else f"topic id {given} was deleted, and the tier has the log of {state.topic_id or 'none'}"


def may_cluster_report_settings(state: CatalogState, topic: str, topic_id: TopicId, cluster_id: str) -> bool:
    """Return whether a cluster's settings for a topic apply to the topic in the tier: neither a later topic nor another cluster has taken
    over.
    """
    return topic_id not in state.superseded.get(topic, {}) and state.topic_clusters.get(topic_id, cluster_id) == cluster_id


def changes_by_topic_record(state: CatalogState, body: TopicsConfirmed | TopicRecreated | TopicsInspected) -> dict[str, Any]:
    if isinstance(body, TopicsConfirmed):
        # The first cluster counts: topic ids are unique, so that a second one is a mistake or a copy.
        new = {topic_id: body.cluster_id for topic_id in body.topic_ids.values() if topic_id not in state.topic_clusters}
        reported = {
            topic: body.settings[topic]
            for topic, topic_id in body.topic_ids.items()
            if topic in body.settings and may_cluster_report_settings(state, topic, topic_id, body.cluster_id)
        }
        settings = {topic: chosen for topic, chosen in {**state.topic_settings, **reported}.items() if chosen}
        return {"topic_clusters": state.topic_clusters | new, "topic_settings": settings}
    if isinstance(body, TopicRecreated):
        if topic_recreation_problem(state, body):
            return {}
        former = state.superseded.get(body.topic, {}) | {body.superseded_id: body.topic_id}
        if body.withdrawn is not None:
            former = {old: new for old, new in former.items() if old != body.topic_id}
            return {
                "superseded": state.superseded | {body.topic: former},
                "withdrawn": state.withdrawn | {body.topic: body.withdrawn},
            }
        clusters = {body.topic_id: body.cluster_id} if body.cluster_id else {}
        return {"superseded": state.superseded | {body.topic: former}, "topic_clusters": clusters | state.topic_clusters}
    asked = topic_ids_of_cluster(state, (*body.missing, *body.present), body.cluster_id)
    missing = {topic_id: entry for topic_id, entry in state.missing.items() if topic_id not in asked.intersection(body.present)}
    for topic_id in asked.intersection(body.missing).difference(body.present):
        first_ms = missing[topic_id].first_ms if topic_id in missing else body.asked_ms
        missing[topic_id] = MissingTopicReports(min(first_ms, body.asked_ms), max(first_ms, body.asked_ms))
    return {"missing": missing}
