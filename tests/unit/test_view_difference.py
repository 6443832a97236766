"""Two points in the life of a partition, and two of Kafka's checkpoint files."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.config.times import format_iso_time
from compactor.errors import BadData, UsageError
from compactor.views.checkpoints import (
    CLEANER_OFFSETS,
    LEADER_EPOCHS,
    CheckpointEntryChange,
    KafkaCleanerOffset,
    compare_checkpoint_files,
    read_checkpoint_file,
)
from compactor.views.difference import CleanerOffsetChange, ControlLogHistory, compare_history_points
from tests.support.crafted import Crafted, kip_table, vector


@pytest.fixture
def crafted() -> Crafted:
    return kip_table()[0]


class TestPoints:
    def test_a_run_alone_is_before_and_after_it(self, crafted: Crafted) -> None:
        around = ControlLogHistory(crafted.log()).points_around_run("run-b")
        assert around is not None
        before, after = around
        assert (before.cleaner_offsets, after.cleaner_offsets) == (vector((0, 100)), vector((0, 100), (1, 155)))
        assert after.slot == before.slot + 1
        found = compare_history_points(before, after)
        assert found.cleaner_offsets == (CleanerOffsetChange(1, None, 155),)
        assert found.segments is not None
        assert [(change.change, change.id) for change in found.segments] == [
            ("removed", "in-100"), ("added", "run-b-out"), ("removed", "in-123")
        ]  # fmt: skip

    def test_slots_from_the_empty_log_on(self, crafted: Crafted) -> None:
        past = ControlLogHistory(crafted.log())
        assert past.find_point("0").cleaner_offsets == ()
        assert past.find_point(str(past.latest_point.slot)) == past.latest_point
        found = compare_history_points(past.find_point("0"), past.latest_point)
        assert found.cleaner_offsets == (CleanerOffsetChange(0, None, 100), CleanerOffsetChange(1, None, 155))
        assert found.fenced == 1
        assert found.leader == ("", "host-b:2 (epoch 1)")

    def test_times_in_milliseconds_and_in_words(self, crafted: Crafted) -> None:
        past = ControlLogHistory(crafted.log())
        start = crafted.clock.now_ms - 120_000
        between = start + 30_000
        assert past.find_point(str(between)).cleaner_offsets == vector((0, 100))
        assert past.find_point(format_iso_time(between)).slot == past.find_point(str(between)).slot
        assert past.find_point(str(start - 1)).slot == 0

    def test_after_a_run(self, crafted: Crafted) -> None:
        assert ControlLogHistory(crafted.log()).find_point("run-a").cleaner_offsets == vector((0, 100))

    @pytest.mark.parametrize("text", ["99", "yesterday", "run-z", "2026-13-45"])
    def test_what_is_no_point(self, crafted: Crafted, text: str) -> None:
        with pytest.raises(UsageError):
            ControlLogHistory(crafted.log()).find_point(text)


class TestAfterACut:
    @pytest.fixture
    def past(self, crafted: Crafted) -> ControlLogHistory:
        assert crafted.author("cutter").log.snapshot_and_cut(1)
        crafted.clock.now_ms += 60_000
        crafted.author("host-c:3").lead()
        return ControlLogHistory(crafted.log())

    def test_an_old_run_is_known_by_its_offsets(self, past: ControlLogHistory) -> None:
        around = past.points_around_run("run-b")
        assert around is not None
        found = compare_history_points(*around)
        assert found.cleaner_offsets == (CleanerOffsetChange(1, None, 155),)
        assert (found.segments, found.leader, found.fenced) == (None, None, None)

    def test_old_slots_and_times_are_refused_with_what_there_is(self, past: ControlLogHistory, crafted: Crafted) -> None:
        with pytest.raises(UsageError, match="holds slots"):
            past.find_point("2")
        with pytest.raises(UsageError, match="does not reach back"):
            past.find_point(str(crafted.clock.now_ms - 600_000))

    def test_what_came_after_it_is_compared_as_ever(self, past: ControlLogHistory) -> None:
        found = compare_history_points(past.find_point(str(past.latest_point.slot - 1)), past.latest_point)
        assert found.leader == ("host-b:2 (epoch 1)", "host-c:3 (epoch 2)")
        assert found.segments == ()


class TestKafkaFiles:
    @pytest.fixture
    def offsets(self, tmp_path: Path) -> Path:
        path = tmp_path / "cleaner-offset-checkpoint"
        path.write_text("0\n2\norders 1 1234\norders 0 99\n")
        return path

    @pytest.fixture
    def epochs(self, tmp_path: Path) -> Path:
        path = tmp_path / "leader-epoch-checkpoint"
        path.write_text("0\n2\n0 0\n5 1200\n")
        return path

    def test_they_are_told_apart_by_what_is_in_them(self, offsets: Path, epochs: Path, tmp_path: Path) -> None:
        found = read_checkpoint_file(offsets)
        assert (found.kind, found.offsets) == (
            CLEANER_OFFSETS,
            (KafkaCleanerOffset("orders", 0, 99), KafkaCleanerOffset("orders", 1, 1234)),
        )
        copy = tmp_path / "what-i-copied.txt"
        copy.write_text(epochs.read_text())
        assert read_checkpoint_file(copy).kind == LEADER_EPOCHS
        assert [(entry.epoch, entry.start_offset) for entry in read_checkpoint_file(copy).leader_epochs] == [(0, 0), (5, 1200)]

    def test_an_empty_one_is_what_its_name_says(self, tmp_path: Path) -> None:
        (tmp_path / LEADER_EPOCHS).write_text("0\n0\n")
        assert read_checkpoint_file(tmp_path / LEADER_EPOCHS).kind == LEADER_EPOCHS
        (tmp_path / CLEANER_OFFSETS).write_text("")
        assert read_checkpoint_file(tmp_path / CLEANER_OFFSETS).offsets == ()

    def test_what_changed(self, offsets: Path, tmp_path: Path) -> None:
        later = tmp_path / "later"
        later.write_text("0\n2\norders 1 2000\npayments 0 7\n")
        changes = compare_checkpoint_files(read_checkpoint_file(offsets), read_checkpoint_file(later))
        assert set(changes) == {
            CheckpointEntryChange("orders-0", 99, None),
            CheckpointEntryChange("orders-1", 1234, 2000),
            CheckpointEntryChange("payments-0", None, 7),
        }
        assert compare_checkpoint_files(read_checkpoint_file(offsets), read_checkpoint_file(offsets)) == ()

    def test_two_kinds_are_not_compared(self, offsets: Path, epochs: Path) -> None:
        with pytest.raises(UsageError):
            compare_checkpoint_files(read_checkpoint_file(offsets), read_checkpoint_file(epochs))

    @pytest.mark.parametrize("text", ["0\n1\norders 0 x\n", "0\n2\norders 0 1\n", "7\n1\norders 0 1\n", "0\n2\n5 1\n4 2\n"])
    def test_what_kafka_would_refuse(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "file"
        path.write_text(text)
        with pytest.raises(BadData):
            read_checkpoint_file(path)

    def test_neither_of_them(self, tmp_path: Path) -> None:
        path = tmp_path / "recovery-point"
        path.write_text("hello\n")
        with pytest.raises(UsageError):
            read_checkpoint_file(path)
        with pytest.raises(UsageError):
            read_checkpoint_file(tmp_path)
