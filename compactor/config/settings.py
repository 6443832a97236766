"""The settings: one TOML file, overridden by environment variables, completed by defaults, as frozen values.

    file         --config FILE, else $TIERED_COMPACTOR_CONFIG, else ./tiered-compactor.toml if it exists
    environment  TIERED_COMPACTOR__SECTION__KEY: text as it is, everything else as TOML writes it (``5``, ``true``, ``["/a", "/b"]``);
                 TIERED_COMPACTOR__TOPICS takes the whole table: ``{"orders-.*" = {delete_retention_ms = 0}}``

Everything that is not understood is refused with UsageError: unknown keys (the message names the nearest known one), values outside their
range (it names the range), values that this version does not support. ``Settings.source_of_setting`` returns the source of each value.
``conf/default.toml`` describes each key. Units are in the names (``_ms``, ``_bytes``, ``_per_s``);
such values may also be texts with a unit (``"10m"``, ``"64 MiB"``).
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from compactor.config.sections import (
    MAX_MS,
    AzureSettings,
    GcsSettings,
    HdfsSettings,
    Milliseconds,
    OutputSettings,
    RegistrySettings,
    S3Settings,
    SegmentReplacementCosts,
    SettingsSection,
    validate_regular_expressions,
    validate_storage_class,
)
from compactor.errors import UsageError
from compactor.model.plan import MAX32, CleanerPolicy, KeylessPolicy
from compactor.model.segment import StrictFrozenModel
from compactor.storage.schemes import DIRECTORY, store_kind_of_scheme, url_problem

# ---- values in the syntax of TOML, and their allowed values in words -----------------------------------------------------------


def format_toml_value(value: object) -> str:
    """Return a setting's value in the syntax of TOML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False, default=str)


