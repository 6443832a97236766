"""The judge of reads: it accepts what compaction may do, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.read_checker import FoundRecord, Outcome, PartitionHistory, Read, SentRecord, judge_read

Change = Callable[[list[FoundRecord]], list[FoundRecord]]


def history() -> PartitionHistory:
    """Offsets 0 to 7: a=0, b=1, a=2 (aborted), b=3, c=4, c deleted at 5, a=6, d=7."""
    made = PartitionHistory()
    for offset, (key, value) in enumerate([("a", 0), ("b", 1), ("a", 2), ("b", 3), ("c", 4), ("c", None), ("a", 6), ("d", 7)]):
        made.announce(SentRecord(key, value, offset))
        made.acknowledge(offset, offset, Outcome.ABORTED if offset == 2 else Outcome.COMMITTED)
    return made


def read_of(made: PartitionHistory, *offsets: int, cleaned_below: int = 8, **more: bool) -> Read:
    return Read(0, 8, [FoundRecord(offset, made.records[offset]) for offset in offsets], cleaned_below=cleaned_below, **more)


@pytest.mark.parametrize(
    ("offsets", "cleaned_below"),
    [((0, 1, 2, 3, 4, 5, 6, 7), 0), ((3, 5, 6, 7), 8), ((3, 6, 7), 8), ((1, 3, 4, 5, 6, 7), 7), ((0, 3, 5, 6, 7), 6)],
    ids=["uncompacted", "compacted", "tombstone expired", "superseded and aborted", "superseded later than the round"],
)
def test_judge_accepts_what_compaction_may_remove(offsets: tuple[int, ...], cleaned_below: int) -> None:
    made = history()
    assert judge_read(made, read_of(made, *offsets, cleaned_below=cleaned_below)) == []


def kinds(made: PartitionHistory, read: Read) -> list[str]:
    return [one.kind for one in judge_read(made, read)]


def test_judge_finds_a_lost_last_value() -> None:
    made = history()
    assert kinds(made, read_of(made, 3, 5, 6)) == ["lost"]


def test_judge_finds_a_superseded_record_missing_where_no_round_has_been() -> None:
    made = history()
    assert kinds(made, read_of(made, 3, 4, 5, 6, 7, cleaned_below=3)) == ["lost", "lost"]


def test_judge_finds_a_deleted_key_that_came_back_unless_the_read_was_slow() -> None:
    made = history()
    assert kinds(made, read_of(made, 3, 4, 6, 7)) == ["came back"]
    assert kinds(made, read_of(made, 3, 4, 6, 7, is_slow=True)) == []


def test_judge_finds_aborted_records_in_committed_reads_only() -> None:
    made = history()
    offsets = (0, 1, 2, 3, 4, 5, 6, 7)
    assert kinds(made, read_of(made, *offsets, is_committed=True)) == ["not committed"]
    assert kinds(made, read_of(made, *offsets)) == []


def test_judge_finds_records_out_of_order_and_records_that_nobody_sent() -> None:
    made = history()
    assert kinds(made, read_of(made, 3, 6, 5, 7)) == ["out of order"]
    strange = [*read_of(made, 3, 5, 6, 7).found, FoundRecord(9, SentRecord("e", 9, 9))]
    assert kinds(made, Read(0, 8, strange)) == ["invented"]
    changed = [FoundRecord(7, SentRecord("d", 8, 7)), *read_of(made, 3, 5, 6).found]
    assert "invented" in kinds(made, Read(0, 8, changed))


def test_judge_rejects_what_an_unclean_election_discarded_and_excuses_what_it_had_superseded() -> None:
    made = history()
    disowned = read_of(made, 3, 5, 6, 7)
    made.disown_from(6)
    assert kinds(made, disowned) == ["discarded", "discarded"]
    made.excused = 0
    assert kinds(made, Read(0, 6, read_of(made, 3, 5).found, cleaned_below=6)) == []
    assert made.excused == 1  # a=0 was superseded by the discarded a=6


def test_judge_accepts_records_whose_fate_no_producer_knows() -> None:
    made = history()
    unknown = SentRecord("e", 8, 8)
    made.announce(unknown)
    compacted = read_of(made, 3, 5, 6, 7).found
    assert kinds(made, Read(0, 9, compacted)) == []
    assert kinds(made, Read(0, 9, [*compacted, FoundRecord(8, unknown)])) == []


def test_judge_ignores_records_before_the_log_start() -> None:
    made = history()
    made.log_start = 4
    assert kinds(made, read_of(made, 5, 6, 7)) == []


@pytest.mark.parametrize("is_committed", [False, True])
def test_judge_excuses_what_a_discarded_segment_stands_in_for_up_to_the_next_surviving_record(*, is_committed: bool) -> None:
    old = [SentRecord(offset, 0, offset) for offset in range(8)]
    new = [SentRecord(offset, 1, 100 + offset) for offset in range(12)]
    made = PartitionHistory.of(enumerate(old))
    made.disown_from(4)
    for offset in range(4, 12):
        made.announce(new[offset])
        made.acknowledge(100 + offset, offset)
    discarded = [] if is_committed else [FoundRecord(5, old[5])]  # of a transaction that never ended
    found = [
        *(FoundRecord(offset, old[offset]) for offset in range(4)),
        *discarded,
        *(FoundRecord(offset, new[offset]) for offset in (8, 10, 11)),
    ]
    read = Read(0, 12, found, is_committed)
    assert [one.offset for one in judge_read(made, read) if one.kind == "lost"] == [9]


@pytest.mark.parametrize(
    ("end", "later", "wrong"),
    [(7, [6], ["came back"]), (7, [], []), (6, [], []), (4, [], [])],
    ids=["a later transaction survives", "a later record survives", "marker lost", "cut"],
)
def test_judge_does_not_know_the_end_of_the_last_transaction_before_an_unclean_election(
    end: int, later: list[int], wrong: list[str]
) -> None:
    """A transaction deletes a at offset 3, writes b at 4 and has its marker at 5; the read is as if it had been aborted."""
    sent = {offset: SentRecord(key, value, offset) for offset, key, value in [(0, "a", 0), (3, "a", None), (4, "b", 1), (6, "d", 1)]}
    made = PartitionHistory()
    for offset, record in sent.items():
        made.announce(record)
        made.acknowledge(offset, offset, Outcome.UNDECIDED if offset in (3, 4) else Outcome.COMMITTED)
    made.decide([3, 4], Outcome.COMMITTED)
    if later:
        made.decide(later, Outcome.COMMITTED)
    made.disown_from(end)
    found = [FoundRecord(offset, sent[offset]) for offset in (0, 4, 6) if offset < end]
    assert [violation.kind for violation in judge_read(made, Read(0, end, found, cleaned_below=end))] == wrong
