"""Identity of the log: nothing of another topic, or of one created anew under its name, comes into a partition."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compactor.control.state import PartitionState
from compactor.features.agent.plan import UploadFailureReason
from compactor.features.imports import import_, log_identity
from compactor.model.ids import TopicPartition
from tests.builders import TOPIC_ID, LogBuilder, name_topic
from tests.support.side_broker import ORDERS, PartitionStory, SideScene, settle, stands
from tests.support.tier_cli import Answer, TierCli

OTHER_ID = "Qm9CQm9CQm9CQm9CQm9CQg"
NO_ID = ""
SETTINGS = {"publish": {"grace_ms": 0}}


def state_of(cli: TierCli) -> PartitionState:
    return cli.open().open_partition_log(TopicPartition("orders", 0)).refresh()


def log_dir(folder: Path, start: int, end: int, *, topic_id: str, epoch: int = 0, word: str = "first") -> Path:
    """A log with one record a batch and four a segment; ``word`` is in every value."""
    shutil.rmtree(folder, ignore_errors=True)
    log = LogBuilder(start, leader_epoch=epoch, topic_id=topic_id, time=1_000 + start)
    for offset in range(start, end):
        if offset % 4 == 0 and offset > start:
            log.roll()
        log.put(f"k{offset % 5}={word}-{offset}")
    log.write(folder)
    (folder / "leader-epoch-checkpoint").write_text(f"0\n1\n{epoch} {start if epoch else 0}\n")
    return folder


def refused(cli: TierCli, folder: Path, *options: object) -> Answer:
    """The import is refused, and nothing has changed."""
    before = cli.digest()
    answer = cli.ask("import", folder, *options)
    assert answer.code == 3, answer
    assert cli.digest() == before
    return answer


@pytest.fixture
def orders(tmp_path: Path) -> Callable[..., Path]:
    """``orders(start, end, topic_id=...)``: a directory called orders-0."""
    return lambda start, end, **how: log_dir(tmp_path / f"broker-{len(list(tmp_path.iterdir()))}" / "orders-0", start, end, **how)


# ---- topic ids ----------------------------------------------------------------------------------------------------------------


def test_the_first_import_records_the_topic_id(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 8, topic_id=TOPIC_ID))
    assert state_of(cli).topic_id == TOPIC_ID


@pytest.mark.parametrize("options", [[], ["--live"]], ids=["whole", "live"])
@pytest.mark.parametrize("moment", ["list_log_segments", "require_free_space"])
def test_a_topic_that_is_created_anew_while_it_is_imported_is_refused(
    moment: str, options: list[str], cli: TierCli, orders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = orders(0, 12, topic_id=TOPIC_ID)
    cli.do("import", directory)
    log_dir(directory, 0, 24, topic_id=TOPIC_ID)
    before, original = state_of(cli), getattr(import_, moment)
    replaced: list[Path] = []

    def create_anew(*arguments: Any, **named: Any) -> Any:
        if not replaced:
            directory.rename(directory.with_name("orders-0.0123-delete"))
            replaced.append(log_dir(directory, 12, 24, topic_id=OTHER_ID, word="second"))
        return original(*arguments, **named)

    monkeypatch.setattr(import_, moment, create_anew)
    cli.refused("import", directory, *options)
    assert replaced
    after = state_of(cli)
    assert (after.live, after.topic_id) == (before.live, TOPIC_ID)


@pytest.mark.parametrize(
    ("start", "epoch", "options"),
    [
        pytest.param(8, 0, [], id="it begins where the tier ends"),
        pytest.param(12, 0, ["--allow-gaps"], id="it begins behind a gap"),
        pytest.param(4, 1, ["--accept-truncation"], id="a later leader epoch disowns the tier's end"),
        pytest.param(4, 1, ["--accept-truncation", "--allow-gaps", "--live"], id="with every option"),
    ],
)
def test_a_topic_that_was_created_anew_is_refused(
    start: int, epoch: int, options: list[str], cli: TierCli, orders: Callable[..., Path]
) -> None:
    cli.do("import", orders(0, 8, topic_id=TOPIC_ID))
    answer = refused(cli, orders(start, 24, topic_id=OTHER_ID, epoch=epoch, word="second"), *options)
    assert TOPIC_ID in answer.stderr
    assert OTHER_ID in answer.stderr
    assert f"topics adopt orders --topic-id {OTHER_ID}" in answer.stderr


def test_the_same_topic_needs_no_record_to_compare(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 8, topic_id=TOPIC_ID))
    assert cli.do("import", orders(8, 16, topic_id=TOPIC_ID))["end_offset"] == 15


def test_older_segments_of_another_topic_are_not_put_in_front(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(8, 16, topic_id=TOPIC_ID))
    assert OTHER_ID in refused(cli, orders(0, 16, topic_id=OTHER_ID)).stderr
    assert cli.do("import", orders(0, 16, topic_id=TOPIC_ID))["start_offset"] == 0


@pytest.mark.parametrize("text", ["", "version: 0\n", "version: 1\ntopic_id: x", f"version: 0\ntopic_id: {TOPIC_ID[:-1]}"])
def test_a_partition_metadata_that_names_no_id_is_refused(text: str, cli: TierCli, orders: Callable[..., Path]) -> None:
    folder = orders(0, 8, topic_id=TOPIC_ID)
    (folder / "partition.metadata").write_text(text)
    cli.refused("import", folder, says="partition.metadata")


def test_a_deleted_partition_may_become_another_topics(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 8, topic_id=TOPIC_ID))
    cli.do("topics", "delete", "orders-0")
    cli.do("import", orders(0, 12, topic_id=OTHER_ID, word="second"))
    assert state_of(cli).topic_id == OTHER_ID


# ---- without an id ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(NO_ID, NO_ID), (NO_ID, TOPIC_ID), (TOPIC_ID, NO_ID)])
@pytest.mark.parametrize(("start", "options"), [(8, []), (12, ["--allow-gaps"])])
def test_without_an_id_at_least_one_record_must_be_equal(
    first: str, second: str, start: int, options: list[str], cli: TierCli, orders: Callable[..., Path]
) -> None:
    cli.do("import", orders(0, 8, topic_id=first))
    answer = refused(cli, orders(start, 24, topic_id=second), *options)
    assert "no record below offset 8 could be compared" in answer.stderr
    assert "topics adopt" in answer.stderr


@pytest.mark.parametrize(("first", "second"), [(NO_ID, NO_ID), (NO_ID, TOPIC_ID), (TOPIC_ID, NO_ID)])
def test_equal_records_tell_the_same_log(first: str, second: str, cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 8, topic_id=first))
    assert cli.do("import", orders(4, 16, topic_id=second))["end_offset"] == 15
    assert state_of(cli).topic_id == (first or second)
    assert cli.do("import", orders(0, 16, topic_id=TOPIC_ID))["segments"] == 0


@pytest.mark.parametrize("second", [NO_ID, TOPIC_ID])
def test_records_are_compared_with_objects_where_no_batch_is_remembered(
    second: str, cli: TierCli, orders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier of an earlier program has no tail; compaction has rewritten what it holds."""
    monkeypatch.setattr("compactor.features.imports.import_.describe_tail_batches", lambda sources, batches: ())
    cli.do("import", orders(0, 8, topic_id=NO_ID))
    cli.run()
    other = refused(cli, orders(0, 16, topic_id=second, word="second"))
    assert "other content under known offsets" in other.stderr
    assert cli.do("import", orders(0, 16, topic_id=second))["end_offset"] == 15
    assert state_of(cli).topic_id == second