def parse_toml_value(text: str) -> object:
    """Return the TOML value of a text; the text itself if it is not valid, so that validation can name the allowed values."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text


def is_text_setting(field: FieldInfo) -> bool:
    """Return whether a setting holds text, so that its environment variable needs no quotes."""
    kinds = [field.annotation] if get_origin(field.annotation) is not Literal else [type(choice) for choice in get_args(field.annotation)]
    return all(kind is str for kind in kinds)


def describe_allowed_values(section_type: type[BaseModel], key: str) -> str:
    """Return the allowed values of a setting in words, such as ``a whole number from 0 to 7 or "auto"``."""
    field = section_type.model_fields[key]
    example = ' or a text such as "10m"' if key.endswith("_ms") else ' or a text such as "64 MiB"' if "_bytes" in key else ""
    return _describe_allowed_type(field.annotation, field.metadata) + example


def _describe_allowed_type(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return _describe_allowed_type(inner, [part for one in extra for part in (one.metadata if isinstance(one, FieldInfo) else [one])])
    if origin is Literal:
        return " or ".join(format_toml_value(choice) for choice in get_args(annotation))
    if origin is tuple:
        element = get_args(annotation)[0]
        return f"a list of {_describe_allowed_type(element, [])}" if get_origin(element) is Literal else "a list of texts"
    if origin is dict and isinstance(get_args(annotation)[1], type) and issubclass(get_args(annotation)[1], BaseModel):
        return "a table of tables"
    if origin is dict:
        return "a table of texts" if get_args(annotation)[1] is str else "a table of texts, numbers and booleans"
    if origin is Union or not isinstance(annotation, type):
        return " or ".join(_describe_allowed_type(choice, []) for choice in get_args(annotation))
    low = next((limit.ge for limit in metadata if isinstance(limit, Ge)), "")
    high = next((limit.le for limit in metadata if isinstance(limit, Le)), "")
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "a text in quotes"
    return f"a {'whole ' if annotation is int else ''}number from {low} to {high}"


ENV_PREFIX = "TIERED_COMPACTOR__"
ENV_FILE = "TIERED_COMPACTOR_CONFIG"
_NO_SETTINGS = (ENV_FILE, "TIERED_COMPACTOR_DEBUG")
_OF_KUBERNETES = re.compile(r"_(SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
"""Variables that Kubernetes sets in every pod for a service whose name begins like ours, such as TIERED_COMPACTOR_AGENT_SERVICE_HOST."""
DEFAULT_FILE = "tiered-compactor.toml"

BUILT: dict[str, tuple[object, ...]] = {}
"""Keys of which only these values are supported so far. Other values are refused. Delete a row when all of its values are supported."""

_MAX_BYTES = 2**60

ByteBudget = Annotated[int, Field(ge=4096, le=_MAX_BYTES)]
Rate = Annotated[int, Field(ge=0, le=_MAX_BYTES)]


def _validate_store_url(url: str) -> str:
    if url and (problem := url_problem(url)):
        raise ValueError(problem)
    return url


def _validate_web_address(address: str) -> str:
    if address and not address.startswith(("http://", "https://")):
        raise ValueError("is not an address that begins with http:// or https://")
    return address


def _validate_host_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", name):
        raise ValueError("is not a host name, for example compactor.example.org, without scheme and port")
    return name


def _validate_listen_address(listen: str) -> str:
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("host and port, for example 127.0.0.1:8080")
    return listen


def _validate_text_not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("it must not be empty")
    return text


def _validate_spark_properties(properties: dict[str, str | bool | int | float]) -> dict[str, str | bool | int | float]:
    for name in properties:
        if not name.startswith("spark.") or name in ("spark.master", "spark.app.name"):
            raise ValueError('properties of Spark by their whole names, {"spark.executor.cores" = 2}; its master is [spark] master')
    return properties


def _validate_encryption_key_pairs(files: dict[str, str]) -> dict[str, str]:
    for name, file in files.items():
        if not name or ":" in name or not file:
            raise ValueError('for each pair a name without a colon and the PEM file of its private key, {key1 = "/etc/keys/key1.pem"}')
    return files


class AivenSettings(SettingsSection):
    """[tier.aiven]. They must match the brokers' ``rsm.config``, so that each side can read the other's objects."""

    key_prefix: str = ""
    key_pairs: Annotated[dict[str, str], AfterValidator(_validate_encryption_key_pairs)] = {}
    active_key_pair: str = ""
    chunk_size: int = Field(4 << 20, ge=1, le=2**30 - 1)
    compression: Literal["none", "zstd", "heuristic"] = "none"
    custom_metadata_fields: tuple[Literal["REMOTE_SIZE", "OBJECT_PREFIX", "OBJECT_KEY"], ...] = Field((), strict=False)
    storage_class: Annotated[str, AfterValidator(validate_storage_class)] = ""

    @model_validator(mode="after")
    def _require_active_pair(self) -> Self:
        if self.active_key_pair and self.active_key_pair not in self.key_pairs:
            raise ValueError(f"active_key_pair is {json.dumps(self.active_key_pair)}, which is not among key_pairs")
        return self


def _validate_cluster_name(name: str) -> str:
    if name and not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError("letters, digits, '.', '_' and '-'")
    return name


def _validate_pinterest_output_url(url: str) -> str:
    """Return the URL. Raises ValueError if Pinterest's consumers (S3StorageServiceEndpoint) do not accept it."""
    url = _validate_store_url(url)
    kind = store_kind_of_scheme(url)
    if kind is not None and not kind.pinterest:
        raise ValueError("consumers of that layout cannot read there: name a directory or a bucket on S3")
    if kind is not None and kind.container and not re.fullmatch(r"[^/]+(/[A-Za-z0-9_./-]*)?", url.partition("://")[2]):
        raise ValueError("consumers of that layout know letters, digits, '.', '_', '-' and '/' in a prefix")
    return url


class PinterestSettings(SettingsSection):
    """[tier.pinterest]: for ``layout = "pinterest"``, and for the output (``target``) that its consumers read."""

    cluster: Annotated[str, AfterValidator(_validate_cluster_name)] = ""
    entropy_bits: int = Field(0, ge=0, le=128)
    target: Annotated[str, AfterValidator(_validate_pinterest_output_url)] = ""
    keep_ms: int = Field(86_400_000, ge=3_600_000, le=MAX_MS)


