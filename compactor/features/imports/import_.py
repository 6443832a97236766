"""Import of a Kafka log directory into the tier, as far as the tier does not have it yet (``import``).

    list -> open from the tier's end on -> same log? -> check -> upload and record (imports.staged_files)

The position is the last offset of the control log plus one, never taken from a file's name. Everything is read and checked before anything
is written.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint.lineage import Lineage, extend_lineage, restore_truncated_front, truncate_lineage_at
from compactor.access.rounds import open_given_reader
from compactor.access.tier import Tier
from compactor.cleaner.rewrite import SidecarBuilder
from compactor.cleaner.source import SourceSegment
from compactor.config.times import format_iso_time
from compactor.constants import DAY_MS, Offset, TopicId
from compactor.control import ordering
from compactor.control.audit import latest_erasure_ms
from compactor.control.fold import TAIL
from compactor.control.logs import HASH_KEY_BYTES, PartitionLog
from compactor.control.records import TailTruncated
from compactor.control.state import PartitionState
from compactor.errors import BadData, UsageError
from compactor.features.imports.incarnations import (
    UNKNOWN_TOPIC_ID,
    TopicRecreationConfirmationSources,
    find_or_open_incarnation,
    require_topic_not_superseded,
)
from compactor.features.imports.log_directory import (
    CHECKPOINT,
    DELETED,
    CheckedFilePart,
    FileCheckSettings,
    SegmentFilePart,
    SegmentToImport,
    check_file_parts,
    combine_parts_to_segments,
    compacted_log_error,
    convert_directory_errors,
    describe_cleaning_signs,
    describe_tail_batches,
    find_cleaning_signs,
    lineage_from_batches,
    lineage_with_staged_epochs,
    max_segment_disk_bytes,
    read_broker_cleaner_offset,
    read_broker_log_start,
    read_checkpointed_log_start,
    read_epoch_checkpoint,
    require_lineage_matches_batches,
    require_no_offset_gaps,
    require_no_orphaned_indexes,
    require_not_compacted_beyond,
)
from compactor.features.imports.log_identity import LogIdentityCheck, create_identity_check
from compactor.features.imports.seam import (
    Divergence,
    SegmentListing,
    count_equal_last_records,
    describe_refused_staged_files,
    file_parts_after_offset,
    file_parts_before_offset,
    file_parts_below_offset,
    fill_lineage_gap,
    find_divergence,
    find_divergence_outside_gaps,
    has_all_tier_records,
    has_equal_tail_batches,
    list_log_segments,
    listing_with_staged_files,
    make_tier_unchanged_check,
    open_listed_segments,
    require_no_gap,
    require_segments_precede_tier,
)
from compactor.features.imports.staged_files import (
    FileStagedForDeletion,
    OpenFilesStagedForDeletion,
    SegmentAddition,
    SegmentUpload,
    SegmentUploadSettings,
    TierEnd,
    add_segments_once,
    require_free_space,
)
from compactor.features.imports.truncation import segment_head_before_offset, undo_rounds_beyond_offset
from compactor.local.budget import spool_folder
from compactor.model.ids import TopicPartition
from compactor.model.plan import CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.producers import ProducerStates
from compactor.round.sources import read_end_states
from compactor.upkeep.log_root import CLEANED


@dataclass(frozen=True)
class ImportOptions:
    """Options of an import.

    live: a broker writes to the directory: its newest segment is left out.
    gaps: the log was compacted before, so that it has gaps.
    accept_truncation: discard what a later leader has discarded, by the broker's leader epochs.
    accept_loss: even if rounds beyond the truncation can no longer be undone (keys lose their last value), or the log was compacted beyond
        the tier's end (deleted keys may stay in the tier).
    continues_cleaned_source: the tier has all of its segments from the same compacted log, which may be compacted beyond the tier's end.
    accept_erased: bring back segments that may hold erased values (`erasure --expedite`).
    below: exclusive bound, such as the high watermark.
    lineage: the broker's leader epochs, if more than in the directory's checkpoint file.
    older: import segments before the tier's start.
    topic_id: None to read it from a broker's directory.
    refill: although the partition was deleted from the tier.
    fetched_from: batches before this offset were not fetched: a gap is no error.
    rewritten: the log was compacted before this offset: batches differ from the broker's.
    log_start: used only by the first import of a partition.
    opening: who may say that the topic was created again.
    staged_problem: returns why a staged file is refused; empty: it is not.
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
    """The end offset is inclusive. If nothing was added, it is the tier's end, and the start offset follows it."""

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
    """Progress of an import. at: a step begins, with its number of bytes. advance: bytes done since the last call."""

    at: Callable[[str, int], None] = lambda step, size: None
    advance: Callable[[int], None] = lambda size: None


