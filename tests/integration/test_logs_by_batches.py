"""What rounds record of the logs that they write, and tiers with logs of which only the batches' digest is known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compactor.cleaner.source import SourceSegment, open_source_segment
from compactor.model.segment import SegmentFile
from compactor.records.batches import verified_header_digest
from compactor.round import pass_two as delivery
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectInfo
from tests.builders import LogBuilder, entry, live
from tests.support.tier_cli import TierCli


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    return TierCli(tmp_path / "tier", {"cleaner": {"segment_bytes": 4000}})


@pytest.fixture
def batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds know of their logs what they would know of those put together of copies."""
    whole = delivery.describe_log

    def described_log(source: SourceSegment) -> SegmentFile:
        return replace(whole(source), sha256="")

    monkeypatch.setattr(delivery, "describe_log", described_log)


def brought(cli: TierCli) -> LogBuilder:
    log = LogBuilder()
    grown(log)
    cli.bring(log.write(cli.folder / "log"))
    return log


def grown(log: LogBuilder) -> None:
    for number in range(20):
        log.put(f"{number % 7}={log.next_offset}", f"only-{log.next_offset}=1")
        if number % 4 == 3:
            log.roll()


def logs(cli: TierCli) -> Iterator[tuple[Path, ObjectInfo]]:
    """Of live segments, with what the store knows of them."""
    cli.do("retire", "--now", "in 10d", "--force-now")
    store = open_store(cli.tier.as_uri())
    for path in sorted(cli.tier.glob("orders-0/*.log")):
        yield path, store.head(str(path.relative_to(cli.tier)))


def test_a_round_records_both_digests(cli: TierCli) -> None:
    brought(cli)
    cli.run()
    found = list(logs(cli))
    assert found
    for path, info in found:
        about = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "batches": verified_header_digest(path)}
        assert about.items() <= info.metadata.items()
        assert about["batches"]


@pytest.mark.parametrize("magic", [0, 1])
def test_logs_with_older_messages_have_sha256_alone(magic: int, tmp_path: Path) -> None:
    """No round writes such, but a way back may."""
    log = LogBuilder()
    log.put("a=1")
    log.raw(entry(magic, 1, "old=1"), 1)
    (path,) = log.write(tmp_path / "log").glob("*.log")
    described = delivery.describe_log(open_source_segment(0, path, 0, None, 0, -1, 1 << 20))
    assert described == SegmentFile(size=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.usefixtures("batches_alone")
def test_such_logs_are_read_compacted_and_exported(cli: TierCli) -> None:
    log = brought(cli)
    cli.run()
    assert [info.metadata.keys() for _, info in logs(cli)] == [{"batches", "mtime_ms"} for _ in logs(cli)]
    assert cli.do("verify", "--deep")["ok"]
    grown(log)
    log.roll()
    cli.bring(log.write(cli.folder / "log"))
    assert cli.run()["status"] == "cleaned"
    assert cli.do("verify", "--deep")["ok"]
    kept = live(cli.export(cli.folder / "out"))
    assert len([text for text in kept if ":only-" in text]) == 40
    assert len(kept) == 40 + 7


@pytest.mark.damages
@pytest.mark.usefixtures("batches_alone")
@pytest.mark.parametrize("place", [3, -2], ids=["an offset", "a payload"])
def test_damage_in_one_is_found(cli: TierCli, place: int) -> None:
    brought(cli)
    cli.run()
    *_, (path, _) = logs(cli)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    answer = cli.ask("verify")
    assert answer.code == 3
    assert [(p["kind"], p["object"]) for p in answer.document["problems"]] == [("digest", f"orders-0/{path.name}")]
    answer = cli.ask("export", "orders-0", cli.folder / "out")
    assert answer.code == 3
    assert "its digest is not the one that was recorded" in answer.stderr