class TierSettings(SettingsSection):
    """[tier]: where segments and control logs are stored."""

    kind: Literal["object-log", "kafka"] = "object-log"
    url: Annotated[str, AfterValidator(_validate_store_url)] = ""
    layout: Literal["native", "kafka-local", "aiven", "pinterest"] = "native"
    key_entropy_bits: int = Field(0, ge=0, le=32)
    control_url: Annotated[str, AfterValidator(_validate_store_url)] = ""
    state_dir: Annotated[str, AfterValidator(_validate_text_not_empty)] = "/var/lib/tiered-compactor"
    on_topic_deletion: Literal["keep", "delete"] = "keep"
    deleted_topic_retention_ms: Milliseconds = 604_800_000
    aiven: AivenSettings = AivenSettings()
    pinterest: PinterestSettings = PinterestSettings()


class KafkaSettings(SettingsSection):
    """[kafka]: brokers and the topics to compact, for ``kind = "kafka"``."""

    bootstrap_servers: str = "127.0.0.1:9092"
    topics: Annotated[
        tuple[Annotated[str, AfterValidator(_validate_text_not_empty)], ...], AfterValidator(validate_regular_expressions)
    ] = Field((), strict=False)
    properties: dict[str, str | bool | int | float] = {}
    metadata_manager_class: str = ""
    allow_untested_brokers: bool = False

    @property
    def has_configured_brokers(self) -> bool:
        """Return whether the configuration sets ``bootstrap_servers`` explicitly."""
        return "bootstrap_servers" in self.model_fields_set and bool(self.bootstrap_servers.strip())


class CleanerSettings(SettingsSection):
    """[cleaner]. Names and defaults are those of Kafka's topic and broker settings if Kafka has such a setting."""

    disk_budget_bytes: ByteBudget | Literal["auto"] = 4 << 30
    map_budget_bytes: ByteBudget = 512 << 20
    map_engine: Literal["auto", "memory", "partitioned", "spark"] = "auto"
    min_cleanable_dirty_ratio: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 0.5
    delete_retention_ms: Milliseconds = 86_400_000
    min_compaction_lag_ms: Milliseconds = 0
    max_compaction_lag_ms: int = Field(MAX_MS, ge=1, le=MAX_MS)
    producer_id_expiration_ms: int = Field(86_400_000, ge=1, le=MAX_MS)
    segment_bytes: int = Field(1 << 30, ge=14, le=MAX32)
    segment_index_bytes: int = Field(10 << 20, ge=4, le=MAX32)
    index_interval_bytes: int = Field(4096, ge=0, le=MAX32)
    max_decompressed_batch_bytes: int = Field(1 << 30, ge=1, le=1 << 40)
    keyless_records: KeylessPolicy = "refuse"
    bloom: bool = True
    bloom_design_keys: int = Field(0, ge=0, le=10**10)
    bloom_false_positive_rate: float = Field(0.01, ge=1e-6, le=0.5)
    bloom_max_bytes: int = Field(0, ge=0, le=_MAX_BYTES)
    splice: bool = True
    local_log_dirs: tuple[Annotated[str, AfterValidator(_validate_text_not_empty)], ...] = Field((), strict=False)
    cleanup_policy: Literal["compact", "delete", "compact,delete"] = "compact"
    retention_ms: int = Field(-1, ge=-1, le=MAX_MS)
    retention_bytes: int = Field(-1, ge=-1, le=_MAX_BYTES)
    verify_before_publish: bool = True

    _store_costs: SegmentReplacementCosts | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _require_ordered_lags(self) -> Self:
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            raise ValueError("min_compaction_lag_ms must not be above max_compaction_lag_ms")
        return self

    @property
    def segment_replacement_costs(self) -> SegmentReplacementCosts | None:
        """Return the costs of the tier's store, for ``min_cleanable_dirty_ratio = "auto"``; None if they were not given."""
        return self._store_costs

    def with_segment_replacement_costs(self, costs: SegmentReplacementCosts) -> CleanerSettings:
        """Return a copy with the costs of the tier's store."""
        copy = self.model_copy()
        copy._store_costs = costs
        return copy

    def cleaner_policy(self) -> CleanerPolicy:
        """Return the settings that determine the bytes of a round's output."""
        return CleanerPolicy(**{name: getattr(self, name) for name in CleanerPolicy.model_fields})


