"""Logs that Kafka wrote and cleaned, brought into a tier piece by piece: no legal one is refused, and no cleaned one continues a tier."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from compactor.cleaner.offline import list_segment_base_offsets, open_segments_of_directory
from compactor.features.imports.log_directory import CleaningSign, find_cleaning_signs
from tests.builders import next_directory
from tests.golden_cases import Round, cleaner_round, client_rounds, names
from tests.plain_format import read_batches, segment_paths
from tests.support.tier_cli import TierCli, batches_of

pytestmark = pytest.mark.usefixtures("unsynced")

CLEANED_BEFORE = "gaps"
"""The profile whose logs have lived through rounds of Kafka's cleaner already."""
UNCLEANED = [name for name in names("cleaner") if not name.startswith(CLEANED_BEFORE)]


def signs(log_dir: Path) -> list[CleaningSign]:
    bases = list_segment_base_offsets(log_dir, is_written_by_broker=False)
    return find_cleaning_signs(open_segments_of_directory(log_dir, bases, None, 4096, 1 << 30))


def growing(log_dir: Path, folder: Path) -> Iterator[Path]:
    """The directory as it grew, segment by segment."""
    for base in sorted(segment_paths(log_dir)):
        for path in log_dir.glob(f"{base:020}.*"):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder)
        yield folder


def came_in_by_segments(cli: TierCli, log_dir: Path, folder: Path) -> None:
    for part in growing(log_dir, folder / "orders-0"):
        if any(path.stat().st_size for path in part.glob("*.log")):
            cli.do("import", part)
    assert [batch.raw for batch in batches_of(cli.export(folder / "out"))] == [batch.raw for batch in batches_of(log_dir)]


@pytest.mark.parametrize("name", UNCLEANED)
def test_a_log_that_was_never_cleaned_comes_in_segment_by_segment(name: str, cleaner_cases: Path, cli: TierCli, tmp_path: Path) -> None:
    case = cleaner_round(cleaner_cases / name, tmp_path)
    assert signs(case.log_dir) == []
    came_in_by_segments(cli, case.log_dir, tmp_path / "grown")


@pytest.mark.parametrize("name", names("clients"))
def test_a_log_of_a_client_comes_in_segment_by_segment(name: str, client_cases: Path, cli: TierCli, tmp_path: Path) -> None:
    case = client_rounds(client_cases / name, "keep", tmp_path)[0]
    assert signs(case.log_dir) == []
    came_in_by_segments(cli, case.log_dir, tmp_path / "grown")


@pytest.mark.parametrize("name", [name for name in names("cleaner") if name.startswith(CLEANED_BEFORE)])
def test_a_log_that_was_cleaned_before_comes_into_an_empty_partition(name: str, cleaner_cases: Path, cli: TierCli, tmp_path: Path) -> None:
    case = cleaner_round(cleaner_cases / name, tmp_path)
    assert cli.bring(case.log_dir)["segments"]
    assert [batch.raw for batch in batches_of(cli.export(tmp_path / "out"))] == [batch.raw for batch in batches_of(case.log_dir)]


@pytest.mark.parametrize("name", UNCLEANED)
def test_kafkas_cleaner_leaves_signs_wherever_it_was(name: str, cleaner_cases: Path, tmp_path: Path) -> None:
    """At every offset at which a tier could end: where records behind it are gone, a sign is there."""
    case = cleaner_round(cleaner_cases / name, tmp_path)
    if case.refused:
        return
    replica = replica_of_cleaned_leader(case, tmp_path)
    before, after, found = offsets(case.log_dir), offsets(replica), signs(replica)
    for base in sorted(segment_paths(case.log_dir)):
        gone = {offset for offset in before - after if offset >= base}
        assert not gone or any(sign.last >= base for sign in found)


def replica_of_cleaned_leader(case: Round, scratch: Path) -> Path:
    return next_directory(case.log_dir, case.expected_dir, case.expected["next_dirty_offset"], scratch / "cleaned")


def offsets(log_dir: Path) -> set[int]:
    """Of all data records of format v2."""
    return {
        record.offset
        for path in segment_paths(log_dir).values()
        for batch in read_batches(path.read_bytes())
        if batch.magic == 2
        for record in batch.records
    }


@pytest.mark.parametrize("name", ["plain-8", "txn-3", "txn-2", "tiny-6"])
def test_a_replica_of_a_cleaned_leader_does_not_continue_a_tier(name: str, cleaner_cases: Path, cli: TierCli, tmp_path: Path) -> None:
    case = cleaner_round(cleaner_cases / name, tmp_path)
    replica = replica_of_cleaned_leader(case, tmp_path)
    first = next(growing(case.log_dir, tmp_path / "begun" / "orders-0"))
    end = cli.do("import", first)["end_offset"]
    shutil.copytree(replica, tmp_path / "replica" / "orders-0")
    cli.refused("import", tmp_path / "replica" / "orders-0", says="a log cleaner has compacted orders-0")
    assert max(batch.last_offset for batch in batches_of(cli.export(tmp_path / "out"))) == end
