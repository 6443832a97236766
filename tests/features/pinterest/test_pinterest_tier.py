"""A tier of Pinterest's layout is read: topics, verify, export, import into a tier of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compactor.features.spark.datasource import ReadRequest, ReadSplit, plan_splits
from compactor.model.ids import TopicPartition
from compactor.read.reading import OffsetRangeReader
from tests.builders import LogBuilder
from tests.support.plain_pinterest import upload, write_metadata
from tests.support.tier_cli import TierCli, batches_of, latest


class Upstream:
    """A log, what its uploader has left of it, and the command line on it."""

    def __init__(self, folder: Path, bits: int = 0) -> None:
        self.folder, self.bits = folder, bits
        self.log = LogBuilder()
        self.cli = TierCli(
            folder / "upstream", {"tier": {"layout": "pinterest"}, "tier.pinterest": {"cluster": "prod", "entropy_bits": bits}}
        )
        self.cli.tier.mkdir(parents=True)
        self.own = TierCli(folder / "own")
        self.index_interval_bytes = 100

    def segment(self, *records: str) -> None:
        self.log.put_segment(*records)

    def upload(self, name: str = "orders-0") -> Path:
        self.log.write(self.folder / "log", indexes=True, index_interval_bytes=self.index_interval_bytes)
        return upload(self.folder / "log", self.cli.tier, "prod", name, self.bits)

    def verify(self) -> list[tuple[str, str]]:
        """Kinds of errors with the file's name."""
        answer = self.cli.ask("verify")
        found = [(p["kind"], p["object"].rpartition("/")[2]) for p in answer.document["problems"] if p["severity"] == "error"]
        assert answer.code == (3 if found else 0), answer
        return found

    def bring(self, *options: str) -> Any:
        return self.own.ask("import", "--from-tier", self.cli.config, *options)


@pytest.fixture(params=[0, 5])
def upstream(request: pytest.FixtureRequest, tmp_path: Path) -> Upstream:
    made = Upstream(tmp_path, request.param)
    made.segment("a=1", "b=1")
    made.segment("a=2", "c=1")
    made.segment("b=2", "a=3", "d=1")
    return made


def raw(folder: Path) -> list[bytes]:
    return [batch.raw for batch in batches_of(folder)]


def name_of(base: int, kind: str = "log") -> str:
    return f"{base:020d}.{kind}"


def test_topics_verify_and_export(upstream: Upstream, tmp_path: Path) -> None:
    upstream.upload()
    upstream.upload("orders-10")
    rows = upstream.cli.do("topics")["partitions"]
    assert [(row["topic"], row["partition"], row["segments"], row["start_offset"], row["end_offset"]) for row in rows] == [
        ("orders", 0, 3, 0, 6),
        ("orders", 10, 3, 0, 6),
    ]
    assert upstream.verify() == []
    before = upstream.cli.digest()
    exported = upstream.cli.export(tmp_path / "exported")
    assert raw(exported) == raw(upstream.folder / "log")
    assert (exported / "leader-epoch-checkpoint").read_text() == "0\n1\n0 0\n"
    assert upstream.cli.digest() == before


def test_the_data_source_reads_it(upstream: Upstream) -> None:
    upstream.upload()
    tier = upstream.cli.open()
    for split_bytes in (1, 1 << 20):
        splits = plan_splits(tier, ReadRequest(tier.settings, ("orders",), starting_offset=1, split_bytes=split_bytes))
        read = [
            int(selection.rows.offset[row])
            for split in splits
            if isinstance(split, ReadSplit)
            for part in split.parts
            for selection in OffsetRangeReader(tier, part.extent, part.options).read_selected_records()
            for row in selection.picked
        ]
        assert read == [1, 2, 3, 4, 5, 6]
    splits = plan_splits(tier, ReadRequest(tier.settings, ("orders",), latest=True))
    assert len(splits) == 1
    assert tier.open_partition_log(TopicPartition("orders", 0)).refresh().end_offset == 6


