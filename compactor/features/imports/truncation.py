"""Truncation of a partition's end for ``import --accept-truncation``, so that the broker's new branch can replace it.

    new branch checked < records below the cut compared < rounds that cleaned beyond it undone < head and new branch uploaded < the record

A round that cleaned beyond the cut has dropped records for discarded ones of the same keys. Undoing it restores them, unless their objects
are deleted: that loss requires a person's consent (``--accept-loss``).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from checkpoint.offsets import first_dirty_offset_in
from compactor.access.tier import Tier
from compactor.cleaner.source import count_negative_timestamps, open_source_segment, segment_of_batch_range
from compactor.control import ordering
from compactor.control.fold import apply_partition_record
from compactor.control.logs import PartitionLog
from compactor.control.publication import undo_round
from compactor.control.records import RoundUndone
from compactor.control.state import PartitionState
from compactor.errors import BadData, UsageError
from compactor.features.imports.log_directory import CheckedFilePart, SegmentFilePart, SegmentToImport, segment_log_path
from compactor.model.plan import CleanerPolicy
from compactor.records.indexes import TXN_ENTRY, parse_txn_index
from compactor.round.sources import read_end_states
from compactor.tier.contents import download_segment_file, read_verified_file


def undo_rounds_beyond_offset(tier: Tier, log: PartitionLog, offset: int, source_name: str, *, accept_loss: bool) -> list[str]:
    """Latest first. Return notes for people.

    :param accept_loss: continue if a round can no longer be undone.
    :raises BadData: if not all can be undone and ``accept_loss`` is False; then none was undone.
    :raises Leased: if a compactor is at work.
    """
    state = log.refresh()
    problem = _undo_problem(log, offset)
    if problem and not accept_loss:
        raise BadData(
            f"{state.topic_partition} was compacted up to offset {first_dirty_offset_in(state.vector)}, and is to be cut"
            f" at {offset}: "
            f"{problem}. A key whose last value before offset {offset} was superseded by a discarded record would have no value",
            segment=source_name,
            hint="`topics delete` the partition and import the whole log, if the broker still has it; else `import --accept-truncation "
            "--accept-loss`. A round that is open is finished or undone by `run` first",
        )
    while first_dirty_offset_in(state.vector) > offset and state.published:
        try:
            state = undo_round(tier.ports, log, tier.lease, state.published[-1])
        except UsageError:
            if not accept_loss:
                raise
            break
    if first_dirty_offset_in(state.vector) <= offset:
        return []
    lost = (
        f"{state.topic_partition} was compacted up to offset {first_dirty_offset_in(state.vector)}, and the round"
        " cannot be undone any more: "
        f"a key whose last value before offset {offset} was superseded by a discarded record has no value now."
        " `topics delete` and a whole import brings "
        "it back, if the broker still has it"
    )
    return [lost]


def _undo_problem(log: PartitionLog, offset: int) -> str:
    """Return why the cleaner offset cannot go back; empty: it can."""
    state = log.state
    while first_dirty_offset_in(state.vector) > offset:
        run_id = state.published[-1] if state.published else ""
        if state.intent is not None:
            return f"run {state.intent.plan.run_id} is open"
        problem = ordering.round_restoration_problem(state, run_id, state.next_compactor_epoch)
        if problem:
            return problem
        record = log.build_record_to_append(RoundUndone(leader_epoch=state.next_compactor_epoch, run_id=run_id))
        state = apply_partition_record(state, record, lambda state, record: "")
    return ""


def segment_head_before_offset(
    tier: Tier, state: PartitionState, offset: int, policy: CleanerPolicy, scratch: Path
) -> SegmentToImport | None:
    """Batches before ``offset`` of its segment; None if a segment begins there, or no batch is left before it. ``scratch`` must exist as
    long as the result is used. Raises BadData if the object is corrupt, or a batch contains offsets on both sides.
    """
    place = next(place for place, segment in enumerate(state.live) if segment.end_offset >= offset)
    first, name, layout = state.live[place], state.topic_partition, tier.ports.layout
    if first.start_offset == offset:
        return None
    key = layout.object_name(name, first, "log")
    path = segment_log_path(scratch, first.start_offset)
    download_segment_file(layout, name, first, "log", path).require_match(key, first.files["log"])
    limit = policy.max_decompressed_batch_bytes
    aborted = np.empty(0, TXN_ENTRY)
    if "txnindex" in first.files:
        aborted = parse_txn_index(read_verified_file(layout, name, first, "txnindex"), key)
    source = open_source_segment(0, path, first.start_offset, first.end_offset + 1, first.mtime_ms, -1, limit, txn_entries=aborted)
    table = source.table
    last = int(np.searchsorted(table.last_offset, offset))
    if last < len(table) and int(table.base_offset[last]) < offset and int(table.count[last]):
        raise BadData(
            f"a batch from {int(table.base_offset[last])} to {int(table.last_offset[last])} lies across offset {offset}",
            segment=key,
            hint="No broker truncates a log inside a batch: check the leader-epoch-checkpoint",
        )
    if last == 0:
        return None
    part = segment_of_batch_range(source, 0, last, first.start_offset, offset)
    before = read_end_states(layout, state.model_copy(update={"live": state.live[:place]}))
    negative = count_negative_timestamps(part, limit) if first.negative_timestamps else 0
    os.utime(path, ns=(first.mtime_ms * 1_000_000,) * 2)
    piece = CheckedFilePart(SegmentFilePart(part, path, 0, source.size), negative, hashlib.sha256(part.buf.data).hexdigest(), None)
    return SegmentToImport(piece, first.start_offset, offset - 1, before.replay_batches(part.table), part.txn_entries)
