"""LocalTieredStorage's layout, written: nothing but Kafka's files, with Kafka's names, comes into the broker's directories."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compactor.adapters.brokers.kafka_local import KafkaLocalLayout
from compactor.constants import TopicId
from compactor.errors import NotFound, UsageError
from compactor.model.ids import TopicPartition
from compactor.storage.factory import open_store
from compactor.tier.contents import TopicIdLookup
from tests.support.segments import files_of, segment_of

NAME = TopicPartition("orders", 1)
IDS = TopicIdLookup({"orders": TopicId("R0AHqObxTZmsN-zsxr_0TQ")})
FOLDER = "kafka-tiered-storage/orders-1-R0AHqObxTZmsN-zsxr_0TQ"
STEM = f"{FOLDER}/00000000000000000100-lZ6vvmajTWKDBUTV6SQAtQ"
BROKERS_PATTERN = re.compile(r"(\d+-)([a-zA-Z0-9_-]{22})(\.[a-z_]+)")  # RemoteLogSegmentFileset.FILENAME_FORMAT


def layout_on(root: Path) -> KafkaLocalLayout:
    return KafkaLocalLayout(open_store(str(root)), IDS)


def test_a_broker_finds_its_own_files_and_nothing_else(tmp_path: Path) -> None:
    layout, files = layout_on(tmp_path), files_of()
    segment = segment_of(files)
    (tmp_path / "kafka-tiered-storage").mkdir()
    assert layout.upload_segment(NAME, segment, files) == ""
    inside = {str(path.relative_to(tmp_path)): path for path in (tmp_path / "kafka-tiered-storage").rglob("*") if not path.is_dir()}
    assert {key: path.read_bytes() for key, path in inside.items()} == {
        f"{STEM}.log": files["log"],
        f"{STEM}.index": files["index"],
        f"{STEM}.timeindex": files["timeindex"],
        f"{STEM}.txnindex": files["txnindex"],
        f"{STEM}.snapshot": files["snapshot"],
        f"{STEM}.leader_epoch_checkpoint": files["leader-epoch-checkpoint"],
    }
    assert all(BROKERS_PATTERN.fullmatch(path.name) for path in inside.values())
    assert [path.name for path in (tmp_path / "kafka-tiered-storage").iterdir()] == [Path(FOLDER).name]
    assert all(path.is_file() for path in (tmp_path / FOLDER).iterdir())
    assert layout.stored_segment_problem(NAME, segment) == ""
    assert layout.segment_files(NAME, segment.model_copy(update={"files": {}})).keys() == files.keys()


def test_writing_again_is_done_already_and_other_content_is_named(tmp_path: Path) -> None:
    layout, files = layout_on(tmp_path), files_of()
    spooled = tmp_path / "out.log"
    spooled.write_bytes(files["log"])
    assert layout.upload_segment(NAME, segment_of(files), {**files, "log": spooled}) == ""
    (tmp_path / f"{STEM}.snapshot").unlink()
    assert layout.upload_segment(NAME, segment_of(files), {**files, "log": spooled}) == ""
    assert layout.stored_segment_problem(NAME, segment_of(files)) == ""
    for kind in ("log", "txnindex"):
        other = {**files, kind: files[kind][:-1] + b"!"}
        assert layout.upload_segment(NAME, segment_of(other), other) == f"{STEM}.{kind} exists already with other content"
        shorter = {**files, kind: files[kind][:-1]}
        assert layout.upload_segment(NAME, segment_of(shorter), shorter) == f"{STEM}.{kind} exists already with other content"


def test_damage_is_found(tmp_path: Path) -> None:
    layout, files = layout_on(tmp_path), files_of()
    segment = segment_of(files)
    brokers = segment.model_copy(update={"files": {}})
    assert layout.upload_segment(NAME, segment, files) == ""
    path = tmp_path / f"{STEM}.log"
    path.write_bytes(b"!" + files["log"][1:])
    assert layout.stored_segment_problem(NAME, segment).endswith(f"{STEM}.log has another digest than was recorded")
    assert layout.stored_segment_problem(NAME, brokers) == ""
    path.write_bytes(files["log"][1:])
    for one in (segment, brokers):
        assert layout.stored_segment_problem(NAME, one).endswith(
            f"{STEM}.log has {len(files['log']) - 1} bytes, recorded are {len(files['log'])}"
        )
    path.unlink()
    assert layout.stored_segment_problem(NAME, brokers).endswith(f"{STEM}.log is missing")
    with pytest.raises(NotFound, match=f"{STEM}.log"):
        layout.segment_files(NAME, brokers)
    path.write_bytes(files["log"])
    (tmp_path / f"{STEM}.txnindex").unlink()
    assert layout.stored_segment_problem(NAME, brokers) == ""  # a segment need not have one
    (tmp_path / f"{STEM}.leader_epoch_checkpoint").unlink()
    assert layout.stored_segment_problem(NAME, brokers).endswith(".leader_epoch_checkpoint is missing")


def test_strangers_are_listed_as_such_and_neighbours_are_not(tmp_path: Path) -> None:
    layout, files = layout_on(tmp_path), files_of()
    assert layout.upload_segment(NAME, segment_of(files), files) == ""
    strangers = [f"{STEM}.leader-epoch-checkpoint", f"{STEM}.log.deleted", f"{STEM[:-1]}R.log", f"{FOLDER}/100-lZ6vvmajTWKDBUTV6SQAtQ.log"]
    for name in strangers:
        (tmp_path / name).write_bytes(b"?")
    for neighbour in ("orders-10-R0AHqObxTZmsN-zsxr_0TQ", "orders-1-AAAAAAAAAAAAAAAAAAAAAg"):
        (tmp_path / "kafka-tiered-storage" / neighbour).mkdir()
        (tmp_path / "kafka-tiered-storage" / neighbour / f"{Path(STEM).name}.log").write_bytes(b"?")
    listed = list(layout.list_objects(NAME))
    assert sorted(o.key for o in listed if not o.kind) == sorted(strangers)
    assert sorted(o.kind for o in listed if o.kind) == sorted(files)
    layout.delete_segments(NAME, [segment_of(files)])
    assert sorted(o.key for o in layout.list_objects(NAME)) == sorted(strangers)


def test_topic_ids_must_be_ids(tmp_path: Path) -> None:
    for ids, cause in (
        ({}, "no id is known of topic orders"),
        ({"orders": "R0AHqObxTZmsN-zsxr_0TR"}, "'R0AHqObxTZmsN-zsxr_0TR' is not a valid id"),
    ):
        with pytest.raises(UsageError, match=cause):
            list(
                KafkaLocalLayout(
                    open_store(str(tmp_path)), TopicIdLookup({topic: TopicId(each) for topic, each in ids.items()})
                ).list_objects(NAME)
            )