def test_nothing_is_ever_written_there(upstream: Upstream) -> None:
    upstream.upload()
    before = upstream.cli.digest()
    for command in (["import", upstream.folder / "log", "--topic", "x", "--partition", "0"], ["run", "--force"], ["retire"]):
        answer = upstream.cli.ask(*command)
        assert upstream.cli.digest() == before
        assert (answer.code, "is only read" in answer.stderr) == (2, True), answer
    assert upstream.cli.do("config", "check")["problems"] == []
    assert upstream.cli.digest() == before


def test_config_check_says_where_nothing_is(upstream: Upstream) -> None:
    upstream.upload()
    upstream.cli.set(**{"tier.pinterest": {"cluster": "other", "entropy_bits": upstream.bits}})
    (problem,) = upstream.cli.do("config", "check")["problems"]
    assert (problem["severity"], problem["kind"]) == ("warning", "empty")


def test_what_else_looks_into_it(upstream: Upstream) -> None:
    upstream.upload()
    segments = upstream.cli.do("segments", "list", "orders-0")["segments"]
    assert [(segment["start_offset"], segment["end_offset"]) for segment in segments] == [(0, 1), (2, 3), (4, 6)]
    assert "offset 5" in upstream.cli.do("explain", "orders-0", "--key", "a")["answer"]
    erasure = upstream.cli.ask("erasure", "orders", "--key", "a").document
    assert [(one["first_offset"], one["what"]) for one in erasure["holders"]] == [(5, "value"), (2, "superseded"), (0, "superseded")]
    assert erasure["holders"][1]["waits_for"].startswith("its tier is only read")
    assert upstream.cli.ask("erasure", "orders", "--key", "z").code == 0
    assert upstream.cli.ask("erasure", "orders", "--key", "a", "--expedite").code == 2
    text = upstream.cli.ask("cat", "orders-0", "--from", "4", output="table").document
    assert [json.loads(line)["offset"] for line in text.splitlines()] == [4, 5, 6]


def test_import_takes_what_is_new_and_the_log_stays_the_same(upstream: Upstream, tmp_path: Path) -> None:
    upstream.upload()
    (row,) = upstream.bring().document["partitions"]
    assert (row["status"], row["segments"], row["start_offset"], row["end_offset"]) == ("imported", 3, 0, 6)
    (row,) = upstream.bring().document["partitions"]
    assert (row["status"], row["segments"]) == ("up_to_date", 0)
    upstream.own.run()
    upstream.segment("a=4")
    upstream.upload()
    (row,) = upstream.bring().document["partitions"]
    assert (row["status"], row["segments"], row["start_offset"], row["end_offset"]) == ("imported", 1, 7, 7)
    assert latest(upstream.own.export(tmp_path / "own log")) == latest(upstream.folder / "log")
    assert upstream.own.do("verify")["ok"]


def test_a_partition_larger_than_the_disk_budget_comes_in_parts(upstream: Upstream, tmp_path: Path) -> None:
    for number in range(20):
        upstream.segment(*(f"k{number}-{key}={'x' * 200}" for key in range(8)))
    upstream.upload()
    upstream.own.set(cleaner={"disk_budget_bytes": 16384}, daemon={"threads": 1})
    (row,) = upstream.bring().document["partitions"]
    assert (row["status"], row["segments"], row["end_offset"]) == ("imported", 23, 166)
    assert raw(upstream.own.export(tmp_path / "own log")) == raw(upstream.folder / "log")


def test_another_tier_of_our_own_is_imported_as_well(upstream: Upstream, tmp_path: Path) -> None:
    upstream.upload()
    upstream.bring()
    upstream.own.run()
    third = TierCli(tmp_path / "third")
    (row,) = third.do("import", "--from-tier", upstream.own.config, "--topics", "ord.*")["partitions"]
    assert (row["status"], row["end_offset"]) == ("imported", 6)
    assert raw(third.export(tmp_path / "third log")) == raw(upstream.own.export(tmp_path / "own log"))
    assert third.do("import", "--from-tier", upstream.own.config, "--topics", "none")["partitions"] == []


def test_replicas_that_roll_elsewhere_overlap_and_nothing_comes_twice(upstream: Upstream, tmp_path: Path) -> None:
    folder = upstream.upload()
    whole = b"".join((folder / name_of(base)).read_bytes() for base in (2, 4))
    (folder / name_of(2)).write_bytes(whole)  # the old leader's segment goes on beyond the new one's first
    assert upstream.verify() == []
    assert raw(upstream.cli.export(tmp_path / "exported")) == raw(upstream.folder / "log")
    assert upstream.bring().code == 0
    assert raw(upstream.own.export(tmp_path / "own log")) == raw(upstream.folder / "log")


