"""`erasure` on tiers that brokers wrote: what consumers were given of a key, and that the newest segment is the brokers'."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.golden.test_broker_tier_commands import consumed, opened


@pytest.mark.parametrize(("layout", "case"), [("kafka-local", "4.4.0"), ("aiven", "encrypted")])
def test_holders_are_the_segments_in_which_consumers_found_the_key(
    layout: str, case: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    tier, cli = opened(layout, case, tmp_path_factory.mktemp("tiers"), tmp_path)
    where = defaultdict(set)
    for row in consumed(tier, "read_uncommitted"):
        for segment in tier.segments:
            if row["key"] is not None and segment.start_offset <= row["offset"] <= segment.end_offset:
                where[row["key"]].add(segment.id)
    key = max(where, key=lambda one: len(where[one]))
    before = cli.digest()
    answer = cli.ask("erasure", "orders", "--key", key.decode())
    assert answer.code == 3, answer
    holders = [holder for holder in answer.document["holders"] if holder["certain"]]
    assert {holder["segment"] for holder in holders if holder["state"] == "live"} == where[key]
    newest = [holder for holder in holders if holder["segment"] == tier.segments[-1].id and holder["what"] != "value"]
    assert all("the newest one is not cleaned" in holder["waits_for"] for holder in newest)
    assert any("have not uploaded" in one["what"] for one in answer.document["not_covered"])
    assert cli.digest() == before
    # What a broker has begun and not finished holds whatever it holds.
    states = {holder["state"] for holder in answer.document["holders"]} - {"live"}
    assert states <= {"brokers"}
    assert cli.ask("erasure", "orders", "--key", "no such key").code == (3 if states else 0)
