"""Check that an incoming log was not compacted beyond the tier's end, by a broker's own cleaner or by the compactor of another tier.

A tombstone that was dropped there can no longer delete a value that the tier has from earlier imports. So the tier is not continued from a
log that was compacted beyond the tier's end.
"""

from __future__ import annotations

import os
from pathlib import Path

from checkpoint.files import parse_cleaner_offset_checkpoint
from compactor.errors import BadData, UsageError
from compactor.model.ids import TopicPartition

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
    return _read_checkpointed_offset(partition_dir, partition, CLEANED)


def read_broker_log_start(partition_dir: Path, partition: TopicPartition) -> int:
    """Return the broker's log start offset of a partition, or 0 if none is recorded because the log starts with its first segment.

    :param partition_dir: the partition's directory; the broker's checkpoint file lies in its parent.
    :param partition: the partition; used if the directory's name is not a partition's.
    :raises UsageError: if the file cannot be read.
    :raises BadData: if it is not a checkpoint file.
    """
    return _read_checkpointed_offset(partition_dir, partition, LOG_STARTS)


def _read_checkpointed_offset(partition_dir: Path, partition: TopicPartition, file_name: str) -> int:
    """Return a partition's offset in a checkpoint file of its broker, or 0 if there is no such file or the file does not name the
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
        return 0
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="Check its owner and its mode") from error
    return parse_cleaner_offset_checkpoint(text, str(path)).get((partition.topic, partition.partition), 0)


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
        raise BadData(
            f"{cleaned_by} has cleaned {partition} up to offset {first_uncleaned_offset}, and the tier ends at {continuation_offset - 1}: "
            "tombstones may be missing that delete keys in the tier",
            segment=source_name,
            hint=f"`topics delete {partition}` and import the whole log again. To prevent this, import before the log is cleaned: "
            "cleanup.policy=delete, or a min.compaction.lag.ms beyond the longest time between two imports",
        )
