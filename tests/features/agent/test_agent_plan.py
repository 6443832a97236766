"""What the agent does next, by values alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compactor.adapters.brokers.chain import LeaderReportedLogEnd
from compactor.constants import LeaderEpoch, TopicId
from compactor.errors import UsageError
from compactor.features.agent.log_directories import BrokerIdentity, read_broker_identity, scan_log_directory, scan_partition_directory
from compactor.features.agent.plan import (
    CHECK_MS,
    MAX_UPLOAD_RETRY_MS,
    TICK_MS,
    UPLOAD_RETRY_MS,
    PartitionDirectoryListing,
    PartitionUploadState,
    SealedSegmentFile,
    UploadFailureReason,
    UploadOutcome,
    adoption_log_line,
    choose_uploads,
    is_listing_current,
    is_upload_due,
    needs_log_end_query,
    upload_lag,
    with_directory_listing,
    with_leadership,
    with_log_end,
    with_upload_outcome,
)
from compactor.model.ids import TopicPartition

pytestmark = pytest.mark.quick

NOW = 1_000_000
ORDERS = TopicPartition("orders", 0)
SEALED = (SealedSegmentFile(0, 10, 100, 500), SealedSegmentFile(10, 20, 0, 600), SealedSegmentFile(20, 30, 300, 700))
SEEN = PartitionDirectoryListing(ORDERS, "/somewhere", NOW - 5_000, NOW, SEALED, active_base=30)
WATCH = PartitionUploadState(SEEN, leads=True, position=10, end=LeaderReportedLogEnd(LeaderEpoch(1), 35), checked_ms=NOW)


def test_lag_counts_what_is_sealed_and_not_in_the_tier() -> None:
    assert (upload_lag(WATCH).segments, upload_lag(WATCH).bytes, upload_lag(WATCH).since_ms) == (1, 300, 700)
    assert upload_lag(replace(WATCH, position=25)).segments == 1
    assert upload_lag(replace(WATCH, position=30)) == upload_lag(replace(WATCH, leads=False)) == upload_lag(replace(WATCH, position=None))


def test_a_segment_is_due_once_it_is_wholly_below_the_high_watermark() -> None:
    assert is_upload_due(WATCH, NOW)
    assert is_upload_due(replace(WATCH, end=LeaderReportedLogEnd(LeaderEpoch(1), 30)), NOW)
    assert not is_upload_due(replace(WATCH, end=LeaderReportedLogEnd(LeaderEpoch(1), 29)), NOW)
    assert needs_log_end_query(replace(WATCH, end=LeaderReportedLogEnd(LeaderEpoch(1), 29)), NOW)
    assert not is_upload_due(replace(WATCH, leads=False), NOW)
    assert not is_upload_due(replace(WATCH, end=None), NOW)
    assert not is_upload_due(replace(WATCH, position=30), NOW)
    assert is_upload_due(replace(WATCH, position=None), NOW)


def test_adoption_list_waits_for_every_partition_and_puts_the_nearest_deadline_first() -> None:
    other = replace(WATCH, seen=replace(SEEN, partition=TopicPartition("orders", 1)))
    late = replace(WATCH, trouble=UploadFailureReason.IDENTITY)
    soon = replace(other, trouble=UploadFailureReason.IDENTITY, deadline_ms=NOW)
    assert adoption_log_line([late, replace(other, position=None)]) is None
    assert adoption_log_line([WATCH, other]) == ""
    assert (adoption_log_line([late, soon]) or "").endswith("orders-1 (until 1970-01-01T00:16:40Z), orders-0")


def test_brokers_are_asked_now_and_then_though_nothing_is_pending() -> None:
    idle = replace(WATCH, position=30)
    assert not needs_log_end_query(idle, NOW + CHECK_MS - 1)
    assert needs_log_end_query(idle, NOW + CHECK_MS)
    assert not needs_log_end_query(replace(idle, leads=False), NOW + CHECK_MS)


def test_what_was_sealed_first_goes_first_and_no_more_than_there_are_threads() -> None:
    watches = [
        replace(WATCH, seen=replace(SEEN, partition=TopicPartition("orders", number), sealed=(SealedSegmentFile(20, 30, 1, 900 - number),)))
        for number in range(5)
    ]
    assert [watch.partition.partition for watch in choose_uploads(watches, {}, 3, NOW)] == [4, 3, 2]
    assert [watch.partition.partition for watch in choose_uploads(watches, {TopicPartition("orders", 3): 0}, 3, NOW)] == [4, 2]


def test_failures_double_the_pause_up_to_ten_minutes() -> None:
    watch, pauses = WATCH, []
    for _ in range(10):
        watch = with_upload_outcome(watch, UploadOutcome(None, trouble=UploadFailureReason.CONTENT, reason="a wrong CRC"), NOW)
        pauses.append(watch.retry_at_ms - NOW)
        assert not is_upload_due(watch, watch.retry_at_ms - 1)
        assert is_upload_due(watch, watch.retry_at_ms)
    assert pauses[:3] == [UPLOAD_RETRY_MS, 2 * UPLOAD_RETRY_MS, 4 * UPLOAD_RETRY_MS]
    assert pauses[-1] == MAX_UPLOAD_RETRY_MS
    good = with_upload_outcome(watch, UploadOutcome(30, 1, 300), NOW)
    assert (good.failures, good.trouble, good.position, good.retry_at_ms) == (0, None, 30, 0)


def test_a_success_that_brought_nothing_is_not_repeated_at_once() -> None:
    assert with_upload_outcome(WATCH, UploadOutcome(10), NOW).retry_at_ms == NOW + CHECK_MS


def test_an_upload_that_was_stopped_changes_nothing() -> None:
    assert with_upload_outcome(WATCH, UploadOutcome(None, stopped=True), NOW) == WATCH


def test_who_begins_to_lead_asks_the_tier_where_it_ends() -> None:
    assert with_leadership(WATCH, True) == WATCH
    assert with_leadership(with_leadership(WATCH, False), True) == PartitionUploadState(SEEN, leads=True)
    later = with_log_end(replace(WATCH, position=30), LeaderReportedLogEnd(LeaderEpoch(2), 35), NOW)
    assert (later.position, later.anew) == (30, True)
    assert is_upload_due(later, NOW)
    assert not with_upload_outcome(later, UploadOutcome(30), NOW).anew


def test_a_log_that_ends_below_the_tier_is_said_and_forgotten_when_it_does_not() -> None:
    behind = with_log_end(WATCH, LeaderReportedLogEnd(LeaderEpoch(1), 9), NOW)
    assert behind.trouble is UploadFailureReason.BEHIND
    assert not is_upload_due(behind, NOW)
    assert is_upload_due(behind, NOW, accept_truncation=True)
    assert with_log_end(behind, LeaderReportedLogEnd(LeaderEpoch(1), 10), NOW).trouble is None
    failing = replace(WATCH, trouble=UploadFailureReason.LINEAGE, reason="other epochs")
    assert with_log_end(failing, LeaderReportedLogEnd(LeaderEpoch(1), 9), NOW).trouble is UploadFailureReason.LINEAGE


def test_a_directory_is_listed_again_when_it_changed_or_may_have() -> None:
    assert is_listing_current(SEEN, SEEN.mtime_ms)
    assert not is_listing_current(SEEN, SEEN.mtime_ms + 1)
    assert not is_listing_current(None, SEEN.mtime_ms)
    assert not is_listing_current(replace(SEEN, scanned_ms=SEEN.mtime_ms + TICK_MS), SEEN.mtime_ms)
    assert not is_listing_current(replace(SEEN, problem="it cannot be read"), SEEN.mtime_ms)
    assert with_directory_listing(WATCH, SEEN) == WATCH


def test_a_topic_that_was_created_again_is_watched_anew_whenever_its_id_becomes_readable() -> None:
    known = replace(WATCH, seen=replace(SEEN, topic_id=TopicId("first")), position=30)
    again = replace(SEEN, topic_id=TopicId("second"))
    assert with_directory_listing(known, again) == PartitionUploadState(again, leads=True)
    without_id = with_directory_listing(known, SEEN)  # listed before the broker wrote partition.metadata
    assert with_directory_listing(replace(without_id, position=30), again) == PartitionUploadState(again, leads=True)
    assert with_directory_listing(known, known.seen).position == 30


def test_log_directories_are_read_by_names(tmp_path: Path) -> None:
    for name in ("orders-0", "orders-1.0123abc-delete", "orders-2.0123abc-future", "other-0", "__cluster_metadata-0", "orders"):
        (tmp_path / name).mkdir()
    for name in (f"{7:020}.log", f"{3:020}.log", f"{0:020}.log.deleted", f"{3:020}.index", f"{5:020}.log.cleaned", "x.log"):
        (tmp_path / "orders-0" / name).write_bytes(b"12")
    (tmp_path / "recovery-point-offset-checkpoint").write_text("0\n0\n")
    (seen,) = scan_log_directory(tmp_path, ["orders|__cluster.*"], {}, NOW)
    assert (seen.partition, seen.active_base) == (ORDERS, 7)
    assert [(file.base, file.end, file.size) for file in seen.sealed] == [(3, 7, 2)]
    (tmp_path / "__internal-0").mkdir()
    held = ["__internal"]
    asked = (([".*"], ()), ([".*", "__internal"], ()), (["__.*"], ()), (["_.*"], ()), ([".*"], held), (["x"], held))
    chosen = [[each.partition.topic for each in scan_log_directory(tmp_path, topics, {}, NOW, tier)] for topics, tier in asked]
    both = ["__internal", "orders", "other"]
    assert chosen == [both[1:], both, both[:1], [], both, []]
    settled = replace(seen, scanned_ms=seen.mtime_ms + TICK_MS + 1)
    (again,) = scan_log_directory(tmp_path, ["orders"], {ORDERS: settled}, NOW)
    assert again is settled
    assert scan_partition_directory(ORDERS, tmp_path / "gone", 0, NOW).active_base == -1


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        ("#x\nnode.id=3\nversion=1\ncluster.id=abc\n", BrokerIdentity(3, "abc")),
        ("version=0\nbroker.id=4\ncluster.id=a=b\n", BrokerIdentity(4, "a=b")),
    ],
)
def test_a_brokers_directory_says_whose_it_is(tmp_path: Path, text: str, whose: BrokerIdentity) -> None:
    (tmp_path / "meta.properties").write_text(text)
    assert read_broker_identity(tmp_path) == whose


@pytest.mark.parametrize("text", [None, "", "node.id=3\n", "cluster.id=abc\n", "node.id=x\ncluster.id=abc\n"])
def test_what_is_no_brokers_directory(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "meta.properties").write_text(text)
    with pytest.raises(UsageError, match=r"meta\.properties"):
        read_broker_identity(tmp_path)
