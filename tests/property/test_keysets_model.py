"""Both offset maps against Python's set and dict, for any order of calls and for hashes that crowd together."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from compactor.cleaner.keys import ABSENT, ENTRY_BYTES, SMALLEST, SPACE, BoundedOffsetMap, KeyHashSet
from tests.support.depth import examples

# Few distinct values, at both ends and in the middle of the table, so that clusters meet, and tags that only differ after the empty marker.
first_half = st.sampled_from([0, 1, 2, 2**32, 2**32 + 1, 2**63, 2**64 - 1])
second_half = st.one_of(
    st.integers(0, 40), st.integers(2**64 - 12, 2**64 - 1), st.integers(2**63 - 5, 2**63 + 5), st.integers(0, 2**64 - 1)
)
rows = st.lists(st.tuples(first_half, second_half), max_size=200)
calls = st.lists(st.tuples(st.sampled_from(["insert", "contains", "grow"]), rows), max_size=8)


def key_of(row: tuple[int, int]) -> tuple[int, int]:
    return (row[0] & 0xFFFFFFFF) or 1, row[1]


@examples(200)
@given(calls=calls)
def test_a_key_set_is_a_set(calls: list[tuple[str, list[tuple[int, int]]]]) -> None:
    key_set, model = KeyHashSet(1 << 20), set[tuple[int, int]]()
    for what, some in calls:
        hashes = np.array(some, dtype=np.uint64).reshape(-1, 2)
        answer = np.zeros(len(some), dtype=np.bool_)
        if what == "insert":
            assert key_set.insert_keys_until_full(hashes, answer) == len(some)
            expected = []
            for row in some:
                expected.append(key_of(row) not in model)
                model.add(key_of(row))
            assert answer.tolist() == expected
        elif what == "contains":
            key_set.flag_contained_keys(hashes, answer)
            assert answer.tolist() == [key_of(row) in model for row in some]
        else:
            assert key_set.enlarge()
        assert key_set.key_count == len(model)
    assert {key_of((int(a), int(b))) for chunk in key_set.iterate_key_hashes() for a, b in chunk} == model


@examples(50)
@given(seed=st.integers(0, 1000), budget=st.integers((SMALLEST + SPACE) * ENTRY_BYTES, 40_000))
def test_it_stays_inside_any_budget(seed: int, budget: int) -> None:
    hashes = np.random.default_rng(seed).integers(0, 2**64, size=(4_000, 2), dtype=np.uint64)
    key_set, answer = KeyHashSet(budget), np.zeros(len(hashes), dtype=np.bool_)
    done = key_set.insert_keys_until_full(hashes, answer)
    assert key_set.table.nbytes <= budget
    assert key_set.peak_bytes <= budget
    assert done == min(len(hashes), int((budget // ENTRY_BYTES - SPACE) * 0.8))
    assert answer.tolist() == [True] * done + [False] * (len(hashes) - done)


@examples(200)
@given(batches=st.lists(rows, max_size=4), limit=st.integers(1, 60))
def test_the_bounded_map_is_a_dict_that_stops(batches: list[list[tuple[int, int]]], limit: int) -> None:
    total = sum(map(len, batches))
    offset_map, model = BoundedOffsetMap(limit, max_record_count=total), dict[tuple[int, int], int]()
    offset, stopped = 0, False
    for some in batches:
        hashes = np.array(some, dtype=np.uint64).reshape(-1, 2)
        taken = offset_map.put_rows_until_full(hashes, np.arange(offset, offset + len(some), dtype=np.int64))
        expected = 0
        for row in some:
            if len(model) >= limit:
                break
            model[row[0] or 1, row[1]] = offset + expected
            expected += 1
        assert taken == expected
        offset += len(some)
        stopped |= taken < len(some)
        out = np.zeros(len(some), dtype=np.int64)
        offset_map.find_latest_offsets(hashes, out)
        assert out.tolist() == [model.get((row[0] or 1, row[1]), ABSENT) for row in some]
    assert offset_map.key_count == len(model) <= limit
    assert not stopped or len(model) == limit
