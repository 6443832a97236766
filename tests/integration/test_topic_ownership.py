"""Two control stores over one broker-managed tier: each topic belongs to one of them, and the other one is refused before it writes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.cli import tiers
from compactor.control.audit import AUDIT_PREFIX
from compactor.control.identity import OWNER_PREFIX, read_topic_owner
from compactor.control.leadership import acquire_leadership
from compactor.control.logs import open_catalog
from compactor.errors import BadData, UsageError
from compactor.model.ids import TopicPartition
from compactor.round.compaction import RoundReport
from compactor.storage.factory import open_store
from compactor.upkeep.broker_verify import list_partition_objects
from compactor.upkeep.retire import retire_partition
from tests.support.deployment import GrowingLog
from tests.support.memory_brokers import MemoryBrokers
from tests.support.tier_cli import TierCli, typed

ORDERS, BILLS = TopicPartition("orders", 0), TopicPartition("bills", 0)


@pytest.fixture
def brokers(tmp_path: Path) -> MemoryBrokers:
    cleaner = {"segment_bytes": 12_000, "min_cleanable_dirty_ratio": 0.0}
    made = MemoryBrokers(tmp_path / "brokers", {"cleaner": cleaner, "publish": {"grace_ms": 0}, "lease": {"ttl_ms": 300}})
    for name in (ORDERS, BILLS):
        made.topic(name.topic)
        made.tier(name, GrowingLog(*name, tmp_path / f"log of {name}", random.Random(4)).write_part(8))
    return made


def with_control_store(brokers: MemoryBrokers, name: str) -> Tier:
    """A process of another deployment over the same tier."""
    tier = brokers.opened()
    folder = brokers.folder / name
    folder.mkdir(exist_ok=True)
    control = open_store(folder.as_uri(), holds_control_records=True)
    ports = replace(tier.ports, control=control, urgent=control)
    tier = replace(tier, ports=ports, catalog=open_catalog(ports))
    tier.identity.read_or_create_catalog()
    return tier


def run(tier: Tier, name: TopicPartition = ORDERS) -> RoundReport:
    return compact(tier, name, tier.ports.clock_ms(), force=True)


def owner_objects(tier: Tier) -> list[str]:
    return [info.key for info in tier.ports.data.list(OWNER_PREFIX)]


def test_the_second_control_store_is_refused_before_it_writes_and_names_both(
    brokers: MemoryBrokers, caplog: pytest.LogCaptureFixture
) -> None:
    first = brokers.opened()
    assert run(first).status == "cleaned"
    assert "topic orders" in caplog.text
    assert f"is compacted with the control store {first.ports.control.url} from now on" in caplog.text
    second = with_control_store(brokers, "another")
    before = {info.key for info in second.ports.data.list("")}
    log = second.open_partition_log(ORDERS, caller_runs_round=True)
    for write in (
        lambda: run(second),
        lambda: retire_partition(second.ports, log, second.lease, second.retention),
        lambda: acquire_leadership(second.ports, log, second.lease),
    ):
        with pytest.raises(UsageError) as refused:
            write()
        assert first.ports.control.url in str(refused.value)
        assert second.ports.control.url in str(refused.value)
        assert "topics takeover orders" in refused.value.hint
    assert {info.key for info in second.ports.data.list("")} == before
    assert log.refresh().slot == 0, "not even its own control log is begun"
    caplog.clear()
    assert run(brokers.opened()).status != "refused", "the owner goes on"
    assert "from now on" not in caplog.text


def test_disjoint_topics_of_a_tier_may_belong_to_two_control_stores(brokers: MemoryBrokers) -> None:
    first, second = brokers.opened(), with_control_store(brokers, "another")
    assert run(first, ORDERS).status == "cleaned"
    assert run(second, BILLS).status == "cleaned"
    with pytest.raises(UsageError):
        run(first, BILLS)


def test_topics_of_the_same_name_in_two_clusters_have_owners_of_their_own(brokers: MemoryBrokers) -> None:
    """Several clusters may share a prefix: their topics differ by their ids."""
    assert run(brokers.opened()).status == "cleaned"
    brokers.topic("orders", number=1)
    with_control_store(brokers, "another").ports.require_topic_ownership(ORDERS)
    assert len(owner_objects(brokers.opened())) == 2


def test_a_takeover_is_recorded_beside_the_owner_before_it(brokers: MemoryBrokers) -> None:
    first, second = brokers.opened(), with_control_store(brokers, "another")
    run(first)
    ownership = second.ports.topic_ownership
    assert ownership is not None
    assert ownership.take_over(second.ports, ORDERS) == first.ports.control.url
    assert ownership.take_over(second.ports, ORDERS) == second.ports.control.url, "once is enough"
    assert len(owner_objects(second)) == 2
    assert run(second).status in ("cleaned", "up_to_date", "skipped")
    with pytest.raises(UsageError, match="another"):
        run(first)


def test_a_takeover_by_command_says_whose_the_topics_were(brokers: MemoryBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = brokers.opened(), with_control_store(brokers, "another")
    run(first)
    monkeypatch.setattr(tiers, "open_configured_tier", lambda args, **how: second)
    config = brokers.folder / "tier.toml"
    assert config.exists()
    for status, before in (("taken", first), ("unchanged", second)):
        answer = typed(config, "topics", "takeover", "orders", "--reason", "moved")
        assert answer.code == 0, answer
        topic_id = second.metadata.topic_id(ORDERS)
        row = {"topic": "orders", "topic_id": topic_id, "status": status, "previous_control_url": before.ports.control.url}
        assert answer.document == {"topics": [row]}
    recorded = [first.ports.control.get(info.key) for info in first.ports.control.list(AUDIT_PREFIX)]
    assert any(b"topics takeover" in each and b"moved" in each for each in recorded)
    assert typed(config, "topics", "takeover", "unknown").code == 2


def test_only_topics_of_a_broker_managed_tier_are_taken_over(tmp_path: Path) -> None:
    answer = TierCli(tmp_path / "cli").ask("topics", "takeover", "orders")
    assert (answer.code, "broker-managed" in answer.stderr) == (2, True)


def test_reading_takes_nothing_and_is_refused_nothing(brokers: MemoryBrokers) -> None:
    run(brokers.opened())
    second = with_control_store(brokers, "another")
    assert second.open_partition_log(ORDERS).refresh().has_segments
    assert second.open_partition_log(BILLS).refresh().has_segments
    assert len(owner_objects(second)) == 1


def test_owners_lie_beside_what_the_brokers_plug_in_lists(brokers: MemoryBrokers) -> None:
    tier = brokers.opened()
    run(tier)
    (key,) = owner_objects(tier)
    assert not key.startswith("kafka-tiered-storage/")
    found = list_partition_objects(tier, ORDERS)
    assert (found.orphans, found.strangers) == ([], [])
    document = json.loads(tier.ports.data.get(key))
    assert (document["topic"], document["control_url"]) == ("orders", tier.ports.control.url)


def test_an_owner_that_cannot_be_read_is_no_owner_of_ones_own(brokers: MemoryBrokers) -> None:
    tier = brokers.opened()
    run(tier)
    (key,) = owner_objects(tier)
    tier.ports.data.put(key, b"{")
    with pytest.raises(BadData, match="names no control store"):
        tier.ports.require_topic_ownership(ORDERS)
    assert tier.ports.topic_ownership is not None
    assert tier.ports.topic_ownership.take_over(tier.ports, ORDERS) == ""
    assert read_topic_owner(tier.ports.data, tier.metadata.topic_id(ORDERS)).number == 2
    tier.ports.require_topic_ownership(ORDERS)
