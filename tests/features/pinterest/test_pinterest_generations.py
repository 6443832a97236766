"""Generations: what the consumer of Pinterest's layout reads of a compacted partition, by its own rules, from every position."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compactor.access.tier import Tier
from compactor.errors import AlreadyExists, Unavailable
from compactor.features.pinterest import generations as layout
from compactor.features.pinterest.generations import (
    GenerationTarget,
    GenerationWriteOptions,
    configured_generation_target,
    switch_readers,
    write_generation,
)
from compactor.features.pinterest.output import delete_due_generations, read_partition_generations
from compactor.model.ids import TopicPartition
from compactor.storage.port import ObjectInfo, ObjectStore
from compactor.storage.wrappers import ReadOnlyStore
from tests.builders import LZ4, NONE, LogBuilder, log_of
from tests.support.plain_pinterest import PlainConsumer, Stalled, upload
from tests.support.tier_cli import GrowingTier, TierCli, batches_of

ORDERS = TopicPartition("orders", 0)


class House(GrowingTier):
    """A tier of our own that is filled again and again, and the generations that are made of it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {"publish": {"grace_ms": 0}, "cleaner": {"delete_retention_ms": 0}})
        self.target = folder / "compacted"
        self.cli.set(**{"tier.pinterest": {"cluster": "prod", "target": self.target.as_uri()}})
        self.exports = 0

    def write(self) -> Any:
        (row,) = self.cli.do("generations", "write")["partitions"]
        return row

    def opened(self) -> tuple[Tier, GenerationTarget]:
        tier = self.cli.open()
        return tier, configured_generation_target(tier)

    def folder_now(self) -> Path:
        """Where an endpoint provider sends a consumer."""
        pointer = json.loads((self.target / ".generations" / "prod" / "orders-0" / "current.json").read_text())
        assert (pointer["cluster"], pointer["entropyBits"], pointer["topic"], pointer["partition"]) == ("prod", 0, "orders", 0)
        return self.target / str(pointer["basePrefix"]) / "prod" / "orders-0"

    def expected(self) -> list[tuple[int, bytes | None, bytes | None]]:
        """All records that our readers read, control records included."""
        self.exports += 1
        exported = self.cli.export(self.folder / f"export {self.exports}")
        return [(r.offset, r.key, r.value) for batch in batches_of(exported) for r in batch.records]

    def check(self, folder: Path | None = None, expected: list[tuple[int, bytes | None, bytes | None]] | None = None) -> None:
        """From every position the consumer gets every record, each once, and never stays where it is."""
        folder, expected = folder or self.folder_now(), expected if expected is not None else self.expected()
        end = expected[-1][0] + 1
        first = min(PlainConsumer(folder).offsets())
        for position in range(first, end + 1):
            assert list(PlainConsumer(folder, position).read_all(end)) == [record for record in expected if record[0] >= position]
        assert max(PlainConsumer(folder).offsets()) == int((folder / "offset.wm").read_text())


@pytest.fixture
def house(tmp_path: Path) -> House:
    made = House(tmp_path)
    made.segment("a=1", "b=1", "c=1")
    made.segment("a=2", "b=2")
    made.segment("d=1", "a=3", "e=1", "e=2")
    made.bring()
    return made


def test_a_partition_that_was_never_compacted(house: House) -> None:
    row = house.write()
    assert (row["status"], row["start_offset"], row["end_offset"]) == ("written", 0, 8)
    house.check()
    assert house.write()["status"] == "up_to_date"


def test_segments_are_appended_until_a_round_rewrites(house: House) -> None:
    first = house.write()["generation"]
    house.segment("f=1", "a=4")
    house.bring()
    row = house.write()
    assert (row["status"], row["generation"], row["objects"]) == ("appended", first, 1)
    house.check()
    before, folder = house.expected(), house.folder_now()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert house.cli.run()["status"] == "cleaned"
    row = house.write()
    assert (row["status"], row["generation"] != first) == ("written", True)
    assert house.folder_now() != folder
    house.check()
    # Who reads the old one goes on reading it.
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    house.check(folder, before)


