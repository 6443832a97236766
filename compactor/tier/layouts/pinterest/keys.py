"""Names of Pinterest's objects: ``[<bits>/]<cluster>/<topic>-<partition>/<20 digits>.{log,index,timeindex}`` below the base prefix.

(S3StorageServiceEndpoint, Utils.getBinaryHashForClusterTopicPartition, SegmentUtils)
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from compactor.errors import UsageError
from compactor.model.ids import TopicPartition, segment_id

KINDS: Final = ("log", "index", "timeindex")
METADATA: Final = "_metadata"
WATERMARK: Final = "offset.wm"

_OBJECT: Final = re.compile(rf"(\d{{20}})\.({'|'.join(KINDS)})")
_PART: Final = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class PartitionKeys:
    """Of one cluster. ``entropy_bits``: how many binary digits stand before each partition's folder; 0 for none."""

    cluster: str
    entropy_bits: int = 0

    def __post_init__(self) -> None:
        if not _PART.fullmatch(self.cluster):
            raise UsageError(
                f"{self.cluster!r} names no cluster of a tier of Pinterest's layout",
                hint="Set cluster under [tier.pinterest] to the id that the uploader runs with",
            )

    def folder(self, name: TopicPartition) -> str:
        """Ends in a slash: ``orders-1`` is no part of ``orders-10``."""
        bits = f"{entropy(self.cluster, name, self.entropy_bits)}/" if self.entropy_bits else ""
        return f"{bits}{self.cluster}/{name}/"

    def file(self, name: TopicPartition, base: int, kind: str) -> str:
        return self.folder(name) + file_name(base, kind)

    def named(self, key: str) -> TopicPartition | None:
        """Whose folder an object lies in; None where it is none of this cluster's."""
        folder, _, _ = key.rpartition("/")
        try:
            name = TopicPartition.parse(folder.rpartition("/")[2])
        except UsageError:
            return None
        return name if self.folder(name) == f"{folder}/" else None


def entropy(cluster: str, name: TopicPartition, bits: int) -> str:
    """The first binary digits of the MD5 of ``<cluster>-<topic>-<partition>``."""
    digest = hashlib.md5(f"{cluster}-{name}".encode(), usedforsecurity=False).digest()
    return f"{int.from_bytes(digest, 'big'):0128b}"[:bits]


def file_name(base: int, kind: str) -> str:
    return f"{base:020d}.{kind}"


def parsed(name: str) -> tuple[int, str] | None:
    """(base offset, kind) of a file's name; None where it is no segment's."""
    match = _OBJECT.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def id_of(base: int) -> str:
    """There are no ids in this layout: within a partition, one that is the same whenever the base offset is. No dash in front."""
    tries = 0
    while (made := segment_id(hashlib.sha256(f"{base}/{tries}".encode()).digest()[:16])).startswith("-"):
        tries += 1
    return made
