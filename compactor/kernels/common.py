"""Array types and constants that kernels and their callers share. Importing this module does not load numba."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
"""Hashes of keys, shape (n, 2)."""
HashKeyHalves = tuple[np.uint64, np.uint64]
"""The two 64-bit halves of the key of SipHash."""
ValueAndNextPosition = tuple[int, int]
"""A number that was read, and the byte position after it."""
ProblemAndBatch = tuple[int, int]
"""Number of a problem (0 for none), and the number of the batch that has it."""
ProblemAndPosition = tuple[int, int]
"""Number of a problem (0 for none), and a byte position."""
FirstRowByBatch = Int64s
"""Number of the first row of each batch, and one more entry: the number of rows."""
HashKeyHalf = np.uint64
"""Half of a secret key of a hash function."""
KeyHashHalf = np.uint64
"""Half of the 128-bit hash of a record's key."""
CountAndEndPosition = tuple[int, int]
"""Number of batches, and the byte position after the last one."""
NextBatchAndPosition = tuple[int, int]
"""Number of the next batch to process, and a byte position."""
ControlTypeAndEpoch = tuple[int, int]
"""Type of a control batch, and the coordinator epoch of its marker (-1 for none)."""
FirstAndEndBatch = tuple[int, int]
"""Numbers of the first batch of a range, and of the batch after its last."""

KEY_BYTES: Final = 20
"""Most bytes of memory that a key takes in an offset map."""
NO_HORIZON: Final = -1
"""In place of a delete horizon: the batch has none."""
