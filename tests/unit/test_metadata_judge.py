"""The judge of the metadata topic notices a compacted segment that is the newest of its partition."""

from __future__ import annotations

from compactor.model.ids import COMPACTOR_BROKER_ID
from tests.broker_soak.metadata_judge import newest_segment_violations

BROKER = 1


def copied(name: str, start: int, end: int, broker: int) -> list[str]:
    about = f"remoteLogSegmentId=RemoteLogSegmentId{{topicIdPartition=AAAA:orders-0, id={name}}}"
    begun = f"RemoteLogSegmentMetadata{{{about}, startOffset={start}, endOffset={end}, brokerId={broker}, state=COPY_SEGMENT_STARTED}}"
    return [begun, f"RemoteLogSegmentMetadataUpdate{{{about}, state=COPY_SEGMENT_FINISHED, brokerId={broker}}}"]


def deleted(name: str, broker: int) -> str:
    about = f"remoteLogSegmentId=RemoteLogSegmentId{{topicIdPartition=AAAA:orders-0, id={name}}}"
    return f"RemoteLogSegmentMetadataUpdate{{{about}, state=DELETE_SEGMENT_STARTED, brokerId={broker}}}"


BY_BROKERS = [*copied("a", 0, 9, BROKER), *copied("b", 10, 19, BROKER), *copied("c", 20, 29, BROKER)]
MERGED = [*copied("ab", 0, 19, COMPACTOR_BROKER_ID), deleted("a", COMPACTOR_BROKER_ID), deleted("b", COMPACTOR_BROKER_ID)]


def test_metadata_judge_accepts_a_round_that_leaves_the_newest_segment_alone() -> None:
    assert newest_segment_violations([*BY_BROKERS, *MERGED]) == []


def test_metadata_judge_notices_a_round_that_takes_the_newest_segment() -> None:
    ours = [*copied("bc", 10, 29, COMPACTOR_BROKER_ID), deleted("b", COMPACTOR_BROKER_ID), deleted("c", COMPACTOR_BROKER_ID)]
    assert len(newest_segment_violations([*BY_BROKERS, *ours])) == 1


def test_metadata_judge_ignores_what_follows_the_deletion_of_the_topic() -> None:
    gone = "RemotePartitionDeleteMetadata{topicPartition=AAAA:orders-0, state=DELETE_PARTITION_MARKED, eventTimestampMs=1, brokerId=1}"
    assert newest_segment_violations([*BY_BROKERS, *MERGED[:2], gone, deleted("c", BROKER), *MERGED[2:]]) == []