def test_emptied_segments_and_emptied_tails_hold_nobody_up(house: House) -> None:
    """Every record of the second segment goes, and the last ones of the first."""
    house.cli.set(cleaner={"segment_bytes": 150})
    for number in range(6):
        house.segment(f"x{number}=1", "gone=1")
        house.segment("gone=2", "gone=3")
        house.segment(f"y{number}=1", "gone=")
    house.segment("last=1")
    house.bring()
    house.cli.run("--now", 10**15)
    house.cli.run("--now", 2 * 10**15)
    expected = house.expected()
    offsets = [offset for offset, _, _ in expected]
    assert len(offsets) < offsets[-1] - offsets[0]  # there are holes
    assert house.write()["status"] == "written"
    house.check()
    house.segment("more=1")
    house.bring()
    assert house.write()["status"] == "appended"
    house.check()


def test_plain_copies_of_the_segments_would_stall(house: House, tmp_path: Path) -> None:
    """The judge can tell: objects under the names that our tier gives them."""
    house.segment("a=9", "b=9", "c=9", "d=9", "e=9")
    house.bring()
    house.cli.set(cleaner={"segment_bytes": 100})
    house.cli.run("--now", 10**15)
    expected = house.expected()
    folder = upload(house.folder / f"export {house.exports}", tmp_path / "copies")
    with pytest.raises(Stalled):
        house.check(folder, expected)
    house.write()
    house.check()


def test_records_below_the_log_start_are_left_out_also_inside_a_batch(tmp_path: Path) -> None:
    house = House(tmp_path)
    for codec in (NONE, LZ4):
        base = house.log.put("a=1", "b=2", "c=3", codec=codec)
        house.log.put(f"d={base}", "e=5")
        house.log.roll()
    house.segment("f=1")
    house.bring()
    everything = house.expected()
    assert house.write()["status"] == "written"
    for start in range(1, 11):
        house.cli.do("topics", "delete-records", "orders-0", "--before", start)
        assert (house.write()["status"], house.write()["status"]) == ("written", "up_to_date")
        house.check(expected=[record for record in everything if record[0] >= start])
        assert min(PlainConsumer(house.folder_now()).offsets()) == start
    house.cli.do("topics", "delete-records", "orders-0", "--before", 11)
    assert house.write()["status"] == "removed"
    assert not (house.target / ".generations" / "prod" / "orders-0" / "current.json").exists()
    house.segment("g=1")
    house.bring()
    assert house.write()["status"] == "appended"
    house.check(expected=[(11, b"g", b"1")])


def test_transactions_are_handed_on_as_they_are(house: House) -> None:
    house.log.put("t=1", pid=7, txn=True)
    house.log.abort(7)
    house.log.roll()
    house.segment("u=1")
    house.bring()
    house.write()
    house.check()


def test_undo_brings_a_new_generation(house: House) -> None:
    house.cli.set(publish={"undo_window_ms": 10**12})
    house.write()
    house.cli.run()
    second = house.write()["generation"]
    (run,) = house.cli.do("runs", "list")["runs"]
    house.cli.do("undo", run["run_id"])
    row = house.write()
    assert (row["status"], row["generation"] != second) == ("written", True)
    house.check()


def test_a_tier_of_the_layout_like_any_other(house: House, tmp_path: Path) -> None:
    house.cli.run()
    house.write()
    base = house.folder_now().parents[1]
    reader = TierCli(tmp_path / "reader", {"tier": {"layout": "pinterest", "url": base.as_uri()}, "tier.pinterest": {"cluster": "prod"}})
    answer = reader.do("verify")
    assert (answer["ok"], [p for p in answer["problems"] if p["severity"] == "error"]) == (True, [])
    own = TierCli(tmp_path / "third")
    (row,) = own.do("import", "--from-tier", reader.config, "--allow-gaps")["partitions"]
    assert row["status"] == "imported"


