"""Checks of broker-managed tiers for ``config check``: the cluster, its metadata topic, the topics, and this user's permissions.

Read-only; nothing is written to the tier as a test. Each unsafe setting is reported with the command that corrects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from compactor.access.tier import Tier
from compactor.brokers.conditions import (
    NOTHING_CONFIRMED,
    REQUIRED_TOPIC_SETTINGS,
    ClusterConfirmations,
    ClusterDescriptionQueries,
    broker_problem,
    cluster_settings_acl_command,
    topic_setting_refusal_reason,
    topic_settings_correction,
)
from compactor.brokers.metadata_topic.admin import (
    ClusterDescription,
    MissingPermission,
    TopicDescription,
    kafka_tool_command,
    metadata_topic_write_refusal_reason,
)
from compactor.config.units import count_noun
from compactor.errors import BadData, CompactorError, StoreError
from compactor.model.ids import TopicPartition
from compactor.upkeep.brokers.known_problems import cleanup_policy_findings, describe_topics, known_kafka_problem_findings


class ConfigCheckFinding(NamedTuple):
    """A problem found by ``config check``.

    severity: error (it does not work), warning (unsafe for compaction) or note. An error of kind ``topic`` concerns that topic only.
    kind: area of the problem, such as version, topic or acl.
    object: name of the broker, topic, permission or URL.
    """

    severity: str
    kind: str
    object: str
    detail: str
    hint: str


def check_brokers_and_metadata_topic(
    admin: ClusterDescriptionQueries,
    bootstrap_servers: str,
    *,
    reports_missing_append_permission: bool,
    confirmed: ClusterConfirmations = NOTHING_CONFIRMED,
) -> list[ConfigCheckFinding]:
    """Check the brokers and the metadata topic, and return the problems found.

    :param bootstrap_servers: addresses of brokers, for messages.
    :param confirmed: what the configuration confirms about the cluster.
    :param reports_missing_append_permission: whether rounds will be published, so that the permission to append is needed.
    """
    found: list[ConfigCheckFinding] = []
    try:
        cluster = admin.describe_cluster()
        found += _broker_and_permission_findings(cluster, confirmed, bootstrap_servers, publishes=reports_missing_append_permission)
        if any(one.kind == "metadata-manager" and one.severity == "error" for one in found):
            return found  # brokers with another metadata manager need not have the topic
        topic = admin.describe_metadata_topic(reports_missing_append_permission=reports_missing_append_permission)
    except StoreError as error:
        return [*found, ConfigCheckFinding("error", "brokers", bootstrap_servers, error.message, error.hint)]
    found += _missing_permission_findings(topic.missing_rights, bootstrap_servers)
    if problem := metadata_topic_write_refusal_reason(topic, bootstrap_servers):
        found.append(
            ConfigCheckFinding("error", "metadata-topic", topic.topic, problem, "Segments whose records are lost are lost to brokers, too")
        )
    return found


def check_topic_settings_and_permissions(
    admin: ClusterDescriptionQueries,
    topics: Sequence[str],
    cleanup_policy_of: Callable[[str], str] = lambda topic: "compact",
    bootstrap_servers: str = "",
) -> list[ConfigCheckFinding]:
    """Check the settings, permissions and leaders of these topics, and return the problems found.

    :param cleanup_policy_of: returns a topic's cleanup_policy in this program's settings.
    :param bootstrap_servers: addresses of brokers, for the commands that correct a topic.
    """
    found: list[ConfigCheckFinding] = []
    for name in topics:
        try:
            topic = admin.describe_topics([name])[name]
        except StoreError as error:
            found.append(ConfigCheckFinding("error", "topic", name, error.message, error.hint))
            continue
        found += _missing_permission_findings(topic.missing_rights, bootstrap_servers)
        found += _topic_setting_findings(topic, cleanup_policy_of(name), bootstrap_servers)
        led = [number for number, one in topic.partitions.items() if one.leader < 0]
        if led:
            found.append(ConfigCheckFinding("warning", "topic", name, f"partitions {led} have no leader", "Check the brokers"))
    return found


def check_known_kafka_problems(admin: ClusterDescriptionQueries, topics: Sequence[str]) -> list[ConfigCheckFinding]:
    """Return findings about broker versions and topic settings that will damage tiered data, whether it is compacted or not."""
    descriptions = describe_topics(admin, topics)
    return [
        ConfigCheckFinding(found.severity, found.kind, found.topic or found.object, f"{found.detail}: {found.means}", found.todo)
        for found in known_kafka_problem_findings(admin.describe_cluster().brokers, descriptions)
        if found.kind != "cleanup-policy"  # `_topic_setting_findings` reports it with the other settings of the topic
    ]


def _topic_setting_findings(description: TopicDescription, cleanup_policy: str, bootstrap_servers: str) -> Iterator[ConfigCheckFinding]:
    """Yield an error for each setting of a topic that rules out compaction, with one command that changes all these settings."""
    topic, settings = description.topic, {key: one.value for key, one in description.settings.items()}
    harm = {found.object: f"{found.detail}: {found.means}" for found in cleanup_policy_findings([description])}
    step = topic_settings_correction(topic, settings, cleanup_policy, bootstrap_servers)
    for setting, (wanted, why) in REQUIRED_TOPIC_SETTINGS.items():
        if setting in settings and topic_setting_refusal_reason(topic, setting, settings[setting], cleanup_policy):
            detail = harm.get(setting, f"{setting} is {settings[setting]}, not {wanted}: {why}")
            yield ConfigCheckFinding("error", "topic", topic, detail, step)


def check_object_access(tier: Tier, partitions: Sequence[TopicPartition]) -> list[ConfigCheckFinding]:
    """Check that the tier's objects can be listed and read, and return the problems found. Uses the first partition that has a segment."""
    layout = tier.ports.layout
    url = tier.settings.tier_url
    for name in partitions:
        try:
            live = tier.open_control_log_of_partition(name).refresh().live
            if not live:
                continue
            if not any(one.segment_id for one in layout.list_objects(name)):
                detail = f"{name} has {len(live)} segments by its metadata, and nothing is listed in {layout.partition_folder(name)}"
                return [ConfigCheckFinding("error", "tier", url, detail, "Correct url, layout or key_prefix under [tier]")]
            layout.read_file(name, live[-1], "log", 0, 1)
        except (StoreError, BadData) as error:
            return [ConfigCheckFinding("error", "tier", url, error.message, error.hint)]
        return []
    return [ConfigCheckFinding("note", "tier", url, "no partition has a segment yet, so that reading could not be tried", "")]


