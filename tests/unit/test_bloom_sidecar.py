"""Sidecars: what goes in comes out; what is stale, cut off, of the future or a lie is refused with the reason, and never answers."""

from __future__ import annotations

import dataclasses
import pickle
import random
import struct

import numpy as np
import numpy.typing as npt
import pytest

from bloom import sidecar as sidecars
from bloom.sidecar import (
    BATCH_RUNS,
    MARKERS,
    RemovableRecordCounts,
    Sidecar,
    SidecarKeyHashCollector,
    SidecarUnusable,
    SidecarUnusableReason,
    estimate_distinct_keys,
    estimate_union_keys,
)
from bloom.sizing import design_filter

KEY = bytes(range(16))
SEGMENT = "AAECAwQFBgcICQoLDA0ODw"
GIGABYTE = 1 << 30
Hashes = npt.NDArray[np.uint64]


def random_hashes(rows: int, seed: int = 1) -> Hashes:
    return np.random.default_rng(seed).integers(0, 2**64, size=(rows, 2), dtype=np.uint64)


def made(hashes: Hashes, *, segment_bytes: int = GIGABYTE, probes: int = 10_000, runs: int = 3, markers: int = 2) -> Sidecar:
    run_table, marker_table = np.zeros(runs, dtype=BATCH_RUNS), np.zeros(markers, dtype=MARKERS)
    run_table["producer_id"] = np.arange(runs) + 7
    run_table["transactional"] = True
    marker_table["offset"] = np.arange(markers) * 2**40
    due = RemovableRecordCounts(tombstones=5, earliest_tombstone_horizon_ms=1_700_000_000_000, keyless_records=0 if len(hashes) else 1)
    portrait = SidecarKeyHashCollector(design_filter(len(np.unique(hashes, axis=0)), probes, segment_bytes))
    for part in np.array_split(hashes, 3):
        portrait.add_record_key_hashes(part)
    return portrait.build_sidecar(SEGMENT, len(hashes) + 1, due, run_table, marker_table)


def refused(data: bytes, segment_id: str = SEGMENT, key: bytes = KEY) -> SidecarUnusableReason:
    with pytest.raises(SidecarUnusable) as caught:
        sidecars.decode_sidecar(data, segment_id, key)
    return caught.value.reason


def test_what_is_written_is_read() -> None:
    hashes = random_hashes(5_000)
    before = made(np.vstack([hashes, hashes[:1_000]]))
    data = sidecars.encode_sidecar(before, KEY)
    after = sidecars.decode_sidecar(data, SEGMENT, KEY)
    assert after.filter is not None
    assert before.filter is not None
    assert after.filter.bitarray.tobytes() == before.filter.bitarray.tobytes()
    assert after.distinct_keys == before.distinct_keys == 5_000
    assert (after.records, after.due, after.made_for) == (before.records, before.due, before.made_for)
    assert after.producer_runs.tolist() == before.producer_runs.tolist()
    assert after.markers.tolist() == before.markers.tolist()
    assert after.sketch.tolist() == before.sketch.tolist()
    assert sidecars.encode_sidecar(after, KEY) == data
    assert after.filter.flag_possible_keys(hashes[17:18]).any()
    assert not after.filter.flag_possible_keys(random_hashes(10_000, seed=2)).any()


def test_the_head_alone_says_everything_but_the_filter() -> None:
    data = sidecars.encode_sidecar(made(random_hashes(5_000)), KEY)
    head = data[: sidecars.sidecar_head_size_bytes(data[:100])]
    assert len(head) < sidecars.HEAD_GUESS < len(data)
    read = sidecars.decode_sidecar_head(head, SEGMENT, KEY)
    assert read.filter is None
    assert read.made_for is not None
    assert read.useless_read_probability(10_000) == pytest.approx(0.01)
    assert read.distinct_keys == 5_000
    assert len(read.producer_runs) == 3
    assert estimate_distinct_keys(read.sketch) == pytest.approx(5_000, rel=0.08)


def test_a_segment_without_keys_meets_none_and_needs_no_filter() -> None:
    read = sidecars.decode_sidecar(sidecars.encode_sidecar(made(random_hashes(0), runs=0, markers=0), KEY), SEGMENT, KEY)
    assert read.filter is None
    assert read.distinct_keys == 0
    assert read.useless_read_probability(10**9) == 0.0


def test_a_segment_too_small_for_a_filter_has_none() -> None:
    hashes = random_hashes(1_000)
    read = sidecars.decode_sidecar(sidecars.encode_sidecar(made(hashes, segment_bytes=1_000), KEY), SEGMENT, KEY)
    assert read.filter is None
    assert read.made_for is None
    assert read.useless_read_probability(1) == 1.0
    assert read.distinct_keys == pytest.approx(1_000, rel=0.08)


def test_repeated_keys_do_not_make_the_filter_larger() -> None:
    hashes = random_hashes(1_000)
    once, often = made(hashes), made(np.vstack([hashes] * 20))
    assert once.made_for is not None
    assert often.made_for is not None
    assert often.made_for.bytes <= once.made_for.bytes * 1.2
    assert often.distinct_keys == 1_000


