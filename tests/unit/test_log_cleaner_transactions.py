"""LogCleanerTest's behaviours on transactions and idempotent producers, driving `clean`.

Names in the docstrings are those of Kafka's tests. `shape` words: see tests.builders.Life.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData
from compactor.records.encode import ProducerFields, RecordToEncode, encode_batch, encode_varint
from tests.builders import Life, LogBuilder, live, snapshot, txn_index
from tests.plain_format import fix_crc
from tests.plain_log import load, transaction_index, unexpired_producers

LATER = 10**12


def test_duplicates_are_still_found_after_cleaning(tmp_path: Path) -> None:
    """testDuplicateCheckAfterCleaning: partly cleaned batches keep offsets and sequences, so a broker still knows what it has."""
    log = LogBuilder()
    log.put("1=a", "2=a", "3=a", pid=1)
    log.put("3=b", "1=b", pid=2)
    log.put("2=c", "3=c", "1=c", pid=3)
    log.put("1=d", pid=4)
    life = Life(tmp_path, log)
    before = unexpired_producers(life.folder, load(life.folder, 4096))
    for _ in range(2):
        life.round()
        assert unexpired_producers(life.folder, load(life.folder, 4096)) == before
        assert life.shape() == ["(0-2)", "(3-4)", "5-7", "8-8"]
        assert life.live() == ["5:2=c", "6:3=c", "8:1=d"]
        assert [(b.base_sequence, b.base_sequence + b.last_offset - b.base_offset) for b in life.batches()] == [
            (0, 2),
            (0, 1),
            (0, 2),
            (0, 0),
        ]


def test_aborted_transactions_over_several_partial_rounds(tmp_path: Path) -> None:
    """testMultiPassSegmentCleaningWithAbortedTransactions (KAFKA-13727): a map of 4 keys, one segment."""
    log = LogBuilder()
    log.put("1=a", "2=a", pid=1, txn=True)  # 0, 1
    log.put("2=b", "3=b", pid=2, txn=True)  # 2, 3
    log.put("4=a", "5=a", pid=1, txn=True)  # 4, 5
    log.abort(1)  # 6
    log.commit(2)  # 7
    log.put("6=p", "7=p", "8=p", "9=p")  # 8..11
    log.put("2=c", pid=2, txn=True)  # 12
    log.commit(2)  # 13
    log.put("3=q", "6=q")  # 14, 15
    life = Life(tmp_path, log)

    assert life.round(map_entries=4, high_watermark=99).next_dirty_offset == 10
    # What is aborted goes everywhere in the segment, also behind the map; the marker and its index entry stay.
    assert life.shape() == ["2-3", "(4-5)", "6-6A", "7-7C", "8-11", "12-12", "13-13C", "14-15"]
    assert list(transaction_index(life.folder)) == [6]

    assert life.round(map_entries=4, high_watermark=99).next_dirty_offset == 15
    assert life.round(map_entries=4, high_watermark=99).next_dirty_offset == 16
    assert life.live() == ["9:7=p", "10:8=p", "11:9=p", "12:2=c", "14:3=q", "15:6=q"]
    # The aborting producer's last batch holds its marker and entry until it writes again.
    assert life.shape() == ["(4-5)", "6-6A", "7-7C!", "8-11", "12-12", "13-13C", "14-15"]

    log.put("1=z", pid=1, txn=True)  # 16
    log.commit(1)
    life.round(high_watermark=99)
    assert "(4-5)" not in life.shape()
    assert list(transaction_index(life.folder)) == [6]  # data was seen once more, on its way out
    life.round(first_dirty_offset=0, high_watermark=99)
    assert transaction_index(life.folder) == {}
    assert "6-6A!" in life.shape()
    life.round(first_dirty_offset=0, now=LATER, high_watermark=99)
    assert not any(word.startswith("6-6") for word in life.shape())


def test_aborted_data_goes_committed_data_stays(tmp_path: Path) -> None:
    """testBasicTransactionAwareCleaning"""
    log = LogBuilder()
    log.put("1=a", "2=a", pid=1, txn=True)
    log.put("2=b", "3=b", pid=2, txn=True)
    log.put("3=a", "4=a", pid=1, txn=True)
    log.abort(1)  # 6
    log.commit(2)  # 7
    log.put("4=c", "2=c")
    life = Life(tmp_path, log)
    entries = transaction_index(life.folder)
    life.round()
    assert life.live() == ["3:3=b", "8:4=c", "9:2=c"]
    assert life.shape() == ["2-3", "(4-5)", "6-6A", "7-7C", "8-9"]
    assert list(transaction_index(life.folder)) == [6]
    assert entries == {}  # it was not there before: the outcome comes from the marker


def test_marker_beyond_the_cleaned_range_still_decides(tmp_path: Path) -> None:
    """testCleanWithTransactionsSpanningSegments: data in cleaned segments, its ABORT in one that is not."""
    log = LogBuilder()
    log.put("1=a", "2=a", pid=1, txn=True)
    log.put("2=b", "3=b", pid=2, txn=True)
    log.commit(2)  # 4
    log.roll()
    log.put("3=a", "4=a", pid=1, txn=True)  # 5, 6
    log.roll()
    log.abort(1)  # 7
    log.put("5=x")
    life = Life(tmp_path, log)
    assert life.round(first_uncleanable_offset=7, high_watermark=7).next_dirty_offset == 7
    assert life.live() == ["2:2=b", "3:3=b", "8:5=x"]
    assert life.shape() == ["2-3", "4-4C", "(5-6)", "7-7A", "8-8"]
    life.round()
    assert life.shape() == ["2-3", "4-4C", "(5-6)", "7-7A", "8-8"]
    assert list(transaction_index(life.folder)) == [7]


def test_commit_marker_stays_while_its_data_does_and_for_the_retention(tmp_path: Path) -> None:
    """testCommitMarkerRemoval"""
    log = LogBuilder()
    log.put("1=a", pid=1, txn=True)
    log.put("2=a", pid=1, txn=True)
    log.commit(1)  # 2
    log.put("2=b", pid=2)
    log.put("3=b", pid=1)  # so that the transaction's batches are not the producer's last
    life = Life(tmp_path, log)
    life.round(now=1_000, delete_retention_ms=500)
    assert life.shape() == ["0-0", "2-2C", "3-3", "4-4"]

    log.put("1=c")
    life.round(now=2_000, delete_retention_ms=500)  # the data goes in this round, and was seen
    assert life.shape() == ["2-2C", "3-3", "4-4", "5-5"]
    log.put("9=x")
    life.round(now=3_000, delete_retention_ms=500)  # nothing left: the marker may go at 3500
    assert life.shape()[0] == "2-2C!"
    log.put("9=y")
    life.round(now=3_499, delete_retention_ms=500)
    assert life.shape()[0] == "2-2C!"
    log.put("9=z")
    life.round(now=3_500, delete_retention_ms=500)
    assert life.shape()[0] == "3-3"


def test_a_whole_chunk_can_go(tmp_path: Path) -> None:
    """testDeletedBatchesWithNoMessagesRead (KAFKA-6854): batches that are dropped unread are no reason to stop."""
    log = LogBuilder()
    for _ in range(4):
        log.put("1=" + "x" * 200_000, pid=1, txn=True)
        log.abort(1)
    log.put("2=b", pid=1)
    life = Life(tmp_path, log)
    life.round()
    assert life.live() == ["8:2=b"]


def test_empty_last_batch_holds_its_commit_marker(tmp_path: Path) -> None:
    """testCommitMarkerRetentionWithEmptyBatch"""
    log = LogBuilder()
    log.put("2=a", "3=a", pid=1, txn=True)
    log.commit(1)  # 2
    log.put("2=b", "3=b", pid=2, txn=True)
    log.commit(2)  # 5
    life = Life(tmp_path, log)
    life.round()
    assert life.shape() == ["(0-1)", "2-2C", "3-4", "5-5C"]
    life.round(first_dirty_offset=0, now=LATER)
    assert life.shape() == ["(0-1)", "2-2C", "3-4", "5-5C"]
    log.put("1=c", pid=1, txn=True)  # 6
    log.commit(1)
    life.round(now=LATER)
    assert life.shape() == ["2-2C", "3-4", "5-5C", "6-6", "7-7C"]
    life.round(first_dirty_offset=0, now=LATER, delete_retention_ms=5)
    assert life.shape()[0] == "2-2C!"
    life.round(first_dirty_offset=0, now=LATER + 5)
    assert life.shape() == ["3-4", "5-5C", "6-6", "7-7C"]


def test_emptied_marker_is_kept_for_its_epoch_and_read_again(tmp_path: Path) -> None:
    """testCleanEmptyControlBatch (KAFKA-7467): only the marker tells the producer's epoch."""
    log = LogBuilder()
    log.end(1, commit=True)  # 0: a transaction without data
    log.put("2=a", "3=a")
    life = Life(tmp_path, log)
    snapshot(life.folder, 3, [(1, 0, -1)])  # what a running broker knows; the emptied batch itself does not tell it
    life.round(now=1_000, delete_retention_ms=10)
    assert life.shape() == ["0-0C!", "1-2"]
    for now in (1_010, LATER, LATER):
        life.round(first_dirty_offset=0, now=now)
        assert life.shape() == ["(0-0M)", "1-2"]


