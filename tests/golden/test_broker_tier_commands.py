"""The commands on tiers that brokers wrote, without a broker: metadata from a snapshot, bytes from the tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden_cases import names
from tests.support.broker_metadata import broker_cli
from tests.support.broker_tiers import BrokerTier, aiven_tier, local_tier
from tests.support.tier_cli import TierCli

CASES = [*(("kafka-local", name) for name in names("tiered")), *(("aiven", name) for name in names("aiven"))]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("brokers")


def opened(layout: str, case: str, scratch: Path, folder: Path) -> tuple[BrokerTier, TierCli]:
    tier = local_tier(case, scratch) if layout == "kafka-local" else aiven_tier(case, scratch)
    return tier, broker_cli(folder, tier, layout)


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_topics_and_segments_are_what_metadata_says(layout: str, case: str, scratch: Path, tmp_path: Path) -> None:
    tier, cli = opened(layout, case, scratch, tmp_path)
    before, control = cli.digest(), sorted((tmp_path / "control").rglob("*"))
    segments = tier.segments
    expected = {
        "topic": "orders",
        "partition": 0,
        "segments": len(segments),
        "bytes": sum(segment.size_bytes for segment in segments),
        "start_offset": segments[0].start_offset,
        "end_offset": segments[-1].end_offset,
    }
    assert cli.do("topics") == {"partitions": [expected]}
    listed = cli.do("segments", "list", "orders-0")["segments"]
    states = {row["id"]: row["state"] for row in listed}
    assert states == {s.id: "COPY_SEGMENT_FINISHED" for s in segments} | {s.id: "COPY_SEGMENT_STARTED" for s in tier.unfinished}
    dumped = cli.do("segments", "dump", "orders-0", "--", segments[1].id)
    assert dumped["batches"][0]["base_offset"] >= segments[1].start_offset
    assert dumped["batches"][-1]["last_offset"] == segments[1].end_offset
    assert cli.digest() == before
    assert sorted((tmp_path / "control").rglob("*")) == control
