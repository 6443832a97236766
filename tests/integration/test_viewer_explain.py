"""`explain`: each reason and each fate once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compactor.control.leadership import hold_leadership
from compactor.control.ports import LeaseDurations
from compactor.model.ids import TopicPartition
from tests.builders import LZ4, LogBuilder, log_of
from tests.support.deployment import Deployment

HOUR = 3_600_000


@pytest.fixture
def log() -> LogBuilder:
    """Offsets 0 to 6: a twice, a tombstone of t, an aborted c, a record without a key."""
    made = log_of("a=1 b=1")
    made.put("a=2", codec=LZ4)
    made.add("t; 7t: c=9; 7 aborts; =x")
    return made


@pytest.fixture
def cleaned(tmp_path: Path, log: LogBuilder) -> Deployment:
    """That log, cleaned once; the replaced segments are kept."""
    made = Deployment(tmp_path, {"cleaner": {"delete_retention_ms": HOUR, "keyless_records": "drop"}})
    made.bring(log.write(tmp_path / "part-1"))
    made.do("run", "--force", "--now", 10 * HOUR)
    return made


@pytest.fixture
def grown(cleaned: Deployment, log: LogBuilder) -> Deployment:
    """Two more segments that nobody has cleaned: a third a (7), and a transaction that does not end (8)."""
    log.add("a=3; /; 8t: d=1")
    cleaned.bring(log.write(cleaned.folder / "part-2"))
    return cleaned


def ask(deployment: Deployment, *arguments: object) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """The answer, and the facts by kind."""
    found = deployment.do("explain", "orders-0", *arguments)
    facts: dict[str, list[dict[str, Any]]] = {}
    for fact in found["facts"]:
        facts.setdefault(fact["kind"], []).append(fact)
    return found["answer"], facts


class TestPartition:
    def test_nothing_is_dirty(self, cleaned: Deployment) -> None:
        answer, facts = ask(cleaned, "--now", 10 * HOUR)
        assert answer == "It is not due: nothing is dirty."
        assert facts["last_round"][0]["status"] == "cleaned"
        assert "(dirty)" in facts["rewritten"][0]["text"]
        assert facts["horizons"][0]["next_ms"] == 11 * HOUR
        assert facts["waiting"][0]["segments"] == 1

    def test_it_is_due(self, grown: Deployment) -> None:
        answer, facts = ask(grown, "--now", 12 * HOUR)
        assert answer.startswith("It is due: ")
        assert facts["horizons"][0]["passed"] == 1
        assert facts["open_transaction"][0]["offset"] == 8
        assert facts["dirty"][0]["uncleanable_from"] == 8

    def test_a_lag_keeps_it(self, grown: Deployment) -> None:
        grown.set(cleaner={"min_compaction_lag_ms": 9_000_000_000_000})
        answer, facts = ask(grown, "--now", 10 * HOUR)
        assert answer == "It is not due: min_compaction_lag_ms has not passed."
        assert facts["min_compaction_lag"][0]["min_compaction_lag_ms"] == 9_000_000_000_000

    def test_the_ratio_keeps_it(self, grown: Deployment) -> None:
        grown.set(cleaner={"min_cleanable_dirty_ratio": 0.9})
        answer, _ = ask(grown, "--now", 10 * HOUR)
        assert "is not above 0.9" in answer

    def test_somebody_leads_it(self, grown: Deployment) -> None:
        tier = grown.opened()
        with hold_leadership(tier.ports, tier.open_partition_log(TopicPartition("orders", 0)), LeaseDurations(60_000)):
            answer, facts = ask(grown)
            assert answer.startswith(f"{tier.ports.holder} holds its lease (epoch 1) until ")
            assert facts["lease"][0]["epoch"] == 1

    @pytest.mark.damages
    def test_it_is_quarantined(self, grown: Deployment) -> None:
        victim = max(grown.tier.glob("orders-0/*7-" + "?" * 22 + ".log"))
        victim.write_bytes(b"x" * victim.stat().st_size)
        assert grown.ask("run", "--force", "orders-0").code == 3
        answer, facts = ask(grown)
        assert answer.startswith("It is quarantined: bad data")
        assert facts["quarantine"][0]["failures"] == 1

    def test_it_is_empty(self, tmp_path: Path, cleaned: Deployment) -> None:
        assert cleaned.ask("explain", "payments-0").code == 2


class TestKey:
    def test_latest_superseded_and_removed(self, grown: Deployment) -> None:
        answer, facts = ask(grown, "--key", "a")
        assert answer == "The key 'a' is a value of 1 B, at offset 7; 1 other records of it are still there."
        assert [fact["offset"] for fact in facts["latest"]] == [7]
        assert [(fact["offset"], fact["superseded_by"]) for fact in facts["superseded"]] == [(2, 7)]
        assert [fact["offset"] for fact in facts["removed"]] == [0]

    def test_the_only_one(self, grown: Deployment) -> None:
        assert ask(grown, "--key", "b")[0] == "The key 'b' is a value of 1 B, at offset 1."

    def test_a_tombstone_and_its_horizon(self, cleaned: Deployment) -> None:
        answer, facts = ask(cleaned, "--key", "t", "--now", 10 * HOUR)
        assert answer.startswith("The key 't' is deleted, by the tombstone at offset 3")
        assert facts["latest"][0]["delete_horizon_ms"] == 11 * HOUR
        assert "stays until its delete horizon" in facts["latest"][0]["text"]
        _, facts = ask(cleaned, "--key", "t", "--now", 11 * HOUR)
        assert "has passed" in facts["latest"][0]["text"]

    def test_aborted_records_are_gone_and_undecided_ones_do_not_count(self, grown: Deployment) -> None:
        answer, facts = ask(grown, "--key", "c")
        assert answer.startswith("The key 'c' is no longer in the partition")
        assert [(fact["offset"], fact["transaction"]) for fact in facts["removed"]] == [(4, "abort")]
        answer, facts = ask(grown, "--key", "d")
        assert answer.startswith("The key 'd' has no committed record")
        assert [fact["offset"] for fact in facts["undecided"]] == [8]

    def test_keys_that_are_no_text(self, grown: Deployment) -> None:
        assert ask(grown, "--key", "base64:Yg==")[0].endswith("at offset 1.")
        assert grown.ask("explain", "orders-0", "--key", "base64:?").code == 2

    def test_a_key_that_never_was(self, grown: Deployment) -> None:
        assert ask(grown, "--key", "z") == ("The key 'z' is not in the partition.", {})


class TestOffset:
    def test_superseded_and_cleaned_away(self, grown: Deployment) -> None:
        answer, facts = ask(grown, "--offset", 0)
        assert answer.startswith("Offset 0 held 'a' and was cleaned away by run ")
        assert answer.endswith("offset 2 supersedes it.")
        assert [fact["offset"] for fact in facts["superseded_by"]] == [7, 2]

    def test_aborted_and_cleaned_away(self, grown: Deployment) -> None:
        assert ask(grown, "--offset", 4)[0].endswith("its transaction was aborted.")

    def test_without_a_key(self, grown: Deployment) -> None:
        answer, facts = ask(grown, "--offset", 6)
        assert "cleaned away" in answer
        assert "no key" in facts["removed"][0]["text"]

    def test_still_there(self, grown: Deployment) -> None:
        assert ask(grown, "--offset", 1)[0].endswith("the latest value of its key: it stays.")
        assert "superseded by offset 7, which no round has cleaned yet" in ask(grown, "--offset", 2)[0]
        assert "stays until its delete horizon" in ask(grown, "--offset", 3, "--now", 10 * HOUR)[0]
        assert "not decided" in ask(grown, "--offset", 8)[0]

    def test_a_marker(self, log: LogBuilder, tmp_path: Path) -> None:
        fresh = Deployment(tmp_path)
        fresh.bring(log.write(tmp_path / "part-1"))
        assert ask(fresh, "--offset", 5)[0].startswith("Offset 5, abort marker of producer 7: ")

    def test_a_tombstone_that_no_round_has_seen(self, log: LogBuilder, tmp_path: Path) -> None:
        fresh = Deployment(tmp_path)
        fresh.bring(log.write(tmp_path / "part-1"))
        assert "no round has seen yet" in ask(fresh, "--offset", 3)[0]

    def test_outside_of_the_tier(self, grown: Deployment) -> None:
        assert ask(grown, "--offset", 99)[0] == "Offset 99 is not in the tier, which holds offsets 0 to 8."

    def test_when_what_was_replaced_is_deleted(self, grown: Deployment) -> None:
        grown.do("retire", "--now", 4 * 10**12, "--force-now")
        assert ask(grown, "--offset", 0)[0].endswith("What it held is deleted.")
        assert ask(grown, "--key", "c")[0] == "The key 'c' is not in the partition."
