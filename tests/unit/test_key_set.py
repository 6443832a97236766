"""The two offset maps against Python's own set and dict, at the edges: empty marker, clusters, growth, the end of the budget."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from compactor.cleaner import keys as key_set
from compactor.cleaner.keys import ENTRY_BYTES, SMALLEST, SPACE, BoundedOffsetMap, KeyHashSet
from compactor.errors import OutOfBudget

MEGABYTE = 1 << 20
LAST = 2**64 - 1
Hashes = npt.NDArray[np.uint64]


def hashes_of(pairs: list[tuple[int, int]]) -> Hashes:
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


def random_hashes(rows: int, keys: int, seed: int = 1) -> Hashes:
    dice = np.random.default_rng(seed)
    return dice.integers(0, 2**64, size=(keys, 2), dtype=np.uint64)[dice.integers(0, keys, rows)]


def first_seen(key_set: KeyHashSet, hashes: Hashes) -> list[bool]:
    answer = np.zeros(len(hashes), dtype=np.bool_)
    assert key_set.insert_keys_until_full(hashes, answer) == len(hashes)
    return answer.tolist()


def contained(key_set: KeyHashSet, hashes: Hashes) -> list[bool]:
    answer = np.zeros(len(hashes), dtype=np.bool_)
    key_set.flag_contained_keys(hashes, answer)
    return answer.tolist()


def expected_first_seen(hashes: Hashes) -> list[bool]:
    seen: set[bytes] = set()
    return [not (row.tobytes() in seen or seen.add(row.tobytes())) for row in hashes]  # type: ignore[func-returns-value]


def test_first_seen_in_order_while_growing_from_the_smallest_size() -> None:
    hashes = random_hashes(200_000, 80_000)
    key_set = KeyHashSet(4 * MEGABYTE)
    assert first_seen(key_set, hashes) == expected_first_seen(hashes)
    assert key_set.key_count == len(np.unique(hashes, axis=0))
    assert all(contained(key_set, hashes))
    assert not any(contained(key_set, random_hashes(50_000, 50_000, seed=2)))


@pytest.mark.parametrize("keys", [6_789, 20_000, 54_321, 300_000])
def test_at_most_20_bytes_a_key_at_any_size(keys: int) -> None:
    hashes = np.random.default_rng(5).integers(0, 2**64, size=(keys, 2), dtype=np.uint64)
    key_set = KeyHashSet(64 * MEGABYTE)
    sizes = []
    for begin in range(0, keys, 997):
        first_seen(key_set, hashes[begin : begin + 997])
        if key_set.key_count >= 5_000:
            sizes.append(key_set.peak_bytes / key_set.key_count)
    assert key_set.key_count == keys
    assert sizes
    assert max(sizes) <= 20


def test_expected_keys_fit_without_growing() -> None:
    key_set = KeyHashSet(64 * MEGABYTE, expected_key_count=100_000)
    before = key_set.peak_bytes
    first_seen(key_set, random_hashes(100_000, 90_000))
    assert key_set.peak_bytes == before <= 20 * 100_000 + 5_000


def test_the_budget_ends_it_at_a_row_and_what_is_known_stays_answerable() -> None:
    budget = 120_000
    hashes = random_hashes(40_000, 30_000)
    key_set = KeyHashSet(budget, expected_key_count=10**9)
    answer = np.zeros(len(hashes), dtype=np.bool_)
    done = key_set.insert_keys_until_full(hashes, answer)
    assert 0 < done < len(hashes)
    assert key_set.peak_bytes <= budget
    assert key_set.key_count == int((budget // ENTRY_BYTES - SPACE) * 0.8)
    assert answer[:done].tolist() == expected_first_seen(hashes[:done])
    assert all(contained(key_set, hashes[:done]))
    assert not contained(key_set, hashes[done : done + 1])[0]
    # A full set still takes rows whose keys it has, and stops again at the first one that it has not.
    again = np.vstack([hashes[:done], hashes[done : done + 1]])
    assert key_set.insert_keys_until_full(again, np.zeros(len(again), dtype=np.bool_)) == done


def test_start_skips_rows_that_are_done() -> None:
    hashes = hashes_of([(i, i << 40) for i in range(100)])
    key_set = KeyHashSet(MEGABYTE)
    answer = np.zeros(100, dtype=np.bool_)
    key_set.insert_keys_until_full(hashes, answer, first_row=60)
    assert answer.tolist() == [False] * 60 + [True] * 40


@pytest.mark.parametrize("budget", [-1, 0, (SMALLEST + SPACE) * ENTRY_BYTES - 1])
def test_a_budget_that_is_too_small_says_what_it_takes(budget: int) -> None:
    with pytest.raises(OutOfBudget, match=str((SMALLEST + SPACE) * ENTRY_BYTES)):
        KeyHashSet(budget)


def test_a_budget_beyond_any_machine() -> None:
    with pytest.raises(OutOfBudget, match="Lower map_budget_bytes"):
        KeyHashSet(1 << 60)


def test_the_empty_marker_is_an_ordinary_hash() -> None:
    key_set = KeyHashSet(MEGABYTE)
    zeros = hashes_of([(0, 0)])
    assert contained(key_set, zeros) == [False]
    assert first_seen(key_set, hashes_of([(0, 0), (0, 0), (2**32, 0), (0, 5)])) == [True, False, False, True]
    assert contained(key_set, zeros) == [True]


@pytest.mark.parametrize("base", [0, LAST - 700, LAST // 2])
def test_hashes_that_all_want_one_home_cost_time_only(base: int) -> None:
    hashes = hashes_of([(i * 7 + 1, base + i % 700) for i in range(2_000)])
    key_set = KeyHashSet(MEGABYTE)
    if base < LAST - 700:
        assert first_seen(key_set, hashes) == [True] * 2_000
        assert first_seen(key_set, hashes) == [False] * 2_000
    else:  # behind the last home there is room for SPACE - 1 more; the set says that it is full, not something wrong
        answer = np.zeros(2_000, dtype=np.bool_)
        done = key_set.insert_keys_until_full(hashes, answer)
        assert done == SPACE
        assert contained(key_set, hashes) == [True] * done + [False] * (2_000 - done)


def test_the_keys_held_come_out_again_for_the_change_over() -> None:
    hashes = random_hashes(30_000, 10_000)
    key_set = KeyHashSet(MEGABYTE)
    first_seen(key_set, hashes)
    keys = np.concatenate(list(key_set.iterate_key_hashes(max_rows=1_000)))
    expected = np.unique(hashes & np.array([0xFFFFFFFF, LAST], dtype=np.uint64), axis=0)
    assert sorted(map(tuple, keys.tolist())) == sorted(map(tuple, expected.tolist()))
    assert first_seen(key_set, keys) == [False] * len(keys)


def test_nothing_in_nothing_out() -> None:
    key_set = KeyHashSet(MEGABYTE)
    empty = hashes_of([])
    assert first_seen(key_set, empty) == []
    assert contained(key_set, empty) == []
    assert key_set.key_count == 0


def test_growing_keeps_every_entry_findable_from_its_home() -> None:
    key_set = KeyHashSet(MEGABYTE)
    hashes = random_hashes(3_000, 3_000)
    first_seen(key_set, hashes)
    while key_set.enlarge():
        assert all(contained(key_set, hashes))
    cells = key_set.table.reshape(-1, 3)
    assert np.count_nonzero(cells[:, 0]) == key_set.key_count
    assert not cells[-1].any()


def put(offset_map: BoundedOffsetMap, pairs: list[tuple[str, int]]) -> int:
    return offset_map.put_rows_until_full(named([key for key, _ in pairs]), np.array([offset for _, offset in pairs], dtype=np.int64))


def named(keys: list[str]) -> Hashes:
    return hashes_of([(ord(key), ord(key) * 0x123456789ABCDEF % 2**64) for key in keys])


def latest(offset_map: BoundedOffsetMap, keys: list[str]) -> list[int]:
    out = np.zeros(len(keys), dtype=np.int64)
    offset_map.find_latest_offsets(named(keys), out)
    return out.tolist()


def test_the_bounded_map_keeps_what_was_put_last() -> None:
    offset_map = BoundedOffsetMap(10, max_record_count=100)
    assert put(offset_map, [("a", 0), ("b", 1), ("a", 2)]) == 3
    assert put(offset_map, [("c", 2**40), ("b", 7)]) == 2
    assert latest(offset_map, ["a", "b", "c", "d"]) == [2, 7, 2**40, key_set.ABSENT]
    assert offset_map.key_count == 3


def test_a_full_map_stops_even_at_a_key_that_it_holds() -> None:
    offset_map = BoundedOffsetMap(2, max_record_count=100)
    assert put(offset_map, [("a", 0), ("a", 1), ("b", 2), ("a", 3), ("b", 4)]) == 3
    assert put(offset_map, [("a", 9)]) == 0
    assert latest(offset_map, ["a", "b"]) == [1, 2]


def test_fewer_rows_than_the_limit_ask_for_less_memory_and_never_fill_it() -> None:
    offset_map = BoundedOffsetMap(2**40, max_record_count=3)
    assert offset_map.peak_bytes <= 32 * 3 + 48
    assert put(offset_map, [("a", 0), ("b", 1), ("c", 2)]) == 3
    assert latest(offset_map, ["a", "b", "c"]) == [0, 1, 2]


def test_the_bounded_map_wraps_around_its_end() -> None:
    offset_map = BoundedOffsetMap(50, max_record_count=50)
    hashes = hashes_of([(i, LAST - i % 2) for i in range(50)])  # (0, LAST) is the marker with the remapped half
    hashes[1, 0] = 77
    assert offset_map.put_rows_until_full(hashes, np.arange(50, dtype=np.int64)) == 50
    out = np.zeros(50, dtype=np.int64)
    offset_map.find_latest_offsets(hashes, out)
    assert out.tolist() == list(range(50))
