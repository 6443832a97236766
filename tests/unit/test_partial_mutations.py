"""Each check of rounds that read a segment in part, dropped in turn: the tests beside it notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bloom.directory import KeyDirectory
from compactor.cleaner.source import SourceSegment
from compactor.model.segment import CountAndDigestSum, SegmentFile
from compactor.round.partial import (
    KeyDirectoryCache,
    SegmentPartToRead,
    balance_with_copies,
    composed_removable_counts,
    flag_touched_batches,
    whole_read_reason,
)
from tests.simulation.mutations import Mutation, edited
from tests.unit import test_partial_rounds as near
from tests.unit.test_partial_rounds import directory, source

__all__ = ["directory", "source"]

Check = Callable[[SourceSegment, KeyDirectory], Any]
MERGED: Check = near.TestDueTogether().test_copied_tombstones_count_with_their_horizon


def read_whole(**changes: Any) -> Check:
    return lambda *_: near.TestWhatIsReadWhole().test_what_needs_a_look_at_all_of_it(changes)


def may_change(horizon_ms: int, *, is_touched: bool) -> Check:
    return lambda log, keys: near.TestWhichBatchesAreTouched().test_a_tombstone_from_its_horizon_on(log, keys, horizon_ms, is_touched)


PARTIAL_MUTATIONS: Mapping[str, tuple[Mutation, Check]] = {
    "a key directory may be of another segment": (
        edited(
            KeyDirectoryCache.load_key_directories,
            ' and sha256_of_batch_headers(directory.headers) == segment.recorded_size_and_digests("log").batches',
            "",
        ),
        lambda _, found: near.TestTheDirectoryIsTheSegments().test_by_the_digest_of_its_headers(found),
    ),
    "headers of what was read are not compared": (
        edited(
            SegmentPartToRead.require_matching_batches,
            " or not np.array_equal(copy_batch_headers(source.buf, source.table.position), wanted)",
            "",
        ),
        lambda log, keys: near.TestWhatIsReadIsWhatTheDirectorySays().test_another_header(log, keys, 1),
    ),
    "the recorded sum is not compared": (
        edited(balance_with_copies, "if sources != recorded_source_sum:", "if False:"),
        lambda log, keys: near.TestTheSumOfAllBatches().test_is_another_than_was_recorded(log, keys, CountAndDigestSum()),
    ),
    "a tombstone waits at its horizon": (
        edited(flag_touched_batches, "base_timestamp > now_ms", "base_timestamp >= now_ms"),
        may_change(near.NOW, is_touched=True),
    ),
    "a tombstone does not wait": (
        edited(flag_touched_batches, "table.base_timestamp > now_ms", "np.False_"),
        may_change(near.NOW + 1, is_touched=False),
    ),
    "a segment with aborted transactions is read in part": (
        edited(whole_read_reason, ' or "txnindex" in segment.files', ""),
        read_whole(files=near.segment().files | {"txnindex": SegmentFile(size=1)}),
    ),
    "a segment with negative timestamps is read in part": (
        edited(whole_read_reason, " or segment.negative_timestamps", ""),
        read_whole(negative_timestamps=1),
    ),
    "a segment whose end is cut is read in part": (
        edited(whole_read_reason, "segment.has_unread_tail or ", ""),
        read_whole(end_offset=90, copied_end_offset=99),
    ),
    "copied tombstones do not count": (
        edited(composed_removable_counts, "written.tombstones + int(np.count_nonzero(buried))", "written.tombstones"),
        MERGED,
    ),
    "copied tombstones have no horizon": (
        edited(composed_removable_counts, "plan.table.base_timestamp[buried].min(initial=NEVER_MS)", "NEVER_MS"),
        MERGED,
    ),
}
"""Rule that is dropped -> the mutation, and the test that notices."""


@pytest.mark.parametrize("rule", PARTIAL_MUTATIONS)
def test_missing_check_of_a_partial_round_is_noticed(rule: str, source: SourceSegment, directory: KeyDirectory) -> None:
    mutation, noticed_by = PARTIAL_MUTATIONS[rule]
    noticed_by(source, directory)
    with mutation(), pytest.raises((AssertionError, pytest.fail.Exception)):
        noticed_by(source, directory)
