"""Hypothesis writes logs, and damages what the cleaner made of them: no single change gets past the equivalence gate."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import assume, given, strategies as st

from compactor.errors import BadData, UsageError
from tests.plain_format import Batch, Record
from tests.property.test_cleaner_matches_naive import logs, requests
from tests.support.damage import AMPLE, TINY, Round, changed, settled
from tests.support.depth import examples

FIELDS = ("leader_epoch", "base_timestamp", "max_timestamp", "producer_id", "producer_epoch", "base_sequence", "last_offset", "base_offset")
Damage = Callable[[st.DrawFn, list[Batch], Round], list[Batch]]


def _with(batches: list[Batch], number: int, batch: Batch) -> list[Batch]:
    return [*batches[:number], batch, *batches[number + 1 :]]


def _pick(draw: st.DrawFn, batches: list[Batch], fits: Callable[[Batch], bool]) -> int:
    found = [number for number, batch in enumerate(batches) if batch.magic == 2 and fits(batch)]
    assume(found)
    return draw(st.sampled_from(found))


def drop_record(draw: st.DrawFn, batches: list[Batch], _: Round) -> list[Batch]:
    number = _pick(draw, batches, lambda batch: batch.count > 0)
    records = list(batches[number].records)
    del records[draw(st.integers(0, len(records) - 1))]
    return _with(batches, number, settled(batches[number], records))


def change_record(draw: st.DrawFn, batches: list[Batch], _: Round) -> list[Batch]:
    number = _pick(draw, batches, lambda batch: batch.count > 0)
    records = list(batches[number].records)
    at = draw(st.integers(0, len(records) - 1))
    old = records[at]
    new = draw(
        st.sampled_from([
            old._replace(value=None if old.value is not None else b""),
            old._replace(value=(old.value or b"") + b"!"),
            old._replace(key=(old.key or b"") + b"!"),
            old._replace(headers=(*old.headers, (b"more", None))),
            old._replace(headers=old.headers[:-1]),
            old._replace(timestamp=old.timestamp + 1),
            old._replace(offset=old.offset + 1),
            old._replace(offset=old.offset - 1),
        ])
    )  # fmt: skip
    assume(new != old and not (batches[number].append_time and new.timestamp != old.timestamp))
    records[at] = new
    return _with(batches, number, settled(batches[number], records))


def bring_back(draw: st.DrawFn, batches: list[Batch], cleaned: Round) -> list[Batch]:
    """A record of a source, that went, in the batch that it came in."""
    sources = {batch.last_offset: batch for batch in cleaned.sources()}
    here = {batch.last_offset: {record.offset for record in batch.records} for batch in batches}
    gone = [
        (last, record) for last, there in here.items() if last in sources for record in sources[last].records if record.offset not in there
    ]
    assume(gone)
    last, record = draw(st.sampled_from(gone))
    number = next(number for number, batch in enumerate(batches) if batch.last_offset == last)
    return _with(batches, number, settled(batches[number], _ordered([*batches[number].records, record])))


def invent_record(draw: st.DrawFn, batches: list[Batch], _: Round) -> list[Batch]:
    number = _pick(draw, batches, lambda batch: not batch.control)
    batch = batches[number]
    there = {record.offset for record in batch.records}
    free = [offset for offset in range(batch.base_offset, min(batch.last_offset, batch.base_offset + 50) + 1) if offset not in there]
    assume(free)
    made = Record(draw(st.sampled_from(free)), 1_000, draw(st.sampled_from([b"a", b"new"])), b"1")
    return _with(batches, number, settled(batch, _ordered([*batch.records, made])))


def change_header(draw: st.DrawFn, batches: list[Batch], _: Round) -> list[Batch]:
    number = _pick(draw, batches, lambda batch: True)
    field = draw(st.sampled_from(FIELDS))
    value = getattr(batches[number], field) + draw(st.sampled_from([1, -1]))
    assume(field not in ("last_offset", "base_offset") or value >= 0)
    return _with(batches, number, changed(batches[number], **{field: value}))


def change_attributes(draw: st.DrawFn, batches: list[Batch], _: Round) -> list[Batch]:
    number = _pick(draw, batches, lambda batch: True)
    return _with(batches, number, changed(batches[number], attributes=batches[number].attributes ^ draw(st.sampled_from([8, 16, 32, 64]))))


def drop_batch(draw: st.DrawFn, batches: list[Batch], _: Round) -> list[Batch]:
    number = draw(st.integers(0, len(batches) - 1))
    return batches[:number] + batches[number + 1 :]


def repeat_batch(draw: st.DrawFn, batches: list[Batch], _: Round) -> list[Batch]:
    number = draw(st.integers(0, len(batches) - 1))
    return batches[: number + 1] + batches[number:]


def exchange_batches(draw: st.DrawFn, batches: list[Batch], _: Round) -> list[Batch]:
    assume(len(batches) > 1)
    number = draw(st.integers(0, len(batches) - 2))
    return [*batches[:number], batches[number + 1], batches[number], *batches[number + 2 :]]


def empty_batch(draw: st.DrawFn, batches: list[Batch], _: Round) -> list[Batch]:
    """As the cleaner leaves a producer's last one."""
    number = _pick(draw, batches, lambda batch: batch.count > 0)
    batch = batches[number]
    return _with(batches, number, changed(batch, [], base_timestamp=-1, attributes=batch.attributes & 0x38))


DAMAGES: tuple[Damage, ...] = (
    drop_record, drop_record, change_record, change_record, change_record, bring_back, bring_back, bring_back, invent_record, change_header,
    change_header, change_attributes, drop_batch, repeat_batch, exchange_batches, empty_batch,
)  # fmt: skip


def _ordered(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.offset)


@st.composite
def damages(draw: st.DrawFn, cleaned: Round) -> str:
    """Damages one segment; says how."""
    segments = {base: batches for base, batches in cleaned.outputs().items() if batches}
    assume(segments)
    base = draw(st.sampled_from(sorted(segments)))
    damage = draw(st.sampled_from(DAMAGES))
    cleaned.put(base, damage(draw, segments[base], cleaned))
    return damage.__name__


@examples(600)
@given(st.data())
def test_no_single_change_gets_past_the_gate(data: st.DataObject) -> None:
    log = data.draw(logs())
    request = data.draw(requests(log))
    with tempfile.TemporaryDirectory() as name:
        folder = log.write(Path(name) / "log")
        try:
            cleaned = Round.of(folder, Path(name) / "out", request)
        except (BadData, UsageError):
            assume(False)
        budget = data.draw(st.sampled_from([AMPLE, AMPLE, TINY]))
        assert cleaned.refusal(budget_bytes=budget) == ""
        done = data.draw(damages(cleaned))
        assert cleaned.refusal(budget_bytes=budget) != "", done
