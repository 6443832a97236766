"""Log directories for tests: batches in words, segments, legacy formats, several rounds.

``log.put("a=1", "b", "=x", "c=")`` is one batch of four records: a value, a tombstone, a record without a key, an empty value.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import google_crc32c
import pytest
from typing_extensions import override

from compactor.cleaner.offline import OfflineCleanOptions, OfflineCleanSummary, clean_log_directory
from compactor.constants import TopicId
from compactor.errors import BadData
from compactor.records.codecs import GZIP, LZ4, NONE, SNAPPY, ZSTD, compress_body
from compactor.records.encode import NO_PRODUCER, ProducerFields, RecordToEncode, encode_batch, encode_txn_marker
from tests.compare import describe
from tests.plain_format import Batch, read_batches, segment_paths
from tests.plain_log import control_type, indexes_of, transaction_index

__all__ = [
    "GZIP",
    "LZ4",
    "NONE",
    "SNAPPY",
    "TOPIC_ID",
    "ZSTD",
    "Life",
    "LogBuilder",
    "entry",
    "live",
    "log_of",
    "name_topic",
    "next_directory",
    "read",
    "wrapper",
]


TOPIC_ID = TopicId("Xy3Jr0mXSGaBcbTsZBZfJA")
"""Of the topics of tests that have one."""


def name_topic(folder: Path, topic_id: str = TOPIC_ID) -> Path:
    """Write the ``partition.metadata`` of a broker from Kafka 2.8 on into a directory; with an empty id, take it away."""
    path = folder / "partition.metadata"
    if topic_id:
        path.write_text(f"version: 0\ntopic_id: {topic_id}")
    else:
        path.unlink(missing_ok=True)
    return folder


def pair(text: str | bytes) -> tuple[bytes | None, bytes | None]:
    """``a=1`` key and value, ``a`` a tombstone, ``=1`` no key, ``@=1`` an empty key, ``a=`` an empty value."""
    key, equals, value = text.encode().partition(b"=") if isinstance(text, str) else text.partition(b"=")
    return (None if not key else b"" if key == b"@" else key), (value if equals else None)


@dataclass(repr=False)
class LogBuilder:
    """Batches one after the other, at rising offsets; a millisecond passes with each record."""

    next_offset: int = 0
    time: int = 1_000
    leader_epoch: int = 0
    segments: list[tuple[int, list[bytes]]] = field(default_factory=list)
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    mtimes: dict[int, int] = field(default_factory=dict)
    written: int = 0
    topic_id: str = TOPIC_ID

    def __post_init__(self) -> None:
        self.segments = [(self.next_offset, [])]

    @override
    def __repr__(self) -> str:
        """In words, for hypothesis and for people."""
        lines = [f"LogBuilder(next_offset={self.next_offset})"]
        for base, batches in self.segments:
            lines.append(f"segment {base}, modified {self.mtimes.get(base)}:")
            lines += [f"  {_told(each)}" for each in read_batches(b"".join(batches), check_crc=False)]
        return "\n".join(lines)

    def put(
        self,
        *pairs: str | bytes,
        pid: int = -1,
        txn: bool = False,
        sequence: int | None = None,
        codec: int = NONE,
        headers: Sequence[tuple[str | bytes, bytes | None]] = (),
        append_time: int | None = None,
        times: Sequence[int] = (),
        offsets: Sequence[int] = (),
        last_offset: int | None = None,
        horizon: int | None = None,
    ) -> int:
        """Appends one batch; returns its base offset."""
        base = offsets[0] if offsets else self.next_offset
        rows = []
        for number, text in enumerate(pairs):
            offset = offsets[number] if offsets else base + number
            rows.append(RecordToEncode(offset, times[number] if times else self.time, *pair(text), headers))
            self.time += 1
        last = rows[-1].offset if last_offset is None else last_offset
        producer = NO_PRODUCER
        if pid >= 0:
            epoch = self.epochs.setdefault(pid, 0)
            first = self.sequences.get((pid, epoch), 0) if sequence is None else sequence
            self.sequences[pid, epoch] = first + last - base + 1
            producer = ProducerFields(pid, epoch, first, txn)
        self.raw(
            encode_batch(
                rows,
                codec=codec,
                producer=producer,
                leader_epoch=self.leader_epoch,
                base_offset=base,
                last_offset=last,
                append_time_ms=append_time,
                delete_horizon_ms=horizon,
            ),
            last,
        )
        return base

    def end(self, pid: int, *, commit: bool, epoch: int | None = None, horizon: int | None = None) -> int:
        """Appends a marker, with the producer's epoch or a newer one (a fenced producer, or transactions version 2)."""
        if epoch is not None:
            self.epochs[pid] = epoch
        offset, self.time = self.next_offset, self.time + 1
        made = encode_txn_marker(
            offset,
            self.time,
            pid,
            self.epochs.setdefault(pid, 0),
            is_commit=commit,
            leader_epoch=self.leader_epoch,
            delete_horizon_ms=horizon,
        )
        self.raw(made, offset)
        return offset

    def commit(self, pid: int) -> int:
        return self.end(pid, commit=True)

    def abort(self, pid: int) -> int:
        return self.end(pid, commit=False)

    def raw(self, data: bytes, last_offset: int) -> None:
        """Appends bytes as they are; behind segments that are written already a new one begins."""
        if self.written == len(self.segments):
            self.roll()
        self.segments[-1][1].append(data)
        self.next_offset = last_offset + 1

    def skip(self, offsets: int) -> None:
        self.next_offset += offsets

    def put_segment(self, *records: str) -> None:
        """Puts each record into a batch of its own, and begins a new segment."""
        for record in records:
            self.put(record)
        self.roll()

    def roll(self, base: int | None = None) -> int:
        """Begins a new segment, at the next offset or at a given later one."""
        self.next_offset = self.next_offset if base is None else base
        self.segments.append((self.next_offset, []))
        return self.next_offset

    def add(self, script: str) -> LogBuilder:
        """Appends the steps of ``script``, each on a line or behind ";".

        ``a=1 b`` is a batch, ``5: a=1`` one of producer 5, ``5t: a=1`` one in its transaction, which ``5 commits`` or ``5 aborts``. ``/``
        begins a segment, ``/ 100`` one at that offset, ``+20`` skips offsets, and a last word ``@5`` is the time of the records.
        """
        for step in filter(None, map(str.strip, re.split(r"[;\n]", script))):
            match step.split():
                case ["/", *base]:
                    self.roll(*map(int, base))
                case [pid, ("commits" | "aborts") as word]:
                    self.end(int(pid), commit=word == "commits")
                case [count] if count.startswith("+"):
                    self.skip(int(count))
                case [who, *pairs] if who.endswith(":"):
                    self.put(*pairs, pid=int(who.rstrip("t:")), txn="t" in who)
                case [*pairs, time] if re.fullmatch(r"@[\d_]+", time):
                    self.put(*pairs, times=[int(time[1:])] * len(pairs))
                case pairs:
                    self.put(*pairs)
        return self

    def write(self, folder: Path, *, indexes: bool = False, index_interval_bytes: int = 4096) -> Path:
        """Adds the segments that are not written yet to a directory; without indexes Kafka, and we, rebuild them."""
        folder.mkdir(parents=True, exist_ok=True)
        for base, batches in self.segments[self.written :]:
            log = folder / f"{base:020}.log"
            log.write_bytes(b"".join(batches))
            if indexes:
                built = indexes_of(read_batches(log.read_bytes()), base, index_interval_bytes)
                for suffix, data in zip((".index", ".timeindex"), built, strict=True):
                    log.with_suffix(suffix).write_bytes(data)
            mtime = self.mtimes.get(base)
            if mtime is not None:
                os.utime(log, ns=(mtime * 1_000_000, mtime * 1_000_000))
        self.written = len(self.segments)
        return name_topic(folder, self.topic_id)


