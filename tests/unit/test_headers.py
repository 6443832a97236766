"""Digests over the headers of batches, and checksums of ranges from headers alone, against hashlib and another CRC-32C over the bytes."""

from __future__ import annotations

import hashlib
import itertools
import random
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, strategies as st

from compactor.kernels.crc import combine_crc32c, crc_after_zero_bytes, zero_bytes_tables
from compactor.records import batches as headers
from compactor.records.batches import (
    HEADER_BYTES,
    BatchHeaderDigestBuilder,
    copy_batch_headers,
    crc32c_from_headers,
    parse_batch_headers,
    read_only_view,
    sha256_of_batch_headers,
    verified_header_digest,
)
from compactor.records.encode import NO_PRODUCER, prepend_batch_header
from tests.builders import GZIP, LZ4, NONE, SNAPPY, ZSTD, LogBuilder, entry, wrapper
from tests.plain_format import Batch, read_batches


def log_of(seed: int = 1, batches: int = 40) -> bytes:
    """Batches of every codec and of many sizes, markers, and headers without records."""
    dice, log = random.Random(seed), LogBuilder()
    for _ in range(batches):
        kind = dice.choice(["data", "data", "data", "marker", "empty"])
        if kind == "data":
            rows = [f"{dice.randrange(9)}={dice.randbytes(dice.choice([0, 3, 700, 9000])).hex()}" for _ in range(dice.randrange(1, 5))]
            log.put(*rows, codec=dice.choice([NONE, GZIP, SNAPPY, LZ4, ZSTD]))
        elif kind == "marker":
            log.put("a=1", pid=7, txn=True)
            log.end(7, commit=dice.random() < 0.5)
        else:
            offset = log.next_offset
            log.raw(prepend_batch_header(offset, 4, 0, 0, -1, -1, NO_PRODUCER, 0, b""), offset + 4)
    return b"".join(log.segments[0][1])


def plain_digest(batches: list[Batch]) -> str:
    return hashlib.sha256(b"headers of v2 batches\0" + b"".join(batch.raw[:61] for batch in batches)).hexdigest()


def headers_in(data: bytes) -> headers.HeaderBytes:
    buf = read_only_view(np.frombuffer(data, np.uint8))
    return copy_batch_headers(buf, parse_batch_headers(buf, "log").position)


def digest_of(data: bytes) -> str:
    digest = BatchHeaderDigestBuilder()
    digest.add_log_bytes(data)
    return digest.header_digest()


class TestDigest:
    @pytest.mark.parametrize("seed", range(5))
    def test_it_is_over_the_headers_one_behind_the_other(self, seed: int, tmp_path: Path) -> None:
        data = log_of(seed)
        (tmp_path / "log").write_bytes(data)
        expected = plain_digest(list(read_batches(data)))
        assert sha256_of_batch_headers(headers_in(data)) == expected
        assert digest_of(data) == expected
        assert verified_header_digest(tmp_path / "log") == expected

    def test_a_range_s_headers(self) -> None:
        data = log_of()
        batches = list(read_batches(data))
        assert headers_in(data)[7:30].tobytes() == b"".join(batch.raw[:61] for batch in batches[7:30])
        assert sha256_of_batch_headers(headers_in(data)[3::5]) == plain_digest(batches[3::5])

    def test_of_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "log").touch()
        nothing = copy_batch_headers(read_only_view(np.empty(0, np.uint8)), np.empty(0, np.int64))
        assert nothing.shape == (0, HEADER_BYTES)
        assert verified_header_digest(tmp_path / "log") == sha256_of_batch_headers(nothing) == plain_digest([])

    @pytest.mark.parametrize("size", [0, 60, 100])
    def test_a_header_outside_is_a_bug(self, size: int) -> None:
        with pytest.raises(IndexError):
            copy_batch_headers(read_only_view(np.zeros(size, np.uint8)), np.array([size - 60]))

    @given(st.lists(st.integers(0, 40_000), max_size=12), st.integers(0, 3))
    def test_pieces_may_end_anywhere(self, cuts: list[int], seed: int) -> None:
        data = log_of(seed, 12)
        digest = BatchHeaderDigestBuilder()
        for start, end in itertools.pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
            digest.add_log_bytes(data[start:end])
        assert digest.header_digest() == plain_digest(list(read_batches(data)))

    def test_byte_by_byte_it_is_there_at_every_batch_s_end_and_nowhere_else(self) -> None:
        data = log_of(2, 6)
        batches = list(read_batches(data))
        ends = dict(zip(itertools.accumulate(len(batch.raw) for batch in batches), itertools.count(1)))
        digest = BatchHeaderDigestBuilder()
        for at in range(len(data)):
            digest.add_log_bytes(data[at : at + 1])
            assert digest.header_digest() == (plain_digest(batches[: ends[at + 1]]) if at + 1 in ends else ""), at

    def test_large_files_are_looked_at_in_pieces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = log_of()
        (tmp_path / "log").write_bytes(data)
        monkeypatch.setattr(headers, "SCAN_BYTES", 100)
        assert verified_header_digest(tmp_path / "log") == plain_digest(list(read_batches(data)))


