"""The log start against a model that knows offsets only: sets of segments, written without any of the product's rules.

Random histories of imports at both ends and raises, sound and unsound, are folded. After each
record the fold must show the model's segments and log start, and refuse exactly the raises that the model calls unsound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, strategies as st

from compactor.constants import CompactorEpoch, Offset
from compactor.control import fold, ordering, records
from compactor.control.state import PartitionState
from compactor.model.segment import CountAndDigestSum, RemoteLogSegmentMetadata
from tests.support.depth import examples
from tests.support.segments import make_segment

Span = tuple[int, int]


@dataclass
class Model:
    """A log as spans of offsets, both ends inclusive. ``gone``: spans that were removed from the front, in order."""

    spans: dict[str, Span] = field(default_factory=dict)
    start: int | None = None
    gone: list[str] = field(default_factory=list)

    @property
    def end(self) -> int:
        return max((last for _, last in self.spans.values()), default=-1)

    @property
    def log_start(self) -> int:
        return max(min(first for first, _ in self.spans.values()), self.start or 0)

    def is_sound(self, offset: int, named: frozenset[str], leads: bool) -> bool:
        """Whether a raise with these ids counts, said once more in other words than the product's."""
        if not self.spans or not leads:
            return False
        newest = max(self.spans, key=lambda name: self.spans[name])
        below = {name for name, (_, last) in self.spans.items() if last + 1 <= offset} - {newest}
        if named != below:
            return False
        return (self.log_start < offset <= self.end + 1) or (offset == self.log_start and len(below) > 0)

    def raised(self, offset: int, named: frozenset[str]) -> None:
        self.gone += sorted(named, key=lambda name: self.spans[name])
        self.spans = {name: span for name, span in self.spans.items() if name not in named}
        self.start = offset


def segment(name: str, span: Span) -> RemoteLogSegmentMetadata:
    return make_segment(name, *span, size=1, at_ms=-1, content=CountAndDigestSum.from_digest_halves(1, *span))


class History:
    """Folds records and moves the model along."""

    def __init__(self) -> None:
        self.state = PartitionState(topic="t", partition=0)
        self.model = Model()
        self.made = 0
        self.append(records.LeadershipAcquired(leader_epoch=CompactorEpoch(0), holder="me", ttl_ms=1))

    def append(self, body: Any) -> bool:
        """Fold one record; return whether it counts."""
        slot, fenced = self.state.slot + 1, len(self.state.fenced)
        record = records.PartitionRecord(version=records.VERSION, log="t-0", slot=slot, incarnation="me", attempt=slot, at_ms=0, body=body)
        self.state = fold.apply_partition_record(self.state, record, ordering.find_rule_violation)
        return len(self.state.fenced) == fenced

    def import_one(self, length: int) -> None:
        self.made += 1
        first = self.model.end + 1 if self.model.spans else 10
        name, span = f"s{self.made:03d}", (first, first + length - 1)
        assert self.append(records.SegmentIdsRegistered(import_id=name, ids=(name,), holder="me"))
        assert self.append(records.SegmentsTiered(import_id=name, segments=(segment(name, span),)))
        self.model.spans[name] = span

    def prepend(self, before: int) -> None:
        """Registered before or after a raise: it never counts once the log start was raised."""
        self.made += 1
        name = f"p{self.made:03d}"
        self.append(records.SegmentIdsRegistered(import_id=name, ids=(name,), holder="me"))
        if not self.model.spans:
            return
        first = min(first for first, _ in self.model.spans.values())
        if first == 0:
            return
        span = (max(0, first - before), first - 1)
        counts = self.append(records.SegmentsPrepended(import_id=name, segments=(segment(name, span),)))
        assert counts == (self.model.start is None)
        if counts:
            self.model.spans[name] = span

    def raise_to(self, percent: int, wrong: str, drawn: int) -> None:
        if not self.model.spans:
            return
        low = self.model.log_start
        offset = low + round((self.model.end + 1 - low) * percent / 100)
        newest = max(self.model.spans, key=lambda name: self.model.spans[name])
        named = {name for name, (_, last) in self.model.spans.items() if last < offset and name != newest}
        if wrong == "lower":
            offset = low - 1 - drawn % 3
        elif wrong == "higher":
            offset = self.model.end + 2 + drawn % 3
        elif wrong == "more":
            named |= {sorted(self.model.spans)[drawn % len(self.model.spans)]}
        elif wrong == "fewer" and named:
            named -= {sorted(named)[drawn % len(named)]}
        ordered = sorted(named, key=lambda name: self.model.spans[name])
        removed = CountAndDigestSum()
        content = CountAndDigestSum()
        for name, (first, last) in self.model.spans.items():
            one = CountAndDigestSum.from_digest_halves(1, first, last)
            removed, content = (removed.plus(one), content) if name in named else (removed, content.plus(one))
        epoch = 1 if wrong == "epoch" else 0
        sound = self.model.is_sound(offset, frozenset(named), leads=epoch == 0)
        body = records.LogStartRaised(
            leader_epoch=CompactorEpoch(epoch), offset=Offset(offset), ids=tuple(ordered), removed=removed, content=content
        )
        assert self.append(body) == sound, (offset, ordered, self.model)
        if sound:
            self.model.raised(offset, frozenset(named))

    def check(self) -> None:
        assert {one.id: (one.start_offset, one.end_offset) for one in self.state.live} == self.model.spans
        assert self.state.log_start_offset == self.model.start
        waiting = [one.id for group in self.state.waiting for one in group.segments]
        assert waiting == self.model.gone
        if self.model.spans:
            assert self.state.log_start == self.model.log_start <= self.state.end_offset + 1
            assert self.state.end_offset == self.model.end


steps = st.one_of(
    st.tuples(st.just("import"), st.integers(1, 4)),
    st.tuples(st.just("prepend"), st.integers(1, 4)),
    st.tuples(
        st.just("raise"), st.integers(0, 100), st.sampled_from(["", "", "", "lower", "higher", "more", "fewer", "epoch"]), st.integers(0, 9)
    ),
)


@examples(200)
@given(st.lists(steps, max_size=14))
def test_the_fold_raises_the_log_start_as_a_model_of_offsets_does(drawn: list[tuple[object, ...]]) -> None:
    history = History()
    for kind, *arguments in drawn:
        {"import": history.import_one, "prepend": history.prepend, "raise": history.raise_to}[str(kind)](*arguments)  # type: ignore[operator]
        history.check()