def test_a_deleted_partition_loses_its_pointer_then_its_generation_and_is_begun_anew(house: House) -> None:
    first = house.write()["generation"]
    house.segment("f=1")
    house.bring()
    house.write()
    folder = house.folder_now()
    before = house.expected()
    house.cli.do("topics", "delete", "orders-0")
    removed = house.write()
    assert (removed["status"], removed["objects"], removed["generation"] > first) == ("removed", 0, True)
    pointer = house.target / ".generations" / "prod" / "orders-0" / "current.json"
    assert not pointer.exists()
    house.check(folder, before)  # whoever reads it goes on
    assert house.write()["status"] == "up_to_date"
    _, target = house.opened()
    (waits,) = delete_due_generations(target, ORDERS)
    assert (waits.generation, waits.deleted) == (first, False)
    (gone,) = delete_due_generations(replace(target, keep_ms=0), ORDERS)
    assert (gone.generation, gone.deleted) == (first, True)
    assert not folder.exists() or not list(folder.iterdir())
    assert read_partition_generations(target, ORDERS).numbers == (3,)
    assert house.cli.do("generations", "list") == {"generations": []}
    assert house.write()["status"] == "up_to_date"
    house.bring()
    assert house.write()["generation"] == removed["generation"]
    house.check()


def test_a_superseded_generation_goes_when_its_time_has_come(house: House) -> None:
    first = house.write()["generation"]
    house.cli.run()
    second = house.write()["generation"]
    _, target = house.opened()
    (waiting,) = delete_due_generations(target, ORDERS)
    assert (waiting.generation, waiting.deleted) == (first, False)
    at_once = replace(target, keep_ms=0)
    (planned,) = delete_due_generations(replace(at_once, store=ReadOnlyStore(target.store)), ORDERS, dry_run=True)
    assert planned.deleted
    assert (house.target / first).exists()
    (gone,) = delete_due_generations(at_once, ORDERS)
    assert (gone.generation, gone.deleted) == (first, True)
    assert not list((house.target / first).rglob("*.log"))
    house.check()
    known = read_partition_generations(target, ORDERS)
    assert (known.current and known.current.name, known.earlier, known.begun) == (second, (), ())
    house.segment("f=1")
    house.bring()
    assert house.write()["status"] == "appended"
    house.check()


class Interrupted(Exception):
    """The process ends here."""


class Breaking:
    """An ObjectStore whose writer ends after so many changes, before or after the last one took effect."""

    def __init__(self, store: ObjectStore, changes: int) -> None:
        self._store, self._left = store, changes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._counted(found) if name in ("create", "create_from_file", "compose", "put", "delete") else found

    def _counted(self, change: Callable[..., ObjectInfo]) -> Callable[..., ObjectInfo]:
        def call(*arguments: Any, **named: Any) -> ObjectInfo:
            if not self._left:
                raise Interrupted
            self._left -= 1
            return change(*arguments, **named)

        return call


def test_a_writer_may_end_anywhere(house: House) -> None:
    house.write()
    house.cli.run()
    house.segment("f=1", "g=1")
    house.bring()
    tier, target = house.opened()
    pristine = house.folder / "pristine"
    shutil.copytree(house.target, pristine)
    for changes in range(200):
        shutil.rmtree(house.target)
        shutil.copytree(pristine, house.target)
        broken = replace(target, store=Breaking(target.store, changes))
        try:
            write_generation(tier, broken, ORDERS)
            delete_due_generations(replace(broken, keep_ms=0), ORDERS)
            break
        except Interrupted:
            # What the pointer says is whole at every moment, be it old or new; and the next writer brings it to its end.
            assert list(PlainConsumer(house.folder_now()).read_all(9))
            write_generation(tier, target, ORDERS)
            house.check()
            delete_due_generations(replace(target, keep_ms=0), ORDERS)
            house.check()
    assert changes > 12
    house.check()
    assert write_generation(tier, target, ORDERS).status == "up_to_date"


def interrupted(store: ObjectStore, before: Callable[[str], None], method: str = "create") -> Any:
    """The store, with ``before`` called with the key of each object that ``method`` is to make."""

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            real = getattr(store, name)
            if name != method:
                return real

            def call(key: str, *rest: Any, **options: Any) -> Any:
                before(key)
                return real(key, *rest, **options)

            return call

    return Interrupted()


