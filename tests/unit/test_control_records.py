"""Control records: written and read back, and refused by name where they cannot be believed."""

from __future__ import annotations

from typing import Any

import pytest

from compactor.constants import CompactorEpoch, Offset, TopicId
from compactor.control import records
from compactor.control.records import (
    VERSION,
    BadControlRecord,
    BrokerLogStartSeen,
    CatalogRecord,
    IncarnationOpened,
    PartitionRecord,
    RunEnded,
    TopicRecreated,
    TopicsConfirmed,
    TopicsInspected,
    append_checksum,
    decode_checksummed_json,
    verify_and_strip_checksum,
)
from compactor.errors import gravest_exit_code

WHERE = "sim://control/partitions/t-0/log/00000000000000000007.json"
ENDED = RunEnded(leader_epoch=CompactorEpoch(3), run_id="r", status="cleaned", stats={"seconds": 1.5, "n": 3})
RECORD = PartitionRecord(version=VERSION, log="t-0", slot=7, incarnation="me", attempt=2, at_ms=5, body=ENDED)
SEALED = append_checksum(RECORD.model_dump_json().encode())


def test_a_record_reads_back_as_it_was_written() -> None:
    assert decode_checksummed_json(PartitionRecord, SEALED, WHERE) == RECORD


@pytest.mark.parametrize("length", range(len(SEALED)))
def test_a_truncated_record_is_named_and_refused(length: int) -> None:
    with pytest.raises(BadControlRecord) as error:
        decode_checksummed_json(PartitionRecord, SEALED[:length], WHERE)
    assert error.value.segment == WHERE
    assert gravest_exit_code([error.value.exit_code]) == 3


@pytest.mark.parametrize("position", range(len(SEALED)))
def test_a_flipped_bit_is_refused_wherever_it_is(position: int) -> None:
    broken = bytearray(SEALED)
    broken[position] ^= 1
    with pytest.raises(BadControlRecord):
        decode_checksummed_json(PartitionRecord, bytes(broken), WHERE)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"null", b"\xff" * 300, b"<html>503</html>", b"{}", append_checksum(b"null"), append_checksum(b"{}"), append_checksum(b"[1]")],
)
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(BadControlRecord):
        decode_checksummed_json(PartitionRecord, garbage, WHERE)


def test_a_future_version_is_named_as_such() -> None:
    document = (
        verify_and_strip_checksum(SEALED, WHERE)
        .replace(b'"version":%d' % VERSION, b'"version":9')
        .replace(b'"attempt"', b'"novelty":1,"attempt"')
    )
    with pytest.raises(BadControlRecord, match="version 9") as error:
        decode_checksummed_json(PartitionRecord, append_checksum(document), WHERE)
    assert "Upgrade" in error.value.hint


ID = TopicId("id")
SEEN = BrokerLogStartSeen(leader_epoch=CompactorEpoch(0), offset=Offset(5))
OPENED = IncarnationOpened(topic_id=ID, by="me")
NEW_IN_7: list[tuple[Any, str, Any]] = [(PartitionRecord, "t-0", SEEN), (PartitionRecord, "t-0", OPENED)]
NEW_IN_7 += [
    (CatalogRecord, "catalog", body)
    for body in (
        TopicsConfirmed(cluster_id="c", topic_ids={"t": ID}),
        TopicRecreated(topic="t", superseded_id=ID, topic_id=TopicId("other"), cluster_id="c", by="me"),
        TopicsInspected(cluster_id="c", missing=(ID,), present=(), asked_ms=1),
    )
]


@pytest.mark.parametrize(("kind", "log", "body"), NEW_IN_7)
def test_a_program_of_format_version_6_refuses_what_version_7_has_added_by_the_version(
    kind: Any, log: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know the type of the record, and says that it needs an upgrade instead of calling the record corrupt."""
    record = kind(version=VERSION, log=log, slot=7, incarnation="me", attempt=2, at_ms=5, body=body)
    document = record.model_dump_json().encode()
    assert decode_checksummed_json(kind, append_checksum(document), WHERE) == record
    unknown = append_checksum(document.replace(f'"type":"{body.type}"'.encode(), b'"type":"of_version_7"'))
    with pytest.raises(BadControlRecord, match="body"):
        decode_checksummed_json(kind, unknown, WHERE)
    monkeypatch.setattr(records, "VERSION", 6)
    with pytest.raises(BadControlRecord, match="of format version 8, this program knows version 6") as error:
        decode_checksummed_json(kind, unknown, WHERE)
    assert "Upgrade" in error.value.hint


def test_a_program_of_format_version_7_refuses_settings_of_topics_by_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not clean by its file alone what a topic's settings protect."""
    body = TopicsConfirmed(cluster_id="c", topic_ids={"t": ID}, settings={"t": {"min.compaction.lag.ms": "5"}})
    record = CatalogRecord(version=VERSION, log="catalog", slot=7, incarnation="me", attempt=2, at_ms=5, body=body)
    document = record.model_dump_json().encode()
    assert decode_checksummed_json(CatalogRecord, append_checksum(document), WHERE) == record
    monkeypatch.setattr(records, "VERSION", 7)
    with pytest.raises(BadControlRecord, match="of format version 8, this program knows version 7"):
        decode_checksummed_json(CatalogRecord, append_checksum(document.replace(b'"settings"', b'"unknown"')), WHERE)


def test_an_unknown_field_or_type_is_refused_and_named() -> None:
    document = verify_and_strip_checksum(SEALED, WHERE)
    with pytest.raises(BadControlRecord, match="novelty"):
        decode_checksummed_json(PartitionRecord, append_checksum(document.replace(b'"attempt"', b'"novelty":1,"attempt"')), WHERE)
    with pytest.raises(BadControlRecord, match="body"):
        decode_checksummed_json(PartitionRecord, append_checksum(document.replace(b"run_ended", b"run_began")), WHERE)
