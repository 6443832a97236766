"""Object keys ``[<bits>/]<cluster>/<topic>-<partition>/<20 digits>.{log,index,timeindex}`` below the base prefix.

(S3StorageServiceEndpoint, Utils.getBinaryHashForClusterTopicPartition, SegmentUtils)
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from compactor.errors import UsageError
from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.tier.names import md5_prefix_bits

OBJECT_KINDS: Final = ("log", "index", "timeindex")
METADATA_FILE: Final = "_metadata"
WATERMARK: Final = "offset.wm"

_OBJECT: Final = re.compile(rf"(\d{{20}})\.({'|'.join(OBJECT_KINDS)})")
_PART: Final = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class PinterestObjectKeys:
    """Builder and parser of the object keys of one cluster in Pinterest's layout. entropy_bits: number of binary digits in front of each
    partition's folder; 0 for none.
    """

    cluster: str
    entropy_bits: int = 0

    def __post_init__(self) -> None:
        if not _PART.fullmatch(self.cluster):
            raise UsageError(
                f"{self.cluster!r} names no cluster of a tier of Pinterest's layout",
                hint="Set cluster under [tier.pinterest] to the id that the uploader runs with",
            )

    def partition_folder(self, partition: TopicPartition) -> str:
        """Return the key prefix of a partition. It ends in a slash, so that ``orders-1`` is not a prefix of ``orders-10``."""
        bits = f"{entropy_prefix(self.cluster, partition, self.entropy_bits)}/" if self.entropy_bits else ""
        return f"{bits}{self.cluster}/{partition}/"

    def file_key(self, partition: TopicPartition, base_offset: int, file_kind: str) -> str:
        """Return the key of a segment's file. base_offset: the segment's first offset."""
        return self.partition_folder(partition) + file_name(base_offset, file_kind)

    def partition_of_object_key(self, key: str) -> TopicPartition | None:
        """Return the partition in whose folder an object lies, or None if it is not of this cluster."""
        folder, _, _ = key.rpartition("/")
        try:
            name = TopicPartition.parse(folder.rpartition("/")[2])
        except UsageError:
            return None
        return name if self.partition_folder(name) == f"{folder}/" else None


def entropy_prefix(cluster: str, partition: TopicPartition, bits: int) -> str:
    """Return the first ``bits`` binary digits of the MD5 of ``<cluster>-<topic>-<partition>``."""
    return md5_prefix_bits(f"{cluster}-{partition}", bits)


def file_name(base_offset: int, file_kind: str) -> str:
    """Return the name of a segment's file. base_offset: the segment's first offset."""
    return f"{base_offset:020d}.{file_kind}"


class PinterestFileName(NamedTuple):
    """Parts of the name of a segment's file in Pinterest's layout."""

    base_offset: int
    file_kind: str


def parse_file_name(name: str) -> PinterestFileName | None:
    """Return base offset and kind of a segment's file name, or None for any other name."""
    match = _OBJECT.fullmatch(name)
    return PinterestFileName(int(match[1]), match[2]) if match else None


def segment_id_from_base_offset(base_offset: int) -> str:
    """Return a segment id derived from the base offset, because this layout has no ids. It never begins with a dash."""
    tries = 0
    while (made := encode_segment_id(hashlib.sha256(f"{base_offset}/{tries}".encode()).digest()[:16])).startswith("-"):
        tries += 1
    return made
