"""Prepares an exported log directory for a cluster that has not written it, so that its brokers read, tier and keep it.

What brokers need was learnt on real ones (docs/migrating.md):

- Producer snapshots: the copy to remote storage fails for ever at a segment without one. They are empty, because a fresh cluster gives out
  producer ids from 0 again, and would refuse new producers for the sequence numbers of old ones.
- Leader epochs: a fresh partition leads at epoch 0. Under batches with higher epochs its lineage collapses, and consumers that resume from
  a commit get nothing. The epoch of a batch lies outside its CRC.
- Open transactions: nobody will end them, and the last stable offset would stand still. So the log ends before the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.constants import MAX_OFFSET, LeaderEpoch, Offset, TopicId
from compactor.errors import UsageError
from compactor.records.batches import BatchTable, memory_map_file, parse_batch_headers_of_segment
from compactor.records.indexes import encode_offset_and_time_index, read_txn_index
from compactor.records.producers import ProducerStates, format_producer_snapshot, parse_producer_snapshot_file

EPOCH_POSITION = 12
"""Position of the leader epoch in a batch of version 2 (Kafka: DefaultRecordBatch.PARTITION_LEADER_EPOCH_OFFSET), 4 bytes."""


def prepare_log_directory_for_new_cluster(folder: Path, log_start_offset: int, index_interval_bytes: int) -> Offset:
    """Change an exported log directory so that a new cluster can load it, and return its last offset, inclusive.

    Batches from the first open transaction on are removed, producer snapshots become empty, and all leader epochs become 0.

    :param log_start_offset: first offset that readers may read.
    :param index_interval_bytes: bytes of the log between two entries of an index, for indexes that must be written again.
    :raises UsageError: if a transaction is open from the beginning of the log on, so that nothing is left.
    """
    tables = {log: parse_batch_headers_of_segment(memory_map_file(log), log.name, -1) for log in sorted(folder.glob("*.log"))}
    stable_end = _last_stable_offset(folder, tables.values())
    for path in folder.glob("*.snapshot"):
        path.unlink()
    ends: list[int] = []
    for log, table in tables.items():
        kept = int(np.searchsorted(table.last_offset, stable_end))
        if not kept:
            for path in folder.glob(f"{log.stem}.*"):
                path.unlink()
            continue
        if kept < len(table):
            _keep_first_batches(log, table, kept, index_interval_bytes)
        _set_leader_epochs_to_zero(log, table, kept)
        ends.append(int(table.last_offset[kept - 1]) + 1)
    if not ends:
        raise UsageError(f"nothing lies below offset {stable_end}, from which on a transaction is open", hint="End it, and export again")
    bases = [int(log.stem) for log in sorted(folder.glob("*.log"))]
    for offset in (*bases[1:], ends[-1]):
        (folder / f"{offset:020d}.snapshot").write_bytes(format_producer_snapshot(ProducerStates.empty_producer_states()))
    lineage = format_leader_epoch_checkpoint((EpochEntry(LeaderEpoch(0), Offset(log_start_offset)),))
    (folder / "leader-epoch-checkpoint").write_text(lineage, encoding="utf-8")
    return Offset(ends[-1] - 1)


def _last_stable_offset(folder: Path, tables: Iterable[BatchTable]) -> int:
    """Return the first offset of the oldest transaction that is open at the end of a log directory, or MAX_OFFSET if none is open.

    Found, as in Kafka, from the newest producer snapshot and the batches after it. Segment metadata cannot be used: brokers record no open
    transaction.

    :param tables: batch tables of the directory's segments, in order.
    """
    newest = max(folder.glob("*.snapshot"), default=None)
    states = ProducerStates.empty_producer_states() if newest is None else parse_producer_snapshot_file(newest.read_bytes(), newest.name)
    for table in tables:
        states = states.replay_batches(table, 0 if newest is None else int(newest.stem))
    undecided = states.first_offset_of_open_transaction()
    return MAX_OFFSET if undecided is None else undecided


def write_topic_id(folder: Path, topic_id: TopicId) -> None:
    """Write the ``partition.metadata`` of a log directory. A broker renames a directory with another topic's id to ``-stray``."""
    (folder / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}", encoding="utf-8")


def _keep_first_batches(log: Path, table: BatchTable, kept_batches: int, index_interval_bytes: int) -> None:
    """Remove all but the first ``kept_batches`` batches from a segment, and write its indexes again, so that a broker need not recover
    it.
    """
    modified = log.stat().st_mtime_ns
    os.truncate(log, int(table.position[kept_batches - 1] + table.size[kept_batches - 1]))
    os.utime(log, ns=(modified, modified))
    columns = table.size[:kept_batches], table.last_offset[:kept_batches], table.max_timestamp[:kept_batches]
    for suffix, data in zip(
        (".index", ".timeindex"), encode_offset_and_time_index(int(log.stem), *columns, index_interval_bytes), strict=True
    ):
        log.with_suffix(suffix).write_bytes(data)
    aborted = log.with_suffix(".txnindex")
    if aborted.exists():
        entries = read_txn_index(aborted)
        aborted.write_bytes(entries[entries["last_offset"] <= table.last_offset[kept_batches - 1]].tobytes())


def _set_leader_epochs_to_zero(log: Path, table: BatchTable, kept_batches: int) -> None:
    """Set the leader epoch of the first ``kept_batches`` batches to 0. Batches before version 2 have none."""
    modified = log.stat().st_mtime_ns
    positions = table.position[:kept_batches][table.magic[:kept_batches] == 2]
    data = np.memmap(log, np.uint8, "r+")
    data[positions[:, None] + np.arange(EPOCH_POSITION, EPOCH_POSITION + 4)] = 0
    data.flush()
    os.utime(log, ns=(modified, modified))