def log_of(script: str) -> LogBuilder:
    """A log from offset 0 on, in the words of ``LogBuilder.add``."""
    return LogBuilder().add(script)


def _told(each: Batch) -> str:
    return f"{describe(each)}: {', '.join(f'{r.offset}@{r.timestamp} {r.key!r}={r.value!r}' for r in each.records)}"


@dataclass
class Life:
    """A log that lives through rounds of `clean`, under the gate's eyes: each round's output takes the place of what it replaces."""

    scratch: Path
    log: LogBuilder
    next_dirty_offset: int | None = None
    rounds: int = 0
    indexes: bool = False
    summary: OfflineCleanSummary | None = None

    witness: ClassVar[Callable[[Path, dict[str, Any], Path], None] | None] = None
    """Asked in every round whether Kafka's cleaner agrees, where it is at hand (tests/integration)."""

    def __post_init__(self) -> None:
        self.folder = self.log.write(self.scratch / "log-0", indexes=self.indexes)

    def round(self, now: int = 1_000_000, **options: int | None) -> OfflineCleanSummary:
        """One round from where the last one ended, over everything that was written by now."""
        if len(self.log.segments) > self.log.written:
            self.log.write(self.folder, indexes=self.indexes)
        self.rounds += 1
        asked: dict[str, Any] = {"now_ms": now, "first_dirty_offset": self.next_dirty_offset, **options}
        request = {name: value for name, value in asked.items() if value is not None}
        out = self.scratch / f"out-{self.rounds}"
        if Life.witness:
            Life.witness(self.folder, request, self.scratch / f"witness-{self.rounds}")
        self.summary = clean_log_directory(self.folder, out, OfflineCleanOptions(**request, gate_budget_bytes=1 << 20))
        self.next_dirty_offset = self.summary.next_dirty_offset
        self.folder = next_directory(self.folder, out, self.next_dirty_offset, self.scratch / f"log-{self.rounds}")
        return self.summary

    def batches(self) -> list[Batch]:
        return [batch for batches in read(self.folder).values() for batch in batches]

    def live(self) -> list[str]:
        return live(self.folder)

    def shape(self) -> list[str]:
        """One word per batch: ``0-3`` data, ``4-4C`` and ``5-5A`` markers, ``()`` around what is empty, ``!`` with a horizon."""
        return [_word(batch) for batch in self.batches()]


