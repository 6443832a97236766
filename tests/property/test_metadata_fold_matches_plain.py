"""The fold and its lookups against a plain one that answers offset by offset; bytes against what they were decoded from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers.cache import RemoteLogMetadataCache
from compactor.adapters.brokers.chain import offset_gaps, segment_read_ranges
from compactor.adapters.brokers.codec import (
    decode_record,
    decode_unframed_segment_metadata,
    encode_record,
    encode_unframed_segment_metadata,
)
from compactor.errors import BadData, NotFound
from compactor.model.remote_log import (
    PartitionDeleteState,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    RemotePartitionDeleteMetadataRecord,
    TopicIdPartition,
)
from compactor.model.segment import SegmentState
from tests.metadata_events import EPOCHS, LAST_OFFSET, LINEAGES, PARTITION, lineage_entries, script
from tests.plain_metadata_cache import PlainCache, Stopped
from tests.support.broker_lookups import highest_offset, list_epoch, segment_for
from tests.support.lookup_holes import lookup_holes

INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
IDS = st.binary(min_size=16, max_size=16)
CUSTOM = st.none() | st.binary(max_size=300)


def tags(first: int = 0) -> st.SearchStrategy[tuple[tuple[int, bytes], ...]]:
    listed = st.dictionaries(st.integers(first, 2**31), st.binary(max_size=5), max_size=2)
    return listed.map(lambda found: tuple(sorted(found.items())))


PARTITIONS = st.builds(TopicIdPartition, IDS, st.text(st.characters(codec="utf-8"), min_size=1, max_size=200), INT32)


@st.composite
def segments(draw: st.DrawFn) -> RemoteLogSegmentMetadataRecord:
    start, end = sorted((draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 2**63 - 1))))
    epochs = tuple(draw(st.lists(st.builds(EpochEntry, INT32, INT64), min_size=1, max_size=5)))
    nested = tuple(draw(st.lists(tags(), min_size=2 + len(epochs), max_size=2 + len(epochs))))
    return RemoteLogSegmentMetadataRecord(
        draw(PARTITIONS), draw(IDS), start, end, draw(INT32), draw(INT64), draw(INT64), epochs, draw(INT32), draw(CUSTOM),
        txn_index_empty=draw(st.booleans()), tags=draw(tags(1)), nested=nested if any(nested) else (),
    )  # fmt: skip


@given(record=segments(), state=st.sampled_from(SegmentState))
def test_segments_come_back_from_their_bytes(record: RemoteLogSegmentMetadataRecord, state: SegmentState) -> None:
    value = encode_record(record)
    assert decode_record(value) == record
    assert encode_record(decode_record(value)) == value
    kept = record._replace(state=state)
    assert decode_unframed_segment_metadata(b"before" + encode_unframed_segment_metadata(kept), 6) == (
        kept,
        6 + len(encode_unframed_segment_metadata(kept)),
    )


@given(
    st.builds(
        RemoteLogSegmentMetadataUpdateRecord, PARTITIONS, IDS, INT32, INT64, st.sampled_from(SegmentState), CUSTOM, tags(), st.just(())
    )
)
def test_updates_come_back_from_their_bytes(record: RemoteLogSegmentMetadataUpdateRecord) -> None:
    assert decode_record(encode_record(record)) == record


@given(st.builds(RemotePartitionDeleteMetadataRecord, PARTITIONS, INT32, INT64, st.sampled_from(PartitionDeleteState), tags(), st.just(())))
def test_deletions_come_back_from_their_bytes(record: RemotePartitionDeleteMetadataRecord) -> None:
    assert decode_record(encode_record(record)) == record


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: b"\x01\x00\x00" + rest))
def test_any_bytes_are_a_record_or_bad_data(value: bytes) -> None:
    try:
        record = decode_record(value, offset=1)
    except BadData:
        return
    assert decode_record(encode_record(record)) == record


@given(seed=st.integers(0, 2**32))
def test_the_fold_answers_as_the_plain_one_does(seed: int) -> None:
    cache, plain = RemoteLogMetadataCache(PARTITION), PlainCache()
    for offset, record in enumerate(script(random.Random(seed))):
        try:
            expected = plain.apply(record)
        except Stopped:
            with pytest.raises(BadData):
                cache.apply_record(record, offset)
            continue
        found = cache.apply_record(record, offset)
        assert (found is None or found.kind == "revived") == expected
        assert cache.apply_record(record, offset) is None, "what was applied is not applied again"
        if offset % 7 == 0:
            agree(cache, plain)
    agree(cache, plain)
    served_as_the_chain_says(cache, plain)


def agree(cache: RemoteLogMetadataCache, plain: PlainCache) -> None:
    assert {one.segment_id: one for one in cache.list_segments()} == plain.metadata
    for epoch in EPOCHS:
        state = plain.epochs.get(epoch)
        assert highest_offset(cache, epoch) == (state.highest if state else None)
        for offset in range(LAST_OFFSET + 2):
            found = cache.find_segment(epoch, offset)
            assert (found.segment_id if found else None) == plain.lookup(epoch, offset)
        listed = plain.listed(epoch)
        if listed is None:
            with pytest.raises(NotFound):
                list_epoch(cache, epoch)
            continue
        ours = list_epoch(cache, epoch)
        assert sorted((one.start_offset, one.segment_id) for one in ours) == sorted((plain.metadata[i].start_offset, i) for i in listed)
        assert [one.start_offset for one in ours] == [plain.metadata[i].start_offset for i in listed]
    holes = set()
    for epoch, state in plain.epochs.items():
        if state.offset_to_id:
            lost = {o for o in range(min(state.offset_to_id), (state.highest or 0) + 1) if plain.lookup(epoch, o) is None}
            holes |= {(epoch, offset) for offset in lost}
    assert {(hole.epoch, offset) for hole in lookup_holes(cache) for offset in range(hole.first, hole.last + 1)} == holes


def served_as_the_chain_says(cache: RemoteLogMetadataCache, plain: PlainCache) -> None:
    for lineage in map(lineage_entries, LINEAGES):
        links = segment_read_ranges(cache, lineage)
        said = {offset: link.segment.segment_id for link in links for offset in range(link.first, link.last + 1)}
        assert said == {o: raw_id for o in range(LAST_OFFSET + 10) if (raw_id := plain.serve(lineage, o))}
        for offset in range(LAST_OFFSET + 10):
            found = segment_for(cache, lineage, offset)
            assert (found.segment_id if found else None) == said.get(offset)
        between = {offset for first, last in offset_gaps(links) for offset in range(first, last + 1)}
        assert between == ({o for o in range(links[0].first, links[-1].last) if o not in said} if links else set())
