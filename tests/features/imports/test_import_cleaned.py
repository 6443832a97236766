"""Import of a log that a cleaner has compacted, where no checkpoint tells: a follower of a cleaned leader, a stale replica, a copy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from compactor.features.agent.plan import UploadFailureReason
from compactor.features.imports import import_
from tests.builders import Life, LogBuilder, live, log_of
from tests.support.side_broker import SideScene, settle, stands
from tests.support.tier_cli import TierCli

pytestmark = pytest.mark.usefixtures("unsynced")

END = 22
"""The tier of ``cli`` ends before this offset."""
SETTINGS = {"publish": {"grace_ms": 0, "orphan_age_ms": 0}, "cleaner": {"delete_retention_ms": 0}}


@pytest.fixture
def story() -> LogBuilder:
    """A key with a value, and a record of a transaction that is open."""
    log = log_of("k0=v1; 7t: t=open")
    for number in range(20):
        log.put(f"first-{number}=1")
    log.roll()
    return log


def go_on(log: LogBuilder) -> None:
    """The key is deleted, the transaction aborted; its producer commits another one."""
    log.add("k0; 7 aborts; 7t: t=later; 7 commits")
    for number in range(20):
        log.put(f"second-{number}=1")
    log.roll()
    for number in range(4):
        log.put(f"third-{number}=1")


def directory(log: LogBuilder, folder: Path) -> Path:
    """A copy of the log, without a broker around it."""
    log.written = 0
    return log.write(folder / "orders-0")


def cleaned(log: LogBuilder, folder: Path, *, rounds: int = 3, **options: int) -> Path:
    """The log as a replica has it that was built anew from a cleaned leader: no checkpoint tells."""
    log.written = 0
    life = Life(folder, log)
    for _ in range(rounds):
        life.round(now=10_000_000, delete_retention_ms=0, **options)
    return shutil.copytree(life.folder, folder / "rebuilt" / "orders-0")


def stale(log: LogBuilder, cleaned_leader: Path, folder: Path) -> Path:
    """The replica that was away: its own log up to the tier's end, and then what it has fetched from the cleaned leader."""
    path = directory(log, folder)
    for old in path.glob("*.log"):
        if int(old.stem) >= END:
            old.unlink()
    for new in cleaned_leader.glob("*.log"):
        kept = b"".join(raw for base, raw in batches(new) if base >= END)
        if kept:
            (path / f"{max(int(new.stem), END):020}.log").write_bytes(kept)
    return path


def batches(path: Path) -> list[tuple[int, bytes]]:
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        size = 12 + int.from_bytes(data[at + 8 : at + 12], "big")
        found.append((int.from_bytes(data[at : at + 8], "big"), data[at : at + size]))
        at += size
    return found


def filled(cli: TierCli, story: LogBuilder, tmp_path: Path) -> None:
    """The tier has the log up to END, and then the log goes on."""
    assert cli.do("import", directory(story, tmp_path / "before"))["end_offset"] == END - 1
    go_on(story)


def exported(cli: TierCli, folder: Path) -> list[str]:
    cli.do("export", "orders-0", folder)
    return live(folder)


@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("options", [(), ("--allow-gaps",), ("--live",)])
def test_a_cleaned_log_without_a_checkpoint_does_not_continue_the_tier(
    options: tuple[str, ...], is_stale: bool, cli: TierCli, story: LogBuilder, tmp_path: Path
) -> None:
    """Otherwise the tier would show ``k0=v1`` for ever, and the aborted record as committed."""
    filled(cli, story, tmp_path)
    rebuilt = cleaned(story, tmp_path / "leader")
    source = stale(story, rebuilt, tmp_path / "stale") if is_stale else rebuilt
    (source / f"{story.next_offset:020}.log").touch()
    before = cli.digest()
    answer = cli.ask("import", source, *options)
    assert answer.code == 3
    for words in (f"offsets {END} to {END} are missing", f"ends at {END - 1}", "`topics delete orders-0`", "--accept-loss"):
        assert words in answer.stderr
    assert cli.digest() == before


def test_the_same_log_uncleaned_continues_it(cli: TierCli, story: LogBuilder, tmp_path: Path) -> None:
    filled(cli, story, tmp_path)
    assert cli.do("import", directory(story, tmp_path / "leader"))["start_offset"] == END


def test_a_log_that_was_cleaned_below_the_tiers_end_continues_it(cli: TierCli, story: LogBuilder, tmp_path: Path) -> None:
    """As with a min.compaction.lag.ms above the time between two imports."""
    story.segments[0][1][1:1] = []
    story.add("first-3=2; /")
    assert cli.do("import", directory(story, tmp_path / "before"))["end_offset"] == END
    go_on(story)
    source = cleaned(story, tmp_path / "leader", rounds=1, first_uncleanable_offset=END + 1)
    assert "5:first-3=1" not in live(source)
    assert cli.do("import", source)["start_offset"] == END + 1