def test_without_an_id_another_log_is_not_put_in_front(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(8, 16, topic_id=NO_ID))
    refused(cli, orders(0, 8, topic_id=NO_ID, word="second"))
    refused(cli, orders(0, 16, topic_id=NO_ID, word="second"))


def test_a_truncation_without_an_id_needs_an_equal_record_below_the_cut(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 16, topic_id=NO_ID))
    answer = refused(cli, orders(8, 24, topic_id=NO_ID, epoch=1, word="second"), "--accept-truncation")
    assert "no record below offset 8 could be compared" in answer.stderr


def test_an_up_to_date_directory_is_no_reason_to_refuse(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 8, topic_id=NO_ID))
    folder = orders(8, 12, topic_id=TOPIC_ID)
    answer = cli.ask("import", folder, "--live")
    assert (answer.code, answer.document["segments"]) == (0, 0)
    assert state_of(cli).topic_id == ""


# ---- the directory that was compared last ---------------------------------------------------------------------------------------


def quiet(folder: Path, start: int, end: int) -> Path:
    """Retention has deleted the front of this very directory; records up to ``end`` are new."""
    rest = log_dir(folder.parent / "rest", start, end, topic_id=NO_ID)
    for path in folder.glob("*.log"):
        path.unlink()
    for path in rest.glob("*.log"):
        shutil.copy2(path, folder / path.name)
    return folder


