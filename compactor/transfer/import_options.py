"""Options, progress callbacks and result of an import (``transfer.import_``), and the resources that imports of one process share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from checkpoint.lineage import Lineage
from compactor.constants import TopicId
from compactor.control.logs import PartitionLog
from compactor.transfer.incarnations import UNKNOWN_TOPIC_ID, TopicRecreationConfirmationSources
from compactor.transfer.staged_file_rules import FileStagedForDeletion
from compactor.transfer.staged_files import OpenFilesStagedForDeletion


@dataclass(frozen=True)
class ImportOptions:
    """Options for the import of a log directory.

    live: a broker writes to the directory, so its newest segment is left out.
    gaps: gaps are expected, because the log was compacted before.
    accept_truncation: discard from the tier the records that a later leader has discarded, as the broker's leader epochs show.
    accept_loss: discard them even if rounds that cleaned beyond the truncation can no longer be undone, so that keys lose their last value.
        Also continue the tier from a log that a cleaner has compacted beyond the tier's end, so that deleted keys may stay in the tier.
    continues_cleaned_source: the tier has all of its segments from the same compacted log, or none. Then the log may be compacted beyond
        the tier's end.
    accept_erased: bring back what may hold values that were erased (`erasure --expedite`). False for people, who are asked first.
    below: exclusive bound, such as the high watermark; a segment that reaches it is left for later.
    lineage: the broker's leader epochs, if the caller knows more of them than the directory's checkpoint file has; else empty.
    older: import segments before the tier's start. The records of a directory that ends below the tier's last batches are compared.
    topic_id: topic id of the log; None to read it from the directory, which is then a broker's.
    refill: import into a partition although it was deleted from the tier.
    may_be_empty: accept a directory without records.
    fetched_from: the directory has no batches before this offset, because they were not fetched; a gap before it is no error.
    rewritten: the log was compacted before this offset, so that its batches before this offset differ from the broker's.
    log_start: log start offset of the log, if the caller knows it; else 0. Used only by the first import of a partition.
    held: the live log's staged files, if the caller holds them open.
    opening: who may say that the topic was created again, so that a new incarnation is opened.
    staged_problem: returns why the caller refuses a staged file that has missing offsets, or an empty string.
    """

    live: bool = False
    gaps: bool = False
    accept_truncation: bool = False
    below: int | None = None
    lineage: Lineage = ()
    topic_id: TopicId | None = None
    older: bool = True
    refill: bool = True
    may_be_empty: bool = False
    accept_loss: bool = False
    accept_erased: bool = True
    continues_cleaned_source: bool = False
    fetched_from: int = 0
    rewritten: int = 0
    log_start: int = 0
    held: OpenFilesStagedForDeletion | None = None
    staged_problem: Callable[[FileStagedForDeletion], str] = lambda file: ""
    opening: TopicRecreationConfirmationSources = UNKNOWN_TOPIC_ID


@dataclass(frozen=True)
class ImportReport:
    """Result of an import: the segments, records and bytes that were added. If nothing was added, the start offset is the tier's
    end + 1, and the end offset the tier's end.

    end_offset: inclusive.
    notes: lines for people.
    """

    segments: int
    bytes: int
    start_offset: int
    end_offset: int
    notes: tuple[str, ...] = ()

    @property
    def import_status(self) -> str:
        return "imported" if self.segments else "up_to_date"


@dataclass(frozen=True)
class ImportProgressCallbacks:
    """Functions that an import calls to report its progress. at: called at the start of a step with the name of the step and its number of
    bytes. advance: called with the number of bytes that were done since the last call.
    """

    at: Callable[[str, int], None] = lambda step, size: None
    advance: Callable[[int], None] = lambda size: None


@dataclass(frozen=True)
class ImportResources:
    """Resources that imports running in one process share.

    note_change: announces a changed partition in the tier's catalog.
    large: lock that is held while more than LARGE_BYTES are imported.
    """

    threads: int
    note_change: Callable[[PartitionLog], None]
    large: AbstractContextManager[object] = field(default_factory=nullcontext)