@dataclass(frozen=True)
class ImportResources:
    """Resources that imports of one process share.


    large: lock that is held while more than LARGE_BYTES are imported.
    """

    threads: int
    note_change: Callable[[PartitionLog], None]
    large: AbstractContextManager[object] = field(default_factory=nullcontext)


LIVE_BYTES = 256 << 20
"""Most bytes imported at once from a live log, whose segments are held in memory; at least one segment is."""

LARGE_BYTES = 16 << 20
"""Imports of more bytes than this run one at a time: one is enough work for the process, and a live log is held in memory."""

MAX_IMPORT_ATTEMPTS = 3
"""How many times a live directory is listed again because the broker deleted a segment before it was read."""


def import_directory(
    tier: Tier,
    log_dir: Path,
    partition: TopicPartition,
    policy: CleanerPolicy,
    progress: ImportProgressCallbacks | None = None,
    options: ImportOptions | None = None,
    shared: ImportResources | None = None,
) -> ImportReport:
    """Import the segments of a log directory that the tier does not have.

    :raises UsageError: if it is not a readable log directory, or the partition was deleted and ``options.refill`` is False.
    :raises BadData: if a segment is corrupt, or there is a gap, another log or a discarded tail. The tier is unchanged.
    :raises Fenced: if the import was voided because it paused too long.
    :raises StoreError: the next attempt finds uploaded objects again, or a sweep deletes them.
    """
    options = options or ImportOptions()
    partition = tier.latest_incarnation(partition)
    log = tier.open_partition_log(partition)
    shared = shared or ImportResources(tier.settings.daemon.threads, lambda log: tier.change_notifier.announce_changed_control_logs([log]))
    with convert_directory_errors(log_dir), ExitStack() as stack:
        held = options.held or stack.enter_context(closing(OpenFilesStagedForDeletion(log_dir)))
        work = _DirectoryImport(tier, log_dir, partition, policy, progress or ImportProgressCallbacks(), options, log, shared, held)
        for _ in range(MAX_IMPORT_ATTEMPTS if options.live else 0):
            try:
                return work.import_new_segments()
            except FileNotFoundError:
                continue  # the broker has deleted a segment meanwhile, so list the directory again
        return work.import_new_segments()


