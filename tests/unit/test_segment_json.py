"""A segment's metadata as it is written down: what a kind of tier adds does not change the bytes of those that do not use it."""

from __future__ import annotations

import json

from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile

WRITTEN = (
    '{"id":"AAAAAAAAAAAAAAAAAAAAAA","start_offset":5,"end_offset":9,"size_bytes":100,"max_timestamp_ms":7,"mtime_ms":8,'
    '"leader_epochs":[{"epoch":0,"start_offset":0}],"files":{"log":{"size":100,"sha256":"ab"}},'
    '"first_timestamp_ms":-1,"due_ms":-1,"open_txn_offset":-1,"records":3}'
)
SEGMENT = RemoteLogSegmentMetadata(
    id="AAAAAAAAAAAAAAAAAAAAAA",
    start_offset=5,
    end_offset=9,
    size_bytes=100,
    max_timestamp_ms=7,
    mtime_ms=8,
    leader_epochs=(EpochEntry(0, 0),),
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
