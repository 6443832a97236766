"""Strict parsing of object names in broker-managed tiers. Names that do not match exactly are never guessed.

Brokers name objects by topic id, so that a topic which is deleted and created again has other names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.tier.ports import SegmentRef

TopicIdOfPartition = Callable[[TopicPartition], TopicId]
"""Returns the id of a partition's topic, as Kafka's Uuid prints it."""

_UUID: Final = r"[A-Za-z0-9_-]{21}[AQgw]"  # 16 bytes: the last of 22 characters holds but two bits
_STEM: Final = re.compile(rf"([0-9]{{20}})-({_UUID})")


def is_topic_id(candidate: str) -> bool:
    """Return whether a text is a topic id as Kafka's class Uuid prints it."""
    return re.fullmatch(_UUID, candidate) is not None


@dataclass(frozen=True)
class TopicIdLookup:
    """Callable partition -> topic id (a TopicIdOfPartition) that can be sent to Spark executors. by_topic: topic name -> topic id."""

    by_topic: Mapping[str, TopicId]

    def __call__(self, partition: TopicPartition) -> TopicId:
        """Return the id of the partition's topic. Raises UsageError if it is unknown or invalid."""
        found = self.by_topic.get(partition.topic, EMPTY_TOPIC_ID)
        if not is_topic_id(found):
            what = f"{found!r} is not a valid id" if found else "no id is known"
            raise UsageError(f"{what} of topic {partition.topic}", hint="It comes from the brokers, or from a snapshot of their metadata")
        return found


class RecognizedLayout(NamedTuple):
    """The program whose layout the objects below a URL have, and the settings of this program for such a tier."""

    what: str
    hint: str


_FOREIGN: Final = (
    (
        re.compile(rf"(kafka-tiered-storage/)?[^/]+-[0-9]+-{_UUID}/{_STEM.pattern}\.[a-z_]+"),
        RecognizedLayout(
            "a broker-managed tier (LocalTieredStorage)",
            'Set kind = "kafka", layout = "kafka-local", url to the broker\'s rsm.config.dir and a control_url elsewhere, all under [tier]',
        ),
    ),
    (
        re.compile(rf".+-{_UUID}/[0-9]+/{_STEM.pattern}\.(log|indexes|rsm-manifest)"),
        RecognizedLayout(
            "a broker-managed tier (Aiven's plugin)",
            'Set kind = "kafka", layout = "aiven" and a control_url elsewhere, all under [tier]',
        ),
    ),
    (
        re.compile(r"([^/]+-[0-9]+/)?[0-9]{20}\.(log|index|timeindex)"),
        RecognizedLayout("a broker's log directory", "`import` copies segments from there; set url under [tier] to another location"),
    ),
)


def recognize_layout(keys: Iterable[str]) -> RecognizedLayout | None:
    """Return which brokers' plug-in has written these object keys, with the settings for its layout, or None if none has."""
    return next((who for key in keys for names, who in _FOREIGN if names.fullmatch(key)), None)


class SegmentObjectNameStem(NamedTuple):
    """The common beginning of the names of a segment's objects: its first offset and its id."""

    start_offset: int
    segment_id: str

    @staticmethod
    def parse(name: str) -> SegmentObjectNameStem | None:
        """Parse the common beginning of object names (such as ``00000000000000000042-<id>``); None for any other text."""
        match = _STEM.fullmatch(name)
        return SegmentObjectNameStem(int(match[1]), match[2]) if match and int(match[1]) < 2**63 else None


def md5_prefix_bits(text: str, bits: int) -> str:
    """Return the first ``bits`` binary digits of a text's MD5. In front of a key they spread the keys over a bucket's index."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return f"{int.from_bytes(digest, 'big'):0128b}"[:bits]


def segment_object_name_stem(segment: SegmentRef) -> str:
    """Return the common beginning of a segment's object names, such as ``00000000000000000042-<id>``."""
    return f"{segment.start_offset:020d}-{segment.id}"
