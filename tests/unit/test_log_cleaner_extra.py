"""Corners that LogCleanerTest leaves out, each seen in a run of Kafka's cleaner, and golden vectors down to the byte."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import cramjam
import lz4.frame
import pytest
import zstandard

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.records.encode import NO_PRODUCER, RecordToEncode, encode_batch, encode_txn_marker, encode_varint, prepend_batch_header
from tests.builders import (
    GZIP,
    LATER,
    LZ4,
    NONE,
    SNAPPY,
    ZSTD,
    Life,
    LogBuilder,
    entry,
    live,
    log_of,
    read,
    refused_cleaning,
    snapshot,
    tell,
    txn_index,
    wrapper,
)
from tests.plain_format import fix_crc
from tests.plain_log import transaction_index

COMPRESSED = (GZIP, SNAPPY, LZ4, ZSTD)


# ---- golden vectors ---------------------------------------------------------------------------------------------------------

NOBODY = "ff" * 14
HORIZON_IN = f"""0000000000000000 00000042 ffffffff 02 84e64c05 0000 00000001 00000000000003e8 00000000000003e9 {NOBODY} 00000002
    1000000002610231 00 0e00020202620100"""
HORIZON_OUT = f"""0000000000000000 00000044 ffffffff 02 c3ea450f 0040 00000001 00000000000013ec 00000000000003e9 {NOBODY} 00000002
    120087400002610231 00 100085400202620100"""
COMMIT_IN = """0000000000000001 00000042 00000000 02 be37f0a7 0030 00000000 00000000000003e8 00000000000003e8 0000000000000005 0000
    ffffffff 00000001 20 00 00 00 08 00000001 0c 000000000000 00"""
COMMIT_OUT = """0000000000000001 00000043 00000000 02 7361ab98 0070 00000000 000000000000044c 00000000000003e8 0000000000000005 0000
    ffffffff 00000001 22 00 c701 00 08 00000001 0c 000000000000 00"""
APPEND_TIME_OUT = f"""0000000000000000 0000003a ffffffff 02 d475b1ac 0008 00000001 0000000000001e61 0000000000001e61 {NOBODY} 00000001
    1000 00 02 0262 0231 00"""
EMPTY_HEADER_OUT = """0000000000000000 00000031 00000003 02 bc73f5e0 0000 00000001 ffffffffffffffff 000000000000000c 0000000000000005
    0000 00000000 00000000"""


def unhex(text: str) -> bytes:
    return bytes.fromhex("".join(text.split()))


def cleaned_bytes(life: Life) -> bytes:
    return (life.folder / f"{0:020}.log").read_bytes()


def test_golden_horizon(tmp_path: Path) -> None:
    log = LogBuilder(leader_epoch=-1)
    log.put("a=1", "b", times=[1000, 1001])
    assert log.segments[0][1][0] == unhex(HORIZON_IN)
    life = Life(tmp_path, log)
    life.round(now=5000, delete_retention_ms=100)
    assert cleaned_bytes(life) == unhex(HORIZON_OUT)


def test_golden_marker_horizon(tmp_path: Path) -> None:
    log = LogBuilder(next_offset=1)
    log.raw(encode_txn_marker(1, 1000, 5, 0, is_commit=True), 1)
    assert log.segments[0][1][0] == unhex(COMMIT_IN)
    life = Life(tmp_path, log)
    life.round(now=1000, delete_retention_ms=100)
    assert (life.folder / f"{1:020}.log").read_bytes() == unhex(COMMIT_OUT)


def test_golden_append_time(tmp_path: Path) -> None:
    """6.5 f: a LogAppendTime batch is rewritten with the append time as its base."""
    log = LogBuilder(leader_epoch=-1)
    log.put("a=1", "b=1", times=[10, 20], append_time=7777)
    log.put("a=2", times=[30])
    life = Life(tmp_path, log)
    life.round(now=9000, delete_retention_ms=100)
    assert cleaned_bytes(life).startswith(unhex(APPEND_TIME_OUT))


def test_golden_empty_header(tmp_path: Path) -> None:
    log = LogBuilder(leader_epoch=3)
    log.put("a=1", "b=1", pid=5, times=[11, 12])
    log.put("a=2", "b=2", times=[13, 14])
    life = Life(tmp_path, log)
    life.round(now=9000, delete_retention_ms=100)
    assert cleaned_bytes(life).startswith(unhex(EMPTY_HEADER_OUT))


# ---- the map, horizons, last batches -----------------------------------------------------------------------------------------

STORIES = {
    "6.5 a, a deviation: a stale aborted producer hides no keys, and Kafka takes it for aborting and leaves both values of `a`": """
        a=1 b=1 c=1
        5t: x=1; 5 aborts           # 3, 4
        d=1
        5t: a=2; 5 commits          # 6, 7
        e=1
        clean map_entries=4 index_interval_bytes=1: next 6
        clean index_interval_bytes=1: live 1:b=1 2:c=1 5:d=1 6:a=2 8:e=1""",
    "6.5 b: behind the map aborted data goes, keyless records stay, tombstones stay and get their horizon": """
        a=1 b=1
        5t: z=1; 5 aborts           # 2, 3: they ask for no room
        =keyless t a=2              # 4 to 6
        5: y=1
        clean now=1_000 map_entries=2 retention=10 high_watermark=99: horizons None None 1010 None \
            | live 0:a=1 1:b=1 4:=keyless 5:t 6:a=2 7:y=1""",
    "a keyless record behind the map stays until it is mapped": """
        a=1 b=1 =keyless c=1
        clean map_entries=1: live 0:a=1 1:b=1 2:=keyless 3:c=1
        clean map_entries=1
        clean map_entries=1: live 0:a=1 1:b=1 3:c=1""",
    "6.5 c: the map is full at a key that it holds, as the limit is tested before the key is looked up": """
        a=1 b=1
        a=2 c=1
        clean map_entries=2: next 2 | live 0:a=1 1:b=1 2:a=2 3:c=1""",
    "6.5 m: first dirty at the upper end cleans nothing: Kafka answers 0 and touches nothing; a broker never asks": """
        a=1
        a=2
        clean first=2: next 0 | bases | live 0:a=1 1:a=2""",
    "6.5 d: no retention still takes two rounds: the round that first sees a tombstone keeps it; equality removes": """
        a
        b=1
        clean now=5_000 retention=0: live 0:a 1:b=1
        clean now=5_000 first=0 retention=0: live 1:b=1""",
    "6.5 e: a horizon stays with its batch when the last tombstone has gone": """
        a b=1 c=1
        clean now=1_000 retention=10
        c=2
        clean now=2_000 retention=10: live 1:b=1 3:c=2 | horizons 1010 None""",
    "6.5 l: empty keys and values are keys and values": """
        @=1 a= @= b=1
        clean: live 1:a= 2:@= 3:b=1
        @ a=2
        clean now=1_000 retention=0 high_watermark=99: live 3:b=1 4:@ 5:a=2""",
    "6.5 j: a keyless last batch of a round goes unless it ends at the high watermark": """
        a=1
        =keyless                    # the last batch of the round, not of the log
        /
        b=1
        clean until=2: 0-0 2-2""",
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_corners(story: str, tmp_path: Path) -> None:
    tell(tmp_path, story)


@pytest.mark.parametrize(("now", "retention"), [(1_700_000_000_000, 2**63 - 1), (2**63 - 1, 86_400_000), (2**63 - 1, 2**63 - 1)])
def test_a_retention_without_end_has_no_end(tmp_path: Path, now: int, retention: int) -> None:
    """Kafka's sum wraps to a time long past, and the next round deletes."""
    log = log_of("a=1; a b=1")
    life = Life(tmp_path, log)
    life.round(now=now, delete_retention_ms=retention)
    assert [batch.horizon for batch in life.batches()] == [2**63 - 1]
    life.round(first_dirty_offset=0, now=2**63 - 2, delete_retention_ms=retention)
    assert life.live() == ["1:a", "2:b=1"]