def test_two_writers_at_once(house: House) -> None:
    tier, target = house.opened()
    steps: list[str] = []

    def overtake(key: str) -> None:
        """Another writer is faster, just before the step is recorded."""
        if key.endswith("1.json") and not steps:
            steps.append(key)
            assert write_generation(tier, target, ORDERS).status == "written"

    assert write_generation(tier, replace(target, store=interrupted(target.store, overtake)), ORDERS).status == "up_to_date"
    assert steps
    house.check()


def test_a_partition_that_was_imported_anew(house: House) -> None:
    """Its control log begins again at slot 1, and another log may be in it."""
    for _ in range(3):
        house.segment("z=1")
        house.bring()
    first = house.write()["generation"]
    for folder in (house.cli.tier, house.folder / "log"):
        shutil.rmtree(folder)
    house.log = LogBuilder()
    house.segment("other=1", "other=2")
    house.segment("other=3")
    house.bring()
    row = house.write()
    assert (row["status"], row["generation"] != first, row["end_offset"]) == ("written", True, 2)
    house.check()


def test_whoever_is_always_overtaken_gives_up(house: House) -> None:
    tier, target = house.opened()

    def lose(key: str) -> None:
        if key.endswith(".json"):
            raise AlreadyExists(key)

    with pytest.raises(Unavailable, match="other processes were faster"):
        write_generation(tier, replace(target, store=interrupted(target.store, lose)), ORDERS)


@pytest.mark.parametrize("target", ["", "inside", "around"])
def test_a_target_of_its_own_is_needed(house: House, target: str) -> None:
    url = {"": "", "inside": (house.cli.tier / "x").as_uri(), "around": house.folder.as_uri()}[target]
    house.cli.set(**{"tier.pinterest": {"target": url}})
    house.cli.refused("generations", "write", code=2, says="target")


def test_config_check_tries_the_target(house: House) -> None:
    assert house.cli.do("config", "check")["ok"]
    (house.folder / "afile").write_text("no directory")
    house.cli.set(**{"tier.pinterest": {"target": (house.folder / "afile" / "target").as_uri()}})
    answer = house.cli.ask("config", "check")
    assert answer.code == 5
    assert any("afile" in problem["object"] for problem in answer.document["problems"])


def test_list_and_retire_on_the_command_line(house: House) -> None:
    first = house.write()["generation"]
    house.cli.run()
    second = house.write()["generation"]
    listed = house.cli.do("generations", "list")["generations"]
    assert [(row["generation"], row["current"]) for row in listed] == [(first, False), (second, True)]
    answer = house.cli.do("generations", "retire", "--dry-run")
    assert ([one["generation"] for one in answer["waiting"]], answer["deleted"]) == ([first], [])
    assert house.cli.do("generations", "retire")["deleted"] == []


def test_many_partitions_by_their_topics(house: House) -> None:
    for name in ("orders-1", "other-0"):
        log = log_of("x=1; /")
        topic, _, number = name.rpartition("-")
        house.cli.do("import", log.write(house.folder / name, indexes=True), "--topic", topic, "--partition", number)

    def shown(*words: object) -> list[tuple[str, int]]:
        return [(row["topic"], row["partition"]) for row in house.cli.do("generations", "write", *words)["partitions"]]

    assert shown("--topics", "ord.*") == [("orders", 0), ("orders", 1)]
    assert shown("other-0", "orders-1") == [("other", 0), ("orders", 1)]
    assert shown() == [("orders", 0), ("orders", 1), ("other", 0)]
    listed = house.cli.do("generations", "list", "--topics", "other")["generations"]
    assert [(row["topic"], row["current"]) for row in listed] == [("other", True)]
    for words in (("orders-0", "--topics", "x"), ("--topics", "(")):
        assert house.cli.ask("generations", "write", *words).code == 2
    assert house.cli.do("generations", "write", "--topics", "none")["partitions"] == []


