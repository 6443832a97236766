"""The checkpoint viewer: who led when, who published what, where a zombie was cut off and why."""

from __future__ import annotations

from compactor.control import records as r
from compactor.views.checkpoints import epoch_history_document, partition_checkpoint_document
from tests.support.crafted import Crafted, kip_table, vector


def test_the_table_of_the_kip() -> None:
    crafted, _, b = kip_table()
    log = crafted.log()
    found = partition_checkpoint_document(b.ports, log)
    assert found["cleaner_offsets"] == vector((0, 100), (1, 155))
    assert (found["first_dirty_offset"], found["end_offset"]) == (155, 154)
    (void,) = found["fenced"]
    assert (void["leader_epoch"], void["offset"], void["by"], void["type"]) == (0, 123, "host-a:1", "round_published")
    assert "host-b:2" in void["reason"]
    assert found["lease"] is not None
    assert (found["lease"].holder, found["lease"].epoch) == ("host-b:2", 1)
    assert [segment.id for segment in log.state.live] == ["run-a-out", "run-b-out"]


def test_the_tree_of_epochs() -> None:
    crafted, a, b = kip_table()
    found = epoch_history_document(b.ports, crafted.log())
    zero, one = found["epochs"]
    assert (zero["holder"], zero["ended"], zero["granted"], [run["run_id"] for run in zero["runs"]]) == (
        "host-a:1",
        "replaced",
        100,
        ["run-a"],
    )
    assert zero["cut_off"] is not None
    assert (zero["cut_off"]["leader_epoch"], zero["cut_off"]["holder"]) == (1, "host-b:2")
    assert zero["cut_off"]["slot"] == one["slot"]
    assert [void["offset"] for void in zero["fenced"]] == [123]
    assert (one["ended"], one["granted"], one["cut_off"], one["fenced"]) == ("leading", 155, None, [])
    assert [(run["first_dirty_offset"], run["next_dirty_offset"], run["sources"], run["outputs"]) for run in one["runs"]] == [
        (100, 155, 2, 1)
    ]
    assert a.epoch == 0


def test_who_released_was_not_cut_off() -> None:
    crafted = Crafted()
    (only,) = crafted.import_segments((0, 99))
    a = crafted.author("host-a:1")
    a.lead()
    a.publish("run-a", [only], (0, 100))
    a.release()
    crafted.author("host-b:2").lead()
    zero, one = epoch_history_document(a.ports, crafted.log())["epochs"]
    assert (zero["ended"], zero["cut_off"]) == ("released", None)
    assert zero["ended_ms"] == crafted.clock.now_ms
    assert (one["ended"], one["runs"], one["granted"]) == ("leading", [], None)


def test_a_round_stands_under_the_epoch_that_published_it_and_names_who_began() -> None:
    crafted = Crafted()
    (only,) = crafted.import_segments((0, 99))
    a, b = crafted.author("host-a:1"), crafted.author("host-b:2")
    a.lead()
    plan = a.announce("run-a", [only], 100)
    b.lead()
    b.finish(plan, vector((1, 100)))
    zero, one = epoch_history_document(a.ports, crafted.log())["epochs"]
    assert zero["runs"] == []
    assert [(run["run_id"], run["announced_by"], run["status"]) for run in one["runs"]] == [("run-a", "host-a:1", "published")]


def test_void_records_of_nobody_we_remember_are_shown_too() -> None:
    crafted = Crafted()
    crafted.import_segments((0, 99))
    stranger = crafted.author("host-x:9")
    stranger.append(r.LineageRecorded(lineage=(), end_offset=5))
    found = epoch_history_document(stranger.ports, crafted.log())
    assert found["epochs"] == []
    (void,) = found["unowned"]
    assert (void["leader_epoch"], void["offset"], void["type"]) == (-1, None, "lineage_recorded")


def test_an_empty_partition() -> None:
    crafted = Crafted()
    reader = crafted.author("reader")
    log = crafted.log()
    assert partition_checkpoint_document(reader.ports, log)["cleaner_offsets"] == ()
    assert partition_checkpoint_document(reader.ports, log)["lease"] is None
    assert epoch_history_document(reader.ports, log)["epochs"] == []
