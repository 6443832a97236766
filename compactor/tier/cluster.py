"""ClusterNow (compactor.tier.brokers) over the cluster's own answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from compactor.errors import NotFound, Refused
from compactor.metadata_topic.admin import KafkaAdmin, TopicFacts, metadata_topic_problem
from compactor.tier.brokers import TopicNow
from compactor.tier.conditions import version_problem

_log = logging.getLogger(__name__)


class AdminCluster:
    """ClusterNow. What may not be described is told once and left out."""

    def __init__(self, admin: KafkaAdmin) -> None:
        self._admin = admin
        self._cluster_id = ""
        self._told: set[str] = set()

    def cluster_id(self) -> str:
        if not self._cluster_id:
            self._cluster_id = self._admin.cluster().cluster_id
        return self._cluster_id

    def topics(self, names: Sequence[str]) -> Mapping[str, TopicNow]:
        """One request for all of them; each by itself where one of them is refused."""
        try:
            facts = self._admin.topics(names)
        except (Refused, NotFound):
            facts = self._one_by_one(names)
        return {name: _now(found) for name, found in facts.items()}

    def problem(self) -> str:
        """What may not be asked for is a problem, too: it is not guessed."""
        try:
            return metadata_topic_problem(self._admin.metadata_topic()) or version_problem(self._admin.cluster())
        except (Refused, NotFound) as error:
            return str(error)

    def _one_by_one(self, names: Sequence[str]) -> dict[str, TopicFacts]:
        facts: dict[str, TopicFacts] = {}
        for name in names:
            try:
                facts |= self._admin.topics([name])
            except (Refused, NotFound) as error:
                if name not in self._told:
                    _log.warning("topic %s is left out: %s", name, error.message)
                self._told.add(name)
        return facts


def _now(facts: TopicFacts) -> TopicNow:
    led = {number: one for number, one in facts.partitions.items() if one.log_start >= 0}
    return TopicNow(
        facts.topic_id,
        log_starts={number: one.log_start for number, one in led.items()},
        last_stable={number: one.last_stable for number, one in led.items()},
        settings={name: setting.value for name, setting in facts.settings.items()},
        chosen=facts.set_on_topic(),
    )