def test_a_horizon_that_is_set_is_copied_with_its_batch(tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a", "b=1", horizon=5_000)
    raw = log.segments[0][1][0]
    life = Life(tmp_path, log)
    life.round(now=4_999)
    assert cleaned_bytes(life) == raw


# ---- odd records (6.5 g, h, i, l) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        (b"\xff", b"\xef\xbf\xbd"),
        (b"\xed\xa0\x80", b"\xef\xbf\xbd"),  # an encoded surrogate is one malformed sequence to Java, three to others
        (b"\xed\xa0", b"\xef\xbf\xbd"),
        (b"\xed\xa0x", b"\xef\xbf\xbdx"),
        (b"\xe2\x82", b"\xef\xbf\xbd"),
        (b"\xc0\x80", b"\xef\xbf\xbd" * 2),
        (b"\xf4\x90\x80\x80", b"\xef\xbf\xbd" * 4),
        ("schl\N{LATIN SMALL LETTER U WITH DIAERESIS}ssel".encode(), "schl\N{LATIN SMALL LETTER U WITH DIAERESIS}ssel".encode()),
    ],
)
def test_header_names_become_utf8_when_rewritten(tmp_path: Path, name: bytes, becomes: bytes) -> None:
    """6.5 g: only a rewritten batch; one that is copied keeps its bytes."""
    log = LogBuilder()
    log.put("a=1", "b=1", headers=[(name, b"v"), (name, None)])
    log.put("c=1", headers=[(name, b"v")])
    log.put("a=2")
    life = Life(tmp_path, log)
    life.round()
    first, second, _ = life.batches()
    assert first.records[0].headers == ((becomes, b"v"), (becomes, None))
    assert second.records[0].headers == ((name, b"v"),)


