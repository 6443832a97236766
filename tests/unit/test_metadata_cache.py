"""Replacements as brokers fold them: what is served at each step, which order leaves a hole, what is reported."""

from __future__ import annotations

import pytest

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers import chain
from compactor.adapters.brokers.cache import MAX_FINISHED_IDS, RemoteLogMetadataCache, SuspiciousRecordFindingKind
from compactor.constants import LeaderEpoch, Offset
from compactor.errors import BadData
from compactor.model.remote_log import MetadataRecord, PartitionDeleteState, RemotePartitionDeleteMetadataRecord
from compactor.model.segment import SegmentState
from tests.metadata_events import PARTITION, finished, raw_id, segment, update
from tests.support.broker_lookups import highest_offset, list_epoch, segment_for
from tests.support.lookup_holes import Hole, lookup_holes

S = SegmentState
ONE_EPOCH = (EpochEntry(LeaderEpoch(0), Offset(0)),)
TWO_EPOCHS = (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(1), Offset(150)))
FOUR = [*finished(1, 0, 99), *finished(2, 100, 199), *finished(3, 200, 299), *finished(4, 300, 399)]


def folded(*events: MetadataRecord) -> RemoteLogMetadataCache:
    cache = RemoteLogMetadataCache(PARTITION)
    add(cache, *events)
    return cache


def add(cache: RemoteLogMetadataCache, *events: MetadataRecord) -> None:
    for event in events:
        assert cache.apply_record(event, cache.applied + 1) is None


def served(cache: RemoteLogMetadataCache, lineage: tuple[EpochEntry, ...] = ONE_EPOCH) -> list[tuple[int, int, int]]:
    return [(int.from_bytes(link.segment.segment_id, "big"), link.first, link.last) for link in chain.segment_read_ranges(cache, lineage)]


def listed(cache: RemoteLogMetadataCache, epoch: int = 0) -> list[int]:
    return [int.from_bytes(one.segment_id, "big") for one in list_epoch(cache, epoch)]


def test_a_segment_is_read_from_copy_finished_to_delete_started() -> None:
    cache = folded(segment(1, 0, 99))
    assert (served(cache), listed(cache), highest_offset(cache, 0)) == ([], [1], None)
    add(cache, update(1, S.COPY_SEGMENT_FINISHED))
    assert (served(cache), highest_offset(cache, 0)) == ([(1, 0, 99)], 99)
    add(cache, update(1, S.DELETE_SEGMENT_STARTED))
    assert (served(cache), listed(cache)) == ([], [1])
    add(cache, update(1, S.DELETE_SEGMENT_FINISHED))
    assert (listed(cache), cache.list_segments(), highest_offset(cache, 0)) == ([], [], 99)


def test_one_in_the_middle_is_replaced_at_once_and_the_old_one_is_in_no_list_of_the_epoch() -> None:
    cache = folded(*FOUR, *finished(20, 100, 199))
    assert served(cache) == [(1, 0, 99), (20, 100, 199), (3, 200, 299), (4, 300, 399)]
    assert listed(cache) == [1, 20, 3, 4]
    assert raw_id(2) in {one.segment_id for one in cache.list_segments()}
    add(cache, update(2, S.DELETE_SEGMENT_STARTED))
    assert listed(cache) == [1, 20, 2, 3, 4]


@pytest.mark.parametrize(
    ("start", "end", "read", "in_epoch", "holes"),
    [
        pytest.param(300, 399, [(1, 0, 99), (2, 100, 199), (3, 200, 299), (10, 300, 399)], [1, 2, 3, 10, 4], [], id="the last of an epoch"),
        pytest.param(100, 399, [(1, 0, 99), (10, 100, 399)], [1, 10, 2, 3, 4], [], id="a group that reaches the end, at once"),
        pytest.param(
            120,
            150,
            [(1, 0, 99), (2, 100, 119), (10, 120, 150), (3, 200, 299), (4, 300, 399)],
            [1, 2, 10, 3, 4],
            [Hole(0, 151, 199)],
            id="a part of a segment hides what is behind it",
        ),
    ],
)
def test_what_takes_over(start: int, end: int, read: list[tuple[int, int, int]], in_epoch: list[int], holes: list[Hole]) -> None:
    cache = folded(*FOUR, *finished(10, start, end))
    assert (served(cache), listed(cache), list(lookup_holes(cache))) == (read, in_epoch, holes)