def test_committed_transaction_over_two_groups(tmp_path: Path) -> None:
    """testCommittedTransactionSpanningSegments (KAFKA-8351): data and marker in segments that are cleaned apart."""
    log = LogBuilder()
    log.put("1=a", pid=1, txn=True)
    log.roll()
    log.commit(1)
    life = Life(tmp_path, log)
    for _ in range(2):
        life.round(first_dirty_offset=0, now=LATER, segment_bytes=1)
        assert life.shape() == ["0-0", "1-1C"]
        assert [base for base, _ in (life.summary.segments if life.summary else ())] == [0, 1]


def test_aborted_transaction_over_two_groups(tmp_path: Path) -> None:
    """testAbortedTransactionSpanningSegments: the producer's last batch stays empty, and so its marker stays."""
    log = LogBuilder()
    log.put("1=a", pid=1, txn=True)
    log.roll()
    log.abort(1)
    life = Life(tmp_path, log)
    for _ in range(3):
        life.round(first_dirty_offset=0, now=LATER, segment_bytes=1)
        assert life.shape() == ["(0-0)", "1-1A"]
        assert list(transaction_index(life.folder)) == [1]


def test_abort_marker_goes_after_two_more_rounds(tmp_path: Path) -> None:
    """testAbortMarkerRemoval"""
    log = LogBuilder()
    log.put("1=a", "2=a", pid=1, txn=True)
    log.abort(1)  # 2
    log.put("3=c", pid=1)
    life = Life(tmp_path, log)
    life.round(now=1_000, delete_retention_ms=100)
    assert life.shape() == ["2-2A", "3-3"]
    assert list(transaction_index(life.folder)) == [2]
    life.round(first_dirty_offset=0, now=1_000, delete_retention_ms=100)
    assert life.shape() == ["2-2A!", "3-3"]
    assert transaction_index(life.folder) == {}
    life.round(first_dirty_offset=0, now=1_100)
    assert life.shape() == ["3-3"]