def test_a_quiet_log_whose_front_has_expired_is_known_by_its_directory(cli: TierCli, orders: Callable[..., Path]) -> None:
    folder = orders(0, 8, topic_id=NO_ID)
    cli.do("import", folder)
    assert cli.do("import", quiet(folder, 8, 16))["end_offset"] == 15


def test_a_directory_that_was_made_anew_is_another_one(cli: TierCli, orders: Callable[..., Path]) -> None:
    """As Kafka does it: the deleted topic's directory is renamed, and the new one has its name."""
    folder = orders(0, 8, topic_id=NO_ID)
    cli.do("import", folder)
    folder.rename(folder.with_name("orders-0.0123-delete"))
    refused(cli, log_dir(folder, 8, 16, topic_id=NO_ID, word="second"))


def test_an_inode_that_is_given_again_is_another_directory(
    cli: TierCli, orders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = orders(0, 8, topic_id=NO_ID)
    monkeypatch.setattr(log_identity, "birth_time_ns", lambda path: 1)
    cli.do("import", folder)
    monkeypatch.setattr(log_identity, "birth_time_ns", lambda path: 2)
    refused(cli, quiet(folder, 8, 16))


def test_without_birth_times_no_directory_is_remembered(cli: TierCli, orders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_identity, "birth_time_ns", lambda path: None)
    folder = orders(0, 8, topic_id=NO_ID)
    cli.do("import", folder)
    refused(cli, quiet(folder, 8, 16))


def test_a_directory_is_forgotten_with_the_partition(cli: TierCli, orders: Callable[..., Path]) -> None:
    """The tier's log was deleted and begun anew from another machine: the old directory does not speak for it."""
    folder = orders(0, 8, topic_id=NO_ID)
    cli.do("import", folder)
    cli.do("topics", "delete", "orders-0")
    elsewhere = TierCli(cli.folder / "elsewhere")
    elsewhere.set(tier={"url": cli.tier.as_uri()})
    elsewhere.do("import", orders(0, 8, topic_id=NO_ID, word="second"))
    refused(cli, quiet(folder, 8, 16))


def test_a_directory_tells_when_it_was_made(tmp_path: Path) -> None:
    made = [tmp_path / name for name in ("a", "b")]
    for path in made:
        path.mkdir()
    ids = [log_identity.identify_directory(path) for path in made]
    if None in ids:
        pytest.skip("this file system does not tell when a directory was made")
    assert ids[0] != ids[1]
    (tmp_path / "a").rename(tmp_path / "c")
    assert log_identity.identify_directory(tmp_path / "c") == ids[0]


# ---- adoption -----------------------------------------------------------------------------------------------------------------


def test_adopting_a_topic_id_lets_a_restored_topic_go_on(cli: TierCli, orders: Callable[..., Path]) -> None:
    """The same records under a new id, whose leader epochs begin anew."""
    cli.do("import", orders(0, 8, topic_id=TOPIC_ID, epoch=7))
    restored = orders(0, 16, topic_id=OTHER_ID, epoch=0)
    refused(cli, restored)
    (row,) = cli.do("topics", "adopt", "orders", "--topic-id", OTHER_ID)["partitions"]
    assert (row["status"], row["topic_id"], row["previous_id"]) == ("adopted", OTHER_ID, TOPIC_ID)
    assert cli.do("import", restored)["end_offset"] == 15
    assert cli.run()["status"] == "cleaned"
    assert OTHER_ID in refused(cli, orders(8, 24, topic_id=TOPIC_ID)).stderr
    assert cli.do("topics", "adopt", "orders-0", "--topic-id", OTHER_ID)["partitions"][0]["status"] == "unchanged"


def test_adopting_a_topic_id_for_a_tier_without_one(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 8, topic_id=NO_ID))
    next_one = orders(8, 16, topic_id=TOPIC_ID)
    assert f"topics adopt orders --topic-id {TOPIC_ID}" in refused(cli, next_one).stderr
    cli.do("topics", "adopt", "orders", "--topic-id", TOPIC_ID)
    assert cli.do("import", next_one)["end_offset"] == 15


