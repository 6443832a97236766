"""Judges a tier that is filled from brokers' directories: at every moment it holds a prefix of one log that a leader had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent
from typing_extensions import override

from checkpoint.offsets import first_dirty_offset_in
from compactor.control.records import PartitionDeleted, SegmentsPrepended, SegmentsTiered, TailTruncated
from compactor.control.state import PartitionState
from compactor.model.ids import TopicPartition
from tests.plain_format import read_batches
from tests.simulation.directories import Directories
from tests.simulation.oracle import Oracle, _id
from tests.simulation.symbolic import NAME, Row, Rows, view
from tests.simulation.world import SimStore, World


@dataclass(frozen=True)
class Source:
    """What an import reads from. ``present``: offset -> number of what is there now. ``start``: nothing lies below it.

    ``version`` changes with every change. ``staged``: offset -> number of what is staged for deletion before it and must be taken, where
    a live log is read. ``cleaned``: end of what its own cleaner has cleaned. ``lost``: what a tier lacks because retention
    had taken it from its own source. ``active``: first offset of the newest segment.
    ``inherited``: keys with values that the log does not give them, where the source is a tier.
    """

    present: Mapping[int, int]
    start: int
    version: object
    staged: Mapping[int, int] = field(default_factory=dict)
    cleaned: int = 0
    lost: frozenset[int] = frozenset()
    active: int = 2**63 - 1
    inherited: frozenset[tuple[str, int]] = frozenset()

    def must_give(self, seam: int) -> int:
        """The offset up to which staged records must come in where they are missing from ``seam`` on."""
        return max(self.staged) + 1 if seam in self.staged and self.cleaned <= seam else 0


@dataclass
class Attempt:
    """One import under way: its source as it was when it began, what it was allowed, and whether it has cut the tier.

    disturbed: somebody else has changed the tier since it was cut.
    seen: the source as it was at each change since.
    """

    began: Source
    now: Callable[[], Source]
    gaps: bool
    cut: bool = False
    disturbed: bool = False
    seen: list[Source] = field(default_factory=list)

    @property
    def sources(self) -> list[Source]:
        """The source at each moment of the import."""
        return [self.began, *self.seen, self.now()]

    def lacked(self, offset: int, number: int = 0) -> bool:
        """Whether the source was without this offset at some time, or without this record."""
        found = {source.present.get(offset, -1) for source in self.sources}
        return -1 in found or bool(number and found != {number})

    def must_give(self, seam: int) -> int:
        """Like ``Source.must_give``, if the source has not changed meanwhile."""
        return self.began.must_give(seam) if self.began.version == self.now().version else 0

    def retained_away(self, offset: int) -> bool:
        """Whether the source began behind this offset at some time, or had lost it."""
        return any(offset < source.start or offset in source.lost for source in self.sources)

    def cleaned_away(self, offset: int) -> bool:
        """Whether the source had cleaned this offset at some time: its log began at or before it, and went on behind it."""
        return any(
            source.start <= offset < max(source.present, default=0) and offset not in {*source.present, *source.lost}
            for source in self.sources
        )


class WayInWorld:
    """The world as one tier's judge sees it: with that tier's stores."""

    def __init__(self, world: World, control: SimStore, data: SimStore) -> None:
        self.world = world
        self.control = control
        self.data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)


class WayInOracle(Oracle):
    """The judge of a tier that is filled from directories, or from a tier that is.

    rows: what came into the tier and was not cut since.
    absent: offset -> number of records that the sources did not have, because they had cleaned them or because retention had taken
        them. They stay absent, also where a later import reads a source that has them.
    lost: those that retention had taken.
    from_cleaned: whether the first source had removed records.
    inherited: keys with values that the log has deleted or replaced, where the first source had them as well: a replica that was away while
        tombstones were cleaned, say. A tier may be filled from it, for lack of a better one.
    """

    def __init__(self, world: World, control: SimStore, data: SimStore, brokers: Directories, name: TopicPartition = NAME) -> None:
        super().__init__(WayInWorld(world, control, data), [], name)  # type: ignore[arg-type]
        self.brokers = brokers
        self.lost: set[int] = set()
        self.absent: dict[int, int] = {}
        self.trailing: set[int] = set()
        """Offsets that a segment covers after its last record, and that its source did not have."""
        self.attempts: dict[Any, Attempt] = {}
        self.ended: list[Attempt] = []
        """Imports that have ended. What one that crashed has written last may land later."""
        self.deletions = 0
        self.from_cleaned = False
        self.inherited: set[tuple[str, int]] = set()
        self.readers: list[Attempt] = []
        """Transfers that read from this tier."""

    def source(self) -> Source:
        """The tier as the source of a transfer."""
        rows = [row for segment in self.state.live for row in self.contents[segment.id]]
        start = self.state.start_offset if self.state.live else 0
        return Source(
            {row[0]: number(row) for row in rows}, start, self.state.slot, lost=frozenset(self.lost), inherited=frozenset(self.inherited)
        )

    @override
    def data_created(self, key: str, data: bytes) -> None:
        if key.startswith(f"{self.name}/") and key.endswith(".log"):
            name = _id(key)
            if self.bytes.setdefault(name, data) != data:
                self.world.violate(f"{key} was created with other bytes than before")
            self.contents[name] = decode(data)

    @override
    def check_step(self, before: PartitionState, record: Any) -> None:
        body = record.body
        for thread, attempt in self.attempts.items():
            attempt.disturbed |= attempt.cut and thread is not getcurrent()
        if isinstance(body, TailTruncated):
            self.cut(before, body)
        elif isinstance(body, SegmentsTiered | SegmentsPrepended):
            self.came(before, body)
        elif isinstance(body, PartitionDeleted):
            self.rows, self.lost, self.absent, self.inherited, self.from_cleaned = [], set(), {}, set(), False
            self.deletions += 1
        else:
            super().check_step(before, record)
        for reader in self.readers:
            reader.seen.append(self.source())

    def came(self, before: PartitionState, body: Any, held: list[Row] | None = None) -> None:
        """Segments came in: of one log with what was there, without a hole that its source did not have."""
        held = self.rows if held is None else held
        super().arrived(body.segments)
        new = [row for segment in body.segments for row in self.contents[segment.id]]
        rows = sorted([*held, *new])
        self.rows = rows
        self.lost -= {row[0] for row in new}
        if not rows:
            return
        chain = self.brokers.chain(number(rows[-1]))
        foreign = next((row for row in rows if chain.get(row[0]) != number(row)), None)
        if foreign is not None:
            self.world.violate(f"offset {foreign[0]} and offset {rows[-1][0]} are of different logs")
            return
        first, last = body.segments[0].start_offset, body.segments[-1].end_offset
        first = min(first, held[-1][0] + 1) if held and held[-1][0] < first else first
        here = {row[0] for row in new}
        missing = {offset: chain[offset] for offset in chain if first <= offset <= last and offset not in here}
        self.passed_over(missing, {number(row) for row in new}, empty=not held)
        mine = self.attempts.get(getcurrent())
        if mine and not isinstance(body, SegmentsPrepended):
            seam = body.segments[0].start_offset if held else min(mine.began.staged, default=0)
            if seam < mine.must_give(seam) and seam not in here:
                self.world.violate(f"offset {seam} was passed over, and its source has it staged for deletion")
                return
        if mine and rows[-1][0] < last:
            self.trailing |= {offset for offset in range(rows[-1][0] + 1, last + 1) if mine.lacked(offset)}
        if mine and not held:
            self.from_cleaned = any(mine.began.start <= offset and offset not in mine.began.present for offset in chain)
        self.check_values(rows, chain, self.values_inherited_from(mine, is_first=not held) if mine else set())

    def values_inherited_from(self, attempt: Attempt, *, is_first: bool) -> set[tuple[str, int]]:
        """The values that the source has, if all of the tier is the source's: nothing was in the tier, or it is the same cleaned log's."""
        live = {row[0] for segment in self.state.live for row in self.contents[segment.id]}
        found = {pair for source in attempt.sources for pair in source.inherited}
        for source in attempt.sources:
            if is_first or (self.from_cleaned and live <= source.present.keys()):
                found |= view([self.brokers.row(source.present[offset]) for offset in sorted(source.present)]).items()
        return found

    def passed_over(self, missing: dict[int, int], new: set[int], *, empty: bool) -> None:
        """Offsets that did not come in: their source did not have them."""
        mine = self.attempts.get(getcurrent())
        everyone = [*self.attempts.values(), *self.ended]
        candidates = [mine] if mine else [each for each in everyone if new <= {*each.began.present.values(), *each.began.staged.values()}]
        for offset in sorted(missing):
            if self.absent.get(offset) == missing[offset]:
                continue
            if offset in self.trailing:
                self.absent[offset] = missing[offset]
                continue
            if not any(attempt.lacked(offset) for attempt in candidates):
                self.world.violate(f"offset {offset} was passed over, and its source has it")
                return
            self.absent[offset] = missing[offset]
            if any(attempt.retained_away(offset) for attempt in candidates):
                if not empty and not any(attempt.gaps or attempt.cleaned_away(offset) for attempt in candidates):
                    self.world.violate(f"offset {offset} was passed over without --allow-gaps")
                    return
                self.lost.add(offset)

    def check_values(self, rows: list[Row], chain: Mapping[int, int], given: set[tuple[str, int]]) -> None:
        """Whatever sources had cleaned: each key has its last value.

        :param given: values that a key may have instead, from here on.
        """
        covered = [offset for offset in sorted(chain) if rows[0][0] <= offset <= rows[-1][0] and offset not in self.lost]
        logged = [self.brokers.row(chain[offset]) for offset in covered]
        wanted, found = view(logged), view(rows)
        met = {row[1] for row in rows}
        wrong = {key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key) and key in met}
        self.inherited |= {pair for pair in found.items() if pair[0] in wrong and pair in given}
        if wrong := {key for key in wrong if (key, found.get(key, -1)) not in self.inherited}:
            key = min(wrong)
            self.world.violate(f"key {key} is {found.get(key)} in the tier, and {wanted.get(key)} in the log up to {rows[-1][0]}")

    def cut(self, before: PartitionState, body: TailTruncated) -> None:
        """What a leader has discarded leaves the tier."""
        self.truncated += 1
        self.trailing = {offset for offset in self.trailing if offset < body.offset}
        self.absent = {offset: number for offset, number in self.absent.items() if offset < body.offset}
        attempt = self.attempts.get(getcurrent())
        if attempt:
            attempt.cut = True
            stay = {number(row) for segment in body.segments for row in self.contents[segment.id]}
            same = (row for row in self.rows if row[0] >= body.offset and not attempt.lacked(row[0], number(row)))
            if (wrong := next((row for row in same if number(row) not in stay), None)) is not None:
                self.world.violate(f"offset {wrong[0]} was cut, and its source has it")
        if first_dirty_offset_in(before.vector) > body.offset and body.accept_loss:
            gone = {segment.id for segment in body.segments}
            live = [row for segment in self.state.live if segment.id not in gone for row in self.contents[segment.id]]
            self.rows = [row for row in live if row[0] < body.offset]
        else:
            self.rows = [row for row in self.rows if row[0] < body.offset]
        if self.rows:
            chain = self.brokers.chain(number(self.rows[-1]))
            self.lost = {offset for offset in chain if offset not in {row[0] for row in self.rows}}
        else:
            self.lost = set()
        if first_dirty_offset_in(self.state.vector) > body.offset:
            self.world.violate("offsets that the broker has discarded count as clean")
        if body.segments:
            self.came(before, body, self.rows)


def number(row: Row) -> int:
    """The record's number, where symbolic rows have a horizon."""
    assert row[3] is not None
    return row[3]


def decode(data: bytes) -> Rows:
    """The records of a segment."""
    rows: Iterable[Row] = (
        (record.offset, (record.key or b"").decode(), None if record.value is None else int(record.value), record.timestamp)
        for one in read_batches(data)
        for record in one.records
    )
    return tuple(rows)
