"""The logs that ``benchmarks.cleaner`` cleans: by size of values, codec and records a batch; a CDC mix; one that is nearly clean."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compactor.records.batches import HEADER
from compactor.records.codecs import GZIP, LZ4, NONE, SNAPPY, ZSTD, compress_body
from compactor.records.encode import NO_PRODUCER, ProducerFields, RecordToEncode, encode_batch, encode_txn_marker, prepend_batch_header

CODECS = {"none": NONE, "lz4": LZ4, "snappy": SNAPPY, "zstd": ZSTD, "gzip": GZIP}
VALUES = {"1k": 1024, "100b": 100}
BATCHES = (1, 10, 100, 500)
USUAL = {"1k": 10, "100b": 100}
"""Records in a batch of some 10 KB."""

NOW_MS = 1_700_000_000_000
SEGMENT_BYTES = 32 << 20
_DIGITS = 10
_POOL_BYTES = 8 << 20


@dataclass(frozen=True)
class Profile:
    """``value``: bytes of a value; ``clean``: the share of the log that is clean already, each key in it once; ``cdc``: see ``_cdc``."""

    name: str
    value: int
    codec: int
    per_batch: int
    clean: float = 0.0
    cdc: bool = False

    @property
    def title(self) -> str:
        """As the documents name it: the usual batches of a size are not mentioned."""
        if self.cdc:
            return "changes of a database, lz4, transactions"
        size, codec = ("1 KB" if self.value == VALUES["1k"] else "100 B"), next(name for name, code in CODECS.items() if code == self.codec)
        usual = self.per_batch == USUAL["1k" if self.value == VALUES["1k"] else "100b"]
        return (
            f"{size}, {codec}"
            + ("" if usual else f", {self.per_batch} a batch")
            + (f", {self.clean:.0%} clean".replace("%", " %") if self.clean else "")
        )


def _profiles() -> Iterator[Profile]:
    for per_batch in (0, *BATCHES):
        for size, value in VALUES.items():
            for codec, number in CODECS.items():
                if per_batch != USUAL[size]:
                    count = per_batch or USUAL[size]
                    yield Profile(f"{size}-{codec}-{count}", value, number, count)
    yield Profile("cdc-lz4", 400, LZ4, 20, cdc=True)
    for codec in ("none", "lz4"):
        yield Profile(f"nearly-clean-{codec}", VALUES["1k"], CODECS[codec], USUAL["1k"], clean=0.95)


PROFILES = {profile.name: profile for profile in _profiles()}
"""The usual batches of both sizes first."""


@dataclass(frozen=True)
class Written:
    """``bytes``: of segments; ``first_dirty``: the first offset that is not clean."""

    records: int
    bytes: int
    first_dirty: int


def write_log(folder: Path, profile: Profile, total_bytes: int) -> Written:
    """JSON-like values, about ``total_bytes`` of records before compression."""
    folder.mkdir()
    records = total_bytes // (profile.value + 30) // profile.per_batch * profile.per_batch
    first_dirty = int(records * profile.clean) // profile.per_batch * profile.per_batch
    batches = _cdc(records) if profile.cdc else _plain(profile, records, first_dirty)
    segment: list[bytes] = []
    base = size = total = 0
    for end, data in batches:
        segment.append(data)
        size += len(data)
        if size >= SEGMENT_BYTES:
            total += (folder / f"{base:020}.log").write_bytes(b"".join(segment))
            segment, size, base = [], 0, end
    if segment:
        total += (folder / f"{base:020}.log").write_bytes(b"".join(segment))
    return Written(records, total, first_dirty)


def _plain(profile: Profile, records: int, first_dirty: int) -> Iterator[tuple[int, bytes]]:
    """(offset behind it, batch): keys drawn from half as many as there are records; what is clean has each key once."""
    dice = np.random.default_rng(1)
    keys = dice.integers(0, records // 2, records)
    if first_dirty:
        keys = np.concatenate((dice.permutation(first_dirty), dice.integers(0, first_dirty, records - first_dirty)))
    pool = _pool(profile)
    count = profile.per_batch
    powers = 10 ** np.arange(_DIGITS - 1, -1, -1)
    for number, base in enumerate(range(0, records, count)):
        body, places = pool[number % len(pool)]
        body[places] = 48 + keys[base : base + count, None] // powers % 10
        data = body.tobytes()
        if profile.codec:
            data = compress_body(profile.codec, data)
        time = NOW_MS - records + base
        yield base + count, prepend_batch_header(base, count - 1, 0, profile.codec, time, time + count - 1, NO_PRODUCER, count, data)


def _pool(profile: Profile) -> list[tuple[np.ndarray, np.ndarray]]:
    """Bodies of batches with values of their own, and where the digits of their keys are, shape (records, digits)."""
    dice = random.Random(1)
    words = [dice.randbytes(dice.randrange(2, 5)).hex() for _ in range(400)]
    key = b"customer-" + b"#" * _DIGITS
    found = []
    for _ in range(max(1, _POOL_BYTES // (profile.per_batch * (profile.value + 30)))):
        rows = [RecordToEncode(n, n, key, _value(dice, words, profile.value)) for n in range(profile.per_batch)]
        body = np.frombuffer(encode_batch(rows)[HEADER:], np.uint8).copy()
        hashes = np.flatnonzero(body == ord("#")).reshape(profile.per_batch, _DIGITS)
        found.append((body, hashes))
    return found


def _value(dice: random.Random, words: list[str], size: int) -> bytes:
    text = f'{{"id":{dice.randrange(10**9)}'
    while len(text) < size:
        text += f',"{dice.choice(words)}":"{dice.choice(words)}{dice.randrange(1000)}"'
    return text[:size].encode()


def _cdc(records: int) -> Iterator[tuple[int, bytes]]:
    """What a database's connectors write: five producers in turns, transactions of up to six batches, one in ten aborted; values of 100
    to 700 bytes, three of four updates among a tenth of the keys, one record in ten a tombstone."""
    dice = random.Random(1)
    words = [dice.randbytes(dice.randrange(2, 5)).hex() for _ in range(400)]
    values = [_value(dice, words, dice.randrange(100, 700)) for _ in range(20_000)]
    keys = records // 2
    sequences, left = [0] * 5, [0] * 5
    offset = 0
    while offset < records:
        time = NOW_MS - records + offset
        who = dice.randrange(5)
        if left[who] == 1:
            left[who] = 0
            yield offset + 1, encode_txn_marker(offset, time, who, 0, is_commit=dice.random() > 0.1)
            offset += 1
            continue
        left[who] = left[who] - 1 if left[who] else dice.randrange(2, 8)
        rows = []
        for at in range(offset, offset + dice.randrange(1, 40)):
            key = dice.randrange(keys // 10) if dice.random() < 0.75 else dice.randrange(keys)
            rows.append(RecordToEncode(at, time, b"customer-%010d" % key, None if dice.random() < 0.1 else dice.choice(values)))
        offset += len(rows)
        yield offset, encode_batch(rows, codec=LZ4, producer=ProducerFields(who, 0, sequences[who], True))
        sequences[who] += len(rows)
