"""A cleaner that misbehaves: the equivalence gate stands between it and the tier, and readers keep what they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
