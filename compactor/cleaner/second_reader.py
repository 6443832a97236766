"""Port through which the cleaner passes decompressed chunks to a second reader (the gate), so that nothing is decompressed twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.worker_threads import ReusableJobBuffers
from compactor.records.rows import BatchChunk


@dataclass(frozen=True, slots=True)
class KeyTableRowsAndBatchCount:
    """Result of reading one chunk: one row per record whose key the second reader will look up, and the number of batches read."""

    batches: int
    rows: npt.NDArray[np.uint64]


class SecondReader(Protocol):
    """A second, independent reader of the batches that a round reads. The gate implements it to check the round.

    ``extract_key_table_rows_of_chunk`` and ``add_fingerprints_of_rewrite_chunk`` run in worker threads,
    the other methods in the order of the log.
    """

    def begin_checks_of_segment_chunks(self, source: SourceSegment) -> None:
        """Tell the second reader that the next chunks belong to this segment."""

    def extract_key_table_rows_of_chunk(
        self, buffers: ReusableJobBuffers, source: SourceSegment, chunk: BatchChunk
    ) -> KeyTableRowsAndBatchCount:
        """Read a chunk of pass 1 (the search for survivors), in which every batch that may enter the offset map is decompressed. Return
        the rows for ``add_rows_to_key_table``.
        """

    def add_rows_to_key_table(self, source: SourceSegment, chunk_rows: KeyTableRowsAndBatchCount) -> None:
        """Add the rows that ``extract_key_table_rows_of_chunk`` returned to the second reader's table."""

    def add_fingerprints_of_rewrite_chunk(self, buffers: ReusableJobBuffers, source: SourceSegment, chunk: BatchChunk) -> None:
        """Read a chunk of pass 2 (the rewrite), in which the batches that may lose some of their records are decompressed."""