def test_the_files_of_a_segment_in_the_order_in_which_readers_need_them(house: House) -> None:
    """Indexes before the log, objects before the step, then what names them, the pointer last."""
    tier, target = house.opened()
    made: list[str] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            found: Callable[..., ObjectInfo] = getattr(target.store, name)
            if name not in ("create", "create_from_file", "compose", "put"):
                return found

            def call(key: str, *arguments: Any, **options: Any) -> ObjectInfo:
                made.append(key.rpartition("/")[2])
                return found(key, *arguments, **options)

            return call

    noting: Any = Noting()
    write_generation(tier, replace(target, store=noting), ORDERS)
    files = [f"{base:020d}.{kind}" for base in (0, 3, 5) for kind in ("index", "timeindex", "log")]
    step, told = f"{1:020d}.json", f"{1:020d}.told"
    assert made == [f"g{1:020d}.begun", *files, step, "_metadata", "offset.wm", "current.json", told]


def test_a_slow_writer_does_not_leave_what_it_knew(house: House) -> None:
    """Between what it has read and what it writes another one appends: it looks again, and puts right what it has put back."""
    house.write()
    tier, target = house.opened()
    (house.folder_now() / "_metadata").unlink()
    steps: list[str] = []

    def append(key: str) -> None:
        if not steps:
            steps.append(key)
            house.segment("f=1", "a=4")
            house.bring()
            assert write_generation(tier, target, ORDERS).status == "appended"

    switch_readers(replace(target, store=interrupted(target.store, append, "put")), target.generation_step_log(ORDERS))
    assert steps
    house.check()


def test_what_a_killed_writer_has_begun_and_nobody_can_finish_any_more_goes(house: House) -> None:
    tier, target = house.opened()
    with pytest.raises(Interrupted):
        write_generation(tier, replace(target, store=Breaking(target.store, 4)), ORDERS)
    left = house.target / f"g{1:020d}"
    assert list(left.rglob("*.log"))
    house.segment("x=1")
    house.bring()
    # Somebody else makes the first step count with another view, under another name where what lies there differs.
    (left / "prod" / "orders-0" / f"{0:020d}.log").write_bytes(b"of a view that was taken back")
    assert write_generation(tier, target, ORDERS).generation == f"g{1:020d}-1"
    at_once = replace(target, keep_ms=0)
    (planned,) = delete_due_generations(at_once, ORDERS, dry_run=True)
    assert (planned.generation, planned.deleted) == (left.name, True)
    (waits,) = delete_due_generations(target, ORDERS)
    assert not waits.deleted
    (gone,) = delete_due_generations(at_once, ORDERS)
    assert (gone.generation, gone.deleted) == (left.name, True)
    assert not list(left.rglob("*.log"))
    assert read_partition_generations(target, ORDERS).begun == ()
    house.check()


def test_steps_are_told_anew_as_a_whole_now_and_then_and_no_more_is_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "WHOLE_EVERY", 4)
    tier, target = house.opened()
    first = write_generation(tier, target, ORDERS).generation
    house.cli.run()
    write_generation(tier, target, ORDERS)
    for number in range(23):
        house.segment(f"n{number}=1")
        house.bring()
        assert write_generation(tier, target, ORDERS).status == "appended"
    before = tier.counters.usage().requests.get("get", 0)
    known = target.generation_step_log(ORDERS).read_generations()
    assert tier.counters.usage().requests["get"] - before <= 4
    assert known.current is not None
    assert (known.current.number, known.current.began, len(known.numbers)) == (25, 2, known.current.number - known.current.whole + 7)
    assert [one.name for one in known.earlier] == [first]
    house.check()
    delete_due_generations(replace(target, keep_ms=0), ORDERS)
    assert read_partition_generations(target, ORDERS).earlier == ()
    house.cli.run("--force")
    assert write_generation(tier, target, ORDERS).status == "written"
    delete_due_generations(replace(target, keep_ms=0), ORDERS)
    assert read_partition_generations(target, ORDERS).numbers == (26,)
    house.check()


def test_only_appending(house: House) -> None:
    """As agents do it: the first generation, then what comes; one that a round has superseded is left to others."""
    tier, target = house.opened()
    how = GenerationWriteOptions(append_only=True)
    assert write_generation(tier, target, ORDERS, how).status == "written"
    house.segment("f=1")
    house.bring()
    assert write_generation(tier, target, ORDERS, how).status == "appended"
    house.cli.run("--force")
    assert write_generation(tier, target, ORDERS, how).status == "superseded"
    assert write_generation(tier, target, ORDERS).status == "written"
    house.check()
