"""A tier of golden data as the product sees it: its events through the metadata topic in memory, or a snapshot of them in a store."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from compactor.adapters.brokers.cache import FoldedMetadataStore
from compactor.adapters.brokers.cluster import ClusterProblem
from compactor.adapters.brokers.codec import decode_record
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.brokers.view import LiveBrokerMetadata, TopicStatus, save_metadata_snapshot, take_metadata_snapshot
from compactor.local.cache import RocksDatabase
from compactor.model.remote_log import MetadataRecord
from compactor.storage.factory import open_store
from tests.simulation.memory_topic import MemoryMetadataTopic, MemoryTopicLog
from tests.support.broker_tiers import BrokerTier
from tests.support.tier_cli import TierCli

NOW_MS = 1_800_000_000_000


class MemoryCluster:
    """ClusterQueries: topics as a test says."""

    def __init__(self, topics: Mapping[str, TopicStatus]) -> None:
        self.known = dict(topics)
        self.problem: ClusterProblem | None = None

    def cluster_problem(self) -> ClusterProblem | None:
        return self.problem

    def cluster_id(self) -> str:
        return "cluster-of-tests"

    def topic_statuses(self, names: Sequence[str]) -> Mapping[str, TopicStatus]:
        return {name: self.known[name] for name in names if name in self.known}


def golden_events(tier: BrokerTier) -> list[MetadataRecord]:
    [path] = [tier.folder / name for name in ("metadata.jsonl", "metadata-topic.jsonl") if (tier.folder / name).exists()]
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [decode_record(base64.b64decode(event["value"])) for event in found]


def brokers_of(
    events: Sequence[MetadataRecord],
    scratch: Path,
    patterns: Sequence[str] = ("orders",),
    *,
    topics: Mapping[str, TopicStatus] | None = None,
) -> LiveBrokerMetadata:
    """``topics``: by default the last id that the events name for each."""
    log = MemoryTopicLog()
    log.write(events)
    known = {record.partition.topic: TopicStatus(record.partition.topic_id) for record in events} if topics is None else topics
    followed = FoldingMetadataTopicReader(MemoryMetadataTopic(log), FoldedMetadataStore(RocksDatabase(scratch)), clock_ms=lambda: 0)
    return LiveBrokerMetadata(followed, MemoryCluster(known), patterns, "the metadata topic of tests")


def broker_cli(folder: Path, tier: BrokerTier, layout: str, events: Sequence[MetadataRecord] | None = None, url: str = "") -> TierCli:
    """The command line on a golden tier: no broker, a snapshot of its metadata in a control store of its own.

    ``url``: where its objects lie, if that is not the directory.
    """
    url = url or tier.objects.as_uri()
    control = folder / "control"
    brokers = brokers_of(golden_events(tier) if events is None else events, folder / "folded")
    snapshot = take_metadata_snapshot(brokers, url=url, layout=layout, now_ms=NOW_MS)
    save_metadata_snapshot(open_store(str(control)), snapshot)
    cli = TierCli(folder / "cli")
    cli.tier = tier.objects
    cli.set(
        tier={"kind": "kafka", "layout": layout, "url": url, "control_url": control.as_uri()},
        kafka={"bootstrap_servers": "", "topics": ["orders"]},
    )
    if layout == "aiven":
        lines = ["[tier.aiven]"]
        for key, value in tier.settings().model_dump(mode="json").items():
            pairs = ", ".join(f"{name} = {json.dumps(file)}" for name, file in value.items()) if isinstance(value, dict) else ""
            lines.append(f"{key} = {{{pairs}}}" if isinstance(value, dict) else f"{key} = {json.dumps(value)}")
        cli.config.write_text(cli.config.read_text() + "\n".join(lines) + "\n")
    return cli
