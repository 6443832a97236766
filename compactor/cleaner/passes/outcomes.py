"""What became of transactions: data is decided by the first marker of its producer behind it (Kafka: CleanedTransactionMetadata).

One fold from the end, for everybody who asks: the cleaner's verdicts, pass 1 of a long log, readers of a part of the log, searches. (The
gate has a rule of its own: what checks must not share the mistakes of what is checked.)
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL, BatchTable, Int64s

Flags = npt.NDArray[np.bool_]
Kinds = npt.NDArray[np.int8]

UNDECIDED: Final = -1
"""Beside ABORT and COMMIT: no marker of the producer was seen yet, or the batch is not data of a transaction."""


def outcomes_backwards(table: BatchTable, known: dict[int, int]) -> Kinds:
    """ABORT, COMMIT or UNDECIDED per batch, for a log that is read from its end: ``known`` has each producer's next marker.

    It is brought on to the beginning of these batches.
    """
    kinds = np.full(len(table), UNDECIDED, np.int8)
    transactional = table.is_transactional
    some = np.flatnonzero((table.control == ABORT) | (table.control == COMMIT) | ((table.control == NOT_CONTROL) & transactional))
    if len(some):
        ids, producer = np.unique(table.producer_id[some], return_inverse=True)
        outcome = np.array([known.get(each, UNDECIDED) for each in ids.tolist()], np.int64)
        kinds[some] = fold_outcomes(table.control[some], transactional[some], producer.astype(np.int64), outcome)
        known.update((each, kind) for each, kind in zip(ids.tolist(), outcome.tolist(), strict=True) if kind != UNDECIDED)
    return kinds


@kernel
def fold_outcomes(control: Kinds, transactional: Flags, producer: Int64s, outcome: Int64s) -> Kinds:
    """Per batch the outcome of its data. ``outcome``: of each producer's first marker behind these batches; changed in place."""
    kinds = np.full(control.size, UNDECIDED, np.int8)
    for i in range(control.size - 1, -1, -1):
        if control[i] == ABORT or control[i] == COMMIT:
            outcome[producer[i]] = control[i]
        elif control[i] == NOT_CONTROL and transactional[i]:
            kinds[i] = outcome[producer[i]]
    return kinds
