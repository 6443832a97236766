"""The gate reads the dirty range from its end, and knows there what the whole fold from the beginning says."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from compactor.cleaner.gate.batch_checks import GateFailed, transaction_outcomes_by_source
from compactor.cleaner.gate.gate import CleanedSegmentCheckParameters, Gate
from compactor.cleaner.gate.parser import LatestRecordTable
from compactor.cleaner.offline import open_for_round
from compactor.cleaner.source import SourceSegment
from tests.builders import LZ4, NONE, LogBuilder, log_of
from tests.support.damage import AMPLE, GATE_KEY, Round
from tests.support.depth import examples


def gate_of(round_: Round, *, behind: bool = True) -> tuple[Gate, list[SourceSegment]]:
    """A gate that has read the log, newest segment first; ``behind``: also what lies behind the range."""
    opened = open_for_round(round_.log_dir, round_.request)
    rules = replace(opened.rules, latest_offset=round_.next_dirty_offset - 1)
    gate = Gate(CleanedSegmentCheckParameters(rules, opened.first_dirty, GATE_KEY, 1 << 24), LatestRecordTable(AMPLE, 10_000))
    sources = opened.sources if behind else [source for source in opened.sources if source.base <= rules.latest_offset]
    for source in reversed(sources):
        if gate._terms.has_dirty_offsets(source):
            gate.read_dirty_segment(source)
        elif source.base > rules.latest_offset:
            gate.collect_later_outcomes(source)
    return gate, opened.sources


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


@examples(60)
@given(logs())
def test_gate_knows_outcomes_from_the_end_as_from_the_beginning(made: tuple[LogBuilder, int, int]) -> None:
    log, first_dirty, uncleanable = made
    with tempfile.TemporaryDirectory() as scratch:
        request = {"now_ms": 1_000_000, "first_dirty_offset": first_dirty, "first_uncleanable_offset": uncleanable}
        round_ = Round.of(log.write(Path(scratch) / "log"), Path(scratch) / "out", request)
        gate, sources = gate_of(round_)
        for source, whole in zip(sources, transaction_outcomes_by_source(sources, {}), strict=True):
            if source.ordinal in gate._dirty:
                assert gate._outcomes_of[source.ordinal].aborted.tolist() == whole.aborted.tolist()
        gate.compute_txn_outcomes(sources)
        assert round_.refusal() == ""


def test_gate_refuses_a_fold_that_differs_from_what_it_read_from_the_end(tmp_path: Path) -> None:
    log = log_of("1t: a=1; /; 1 aborts; b=1")
    request = {"now_ms": 1_000_000, "first_uncleanable_offset": 1}
    round_ = Round.of(log.write(tmp_path / "log"), tmp_path / "out", request)
    gate, sources = gate_of(round_)
    gate.compute_txn_outcomes(sources)
    gate, sources = gate_of(round_, behind=False)
    with pytest.raises(GateFailed, match="other aborted batches"):
        gate.compute_txn_outcomes(sources)
