"""What brokers say, mirrored into a control log's state: the same difference in memory and as a record."""

from __future__ import annotations

from checkpoint.lineage import EpochEntry
from checkpoint.offsets import CleanerOffset
from compactor.adapters.brokers.cache import RemoteLogMetadataCache
from compactor.adapters.brokers.chain import lineage_from_segments, segment_read_ranges
from compactor.constants import CompactorEpoch, LeaderEpoch, Offset
from compactor.control.mirror import build_broker_changes_record, state_with_broker_view
from compactor.control.ordering import check_no_broker_gap, check_sources_stay
from compactor.control.records import VERSION, PartitionRecord, SegmentsMirrored
from compactor.control.state import PartitionState
from compactor.model.remote_log import BrokerView, MetadataRecord
from compactor.model.segment import SegmentState
from tests.metadata_events import PARTITION, finished, raw_id, segment, update

EMPTY = PartitionState(topic=PARTITION.topic, partition=PARTITION.partition)


def view(*events: MetadataRecord) -> BrokerView:
    cache = RemoteLogMetadataCache(PARTITION)
    for offset, event in enumerate(events):
        assert cache.apply_record(event, offset) is None
    lineage = lineage_from_segments(cache)
    return BrokerView(segment_read_ranges(cache, lineage), lineage, cache.applied)


def spans(state: PartitionState) -> list[tuple[int, int]]:
    return [(one.start_offset, one.end_offset) for one in state.live]


def record(body: SegmentsMirrored) -> PartitionRecord:
    return PartitionRecord(version=VERSION, log="orders-7", slot=1, incarnation="me", attempt=1, at_ms=0, body=body)


def test_what_brokers_tier_and_delete_is_followed() -> None:
    first = [*finished(1, 0, 9), *finished(2, 10, 19)]
    state = state_with_broker_view(EMPTY, view(*first))
    assert spans(state) == [(0, 9), (10, 19)]
    assert (state.lineage, state.lineage_end) == ((EpochEntry(LeaderEpoch(0), Offset(0)),), 20)
    assert (state.live[0].size_bytes, state.live[0].mtime_ms, state.live[0].files) == (100, 1000, {})
    assert build_broker_changes_record(state, view(*first)) is None
    later = state_with_broker_view(state, view(*first, *finished(3, 20, 29), update(1, SegmentState.DELETE_SEGMENT_STARTED)))
    assert spans(later) == [(10, 19), (20, 29)]


def test_what_the_log_knows_of_a_segment_stays() -> None:
    state = state_with_broker_view(EMPTY, view(*finished(1, 0, 9)))
    known = state.live[0].model_copy(update={"records": 7, "due_ms": 5})
    state = state.model_copy(update={"live": (known,)})
    assert state_with_broker_view(state, view(*finished(1, 0, 9), *finished(2, 10, 19))).live[0] == known


def test_an_overlap_ends_where_readers_leave_the_segment() -> None:
    state = state_with_broker_view(EMPTY, view(*finished(1, 0, 12), *finished(2, 10, 19)))
    assert spans(state) == [(0, 9), (10, 19)]
    without = state_with_broker_view(state, view(*finished(1, 0, 12), *finished(2, 10, 19), update(2, SegmentState.DELETE_SEGMENT_STARTED)))
    assert spans(without) == [(0, 12)]
    shadowed = state_with_broker_view(EMPTY, view(*finished(1, 5, 9), *finished(2, 0, 19)))
    assert spans(shadowed) == [(0, 19)]


def test_a_later_leader_truncates_what_an_earlier_one_wrote() -> None:
    lost: list[MetadataRecord] = [segment(1, 0, 9), update(1, SegmentState.COPY_SEGMENT_FINISHED), segment(2, 10, 19, {1: 10})]
    lost.append(update(2, SegmentState.COPY_SEGMENT_FINISHED))
    assert spans(state_with_broker_view(EMPTY, view(*lost))) == [(0, 9), (10, 19)]
    seen = view(*lost, segment(3, 5, 14, {2: 5}), update(3, SegmentState.COPY_SEGMENT_FINISHED))
    assert seen.lineage == (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(2), Offset(5)))
    cleaned = state_with_broker_view(EMPTY, view(*lost)).model_copy(update={"vector": (CleanerOffset(CompactorEpoch(4), Offset(18)),)})
    state = state_with_broker_view(cleaned, seen)
    assert spans(state) == [(0, 4), (5, 14)]
    assert [(entry.leader_epoch, entry.offset) for entry in state.vector] == [(4, 5)]


def test_a_record_must_leave_a_log_without_gaps() -> None:
    body = build_broker_changes_record(EMPTY, view(*finished(1, 0, 9), *finished(2, 15, 19)), leader_epoch=CompactorEpoch(3))
    assert body is not None
    assert "starts at 15" in check_no_broker_gap(EMPTY, record(body))
    good = build_broker_changes_record(EMPTY, view(*finished(1, 0, 9), *finished(2, 10, 19)), leader_epoch=CompactorEpoch(3))
    assert good is not None
    assert check_no_broker_gap(EMPTY, record(good)) == ""
    assert check_sources_stay(EMPTY, record(good)) == ""
    assert "is not live" in check_no_broker_gap(EMPTY, record(good.model_copy(update={"gone": ("x",)})))
    assert raw_id(1) == b"\0" * 15 + b"\1"
