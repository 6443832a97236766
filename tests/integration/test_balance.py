"""The balance of a round: what a cleaner loses or makes up is noticed without the gate, and what a segment held stays on record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compactor.cleaner import retention as chunks
from compactor.control.logs import PartitionLog
from compactor.control.state import ControlLogState, PartitionState
from compactor.model.segment import SegmentFile
from compactor.records.encode import EncodedBatches, encode_cleaned_chunk
from tests.builders import LZ4, LogBuilder, log_of
from tests.plain_format import Batch
from tests.support.damage import Damage, misbehave, settled
from tests.support.tier_cli import TierCli, latest


def story() -> LogBuilder:
    log = LogBuilder()
    for number in range(3):
        log.put(f"a={number}", f"b={number}", f"only-{number}=1", f"too-{number}=1")
        log.put(f"whole-{number}=1", f"left-{number}=1", codec=LZ4)
        log.put(f"c={number}", "x=1", pid=number, txn=True, codec=LZ4)
        log.end(number, commit=number != 1)
        log.roll()
    log.put("last=1")
    return log


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    cli = TierCli(tmp_path / "home", {"cleaner": {"min_cleanable_dirty_ratio": 0.0, "verify_before_publish": False}})
    cli.bring(story().write(tmp_path / "log", indexes=True))
    return cli


def at_first(wanted: Callable[[Batch], bool], change: Callable[[Batch], list[Batch]]) -> Damage:
    def damage(batches: list[Batch]) -> list[Batch]:
        at = next(number for number, each in enumerate(batches) if wanted(each))
        return [*batches[:at], *change(batches[at]), *batches[at + 1 :]]

    return damage


def rewritten(batch: Batch) -> bool:
    return any(record.key and record.key.startswith(b"only") for record in batch.records)


def untouched(batch: Batch) -> bool:
    return any(record.key and record.key.startswith(b"whole") for record in batch.records)


DAMAGES: dict[str, Damage] = {
    "a record lost": at_first(rewritten, lambda each: [settled(each, each.records[1:])]),
    "a record twice": at_first(rewritten, lambda each: [settled(each, [each.records[0]._replace(offset=1), *each.records])]),
    "a record made up": at_first(rewritten, lambda each: [settled(each, [each.records[0]._replace(offset=0, key=b"new"), *each.records])]),
    "a value swapped": at_first(rewritten, lambda each: [settled(each, [r._replace(value=b"2") for r in each.records])]),
    "a batch lost": at_first(untouched, lambda each: []),
    "a record lost of a batch that stays": at_first(untouched, lambda each: [settled(each, each.records[1:])]),
    "a marker lost": at_first(lambda each: each.control, lambda each: []),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_lost_or_made_up_is_noticed_without_the_gate(cli: TierCli, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        misbehave(patched, DAMAGES[name])
        answer = cli.ask("run", "--force")
    (row,) = answer.document["partitions"]
    assert (answer.code, row["status"], row["segments_out"]) == (3, "quarantined", 0), row
    assert row["reason"].startswith("balance: group 0: "), row["reason"]
    (run,) = cli.do("runs", "list")["runs"]
    assert (run["status"], run["balance"]) == ("quarantined", None)
    assert "balance: group 0" in run["reason"]
    assert cli.run()["status"] == "cleaned", "the next round, with a cleaner that is right"


@pytest.mark.parametrize("change", ["lost", "kept"])
def test_a_wrong_decision_of_a_single_record_is_noticed(cli: TierCli, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is not what was decided."""

    def wrong(*arguments: Any) -> EncodedBatches:
        decisions = arguments[5]
        keep = decisions.keep_flags.copy()
        if "orders-0" in arguments[7]:
            changed = (keep if change == "lost" else ~keep).nonzero()[0]
            keep[changed[:1]] = change != "lost"
        write: Callable[..., EncodedBatches] = encode_cleaned_chunk
        return write(*arguments[:5], decisions._replace(keep_flags=keep), *arguments[6:])

    with monkeypatch.context() as patched:
        patched.setattr(chunks, "encode_cleaned_chunk", wrong)
        (row,) = cli.ask("run", "--force").document["partitions"]
    assert row["status"] == "quarantined"
    assert row["reason"].startswith("balance: group 0: the batches that were looked into hold"), row["reason"]


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("engine", ["memory", "partitioned"])
def test_the_history_has_the_balance(cli: TierCli, gate: bool, engine: str, tmp_path: Path) -> None:
    cli.set(cleaner={"verify_before_publish": gate, "map_engine": engine})
    before = latest(cli.export(tmp_path / "before"))
    assert cli.run()["status"] == "cleaned"
    run = cli.do("runs", "list")["runs"][-1]
    balance = run["balance"]
    assert balance["records_dropped"]["superseded"]["count"] > 0
    assert balance["dropped"]["aborted"]["count"] == 1
    counts = {name: balance[name]["count"] for name in ("sources", "left", "opened", "records", "written")}
    assert counts["sources"] == counts["left"] + counts["opened"] + sum(each["count"] for each in balance["dropped"].values())
    assert counts["records"] == counts["written"] + sum(each["count"] for each in balance["records_dropped"].values())
    live = cli.do("verify", "--deep")
    assert live == {"ok": True, "problems": [p for p in live["problems"] if p["kind"] == "waiting"]}
    shown = cli.ask("runs", "show", run["run_id"], output="table").document
    assert "it adds up" in shown
    assert latest(cli.export(tmp_path / "after")) == before
    # What the last round left is what the next one finds.
    log = story()
    log.add("/; a=4 left-1=2; /; last=2")
    cli.bring(log.write(tmp_path / "longer", indexes=True))
    assert cli.run()["status"] == "cleaned"
    following = cli.do("runs", "list")["runs"][-1]
    assert following["content"] is not None
    assert following["balance"]["sources"]["count"] > 0
    assert cli.do("verify", "--deep")["ok"]


def test_verify_deep_finds_another_valid_segment(cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with the same offsets, size and times. That nothing is recorded of its bytes is as on a tier that brokers write."""
    log = log_of("a=9 b=9 only-9=1 too-9=1")
    log.put("whole-9=1", "left-9=1", codec=LZ4)
    log.put("c=9", "x=1", pid=0, txn=True, codec=LZ4)
    log.end(0, commit=True)
    (swapped,) = log.write(tmp_path / "other").glob("*.log")
    path = min(cli.tier.rglob("*.log"))
    before = path.read_bytes()
    assert len(before) == len(swapped.read_bytes())
    whole = PartitionLog.refresh_and_check_gaps

    def with_sizes_only(log: PartitionLog) -> ControlLogState:
        state: ControlLogState = whole(log)
        if not isinstance(state, PartitionState):
            return state  # the tier-wide log
        bare = [s.model_copy(update={"files": {kind: SegmentFile(size=f.size) for kind, f in s.files.items()}}) for s in state.live]
        return state.model_copy(update={"live": tuple(bare)})

    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "refresh_and_check_gaps", with_sizes_only)
        assert cli.do("verify", "--deep")["ok"]
        path.write_bytes(swapped.read_bytes())
        assert cli.do("verify")["ok"], "only the sum tells"
        answer = cli.ask("verify", "--deep")
    path.write_bytes(before)
    assert answer.code == 3
    assert [problem["kind"] for problem in answer.document["problems"]] == ["balance"]