_MIN_LAG, _MAX_LAG = "min_compaction_lag_ms", "max_compaction_lag_ms"
TOPIC_POLICY: Mapping[str, str] = {
    "min.cleanable.dirty.ratio": "min_cleanable_dirty_ratio",
    "delete.retention.ms": "delete_retention_ms",
    "min.compaction.lag.ms": "min_compaction_lag_ms",
    "max.compaction.lag.ms": "max_compaction_lag_ms",
    "segment.bytes": "segment_bytes",
}
"""Topic settings of Kafka that apply to the cleaning of a topic if they are set on it -> their names in [cleaner]."""


class RateLimitSettings(SettingsSection):
    """[limits]: rate limits of all threads of a process together; 0 for unlimited."""

    max_read_bytes_per_s: Rate = 0
    max_write_bytes_per_s: Rate = 0
    max_requests_per_s: Rate = 0


class PublishSettings(SettingsSection):
    """[publish]: when replaced objects are deleted, and how many metadata records compaction may write per hour."""

    grace_ms: Milliseconds = 600_000
    undo_window_ms: Milliseconds = 0
    orphan_age_ms: Milliseconds = 86_400_000
    retire: bool = True
    metadata_records_per_hour: int = Field(0, ge=0, le=10**9)


class LeaseSettings(SettingsSection):
    """[lease]: leadership of partitions."""

    ttl_ms: int = Field(30_000, ge=100, le=86_400_000)
    stall_ms: int = Field(3_600_000, ge=1_000)


_HostNames = tuple[Annotated[str, AfterValidator(_validate_host_name)], ...]


class DaemonSettings(SettingsSection):
    """[daemon]."""

    interval_ms: int = Field(15_000, ge=100, le=MAX_MS)
    listen: Annotated[str, AfterValidator(_validate_listen_address)] = "127.0.0.1:8080"
    host_names: _HostNames = Field((), strict=False)
    runbook_url: Annotated[str, AfterValidator(_validate_web_address)] = ""
    threads: int = Field(2, ge=1, le=1024)


class AgentSettings(SettingsSection):
    """[agent]."""

    listen: Annotated[str, AfterValidator(_validate_listen_address)] = "127.0.0.1:8081"
    host_names: _HostNames = Field((), strict=False)
    runbook_url: Annotated[str, AfterValidator(_validate_web_address)] = ""
    log_dirs: tuple[Annotated[str, AfterValidator(_validate_text_not_empty)], ...] = Field((), strict=False)
    topics: Annotated[
        tuple[Annotated[str, AfterValidator(_validate_text_not_empty)], ...], AfterValidator(validate_regular_expressions)
    ] = Field((), strict=False)
    interval_ms: int = Field(5_000, ge=100, le=MAX_MS)
    allow_gaps: bool = False
    accept_truncation: bool = False


def _validate_replicas(nodes: tuple[str, ...]) -> tuple[str, ...]:
    for node in nodes:
        number, _, address = node.partition("@")
        if not number.isascii() or not number.isdigit():
            raise ValueError('for each replica ID@HOST:PORT, ["0@reader-0:9192", "1@reader-1:9192"]')
        _validate_listen_address(address)
    return nodes


def _validate_optional_address(listen: str) -> str:
    return _validate_listen_address(listen) if listen else listen


class ServeSettings(SettingsSection):
    """[serve]."""

    listen: Annotated[str, AfterValidator(_validate_listen_address)] = "127.0.0.1:9192"
    pages_listen: Annotated[str, AfterValidator(_validate_listen_address)] = "127.0.0.1:8082"
    advertised: Annotated[str, AfterValidator(_validate_optional_address)] = ""
    node_id: int = Field(0, ge=0, le=MAX32)
    nodes: Annotated[tuple[str, ...], AfterValidator(_validate_replicas)] = Field((), strict=False)
    tls_certificate: str = ""
    tls_key: str = ""
    users_file: str = ""
    cache_bytes: int = Field(256 << 20, ge=1024, le=_MAX_BYTES)
    disk_cache_bytes: int = Field(0, ge=0, le=_MAX_BYTES)
    read_ahead: int = Field(3, ge=0, le=64)
    refresh_ms: int = Field(1_000, ge=10, le=MAX_MS)
    max_connections: int = Field(1_000, ge=1, le=1_000_000)
    max_request_bytes: int = Field(2 << 20, ge=1024, le=1 << 30)
    max_response_bytes: int = Field(16 << 20, ge=1024, le=1 << 30)
    max_in_flight_bytes: int = Field(256 << 20, ge=1024, le=_MAX_BYTES)
    request_timeout_ms: int = Field(30_000, ge=100, le=MAX_MS)
    idle_ms: int = Field(600_000, ge=1_000, le=MAX_MS)