def test_adopting_a_seam_counts_once(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 8, topic_id=NO_ID))
    next_one = orders(8, 16, topic_id=NO_ID)
    assert "topics adopt orders-0 --seam 8" in refused(cli, next_one).stderr
    cli.do("topics", "adopt", "orders-0", "--seam", 8)
    assert cli.do("import", next_one)["end_offset"] == 15
    refused(cli, orders(16, 24, topic_id=NO_ID))


def test_a_seam_elsewhere_is_refused(cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 8, topic_id=NO_ID))
    answer = cli.ask("topics", "adopt", "orders-0", "--seam", 9)
    assert (answer.code, answer.document["partitions"][0]["status"]) == (3, "refused")
    assert "the tier ends at 7" in answer.stderr


@pytest.mark.parametrize(
    "options", [["orders"], ["nobody", "--seam", "8"], ["orders", "--topic-id", "short"], ["orders", "--topic-id", TOPIC_ID, "--seam", "8"]]
)
def test_adopt_wants_one_declaration_of_partitions_that_are_there(options: list[str], cli: TierCli, orders: Callable[..., Path]) -> None:
    cli.do("import", orders(0, 8, topic_id=NO_ID))
    assert cli.ask("topics", "adopt", *options).code == 2


def test_one_topic_id_is_not_given_to_two_topics(cli: TierCli, orders: Callable[..., Path]) -> None:
    folder = orders(0, 8, topic_id=NO_ID)
    for topic in ("a", "b"):
        cli.do("import", folder, "--topic", topic, "--partition", 0)
    cli.refused("topics", "adopt", ".*", "--topic-id", TOPIC_ID, code=2, says="several topics")


# ---- from another tier ----------------------------------------------------------------------------------------------------------


def test_from_tier_refuses_another_topic(tmp_path: Path, cli: TierCli, orders: Callable[..., Path]) -> None:
    source = TierCli(tmp_path / "source")
    source.do("import", orders(0, 8, topic_id=TOPIC_ID))
    assert cli.do("import", "--from-tier", source.config)["partitions"][0]["status"] == "imported"
    assert state_of(cli).topic_id == TOPIC_ID
    source.do("topics", "delete", "orders-0")
    source.do("import", orders(8, 16, topic_id=OTHER_ID, word="second"))
    answer = cli.ask("import", "--from-tier", source.config)
    (row,) = answer.document["partitions"]
    assert (answer.code, row["status"]) == (3, "refused")
    assert TOPIC_ID in row["reason"]
    assert OTHER_ID in row["reason"]


# ---- beside a broker ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scene(tmp_path: Path) -> SideScene:
    return SideScene.in_folder(tmp_path)


def created_anew(scene: SideScene, topic_id: str, records: int) -> None:
    """The topic is deleted and created again; its leader has moved once since, so that its epochs look later."""
    scene.replica.folder.rename(scene.replica.folder.with_name("orders-0.0123-delete"))
    story = PartitionStory(scene.cluster)
    story.log.time = 99_000
    scene.story, scene.replica = story, scene.one.replica()
    scene.replica.topic_id = topic_id
    story.lead(1, epoch=1)
    story.write(scene.replica, 3)
    story.lead(1, epoch=9)
    story.write(scene.replica, records)


