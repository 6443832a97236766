"""Ownership of the topics of a broker-managed tier: which control store compacts a topic.

  <tier.url>/.tiered-compactor/owners/<topic id>/<number>.json    created if absent, never overwritten; the highest number counts

Rounds of one topic in two control stores would not know of each other's plans and leadership, and would delete each other's segments. So
the first process that leads a partition of the topic takes the topic for its control store, and processes of another control store are
refused, until a person takes the topic over (``topics takeover``), which is the next number. Commands that only read ask nobody.

The objects lie beside those of the brokers' plug-in, which lists and deletes only what is below its own prefix or folder.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import ValidationError

from compactor.control.logs import open_catalog
from compactor.control.ports import EnvironmentPorts
from compactor.errors import AlreadyExists, BadData, UsageError
from compactor.model.base import StrictFrozenModel
from compactor.model.ids import TopicPartition
from compactor.storage.port import ObjectStore
from compactor.tier.names import TopicIdOfPartition

OWNER_PREFIX = ".tiered-compactor/owners/"
_log = logging.getLogger(__name__)


class TopicOwner(StrictFrozenModel):
    """Control store that compacts a topic. tier_id: the identity in its catalog; a new one if the control store was lost and begun anew.

    by, at_ms: the process that took the topic, and when by its clock, for people.
    """

    topic: str
    topic_id: str
    tier_id: str
    control_url: str
    by: str
    at_ms: int

    def is_same_control_store(self, other: TopicOwner) -> bool:
        """Return whether both name the same control store. A copy in another place is another one: both could be at work."""
        return (self.tier_id, self.control_url) == (other.tier_id, other.control_url)


class RecordedOwner(NamedTuple):
    """An owner as it is recorded. number: 0 if there is none."""

    number: int
    owner: TopicOwner | None


def read_topic_owner(data: ObjectStore, topic_id: str) -> RecordedOwner:
    """Return the control store that compacts a topic now. Raises BadData if the object is corrupt, StoreError."""
    folder = f"{OWNER_PREFIX}{topic_id}/"
    numbers = [info.key.removeprefix(folder).removesuffix(".json") for info in data.list(folder)]
    number = max((int(each) for each in numbers if each.isdecimal()), default=0)
    if not number:
        return RecordedOwner(0, None)
    key = _key(topic_id, number)
    try:
        return RecordedOwner(number, TopicOwner.model_validate_json(data.get(key)))
    except ValidationError:
        hint = "`topics takeover` names the control store again, once no other one compacts the topic"
        raise BadData("it names no control store", segment=f"{data.url}/{key}", hint=hint) from None


@dataclass
class TopicOwnershipCheckByObjects:
    """Check that this process's control store compacts a topic, made before a process leads one of its partitions.

    topic_id: returns a partition's topic id as the brokers have it now.
    """

    topic_id: TopicIdOfPartition
    _tier_id: str = field(default="", init=False)

    def require_topic_owned_by_this_control_store(self, ports: EnvironmentPorts, partition: TopicPartition) -> None:
        """Take the topic for this control store if it has no owner. Raises UsageError if another control store has it, and StoreError."""
        mine = self._owner_record(ports, partition)
        number, owner = read_topic_owner(ports.data, mine.topic_id)
        if owner is None and not mine.tier_id:
            return  # nothing was ever written with this control store, and what is not led is not taken
        if owner is None:
            number, owner = self._record_owner(ports.data, number + 1, mine)
        if not owner.is_same_control_store(mine):
            raise UsageError(
                f"topic {partition.topic} ({mine.topic_id}) of {ports.data.url} is compacted with the control store {owner.control_url} "
                f"(tier {owner.tier_id}), and this one is {mine.control_url} (tier {mine.tier_id or 'unknown'})",
                hint="Nothing was changed. Correct tier.control_url, or leave the topic out of [kafka] topics. If that control store is "
                f"lost or was moved, and nothing works with it any more: `topics takeover {partition.topic}`",
            )

    def take_over(self, ports: EnvironmentPorts, partition: TopicPartition) -> str:
        """Record this control store as the topic's owner. Return the URL of the control store that was the owner before: empty if there was
        none, and this one's if nothing had to be recorded.

        Raises AlreadyExists if another process was faster, and StoreError.
        """
        mine = self._owner_record(ports, partition)
        try:
            number, owner = read_topic_owner(ports.data, mine.topic_id)
        except BadData:
            numbers = [info.key for info in ports.data.list(f"{OWNER_PREFIX}{mine.topic_id}/")]
            number, owner = len(numbers), None
        if owner is not None and owner.is_same_control_store(mine):
            return owner.control_url
        ports.data.create(_key(mine.topic_id, number + 1), mine.model_dump_json().encode())
        return owner.control_url if owner is not None else ""

    def _owner_record(self, ports: EnvironmentPorts, partition: TopicPartition) -> TopicOwner:
        self._tier_id = self._tier_id or open_catalog(ports).refresh().tier_id
        return TopicOwner(
            topic=partition.topic,
            topic_id=self.topic_id(partition),
            tier_id=self._tier_id,
            control_url=ports.control.url,
            by=ports.holder,
            at_ms=ports.clock_ms(),
        )

    def _record_owner(self, data: ObjectStore, number: int, mine: TopicOwner) -> tuple[int, TopicOwner]:
        """Create the record of this control store, and return the one that counts."""
        try:
            data.create(_key(mine.topic_id, number), mine.model_dump_json().encode())
        except AlreadyExists:
            pass
        else:
            _log.warning("topic %s (%s) is compacted with the control store %s from now on", mine.topic, mine.topic_id, mine.control_url)
        found, owner = read_topic_owner(data, mine.topic_id)
        return found, owner or mine


def _key(topic_id: str, number: int) -> str:
    return f"{OWNER_PREFIX}{topic_id}/{number:06d}.json"