@pytest.mark.parametrize("hashes", [random_hashes(400), random_hashes(0)], ids=["with a filter", "without"])
def test_cut_off_anywhere(hashes: Hashes) -> None:
    data = sidecars.encode_sidecar(made(hashes), KEY)
    for size in [*range(80), *range(80, len(data), 97), len(data) - 1]:
        assert refused(data[:size]) is SidecarUnusableReason.CUT_OFF


def test_longer_than_it_should_be() -> None:
    assert refused(sidecars.encode_sidecar(made(random_hashes(10)), KEY) + b"\0") is SidecarUnusableReason.DAMAGED


def test_any_bit_that_is_flipped_is_seen() -> None:
    data = sidecars.encode_sidecar(made(random_hashes(300)), KEY)
    dice = random.Random(4)
    for position in [*range(70), *(dice.randrange(len(data)) for _ in range(300))]:
        lie = bytearray(data)
        lie[position] ^= 1 << dice.randrange(8)
        assert refused(bytes(lie)) in set(SidecarUnusableReason) - {SidecarUnusableReason.OTHER_SEGMENT}


def test_cleared_bits_do_not_lie() -> None:
    data = bytearray(sidecars.encode_sidecar(made(random_hashes(300)), KEY))
    start = sidecars.sidecar_head_size_bytes(bytes(data)) + 40
    data[start:] = bytes(len(data) - start)
    assert refused(bytes(data)) is SidecarUnusableReason.DAMAGED


def test_who_has_not_the_hash_key_cannot_make_one() -> None:
    data = sidecars.encode_sidecar(made(random_hashes(300)), bytes(16))
    assert refused(data) is SidecarUnusableReason.OTHER_KEY
    forged = data[:12] + sidecars.hash_key_fingerprint(KEY) + data[20:]
    assert refused(forged) is SidecarUnusableReason.DAMAGED


def test_the_filter_of_another_sidecar_does_not_fit() -> None:
    one, two = (sidecars.encode_sidecar(made(random_hashes(300, seed=seed)), KEY) for seed in (1, 2))
    cut_one, cut_two = sidecars.sidecar_head_size_bytes(one), sidecars.sidecar_head_size_bytes(two)
    assert refused(one[:cut_one] + two[cut_two:]) is SidecarUnusableReason.DAMAGED


def test_made_for_another_segment() -> None:
    data = sidecars.encode_sidecar(made(random_hashes(10)), KEY)
    assert refused(data, segment_id="BBECAwQFBgcICQoLDA0ODw") is SidecarUnusableReason.OTHER_SEGMENT


def test_of_a_future_version() -> None:
    data = sidecars.encode_sidecar(made(random_hashes(10)), KEY)
    future = data[:8] + struct.pack("<I", sidecars.SIDECAR_VERSION + 1) + b"whatever comes then" * 10
    assert refused(future) is SidecarUnusableReason.FUTURE_VERSION


@pytest.mark.parametrize("data", [b"<?xml version='1.0'?><Error/>" * 9, b"\0" * 500, b"tc-sidf\n" + bytes(200)])
def test_something_else_altogether(data: bytes) -> None:
    assert refused(data) is SidecarUnusableReason.NOT_A_SIDECAR


def test_a_reason_can_be_told_to_people_and_sent_between_processes() -> None:
    error = SidecarUnusable(SidecarUnusableReason.CUT_OFF, "12 bytes")
    assert str(error) == "it is cut off (12 bytes)"
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.reason, str(twin)) == (error.reason, str(error))


@pytest.mark.parametrize(
    ("due", "now", "word"),
    [
        (RemovableRecordCounts(), 2**62, ""),
        (RemovableRecordCounts(tombstones=3, earliest_tombstone_horizon_ms=1_000), 999, ""),
        (RemovableRecordCounts(tombstones=3, earliest_tombstone_horizon_ms=1_000), 1_000, "passed"),
        (RemovableRecordCounts(tombstones=3, tombstones_without_horizon=1, earliest_tombstone_horizon_ms=1_000), 0, "no delete horizon"),
        (RemovableRecordCounts(keyless_records=1), 0, "no key"),
    ],
)
def test_what_is_due_in_spite_of_the_filter(due: RemovableRecordCounts, now: int, word: str) -> None:
    assert word in due.reason_to_read(now)
    assert bool(due.reason_to_read(now)) == bool(word)


def test_sidecars_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        made(random_hashes(1)).records = 2  # type: ignore[misc]


def test_keys_that_were_not_looked_at_count_as_many() -> None:
    tables = np.zeros(0, dtype=BATCH_RUNS), np.zeros(0, dtype=MARKERS)
    unseen = SidecarKeyHashCollector(None).build_sidecar(SEGMENT, 1_000, RemovableRecordCounts(keyless_records=100), *tables)
    assert unseen.distinct_keys == 900
    assert unseen.filter is None
    seen = made(random_hashes(3_000))
    assert estimate_union_keys([unseen, seen, seen]) == pytest.approx(3_900, rel=0.08)
    assert estimate_union_keys([]) == 0
    empty = SidecarKeyHashCollector(None).build_sidecar(SEGMENT, 7, RemovableRecordCounts(keyless_records=7), *tables)
    assert empty.distinct_keys == 0
