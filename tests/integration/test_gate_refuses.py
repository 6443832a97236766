"""A cleaner that misbehaves: the equivalence gate stands between it and the tier, and readers keep what they have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from compactor.cleaner.gate.parser import LatestRecordTable
from compactor.round import pass_one
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
    "a record dropped": (on_first_records(lambda each: settled(each, each.records[1:])), "the last record of a key is missing"),
    "a value swapped": (
        on_first_records(lambda each: settled(each, [r._replace(value=b"another") for r in each.records])),
        "not the source's",
    ),
    "a marker lost": (lambda batches: [each for each in batches if not each.control], "a control batch is missing"),
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


@pytest.mark.parametrize(("engine", "disk_bytes"), [("auto", 9_000_000), ("partitioned", 9_000_000), ("partitioned", 90_000)])
def test_beyond_its_memory_the_gate_checks_a_range_of_the_keys_and_the_same_range_until_a_round_is_published(
    engine: str, disk_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the cleaner's keys in memory, on the disk, and with so little disk that the log is read several times."""
    log = LogBuilder()
    for number in range(6):
        for begin in range(0, 800, 40):
            log.put(*(f"k{key}={number}" for key in range(begin + number, begin + 40)))
        log.roll()
    log.put("last=1")
    settings = {"map_engine": engine, "disk_budget_bytes": disk_bytes, "segment_bytes": 30_000, "min_cleanable_dirty_ratio": 0.0}
    cli = TierCli(tmp_path / "home", {"cleaner": settings})
    cli.bring(log.write(tmp_path / "log", indexes=True))
    monkeypatch.setattr(pass_one, "LatestRecordTable", lambda budget_bytes, rows: LatestRecordTable(24 * 900, rows))

    def refused_by_gate(key: bytes) -> bool:
        with monkeypatch.context() as patched:
            misbehave(patched, partial(without, key))
            (row,) = cli.ask("run", "--force").document["partitions"]
        assert row["status"] == "quarantined", "what the gate does not look up the balance has counted"
        by_gate = "the last record of a key is missing" in row["reason"] and str(key) in row["reason"]
        assert by_gate or row["reason"].startswith("balance: ")
        return by_gate

    refused = {}
    for number in range(0, 800, 40):  # until there is a key of either kind: half of the keys are looked up
        key = f"k{number}".encode()
        refused[key] = refused_by_gate(key)
        if len(set(refused.values())) == 2:
            break
    assert set(refused.values()) == {True, False}
    for key, before in list(refused.items())[-2:]:
        assert refused_by_gate(key) == before
    row = cli.run()
    assert row["status"] == "cleaned"
    assert (row["passes"] > 1) == (disk_bytes < 1_000_000)
    assert latest(cli.export(tmp_path / "cleaned")) == latest(tmp_path / "log")
    (run,) = [run for run in cli.do("runs", "list", cli.named)["runs"] if run["status"] == "cleaned"]
    stats = run["stats"]
    assert 0 < stats["gate_keys"] < stats["map_entries"]
    assert stats["gate_coverage"] == 0.5
