"""Import of a log that lost its end: what is refused before a record is written. The tier always holds a prefix of the leader's log."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.constants import LeaderEpoch, Offset
from compactor.control import importing
from compactor.errors import BadData, Fenced
from compactor.features.agent.plan import UploadFailureReason
from compactor.features.imports import import_, staged_files as intake
from compactor.features.imports.import_ import ImportOptions, import_directory
from tests.builders import TOPIC_ID, name_topic
from tests.support.side_broker import ORDERS, PartitionStory, Replica, SideCluster, SideScene, settle, stands
from tests.support.tier_cli import TierCli, batches_of, latest

SEGMENT = 20
"""Records per segment, one record a batch: more than the tail of 16 batches that a state remembers."""
SETTINGS = {"publish": {"grace_ms": 0, "orphan_age_ms": 0}}


@dataclass
class Log:
    """One broker's log of ``orders-0`` and its directory."""

    folder: Path
    story: PartitionStory = field(default_factory=lambda: PartitionStory(SideCluster()))

    def __post_init__(self) -> None:
        (self.folder / "orders-0").mkdir(parents=True)
        self.replica = Replica(self.folder / "orders-0")
        if self.story.epochs:
            self.story.follow(self.replica, per_segment=SEGMENT)

    @property
    def path(self) -> Path:
        return self.replica.folder

    @property
    def written(self) -> list[bytes]:
        return self.story.written

    def lead(self, epoch: int, count: int) -> Log:
        """This broker is elected and writes so many records."""
        self.story.lead(1, epoch=epoch)
        self.story.write(self.replica, count, per_segment=SEGMENT)
        return self

    def write(self, count: int) -> None:
        self.story.write(self.replica, count, per_segment=SEGMENT)

    def replica_until(self, offset: int, name: str) -> Log:
        """Another broker, whose log ends there."""
        story = copy.deepcopy(self.story)
        story.truncate(offset)
        return Log(self.folder.parent / name, story)


@pytest.fixture
def first(tmp_path: Path) -> Log:
    return Log(tmp_path / "first").lead(0, 100)


def held(cli: TierCli, folder: Path) -> list[bytes]:
    shutil.rmtree(folder, ignore_errors=True)
    cli.do("export", "orders-0", folder)
    return [batch.raw for batch in batches_of(folder)]


def bring(tier: Tier, log: Log, **options: Any) -> Any:
    policy = tier.cleaner_settings_for_topic("orders").cleaner_policy()
    return import_directory(tier, log.path, ORDERS, policy, options=ImportOptions(**options))


def refused(cli: TierCli, path: Path, word: str, *options: str) -> None:
    """The import is refused with this word, and nothing has changed."""
    before = cli.digest()
    answer = cli.ask("import", path, *options)
    assert (answer.code, word in answer.stderr) == (3, True), answer
    assert cli.digest() == before


def end_of(cli: TierCli) -> int:
    return int(cli.do("topics")["partitions"][0]["end_offset"])


# ---- nothing of the new branch is skipped -----------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_the_new_branch_follows_the_cut_without_a_gap(live: bool, gaps: bool, cli: TierCli, first: Log, tmp_path: Path) -> None:
    cli.do("import", first.path)
    second = first.replica_until(40, "second").lead(1, 160)
    options = [*(["--live"] if live else []), *(["--allow-gaps"] if gaps else [])]
    answer = cli.ask("import", second.path, "--accept-truncation", *options)
    assert (answer.code, "missing" in answer.stderr) == (0, False)
    assert held(cli, tmp_path / "out") == second.written[: 180 if live else 200]
    assert cli.do("import", second.path)["segments"] == (1 if live else 0)


def test_an_agent_that_accepts_gaps_takes_all_of_the_new_branch(tmp_path: Path) -> None:
    scene = SideScene.in_folder(tmp_path)
    scene.story.write(scene.replica, 90, per_segment=SEGMENT)
    assert stands(settle(scene.agent()))[1] is None
    scene.story.truncate(40)
    scene.replica.truncate(40)
    scene.story.lead(1)
    scene.story.write(scene.replica, 160, per_segment=SEGMENT)
    agent = scene.agent(accept_truncation=True, allow_gaps=True)
    assert stands(settle(agent)) == (scene.replica.bases[-1], None)
    assert scene.tier.held() == scene.story.written[: scene.replica.bases[-1]]


