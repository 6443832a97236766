"""A partition whose log start was raised: what readers see, what rounds do, and what its segments become."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.consumer import ConsumerOptions, Place, TieredConsumer
from compactor.control.ports import ObjectRetention
from compactor.control.publication import undo_round
from compactor.control.state import PartitionState
from compactor.errors import UsageError
from compactor.features.erasure.partition import KeySearchRequest, survey_partition
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition
from compactor.read.ranges import read_record_blocks
from compactor.read.reading import offset_for_time, time_offset_or_end
from compactor.upkeep.export import export_partition
from compactor.upkeep.orphans import delete_records
from compactor.upkeep.retire import GraceClock, retire_partition
from compactor.upkeep.verify import verify_partition
from compactor.views.explain import explain_key, explain_offset, explain_partition
from compactor.views.forecast import forecast_next_round
from tests.builders import LZ4, LogBuilder, log_of, read

NAME = TopicPartition("orders", 0)
NOW_MS = 10_000_000_000_000
REFRESH_S = 0.002


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return opened(tmp_path, "")


def opened(tmp_path: Path, cleaner: str) -> Tier:
    file = tmp_path / "settings.toml"
    file.write_text(f'[tier]\nurl = "{(tmp_path / "a tier").as_uri()}"\nstate_dir = "{tmp_path / "state"}"\n[cleaner]\n{cleaner}\n')
    return open_tier(load_settings(str(file), {}))


def imported(tier: Tier, folder: Path) -> LogBuilder:
    """Offsets 0..4 in one segment (two batches, the first one compressed), 5..7 in the next, 8..9 in the newest."""
    log = LogBuilder(time=1_000)
    log.put("a=0", "b=1", "c=2", codec=LZ4)
    log.add("a=3 d=4; /; b=5 e=6 e=7; /; c=8 f=9; /")
    bring(tier, log, folder)
    return log


def bring(tier: Tier, log: LogBuilder, folder: Path) -> None:
    import_directory(tier, log.write(folder / "log"), NAME, tier.settings.cleaner.cleaner_policy())


def state_of(tier: Tier) -> PartitionState:
    return tier.open_partition_log(NAME).refresh()


def offsets(tier: Tier, **options: Any) -> list[int]:
    return [message.offset() or 0 for block in read_record_blocks(tier, NAME, **options) for message in block.messages()]


def errors(tier: Tier) -> list[Any]:
    return [problem for problem in verify_partition(tier, NAME, compares_batch_digest_sums=True) if problem.severity == "error"]


def raised(tier: Tier, offset: int) -> PartitionState:
    return delete_records(tier, NAME, offset)[1]


def test_readers_begin_at_the_log_start_also_inside_a_batch(tier: Tier, tmp_path: Path) -> None:
    imported(tier, tmp_path)
    for start in range(11):
        state = raised(tier, start)
        assert state.log_start == start
        assert offsets(tier) == list(range(start, 10))
        assert offsets(tier, first_offset=1) == list(range(max(1, start), 10))
        values = {0: [3, 4, 5, 7, 8, 9], 4: [4, 5, 7, 8, 9], 8: [8, 9], 10: []}
        if start in values:
            assert offsets(tier, latest_only=True) == values[start]
        assert offset_for_time(tier, NAME, 0) == (start if start < 10 else None)
    assert [segment.start_offset for segment in state_of(tier).live] == [8]


def test_a_consumer_below_the_log_start_goes_on_by_its_offset_reset(tier: Tier, tmp_path: Path) -> None:
    log = imported(tier, tmp_path)
    for start in (6, 10):
        raised(tier, start)
        with TieredConsumer(tier, options=ConsumerOptions(refresh_s=REFRESH_S)) as consumer:
            consumer.assign([Place(*NAME, 2)])
            found = [message for _ in range(100) for message in consumer.consume(5, timeout=REFRESH_S)]
            assert [(message.error(), message.offset()) for message in found] == [(None, offset) for offset in range(start, 10)]
            assert consumer.position([Place(*NAME)]) == [Place(*NAME, 10)]
            assert consumer.get_watermark_offsets(Place(*NAME)) == (start, 10)
        with TieredConsumer(tier, options=ConsumerOptions(refresh_s=REFRESH_S, offset_reset="error")) as consumer:
            consumer.assign([Place(*NAME, 2)])
            (message,) = [message for _ in range(100) for message in consumer.consume(5, timeout=REFRESH_S)]
            assert "OFFSET_OUT_OF_RANGE" in str(message.error())
            assert f"the tier begins at {start}" in str(message.error())
    log.add("g=10; /")
    bring(tier, log, tmp_path)
    assert offsets(tier) == [10]


def test_a_consumer_that_is_overtaken_by_retention_is_told(tier: Tier, tmp_path: Path) -> None:
    """The segment that it reads next is deleted: it goes on at the log start, and nothing is passed over in silence."""
    imported(tier, tmp_path)
    with TieredConsumer(tier, options=ConsumerOptions(refresh_s=REFRESH_S, offset_reset="error", threads=1)) as consumer:
        consumer.assign([Place(*NAME, 0)])
        assert [message.offset() for message in consumer.consume(1, timeout=5)] == [0]
        raised(tier, 8)
        retire_partition(
            tier.ports,
            tier.open_partition_log(NAME),
            tier.lease,
            ObjectRetention(grace_ms=0),
            clock=GraceClock(NOW_MS * 2, forced=True),
        )
        found = [message for _ in range(100) for message in consumer.consume(5, timeout=REFRESH_S)]
    read = [message.offset() for message in found if message.error() is None]
    assert read == list(range(1, 1 + len(read)))
    assert read[-1] == 9 or "the tier begins at 8" in str(found[-1].error())


def test_a_round_treats_a_segment_that_the_log_start_divides_as_a_whole(tier: Tier, tmp_path: Path) -> None:
    imported(tier, tmp_path)
    raised(tier, 2)
    report = compact(tier, NAME, NOW_MS, force=True)
    assert (report.status, report.first_dirty_offset, report.next_dirty_offset) == ("cleaned", 2, 10)
    state = state_of(tier)
    assert (state.start_offset, state.log_start) == (0, 2)
    # Offset 0 is superseded by 3, offset 1 by 5, 2 by 8. Nothing is dropped because it lies below the log start.
    assert offsets(tier) == [3, 4, 5, 7, 8, 9]
    assert errors(tier) == []


def test_records_below_the_log_start_that_nothing_supersedes_stay_in_their_segment(tier: Tier, tmp_path: Path) -> None:
    log = log_of("only=0 a=1 a=2 b=3; /; b=4 c=5; /")
    bring(tier, log, tmp_path)
    content = state_of(tier).live[0].records
    assert content == 4
    raised(tier, 3)
    assert compact(tier, NAME, NOW_MS, force=True).status == "cleaned"
    assert sum(segment.records for segment in state_of(tier).live) == 5, "only b at 3 is superseded from the log start on"
    assert offsets(tier) == [4, 5]


def test_expired_segments_wait_for_grace_and_are_then_deleted(tmp_path: Path) -> None:
    tier = opened(tmp_path, 'cleanup_policy = "compact,delete"\nretention_ms = 1')
    imported(tier, tmp_path)
    report = compact(tier, NAME, NOW_MS)
    assert (report.status, report.segments_expired, report.log_start_offset) == ("expired", 2, 10)
    state = state_of(tier)
    assert (len(state.live), state.log_start, state.end_offset) == (1, 10, 9)
    objects = [key for key in (tmp_path / "a tier").rglob("*.log") if ".tiered-compactor" not in str(key)]
    assert len(objects) == 3
    assert retire_partition(tier.ports, tier.open_partition_log(NAME), tier.lease, tier.retention).deleted == ()
    retire_partition(
        tier.ports,
        tier.open_partition_log(NAME),
        tier.lease,
        ObjectRetention(grace_ms=0),
        clock=GraceClock(NOW_MS * 2, forced=True),
    )
    assert len([key for key in (tmp_path / "a tier").rglob("*.log") if ".tiered-compactor" not in str(key)]) == 1
    assert errors(tier) == []
    assert compact(tier, NAME, NOW_MS, force=True).status == "nothing_to_do"


def test_plan_and_explain_say_what_expires_before_and_after_it_does(tmp_path: Path) -> None:
    tier = opened(tmp_path, 'cleanup_policy = "compact,delete"\nretention_ms = 1')
    imported(tier, tmp_path)
    told = forecast_next_round(tier, NAME, NOW_MS)
    assert (told.due, told.reason) == (True, "retention: 3 segments are older than retention_ms")
    assert (told.segments_expired, told.log_start_offset, told.bytes_to_read) == (2, 10, 0)
    assert [segment.action for segment in told.segments] == ["expire", "expire", "skip"]
    assert told.retention.startswith("the next `run` removes 2 segments, ")
    assert "the log then starts at offset 10; the newest segment stays, unread" in told.retention
    explained = explain_partition(tier, NAME, NOW_MS)
    assert explained.answer == "It is due: dirty ratio 1.00 is above 0.5. The next `run` cleans it."
    assert told.retention in [fact.text for fact in explained.facts if fact.kind == "retention"]
    assert compact(tier, NAME, NOW_MS).segments_expired == told.segments_expired
    after = forecast_next_round(tier, NAME, NOW_MS)
    assert (after.due, after.segments_expired, after.retention) == (False, 0, "")
    assert [(s.action, s.why) for s in after.segments] == [("skip", "its records have expired; it stays as the newest segment")]
    facts = {fact.kind: fact.values for fact in explain_partition(tier, NAME, NOW_MS).facts}
    assert facts["log_start"] == {"log_start_offset": 10}


def test_plan_leaves_out_what_expires_before_the_round(tmp_path: Path) -> None:
    tier = opened(tmp_path, 'cleanup_policy = "compact,delete"\nretention_bytes = 1')
    imported(tier, tmp_path)
    sizes = [segment.size_bytes for segment in state_of(tier).live]
    told = forecast_next_round(tier, NAME, NOW_MS)
    assert (told.due, told.segments_expired, told.bytes_expired) == (True, 2, sum(sizes[:2]))
    assert [segment.action for segment in told.segments] == ["expire", "expire", "rewrite"]
    assert (told.bytes_to_read, told.bytes_to_write) == (sizes[2], sizes[2])
    report = compact(tier, NAME, NOW_MS)
    assert (report.status, report.segments_expired, report.segments_in) == ("cleaned", 2, 1)


def test_explain_says_when_the_next_segment_expires(tmp_path: Path) -> None:
    tier = opened(tmp_path, 'cleanup_policy = "delete"\nretention_ms = 1000\nretention_bytes = 100000')
    imported(tier, tmp_path)
    newest_ms = state_of(tier).live[0].max_timestamp_ms
    (fact,) = [fact for fact in explain_partition(tier, NAME, newest_ms).facts if fact.kind == "retention"]
    assert fact.values["next_ms"] == newest_ms + 1001
    assert "by retention_ms (1 s); segments expire as soon as 97.7 KiB remain without them, by retention_bytes" in fact.text
    assert explain_partition(tier, NAME, NOW_MS).answer.startswith("It is due: 3 segments are older than retention_ms.")


def test_a_marker_whose_data_have_expired_goes_like_any_orphan(tmp_path: Path) -> None:
    """The data of a transaction expire, its marker stays until its delete horizon, and no round misses the data."""
    tier = opened(tmp_path, "delete_retention_ms = 1000")
    log = log_of("7t: a=0 b=1; /")
    log.end(7, commit=True)
    log.put("c=3", pid=8, txn=True)
    log.end(8, commit=False)
    log.put("d=5", pid=7, txn=True)
    log.end(7, commit=True)
    log.add("e=7; /")
    bring(tier, log, tmp_path)
    raised(tier, 2)
    assert [segment.start_offset for segment in state_of(tier).live] == [2]
    assert compact(tier, NAME, NOW_MS, force=True).status == "cleaned"
    assert (offsets(tier), state_of(tier).live[0].due_ms) == ([5, 7], NOW_MS + 1000)
    assert 2 in markers(tier, tmp_path / "before")
    assert compact(tier, NAME, NOW_MS + 1001).status == "cleaned"
    left = markers(tier, tmp_path / "after")
    assert (2 in left, 6 in left) == (False, True), "the data of the second transaction are there"
    assert (offsets(tier), errors(tier)) == ([5, 7], [])


def markers(tier: Tier, out: Path) -> list[int]:
    export_partition(tier, NAME, out)
    return [record.offset for found in read(out).values() for batch in found if batch.control for record in batch.records]


def test_erasure_and_verify_see_what_lies_below_the_log_start_until_it_is_gone(tier: Tier, tmp_path: Path) -> None:
    imported(tier, tmp_path)
    raised(tier, 6)

    def held(key: bytes) -> list[str]:
        holders = survey_partition(tier, NAME, KeySearchRequest((key,), NOW_MS)).holders
        return sorted({holder.object.split("/")[1][:20].lstrip("0") for holder in holders if holder.what != "keyed hash"})

    assert (held(b"d"), held(b"b")) == ([""], ["", "5"]), "d=4 is in a removed segment, b=5 in the one that is divided"
    (divided,) = (tmp_path / "a tier" / "orders-0").glob(f"{5:020}-*.log")
    data = divided.read_bytes()
    divided.write_bytes(data[:70] + bytes([data[70] ^ 1]) + data[71:])
    assert errors(tier) != []
    divided.write_bytes(data)
    retire_partition(
        tier.ports,
        tier.open_partition_log(NAME),
        tier.lease,
        ObjectRetention(grace_ms=0),
        clock=GraceClock(NOW_MS * 2, forced=True),
    )
    assert (held(b"d"), held(b"b")) == ([], ["5"])


def test_a_cleaners_clock_in_the_future_expires_nothing(tmp_path: Path) -> None:
    century_ms = 100 * 365 * 86_400_000
    tier = opened(tmp_path, f'cleanup_policy = "delete"\nretention_ms = {century_ms}')
    imported(tier, tmp_path)
    assert compact(tier, NAME, NOW_MS * 100).status == "nothing_to_do"
    ahead = replace(tier, ports=replace(tier.ports, clock_ms=lambda: NOW_MS * 100))
    assert compact(ahead, NAME, NOW_MS * 100).status == "nothing_to_do", "the store's clock is right"
    assert state_of(tier).log_start == 0


def test_deleting_records_by_time_keeps_the_first_record_that_is_as_late(tier: Tier, tmp_path: Path) -> None:
    log = LogBuilder()
    log.put("a=0", "b=1", "c=2", times=[10, 30, 20])
    log.roll()
    bring(tier, log, tmp_path)
    assert [time_offset_or_end(tier, NAME, at) for at in (5, 11, 30, 31)] == [0, 1, 1, 3]


def test_deleting_records_beyond_the_end_is_refused_and_below_the_start_changes_nothing(tier: Tier, tmp_path: Path) -> None:
    imported(tier, tmp_path)
    with pytest.raises(UsageError, match="lies beyond"):
        delete_records(tier, NAME, 11)
    raised(tier, 6)
    before = state_of(tier)
    assert raised(tier, 3).log_start == 6
    assert state_of(tier).log_start_slot == before.log_start_slot


def test_undo_does_not_bring_back_what_was_deleted(tmp_path: Path) -> None:
    tier = opened(tmp_path, "")
    imported(tier, tmp_path)
    compact(tier, NAME, NOW_MS, force=True)
    run_id = state_of(tier).published[-1]
    raised(tier, 5)
    with pytest.raises(UsageError, match=r"cannot be undone: segment .*, which it replaced, ends below the log start"):
        undo_round(tier.ports, tier.open_partition_log(NAME), tier.lease, run_id)


def test_explanations_know_the_log_start(tier: Tier, tmp_path: Path) -> None:
    imported(tier, tmp_path)
    raised(tier, 2)
    assert "below the log start 2" in explain_offset(tier, NAME, 1, NOW_MS).answer
    told = explain_key(tier, NAME, b"a", NOW_MS)
    assert {fact.values["offset"] for fact in told.facts if fact.kind == "below_log_start"} == {0}
