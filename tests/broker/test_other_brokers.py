"""Brokers under which rounds run, and those under which nothing may be written: versions, metadata managers, rights."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from compactor.adapters.brokers.admin import NEWEST_TESTED, TESTED_MINORS, KafkaAdmin
from compactor.adapters.brokers.cluster import KAFKA_METADATA_MANAGER
from compactor.adapters.kafka_client import KafkaConnection
from tests.broker.test_compaction import BrokerTierCli, assert_compacted, cli
from tests.support.kafka_admin import METADATA_TOPIC, ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory

__all__ = ["cli"]
pytestmark = pytest.mark.timeout(900)
OTHER = "OtherMetadataManager"
RELEASES = ("3.8.1", "3.9.2", "4.0.1", "4.1.1", "4.2.0", "4.3.1", "4.4.0")
PASSWORD = "secret of the compactor"
NEWEST_UNTESTED = """
import compactor.adapters.brokers.admin as versions
versions.TESTED_MINORS = {name: level for name, level in versions.TESTED_MINORS.items() if name != versions.NEWEST_TESTED}
versions.NEWEST_TESTED = list(versions.TESTED_MINORS)[-1]
"""
"""Runs in the process of a command: it is a release from before the newest brokers."""


def minor(release: str) -> str:
    return release.rpartition(".")[0]


def test_a_release_of_each_tested_minor_version_takes_part() -> None:
    assert [minor(release) for release in RELEASES] == list(TESTED_MINORS)


@pytest.mark.slow_broker
@pytest.mark.parametrize("release", RELEASES)
def test_rounds_run_under_each_tested_minor_version(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli], release: str
) -> None:
    with new_cluster(release) as cluster, ClusterAdmin(cluster) as admin:
        [broker] = KafkaAdmin(KafkaConnection(cluster.bootstrap)).describe_cluster().brokers
        assert (broker.version, broker.metadata_version) == (minor(release), TESTED_MINORS[minor(release)])
        story = TopicStory(cluster, admin, "orders").create().tell()
        story.tiered()
        ours = cli(cluster, "orders")
        assert ours.process("config", "check")["ok"]
        [done] = ours.process("run")["partitions"]
        assert done["status"] == "cleaned"
        assert_compacted(cluster, "orders", story.partitions[0], done["next_dirty_offset"])
        assert ours.process("retire")["deleted"]
        assert ours.process("verify")["ok"]
        assert_compacted(cluster, "orders", story.partitions[0], done["next_dirty_offset"])
        cluster.restart()
        assert_compacted(cluster, "orders", story.partitions[0], done["next_dirty_offset"])


def compiled_manager(cluster: KafkaCluster, folder: Path) -> dict[str, str]:
    """Return the settings of a broker that uses OtherMetadataManager."""
    folder.mkdir()
    source = Path(__file__).parents[1] / "support" / f"{OTHER}.java"
    subprocess.run(["javac", "-nowarn", "-cp", cluster.jars.class_path, "-d", str(folder), str(source)], check=True)
    return {"remote.log.metadata.manager.class.name": OTHER, "remote.log.metadata.manager.class.path": f"{folder}/"}


def test_nothing_is_written_or_deleted_once_a_broker_keeps_its_metadata_elsewhere(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli], tmp_path: Path
) -> None:
    with new_cluster() as cluster, ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, "orders").create().tell()
        story.tiered()
        ours = cli(cluster, "orders", publish={"orphan_age_ms": 0})
        [first] = ours.process("run")["partitions"]
        assert first["status"] == "cleaned"
        story.plain(count=300)
        story.tiered()
        copy = admin.tier_files("orders")[0]
        (copy.parent / copy.name.replace(copy.name[21:43], "AAAAAAAAAAAAAAAAAAAAAQ")).write_bytes(copy.read_bytes())
        orphans = tmp_path / "orphans.json"
        assert ours.process("orphans", "find", "--to", str(orphans))["orphans"]

        settings = compiled_manager(cluster, tmp_path / "classes")
        with (cluster.nodes[1].directory / "server.properties").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())
        cluster.restart()
        wait_until(lambda: admin.leadership("orders").leader > 0, "orders to be led again")
        objects = admin.tier_files("orders")
        records = [admin.offsets(METADATA_TOPIC, number).latest for number in range(5)]
        for command in (["run"], ["retire"], ["orphans", "purge", str(orphans)]):
            said = ours.refused(*command, code=5)
            assert f"broker 1 keeps its metadata by {OTHER}, and not by {KAFKA_METADATA_MANAGER}" in said
        checked = ours.process("config", "check", code=5)["problems"]
        assert [(one["severity"], one["kind"]) for one in checked if one["severity"] == "error"] == [("error", "metadata-manager")]
        assert ("error", "metadata-manager") in {(one["severity"], one["kind"]) for one in ours.process("doctor", code=3)["problems"]}
        assert admin.tier_files("orders") == objects
        assert [admin.offsets(METADATA_TOPIC, number).latest for number in range(5)] == records


def test_a_cluster_that_was_born_with_another_metadata_manager_is_told_the_same(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli], tmp_path: Path, broker: KafkaCluster
) -> None:
    settings = compiled_manager(broker, tmp_path / "classes")
    with new_cluster(settings=settings) as cluster:
        ours = cli(cluster, "orders")
        [problem] = [one for one in ours.process("config", "check", code=5)["problems"] if one["severity"] == "error"]
        assert problem["kind"] == "metadata-manager"
        for command in ("run", "topics", "doctor"):
            said = ours.refused(command, code=5)
            assert f"broker 1 keeps its metadata by {OTHER}, and not by {KAFKA_METADATA_MANAGER}" in said
            assert "tier for the first time" not in said


def test_an_untested_version_delays_rounds_and_no_command_that_reads(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    story = TopicStory(broker, broker_admin, "untested").create().tell()
    story.tiered()
    ours = cli(broker, "untested")
    done = subprocess.run(
        ours.words("run", before=NEWEST_UNTESTED), capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 5
    assert f"the version of broker 1 is newer than {list(TESTED_MINORS)[-2]}, the newest tested version" in done.stderr
    assert "allow_untested_brokers = true" in done.stderr
    for command in (["topics"], ["plan"], ["verify"], ["cat", "untested-0"], ["segments", "list", "untested-0"]):
        subprocess.run(ours.words(*command, before=NEWEST_UNTESTED), check=True, capture_output=True, cwd=Path(__file__).parents[2])
    [blocked] = ours.process("status", code=3, before=NEWEST_UNTESTED)["needs_attention"]
    assert (blocked["partition"], blocked["cause"]) == ("untested-0", "brokers")
    assert "allow_untested_brokers = true" in blocked["next_step"]
    assert [one["kind"] for one in ours.process("doctor", before=NEWEST_UNTESTED)["problems"]] == ["untested-brokers"]
    checked = ours.process("config", "check", code=5, before=NEWEST_UNTESTED)
    assert [(one["severity"], one["kind"]) for one in checked["problems"]] == [("warning", "untested-brokers"), ("error", "topic")]
    assert checked["topics"] == [{"topic": "untested", "severity": "error", "exit_code": 5, "blocked": True}]
    allowed = cli(broker, "untested", kafka={"allow_untested_brokers": True})
    [cleaned] = allowed.process("run", before=NEWEST_UNTESTED)["partitions"]
    assert cleaned["status"] == "cleaned"
    assert list(TESTED_MINORS)[-1] == NEWEST_TESTED


def test_a_metadata_manager_that_may_not_be_read_needs_the_right_or_a_confirmation(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]
) -> None:
    with new_cluster(users={"compactor": PASSWORD}) as cluster, ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, "orders").create().tell()
        story.tiered()
        admin.allow("compactor", *(("TOPIC", METADATA_TOPIC, right) for right in ("READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS")))
        admin.allow("compactor", *(("TOPIC", "orders", right) for right in ("DESCRIBE", "DESCRIBE_CONFIGS")))
        login = cluster.client_settings("compactor")
        servers = login.pop("bootstrap.servers")
        sections = {"kafka.properties": {"message.timeout.ms": 3000, **login}}
        ours = cli(cluster, "orders", kafka={"bootstrap_servers": servers}, **sections)
        said = ours.refused("run", code=5)
        assert "remote.log.metadata.manager.class.name of broker 1 is unknown" in said
        assert "--add --allow-principal User:... --operation DescribeConfigs --cluster" in said
        assert ours.process("verify")["ok"]
        confirmed = {"bootstrap_servers": servers, "metadata_manager_class": KAFKA_METADATA_MANAGER}
        [done] = cli(cluster, "orders", kafka=confirmed, **sections).process("run")["partitions"]
        assert done["status"] == "cleaned"
        story.plain(count=300)
        story.tiered()
        admin.allow("compactor", ("CLUSTER", "kafka-cluster", "DESCRIBE_CONFIGS"))
        ours = cli(cluster, "orders", kafka={"bootstrap_servers": servers}, **sections)
        assert [one["status"] for one in ours.process("run")["partitions"]] == ["cleaned"]