def test_a_gap_is_accepted_only_where_the_directory_has_nothing(cli: TierCli, first: Log, tmp_path: Path) -> None:
    """The new branch begins after the cut: what lies between is missing in the directory, and nothing is cut without consent to that."""
    cli.do("import", first.path)
    second = first.replica_until(40, "second").lead(1, 60)
    (second.path / f"{40:020}.log").unlink()
    refused(cli, second.path, "leaves a gap", "--accept-truncation")
    answer = cli.ask("import", second.path, "--accept-truncation", "--allow-gaps")
    assert (answer.code, "offsets 40 to 59 are missing" in answer.stderr) == (0, True)
    assert held(cli, tmp_path / "out") == [*second.written[:40], *second.written[60:]]


# ---- everything is checked before anything is recorded ----------------------------------------------------------------------


@pytest.mark.parametrize("segment", [40, 80])
@pytest.mark.parametrize("live", [False, True])
def test_a_damaged_new_branch_leaves_the_tier_as_it_is(
    segment: int, live: bool, cli: TierCli, first: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_, "LIVE_BYTES", 1)
    cli.do("import", first.path)
    second = first.replica_until(40, "second").lead(1, 80)
    damaged = second.path / f"{segment:020}.log"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    refused(cli, second.path, "CRC", "--accept-truncation", *(["--live"] if live else []))


def test_a_missing_segment_of_the_new_branch_is_noticed_before_the_cut(cli: TierCli, first: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_, "LIVE_BYTES", 1)
    cli.do("import", first.path)
    second = first.replica_until(40, "second").lead(1, 100)
    (second.path / f"{80:020}.log").unlink()
    refused(cli, second.path, "offsets 80 to 99 are missing", "--live", "--accept-truncation")


@pytest.mark.parametrize("rolls", [0, 7])
def test_another_log_with_the_same_epochs_discards_nothing(rolls: int, cli: TierCli, first: Log, tmp_path: Path) -> None:
    """All the batches that are remembered lie after the cut: the records below it are compared with the tier's objects."""
    cli.do("import", first.path)
    stranger = Log(tmp_path / "stranger", PartitionStory(SideCluster()))
    stranger.story.log.time += 1
    stranger.replica.append([], [], per_segment=SEGMENT)
    stranger.lead(0, 40 + rolls).lead(1, 80)
    refused(cli, stranger.path, "other content", "--accept-truncation")


def test_batches_that_are_remembered_below_the_cut_are_compared_although_a_round_has_dropped_their_records(
    cli: TierCli, tmp_path: Path
) -> None:
    """The first record is superseded and gone from the tier; its batch is remembered, and is another one in this directory."""
    first, stranger = Log(tmp_path / "first"), Log(tmp_path / "stranger")
    for log, value in ((first, "one"), (stranger, "two")):
        log.story.lead(1, epoch=0)
        batches = []
        for number, text in enumerate([f"a={value}", "a=same", "b=1", "c=1", "d=1"]):
            log.story.log.put(text)
            batches.append((number, log.written[-1]))
        log.replica.append(batches, log.story.epochs, per_segment=2)
    cli.do("import", first.path)
    assert cli.run("orders-0")["status"] == "cleaned"
    second = stranger.replica_until(3, "second").lead(1, 4)
    refused(cli, second.path, "other content", "--accept-truncation")


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_cut_is_refused_where_retention_has_moved_the_beginning_of_the_new_epoch(
    checkpoint: bool, cli: TierCli, first: Log, tmp_path: Path
) -> None:
    name_topic(first.path)
    cli.do("import", first.path)
    second = first.replica_until(30, "second").lead(1, 70)
    second.replica.stage_until(begin := next(base for base in second.replica.bases if base > 30))
    second.replica.unlink_staged()
    name_topic(second.path)
    if not checkpoint:
        (second.path / "leader-epoch-checkpoint").unlink()
    before = cli.digest()
    answer = cli.ask("import", second.path, "--accept-truncation")
    assert (answer.code, f"offset {begin} on, where this log begins" in answer.stderr, "--accept-loss" in answer.stderr) == (3, True, True)
    assert cli.digest() == before
    answer = cli.ask("import", second.path, "--accept-truncation", "--accept-loss")
    assert (answer.code, f"offsets before {begin} may belong to the discarded log" in answer.stderr) == (0, True), answer.stderr
    assert held(cli, tmp_path / "out") == [*first.written[:begin], *second.written[begin:]]


