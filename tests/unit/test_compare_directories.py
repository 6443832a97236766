"""The comparer must see every kind of difference, and none where there is none."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from compactor.records.encode import NO_PRODUCER, ProducerFields, RecordToEncode, encode_batch, prepend_batch_header
from tests.builders import GZIP, ZSTD, LogBuilder, read, txn_index
from tests.compare import directories_differ, segments_differ
from tests.plain_format import fix_crc, read_batches

LOG, INDEX, TIMES, TXN = (f"{0:020}{suffix}" for suffix in (".log", ".index", ".timeindex", ".txnindex"))


def directory(folder: Path) -> Path:
    log = LogBuilder()
    log.put("a=1", "b=2", pid=5, headers=[("h", b"v")])
    log.put("c=" + "x" * 5000, codec=GZIP)
    log.put("d=1", codec=ZSTD)
    log.roll()
    log.mtimes = {0: 1_000, 4: 2_000}
    log.write(folder, indexes=True)
    txn_index(folder, 0, [(5, 0, 1, 2)])
    return folder


def changed(raw: bytes, at: int, value: bytes) -> bytes:
    return fix_crc(raw[:at] + value + raw[at + len(value) :])


def first_batch(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        first, *others = (each.raw for each in read_batches((folder / LOG).read_bytes()))
        mtime = (folder / LOG).stat().st_mtime_ns
        (folder / LOG).write_bytes(b"".join([change(first), *others]))
        os.utime(folder / LOG, ns=(mtime, mtime))

    return damage


def longer_varint(raw: bytes) -> bytes:
    """The timestamp delta 0 of the first record in two bytes: legal, and not what Kafka writes."""
    (each,) = read_batches(raw)
    body = raw[61:]
    first = bytes([body[0] + 2]) + body[1:2] + b"\x80\x00" + body[3 : 1 + body[0] // 2]
    body = first + body[1 + body[0] // 2 :]
    return (
        raw[:8]
        + prepend_batch_header(
            0,
            1,
            0,
            0,
            each.base_timestamp,
            each.max_timestamp,
            ProducerFields(each.producer_id, each.producer_epoch, each.base_sequence),
            2,
            body,
        )[8:]
    )


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a segment is missing": (lambda folder: (folder / f"{4:020}.log").unlink(), "segments: expected"),
    "a batch is missing": (first_batch(lambda raw: b""), "batch 0"),
    "another leader epoch": (first_batch(lambda raw: changed(raw, 12, struct.pack(">i", 9))), "leader_epoch: expected 0, actual 9"),
    "another sequence": (first_batch(lambda raw: changed(raw, 53, struct.pack(">i", 9))), "base_sequence: expected 0, actual 9"),
    "another last offset": (first_batch(lambda raw: changed(raw, 23, struct.pack(">i", 2))), "last_offset: expected 1, actual 2"),
    "another largest time": (first_batch(lambda raw: changed(raw, 35, struct.pack(">q", 9))), "max_timestamp"),
    "unknown attribute bits": (first_batch(lambda raw: changed(raw, 21, b"\x01")), "attributes: expected 0, actual 256"),
    "another value": (first_batch(lambda raw: changed(raw, 68, b"!")), "record 0, value: expected b'1', actual b'!'"),
    "another header": (first_batch(lambda raw: changed(raw, 71, b"i")), "record 0, headers"),
    "other bytes, same content": (
        first_batch(longer_varint),
        "the content is the same, the bytes are not",
    ),
    "a byte of the index": (lambda folder: (folder / INDEX).write_bytes(b"\x00" * 8), ".index"),
    "a byte of the time index": (lambda folder: (folder / TIMES).write_bytes(b"\x00" * 12), ".timeindex"),
    "the transaction index": (lambda folder: (folder / TXN).unlink(), "transaction index"),
    "the modification time": (lambda folder: os.utime(folder / LOG, ns=(5, 5)), "modification time: expected 1000"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_differences_are_seen(tmp_path: Path, name: str) -> None:
    damage, words = DAMAGE[name]
    expected, actual = directory(tmp_path / "expected"), directory(tmp_path / "actual")
    assert directories_differ(expected, actual, index_interval_bytes=4096) == ""
    damage(actual)
    assert words in directories_differ(expected, actual, index_interval_bytes=4096)


def test_compressed_bytes_may_differ_content_may_not(tmp_path: Path) -> None:
    rows = [RecordToEncode(0, 1, b"a", b"value " * 100), RecordToEncode(1, 1, b"b", b"value " * 100)]
    body = encode_batch(rows)[61:]
    made = []
    for level in (1, 9):
        packer = zlib.compressobj(level, wbits=31)
        made.append(prepend_batch_header(0, 1, 0, GZIP, 1, 1, NO_PRODUCER, 2, packer.compress(body) + packer.flush()))
    assert made[0] != made[1]
    other = encode_batch([rows[0], rows[1]._replace(value=b"other")], codec=GZIP)
    for name, data in (("expected", made[0]), ("same", made[1]), ("other", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOG).write_bytes(data)
        os.utime(tmp_path / name / LOG, ns=(0, 0))
    assert segments_differ(read(tmp_path / "expected"), read(tmp_path / "same")) == ""
    assert directories_differ(tmp_path / "expected", tmp_path / "same") == ""
    assert "record 1, value" in directories_differ(tmp_path / "expected", tmp_path / "other")
