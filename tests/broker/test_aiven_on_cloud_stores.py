"""Tiers that Aiven's plug-in writes to emulators of Google Cloud Storage and Azure, compacted under the running broker.

The plug-in is in no registry. AIVEN_PLUGIN_JARS names a folder with the jars of a release: core, gcs and azure.
Plug-in 1.0.0 does not start with Kafka 4.4.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker.test_compaction import BrokerTierCli, Onlooker, assert_compacted
from tests.broker_soak.cluster import AIVEN_CHUNK_BYTES
from tests.support.cloud_servers import ACCOUNT, KEY, CloudBucket
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.servers import BUCKETS

PLUGIN = os.environ.get("AIVEN_PLUGIN_JARS", "")
NEWEST_KAFKA = "4.3.1"
PREFIX = "some/prefix/"

pytestmark = [
    pytest.mark.slow_broker,
    pytest.mark.skipif(not PLUGIN, reason="AIVEN_PLUGIN_JARS names no folder with the plug-in's jars"),
]


def plugin_settings(bucket: CloudBucket) -> dict[str, str]:
    """Return the broker settings, in the plug-in's own names, for a bucket or container without the prefix of the tests."""
    storage = "io.aiven.kafka.tieredstorage.storage"
    place = bucket.url.partition("://")[2].split("/")
    if bucket.section == "gcs":
        options = {
            "backend.class": f"{storage}.gcs.GcsStorage",
            "gcs.bucket.name": place[0],
            "gcs.endpoint.url": bucket.endpoint,
            "gcs.credentials.default": "false",
        }
    else:
        options = {
            "backend.class": f"{storage}.azure.AzureBlobStorage",
            "azure.account.name": ACCOUNT,
            "azure.account.key": KEY,
            "azure.container.name": place[1],
            "azure.endpoint.url": f"{bucket.endpoint}/{ACCOUNT}",
        }
    return {
        "remote.log.storage.manager.class.name": "io.aiven.kafka.tieredstorage.RemoteStorageManager",
        "remote.log.storage.manager.class.path": f"{Path(PLUGIN).resolve()}/*",
        **{f"rsm.config.storage.{name}": value for name, value in options.items()},
        "rsm.config.key.prefix": PREFIX,
        "rsm.config.chunk.size": str(AIVEN_CHUNK_BYTES),
    }


@pytest.mark.timeout(400)
@pytest.mark.parametrize("server", ["fake-gcs-server", "Azurite"])
def test_a_tier_of_the_plugin_is_read_checked_and_compacted(
    request: pytest.FixtureRequest, new_cluster: Callable[..., KafkaCluster], tmp_path: Path, server: str
) -> None:
    bucket: CloudBucket = request.getfixturevalue(BUCKETS[server])
    url = bucket.url.rpartition("/")[0]
    with new_cluster(NEWEST_KAFKA, settings=plugin_settings(bucket)) as cluster, ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, "compacted").create().tell()
        tiered = story.tiered()[0].latest_tiered
        errors = len(cluster.errors())
        sections = bucket.sections()
        sections["tier"] = {"kind": "kafka", "layout": "aiven", "url": url, "control_url": f"{url}/control"}
        sections["tier.aiven"] = {"key_prefix": PREFIX, "chunk_size": AIVEN_CHUNK_BYTES}
        cli = BrokerTierCli(cluster, tmp_path / "compactor", ["compacted"], sections)
        [row] = cli.process("topics")["partitions"]
        assert row["end_offset"] == tiered
        assert [one for one in cli.process("verify")["problems"] if one["severity"] == "error"] == []
        assert [one for one in cli.process("config", "check")["problems"] if one["severity"] == "error"] == []
        with Onlooker(story):
            [done] = cli.process("run")["partitions"]
            assert (done["status"], done["bytes_written"] < done["bytes_read"]) == ("cleaned", True)
            assert_compacted(cluster, "compacted", story.partitions[0], done["next_dirty_offset"])
            cli.process("retire")
        assert cli.process("verify")["ok"]
        assert cluster.errors()[errors:] == []
        cluster.restart()  # a broker that starts reports errors of its own: of its registration, of metadata that it has not read yet
        assert_compacted(cluster, "compacted", story.partitions[0], done["next_dirty_offset"])