@dataclass
class _DirectoryImport:
    tier: Tier
    log_dir: Path
    partition: TopicPartition
    policy: CleanerPolicy
    progress: ImportProgressCallbacks
    options: ImportOptions
    log: PartitionLog
    company: ImportResources
    held: OpenFilesStagedForDeletion
    identity: LogIdentityCheck = field(init=False)
    notes: list[str] = field(default_factory=list)
    done: list[SegmentToImport] = field(default_factory=list)
    whole: SegmentListing = field(default_factory=lambda: SegmentListing(Path(), ()))
    compared: int = 0
    too_late: str = ""
    key_to_be: bytes = b""
    cleaned: int | None = None
    continues_cleaned_source: bool = False
    cleaned_to: int = 0
    loss_accepted: bool = False
    gaps_met: list[tuple[int, int]] = field(default_factory=list)
    rewritten: int = 0
    log_start: int = 0
    telling: threading.Lock = field(default_factory=threading.Lock)

    def import_new_segments(self) -> ImportReport:
        """Raises FileNotFoundError if a listed segment was deleted."""
        # Read before the directory is listed, and again before anything becomes readable: a topic recreated in between has another id.
        self.identity = create_identity_check(self.tier, self.log, self.log_dir, self.options.topic_id)
        found = list_log_segments(self.log_dir, is_written_by_broker=self.options.live)
        if not found.bases and not self.options.live and not self.options.may_be_empty:
            raise UsageError(f"{self.log_dir} holds no segments", hint="Segments are called <20 digits>.log")
        self.whole, self.compared, self.gaps_met = found, 0, []
        state = self.log.refresh_and_check_gaps()
        compare = partial(self._count_equal_records_below, state.end_offset + 1)
        place = find_or_open_incarnation(
            self.tier, state, self.identity.given_id, self.identity.partition_metadata_path, self.options.opening, compare
        )
        if place != self.partition:
            self.partition, self.log = place, self.tier.open_partition_log(place)
            return self.import_new_segments()
        self._require_refill_allowed(state)
        self.identity.settled |= not state.has_segments and not state.topic_id
        self.rewritten = max(self.options.rewritten, read_broker_cleaner_offset(self.log_dir, self.partition))
        if not self.done:
            self.continues_cleaned_source = self.options.continues_cleaned_source or not state.has_segments
        first = not state.has_segments and state.log_start_offset is None
        self.log_start = max(self.options.log_start, read_broker_log_start(self.log_dir, self.partition)) if first else 0
        diverged = self._find_acceptable_divergence(found, state)
        found = self.whole = self._with_staged_files(found, state, diverged)
        if diverged is not None and diverged.offset <= state.end_offset:
            self.cleaned, self.continues_cleaned_source = None, False
            self._require_uncleaned_beyond(diverged.offset)
            self._replace_discarded_tier_end(found, state, diverged)
            return self.import_new_segments()
        self._require_local_records(found, state)
        self._require_uncleaned_beyond(state.end_offset + 1)
        self._prepend_segments(found, state)
        state = self.log.state
        new = found.segments_from_offset(self._first_offset_to_read(state))
        if self.log_start and self.options.live and self._sealed_end_offset(found) <= self.log_start:
            new = found.segments_before_offset(0)  # all sealed segments lie below the log start, and their records are deleted
        if state.has_segments and not new.bases:
            self._require_equal_last_records(found, state)  # all sealed segments of a live log may lie before the tail
            self._note_unidentified_log()
        for part in self._split_listing(new):
            count = len(self.done)
            with self._size_lock(part):
                if self._append_batches(found, part, state, diverged):
                    break
            if self.log.state.end_offset != (self.done[-1].end if len(self.done) > count else state.end_offset):
                return self.import_new_segments()  # another process has cut the log or added to it, so decide again what is missing
            state = self.log.state
        if self.too_late and not self.done:
            raise BadData(self.too_late, segment=str(self.log_dir), hint="`topics delete` it and import the whole directory again")
        self.notes += [self.too_late] if self.too_late else []
        self.identity.remember_matched_directory()
        return self._build_import_report()

    def _first_offset_to_read(self, state: PartitionState) -> int:
        """Start of the tail (the tier's last batches), else the tier's end offset, or the log start if the tier is empty."""
        if not state.has_segments:
            return self.log_start
        return min(state.tail[0].base_offset, state.end_offset + 1) if state.tail else state.end_offset

    def _with_staged_files(self, listing: SegmentListing, state: PartitionState, diverged: Divergence | None) -> SegmentListing:
        if not self.options.live:
            return listing
        position = state.end_offset + 1 if diverged is None else min(diverged.offset, state.end_offset + 1)
        lineage = state.lineage if diverged is None else truncate_lineage_at(state.lineage, diverged.offset)
        tier_end = TierEnd(position if state.has_segments else None, lineage)
        return listing_with_staged_files(
            listing, self.held, self.options.staged_problem, self.policy, tier_end, partial(self._first_uncleaned_offset, listing)
        )

    def _first_uncleaned_offset(self, listing: SegmentListing) -> int:
        """Taken from the broker's checkpoint or the first sign in a sealed segment."""
        cleaned = read_broker_cleaner_offset(self.log_dir, self.partition)
        for part in self._split_listing(listing):
            signs = find_cleaning_signs(self._open_listed_segments(part))
            if signs:
                return max(cleaned, signs[0].last + 1)
        return cleaned

    def _require_local_records(self, listing: SegmentListing, state: PartitionState) -> None:
        """Raise BadData if the broker has moved all records to its remote storage (KIP-405). If only the log's beginning was moved, or gaps
        are accepted, add a note.
        """
        log_start = read_checkpointed_log_start(self.log_dir, self.partition)
        bases = (*listing.bases, *([] if listing.end is None else [listing.end]))
        if log_start is None or not bases:
            return
        wanted = max(log_start, state.end_offset + 1) if state.has_segments else log_start
        if wanted >= bases[0]:
            return
        what = f"offsets {wanted} to {bases[0] - 1} of {self.partition} are in the remote storage of the brokers, not in the directory"
        if not any(map(listing.segment_size, listing.bases)) and not self.options.gaps:
            hint = 'Nothing else is there to import. Use the brokers\' tier itself ([tier] kind = "kafka"), or accept it with --allow-gaps'
            raise BadData(what, segment=str(self.log_dir), hint=hint)
        if not state.has_segments and not any(note.startswith(what) for note in self.notes):
            self.notes.append(f"{what}, and are not imported")

    def _require_refill_allowed(self, state: PartitionState) -> None:
        if state.deleted_slot and not self.options.refill:
            raise UsageError(
                f"{self.partition} was deleted from the tier and is not filled again by itself", hint="`import` its log directory again"
            )

    # --- at the end ---

    def _append_batches(
        self, listing: SegmentListing, listing_part: SegmentListing, state: PartitionState, diverged: Divergence | None
    ) -> bool:
        """Return whether the bound (``options.below``) was reached.

        :param state: the import is refused if the control log has changed since.
        :param diverged: where the log lacks a leader epoch that the tier expects after its end.
        """
        sources = self._open_listed_segments(listing_part)
        given = self._read_checkpoint_lineage(sources)
        pieces = file_parts_after_offset(self.log_dir, sources, state.end_offset if state.has_segments else -1)
        bounded = file_parts_below_offset(pieces, self.options.below)
        reached, pieces = len(bounded) < len(pieces), bounded
        self._require_no_cleaning_signs(pieces, state.end_offset + 1)
        same = state.has_segments and has_equal_tail_batches(state, sources, compacted_below=self.rewritten)
        self.compared += same
        if state.has_segments and not same:
            self._require_equal_last_records(listing, state)
        if not any(piece.source.size for piece in pieces):
            empty = len(sources) == len(self.whole.bases) and not any(source.size for source in sources)
            if empty and not self.options.may_be_empty and not self.options.live:
                raise BadData("all its segments are empty", segment=str(self.log_dir), hint="There is nothing to import")
            self._note_unidentified_log()
            return reached
        pieces = self._file_parts_without_gap(state, state.end_offset, pieces)
        self.identity.require_same_log(self.compared, self._count_equal_records_below)
        checked = self._check_file_parts(pieces)
        found_members = combine_parts_to_segments(self.log_dir, checked, read_end_states(self.tier.ports.layout, state))
        known = state.lineage if diverged is None else truncate_lineage_at(state.lineage, diverged.offset)
        fits = make_tier_unchanged_check(state, self.log_dir)
        self._upload_and_record_segments(found_members, self._build_segment_addition(found_members, known, given, fits=fits), known)
        return reached

    def _build_segment_addition(
        self, new_segments: Sequence[SegmentToImport], tier_lineage: Lineage, log_lineage: Lineage, **more: Any
    ) -> SegmentAddition:
        """Without a lineage of the log, the tier's is extended by that of the batches."""
        sources = [member.source for member in new_segments]
        lineage = log_lineage or extend_lineage(tier_lineage, lineage_from_batches(sources) if sources else ())
        more |= {
            "listed": self._add_partition_to_catalog,
            "noted": self._publish_catalog_change,
            "log_start": 0 if self.log.state.has_segments else self.log_start,
            "source_cleaned_to": self.cleaned_to if self.continues_cleaned_source or self.loss_accepted else 0,
            "accept_loss": self.loss_accepted,
        }
        return SegmentAddition(lineage, describe_tail_batches(sources, TAIL), topic_id=self.identity.given_id, **more)

    def _read_checkpoint_lineage(self, sources: Sequence[SourceSegment]) -> Lineage:
        given = self.options.lineage or read_epoch_checkpoint(self.log_dir)
        if given:
            require_lineage_matches_batches(self.log_dir / CHECKPOINT, given, sources)
        for gap in self.gaps_met:
            given = fill_lineage_gap(given, self.log.state.lineage, *gap)
        return lineage_with_staged_epochs(given, sources)

    def _open_listed_segments(self, listing: SegmentListing) -> list[SourceSegment]:
        return open_listed_segments(listing, self.policy, is_written_by_broker=self.options.live)

    def _split_listing(self, listing: SegmentListing) -> Iterator[SegmentListing]:
        """The files of a live log are read, so that each part must fit into memory."""
        return listing.split_by_size(LIVE_BYTES) if self.options.live else iter([listing] if listing.bases else [])

    def _size_lock(self, listing_part: SegmentListing) -> AbstractContextManager[object]:
        return self.company.large if listing_part.total_size_bytes > LARGE_BYTES else nullcontext()

    # --- whether it is the same log ---

    def _find_acceptable_divergence(self, listing: SegmentListing, state: PartitionState) -> Divergence | None:
        """Raises BadData if the options do not permit to discard the data that a later leader has discarded."""
        if not state.has_segments:
            return None
        lineage, new = partial(self._read_checkpoint_lineage, []), listing.segments_from_offset(self._first_offset_to_read(state))
        if given := lineage():
            # A leader writes an epoch's entry before its first batch, so the log reaches at least the last entry.
            end = max(self._sealed_end_offset(listing), given[-1].start_offset)
            diverged = find_divergence_outside_gaps(state, lineage, end, self._open_tier_segment, self.gaps_met)
        else:
            diverged = find_divergence(state, *self._read_listed_lineage(new))
            if diverged is not None and diverged.newer:  # it may lie before the segments that were opened
                diverged = find_divergence(state, *self._read_listed_lineage(listing))
            elif diverged is not None and has_equal_tail_batches(state, self._open_listed_segments(new)):
                return None  # epochs that only batches show may be out of order (v0 and v1 have none); equal batches are better evidence
        if diverged is None or (diverged.newer and diverged.offset > state.end_offset):
            return diverged
        if not (diverged.newer and self.options.accept_truncation) or diverged.offset <= state.log_start:
            self._has_equal_tail(listing, state, diverged.offset)  # if it is another log, the error says so
            for part in self._split_listing(new):  # nor is a checkpoint believed that its own batches contradict
                self._read_checkpoint_lineage(self._open_listed_segments(part))
            raise diverged.divergent_import_error(state, self.log_dir)
        return diverged

    def _sealed_end_offset(self, listing: SegmentListing) -> int:
        if listing.end is not None:
            return listing.end
        for base in reversed(listing.bases):
            (source,) = self._open_listed_segments(listing.segments_from_offset(base).segments_before_offset(base + 1))
            if source.size:
                return int(source.table.last_offset[-1]) + 1
        return 0

    def _read_listed_lineage(self, listing: SegmentListing) -> tuple[Lineage, int]:
        lineage, end = Lineage(), 0
        for part in self._split_listing(listing):
            filled = [source for source in self._open_listed_segments(part) if source.size]
            lineage = extend_lineage(lineage, lineage_from_batches(filled))
            end = int(filled[-1].table.last_offset[-1]) + 1 if filled else end
        return lineage, end

    def _require_uncleaned_beyond(self, offset: int) -> None:
        cleaned = read_broker_cleaner_offset(self.log_dir, self.partition)
        if self.cleaned is None or cleaned > self.cleaned:
            where = str(self.log_dir.parent / CLEANED)
            try:
                require_not_compacted_beyond(self.partition, offset, cleaned, cleaned_by="the broker's own cleaner", source_name=where)
            except BadData as error:
                self._require_accepted_compaction(error, offset, cleaned)
        self.cleaned = cleaned if self.cleaned is None else self.cleaned
        self.cleaned_to = max(self.cleaned_to, cleaned)

    def _require_no_cleaning_signs(self, file_parts: Sequence[SegmentFilePart], offset: int) -> None:
        """Raise BadData if batches show that the log was compacted after ``offset``: the leader's log was cleaned, or the broker's
        checkpoint was not copied. Missing offsets at the ends of segments alone are left to ``require_no_offset_gaps``, because a lost
        segment file leaves the same.
        """
        signs = find_cleaning_signs([piece.source for piece in file_parts])
        if all(sign.kind == "boundary" for sign in signs):
            return
        end = max(sign.last for sign in signs) + 1
        if offset:
            what = f"a log cleaner has compacted {self.partition}: {describe_cleaning_signs(signs)}"
            try:
                self._require_accepted_compaction(compacted_log_error(self.partition, offset, what, signs[0].segment), offset, end)
            except BadData:
                check_file_parts(file_parts, FileCheckSettings(self.policy.max_decompressed_batch_bytes, self.company.threads))
                raise  # not a damaged header: its batch is intact
        self.cleaned_to = max(self.cleaned_to, end)

    def _require_accepted_compaction(self, error: BadData, offset: int, cleaned_to: int) -> None:
        """Raise ``error`` unless all of the tier comes from the log as compacted then, or a person has accepted the loss."""
        # A first import may take a compacted log in several parts: the part of the log below ``source_cleaned_to`` was compacted before its
        # first segment came in, together with all that its tombstones delete. Beyond that, the tier's last batches must have come from a
        # compacted log, and the directory must still hold all records of the tier: then the two are one log. This is not enough for the
        # replica of a log that was *not* compacted when it was imported, because it may have missed tombstones for ever.
        state = self.log.state
        if self.continues_cleaned_source or cleaned_to <= state.source_cleaned_to:
            return
        if state.end_offset + 1 == offset and self._continues_compacted_log(state):
            self.continues_cleaned_source = True
            self.rewritten = max(self.rewritten, cleaned_to)
        elif not self.options.accept_loss:
            raise error
        elif not self.loss_accepted:
            self.loss_accepted = True
            self.rewritten = max(self.rewritten, cleaned_to)
            self.notes.append(
                f"{self.partition}: a cleaned log continues it at offset {offset}. Keys that were deleted since, and transactions that were"
                " aborted, may stay in the tier"
            )

    def _continues_compacted_log(self, state: PartitionState) -> bool:
        if not state.tail or state.source_cleaned_to <= state.tail[0].base_offset:
            return False
        limit = self.policy.max_decompressed_batch_bytes
        return has_all_tier_records(state, self.whole, self._open_tier_segment, self._open_listed_segments, limit)

    def _require_equal_last_records(self, listing: SegmentListing, state: PartitionState) -> None:
        if self.options.older and self._sealed_end_offset(listing) <= state.end_offset + 1:
            self._count_equal_records(listing, state, self._sealed_end_offset(listing))

    def _has_equal_tail(self, listing: SegmentListing, state: PartitionState, offset: int) -> bool:
        known = [batch for batch in state.tail if self.rewritten <= batch.last_offset < offset]
        compared = listing.segments_before_offset(offset).segments_from_offset(known[0].base_offset) if known else None
        sources = [] if compared is None else self._open_listed_segments(compared)
        return has_equal_tail_batches(state, sources, offset, self.rewritten)

    def _count_equal_records(self, listing: SegmentListing, state: PartitionState, end_offset: int) -> int:
        limit = self.policy.max_decompressed_batch_bytes
        open_tier, open_listed, below = self._open_tier_segment, self._open_listed_segments, self.rewritten
        return count_equal_last_records(state, listing, open_tier, open_listed, limit, end_offset=end_offset, compacted_below=below)

    def _count_equal_records_below(self, end_offset: int) -> int:
        return self._count_equal_records(self.whole, self.log.state, min(end_offset, self._sealed_end_offset(self.whole)))

    def _note_unidentified_log(self) -> None:
        if self.log.state.has_segments and not self.identity.is_same_log(self.compared, self._count_equal_records_below):
            self.notes.append(self.identity.topic_adoption_needed_note())

    # --- a truncated log ---

    def _replace_discarded_tier_end(self, listing: SegmentListing, state: PartitionState, diverged: Divergence) -> None:
        """All of the broker's new branch is read and checked first."""
        offset, end = diverged.offset, state.end_offset
        same: int = self._has_equal_tail(listing, state, offset)
        self.identity.require_same_log(same, self._count_equal_records_below, cut_offset=offset)
        loss = self.options.accept_loss
        self.notes += diverged.require_equal_records(
            state, self.log_dir, lambda: same or self._count_equal_records_below(offset), accept_loss=loss
        )
        branch = listing.segments_from_offset(offset)
        with self._size_lock(branch):
            checked = self._check_branch(branch, state, offset)
            check_position = make_tier_unchanged_check(state, self.log_dir)
            check_position(self.log.refresh())
            self.notes += undo_rounds_beyond_offset(self.tier, self.log, offset, str(self.log_dir / CHECKPOINT), accept_loss=loss)
            check_position(self.log.state)  # another import may have cut the log
            with tempfile.TemporaryDirectory(prefix="cut-", dir=spool_folder(self.tier.state_dir)) as scratch:
                self._replace_tier_end(checked, diverged.given, offset, Path(scratch))
        self.notes.append(f"{self.partition}: offsets {offset} to {end} were discarded by the broker, and now by the tier")

    def _check_branch(self, branch: SegmentListing, state: PartitionState, offset: int) -> list[CheckedFilePart]:
        """Check all batches from ``offset`` on. Return those to record together with the cut: the first part with data, below
        ``options.below``.
        """
        first: list[CheckedFilePart] | None = None
        last: list[SourceSegment] = []
        for part in self._split_listing(branch):
            sources = self._open_listed_segments(part)
            self._read_checkpoint_lineage(sources)
            pieces = file_parts_after_offset(self.log_dir, sources, offset - 1)
            if not any(piece.source.size for piece in pieces):
                continue
            self._require_no_cleaning_signs(pieces, offset)
            count = 0
            if first is None:
                pieces = self._file_parts_without_gap(state, offset - 1, pieces)
                count = len(file_parts_below_offset(pieces, self.options.below))
                first = self._check_file_parts(pieces[:count]) if any(piece.source.size for piece in pieces[:count]) else []
            check_file_parts(pieces[count:], FileCheckSettings(self.policy.max_decompressed_batch_bytes, self.company.threads))
            if not self.options.gaps:
                require_no_offset_gaps([*last, *(piece.source for piece in pieces)])
            last = [pieces[-1].source]
        return first or []

    def _replace_tier_end(self, file_parts: Sequence[CheckedFilePart], log_lineage: Lineage, offset: int, scratch: Path) -> None:
        """Cut the tier and add the first segments of the new branch, in one record."""
        state, layout = self.log.state, self.tier.ports.layout
        place = next(place for place, segment in enumerate(state.live) if segment.end_offset >= offset)
        head = segment_head_before_offset(self.tier, state, offset, self.policy, scratch)
        start = offset if head else state.live[place].start_offset
        if file_parts and file_parts[0].piece.source.base != start:  # a round has left no batch in between; the first segment covers it
            piece = file_parts[0].piece
            file_parts = [replace(file_parts[0], piece=replace(piece, source=replace(piece.source, base=start))), *file_parts[1:]]
        before = head.states if head else read_end_states(layout, state.model_copy(update={"live": state.live[:place]}))
        found = combine_parts_to_segments(self.log_dir, file_parts, before) if file_parts else []
        known = truncate_lineage_at(state.lineage, start)
        voided = tuple(segment.id for segment in state.live[place:])
        body = TailTruncated(cut_id="", offset=Offset(start), voided=voided, accept_loss=self.options.accept_loss)
        log_lineage = lineage_with_staged_epochs(log_lineage, [one.piece.source for one in file_parts])
        self._upload_and_record_segments(found, self._build_segment_addition(found, known, log_lineage, cut=body), known, head)

    @contextmanager
    def _open_tier_segment(self, segment: RemoteLogSegmentMetadata) -> Iterator[SourceSegment]:
        reader = open_given_reader(self.tier, self.partition, [segment], "import")
        with reader as reading, reading.open_segment(0, include_txn_index=False) as source:
            yield source

    def _file_parts_without_gap(
        self, state: PartitionState, last_tier_offset: int, file_parts: list[SegmentFilePart]
    ) -> list[SegmentFilePart]:
        """The first returned part covers an allowed gap. Raises BadData for any other gap."""
        first = file_parts[0].source
        if not state.has_segments or first.base == last_tier_offset + 1:
            return file_parts
        require_no_gap(state, last_tier_offset, first, self.options.fetched_from, self.held.refusals, allow_gaps=self.options.gaps)
        self.notes.append(f"offsets {last_tier_offset + 1} to {first.base - 1} are missing in {self.partition}, and stay so")
        return [replace(file_parts[0], source=replace(first, base=last_tier_offset + 1)), *file_parts[1:]]

    # --- before the beginning ---

    def _prepend_segments(self, listing: SegmentListing, state: PartitionState) -> None:
        if not state.has_segments or not listing.bases or listing.bases[0] >= state.start_offset or not self.options.older:
            return
        if state.log_start_offset is not None or (listing.end is not None and listing.end < state.start_offset):
            return  # what lies there was deleted, or the active segment has offsets that would be passed over
        problem = ordering.already_compacted_problem(state)
        if problem:
            self.too_late = f"offsets {listing.bases[0]} to {state.start_offset - 1} cannot be added before what the tier has: {problem}"
            return
        part = listing.segments_before_offset(state.start_offset)
        pieces = file_parts_before_offset(self.log_dir, self._open_listed_segments(part), state.start_offset)
        if not any(piece.source.size for piece in pieces):
            return
        given = self._read_checkpoint_lineage([piece.source for piece in pieces])
        last = pieces[-1].source
        if last.end != state.start_offset and not self.options.gaps:
            raise BadData(
                f"offsets {last.end} to {state.start_offset - 1} are missing between the directory and {self.partition} in the tier",
                segment=last.name,
                hint="Restore the segment in between; if a cleaner has removed the offsets, use --allow-gaps",
            )
        pieces[-1] = replace(pieces[-1], source=replace(last, end=state.start_offset, is_last=False))
        self.identity.require_same_log(0, self._count_equal_records_below)
        found_members = combine_parts_to_segments(self.log_dir, self._check_file_parts(pieces), ProducerStates.empty_producer_states())
        require_segments_precede_tier(state, found_members, given, self.log_dir)
        filled = [piece.source for piece in pieces if piece.source.size]
        older = restore_truncated_front(lineage_from_batches(filled), truncate_lineage_at(given, found_members[-1].end + 1))
        self._upload_and_record_segments(
            found_members,
            SegmentAddition(
                older,
                before=True,
                topic_id=self.identity.given_id,
                listed=self._add_partition_to_catalog,
                noted=self._publish_catalog_change,
            ),
            (),
        )

    # --- both ---

    def _check_file_parts(self, file_parts: Sequence[SegmentFilePart]) -> list[CheckedFilePart]:
        sources = [piece.source for piece in file_parts]
        size = sum(source.size for source in sources)
        self.progress.at("checking", size)
        if not self.options.live:
            require_no_orphaned_indexes(self.log_dir, self.whole.bases)
        if not self.options.gaps:
            require_no_offset_gaps(sources)
        limit = self.policy.max_decompressed_batch_bytes
        latest_ms = self.tier.ports.clock_ms() + DAY_MS
        checks = FileCheckSettings(limit, self.company.threads, self._create_sidecar_builder, self.progress.advance, latest_ms)
        checked = check_file_parts(file_parts, checks)
        negative = sum(piece.negative_timestamps for piece in checked)
        if negative:
            self.notes.append(
                f"{negative} records of {self.partition} have negative timestamps: Kafka's cleaner refuses to rewrite a batch with such a "
                "record, and so does a round here, which then leaves the partition as it is"
            )
        late = sum(piece.late_timestamps for piece in checked)
        if late:
            self.notes.append(
                f"{late} records of {self.partition} have times more than a day ahead: as in Kafka, neither retention.ms nor "
                "min.compaction.lag.ms passes for their segments until then"
            )
        return checked

    def _create_sidecar_builder(self, source: SourceSegment) -> SidecarBuilder | None:
        """Builder without Bloom filter."""
        if not self.tier.cleaner_settings_for_topic(self.partition.topic).bloom:
            return None
        return SidecarBuilder(source, None, self._hash_key(), counts_distinct_keys=True)

    def _hash_key(self) -> bytes:
        if self.tier.catalog.state.tier_id:
            return self.tier.identity.hash_key()
        self.key_to_be = self.key_to_be or self.tier.ports.random_bytes(HASH_KEY_BYTES)
        return self.key_to_be

    def _upload_and_record_segments(
        self, new_segments: list[SegmentToImport], addition: SegmentAddition, tier_lineage: Lineage, head: SegmentToImport | None = None
    ) -> None:
        """Upload and record. ``tier_lineage``: as far as the segments continue it; ``head``: the rest of a cut segment."""
        if not addition.cut and not self.options.accept_erased:
            self._require_values_erased(new_segments)
        # The broker's cleaner may have run while the segments were read.
        self._require_uncleaned_beyond(addition.cut.offset if addition.cut else self.log.state.end_offset + 1)
        tier, interval = self.tier, self.policy.index_interval_bytes
        require_free_space(tier.ports.layout.url, sum(max_segment_disk_bytes(member, interval) for member in new_segments))
        if not tier.catalog.state.tier_id:
            tier.identity.read_or_create_catalog(self.key_to_be)
            tier.catalog.refresh()
        self.progress.at("uploading", sum(member.source.size for member in new_segments))
        sidecars = tier.open_sidecar_store(self.partition) if tier.cleaner_settings_for_topic(self.partition.topic).bloom else None
        lineage = restore_truncated_front(tier_lineage, addition.lineage)
        how = SegmentUploadSettings(tier, self.partition, self.policy, self.company.threads, sidecars, self._report_progress)
        check, members = self.identity.require_directory_unchanged, [head, *new_segments] if head else new_segments
        incoming = [SegmentUpload(how, member, lineage, check) for member in members]
        if add_segments_once(tier.ports, self.log, incoming, replace(addition, at_once=self.company.threads)):
            self.done += new_segments

    def _require_values_erased(self, new_segments: Sequence[SegmentToImport]) -> None:
        """Raise BadData if the segments may bring erased values back: an erasure is recorded, and the partition was deleted from the tier
        or the segments precede it. Later segments follow the tombstones of erased keys.
        """
        state = self.log.state
        if new_segments[0].start > state.end_offset if state.has_segments else not state.deleted_slot:
            return
        erased_ms = latest_erasure_ms(self.tier.ports, self.partition)
        if erased_ms is not None:
            raise BadData(
                f"keys of {self.partition.topic} were erased until {format_iso_time(erased_ms)}, and this directory may bring values back",
                segment=str(self.log_dir),
                hint="`audit list` shows the erasure. To import it nevertheless: --accept-erased, and erase the keys again afterwards",
            )

    def _report_progress(self, byte_count: int) -> None:
        with self.telling:
            self.progress.advance(byte_count)

    def _add_partition_to_catalog(self) -> None:
        if str(self.partition) not in self.tier.catalog.state.partitions:
            self.company.note_change(self.log)
            require_topic_not_superseded(self.tier, self.log.state, self.identity.given_id, self.identity.partition_metadata_path)

    def _publish_catalog_change(self) -> None:
        self.company.note_change(self.log)

    def _build_import_report(self) -> ImportReport:
        state = self.log.state
        self.notes += describe_refused_staged_files(self.held.refusals)
        if not self.done:
            return ImportReport(0, 0, state.end_offset + 1, state.end_offset, tuple(self.notes))
        taken = [member for member in self.done if member.source.name.endswith(DELETED)]
        if taken:
            what = f"offsets {taken[0].start} to {taken[-1].end} of {self.partition}"
            self.notes.append(f"{what} were taken from files that the broker has staged for deletion")
        size = sum(member.source.size for member in self.done)
        start, end = min(member.start for member in self.done), max(member.end for member in self.done)
        return ImportReport(len(self.done), size, start, end, tuple(self.notes))
