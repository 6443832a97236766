"""The commands on tiers that brokers wrote, without a broker: metadata from a snapshot, bytes from the tier."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from compactor.adapters.brokers.view import read_latest_metadata_snapshot, save_metadata_snapshot
from compactor.features.spark.datasource import KafkaTieredSource
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord
from compactor.storage.factory import open_store
from tests.golden_cases import names
from tests.support.broker_metadata import broker_cli, golden_events
from tests.support.broker_tiers import BrokerTier, aiven_tier, local_tier
from tests.support.tier_cli import TierCli, batches_of, visible

CASES = [*(("kafka-local", name) for name in names("tiered")), *(("aiven", name) for name in names("aiven"))]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("brokers")


def consumed(tier: BrokerTier, isolation: str) -> list[dict[str, Any]]:
    """Offset and key of what a consumer of the topic was given."""
    if (tier.folder / "records.jsonl").exists():
        rows = [row for row in tier.records() if isolation == "read_uncommitted" or row.get("committed", True)]
    else:
        rows = [json.loads(line) for line in (tier.folder / f"{isolation}.jsonl").read_text().splitlines()]
    return [{"offset": row["offset"], "key": None if row["key"] is None else base64.b64decode(row["key"])} for row in rows]


def lineage_lines(tier: BrokerTier) -> list[str]:
    """The partition's epochs with records, by its segments' own metadata."""
    starts: dict[int, int] = {}
    for segment in tier.segments:
        for entry in segment.leader_epochs:
            starts[entry.epoch] = min(entry.start_offset, starts.get(entry.epoch, entry.start_offset))
    return [f"{epoch} {start}" for epoch, start in sorted(starts.items())]


def arrow(reader: DataSourceReader, split: InputPartition) -> Iterator[pa.RecordBatch]:
    for batch in reader.read(split):
        assert isinstance(batch, pa.RecordBatch)
        yield batch


def opened(layout: str, case: str, scratch: Path, folder: Path) -> tuple[BrokerTier, TierCli]:
    tier = local_tier(case, scratch) if layout == "kafka-local" else aiven_tier(case, scratch)
    return tier, broker_cli(folder, tier, layout)


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_topics_and_segments_are_what_metadata_says(layout: str, case: str, scratch: Path, tmp_path: Path) -> None:
    tier, cli = opened(layout, case, scratch, tmp_path)
    before, control = cli.digest(), sorted((tmp_path / "control").rglob("*"))
    segments = tier.segments
    expected = {
        "topic": "orders",
        "partition": 0,
        "segments": len(segments),
        "bytes": sum(segment.size_bytes for segment in segments),
        "start_offset": segments[0].start_offset,
        "end_offset": segments[-1].end_offset,
        "incarnation": 1,
        "superseded_by": "",
    }
    [found] = cli.do("topics")["partitions"]
    assert {name: found[name] for name in expected} == expected
    listed = cli.do("segments", "list", "orders-0")["segments"]
    states = {row["id"]: row["state"] for row in listed}
    assert states == {s.id: "COPY_SEGMENT_FINISHED" for s in segments} | {s.id: "COPY_SEGMENT_STARTED" for s in tier.unfinished}
    dumped = cli.do("segments", "dump", "orders-0", "--", segments[1].id)
    assert dumped["batches"][0]["base_offset"] >= segments[1].start_offset
    assert dumped["batches"][-1]["last_offset"] == segments[1].end_offset
    assert cli.digest() == before
    assert sorted((tmp_path / "control").rglob("*")) == control


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_an_exported_log_directory_is_what_consumers_read(layout: str, case: str, scratch: Path, tmp_path: Path) -> None:
    tier, cli = opened(layout, case, scratch, tmp_path)
    target = cli.export(tmp_path / "log")
    last = tier.segments[-1].end_offset
    read = [(record.offset, record.key) for batch in batches_of(target) if not batch.control for record in batch.records]
    assert read == [(one["offset"], one["key"]) for one in consumed(tier, "read_uncommitted") if one["offset"] <= last]
    committed = [(one["offset"], one["key"]) for one in consumed(tier, "read_committed") if one["offset"] <= last]
    seen = [(offset, key) for offset, _, key, _, _ in visible(target)]  # up to the transaction that is open at the tier's end
    assert seen == committed[: len(seen)]
    assert len(seen) > 0.9 * len(committed)
    logs = sorted(target.glob("*.log"))
    assert [int(path.stem) for path in logs] == [segment.start_offset for segment in tier.segments]
    assert [path.with_suffix(".index").exists() for path in logs] == [True] * len(logs)
    assert (target / "leader-epoch-checkpoint").read_text().splitlines()[2:] == lineage_lines(tier)


def test_of_overlapping_segments_each_offset_is_exported_once(scratch: Path, tmp_path: Path) -> None:
    """A second leader has tiered again, from within a segment, what the first one had: consumers leave the first one there."""
    tier = local_tier(names("tiered")[-1], scratch)
    events = golden_events(tier)
    introduced = [event for event in events if isinstance(event, RemoteLogSegmentMetadataRecord)]
    first, second = (next(event for event in introduced if event.id == tier.segments[at].id) for at in (0, 1))
    longer = first._replace(end_offset=second.start_offset + 9)
    cli = broker_cli(tmp_path, tier, "kafka-local", [longer if event is first else event for event in events])
    rows = cli.do("segments", "list", "orders-0")["segments"]
    assert (rows[0]["end_offset"], rows[1]["start_offset"]) == (second.start_offset - 1, second.start_offset)
    target = cli.export(tmp_path / "log")
    assert not (target / "00000000000000000000.index").exists()
    offsets = [record.offset for batch in batches_of(target) for record in batch.records]
    assert offsets == sorted(set(offsets))
    assert offsets[-1] >= 3200


@pytest.mark.parametrize(("layout", "case"), CASES)
@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_the_data_source_gives_what_a_consumer_gets(layout: str, case: str, isolation: str, scratch: Path, tmp_path: Path) -> None:
    tier, cli = opened(layout, case, scratch, tmp_path)
    options = {"config": str(cli.config), "topic": "orders", "isolation": isolation, "columns": "offset,key", "splitBytes": "100000"}
    source = KafkaTieredSource(options)
    reader = source.reader(StructType([StructField("offset", LongType()), StructField("key", BinaryType())]))
    splits = reader.partitions()
    rows = [(row["offset"], row["key"]) for split in splits for batch in arrow(reader, split) for row in batch.to_pylist()]
    last = tier.segments[-1].end_offset
    expected = [(one["offset"], one["key"]) for one in consumed(tier, isolation) if one["offset"] <= last]
    assert len(splits) > 1
    assert rows == expected[: len(rows)]
    assert len(rows) > (0.9 if isolation == "read_committed" else 0.99) * len(expected)
    tail = expected[len(rows)][0] if len(rows) < len(expected) else last
    assert isolation == "read_committed" or tail == last


def test_config_check_leaves_the_tier_alone(scratch: Path, tmp_path: Path) -> None:
    _, cli = opened("kafka-local", names("tiered")[-1], scratch, tmp_path)
    before = cli.digest()
    assert cli.do("config", "check") == {"ok": True, "problems": [], "topics": []}
    cli.set(kafka={"topics": ["order"]})
    answer = cli.ask("config", "check")
    assert "order matches no tiered topic; tiered are orders" in answer.stderr
    cli.set(kafka={"topics": []})
    answer = cli.ask("topics")
    assert (answer.code, answer.document) == (2, None)
    assert "topics under [kafka] is empty, so that no topic is read" in answer.stderr
    cli.set(kafka={"topics": ["orders"]}, tier={"url": (tmp_path / "elsewhere").as_uri()})
    answer = cli.ask("config", "check")
    assert (answer.code, [one["kind"] for one in answer.document["problems"]]) == (5, ["tier"])
    assert cli.digest() == before


def test_config_check_and_plan_tell_a_topic_that_its_settings_block(scratch: Path, tmp_path: Path) -> None:
    _, cli = opened("kafka-local", names("tiered")[-1], scratch, tmp_path)
    control = open_store(str(tmp_path / "control"))
    known = read_latest_metadata_snapshot(control)
    changed = {"retention.ms": "604800000", "retention.bytes": "1"}
    (orders,) = known.topics
    topic = orders.model_copy(update={"settings": dict(orders.settings) | changed})
    save_metadata_snapshot(control, known.model_copy(update={"topics": (topic,), "taken_ms": known.taken_ms + 1}))
    answer = cli.ask("config", "check")
    assert (answer.code, answer.document["ok"]) == (5, False)
    assert answer.document["topics"] == [{"topic": "orders", "severity": "error", "exit_code": 5, "blocked": True}]
    told = " ".join(problem["detail"] for problem in answer.document["problems"])
    assert all(f"{name} of orders is {value}" in told for name, value in changed.items())
    shown = cli.ask("config", "check", output="table").document
    assert "blocked: orders (error, exit code 5); no round can clean it, and other topics are not affected" in shown
    assert "can be used" not in shown
    (planned,) = cli.do("plan", "--sample", 0)["partitions"]
    assert (planned["verdict"]["kind"], planned["verdict"]["cause"]) == ("blocked", "settings")
    assert planned["verdict"]["next_step"].endswith("--add-config retention.bytes=-1,retention.ms=-1")
    assert "cannot run: orders-0 is blocked by settings" in cli.ask("plan", output="table").document
    assert cli.ask("status").code == 3
    assert cli.do("explain", "orders-0")["answer"].startswith("It is blocked: retention.bytes of orders is 1")


@pytest.mark.parametrize(("layout", "case"), CASES[-2:])
def test_a_sample_says_what_compaction_saves_at_least(layout: str, case: str, scratch: Path, tmp_path: Path) -> None:
    tier, cli = opened(layout, case, scratch, tmp_path)
    cli.set(cleaner={"keyless_records": "drop"})  # else nothing is saved, because the partition is blocked
    [unknown] = cli.do("plan", "--sample", 0)["partitions"]
    assert (unknown["expected_saving_bytes"], unknown["expected_saving_usd_month"]) == (None, None)
    [exact] = cli.do("plan", "--sample", 10**9)["partitions"]
    last = tier.segments[-1].start_offset - 1  # the newest segment is no part of a round
    seen = [one for one in consumed(tier, "read_committed") if one["offset"] <= last]
    kept = {one["key"]: one["offset"] for one in seen if one["key"] is not None}
    share = 1 - len(kept) / len(seen)
    cleanable = sum(segment.size_bytes for segment in tier.segments[:-1])
    assert exact["expected_saving_error_bytes"] == 0
    assert abs(exact["expected_saving_bytes"] / cleanable - share) < 0.1
    [sampled] = cli.do("plan", "--sample", cleanable // 2)["partitions"]
    assert 0 < sampled["expected_saving_bytes"] <= exact["expected_saving_bytes"] + sampled["expected_saving_error_bytes"]
    assert sampled["expected_saving_error_bytes"] > 0
    assert "give or take" in sampled["expected_saving_why"]


def test_sidecars_are_made_in_the_control_store(scratch: Path, tmp_path: Path) -> None:
    tier, cli = opened("kafka-local", names("tiered")[-1], scratch, tmp_path)
    before = cli.digest()
    assert len(cli.do("bloom", "rebuild", "orders-0")["written"]) == len(tier.segments)
    shown = cli.do("bloom", "show", "orders-0")["segments"]
    assert all(one["sidecar"] for one in shown)
    listed = cli.do("segments", "list", "orders-0")["segments"]
    assert all(one["sidecar"] for one in listed)
    assert cli.digest() == before
    cli.set(tier={"control_url": (tier.objects / "control").as_uri()})
    cli.refused("topics", code=2, says="where brokers keep their segments")


def test_what_changes_a_tier_says_what_is_missing(scratch: Path, tmp_path: Path) -> None:
    _, cli = opened("kafka-local", names("tiered")[-1], scratch, tmp_path)
    before = cli.digest()
    for command, said in (
        (["run"], "needs bootstrap_servers under [kafka]"),
        (["import", str(tmp_path)], "import into a broker-managed tier is refused"),
        (["topics", "delete", "orders-0"], "the brokers say which partitions"),
        (["undo", "x"], "needs bootstrap_servers under [kafka]"),
        (["daemon"], "needs bootstrap_servers under [kafka]"),
        (["topics", "snapshot"], "no broker is named to take a snapshot from"),
    ):
        answer = cli.ask(*command)
        assert (answer.code, answer.document) == (2, None)
        assert said in answer.stderr
        assert len(answer.remarks) == 1
    assert cli.digest() == before
