"""Prepares an exported log directory for a cluster that has not written it, so that its brokers read, tier and keep it.

What brokers need was learnt on real ones (docs/migrating.md):

- Producer snapshots: the copy to remote storage fails for ever at a segment without one. They are empty, because a fresh cluster gives out
  producer ids from 0 again, and would refuse new producers for the sequence numbers of old ones.
- Leader epochs: a fresh partition leads at epoch 0. Under batches with higher epochs its lineage collapses, and consumers that resume from
  a commit get nothing. The epoch of a batch lies outside its CRC.
- Open transactions: nobody will end them, and the last stable offset would stand still. So their records are left out, as if they had been
  aborted. The log is not cut before them: a cut would have to lie before every transaction that is open there, of which most end later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset, TopicId
from compactor.errors import UsageError
from compactor.kernels.common import Flags
from compactor.records.batches import NOT_CONTROL, BatchTable, Int64s, memory_map_file, parse_batch_headers_of_segment
from compactor.records.indexes import encode_offset_and_time_index
from compactor.records.producers import ProducerStates, format_producer_snapshot, parse_producer_snapshot_file

EPOCH_POSITION = 12
"""Position of the leader epoch in a batch of version 2 (Kafka: DefaultRecordBatch.PARTITION_LEADER_EPOCH_OFFSET), 4 bytes."""


@dataclass(frozen=True)
class OpenTransaction:
    """A transaction that has not ended, and whose records an export left out.

    first_offset, last_offset: of its records, both inclusive.
    records: their number.
    """

    producer_id: int
    producer_epoch: int
    first_offset: int
    last_offset: int
    records: int


def prepare_log_directory_for_new_cluster(folder: Path, log_start_offset: int, index_interval_bytes: int) -> tuple[OpenTransaction, ...]:
    """Change an exported log directory so that a new cluster can load it, and return the transactions that were left out.

    Batches of open transactions are removed, producer snapshots become empty, and all leader epochs become 0.

    :param log_start_offset: first offset that readers may read.
    :param index_interval_bytes: bytes of the log between two entries of an index, for indexes that must be written again.
    :raises UsageError: if nothing is left.
    """
    tables = {log: parse_batch_headers_of_segment(memory_map_file(log), log.name, -1) for log in sorted(folder.glob("*.log"))}
    states = _producer_states_at_end(folder, tables.values())
    open_flags = {log: _flag_batches_of_open_transactions(table, states) for log, table in tables.items()}
    for path in folder.glob("*.snapshot"):
        path.unlink()
    end = -1
    for log, table in tables.items():
        kept = np.flatnonzero(~open_flags[log])
        if not len(kept):
            for path in folder.glob(f"{log.stem}.*"):
                path.unlink()
            continue
        left = table if len(kept) == len(table) else _keep_batches(log, table, kept, index_interval_bytes)
        _set_leader_epochs_to_zero(log, left)
        end = int(left.last_offset[-1]) + 1
    if end < 0:
        raise UsageError("all records belong to transactions that are open", hint="End them, and export again")
    bases = [int(log.stem) for log in sorted(folder.glob("*.log"))]
    for offset in (*bases[1:], end):
        (folder / f"{offset:020d}.snapshot").write_bytes(format_producer_snapshot(ProducerStates.empty_producer_states()))
    lineage = format_leader_epoch_checkpoint((EpochEntry(LeaderEpoch(0), Offset(log_start_offset)),))
    (folder / "leader-epoch-checkpoint").write_text(lineage, encoding="utf-8")
    return _describe_open_transactions([table.select_rows(np.flatnonzero(open_flags[log])) for log, table in tables.items()])


def _producer_states_at_end(folder: Path, tables: Iterable[BatchTable]) -> ProducerStates:
    """Return the producer states at the end of a log directory.

    Found, as in Kafka, from the newest producer snapshot and the batches after it. Segment metadata cannot be used: brokers record no open
    transaction.

    :param tables: batch tables of the directory's segments, in order.
    """
    newest = max(folder.glob("*.snapshot"), default=None)
    states = ProducerStates.empty_producer_states() if newest is None else parse_producer_snapshot_file(newest.read_bytes(), newest.name)
    for table in tables:
        states = states.replay_batches(table, 0 if newest is None else int(newest.stem))
    return states


def _flag_batches_of_open_transactions(table: BatchTable, states: ProducerStates) -> Flags:
    """Return a flag for each batch: whether it has records of a transaction that is open in ``states``, those at the log's end."""
    opened = states.entries[states.entries["txn_first_offset"] >= 0]
    data = table.transactional_flags & (table.control == NOT_CONTROL)
    if not len(opened):
        return np.zeros(len(table), np.bool_)
    row = np.minimum(np.searchsorted(opened["producer_id"], table.producer_id), len(opened) - 1)
    mine: Flags = data & (opened["producer_id"][row] == table.producer_id) & (table.base_offset >= opened["txn_first_offset"][row])
    return mine


def _describe_open_transactions(tables: Sequence[BatchTable]) -> tuple[OpenTransaction, ...]:
    """Return the transactions to which these batches belong, one of each producer, ascending by first offset."""
    batches = BatchTable(*(np.concatenate(columns) for columns in zip(*tables, strict=True)))
    found = []
    for producer in np.unique(batches.producer_id):
        mine = batches.select_rows(np.flatnonzero(batches.producer_id == producer))
        first, last, records = int(mine.base_offset[0]), int(mine.last_offset[-1]), int(mine.count.sum())
        found.append(OpenTransaction(int(producer), int(mine.producer_epoch[-1]), first, last, records))
    return tuple(sorted(found, key=lambda one: one.first_offset))


def write_topic_id(folder: Path, topic_id: TopicId) -> None:
    """Write the ``partition.metadata`` of a log directory. A broker renames a directory with another topic's id to ``-stray``."""
    (folder / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}", encoding="utf-8")


def _keep_batches(log: Path, table: BatchTable, kept: Int64s, index_interval_bytes: int) -> BatchTable:
    """Remove all batches from a segment but those with the numbers ``kept``, and return the table of these.

    The indexes of offsets and times are written again, so that a broker need not recover the segment; that of aborted transactions has no
    positions and stays.
    """
    modified, buf = log.stat().st_mtime_ns, memory_map_file(log)
    data = b"".join(
        buf[int(table.position[run[0]]) : int(table.position[run[-1]] + table.size[run[-1]])].tobytes()
        for run in np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1)
    )
    del buf
    log.unlink()
    log.write_bytes(data)
    os.utime(log, ns=(modified, modified))
    left = table.select_rows(kept)
    left = left.replace_columns(position=np.cumsum(left.size) - left.size)
    indexes = encode_offset_and_time_index(int(log.stem), left.size, left.last_offset, left.max_timestamp, index_interval_bytes)
    for suffix, index in zip((".index", ".timeindex"), indexes, strict=True):
        log.with_suffix(suffix).write_bytes(index)
    return left


def _set_leader_epochs_to_zero(log: Path, table: BatchTable) -> None:
    """Set the leader epoch of all batches to 0. Batches before version 2 have none."""
    modified = log.stat().st_mtime_ns
    positions = table.position[table.magic == 2]
    data = np.memmap(log, np.uint8, "r+")
    data[positions[:, None] + np.arange(EPOCH_POSITION, EPOCH_POSITION + 4)] = 0
    data.flush()
    os.utime(log, ns=(modified, modified))
