"""The settings in force: one TOML file, environment variables over it, defaults below it, as frozen values.

    file         --config FILE, else $TIERED_COMPACTOR_CONFIG, else ./tiered-compactor.toml where it exists
    environment  TIERED_COMPACTOR__SECTION__KEY: text as it is, everything else as TOML writes it (``5``, ``true``, ``["/a", "/b"]``);
                 TIERED_COMPACTOR__TOPICS takes the whole table: ``{"orders-.*" = {delete_retention_ms = 0}}``

Everything that is not understood is refused (UsageError): unknown keys, with the nearest known one; values outside their range,
with the range; values that are not built yet. ``Settings.where`` tells where each value comes from.
``conf/default.toml`` says what each key is for; units stand in the names (``_ms``, ``_bytes``, ``_per_s``).
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
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from compactor.allowed import allowed, as_toml, is_text
from compactor.errors import UsageError
from compactor.model.base import Value
from compactor.model.policy import MAX32, CleanerPolicy

ENV_PREFIX = "TIERED_COMPACTOR__"
ENV_FILE = "TIERED_COMPACTOR_CONFIG"
_ENV_BEGINNING = "TIERED_COMPACTOR_"
_NO_SETTINGS = (ENV_FILE, "TIERED_COMPACTOR_DEBUG")
_OF_KUBERNETES = re.compile(r"_(SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
"""What it says to every neighbour of a service whose name begins like ours, as TIERED_COMPACTOR_AGENT_SERVICE_HOST."""
DEFAULT_FILE = "tiered-compactor.toml"

BUILT: dict[str, tuple[object, ...]] = {}
"""Keys of which only some values work so far. The others are refused, not ignored; delete a row when all of its values work."""

_MAX_MS = 2**63 - 1
_MAX_BYTES = 2**60

Milliseconds = Annotated[int, Field(ge=0, le=_MAX_MS)]
Budget = Annotated[int, Field(ge=4096, le=_MAX_BYTES)]
Rate = Annotated[int, Field(ge=0, le=_MAX_BYTES)]


def _store_url(url: str) -> str:
    if url and not re.match(r"file://(localhost)?/.|s3://[^/]", url):
        raise ValueError("write file:///var/lib/tier (three slashes, the full path) or s3://bucket/prefix")
    return _without_credentials(url) if url.startswith("s3:") else url


def _endpoint(url: str) -> str:
    if url and not re.match(r"https?://[^/]", url):
        raise ValueError("write http:// or https://, host and port, for example http://127.0.0.1:9000")
    return _without_credentials(url)


def _without_credentials(url: str) -> str:
    """What stands in a URL is shown, in messages and by `config show`."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ValueError("no user and no password here: credentials come from the usual AWS chain")
    return url


def _host_and_port(listen: str) -> str:
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("host and port, for example 127.0.0.1:8080")
    return listen


