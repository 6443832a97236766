"""Pass 1 over the live segments, on the driver: which tasks, in which order, and the fold over what they found.

rows wanted        keys of dirty segments and of all that are rewritten, as scratch objects
headers only       outcomes of transactions may be told anywhere
a sidecar          stands in for a segment that is not read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from bloom.sidecar import Sidecar
from compactor.cleaner.gate.batches import Fates, fates_of
from compactor.cleaner.passes.portraits import NOTHING, stand_in
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts, fold
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.spark.cluster.steps import TaskSteps
from compactor.spark.round.gate import SparseFates
from compactor.spark.round.mapping import Indexed, SparseVerdicts, ToGather, ToIndex, index_segment


@dataclass(frozen=True)
class FoldedSegment:
    """What pass 1 found out about one segment that was read."""

    indexed: Indexed
    verdicts: SparseVerdicts
    fates: SparseFates

    def to_gather(self, metadata: RemoteLogSegmentMetadata) -> ToGather:
        return ToGather(metadata, self.verdicts, self.indexed.buckets, self.fates)


@dataclass
class Index:
    """``stand_ins``: by segment id, of segments that need not be read; where none is known the headers are. ``found``: what was read."""

    live: Sequence[RemoteLogSegmentMetadata]
    stand_ins: Mapping[str, Sidecar]
    found: dict[str, Indexed] = field(default_factory=dict)
    folded: dict[str, tuple[SourceSegment, Verdicts, Fates]] = field(default_factory=dict)

    def read(self, steps: TaskSteps, rows: AbstractSet[str], sources: AbstractSet[str] = frozenset()) -> None:
        """Reads what is not known yet (ids): the keys of ``rows``; headers of ``sources``, and of all that nothing stands in for.

        A segment of which only the headers are known is read again where its keys are wanted now. Raises BadData, StoreError, OutOfBudget.
        """
        items = []
        for segment in self.live:
            name = segment.id
            if name not in self.found:
                if name in rows or name in sources or name not in self.stand_ins:
                    items.append(ToIndex(segment, name in rows))
            elif name in rows and self.found[name].buckets is None:
                known = self.known(name)
                items.append(ToIndex(segment, True, known.verdicts, known.fates))
        self._run(steps, f"pass 1, keys of {len(items)} segments", items)
        self._fold()
        second = []
        for item in items:
            known = self.known(item.metadata.id)
            if known.indexed.undecided:
                second.append(ToIndex(item.metadata, True, known.verdicts, known.fates))
        self._run(steps, f"pass 1, keys of {len(second)} segments with transactions", second)

    def known(self, segment_id: str) -> FoldedSegment:
        """Of a segment that was read."""
        indexed = self.found[segment_id]
        _, verdicts, fates = self.folded[segment_id]
        places = indexed.batches, indexed.places
        return FoldedSegment(indexed, SparseVerdicts(*places, verdicts), SparseFates(*places, fates))

    @property
    def scratch(self) -> list[str]:
        """Keys of the objects that were written."""
        return [part.key for found in self.found.values() for part in (found.buckets, found.sample) if part]

    def _run(self, steps: TaskSteps, step: str, items: Sequence[ToIndex]) -> None:
        for place, result in steps.each(step, index_segment, items):
            self.found[items[place].metadata.id] = result

    def _fold(self) -> None:
        """The cleaner's fold and the gate's, over the batches that decide; batches of no transaction say nothing to either."""
        sources = [self._source(place, segment) for place, segment in enumerate(self.live)]
        both = zip(sources, fold(sources), fates_of(sources, {}), strict=True)
        self.folded = {source.name: (source, verdicts, fates) for source, verdicts, fates in both}

    def _source(self, ordinal: int, segment: RemoteLogSegmentMetadata) -> SourceSegment:
        place = (ordinal, segment.id, segment.start_offset, segment.end_offset + 1, segment.mtime_ms)
        found = self.found.get(segment.id)
        if found is None:
            return stand_in(*place, self.stand_ins[segment.id])
        return SourceSegment(*place, NOTHING, found.table, txn_entries=found.txn_entries)
