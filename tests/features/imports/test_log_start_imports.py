"""The log start on the way into a tier and out of it: what a first import takes over, and what never comes back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpoint.files import parse_cleaner_offset_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.constants import LeaderEpoch, Offset
from compactor.control.state import PartitionState
from compactor.errors import BadData
from compactor.features.imports.from_tier import import_tier
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.features.imports.log_directory import is_locked_by_broker
from compactor.model.ids import TopicPartition
from compactor.read.ranges import read_record_blocks
from compactor.upkeep.export import export_partition
from compactor.upkeep.orphans import delete_records
from tests.builders import LogBuilder
from tests.features.imports.test_import_truncated import end_of
from tests.support.tier_cli import TierCli

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
    return tier.open_partition_log(NAME).refresh()


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
    log.add("/; k=9")
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
    other.add("k=new; /; k=newer")
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
    log.add("/; k=12")
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


def emptied(folder: Path, base_offset: int, log_start: int | None) -> Path:
    """Return a directory whose only segment is the active one, without records. ``log_start``: as the broker has recorded it, if at all."""
    log_dir = recorded(folder, log_start) if log_start is not None else folder / str(NAME)
    log_dir.mkdir(parents=True)
    (log_dir / f"{base_offset:020d}.log").touch()
    return log_dir


@pytest.mark.parametrize("live", [False, True])
def test_a_log_whose_records_are_all_in_remote_storage_is_refused(tier: Tier, tmp_path: Path, live: bool) -> None:
    log_dir, policy = emptied(tmp_path / "broker", 330, 0), tier.settings.cleaner.cleaner_policy()
    for _ in range(2):
        with pytest.raises(BadData, match="offsets 0 to 329 of orders-0 are in the remote storage of the brokers"):
            import_directory(tier, log_dir, NAME, policy, options=ImportOptions(live=live, may_be_empty=True))
    report = import_directory(tier, log_dir, NAME, policy, options=ImportOptions(live=live, may_be_empty=True, gaps=True))
    assert (report.segments, [note for note in report.notes if "offsets 0 to 329" in note] != []) == (0, True)


def test_a_tier_that_lags_behind_what_was_moved_to_remote_storage_is_told(tier: Tier, log: LogBuilder, tmp_path: Path) -> None:
    bring(tier, log, tmp_path / "first")
    log_dir, policy = emptied(tmp_path / "later", 20, 0), tier.settings.cleaner.cleaner_policy()
    with pytest.raises(BadData, match="offsets 12 to 19 of orders-0"):
        import_directory(tier, log_dir, NAME, policy, options=ImportOptions(may_be_empty=True))


@pytest.mark.parametrize(("base_offset", "log_start"), [(12, 0), (20, 20), (20, None), (0, None)])
def test_an_empty_log_of_which_nothing_is_missing_is_up_to_date(
    tier: Tier, log: LogBuilder, tmp_path: Path, base_offset: int, log_start: int | None
) -> None:
    """All of it is in the tier; or retention has deleted what is not there, which is no matter of remote storage."""
    if base_offset == 12:
        bring(tier, log, tmp_path / "first")
    log_dir, policy = emptied(tmp_path / "later", base_offset, log_start), tier.settings.cleaner.cleaner_policy()
    report = import_directory(tier, log_dir, NAME, policy, options=ImportOptions(may_be_empty=True))
    assert report.import_status == "up_to_date"
    assert "remote storage" not in str(report.notes)


def test_a_log_whose_beginning_is_in_remote_storage_comes_in_with_a_remark(tier: Tier, tmp_path: Path) -> None:
    made = LogBuilder(next_offset=100).add("a=1")
    log_dir = made.write(recorded(tmp_path / "broker", 0))
    report = import_directory(tier, log_dir, NAME, tier.settings.cleaner.cleaner_policy())
    assert (report.segments, [note for note in report.notes if "offsets 0 to 99" in note] != []) == (1, True)


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "wb")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def broker_holding(broker_dir: Path) -> Iterator[None]:
    """A process that holds the lock of a log directory as Java's FileChannel.tryLock does."""
    command = [sys.executable, "-c", HOLDER, str(broker_dir / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == b"held\n"
        yield
        process.stdin.close()


@pytest.mark.parametrize("is_root", [False, True])
def test_the_active_segment_of_a_running_broker_is_left_out_without_an_option(log: LogBuilder, tmp_path: Path, is_root: bool) -> None:
    cli, root = TierCli(tmp_path / "cli"), tmp_path / "broker"
    log_dir = log.write(root / str(NAME))
    with broker_holding(root):
        assert is_locked_by_broker(root)
        answer = cli.ask("import", root if is_root else log_dir)
        assert is_locked_by_broker(root), "it was asked for, and not taken"
    assert "a broker holds the lock" in answer.stderr
    assert end_of(cli) == 7
    again = cli.ask("import", log_dir)  # the broker has gone, and left its file
    assert (root / ".lock").exists()
    assert ("a broker holds the lock" in again.stderr, end_of(cli)) == (False, 11)
