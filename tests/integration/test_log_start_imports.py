"""The log start on the way into a tier and out of it: what a first import takes over, and what never comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.files import parse_cleaner_offset_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.constants import LeaderEpoch, Offset
from compactor.consumer.ranges import read_record_blocks
from compactor.control.state import PartitionState
from compactor.errors import BadData
from compactor.model.ids import TopicPartition
from compactor.transfer.export import export_partition
from compactor.transfer.from_tier import import_tier
from compactor.transfer.import_ import import_directory
from compactor.transfer.import_options import ImportOptions
from compactor.upkeep.operator_changes import delete_records
from tests.builders import LogBuilder

NAME = TopicPartition("orders", 0)


def opened(folder: Path, name: str) -> Tier:
    file = folder / f"{name}.toml"
    file.write_text(f'[tier]\nurl = "{(folder / name).as_uri()}"\nstate_dir = "{folder / f"{name} state"}"\n')
    return open_tier(load_settings(str(file), {}))


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return opened(tmp_path, "a tier")


@pytest.fixture
def log(tmp_path: Path) -> LogBuilder:
    """Three segments of four offsets each, in two leader epochs; the last one is the broker's active segment."""
    made = LogBuilder()
    for number in range(3):
        made.leader_epoch = number // 2
        for offset in range(4):
            made.put(f"k{offset}={number}")
        if number < 2:
            made.roll()
    return made


def recorded(folder: Path, log_start: int) -> Path:
    """Return the partition's directory in a log directory of a broker that has deleted the records below an offset."""
    folder.mkdir(exist_ok=True)
    (folder / "log-start-offset-checkpoint").write_text(f"0\n2\nother 0 99\norders 0 {log_start}\n")
    return folder / str(NAME)


def bring(tier: Tier, log: LogBuilder, folder: Path, *, live: bool = False) -> None:
    import_directory(tier, log.write(folder), NAME, tier.settings.cleaner.cleaner_policy(), options=ImportOptions(live=live))


def state_of(tier: Tier) -> PartitionState:
    return tier.open_control_log_of_partition(NAME).refresh()


def offsets(tier: Tier) -> list[int]:
    return [message.offset() or 0 for block in read_record_blocks(tier, NAME) for message in block.messages()]


@pytest.mark.parametrize(("log_start", "first_segment"), [(1, 0), (4, 4), (6, 4), (9, 8), (12, 8)])
def test_a_first_import_takes_the_log_start_over(log_start: int, first_segment: int, tier: Tier, log: LogBuilder, tmp_path: Path) -> None:
    bring(tier, log, recorded(tmp_path / "broker", log_start))
    state = state_of(tier)
    assert (state.start_offset, state.log_start, state.end_offset) == (first_segment, log_start, 11)
    assert offsets(tier) == list(range(log_start, 12))


@pytest.mark.parametrize(("log_start", "held"), [(6, [6, 7]), (9, [])])
def test_a_live_import_waits_for_a_segment_that_readers_may_read(
    log_start: int, held: list[int], tier: Tier, log: LogBuilder, tmp_path: Path
) -> None:
    folder = recorded(tmp_path / "broker", log_start)
    bring(tier, log, folder, live=True)
    assert not held or offsets(tier) == held
    log.roll()
    log.put("k=9")
    bring(tier, log, folder, live=True)
    assert offsets(tier) == list(range(log_start, 12))


def test_a_later_import_neither_lowers_nor_raises_it(tier: Tier, log: LogBuilder, tmp_path: Path) -> None:
    folder = tmp_path / "broker" / str(NAME)
    folder.parent.mkdir()
    bring(tier, log, folder, live=True)
    assert state_of(tier).log_start_offset is None
    recorded(tmp_path / "broker", 6)
    bring(tier, log, folder)
    assert (state_of(tier).log_start_offset, offsets(tier)) == (None, list(range(12)))


def test_an_import_does_not_bring_back_what_was_deleted(tier: Tier, log: LogBuilder, tmp_path: Path) -> None:
    folder = tmp_path / "broker" / str(NAME)
    bring(tier, log, folder, live=True)
    delete_records(tier, NAME, 6)
    bring(tier, log, folder)
    assert (state_of(tier).start_offset, offsets(tier)) == (4, list(range(6, 12)))


def test_a_truncation_at_or_below_the_log_start_is_refused(tier: Tier, log: LogBuilder, tmp_path: Path) -> None:
    bring(tier, log, tmp_path / "broker" / str(NAME))
    delete_records(tier, NAME, 6)
    before = state_of(tier)
    other = LogBuilder()
    for offset in range(4):
        other.put(f"k{offset}=0")
    other.leader_epoch = 5
    other.put("k=new")
    other.roll()
    other.put("k=newer")
    folder = other.write(tmp_path / "replica" / str(NAME))
    (folder / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n5 4\n")
    with pytest.raises(BadData, match="was discarded") as refused:
        import_directory(tier, folder, NAME, tier.settings.cleaner.cleaner_policy(), options=ImportOptions(accept_truncation=True))
    assert "`topics delete` the partition and import this log" in (refused.value.hint or "")
    assert state_of(tier) == before


def test_another_tier_gets_the_log_start_of_its_source(tier: Tier, log: LogBuilder, tmp_path: Path) -> None:
    bring(tier, log, tmp_path / "broker" / str(NAME))
    target = opened(tmp_path, "another tier")
    delete_records(tier, NAME, 6)
    (done,) = import_tier(tier, target, [NAME], ImportOptions())
    assert (done.import_status, offsets(target)) == ("imported", list(range(6, 12)))
    assert (state_of(target).start_offset, state_of(target).log_start) == (4, 6)
    log.roll()
    log.put("k=12")
    bring(tier, log, tmp_path / "broker" / str(NAME))
    delete_records(tier, NAME, 9)
    import_tier(tier, target, [NAME], ImportOptions())
    assert offsets(target) == list(range(6, 13)), "what the target has stays until its own retention deletes it"


def test_an_export_tells_a_broker_where_the_log_starts(tier: Tier, log: LogBuilder, tmp_path: Path) -> None:
    bring(tier, log, tmp_path / "broker" / str(NAME))
    delete_records(tier, NAME, 9)
    out = tmp_path / "out"
    out.mkdir()
    (out / "log-start-offset-checkpoint").write_text("0\n1\nother 0 5\n")
    export_partition(tier, NAME, out / str(NAME))
    text = (out / "log-start-offset-checkpoint").read_text()
    assert parse_cleaner_offset_checkpoint(text) == {("other", 0): 5, ("orders", 0): 9}
    lineage = parse_leader_epoch_checkpoint((out / str(NAME) / "leader-epoch-checkpoint").read_text())
    assert lineage == (EpochEntry(LeaderEpoch(1), Offset(9)),), "only the export cuts the lineage"
    assert len(state_of(tier).lineage) == 2
    again = opened(tmp_path, "again")
    import_directory(again, out / str(NAME), NAME, again.settings.cleaner.cleaner_policy())
    assert offsets(again) == offsets(tier) == [9, 10, 11]
