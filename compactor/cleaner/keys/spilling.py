"""Pass 1 that never runs out of memory: a set of keys while they fit, rows on local disk from then on.

The answers are those of BackwardSurvivors, record by record. What the set has answered stays answered; its keys go to the disk before
the rows that come after them. Rows below the dirty range are looked up by reading them in pass 1 too, as no set of all keys is left.

Bits of all segments lie behind each other in the order of the scan, and a row's place there is its ordinal on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from compactor.cleaner.keys.buckets import SEEN, KeyBuckets
from compactor.cleaner.keys.keysets import LEAST_BYTES, KeySet
from compactor.cleaner.keys.survivors import BackwardSurvivors, Hashed, Hashes, PassOne, SegmentBits
from compactor.cleaner.passes.lanes import Lane, Lanes
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Flags
from compactor.errors import CompactorError, OutOfBudget
from compactor.records.batches import Int64s
from compactor.records.rows import Chunk, Rows

OpenBuckets = Callable[[int, int], KeyBuckets]
"""(part, parts) -> an empty engine on disk."""


class SpillingSurvivors(BackwardSurvivors):
    """Answers once ``finish`` has been called for every part.

        for part in range(parts):
            scan ...         # dirty segments in descending order
            (keys)           # what filters are asked about
            scan_clean ...   # segments below, in any order, that have rows to look up
            finish()

    :param keys: the set to begin with; None: on disk from the first row. With several parts always None.
    :param open_buckets: told (part, parts).
    """

    def __init__(self, one: PassOne, keys: KeySet | None, open_buckets: OpenBuckets, parts: int = 1) -> None:
        super().__init__(one, keys or KeySet(LEAST_BYTES))
        self._open = open_buckets
        self._part, self._parts = 0, parts
        self._buckets = open_buckets(0, parts) if keys is None else None
        self._next = 0
        self._places: dict[int, int] = {}
        self._clean: dict[int, SegmentBits] = {}
        self._clean_places: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}
        self._entries = 0
        self._peak = 0
        self.met: set[int] = set()
        """Ordinals of segments of which pass 2 has found a superseded record below the dirty range."""

    @property
    def keys(self) -> int:
        return self._entries or self._set.entries

    @property
    def peak_bytes(self) -> int:
        return max(self._peak, self._set.peak_bytes)

    @property
    def one(self) -> PassOne:
        return self._one

    @property
    def on_disk(self) -> bool:
        """Whether rows of this part are there: then what lies below the dirty range must be looked up now."""
        return self._buckets is not None

    @property
    def spilled(self) -> bool:
        """Whether the disk was needed."""
        return self._buckets is not None or self._entries > 0

    def scan(self, source: SourceSegment, wanted: Flags, lanes: Lanes, *, ahead: bool = True) -> None:
        before = self._bits.pop(source.ordinal, None)
        self._places[source.ordinal] = self._next
        super().scan(source, wanted, lanes, ahead=ahead)
        if before is not None:  # an earlier part of the keys has begun these bits, in the same places
            self._bits[source.ordinal] = before

    def _first_seen(self, hashed: Hashed) -> tuple[Flags, bool]:
        rows = int(hashed.first_row[-1])
        place = self._take(rows)
        survives = np.zeros(rows, np.bool_)
        done = 0
        if self._buckets is None:
            seen = np.zeros(len(hashed.hashes), np.bool_)
            done = self._set.insert_if_absent(hashed.hashes, seen)
            survives[hashed.picked[:done]] = seen[:done]
            if done == len(hashed.hashes):
                return survives, True
            self._spill()
        self._disk.add(hashed.hashes[done:], (place + hashed.picked[done:]).astype(np.uint32))
        return survives, False

    def dirty_keys(self) -> Iterator[Hashes]:
        """The keys of the dirty range, as far as this part has them; repeated ones too."""
        return self._set.held() if self._buckets is None else self._buckets.dirty_keys()

    def scan_clean(self, source: SourceSegment, wanted: Flags, lanes: Lanes) -> None:
        """Reads the rows of a segment that lie below the dirty range; ``wanted``: batches that may have some. Raises BadData, OutOfBudget.

        While the set has all keys only a witness has something to do here.
        """
        one = self._one
        if one.witness is not None and one.witness.on_disk:
            one.witness.begin(source)
        elif self._buckets is None:
            return
        bits = SegmentBits(len(source.table))
        begins = self._next
        added: list[npt.NDArray[np.uint8]] = []

        def read(lane: Lane, job: tuple[int, int]) -> list[Hashed]:
            first, last = job
            return one.hashed(lane, source, first, last, wanted[first:last], backwards=False, below=True)

        for pieces in lanes.run(read, [(first, last) for first, last in source.ranges() if wanted[first:last].any()]):
            for piece in pieces:
                if one.witness is not None and piece.looked is not None:
                    one.witness.note(source, piece.looked)
                if self._buckets is None:
                    continue
                rows = int(piece.first_row[-1])
                place = self._take(rows)
                self._disk.add_clean(piece.hashes, (place + piece.picked).astype(np.uint32))
                bits.add(piece, np.ones(rows, np.bool_), one.first_dirty, source, final=False)
                mine = np.zeros(rows, np.bool_)
                mine[piece.picked[self._disk.takes(piece.hashes)]] = True
                added.append(np.packbits(mine))
        if self._buckets is None:
            return
        bits.close()
        self._clean.setdefault(source.ordinal, bits)
        self._clean_places[source.ordinal] = (begins, np.concatenate(added) if added else np.empty(0, np.uint8))

    def finish(self) -> None:
        """Ends a part. Raises OutOfBudget."""
        if self._one.witness is not None and not self._one.witness.sees_again:
            self._one = replace(self._one, witness=None)  # it has seen all there is
        if self._buckets is None:
            return
        with self._disk as buckets:
            found = buckets.finish(8 * self._next)
            self._entries += buckets.entries
            self._peak = max(self._peak, buckets.peak_bytes)
        for ordinal, place in self._places.items():
            packed = self._bits[ordinal].packed
            packed |= found[place : place + len(packed)]
        for ordinal, (place, mine) in self._clean_places.items():
            packed = self._clean[ordinal].packed
            packed &= ~(mine & ~found[place : place + len(mine)])
        self._next = 0
        self._clean_places = {}
        self._part += 1
        self._buckets = self._open(self._part, self._parts) if self._part < self._parts else None

    def close(self) -> None:
        """Gives the disk back where ``finish`` was not reached."""
        if self._buckets is not None:
            self._buckets.close()

    def forget(self) -> None:
        """Nobody looks up a key any more."""
        self._entries, self._peak = self.keys, self.peak_bytes
        self._set = KeySet(LEAST_BYTES)

    def _met(self, source: SourceSegment, chunk: Chunk, rows: Rows, first_row: Int64s, below: Int64s) -> Flags:
        if not self.spilled:
            found = super()._met(source, chunk, rows, first_row, below)
        elif source.ordinal in self._clean:
            found = self._clean[source.ordinal].superseded(chunk, first_row)[below]
        else:
            return np.zeros(len(below), np.bool_)  # nobody had a reason to look them up: its filter met no key
        if found.any():
            self.met.add(source.ordinal)
        return found

    @property
    def _disk(self) -> KeyBuckets:
        if self._buckets is None:
            raise CompactorError("the disk is asked before it was needed", hint="This is a bug; please report it")
        return self._buckets

    def _take(self, rows: int) -> int:
        """Room for the bits of a chunk; returns the place of its first one."""
        place = 8 * self._next
        self._next += (rows + 7) // 8
        if 8 * self._next >= SEEN:
            raise OutOfBudget(
                f"one round over more than {SEEN - 1} records", hint="Clean a part of them first: raise min_compaction_lag_ms for one round"
            )
        return place

    def _spill(self) -> None:
        self._buckets = self._open(0, 1)
        for keys in self._set.held():
            self._buckets.add_seen(keys)
        self._peak = self._set.peak_bytes
        self._set = KeySet(LEAST_BYTES)