def test_last_batch_is_found_by_offset_not_by_sequence(tmp_path: Path) -> None:
    """testEmptyBatchRemovalWithSequenceReuse (KAFKA-8335): __consumer_offsets writes sequence 0 again and again."""
    log = LogBuilder()
    log.put("2=a", pid=1, txn=True, sequence=0)
    log.commit(1)
    log.put("2=b", pid=1, txn=True, sequence=0)  # 2
    log.commit(1)
    log.put("2=c", pid=2)  # 4
    life = Life(tmp_path, log)
    life.round(now=1_000, delete_retention_ms=10)
    assert life.shape() == ["1-1C", "(2-2)", "3-3C", "4-4"]
    life.round(first_dirty_offset=0, now=1_000, delete_retention_ms=10)
    assert life.shape() == ["1-1C!", "(2-2)", "3-3C", "4-4"]


def test_abort_marker_stays_with_the_empty_batch(tmp_path: Path) -> None:
    """testAbortMarkerRetentionWithEmptyBatch: entry and marker live as long as the producer's emptied last batch."""
    log = LogBuilder()
    log.put("1=a", "2=a", pid=1, txn=True)
    log.abort(1)  # 2
    life = Life(tmp_path, log)
    for now in (1_000, LATER, LATER):
        life.round(first_dirty_offset=0, now=now)
        assert life.shape() == ["(0-1)", "2-2A"]
        assert list(transaction_index(life.folder)) == [2]
    log.put("3=b", pid=1, txn=True)  # 3
    log.commit(1)
    life.round(now=LATER, delete_retention_ms=5)
    assert life.shape() == ["2-2A", "3-3", "4-4C"]
    life.round(first_dirty_offset=0, now=LATER, delete_retention_ms=5)
    assert life.shape() == ["2-2A!", "3-3", "4-4C"]
    assert transaction_index(life.folder) == {}
    life.round(first_dirty_offset=0, now=LATER + 5)
    assert life.shape() == ["3-3", "4-4C"]


def test_last_sequence_of_every_producer_is_kept(tmp_path: Path) -> None:
    """testLogCleanerRetainsProducerLastSequence"""
    log = LogBuilder()
    log.put("0=a")
    log.put("0=b", pid=1)
    log.put("0=c", pid=2)
    log.put("0=d", pid=3)
    log.put("1=e", pid=3)  # 4: frees offset 3
    log.put("0=f", pid=4)
    life = Life(tmp_path, log)
    life.round()
    assert life.shape() == ["(1-1)", "(2-2)", "4-4", "5-5"]
    assert [(b.producer_id, b.producer_epoch, b.base_sequence) for b in life.batches()] == [(1, 0, 0), (2, 0, 0), (3, 0, 1), (4, 0, 0)]
    log.put("9=g", pid=1)
    life.round()
    assert life.shape() == ["(2-2)", "4-4", "5-5", "6-6"]


