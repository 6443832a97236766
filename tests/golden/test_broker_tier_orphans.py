"""``orphans``: found in one step, deleted in another that believes nothing of the list."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from compactor.access.metadata import BrokerManagedTierMetadataSource
from compactor.access.tier import Tier
from compactor.errors import BadData, UsageError
from compactor.model.remote_log import MetadataRecord, RemoteLogSegmentMetadataRecord, uuid_bytes
from compactor.upkeep.orphans import LIKELY, SURE, find_orphans, purge_orphans, read_orphan_list, write_orphan_list
from tests.golden_cases import names
from tests.metadata_events import S, update
from tests.support.broker_metadata import broker_cli, brokers_of, golden_events
from tests.support.broker_tiers import ORDERS, local_tier
from tests.support.tier_cli import TierCli

STRAY = "A" * 22
DAY_S = 86_400


@dataclass
class Left:
    """A copy of a golden tier: segment 4 is finished in metadata and still there, one object was never named, one is young."""

    tier: Tier
    cli: TierCli
    events: list[MetadataRecord]
    folder: Path
    finished: list[str]
    stray: str
    young: str

    def now_with(self, *events: MetadataRecord) -> Tier:
        scratch = self.folder / f"folded {len(events)}"
        return replace(self.tier, metadata=BrokerManagedTierMetadataSource(brokers_of([*self.events, *events], scratch)))


@pytest.fixture
def left(tmp_path: Path) -> Left:
    golden = local_tier(names("tiered")[-1], tmp_path)
    shutil.copytree(golden.objects, tmp_path / "objects")
    golden = replace(golden, objects=tmp_path / "objects")
    segment = golden.segments[4]
    raw = uuid_bytes(segment.id)
    events = golden_events(golden)
    introduced = next(event for event in events if isinstance(event, RemoteLogSegmentMetadataRecord) and event.segment_id == raw)
    for state in (S.DELETE_SEGMENT_STARTED, S.DELETE_SEGMENT_FINISHED):
        events.append(update(0, state)._replace(partition=introduced.partition, segment_id=raw))
    objects = sorted(golden.objects.rglob(f"*{segment.id}*"))
    stray = objects[0].with_name(f"{5000:020d}-{STRAY}.log")
    young = objects[0].with_name(f"{6000:020d}-{STRAY}.log")
    for path in (stray, young):
        path.write_bytes(b"left behind")
    for path in golden.objects.rglob("*"):
        if path.is_file() and path != young:
            os.utime(path, (path.stat().st_mtime - 30 * DAY_S,) * 2)
    cli = broker_cli(tmp_path, golden, "kafka-local", events)
    opened = cli.open()
    tier = replace(opened, metadata=BrokerManagedTierMetadataSource(brokers_of(events, tmp_path / "live")))
    keys = [str(path.relative_to(golden.objects)) for path in (*objects, stray, young)]
    return Left(tier, cli, events, tmp_path, keys[:-2], keys[-2], keys[-1])


def test_what_nothing_names_is_listed_with_age_and_certainty(left: Left) -> None:
    before = left.cli.digest()
    found = find_orphans(left.tier, [ORDERS])
    assert {one.object: one.certainty for one in found.orphans} == dict.fromkeys(left.finished, SURE) | {left.stray: LIKELY}
    assert all(one.age_ms >= left.tier.retention.orphan_age_ms for one in found.orphans)
    assert (found.url, found.layout, found.cluster_id) == (left.tier.settings.tier_url, "kafka-local", "cluster-of-tests")
    write_orphan_list(found, left.folder / "list.json")
    assert read_orphan_list(left.folder / "list.json") == found
    with pytest.raises(UsageError, match="exists already"):
        write_orphan_list(found, left.folder / "list.json")
    assert left.cli.digest() == before


def test_a_purge_deletes_what_still_is_one(left: Left) -> None:
    found = find_orphans(left.tier, [ORDERS])
    before = left.cli.digest()
    assert len(purge_orphans(left.tier, found, left.tier.ports.data, dry_run=True).deleted) == len(found.orphans)
    assert left.cli.digest() == before
    done = purge_orphans(left.tier, found, left.tier.ports.data)
    assert sorted(one.object for one in done.deleted) == sorted([*left.finished, left.stray])
    assert done.kept == {}
    assert set(before) - set(left.cli.digest()) == {*left.finished, left.stray}
    again = purge_orphans(left.tier, found, left.tier.ports.data)
    assert (list(again.deleted), set(again.kept.values())) == ([], {"metadata names it now, or it was deleted"})


def test_a_purge_keeps_what_is_named_meanwhile_or_has_changed(left: Left) -> None:
    found = find_orphans(left.tier, [ORDERS])
    first = next(event for event in left.events if isinstance(event, RemoteLogSegmentMetadataRecord))
    named = left.now_with(
        first._replace(segment_id=uuid_bytes(STRAY), start_offset=5000, end_offset=5009, leader_epochs=first.leader_epochs)
    )
    changed = left.cli.tier / left.finished[0]
    changed.write_bytes(b"written anew")
    os.utime(changed, (changed.stat().st_mtime - 30 * DAY_S,) * 2)
    done = purge_orphans(named, found, left.tier.ports.data)
    assert done.kept == {left.stray: "metadata names it now, or it was deleted", left.finished[0]: "it has changed since it was listed"}
    assert (left.cli.tier / left.stray).exists()
    assert changed.exists()


def test_a_purge_refuses_another_tier_and_metadata_that_is_old_or_has_holes(left: Left) -> None:
    found = find_orphans(left.tier, [ORDERS])
    data = left.tier.ports.data
    with pytest.raises(UsageError, match="the list is of the tier at file:///elsewhere"):
        purge_orphans(left.tier, replace(found, url="file:///elsewhere"), data)
    with pytest.raises(UsageError, match="the list is of the cluster another"):
        purge_orphans(left.tier, replace(found, cluster_id="another"), data)
    write_orphan_list(found, left.folder / "list.json")
    left.cli.refused("orphans", "purge", left.folder / "list.json", code=2, says="there is only a snapshot")
    (left.folder / "bad.json").write_text(json.dumps({"format": 1, "orphans": []}))
    with pytest.raises(BadData, match="it is not a list of orphans"):
        read_orphan_list(left.folder / "bad.json")
    assert (left.cli.tier / left.stray).exists()


def test_the_commands_tell_the_list(left: Left) -> None:
    document = left.cli.do("orphans", "find", "--to", left.folder / "found.json")
    assert {one["object"] for one in document["orphans"]} == {*left.finished, left.stray}
    assert json.loads((left.folder / "found.json").read_text()) == document
