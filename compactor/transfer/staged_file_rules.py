"""Rules by which segment files that a broker has staged for deletion (``NNN.log.deleted``) still belong to its log. Pure.

Kafka removes a segment by renaming its files, and unlinks them ``file.delete.delay.ms`` later (LocalLog.deleteSegmentFiles). Retention
and DeleteRecords do so at the front of the log, and leave the same files: the two cannot be told apart. Truncations and the log cleaner
do so, too, with records that the log does not have any more. So a staged file is taken only if every rule of ``choose_staged_files`` holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from checkpoint.lineage import Lineage, first_contradicting_offset, leader_epoch_at, merge_segment_lineages


@dataclass(frozen=True)
class FileStagedForDeletion:
    """Segment file that its broker has renamed for deletion, as the directory listing describes it.

    base: offset in the file's name.
    size: size in bytes.
    mtime_ms: when the broker wrote it last.
    changed_ms: change time of the inode, which is when the broker renamed the file.
    inode: device and inode number, because a later file may take the same name.
    """

    base: int
    size: int
    mtime_ms: int
    changed_ms: int
    inode: tuple[int, int]


@dataclass(frozen=True)
class SegmentStagedForDeletion:
    """Offsets and leader epochs of a staged file.

    last_offset: last offset of its last batch; less than ``base`` if it has no batch.
    epochs: leader epochs of its batches, in the order of the batches, each with the offset of its first batch.
    """

    base: int
    last_offset: int
    epochs: Lineage = ()


@dataclass(frozen=True)
class BrokerLiveLog:
    """The part of a broker's log that is not staged for deletion: offsets and leader epoch where it begins.

    bases: base offsets of all its segment files, ascending, the active one included.
    first_epoch: leader epoch of its first batch, -1 if unknown.
    cleaned: first offset that no log cleaner has cleaned, neither this broker's nor that of a leader from which it has fetched; 0 if none
        has cleaned anything.
    """

    bases: tuple[int, ...]
    first_epoch: int = -1
    cleaned: int = 0


@dataclass(frozen=True)
class TierEnd:
    """End of a partition in the tier, from which a broker's log must continue.

    position: last offset + 1, or the offset at which the tier's end is to be cut; None for an empty tier.
    lineage: the tier's leader epochs, without those that are to be cut.
    """

    position: int | None
    lineage: Lineage = ()


@dataclass(frozen=True)
class StagedFileChoice:
    """Decision about files that a broker has staged for deletion.

    taken: base offsets of the files to import, ascending.
    refusals: by base offset, why a file is not imported although it has offsets that the tier lacks.
    """

    taken: tuple[int, ...] = ()
    refusals: Mapping[int, str] = field(default_factory=dict)


def choose_staged_files(segments: Sequence[SegmentStagedForDeletion], live_log: BrokerLiveLog, tier_end: TierEnd) -> StagedFileChoice:
    """Choose, among files staged for deletion, those that continue the tier up to the live log. None are taken if the live log continues it
    by itself.

    :param segments: in any order. Those that have no offset at or after the tier's position are ignored.
    """
    position = 0 if tier_end.position is None else tier_end.position
    if not live_log.bases or (tier_end.position is not None and live_log.bases[0] <= position):
        return StagedFileChoice()
    missing = [segment for segment in segments if segment.last_offset >= max(segment.base, position)]
    refusals = {
        segment.base: segment_replaced_by_live_file_problem(segment, live_log) or segment_not_below_live_log_problem(segment, live_log)
        for segment in missing
    }
    chain = longest_chain_to_live_log([segment for segment in missing if not refusals[segment.base]], live_log)
    while tier_end.position is None and (reason := live_log_cleaned_by_broker_problem(chain, live_log, tier_end)):
        refusals[chain[0].base], chain = reason, chain[1:]  # an empty tier may begin with what the cleaner has not reached
    problem = (
        chain_not_continuing_tier_problem(chain, tier_end)
        or chain_epochs_contradict_tier_problem(chain, live_log, tier_end)
        or live_log_cleaned_by_broker_problem(chain, live_log, tier_end)
    )
    linked_bases = {segment.base for segment in chain}
    for segment in missing:
        if not refusals[segment.base]:
            unlinked = f"it ends at offset {segment.last_offset}, and it is not the only one before a segment that is taken or live"
            refusals[segment.base] = problem if segment.base in linked_bases else unlinked
    taken = () if problem else tuple(segment.base for segment in chain)
    return StagedFileChoice(taken, {base: reason for base, reason in refusals.items() if reason})


def segment_replaced_by_live_file_problem(segment: SegmentStagedForDeletion, live_log: BrokerLiveLog) -> str:
    """Return a message if the live log has a file with the segment's base offset, so that the segment is not imported; else an empty
    string.

    The log cleaner, and a roll over an empty active segment, replace a file by one of the same name.
    """
    return "a live segment has its base offset: it was replaced" if segment.base in live_log.bases else ""


def segment_not_below_live_log_problem(segment: SegmentStagedForDeletion, live_log: BrokerLiveLog) -> str:
    """Return a message if the segment is not entirely below the lowest base offset of the live log, so that it is not imported; else an
    empty string.

    Retention removes segments from the front only. A file staged above the front was removed by a truncation or replaced by the log
    cleaner.
    """
    if segment.base < live_log.bases[0] and segment.last_offset < live_log.bases[0]:
        return ""
    return f"it is not wholly below offset {live_log.bases[0]}, where the live log begins: a truncation or the log cleaner removed it"


def longest_chain_to_live_log(
    segments: Sequence[SegmentStagedForDeletion], live_log: BrokerLiveLog
) -> tuple[SegmentStagedForDeletion, ...]:
    """Return the longest chain of segments, ascending, in which each ends where the next one begins and the last one ends where the live
    log begins.

    The chain stops where two segments end at the same offset, because they are of two branches of the log and nothing tells them apart.
    """
    chain: list[SegmentStagedForDeletion] = []
    begin = live_log.bases[0]
    while len(before := [segment for segment in segments if segment.last_offset + 1 == begin]) == 1:
        chain.insert(0, before[0])
        begin = before[0].base
    return tuple(chain)


def chain_not_continuing_tier_problem(chain: Sequence[SegmentStagedForDeletion], tier_end: TierEnd) -> str:
    """Return why a chain of segments does not continue the tier's end without a gap, or an empty string.

    Any chain continues an empty tier.
    """
    if not chain or tier_end.position is None or chain[0].base <= tier_end.position:
        return ""
    return f"the tier ends before offset {tier_end.position}, and what is staged begins at {chain[0].base}: it leaves a gap"


def chain_epochs_contradict_tier_problem(chain: Sequence[SegmentStagedForDeletion], live_log: BrokerLiveLog, tier_end: TierEnd) -> str:
    """Return why the leader epochs of a chain of segments contradict the tier's lineage or the first live batch, or an empty string.

    Epochs never decrease along a log. Batches of v0 and v1 have none.
    """
    named = [entry for segment in chain for entry in segment.epochs if entry.epoch >= 0]
    falls = next((after for before, after in pairwise(named) if after.epoch < before.epoch), None)
    if falls is not None:
        return f"leader epoch {falls.epoch} at offset {falls.start_offset} is lower than the one before it"
    if named and 0 <= live_log.first_epoch < named[-1].epoch:
        return f"it was written in leader epoch {named[-1].epoch}, and the live log begins with epoch {live_log.first_epoch}"
    given = merge_segment_lineages([named])
    if tier_end.position is None or not given:
        return ""
    older = given[0].epoch < leader_epoch_at(tier_end.lineage, given[0].start_offset)
    if older or first_contradicting_offset(tier_end.lineage, tier_end.position, given, chain[-1].last_offset + 1) is not None:
        both = f"{_epochs_text(tier_end.lineage)} in the tier, {_epochs_text(given)} in what is staged"
        return f"its leader epochs are not those of the tier's log: {both}"
    return ""


def live_log_cleaned_by_broker_problem(chain: Sequence[SegmentStagedForDeletion], live_log: BrokerLiveLog, tier_end: TierEnd) -> str:
    """Return why a chain of segments cannot precede a live log that a log cleaner has cleaned, or an empty string.

    The cleaner may have dropped a tombstone after retention had staged the key's older records. Importing these would bring the key back.
    """
    if not chain or live_log.cleaned <= max(chain[0].base, tier_end.position or 0):
        return ""
    return f"a log cleaner has cleaned the log up to offset {live_log.cleaned}: tombstones may be gone that delete keys in what is staged"


def _epochs_text(lineage: Lineage) -> str:
    return ", ".join(f"{entry.epoch} from {entry.start_offset}" for entry in lineage) or "none"
