"""`erasure` names each kind of holder, says what has to pass, and does what may be done now."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from compactor.access.rounds import compact
from compactor.control import importing
from compactor.control.state import RoundStage
from compactor.errors import StoreError
from compactor.model.ids import TopicPartition
from compactor.storage.keys import RESERVED
from compactor.tier.ports import SegmentIdAndStartOffset
from tests.builders import LZ4, LogBuilder, log_of
from tests.support.bucket_cli import BucketCli
from tests.support.s3_server import Bucket
from tests.support.tier_cli import TierCli

HOUR = 3_600_000


class Topic:
    """A partition ``orders-0`` that grows, and what `erasure` says of a key."""

    def __init__(self, cli: TierCli, folder: Path) -> None:
        self.cli, self.folder, self.log, self.parts = cli, folder, LogBuilder(), 0

    def bring(self, *pairs: str, **how: Any) -> None:
        self.log.put(*pairs, **how)
        self.bring_log()

    def bring_log(self) -> None:
        self.parts += 1
        self.cli.bring(self.log.write(self.folder / f"part-{self.parts}"))

    def ask(self, key: str, *more: object, topic: str = "orders") -> tuple[int, Any]:
        answer = self.cli.ask("erasure", topic, "--key", key, *more)
        assert answer.code in (0, 3), answer
        assert answer.document["erased"] == (answer.code == 0)
        return answer.code, answer.document

    def holders(self, key: str) -> list[tuple[str, str]]:
        return sorted((one["state"], one["what"]) for one in self.ask(key)[1]["holders"])

    def round(self, now_ms: int) -> Any:
        return self.cli.run("--now", now_ms)


@pytest.fixture
def topic(tmp_path: Path) -> Topic:
    made = Topic(
        TierCli(tmp_path / "cli", {"cleaner": {"delete_retention_ms": 0, "bloom": False}, "publish": {"grace_ms": HOUR}}), tmp_path
    )
    made.bring("a=1", "b=1", "c=1")
    made.bring("a=2", "b=2", codec=LZ4)
    return made


def test_a_key_that_was_never_there_is_erased(topic: Topic) -> None:
    code, document = topic.ask("z")
    assert (code, document["holders"], document["gone_since"]) == (0, [], None)
    assert any("no import has copied yet" in one["what"] for one in document["not_covered"])


def test_each_state_of_a_record_until_it_is_gone(topic: Topic) -> None:
    assert topic.holders("a") == [("live", "superseded"), ("live", "value")]
    (old, new) = sorted(topic.ask("a")[1]["holders"], key=lambda one: str(one["what"]))
    assert new["waits_for"].startswith("a tombstone of the key")
    assert (old["first_offset"], old["last_offset"], old["records"], new["first_offset"]) == (0, 0, 1, 3)
    topic.bring("a")
    assert topic.holders("a") == [("live", "superseded"), ("live", "superseded"), ("live", "tombstone")]
    first = topic.round(10 * HOUR)
    assert first["status"] == "cleaned"
    document = topic.ask("a")[1]
    assert topic.holders("a") == [("live", "tombstone"), *[("replaced", "record")] * 3]
    replaced = [one for one in document["holders"] if one["state"] == "replaced"]
    assert all(one["until_ms"] > time.time() * 1000 and len(one["sha256"]) == 64 for one in replaced)
    assert document["gone_since"] is None  # its tombstone is still read
    topic.round(11 * HOUR)
    code, document = topic.ask("a")
    assert code == 3
    assert {one["state"] for one in document["holders"]} == {"replaced"}
    assert document["gone_since"]["run_id"] == topic.cli.do("runs", "list")["runs"][-1]["run_id"]
    topic.cli.do("retire", "--force-now", "--now", int(time.time() * 1000) + 2 * HOUR)
    code, document = topic.ask("a")
    assert (code, document["holders"]) == (0, [])
    assert topic.holders("c") == [("live", "value")]


def test_what_may_not_be_touched(topic: Topic) -> None:
    topic.log.put("t=1", pid=7, txn=True)
    topic.log.abort(7)
    topic.log.roll()
    topic.log.put("d=1")
    topic.log.put("u=1", pid=8, txn=True)
    topic.log.put("d")
    topic.bring_log()
    assert topic.holders("t") == [("live", "aborted")]
    assert topic.holders("u") == [("live", "undecided")]
    (holder,) = [one for one in topic.ask("d")[1]["holders"] if one["what"] == "tombstone"]
    assert holder["waits_for"] == "the end of the transaction that is open since offset 8"
    topic.cli.set(cleaner={"min_compaction_lag_ms": 9_000_000_000_000})
    (holder,) = [one for one in topic.ask("a")[1]["holders"] if one["what"] == "superseded"]
    assert holder["waits_for"].startswith("min_compaction_lag_ms")


def test_expedite_shortens_grace_only_with_consent(topic: Topic, tmp_path: Path) -> None:
    topic.bring("a")
    topic.bring("e=1")
    code, document = topic.ask("a", "--expedite")
    assert code == 3
    assert {one["state"] for one in document["holders"]} == {"replaced"}
    assert len(document["done"]) == 2  # one round for the values, one for the tombstone whose horizon has passed at once
    assert document["gone_since"] is not None
    report = tmp_path / "report.json"
    topic.ask("a", "--to", report)
    named = {one["object"] for one in json.loads(report.read_text())["holders"]}
    assert "a" not in report.read_text().replace("sha", "").split('"')  # no key, only its digest
    assert topic.cli.ask("erasure", "orders", "--key", "a", "--to", report).code == 2  # a report is not overwritten
    code, last = topic.ask("a", "--expedite", "--shorten-grace")
    assert (code, last["holders"]) == (0, [])
    assert last["gone_since"] == document["gone_since"]
    assert not [path for path in topic.cli.tier.rglob("*.log") if str(path.relative_to(topic.cli.tier)) in named]
    assert topic.ask("a")[1]["gone_since"] is None  # nothing is left that shows which round it was
    assert topic.holders("e") == [("live", "value")]


def test_shortened_grace_spares_objects_that_somebody_may_be_uploading(topic: Topic) -> None:
    topic.bring("a")
    topic.bring("e=1")
    log = min(topic.cli.tier.glob("orders-0/*.log"))
    young = log.with_name(f"{log.name[:21]}{'o' * 22}.log")
    young.write_bytes(b"half of a segment")
    topic.ask("a", "--expedite", "--shorten-grace")
    assert (young.exists(), log.exists()) == (True, False)
    young.unlink()


def test_expedite_in_one_step_names_the_round_that_took_the_key_from_readers(topic: Topic) -> None:
    topic.bring("a")
    topic.bring("e=1")
    code, document = topic.ask("a", "--expedite", "--shorten-grace")
    assert (code, document["holders"]) == (0, [])
    assert document["gone_since"]["run_id"] == topic.cli.do("runs", "list")["runs"][-1]["run_id"]


def test_a_tombstone_that_slow_readers_were_promised_is_not_expedited(topic: Topic) -> None:
    topic.cli.set(cleaner={"delete_retention_ms": HOUR})
    topic.bring("a")
    code, document = topic.ask("a", "--expedite", "--shorten-grace")
    (holder,) = document["holders"]
    assert (code, holder["state"], holder["what"]) == (3, "live", "tombstone")
    assert holder["until_ms"] > time.time() * 1000
    assert document["keys"][0]["until_ms"] == holder["until_ms"]


def test_what_is_being_written_is_a_holder(topic: Topic) -> None:
    """A round that stopped after its upload, and an import that stopped before it told."""
    opened, name = topic.cli.open(), TopicPartition("orders", 0)

    def stop(stage: RoundStage, plan: object) -> None:
        if stage is RoundStage.VERIFIED:
            raise StoreError("stopped")

    with pytest.raises(StoreError, match="stopped"):
        compact(opened, name, 10 * HOUR, force=True, on_stage=stop)
    assert ("open round", "record") in topic.holders("c")
    topic.cli.set(lease={"ttl_ms": 1_000})
    topic.cli.run("--now", 10 * HOUR)
    assert topic.holders("c") == [("live", "value"), ("replaced", "record")]
    log = opened.open_partition_log(name)
    segment = log.refresh().live[0]
    import_id, new_id = opened.ports.new_id(), opened.ports.new_id()
    importing.register_import(opened.ports, log, import_id, [new_id])
    source = topic.cli.tier / opened.ports.layout.object_name(name, segment, "log")
    shutil.copy(
        source, topic.cli.tier / opened.ports.layout.object_name(name, SegmentIdAndStartOffset(new_id, segment.start_offset), "log")
    )
    assert ("importing", "record") in topic.holders("c")


@pytest.mark.damages
def test_what_no_log_knows_and_what_cannot_be_read(topic: Topic) -> None:
    log = next(path for path in sorted((topic.cli.tier / "orders-0").glob("*.log")))
    orphan = log.with_name(f"{log.name[:21]}{'o' * 22}.log")
    shutil.copy(log, orphan)
    assert ("orphan", "record") in topic.holders("a")
    orphan.write_bytes(b"no segment at all")
    (holder,) = topic.ask("z")[1]["holders"]
    assert (holder["state"], holder["what"], holder["key"], holder["certain"]) == ("orphan", "unknown", None, False)
    orphan.unlink()
    staged = topic.cli.tier / RESERVED / "tmp" / "1-half"
    staged.write_bytes(b"half of a segment")
    (holder,) = topic.ask("z")[1]["holders"]
    assert holder["state"] == "unfinished upload"
    staged.unlink()
    scratch = topic.cli.tier / ".tiered-compactor" / "partitions" / "orders-0" / "scratch" / "run" / "buckets"
    scratch.parent.mkdir(parents=True)
    scratch.write_bytes(b"hashes")
    (holder,) = topic.ask("z")[1]["holders"]
    assert (holder["state"], holder["what"]) == ("scratch", "keyed hash")
    shutil.rmtree(scratch.parent.parent)
    log.write_bytes(b"damaged")
    assert ("live", "unknown") in topic.holders("z")


def test_sidecars_hold_keyed_hashes_and_filters_spare_reads(tmp_path: Path) -> None:
    topic = Topic(TierCli(tmp_path / "cli", {"cleaner": {"delete_retention_ms": 0, "bloom_design_keys": 10}}), tmp_path)
    topic.bring(*(f"k{number}={'x' * 500}" for number in range(200)))
    topic.bring("other=1")
    topic.cli.do("bloom", "rebuild", "orders-0")
    document = topic.ask("k7")[1]
    assert sorted(one["state"] for one in document["holders"]) == ["live", "sidecar"]
    assert document["partitions"][0]["segments_read"] == 2
    filtered = topic.ask("k7", "--by-filters")[1]
    assert [one["object"] for one in filtered["holders"]] == [one["object"] for one in document["holders"]]
    code, filtered = topic.ask("nobody", "--by-filters")
    assert code == 0
    assert filtered["partitions"][0]["ruled_out_by_filters"] >= 1


def test_many_keys_and_the_way_they_are_written(topic: Topic, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a\nbase64:Yg==\nzz\n\n")
    answer = topic.cli.ask("erasure", "orders-0", "--keys-file", file, "--key", "c")
    assert answer.code == 3
    assert [one["erased"] for one in answer.document["keys"]] == [False, False, False, True]
    assert len({one["key"] for one in answer.document["holders"]}) == 3
    assert topic.cli.ask("erasure", "other", "--key", "a").code == 2
    assert topic.cli.ask("erasure", "orders").code == 2
    table = topic.cli.ask("erasure", "orders", "--key", "a", output="table")
    assert table.code == 3
    assert "Not yet: 2 objects may hold it." in str(table.document)
    mistyped = topic.cli.ask("erasure", "orders", "--key", "A", output="table")
    assert (mistyped.code, "check how the key is written" in str(mistyped.document)) == (0, True)


def test_generations_for_other_consumers_are_holders(tmp_path: Path) -> None:
    target = (tmp_path / "target").as_uri()
    settings: dict[str, dict[str, Any]] = {"tier.pinterest": {"cluster": "prod", "target": target}, "cleaner": {"bloom": False}}
    topic = Topic(TierCli(tmp_path / "cli", settings), tmp_path)
    topic.bring("a=1", "b=1")
    topic.cli.do("generations", "write", "orders-0")
    assert topic.holders("a") == [("generation", "record"), ("live", "value")]
    not_covered = [one["what"] for one in topic.ask("a")[1]["not_covered"]]
    assert any("old versions of generations" in what for what in not_covered)
    assert topic.holders("z") == []


def test_a_bucket_that_keeps_versions(tmp_path: Path, s3_bucket: Bucket) -> None:
    cli = BucketCli(tmp_path / "cli", s3_bucket, cleaner={"delete_retention_ms": 0, "bloom": False}, publish={"grace_ms": 0})
    topic = Topic(cli, tmp_path)
    client, name = s3_bucket.server.client(), s3_bucket.name
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    topic.bring("a=1", "b=1")
    topic.bring("a", "b=2")
    code, document = topic.ask("a", "--expedite")
    assert code == 3
    assert {one["state"] for one in document["holders"]} == {"old version"}
    assert {one["what"] for one in document["holders"]} == {"record"}
    for entry in client.list_object_versions(Bucket=name)["Versions"]:
        if not entry["IsLatest"]:
            client.delete_object(Bucket=name, Key=entry["Key"], VersionId=entry["VersionId"])
    assert topic.ask("a")[0] == 0
    assert topic.holders("b") == [("live", "value")]


class TestErasedValuesComeBackOnlyByAWord:
    """The rule needs neither keys nor their hashes: that, and until when, keys of the topic were erased is in the audit."""

    def test_an_old_directory_after_the_partition_was_deleted(self, topic: Topic) -> None:
        topic.bring("a")
        topic.ask("a", "--expedite")
        old = topic.folder / "part-1"
        topic.cli.do("topics", "delete", "orders-0")
        answer = topic.cli.ask("import", old, "--topic", "orders", "--partition", 0)
        assert (answer.code, "keys of orders were erased until" in answer.stderr, "--accept-erased" in answer.stderr) == (3, True, True)
        assert topic.cli.do("topics")["partitions"] == []
        assert topic.cli.do("import", old, "--topic", "orders", "--partition", 0, "--accept-erased")["segments"] == 1
        imports = [row["action"] for row in topic.cli.do("audit", "list")["actions"] if row["action"]["command"] == "import"]
        assert [action["details"] for action in imports] == [{"accept_erased": True}]

    def test_what_continues_the_tier_needs_no_word(self, topic: Topic) -> None:
        topic.ask("a", "--expedite")
        topic.bring("d=1")
        made = log_of("a=1")
        other = made.write(topic.folder / "another partition")
        assert topic.cli.ask("import", other, "--topic", "orders", "--partition", 1).code == 0, "a partition that the tier never had"

    def test_a_partition_that_was_deleted_without_an_erasure_needs_no_word(self, topic: Topic) -> None:
        topic.ask("a")
        topic.cli.do("topics", "delete", "orders-0")
        assert topic.cli.ask("import", topic.folder / "part-1", "--topic", "orders", "--partition", 0).code == 0

    def test_undo_of_a_round_that_was_over_when_keys_were_erased(self, topic: Topic) -> None:
        topic.bring("a")
        topic.cli.run()
        topic.ask("a", "--expedite")
        latest = self.latest_undoable_run(topic)
        topic.cli.refused("undo", latest, code=2, says="keys of orders were erased until")
        assert topic.cli.ask("undo", latest, "--accept-erased").code == 0

    def test_undo_of_a_later_round_needs_no_word(self, topic: Topic) -> None:
        topic.ask("z", "--expedite")
        topic.bring("c=5")
        topic.cli.run()
        assert topic.cli.ask("undo", self.latest_undoable_run(topic)).code == 0

    def latest_undoable_run(self, topic: Topic) -> str:
        runs = [row for row in topic.cli.do("runs", "list", "orders-0")["runs"] if row["undoable"]]
        return str(max(runs, key=lambda row: row["started_ms"])["run_id"])
