"""``import --accept-truncation``: what a broker has discarded leaves the tier.

    rounds that cleaned beyond it undone, as far as they can be < what is left of the segment in the middle uploaded < the record

A round that cleaned beyond the offset has dropped records because discarded ones had their keys. Undone, they are back; where their
objects are gone already, the values are, too: that is said.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np

from checkpoint.offsets import clean_up_to
from compactor.bootstrap import Tier
from compactor.cleaner.passes.describe import negative_timestamps
from compactor.cleaner.passes.source import cut_source, open_source
from compactor.control.importing import register, truncate
from compactor.control.logs import PartitionLog
from compactor.control.records import TailTruncated
from compactor.control.state import PartitionState
from compactor.control.undo import undo
from compactor.errors import BadData, UsageError
from compactor.local.spool import process_folder
from compactor.model.policy import CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.balance import BalanceKey
from compactor.records.indexes import TXN_ENTRY, parse_txn_index
from compactor.records.producers import ProducerStates
from compactor.round.sources import producers_at_end
from compactor.tier.recorded import content, download
from compactor.transfer.log_directory import CheckedPiece, LogPiece, Member, log_path, prepare


def accept_truncation(
    tier: Tier,
    log: PartitionLog,
    offset: int,
    epoch: int,
    policy: CleanerPolicy,
) -> list[str]:
    """Discards what the tier has from ``offset`` on, where this epoch begins now. Returns what people should know.

    :raises BadData: a segment that cannot be cut; a round that was faster. Leased: a compactor is at work.
    """
    notes = _go_back(tier, log, offset)
    state = log.state
    name = state.name
    place = next(place for place, segment in enumerate(state.live) if segment.end_offset >= offset)
    voided, first = state.live[place:], state.live[place]
    cut_id = tier.ports.new_id()
    begins = offset
    head = None
    if first.start_offset < offset:
        with tempfile.TemporaryDirectory(prefix="cut-", dir=process_folder(tier.state_dir)) as scratch:
            member = _head(
                tier,
                state,
                first,
                offset,
                policy,
                producers_at_end(tier.ports.layout, state.model_copy(update={"live": state.live[:place]})),
                Path(scratch),
            )
            if member is None:
                offset = first.start_offset
            else:
                state = register(tier.ports, log, cut_id, [tier.ports.new_id()])
                new_id = state.registrations[cut_id].ids[0]
                head, paths = prepare(member, new_id, state.lineage, policy, BalanceKey(tier.hash_key()), Path(scratch))
                problem = tier.ports.layout.upload(name, head, paths)
                if problem:
                    raise BadData(problem, segment=str(name), hint="Import again")
    body = TailTruncated(
        cut_id=cut_id,
        offset=offset,
        voided=tuple(segment.id for segment in voided),
        head=head,
        epoch=epoch if offset == begins else None,
    )
    truncate(tier.ports, log, body)
    return [*notes, f"{name}: offsets {offset} to {voided[-1].end_offset} were discarded by the broker, and now by the tier"]


def _go_back(tier: Tier, log: PartitionLog, offset: int) -> list[str]:
    """Undoes the rounds that cleaned beyond the offset, latest first."""
    state = log.refresh()
    while clean_up_to(state.vector) > offset and state.published:
        run_id = state.published[-1]
        try:
            state = undo(tier.ports, log, tier.lease, run_id)
        except UsageError:
            break
    if clean_up_to(state.vector) <= offset:
        return []
    lost = (
        f"{state.name} was compacted up to offset {clean_up_to(state.vector)}, and the round cannot be undone any more: a key whose last "
        f"value before offset {offset} was superseded by a discarded record has no value now. `topics delete` and a whole import brings "
        "it back, if the broker still has it"
    )
    return [lost]


def _head(
    tier: Tier,
    state: PartitionState,
    first: RemoteLogSegmentMetadata,
    offset: int,
    policy: CleanerPolicy,
    producers: ProducerStates,
    scratch: Path,
) -> Member | None:
    """What a segment has below the offset; None where a round has left nothing there."""
    name, layout = state.name, tier.ports.layout
    key = layout.where(name, first, "log")
    path = log_path(scratch, first.start_offset)
    download(layout, name, first, "log", path).require(key, first.files["log"])
    limit = policy.max_decompressed_batch_bytes
    aborted = np.empty(0, TXN_ENTRY)
    if "txnindex" in first.files:
        aborted = parse_txn_index(content(layout, name, first, "txnindex"), key)
    source = open_source(0, path, first.start_offset, first.end_offset + 1, first.mtime_ms, -1, limit, txn_entries=aborted)
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
    part = cut_source(source, 0, last, first.start_offset, offset)
    states = producers.replay(part.table)
    negative = negative_timestamps(part, limit) if first.negative_timestamps else 0
    os.utime(path, ns=(first.mtime_ms * 1_000_000,) * 2)
    piece = CheckedPiece(LogPiece(part, path, 0, source.size), negative, hashlib.sha256(part.buf.data).hexdigest(), None)
    return Member(piece, first.start_offset, offset - 1, states, part.txn_entries)
