"""Choice of the incarnation (a topic's life under one topic id) that a log belongs to. The rule is ``control.incarnations``.

    the tier's log has the same id      -> that log
    its recorded successor              -> the next incarnation, which is opened
    superseded                          -> refused
    another id                          -> refused while records are equal (``topics adopt``), else as the cluster or a person says

The record *topic recreated* in the tier-wide log comes first, and only one of several successors counts. Then the new log is opened. The
next import continues an interrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compactor.access.tier import Tier
from compactor.constants import TopicId
from compactor.control.importing import record_topic_incarnation_opening
from compactor.control.incarnations import (
    TopicIdRelationToTier,
    classify_topic_id,
    ids_that_superseded_topic,
    latest_incarnation_among,
    may_cluster_report_settings,
    newest_successor_topic_id,
    topic_recreation_problem,
)
from compactor.control.logs import CatalogLog, open_catalog, publish_hints, write_snapshot_if_due
from compactor.control.records import TopicRecreated, TopicsConfirmed
from compactor.control.state import CatalogState, PartitionState
from compactor.errors import BadData, UsageError
from compactor.model.ids import TopicPartition, partition_of_incarnation
from compactor.model.remote_log import ClusterTopicIds

TopicIdsQuery = Callable[[Sequence[str]], ClusterTopicIds]
"""Asks a cluster for the ids of topics by name. Raises StoreError."""

TopicSettingsQuery = Callable[[Sequence[str]], Mapping[str, Mapping[str, str] | None]]
"""Asks a cluster which settings for compaction are set on topics themselves, by Kafka's names: none if it does not compact the topic, None
if the user may not read them. Raises StoreError."""


@dataclass(frozen=True)
class TopicRecreationConfirmationSources:
    """Sources that may confirm that a topic was deleted and created again. by_hand: a person has confirmed it."""

    ask: TopicIdsQuery | None = None
    by_hand: bool = False


UNKNOWN_TOPIC_ID = TopicRecreationConfirmationSources()
"""Neither a cluster nor a person says that a topic was created again: another topic id is refused."""


def find_or_open_incarnation(
    tier: Tier,
    state: PartitionState,
    topic_id: TopicId,
    id_source: str,
    confirmation: TopicRecreationConfirmationSources,
    count_equal_records: Callable[[], int],
) -> TopicPartition:
    """Incarnation of a log of this topic id: that of ``state``, or another, which is opened if it does not exist.

    :param state: of the latest incarnation, just read.
    :param count_equal_records: compares the last records of both logs; raises BadData if one differs.
    :raises BadData: if a later topic has superseded this one; or neither the cluster nor a person confirms that an unknown topic replaces
        the tier's.
    """
    former = tier.catalog.state.superseded.get(state.topic, {})
    is_new = not (state.topic_id or state.has_segments or state.deleted_slot)  # looked at again once it is listed
    if (state.topic_id == topic_id or is_new) and topic_id not in former:
        return state.topic_partition
    catalog = open_catalog(tier.ports)  # not the shared log, because several imports run in this process
    known = catalog.refresh()
    listed = known.incarnations_of_partition(state.topic_partition)
    latest = latest_incarnation_among(state.topic_partition, listed, known.withdrawn_partitions)
    if latest != state.topic_partition and latest in listed:
        return latest
    former = known.superseded.get(state.topic, {})
    verdict = classify_topic_id(state.topic_id, topic_id, former)
    if verdict is TopicIdRelationToTier.CURRENT:
        return state.topic_partition
    if verdict is TopicIdRelationToTier.SUPERSEDED:
        raise _superseded_topic_error(state, topic_id or state.topic_id, former, id_source)
    if state.has_segments and _has_equal_last_records(count_equal_records):
        raise other_topic_error(state, topic_id, id_source, "its records are the same as the tier's")
    if verdict is TopicIdRelationToTier.OTHER:
        _record_topic_recreation(catalog, state, topic_id, id_source, confirmation, tier.ports.holder)
    following = tier.open_partition_log(
        partition_of_incarnation(state.topic, state.partition, max(each.incarnation for each in [state.topic_partition, *listed]) + 1)
    )
    if following.refresh().topic_id not in catalog.state.superseded.get(state.topic, {}):
        record_topic_incarnation_opening(following, topic_id, tier.ports.holder)
    # Listed before its first segment comes: its topic may be superseded until then, and the next one is found through it.
    publish_hints(catalog, {following.state.topic_partition: following.confirmed_slot()})
    return following.state.topic_partition


def require_topic_not_superseded(tier: Tier, state: PartitionState, topic_id: TopicId, id_source: str) -> None:
    """Raise BadData if the catalog, as last read, has a successor of this topic id."""
    former = tier.catalog.state.superseded.get(state.topic, {})
    if topic_id in former:
        raise _superseded_topic_error(state, topic_id, former, id_source)


def record_cluster_of_topics(catalog: CatalogLog, topic_ids: Mapping[str, TopicId], ask: TopicIdsQuery) -> None:
    """Record which cluster has these topics (ids by name), except those that it does not have now. Raises StoreError."""
    unknown = {topic: given for topic, given in topic_ids.items() if given and given not in catalog.state.topic_clusters}
    if not unknown:
        return
    answer = ask(sorted(unknown))
    found = {topic: given for topic, given in unknown.items() if answer.topic_ids.get(topic) == given}

    def build_confirmation(state: CatalogState) -> TopicsConfirmed | None:
        new = {topic: given for topic, given in found.items() if given not in state.topic_clusters}
        return TopicsConfirmed(cluster_id=answer.cluster_id, topic_ids=new) if new and answer.cluster_id else None

    catalog.append_due_records(build_confirmation)
    write_snapshot_if_due(catalog)


def record_settings_of_topics(
    catalog: CatalogLog, topic_ids: Mapping[str, TopicId], ask: TopicIdsQuery, ask_settings: TopicSettingsQuery
) -> list[str]:
    """Record changed compaction settings of these topics (ids by name). Topics that the cluster does not have now are left out. Return
    those whose settings may not be read; their record stays. Raises StoreError.
    """
    named = sorted(topic for topic, given in topic_ids.items() if given)
    answer = ask(named) if named else ClusterTopicIds("", {})
    current = [topic for topic in named if answer.cluster_id and answer.topic_ids.get(topic) == topic_ids[topic]]
    found = ask_settings(current) if current else {}

    def build_changed_settings_record(state: CatalogState) -> TopicsConfirmed | None:
        new = {
            topic: dict(chosen)
            for topic, chosen in found.items()
            if chosen is not None
            and state.topic_settings.get(topic, {}) != chosen
            and may_cluster_report_settings(state, topic, topic_ids[topic], answer.cluster_id)
        }
        ids = {topic: topic_ids[topic] for topic in new}
        return TopicsConfirmed(cluster_id=answer.cluster_id, topic_ids=ids, settings=new) if new else None

    catalog.append_due_records(build_changed_settings_record)
    write_snapshot_if_due(catalog)
    return [topic for topic, chosen in found.items() if chosen is None]


def unreadable_settings_message(topics: Sequence[str]) -> str:
    return (
        f"what is set for compaction on {', '.join(topics)} is unknown: DESCRIBE_CONFIGS is not allowed. What was recorded before, else "
        "[cleaner], applies"
    )


def _has_equal_last_records(count_equal_records: Callable[[], int]) -> bool:
    """Raises BadData if records cannot be read: damage does not show that the logs differ."""
    try:
        return count_equal_records() > 0
    except BadData as error:
        if not error.is_other_content:
            raise
        return False


def _record_topic_recreation(
    catalog: CatalogLog,
    state: PartitionState,
    topic_id: TopicId,
    id_source: str,
    confirmation: TopicRecreationConfirmationSources,
    holder: str,
) -> None:
    """Raises BadData if neither the cluster nor a person confirms the recreation, or the cluster still has the tier's topic."""
    former_id = newest_successor_topic_id(state.topic_id, catalog.state.superseded.get(state.topic, {}))
    answer = confirmation.ask([state.topic]) if confirmation.ask else ClusterTopicIds("", {})
    reported_id, cluster_id = answer.topic_ids.get(state.topic, ""), answer.cluster_id
    # Also if a person has said that the topic is new: a stale directory, given by mistake, would lock the live topic out.
    is_refused = reported_id == former_id if confirmation.by_hand else reported_id != topic_id or not cluster_id
    if is_refused:
        raise other_topic_error(state, topic_id, id_source, f"the cluster has the topic id {reported_id} now" if reported_id else "")
    cluster_id = "" if confirmation.by_hand else cluster_id
    body = TopicRecreated(topic=state.topic, superseded_id=former_id, topic_id=topic_id, cluster_id=cluster_id, by=holder)

    def build_recreation(catalog_state: CatalogState) -> TopicRecreated | None:
        if catalog_state.superseded.get(state.topic, {}).get(former_id) == topic_id:
            return None
        problem = topic_recreation_problem(catalog_state, body)
        if problem:
            raise other_topic_error(state, topic_id, id_source, problem)
        return body

    catalog.append_due_records(build_recreation)
    write_snapshot_if_due(catalog)


