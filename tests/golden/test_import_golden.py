"""What Kafka wrote, through the tier: import, run and export give what `clean` gives with the same parameters; again gives nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData
from tests.builders import next_directory
from tests.golden_cases import Round, cleaner_round, client_rounds, names
from tests.plain_format import segment_paths
from tests.plain_log import transaction_index
from tests.support.depth import a_third
from tests.support.tier_cli import TierCli, batches_of, contents, latest, visible

NEVER = 2**63 - 1


@a_third("name", names("cleaner"))
def test_import_run_export_is_clean(name: str, cleaner_cases: Path, tmp_path: Path) -> None:
    through_the_tier(cleaner_round(cleaner_cases / name, tmp_path), tmp_path)


@pytest.mark.parametrize("parameters", ["keep", "drop"])
@a_third("name", names("clients"))
def test_import_run_export_is_clean_for_clients(name: str, parameters: str, client_cases: Path, tmp_path: Path) -> None:
    for number, case in enumerate(client_rounds(client_cases / name, parameters, tmp_path)):
        through_the_tier(case, tmp_path / str(number))


@pytest.mark.parametrize("name", ["gaps-2", "keyless-4", "legacy-5", "plain-3", "tiny-7", "txn-3", "txn-2"])
def test_only_log_files(name: str, cleaner_cases: Path, tmp_path: Path) -> None:
    case = cleaner_round(cleaner_cases / name, tmp_path)
    for path in case.log_dir.iterdir():
        if path.suffix != ".log":
            path.unlink()
    through_the_tier(case, tmp_path)


def through_the_tier(case: Round, scratch: Path) -> None:
    request = replace(
        OfflineCleanOptions(**case.request()), first_dirty_offset=None, first_uncleanable_offset=None, map_entries=None, high_watermark=None
    )
    cli = TierCli(scratch / "some tier", {"cleaner": cleaner_settings(request)})
    imported = cli.bring(case.log_dir)
    assert imported["bytes"] == sum(path.stat().st_size for path in segment_paths(case.log_dir).values())

    before = cli.export(scratch / "before")
    assert [batch.raw for batch in batches_of(before)] == [batch.raw for batch in batches_of(case.log_dir)]
    assert visible(before) == visible(case.log_dir)
    assert transaction_index(before).items() >= transaction_index(case.log_dir).items()
    verified = cli.do("verify")
    assert verified["ok"]
    noted = {("note", "negative-timestamp"), ("note", "future-timestamp")}
    assert {(problem["severity"], problem["kind"]) for problem in verified["problems"]} <= noted

    answer = cli.ask("run", "--force", "--now", request.now_ms)
    (row,) = answer.document["partitions"]
    if case.refused:
        with pytest.raises(BadData):
            clean_log_directory(case.log_dir, scratch / "out", request)
        assert (answer.code, row["status"]) == (3, "quarantined")
        assert contents(cli.export(scratch / "after")) == contents(case.log_dir)
        return
    assert (answer.code, row["status"]) == (0, "cleaned"), answer.stderr

    request = replace(request, first_uncleanable_offset=row["next_dirty_offset"])
    summary = clean_log_directory(case.log_dir, scratch / "out", request)
    expected = next_directory(case.log_dir, scratch / "out", summary.next_dirty_offset, scratch / "expected after")
    after = cli.export(scratch / "after")
    assert contents(after) == contents(expected)
    assert visible(after) == visible(expected)
    assert latest(after) == latest(case.log_dir)
    assert (row["next_dirty_offset"], row["records_read"]) == (summary.next_dirty_offset, summary.records_read)
    assert cli.do("verify")["ok"]

    again(cli, request.now_ms, request.delete_retention_ms, case)


def again(cli: TierCli, now: int, retention: int, case: Round) -> None:
    """A second forced round rewrites nothing; only what became due may go. And the same import is still no news."""
    segments = cli.do("segments", "list", cli.named)["segments"]
    row = cli.run("--now", now)
    due = [s for s in segments if s["replaced_by"] is None and 0 <= s["due_ms"] <= now and s["end_offset"] < row["next_dirty_offset"]]
    if not due:
        assert row["status"] == "nothing_to_do"
        assert (row["bytes_read"], row["bytes_written"], row["segments_out"]) == (0, 0, 0)
        assert cli.do("segments", "list", cli.named)["segments"] == segments
    else:
        assert retention == 0
        # With these go segments with a marker that has lost the last data of its transaction just now: it gets its horizon.
        assert row["segments_out"] >= len(due)
    topics = cli.do("topics")
    cli.bring(case.log_dir)
    assert cli.do("topics") == topics


def cleaner_settings(request: OfflineCleanOptions) -> dict[str, Any]:
    """[cleaner] for one of Kafka's rounds: nothing expires, the disk is large enough, and records without a key are dropped."""
    names = ("delete_retention_ms", "segment_bytes", "segment_index_bytes", "index_interval_bytes")
    return {name: getattr(request, name) for name in names} | {"producer_id_expiration_ms": NEVER, "keyless_records": "drop"}
