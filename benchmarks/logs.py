"""Log directories for benchmarks, written at some hundred MB a second: v2 batches of keys that are given by their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt

from compactor.records.encode import RecordToEncode, encode_batch

BASE_MS = 1_700_000_000_000
TOPIC_ID = "YmVuY2htYXJrLXRvcGljIQ"
DIGITS = 12
_CRC_AT, _CHECKED_FROM = 17, 21


def write_log(
    folder: Path,
    segments: Iterable[npt.NDArray[np.int64]],
    *,
    value_bytes: int,
    first_offset: int = 0,
    per_batch: int = 100,
    has_random_values: bool = False,
) -> int:
    """One segment for each array of key numbers, whose length is a multiple of ``per_batch``; returns the offset behind the last record.

    :param has_random_values: whether each record has random hexadecimal digits as its value; otherwise all have the same bytes.
    """
    folder.mkdir(parents=True)
    # Directories of one log that share no record: only the topic id shows that they belong together.
    (folder / "partition.metadata").write_text(f"version: 0\ntopic_id: {TOPIC_ID}")
    dice = np.random.default_rng(first_offset + 1)
    value = dice.bytes(value_bytes)
    rows = [RecordToEncode(n, BASE_MS, b"key-%0*d" % (DIGITS, n), value) for n in range(per_batch)]
    template = encode_batch(rows, base_offset=0, last_offset=per_batch - 1)
    places = np.array([template.index(b"key-%0*d" % (DIGITS, n)) + 4 for n in range(per_batch)])
    values = (places + DIGITS + template[places[0] + DIGITS :].index(value))[:, None] + np.arange(value_bytes)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    offset = first_offset
    for keys in segments:
        numbers = keys.reshape(-1, per_batch)
        with (folder / f"{offset:020d}.log").open("wb") as file:
            for begin in range(0, len(numbers), 1000):  # a thousand batches at a time
                some = numbers[begin : begin + 1000]
                data = np.tile(np.frombuffer(template, np.uint8), (len(some), 1))
                for digit in range(DIGITS):
                    data[:, places + digit] = 48 + some // 10 ** (DIGITS - 1 - digit) % 10
                if has_random_values:
                    data[:, values] = digits[dice.integers(0, 16, (len(some), *values.shape), np.uint8)]
                bases = offset + per_batch * np.arange(len(some))
                data[:, :8] = bases.astype(">i8").view(np.uint8).reshape(len(some), 8)
                data[:, 27:35] = data[:, 35:43] = (BASE_MS + bases).astype(">i8").view(np.uint8).reshape(len(some), 8)
                for row in data:
                    crc = google_crc32c.value(row[_CHECKED_FROM:].tobytes()).to_bytes(4, "big")
                    row[_CRC_AT:_CHECKED_FROM] = np.frombuffer(crc, np.uint8)
                data.tofile(file)
                offset += per_batch * len(some)
    return offset
