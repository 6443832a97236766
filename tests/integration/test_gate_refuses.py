"""A cleaner that misbehaves: the equivalence gate stands between it and the tier, and readers keep what they have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from compactor.cleaner.gate import ranges, spool
from compactor.round import index
from tests.builders import LZ4, LogBuilder
from tests.plain_format import Batch
from tests.support.damage import Damage, misbehave, settled
from tests.support.tier_cli import TierCli, latest, visible


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    log = LogBuilder()
    for number in range(3):
        log.put(f"a={number}", f"b={number}", f"only-{number}=1", f"too-{number}=1")
        log.put(f"c={number}", "x=1", pid=number, txn=True, codec=LZ4)
        log.end(number, commit=number != 1)
        log.roll()
    log.put("last=1")
    cli = TierCli(tmp_path / "home", {"cleaner": {"min_cleanable_dirty_ratio": 0.0}})
    cli.bring(log.write(tmp_path / "log", indexes=True))
    return cli


def on_first_records(change: Callable[[Batch], Batch]) -> Damage:
    def damage(batches: list[Batch]) -> list[Batch]:
        at = next(number for number, each in enumerate(batches) if each.records and not each.control)
        return [*batches[:at], change(batches[at]), *batches[at + 1 :]]

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a record dropped": (on_first_records(lambda each: settled(each, each.records[1:])), "the last record of a key is gone"),
    "a value swapped": (
        on_first_records(lambda each: settled(each, [r._replace(value=b"another") for r in each.records])),
        "not the source's",
    ),
    "a marker lost": (lambda batches: [each for each in batches if not each.control], "a control batch is gone"),
    "the end lost": (lambda batches: batches[:-1], "must end at"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_the_gate_refuses_is_not_published(cli: TierCli, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damage, cause = DAMAGES[name]
    before, segments = cli.digest(), cli.do("segments", "list", cli.named)["segments"]
    view = visible(cli.export(tmp_path / "before"))
    with monkeypatch.context() as patched:
        misbehave(patched, damage)
        answer = cli.ask("run", "--force")
    (row,) = answer.document["partitions"]
    assert (answer.code, row["status"], row["segments_out"]) == (3, "quarantined", 0)
    assert row["reason"].startswith("gate: ")
    assert cause in row["reason"]
    assert ".log" in answer.stderr
    assert cause in answer.stderr
    after = cli.digest()
    assert {key: after.get(key) for key in before} == before, "no object was touched"
    assert not [key for key in after if key not in before and key.endswith((".log", ".index", ".timeindex", ".txnindex"))]
    assert cli.do("segments", "list", cli.named)["segments"] == segments
    assert visible(cli.export(tmp_path / "after")) == view
    assert cli.do("verify")["ok"]
    assert cli.do("runs", "list")["runs"][0]["status"] == "quarantined"

    assert cli.run()["status"] == "cleaned", "the next round, with a cleaner that is right, is none the worse for it"
    assert latest(cli.export(tmp_path / "cleaned")) == latest(tmp_path / "before")


def test_the_gate_can_be_switched_off(cli: TierCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shows that nothing else compares all of a record: the balance looks at the edges of key and value, and not at headers."""
    cli.set(cleaner={"verify_before_publish": False})
    headed = on_first_records(lambda each: settled(each, [r._replace(headers=((b"made", b"up"),)) for r in each.records]))
    misbehave(monkeypatch, headed)
    row = cli.run()
    assert row["status"] == "cleaned", str(row)


def without(key: bytes, batches: list[Batch]) -> list[Batch]:
    """A batch that has nothing else goes with it."""
    left = [[r for r in each.records if r.key != key] for each in batches]
    changed = [settled(each, some) if len(some) < len(each.records) else each for each, some in zip(batches, left, strict=True)]
    return [each for each, some, before in zip(changed, left, batches, strict=True) if some or not before.records]


@pytest.mark.parametrize(("engine", "disk_bytes"), [("auto", 9_000_000), ("partitioned", 9_000_000), ("partitioned", 120_000)])
def test_where_its_keys_are_on_the_disk_it_looks_up_every_one(
    engine: str, disk_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the cleaner's keys in memory, with both on the disk, and with so little disk that the log is read several times."""
    monkeypatch.setattr(index, "GATE_KEY_BYTES", 1 << 40)
    monkeypatch.setattr(spool, "BLOCK_ROWS", 100)
    monkeypatch.setattr(ranges, "CACHE_BYTES", 5_000)
    log = LogBuilder()
    for number in range(6):
        for begin in range(0, 800, 40):
            log.put(*(f"k{key}={number}" for key in range(begin + number, begin + 40)))
        log.roll()
    log.put("last=1")
    settings = {"map_engine": engine, "disk_budget_bytes": disk_bytes, "segment_bytes": 30_000, "min_cleanable_dirty_ratio": 0.0}
    cli = TierCli(tmp_path / "home", {"cleaner": settings})
    cli.bring(log.write(tmp_path / "log", indexes=True))
    for key in (b"k0", b"k2", b"k799"):
        with monkeypatch.context() as patched:
            misbehave(patched, partial(without, key))
            (row,) = cli.ask("run", "--force").document["partitions"]
        assert row["status"] == "quarantined"
        assert "the last record of a key is gone" in row["reason"]
        assert str(key) in row["reason"]
    row = cli.run()
    assert row["status"] == "cleaned"
    assert (row["passes"] > 1) == (disk_bytes < 1_000_000)
    assert latest(cli.export(tmp_path / "cleaned")) == latest(tmp_path / "log")
    (run,) = [run for run in cli.do("runs", "list", cli.named)["runs"] if run["status"] == "cleaned"]
    assert (run["stats"]["gate_keys"], run["stats"]["gate_disk_bytes"] > 0) == (run["stats"]["map_entries"], True)


@pytest.mark.parametrize("spills", [False, True])
def test_what_filters_bring_in_for_one_part_of_the_keys_it_is_shown_for_all(
    spills: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``spills``: its keys leave its memory during the first part, and are all looked at with it."""
    monkeypatch.setattr(index, "_parts", lambda job, rows: 3)
    log = LogBuilder()
    for number in range(10):
        log.put(*(f"k{number}-{n}=1" for n in range(300)))
        log.roll()
    log.put("last=1")
    settings = {"map_engine": "partitioned", "segment_bytes": 9_000, "min_cleanable_dirty_ratio": 0.0}
    cli = TierCli(tmp_path / "home", {"cleaner": settings})
    cli.bring(log.write(tmp_path / "log", indexes=True))
    cli.run()
    if spills:
        monkeypatch.setattr(index, "_gate_share", lambda settings: 0)
        monkeypatch.setattr(index, "_gate_on_disk", lambda job: False)
    else:
        monkeypatch.setattr(index, "GATE_KEY_BYTES", 1 << 40)
    log.roll()
    log.put(*(f"k{number}-0=2" for number in range(6)))
    log.roll()
    log.put("last=2")
    cli.bring(log.write(tmp_path / "more", indexes=True))
    (row,) = cli.ask("run", "--force").document["partitions"]
    assert (row["status"], row["passes"]) == ("cleaned", 3), row["reason"]
    assert row["segments_skipped"] > 0
    assert latest(cli.export(tmp_path / "cleaned")) == latest(tmp_path / "log") | latest(tmp_path / "more")
