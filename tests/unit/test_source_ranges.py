"""What the cleaner takes at once: runs of batches of one kind, which markers do not cut into crumbs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compactor.cleaner.source import PACKED_CHUNK, SourceSegment, open_source_segment
from compactor.records.codecs import LZ4, NONE
from compactor.records.encode import ProducerFields, RecordToEncode, encode_batch, encode_txn_marker


def opened(folder: Path, batches: Sequence[bytes]) -> SourceSegment:
    path = folder / f"{0:020d}.log"
    path.write_bytes(b"".join(batches))
    return open_source_segment(0, path, 0, None, 0, -1, 1 << 30)


def data(offset: int, codec: int, value: bytes = b"value") -> bytes:
    return encode_batch([RecordToEncode(offset, 1, b"key", value)], codec=codec, producer=ProducerFields(1, 0, offset, True))


def end(offset: int) -> bytes:
    return encode_txn_marker(offset, 1, 1, 0, is_commit=True)


def test_markers_between_compressed_batches_cut_nothing(tmp_path: Path) -> None:
    source = opened(tmp_path, [data(offset, LZ4) if offset % 3 else end(offset) for offset in range(1, 100)])
    assert source.split_by_kind() == [(0, 99)]
    (chunk,) = source.read_chunks(0, 99, np.ones(99, np.bool_), 1 << 20)
    for number, (start, stop) in enumerate(zip(chunk.body_start.tolist(), chunk.body_end.tolist(), strict=True)):
        assert stop - start == len((data(number + 1, NONE) if (number + 1) % 3 else end(number + 1))[61:])


def test_data_that_nobody_compressed_does(tmp_path: Path) -> None:
    source = opened(tmp_path, [end(0), data(1, LZ4), end(2), data(3, NONE), end(4), data(5, LZ4)])
    assert source.split_by_kind() == [(0, 1), (1, 3), (3, 5), (5, 6)]


def test_where_markers_are_few_they_stand_alone(tmp_path: Path) -> None:
    """Chunks without markers are cleaned while they are inflated for the first time."""
    large = np.random.default_rng(1).bytes(PACKED_CHUNK)
    source = opened(tmp_path, [data(0, LZ4, large), end(1), data(2, LZ4, large)])
    assert source.split_by_kind() == [(0, 1), (1, 2), (2, 3)]
