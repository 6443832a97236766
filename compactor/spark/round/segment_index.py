"""The driver's index of live segments during pass 1: plans the bundles, collects their results, and folds the transactions.

rows wanted     keys of dirty segments and of all sources, as scratch objects
headers only    other segments, because the end of a transaction may be in any of them
sidecars        replace segments that are not read
bundles         of an earlier attempt at the same plan replace their segments
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from bloom.sidecar import Sidecar
from compactor.cleaner.gate.batch_checks import BatchTransactionOutcomes, transaction_outcomes_by_source
from compactor.cleaner.gate.key_table import GATE_ROW_BYTES
from compactor.cleaner.keys.disk_map import KEY_ROW_BYTES
from compactor.cleaner.passes.sidecar_builder import NO_BYTES, create_substitute_segment_from_sidecar
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import TransactionVerdicts, transaction_verdicts_by_source
from compactor.model.keyless import KeylessRecords
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.spark.cluster.round_jobs import RoundJobRunner
from compactor.spark.round.bundles import (
    PassOneResultOfSegment,
    PassOneResultOfSegmentBundle,
    merge_segments_into_row_number_ranges,
    plan_segment_bundles,
)
from compactor.spark.round.exchange import StoredKeyRows
from compactor.spark.round.gate_ranges import GateInputOfAllHashRanges
from compactor.spark.round.gate_rows import SparseTransactionOutcomes, StoredGateRows
from compactor.spark.round.pass_one_tasks import (
    InputOfAllHashRangeTasks,
    SegmentForWritingSurvivors,
    SegmentToReadInPassOne,
    SparseTransactionVerdicts,
    SurvivorBundle,
    read_segments_of_bundle_in_pass_one,
)

SEGMENTS_PER_GATHER_TASK = 256
"""Number of segments without keys whose verdicts one task writes."""


@dataclass
class PassOneSegmentResults:
    """Results of pass 1 for the live segments, which the driver collects.

    stand_ins: sidecars, by segment id, that take the place of reading a segment. Of a segment without one, at least the headers are read.
    segments: results for the segments that were read, by id.
    folded: transaction results of each segment, by id.
    bundles, gate_bundles: locations of the key rows, and of the rows for the gate (the independent check of the output); one entry for each
        task.
    bundle_places: by segment id, index in ``bundles`` of the entry that holds the segment's keys.
    """

    live: Sequence[RemoteLogSegmentMetadata]
    stand_ins: Mapping[str, Sidecar]
    segments: dict[str, PassOneResultOfSegment] = field(default_factory=dict)
    folded: dict[str, tuple[SourceSegment, TransactionVerdicts, BatchTransactionOutcomes]] = field(default_factory=dict)
    bundles: list[StoredKeyRows] = field(default_factory=list)
    gate_bundles: list[StoredGateRows] = field(default_factory=list)
    bundle_places: dict[str, int] = field(default_factory=dict)

    def read_segment_keys_and_headers(
        self, jobs: RoundJobRunner, ids_with_keys: AbstractSet[str], source_ids: AbstractSet[str] = frozenset()
    ) -> None:
        """Read what the index does not have yet: the keys of the segments in ``ids_with_keys``, and the headers of ``source_ids`` and of
        all segments without a sidecar. A segment of which only the headers were read is read again if its keys are wanted now. Raises
        BadData, StoreError, OutOfBudget.

        :param ids_with_keys: ids of segments whose keys are wanted.
        :param source_ids: ids of segments that will be rewritten.
        """
        items = []
        for segment in self.live:
            name = segment.id
            if name not in self.segments:
                if name in ids_with_keys or name in source_ids or name not in self.stand_ins:
                    items.append(SegmentToReadInPassOne(segment, name in ids_with_keys))
            elif name in ids_with_keys and not self.segments[name].has_key_rows and not self.segments[name].undecided:
                items.append(self._segment_to_read_with_key_rows(segment))
        self._read_segments_in_tasks_per_bundle(jobs, items, "")
        self._determine_transaction_outcomes()
        undecided = [segment for segment in self.live if segment.id in self.segments and self.segments[segment.id].undecided]
        self._read_segments_in_tasks_per_bundle(
            jobs, [self._segment_to_read_with_key_rows(segment) for segment in undecided], " with transactions"
        )

    def add_bundle_unless_known(self, bundle: PassOneResultOfSegmentBundle) -> bool:
        """Add the result of a pass 1 task to the index, and return True. Return False, without adding it, if the index has the keys of one
        of its segments already.
        """
        if any(segment.has_key_rows and segment.id in self.bundle_places for segment in bundle.segments):
            return False
        for segment in bundle.segments:
            if segment.has_key_rows:
                self.bundle_places[segment.id] = len(self.bundles)
            if segment.has_key_rows or segment.id not in self.bundle_places:
                self.segments[segment.id] = segment
        if bundle.keys is not None:
            self.bundles.append(bundle.keys)
        if bundle.gate is not None:
            self.gate_bundles.append(bundle.gate)
        return True

    def input_of_all_hash_range_tasks(self, source_ids: AbstractSet[str]) -> InputOfAllHashRangeTasks:
        """Return the input of the tasks over hash ranges.

        :param source_ids: ids of the segments whose survivors are wanted.
        """
        with_rows = [self.segments[segment.id] for segment in reversed(self.live) if segment.id in self.bundle_places]
        dirty = [
            (self.bundle_places[segment.id], segment) for segment in with_rows if self.bundles[self.bundle_places[segment.id]].dirty_rows
        ]
        return InputOfAllHashRangeTasks(
            tuple(self.bundles),
            merge_segments_into_row_number_ranges(dirty),
            frozenset(self.bundle_places[name] for name in source_ids if name in self.bundle_places),
        )

    def gate_input(self) -> GateInputOfAllHashRanges:
        """Return the input of the gate (the independent check of the output) for tasks over hash ranges: all rows that this index has
        stored.
        """
        shown = [segment for segment in self.live if segment.id in self.bundle_places]
        bounds = [*(segment.start_offset for segment in shown), *(segment.end_offset + 1 for segment in shown[-1:])]
        return GateInputOfAllHashRanges(tuple(self.gate_bundles), np.array(bounds, np.int64))

    def plan_survivor_bundles(self, source_ids: AbstractSet[str]) -> list[SurvivorBundle]:
        """Return the work items for gathering the survivors of the segments in ``source_ids``: first each bundle that has keys, then
        segments without keys.
        """
        of_bundle: dict[int, list[SegmentForWritingSurvivors]] = {}
        without: list[SegmentForWritingSurvivors] = []
        for segment in self.live:
            if segment.id in source_ids:
                place = self.bundle_places.get(segment.id)
                (without if place is None else of_bundle.setdefault(place, [])).append(self._segment_for_writing_survivors(segment.id))
        found = [SurvivorBundle(f"{place}", tuple(of_bundle[place]), self.bundles[place]) for place in sorted(of_bundle)]
        together = range(0, len(without), SEGMENTS_PER_GATHER_TASK)
        return found + [SurvivorBundle(f"headers-{n}", tuple(without[n : n + SEGMENTS_PER_GATHER_TASK]), None) for n in together]

    def count_keyless_records(self) -> KeylessRecords:
        """Return how many records of the dirty range have no key, in the segments whose keys were read."""
        return reduce(KeylessRecords.plus, (segment.keyless for segment in self.segments.values()), KeylessRecords())

    @property
    def scratch_keys(self) -> list[str]:
        """Return the keys of the scratch objects that were written."""
        return [bundle.key for bundle in self.bundles] + [bundle.key for bundle in self.gate_bundles]

    def _segment_for_writing_survivors(self, segment_id: str) -> SegmentForWritingSurvivors:
        """Return a segment that was read, with its transaction verdicts (which batches are aborted), as input for writing its survivors."""
        indexed = self.segments[segment_id]
        _, verdicts, outcomes = self.folded[segment_id]
        places = indexed.batches, indexed.places
        return SegmentForWritingSurvivors(
            indexed, SparseTransactionVerdicts(*places, verdicts), SparseTransactionOutcomes(*places, outcomes)
        )

    def _segment_to_read_with_key_rows(self, segment: RemoteLogSegmentMetadata) -> SegmentToReadInPassOne:
        """Return the input with which pass 1 reads a segment with its keys. It includes the segment's transaction verdicts if these are
        known.
        """
        if segment.id not in self.folded:
            return SegmentToReadInPassOne(segment, True)
        known = self._segment_for_writing_survivors(segment.id)
        return SegmentToReadInPassOne(segment, True, known.verdicts, known.outcomes)

    def _read_segments_in_tasks_per_bundle(self, jobs: RoundJobRunner, items: Sequence[SegmentToReadInPassOne], description: str) -> None:
        """Index segments in Spark tasks, one for each bundle of neighbours, and add the results to this index.

        :param description: text that the job's name in the Spark UI ends with.
        """
        row_bytes = KEY_ROW_BYTES + (GATE_ROW_BYTES if jobs.shared.gate else 0)
        runs = plan_segment_bundles([item.metadata for item in items], jobs.cluster.task_slots, jobs.shared.disk_budget_bytes, row_bytes)
        what = f"pass 1, keys of {len(items)} segments{description}, in {len(runs)} bundles"
        for result in jobs.run_task_per_item(
            what, read_segments_of_bundle_in_pass_one, [tuple(reversed(items[begin:end])) for begin, end in runs]
        ):
            self.add_bundle_unless_known(result[1])

    def _determine_transaction_outcomes(self) -> None:
        """Determine the outcome of all transactions from the segments' headers in order: once for the cleaner, and once more for the gate
        (the independent check of the output).
        """
        sources = list(self._live_segment_headers())
        both = zip(sources, transaction_verdicts_by_source(sources), transaction_outcomes_by_source(sources, {}), strict=True)
        self.folded = {source.name: (source, verdicts, outcomes) for source, verdicts, outcomes in both}

    def _live_segment_headers(self) -> Iterator[SourceSegment]:
        """Yield every live segment with the batch headers that decide about transactions, from its pass 1 result or its sidecar."""
        for ordinal, segment in enumerate(self.live):
            place = (ordinal, segment.id, segment.start_offset, segment.end_offset + 1, segment.mtime_ms)
            found = self.segments.get(segment.id)
            if found is None:
                yield create_substitute_segment_from_sidecar(*place, self.stand_ins[segment.id])
            else:
                yield SourceSegment(*place, NO_BYTES, found.table, txn_entries=found.txn_entries)
