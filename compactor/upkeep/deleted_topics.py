"""Deletion of topics that their cluster has deleted (``[tier] on_topic_deletion = "delete"``). The rule is ``control.incarnations``.

ask by id -> record what is new or contradicts -> delete what is confirmed, missing still, and past ``deleted_topic_retention_ms``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from compactor.access.tier import Tier
from compactor.brokers.topic_ids import ExistingAndMissingTopicIds
from compactor.constants import TopicId
from compactor.control.deletion import delete_partition
from compactor.control.incarnations import CONFIRMATION_MS, is_topic_deletion_confirmed, topic_ids_of_cluster
from compactor.control.logs import CatalogLog, open_catalog, write_snapshot_if_due
from compactor.control.records import TopicsInspected
from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition

AskWhichTopicIdsExist = Callable[[Sequence[TopicId]], ExistingAndMissingTopicIds]
"""Asks the cluster about topic ids. Raises StoreError, UsageError."""


def delete_tiered_data_of_missing_topics(tier: Tier, ask_about_topics: AskWhichTopicIdsExist) -> list[TopicPartition]:
    """Delete the partitions of topics that no longer exist, and return these partitions. The cluster is asked about all topic ids that are
    recorded as its own.

    A partition is due for deletion if two conditions are met. The cluster has reported twice, at least an hour apart and without a contrary
    answer, that its topic does not exist; and deleted_topic_retention_ms has passed since the first report.

    :raises UsageError: if no brokers are configured, although on_topic_deletion requires them.
    :raises Leased: if another compactor is at work on a partition that is due.
    :raises StoreError: if brokers or stores fail.
    """
    if tier.settings.tier.on_topic_deletion == "keep":
        return []
    if not tier.settings.kafka.has_configured_brokers:
        what = "on_topic_deletion asks the cluster, and [kafka] bootstrap_servers names none"
        raise UsageError(what, hint='Set on_topic_deletion = "keep" under [tier]')
    catalog = open_catalog(tier.ports)
    topic_ids = sorted(catalog.refresh().topic_clusters)
    if not topic_ids:
        return []
    # Both clocks are read before the question, so that no answer is older. A first answer counts from the later one and is confirmed by
    # the earlier one, so that a wrong clock does not make two answers of one.
    earlier_ms, later_ms = sorted((tier.ports.clock_ms(), tier.ports.control.clock_ms()))
    answers = ask_about_topics(topic_ids)
    _record_cluster_answers_about_topic_ids(catalog, answers, later_ms, lambda state, topic_id: topic_id not in state.missing)
    state = _record_cluster_answers_about_topic_ids(
        catalog, answers, earlier_ms, partial(_is_first_confirmation_of_topic_deletion, asked_ms=earlier_ms)
    )
    write_snapshot_if_due(catalog)
    asked = topic_ids_of_cluster(state, answers.missing, answers.cluster_id)
    due = {topic_id for topic_id in asked if _is_tiered_data_of_topic_due_for_deletion(tier, state, topic_id, earlier_ms)}
    return _delete_tiered_partitions_of_topics(tier, due) if due else []


def _record_cluster_answers_about_topic_ids(
    catalog: CatalogLog, answers: ExistingAndMissingTopicIds, asked_ms: int, adds_information: Callable[[CatalogState, str], bool]
) -> CatalogState:
    """Record the cluster's answers about topic ids in the catalog (the tier-wide state), and return the resulting catalog. An answer that a
    topic exists is only recorded if the topic was reported missing before.

    :param asked_ms: time of the question, in milliseconds.
    :param adds_information: returns whether the answer that a topic is missing is worth recording.
    """

    def decide_record_to_append(state: CatalogState) -> TopicsInspected | None:
        # The fold ignores what another cluster says: recorded, it would be decided again for ever.
        asked = topic_ids_of_cluster(state, (*answers.missing, *answers.present), answers.cluster_id)
        missing = tuple(topic_id for topic_id in answers.missing if topic_id in asked and adds_information(state, topic_id))
        present = tuple(topic_id for topic_id in answers.present if topic_id in asked and topic_id in state.missing)
        if not missing and not present:
            return None
        return TopicsInspected(cluster_id=answers.cluster_id, missing=missing, present=present, asked_ms=asked_ms)

    return catalog.append_due_records(decide_record_to_append)


def _is_first_confirmation_of_topic_deletion(state: CatalogState, topic_id: TopicId, asked_ms: int) -> bool:
    """Return whether an answer at ``asked_ms`` is the first to confirm that a topic is missing: the topic was reported missing before, at
    least CONFIRMATION_MS earlier, and no other answer has confirmed that.
    """
    known = state.missing.get(topic_id)
    return known is not None and not is_topic_deletion_confirmed(state, topic_id) and asked_ms - known.first_ms >= CONFIRMATION_MS


def _is_tiered_data_of_topic_due_for_deletion(tier: Tier, state: CatalogState, topic_id: TopicId, now_ms: int) -> bool:
    kept_ms = tier.settings.tier.deleted_topic_retention_ms
    return is_topic_deletion_confirmed(state, topic_id) and now_ms - state.missing[topic_id].first_ms >= kept_ms


def _delete_tiered_partitions_of_topics(tier: Tier, topic_ids: set[TopicId]) -> list[TopicPartition]:
    """Delete the partitions that have these topic ids, and return them. A topic that was created again under the same name has another id,
    and its partitions stay.
    """
    deleted = []
    for name in tier.list_partitions():
        log = tier.open_control_log_of_partition(name, caller_runs_round=True)
        state = log.refresh()
        if state.topic_id in topic_ids and (state.has_segments or state.registrations or state.intent):
            delete_partition(tier.ports, log, tier.lease, deleted_topic_id=state.topic_id)
            tier.change_notifier.announce_changed_control_logs([log])
            deleted.append(name)
    return deleted