def test_a_group_takes_over_as_its_sources_are_deleted_in_ascending_order() -> None:
    cache = folded(*FOUR, *finished(10, 0, 299))
    assert served(cache) == [(10, 0, 99), (2, 100, 199), (3, 200, 299), (4, 300, 399)]
    for number, expected in ((1, 99), (2, 199), (3, 299)):
        add(cache, update(number, S.DELETE_SEGMENT_STARTED))
        assert served(cache)[0] == (10, 0, expected)
        assert list(lookup_holes(cache)) == []


def test_the_wrong_order_leaves_a_hole_until_the_right_one_follows() -> None:
    cache = folded(*FOUR, *finished(10, 0, 299), update(3, S.DELETE_SEGMENT_STARTED))
    assert list(lookup_holes(cache)) == [Hole(0, 200, 299)]
    assert chain.offset_gaps(chain.segment_read_ranges(cache, ONE_EPOCH)) == [(200, 299)]
    assert segment_for(cache, ONE_EPOCH, 250) is None
    add(cache, update(2, S.DELETE_SEGMENT_STARTED))
    assert list(lookup_holes(cache)) == []


def test_the_last_segment_deleted_leaves_a_hole_up_to_the_highest_offset() -> None:
    assert list(lookup_holes(folded(*FOUR, update(4, S.DELETE_SEGMENT_STARTED)))) == [Hole(0, 300, 399)]
    assert list(lookup_holes(folded(*FOUR, update(1, S.DELETE_SEGMENT_STARTED)))) == []


def test_a_segment_over_two_epochs_is_one_link() -> None:
    cache = folded(*finished(1, 0, 99), *finished(2, 100, 199, {0: 100, 1: 150}), *finished(3, 200, 299, {1: 200}))
    assert served(cache, TWO_EPOCHS) == [(1, 0, 99), (2, 100, 199), (3, 200, 299)]
    # A lineage that does not know the second epoch reads what is left of the first.
    assert served(cache, ONE_EPOCH) == [(1, 0, 99), (2, 100, 149)]
    group = folded(*FOUR, *finished(10, 0, 399, {0: 0, 2: 200}))
    assert served(
        group, (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(1), Offset(100)), EpochEntry(LeaderEpoch(2), Offset(200)))
    ) == [
        (10, 0, 99),
        (10, 200, 399),
    ]


def test_overlapping_segments_are_read_as_a_broker_reads_them() -> None:
    cache = folded(*finished(1, 0, 99), *finished(2, 40, 199))
    assert served(cache) == [(1, 0, 39), (2, 40, 199)]
    assert segment_for(cache, ONE_EPOCH, 100) == cache.segments[raw_id(2)]


def test_dropped_records_are_found() -> None:
    cache = folded(*FOUR)
    dropped = cache.apply_record(update(1, S.DELETE_SEGMENT_FINISHED), 8)
    assert dropped is not None
    assert (dropped.kind, dropped.segment_id, dropped.offset) == (SuspiciousRecordFindingKind.DROPPED_TRANSITION, raw_id(1), 8)
    assert "COPY_SEGMENT_FINISHED cannot become DELETE_SEGMENT_FINISHED" in str(dropped)
    unknown = cache.apply_record(update(77, S.COPY_SEGMENT_FINISHED), 9)
    assert unknown is not None
    assert (unknown.kind, "was never introduced" in unknown.detail) == (SuspiciousRecordFindingKind.UNKNOWN_SEGMENT, True)
    again = cache.apply_record(segment(1, 0, 99), 10)
    assert again is not None
    assert again.kind is SuspiciousRecordFindingKind.DROPPED_TRANSITION
    assert served(cache) == served(folded(*FOUR))


