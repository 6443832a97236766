"""Types of arrays and constants that kernels and their callers share. Importing this module does not load numba."""

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
ValueAndNextPosition = tuple[int, int]
"""A number that was read, and the byte position after it."""
ProblemAndBatch = tuple[int, int]
"""Number of a problem (0 for none), and the number of the batch that has it."""
ProblemAndPosition = tuple[int, int]
"""Number of a problem (0 for none), and a byte position."""

KEY_BYTES: Final = 20
"""Most bytes of memory that a key takes in an offset map."""
NO_HORIZON: Final = -1
"""In place of a delete horizon: the batch has none."""