def _expressions(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{json.dumps(pattern)} is not a regular expression: {error}") from error
    return patterns


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("it must not be empty")
    return text


class _Section(Value):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def _of_spark(properties: dict[str, str | bool | int | float]) -> dict[str, str | bool | int | float]:
    for name in properties:
        if not name.startswith("spark.") or name in ("spark.master", "spark.app.name"):
            raise ValueError('properties of Spark by their whole names, {"spark.executor.cores" = 2}; its master is [spark] master')
    return properties


def _key_pairs(files: dict[str, str]) -> dict[str, str]:
    for name, file in files.items():
        if not name or ":" in name or not file:
            raise ValueError('for each pair a name without a colon and the PEM file of its private key, {key1 = "/etc/keys/key1.pem"}')
    return files


def _storage_class(name: str) -> str:
    if name in ("GLACIER", "DEEP_ARCHIVE"):
        raise ValueError("brokers could not read what lies there without being restored first")
    return name


class Aiven(_Section):
    """For ``layout = "aiven"``: as the brokers' ``rsm.config`` has it, so that both read what the other wrote."""

    key_prefix: str = ""
    key_pairs: Annotated[dict[str, str], AfterValidator(_key_pairs)] = {}
    active_key_pair: str = ""
    chunk_size: int = Field(4 << 20, ge=1, le=2**30 - 1)
    compression: Literal["none", "zstd", "heuristic"] = "none"
    custom_metadata_fields: tuple[Literal["REMOTE_SIZE", "OBJECT_PREFIX", "OBJECT_KEY"], ...] = Field((), strict=False)
    storage_class: Annotated[str, AfterValidator(_storage_class)] = ""

    @model_validator(mode="after")
    def _active_key_is_there(self) -> Self:
        if self.active_key_pair and self.active_key_pair not in self.key_pairs:
            raise ValueError(f"active_key_pair is {json.dumps(self.active_key_pair)}, which is not among key_pairs")
        return self


def _cluster(name: str) -> str:
    if name and not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError("letters, digits, '.', '_' and '-'")
    return name


def _read_by_them(url: str) -> str:
    """S3StorageServiceEndpoint takes no other prefix."""
    url = _store_url(url)
    if url.startswith("s3:") and not re.fullmatch(r"s3://[^/]+(/[A-Za-z0-9_./-]*)?", url):
        raise ValueError("consumers of that layout know letters, digits, '.', '_', '-' and '/' in a prefix")
    return url


class Pinterest(_Section):
    """For ``layout = "pinterest"``, and for the generations that consumers of that layout read of a tier of our own (``target``)."""

    cluster: Annotated[str, AfterValidator(_cluster)] = ""
    entropy_bits: int = Field(0, ge=0, le=128)
    target: Annotated[str, AfterValidator(_read_by_them)] = ""
    keep_ms: int = Field(86_400_000, ge=3_600_000, le=_MAX_MS)


class TierSettings(_Section):
    """Where the segments lie."""

    kind: Literal["object-log", "kafka"] = "object-log"
    url: Annotated[str, AfterValidator(_store_url)] = ""
    layout: Literal["native", "kafka-local", "aiven", "pinterest"] = "native"
    control_url: Annotated[str, AfterValidator(_store_url)] = ""
    state_dir: Annotated[str, AfterValidator(_not_empty)] = "/var/lib/tiered-compactor"
    aiven: Aiven = Aiven()
    pinterest: Pinterest = Pinterest()


class S3(_Section):
    """Credentials come from the usual AWS chain (environment, ~/.aws, instance role) and never stand here."""

    endpoint_url: Annotated[str, AfterValidator(_endpoint)] = ""
    region: str = ""
    first_answer_ms: Milliseconds = 60_000


class Kafka(_Section):
    """For ``kind = "kafka"``."""

    bootstrap_servers: str = "127.0.0.1:9092"
    topics: Annotated[tuple[Annotated[str, AfterValidator(_not_empty)], ...], AfterValidator(_expressions)] = Field((), strict=False)
    properties: dict[str, str | bool | int | float] = {}


class Cleaner(_Section):
    """How partitions are cleaned. Names and defaults are those of Kafka's topic and broker settings where Kafka has them."""

    disk_budget_bytes: Budget | Literal["auto"] = 4 << 30
    map_budget_bytes: Budget = 512 << 20
    map_engine: Literal["auto", "memory", "partitioned", "spark"] = "auto"
    min_cleanable_dirty_ratio: float = Field(0.5, ge=0, le=1)
    delete_retention_ms: Milliseconds = 86_400_000
    min_compaction_lag_ms: Milliseconds = 0
    max_compaction_lag_ms: int = Field(_MAX_MS, ge=1, le=_MAX_MS)
    producer_id_expiration_ms: int = Field(86_400_000, ge=1, le=_MAX_MS)
    segment_bytes: int = Field(1 << 30, ge=14, le=MAX32)
    segment_index_bytes: int = Field(10 << 20, ge=4, le=MAX32)
    index_interval_bytes: int = Field(4096, ge=0, le=MAX32)
    max_decompressed_batch_bytes: int = Field(1 << 30, ge=1, le=1 << 40)
    bloom: bool = True
    bloom_design_keys: int = Field(0, ge=0, le=10**10)
    splice: bool = True
    local_log_dirs: tuple[Annotated[str, AfterValidator(_not_empty)], ...] = Field((), strict=False)
    verify_before_publish: bool = True

    @model_validator(mode="after")
    def _lags_in_order(self) -> Self:
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            raise ValueError("min_compaction_lag_ms must not be above max_compaction_lag_ms")
        return self

    def policy(self) -> CleanerPolicy:
        """The part that decides the bytes of a round."""
        return CleanerPolicy(**{name: getattr(self, name) for name in CleanerPolicy.model_fields})


TOPIC_POLICY: Mapping[str, str] = {
    "min.cleanable.dirty.ratio": "min_cleanable_dirty_ratio",
    "delete.retention.ms": "delete_retention_ms",
    "min.compaction.lag.ms": "min_compaction_lag_ms",
    "max.compaction.lag.ms": "max_compaction_lag_ms",
    "segment.bytes": "segment_bytes",
}
"""Settings of a topic that are taken as policy where they are set on it: Kafka's name -> ours in [cleaner]."""


class Limits(_Section):
    """Together for all threads of this process; 0 = none."""

    max_read_bytes_per_s: Rate = 0
    max_write_bytes_per_s: Rate = 0
    max_requests_per_s: Rate = 0


class Publish(_Section):
    """What happens to replaced objects, and how much readers are told of at once."""

    grace_ms: Milliseconds = 600_000
    undo_window_ms: Milliseconds = 0
    orphan_age_ms: Milliseconds = 86_400_000
    metadata_records_per_hour: int = Field(0, ge=0, le=10**9)


class LeaseSettings(_Section):
    """Leadership of a partition."""

    ttl_ms: int = Field(30_000, ge=100, le=86_400_000)
    stall_ms: int = Field(3_600_000, ge=1_000)


class DaemonSettings(_Section):
    """The `daemon` command."""

    interval_ms: int = Field(15_000, ge=100, le=_MAX_MS)
    listen: Annotated[str, AfterValidator(_host_and_port)] = "127.0.0.1:8080"
    threads: int = Field(2, ge=1, le=1024)


class AgentSettings(_Section):
    """The `agent` command."""

    listen: Annotated[str, AfterValidator(_host_and_port)] = "127.0.0.1:8081"
    log_dirs: tuple[Annotated[str, AfterValidator(_not_empty)], ...] = Field((), strict=False)
    topics: Annotated[tuple[Annotated[str, AfterValidator(_not_empty)], ...], AfterValidator(_expressions)] = Field((), strict=False)
    interval_ms: int = Field(5_000, ge=100, le=_MAX_MS)
    allow_gaps: bool = False
    accept_truncation: bool = False


class Spark(_Section):
    """The `spark` map engine and the `recompact` command."""

    master: Annotated[str, AfterValidator(_not_empty)] = "local[*]"
    partitions: int = Field(0, ge=0, le=1_000_000)
    led_at_once: int = Field(0, ge=0, le=1024)
    large_at_once: int = Field(2, ge=1, le=64)
    properties: Annotated[dict[str, str | bool | int | float], AfterValidator(_of_spark)] = {}


class Settings(Value):
    """Everything that can be set. ``topics`` maps a regular expression to [cleaner] with that table's overrides applied."""

    tier: TierSettings = TierSettings()
    s3: S3 = S3()
    kafka: Kafka = Kafka()
    cleaner: Cleaner = Cleaner()
    limits: Limits = Limits()
    publish: Publish = Publish()
    lease: LeaseSettings = LeaseSettings()
    daemon: DaemonSettings = DaemonSettings()
    agent: AgentSettings = AgentSettings()
    spark: Spark = Spark()
    topics: dict[str, Cleaner] = {}

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def cleaner_for(self, topic: str, chosen: Mapping[str, str] | None = None) -> Cleaner:
        """[cleaner] as it holds for a topic: with the overrides of the first [topics] table whose expression matches its whole name.

        ``chosen``: what is set on the topic itself, by Kafka's names; it goes before [cleaner], and [topics] before it. Raises UsageError
        where they do not go together.
        """
        pattern = self.pattern_for(topic)
        cleaner = self.cleaner if pattern is None else self.topics[pattern]
        said = {ours: (chosen or {})[theirs] for theirs, ours in TOPIC_POLICY.items() if theirs in (chosen or {})}
        own = {key: value for key, value in said.items() if pattern is None or key not in self.overridden(pattern)}
        if not own:
            return cleaner
        try:
            kinds = {key: float if key == "min_cleanable_dirty_ratio" else int for key in own}
            return Cleaner(**{**cleaner.model_dump(), **{key: kinds[key](value) for key, value in own.items()}})
        except ValueError as error:
            what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            hint = f"Set what shall hold under [topics.{json.dumps(re.escape(topic))}]"
            raise UsageError(f"the settings of topic {topic} and [cleaner] do not go together: {what}", hint=hint) from error

    def pattern_for(self, topic: str) -> str | None:
        """The first [topics] expression that matches a topic's whole name."""
        return next((pattern for pattern in self.topics if re.fullmatch(pattern, topic)), None)

    def source_for(self, topic: str, key: str, chosen: Mapping[str, str]) -> str:
        """Where a key of ``cleaner_for`` comes from: as ``where``, or ``topic NAME``."""
        pattern = self.pattern_for(topic)
        if pattern is not None and key in self.overridden(pattern):
            return f"{self.where(topic_key(pattern, key))}, [topics.{json.dumps(pattern)}]"
        if any(ours == key and theirs in chosen for theirs, ours in TOPIC_POLICY.items()):
            return f"topic {topic}"
        return self.where(f"cleaner.{key}")

    def section(self, name: str) -> Value:
        """One of SECTIONS: ``tier``, ``tier.aiven``."""
        found: Value = reduce(getattr, name.split("."), self)
        return found

    def where(self, key: str) -> str:
        """Where the value of ``tier.url`` or ``topics."orders-.*".bloom`` comes from: a file, an environment variable, ``default``."""
        return self._sources.get(key, "default")

    def overridden(self, pattern: str) -> list[str]:
        """The keys that this [topics] table sets."""
        return [name for name in Cleaner.model_fields if topic_key(pattern, name) in self._sources]

    @property
    def tier_url(self) -> str:
        """The tier's URL. Raises UsageError where none is set."""
        if not self.tier.url:
            raise UsageError(
                "no tier is configured",
                hint=f"Set url under [tier] in ./{DEFAULT_FILE} or {ENV_PREFIX}TIER__URL, for example file:///var/lib/tier",
            )
        return self.tier.url

    @property
    def control_url(self) -> str:
        """Where control logs, sidecars and scratch live. Raises UsageError where no tier is set.

        Empty for a tier that brokers write where no place was named: nothing of this program's own may lie among their objects; and for
        one of Pinterest's layout, which is only read.
        """
        root = self.tier_url
        if self.tier.layout == "pinterest":
            return ""
        if self.tier.kind == "object-log":
            return self.tier.control_url or root.rstrip("/") + "/.tiered-compactor/"
        data = root.rstrip("/") + "/" + self.tier.aiven.key_prefix * (self.tier.layout == "aiven")
        if (self.tier.control_url.rstrip("/") + "/").startswith(data):
            raise UsageError(
                f"control_url under [tier] lies within {data}, where brokers keep their segments",
                hint="Name another bucket or prefix, or another directory",
            )
        return self.tier.control_url


def topic_key(pattern: str, name: str) -> str:
    """The dotted name of an override, as ``Settings.where`` takes it."""
    return f"topics.{json.dumps(pattern)}.{name}"


def _sections(kind: type[Value], prefix: str = "") -> Iterator[tuple[str, type[_Section]]]:
    for name, field in kind.model_fields.items():
        if isinstance(field.default, _Section):
            yield prefix + name, type(field.default)
            yield from _sections(type(field.default), f"{prefix}{name}.")


SECTIONS: dict[str, type[_Section]] = dict(_sections(Settings))
"""By name: ``tier``, ``tier.aiven``."""


def keys_of(kind: type[Value]) -> list[str]:
    """What can be set in a section, those inside it apart."""
    return [name for name, field in kind.model_fields.items() if not isinstance(field.default, _Section)]


def load(file: str | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force. ``file`` is what ``--config`` says. Raises UsageError that names file or variable, key and what is allowed."""
    environ = os.environ if environ is None else environ
    raw = _Raw()
    path = _find_file(file, environ)
    if path is not None:
        raw.read_file(path)
    raw.read_environment(environ)
    return raw.settings()


def _find_file(file: str | None, environ: Mapping[str, str]) -> Path | None:
    named = file or environ.get(ENV_FILE)
    if named:
        return Path(named)
    return Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None


class _Raw:
    """Values as they were written, each with its source, before they are checked."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        self.topics: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, str] = {}

    def read_file(self, path: Path) -> None:
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UsageError(f"there is no configuration file {path}", hint=f"See --config and ${ENV_FILE}") from error
        except OSError as error:
            raise UsageError(f"the configuration file {path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # not UTF-8, or not TOML; both tell where
            raise UsageError(f"{path} is not valid TOML: {error}") from error
        for section, table in document.items():
            if section != "topics" and section not in SECTIONS:
                if isinstance(table, dict):
                    raise _unknown_section(f"{path}: unknown section [{section}]", section)
                raise _unknown(f"{path}: unknown key {section}", section)
            if not isinstance(table, dict):
                raise UsageError(f"{path}: {section} is a section", hint=f"Write [{section}] and its keys below")
            if section == "topics":
                self.add_topics(table, str(path))
            else:
                self.read_section(section, table, path)

    def read_section(self, section: str, table: Mapping[str, Any], path: Path) -> None:
        inner = {f"{section}.{key}": value for key, value in table.items() if f"{section}.{key}" in SECTIONS}
        self.add(section, {key: value for key, value in table.items() if f"{section}.{key}" not in SECTIONS}, str(path))
        for name, value in inner.items():
            if not isinstance(value, dict):
                raise UsageError(f"{path}: {name} is a section", hint=f"Write [{name}] and its keys below")
            self.read_section(name, value, path)

    def read_environment(self, environ: Mapping[str, str]) -> None:
        for variable in sorted(name for name in environ if name.startswith(_ENV_BEGINNING)):
            if not variable.startswith(ENV_PREFIX):
                if variable not in _NO_SETTINGS and not _OF_KUBERNETES.search(variable):
                    hint = f"Those of settings have two underscores: {ENV_PREFIX}SECTION__KEY"
                    raise UsageError(f"unknown environment variable {variable}", hint=hint)
                continue
            section, _, key = variable.removeprefix(ENV_PREFIX).lower().partition("__")
            while f"{section}.{key.partition('__')[0]}" in SECTIONS:
                inner, _, key = key.partition("__")
                section = f"{section}.{inner}"
            if section == "topics" and not key:
                table = _toml_value(environ[variable])
                if not isinstance(table, dict):
                    raise UsageError(f"{variable} is not a TOML table", hint='For example {"orders-.*" = {delete_retention_ms = 0}}')
                self.add_topics(table, variable)
            elif section not in SECTIONS or key not in keys_of(SECTIONS[section]):
                raise _unknown(f"unknown environment variable {variable}", key or section, env_name, within=section)
            else:
                text = environ[variable]
                self.add(section, {key: text if is_text(SECTIONS[section].model_fields[key]) else _toml_value(text)}, variable)

    def add(self, section: str, table: Mapping[str, Any], source: str) -> None:
        for key, value in table.items():
            if key not in keys_of(SECTIONS[section]):
                raise _unknown(f"{source}: unknown key {key} in [{section}]", key, within=section)
            self.values[section][key] = value
            self.sources[f"{section}.{key}"] = source

    def add_topics(self, tables: Mapping[str, Any], source: str) -> None:
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
                if key not in Cleaner.model_fields:
                    raise _unknown(f"{where}: unknown key {key}", key, within="cleaner")
                self.sources[topic_key(pattern, key)] = source
            self.topics[pattern] = dict(table)

    def settings(self) -> Settings:
        sections: dict[str, Any] = {}
        for name in sorted(SECTIONS, key=lambda name: -name.count(".")):
            inside = {inner.rpartition(".")[2]: section for inner, section in sections.items() if inner.rpartition(".")[0] == name}
            sections[name] = self.checked(name, SECTIONS[name], {**self.values[name], **inside})
        sections = {name: section for name, section in sections.items() if "." not in name}
        sections["topics"] = {
            pattern: self.checked(f"topics.{json.dumps(pattern)}", Cleaner, {**self.values["cleaner"], **table})
            for pattern, table in self.topics.items()
        }
        settings = Settings(**sections)
        settings._sources.update(self.sources)
        return settings

    def checked(self, section: str, kind: type[_Section], values: Mapping[str, Any]) -> _Section:
        try:
            value = kind(**values)
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:
                raise UsageError(f"[{section}]: {first['msg'].removeprefix('Value error, ')}") from error
            key = str(first["loc"][0])
            why = first["msg"].removeprefix("Value error, ") if first["type"] == "value_error" else f"allowed is {allowed(kind, key)}"
            # A table is not repeated, as librdkafka's properties hold passwords; nor is what stands before an @.
            secret = isinstance(values[key], dict) or "@" in str(values[key])
            written = "" if secret else f" = {as_toml(values[key])}"
            raise UsageError(f"{self.named(section, key)}{written}: {why}") from error
        for dotted, built in BUILT.items():
            of, _, key = dotted.rpartition(".")
            if SECTIONS[of] is kind and getattr(value, key) not in built:
                works = " or ".join(as_toml(choice) for choice in built)
                what = f"{self.named(section, key)} = {as_toml(values[key])}"
                raise UsageError(f"{what} is not built yet", hint=f"This version knows {works}")
        return value

    def named(self, section: str, key: str) -> str:
        source = self.sources.get(f"{section}.{key}") or self.sources[f"cleaner.{key}"]
        return source if source.startswith(ENV_PREFIX) and section != "topics" else f"{source}: [{section}] {key}"


def env_name(section: str, key: str) -> str:
    """The environment variable of a setting."""
    return f"{ENV_PREFIX}{section.upper().replace('.', '__')}__{key.upper()}"


def _dotted(section: str, key: str) -> str:
    return f"{key} in [{section}]"


def _keys() -> Iterator[tuple[str, str]]:
    for section, kind in SECTIONS.items():
        for key in keys_of(kind):
            yield section, key


def _unknown(what: str, name: str, spell: Callable[[str, str], str] = _dotted, within: str = "") -> UsageError:
    """Names the nearest known key: of the same section first, then of any, then the nearest section."""
    for candidates in ([pair for pair in _keys() if pair[0] == within], list(_keys())):
        near = difflib.get_close_matches(name, [key for _, key in candidates], n=1)
        if near:
            section, key = next(pair for pair in candidates if pair[1] == near[0])
            return UsageError(what, hint=f"Did you mean {spell(section, key)}?")
    near = difflib.get_close_matches(name if within in SECTIONS else within or name, [*SECTIONS, "topics"], n=1)
    return UsageError(what, hint=f"Did you mean [{near[0]}]?" if near else "`tiered-compactor config show` lists all keys")


def _unknown_section(what: str, name: str) -> UsageError:
    near = difflib.get_close_matches(name, [*SECTIONS, "topics"], n=1)
    return UsageError(what, hint=f"Did you mean [{near[0]}]?") if near else _unknown(what, name)


def _toml_value(text: str) -> object:
    """What TOML reads there; the text itself where it reads nothing, so that the range check can name the allowed values."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text
