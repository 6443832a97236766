"""Check that an incoming log was not compacted beyond the tier's end, by a broker's log cleaner or by the compactor of another tier.

A tombstone that was dropped there can no longer delete a value that the tier has from earlier imports, and a dropped transaction marker can
no longer abort a record of it. So the tier is not continued from a log that was compacted beyond the tier's end.

A broker's checkpoint states how far *its* cleaner has compacted the log. What a follower has fetched from a cleaned leader is compacted as
well, and so is a copy without the checkpoint. There only the batches show it (``find_cleaning_signs``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from checkpoint.files import parse_cleaner_offset_checkpoint
from compactor.cleaner.passes.source import SourceSegment
from compactor.errors import BadData, UsageError
from compactor.model.ids import TopicPartition
from compactor.records.batches import HORIZON

CLEANED = "cleaner-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
"""Has the format of the cleaner's checkpoint (Kafka: OffsetCheckpointFile)."""


def read_broker_cleaner_offset(partition_dir: Path, partition: TopicPartition) -> int:
    """Return the first offset of a partition that the broker's own log cleaner has not cleaned; 0 if none is recorded.

    :param partition_dir: the partition's directory; the broker's checkpoint file lies in its parent.
    :param partition: the partition; used if the directory's name is not a partition's.
    :raises UsageError: if the file cannot be read.
    :raises BadData: if it is not a checkpoint file.
    """
    return _read_checkpointed_offset(partition_dir, partition, CLEANED) or 0


def read_broker_log_start(partition_dir: Path, partition: TopicPartition) -> int:
    """Return the broker's log start offset of a partition, or 0 if none is recorded because the log starts with its first segment.

    :param partition_dir: the partition's directory; the broker's checkpoint file lies in its parent.
    :param partition: the partition; used if the directory's name is not a partition's.
    :raises UsageError: if the file cannot be read.
    :raises BadData: if it is not a checkpoint file.
    """
    return read_checkpointed_log_start(partition_dir, partition) or 0


def read_checkpointed_log_start(partition_dir: Path, partition: TopicPartition) -> int | None:
    """Return the broker's log start offset of a partition, or None if none is recorded. Parameters and errors: ``read_broker_log_start``.

    A log start below the first segment is recorded only for a topic with remote storage (LogManager.checkpointLogStartOffsetsInDir).
    """
    return _read_checkpointed_offset(partition_dir, partition, LOG_STARTS)


def _read_checkpointed_offset(partition_dir: Path, partition: TopicPartition, file_name: str) -> int | None:
    """Return a partition's offset in a checkpoint file of its broker, or None if there is no such file or the file does not name the
    partition.

    :param partition_dir: the partition's directory; the file lies in its parent.
    :param partition: the partition; used if the directory's name is not a partition's.
    :param file_name: name of the checkpoint file.
    :raises UsageError: if the file cannot be read.
    :raises BadData: if it is not a checkpoint file.
    """
    folder = Path(os.path.abspath(partition_dir))
    path = folder.parent / file_name
    try:
        partition = TopicPartition.parse(folder.name)
    except UsageError:
        pass  # the directory has another name than the broker gave it
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="Check its owner and its mode") from error
    return parse_cleaner_offset_checkpoint(text, str(path)).get((partition.topic, partition.partition))


class CleaningSign(NamedTuple):
    """Sign in a log's batches that a log cleaner has removed records.

    kind: ``missing``: the offsets are missing inside a segment. ``boundary``: they are missing at the end of a segment, as they are if a
        segment file is lost. ``incomplete``: the batch lacks records. ``horizon``: the batch has a delete horizon, which only cleaners set.
    first, last: the missing offsets, or those of the batch; inclusive.
    segment: name of the segment file.
    """

    kind: Literal["missing", "boundary", "incomplete", "horizon"]
    first: int
    last: int
    segment: str


