"""A cleaner that misbehaves: the equivalence gate stands between it and the tier, and readers keep what they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compactor.cleaner.passes.rewrite import CleanedSegment, RewritePass
from compactor.round import rewrite as worker
from tests.builders import LZ4, LogBuilder
from tests.plain_format import Batch, read_batches
from tests.plain_log import indexes_of
from tests.support.damage import encoded, settled
from tests.support.tier_cli import TierCli, latest, visible

Damage = Callable[[list[Batch]], list[Batch]]


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


def misbehave(monkeypatch: pytest.MonkeyPatch, damage: Damage) -> None:
    """What the cleaner wrote is changed on disk before anybody looks at it; CRCs and indexes fit."""

    class Wrong(RewritePass):
        def rewrite(self, *arguments: Any, **options: Any) -> CleanedSegment:
            cleaned = super().rewrite(*arguments, **options)
            batches = damage(list(read_batches(cleaned.paths["log"].read_bytes())))
            data = b"".join(encoded(each) for each in batches)
            cleaned.paths["log"].write_bytes(data)
            index, timeindex = indexes_of(read_batches(data), cleaned.base, self.index_interval_bytes)
            cleaned.paths["index"].write_bytes(index)
            cleaned.paths["timeindex"].write_bytes(timeindex)
            return replace(cleaned, size=len(data))

    monkeypatch.setattr(worker, "RewritePass", Wrong)


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
    """Which shows that nothing else noticed the damage of the other tests."""
    cli.set(cleaner={"verify_before_publish": False})
    misbehave(monkeypatch, DAMAGES["a value swapped"][0])
    row = cli.run()
    assert row["status"] == "cleaned", str(row)
