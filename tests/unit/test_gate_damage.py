"""Each kind of damage that the equivalence gate must notice, done to a segment that was cleaned right.

Checksums, lengths and index files are right again after the damage (tests/support/damage.py): the comparison itself must bite.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compactor.cleaner.gate.batch_checks import GateFailed
from compactor.records.encode import NO_PRODUCER, RecordToEncode, encode_batch, encode_filler_batch
from tests.builders import LZ4, LogBuilder, log_of
from tests.plain_format import Batch, Record, fix_crc, read_batches
from tests.support.damage import AMPLE, TINY, Round, changed, settled

NOW = 1_000_000
WHOLE, BELOW = "in the dirty range", "below it"
DUE, WAITING = 5_000, 2_000_000
"""Delete horizons that have passed, and that have not."""


def the_log() -> LogBuilder:
    """A bit of everything; what a round does to it stands behind each line."""
    log = LogBuilder()
    log.put("a=1", "b=2", "c=3")  # 0-2: a is superseded
    log.put("d=4", "e=5", pid=1)  # 3-4: e is superseded
    log.put("f=6", "g=7", pid=2, txn=True)  # 5-6: aborted; the last batch of producer 2, so its header stays
    log.abort(2)  # 7
    log.put("h=8", "i=9", pid=3, txn=True)  # 8-9
    log.commit(3)  # 10
    log.put("gone", "k=1", horizon=DUE)  # 11-12: the tombstone goes
    log.put("stays", "l=1", horizon=WAITING)  # 13-14
    log.end(4, commit=True, horizon=DUE)  # 15: a marker whose horizon has passed; its producer's last, so its header stays
    log.put("m=1", "n=1", codec=LZ4, headers=[("name", b"content")])  # 16-17
    log.add("/; a=2 e=6 o=1")
    log.end(5, commit=False)  # 21: no data of its transaction is left: gets its horizon
    log.put("p=1", "q", "=x", "r=1")  # 22-25: the tombstone gets a horizon, the keyless record goes
    log.put("s=1", "s=2", pid=1)  # 26-27
    return log


@pytest.fixture(params=[AMPLE, TINY], ids=["all keys", "ranges in turn"])
def budget(request: pytest.FixtureRequest) -> int:
    """What the gate has for its keys."""
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture(params=[WHOLE, BELOW])
def cleaned(request: pytest.FixtureRequest, tmp_path: Path) -> Round:
    """The first segment is part of the dirty range, or lies below it and is only compared record by record."""
    folder = the_log().write(tmp_path / "log")
    first_dirty = 0 if request.param == WHOLE else 18
    return Round.of(folder, tmp_path / "out", {"now_ms": NOW, "first_dirty_offset": first_dirty})


def at(batches: list[Batch], last_offset: int) -> int:
    return next(number for number, each in enumerate(batches) if each.last_offset == last_offset)


Damage = Callable[[list[Batch]], list[Batch]]


def on(last_offset: int, damage: Callable[[Batch], Batch]) -> Damage:
    def change(batches: list[Batch]) -> list[Batch]:
        number = at(batches, last_offset)
        return [*batches[:number], damage(batches[number]), *batches[number + 1 :]]

    return change


def without(offset: int) -> Callable[[Batch], Batch]:
    return lambda each: settled(each, [r for r in each.records if r.offset != offset])


def having(record: Record) -> Callable[[Batch], Batch]:
    return lambda each: settled(each, sorted((*each.records, record)))


def other(offset: int, /, **fields: object) -> Callable[[Batch], Batch]:
    return lambda each: settled(each, [r._replace(**fields) if r.offset == offset else r for r in each.records])  # type: ignore[arg-type]


def header(**fields: int) -> Callable[[Batch], Batch]:
    return lambda each: changed(each, **fields)


def record_attributes(each: Batch) -> Batch:
    """Of the first record of an uncompressed batch: bits that Kafka never sets."""
    return replace(each, raw=fix_crc(each.raw[:62] + b"\x02" + each.raw[63:]))


def lost(last_offset: int) -> Damage:
    return lambda batches: [each for each in batches if each.last_offset != last_offset]


def swapped(batches: list[Batch]) -> list[Batch]:
    return [batches[1], batches[0], *batches[2:]]


def repeated(batches: list[Batch]) -> list[Batch]:
    return [*batches[:2], *batches[1:]]


def invented_batch(batches: list[Batch]) -> list[Batch]:
    made = next(iter(read_batches(encode_batch([RecordToEncode(28, 1_000, b"new", b"1")], producer=NO_PRODUCER))))
    return [*batches, made]


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a live record dropped": (on(2, without(1)), "the last record of a key is missing"),
    "a live record of a compressed batch dropped": (on(17, without(16)), "the last record of a key is missing"),
    "a whole batch dropped": (lost(17), "the last record of a key is missing"),
    "a superseded record brought back": (on(2, having(Record(0, 1_000, b"a", b"1"))), "superseded by the record at offset 18"),
    "a superseded record within its batch": (on(27, having(Record(26, 1_026, b"s", b"1"))), "superseded by the record at offset 27"),
    "a keyless record kept": (on(25, having(Record(24, 1_024, None, b"x"))), "without a key"),
    "an aborted record kept": (
        on(6, lambda each: changed(each, [Record(5, 1_005, b"f", b"6")], base_timestamp=1_005)),
        "records of an aborted transaction",
    ),
    "a tombstone kept past its horizon": (on(12, having(Record(11, 1_011, b"gone", None))), "tombstone whose horizon has passed"),
    "a tombstone dropped too early": (on(14, without(13)), "the last record of a key is missing"),
    "a tombstone turned into a value": (on(14, other(13, value=b"")), "not the source's"),
    "a batch emptied, as if only its producer kept it": (
        on(9, lambda each: changed(each, [], base_timestamp=-1)),
        "the last record of a key is missing",
    ),
    "a marker lost": (lost(10), "a control batch is missing"),
    "an abort marker lost": (lost(7), "a control batch is missing"),
    "a marker turned into its opposite": (on(10, other(10, key=b"\x00\x00\x00\x00")), "a control batch was changed"),
    "a marker's record changed": (on(21, other(21, value=bytes(6) + b"more")), "differs from its source"),
    "a marker of another coordinator": (on(21, other(21, value=b"\x00\x00\x00\x00\x00\x07")), "differs from its source"),
    "attributes on a marker's record": (on(21, record_attributes), "differs from its source"),
    "a marker kept past its horizon": (
        on(15, lambda each: changed(each, [Record(15, 1_015, b"\x00\x00\x00\x01", bytes(6))], base_timestamp=DUE, attributes=0x70)),
        "a marker whose horizon has passed",
    ),
    "a marker without its horizon": (on(21, header(attributes=0x30)), "did not just get its horizon"),
    "a marker with another horizon": (on(21, header(base_timestamp=NOW)), "did not just get its horizon"),
    "the last batch of a live producer lost": (lost(6), "the header of a producer's last batch"),
    "the last batch of a live producer changed": (on(6, header(max_timestamp=7)), "not what Kafka leaves"),
    "another last offset": (on(4, header(last_offset=3)), "other offsets than its source batch"),
    "another base offset": (on(20, header(base_offset=19)), "other offsets than its source batch"),
    "offsets that do not ascend": (swapped, "offsets do not ascend"),
    "a batch twice": (repeated, "offsets do not ascend"),
    "a batch that was invented": (invented_batch, "no source has"),
    "a record that was invented": (on(4, having(Record(4, 1_004, b"new", b"1"))), "a record that no source has|not the source's"),
    "a record under another offset": (on(2, other(1, offset=0)), "superseded by the record at offset 1|not the source's"),
    "a value swapped": (on(2, other(1, value=b"9")), "not the source's"),
    "a value of a compressed record swapped": (on(17, other(16, value=b"9")), "not the source's"),
    "a timestamp changed": (on(2, other(2, timestamp=999)), "not the source's"),
    "a record header changed": (on(17, other(17, headers=((b"name", b"other"),))), "not the source's"),
    "a record header lost": (on(17, other(17, headers=())), "not the source's"),
    "another producer id": (on(4, header(producer_id=9)), "another producer id"),
    "another producer epoch": (on(4, header(producer_epoch=1)), "another producer epoch"),
    "another sequence": (on(4, header(base_sequence=9)), "another sequence"),
    "another leader epoch": (on(4, header(leader_epoch=1)), "another leader epoch"),
    "another maximum timestamp": (on(4, header(max_timestamp=9)), "another maximum timestamp"),
    "another base timestamp": (on(4, header(base_timestamp=9)), "a base timestamp that is not the first record's"),
    "another delete horizon": (on(14, header(base_timestamp=WAITING + 1)), "another delete horizon"),
    "a delete horizon lost": (on(14, header(attributes=0, base_timestamp=1_013)), "a delete horizon is missing"),
    "a delete horizon without a reason": (on(4, header(attributes=0x40, base_timestamp=NOW + 86_400_000)), "or has no reason"),
    "a new tombstone without its horizon": (on(25, header(attributes=0, base_timestamp=1_022)), "a delete horizon is missing"),
    "the transactional bit lost": (on(9, header(attributes=0)), "other attributes"),
    "the time type changed": (on(4, header(attributes=8)), "other attributes"),
    "another codec": (on(17, header(attributes=0)), "another codec"),
    "bits that nobody knows": (on(4, header(attributes=0x100)), "unknown attributes"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused(cleaned: Round, budget: int, name: str) -> None:
    damage, cause = DAMAGES[name]
    assert cleaned.refusal(budget_bytes=budget) == ""
    cleaned.change(lambda batches: [changed(each) if each.count else each for each in batches])
    assert cleaned.refusal(budget_bytes=budget) == "", "written anew without a change it is as good as before"
    cleaned.change(damage)
    assert re.search(cause, cleaned.refusal(budget_bytes=budget))


@pytest.mark.parametrize("damage", [other(1, value=b"9"), without(1)], ids=["changed", "lost"])
def test_the_refusal_names_key_offset_and_segment(cleaned: Round, budget: int, damage: Callable[[Batch], Batch]) -> None:
    cleaned.change(on(2, damage))
    with pytest.raises(GateFailed) as refused:
        cleaned.judged_in_turn(budget)
    assert (refused.value.segment, refused.value.offset, refused.value.key) == ("00000000000000000000.log", 1, b"b")
    assert "Nothing was published" in str(refused.value)


def test_a_wrong_crc_is_refused(cleaned: Round) -> None:
    log = cleaned.paths(0)["log"]
    data = bytearray(log.read_bytes())
    data[-1] ^= 1
    log.write_bytes(data)
    assert cleaned.refusal() == "a wrong CRC"


def test_a_cut_segment_is_refused(cleaned: Round) -> None:
    log = cleaned.paths(0)["log"]
    log.write_bytes(log.read_bytes()[:-1])
    assert "unreadable" in cleaned.refusal()


# ---- coverage ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hollow(tmp_path: Path) -> Round:
    """The round leaves nothing at the segment's end: high watermark and producers do not hold the last batch."""
    log = log_of("a=1 b=1; =x =y")
    return Round.of(log.write(tmp_path / "log"), tmp_path / "out", {"now_ms": NOW, "high_watermark": 99})


