"""The broker soak excuses a consumer out of range where brokers hid a segment with a shorter copy, and nowhere else."""

from __future__ import annotations

import pytest

from compactor.model.ids import COMPACTOR_BROKER_ID
from tests.broker_soak.broker_holes import BrokerHole, MetadataReplay
from tests.broker_soak.readers import Findings, OutOfRange, Pass, read_and_judge
from tests.broker_soak.traffic import WrittenPartition
from tests.read_checker import FoundRecord, PartitionHistory, SentRecord
from tests.unit.test_broker_soak_readers import OneAnswer

WHERE, TOPIC_ID, OLDER_TOPIC_ID = "aging-0", "_mh7hpJHTbm1QwrgFmCv5Q", "7c3ehaVzTli4p4On6MpeVg"
BEFORE, HIDDEN, HIDING, AFTER = "aWYdCaoQQA6W7odFyrC2wg", "RjC1lJp3TqGCs4iXk7RTbg", "zbuKEeWaQEqhCFgRL0UWFg", "DV2zspzBTWOXf2gv_HDUFg"
OURS = "grKfa7qaSzyQ2AwbS6cQ7Q"
HOLE = BrokerHole(WHERE, 20, 30_093, 30_179, HIDDEN, HIDING)
LATER_MS = 10_000


def about(segment: str, topic_id: str) -> str:
    return f"remoteLogSegmentId=RemoteLogSegmentId{{topicIdPartition={topic_id}:{WHERE}, id={segment}}}"


def copied(
    segment: str, start: int, end: int, at_ms: int, *, broker: int = 1, epochs: str = "", topic_id: str = TOPIC_ID
) -> tuple[str, str]:
    """Return the two records of a copy, as Kafka 4.4.0 printed them."""
    begun = (
        f"partition: 1, offset: 1, value: RemoteLogSegmentMetadata{{{about(segment, topic_id)}, startOffset={start}, endOffset={end}, "
        f"brokerId={broker}, maxTimestampMs=1, eventTimestampMs={at_ms}, segmentLeaderEpochs={{{epochs or f'20={start}'}}}, "
        "segmentSizeInBytes=9000, customMetadata=Optional.empty, state=COPY_SEGMENT_STARTED, txnIdxEmpty=false}"
    )
    return begun, update(segment, "COPY_SEGMENT_FINISHED", at_ms + 500, broker=broker, topic_id=topic_id)


def update(segment: str, state: str, at_ms: int, *, broker: int = 1, topic_id: str = TOPIC_ID) -> str:
    return (
        f"partition: 1, offset: 2, value: RemoteLogSegmentMetadataUpdate{{{about(segment, topic_id)}, customMetadata=Optional.empty, "
        f"state={state}, eventTimestampMs={at_ms}, brokerId={broker}}}"
    )


FIRST_LEADER = [*copied(BEFORE, 29_559, 29_945, 1_000), *copied(HIDDEN, 29_946, 30_179, 2_000)]
SECOND_LEADER = [*copied(HIDING, 29_946, 30_092, 3_000, broker=2)]
FOLLOWING = [*copied(AFTER, 30_180, 30_464, 4_000, epochs="20=30180, 21=30200, 22=30339")]
BY_BROKERS = [*FIRST_LEADER, *SECOND_LEADER, *FOLLOWING]


def hole_at(lines: list[str], offset: int, at_ms: int = LATER_MS) -> BrokerHole | None:
    return MetadataReplay(lines).broker_hole(WHERE, offset, at_ms)


@pytest.mark.parametrize("offset", [30_093, 30_179])
def test_offsets_that_a_shorter_copy_hid_are_a_hole_of_the_brokers(offset: int) -> None:
    assert hole_at(BY_BROKERS, offset) == HOLE


@pytest.mark.parametrize("offset", [29_558, 29_946, 30_092, 30_180, 30_465, -1])
def test_offsets_beside_the_hole_are_not_excused(offset: int) -> None:
    assert hole_at(BY_BROKERS, offset) is None


def test_hole_does_not_excuse_what_failed_before_it_opened() -> None:
    assert hole_at(BY_BROKERS, 30_093, at_ms=3_499) is None
    assert hole_at(BY_BROKERS, 30_093, at_ms=3_500) == HOLE


def test_hole_of_another_partition_is_not_excused() -> None:
    assert MetadataReplay(BY_BROKERS).broker_hole("orders-0", 30_093, LATER_MS) is None


