"""The metadata topic followed over restarts: from where the last run ended, anew where the topic is another one or local state is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from compactor.adapters.brokers.cache import MAX_FINDINGS, FoldedMetadataStore, RemoteLogMetadataCache, SuspiciousRecordFindingKind
from compactor.adapters.brokers.codec import decode_record, encode_record
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader, metadata_partition
from compactor.adapters.brokers.topic import PollResult
from compactor.errors import BadData, Unavailable
from compactor.local.cache import RocksDatabase
from compactor.model.ids import COMPACTOR_BROKER_ID
from compactor.model.remote_log import MetadataRecord, TopicIdPartition
from compactor.model.segment import SegmentState
from tests.metadata_events import finished, raw_id, script, segment, update
from tests.simulation.memory_topic import MemoryMetadataTopic, MemoryTopicLog

S = SegmentState
TIMEOUT_S = 60.0
NOW_MS = 60_000
NAMES = [TopicIdPartition(bytes([topic]) * 16, f"topic-{topic}", partition) for topic in range(4) for partition in range(5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[[], RocksDatabase]]:
    stores: list[RocksDatabase] = []

    def again() -> RocksDatabase:
        for store in stores:
            store.close()
        stores.append(RocksDatabase(folder))
        return stores[-1]

    yield again
    for store in stores:
        store.close()


def of(name: TopicIdPartition, events: list[MetadataRecord]) -> list[MetadataRecord]:
    return [event._replace(partition=name) for event in events]


def history(rng: random.Random, length: int = 40) -> dict[TopicIdPartition, list[MetadataRecord]]:
    """Without what stops brokers."""
    made = {name: of(name, script(rng, length)) for name in NAMES}
    started = S.COPY_SEGMENT_STARTED
    return {name: [e for e in events if isinstance(e, type(segment(1, 0, 1))) or e.state is not started] for name, events in made.items()}


def interleaved(rng: random.Random, histories: dict[TopicIdPartition, list[MetadataRecord]]) -> list[MetadataRecord]:
    order = [name for name, events in histories.items() for _ in events]
    rng.shuffle(order)
    left = {name: iter(events) for name, events in histories.items()}
    return [next(left[name]) for name in order]


def expected(log: MemoryTopicLog, name: TopicIdPartition) -> RemoteLogMetadataCache:
    """The plain way: all of the log, from its beginning."""
    cache = RemoteLogMetadataCache(name)
    for record in log.logs[metadata_partition(name.topic_id, name.partition, len(log.logs))]:
        if record is not None and (decoded := decode_record(record.value)).partition == name:
            cache.apply_record(decoded, record.offset)
    return cache


def same(followed: FoldingMetadataTopicReader, log: MemoryTopicLog) -> None:
    listed = {one.partition: one for one in followed.tiered_partitions()}
    for name in NAMES:
        folded, plain = followed.partition_metadata_from_records(name.topic_id, name.partition), expected(log, name)
        if plain.applied < 0:
            assert folded is None
            continue
        assert folded is not None
        assert folded.cache.partition == name
        assert folded.cache.list_segments() == plain.list_segments()
        assert list(folded.cache.finished) == list(plain.finished)
        assert {e: vars(state) for e, state in folded.cache.epochs.items()} == {e: vars(state) for e, state in plain.epochs.items()}
        whole = [one for one in plain.list_segments() if one.state is S.COPY_SEGMENT_FINISHED]
        figures = (len(whole), len(plain.segments) - len(whole), sum(one.size_bytes for one in whole))
        assert listed[name][1:4] == figures
        assert listed[name].applied == plain.applied


@pytest.mark.parametrize("chunk_records", [1, 7, 100_000])
def test_every_start_goes_on_where_the_last_one_ended(opened: Callable[[], RocksDatabase], chunk_records: int) -> None:
    rng = random.Random(chunk_records)
    log = MemoryTopicLog()
    events = interleaved(rng, history(rng))
    written = 0
    while events:
        part, events = events[:100], events[100:]
        log.write(part)
        written += len(part)
        topic = MemoryMetadataTopic(log)
        followed = FoldingMetadataTopicReader(topic, FoldedMetadataStore(opened()), chunk_records=chunk_records, clock_ms=lambda: NOW_MS)
        progress = followed.fold_to_end(TIMEOUT_S)
        assert (progress.records, progress.unread, progress.refold_reason) == (len(part), {}, "")
        same(followed, log)
    assert written > 300


def test_a_running_process_reads_only_what_is_new(opened: Callable[[], RocksDatabase]) -> None:
    rng = random.Random(5)
    log = MemoryTopicLog()
    topic = MemoryMetadataTopic(log)
    followed = FoldingMetadataTopicReader(topic, FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    events = interleaved(rng, history(rng))
    for at in range(0, len(events), 50):
        log.write(events[at : at + 50])
        assert followed.fold_to_end(TIMEOUT_S).records == len(events[at : at + 50])
    same(followed, log)
    polls = topic.polls
    assert followed.fold_to_end(TIMEOUT_S).records == 0
    assert topic.polls == polls, "nothing new, nothing read"


def test_without_local_state_memory_does(tmp_path: Path) -> None:
    log = MemoryTopicLog()
    rng = random.Random(6)
    log.write(interleaved(rng, history(rng)))
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    followed = FoldingMetadataTopicReader(
        MemoryMetadataTopic(log), FoldedMetadataStore(RocksDatabase(blocked)), chunk_records=50, clock_ms=lambda: NOW_MS
    )
    assert followed.fold_to_end(TIMEOUT_S).unread == {}
    same(followed, log)


def test_a_second_process_folds_for_itself(folder: Path) -> None:
    log = MemoryTopicLog()
    rng = random.Random(7)
    events = interleaved(rng, history(rng))
    log.write(events[:200])
    writer, reader = RocksDatabase(folder), RocksDatabase(folder)
    first = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(writer), clock_ms=lambda: NOW_MS)
    first.fold_to_end(TIMEOUT_S)
    second = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(reader), clock_ms=lambda: NOW_MS)
    log.write(events[200:])
    assert second.fold_to_end(TIMEOUT_S).unread == {}
    assert first.fold_to_end(TIMEOUT_S).records == len(events) - 200
    same(first, log)
    same(second, log)
    reader.close()
    writer.close()


@pytest.mark.parametrize("change", ["cluster_id", "topic_id", "truncated", "truncated and grown", "partitions"])
def test_another_topic_is_folded_anew(opened: Callable[[], RocksDatabase], change: str) -> None:
    rng = random.Random(8)
    log = MemoryTopicLog()
    log.write(interleaved(rng, history(rng)))
    FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS).fold_to_end(TIMEOUT_S)
    other = MemoryTopicLog(7 if change == "partitions" else 5, **{change: "other"} if change.endswith("_id") else {})
    events = interleaved(rng, history(rng))
    other.write(events)
    if "truncated" in change:
        for number, old in enumerate(log.logs):
            keep = len(old) // 2
            del old[keep:]
            if change == "truncated and grown":
                old += [record._replace(offset=keep + record.offset) for record in other.logs[number] if record]
        other = log
    followed = FoldingMetadataTopicReader(MemoryMetadataTopic(other), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    assert followed.fold_to_end(TIMEOUT_S).unread == {}
    same(followed, other)


def test_a_topic_made_anew_is_noticed_by_a_running_process(opened: Callable[[], RocksDatabase]) -> None:
    rng = random.Random(9)
    topic = MemoryMetadataTopic(MemoryTopicLog())
    topic.log.write(interleaved(rng, history(rng)))
    followed = FoldingMetadataTopicReader(topic, FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    followed.fold_to_end(TIMEOUT_S)
    topic.log = MemoryTopicLog(topic_id="another")
    topic.log.write(interleaved(rng, history(rng)))
    assert followed.fold_to_end(TIMEOUT_S).unread == {}
    same(followed, topic.log)
    for number, records in enumerate(topic.log.logs):
        topic.log.truncate(number, len(records) // 2)
    assert "truncated" in followed.fold_to_end(TIMEOUT_S).refold_reason
    same(followed, topic.log)


def test_local_state_that_vanishes_is_folded_anew(opened: Callable[[], RocksDatabase]) -> None:
    rng = random.Random(10)
    log = MemoryTopicLog()
    events = interleaved(rng, history(rng))
    log.write(events[:300])
    store = opened()
    followed = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(store), clock_ms=lambda: NOW_MS)
    followed.fold_to_end(TIMEOUT_S)
    store.delete_all_entries("a test does")
    with pytest.raises(Unavailable, match="is lost"):
        followed.partition_metadata_from_records(NAMES[0].topic_id, NAMES[0].partition)
    log.write(events[300:])
    assert followed.fold_to_end(TIMEOUT_S).records == len(events)
    same(followed, log)
    store.close()
    log.write(of(NAMES[0], finished(50, 0, 9)))
    assert followed.fold_to_end(TIMEOUT_S).records == len(events) + 2, "in memory, from the beginning"
    same(followed, log)


class Faltering(MemoryMetadataTopic):
    """Every other poll takes records and fails before it hands them out."""

    @override
    def poll(self, limit: int, timeout_s: float) -> PollResult:
        polled = super().poll(limit, timeout_s)
        if self.polls % 2:
            raise Unavailable("no broker answers")
        return polled


def test_nothing_is_skipped_by_a_poll_that_fails(opened: Callable[[], RocksDatabase]) -> None:
    log = MemoryTopicLog()
    rng = random.Random(13)
    events = interleaved(rng, history(rng))
    followed = FoldingMetadataTopicReader(Faltering(log), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    for at in range(0, len(events), 100):
        log.write(events[at : at + 100])
        with pytest.raises(Unavailable):
            followed.fold_to_end(TIMEOUT_S)
        assert followed.fold_to_end(TIMEOUT_S).unread == {}
    same(followed, log)


def test_control_records_and_a_lagging_reader(opened: Callable[[], RocksDatabase]) -> None:
    log = MemoryTopicLog()
    rng = random.Random(11)
    for event in interleaved(rng, history(rng, 10)):
        log.write([event])
        log.control_record(rng.randrange(5))
    behind = {"lag": 3}
    followed = FoldingMetadataTopicReader(
        MemoryMetadataTopic(log, lag=lambda _: behind["lag"]), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS
    )
    assert followed.fold_to_end(TIMEOUT_S).unread == {}
    behind["lag"] = 0
    followed.fold_to_end(TIMEOUT_S)
    same(followed, log)
    again = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    assert again.fold_to_end(TIMEOUT_S).records == 0
    same(again, log)


def test_a_lost_beginning_is_told(opened: Callable[[], RocksDatabase]) -> None:
    log = MemoryTopicLog()
    rng = random.Random(12)
    log.write(interleaved(rng, history(rng)))
    log.delete_records(3, 20)
    followed = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    assert followed.fold_to_end(TIMEOUT_S).unread == {}
    assert {number: reached.missing for number, reached in followed.fold_positions().items()} == {0: 0, 1: 0, 2: 0, 3: 20, 4: 0}
    log.delete_records(2, len(log.logs[2]))
    again = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    assert again.fold_to_end(TIMEOUT_S).unread == {}


def test_a_record_that_stops_brokers_stops_us_in_its_partition_only(opened: Callable[[], RocksDatabase]) -> None:
    log = MemoryTopicLog()
    for name in NAMES:
        log.write(of(name, finished(1, 0, 9)))
    bad = NAMES[0]
    number = metadata_partition(bad.topic_id, bad.partition, 5)
    before = len(log.logs[number])
    log.put(number, b"garbage")
    log.write(of(bad, finished(2, 10, 19)))
    for _ in range(2):
        followed = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
        assert followed.fold_to_end(TIMEOUT_S).unread == {}
        with pytest.raises(BadData, match=f"__remote_log_metadata-{number}, offset {before}: the frame's version is 103"):
            followed.partition_metadata_from_records(bad.topic_id, bad.partition)
        healthy = next(name for name in NAMES if metadata_partition(name.topic_id, name.partition, 5) != number)
        assert followed.partition_metadata_from_records(healthy.topic_id, healthy.partition) is not None


def test_a_partition_without_a_leader_holds_up_what_it_tells_of_only(opened: Callable[[], RocksDatabase]) -> None:
    log = MemoryTopicLog()
    for name in NAMES:
        log.write(of(name, finished(1, 0, 9)))
    lost = NAMES[0]
    number = metadata_partition(lost.topic_id, lost.partition, 5)
    healthy = next(name for name in NAMES if metadata_partition(name.topic_id, name.partition, 5) != number)
    followed = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    for _ in range(2):  # from the beginning, and after it was read before
        log.leaderless = {number}
        log.write(of(healthy, finished(2, 10, 19)))
        assert followed.fold_to_end(TIMEOUT_S).unread == {}
        assert followed.leaderless_metadata_partitions == {number}
        with pytest.raises(Unavailable, match=f"partition {number} of __remote_log_metadata cannot be read: no broker leads it"):
            followed.partition_metadata_from_records(lost.topic_id, lost.partition)
        folded = followed.partition_metadata_from_records(healthy.topic_id, healthy.partition)
        assert folded is not None
        assert len(folded.cache.segments) == 2
        log.leaderless = set()
        log.write(of(lost, finished(2, 10, 19)))
        followed.fold_to_end(TIMEOUT_S)
        same(followed, log)


@pytest.mark.parametrize("chunk_records", [1, 100_000])
def test_an_impossible_update_stops_exactly_there(opened: Callable[[], RocksDatabase], chunk_records: int) -> None:
    log = MemoryTopicLog(1)
    one, two = NAMES[:2]
    log.write([*of(one, [segment(1, 0, 9)]), *of(two, finished(5, 0, 9)), *of(one, [update(1, S.COPY_SEGMENT_STARTED)])])
    log.write([*of(two, finished(6, 10, 19)), *of(one, finished(2, 10, 19))])
    followed = FoldingMetadataTopicReader(
        MemoryMetadataTopic(log), FoldedMetadataStore(opened()), chunk_records=chunk_records, clock_ms=lambda: NOW_MS
    )
    followed.fold_to_end(TIMEOUT_S)
    reached = followed.fold_positions()[0]
    assert (reached.position, reached.last, "COPY_SEGMENT_STARTED" in reached.stopped) == (3, 2, True)


def test_keyed_records_and_records_in_a_wrong_partition_are_refused(opened: Callable[[], RocksDatabase]) -> None:
    value = encode_record(segment(1, 0, 9)._replace(partition=NAMES[0]))
    number = metadata_partition(NAMES[0].topic_id, NAMES[0].partition, 5)
    log = MemoryTopicLog()
    log.put(number, value, key=b"KIP-1266")
    log.put((number + 1) % 5, value)
    followed = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    followed.fold_to_end(TIMEOUT_S)
    said = [reached.stopped for _, reached in sorted(followed.fold_positions().items())]
    assert "has a key" in said[number]
    assert f"belongs into partition {number}" in said[(number + 1) % 5]


def test_findings_are_kept_and_counted(opened: Callable[[], RocksDatabase]) -> None:
    log = MemoryTopicLog()
    name = NAMES[3]
    log.write(of(name, finished(1, 0, 9)))
    log.write(of(name, [update(1, S.DELETE_SEGMENT_FINISHED)] * (MAX_FINDINGS + 5)))
    for _ in range(2):
        followed = FoldingMetadataTopicReader(
            MemoryMetadataTopic(log), FoldedMetadataStore(opened()), chunk_records=10, clock_ms=lambda: NOW_MS
        )
        followed.fold_to_end(TIMEOUT_S)
        folded = followed.partition_metadata_from_records(name.topic_id, name.partition)
        assert folded is not None
        assert (folded.finding_count, len(folded.findings)) == (MAX_FINDINGS + 5, MAX_FINDINGS)
        assert {(one.kind, one.segment_id) for one in folded.findings} == {(SuspiciousRecordFindingKind.DROPPED_TRANSITION, raw_id(1))}
        assert [one.findings for one in followed.tiered_partitions()] == [MAX_FINDINGS + 5]


@pytest.mark.parametrize("chunk_records", [1, 100])
def test_what_compactors_said_is_counted_once_over_all_starts(opened: Callable[[], RocksDatabase], chunk_records: int) -> None:
    log = MemoryTopicLog()
    for number, name in enumerate(NAMES):
        ours = segment(number, 0, 9)._replace(partition=name, broker_id=COMPACTOR_BROKER_ID, event_timestamp_ms=number % 2 * 60_000)
        log.write([ours, segment(100 + number, 10, 19)._replace(partition=name)])
        followed = FoldingMetadataTopicReader(
            MemoryMetadataTopic(log), FoldedMetadataStore(opened()), chunk_records=chunk_records, clock_ms=lambda: NOW_MS
        )
        followed.fold_to_end(TIMEOUT_S)
    followed = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS)
    followed.fold_to_end(TIMEOUT_S)
    assert dict(followed.compactor_records_by_minute()) == {0: len(NAMES) // 2, 1: len(NAMES) // 2}


def test_nothing_is_answered_before_the_first_look(opened: Callable[[], RocksDatabase]) -> None:
    with pytest.raises(Unavailable, match="has not been read yet"):
        FoldingMetadataTopicReader(
            MemoryMetadataTopic(MemoryTopicLog()), FoldedMetadataStore(opened()), clock_ms=lambda: NOW_MS
        ).partition_metadata_from_records(b"x" * 16, 0)