def filler(last_offset: int, leader_epoch: int = 0) -> Batch:
    return next(iter(read_batches(encode_filler_batch(last_offset, last_offset, leader_epoch))))


def test_a_segment_ends_where_its_sources_end(hollow: Round) -> None:
    assert hollow.refusal() == "", "Kafka leaves it so"
    assert hollow.refusal(end_offset=3) == "it ends at offset 1 and must end at 3"
    hollow.change(lambda batches: [*batches, filler(3)])
    assert hollow.refusal(end_offset=3) == ""
    assert hollow.refusal(end_offset=2) == "it ends at offset 3 and must end at 2"


def test_a_filler_belongs_at_the_end_of_a_published_segment_only(hollow: Round) -> None:
    hollow.change(lambda batches: [*batches, filler(2), filler(3)])
    assert hollow.refusal(end_offset=3) == "other offsets than its source batch"
    hollow.change(lambda batches: [batches[0], filler(3)])
    assert hollow.refusal() != "", "Kafka would not have left one"


def test_a_filler_has_the_leader_epoch_of_the_last_source_batch(hollow: Round) -> None:
    hollow.change(lambda batches: [*batches, filler(3, leader_epoch=1)])
    assert "a filler of another leader epoch" in hollow.refusal(end_offset=3)


def test_an_emptied_segment_must_not_be_published(hollow: Round) -> None:
    hollow.change(lambda batches: [])
    assert hollow.refusal(end_offset=3) == "it is empty and must end at 3"