NO_HOLES = {
    "a longer copy comes later": [*copied(HIDING, 29_946, 30_092, 1_000), *copied(HIDDEN, 29_946, 30_179, 2_000, broker=2)],
    "a third copy covers the offsets": [*BY_BROKERS, *copied(OURS, 30_093, 30_179, 5_000, broker=2)],
    "another epoch reads the offsets": [*BY_BROKERS, *copied(OURS, 30_093, 30_179, 5_000, epochs="21=30093")],
    "a compactor's copy hid them": [*FIRST_LEADER, *copied(OURS, 29_946, 30_092, 3_000, broker=COMPACTOR_BROKER_ID), *FOLLOWING],
    "a compactor deleted them": [*FIRST_LEADER, update(HIDDEN, "DELETE_SEGMENT_STARTED", 3_000, broker=COMPACTOR_BROKER_ID), *FOLLOWING],
}


@pytest.mark.parametrize("lines", NO_HOLES.values(), ids=NO_HOLES)
def test_what_is_no_hole_of_the_brokers(lines: list[str]) -> None:
    assert hole_at(lines, 30_093) is None


def test_offsets_that_no_broker_copied_are_no_hole_of_theirs() -> None:
    assert hole_at([*FIRST_LEADER, *copied(AFTER, 30_200, 30_464, 4_000)], 30_190) is None


@pytest.mark.parametrize("state", ["DELETE_SEGMENT_STARTED", "DELETE_SEGMENT_FINISHED"])
def test_hole_ends_when_the_hidden_segment_is_deleted(state: str) -> None:
    gone = [update(HIDDEN, "DELETE_SEGMENT_STARTED", 5_000), update(HIDDEN, state, 5_500)]
    assert hole_at([*BY_BROKERS, *gone], 30_093) is None


@pytest.mark.parametrize(("start", "end"), [(29_946, 30_179), (29_559, 30_092), (30_179, 30_464), (29_946, 29_946)])
def test_hole_of_brokers_is_not_excused_where_a_compactor_replaced_anything(start: int, end: int) -> None:
    begun, _ = copied(OURS, start, end, 5_000, broker=COMPACTOR_BROKER_ID)
    assert hole_at([*BY_BROKERS, begun], 30_093) is None


@pytest.mark.parametrize(("start", "end"), [(29_559, 29_945), (30_180, 30_464)])
def test_hole_of_brokers_is_excused_beside_what_a_compactor_replaced(start: int, end: int) -> None:
    assert hole_at([*BY_BROKERS, *copied(OURS, start, end, 5_000, broker=COMPACTOR_BROKER_ID)], 30_093) == HOLE


def test_hole_of_a_topic_that_was_created_again_is_not_excused() -> None:
    again = copied(OURS, 0, 99, 5_000, topic_id=OLDER_TOPIC_ID)
    assert hole_at([*again, *BY_BROKERS], 30_093, at_ms=4_999) == HOLE
    assert hole_at([*again, *BY_BROKERS], 30_093) is None


def test_passes_that_met_a_hole_of_brokers_are_counted_and_others_are_failures() -> None:
    findings = Findings()
    findings.out_of_range += [
        OutOfRange(WHERE, position, "Java: OffsetOutOfRangeException", "text", LATER_MS) for position in (30_093, 30_150)
    ]
    assert findings.judge_out_of_range(BY_BROKERS)
    assert (findings.holes, findings.errors) == ({str(HOLE): 2}, {})
    findings.out_of_range += [OutOfRange(WHERE, position, "Java: OffsetOutOfRangeException", "text", LATER_MS) for position in (30_093, -1)]
    assert not findings.judge_out_of_range(BY_BROKERS)
    assert (findings.holes, findings.errors) == ({str(HOLE): 3}, {"Java: OffsetOutOfRangeException": 1})
    assert not findings.judge_out_of_range(BY_BROKERS)


def test_record_that_a_pass_lacks_is_lost_even_where_brokers_made_a_hole() -> None:
    written, findings = WrittenPartition("aging", 0), Findings()
    written.history = PartitionHistory.of([(offset, SentRecord(b"key-%d" % offset, b"value", offset)) for offset in (30_092, 30_093)])
    client = OneAnswer(Pass(29_559, 30_465, [FoundRecord(30_092, written.history.records[30_092])]))
    assert read_and_judge(client, written, findings, client)
    findings.judge_out_of_range(BY_BROKERS)
    assert [": lost: offset 30093" in text for text in findings.violations] == [True]
    assert not findings.holes


def test_without_the_metadata_topic_nothing_is_excused() -> None:
    findings = Findings(out_of_range=[OutOfRange(WHERE, 30_093, "librdkafka: _AUTO_OFFSET_RESET", "text", LATER_MS)])
    assert not findings.judge_out_of_range([])
    assert findings.errors == {"librdkafka: _AUTO_OFFSET_RESET": 1}
