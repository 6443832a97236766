"""Object keys ``<prefix><topic>-<topic id>/<partition>/<offset>-<segment id>.<suffix>`` with the configured prefix (ObjectKeyFactory).

The plug-in prints offsets with the digits of its JVM's locale. Keys with digits other than 0-9 are treated as foreign objects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from compactor.model.ids import TopicPartition
from compactor.tier.names import ObjectStem, TopicIdOf, object_stem
from compactor.tier.ports import SegmentRef

LOG: Final = "log"
INDEXES: Final = "indexes"
MANIFEST: Final = "rsm-manifest"
SUFFIXES: Final = (LOG, INDEXES, MANIFEST)
_FOLDER: Final = re.compile(r"([^/]+)-[A-Za-z0-9_-]{22}/(\d+)/[^/]+")
"""In the order of upload."""


@dataclass(frozen=True)
class ObjectKeys:
    """Builds and parses the object keys of segments under one prefix."""

    prefix: str
    topic_id: TopicIdOf

    def folder(self, name: TopicPartition) -> str:
        """Return the key prefix of a partition's objects. It ends in a slash, so that partition 1 is not a prefix of partition 10."""
        return f"{self.prefix}{name.topic}-{self.topic_id(name)}/{name.partition}/"

    def main_path(self, name: TopicPartition, segment: SegmentRef) -> str:
        """Return a segment's object key without prefix and suffix."""
        return f"{name.topic}-{self.topic_id(name)}/{name.partition}/{object_stem(segment)}"

    def key(self, name: TopicPartition, segment: SegmentRef, suffix: str) -> str:
        """Return the key of a segment's object. suffix: one of SUFFIXES."""
        return f"{self.prefix}{self.main_path(name, segment)}.{suffix}"

    def partition_of(self, key: str) -> str:
        """Return the partition of a key as ``topic-partition``, whatever its topic id is, or an empty string."""
        match = _FOLDER.fullmatch(key.removeprefix(self.prefix)) if key.startswith(self.prefix) else None
        return f"{match[1]}-{match[2]}" if match else ""

    def parse(self, name: TopicPartition, key: str) -> tuple[ObjectStem, str] | None:
        """Return the offset and segment id in a key of the partition's folder, and its suffix; None for a foreign object."""
        first, _, suffix = key.removeprefix(self.folder(name)).partition(".")
        found = ObjectStem.parse(first)
        return (found, suffix) if found and suffix in SUFFIXES else None
