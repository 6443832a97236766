"""Which partition of ``__remote_log_metadata`` has a user partition's records (Kafka's RemoteLogMetadataTopicPartitioner).

Topic id and partition number decide, not the name. Brokers and we must agree on the number of partitions: it never changes.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF


def metadata_partition(topic_id: bytes, partition: int, partitions: int) -> int:
    """``topic_id``: 16 bytes; ``partitions``: of the metadata topic."""
    hashed = objects_hash((_fold(topic_id[8:]), _fold(topic_id[:8]), partition))
    return (murmur2(hashed.to_bytes(4, "big")) & 0x7FFFFFFF) % partitions


def objects_hash(hashes: tuple[int, ...]) -> int:
    """java.util.Objects.hash over values with these hash codes, as 32 bits."""
    result = 1
    for value in hashes:
        result = (31 * result + value) & _MASK
    return result


def murmur2(data: bytes) -> int:
    """org.apache.kafka.common.utils.Utils.murmur2, as 32 bits."""
    multiplier, length = 0x5BD1E995, len(data)
    mixed = 0x9747B28C ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(data[at : at + 4], "little") * multiplier & _MASK
        word = (word ^ word >> 24) * multiplier & _MASK
        mixed = mixed * multiplier & _MASK ^ word
    if whole < length:
        mixed = (mixed ^ int.from_bytes(data[whole:], "little")) * multiplier & _MASK
    mixed = (mixed ^ mixed >> 13) * multiplier & _MASK
    return mixed ^ mixed >> 15


def _fold(half: bytes) -> int:
    """java.lang.Long.hashCode of one half of a topic id."""
    value = int.from_bytes(half, "big")
    return (value ^ value >> 32) & _MASK
