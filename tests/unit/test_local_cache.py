"""The cache on this machine: what is kept comes back, whatever is wrong with it costs one line at most, and it is never the truth."""

from __future__ import annotations

import json
import logging
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from checkpoint.lineage import EpochEntry
from compactor.config.settings import CleanerSettings
from compactor.constants import CompactorEpoch, LeaderEpoch, Offset, TimestampMs
from compactor.control.control_log import LogDeletionBoundary, StateIdentity
from compactor.control.state import CatalogState, GroupAwaitingDeletion, OpenImport, PartitionState
from compactor.control.summary import PartitionSummary, SegmentSummary, decode_summary, encode_summary, summarize_state
from compactor.local import cache as local_state
from compactor.local.cache import LocalState
from compactor.model.ids import TopicPartition
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile
from compactor.round.plan import assess_round

NAME = TopicPartition("orders", 0)
MARK = StateIdentity(boundary=LogDeletionBoundary(version=1, log="orders-0", number=2, slot=1), incarnation="a", attempt=3)


def segment(number: int, dice: random.Random) -> RemoteLogSegmentMetadata:
    kinds = dice.sample(FILE_KINDS, dice.randint(1, len(FILE_KINDS)))
    return RemoteLogSegmentMetadata(
        id=f"{number:022}",
        start_offset=Offset(number * 10),
        end_offset=Offset(number * 10 + 9),
        size_bytes=dice.randrange(1 << 40),
        max_timestamp_ms=TimestampMs(dice.choice((-1, dice.randrange(2000)))),
        mtime_ms=dice.randrange(2000),
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(0)),),
        files={kind: SegmentFile(size=dice.randrange(1 << 33), sha256="0" * 64) for kind in kinds},
        first_timestamp_ms=dice.choice((-1, dice.randrange(2000))),
        due_ms=dice.choice((-1, dice.randrange(2000))),
        open_txn_offset=dice.choice((-1, -1, number * 10 + 3)),
        records=dice.randrange(1 << 35),
    )


def state(dice: random.Random, slot: int = 7, name: TopicPartition = NAME) -> PartitionState:
    live = tuple(segment(number, dice) for number in range(dice.randrange(12)))
    waiting = GroupAwaitingDeletion(slot=3, run_id="r", leader_epoch=CompactorEpoch(0), segments=live[:2], vector_before=(), vector=())
    return PartitionState(
        slot=slot,
        topic=name.topic,
        partition=name.partition,
        live=live,
        waiting=(waiting,) if dice.random() < 0.5 else (),
        registrations={"i": OpenImport(import_id="i", ids=("x",), holder="h", slot=2)} if dice.random() < 0.5 else {},
    )


def opened(folder: Path, tier_id: str = "tier") -> LocalState:
    local = LocalState(folder)
    local.cached_catalog()
    local.bind_to_tier(tier_id)
    return local


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a state dir" / "cache"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What a person sees on stderr: warnings, as nothing else is set up."""
    said: list[str] = []

    class Handler(logging.Handler):
        @override
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("compactor").addHandler(handler)
    yield said
    logging.getLogger("compactor").removeHandler(handler)


# ---- summaries ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_summary_decides_as_the_state_does(seed: int) -> None:
    dice = random.Random(seed)
    full = state(dice)
    summary = decode_summary(encode_summary(summarize_state(full)))
    for field in SegmentSummary._fields:
        assert [getattr(s, field) for s in summary.live] == [getattr(s, field) for s in full.live]
    for field in ("topic_partition", "slot", "bytes", "start_offset", "end_offset", "first_dirty_offset", "vector"):
        assert getattr(summary, field) == getattr(full, field)
    assert summary.has_open_transaction == any(segment.open_txn_offset >= 0 for segment in full.live[-1:])
    assert [group.size_bytes for group in summary.waiting] == [sum(s.size_bytes for s in group.segments) for group in full.waiting]
    cleaner = CleanerSettings(min_compaction_lag_ms=dice.choice((0, 500)), max_compaction_lag_ms=dice.choice((600, 2**62)))
    for now in (0, 900, 5000):
        one, other = assess_round(full, cleaner, now), assess_round(summary, cleaner, now)
        assert [s.id for s in one.dirty] == [s.id for s in other.dirty]
        assert [s.id for s in one.clean] == [s.id for s in other.clean]
        assert (one.due, one.reason, one.end, one.dirty_ratio, one.horizon_due) == (
            other.due, other.reason, other.end, other.dirty_ratio, other.horizon_due,
        )  # fmt: skip