class TestDamage:
    def test_every_bit_counts(self) -> None:
        """Before the CRC's reach the header is another one; behind it the CRC does not fit."""
        log = LogBuilder()
        for number in range(3):
            log.put(f"a={number}", "b=some text")
        data = b"".join(log.segments[0][1])
        expected, size = digest_of(data), len(data) // 3
        assert expected
        for bit in range(8 * len(data)):
            harmed = bytearray(data)
            harmed[bit // 8] ^= 1 << bit % 8
            found, field = digest_of(bytes(harmed)), bit // 8 % size
            assert found != expected, bit
            if field < 8 or 12 <= field < 16:  # base offset and leader epoch, which brokers change without a new CRC
                assert found, bit
            else:
                assert not found, bit

    @pytest.mark.parametrize("change", ["missing", "twice", "swapped", "of another log"])
    def test_whole_batches(self, change: str) -> None:
        batches = [batch.raw for batch in read_batches(log_of(4))]
        changed = {
            "missing": batches[:5] + batches[6:],
            "twice": batches[:5] + batches[4:],
            "swapped": [*batches[:5], batches[6], batches[5], *batches[7:]],
            "of another log": [*batches[:-1], *(batch.raw for batch in list(read_batches(log_of(5)))[-1:])],
        }[change]
        found = digest_of(b"".join(changed))
        assert found
        assert found != digest_of(b"".join(batches))

    def test_a_file_that_ends_within_a_batch_has_none(self, tmp_path: Path) -> None:
        data = log_of(2, 3)
        ends = {0, *itertools.accumulate(len(batch.raw) for batch in read_batches(data))}
        for size in range(len(data) + 1):
            assert bool(digest_of(data[:size])) == (size in ends), size
        (tmp_path / "log").write_bytes(data[:-1])
        assert verified_header_digest(tmp_path / "log") == ""

    @pytest.mark.parametrize("magic", [0, 1])
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("place", ["alone", "first", "last"])
    def test_older_messages_have_none(self, magic: int, place: str, tmp_path: Path, *, packed: bool) -> None:
        old = entry(magic, 0, "a=" + "1" * 99)
        old = wrapper(magic, 0, [old], GZIP) if packed else old
        new = log_of(1, 3)
        (tmp_path / "log").write_bytes({"alone": old, "first": old + new, "last": new + old}[place])
        assert verified_header_digest(tmp_path / "log") == ""

    @pytest.mark.parametrize("length", [-(2**31), -1, 0, 48])
    def test_a_batch_that_claims_less_than_its_header(self, length: int) -> None:
        data = bytearray(log_of(1, 2))
        data[8:12] = struct.pack(">i", length)
        assert digest_of(bytes(data)) == ""

    def test_what_comes_after_damage_does_not_heal_it(self) -> None:
        digest, data = BatchHeaderDigestBuilder(), log_of(1, 2)
        digest.add_log_bytes(b"\0" * 61)
        digest.add_log_bytes(data)
        assert digest.header_digest() == ""


class TestRanges:
    @pytest.mark.parametrize("seed", range(5))
    def test_the_checksum_of_the_bytes(self, seed: int) -> None:
        data = log_of(seed)
        batches = [batch.raw for batch in read_batches(data)]
        found = headers_in(data)
        for first, last in [(0, len(batches)), (0, 1), (3, 4), (5, 30), (len(batches) - 1, len(batches)), (9, 9)]:
            assert crc32c_from_headers(found[first:last]) == google_crc32c.value(b"".join(batches[first:last])), (first, last)

    def test_of_batches_that_do_not_lie_together(self) -> None:
        data = log_of()
        batches = [batch.raw for batch in read_batches(data)]
        assert crc32c_from_headers(headers_in(data)[::3]) == google_crc32c.value(b"".join(batches[::3]))

    @given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
    def test_zeros_by_powers_are_zeros(self, first: int, second: int, size: int) -> None:
        assert int(crc_after_zero_bytes(zero_bytes_tables(), np.uint64(first), size)) ^ second == combine_crc32c(first, second, size)