def read_tiered_partitions_and_findings(tier: Tier) -> tuple[list[TopicPartition], list[ConfigCheckFinding]]:
    """Read the metadata topic. Return the tiered partitions (none if it cannot be read) and the problems found."""
    try:
        tier.broker_metadata.refresh(max_age_s=0.0)
        names = tier.broker_metadata.list_topic_partitions()
    except CompactorError as error:
        return [], [ConfigCheckFinding("error", "metadata", tier.broker_metadata.source_name, error.message, error.hint)]
    if tier.broker_metadata.is_metadata_incomplete():
        explanation = "records are missing: segments that they named cannot be seen"
        return names, [
            ConfigCheckFinding(
                "warning", "metadata", tier.broker_metadata.source_name, explanation, "`orphans purge` refuses to work with it"
            )
        ]
    return names, []


def check_metadata_record_rate_limit(tier: Tier, partitions: Sequence[TopicPartition]) -> list[ConfigCheckFinding]:
    """Check that the metadata records of a first round over each partition fit within [publish] metadata_records_per_hour, and return the
    problems found.
    """
    per_hour = tier.settings.publish.metadata_records_per_hour
    if not per_hour:
        return []
    sizes = []
    for name in partitions:
        try:
            sizes.append((len(tier.broker_metadata.partition_metadata_from_records(name).cache.segments), name))
        except CompactorError:
            continue  # `check_object_access` reports it
    tight = sorted(((count, name) for count, name in sizes if 2 * (count + 1) > per_hour), reverse=True)
    if not tight:
        return []
    count, name = tight[0]
    explanation = (
        f"it is {per_hour}, and a first round over {name} with its {count_noun(count, 'segment')} writes about {2 * (count + 1)} records: "
        f"it waits for an hour without records ({count_noun(len(tight), 'partition is', 'partitions are')} that large)"
    )
    hint = "Raise it, or keep it: later rounds are smaller"
    return [ConfigCheckFinding("warning", "budget", "publish.metadata_records_per_hour", explanation, hint)]


def _broker_and_permission_findings(
    cluster: ClusterDescription, confirmed: ClusterConfirmations, bootstrap_servers: str, *, publishes: bool
) -> Iterator[ConfigCheckFinding]:
    """Yield findings about brokers under which nothing is compacted, and about missing permissions.

    :param publishes: whether rounds will be published, so that an unknown metadata manager is an error.
    """
    for broker in cluster.brokers:
        problem = broker_problem([broker], confirmed)
        if problem is None:
            continue
        is_unknown = problem.cause == "metadata-manager" and not broker.metadata_manager
        is_error = problem.cause in ("metadata-manager", "metadata-topic") and (publishes or not is_unknown)
        severity = "error" if is_error else "warning"
        yield ConfigCheckFinding(severity, problem.cause, f"broker {broker.id} ({broker.address})", problem.message, problem.hint)
    yield from _missing_permission_findings(cluster.missing_rights, bootstrap_servers)


def _missing_permission_findings(missing_permissions: Sequence[MissingPermission], bootstrap_servers: str) -> Iterator[ConfigCheckFinding]:
    """Yield a finding, with the kafka-acls command, for each missing permission."""
    for right in missing_permissions:
        operation = "".join(part.capitalize() for part in right.operation.split("_"))
        if "cluster" in right.resource:
            mend = cluster_settings_acl_command(bootstrap_servers)
        else:
            where = f"--operation {operation} --topic {right.resource.removeprefix('topic ')}"
            mend = kafka_tool_command("kafka-acls", f"--add --allow-principal User:... {where}", bootstrap_servers)
        severity = "error" if right.operation == "READ" else "warning"
        yield ConfigCheckFinding(severity, "acl", right.resource, str(right), mend)