def test_record_and_batch_attributes_survive_only_a_copy(tmp_path: Path) -> None:
    """6.5 g: unknown bits go when a batch is rewritten."""
    log = LogBuilder()
    raws = []
    for base, keys in ((0, b"ab"), (2, b"ac"), (4, b"de")):
        plain = encode_batch([RecordToEncode(base + n, 1, keys[n : n + 1], b"1", (), 5 + n) for n in range(2)])
        raws.append(fix_crc(plain[:21] + b"\x7f\x80" + plain[23:]))
        log.raw(raws[-1], base + 1)
    log.put("a=2")
    life = Life(tmp_path, log)
    life.round()
    first, second, third, _ = life.batches()
    assert [(b.attributes, [(r.offset, r.attributes) for r in b.records]) for b in (first, second)] == [(0, [(1, 0)]), (0, [(3, 0)])]
    assert third.raw == raws[2]


def test_wrong_crc_is_refused(tmp_path: Path) -> None:
    """6.5 h, a deviation: Kafka would copy the batch, or hide the damage under a fresh CRC."""
    for damaged in (0, 1):  # a batch that would be rewritten, one that would be copied
        log = log_of("a=1 b=1; a=2")
        batches = log.segments[0][1]
        batches[damaged] = batches[damaged][:-2] + b"?\x00"
        assert refused_cleaning(tmp_path / str(damaged), log, "CRC").position == (0, len(batches[0]))[damaged]


def test_negative_timestamp_is_refused_where_it_must_be_rewritten(tmp_path: Path) -> None:
    """6.5 i: copied, it passes."""
    log = LogBuilder()
    log.put("a=1", "b=1", times=[-5, -5])
    log.put("c=1")
    life = Life(tmp_path, log)
    life.round()
    assert life.live() == ["0:a=1", "1:b=1", "2:c=1"]
    log.put("a=2")
    log.written = 0
    assert refused_cleaning(tmp_path / "refused", log, "timestamp").position == 0


def test_equal_offsets_in_a_batch_are_refused_where_they_must_be_rewritten(tmp_path: Path) -> None:
    """6.5 i"""
    log = LogBuilder()
    log.put("a=1", "b=1", "c=1", offsets=[0, 1, 1], last_offset=2)
    log.put("a=2")
    refused_cleaning(tmp_path, log, "offset")


def test_sequence_zero_without_a_producer_is_kept(tmp_path: Path) -> None:
    """Some clients write producer id -1 with sequence 0; the cleaner does not mind."""
    log = LogBuilder()
    rows = [RecordToEncode(0, 1, b"a", b"1"), RecordToEncode(1, 1, b"b", b"1")]
    log.raw(encode_batch(rows, producer=NO_PRODUCER._replace(sequence=0)), 1)
    log.put("a=2")
    life = Life(tmp_path, log)
    life.round()
    assert life.live() == ["1:b=1", "2:a=2"]
    assert life.batches()[0].base_sequence == 0


# ---- last batches and producers (6.5 j, k) ----------------------------------------------------------------------------------