class SparkSettings(SettingsSection):
    """[spark]: the `spark` map engine and the `recompact` command."""

    master: Annotated[str, AfterValidator(_validate_text_not_empty)] = "local[*]"
    above_bytes: int = Field(0, ge=0, le=_MAX_BYTES)
    idle_ms: int = Field(600_000, ge=1_000, le=MAX_MS)
    partitions: int = Field(0, ge=0, le=1_000_000)
    led_at_once: int = Field(0, ge=0, le=1024)
    large_at_once: int = Field(2, ge=1, le=64)
    properties: Annotated[dict[str, str | bool | int | float], AfterValidator(_validate_spark_properties)] = {}

    @property
    def uses_spark_cluster(self) -> bool:
        """Return whether ``spark.master`` names a Spark cluster and not this machine."""
        return not self.master.startswith("local")


class Settings(StrictFrozenModel):
    """All settings, a field per section.
    topics: by the expression of each [topics] table, the settings of matching topics: [cleaner], overridden by the table.
    """

    tier: TierSettings = TierSettings()
    outputs: OutputSettings = OutputSettings()
    s3: S3Settings = S3Settings()
    gcs: GcsSettings = GcsSettings()
    azure: AzureSettings = AzureSettings()
    hdfs: HdfsSettings = HdfsSettings()
    kafka: KafkaSettings = KafkaSettings()
    registry: RegistrySettings = RegistrySettings()
    cleaner: CleanerSettings = CleanerSettings()
    limits: RateLimitSettings = RateLimitSettings()
    publish: PublishSettings = PublishSettings()
    lease: LeaseSettings = LeaseSettings()
    daemon: DaemonSettings = DaemonSettings()
    agent: AgentSettings = AgentSettings()
    serve: ServeSettings = ServeSettings()
    spark: SparkSettings = SparkSettings()
    topics: dict[str, CleanerSettings] = {}

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def cleaner_settings_for_topic(self, topic: str, topic_settings: Mapping[str, str] | None = None) -> CleanerSettings:
        """Return the cleaner settings of a topic: [cleaner], overridden by the topic's settings in Kafka, overridden by the first [topics]
        table whose expression matches its whole name. Raises UsageError if a value is invalid.
        A minimum lag above the maximum lag, which Kafka refuses, would stop all topics of a tier here. The one that has precedence holds,
        and the other one is set to it.
        :param topic_settings: by Kafka's names.
        """
        pattern = self.matching_topic_pattern(topic)
        cleaner = self.cleaner if pattern is None else self.topics[pattern]
        message = {ours: (topic_settings or {})[theirs] for theirs, ours in TOPIC_POLICY.items() if theirs in (topic_settings or {})}
        own = {key: value for key, value in message.items() if pattern is None or key not in self.overridden_setting_names(pattern)}
        if not own:
            return cleaner
        try:
            kinds = {key: float if key == "min_cleanable_dirty_ratio" else int for key in own}
            values = {**cleaner.model_dump(), **{key: kinds[key](value) for key, value in own.items()}}
            if values[_MIN_LAG] > values[_MAX_LAG] and not {_MIN_LAG, _MAX_LAG} <= own.keys():
                of_topic, other = (_MIN_LAG, _MAX_LAG) if _MIN_LAG in own else (_MAX_LAG, _MIN_LAG)
                is_in_table = pattern is not None and other in self.overridden_setting_names(pattern)
                values |= {of_topic: values[other]} if is_in_table else {other: values[of_topic]}
            return CleanerSettings(**values)
        except ValueError as error:
            what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            hint = f"Set what shall hold under [topics.{json.dumps(re.escape(topic))}]"
            raise UsageError(f"the settings of topic {topic} and [cleaner] do not go together: {what}", hint=hint) from error

    def matching_topic_pattern(self, topic: str) -> str | None:
        """Return the first [topics] expression that matches a topic's whole name, or None."""
        return next((pattern for pattern in self.topics if re.fullmatch(pattern, topic)), None)

    def source_of_topic_setting(self, topic: str, key: str, topic_settings: Mapping[str, str]) -> str:
        """Return where a topic's setting is set: a file, an environment variable, ``topic NAME`` (on the brokers), or ``default``. For a
        lag that is set to the other lag, the name of the latter.
        """
        pattern = self.matching_topic_pattern(topic)
        if pattern is not None and key in self.overridden_setting_names(pattern):
            return f"{self.source_of_setting(topic_override_key(pattern, key))}, [topics.{json.dumps(pattern)}]"
        chosen = next((topic_settings[theirs] for theirs, ours in TOPIC_POLICY.items() if ours == key and theirs in topic_settings), None)
        if key in (_MIN_LAG, _MAX_LAG):
            stated = getattr(self.cleaner_settings_for_topic(topic), key) if chosen is None else int(chosen)
            if getattr(self.cleaner_settings_for_topic(topic, topic_settings), key) != stated:
                return _MAX_LAG if key == _MIN_LAG else _MIN_LAG
        if chosen is not None:
            return f"topic {topic}"
        return self.source_of_setting(f"cleaner.{key}")

    def settings_of_section(self, name: str) -> StrictFrozenModel:
        """Return a section by its name, such as ``tier`` or ``tier.aiven``."""
        found: StrictFrozenModel = reduce(getattr, name.split("."), self)
        return found

    def source_of_setting(self, key: str) -> str:
        """Return where a setting such as ``topics."orders-.*".bloom`` is set: a file, an environment variable, or ``default``."""
        return self._sources.get(key, "default")

    def overridden_setting_names(self, pattern: str) -> list[str]:
        """Return the names of the settings that a [topics] table sets."""
        return [name for name in CleanerSettings.model_fields if topic_override_key(pattern, name) in self._sources]

    @property
    def tier_url(self) -> str:
        """Return the tier's URL. Raises UsageError if none is set."""
        if not self.tier.url:
            raise UsageError(
                "no tier is configured",
                hint=f"Set url under [tier] in ./{DEFAULT_FILE} or {ENV_PREFIX}TIER__URL, for example {DIRECTORY.example}",
            )
        return self.tier.url


