"""checkpoints, runs and undo as a user types them; and that looking disturbs nobody."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from compactor.errors import CompactorError
from compactor.storage.port import FileRange
from compactor.storage.wrappers import ReadOnlyStore
from tests.support.deployment import Deployment, GrowingLog, Running

LOOKS = (
    ("checkpoints", "list"),
    ("checkpoints", "show", "orders-0"),
    ("checkpoints", "lineage", "orders-0"),
    ("checkpoints", "diff", "orders-0", "1"),
    ("checkpoints", "verify"),
    ("runs", "list"),
    ("explain", "orders-0"),
    ("explain", "orders-0", "--key", "key-1"),
    ("explain", "orders-0", "--offset", "3"),
)


@pytest.fixture
def log(tmp_path: Path) -> GrowingLog:
    return GrowingLog("orders", 0, tmp_path, random.Random(11))


@pytest.fixture
def deployment(tmp_path: Path, log: GrowingLog) -> Deployment:
    """Two parts, each cleaned by a run of its own."""
    made = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}, "lease": {"ttl_ms": 500}})
    for _ in range(2):
        made.bring(log.write_part())
        made.do("run", "--force")
    return made


def slow_run(deployment: Deployment, requests_per_s: int) -> Running:
    """A `run` of its own that takes some seconds."""
    slow = {"TIERED_COMPACTOR__LIMITS__MAX_REQUESTS_PER_S": str(requests_per_s)}
    os.environ.update(slow)
    try:
        return deployment.start("run", "--force")
    finally:
        for name in slow:
            del os.environ[name]


class TestLooking:
    def test_no_look_changes_anything(self, deployment: Deployment) -> None:
        before = deployment.digest()
        for look in LOOKS:
            assert deployment.ask(*look).code == 0
            assert deployment.ask(*look, output="table").code == 0
        assert deployment.digest() == before

    def test_not_even_at_a_round_that_was_interrupted(self, deployment: Deployment, log: GrowingLog) -> None:
        deployment.bring(log.write_part(segments=8))
        process = slow_run(deployment, 15)
        try:
            while deployment.do("checkpoints", "show", "orders-0")["open_run"] is None:
                assert process.poll() is None, process.said()
        finally:
            process.put_down()
        before = deployment.digest()
        for look in LOOKS:
            assert deployment.ask(*look).code == 0
        assert deployment.digest() == before
        found = deployment.do("checkpoints", "show", "orders-0")
        assert found["lease"]["epoch"] == 2
        time.sleep(0.6)  # one ttl
        assert "was interrupted" in deployment.do("explain", "orders-0")["answer"]

    def test_a_run_at_work_is_not_disturbed(self, deployment: Deployment, log: GrowingLog) -> None:
        deployment.bring(log.write_part(segments=6))
        process = slow_run(deployment, 30)
        looks = 0
        try:
            while process.poll() is None:
                for look in LOOKS:
                    answer = deployment.ask(*look)
                    assert answer.code == 0, answer
                    looks += 1
        finally:
            process.put_down()
        assert process.returncode == 0, process.said()
        assert looks >= len(LOOKS)
        assert [run["status"] for run in deployment.do("runs", "list")["runs"]] == ["cleaned"] * 3
        assert log.wrong_in(deployment.export(deployment.folder / "out"), clean=True) == []

    def test_a_store_that_is_only_looked_at_refuses_to_be_written_to(self, deployment: Deployment) -> None:
        store = ReadOnlyStore(deployment.opened().ports.control)
        for write in (
            lambda: store.create("a", b""),
            lambda: store.create_from_file("a", deployment.config),
            lambda: store.compose("a", [FileRange(deployment.config, 0, 1)]),
            lambda: store.put("a", b""),
            lambda: store.delete(["a"]),
            store.clock_ms,
        ):
            with pytest.raises(CompactorError):
                write()


class TestCheckpoints:
    def test_what_scripts_may_rely_on(self, deployment: Deployment) -> None:
        found = deployment.do("checkpoints", "show", "orders-0")
        end = found["end_offset"]
        (first, second) = found["cleaner_offsets"]
        assert (first["leader_epoch"], second) == (0, {"leader_epoch": 1, "offset": end + 1})
        assert 0 < first["offset"] <= end
        assert (found["lease"], found["fenced"], found["first_dirty_offset"]) == (None, [], end + 1)
        (row,) = deployment.do("checkpoints", "list")["partitions"]
        assert row == found
        tree = deployment.do("checkpoints", "lineage", "orders-0")
        assert [(epoch["leader_epoch"], epoch["ended"], len(epoch["runs"])) for epoch in tree["epochs"]] == [
            (0, "released", 1), (1, "released", 1)
        ]  # fmt: skip
        assert tree["cleaner_offsets"] == found["cleaner_offsets"]
        assert deployment.do("checkpoints", "verify") == {"ok": True, "problems": []}

    def test_a_run_is_a_difference(self, deployment: Deployment) -> None:
        first, second = (run["run_id"] for run in deployment.do("runs", "list")["runs"])
        found = deployment.do("checkpoints", "diff", "orders-0", second)
        assert [change["leader_epoch"] for change in found["cleaner_offsets"]] == [1]
        changes = [change["change"] for change in found["segments"]]
        assert (changes.count("removed"), changes.count("added") > 0) == (4, True)
        between = deployment.do("checkpoints", "diff", "orders-0", first, second)
        assert between["to"] == found["to"]

    def test_for_people(self, deployment: Deployment) -> None:
        text = deployment.ask("checkpoints", "lineage", "orders-0", output="table").document
        (first, _) = (run["run_id"] for run in deployment.do("runs", "list")["runs"])
        assert f"run {first}  cleaned, published in slot" in text
        assert "└── epoch 1" in text
        text = deployment.ask("checkpoints", "list", output="table").document
        assert "orders-0" in text

    def test_kafkas_own_files_need_no_configuration(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bare = Deployment(tmp_path / "bare")
        monkeypatch.chdir(tmp_path)
        Path("cleaner-offset-checkpoint").write_text("0\n1\norders 0 1234\n")
        Path("later").write_text("0\n1\norders 0 2000\n")
        for subcommand in ("show", "list"):
            found = bare.do("checkpoints", subcommand, "cleaner-offset-checkpoint")
            assert found["partitions"] == [
                {
                    "topic": "orders",
                    "partition": 0,
                    "cleaner_offsets": [{"leader_epoch": None, "offset": 1234}],
                    "lease": None,
                    "fenced": [],
                }
            ]
        found = bare.do("checkpoints", "diff", "cleaner-offset-checkpoint", "later")
        assert found["changes"] == [{"what": "orders-0", "before": 1234, "after": 2000}]
        Path("leader-epoch-checkpoint").write_text("0\n1\n5 1200\n")
        assert bare.do("checkpoints", "show", "leader-epoch-checkpoint")["leader_epochs"] == [{"epoch": 5, "start_offset": 1200}]
        assert bare.do("checkpoints", "lineage", "leader-epoch-checkpoint")["leader_epochs"] == [{"epoch": 5, "start_offset": 1200}]
        assert bare.ask("checkpoints", "lineage", "later").code == 2
        assert bare.do("checkpoints", "verify", "later", "leader-epoch-checkpoint") == {"ok": True, "problems": []}
        Path("later").write_text("0\n9\norders 0 2000\n")
        assert bare.ask("checkpoints", "show", "later").code == 3
        assert bare.ask("checkpoints", "verify", "later").code == 3

    def test_a_file_of_many_partitions_is_asked_for_some(self, tmp_path: Path) -> None:
        bare = Deployment(tmp_path / "bare")
        file = tmp_path / "cleaner-offset-checkpoint"
        file.write_text("0\n5000\n" + "".join(f"orders {number} {number}\n" for number in range(4_999)) + "payments 0 7\n")
        found = bare.do("checkpoints", "list", file, "orders-4711", "payments")["partitions"]
        assert [(row["topic"], row["partition"]) for row in found] == [("orders", 4711), ("payments", 0)]
        bare.refused("checkpoints", "list", file, "invoices-0", code=2, says="has no entry of invoices-0")

    def test_a_file_and_a_partition_of_the_tier_are_compared_for_a_take_over(self, deployment: Deployment, tmp_path: Path) -> None:
        file = tmp_path / "cleaner-offset-checkpoint"
        first_dirty = deployment.do("checkpoints", "show", "orders-0")["first_dirty_offset"]
        file.write_text(f"0\n2\norders 0 {first_dirty + 5}\npayments 0 7\n")
        expected = [{"what": "orders-0", "before": first_dirty + 5, "after": first_dirty}]
        assert deployment.do("checkpoints", "diff", file, "orders-0")["changes"] == expected
        expected = [{"what": "orders-0", "before": first_dirty, "after": first_dirty + 5}]
        assert deployment.do("checkpoints", "diff", "orders-0", file)["changes"] == expected

    @pytest.mark.parametrize(
        "arguments",
        [
            ("show", "no/such/file"),
            ("show", "payments-0"),
            ("diff", "orders-0", "4711"),
            ("diff", "orders-0", "yesterday"),
            ("lineage", "payments"),
        ],
    )
    def test_what_is_not_there(self, deployment: Deployment, arguments: tuple[str, ...]) -> None:
        assert deployment.ask("checkpoints", *arguments).code == 2

    @pytest.mark.damages
    def test_a_garbled_record_is_named(self, deployment: Deployment) -> None:
        (slot,) = deployment.tier.glob(f".tiered-compactor/partitions/orders-0/log/{3:020d}.json")
        slot.write_bytes(slot.read_bytes()[:-7])
        answer = deployment.ask("checkpoints", "verify")
        assert answer.code == 3
        assert slot.name in answer.stderr
        assert deployment.ask("checkpoints", "show", "orders-0").code == 3


class TestRunsAndUndo:
    def test_a_round_is_taken_back_and_done_again(self, deployment: Deployment, log: GrowingLog) -> None:
        first, second = deployment.do("runs", "list", "orders-0")["runs"]
        assert [(run["status"], run["undoable"]) for run in (first, second)] == [("cleaned", False), ("cleaned", True)]
        shown = deployment.do("runs", "show", second["run_id"])
        assert shown == second
        assert shown["stats"]["records_read"] > shown["stats"]["records_kept"]
        done = deployment.do("undo", second["run_id"])
        assert done["cleaner_offsets"] == first["cleaner_offsets"]
        assert done["segments"] == 4
        assert log.wrong_in(deployment.export(deployment.folder / "undone"), clean=False) == []
        assert deployment.do("verify")["ok"]
        again = deployment.ask("undo", second["run_id"])
        assert (again.code, "undone before" in again.stderr) == (0, True)
        assert [run["status"] for run in deployment.do("runs", "list")["runs"]] == ["cleaned", "reverted"]
        assert deployment.do("checkpoints", "lineage", "orders-0")["epochs"][-1]["undid"] == [second["run_id"]]
        assert deployment.run("orders-0")["status"] == "cleaned"
        assert log.wrong_in(deployment.export(deployment.folder / "out"), clean=True) == []

    def test_only_the_latest_round_can_be_undone(self, deployment: Deployment) -> None:
        first, _ = deployment.do("runs", "list")["runs"]
        before = deployment.do("checkpoints", "show", "orders-0")["cleaner_offsets"]
        deployment.refused("undo", first["run_id"], "--partition", "orders-0", code=2, says="not the latest round")
        assert deployment.do("checkpoints", "show", "orders-0")["cleaner_offsets"] == before

    def test_nobody_is_led_back_to_what_was_lost(self, deployment: Deployment) -> None:
        run = deployment.do("runs", "list", "orders-0")["runs"][-1]
        assert run["undoable"]
        segments = deployment.do("segments", "list", "orders-0")["segments"]
        live = {segment["id"] for segment in segments if segment["replaced_by"] is None}
        source = next(segment["id"] for segment in segments if segment["replaced_by"] in live)
        (lost,) = deployment.tier.glob(f"orders-0/*-{source}.log")
        kept = lost.read_bytes()
        lost.unlink()
        answer = deployment.ask("undo", run["run_id"])
        assert (answer.code, lost.name in answer.stderr) == (3, True)
        assert deployment.do("verify")["ok"]
        lost.write_bytes(kept[:-1] + b"?")
        assert deployment.ask("undo", run["run_id"]).code == 3
        lost.write_bytes(kept)
        deployment.do("undo", run["run_id"])

    def test_what_was_retired_cannot_be_undone(self, deployment: Deployment) -> None:
        deployment.do("retire", "--now", 4 * 10**12, "--force-now")
        _, second = deployment.do("runs", "list")["runs"]
        assert not second["undoable"]
        assert deployment.ask("undo", second["run_id"]).code == 2

    def test_a_run_that_nobody_remembers(self, deployment: Deployment) -> None:
        assert deployment.ask("undo", "nonsense").code == 2
        assert deployment.ask("runs", "show", "nonsense").code == 2
