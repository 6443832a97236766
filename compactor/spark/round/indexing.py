"""Pass 1 over the live segments, on the driver: which bundles, in which order, and the fold over what they found.

rows wanted        keys of dirty segments and of all that are rewritten, as scratch objects
headers only       outcomes of transactions may be told anywhere
a sidecar          stands in for a segment that is not read
a bundle           of an earlier attempt at the same plan stands in for all of its segments
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from bloom.sidecar import Sidecar
from compactor.cleaner.gate.batches import Fates, fates_of
from compactor.cleaner.gate.table import ROW_BYTES as GATE_ROW_BYTES
from compactor.cleaner.keys.buckets import ROW_BYTES
from compactor.cleaner.passes.portraits import NOTHING, stand_in
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts, fold
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.spark.cluster.steps import TaskSteps
from compactor.spark.round.bundles import Indexed, IndexedBundle, bundled, pieces
from compactor.spark.round.exchange import KeyBundle
from compactor.spark.round.gate import GateBundle, SparseFates
from compactor.spark.round.judging import ToJudge
from compactor.spark.round.mapping import Exchange, GatherBundle, SparseVerdicts, ToGather, ToIndex, index_bundle

GATHERED_TOGETHER = 256
"""Segments without keys whose verdicts one task writes down."""


@dataclass
class Index:
    """``stand_ins``: by segment id, of segments that need not be read; where none is known the headers are.

    ``found``: what was read; ``bundles``: its keys; ``place``: by segment id, which bundle has its keys.
    """

    live: Sequence[RemoteLogSegmentMetadata]
    stand_ins: Mapping[str, Sidecar]
    found: dict[str, Indexed] = field(default_factory=dict)
    folded: dict[str, tuple[SourceSegment, Verdicts, Fates]] = field(default_factory=dict)
    bundles: list[KeyBundle] = field(default_factory=list)
    gate_bundles: list[GateBundle] = field(default_factory=list)
    place: dict[str, int] = field(default_factory=dict)

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
            elif name in rows and not self.found[name].has_rows and not self.found[name].undecided:
                items.append(self._again(segment))
        self._run(steps, items, "")
        self._fold()
        undecided = [segment for segment in self.live if segment.id in self.found and self.found[segment.id].undecided]
        self._run(steps, [self._again(segment) for segment in undecided], " with transactions")

    def take(self, bundle: IndexedBundle) -> bool:
        """What a task found; False where the keys of one of its segments are known already."""
        if any(segment.has_rows and segment.id in self.place for segment in bundle.segments):
            return False
        for segment in bundle.segments:
            if segment.has_rows:
                self.place[segment.id] = len(self.bundles)
            if segment.has_rows or segment.id not in self.place:
                self.found[segment.id] = segment
        if bundle.keys is not None:
            self.bundles.append(bundle.keys)
        if bundle.gate is not None:
            self.gate_bundles.append(bundle.gate)
        return True

    def exchange(self, sources: AbstractSet[str]) -> Exchange:
        """``sources``: ids of the segments whose survivors are wanted."""
        with_rows = [self.found[segment.id] for segment in reversed(self.live) if segment.id in self.place]
        dirty = [(self.place[segment.id], segment) for segment in with_rows if self.bundles[self.place[segment.id]].dirty_rows]
        return Exchange(tuple(self.bundles), pieces(dirty), frozenset(self.place[name] for name in sources if name in self.place))

    def to_judge(self) -> ToJudge:
        """All that the gate was shown."""
        shown = [segment for segment in self.live if segment.id in self.place]
        bounds = [*(segment.start_offset for segment in shown), *(segment.end_offset + 1 for segment in shown[-1:])]
        return ToJudge(tuple(self.gate_bundles), np.array(bounds, np.int64))

    def to_gather(self, sources: AbstractSet[str]) -> list[GatherBundle]:
        """For each bundle that is asked, in their order, and then for those sources whose keys nobody wanted."""
        of_bundle: dict[int, list[ToGather]] = {}
        without: list[ToGather] = []
        for segment in self.live:
            if segment.id in sources:
                place = self.place.get(segment.id)
                (without if place is None else of_bundle.setdefault(place, [])).append(self._known(segment.id))
        found = [GatherBundle(f"{place}", tuple(of_bundle[place]), self.bundles[place]) for place in sorted(of_bundle)]
        together = range(0, len(without), GATHERED_TOGETHER)
        return found + [GatherBundle(f"headers-{n}", tuple(without[n : n + GATHERED_TOGETHER]), None) for n in together]

    @property
    def scratch(self) -> list[str]:
        """Keys of the objects that were written."""
        return [bundle.key for bundle in self.bundles] + [bundle.key for bundle in self.gate_bundles]

    def _known(self, segment_id: str) -> ToGather:
        """Of a segment that was read."""
        indexed = self.found[segment_id]
        _, verdicts, fates = self.folded[segment_id]
        places = indexed.batches, indexed.places
        return ToGather(indexed, SparseVerdicts(*places, verdicts), SparseFates(*places, fates))

    def _again(self, segment: RemoteLogSegmentMetadata) -> ToIndex:
        if segment.id not in self.folded:
            return ToIndex(segment, True)
        known = self._known(segment.id)
        return ToIndex(segment, True, known.verdicts, known.fates)

    def _run(self, steps: TaskSteps, items: Sequence[ToIndex], which: str) -> None:
        row_bytes = ROW_BYTES + (GATE_ROW_BYTES if steps.shared.gate else 0)
        runs = bundled([item.metadata for item in items], steps.cluster.slots, steps.shared.disk_budget_bytes, row_bytes)
        what = f"pass 1, keys of {len(items)} segments{which}, in {len(runs)} bundles"
        for result in steps.each(what, index_bundle, [tuple(reversed(items[begin:end])) for begin, end in runs]):
            self.take(result[1])

    def _fold(self) -> None:
        """The cleaner's fold and the gate's, over the batches that decide; batches of no transaction say nothing to either."""
        sources = list(self._sources())
        both = zip(sources, fold(sources), fates_of(sources, {}), strict=True)
        self.folded = {source.name: (source, verdicts, fates) for source, verdicts, fates in both}

    def _sources(self) -> Iterator[SourceSegment]:
        for ordinal, segment in enumerate(self.live):
            place = (ordinal, segment.id, segment.start_offset, segment.end_offset + 1, segment.mtime_ms)
            found = self.found.get(segment.id)
            if found is None:
                yield stand_in(*place, self.stand_ins[segment.id])
            else:
                yield SourceSegment(*place, NOTHING, found.table, txn_entries=found.txn_entries)
