"""KeyFilter against the library it is made of: the same bits, the same answers, and nothing of it can turn into a plain filter unseen."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import numpy.typing as npt
import pytest
from pybloom_live import BloomFilter

from bloom.filter import KeyFilter

Hashes = npt.NDArray[np.uint64]


def random_hashes(rows: int, seed: int = 1) -> Hashes:
    return np.random.default_rng(seed).integers(0, 2**64, size=(rows, 2), dtype=np.uint64)


def filled(hashes: Hashes, rate: float = 0.01, capacity: int = 0) -> KeyFilter:
    key_filter = KeyFilter(capacity or len(hashes), rate)
    key_filter.add_record_key_hashes(hashes)
    return key_filter


def test_it_is_pybloom_lives_and_sized_by_it() -> None:
    ours, theirs = KeyFilter(1_000, 2e-9), BloomFilter(1_000, 2e-9)
    assert isinstance(ours, BloomFilter)
    assert (ours.num_slices, ours.bits_per_slice, ours.num_bits) == (theirs.num_slices, theirs.bits_per_slice, theirs.num_bits)


def test_no_false_negative_and_few_false_positives() -> None:
    mine, others = random_hashes(20_000), random_hashes(200_000, seed=2)
    key_filter = filled(mine, 0.01)
    assert key_filter.flag_possible_keys(mine).all()
    assert 0.007 < key_filter.flag_possible_keys(others).mean() < 0.013
    assert not filled(mine, 2e-9).flag_possible_keys(others).any()


def test_only_the_key_of_a_hash_is_looked_at() -> None:
    hashes = random_hashes(1_000)
    hashes[:5, 0] <<= np.uint64(32)  # tag 0, which counts as 1
    key_filter = filled(hashes)
    keys = hashes & np.array([0xFFFFFFFF, 2**64 - 1], dtype=np.uint64)
    assert key_filter.flag_possible_keys(keys).all()
    keys[:5, 0] = 1
    assert key_filter.flag_possible_keys(keys).all()


@pytest.mark.parametrize(
    "twin", [copy.copy, copy.deepcopy, KeyFilter.copy, lambda f: pickle.loads(pickle.dumps(f)), lambda f: f | f, lambda f: f & f]
)
def test_copies_of_every_kind_still_find_their_keys(twin: object) -> None:
    hashes = random_hashes(500)
    other = twin(filled(hashes))  # type: ignore[operator]
    assert type(other) is KeyFilter
    assert other.flag_possible_keys(hashes).all()
    assert all(row.tobytes() in other for row in hashes)


def test_a_copy_stands_alone() -> None:
    key_filter = filled(random_hashes(10), capacity=100)
    other = key_filter.copy()
    other.add_record_key_hashes(random_hashes(10, seed=2))
    assert (key_filter.count, other.count) == (10, 20)
    assert key_filter.bitarray != other.bitarray


def test_union_of_two_filters() -> None:
    one, two = random_hashes(300), random_hashes(300, seed=2)
    both = filled(one, capacity=1_000) | filled(two, capacity=1_000)
    assert both.flag_possible_keys(np.vstack([one, two])).all()


def test_a_key_that_is_not_a_hash_is_refused() -> None:
    key_filter = KeyFilter(10)
    with pytest.raises(ValueError, match="16 bytes"):
        key_filter.add(b"orders")
    with pytest.raises(ValueError, match="16 bytes"):
        assert b"" in key_filter


def test_beyond_its_capacity_it_refuses_as_the_library_does() -> None:
    key_filter = filled(random_hashes(12), capacity=10)
    with pytest.raises(IndexError, match="capacity"):
        key_filter.add(random_hashes(1, seed=2)[0].tobytes())
    before = key_filter.bitarray.copy()
    with pytest.raises(IndexError, match="capacity"):
        key_filter.add_record_key_hashes(random_hashes(1, seed=2))
    assert key_filter.bitarray == before


def test_a_file_that_is_cut_off_is_refused() -> None:
    body = io.BytesIO()
    filled(random_hashes(100)).tofile(body)
    with pytest.raises(ValueError, match="mismatch"):
        KeyFilter.fromfile(io.BytesIO(body.getvalue()[:-20]))


def test_nothing_added_nothing_found() -> None:
    key_filter = KeyFilter(10)
    key_filter.add_record_key_hashes(random_hashes(0))
    assert key_filter.count == 0
    assert key_filter.flag_possible_keys(random_hashes(0)).tolist() == []
    assert not key_filter.flag_possible_keys(random_hashes(100)).any()