def topic_override_key(pattern: str, name: str) -> str:
    """Return the dotted name of an override in a [topics] table, such as ``topics."orders-.*".bloom``."""
    return f"topics.{json.dumps(pattern)}.{name}"


def _nested_sections(section_type: type[StrictFrozenModel], prefix: str = "") -> Iterator[tuple[str, type[SettingsSection]]]:
    for name, field in section_type.model_fields.items():
        if isinstance(field.default, SettingsSection):
            yield prefix + name, type(field.default)
            yield from _nested_sections(type(field.default), f"{prefix}{name}.")


SECTION_TYPES: dict[str, type[SettingsSection]] = dict(_nested_sections(Settings))
"""Class of each section by its name, such as ``tier`` or ``tier.aiven``."""


def setting_keys(section_type: type[StrictFrozenModel]) -> list[str]:
    """Return a section's settings, without those of its inner sections."""
    return [name for name, field in section_type.model_fields.items() if not isinstance(field.default, SettingsSection)]


def load_settings(file: str | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Load the settings from the configuration file and the environment.
    :param file: None to search the default locations.
    :param environ: None for the environment of the process.
    :raises UsageError: if anything is invalid. It names the file or variable, the key and the allowed values.
    """
    environ = os.environ if environ is None else environ
    raw = _UncheckedSettings()
    path = _find_config_file(file, environ)
    if path is not None:
        raw.add_config_file(path)
    raw.add_environment(environ)
    return raw.validate_all_sections()


def _find_config_file(file: str | None, environ: Mapping[str, str]) -> Path | None:
    named = file or environ.get(ENV_FILE)
    if named:
        return Path(named)
    return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None


_TEXTS_OF_PIPES: dict[Path, str] = {}


def _read_config_file(path: Path) -> str:
    """A pipe, as of ``--config <(...)``, can be read only once, so its text is cached for the process."""
    if path in _TEXTS_OF_PIPES:
        return _TEXTS_OF_PIPES[path]
    text = path.read_text(encoding="utf-8")
    if path.is_fifo():
        _TEXTS_OF_PIPES[path] = text
    return text


class _UncheckedSettings:
    """Settings as written in files and environment variables, each with its source, before validation."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {name: {} for name in SECTION_TYPES}
        self.topics: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, str] = {}

    def add_config_file(self, path: Path) -> None:
        try:
            document = tomllib.loads(_read_config_file(path))
        except FileNotFoundError as error:
            raise UsageError(f"there is no configuration file {path}", hint=f"See --config and ${ENV_FILE}") from error
        except OSError as error:
            raise UsageError(f"the configuration file {path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # not UTF-8, or not TOML; both tell where
            raise UsageError(f"{path} is not valid TOML: {error}") from error
        for section, table in document.items():
            if section != "topics" and section not in SECTION_TYPES:
                if isinstance(table, dict):
                    raise _unknown_section_error(f"{path}: unknown section [{section}]", section)
                raise _unknown_setting_error(f"{path}: unknown key {section}", section)
            if not isinstance(table, dict):
                raise UsageError(f"{path}: {section} is a section", hint=f"Write [{section}] and its keys below")
            if section == "topics":
                self.add_topic_overrides(table, str(path))
            else:
                self.add_section_table(section, table, path)

    def add_section_table(self, section: str, table: Mapping[str, Any], path: Path) -> None:
        inner = {f"{section}.{key}": value for key, value in table.items() if f"{section}.{key}" in SECTION_TYPES}
        self._add_section_values(
            section, {key: value for key, value in table.items() if f"{section}.{key}" not in SECTION_TYPES}, str(path)
        )
        for name, value in inner.items():
            if not isinstance(value, dict):
                raise UsageError(f"{path}: {name} is a section", hint=f"Write [{name}] and its keys below")
            self.add_section_table(name, value, path)

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Read the variables that begin with TIERED_COMPACTOR_. Raises UsageError for unknown ones."""
        for variable in sorted(name for name in environ if name.startswith(ENV_PREFIX[:-1])):
            if not variable.startswith(ENV_PREFIX):
                if variable not in _NO_SETTINGS and not _OF_KUBERNETES.search(variable):
                    hint = f"Those of settings have two underscores: {ENV_PREFIX}SECTION__KEY"
                    raise UsageError(f"unknown environment variable {variable}", hint=hint)
                continue
            section, _, key = variable.removeprefix(ENV_PREFIX).lower().partition("__")
            while f"{section}.{key.partition('__')[0]}" in SECTION_TYPES:
                inner, _, key = key.partition("__")
                section = f"{section}.{inner}"
            if section == "topics" and not key:
                table = parse_toml_value(environ[variable])
                if not isinstance(table, dict):
                    raise UsageError(f"{variable} is not a TOML table", hint='For example {"orders-.*" = {delete_retention_ms = 0}}')
                self.add_topic_overrides(table, variable)
            elif section not in SECTION_TYPES or key not in setting_keys(SECTION_TYPES[section]):
                raise _unknown_setting_error(
                    f"unknown environment variable {variable}", key or section, environment_variable_name, near_section=section
                )
            else:
                text = environ[variable]
                self._add_section_values(
                    section, {key: text if is_text_setting(SECTION_TYPES[section].model_fields[key]) else parse_toml_value(text)}, variable
                )

    def _add_section_values(self, section: str, table: Mapping[str, Any], source: str) -> None:
        for key, value in table.items():
            if key not in setting_keys(SECTION_TYPES[section]):
                raise _unknown_setting_error(f"{source}: unknown key {key} in [{section}]", key, near_section=section)
            self.values[section][key] = value
            self.sources[f"{section}.{key}"] = source

    def add_topic_overrides(self, tables: Mapping[str, Any], source: str) -> None:
        for name in [name for name in self.sources if name.startswith("topics.")]:
            del self.sources[name]
        self.topics = {}
        for pattern, table in tables.items():
            where = f"{source}: [topics.{json.dumps(pattern)}]"
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"{where} is not a regular expression: {error}") from error
            if not isinstance(table, dict):
                raise UsageError(f"{where} is not a table", hint="Write the overridden keys of [cleaner] below it")
            for key in table:
                if key not in CleanerSettings.model_fields:
                    raise _unknown_setting_error(f"{where}: unknown key {key}", key, near_section="cleaner")
                self.sources[topic_override_key(pattern, key)] = source
            self.topics[pattern] = dict(table)

    def validate_all_sections(self) -> Settings:
        sections: dict[str, Any] = {}
        for name in sorted(SECTION_TYPES, key=lambda name: -name.count(".")):
            inside = {inner.rpartition(".")[2]: section for inner, section in sections.items() if inner.rpartition(".")[0] == name}
            sections[name] = self._validate_section(name, SECTION_TYPES[name], {**self.values[name], **inside})
        sections = {name: section for name, section in sections.items() if "." not in name}
        sections["topics"] = {
            pattern: self._validate_section(f"topics.{json.dumps(pattern)}", CleanerSettings, {**self.values["cleaner"], **table})
            for pattern, table in self.topics.items()
        }
        settings = Settings(**sections)
        settings._sources.update(self.sources)
        return settings

    def _validate_section(self, section: str, section_type: type[SettingsSection], values: Mapping[str, Any]) -> SettingsSection:
        try:
            value = section_type(**values)
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:
                raise UsageError(f"[{section}]: {first['msg'].removeprefix('Value error, ')}") from error
            key = str(first["loc"][0])
            why = (
                first["msg"].removeprefix("Value error, ")
                if first["type"] == "value_error"
                else f"allowed is {describe_allowed_values(section_type, key)}"
            )
            # A table is not repeated, as librdkafka's properties hold passwords; nor is what stands before an @.
            secret = isinstance(values[key], dict) or "@" in str(values[key])
            written = "" if secret else f" = {format_toml_value(values[key])}"
            raise UsageError(f"{self._format_setting_with_source(section, key)}{written}: {why}") from error
        for dotted, built in BUILT.items():
            of, _, key = dotted.rpartition(".")
            if SECTION_TYPES[of] is section_type and getattr(value, key) not in built:
                works = " or ".join(format_toml_value(choice) for choice in built)
                what = f"{self._format_setting_with_source(section, key)} = {format_toml_value(values[key])}"
                raise UsageError(f"{what} is not built yet", hint=f"This version knows {works}")
        return value

    def _format_setting_with_source(self, section: str, key: str) -> str:
        source = self.sources.get(f"{section}.{key}") or self.sources[f"cleaner.{key}"]
        return source if source.startswith(ENV_PREFIX) and section != "topics" else f"{source}: [{section}] {key}"


def environment_variable_name(section: str, key: str) -> str:
    """Return the name of a setting's environment variable."""
    return f"{ENV_PREFIX}{section.upper().replace('.', '__')}__{key.upper()}"


def _format_setting_name(section: str, key: str) -> str:
    return f"{key} in [{section}]"


def _all_keys() -> Iterator[tuple[str, str]]:
    for section, kind in SECTION_TYPES.items():
        for key in setting_keys(kind):
            yield section, key


def _unknown_setting_error(
    message: str, name: str, format_key: Callable[[str, str], str] = _format_setting_name, near_section: str = ""
) -> UsageError:
    """The hint names the most similar setting, preferably of section ``near_section``."""
    for candidates in ([pair for pair in _all_keys() if pair[0] == near_section], list(_all_keys())):
        near = difflib.get_close_matches(name, [key for _, key in candidates], n=1)
        if near:
            section, key = next(pair for pair in candidates if pair[1] == near[0])
            return UsageError(message, hint=f"Did you mean {format_key(section, key)}?")
    near = difflib.get_close_matches(name if near_section in SECTION_TYPES else near_section or name, [*SECTION_TYPES, "topics"], n=1)
    return UsageError(message, hint=f"Did you mean [{near[0]}]?" if near else "`tiered-compactor config show` lists all keys")


def _unknown_section_error(message: str, name: str) -> UsageError:
    near = difflib.get_close_matches(name, [*SECTION_TYPES, "topics"], n=1)
    return UsageError(message, hint=f"Did you mean [{near[0]}]?") if near else _unknown_setting_error(message, name)
