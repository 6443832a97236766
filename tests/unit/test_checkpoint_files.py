"""Kafka's own checkpoint files."""

from __future__ import annotations

import pytest

from checkpoint.files import format_leader_epoch_checkpoint, parse_cleaner_offset_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset
from compactor.errors import BadData


def test_cleaner_offsets_are_read() -> None:
    text = "0\n2\norders 0 1234\norders 12 7\n"
    offsets = parse_cleaner_offset_checkpoint(text)
    assert offsets == {("orders", 0): 1234, ("orders", 12): 7}


def test_leader_epochs_read_as_they_were_written() -> None:
    text = "0\n2\n0 0\n5 1200\n"
    entries = parse_leader_epoch_checkpoint(text)
    assert entries == (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(5), Offset(1200)))
    assert format_leader_epoch_checkpoint(entries) == text


@pytest.mark.parametrize("text", ["", "0\n", "0\n0\n"])
def test_a_file_without_entries(text: str) -> None:
    assert parse_leader_epoch_checkpoint(text) == ()
    assert parse_cleaner_offset_checkpoint(text) == {}


def test_any_white_space_separates() -> None:
    assert parse_leader_epoch_checkpoint("0\n1\n3\t\t44  \n") == (EpochEntry(LeaderEpoch(3), Offset(44)),)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("1\n0\n", "version 1"),
        ("x\n0\n", "not a number"),
        ("0\n2\n0 0\n", "promises 2 entries, 1 follow"),
        ("0\n1\n0 0 0\n", "2 fields"),
        ("0\n1\n0 1x\n", "not a number"),
        ("0\n2\n3 10\n2 20\n", "does not follow"),
        ("0\n2\n3 10\n4 9\n", "does not follow"),
        ("0\n1\n2147483648 0\n", "out of range for 32 bits"),
        ("0\n1\n0 9223372036854775808\n", "out of range for 64 bits"),
        ("0\n1\n0 " + "9" * 5000 + "\n", "out of range"),
        ("0\n1\n-1 0\n", "negative"),
        ("0\n1\n0 -5\n", "negative"),
    ],
)
def test_what_kafka_would_not_read_is_named(text: str, cause: str) -> None:
    with pytest.raises(BadData, match=cause) as error:
        parse_leader_epoch_checkpoint(text, "log/leader-epoch-checkpoint")
    assert error.value.segment == "log/leader-epoch-checkpoint"


def test_the_highest_numbers_that_kafka_has() -> None:
    assert parse_leader_epoch_checkpoint("0\n1\n2147483647 9223372036854775807\n") == (
        EpochEntry(LeaderEpoch(2**31 - 1), Offset(2**63 - 1)),
    )
    with pytest.raises(BadData, match="out of range for 32 bits"):
        parse_cleaner_offset_checkpoint("0\n1\norders 2147483648 0\n")