def test_damaged_summaries_raise_value_errors() -> None:
    data = encode_summary(summarize_state(state(random.Random(3))))
    for cut in (0, 3, 20):
        with pytest.raises((ValueError, struct.error)):
            decode_summary(data[:cut])


# ---- keeping -----------------------------------------------------------------------------------------------------------------


def test_what_is_kept_comes_back(folder: Path) -> None:
    local = opened(folder)
    full = state(random.Random(1))
    local.cache_partition_state(full, MARK, last_hint_number=5, now_ms=99)
    local.cache_catalog(CatalogState(slot=4, tier_id="tier"), MARK)
    local.cache_sidecar_heads({"s1": b"one", "s2": b"two"})
    local.close()
    again = opened(folder)
    assert again.cached_partition_state(NAME) == (full, MARK)
    ((key, (seen, summary)),) = again.cached_summaries().items()
    assert (key, seen.slot, seen.hint, seen.checked_ms) == ("orders-0", 7, 5, 99)
    assert summary == decode_summary(encode_summary(summarize_state(full)))
    kept = again.cached_catalog()
    assert kept is not None
    assert (kept.state, kept.mark) == (CatalogState(slot=4, tier_id="tier"), MARK)
    assert again.cached_sidecar_heads(["s1", "s2", "s3"]) == {"s1": b"one", "s2": b"two"}
    again.delete_cached_sidecar_heads(["s1"])
    assert again.cached_sidecar_heads(["s1", "s2"]) == {"s2": b"two"}
    assert again.cached_partition_state(TopicPartition("orders", 1)) is None


def test_nothing_is_opened_before_it_is_used(folder: Path) -> None:
    LocalState(folder)
    assert not folder.exists()


def test_others_cannot_read_it(folder: Path) -> None:
    opened(folder)
    assert folder.stat().st_mode & 0o077 == 0, "the catalog holds the tier's hash key"


def test_a_later_look_moves_the_hint_only(folder: Path) -> None:
    local = opened(folder)
    full = state(random.Random(2))
    local.cache_partition_state(full, MARK, last_hint_number=5, now_ms=99)
    seen, summary = local.cached_summaries()["orders-0"]
    local.save_read_progress({NAME: seen.model_copy(update={"hint": 8, "checked_ms": 200})})
    again, same = local.cached_summaries()["orders-0"]
    assert (again.hint, again.checked_ms, again.slot) == (8, 200, 7)
    assert same == summary
    assert local.cached_partition_state(NAME) == (full, MARK)


# ---- several processes -------------------------------------------------------------------------------------------------------

READER = """
import json, sys
from pathlib import Path
from compactor.local.cache import LocalState
from compactor.control.state import CatalogState
from tests.unit.test_local_cache import MARK, NAME, opened
local = opened(Path(sys.argv[1]))
known = local.cached_partition_state(NAME)
local.cache_partition_state(known[0].model_copy(update={"slot": 50}), MARK, 1, 1)
print(json.dumps([local.is_writable, known[0].slot, list(local.cached_summaries())]))
"""