def test_last_sequence_is_kept_though_the_transaction_was_aborted(tmp_path: Path) -> None:
    """testLogCleanerRetainsLastSequenceEvenIfTransactionAborted"""
    log = LogBuilder()
    log.put("1=a", pid=1, txn=True)
    log.put("2=a", "3=a", pid=1, txn=True)
    log.abort(1)  # 3
    life = Life(tmp_path, log)
    life.round()
    assert life.shape() == ["(1-2)", "3-3A"]
    assert life.batches()[0].base_sequence == 1
    log.put("4=b", pid=1)
    life.round()
    assert life.shape() == ["3-3A", "4-4"]


def test_user_keys_that_look_like_markers_drop_no_markers(tmp_path: Path) -> None:
    """testCleaningWithKeysConflictingWithTxnMarkerKeys (KAFKA-14055): control records never meet the map."""
    log = LogBuilder()
    log.put("1=a", pid=1, txn=True)
    log.commit(1)  # 1: its key is 00 00 00 01
    log.put("2=a", pid=1, txn=True)
    log.abort(1)  # 3: its key is 00 00 00 00
    log.put(b"\x00\x00\x00\x01=user", b"\x00\x00\x00\x00=user")
    log.put("3=a", pid=1)
    life = Life(tmp_path, log)
    life.round()
    assert life.shape() == ["0-0", "1-1C", "3-3A", "4-5", "6-6"]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("gate", [0, 1 << 20])
def test_control_key_longer_than_all_memory_is_refused(kind: int, gate: int, tmp_path: Path) -> None:
    """A sum of it and a position is negative (found by the fuzz, which read there)."""
    log = LogBuilder()
    log.put("1=a", pid=1, txn=True)
    made = bytearray(encode_batch([RecordToEncode(1, 1_001, bytes((0, 0, 0, kind)), bytes(6))], producer=ProducerFields(1, 0, -1, True)))
    made[22] |= 0x20
    at = made.index(bytes((8, 0, 0, 0, kind)))
    made[at : at + 1] = encode_varint(2**63 - 1)
    made[8:12] = (len(made) - 12).to_bytes(4, "big")
    made[61] += 2 * 9
    log.raw(fix_crc(bytes(made)), 1)
    log.put("1=b")
    with pytest.raises(BadData) as refused:
        clean_log_directory(log.write(tmp_path / "log"), tmp_path / "out", OfflineCleanOptions(now_ms=1, gate_budget_bytes=gate))
    assert (refused.value.offset, refused.value.position > 0) == (1, True)


def test_control_record_without_a_value_is_refused(tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("1=a", pid=1, txn=True)
    made = bytearray(encode_batch([RecordToEncode(1, 1_001, b"\x00\x00\x00\x01", None)], producer=ProducerFields(1, 0, -1, True)))
    made[22] |= 0x20
    log.raw(fix_crc(bytes(made)), 1)
    log.put("1=b")
    with pytest.raises(BadData, match="a control record without a value") as refused:
        Life(tmp_path, log).round()
    assert refused.value.offset == 1


@pytest.mark.parametrize("told", [0, 3])
def test_an_index_entry_that_begins_after_data_of_its_transaction_is_made_anew(told: int, tmp_path: Path) -> None:
    """A deviation: a broker that was built from remote storage knows no open transaction, and lets it begin where it sees its next data.

    The result is Kafka's for the entry of a broker that knows the whole transaction (``told`` = 0). For the other one Kafka keeps "a".
    """
    log = LogBuilder()
    log.put("a=aborted", pid=5, txn=True)  # 0
    log.put("b=1")  # 1
    log.roll()
    log.put("c=1", pid=6, txn=True)  # 2
    log.put("d=aborted", pid=5, txn=True)  # 3
    log.abort(5)  # 4
    log.commit(6)  # 5
    log.put("e=1", pid=5)  # 6
    folder = log.write(tmp_path / "log", indexes=True)
    txn_index(folder, 2, [(5, told, 4, 2)])
    clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1, gate_budget_bytes=1 << 20))
    assert live(tmp_path / "out") == ["1:b=1", "2:c=1", "6:e=1"]
    assert transaction_index(tmp_path / "out") == {4: struct.pack(">hqqqq", 0, 5, 0, 4, 2)}