def test_emptied_legacy_last_batch_is_dropped(tmp_path: Path) -> None:
    """6.5 j, a deviation: Kafka throws IllegalStateException and gives the partition up."""
    for number, codec in enumerate((NONE, GZIP)):
        for magic in (0, 1):
            log = log_of("a=1")
            last = entry(magic, 1, "=keyless") if codec == NONE else wrapper(magic, 1, [entry(magic, 1 - magic, "=keyless")], codec)
            log.raw(last, 1)
            life = Life(tmp_path / f"{number}-{magic}", log)
            life.round()
            assert life.shape() == ["0-0"]


def test_epoch_that_its_marker_bumped(tmp_path: Path) -> None:
    """6.5 k: the old epoch's data goes although it is the producer's last; the marker stays as an empty control header."""
    log = log_of("5t: a=1")
    log.end(5, commit=False, epoch=1)  # 1
    log.put("b=1")
    life = Life(tmp_path, log)
    for now, marker in ((1_000, "1-1A"), (1_000, "1-1A!"), (1_010, "(1-1M)")):
        life.round(first_dirty_offset=0, now=now, delete_retention_ms=10)
        assert life.shape() == [marker, "2-2"]
    assert life.batches()[0].producer_epoch == 1


def test_other_control_records_are_kept_for_ever(tmp_path: Path) -> None:
    """LEADER_CHANGE, snapshots, and types that are not known yet."""
    log = LogBuilder()
    for kind in (2, 3, 4, 5, 6, 77):
        offset = log.next_offset
        fields = (encode_varint(4), struct.pack(">hh", 0, kind), encode_varint(1), b"\x00")
        body = b"".join([b"\x00", encode_varint(0), encode_varint(0), *fields, encode_varint(0)])
        log.raw(prepend_batch_header(offset, 0, 0, 0x20, 1, 1, NO_PRODUCER, 1, encode_varint(len(body)) + body), offset)
    log.put("a=1")
    life = Life(tmp_path, log)
    before = cleaned_bytes(life)
    for _ in range(3):
        life.round(first_dirty_offset=0, now=LATER, delete_retention_ms=0)
    assert cleaned_bytes(life) == before


def test_header_without_records_goes_when_it_is_not_the_last(tmp_path: Path) -> None:
    """What an earlier round kept for the log's end is dropped when the end has moved on."""
    log = log_of("a=1")
    log.raw(encode_batch([], base_offset=1, last_offset=4, leader_epoch=0), 4)
    life = Life(tmp_path, log)
    life.round()
    assert life.shape() == ["0-0", "(1-4)"]
    log.put("b=1")
    life.round()
    assert life.shape() == ["0-0", "5-5"]


def test_index_entry_keeps_its_bytes(tmp_path: Path) -> None:
    """The entry's first offset and last stable offset are the original ones, though data of the transaction is gone."""
    log = log_of("5t: a=1; 5t: b=1; 5 aborts")
    life = Life(tmp_path, log)
    log.write(life.folder, indexes=True)
    (life.folder / f"{0:020}.index").write_bytes(b"")
    (life.folder / f"{0:020}.timeindex").write_bytes(b"")
    txn_index(life.folder, 0, [(5, 0, 2, 3)])
    original = (life.folder / f"{0:020}.txnindex").read_bytes()
    for _ in range(2):
        life.round(first_dirty_offset=0)
        assert life.shape() == ["(1-1)", "2-2A"]
        assert (life.folder / f"{0:020}.txnindex").read_bytes() == original


def test_outcomes_come_from_markers_not_from_the_index(tmp_path: Path) -> None:
    """A deviation: without a .txnindex, but with an .index, nothing was aborted for Kafka; tiers do lose that file."""
    log = log_of("5t: a=aborted; 5 aborts; 5: b=1")
    folder = log.write(tmp_path / "log", indexes=True)
    assert not list(folder.glob("*.txnindex"))
    clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1))
    assert live(tmp_path / "out") == ["2:b=1"]
    assert transaction_index(tmp_path / "out") == {1: struct.pack(">hqqqq", 0, 5, 0, 1, 2)}


