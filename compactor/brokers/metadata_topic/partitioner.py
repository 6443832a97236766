"""Assignment of user partitions to partitions of ``__remote_log_metadata`` (Kafka's RemoteLogMetadataTopicPartitioner).

It depends on topic id and partition number, not on the topic name. The metadata topic's partition count must never change.
"""

from __future__ import annotations

_UINT32_MASK = 0xFFFFFFFF


def metadata_partition(topic_id: bytes, partition: int, partitions: int) -> int:
    """Return the metadata topic partition that holds a user partition's records.

    :param topic_id: 16 bytes.
    :param partition: number of the user partition.
    :param partitions: number of partitions of the metadata topic.
    """
    hashed = java_objects_hash((_java_long_hash(topic_id[8:]), _java_long_hash(topic_id[:8]), partition))
    return (murmur2(hashed.to_bytes(4, "big")) & 0x7FFFFFFF) % partitions


def java_objects_hash(hashes: tuple[int, ...]) -> int:
    """Return java.util.Objects.hash over values with these hash codes, as 32 unsigned bits."""
    result = 1
    for value in hashes:
        result = (31 * result + value) & _UINT32_MASK
    return result


def murmur2(data: bytes) -> int:
    """Return Kafka's murmur2 hash (org.apache.kafka.common.utils.Utils.murmur2), as 32 unsigned bits."""
    multiplier, length = 0x5BD1E995, len(data)
    mixed = 0x9747B28C ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(data[at : at + 4], "little") * multiplier & _UINT32_MASK
        word = (word ^ word >> 24) * multiplier & _UINT32_MASK
        mixed = mixed * multiplier & _UINT32_MASK ^ word
    if whole < length:
        mixed = (mixed ^ int.from_bytes(data[whole:], "little")) * multiplier & _UINT32_MASK
    mixed = (mixed ^ mixed >> 13) * multiplier & _UINT32_MASK
    return mixed ^ mixed >> 15


def _java_long_hash(half: bytes) -> int:
    """Return java.lang.Long.hashCode of 8 bytes."""
    value = int.from_bytes(half, "big")
    return (value ^ value >> 32) & _UINT32_MASK
