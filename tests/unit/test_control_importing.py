"""Import registration: ids < upload < tiered, all or none, once."""

from __future__ import annotations

import pytest

from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset
from compactor.control.importing import record_tiered_segments
from compactor.control.leadership import reason_to_refuse_append
from compactor.control.records import LineageRecorded
from compactor.errors import BadData
from tests.simulation.play import Play, uploaded
from tests.support.lineages import record_lineage


def test_ids_are_in_the_log_before_the_first_upload(play: Play) -> None:
    import_id, segments = uploaded(play, play.process(), 0, 1)
    assert play.oracle.state.registrations[import_id].ids == tuple(segment.id for segment in segments)
    assert play.oracle.state.live == ()


def test_all_segments_of_a_record_become_readable_at_once_and_in_parts_where_asked(play: Play) -> None:
    actor = play.process()
    import_id, segments = uploaded(play, actor, 0, 1, 2)
    assert record_tiered_segments(actor.ports, actor.log, import_id, segments[:2]).live == tuple(segments[:2])
    assert import_id in actor.log.state.registrations
    assert record_tiered_segments(actor.ports, actor.log, import_id, segments[2:]).live == tuple(segments)
    assert actor.log.state.registrations == {}


def test_the_same_again_changes_nothing(play: Play) -> None:
    actor = play.process()
    import_id, segments = uploaded(play, actor, 0)
    play.lose("create partitions/t-0/log/")
    state = record_tiered_segments(actor.ports, actor.log, import_id, segments)
    assert record_tiered_segments(actor.ports, actor.log, import_id, segments) == state


def test_only_registered_ids(play: Play) -> None:
    actor = play.process()
    import_id, segments = uploaded(play, actor, 0)
    stranger = segments[0].model_copy(update={"id": actor.ports.new_id()})
    with pytest.raises(BadData, match="has not registered"):
        record_tiered_segments(actor.ports, actor.log, import_id, [stranger])


def test_the_slower_of_two_importers_is_told(play: Play) -> None:
    first, second = play.process("a"), play.process("b")
    mine, other = uploaded(play, first, 0), uploaded(play, second, 0, 1)
    record_tiered_segments(first.ports, first.log, *mine)
    with pytest.raises(BadData, match="the log ends at"):
        record_tiered_segments(second.ports, second.log, *other)
    assert play.oracle.state.live == tuple(mine[1])


def test_a_gap_is_refused(play: Play) -> None:
    actor = play.process()
    record_tiered_segments(actor.ports, actor.log, *uploaded(play, actor, 0))
    with pytest.raises(BadData, match="starts at"):
        record_tiered_segments(actor.ports, actor.log, *uploaded(play, actor, 2))


def test_lineage_is_taken_from_the_broker_or_from_the_segments(play: Play) -> None:
    actor = play.process()
    import_id, segments = uploaded(play, actor, 0)
    assert record_tiered_segments(actor.ports, actor.log, import_id, segments).lineage == (EpochEntry(LeaderEpoch(0), Offset(0)),)
    whole = (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(3), Offset(segments[0].end_offset + 1)))
    import_id, segments = uploaded(play, actor, 1)
    assert record_tiered_segments(actor.ports, actor.log, import_id, segments, whole).lineage == whole


def test_a_truncated_lineage_clamps_and_is_recorded_once(play: Play) -> None:
    play.importing(2)
    play.process("a").run()
    actor = play.process("b")
    before = actor.state()
    record_lineage(actor.log, before.lineage, 1)
    state = record_lineage(actor.log, before.lineage, 1)
    assert state.slot == before.slot + 1
    assert [entry.offset for entry in state.vector] == [1]
    assert state.live == before.live


def test_a_lineage_that_goes_back_is_refused(play: Play) -> None:
    actor = play.process()
    backwards = LineageRecorded(lineage=(EpochEntry(LeaderEpoch(3), Offset(0)), EpochEntry(LeaderEpoch(2), Offset(9))), end_offset=10)
    assert "ascend" in reason_to_refuse_append(actor.log, actor.state(), backwards)