def find_cleaning_signs(sources: Sequence[SourceSegment]) -> list[CleaningSign]:
    """Return the signs that a log cleaner has removed records of a log, ascending.

    A broker gives consecutive offsets to the records that it appends, and none to a batch that it refuses or drops as a duplicate
    (UnifiedLog.append). So missing offsets were removed. That a log begins late is no sign, because retention deletes its beginning. Nor is
    a zero-byte segment at the end; but where later batches follow, the cleaner has removed all that the segment held. Offsets before a
    compressed batch of v0 or v1 are not known to be missing, because its header does not state its first offset.

    :param sources: consecutive segments of the log.
    """
    found: list[CleaningSign] = []
    end, before = sources[0].base if sources else 0, ""
    is_emptied = False
    for source in sources:
        table = source.table
        if not len(table):
            is_emptied = True
            continue
        if end < source.base:
            found.append(CleaningSign("missing" if is_emptied else "boundary", end, source.base - 1, before or source.name))
        before, is_emptied = source.name, False
        expected = np.concatenate(([max(end, source.base)], table.last_offset[:-1] + 1))
        missing = (table.base_offset >= 0) & (table.base_offset > expected)
        incomplete = (table.magic == 2) & (table.count < table.last_offset - table.base_offset + 1)
        horizon = (table.magic == 2) & ((table.attributes & np.int16(HORIZON)) != 0)
        for batch in np.flatnonzero(missing | incomplete | horizon).tolist():
            first, last = int(table.base_offset[batch]), int(table.last_offset[batch])
            if missing[batch]:
                found.append(CleaningSign("missing", int(expected[batch]), first - 1, source.name))
            if incomplete[batch] or horizon[batch]:
                found.append(CleaningSign("incomplete" if incomplete[batch] else "horizon", first, last, source.name))
        end = int(table.last_offset[-1]) + 1
    return found


SHOWN_SIGNS = 3
"""How many signs a message names."""


def describe_cleaning_signs(signs: Sequence[CleaningSign]) -> str:
    """Return the first signs in words for a message, and the number of others."""
    words = {
        "missing": "offsets {} to {} are missing",
        "boundary": "offsets {} to {} are missing",
        "incomplete": "the batch of offsets {} to {} lacks records",
        "horizon": "the batch of offsets {} to {} has a delete horizon",
    }
    shown = [words[sign.kind].format(sign.first, sign.last) for sign in signs[:SHOWN_SIGNS]]
    more = [f"{len(signs) - SHOWN_SIGNS} more such places"] if len(signs) > SHOWN_SIGNS else []
    return ", ".join([*shown, *more])


def require_not_compacted_beyond(
    partition: TopicPartition, continuation_offset: int, first_uncleaned_offset: int, *, cleaned_by: str, source_name: str
) -> None:
    """Raise BadData if a log was compacted beyond ``continuation_offset``, because deleted keys could then come back.

    :param continuation_offset: offset at which the log is to continue the tier: the tier's end + 1, or where its end is cut; 0 for an empty
        tier, in which no value can come back.
    :param first_uncleaned_offset: first offset of the log that was not compacted.
    :param cleaned_by: what compacted the log, for the message.
    :param source_name: the file or tier that states ``first_uncleaned_offset``, for the message.
    """
    if 0 < continuation_offset < first_uncleaned_offset:
        what = f"{cleaned_by} has cleaned {partition} up to offset {first_uncleaned_offset}"
        raise compacted_log_error(partition, continuation_offset, what, source_name)


def compacted_log_error(partition: TopicPartition, continuation_offset: int, what: str, source_name: str) -> BadData:
    """Return the error for a log that was compacted beyond ``continuation_offset``.

    :param what: what shows it, for the message.
    :param source_name: the file or tier that shows it.
    """
    error = BadData(
        f"{what}, and the tier ends at {continuation_offset - 1}: tombstones may be missing that delete keys in the tier, and markers that"
        " abort transactions in it",
        segment=source_name,
        hint=f"`topics delete {partition}` and import the whole log again; or `import --accept-loss`, which is recorded and leaves these"
        " keys and transactions in the tier. To prevent this, import before the log is cleaned: cleanup.policy=delete, or a"
        " min.compaction.lag.ms beyond the longest time between two imports",
    )
    error.is_compacted = True
    return error
