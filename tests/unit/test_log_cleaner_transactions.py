"""LogCleanerTest's behaviours on transactions and idempotent producers, driving `clean`.

Names in the docstrings are those of Kafka's tests. the words of their stories: `tests.builders.tell`.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.errors import BadData
from compactor.records.encode import ProducerFields, RecordToEncode, encode_batch, encode_varint
from tests.builders import LATER, Life, LogBuilder, live, log_of, refused_cleaning, snapshot, tell, txn_index
from tests.plain_format import fix_crc
from tests.plain_log import load, transaction_index, unexpired_producers


def test_duplicates_are_still_found_after_cleaning(tmp_path: Path) -> None:
    """testDuplicateCheckAfterCleaning: partly cleaned batches keep offsets and sequences, so a broker still knows what it has."""
    life = Life(tmp_path, log_of("1: 1=a 2=a 3=a; 2: 3=b 1=b; 3: 2=c 3=c 1=c; 4: 1=d"))
    before = unexpired_producers(life.folder, load(life.folder, 4096))
    for _ in range(2):
        life.round()
        assert unexpired_producers(life.folder, load(life.folder, 4096)) == before
        assert life.shape() == ["(0-2)", "(3-4)", "5-7", "8-8"]
        assert life.live() == ["5:2=c", "6:3=c", "8:1=d"]
        spans = [(b.base_sequence, b.base_sequence + b.last_offset - b.base_offset) for b in life.batches()]
        assert spans == [(0, 2), (0, 1), (0, 2), (0, 0)]


STORIES = {
    "testMultiPassSegmentCleaningWithAbortedTransactions (KAFKA-13727): aborted data over partial rounds, a map of 4 keys, one segment": """
        1t: 1=a 2=a
        2t: 2=b 3=b
        1t: 4=a 5=a
        1 aborts; 2 commits         # 6, 7
        6=p 7=p 8=p 9=p
        2t: 2=c; 2 commits          # 12, 13
        3=q 6=q
        # What is aborted goes everywhere in the segment, also behind the map; the marker and its index entry stay.
        clean map_entries=4 high_watermark=99: 2-3 (4-5) 6-6A 7-7C 8-11 12-12 13-13C 14-15 | index 6 | next 10
        clean map_entries=4 high_watermark=99: next 15
        # The aborting producer's last batch holds its marker and entry until it writes again.
        clean map_entries=4 high_watermark=99: (4-5) 6-6A 7-7C! 8-11 12-12 13-13C 14-15 | live 9:7=p 10:8=p 11:9=p 12:2=c 14:3=q 15:6=q
        1t: 1=z; 1 commits
        # data of the transaction was seen once more, on its way out
        clean high_watermark=99: 6-6A 7-7C! 8-11 12-12 13-13C 14-15 16-16 17-17C | index 6
        clean first=0 high_watermark=99: 6-6A! 7-7C! 8-11 12-12 13-13C 14-15 16-16 17-17C | index
        clean first=0 now=LATER high_watermark=99: 8-11 12-12 13-13C 14-15 16-16 17-17C""",
    "testBasicTransactionAwareCleaning: aborted data goes, committed data stays; the index is made anew from the marker": """
        1t: 1=a 2=a
        2t: 2=b 3=b
        1t: 3=a 4=a
        1 aborts; 2 commits         # 6, 7
        4=c 2=c
        clean: 2-3 (4-5) 6-6A 7-7C 8-9 | live 3:3=b 8:4=c 9:2=c | index 6""",
    "testCleanWithTransactionsSpanningSegments: a marker beyond the cleaned range still decides": """
        1t: 1=a 2=a
        2t: 2=b 3=b; 2 commits      # 4
        /
        1t: 3=a 4=a
        /
        1 aborts                    # 7
        5=x
        clean until=7 high_watermark=7: 2-3 4-4C (5-6) 7-7A 8-8 | live 2:2=b 3:3=b 8:5=x | next 7
        clean: 2-3 4-4C (5-6) 7-7A 8-8 | index 7""",
    "testCommitMarkerRemoval: a commit marker stays while its data does, and for the retention": """
        1t: 1=a
        1t: 2=a
        1 commits                   # 2
        2: 2=b
        1: 3=b                      # so that the transaction's batches are not the producer's last
        clean now=1_000 retention=500: 0-0 2-2C 3-3 4-4
        1=c
        clean now=2_000 retention=500: 2-2C 3-3 4-4 5-5     # the data goes in this round, and was seen
        9=x
        clean now=3_000 retention=500: 2-2C! 3-3 4-4 5-5 6-6     # nothing left: the marker may go at 3500
        9=y
        clean now=3_499 retention=500: 2-2C! 3-3 4-4 5-5 7-7
        9=z
        clean now=3_500 retention=500: 3-3 4-4 5-5 8-8""",
    "testCommitMarkerRetentionWithEmptyBatch: an empty last batch holds its commit marker": """
        1t: 2=a 3=a; 1 commits      # 2
        2t: 2=b 3=b; 2 commits      # 5
        clean: (0-1) 2-2C 3-4 5-5C
        clean first=0 now=LATER: (0-1) 2-2C 3-4 5-5C
        1t: 1=c; 1 commits          # 7
        clean now=LATER: 2-2C 3-4 5-5C 6-6 7-7C
        clean first=0 now=LATER retention=5: 2-2C! 3-4 5-5C 6-6 7-7C
        clean first=0 now=1_000_000_000_005: 3-4 5-5C 6-6 7-7C""",
    "testCommittedTransactionSpanningSegments (KAFKA-8351): data and marker in segments that are cleaned apart": """
        1t: 1=a
        /
        1 commits
        clean first=0 now=LATER segment_bytes=1: 0-0 1-1C | bases 0 1
        clean first=0 now=LATER segment_bytes=1: 0-0 1-1C | bases 0 1""",
    "testAbortedTransactionSpanningSegments: the producer's last batch stays empty, and so its marker stays": """
        1t: 1=a
        /
        1 aborts
        clean first=0 now=LATER segment_bytes=1: (0-0) 1-1A | index 1
        clean first=0 now=LATER segment_bytes=1: (0-0) 1-1A | index 1
        clean first=0 now=LATER segment_bytes=1: (0-0) 1-1A | index 1""",
    "testAbortMarkerRemoval: an abort marker goes after two more rounds": """
        1t: 1=a 2=a; 1 aborts       # 2
        1: 3=c
        clean now=1_000 retention=100: 2-2A 3-3 | index 2
        clean first=0 now=1_000 retention=100: 2-2A! 3-3 | index
        clean first=0 now=1_100: 3-3""",
    "testAbortMarkerRetentionWithEmptyBatch: entry and marker live as long as the producer's emptied last batch": """
        1t: 1=a 2=a; 1 aborts       # 2
        clean first=0 now=1_000: (0-1) 2-2A | index 2
        clean first=0 now=LATER: (0-1) 2-2A | index 2
        clean first=0 now=LATER: (0-1) 2-2A | index 2
        1t: 3=b; 1 commits
        clean now=LATER retention=5: 2-2A 3-3 4-4C
        clean first=0 now=LATER retention=5: 2-2A! 3-3 4-4C | index
        clean first=0 now=1_000_000_000_005: 3-3 4-4C""",
    "testLogCleanerRetainsLastSequenceEvenIfTransactionAborted": """
        1t: 1=a
        1t: 2=a 3=a
        1 aborts                    # 3
        clean: (1-2) 3-3A | sequences 1 -1
        1: 4=b
        clean: 3-3A 4-4""",
    "testLogCleanerRetainsProducerLastSequence: of every producer": """
        0=a
        1: 0=b
        2: 0=c
        3: 0=d
        3: 1=e                      # 4: frees offset 3
        4: 0=f
        clean: (1-1) (2-2) 4-4 5-5 | sequences 0 0 1 0
        1: 9=g
        clean: (2-2) 4-4 5-5 6-6""",
    "testCleaningWithKeysConflictingWithTxnMarkerKeys (KAFKA-14055): control records never meet the map": """
        1t: 1=a; 1 commits          # 1: its key is 00 00 00 01
        1t: 2=a; 1 aborts           # 3: its key is 00 00 00 00
        \0\0\0\1=user \0\0\0\0=user
        1: 3=a
        clean: 0-0 1-1C 3-3A 4-5 6-6""",
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_transactions(story: str, tmp_path: Path) -> None:
    tell(tmp_path, story)


def test_a_whole_chunk_can_go(tmp_path: Path) -> None:
    """testDeletedBatchesWithNoMessagesRead (KAFKA-6854): batches that are dropped unread are no reason to stop."""
    tell(tmp_path, f"1t: 1={'x' * 200_000}; 1 aborts\n" * 4 + "1: 2=b\nclean: live 8:2=b")


def test_emptied_marker_is_kept_for_its_epoch_and_read_again(tmp_path: Path) -> None:
    """testCleanEmptyControlBatch (KAFKA-7467): only the marker tells the producer's epoch."""
    life = Life(tmp_path, log_of("1 commits; 2=a 3=a"))
    snapshot(life.folder, 3, [(1, 0, -1)])  # what a running broker knows; the emptied batch itself does not tell it
    life.round(now=1_000, delete_retention_ms=10)
    assert life.shape() == ["0-0C!", "1-2"]
    for now in (1_010, LATER, LATER):
        life.round(first_dirty_offset=0, now=now)
        assert life.shape() == ["(0-0M)", "1-2"]


