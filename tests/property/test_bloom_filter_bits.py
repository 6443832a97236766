"""Bulk add and probe agree with the subclass's own ``add`` and ``in`` bit for bit, through save and load."""

from __future__ import annotations

import io

import numpy as np
from hypothesis import given, strategies as st

from bloom.filter import KeyFilter
from tests.support.depth import examples

word = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**32, 2**32 - 1, 2**64 - 1]))
rows = st.lists(st.tuples(word, word), max_size=40)
rates = st.sampled_from([0.5, 0.3, 0.01, 1e-4, 2e-9])


@examples(150)
@given(batches=st.lists(rows, min_size=1, max_size=3), asked=rows, rate=rates, capacity=st.integers(120, 400))
def test_bulk_is_one_by_one(batches: list[list[tuple[int, int]]], asked: list[tuple[int, int]], rate: float, capacity: int) -> None:
    single, bulk = KeyFilter(capacity, rate), KeyFilter(capacity, rate)
    for batch in batches:
        hashes = np.array(batch, dtype=np.uint64).reshape(-1, 2)
        bulk.add_record_key_hashes(hashes)
        for row in hashes:
            single.add(row.tobytes())
    body = io.BytesIO()
    bulk.tofile(body)
    loaded = KeyFilter.fromfile(io.BytesIO(body.getvalue()))
    assert bulk.bitarray == single.bitarray
    assert bulk.count == single.count == loaded.count
    questions = np.array([*asked, *(row for batch in batches for row in batch)], dtype=np.uint64).reshape(-1, 2)
    answers = [row.tobytes() in single for row in questions]
    assert bulk.flag_possible_keys(questions).tolist() == answers
    assert loaded.flag_possible_keys(questions).tolist() == answers
    assert all(answers[len(asked) :])
