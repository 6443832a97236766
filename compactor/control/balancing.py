"""Balance check of a round before it is published, from receipts and segment metadata alone.

sources of a group = left + opened + dropped, records likewise           nothing lost or made up within the round
sources of a group = what was recorded of these segments when they were written        nor between two rounds
result of a group  = what its new segment's metadata records
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from compactor.control.state import Intent, PartitionState, sum_batches_of
from compactor.model.balance import Balance, DigestSum
from compactor.model.plan import Replacement


def balance_problem(state: PartitionState, intent: Intent) -> str:
    """Return which equation of the balance does not hold for a round's receipts, or an empty string. Receipts of earlier versions have
    none.
    """
    live = state.live_by_id()
    tasks = {task.group: task for task in intent.plan.tasks}
    for receipt in intent.receipts:
        balance = receipt.balance
        if balance is None:
            continue
        found = balance.problem()
        sources = tasks[receipt.group].sources
        recorded = sum_batches_of(live[source] for source in sources) if live.keys() >= set(sources) else None
        if not found and recorded not in (None, balance.sources):
            found = f"the sources hold {balance.sources} batches, and {recorded} were recorded when they were written"
        if not found and receipt.segment.content != balance.result:
            found = f"the new segment holds {balance.result} batches, and its metadata says {receipt.segment.content}"
        if found:
            return f"group {receipt.group}: {found}"
    return ""


def round_balance(intent: Intent, replacements: Sequence[Replacement]) -> Balance | None:
    """Return the sum of the balances of the groups that are published; None if one of them has no balance."""
    ids = {new.segment.id for new in replacements}
    found = [receipt.balance for receipt in intent.receipts if receipt.segment.id in ids]
    return None if not found or None in found else reduce(Balance.plus, (balance for balance in found if balance))


def content_after_round(state: PartitionState, replacements: Sequence[Replacement]) -> DigestSum | None:
    """Return the sum of all batches that readers have after these replacements; None if it is not known of each segment."""
    gone = {source for new in replacements for source in new.sources}
    return sum_batches_of([*(segment for segment in state.live if segment.id not in gone), *(new.segment for new in replacements)])
