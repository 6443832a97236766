"""Deletion of topics that their cluster has deleted (``[tier] on_topic_deletion = "delete"``). The rule is ``control.incarnations``.

ask by id -> record what is new or contradicts -> delete what is confirmed, missing still, and past ``deleted_topic_retention_ms``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compactor.access.tier import Tier
from compactor.brokers.topic_ids import TopicAnswers
from compactor.control.deletion import delete_partition
from compactor.control.incarnations import CONFIRMATION_MS, is_deletion_confirmed, topics_of_cluster
from compactor.control.logs import cut_if_due, open_catalog
from compactor.control.records import TopicsInspected
from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition

AskAboutTopics = Callable[[Sequence[str]], TopicAnswers]
"""Asks the cluster about topic ids. Raises StoreError, UsageError."""


def deletion_settings_problem(tier: Tier) -> str:
    """Return why topics that are deleted cannot be deleted from this tier, or an empty string."""
    if tier.settings.tier.on_topic_deletion == "keep":
        return ""
    if not tier.ownership.ours:
        return "on_topic_deletion is for tiers that this program manages: brokers delete the segments of a deleted topic themselves"
    return "" if tier.settings.kafka.names_brokers else "on_topic_deletion asks the cluster, and [kafka] bootstrap_servers names none"


def delete_removed_topics(tier: Tier, ask: AskAboutTopics) -> list[TopicPartition]:
    """Ask the cluster about all topic ids that are recorded as its own, and delete the partitions that are due. Return these.

    :raises UsageError: if the settings do not allow it. :raises Leased: if another compactor is at work on a partition that is due.
    :raises StoreError: if brokers or stores fail.
    """
    problem = deletion_settings_problem(tier)
    if problem:
        raise UsageError(problem, hint='Set on_topic_deletion = "keep" under [tier]')
    if tier.settings.tier.on_topic_deletion == "keep":
        return []
    catalog = open_catalog(tier.ports)
    topic_ids = sorted(catalog.refresh().topic_clusters)
    if not topic_ids:
        return []
    now_ms = min(tier.ports.clock_ms(), tier.ports.control.clock_ms())  # before the question: an answer is not older than this
    answers = ask(topic_ids)

    def decide(state: CatalogState) -> TopicsInspected | None:
        # The fold ignores what another cluster says: recorded, it would be decided again for ever.
        asked = topics_of_cluster(state, (*answers.missing, *answers.present), answers.cluster_id)
        missing = tuple(topic_id for topic_id in answers.missing if topic_id in asked and _adds_to_record(state, topic_id, now_ms))
        present = tuple(topic_id for topic_id in answers.present if topic_id in asked and topic_id in state.missing)
        if not missing and not present:
            return None
        return TopicsInspected(cluster_id=answers.cluster_id, missing=missing, present=present, asked_ms=now_ms)

    state = catalog.transact(decide)
    cut_if_due(catalog)
    asked = topics_of_cluster(state, answers.missing, answers.cluster_id)
    due = {topic_id for topic_id in asked if _is_due(tier, state, topic_id, now_ms)}
    return _delete_topics(tier, due) if due else []


def _adds_to_record(state: CatalogState, topic_id: str, now_ms: int) -> bool:
    """Return whether an answer that a topic is missing is the first one, or the one that confirms it."""
    known = state.missing.get(topic_id)
    return known is None or (not is_deletion_confirmed(state, topic_id) and now_ms - known.first_ms >= CONFIRMATION_MS)


def _is_due(tier: Tier, state: CatalogState, topic_id: str, now_ms: int) -> bool:
    kept_ms = tier.settings.tier.deleted_topic_retention_ms
    return is_deletion_confirmed(state, topic_id) and now_ms - state.missing[topic_id].first_ms >= kept_ms


def _delete_topics(tier: Tier, topic_ids: set[str]) -> list[TopicPartition]:
    """Delete the partitions whose logs have these topic ids, in whichever incarnation."""
    deleted = []
    for name in tier.partitions():
        log = tier.open(name, leads=True)
        state = log.refresh()
        if state.topic_id in topic_ids and (state.has_segments or state.registrations or state.intent):
            delete_partition(tier.ports, log, tier.lease, deleted_topic_id=state.topic_id)
            tier.changes.publish([log])
            deleted.append(name)
    return deleted
