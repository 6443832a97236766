"""*Log start raised*: what the record may remove, what it leaves, and what it keeps from coming back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from compactor.constants import CompactorEpoch, Offset
from compactor.control import fold, ordering, records
from compactor.control.log_start import build_log_start_record, check_expired_groups, segments_removable_below
from compactor.control.state import PartitionState, sum_batch_digests
from compactor.errors import BadData
from compactor.model.ids import TopicPartition
from compactor.model.segment import CountAndDigestSum, RemoteLogSegmentMetadata, SegmentFile, total_digest_sum
from tests.support.segments import make_segment

NAME = TopicPartition("orders", 0)
EPOCH = 0


def segment(name: str, start: int, end: int, content: CountAndDigestSum | None = None) -> RemoteLogSegmentMetadata:
    return make_segment(name, start, end, size=9, at_ms=-1, content=content, files={"log": SegmentFile(size=9, sha256="0" * 64)})


def folded(state: PartitionState, *bodies: Any, incarnation: str = "me") -> PartitionState:
    for body in bodies:
        slot = state.slot + 1
        record = records.PartitionRecord(
            version=records.VERSION, log=str(NAME), slot=slot, incarnation=incarnation, attempt=slot, at_ms=0, body=body
        )
        state = fold.apply_partition_record(state, record, ordering.find_rule_violation)
    return state


def tiered(number: int, *segments: RemoteLogSegmentMetadata) -> tuple[Any, Any]:
    registered = records.SegmentIdsRegistered(import_id=f"i{number}", ids=tuple(one.id for one in segments), holder="me")
    return registered, records.SegmentsTiered(import_id=f"i{number}", segments=segments)


def three() -> PartitionState:
    """Segments a (0..9), b (10..19), c (20..29), led by "me"."""
    parts = [segment(name, 10 * n, 10 * n + 9, CountAndDigestSum.from_digest_halves(n + 1, n, 7 * n)) for n, name in enumerate("abc")]
    acquired = records.LeadershipAcquired(leader_epoch=CompactorEpoch(EPOCH), holder="me", ttl_ms=1)
    return folded(PartitionState(topic="orders", partition=0), *tiered(0, *parts), acquired)


def rise(state: PartitionState, offset: int, **changes: Any) -> PartitionState:
    return folded(state, build_log_start_record(state, offset, CompactorEpoch(EPOCH), 5).model_copy(update=changes))


def ids(state: PartitionState) -> str:
    return "".join(one.id for one in state.live)


class TestRaising:
    @pytest.mark.parametrize(
        ("offset", "left", "start"), [(1, "abc", 1), (10, "bc", 10), (15, "bc", 15), (20, "c", 20), (25, "c", 25), (30, "c", 30)]
    )
    def test_segments_wholly_below_the_offset_leave_the_view(self, offset: int, left: str, start: int) -> None:
        state = rise(three(), offset)
        assert (ids(state), state.log_start, state.fenced) == (left, start, ())
        assert state.log_start_slot == state.slot
        assert "".join(one.id for group in state.waiting for one in group.segments) == "abc"[: 3 - len(left)]

    def test_removed_segments_wait_for_grace_and_nobody_can_go_back_to_them(self) -> None:
        (group,) = rise(three(), 20).waiting
        assert (group.undone, group.grace_ms, group.replaced_by) == (True, 5, {})
        assert "below offset 20" in group.why
        assert ordering.protected_segment_ids(rise(three(), 20)) >= {"a", "b", "c"}

    def test_the_newest_segment_stays_as_the_anchor_and_goes_once_another_one_has_arrived(self) -> None:
        state = rise(three(), 30)
        assert (ids(state), state.end_offset, state.log_start) == ("c", 29, 30)
        assert "starts at 30 already" in rise(state, 30).fenced[-1].reason
        state = folded(state, *tiered(1, segment("d", 30, 39)))
        assert ids(state) == "cd"
        state = rise(state, 30)
        assert (ids(state), state.log_start, state.fenced) == ("d", 30, ())

    def test_the_record_subtracts_what_it_removes(self) -> None:
        state = three()
        body = build_log_start_record(state, 20, CompactorEpoch(EPOCH), 5)
        assert None not in (body.removed, body.content)
        assert total_digest_sum(part for part in (body.removed, body.content) if part) == sum_batch_digests(state.live)
        assert sum_batch_digests(rise(state, 20).live) == body.content
        assert "other" in rise(state, 20, removed=body.content).fenced[-1].reason
        assert "other" in rise(state, 20, content=None).fenced[-1].reason

    @pytest.mark.parametrize("offset", [-1, 0, 31])
    def test_an_offset_outside_the_log_does_not_count(self, offset: int) -> None:
        assert rise(three(), offset).log_start_offset is None

    def test_the_log_start_never_falls(self) -> None:
        state = rise(three(), 15)
        assert rise(state, 14).log_start == 15
        assert "lies between" in rise(state, 14).fenced[-1].reason.replace("does not lie", "lies")
        assert rise(state, 14, ids=("b",)).log_start == 15

    @pytest.mark.parametrize("names", [(), ("a",), ("b",), ("a", "b", "c"), ("b", "a"), ("a", "b", "b"), ("x",)])
    def test_other_ids_than_those_below_the_offset_do_not_count(self, names: tuple[str, ...]) -> None:
        state = rise(three(), 20, ids=names)
        assert (ids(state), state.log_start) == ("abc", 0)
        assert state.fenced

    def test_the_newest_segment_is_never_removed(self) -> None:
        assert segments_removable_below(three().live, 30) == three().live[:2]
        assert ids(rise(three(), 30, ids=("a", "b", "c"))) == "abc"

    def test_only_the_leader_raises_it(self) -> None:
        state = three()
        assert folded(state, build_log_start_record(state, 20, CompactorEpoch(EPOCH + 1), 5)).live == state.live
        assert folded(state, build_log_start_record(state, 20, CompactorEpoch(EPOCH), 5), incarnation="somebody").live == state.live

    def test_an_empty_partition_has_no_log_start_to_raise(self) -> None:
        empty = folded(
            PartitionState(topic="orders", partition=0), records.LeadershipAcquired(leader_epoch=CompactorEpoch(0), holder="me", ttl_ms=1)
        )
        assert rise(empty, 0).log_start_offset is None


class TestWhatItKeepsOut:
    def test_what_lies_before_the_log_is_not_added_again(self) -> None:
        parts = [segment("b", 10, 19), segment("c", 20, 29)]
        acquired = records.LeadershipAcquired(leader_epoch=CompactorEpoch(EPOCH), holder="me", ttl_ms=1)
        before = records.SegmentsPrepended(import_id="older", segments=(segment("z", 0, 9),))
        # Registered while nothing was raised: the record of the segments decides, not the registration.
        registered = records.SegmentIdsRegistered(import_id="older", ids=("z",), holder="me")
        state = folded(PartitionState(topic="orders", partition=0), *tiered(0, *parts), acquired, registered)
        assert ids(folded(state, before)) == "zbc"
        state = rise(state, 11)
        assert ids(folded(state, before)) == "bc"
        assert "raised to 11" in folded(state, before).fenced[-1].reason

    @pytest.mark.parametrize(("offset", "counts"), [(15, False), (16, True)])
    def test_a_truncation_at_or_below_it_does_not_count(self, offset: int, counts: bool) -> None:
        head = segment("h", 10, offset - 1)
        registered = records.SegmentIdsRegistered(import_id="cut", ids=("h",), holder="me")
        cut = records.TailTruncated(cut_id="cut", offset=Offset(offset), voided=("b", "c"), head=head)
        state = folded(rise(three(), 15), registered, cut)
        assert ids(state) == ("h" if counts else "bc")
        assert state.log_start == 15

    def test_deleting_the_partition_clears_it(self) -> None:
        state = folded(rise(three(), 15), records.PartitionDeleted(leader_epoch=CompactorEpoch(EPOCH)))
        assert (state.log_start_offset, state.log_start_slot, state.log_start) == (None, 0, 0)

    def test_what_is_below_it_counts_as_clean(self) -> None:
        assert three().first_dirty_offset == 0
        assert rise(three(), 25).first_dirty_offset == 25


class TestImports:
    @pytest.mark.parametrize(("log_start", "counts"), [(-1, False), (0, True), (15, True), (20, True), (21, False)])
    def test_a_first_import_sets_it_within_its_segments_or_right_after_them(self, log_start: int, counts: bool) -> None:
        registered, tiered_ = tiered(0, segment("a", 0, 9), segment("b", 10, 19))
        state = folded(PartitionState(topic="orders", partition=0), registered, tiered_.model_copy(update={"log_start_offset": log_start}))
        assert (ids(state), state.log_start_offset) == (("ab", log_start) if counts else ("", None))

    def test_a_later_import_does_not_set_it(self) -> None:
        registered, tiered_ = tiered(1, segment("d", 30, 39))
        for before in (three(), rise(three(), 15)):
            state = folded(before, registered, tiered_.model_copy(update={"log_start_offset": 35}))
            assert (ids(state), state.log_start_offset) == (ids(before), before.log_start_offset)


class TestBrokers:
    """What brokers have reported, and which groups of a round count as expired by it."""

    def seen(self, state: PartitionState, offset: int, *, incarnation: str = "me") -> PartitionState:
        return folded(state, records.BrokerLogStartSeen(leader_epoch=CompactorEpoch(EPOCH), offset=Offset(offset)), incarnation=incarnation)

    def test_the_highest_log_start_that_brokers_have_reported_counts(self) -> None:
        state = self.seen(three(), 15)
        assert state.broker_log_start == 15
        for offset in (14, 15):
            assert self.seen(state, offset).broker_log_start == 15
            assert "reported the log start 15 already" in self.seen(state, offset).fenced[-1].reason
        assert self.seen(state, 16).broker_log_start == 16

    def test_only_the_leader_records_what_brokers_have_reported(self) -> None:
        assert self.seen(three(), 15, incarnation="somebody").broker_log_start == 0

    @pytest.mark.parametrize(
        ("expired", "cut_off", "problem"),
        [
            ((0,), (), ""),
            ((0,), (1,), ""),
            ((1,), (), "group 1 does not lie below the log start 10"),
            ((0,), (0,), "both cut off and expired"),
        ],
    )
    def test_groups_expire_only_wholly_below_that_log_start(self, expired: tuple[int, ...], cut_off: tuple[int, ...], problem: str) -> None:
        tasks = tuple(SimpleNamespace(group=group, end_offset=10 * group + 9) for group in (0, 1))
        state: Any = SimpleNamespace(broker_log_start=10, intent=SimpleNamespace(plan=SimpleNamespace(tasks=tasks)))
        record: Any = SimpleNamespace(body=SimpleNamespace(expired=expired, cut_off=cut_off))
        assert problem in check_expired_groups(state, record)
        assert bool(problem) == bool(check_expired_groups(state, record))


def test_programs_that_cannot_raise_it_refuse_record_and_snapshot_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    state = rise(three(), 15)
    body = build_log_start_record(three(), 15, CompactorEpoch(EPOCH), None)
    record = records.PartitionRecord(version=records.VERSION, log="x", slot=1, incarnation="me", attempt=1, at_ms=0, body=body)
    sealed = records.append_checksum(record.model_dump_json().encode())
    assert records.decode_checksummed_json(records.PartitionRecord, sealed, "x").body == body
    assert PartitionState.model_validate_json(state.model_dump_json()) == state
    assert "log_start" not in three().model_dump_json()
    unknown = records.append_checksum(record.model_dump_json().replace("log_start_raised", "log_start_turned").encode())
    with pytest.raises(BadData, match="log_start_turned"):
        records.decode_checksummed_json(records.PartitionRecord, unknown, "x")
    monkeypatch.setattr(records, "VERSION", records.VERSION - 1)
    with pytest.raises(BadData, match="format version"):
        records.decode_checksummed_json(records.PartitionRecord, unknown, "x")
