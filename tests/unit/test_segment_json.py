"""A segment's metadata as it is written down: what a kind of tier adds does not change the bytes of those that do not use it."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from pydantic import ValidationError

from compactor.constants import LeaderEpoch, Offset, TimestampMs
from compactor.control.state import PartitionState
from compactor.model.segment import FILE_KINDS, CountAndDigestSum, EpochEntry, RemoteLogSegmentMetadata, SegmentFile

WRITTEN = (
    '{"id":"AAAAAAAAAAAAAAAAAAAAAA","start_offset":5,"end_offset":9,"size_bytes":100,"max_timestamp_ms":7,"mtime_ms":8,'
    '"leader_epochs":[{"epoch":0,"start_offset":0}],"files":{"log":{"size":100,"sha256":"ab"}},'
    '"first_timestamp_ms":-1,"due_ms":-1,"open_txn_offset":-1,"records":3}'
)
SEGMENT = RemoteLogSegmentMetadata(
    id="AAAAAAAAAAAAAAAAAAAAAA",
    start_offset=Offset(5),
    end_offset=Offset(9),
    size_bytes=100,
    max_timestamp_ms=TimestampMs(7),
    mtime_ms=8,
    leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(0)),),
    files={"log": SegmentFile(size=100, sha256="ab")},
    records=3,
)


def test_without_custom_metadata_the_bytes_are_as_ever() -> None:
    assert SEGMENT.model_dump_json() == WRITTEN
    assert RemoteLogSegmentMetadata.model_validate_json(WRITTEN) == SEGMENT


def test_custom_metadata_comes_back() -> None:
    custom = SEGMENT.model_copy(update={"custom_metadata": "AQID"})
    assert json.loads(custom.model_dump_json()) == json.loads(WRITTEN) | {"custom_metadata": "AQID"}
    assert RemoteLogSegmentMetadata.model_validate_json(custom.model_dump_json()) == custom


def test_a_file_without_a_digest_of_ours_comes_back() -> None:
    """A broker wrote it; whoever mirrors it may leave the digest out."""
    bare = SEGMENT.model_copy(update={"files": {"log": SegmentFile(size=100)}})
    assert RemoteLogSegmentMetadata.model_validate_json(bare.model_dump_json()) == bare
    assert RemoteLogSegmentMetadata.model_validate_json(WRITTEN.replace(',"sha256":"ab"', "")) == bare


def test_a_log_that_was_put_together_of_copies_comes_back() -> None:
    both = SEGMENT.model_copy(update={"files": {"log": SegmentFile(size=100, sha256="ab", batches="cd")}})
    assert both.model_dump_json() == WRITTEN.replace('"sha256":"ab"', '"sha256":"ab","batches":"cd"')
    assert RemoteLogSegmentMetadata.model_validate_json(both.model_dump_json()) == both
    spliced = SEGMENT.model_copy(update={"files": {"log": SegmentFile(size=100, batches="cd")}})
    assert RemoteLogSegmentMetadata.model_validate_json(spliced.model_dump_json()) == spliced


@pytest.mark.parametrize("value", ['"sha256":"ab"', '"batches":"cd"'])
def test_a_field_of_a_later_version_is_refused_in_a_file_and_in_a_sum(value: str) -> None:
    assert RemoteLogSegmentMetadata.model_validate_json(WRITTEN.replace('"sha256":"ab"', value)).files
    for later in (f'{value},"sha3":"ef"}}', f'{value}}}}},"content":{{"count":1,"digits":"0"'):
        with pytest.raises(ValidationError):
            RemoteLogSegmentMetadata.model_validate_json(WRITTEN.replace('"sha256":"ab"}', later))


def test_an_open_state_takes_less_than_2_kb_a_segment() -> None:
    files = {kind: SegmentFile(size=1000, sha256=f"{number:064x}") for number, kind in enumerate(FILE_KINDS) if kind != "txnindex"}
    content = CountAndDigestSum(count=3, digest="ab" * 16)
    numbers = ("start_offset", "end_offset", "size_bytes", "max_timestamp_ms", "mtime_ms", "first_timestamp_ms", "records")
    live = tuple(
        SEGMENT.model_copy(update={"id": f"{number:022}", "files": files, "content": content} | dict.fromkeys(numbers, 10**12 + number))
        for number in range(500)
    )
    stored = PartitionState(topic="orders", partition=0, live=live).model_dump_json()
    PartitionState.model_validate_json(stored)
    tracemalloc.start()
    try:
        opened = PartitionState.model_validate_json(stored)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert opened.live == live
    assert taken <= 1900 * len(live)


def file(sha256: str = "", batches: str = "", size: int = 100) -> SegmentFile:
    return SegmentFile(size=size, sha256=sha256, batches=batches)


@pytest.mark.parametrize(
    ("one", "other", "comparable", "same"),
    [
        (file("a"), file("a"), True, True),
        (file("a"), file("b"), True, False),
        (file("a"), file("a", size=99), True, False),
        (file(batches="a"), file(batches="a"), True, True),
        (file(batches="a"), file(batches="b"), True, False),
        (file("a", "b"), file("a"), True, True),
        (file("a", "b"), file(batches="b"), True, True),
        (file("a", "b"), file("a", "c"), True, False),
        (file("a", "b"), file("c", "b"), True, False),
        (file("a"), file(batches="a"), False, False),
        (file("a", "b"), file(), False, False),
        (file(), file(), False, False),
    ],
)
def test_files_are_compared_by_the_digests_that_both_have(one: SegmentFile, other: SegmentFile, *, comparable: bool, same: bool) -> None:
    for a, b in ((one, other), (other, one)):
        assert (a.is_comparable_with(b), a.has_same_content_as(b)) == (comparable, same)


def test_without_a_digest_the_size_is_what_counts() -> None:
    assert (file().has_digest, file("a").has_digest, file(batches="a").has_digest) == (False, True, True)
    assert file().matches_read_file(file("a"))
    assert not file().matches_read_file(file(size=99))
    assert not file("a").matches_read_file(file())
    assert file("a").matches_read_file(file("a", "b"))