LATER = 10**12
_SHORT = {"first": "first_dirty_offset", "until": "first_uncleanable_offset", "retention": "delete_retention_ms"}


def tell(scratch: Path, story: str) -> Life:
    """A log's life in words: steps of ``LogBuilder.add``, and rounds with what must be left after each.

    ``clean first=0 retention=5: 2-2A 3-3 | live 3:a=1 | index 2 | next 4`` has the options of a round, and what it leaves: ``shape``, live
    records, the markers in the transaction index, the next dirty offset; each only where it is named.
    """
    log = LogBuilder()
    life: Life | None = None
    for line in filter(None, (line.partition("#")[0].strip() for line in story.splitlines())):
        if not line.startswith("clean"):
            log.add(line)
            continue
        life = life or Life(scratch, log)
        options, _, expected = line.removeprefix("clean").partition(":")
        pairs = (option.split("=") for option in options.split())
        life.round(**{_SHORT.get(name, name): LATER if value == "LATER" else int(value) for name, value in pairs})
        for part in expected.split("|") if expected else ():
            name, _, _ = part.strip().partition(" ")
            found: dict[str, Callable[[Life], Iterable[object]]] = {
                "live": Life.live,
                "index": lambda life: transaction_index(life.folder),
                "next": lambda life: [life.next_dirty_offset],
                "mapped": lambda life: [life.summary and life.summary.map_entries],
                "bases": lambda life: [base for base, _ in (life.summary.segments if life.summary else ())],
                "sequences": lambda life: [batch.base_sequence for batch in life.batches()],
                "horizons": lambda life: [batch.horizon for batch in life.batches()],
            }
            seen = [name, *found[name](life)] if name in found else life.shape()
            assert " ".join(map(str, seen)) == " ".join(part.split()), line
    assert life is not None
    return life


def refused_cleaning(scratch: Path, log: LogBuilder, match: str = ".", **options: Any) -> BadData:
    """What `clean` says of a log that it must not clean."""
    with pytest.raises(BadData, match=match) as refused:
        clean_log_directory(log.write(scratch / "log"), scratch / "out", OfflineCleanOptions(now_ms=1, **options))
    assert not (scratch / "out").exists()
    return refused.value


