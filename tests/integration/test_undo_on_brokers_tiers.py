"""The way back on tiers that brokers write: a round of its own that copies what was replaced under new ids."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.lineage import EpochEntry
from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.adapters.brokers.chain import lineage_from_segments, offset_gaps, segment_read_ranges
from compactor.constants import LeaderEpoch, Offset
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError, Unavailable, UsageError
from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord, RemoteLogSegmentMetadataUpdateRecord, uuid_bytes
from compactor.model.segment import SegmentState
from compactor.upkeep.export import export_partition
from compactor.upkeep.orphans import undo_by_copies
from compactor.upkeep.retire import retire_partition
from compactor.views.overview import undo_refusal
from tests.builders import LogBuilder, read
from tests.simulation.memory_topic import Loss, MemoryMetadataTopic
from tests.support.deployment import GrowingLog
from tests.support.memory_brokers import MemoryBrokers

NAME = TopicPartition("orders", 0)
NOW = 10_000_000_000_000


class Undoing:
    """One partition that was compacted once. ``log_dir``: its log; None for one of random records."""

    def __init__(self, folder: Path, log_dir: Path | None = None, segment_bytes: int = 12_000) -> None:
        cleaner = {"segment_bytes": segment_bytes, "min_cleanable_dirty_ratio": 0.0}
        self.brokers = MemoryBrokers(folder / "brokers", {"cleaner": cleaner, "publish": {"grace_ms": 0}, "lease": {"ttl_ms": 300}})
        self.brokers.topic("orders")
        self.folder = folder
        self.log = GrowingLog(*NAME, folder, random.Random(4))
        self.brokers.tier(NAME, log_dir or self.log.write_part(8))
        self.before = self.view()
        self.opened = self.brokers.opened()
        assert compact(self.opened, NAME, NOW).status == "cleaned"
        self.run_id = self.state().published[-1]

    def view(self) -> list[tuple[int, bytes]]:
        """The batches that readers find."""
        out = self.folder / f"out-{random.randrange(1 << 40)}"
        export_partition(self.brokers.opened(), NAME, out)
        return [(base, batch.raw) for base, batches in sorted(read(out).items()) for batch in batches]

    def batches(self) -> list[bytes]:
        return [raw for _, raw in self.view()]

    def state(self) -> PartitionState:
        return self.opened.open_partition_log(NAME, caller_runs_round=True).refresh()

    def undo(self, opened: Tier | None = None) -> PartitionState:
        tier = opened or self.brokers.opened()
        return undo_by_copies(tier, tier.open_partition_log(NAME, caller_runs_round=True), self.run_id)

    def retire(self) -> None:
        tier = self.brokers.opened()
        retire_partition(tier.ports, tier.open_partition_log(NAME, caller_runs_round=True), tier.lease, tier.retention)

    def assert_whole(self) -> None:
        opened = self.brokers.opened()
        folded = opened.broker_metadata.partition_metadata_from_records(NAME).cache
        links = segment_read_ranges(folded, lineage_from_segments(folded))
        assert offset_gaps(links) == []
        live = {segment.id for segment in opened.open_partition_log(NAME).refresh().live}
        assert {link.segment.id for link in links} == live
        for segment in opened.open_partition_log(NAME).refresh().live:
            assert opened.ports.layout.stored_segment_problem(NAME, segment) == ""


@pytest.fixture
def undoing(tmp_path: Path) -> Undoing:
    return Undoing(tmp_path)


def after(count: int) -> Callable[[], Loss]:
    left = [count]

    def fate() -> Loss:
        left[0] -= 1
        return Loss(before=left[0] < 0)

    return fate


def test_readers_get_what_they_had_before_the_round_and_the_offsets_go_back(undoing: Undoing) -> None:
    compacted = undoing.batches()
    whole = [raw for _, raw in undoing.before]
    assert compacted != whole
    assert undo_refusal(undoing.state(), undoing.run_id) == ""
    state = undoing.undo()
    assert undoing.batches() == whole
    assert (state.first_dirty_offset, state.published, state.intent) == (0, (), None)
    assert [(run.status, bool(run.published_slot)) for run in state.runs] == [("reverted", True), ("restored", True)]
    undoing.assert_whole()
    undoing.retire()
    undoing.assert_whole()
    assert undoing.batches() == whole
    opened = undoing.brokers.opened()
    live = {segment.id for segment in opened.open_partition_log(NAME).refresh().live}
    assert {path.name[21:43] for path in (undoing.brokers.folder / "objects").rglob("*.log")} == live
    assert {one.id for one in opened.broker_metadata.partition_metadata_from_records(NAME).cache.segments.values()} == live
    assert compact(opened, NAME, NOW).status == "cleaned"  # the same round is due again
    assert undoing.batches() == compacted
    undoing.assert_whole()


def test_restored_segments_know_the_transaction_that_is_open_at_their_end(tmp_path: Path) -> None:
    log = LogBuilder(time=1_700_000_000_000)
    for number in range(6):
        log.put("a=1", f"b={number}", pid=7, txn=True)
        log.roll()
        log.put("a=2", f"c={number}")
        log.end(7, commit=True)
    undoing = Undoing(tmp_path, log.write(tmp_path / str(NAME)), segment_bytes=14)
    compacted = {segment.id: segment.open_txn_offset for segment in undoing.state().live}
    restored = {segment.id: segment.open_txn_offset for segment in undoing.undo().live}
    assert list(restored.values()) == list(compacted.values())
    assert max(restored[new] for new in restored.keys() - compacted.keys()) >= 0


def test_broken_off_at_any_record_undo_is_finished_or_given_up(undoing: Undoing) -> None:
    compacted, whole = undoing.batches(), [raw for _, raw in undoing.before]
    for count in range(40):  # noqa: B007 - how many it took is looked at below
        opened = undoing.brokers.opened(appending=MemoryMetadataTopic(undoing.brokers.log, fate=after(1)))
        try:
            undoing.undo(opened)
        except Unavailable:
            undoing.assert_whole()
            continue
        break
    assert count > 4
    assert undoing.batches() == whole != compacted


@pytest.mark.parametrize("count", [0, 2, 3, 5])
def test_what_a_dead_undo_left_the_next_round_takes_up(undoing: Undoing, count: int) -> None:
    """Before readers are switched it is given up, afterwards finished; either way nothing is left half done."""
    compacted, whole = undoing.batches(), [raw for _, raw in undoing.before]
    with pytest.raises(Unavailable):
        undoing.undo(undoing.brokers.opened(appending=MemoryMetadataTopic(undoing.brokers.log, fate=after(count))))
    begun = undoing.state().intent
    assert begun is not None
    report = compact(undoing.brokers.opened(), NAME, NOW)
    undoing.assert_whole()
    if begun.begun_slot:
        assert (report.status, undoing.batches()) == ("resumed", whole)
    else:
        assert undoing.batches() == compacted
        assert undoing.state().find_run(begun.plan.run_id).status == "undone"  # type: ignore[union-attr]


def test_where_brokers_delete_in_mid_undo_it_is_told_that_a_part_is_not_taken_back(undoing: Undoing) -> None:
    made = [segment for segment in undoing.state().live if segment.id in undoing.state().published_by]
    assert len(made) > 1
    with pytest.raises(Unavailable):
        undoing.undo(undoing.brokers.opened(appending=MemoryMetadataTopic(undoing.brokers.log, fate=after(len(made)))))
    begun = undoing.state().intent
    assert begun is not None
    assert begun.begun_slot
    where = undoing.opened.broker_metadata.partition_metadata_from_records(NAME).cache.partition
    for step in (SegmentState.DELETE_SEGMENT_STARTED, SegmentState.DELETE_SEGMENT_FINISHED):
        undoing.brokers.write(RemoteLogSegmentMetadataUpdateRecord(where, uuid_bytes(made[0].id), 1, 5, step))
    with pytest.raises(CompactorError, match=f"undone in part: .* up to offset {made[0].end_offset} readers keep"):
        undoing.undo()
    state = undoing.state()
    assert state.intent is None
    assert [(run.status, not undo_refusal(state, run.run_id)) for run in state.runs] == [
        ("reverted_in_part", False),
        ("restored", False),
    ]
    assert state.runs[0].reason == f"1 of {len(made)} groups stay: brokers had deleted segments of them"
    with pytest.raises(UsageError, match=f"undone in part: 1 of {len(made)} groups stay"):
        undoing.undo()


def test_where_brokers_have_tiered_a_part_again_it_is_refused_before_anything_is_said(undoing: Undoing) -> None:
    """A later leader rolls elsewhere: what the round made is read up to there, and what it replaced reaches beyond."""
    made = [segment for segment in undoing.state().live if segment.id in undoing.state().published_by][-1]
    newest = undoing.state().live[-1]
    where = undoing.opened.broker_metadata.partition_metadata_from_records(NAME).cache.partition
    batches = {int.from_bytes(raw[:8], "big"): raw for _, raw in undoing.before}
    begin, raw_id = next(base for base in batches if base > made.start_offset), b"tiered-again-16b"
    log = b"".join(raw for base, raw in batches.items() if base >= begin)
    layout = undoing.opened.ports.layout
    contents = {kind: layout.read_file(NAME, newest, kind) for kind in layout.segment_files(NAME, newest)} | {"log": log}
    described = newest.model_copy(update={"id": encode_segment_id(raw_id), "start_offset": begin, "size_bytes": len(log), "files": {}})
    assert layout.upload_segment(NAME, described, contents) == ""
    again = RemoteLogSegmentMetadataRecord(
        where, raw_id, begin, newest.end_offset, 1, newest.max_timestamp_ms, 5, (EpochEntry(LeaderEpoch(0), Offset(begin)),), len(log)
    )
    undoing.brokers.write(again, RemoteLogSegmentMetadataUpdateRecord(where, again.segment_id, 1, 5, SegmentState.COPY_SEGMENT_FINISHED))
    before = [list(log) for log in undoing.brokers.log.logs]
    with pytest.raises(UsageError, match=f"segment {made.id} is read in part: brokers have tiered again what follows offset {begin - 1}"):
        undoing.undo()
    assert (undoing.state().intent, undoing.state().quarantine) == (None, None)
    assert undoing.brokers.log.logs == before
    assert "is read in part" in undo_refusal(undoing.state(), undoing.run_id)


def test_what_is_deleted_or_built_on_is_refused(undoing: Undoing) -> None:
    before = undoing.batches()
    with pytest.raises(UsageError, match="no run nothing that is remembered"):
        undo_by_copies(undoing.opened, undoing.opened.open_partition_log(NAME, caller_runs_round=True), "nothing")
    undoing.retire()
    with pytest.raises(UsageError, match="cannot be undone: retiring what run .* replaced has begun"):
        undoing.undo()
    undoing.brokers.tier(NAME, undoing.log.write_part(3))
    assert compact(undoing.brokers.opened(), NAME, NOW).status == "cleaned"
    with pytest.raises(UsageError, match="is not the latest round that readers have"):
        undoing.undo()
    assert undoing.batches() != before


def test_a_lost_object_is_noticed_before_anything_is_changed(undoing: Undoing) -> None:
    [group] = undoing.state().waiting
    key = undoing.opened.ports.layout.object_name(NAME, group.segments[0], "log")
    (undoing.brokers.folder / "objects" / key).unlink()
    before = [list(log) for log in undoing.brokers.log.logs]
    with pytest.raises(BadData, match="is damaged"):
        undoing.undo()
    assert (undoing.state().intent, undoing.state().quarantine) == (None, None)
    assert undoing.brokers.log.logs == before
