"""What compactor.records.encode writes, the plain reader reads."""

from __future__ import annotations

import pytest

from compactor.records.encode import ProducerFields, RecordToEncode, encode_batch, encode_txn_marker, encode_varint
from tests.builders import GZIP, LZ4, NONE, SNAPPY, ZSTD
from tests.plain_format import Record, read_batches, varint as read_varint
from tests.plain_log import control_type

ROWS = [
    RecordToEncode(10, 1_000, b"a", b"1"),
    RecordToEncode(12, 900, b"", None, (("h", b"v"), ("", None), (b"\xff", b""))),
    RecordToEncode(15, 2_000, None, b""),
    RecordToEncode(16, -1, b"k" * 300, b"v" * 100_000),
]


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4, ZSTD])
def test_rows_come_back(codec: int) -> None:
    data = encode_batch(ROWS, codec=codec, producer=ProducerFields(7, 2, 40, True), leader_epoch=3, base_offset=8, last_offset=20)
    (read,) = read_batches(data)
    assert (read.base_offset, read.last_offset, read.codec, read.leader_epoch, read.count) == (8, 20, codec, 3, 4)
    assert (read.producer_id, read.producer_epoch, read.base_sequence, read.transactional) == (7, 2, 40, True)
    assert (read.base_timestamp, read.max_timestamp, read.horizon) == (1_000, 2_000, None)
    expected = [Record(o, t, k, v, tuple((n.encode() if isinstance(n, str) else n, x) for n, x in h)) for o, t, k, v, h, _ in ROWS]
    assert list(read.records) == expected


def test_horizon_takes_the_place_of_the_base_timestamp() -> None:
    (read,) = read_batches(encode_batch(ROWS, delete_horizon_ms=5_000))
    assert (read.horizon, read.base_timestamp, [r.timestamp for r in read.records]) == (5_000, 5_000, [1_000, 900, 2_000, -1])


def test_append_time_is_every_records_time() -> None:
    (read,) = read_batches(encode_batch(ROWS, append_time_ms=7_777))
    assert (read.append_time, read.base_timestamp, read.max_timestamp) == (True, 1_000, 7_777)
    assert {r.timestamp for r in read.records} == {7_777}


def test_batch_without_rows_is_a_bare_header() -> None:
    data = encode_batch([], base_offset=3, last_offset=9, codec=GZIP, producer=ProducerFields(7, 2, 40), max_timestamp=12)
    (read,) = read_batches(data)
    assert len(data) == 61
    assert (read.base_offset, read.last_offset, read.codec, read.max_timestamp, read.count, read.records) == (3, 9, NONE, 12, 0, ())
    with pytest.raises(ValueError, match="needs"):
        encode_batch([])


@pytest.mark.parametrize("commit", [False, True])
def test_markers(commit: bool) -> None:
    (read,) = read_batches(encode_txn_marker(5, 1_000, 7, 2, is_commit=commit, coordinator_epoch=9, delete_horizon_ms=3_000))
    assert (read.control, read.transactional, control_type(read), read.horizon) == (True, True, int(commit), 3_000)
    assert (read.producer_id, read.producer_epoch, read.base_sequence) == (7, 2, -1)
    assert read.records[0].timestamp == 1_000
    assert read.records[0].value == b"\x00\x00\x00\x00\x00\x09"


@pytest.mark.parametrize("number", [0, 1, -1, 63, 64, -64, -65, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
def test_varints(number: int) -> None:
    data = encode_varint(number)
    assert read_varint(data, 0, 10) == (number, len(data))
