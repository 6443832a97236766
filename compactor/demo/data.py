"""A change-capture topic as a broker would have it on disk: one table of customers, captured row by row.

The same seed gives the same bytes. The topic has inserts, updates of keys with skewed popularity, deletes as tombstones, headers, all five
codecs (as if the producer's settings had changed over time) and three leader epochs. One producer is idempotent. A second one is
transactional, and its transactions lie between the other's batches; all but one are committed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset
from compactor.records.build import ProducerFields, RecordToEncode, encode_batch, encode_txn_marker
from compactor.records.codecs import GZIP, LZ4, NONE, SNAPPY, ZSTD

RecordCount = int
"""Number of records."""
CONNECTOR = 4001
IMPORTER = 4002
"""Producer ids of the change-capture connector, and of a job that changes many customers in one transaction."""

_CODECS = (NONE, GZIP, SNAPPY, LZ4, ZSTD)
_SKEW = 0.9
_DELETES = 0.02
_HISTORY_MS = 7 * 86_400_000
_CITIES = (b"Lisbon", b"Oslo", b"Turin", b"Graz", b"Nantes", b"Gdansk", b"Leeds", b"Zagreb")
_PLANS = (b"free", b"basic", b"plus", b"business")


@dataclass(frozen=True)
class DemoTopicSettings:
    """Size of the generated topic. The same settings, ``seed`` included, give the same bytes.

    now_ms: time of the last record, in milliseconds.
    records: number of records; each is one change of a row.
    keys: number of rows of the table, and so of different record keys.
    batch_records: records in a batch.
    segment_bytes: largest size of a segment, in bytes.
    transactions: number of transactions, one of which is aborted.
    """

    now_ms: int
    records: int = 300_000
    keys: int = 30_000
    batch_records: int = 120
    segment_bytes: int = 4 << 20
    transactions: int = 24
    seed: int = 1272


@dataclass
class _LogDirectoryWriter:
    """Writer of a Kafka log directory. Appends batches to segments as a broker does, and begins a new segment when the next batch does not
    fit.
    """

    folder: Path
    segment_bytes: int
    next_offset: int = 0
    leader_epoch: int = 0
    epochs: list[EpochEntry] = field(default_factory=list)
    _base: int = 0
    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def append_batch(self, data: bytes, record_count: int, segment_file_mtime_ms: int) -> None:
        """Append a serialized batch to the log. If it does not fit into the current segment, write that segment and begin a new one first.

        :param record_count: number of records in the batch.
        :param segment_file_mtime_ms: modification time, in milliseconds, for the file of a segment that is written.
        """
        if self._size + len(data) > self.segment_bytes:
            self.roll_segment(segment_file_mtime_ms)
        self._parts.append(data)
        self._size += len(data)
        self.next_offset += record_count

    def begin_leader_epoch(self, epoch: int) -> None:
        """Begin a leader epoch at the next offset of the log."""
        self.leader_epoch = epoch
        self.epochs.append(EpochEntry(LeaderEpoch(epoch), Offset(self.next_offset)))

    def roll_segment(self, segment_file_mtime_ms: int) -> None:
        """Write the batches of the current segment to a file, if there are any, and begin a new segment.

        :param segment_file_mtime_ms: modification time of the file, in milliseconds.
        """
        if self._parts:
            path = self.folder / f"{self._base:020d}.log"
            path.write_bytes(b"".join(self._parts))
            os.utime(path, ns=(segment_file_mtime_ms * 1_000_000,) * 2)
        self._base, self._parts, self._size = self.next_offset, [], 0


def write_demo_topic(folder: Path, settings: DemoTopicSettings, customers: CustomersTable) -> Iterator[RecordCount]:
    """Write a Kafka log directory with the generated topic. Yield the number of records of each batch once it is generated, for a progress
    bar.

    :param folder: the directory, which must not exist yet.
    :param customers: the table whose changes are the records. Afterwards it holds the last value of each key.
    """
    folder.mkdir(parents=True)
    log = _LogDirectoryWriter(folder, settings.segment_bytes)
    batches = -(-settings.records // settings.batch_records)
    transactions = {(2 * n + 1) * batches // (2 * settings.transactions): n for n in range(settings.transactions)}
    elections = {0: 0, batches // 3: 1, 3 * batches // 4: 3}
    sequence = {CONNECTOR: 0, IMPORTER: 0}
    for number in range(batches):
        now = settings.now_ms - _HISTORY_MS + (number + 1) * (_HISTORY_MS // batches)
        codec = _CODECS[number * len(_CODECS) // batches]
        if number in elections:
            log.begin_leader_epoch(elections[number])
        count = min(settings.batch_records, settings.records - number * settings.batch_records)
        whose = [(CONNECTOR, count)]
        if number in transactions:
            # The importer's transaction begins before this batch and ends after it.
            third = count // 3
            whose = [(IMPORTER, third), (CONNECTOR, count - 2 * third), (IMPORTER, third)]
        for producer, some in whose:
            rows = customers.change_random_rows_and_return_records(
                some, log.next_offset, now, aborted=producer == IMPORTER and _is_demo_transaction_aborted(settings, transactions[number])
            )
            header = ProducerFields(producer, 0, sequence[producer], producer == IMPORTER)
            log.append_batch(encode_batch(rows, codec=codec, producer=header, leader_epoch=log.leader_epoch), some, now)
            sequence[producer] += some
        if number in transactions:
            commit = not _is_demo_transaction_aborted(settings, transactions[number])
            log.append_batch(encode_txn_marker(log.next_offset, now, IMPORTER, 0, is_commit=commit, leader_epoch=log.leader_epoch), 1, now)
        yield count
    log.roll_segment(settings.now_ms)
    (folder / "leader-epoch-checkpoint").write_text(format_leader_epoch_checkpoint(tuple(log.epochs)), encoding="utf-8")


def _is_demo_transaction_aborted(settings: DemoTopicSettings, transaction_number: int) -> bool:
    """Return whether the transaction with this number is aborted. Only the one in the middle is."""
    return transaction_number == settings.transactions // 2


class CustomersTable:
    """The table whose changes the demo's topic holds: which rows exist, how often each was changed, and the last value of each key.

    latest: key -> last committed value, None if the key was deleted.
    """

    def __init__(self, settings: DemoTopicSettings) -> None:
        self._random = np.random.default_rng(settings.seed)
        weights = np.cumsum(np.arange(1, settings.keys + 1, dtype=np.float64) ** -_SKEW)
        self._popularity = weights / weights[-1]
        self._id_of_rank = self._random.permutation(settings.keys) + 10_000
        self.latest: dict[bytes, bytes | None] = {}
        self._versions: dict[int, int] = {}
        self._lsn = 1 << 32

    def change_random_rows_and_return_records(self, count: int, offset: int, timestamp: int, *, aborted: bool) -> list[RecordToEncode]:
        """Change ``count`` random rows, and return the records of these changes. If ``aborted``, the table itself stays as it is, because
        the records belong to an aborted transaction.

        :param offset: offset of the first record.
        :param timestamp: time of the first record in milliseconds. Each further record is one millisecond later.
        """
        ids = self._id_of_rank[np.searchsorted(self._popularity, self._random.random(count))].tolist()
        lots = self._random.random(count).tolist()
        versions = dict(self._versions) if aborted else self._versions
        rows = [
            self._change_row_and_return_record(versions, key, lot, offset + i, timestamp + i)
            for i, (key, lot) in enumerate(zip(ids, lots, strict=True))
        ]
        if not aborted:
            self.latest |= {row.key: row.value for row in rows if row.key is not None}
        return rows

    def _change_row_and_return_record(
        self, change_count_by_key: dict[int, int], key: int, random_fraction: float, offset: int, timestamp: int
    ) -> RecordToEncode:
        """Return the record of the next change of a row.

        :param change_count_by_key: how often each row was changed, by key. Changed in place.
        :param key: number of the row.
        :param random_fraction: a random number from 0 to 1. Below ``_DELETES``, the change deletes the row, if it exists.
        """
        self._lsn += 64 + key % 512
        name = b'{"id":%d}' % key
        headers = (("connector", b"shop-db"), ("lsn", b"%d" % self._lsn))
        version = change_count_by_key.get(key, 0)
        if version and random_fraction < _DELETES:
            del change_count_by_key[key]
            return RecordToEncode(offset, timestamp, name, None, headers)
        change_count_by_key[key] = version + 1
        return RecordToEncode(offset, timestamp, name, _customer_row_json(key, version, random_fraction, timestamp, self._lsn), headers)


def _customer_row_json(key: int, version: int, random_fraction: float, timestamp: int, lsn: int) -> bytes:
    """Return a row of the table as the JSON value of a change record.

    :param version: number of earlier changes of the row; 0 if this change inserts it.
    :param random_fraction: a number from 0 to 1 that decides the values of some columns.
    :param timestamp: time of the change, in milliseconds.
    :param lsn: position of the change in the source database's log.
    """
    return (
        b'{"op":"%s","ts_ms":%d,"source":{"db":"shop","table":"customers","lsn":%d},"after":{"id":%d,"name":"Customer %d",'
        b'"email":"c%d@example.org","city":"%s","plan":"%s","balance_cents":%d,"session":"%016x","version":%d}}'
    ) % (
        b"u" if version else b"c",
        timestamp,
        lsn,
        key,
        key,
        key,
        _CITIES[key % len(_CITIES)],
        _PLANS[(key + version) % len(_PLANS)],
        int(random_fraction * 1_000_000),
        int(random_fraction * (1 << 60)),
        version + 1,
    )