def test_unreadable_snapshot_gives_way_to_an_older_one(tmp_path: Path) -> None:
    """As in Kafka: the log behind the older one says the same."""
    log = log_of("5: a=1; /; 6: a=2; /; a=3")
    folder = log.write(tmp_path / "log")
    snapshot(folder, 1, [(5, 0, 0)])
    snapshot(folder, 2, [])
    newest = folder / f"{2:020}.snapshot"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1))
    assert [(b.base_offset, b.producer_id) for batches in read(tmp_path / "out").values() for b in batches] == [(0, 5), (1, 6), (2, -1)]


def test_what_the_round_does_not_read_it_does_not_judge(tmp_path: Path) -> None:
    """As in Kafka: a batch after the round's end may hold anything."""
    log = log_of("a=1 a=2; /; b=1")
    log.segments[1][1][0] = log.segments[1][1][0][:-2] + b"?\x00"
    folder = log.write(tmp_path / "log")
    clean_log_directory(folder, tmp_path / "out", OfflineCleanOptions(now_ms=1, first_uncleanable_offset=2))
    assert live(tmp_path / "out") == ["1:a=2"]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "more records than there are": lambda raw: raw[:57] + struct.pack(">i", 3) + raw[61:],
    "more records than there can be": lambda raw: raw[:57] + struct.pack(">i", 2**31 - 1) + raw[61:],
    "a negative number of headers": lambda raw: raw[:-1] + b"\x01",
    "a key longer than the batch": lambda raw: raw[:65] + b"\x7e" + raw[66:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("kind", ["data", "marker"])
def test_damage_under_a_right_crc_is_refused(tmp_path: Path, kind: str, damage: Callable[[bytes], bytes]) -> None:
    """Whoever wrote it had the checksum right: the records do not parse."""
    # in a transaction, so that the marker would be copied as it is
    log = log_of(f"5t: a=1; {'b=1' if kind == 'data' else '5 commits'}; c=2")
    log.segments[0][1][1] = fix_crc(damage(log.segments[0][1][1]))
    refused = refused_cleaning(tmp_path, log)
    assert (refused.position, refused.offset) == (len(log.segments[0][1][0]), 1)


# ---- legacy (6.5 n) ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("magic", [0, 1])
def test_legacy_tombstones_go_by_modification_time(tmp_path: Path, magic: int) -> None:
    """6.5 n: kept while strictly newer than (the last clean segment's time - retention); equality removes."""
    for number, (mtime, kept) in enumerate(((9_000, False), (9_001, True))):
        log = LogBuilder()
        log.raw(entry(magic, 0, "a", timestamp=5), 0)
        log.add("/; b=1; /; c=1")
        log.mtimes = {0: mtime, 1: 10_000, 2: 50_000}
        life = Life(tmp_path / str(number), log)
        life.round(first_dirty_offset=2, delete_retention_ms=1_000)
        assert life.live() == (["0:a"] if kept else []) + ["1:b=1", "2:c=1"]
        if kept:
            assert life.batches()[0].magic == 2
            assert life.batches()[0].horizon == 1_001_000


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("magic", [0, 1])
def test_legacy_wrappers_become_magic_2(tmp_path: Path, magic: int, codec: int) -> None:
    """First and last retained offset, the codec and the times are kept; there is no producer and no leader epoch."""
    log = LogBuilder(next_offset=10)
    inner = [
        entry(magic, number + (0 if magic else 10), text, timestamp=100 + number)
        for number, text in enumerate(("a=1", "b=1", "c=1", "d=1"))
    ]
    log.raw(wrapper(magic, 13, inner, codec, timestamp=103), 13)
    log.put("a=2", "d=2")
    life = Life(tmp_path, log)
    life.round()
    first = life.batches()[0]
    assert (first.magic, first.base_offset, first.last_offset, first.codec) == (2, 11, 12, codec)
    assert (first.producer_id, first.producer_epoch, first.base_sequence, first.leader_epoch) == (-1, -1, -1, -1)
    assert [r.timestamp for r in first.records] == ([101, 102] if magic else [-1, -1])
    assert life.live() == ["11:b=1", "12:c=1", "14:a=2", "15:d=2"]


def test_append_time_of_magic_1_stays(tmp_path: Path) -> None:
    log = LogBuilder()
    log.raw(wrapper(1, 1, [entry(1, 0, "a=1", timestamp=5), entry(1, 1, "b=1", timestamp=6)], GZIP, timestamp=777, append_time=True), 1)
    life = Life(tmp_path, log)
    life.round()
    (only,) = life.batches()
    assert only.append_time
    assert (only.base_timestamp, only.max_timestamp, [r.timestamp for r in only.records]) == (777, 777, [777, 777])


def test_wrapper_at_offset_0_counts_from_0(tmp_path: Path) -> None:
    """What old librdkafka wrote: inner offsets 0, 1, 2 in a wrapper whose own offset was never set."""
    log = LogBuilder()
    log.raw(wrapper(1, 0, [entry(1, number, f"{number}=a", timestamp=1) for number in range(3)], GZIP, timestamp=1), 2)
    life = Life(tmp_path, log)
    life.round(high_watermark=3)
    assert life.live() == ["0:0=a", "1:1=a", "2:2=a"]


# ---- codecs in every framing (6.5 o) ----------------------------------------------------------------------------------------


def framed(codec: int, data: bytes) -> list[bytes]:
    half = len(data) // 2
    xerial = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    if codec == GZIP:
        import gzip

        return [gzip.compress(data, 9), gzip.compress(data[:half]) + gzip.compress(data[half:], 1)]
    if codec == SNAPPY:
        blocks = [bytes(cramjam.snappy.compress_raw(part)) for part in (data[:half], data[half:])]
        frames = [struct.pack(">i", len(block)) + block for block in blocks]
        return [bytes(cramjam.snappy.compress_raw(data)), xerial + b"".join(frames), xerial + frames[0] + xerial + frames[1]]
    if codec == LZ4:
        kinds = [{"block_checksum": True}, {"content_checksum": True}, {"store_size": True}, {"block_size": lz4.frame.BLOCKSIZE_MAX4MB}]
        return [lz4.frame.compress(data, block_linked=False, **({"store_size": False} | kind)) for kind in kinds]
    sized = zstandard.ZstdCompressor(write_content_size=True, write_checksum=True)
    bare = zstandard.ZstdCompressor(level=19, write_content_size=False)
    return [sized.compress(data), bare.compress(data), bare.compress(data[:half]) + sized.compress(data[half:])]


@pytest.mark.parametrize("codec", COMPRESSED)
def test_every_framing_is_read(tmp_path: Path, codec: int) -> None:
    """6.5 o: raw and framed snappy, lz4 with every option, zstd with and without size, several members and frames."""
    rows = [RecordToEncode(number, 1, b"key%d" % number, b"value" * number) for number in range(8)]
    body = encode_batch(rows)[61:]
    for number, data in enumerate(framed(codec, body)):
        log = LogBuilder()
        log.raw(prepend_batch_header(0, 7, 0, codec, 1, 1, NO_PRODUCER, 8, data), 7)
        log.put("key3=new")
        folder = log.write(tmp_path / f"log-{number}")
        clean_log_directory(folder, tmp_path / f"out-{number}", OfflineCleanOptions(now_ms=1))
        assert [text.split(":")[0] for text in live(tmp_path / f"out-{number}")] == ["0", "1", "2", "4", "5", "6", "7", "8"]
        assert read(tmp_path / f"out-{number}")[0][0].codec == codec


@pytest.mark.parametrize("codec", COMPRESSED)
def test_what_inflates_too_far_is_refused(tmp_path: Path, codec: int) -> None:
    log = LogBuilder()
    log.put("a=" + "x" * 300_000, codec=codec)
    refused = refused_cleaning(tmp_path, log, "max_decompressed_batch_bytes", max_decompressed_batch_bytes=200_000)
    assert (refused.position, refused.offset) == (0, 0)


def test_offsets_that_go_back_are_refused(tmp_path: Path) -> None:
    """Also across segments."""
    for number, roll in enumerate((False, True)):
        log = log_of("a=1 b=1 c=1")
        if roll:
            log.roll(2)
        log.put("d=1", offsets=[2])
        assert refused_cleaning(tmp_path / str(number), log, "offset").offset == 2


def test_record_outside_its_batch_is_refused(tmp_path: Path) -> None:
    """A deviation: Kafka takes it, and its offset map with it."""
    log = LogBuilder()
    log.put("a=1", "b=1", offsets=[0, 5], last_offset=2)
    log.put("c=1")
    refused = refused_cleaning(tmp_path, log, "outside its batch")
    assert (refused.position, refused.offset) == (0, 0)
