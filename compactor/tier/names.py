"""Names in the tiers that brokers write, read strictly: what does not fit is a stranger's, never guessed.

A broker makes them from ids of its own: a topic that is deleted and made again has the same name and another id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.tier.ports import SegmentRef

TopicIdOf = Callable[[TopicPartition], str]
"""The id of a partition's topic, as Kafka's Uuid prints it."""

_UUID: Final = r"[A-Za-z0-9_-]{21}[AQgw]"  # 16 bytes: the last of 22 characters holds but two bits
_STEM: Final = re.compile(rf"([0-9]{{20}})-({_UUID})")


@dataclass(frozen=True)
class TopicIds:
    """A TopicIdOf that can travel to executors. ``by_topic``: topic name -> id."""

    by_topic: Mapping[str, str]

    def __call__(self, name: TopicPartition) -> str:
        """Raises UsageError."""
        found = self.by_topic.get(name.topic, "")
        if not re.fullmatch(_UUID, found):
            what = f"{found!r} is no id" if found else "nothing tells the id"
            raise UsageError(f"{what} of topic {name.topic}", hint="It comes from the brokers, or from a snapshot of their metadata")
        return found


class Foreign(NamedTuple):
    """What a broker has written to a place that is taken for a tier of ours, and what was meant then."""

    what: str
    hint: str


_FOREIGN: Final = (
    (
        re.compile(rf"(kafka-tiered-storage/)?[^/]+-[0-9]+-{_UUID}/{_STEM.pattern}\.[a-z_]+"),
        Foreign(
            "a tier that brokers write (LocalTieredStorage)",
            'Set kind = "kafka", layout = "kafka-local", url to the broker\'s rsm.config.dir and a control_url elsewhere, all under [tier]',
        ),
    ),
    (
        re.compile(rf".+-{_UUID}/[0-9]+/{_STEM.pattern}\.(log|indexes|rsm-manifest)"),
        Foreign(
            "a tier that brokers write (Aiven's plugin)",
            'Set kind = "kafka", layout = "aiven" and a control_url elsewhere, all under [tier]',
        ),
    ),
    (
        re.compile(r"([^/]+-[0-9]+/)?[0-9]{20}\.(log|index|timeindex)"),
        Foreign("a broker's log directory", "`import` takes segments from there; set url under [tier] to a place of its own"),
    ),
)


def foreign(keys: Iterable[str]) -> Foreign | None:
    """Whose these objects are, where a broker has written one of them."""
    return next((who for key in keys for names, who in _FOREIGN if names.fullmatch(key)), None)


class Stem(NamedTuple):
    """What the names of a segment's objects begin with."""

    start_offset: int
    segment_id: str

    @staticmethod
    def parse(text: str) -> Stem | None:
        match = _STEM.fullmatch(text)
        return Stem(int(match[1]), match[2]) if match and int(match[1]) < 2**63 else None


def stem(segment: SegmentRef) -> str:
    """``00000000000000000042-<id>``"""
    return f"{segment.start_offset:020d}-{segment.id}"