def test_deleting_the_topic_and_a_complete_import_are_the_way_out(cli: TierCli, story: LogBuilder, tmp_path: Path) -> None:
    filled(cli, story, tmp_path)
    source = cleaned(story, tmp_path / "leader")
    assert cli.ask("import", source).code == 3
    cli.do("topics", "delete", "orders-0")
    assert cli.do("import", source)["end_offset"] == story.next_offset - 1
    assert not [record for record in exported(cli, tmp_path / "out") if "k0" in record]


def test_an_accepted_loss_is_recorded(cli: TierCli, story: LogBuilder, tmp_path: Path) -> None:
    filled(cli, story, tmp_path)
    source = cleaned(story, tmp_path / "leader")
    answer = cli.ask("import", source, "--accept-loss", "--reason", "the key is not personal")
    assert (answer.code, answer.document["start_offset"]) == (0, END)
    assert "may stay in the tier" in answer.stderr
    assert "0:k0=v1" in exported(cli, tmp_path / "out")
    (entry,) = cli.do("audit", "list")["actions"]
    assert entry["action"]["reason"] == "the key is not personal"
    records = b"".join(path.read_bytes() for path in cli.tier.rglob("*") if path.is_file() and path.suffix != ".log")
    assert b'"accept_loss":true' in records
    assert cli.ask("import", source).code == 0, "nothing is new, so nothing is judged"


def test_an_unneeded_consent_is_not_recorded_with_the_segments(cli: TierCli, story: LogBuilder, tmp_path: Path) -> None:
    filled(cli, story, tmp_path)
    assert cli.do("import", directory(story, tmp_path / "leader"), "--accept-loss")["start_offset"] == END
    records = [path.read_bytes() for path in cli.tier.rglob("*") if path.is_file()]
    assert not [data for data in records if b"segments_tiered" in data and b'"accept_loss":true' in data]


def test_a_first_import_of_a_cleaned_log_may_come_in_parts(cli: TierCli, story: LogBuilder, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(import_, "LIVE_BYTES", 1)
    go_on(story)
    source = cleaned(story, tmp_path / "leader")
    (source / f"{story.next_offset:020}.log").touch()
    assert cli.do("import", source, "--live")["end_offset"] == story.next_offset - 1


@pytest.mark.parametrize("is_accepted", [True, False])
def test_directories_of_one_cleaned_log_that_grow_are_one_import(is_accepted: bool, cli: TierCli, tmp_path: Path) -> None:
    """Its beginning was cleaned up to the tier's end, and the longer directory has all of it. Else a key may have been deleted since."""
    log = LogBuilder()
    for number in range(4):
        log.put(f"a{number}=1", "x=1", "k0=v1" if number == 0 else f"y{number}=1")
        log.put("x=2", f"b{number}=1")
        log.roll()
    log.put("x=3")
    whole = cleaned(log, tmp_path / "leader", rounds=1)
    begun = sorted(whole.glob("*.log"))[:1]
    part = tmp_path / "part" / "orders-0"
    part.mkdir(parents=True)
    for path in (*begun, whole / "partition.metadata"):
        shutil.copy2(path, part)
    end = cli.do("import", part)["end_offset"]
    if not is_accepted:
        log.add("k0; /; z=1")
        whole = cleaned(log, tmp_path / "later")
        assert "2:k0=v1" not in live(whole)
    answer = cli.ask("import", whole)
    assert (answer.code, "a log cleaner has compacted" in answer.stderr) == ((0, False) if is_accepted else (3, True))
    if is_accepted:
        assert answer.document["start_offset"] == end + 1
        assert exported(cli, tmp_path / "out") == live(whole)


def test_nothing_older_comes_in_front_of_a_cleaned_log(cli: TierCli, story: LogBuilder, tmp_path: Path) -> None:
    """A stale replica may have a value whose tombstone is gone from what was imported."""
    go_on(story)
    whole = directory(story, tmp_path / "stale")
    story.segments = story.segments[1:]
    cli.do("import", cleaned(story, tmp_path / "leader"))
    cli.refused("import", whole, says="compacted the log up to offset")


def test_a_truncated_tier_is_not_continued_by_a_cleaned_branch(cli: TierCli, story: LogBuilder, tmp_path: Path) -> None:
    cli.do("import", directory(story, tmp_path / "before"))
    kept = [raw for _, parts in story.segments for raw in parts][:10]
    branch = LogBuilder(leader_epoch=1)
    branch.segments, branch.next_offset = [(0, kept)], 10
    go_on(branch)
    source = cleaned(branch, tmp_path / "leader", first_dirty_offset=10)
    (source / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n1 10\n")
    before = cli.digest()
    answer = cli.ask("import", source, "--accept-truncation")
    assert (answer.code, "a log cleaner has compacted" in answer.stderr, "ends at 9" in answer.stderr) == (3, True, True)
    assert cli.digest() == before


def test_an_agent_reports_a_cleaned_log_as_compacted(tmp_path: Path) -> None:
    scene = SideScene.in_folder(tmp_path)
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.story.write(scene.replica, 12)
    scene.replica.batches = [(offset, raw) for offset, raw in scene.replica.batches if offset != 14]
    scene.replica.write()
    assert stands(settle(agent)) == (8, UploadFailureReason.COMPACTED)
    assert any("offsets 14 to 14 are missing" in text for text in scene.tier.told)