@pytest.mark.parametrize("known", [False, True])
def test_a_directory_that_begins_at_the_cut_needs_the_topic_id(known: bool, cli: TierCli, first: Log, tmp_path: Path) -> None:
    cli.do("import", first.path)
    second = first.replica_until(40, "second").lead(1, 60)
    second.replica.delete_until(40)
    if known:
        cli.do("topics", "adopt", "orders", "--topic-id", TOPIC_ID)
        name_topic(second.path)
    before = cli.digest()
    answer = cli.ask("import", second.path, "--accept-truncation")
    if known:
        assert answer.code == 0, answer
        assert held(cli, tmp_path / "out") == second.written
    else:
        assert (answer.code, "topics delete" in answer.stderr) == (3, True)
        assert cli.digest() == before


def test_where_the_whole_log_was_discarded_the_way_out_is_named(cli: TierCli, first: Log, tmp_path: Path) -> None:
    first.replica.delete_until(60)
    cli.do("import", first.path)
    second = first.replica_until(40, "second").lead(1, 100)
    for options in ([], ["--accept-truncation"]):
        answer = cli.ask("import", second.path, *options)
        assert (answer.code, "--accept-truncation" in answer.stderr, "topics delete" in answer.stderr) == (3, False, True)
    cli.do("topics", "delete", "orders-0")
    cli.do("import", second.path)
    assert held(cli, tmp_path / "out") == second.written


# ---- elections there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("brought", [0, 1, 50])
@pytest.mark.parametrize("live", [False, True])
def test_an_election_there_and_back(brought: int, live: bool, cli: TierCli, tmp_path: Path) -> None:
    """The old branch comes back with segments that were imported before under the same ids of imports."""
    first = Log(tmp_path / "first").lead(0, 200)
    options = ["--accept-truncation", *(["--live"] if live else [])]
    for end in (100, 200):
        cli.do("import", first.replica_until(end, f"until {end}").path)
    second = first.replica_until(100, "second").lead(1, brought)
    cli.do("import", second.path, *options)
    assert held(cli, tmp_path / "out") == second.written[: 100 if live and brought < SEGMENT else 140 if live else 100 + brought]
    first.lead(2, 30)
    cli.do("import", first.path, *options)
    assert held(cli, tmp_path / "out") == first.written[: 220 if live else 230]
    second.lead(3, 100)
    cli.do("import", second.path, "--accept-truncation")
    assert held(cli, tmp_path / "out") == second.written
    assert cli.do("verify")["ok"]


def test_a_leader_that_returns_needs_no_option_where_nothing_is_discarded(cli: TierCli, tmp_path: Path) -> None:
    first = Log(tmp_path / "first").lead(0, 200)
    cli.do("import", first.path)
    second = first.replica_until(100, "second").lead(1, 0)
    cli.do("import", second.path, "--accept-truncation")
    assert end_of(cli) == 99
    assert cli.ask("import", first.path).code == 3  # it has not heard of epoch 1
    first.lead(2, 10)
    assert cli.do("import", first.path)["start_offset"] == 100
    assert held(cli, tmp_path / "out") == first.written


def test_a_replica_that_was_left_behind_twice_does_not_bring_its_branch_back(cli: TierCli, tmp_path: Path) -> None:
    """The tier knows of epoch 2, though it has nothing of it: epoch 1 is not a later leader than the tier's."""
    first = Log(tmp_path / "first").lead(0, 200)
    cli.do("import", first.path, "--live")
    second = first.replica_until(100, "second").lead(1, 100)
    cli.do("import", second.path, "--accept-truncation")
    first.lead(2, 1)
    cli.do("import", first.path, "--live", "--accept-truncation")
    refused(cli, second.path, "has missed a truncation", "--accept-truncation")


