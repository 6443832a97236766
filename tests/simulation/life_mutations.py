"""The rules about topics that are deleted and created again, each dropped in turn: whole lives must notice, or directed tests.

``python -m tests.simulation --lives --drop all`` shows which seeds notice what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from compactor.constants import TopicId
from compactor.control import incarnations as rule
from compactor.control.importing import record_topic_incarnation_opening
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError
from compactor.features.imports import import_, incarnations
from compactor.model.ids import TopicPartition, partition_of_incarnation as named
from compactor.upkeep import retire as deleted_topics
from tests.simulation import lives
from tests.simulation.mutations import Mutation, noticed, together, without


@contextmanager
def nobody_is_asked() -> Iterator[None]:
    """Another topic id supersedes the tier's, whoever brings it."""
    record = incarnations._record_topic_recreation

    def by_hand(
        catalog: Any, state: Any, topic_id: str, where: str, opening: incarnations.TopicRecreationConfirmationSources, holder: str
    ) -> None:
        record(catalog, state, TopicId(topic_id), where, replace(opening, by_hand=True, ask=None), holder)

    with patch.object(incarnations, "_record_topic_recreation", by_hand):
        yield


@contextmanager
def any_cluster_is_believed() -> Iterator[None]:
    """It does not matter which cluster says that a topic was created again."""
    problem = rule.topic_recreation_problem

    def careless(state: Any, body: Any) -> str:
        return problem(state, body.model_copy(update={"cluster_id": ""}))

    with patch.object(rule, "topic_recreation_problem", careless), patch.object(incarnations, "topic_recreation_problem", careless):
        yield


@contextmanager
def superseded_topics_come_back() -> Iterator[None]:
    """An id that was superseded is one like any other."""
    judge, problem = rule.classify_topic_id, rule.topic_recreation_problem

    def forgetful(recorded_id: str, given_id: str, superseded: Any) -> rule.TopicIdRelationToTier:
        return judge(TopicId(recorded_id), TopicId(given_id), {})

    def careless(state: Any, body: Any) -> str:
        return problem(state.model_copy(update={"superseded": {}}), body)

    with (
        patch.object(incarnations, "classify_topic_id", forgetful),
        patch.object(incarnations, "newest_successor_topic_id", lambda topic_id, superseded: topic_id),
        patch.object(import_, "require_topic_not_superseded", lambda *_: None),
        patch.object(rule, "topic_recreation_problem", careless),
        patch.object(incarnations, "topic_recreation_problem", careless),
    ):
        yield


@contextmanager
def damage_is_a_difference() -> Iterator[None]:
    """Records that cannot be read count as other records than the tier's."""

    def has_equal_records(compare: Any) -> bool:
        try:
            return bool(compare() > 0)
        except BadData:
            return False

    with patch.object(incarnations, "_has_equal_last_records", has_equal_records):
        yield


@contextmanager
def incarnations_are_listed_late() -> Iterator[None]:
    """A new incarnation is listed with its first segment, not when it is opened."""
    find = incarnations.find_or_open_incarnation

    def late(tier: Any, state: PartitionState, topic_id: str, *means: Any) -> TopicPartition:
        with patch.object(incarnations, "publish_hints", lambda *_: None):
            following = tier.open_partition_log(named(state.topic, state.partition, state.incarnation + 1))
            found = find(tier, state, TopicId(topic_id), *means)
            if found != state.topic_partition and found == following.state.topic_partition:
                record_topic_incarnation_opening(following, TopicId(topic_id), "")
            return found

    with patch.object(import_, "find_or_open_incarnation", late):
        yield


@contextmanager
def one_answer_is_enough() -> Iterator[None]:
    """A topic is deleted once its cluster has said one time that it does not exist."""

    def confirmed(state: Any, topic_id: str) -> bool:
        return topic_id in state.missing

    with patch.object(deleted_topics, "is_topic_deletion_confirmed", confirmed):
        yield


@contextmanager
def contradictions_do_not_count() -> Iterator[None]:
    """That a topic exists after all does not matter."""
    delete = deleted_topics.delete_missing_topics

    def deaf(tier: Any, ask: Any) -> Any:
        return delete(tier, lambda topic_ids: replace(ask(topic_ids), present=()))

    with patch.object(deleted_topics, "delete_missing_topics", deaf):
        yield


@contextmanager
def answers_of_any_cluster_count() -> Iterator[None]:
    """Nobody looks which cluster says that a topic does not exist: all answers are taken for those of the recorded one."""
    delete = deleted_topics.delete_missing_topics

    def careless(tier: Any, ask: Any) -> Any:
        def recorded(topic_ids: Any) -> Any:
            return replace(ask(topic_ids), cluster_id=next(iter(tier.catalog.refresh().topic_clusters.values())))

        return delete(tier, recorded)

    with patch.object(deleted_topics, "delete_missing_topics", careless):
        yield


def earlier_twice(values: Iterable[Any]) -> list[Any]:
    """Return the earlier of two clocks twice; other values in order."""
    found = sorted(values)
    return [found[0]] * 2 if len(found) == 2 and isinstance(found[0], int) else found


def readers_do_not_know_the_log_start() -> AbstractContextManager[Any]:
    """Readers begin with the first live segment."""
    return patch.object(PartitionState, "log_start", property(lambda self: self.start_offset))


LIFE_MUTATIONS: Mapping[str, Mutation] = {
    "nobody is asked who the topic is": nobody_is_asked,
    "any cluster may say that a topic was created again": any_cluster_is_believed,
    "superseded topics come back, and nobody is asked": together(superseded_topics_come_back, nobody_is_asked),
    "restored topics are not adopted": lambda: patch.object(incarnations, "_has_equal_last_records", lambda compare: False),
    "one answer is enough": one_answer_is_enough,
    "readers do not know the log start": readers_do_not_know_the_log_start,
}
"""Noticed by lives."""

OPENING_MUTATIONS: Mapping[str, Mutation] = {
    "damage is a difference": damage_is_a_difference,
    "incarnations are listed late": incarnations_are_listed_late,
}
"""Rare in lives: tests/integration/test_incarnations.py notices."""

COVERED_MUTATIONS: Mapping[str, Mutation] = {
    "incarnations are opened twice": without(rule.check_incarnation_unused),
    "incarnations need not be opened": without(rule.check_incarnation_opened),
    "a deletion is any topic's": without(rule.check_deleted_topic),
}
"""Writers ask these rules before they append, so that lives do not notice: tests/unit/test_control_incarnations.py does."""

DELETION_MUTATIONS: Mapping[str, Mutation] = {
    "one answer is enough": one_answer_is_enough,
    "answers need not lie apart": lambda: lives.confirmed_within(0),
    "contradictions do not count": contradictions_do_not_count,
    "answers of any cluster count": answers_of_any_cluster_count,
    "the earlier clock counts": lambda: patch.object(deleted_topics, "sorted", earlier_twice, create=True),
}
"""Rare in lives: tests/integration/test_deleted_topics.py notices."""


def life_bites(mutation: Mutation, seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """(seed, first violation) of each life that notices."""
    for seed in seeds:
        with mutation():
            try:
                outcome = lives.run_life(seed)
            except (CompactorError, AssertionError) as error:
                yield seed, f"{type(error).__name__}: {error}"
                continue
        if outcome.violations:
            yield seed, noticed(outcome.violations[0])
