"""Aiven's formats: the chunk sizes' codec, custom metadata, and manifests of which one byte is wrong."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from compactor.adapters.brokers.aiven.layout import AivenLayout
from compactor.adapters.brokers.aiven.manifest import (
    CustomMetadata,
    InvalidAivenDataError,
    compressed_chunk_index,
    decode_chunk_sizes,
    encode_chunk_sizes,
    uncompressed_chunk_index,
)
from compactor.errors import BadData, Refused
from compactor.storage.wrappers import RequestCounters
from tests.support.broker_tiers import ORDERS, BrokerTier, aiven_tier
from tests.support.memory_store import Clock, MemoryStore
from tests.support.plain_aiven import codec

SIZES = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), max_size=20),
    st.integers(0, 2**30).flatmap(lambda base: st.lists(st.integers(base, base + 300), min_size=1, max_size=300)),
)
CUSTOM = st.builds(
    CustomMetadata,
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.text(st.characters(codec="utf-8"), max_size=200),
    st.none() | st.text(st.characters(codec="utf-8"), max_size=200),
    st.dictionaries(st.integers(3, 2**31 - 1), st.binary(max_size=200), max_size=3).map(lambda fields: tuple(sorted(fields.items()))),
)


@given(SIZES)
def test_sizes_of_chunks(sizes: list[int]) -> None:
    written = encode_chunk_sizes(sizes)
    assert decode_chunk_sizes(written) == tuple(sizes)
    assert codec(written) == sizes
    if len(sizes) > 2:
        assert len(written) <= 13 + 4 * (len(sizes) - 1)


@given(st.binary(max_size=40))
def test_a_codec_of_any_bytes_is_one_list_or_refused(data: bytes) -> None:
    try:
        sizes = decode_chunk_sizes(data)
    except InvalidAivenDataError:
        return
    assert len(data) >= 4 + 4 * min(len(sizes), 1)
    if all(size >= 0 for size in sizes) and len(sizes) < 2:
        assert encode_chunk_sizes(sizes) == data


@given(CUSTOM)
def test_custom_metadata(custom: CustomMetadata) -> None:
    assert CustomMetadata.decode(custom.encode()) == custom


@given(CUSTOM, st.data())
def test_custom_metadata_that_is_cut_off_is_refused(custom: CustomMetadata, data: st.DataObject) -> None:
    raw = base64.b64decode(custom.encode())
    if raw:
        cut = data.draw(st.integers(0, len(raw) - 1))
        for wrong in (raw[:cut], raw + b"\0"):
            if wrong:
                with pytest.raises(InvalidAivenDataError):
                    CustomMetadata.decode(base64.b64encode(wrong).decode())


@given(st.integers(1, 5000), st.integers(1, 20_000), st.data())
def test_chunks_cover_the_log_and_the_object(chunk_size: int, file_size: int, data: st.DataObject) -> None:
    count = -(-file_size // chunk_size)
    index = uncompressed_chunk_index(chunk_size, file_size, 28)
    index.require_uncompressed_chunks(28)
    if count <= 300:
        lengths = data.draw(st.lists(st.integers(1, 9000), min_size=count, max_size=count))
        index = data.draw(st.sampled_from([index, compressed_chunk_index(chunk_size, file_size, lengths)]))
    start = data.draw(st.integers(0, file_size - 1))
    end = data.draw(st.integers(start + 1, file_size))
    chunks = [index.stored_chunk(number) for number in index.chunk_numbers(start, end)]
    assert chunks[0].start <= start < chunks[0].start + chunks[0].size
    assert chunks[-1].start < end <= chunks[-1].start + chunks[-1].size
    for one, following in pairwise(chunks):
        assert (one.start + one.size, one.stored_start + one.stored_size) == (following.start, following.stored_start)
    last = index.stored_chunk(count - 1)
    assert (last.start + last.size, last.stored_start + last.stored_size) == (file_size, index.stored_size)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aiven")


def damaged(whole: bytes, alike: tuple[range, ...]) -> Iterator[tuple[int, bytes]]:
    """Each byte with its lowest bit flipped (some of those that are all ``alike``); then cut off in several places."""
    for at, byte in enumerate(whole):
        if at % 16 == 0 or not any(at in span for span in alike):
            yield at, whole[:at] + bytes([byte ^ 1]) + whole[at + 1 :]
    for at in range(0, len(whole), 37):
        yield at, whole[:at]


@pytest.mark.parametrize("case", ["plain", "zstd", "encrypted", "all"])
def test_a_manifest_with_one_wrong_byte_is_refused_or_says_the_same(case: str, scratch: Path) -> None:
    """Only what nobody reads may be wrong unnoticed: in ``remoteLogSegmentMetadata``."""
    tier = aiven_tier(case, scratch)
    store = MemoryStore(Clock(), RequestCounters())
    for path in tier.objects.rglob("*"):
        if path.is_file():
            store.put(str(path.relative_to(tier.objects)), path.read_bytes())
    segment = tier.segments[1]
    layout = AivenLayout(store, tier.topic, tier.settings())
    key = layout.object_name(ORDERS, segment, "log").replace(".log", ".rsm-manifest")
    whole = store.get(key)
    unread = whole.index(b'"remoteLogSegmentMetadata":{') + len(b'"remoteLogSegmentMetadata":{')
    wrapped = whole.find(b'"dataKey":"key')
    expected = contents(tier, store)
    refused = set()
    alike = (range(wrapped + 20, wrapped + 350), range(unread, len(whole))) if wrapped > 0 else ()  # each costs an RSA decryption
    for at, text in damaged(whole, alike):
        store.put(key, text)
        found = answer(tier, store)
        if isinstance(found, str):
            assert Path(key).name.partition(".")[0] in found
            refused.add(at)
        else:
            assert at >= unread, text
            assert found == expected
    assert len(refused) > 400


def answer(tier: BrokerTier, store: MemoryStore) -> dict[str, bytes] | str:
    try:
        return contents(tier, store)
    except (BadData, Refused) as error:
        return str(error)


def contents(tier: BrokerTier, store: MemoryStore) -> dict[str, bytes]:
    layout, segment = AivenLayout(store, tier.topic, tier.settings()), tier.segments[1]
    return {kind: layout.read_file(ORDERS, segment, kind) for kind in layout.segment_files(ORDERS, segment)}