def test_an_upload_that_an_election_has_overtaken_is_void(cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it uploads, the tier goes beyond its first offset, is cut exactly there, and ends where it wants to begin."""
    first = Log(tmp_path / "first").lead(0, 200)
    cli.do("import", first.replica_until(100, "old").path)
    other = first.replica_until(130, "other").lead(1, 50)
    third = first.replica_until(100, "third").lead(2, 0)

    def overtaken(one: intake.IncomingSegment) -> None:
        monkeypatch.undo()
        cli.do("import", other.path)
        cli.do("import", third.path, "--accept-truncation")
        assert end_of(cli) == 99

    monkeypatch.setattr(intake, "require_source_unchanged", overtaken)
    with pytest.raises(Fenced, match="truncated at offset 100"):
        bring(cli.open(), first)
    assert held(cli, tmp_path / "out") == third.written


def test_an_import_that_was_checked_against_another_branch_is_not_registered(
    cli: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Log(tmp_path / "first").lead(0, 200)
    cli.do("import", first.replica_until(100, "old").path)
    other = first.replica_until(130, "other").lead(1, 50)
    third = first.replica_until(100, "third").lead(2, 0)

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        cli.do("import", other.path)
        cli.do("import", third.path, "--accept-truncation")
        arguments[1].refresh()
        return importing.register_import(*arguments)

    monkeypatch.setattr(intake, "register_import", late)
    with pytest.raises(BadData, match="by now"):
        bring(cli.open(), first)
    assert held(cli, tmp_path / "out") == third.written


# ---- one record -------------------------------------------------------------------------------------------------------------


def test_a_cut_that_dies_before_its_record_has_changed_nothing_and_is_resumed(
    cli: TierCli, first: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.do("import", first.path)
    second = first.replica_until(47, "second").lead(1, 93)
    uploads: list[str] = []

    def dies(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(intake, "record_tail_truncation", dies)
        with pytest.raises(KeyboardInterrupt):
            bring(cli.open(), second, accept_truncation=True)
    assert held(cli, tmp_path / "out") == first.written
    tier = cli.open()
    uploads = [info.key for info in tier.ports.data.list("orders-0/") if info.key.endswith(".log")]
    bring(tier, second, accept_truncation=True)
    assert [info.key for info in tier.ports.data.list("orders-0/") if info.key.endswith(".log")] == uploads
    assert held(cli, tmp_path / "out") == second.written
    assert cli.do("verify")["ok"]


def test_a_cut_is_one_record_and_any_later_import_goes_on_without_an_option(
    cli: TierCli, first: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live log comes in parts: the process dies after the first one, which came with the cut."""
    cli.do("import", first.path)
    second = first.replica_until(50, "second").lead(1, 90)
    monkeypatch.setattr(import_, "LIVE_BYTES", 1)

    def dies(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(intake, "record_tiered_segments", dies)
        with pytest.raises(KeyboardInterrupt):
            bring(cli.open(), second, live=True, accept_truncation=True)
    assert held(cli, tmp_path / "out") == second.written[:60]
    assert cli.do("import", second.path, "--live")["start_offset"] == 60
    assert held(cli, tmp_path / "out") == second.written[:120]


def test_a_bound_leaves_the_new_branch_out_and_cuts_all_the_same(cli: TierCli, first: Log, tmp_path: Path) -> None:
    cli.do("import", first.path)
    second = first.replica_until(50, "second").lead(1, 90)
    tier = cli.open()
    assert bring(tier, second, live=True, accept_truncation=True, below=55).end_offset == 49
    assert bring(tier, second, live=True, below=60).end_offset == 59
    assert held(cli, tmp_path / "out") == second.written[:60]


def test_an_agent_never_accepts_a_loss(tmp_path: Path) -> None:
    """A round beyond the cut is final: the tier stays as it is until a person decides."""
    scene = SideScene.in_folder(tmp_path)
    assert stands(settle(scene.agent())) == (8, None)
    assert scene.tier.cli.run("orders-0")["status"] == "cleaned"
    assert scene.tier.cli.do("retire")["deleted"]
    before = scene.tier.held()
    scene.story.truncate(6)
    scene.replica.truncate(6)
    scene.story.lead(1)
    scene.story.write(scene.replica, 12)
    assert stands(settle(scene.agent(accept_truncation=True))) == (8, UploadFailureReason.LINEAGE)
    assert any("--accept-loss" in text for text in scene.tier.told)
    assert scene.tier.held() == before


def test_an_agent_discards_nothing_for_a_cluster_that_was_set_back(tmp_path: Path) -> None:
    """Restored from an old copy, it counts leader epochs below those that the tier has seen: no later leader has disowned anything."""
    scene = SideScene.in_folder(tmp_path)
    scene.story.lead(1)
    scene.story.write(scene.replica, 20)
    agent = scene.agent(accept_truncation=True)
    position = stands(settle(agent))[0]
    before = scene.tier.held()
    scene.story.truncate(6)
    scene.replica.truncate(6)
    scene.story.log.leader_epoch = 1
    scene.replica.write()
    scene.story.write(scene.replica, 7)
    assert scene.replica.epochs == [(1, 0)]
    for _ in range(2):
        scene.tier.hurry(700_000)
        settle(agent)
    watch = settle(agent)
    assert stands(watch)[0] == position
    assert stands(watch)[1] in (UploadFailureReason.BEHIND, UploadFailureReason.LINEAGE)
    assert scene.tier.held() == before


# ---- logs that were compacted before they came ------------------------------------------------------------------------------


def test_a_directory_that_its_broker_has_cleaned_beyond_the_tier_is_refused(cli: TierCli, first: Log, tmp_path: Path) -> None:
    cli.do("import", first.path)
    first.write(40)
    checkpoint = first.folder / "cleaner-offset-checkpoint"
    checkpoint.write_text("0\n1\norders 0 120\n")
    before = cli.digest()
    answer = cli.ask("import", first.path)
    assert (answer.code, "topics delete" in answer.stderr, "up to offset 120" in answer.stderr) == (3, True, True)
    assert cli.ask("import", first.path, "--partition", 7).code == 0  # an empty partition has nothing that could come back
    assert cli.ask("import", first.path, "--partition", 7).code == 0
    checkpoint.write_text("0\n1\norders 0 100\n")
    assert set(before.items()) <= set(cli.digest().items())
    assert cli.do("import", first.path)["start_offset"] == 100


def test_a_cut_below_what_the_broker_has_cleaned_is_refused(cli: TierCli, first: Log) -> None:
    cli.do("import", first.path)
    second = first.replica_until(40, "second").lead(1, 80)
    (second.folder / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 60\n")
    refused(cli, second.path, "up to offset 60", "--accept-truncation")


def test_a_cleaned_directory_comes_into_an_empty_tier_in_parts(cli: TierCli, first: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_, "LIVE_BYTES", 1)
    (first.folder / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 80\n")
    assert cli.do("import", first.path, "--live")["end_offset"] == 79


# ---- from another tier ------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> TierCli:
    settings = {"publish": {"grace_ms": 0, "orphan_age_ms": 0}, "cleaner": {"delete_retention_ms": 0}}
    return TierCli(tmp_path / "another tier", settings)


def transferred(cli: TierCli, source: TierCli, *options: str) -> Any:
    answer = cli.ask("import", "--from-tier", source.config, *options)
    (row,) = answer.document["partitions"]
    return row


@pytest.mark.parametrize("count", [0, 10, 160])
@pytest.mark.parametrize("most", [1, 1 << 30])
def test_a_transfer_follows_a_truncation_of_the_other_tier(
    count: int, most: int, cli: TierCli, source: TierCli, first: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compactor.features.imports.from_tier.MOST_AT_ONCE", most)
    source.do("import", first.path)
    assert transferred(cli, source)["status"] == "imported"
    second = first.replica_until(47, "second").lead(1, count)
    source.do("import", second.path, "--accept-truncation")
    before = cli.digest()
    assert "--accept-truncation" in transferred(cli, source)["reason"]
    assert cli.digest() == before
    row = transferred(cli, source, "--accept-truncation")
    assert row["status"] == ("imported" if count else "up_to_date"), row
    assert held(cli, tmp_path / "out") == second.written
    assert cli.do("verify")["ok"]


def test_a_gap_that_only_the_fetched_segments_have_is_refused(
    cli: TierCli, source: TierCli, first: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process cuts the target after the segments at its old end were fetched."""
    source.do("import", first.path)
    transferred(cli, source)
    first.write(60)
    source.do("import", first.path)
    second = first.replica_until(40, "second").lead(1, 0)

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        cli.do("import", second.path, "--accept-truncation")
        first.story.lead(1, epoch=2)  # so that the other tier's lineage is the later one
        lineage = (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(2), Offset(160)))
        return import_directory(*(*arguments[:5], replace(arguments[5], lineage=lineage), *arguments[6:]))

    monkeypatch.setattr("compactor.features.imports.from_tier.import_directory", late)
    assert "were fetched from offset" in transferred(cli, source)["reason"]
    assert end_of(cli) == 39


def compacted_source(source: TierCli, log: Log) -> None:
    """A key is written, deleted, and both are cleaned away."""
    source.do("import", log.path)
    for _ in range(2):
        source.do("run", "--force", "orders-0", "--now", 4_000_000_000_000)
    source.do("retire")


def put(log: Log, *texts: str) -> None:
    batches = []
    for text in texts:
        offset = log.story.log.next_offset
        log.story.log.put(text)
        batches.append((offset, log.written[-1]))
    log.replica.append(batches, log.story.epochs, per_segment=SEGMENT)


def test_a_tombstone_that_came_and_went_between_two_transfers(cli: TierCli, source: TierCli, first: Log, tmp_path: Path) -> None:
    put(first, "gone=1", "z=1")
    source.do("import", first.path)
    transferred(cli, source)
    put(first, "gone", *[f"filling={number}" for number in range(60)])
    compacted_source(source, first)
    before = cli.digest()
    row = transferred(cli, source)
    assert (row["status"], "topics delete" in row["reason"]) == ("refused", True)
    assert cli.digest() == before
    cli.do("topics", "delete", "orders-0")
    assert transferred(cli, source)["status"] == "imported"
    view = latest(cli.export(tmp_path / "out"))
    assert b"gone" not in view
    assert view == latest(source.export(tmp_path / "theirs"))


def test_a_source_that_compacted_no_further_than_the_target_ends_goes_on(cli: TierCli, source: TierCli, first: Log, tmp_path: Path) -> None:
    """The batches at the seam are other ones by now: the records that both tiers have are compared."""
    source.do("import", first.path)
    transferred(cli, source)
    compacted_source(source, first)
    first.write(60)
    source.do("import", first.path)
    assert transferred(cli, source)["start_offset"] == 100
    assert latest(cli.export(tmp_path / "out")) == latest(source.export(tmp_path / "theirs"))


def test_a_first_transfer_of_a_compacted_tier_that_was_cut_short_goes_on(
    cli: TierCli, source: TierCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path / "unique").lead(0, 0)
    put(log, *[f"key-{number}=1" for number in range(100)], *[f"key-{number}=2" for number in range(0, 100, 2)])
    source.set(cleaner={"segment_bytes": 4_000})
    compacted_source(source, log)
    assert len(source.open().open_partition_log(ORDERS).refresh().live) > 1
    monkeypatch.setattr("compactor.features.imports.from_tier.MOST_AT_ONCE", 1)
    calls: list[int] = []

    def dies_at_second(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise BadData("killed", segment="here", hint="")
        return import_directory(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("compactor.features.imports.from_tier.import_directory", dies_at_second)
        assert "killed" in transferred(cli, source)["reason"]
    assert transferred(cli, source)["status"] == "imported"
    assert latest(cli.export(tmp_path / "out")) == latest(source.export(tmp_path / "theirs"))