def test_last_batch_is_found_by_offset_not_by_sequence(tmp_path: Path) -> None:
    """testEmptyBatchRemovalWithSequenceReuse (KAFKA-8335): __consumer_offsets writes sequence 0 again and again."""
    log = LogBuilder()
    for value in ("2=a", "2=b"):
        log.put(value, pid=1, txn=True, sequence=0)
        log.commit(1)
    life = Life(tmp_path, log.add("2: 2=c"))
    for marker in ("1-1C", "1-1C!"):
        life.round(first_dirty_offset=0, now=1_000, delete_retention_ms=10)
        assert life.shape() == [marker, "(2-2)", "3-3C", "4-4"]


def marker_of(kind: int, value: bytes | None) -> bytearray:
    """A marker in its batch, whose checksum is not right yet."""
    made = bytearray(encode_batch([RecordToEncode(1, 1_001, bytes((0, 0, 0, kind)), value)], producer=ProducerFields(1, 0, -1, True)))
    made[22] |= 0x20
    return made


def refusal(tmp_path: Path, marker: bytearray, gate: int = 0) -> BadData:
    log = log_of("1t: 1=a")
    log.raw(fix_crc(bytes(marker)), 1)
    refused = refused_cleaning(tmp_path, log.add("1=b"), gate_budget_bytes=gate)
    assert refused.offset == 1
    return refused


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("gate", [0, 1 << 20])
def test_control_key_longer_than_all_memory_is_refused(kind: int, gate: int, tmp_path: Path) -> None:
    """A sum of it and a position is negative (found by the fuzz, which read there)."""
    made = marker_of(kind, bytes(6))
    at = made.index(bytes((8, 0, 0, 0, kind)))
    made[at : at + 1] = encode_varint(2**63 - 1)
    made[8:12] = (len(made) - 12).to_bytes(4, "big")
    made[61] += 2 * 9
    assert refusal(tmp_path, made, gate).position > 0


def test_control_record_without_a_value_is_refused(tmp_path: Path) -> None:
    assert "a control record without a value" in str(refusal(tmp_path, marker_of(1, None), 1 << 20))


@pytest.mark.parametrize("told", [0, 3])
def test_an_index_entry_that_begins_after_data_of_its_transaction_is_made_anew(told: int, tmp_path: Path) -> None:
    """A deviation: a broker that was built from remote storage knows no open transaction, and lets it begin where it sees its next data.

    The result is Kafka's for the entry of a broker that knows the whole transaction (``told`` = 0). For the other one Kafka keeps "a".
    """
    log = log_of("5t: a=aborted; b=1; /; 6t: c=1; 5t: d=aborted; 5 aborts; 6 commits; 5: e=1")
    folder = log.write(tmp_path / "log", indexes=True)
    txn_index(folder, 2, [(5, told, 4, 2)])
    clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1, gate_budget_bytes=1 << 20))
    assert live(tmp_path / "out") == ["1:b=1", "2:c=1", "6:e=1"]
    assert transaction_index(tmp_path / "out") == {4: struct.pack(">hqqqq", 0, 5, 0, 4, 2)}