# ---- index files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def indexed(tmp_path: Path) -> Round:
    """With an entry for each batch but the first."""
    return Round.of(the_log().write(tmp_path / "log"), tmp_path / "out", {"now_ms": NOW, "index_interval_bytes": 0})


@pytest.mark.parametrize(
    ("kind", "damage", "cause"),
    [
        ("index", lambda data: struct.pack(">II", 4, 1) + data[8:], "the offset index"),
        ("index", lambda data: struct.pack(">II", 5, *struct.unpack(">I", data[4:8])) + data[8:], "the offset index"),
        ("index", lambda data: data[8:16] + data[:8] + data[16:], "the offset index"),
        ("index", lambda data: data + data[-8:], "the offset index"),
        ("timeindex", lambda data: data[:-12], "the time index"),
        ("timeindex", lambda data: struct.pack(">q", 7) + data[8:], "the time index"),
        ("timeindex", lambda data: data[:-4] + struct.pack(">I", 1), "the time index"),
        ("timeindex", lambda data: data + data[-12:], "the time index"),
        ("timeindex", lambda data: b"", "the time index"),
        ("txnindex", lambda data: b"", "the transaction index"),
        ("txnindex", lambda data: data + data, "the transaction index"),
        ("txnindex", lambda data: data[:2] + struct.pack(">q", 9) + data[10:], "the transaction index"),
        ("txnindex", lambda data: data[:10] + struct.pack(">q", 6) + data[18:], "the transaction index"),
        ("txnindex", lambda data: data[:18] + struct.pack(">q", 8) + data[26:], "the transaction index"),
    ],
)  # fmt: skip
def test_wrong_index_files_are_refused(indexed: Round, kind: str, damage: Callable[[bytes], bytes], cause: str) -> None:
    assert indexed.refusal() == ""
    path = indexed.paths(0)[kind]
    path.write_bytes(damage(path.read_bytes()))
    assert cause in indexed.refusal()


def test_a_lost_transaction_index_is_refused(indexed: Round) -> None:
    indexed.paths(0)["txnindex"].unlink()
    assert "the transaction index" in indexed.refusal()