def test_a_finished_id_that_comes_back_is_found() -> None:
    cache = folded(*finished(1, 0, 99), update(1, S.DELETE_SEGMENT_STARTED), update(1, S.DELETE_SEGMENT_FINISHED))
    late = cache.apply_record(update(1, S.COPY_SEGMENT_FINISHED), 4)
    assert late is not None
    assert "is finished" in late.detail
    revived = cache.apply_record(segment(1, 0, 99), 5)
    assert revived is not None
    assert revived.kind is SuspiciousRecordFindingKind.REVIVED
    assert cache.apply_record(update(1, S.COPY_SEGMENT_FINISHED), 6) is None
    assert served(cache) == [(1, 0, 99)]


def test_memory_of_finished_ids_is_bounded() -> None:
    cache = RemoteLogMetadataCache(PARTITION)
    for number in range(MAX_FINISHED_IDS + 10):
        add(cache, segment(number, 0, 9), update(number, S.DELETE_SEGMENT_STARTED), update(number, S.DELETE_SEGMENT_FINISHED))
    assert len(cache.finished) == MAX_FINISHED_IDS
    assert raw_id(9) not in cache.finished
    assert raw_id(10) in cache.finished


def test_applying_again_changes_nothing() -> None:
    cache = folded(*FOUR, update(1, S.DELETE_SEGMENT_STARTED))
    before = served(cache), listed(cache), cache.applied
    for offset, event in enumerate((*FOUR, update(1, S.DELETE_SEGMENT_STARTED))):
        assert cache.apply_record(event, offset) is None
    assert (served(cache), listed(cache), cache.applied) == before


def test_a_copy_is_tried_on_without_harm() -> None:
    cache = folded(*FOUR)
    trial = cache.copy()
    add(trial, *finished(10, 0, 399))
    assert served(trial) == [(10, 0, 399)]
    assert served(cache) == served(folded(*FOUR))


def test_an_update_to_started_stops_brokers() -> None:
    cache = folded(segment(1, 0, 99))
    with pytest.raises(BadData, match="COPY_SEGMENT_STARTED"):
        cache.apply_record(update(1, S.COPY_SEGMENT_STARTED), 1)


def test_updates_replace_custom_metadata() -> None:
    cache = folded(segment(1, 0, 99)._replace(custom_metadata=b"\1"), update(1, S.COPY_SEGMENT_FINISHED))
    found = cache.segments[raw_id(1)]
    assert (found.custom_metadata, found.broker_id, found.event_timestamp_ms) == (None, 2, 6)


def test_records_of_another_partition_are_a_mistake() -> None:
    other = segment(1, 0, 99)._replace(partition=PARTITION._replace(partition=8))
    with pytest.raises(ValueError, match="orders-8"):
        folded(*FOUR).apply_record(other, 100)


def test_a_deleted_partition_is_empty() -> None:
    cache = folded(*FOUR)
    add(cache, RemotePartitionDeleteMetadataRecord(PARTITION, 1, 9, PartitionDeleteState.DELETE_PARTITION_STARTED))
    assert len(cache.list_segments()) == 4
    add(cache, RemotePartitionDeleteMetadataRecord(PARTITION, 1, 9, PartitionDeleteState.DELETE_PARTITION_FINISHED))
    assert (cache.list_segments(), served(cache)) == ([], [])


def test_an_exact_start_belongs_to_the_first_epoch_that_begins_there() -> None:
    lineage = (
        EpochEntry(LeaderEpoch(0), Offset(0)),
        EpochEntry(LeaderEpoch(1), Offset(10)),
        EpochEntry(LeaderEpoch(2), Offset(10)),
        EpochEntry(LeaderEpoch(3), Offset(20)),
    )
    assert [chain.epoch_for_offset(lineage, offset) for offset in (-1, 0, 9, 10, 11, 19, 20, 500)] == [None, 0, 0, 1, 2, 2, 3, 3]
    cache = folded(*finished(1, 0, 29, {0: 0, 1: 10, 2: 10, 3: 20}))
    for offset in range(40):
        one = segment_for(cache, lineage, offset)
        assert (one is not None) == any(link.first <= offset <= link.last for link in chain.segment_read_ranges(cache, lineage)), offset
