"""Truncations, deletions and segments before the beginning: what the records do, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from checkpoint.lineage import EpochEntry, first_contradicting_offset, restore_truncated_front, truncate_lineage_at
from checkpoint.offsets import first_dirty_offset_in
from compactor.constants import LeaderEpoch, Offset
from compactor.control import ordering
from compactor.control.fold import apply_partition_record
from compactor.control.importing import record_prepended_segments, record_tail_truncation, record_tiered_segments, register_import
from compactor.control.ports import ObjectRetention
from compactor.control.publication import delete_partition, undo_round
from compactor.control.records import LastImportedBatch, SegmentsPrepended, TailTruncated
from compactor.errors import BadData, Fenced, UsageError
from compactor.features.imports.staged_files import SegmentAddition, add_segments_once
from tests.simulation.actors import LEASE, SymbolicIncoming
from tests.simulation.play import Actor, Play, playing, uploaded
from tests.simulation.symbolic import NAME, describe, encode, upload
from tests.simulation.world import GRACE_MS, UNDO_WINDOW_MS

ZERO, ONE, TWO = (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(1), Offset(40)), EpochEntry(LeaderEpoch(2), Offset(80)))


@pytest.fixture
def play() -> Iterator[Play]:
    with playing(6) as made:
        yield made


def truncated_at(play: Play, actor: Actor, offset: int) -> TailTruncated:
    """The record that takes out what the tier has from there on, with what is left of the segment in the middle."""
    voided = [segment for segment in actor.state().live if segment.end_offset >= offset]
    first = voided[0]
    head = None
    cut_id = actor.ports.new_id()
    if first.start_offset < offset:
        data = encode(row for row in play.oracle.contents[first.id] if row[0] < offset)
        head = describe(actor.ports.new_id(), first.start_offset, offset - 1, data, first.leader_epochs)
        register_import(actor.ports, actor.log, cut_id, [head.id])
        upload(actor.ports, head, data)
    lost = first_dirty_offset_in(actor.state().vector) > offset
    return TailTruncated(cut_id=cut_id, offset=Offset(offset), voided=tuple(segment.id for segment in voided), head=head, accept_loss=lost)


class TestLineages:
    def test_retention_cuts_a_checkpoint_and_nothing_is_forgotten(self) -> None:
        assert restore_truncated_front((ZERO, ONE), (EpochEntry(LeaderEpoch(1), Offset(60)), TWO)) == (ZERO, ONE, TWO)
        assert restore_truncated_front((ZERO, ONE), (TWO,)) == (ZERO, ONE, TWO)
        assert restore_truncated_front((), (ONE,)) == (ONE,)
        assert restore_truncated_front((ONE,), ()) == (ONE,)
        assert restore_truncated_front((ONE,), (ZERO, ONE, TWO)) == (ZERO, ONE, TWO)

    @pytest.mark.parametrize(
        ("given", "end", "parted"),
        [
            ((ZERO, ONE), 100, None),
            ((EpochEntry(LeaderEpoch(1), Offset(70)),), 100, None),  # cut by retention
            ((ZERO, ONE), 60, None),  # an older copy
            ((ZERO,), 40, None),
            ((ZERO, ONE, EpochEntry(LeaderEpoch(3), Offset(100))), 130, None),
            ((ZERO, ONE, EpochEntry(LeaderEpoch(3), Offset(90))), 130, 90),
            ((ZERO, ONE, EpochEntry(LeaderEpoch(3), Offset(90))), 90, 90),  # the new leader has written nothing yet
            ((ZERO, EpochEntry(LeaderEpoch(2), Offset(30))), 100, 30),
            ((ZERO,), 100, 40),  # a replica that never heard of epoch 1
            ((), 100, None),
        ],
    )
    def test_who_disowns_what(self, given: tuple[EpochEntry, ...], end: int, parted: int | None) -> None:
        assert first_contradicting_offset((ZERO, ONE), 100, given, end) == parted

    def test_an_epoch_that_is_known_to_begin_after_the_end(self) -> None:
        known = (ZERO, EpochEntry(LeaderEpoch(2), Offset(200)))
        assert first_contradicting_offset(known, 180, (ZERO,), 200) is None  # an older copy
        assert first_contradicting_offset(known, 180, (ZERO,), 230) == 200
        assert first_contradicting_offset(known, 180, (ZERO, EpochEntry(LeaderEpoch(3), Offset(200))), 230) is None

    def test_cut(self) -> None:
        assert truncate_lineage_at((ZERO, ONE, TWO), 80) == (ZERO, ONE)


class TestTruncation:
    @pytest.mark.parametrize("inside", [False, True])
    def test_the_discarded_branch_leaves_the_view_and_waits(self, inside: bool) -> None:
        with playing(6, seed=3) as play:
            play.importing(5)
            actor = play.process("a")
            before = actor.state()
            offset = before.live[3].start_offset if not inside else next(s for s in before.live if s.end_offset > s.start_offset).end_offset
            body = truncated_at(play, actor, offset)
            play.oracle.rows = [row for row in play.oracle.rows if row[0] < offset]
            state = record_tail_truncation(actor.ports, actor.log, body)
            assert state.end_offset == offset - 1
            assert (body.head is not None) == inside
            assert {segment.id for segment in state.waiting[-1].segments} == set(body.voided)
            assert record_tail_truncation(actor.ports, actor.log, body) == state
            play.pass_time(GRACE_MS * 2 + UNDO_WINDOW_MS)
            assert len(play.process("b").retire().deleted) == len(body.voided)

    def test_the_grace_of_whoever_truncates_counts_whoever_retires(self, play: Play) -> None:
        play.importing(5)
        actor = play.process("a")
        careful = replace(actor.ports, retention=ObjectRetention(grace_ms=10 * GRACE_MS))
        offset = actor.state().live[3].start_offset
        body = truncated_at(play, actor, offset)
        play.oracle.rows = [row for row in play.oracle.rows if row[0] < offset]
        state = record_tail_truncation(careful, actor.log, body)
        assert state.waiting[-1].grace_ms == 10 * GRACE_MS
        play.pass_time(5 * GRACE_MS)
        assert play.process("b").retire().deleted == ()
        play.pass_time(6 * GRACE_MS)
        assert len(play.process("b").retire().deleted) == len(body.voided)

    def test_what_was_clean_is_dirty_again_and_what_was_replaced_can_be_retired(self, play: Play) -> None:
        play.importing(5)
        play.process("a").run()
        actor = play.process("b")
        before = actor.state()
        offset = before.live[-1].start_offset + 1
        body = truncated_at(play, actor, offset)
        play.oracle.rows = [row for s in before.live for row in play.oracle.contents[s.id] if row[0] < offset]
        state = record_tail_truncation(actor.ports, actor.log, body)
        assert [entry.offset for entry in state.vector] == [offset]
        assert {entry.offset for group in state.waiting for entry in group.vector} == {offset}
        run_id = state.runs[-1].run_id
        with pytest.raises(UsageError, match="built on"):
            undo_round(actor.ports, actor.log, LEASE, run_id)
        play.pass_time(GRACE_MS * 2 + UNDO_WINDOW_MS)
        play.process("c").retire()
        assert play.oracle.state.waiting == ()

    def test_one_record_takes_the_new_branch_in_and_voids_what_was_open(self, play: Play) -> None:
        play.importing(3)
        actor = play.process("a")
        before = actor.state()
        overtaken = uploaded(play, actor, 4)
        offset = before.live[-1].start_offset
        cut_id, (new,) = uploaded(play, actor, 2)
        tail = (LastImportedBatch(base_offset=new.end_offset, last_offset=new.end_offset, digest="d"),)
        lineage = (
            EpochEntry(LeaderEpoch(0), Offset(0)),
            EpochEntry(LeaderEpoch(1), offset),
            EpochEntry(LeaderEpoch(2), Offset(new.end_offset + 5)),
        )
        voided = (before.live[-1].id,)
        body = TailTruncated(cut_id=cut_id, offset=offset, voided=voided, segments=(new,), lineage=lineage, tail=tail)
        for broken, cause in (
            (body.model_copy(update={"segments": ()}), "has registered"),
            (body.model_copy(update={"cut_id": "another"}), "has registered"),
            (body.model_copy(update={"offset": offset - 1}), "are others"),
            (body.model_copy(update={"segments": (new.model_copy(update={"start_offset": offset + 1}),)}), "the log is cut at"),
        ):
            assert cause in ordering.find_rule_violation(actor.state(), actor.log.build_record_to_append(broken))
        state = record_tail_truncation(actor.ports, actor.log, body)
        assert state.live == (*before.live[:-1], new)
        kept = tuple(batch for batch in before.tail if batch.last_offset < offset)
        assert (state.lineage, state.lineage_end, state.tail) == (lineage, new.end_offset + 1, (*kept, *tail))
        assert [segment.id for segment in state.waiting[-1].segments] == list(voided)
        assert state.registrations == {}
        assert {entry.import_id: bool(entry.voided) for entry in state.closed_imports[-2:]} == {cut_id: False, overtaken[0]: True}
        assert set(state.voided) == {segment.id for segment in overtaken[1]}
        with pytest.raises(Fenced, match="truncated at offset"):
            record_tiered_segments(actor.ports, actor.log, *overtaken)
        assert record_tail_truncation(actor.ports, actor.log, body) == state

    def test_an_import_whose_segments_were_cut_is_made_again(self, play: Play) -> None:
        """Its id is made of its content, and it was complete once."""
        play.importing(3)
        actor = play.process("a")
        last = actor.state().live[-1]
        again = [SymbolicIncoming(play.actors, actor.ports, play.broker[3])]
        arrival = SegmentAddition((EpochEntry(LeaderEpoch(0), Offset(0)),))
        assert add_segments_once(actor.ports, actor.log, again, arrival)
        whole = actor.state()
        record_tail_truncation(actor.ports, actor.log, truncated_at(play, actor, last.end_offset + 1))
        assert actor.state().end_offset == last.end_offset
        assert add_segments_once(actor.ports, actor.log, again, arrival)
        assert actor.state().end_offset == whole.end_offset
        assert not add_segments_once(actor.ports, actor.log, again, arrival)

    def test_a_cut_below_the_cleaner_offset_needs_an_accepted_loss(self, play: Play) -> None:
        play.importing(5)
        play.process("a").run()
        actor = play.process("b")
        body = truncated_at(play, actor, actor.state().live[-1].start_offset + 1)
        assert body.accept_loss
        careless = actor.log.build_record_to_append(body.model_copy(update={"accept_loss": False}))
        assert "was compacted up to" in ordering.find_rule_violation(actor.state(), careless)
        earlier = careless.model_copy(update={"version": 4})
        assert ordering.find_rule_violation(actor.state(), earlier) == ""

    def test_a_record_of_an_earlier_version_leaves_open_imports_open(self, play: Play) -> None:
        """What was tiered after it counts, as it did for the program that wrote it."""
        play.importing(3)
        actor = play.process("a")
        open_import = uploaded(play, actor, 4)
        before = actor.state()
        body = truncated_at(play, actor, before.live[-1].start_offset)
        record = actor.log.build_record_to_append(body).model_copy(update={"version": 4})
        assert set(apply_partition_record(actor.state(), record, ordering.find_rule_violation).registrations) == {open_import[0]}
        assert (
            apply_partition_record(actor.state(), actor.log.build_record_to_append(body), ordering.find_rule_violation).registrations == {}
        )

    def test_a_program_of_an_earlier_version_refuses_every_truncation_by_name(self) -> None:
        """It would keep imports open that are void, and end the log where new segments follow."""
        assert "accept_loss" in TailTruncated(cut_id="c", offset=Offset(1), voided=("a",)).model_dump()

    def test_a_round_that_was_faster_is_noticed(self, play: Play) -> None:
        play.importing(4)
        actor = play.process("a")
        body = truncated_at(play, actor, actor.state().live[-1].start_offset)
        play.process("b").run()
        with pytest.raises(BadData, match="are others"):
            record_tail_truncation(actor.ports, actor.log, body)

    def test_a_lineage_that_disowns_the_tail_is_refused(self, play: Play) -> None:
        actor = play.process()
        first, second = uploaded(play, actor, 0), None
        end = record_tiered_segments(actor.ports, actor.log, *first, (EpochEntry(LeaderEpoch(0), Offset(0)),)).end_offset
        second = uploaded(play, actor, 1)
        tail = (LastImportedBatch(base_offset=Offset(end + 1), last_offset=Offset(end + 1), digest="d"),)
        with pytest.raises(BadData, match=f"offset {end} to another"):
            record_tiered_segments(
                actor.ports, actor.log, *second, (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(1), Offset(end))), tail
            )
        state = record_tiered_segments(
            actor.ports, actor.log, *second, (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(1), Offset(end + 1))), tail
        )
        assert state.tail == tail


class TestPrepending:
    def test_before_the_beginning_while_nothing_is_compacted(self, play: Play) -> None:
        actor = play.process()
        later = uploaded(play, actor, 2, 3)
        play.oracle.rows = [row for row in play.oracle.rows if row[0] >= later[1][0].start_offset]
        record_tiered_segments(actor.ports, actor.log, *later)
        earlier = uploaded(play, actor, 0, 1)
        play.oracle.rows = [row for segment in play.broker for row in segment]
        assert record_prepended_segments(actor.ports, actor.log, *earlier).live == (*earlier[1], *later[1])

    def test_a_round_gathers_anew_after_segments_were_prepended_since_its_pass_one(self, play: Play) -> None:
        actor = play.process("importer")
        later = uploaded(play, actor, 2, 3)
        play.oracle.rows = [row for row in play.oracle.rows if row[0] >= later[1][0].start_offset]
        slot = record_tiered_segments(actor.ports, actor.log, *later).slot
        earlier = uploaded(play, actor, 0, 1)

        def prepend_earlier() -> None:
            play.oracle.rows = [row for segment in play.broker for row in segment]
            record_prepended_segments(actor.ports, actor.log, *earlier)

        first = play.process("b")
        # Leadership is the first record of the round, the announced plan the second.
        play.before(f"create partitions/{NAME}/log/{slot + 3:020d}", prepend_earlier)
        result = first.run()
        assert result.status == "cleaned"
        assert "before the log's beginning" in result.undone
        assert result.plan is not None
        assert result.plan.source_segment_ids[0] == earlier[1][0].id

    def test_not_with_a_gap_and_not_behind_a_compaction(self, play: Play) -> None:
        actor = play.process()
        later = uploaded(play, actor, 2, 3)
        play.oracle.rows = [row for row in play.oracle.rows if row[0] >= later[1][0].start_offset]
        record_tiered_segments(actor.ports, actor.log, *later)
        with pytest.raises(BadData, match="the log starts at"):
            record_prepended_segments(actor.ports, actor.log, *uploaded(play, actor, 0))
        fitting = uploaded(play, actor, 0, 1)
        record = actor.log.build_record_to_append(SegmentsPrepended(import_id=fitting[0], segments=tuple(fitting[1])))
        assert ordering.find_rule_violation(actor.state(), record) == ""
        assert play.process("b").run().status == "cleaned"
        assert "was compacted up to" in ordering.find_rule_violation(actor.state(), record)
        with pytest.raises(BadData, match="was compacted up to"):
            record_prepended_segments(actor.ports, actor.log, *fitting)


class TestDeleting:
    def test_everything_waits_and_the_name_is_free(self, play: Play) -> None:
        play.importing(3)
        play.process("a").run()
        actor = play.process("b")
        open_import = uploaded(play, actor, 3)
        before, state = delete_partition(actor.ports, actor.log, LEASE)
        assert before.live
        assert (state.live, state.vector, state.lineage, state.registrations) == ((), (), (), {})
        assert state.deleted_slot
        with pytest.raises(Fenced, match="was deleted"):
            record_tiered_segments(actor.ports, actor.log, *open_import)
        with pytest.raises(UsageError, match="is empty"):
            delete_partition(actor.ports, actor.log, LEASE)
        play.pass_time(GRACE_MS * 2)
        play.process("c").retire()
        assert play.world.data.objects == {}
        anew = uploaded(play, actor, 0, 1)
        state = record_tiered_segments(actor.ports, actor.log, *anew)
        assert (state.live, state.deleted_slot) == (tuple(anew[1]), 0)

    def test_an_open_round_is_given_up(self, play: Play) -> None:
        play.importing(3)
        play.die("create t-0/")
        with pytest.raises(BaseException):  # noqa: B017, PT011 - the process dies in the middle of its round
            play.process("a").run()
        play.pass_time(10 * LEASE.ttl_ms)
        actor = play.process("b")
        _, state = delete_partition(actor.ports, actor.log, LEASE)
        assert state.intent is None
        assert state.runs[-1].status == "undone"
        play.pass_time(GRACE_MS * 2 + UNDO_WINDOW_MS)
        play.process("c").retire()
        assert play.world.data.objects == {}
