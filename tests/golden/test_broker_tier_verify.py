"""``verify`` on tiers that brokers wrote: as they were captured, and with damage made by hand, each named and nothing else."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset
from compactor.model.ids import COMPACTOR_BROKER_ID
from compactor.model.remote_log import MetadataRecord, RemoteLogSegmentMetadataRecord, RemoteLogSegmentMetadataUpdateRecord
from compactor.model.segment import SegmentState
from tests.golden_cases import names
from tests.support.broker_metadata import broker_cli, golden_events
from tests.support.broker_tiers import BrokerTier, aiven_tier, local_tier

LOCAL = names("tiered")[-1]
CASES = [*(("kafka-local", name) for name in names("tiered")), *(("aiven", name) for name in names("aiven"))]
Events = list[MetadataRecord]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("brokers")


@pytest.mark.parametrize(("layout", "case"), CASES)
@pytest.mark.parametrize("fast", [[], ["--fast"]])
def test_a_captured_tier_is_well(layout: str, case: str, fast: list[str], scratch: Path, tmp_path: Path) -> None:
    tier = local_tier(case, scratch) if layout == "kafka-local" else aiven_tier(case, scratch)
    cli = broker_cli(tmp_path, tier, layout)
    before = cli.digest()
    answer = cli.ask("verify", *fast)
    found = {(one["severity"], one["kind"], one["object"]) for one in answer.document["problems"]}
    assert found == {("warning", "stuck-copy", segment.id) for segment in tier.unfinished}
    assert answer.code == 0
    assert cli.digest() == before


class Damaged:
    """A copy of a golden tier, and its events, both to be spoilt."""

    def __init__(self, tier: BrokerTier, folder: Path) -> None:
        shutil.copytree(tier.objects, folder / "objects")
        self.tier = replace(tier, objects=folder / "objects")
        self.events = golden_events(tier)

    def file(self, at: int, suffix: str) -> Path:
        segment = self.tier.segments[at]
        [path] = self.tier.objects.rglob(f"{segment.start_offset:020d}-{segment.id}.{suffix}")
        return path

    def key(self, path: Path) -> str:
        return str(path.relative_to(self.tier.objects))

    def spoil(self, path: Path, change: Callable[[bytearray], None]) -> str:
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)
        return self.key(path)

    def introduced(self, at: int) -> tuple[int, RemoteLogSegmentMetadataRecord]:
        wanted = self.tier.segments[at].id
        return next(
            (place, event)
            for place, event in enumerate(self.events)
            if isinstance(event, RemoteLogSegmentMetadataRecord) and event.id == wanted
        )

    def change(self, at: int, **changes: object) -> None:
        place, event = self.introduced(at)
        self.events[place] = event._replace(**changes)  # type: ignore[arg-type]

    def append(self, at: int, *states: SegmentState) -> None:
        _, event = self.introduced(at)
        self.events += [
            RemoteLogSegmentMetadataUpdateRecord(event.partition, event.segment_id, 1, event.event_timestamp_ms, state) for state in states
        ]


def flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 0x40

    return change


def cut(data: bytearray) -> None:
    del data[-7:]


def missing_log(tier: Damaged) -> str:
    path = tier.file(3, "log")
    path.unlink()
    return tier.key(path)


def missing_index(tier: Damaged) -> str:
    path = tier.file(4, "index")
    path.unlink()
    return tier.key(path)


def short_log(tier: Damaged) -> str:
    return tier.spoil(tier.file(5, "log"), cut)


def rotten_log(tier: Damaged) -> str:
    return tier.spoil(tier.file(6, "log"), flip(2_000))


def wrong_index(tier: Damaged) -> str:
    return tier.spoil(tier.file(7, "index"), flip(5))


def wrong_timeindex(tier: Damaged) -> str:
    return tier.spoil(tier.file(8, "timeindex"), flip(11))


def poor_txnindex(tier: Damaged) -> str:
    return tier.spoil(max(tier.tier.objects.rglob("*.txnindex")), bytearray.clear)


def rotten_snapshot(tier: Damaged) -> str:
    return tier.spoil(tier.file(1, "snapshot"), flip(9))


def other_lineage(tier: Damaged) -> str:
    path = tier.file(2, "leader_epoch_checkpoint")
    path.write_text("0\n1\n7 0\n")
    return tier.key(path)


def orphan(tier: Damaged) -> str:
    path = tier.file(0, "log")
    made = path.with_name(f"{77:020d}-{'A' * 22}.log")
    made.write_bytes(b"x")
    os.utime(made, (1, 1))
    return tier.key(made)


def stranger(tier: Damaged) -> str:
    made = tier.file(0, "log").with_name("notes.txt")
    made.write_bytes(b"x")
    return tier.key(made)


def gap(tier: Damaged) -> str:
    tier.append(12, SegmentState.DELETE_SEGMENT_STARTED, SegmentState.DELETE_SEGMENT_FINISHED)
    segment = tier.tier.segments[12]
    for path in list(tier.tier.objects.rglob(f"*{segment.id}*")):
        path.unlink()
    return ""


def stuck_copy(tier: Damaged) -> str:
    _, event = tier.introduced(-1)
    other = event._replace(segment_id=b"0123456789abcdef", start_offset=event.end_offset + 1, end_offset=event.end_offset + 50)
    tier.events.append(other._replace(leader_epochs=(EpochEntry(event.leader_epochs[-1].epoch, Offset(other.start_offset)),)))
    return base64.urlsafe_b64encode(b"0123456789abcdef").decode().rstrip("=")


def wrong_time(tier: Damaged) -> str:
    _, event = tier.introduced(14)
    tier.change(14, max_timestamp_ms=event.max_timestamp_ms + 1)
    return tier.key(tier.file(14, "log"))


DAMAGE: list[tuple[str, Callable[[Damaged], str]]] = [
    ("missing", missing_log),
    ("missing", missing_index),
    ("size", short_log),
    ("log", rotten_log),
    ("index", wrong_index),
    ("timeindex", wrong_timeindex),
    ("txnindex", poor_txnindex),
    ("snapshot", rotten_snapshot),
    ("leader-epoch-checkpoint", other_lineage),
    ("orphan", orphan),
    ("stranger", stranger),
    ("gap", gap),
    ("stuck-copy", stuck_copy),
    ("metadata", wrong_time),
]


@pytest.mark.parametrize(("kind", "damage"), DAMAGE, ids=[damage.__name__ for _, damage in DAMAGE])
def test_each_damage_is_named_and_nothing_else(kind: str, damage: Callable[[Damaged], str], scratch: Path, tmp_path: Path) -> None:
    spoilt = Damaged(local_tier(LOCAL, scratch), tmp_path)
    where = damage(spoilt)
    answer = broker_cli(tmp_path, spoilt.tier, "kafka-local", spoilt.events).ask("verify")
    assert [(one["kind"], one["object"]) for one in answer.document["problems"]] == [(kind, where)]
    [one] = answer.document["problems"]
    assert answer.code == (3 if one["severity"] == "error" else 0)
    assert one["means"]
    assert one["todo"]


def test_all_damage_together(scratch: Path, tmp_path: Path) -> None:
    spoilt = Damaged(local_tier(LOCAL, scratch), tmp_path)
    expected = sorted((kind, damage(spoilt)) for kind, damage in DAMAGE)
    cli = broker_cli(tmp_path, spoilt.tier, "kafka-local", spoilt.events)
    answer = cli.ask("verify")
    assert sorted((one["kind"], one["object"]) for one in answer.document["problems"]) == expected
    unread = {"log", "index", "timeindex", "txnindex", "snapshot", "leader-epoch-checkpoint", "metadata"}
    fast = cli.ask("verify", "--fast").document["problems"]
    assert sorted((one["kind"], one["object"]) for one in fast) == [one for one in expected if one[0] not in unread]


@pytest.mark.parametrize(
    ("more", "broker", "found"),
    [
        (3, 1, ("warning", "end-hole")),
        (3, COMPACTOR_BROKER_ID, ("error", "metadata")),
        (-1, 1, ("error", "log")),
    ],
    ids=["a compacted topic's", "ours", "beyond"],
)
def test_a_broker_may_tier_a_log_that_ends_below_its_metadata(
    more: int, broker: int, found: tuple[str, str], scratch: Path, tmp_path: Path
) -> None:
    """Brokers name the offset before the next segment, and may have compacted the topic before they tiered it."""
    spoilt = Damaged(local_tier(LOCAL, scratch), tmp_path)
    _, event = spoilt.introduced(-1)
    spoilt.change(-1, end_offset=event.end_offset + more)
    writes = (RemoteLogSegmentMetadataRecord, RemoteLogSegmentMetadataUpdateRecord)
    spoilt.events = [
        one._replace(broker_id=broker) if isinstance(one, writes) and one.segment_id == event.segment_id else one for one in spoilt.events
    ]
    answer = broker_cli(tmp_path, spoilt.tier, "kafka-local", spoilt.events).ask("verify")
    assert {(one["severity"], one["kind"]) for one in answer.document["problems"]} == {found}
    assert answer.code == (3 if found[0] == "error" else 0)


def test_epochs_that_metadata_has_wrong(scratch: Path, tmp_path: Path) -> None:
    spoilt = Damaged(local_tier(LOCAL, scratch), tmp_path)
    _, event = spoilt.introduced(-1)
    spoilt.change(-1, leader_epochs=(EpochEntry(LeaderEpoch(event.leader_epochs[-1].epoch + 1), Offset(event.start_offset)),))
    problems = broker_cli(tmp_path, spoilt.tier, "kafka-local", spoilt.events).ask("verify").document["problems"]
    files = [spoilt.key(spoilt.file(-1, suffix)) for suffix in ("log", "leader_epoch_checkpoint")]
    assert [(one["kind"], one["object"]) for one in problems] == list(zip(("epochs", "leader-epoch-checkpoint"), files, strict=True))
