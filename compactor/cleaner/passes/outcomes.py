"""Outcomes of transactions: whether data is committed or aborted is decided by the next marker of its producer (Kafka:
CleanedTransactionMetadata).

One fold from the end of the log is used by the cleaner, by pass 1 of a long log, by readers and by searches. The gate has a rule of its
own, because a check must not share the mistakes of what it checks.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.kernels.common import Flags
from compactor.kernels.jit import kernel
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL, BatchTable, Int64s

TxnOutcomes = npt.NDArray[np.int8]

UNDECIDED: Final = -1
"""Beside ABORT and COMMIT: no marker of the producer was seen yet, or the batch is not data of a transaction."""


def find_txn_outcomes_and_update_next_outcomes(table: BatchTable, next_outcome_by_producer: dict[int, int]) -> TxnOutcomes:
    """Return the outcome of each batch's transaction: ABORT, COMMIT or UNDECIDED. Segments of a log are passed from the last to the first,
    because a later marker decides about earlier data.

    :param next_outcome_by_producer: by producer id, the outcome of the producer's first marker after this segment. Updated in place for the
        call with the previous segment, so that markers of this segment are included.
    """
    kinds = np.full(len(table), UNDECIDED, np.int8)
    transactional = table.transactional_flags
    some = np.flatnonzero((table.control == ABORT) | (table.control == COMMIT) | ((table.control == NOT_CONTROL) & transactional))
    if len(some):
        ids, producer = np.unique(table.producer_id[some], return_inverse=True)
        outcome = np.array([next_outcome_by_producer.get(each, UNDECIDED) for each in ids.tolist()], np.int64)
        kinds[some] = find_txn_outcomes_in_columns_and_update_next(
            table.control[some], transactional[some], producer.astype(np.int64), outcome
        )
        next_outcome_by_producer.update(
            (each, kind) for each, kind in zip(ids.tolist(), outcome.tolist(), strict=True) if kind != UNDECIDED
        )
    return kinds


@kernel
def find_txn_outcomes_in_columns_and_update_next(
    control_kind: TxnOutcomes, transactional_flags: Flags, producer: Int64s, next_outcome_by_producer: Int64s
) -> TxnOutcomes:
    """Return, for each batch of transactional data, the outcome of its transaction: ABORT, COMMIT or UNDECIDED. Other batches are
    UNDECIDED.

    :param producer: for each batch, the index of its producer.
    :param next_outcome_by_producer: by producer index, the outcome of the producer's first marker after these batches. Updated in place, so
        that the markers of these batches are included.
    """
    kinds = np.full(control_kind.size, UNDECIDED, np.int8)
    for i in range(control_kind.size - 1, -1, -1):
        if control_kind[i] == ABORT or control_kind[i] == COMMIT:
            next_outcome_by_producer[producer[i]] = control_kind[i]
        elif control_kind[i] == NOT_CONTROL and transactional_flags[i]:
            kinds[i] = next_outcome_by_producer[producer[i]]
    return kinds