@pytest.mark.parametrize("records", [3, 30])
@pytest.mark.parametrize("allow_gaps", [False, True])
def test_an_agent_refuses_a_topic_that_was_created_anew(records: int, allow_gaps: bool, scene: SideScene) -> None:
    scene.replica.topic_id = TOPIC_ID
    scene.replica.write()
    assert stands(settle(scene.agent())) == (8, None)
    held = scene.tier.held()
    created_anew(scene, OTHER_ID, records)
    agent = scene.agent(accept_truncation=True, allow_gaps=allow_gaps)
    settle(agent)
    scene.tier.hurry()
    assert stands(settle(agent)) == (8, UploadFailureReason.IDENTITY)
    assert scene.tier.held() == held
    assert any(TOPIC_ID in text and OTHER_ID in text for text in scene.tier.told)


@pytest.mark.parametrize("records", [3, 30])
def test_an_agent_without_ids_compares_below_the_cut(records: int, scene: SideScene) -> None:
    assert stands(settle(scene.agent())) == (8, None)
    held = scene.tier.held()
    created_anew(scene, NO_ID, records)
    agent = scene.agent(accept_truncation=True)
    settle(agent)
    scene.tier.hurry()
    position, trouble = stands(settle(agent))
    assert position in (None, 8)
    assert trouble in (UploadFailureReason.IDENTITY, UploadFailureReason.CONTENT)
    assert scene.tier.held() == held


def test_an_agent_goes_on_with_a_quiet_directory(scene: SideScene) -> None:
    assert stands(settle(scene.agent())) == (8, None)
    scene.story.write(scene.replica, 10)
    scene.replica.delete_until(8)
    assert stands(settle(scene.agent()))[1] is None
    assert scene.tier.held() == scene.story.written[: scene.replica.bases[-1]]


def test_an_agent_learns_the_topic_id_with_nothing_to_upload(scene: SideScene) -> None:
    """A broker that was upgraded: the same directory has an id now."""
    assert stands(settle(scene.agent())) == (8, None)
    scene.replica.topic_id = TOPIC_ID
    scene.replica.write()
    assert stands(settle(scene.agent())) == (8, None)
    assert scene.tier.opened().open_partition_log(ORDERS).refresh().topic_id == TOPIC_ID
    name_topic(scene.replica.folder, OTHER_ID)
    assert stands(settle(scene.agent()))[1] is UploadFailureReason.IDENTITY


@pytest.mark.parametrize("indexed", [False, True])
def test_an_agent_says_until_when_a_log_waits_for_adoption(indexed: bool, scene: SideScene, tmp_path: Path) -> None:
    """A directory without an id that was restored from a copy, and whose front has expired."""
    assert stands(settle(scene.agent())) == (8, None)
    scene.story.write(scene.replica, 10)
    scene.replica.delete_until(8)
    folder = scene.replica.folder
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    (tmp_path / "copy").rename(folder)
    os.utime(folder / f"{8:020}.log", ns=(0, 0))
    if indexed:
        (folder / f"{8:020}.timeindex").write_bytes(struct.pack(">qiqi", 5, 1, 86_400_000, 2))
    scene.cluster.retentions["orders"] = 3_600_000
    agent = scene.agent()
    assert stands(settle(agent)) == (8, UploadFailureReason.IDENTITY)
    when = "1970-01-02T01:00:00Z" if indexed else "1970-01-01T01:00:00Z"
    assert any("topics adopt orders-0 --seam 8" in text and when in text for text in scene.tier.told)
    scene.tier.cli.do("topics", "adopt", "orders-0", "--seam", 8)
    scene.tier.hurry()
    assert stands(settle(agent))[1] is None
    assert scene.tier.held() == scene.story.written[: scene.replica.bases[-1]]
