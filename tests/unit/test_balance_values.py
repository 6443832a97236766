"""The balance as a value, and what the driver makes of receipts with and without one."""

from __future__ import annotations

import pytest

from compactor.constants import CompactorEpoch, Offset, TimestampMs
from compactor.control import publication
from compactor.control.state import PartitionState, RoundIntent, sum_batch_digests
from compactor.model.plan import CleanerPolicy, CompactionPlan, CompactionReceipt, CompactionTask, Replacement
from compactor.model.segment import Balance, CountAndDigestSum, total_digest_sum
from tests.support.crafted import LINEAGE, segment

ONE, TWO = CountAndDigestSum.from_digest_halves(1, 2**64 - 1, 5), CountAndDigestSum.from_digest_halves(2, 3, 2**64 - 2)
BALANCE = Balance(
    sources=total_digest_sum((ONE, TWO)),
    left=ONE,
    opened=TWO,
    result=ONE,
    records=TWO,
    written=ONE,
    records_dropped={"superseded": CountAndDigestSum.from_digest_halves(1, 4, 2**64 - 7)},
)


def test_sums_depend_on_no_order_and_wrap_around() -> None:
    assert ONE.plus(TWO) == TWO.plus(ONE) == CountAndDigestSum.from_digest_halves(3, 2, 3)
    assert total_digest_sum(()) == CountAndDigestSum()


def test_a_balance_adds_up_alone_and_with_others() -> None:
    assert BALANCE.imbalance_problem() == ""
    assert BALANCE.plus(BALANCE).imbalance_problem() == ""
    assert BALANCE.plus(Balance()) == BALANCE


@pytest.mark.parametrize("field", ["sources", "left", "opened", "records", "written"])
def test_a_digest_or_a_count_that_is_off_is_a_problem(field: str) -> None:
    right: CountAndDigestSum = getattr(BALANCE, field)
    for wrong in (
        right.plus(CountAndDigestSum.from_digest_halves(1, 0, 0)),
        right.plus(CountAndDigestSum.from_digest_halves(0, 1, 0)),
        right.plus(CountAndDigestSum.from_digest_halves(0, 0, 1)),
    ):
        assert BALANCE.model_copy(update={field: wrong}).imbalance_problem() != ""


def announced(
    balance: Balance | None, *, recorded: CountAndDigestSum | None, result: CountAndDigestSum | None
) -> tuple[PartitionState, RoundIntent]:
    """One group of one segment, with a receipt. ``recorded``: of the source when it was written, ``result``: by the new metadata."""
    source, made = segment("S" * 22, 0, 9), segment("N" * 22, 0, 9)
    task = CompactionTask(
        group=0,
        sources=(source.id,),
        new_segment_id=made.id,
        start_offset=Offset(0),
        end_offset=Offset(9),
        leader_epochs=LINEAGE,
        mtime_ms=1,
    )
    made = made.model_copy(update={"content": result})
    receipt = CompactionReceipt(
        run_id="R", group=0, segment=made, records_read=2, records_kept=1, bytes_read=1, bytes_written=1, balance=balance
    )
    state = PartitionState(topic="orders", partition=0, live=(source.model_copy(update={"content": recorded}),))
    plan = CompactionPlan(
        run_id="R", topic="orders", partition=0,
        leader_epoch=CompactorEpoch(1), now_ms=TimestampMs(1), first_dirty_offset=Offset(0),
        end_offset=Offset(10), next_dirty_offset=Offset(10),
        high_watermark=10, legacy_horizon_ms=0, vector=(), policy=CleanerPolicy(), map_engine="memory", fingerprint="test", producers=(),
        tasks=(task,),
    )  # fmt: skip
    return state, RoundIntent(plan=plan, slot=1, at_ms=1, receipts=(receipt,))


def test_the_driver_goes_by_receipts_and_metadata() -> None:
    assert publication.receipt_balance_problem(*announced(BALANCE, recorded=total_digest_sum((ONE, TWO)), result=ONE)) == ""
    assert publication.receipt_balance_problem(*announced(BALANCE, recorded=None, result=ONE)) == "", "whoever wrote the source did not say"
    assert "were recorded when they were written" in publication.receipt_balance_problem(*announced(BALANCE, recorded=ONE, result=ONE))
    assert "its metadata says" in publication.receipt_balance_problem(*announced(BALANCE, recorded=None, result=TWO))
    lost = BALANCE.model_copy(update={"left": CountAndDigestSum()})
    assert "group 0: the sources hold" in publication.receipt_balance_problem(*announced(lost, recorded=None, result=ONE))


def test_what_was_recorded_of_a_segment_says_nothing_of_the_part_that_is_read() -> None:
    """Brokers have tiered its end anew: a round is given fewer batches than it was written with."""
    balance = Balance(
        sources=CountAndDigestSum.from_digest_halves(1, 1, 1),
        left=CountAndDigestSum.from_digest_halves(1, 1, 1),
        result=CountAndDigestSum.from_digest_halves(1, 1, 1),
    )
    state, intent = announced(balance, recorded=CountAndDigestSum.from_digest_halves(2, 3, 4), result=balance.result)
    assert "were recorded" in publication.receipt_balance_problem(state, intent)
    cut = [one.model_copy(update={"copied_end_offset": one.end_offset + 1}) for one in state.live]
    assert publication.receipt_balance_problem(state.model_copy(update={"live": tuple(cut)}), intent) == ""


def test_a_receipt_of_an_earlier_program_has_no_balance() -> None:
    state, intent = announced(None, recorded=ONE, result=None)
    text = intent.receipts[0].model_dump_json()
    assert "balance" not in text
    assert "content" not in text
    assert CompactionReceipt.model_validate_json(text) == intent.receipts[0]
    assert publication.receipt_balance_problem(state, intent) == ""
    new = Replacement(sources=intent.plan.tasks[0].sources, segment=intent.receipts[0].segment)
    assert publication.sum_published_balances(intent, [new]) is None
    assert publication.content_digest_after_round(state, [new]) is None
    assert sum_batch_digests(state.live) == ONE


def test_what_readers_have_after_a_round() -> None:
    state, intent = announced(BALANCE, recorded=total_digest_sum((ONE, TWO)), result=ONE)
    new = Replacement(sources=intent.plan.tasks[0].sources, segment=intent.receipts[0].segment)
    assert publication.content_digest_after_round(state, [new]) == ONE
    assert publication.sum_published_balances(intent, [new]) == BALANCE
    assert publication.content_digest_after_round(state, []) == sum_batch_digests(state.live)
