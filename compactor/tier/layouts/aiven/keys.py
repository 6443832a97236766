"""Object keys: ``<prefix><topic>-<topic id>/<partition>/<offset>-<segment id>.<suffix>``, the prefix as configured (ObjectKeyFactory).

The plug-in prints offsets with the digits of its JVM's locale. Other than 0-9 we do not read; such objects are strangers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from compactor.model.ids import TopicPartition
from compactor.tier.names import Stem, TopicIdOf, stem
from compactor.tier.ports import SegmentRef

LOG: Final = "log"
INDEXES: Final = "indexes"
MANIFEST: Final = "rsm-manifest"
SUFFIXES: Final = (LOG, INDEXES, MANIFEST)
_FOLDER: Final = re.compile(r"([^/]+)-[A-Za-z0-9_-]{22}/(\d+)/[^/]+")
"""In the order of upload."""


@dataclass(frozen=True)
class ObjectKeys:
    prefix: str
    topic_id: TopicIdOf

    def folder(self, name: TopicPartition) -> str:
        """Ends in a slash, so that partition 1 is not partition 10."""
        return f"{self.prefix}{name.topic}-{self.topic_id(name)}/{name.partition}/"

    def main_path(self, name: TopicPartition, segment: SegmentRef) -> str:
        """Without prefix and suffix."""
        return f"{name.topic}-{self.topic_id(name)}/{name.partition}/{stem(segment)}"

    def key(self, name: TopicPartition, segment: SegmentRef, suffix: str) -> str:
        return f"{self.prefix}{self.main_path(name, segment)}.{suffix}"

    def partition_of(self, key: str) -> str:
        """Whatever the topic's id is: folders of deleted topics stay."""
        match = _FOLDER.fullmatch(key.removeprefix(self.prefix)) if key.startswith(self.prefix) else None
        return f"{match[1]}-{match[2]}" if match else ""

    def parse(self, name: TopicPartition, key: str) -> tuple[Stem, str] | None:
        """What a key of the partition's folder names, and its suffix; None: a stranger's."""
        first, _, suffix = key.removeprefix(self.folder(name)).partition(".")
        found = Stem.parse(first)
        return (found, suffix) if found and suffix in SUFFIXES else None
