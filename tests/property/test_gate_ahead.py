"""The gate that reads the dirty range from its end says what the one says that knows the whole fold from the beginning."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compactor.cleaner.gate.ahead import GateAhead
from compactor.cleaner.gate.judge import GateFailed, GateReport, GateTerms
from compactor.cleaner.gate.ranges import LastRecords
from compactor.cleaner.offline import open_round
from compactor.cleaner.passes.grouping import group
from tests.builders import LZ4, NONE, LogBuilder
from tests.support.damage import AMPLE, GATE_KEY, Round, open_spool, settled


def judged(round_: Round, *, behind: bool = True) -> list[GateReport]:
    """As Round.judged, newest segment first; ``behind``: it is told what lies behind the range."""
    opened = open_round(round_.log_dir, round_.request)
    rules = replace(opened.rules, latest_offset=round_.next_dirty_offset - 1)
    keys = LastRecords(AMPLE, 10_000, open_spool(round_.out_dir.with_suffix(".gate")))
    gate = GateAhead(GateTerms(rules, opened.first_dirty, GATE_KEY, 1 << 24), keys)
    for source in reversed(opened.sources):
        if source.base > rules.latest_offset:
            if behind:
                gate.behind(source)
        elif source.end > opened.first_dirty and opened.first_dirty <= rules.latest_offset:
            gate.read(source)
    gate.settle(opened.sources)
    inputs = [source for source in opened.sources if source.base < round_.next_dirty_offset]
    groups = group(inputs, round_.request.segment_bytes, round_.request.segment_index_bytes, opened.upper)
    return [gate.gate.check(members, round_.paths(members[0].base), end_offset=None) for members in groups]


@st.composite
def logs(draw: st.DrawFn) -> tuple[LogBuilder, int, int]:
    """A log whose transactions reach over segments; first dirty and first uncleanable offset."""
    log = LogBuilder()
    open_: set[int] = set()
    for number in range(draw(st.integers(2, 5))):
        if number:
            log.roll()
        for _ in range(draw(st.integers(1, 5))):
            pid = draw(st.sampled_from([-1, 1, 2]))
            if pid > 0 and draw(st.booleans()):
                log.end(pid, commit=draw(st.booleans()))
                open_.discard(pid)
            else:
                some = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8))
                log.put(
                    *(f"k{key}" + ("" if key % 7 == 0 else f"={log.time}") for key in some),
                    pid=pid,
                    txn=pid > 0,
                    codec=draw(st.sampled_from([NONE, LZ4])),
                )
                open_.update({pid} if pid > 0 else ())
    log.roll()
    for pid in sorted(open_):
        log.end(pid, commit=draw(st.booleans()))
    log.put("last=1")
    bases = [base for base, _ in log.segments]
    uncleanable = draw(st.sampled_from([*bases[1:], log.next_offset]))
    return log, draw(st.sampled_from([base for base in bases if base < uncleanable])), uncleanable


@settings(max_examples=60)
@given(logs())
def test_both_gates_say_the_same(made: tuple[LogBuilder, int, int]) -> None:
    log, first_dirty, uncleanable = made
    with tempfile.TemporaryDirectory() as scratch:
        request = {"now_ms": 1_000_000, "first_dirty_offset": first_dirty, "first_uncleanable_offset": uncleanable}
        round_ = Round.of(log.write(Path(scratch) / "log"), Path(scratch) / "out", request)
        assert judged(round_) == round_.judged()


def test_a_lost_record_is_noticed(tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a=1", "b=1")
    log.put("a=2", "c=1")
    round_ = Round.of(log.write(tmp_path / "log"), tmp_path / "out", {"now_ms": 1_000_000})
    assert judged(round_)
    round_.change(lambda batches: [settled(each, [r for r in each.records if r.key != b"c"]) for each in batches])
    with pytest.raises(GateFailed, match="the last record of a key is gone"):
        judged(round_)


def test_who_does_not_tell_it_what_lies_behind_is_noticed(tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a=1", pid=1, txn=True)
    log.roll()
    log.abort(1)
    log.put("b=1")
    request = {"now_ms": 1_000_000, "first_uncleanable_offset": 1}
    round_ = Round.of(log.write(tmp_path / "log"), tmp_path / "out", request)
    assert judged(round_)
    with pytest.raises(GateFailed, match="other aborted batches"):
        judged(round_, behind=False)
