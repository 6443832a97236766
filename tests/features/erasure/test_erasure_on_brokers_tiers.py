"""`erasure --expedite` on a tier that brokers write: through the metadata topic, and the newest segment stays the brokers'."""

from __future__ import annotations

from pathlib import Path

from compactor.access.tier import Tier
from compactor.features.erasure.partition import KeySearchRequest, survey_partition
from compactor.features.erasure.topic import (
    ErasureReportHeader,
    erasure_report_json,
    expedite_erasure,
    partitions_of_topic,
    survey_topic,
)
from compactor.model.ids import TopicPartition
from tests.builders import LogBuilder, log_of
from tests.support.memory_brokers import MemoryBrokers

NAME = TopicPartition("orders", 0)


def asked(brokers: MemoryBrokers, *keys: bytes) -> KeySearchRequest:
    return KeySearchRequest(keys, brokers.clock_ms())


def held(opened: Tier, question: KeySearchRequest) -> list[tuple[str, str]]:
    return sorted((holder.state.value, holder.what) for holder in survey_partition(opened, NAME, question).holders)


def test_what_is_needed_is_done_up_to_the_brokers_newest_segment(tmp_path: Path) -> None:
    cleaner = {"bloom": False}
    brokers = MemoryBrokers(tmp_path / "brokers", {"cleaner": cleaner, "publish": {"grace_ms": 0}})
    brokers.topic("orders", {"delete.retention.ms": "0"})
    log = log_of("a=1 b=1; /; a c=1; /; d=1; /; b")
    brokers.tier(NAME, log.write(tmp_path / "orders-0"))
    opened = brokers.opened()
    question = asked(brokers, b"a")
    assert held(opened, question) == [("live", "superseded"), ("live", "tombstone")]
    told: list[str] = []
    brokers.hurried_ms += 1_000
    found = expedite_erasure(
        opened, survey_partition(opened, NAME, question), asked(brokers, b"a"), shorten_grace=False, report_step=told.append
    )
    assert found.holders == (), (told, found.holders)
    assert any("cleaned" in line for line in told)
    # b was deleted in the newest segment: until the next one is tiered nobody touches it, and the value before it has to wait, too.
    rest = survey_partition(opened, NAME, asked(brokers, b"b"))
    (tombstone,) = [one for one in rest.holders if one.what == "tombstone"]
    assert "the newest one is not cleaned" in tombstone.waits_for
    everything = survey_topic(opened, partitions_of_topic(opened, "orders"), asked(brokers, b"a", b"b"))
    report = erasure_report_json(ErasureReportHeader({}, "orders", brokers.clock_ms(), ("digest of a", "digest of b")), everything, told)
    assert [key["erased"] for key in report["keys"]] == [True, False]
    assert any("have not uploaded" in one["what"] for one in report["not_covered"])


def test_what_lies_behind_the_end_up_to_which_a_segment_is_read(tmp_path: Path) -> None:
    brokers = MemoryBrokers(tmp_path / "brokers", {"cleaner": {"bloom": False}, "publish": {"grace_ms": 0}})
    brokers.topic("orders", {"delete.retention.ms": "0"})
    lost = log_of("x=1; a=1")
    brokers.tier(NAME, lost.write(tmp_path / "lost" / "orders-0"))
    # An unclean election: another leader has written offset 1 anew.
    kept = LogBuilder(next_offset=1)
    kept.leader_epoch = 2
    kept.add("b=1; /; c=1")
    opened = brokers.opened()
    brokers.restart(NAME)
    brokers.tier(NAME, kept.write(tmp_path / "kept" / "orders-0"))
    assert [one.has_unread_tail for one in opened.open_partition_log(NAME).refresh_and_check_gaps().live] == [
        True,
        False,
        False,
    ]
    question = asked(brokers, b"a")
    assert held(opened, question) == [("live", "record")]
    assert held(opened, asked(brokers, b"x")) == [("live", "value")]
    told: list[str] = []
    brokers.hurried_ms += 1_000
    found = expedite_erasure(
        opened, survey_partition(opened, NAME, question), asked(brokers, b"a"), shorten_grace=False, report_step=told.append
    )
    assert found.holders == (), (told, found.movable, found.holders)
    assert held(opened, asked(brokers, b"a")) == []
