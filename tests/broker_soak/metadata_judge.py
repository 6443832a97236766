"""Judge of the metadata topic, as Kafka's own formatter prints it: a round never takes the newest segment of a partition.

A broker that builds a replica from the newest tiered segment (KIP-1023) therefore always builds it from a broker's segment
(rule R8 of docs/broker-protocol.md).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from compactor.model.ids import COMPACTOR_BROKER_ID

_SEGMENT = re.compile(r"RemoteLogSegmentId\{topicIdPartition=([^,]+), id=([^}]+)\}")
_OFFSETS = re.compile(r"startOffset=(\d+), endOffset=(\d+)")
_STATE = re.compile(r"state=([A-Z_]+)")
_BROKER = re.compile(r"brokerId=(\d+)")
_DELETED = re.compile(r"RemotePartitionDeleteMetadata\{topicPartition=([^,]+),")


@dataclass(frozen=True)
class _Segment:
    end_offset: int
    is_ours: bool


def newest_segment_violations(lines: Iterable[str]) -> list[str]:
    """Return a line for each record of a compactor after which the segment with the highest end offset was not a broker's.

    lines: records of the metadata topic; those of one partition in their order. What follows the deletion of a partition does not count.
    """
    started: dict[str, _Segment] = {}
    readable: dict[str, dict[str, _Segment]] = defaultdict(dict)
    deleted: set[str] = set()
    found = []
    for line in lines:
        if gone := _DELETED.search(line):
            deleted.add(gone[1])
        about, state, broker = _SEGMENT.search(line), _STATE.search(line), _BROKER.search(line)
        if about is None or state is None or broker is None:
            continue
        partition, name = about.groups()
        is_ours = int(broker[1]) == COMPACTOR_BROKER_ID
        if offsets := _OFFSETS.search(line):
            started[name] = _Segment(int(offsets[2]), is_ours)
        if state[1] == "COPY_SEGMENT_FINISHED" and name in started:
            readable[partition][name] = started[name]
        elif state[1].startswith("DELETE_SEGMENT"):
            readable[partition].pop(name, None)
        segments = readable[partition].values()
        if not is_ours or not segments or partition in deleted:
            continue
        last = max(one.end_offset for one in segments)
        if all(one.is_ours for one in segments if one.end_offset == last):
            found.append(f"R8: the newest segment of {partition} is a compactor's after: {line}")
    return found
