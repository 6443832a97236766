"""Which segments retention deletes: the decision beside a transcription of Kafka's own loops, and its edges one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from checkpoint.lineage import EpochEntry
from compactor.config.settings import CleanerSettings, load_settings
from compactor.constants import NEVER_MS, LeaderEpoch, Offset, TimestampMs
from compactor.control.state import PartitionState
from compactor.control.summary import summarize_state
from compactor.errors import UsageError
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import ExpiredSegments, assess_round, find_expired_segments, next_expiry_ms
from compactor.tier.kinds import tier_kind

NOW = 1_000_000


def segment(number: int, stamp: int = NOW, size: int = 100, mtime: int = NOW, **facts: Any) -> RemoteLogSegmentMetadata:
    start = 10 * number
    return RemoteLogSegmentMetadata(
        id=f"s{number}", start_offset=Offset(start), end_offset=Offset(start + 9), size_bytes=size,
        max_timestamp_ms=TimestampMs(stamp), mtime_ms=mtime,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(start)),), files={}, **facts,
    )  # fmt: skip


def state(*live: RemoteLogSegmentMetadata, start: int | None = None, **changes: Any) -> PartitionState:
    return PartitionState(topic="orders", partition=0, live=live, log_start_offset=start, **changes)


def cleaner(**settings: Any) -> CleanerSettings:
    return CleanerSettings.model_validate({"cleanup_policy": "compact,delete", **settings})


def expired(given: PartitionState, settings: CleanerSettings, now_ms: int = NOW) -> ExpiredSegments | None:
    """The decision over the state, which must be the same over its summary."""
    found = find_expired_segments(given, settings, now_ms)
    assert find_expired_segments(summarize_state(given), settings, now_ms) == found
    return found


def kafka(sizes: list[int], stamps: list[int], mtimes: list[int], retention_ms: int, retention_bytes: int, now_ms: int) -> int:
    """Number of segments that UnifiedLog.deleteOldSegments of Kafka 4.4 deletes, all of them below the high watermark."""
    segments = list(zip(sizes, stamps, mtimes, strict=True))

    def deletable(predicate: Any) -> int:
        count = 0
        for one in segments:
            if not predicate(one):
                break
            count += 1
        return count

    deleted = 0
    if retention_ms >= 0:
        gone = deletable(lambda one: now_ms - (one[1] if one[1] >= 0 else one[2]) > retention_ms)
        del segments[:gone]
        deleted += gone
    size = sum(one[0] for one in segments)
    if retention_bytes >= 0 and size >= retention_bytes:
        diff = size - retention_bytes

        def should_delete(one: tuple[int, int, int]) -> bool:
            nonlocal diff
            if diff - one[0] >= 0:
                diff -= one[0]
                return True
            return False

        deleted += deletable(should_delete)
    return deleted


stamps = st.one_of(st.just(-1), st.integers(NOW - 20, NOW + 5))


@given(
    st.lists(st.tuples(st.integers(1, 30), stamps, st.integers(NOW - 20, NOW + 5)), min_size=1, max_size=6),
    st.integers(-1, 20),
    st.integers(-1, 100),
)
def test_the_prefix_is_the_one_that_kafka_deletes(drawn: list[tuple[int, int, int]], retention_ms: int, retention_bytes: int) -> None:
    live = tuple(segment(n, stamp, size, mtime) for n, (size, stamp, mtime) in enumerate(drawn))
    found = expired(state(*live), cleaner(retention_ms=retention_ms, retention_bytes=retention_bytes))
    sizes, times, modified = (list(column) for column in zip(*drawn, strict=True))
    count = kafka(sizes, times, modified, retention_ms, retention_bytes, NOW)
    assert (found.log_start_offset if found else 0) == 10 * count
    # Kafka rolls the newest segment and deletes it, too; here it stays as the anchor.
    assert (found.segments if found else 0) == min(count, len(live) - 1)


class TestAge:
    def test_a_segment_expires_once_its_largest_timestamp_is_older_than_the_limit(self) -> None:
        live = (segment(0, NOW - 11), segment(1, NOW - 10), segment(2))
        found = expired(state(*live), cleaner(retention_ms=10))
        assert found == ExpiredSegments(10, 1, 100, "1 segment is older than retention_ms")

    def test_a_young_segment_keeps_the_older_ones_behind_it(self) -> None:
        assert expired(state(segment(0), segment(1, NOW - 99), segment(2)), cleaner(retention_ms=10)) is None

    def test_without_timestamps_the_modification_time_counts(self) -> None:
        live = (segment(0, -1, mtime=NOW - 11), segment(1, -1, mtime=NOW - 10), segment(2))
        found = expired(state(*live), cleaner(retention_ms=10))
        assert found
        assert found.log_start_offset == 10

    def test_a_clock_that_is_behind_expires_nothing(self) -> None:
        live = (segment(0, NOW - 11), segment(1))
        assert expired(state(*live), cleaner(retention_ms=10), NOW - 1) is None

    def test_everything_may_expire_and_the_newest_segment_stays(self) -> None:
        live = (segment(0, NOW - 50), segment(1, NOW - 50))
        found = expired(state(*live), cleaner(retention_ms=10))
        assert found
        assert (found.log_start_offset, found.segments) == (20, 1)

    @pytest.mark.parametrize(("retention_ms", "moment"), [(10, NOW + 11), (-1, NEVER_MS)])
    def test_the_next_moment_is_that_of_the_first_segment(self, retention_ms: int, moment: int) -> None:
        given = state(segment(0), segment(1, NOW - 99))
        assert next_expiry_ms(given, cleaner(retention_ms=retention_ms)) == moment


class TestSize:
    @pytest.mark.parametrize(("limit", "offset"), [(400, None), (301, None), (300, 10), (201, 10), (200, 20), (1, 30), (0, 40)])
    def test_segments_go_while_what_remains_is_at_least_the_limit(self, limit: int, offset: int | None) -> None:
        found = expired(state(*(segment(n) for n in range(4))), cleaner(retention_bytes=limit))
        assert (found.log_start_offset if found else None) == offset

    def test_segments_below_the_log_start_and_those_that_wait_do_not_count(self) -> None:
        live = (segment(1), segment(2), segment(3))
        assert expired(state(*live, start=15), cleaner(retention_bytes=201)) is None
        found = expired(state(*live, start=20), cleaner(retention_bytes=200))
        assert found == ExpiredSegments(20, 1, 100, "they lie below the log start")


class TestPolicy:
    def test_compact_alone_expires_nothing(self) -> None:
        live = (segment(0, 0), segment(1))
        settings = cleaner(cleanup_policy="compact", retention_ms=1, retention_bytes=0)
        assert expired(state(*live), settings) is None
        assert next_expiry_ms(state(*live), settings) == NEVER_MS

    def test_what_was_deleted_by_hand_and_stayed_as_the_newest_goes_under_any_policy(self) -> None:
        found = expired(state(segment(0), segment(1), start=10), cleaner(cleanup_policy="compact"))
        assert found == ExpiredSegments(10, 1, 100, "they lie below the log start")

    def test_brokers_expire_their_own_segments(self) -> None:
        assert expired(state(segment(0, 0), segment(1), mirrored=True), cleaner(retention_ms=1)) is None

    def test_delete_alone_cleans_nothing(self) -> None:
        found = assess_round(state(segment(0), segment(1)), cleaner(cleanup_policy="delete"), NOW, force=True)
        assert (found.due, found.covered_segments, found.reason) == (False, (), 'cleanup_policy is "delete"')

    def test_a_round_begins_at_the_log_start_and_leaves_out_what_nobody_reads(self) -> None:
        live = (segment(0, due_ms=1), segment(1))
        assert assess_round(state(*live, start=15), cleaner(), NOW).first_dirty == 15
        unread = assess_round(state(segment(0, due_ms=1), start=10), cleaner(), NOW, force=True)
        assert (unread.due, unread.covered_segments, unread.horizon_due) == (False, (), ())


@pytest.mark.parametrize("table", ["[cleaner]\nretention_ms = 5\n", '[topics."a"]\ncleanup_policy = "delete"\n'])
def test_tiers_that_brokers_manage_refuse_retention_of_ours(table: str, tmp_path: Any) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[tier]\nkind = "kafka"\nlayout = "aiven"\nurl = "s3://b"\n' + table)
    with pytest.raises(UsageError, match="brokers expire the segments of this tier"):
        tier_kind(load_settings(str(file), {}))
    file.write_text('[tier]\nurl = "s3://b"\n' + table)
    tier_kind(load_settings(str(file), {}))


@pytest.mark.parametrize("kind", ['kind = "kafka"\nlayout = "aiven"', 'layout = "pinterest"'])
def test_only_tiers_of_our_own_delete_topics_that_their_cluster_has_deleted(kind: str, tmp_path: Any) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'[tier]\n{kind}\nurl = "s3://b"\non_topic_deletion = "delete"\n')
    with pytest.raises(UsageError, match="this tier has another owner"):
        tier_kind(load_settings(str(file), {}))
    file.write_text('[tier]\nurl = "s3://b"\non_topic_deletion = "delete"\n')
    tier_kind(load_settings(str(file), {}))