def _word(batch: Batch) -> str:
    text = f"{batch.base_offset}-{batch.last_offset}"
    if batch.control:
        text += {0: "A", 1: "C", None: "M"}.get(control_type(batch), "?")
    text += "!" if batch.horizon is not None else ""
    return text if batch.records else f"({text})"


def snapshot(folder: Path, offset: int, producers: Iterable[tuple[int, int, int]]) -> None:
    """A producer snapshot with (producer id, epoch, last offset or -1) each."""
    entries = [struct.pack(">qhiqiqiq", pid, epoch, 0 if last >= 0 else -1, last, 0, 0, 0, -1) for pid, epoch, last in producers]
    body = struct.pack(">i", len(entries)) + b"".join(entries)
    (folder / f"{offset:020}.snapshot").write_bytes(struct.pack(">hI", 1, google_crc32c.value(body)) + body)


def txn_index(folder: Path, base: int, entries: Iterable[tuple[int, int, int, int]]) -> None:
    """A transaction index with (producer id, first offset, last offset, last stable offset) each."""
    (folder / f"{base:020}.txnindex").write_bytes(b"".join(struct.pack(">hqqqq", 0, *each) for each in entries))


# ---- magic 0 and 1 ----------------------------------------------------------------------------------------------------------


def entry(magic: int, offset: int, text: str | bytes, *, timestamp: int = -1, attributes: int = 0) -> bytes:
    """An uncompressed v0 or v1 entry, by itself or inside a wrapper."""
    return _entry(magic, offset, *pair(text), timestamp, attributes)


def wrapper(magic: int, offset: int, entries: Iterable[bytes], codec: int, *, timestamp: int = -1, append_time: bool = False) -> bytes:
    """A compressed wrapper around entries: offsets inside are absolute for v0, relative for v1."""
    body = compress_body(codec, b"".join(entries))
    if magic == 0 and codec == LZ4:
        body = body[:6] + bytes([_wrong_header_checksum(body)]) + body[7:]
    return _entry(magic, offset, None, body, timestamp, codec | (8 if append_time else 0))


def _entry(magic: int, offset: int, key: bytes | None, value: bytes | None, timestamp: int, attributes: int) -> bytes:
    checked = struct.pack(">bB", magic, attributes) + (struct.pack(">q", timestamp) if magic else b"")
    for part in (key, value):
        checked += struct.pack(">i", -1 if part is None else len(part)) + (part or b"")
    return struct.pack(">qiI", offset, len(checked) + 4, zlib.crc32(checked)) + checked


def _wrong_header_checksum(frame: bytes) -> int:
    """What v0 writers put there: the second byte of the xxHash of magic and descriptor (KAFKA-3160)."""
    import xxhash

    return xxhash.xxh32_intdigest(frame[:6]) >> 8 & 0xFF


# ---- results ----------------------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[int, list[Batch]]:
    """Base -> batches of every segment."""
    return {base: list(read_batches(path.read_bytes())) for base, path in segment_paths(folder).items()}


def live(folder: Path) -> list[str]:
    """The data records in order, as ``put`` takes them, with their offsets: ``3:a=1``."""
    return [
        f"{r.offset}:{(r.key or b'').decode() or ('@' if r.key == b'' else '')}" + ("" if r.value is None else f"={r.value.decode()}")
        for batches in read(folder).values()
        for b in batches
        if not b.control
        for r in b.records
    ]


def next_directory(log_dir: Path, out_dir: Path, next_dirty_offset: int, target: Path) -> Path:
    """The log as Kafka has it after the round: outputs in the place of what they replace, the rest as it was.

    Snapshots of segments that are gone go with them.
    """
    target.mkdir()
    bases = {int(path.stem) for path in out_dir.glob("*.log")}
    for path in sorted(log_dir.iterdir()):
        number = int(path.stem) if path.stem.isdecimal() else None
        replaced = number is not None and number < next_dirty_offset
        if replaced and not (path.suffix == ".snapshot" and number in bases):
            continue
        shutil.copy2(path, target / path.name)
    for path in out_dir.iterdir():
        shutil.copy2(path, target / path.name)
    return target