@pytest.mark.damages
def test_a_segment_without_its_index_is_read_all_the_same(upstream: Upstream, tmp_path: Path) -> None:
    folder = upstream.upload()
    (folder / name_of(2, "index")).unlink()
    assert upstream.verify() == [("missing", name_of(2)), ("gap", name_of(0))]
    assert upstream.bring().code == 0
    assert raw(upstream.own.export(tmp_path / "own log")) == raw(upstream.folder / "log")


@pytest.mark.damages
def test_a_hole_is_named_and_not_imported_unless_it_is_allowed(upstream: Upstream) -> None:
    folder = upstream.upload()
    for kind in ("log", "index", "timeindex"):
        (folder / name_of(2, kind)).unlink()
    assert upstream.verify() == [("dangling", "_metadata"), ("gap", name_of(0))]
    answer = upstream.bring()
    assert (answer.code, answer.document["partitions"][0]["status"]) == (3, "refused")
    assert "missing" in answer.document["partitions"][0]["reason"]
    assert upstream.bring("--allow-gaps").document["partitions"][0]["status"] == "imported"


def test_what_metadata_does_not_name_is_told_and_read(upstream: Upstream) -> None:
    folder = upstream.upload()
    write_metadata(folder, [0, 4, 7])
    assert upstream.verify() == [("unlisted", name_of(2)), ("gap", name_of(0))]
    assert upstream.cli.do("topics")["partitions"][0]["segments"] == 3
    write_metadata(folder, [2, 4, 7])  # the first one expires: its name goes first
    assert upstream.verify() == []
    assert upstream.cli.do("topics")["partitions"][0]["start_offset"] == 2


@pytest.mark.damages
def test_damage_is_named(upstream: Upstream) -> None:
    folder = upstream.upload()
    log = folder / name_of(4)
    log.write_bytes(log.read_bytes()[:-1] + b"\xff")
    (folder / "offset.wm").write_text("00000000000000000009")
    (folder / name_of(2, "timeindex")).write_bytes(b"12345")
    assert upstream.verify() == [("watermark", "offset.wm"), ("timeindex", name_of(2, "timeindex")), ("log", name_of(4))]
    (folder / "_metadata").write_text("{}")
    assert ("metadata", "_metadata") in upstream.verify()


@pytest.mark.damages
def test_batches_of_another_offset_than_the_name_says(upstream: Upstream) -> None:
    folder = upstream.upload()
    for kind in ("log", "index", "timeindex"):
        (folder / name_of(4, kind)).rename(folder / name_of(5, kind))
    write_metadata(folder)
    assert ("log", name_of(5)) in upstream.verify()


@pytest.mark.damages
def test_the_newest_log_is_cut_short(upstream: Upstream) -> None:
    folder = upstream.upload()
    log = folder / name_of(4)
    log.write_bytes(log.read_bytes()[:-3])
    upstream.cli.refused("topics", says="cut short")


@pytest.mark.damages
def test_an_index_in_which_the_consumers_search_does_not_end(upstream: Upstream) -> None:
    folder = upstream.upload()
    sizes = [len(batch.raw) for batch in batches_of(upstream.folder / "log")][4:7]
    entries = [(1, sizes[0]), (2, sizes[0] + sizes[1])]
    (folder / name_of(4, "index")).write_bytes(b"".join(offset.to_bytes(4) + at.to_bytes(4) for offset, at in entries))
    assert upstream.verify() == [("endless", name_of(4, "index"))]


@pytest.mark.damages
def test_the_same_tier_twice_and_contradicting_arguments(upstream: Upstream) -> None:
    upstream.upload()
    assert upstream.own.ask("import").code == 2
    assert upstream.own.ask("import", "--from-tier", upstream.own.config).code == 2
    assert upstream.bring("--live").code == 2
    upstream.cli.set(**{"tier.pinterest": {"cluster": ""}})
    answer = upstream.cli.ask("topics")
    assert answer.code == 2
    assert "cluster" in json.dumps(answer.stderr)