def reinstate_superseded_topic(tier: Tier, topic: str, topic_id: TopicId, ask: TopicIdsQuery | None) -> TopicId:
    """Record that a topic name means a superseded topic id again (after `import --new-incarnation` of a stale directory). Return the id
    that it meant; its incarnations stay readable by number.

    :raises UsageError: if a cluster has confirmed that the topic was deleted and created again. Raises StoreError.
    """
    catalog = open_catalog(tier.ports)
    later = ids_that_superseded_topic(topic_id, catalog.refresh().superseded.get(topic, {}))
    reported_id = ask([topic]).topic_ids.get(topic, "") if ask else ""
    names = [name for name in catalog.state.topic_partitions if name.topic == topic]
    ids = {name: tier.open_partition_log(name).refresh().topic_id for name in names}
    numbers = {name.partition: name.incarnation for name in names if ids[name] == topic_id}
    # A deleted incarnation has no topic id any more, but its number shows that it came later.
    withdrawn = tuple(str(name) for name in names if ids[name] in later or name.incarnation > numbers.get(name.partition, name.incarnation))
    body = TopicRecreated(topic=topic, superseded_id=later[-1], topic_id=topic_id, by=tier.ports.holder, withdrawn=withdrawn)

    def build_missing_reinstatement_record(state: CatalogState) -> TopicRecreated | None:
        if topic_id not in state.superseded.get(topic, {}):
            return None
        problem = topic_recreation_problem(state, body)
        if reported_id in later:
            problem = f"the cluster has the topic id {reported_id} now"
        if problem:
            hint = "A deleted topic does not come back. `topics` lists the ids, and `cat --topic-id` reads the former topic"
            raise UsageError(f"topic id {topic_id} was superseded, and stays so: {problem}", hint=hint)
        return body

    catalog.append_due_records(build_missing_reinstatement_record)
    write_snapshot_if_due(catalog)
    tier.catalog.refresh()
    return later[-1]


def other_topic_error(state: PartitionState, topic_id: TopicId, id_source: str, reason: str) -> BadData:
    """Parameter ``reason``: empty if neither the cluster nor a person confirmed the recreation."""
    return BadData(
        f"this is the log of topic id {topic_id}, and the tier has {state.topic_partition} of topic id {state.topic_id}:"
        " the topic was deleted and "
        f"created again, or this is another cluster's{f' ({reason})' if reason else ''}",
        segment=id_source,
        hint=f"If the topic was created again, `import --new-incarnation` keeps both. If it was restored with the same records, use "
        f"`topics adopt {state.topic} --topic-id {topic_id}`. Else import it under another name",
    )


def _superseded_topic_error(state: PartitionState, topic_id: TopicId, former: Mapping[TopicId, TopicId], id_source: str) -> BadData:
    return BadData(
        f"this is the log of topic id {topic_id}, which topic id {newest_successor_topic_id(topic_id, former)} has superseded as "
        f"{state.topic}",
        segment=id_source,
        hint="A deleted topic does not come back: this is a stale replica, a stray directory or a backup. Import it under another name. If "
        f"the topic was superseded by mistake, `topics adopt {state.topic} --topic-id {topic_id}` takes that back",
    )