def test_one_process_writes_and_others_read(folder: Path, lines: list[str]) -> None:
    writer = opened(folder)
    writer.cache_partition_state(state(random.Random(1)), MARK, last_hint_number=5, now_ms=99)
    assert writer.is_writable
    told = subprocess.run(
        [sys.executable, "-c", READER, str(folder)], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert json.loads(told.stdout) == [False, 7, ["orders-0"]]
    assert told.stderr == ""
    writer.cache_partition_state(state(random.Random(1), slot=8), MARK, last_hint_number=5, now_ms=99)
    known = writer.cached_partition_state(NAME)
    assert known is not None
    assert known[0].slot == 8, "what the reader wanted to write is not there"
    assert not lines


def test_the_next_one_writes_when_the_writer_is_gone(folder: Path) -> None:
    first, second = opened(folder), LocalState(folder)
    assert not second.is_writable
    first.close()
    assert opened(folder).is_writable


# ---- what is wrong with it ---------------------------------------------------------------------------------------------------


def kept_in(folder: Path) -> None:
    local = opened(folder)
    local.cache_catalog(CatalogState(slot=4, tier_id="tier"), MARK)
    local.cache_partition_state(state(random.Random(1)), MARK, last_hint_number=5, now_ms=99)
    local.close()


@pytest.mark.parametrize("file", ["MANIFEST-*", "*.sst", "CURRENT", "OPTIONS-*", "rocksdict-config.json"])
@pytest.mark.parametrize("damage", ["zeros", "cut", "short", "gone"])
def test_a_broken_one_is_thrown_away_in_one_line(folder: Path, file: str, damage: str, lines: list[str]) -> None:
    kept_in(folder)
    for path in folder.glob(file):
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes({"zeros": b"\0" * path.stat().st_size, "cut": b"", "short": path.read_bytes()[:10]}[damage])
    local = opened(folder)
    local.cached_summaries()
    known = local.cached_partition_state(NAME)
    assert known is None or known[0].slot == 7
    assert len(lines) <= 1
    assert all("is thrown away" in line and str(folder) in line and "\n" not in line for line in lines)
    local.cache_partition_state(state(random.Random(1), slot=9), MARK, last_hint_number=5, now_ms=99)
    again = local.cached_partition_state(NAME)
    assert again is not None, "it goes on with a new one"
    assert again[0].slot == 9


@pytest.mark.parametrize("key", [b"meta", b"catalog", b"seen/orders-0", b"summary/orders-0", b"state/orders-0"])
def test_values_that_cannot_be_read_are_thrown_away_in_one_line(folder: Path, key: bytes, lines: list[str]) -> None:
    kept_in(folder)
    local = opened(folder)
    local._rocks.write({key: b"\0\1garbage"})
    local.close()
    again = LocalState(folder)
    again.cached_catalog()
    again.bind_to_tier("tier")
    assert again.cached_summaries() == {} or key == b"state/orders-0"
    again.cached_partition_state(NAME)
    assert again.cached_summaries() == {}
    assert again.cached_partition_state(NAME) is None
    assert len(lines) == 1


def test_one_of_another_version_is_thrown_away_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr(local_state, "CACHE_FORMAT", local_state.CACHE_FORMAT - 1)
    kept_in(folder)
    monkeypatch.undo()
    local = LocalState(folder)
    assert local.cached_catalog() is None
    local.bind_to_tier("tier")
    assert local.cached_summaries() == {}
    assert len(lines) == 1
    local.close()
    assert opened(folder).is_writable
    assert len(lines) == 1


@pytest.mark.parametrize("diverged", [False, True])
def test_one_of_another_tier_is_thrown_away_in_one_line(folder: Path, lines: list[str], diverged: bool) -> None:
    kept_in(folder)
    local = LocalState(folder)
    local.cached_catalog()
    local.bind_to_tier("tier" if diverged else "another", is_from_diverged_copy=diverged)
    assert local.cached_summaries() == {}
    assert local.cached_partition_state(NAME) is None
    assert len(lines) == 1


def test_where_nothing_can_be_written_there_is_none(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "file").write_text("not a directory")
    local = opened(tmp_path / "file" / "cache")
    local.cache_partition_state(state(random.Random(1)), MARK, last_hint_number=5, now_ms=99)
    assert not local.is_writable
    assert local.cached_summaries() == {}
    assert local.cached_partition_state(NAME) is None
    assert not lines


def test_a_summary_is_small() -> None:
    summary = summarize_state(PartitionState(slot=1, topic="t", partition=0, live=tuple(segment(n, random.Random(n)) for n in range(100))))
    assert isinstance(summary, PartitionSummary)
    assert len(encode_summary(summary)) < 100 * 130 + 1000
