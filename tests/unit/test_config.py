"""Settings: where values come from, and what is refused with which words."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from compactor.config import settings as config
from compactor.config.settings import Settings, load_settings
from compactor.errors import UsageError
from compactor.model.plan import CleanerPolicy
from compactor.tier.kinds import control_url


def loaded(tmp_path: Path, text: str = "", environ: Mapping[str, str] | None = None) -> Settings:
    file = tmp_path / "some where.toml"
    file.write_text(text, encoding="utf-8")
    return load_settings(str(file), environ or {})


def refusal(tmp_path: Path, text: str = "", environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as refused:
        loaded(tmp_path, text, environ)
    return str(refused.value).replace(str(tmp_path / "some where.toml"), "FILE")


def test_defaults_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None, {})
    assert settings == Settings()
    assert settings.source_of_setting("tier.url") == "default"


def test_the_file_is_named_by_option_then_variable_then_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("option", "variable", "tiered-compactor"):
        (tmp_path / f"{name}.toml").write_text(f'[s3]\nregion = "{name}"\n')
    monkeypatch.chdir(tmp_path)
    named = {"TIERED_COMPACTOR_CONFIG": str(tmp_path / "variable.toml")}
    assert load_settings(str(tmp_path / "option.toml"), named).s3.region == "option"
    assert load_settings(None, named).s3.region == "variable"
    assert load_settings(None, {}).s3.region == "tiered-compactor"


def test_environment_before_file_before_default(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        "[publish]\ngrace_ms = 1\nundo_window_ms = 2\n",
        {"TIERED_COMPACTOR__PUBLISH__GRACE_MS": "3", "OTHER__PUBLISH__UNDO_WINDOW_MS": "4"},
    )
    assert (settings.publish.grace_ms, settings.publish.undo_window_ms, settings.publish.orphan_age_ms) == (3, 2, 86_400_000)
    assert settings.source_of_setting("publish.grace_ms") == "TIERED_COMPACTOR__PUBLISH__GRACE_MS"
    assert settings.source_of_setting("publish.undo_window_ms") == str(tmp_path / "some where.toml")
    assert settings.source_of_setting("publish.orphan_age_ms") == "default"


def test_every_key_is_an_environment_variable(tmp_path: Path) -> None:
    values = {
        "tier.kind": "kafka",
        "tier.layout": "aiven",
        "tier.url": "file:///a b",
        "tier.control_url": "s3://bucket",
        "tier.pinterest.entropy_bits": "7",
        "tier.key_entropy_bits": "7",
        "tier.pinterest.target": "s3://bucket/compacted",
        "tier.pinterest.keep_ms": "3600001",
        "tier.aiven.key_pairs": '{key1 = "/etc/keys/key1.pem"}',
        "tier.aiven.compression": "zstd",
        "tier.aiven.custom_metadata_fields": '["OBJECT_KEY"]',
        "s3.endpoint_url": "https://[::1]:9000",
        "registry.url": "http://[::1]:8081",
        "daemon.runbook_url": "https://[::1]/docs",
        "agent.runbook_url": "https://[::1]/docs",
        "serve.advertised": "reader-0:9192",
        "serve.nodes": '["0@reader-0:9192"]',
        "gcs.endpoint_url": "http://[::1]:4443",
        "azure.endpoint_url": "http://[::1]:10000/account",
        "hdfs.webhdfs_url": "http://[::1]:9870",
        "hdfs.kerberos": "true",
        "kafka.topics": '["orders"]',
        "kafka.properties": '{"security.protocol" = "SSL"}',
        "kafka.allow_untested_brokers": "true",
        "cleaner.min_cleanable_dirty_ratio": "0.25",
        "cleaner.max_compaction_lag_ms": "5",
        "cleaner.keyless_records": "keep",
        "tier.on_topic_deletion": "delete",
        "publish.retire": "false",
        "cleaner.bloom": "false",
        "cleaner.bloom_false_positive_rate": "0.02",
        "cleaner.splice": "false",
        "cleaner.verify_before_publish": "false",
        "cleaner.map_engine": "memory",
        "cleaner.cleanup_policy": "compact,delete",
        "cleaner.local_log_dirs": '["/var/kafka"]',
        "daemon.listen": "[::1]:0",
        "serve.listen": "[::1]:0",
        "serve.read_ahead": "7",
        "serve.pages_listen": "[::1]:0",
        "daemon.threads": "7",
        "agent.listen": "[::1]:0",
        "daemon.host_names": '["daemon"]',
        "agent.host_names": '["agent"]',
        "agent.log_dirs": '["/var/kafka"]',
        "agent.topics": '["orders"]',
        "agent.allow_gaps": "true",
        "agent.accept_truncation": "true",
        "outputs.iceberg.table": "a.b",
        "outputs.iceberg.catalog": '{type = "rest"}',
        "outputs.iceberg.keep_ms": "70000",
        "outputs.iceberg.topics": '{"orders-.*" = {catalog = {type = "rest"}}}',
        "spark.led_at_once": "7",
        "spark.large_at_once": "7",
        "spark.properties": '{"spark.ui.enabled" = false}',
    }
    pairs = {"TIERED_COMPACTOR__TIER__AIVEN__KEY_PAIRS": '{4097 = "/etc/keys/key1.pem"}'}
    only_defaults_are_built = {key for key, built in config.BUILT.items() if len(built) == 1}
    for section, kind in config.SECTION_TYPES.items():
        for key in config.setting_keys(kind):
            dotted, variable = f"{section}.{key}", config.environment_variable_name(section, key)
            if dotted in only_defaults_are_built:
                continue
            others = pairs if key == "active_key_pair" else {}
            settings = loaded(tmp_path, "", {**others, variable: values.get(dotted, "4097")})
            assert getattr(settings.settings_of_section(section), key) != getattr(kind(), key), dotted
            assert settings.source_of_setting(dotted) == variable


def test_values_of_the_environment_are_read_as_toml_unless_they_are_text(tmp_path: Path) -> None:
    environ = {
        "TIERED_COMPACTOR__KAFKA__PROPERTIES": '{"security.protocol" = "SSL", retries = 3, x = true}',
        "TIERED_COMPACTOR__CLEANER__DISK_BUDGET_BYTES": "auto",
        "TIERED_COMPACTOR__CLEANER__MIN_CLEANABLE_DIRTY_RATIO": "1",
        "TIERED_COMPACTOR__S3__REGION": "0x10",
        "TIERED_COMPACTOR__TOPICS": '{"a|b" = {bloom = false}}',
    }
    settings = loaded(tmp_path, "", environ)
    assert settings.kafka.properties == {"security.protocol": "SSL", "retries": 3, "x": True}
    assert settings.cleaner.disk_budget_bytes == "auto"
    assert settings.cleaner.min_cleanable_dirty_ratio == 1.0
    assert settings.s3.region == "0x10"
    assert not settings.cleaner_settings_for_topic("b").bloom


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[teir]\nurl = 'x'", "FILE: unknown section [teir]. Did you mean [tier]?"),
        ("[clean]\nx = 1", "FILE: unknown section [clean]. Did you mean [cleaner]?"),
        ("[cleaner]\ndisk_budget = 1", "FILE: unknown key disk_budget in [cleaner]. Did you mean disk_budget_bytes in [cleaner]?"),
        ("[tier]\ngrace_ms = 1", "FILE: unknown key grace_ms in [tier]. Did you mean grace_ms in [publish]?"),
        ("grace_ms = 1", "FILE: unknown key grace_ms. Did you mean grace_ms in [publish]?"),
        ("[tier]\nzzzzzzzzz = 1", "FILE: unknown key zzzzzzzzz in [tier]. `tiered-compactor config show` lists all keys"),
        ("[tier.aiven]\nx = 1", "FILE: unknown key x in [tier.aiven]. `tiered-compactor config show` lists all keys"),
        ("[tier]\naiven = 5", "FILE: tier.aiven is a section. Write [tier.aiven] and its keys below"),
        (
            '[tier.aiven]\nkey_pairs = {a = "/a.pem"}\nactive_key_pair = "b"',
            '[tier.aiven]: active_key_pair is "b", which is not among key_pairs',
        ),
        (
            '[tier.aiven]\nstorage_class = "GLACIER"',
            'FILE: [tier.aiven] storage_class = "GLACIER": objects of that class must be restored before they can be read',
        ),
        ("[tier.aiven]\nchunk_size = 0", "FILE: [tier.aiven] chunk_size = 0: allowed is a whole number from 1 to 1073741823"),
        (
            '[tier.aiven]\ncustom_metadata_fields = ["SIZE"]',
            'FILE: [tier.aiven] custom_metadata_fields = ["SIZE"]: allowed is a list of "REMOTE_SIZE" or "OBJECT_PREFIX" or "OBJECT_KEY"',
        ),
        (
            '[tier.aiven]\nkey_pairs = {"a:b" = "/a.pem"}',
            (
                "FILE: [tier.aiven] key_pairs: for each pair a name without a colon and the PEM file of its private key, "
                '{key1 = "/etc/keys/key1.pem"}'
            ),
        ),
        ("tier = 5", "FILE: tier is a section. Write [tier] and its keys below"),
        ("topics = 5", "FILE: topics is a section. Write [topics] and its keys below"),
        ('[topics."a"]\nblom = true', 'FILE: [topics."a"]: unknown key blom. Did you mean bloom in [cleaner]?'),
        (
            '[topics."a("]\nbloom = true',
            'FILE: [topics."a("] is not a regular expression: missing ), unterminated subpattern at position 1',
        ),
        ("[topics]\na = 1", 'FILE: [topics."a"] is not a table. Write the overridden keys of [cleaner] below it'),
        ("[tier\n", "FILE is not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 6)"),
        ("[tier]\nkind = 5", 'FILE: [tier] kind = 5: allowed is "object-log" or "kafka"'),
        ("[tier]\nurl = 5", "FILE: [tier] url = 5: allowed is a text in quotes"),
        (
            '[tier]\nurl = "/var/lib/tier"',
            (
                'FILE: [tier] url = "/var/lib/tier": write file:///var/lib/tier'
                " (three slashes, the full path), s3://bucket/prefix, gs://bucket/prefix,"
                " az://account/container/prefix or hdfs://namenode/path"
            ),
        ),
        (
            '[tier]\nurl = "s3://key:secret@bucket/x"',
            "FILE: [tier] url: no user and no password here: credentials come from the store's usual chain",
        ),
        (
            '[s3]\nendpoint_url = "http://key:secret@127.0.0.1:9000"',
            "FILE: [s3] endpoint_url: no user and no password here: credentials come from the store's usual chain",
        ),
        (
            '[s3]\nendpoint_url = "127.0.0.1:9000"',
            'FILE: [s3] endpoint_url = "127.0.0.1:9000": write http:// or https://, host and port, for example http://127.0.0.1:9000',
        ),
        ('[tier]\nstate_dir = " "', 'FILE: [tier] state_dir = " ": it must not be empty'),
        (
            "[cleaner]\ndisk_budget_bytes = -1",
            (
                'FILE: [cleaner] disk_budget_bytes = -1: allowed is a whole number from 4096 to 1152921504606846976 or "auto" '
                'or a text such as "64 MiB"'
            ),
        ),
        (
            '[cleaner]\ndisk_budget_bytes = "all"',
            (
                'FILE: [cleaner] disk_budget_bytes = "all": allowed is a whole number from 4096 to 1152921504606846976 or "auto" '
                'or a text such as "64 MiB"'
            ),
        ),
        (
            "[cleaner]\nmap_budget_bytes = 1e30",
            (
                "FILE: [cleaner] map_budget_bytes = 1e+30: allowed is a whole number from 4096 to 1152921504606846976 "
                'or a text such as "64 MiB"'
            ),
        ),
        (
            "[cleaner]\nmin_cleanable_dirty_ratio = nan",
            'FILE: [cleaner] min_cleanable_dirty_ratio = NaN: allowed is a number from 0 to 1 or "auto"',
        ),
        ("[cleaner]\nbloom = 1", "FILE: [cleaner] bloom = 1: allowed is true or false"),
        ("[cleaner]\nlocal_log_dirs = 1", "FILE: [cleaner] local_log_dirs = 1: allowed is a list of texts"),
        (
            "[cleaner]\nmin_compaction_lag_ms = 2\nmax_compaction_lag_ms = 1",
            "[cleaner]: min_compaction_lag_ms must not be above max_compaction_lag_ms",
        ),
        (
            '[topics."a"]\nsegment_bytes = 1',
            'FILE: [topics."a"] segment_bytes = 1: allowed is a whole number from 14 to 2147483647 or a text such as "64 MiB"',
        ),
        ('[daemon]\nlisten = "8080"', 'FILE: [daemon] listen = "8080": host and port, for example 127.0.0.1:8080'),
        ("[kafka]\nproperties = {a = [1]}", "FILE: [kafka] properties: allowed is a table of texts, numbers and booleans"),
        (
            '[kafka]\ntopics = ["("]',
            'FILE: [kafka] topics = ["("]: "(" is not a regular expression: missing ), unterminated subpattern at position 0',
        ),
    ],
)
def test_what_a_file_must_not_say(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text) == message


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TIERED_COMPACTOR__CLEANR__BLOOM", "true", "unknown environment variable {}. Did you mean TIERED_COMPACTOR__CLEANER__BLOOM?"),
        ("TIERED_COMPACTOR__TIER__URI", "x", "unknown environment variable {}. Did you mean TIERED_COMPACTOR__TIER__URL?"),
        (
            "TIERED_COMPACTOR_TIER_URL",
            "x",
            "unknown environment variable {}. Those of settings have two underscores: TIERED_COMPACTOR__SECTION__KEY",
        ),
        (
            "TIERED_COMPACTOR_CLEANR__BLOOM",
            "true",
            "unknown environment variable {}. Those of settings have two underscores: TIERED_COMPACTOR__SECTION__KEY",
        ),
        ("TIERED_COMPACTOR__TIERS", "x", "unknown environment variable {}. Did you mean [tier]?"),
        ("TIERED_COMPACTOR__TOPICS", "5", '{} is not a TOML table. For example {{"orders-.*" = {{delete_retention_ms = 0}}}}'),
        ("TIERED_COMPACTOR__CLEANER__BLOOM", "True", '{} = "True": allowed is true or false'),
        ("TIERED_COMPACTOR__DAEMON__THREADS", "", '{} = "": allowed is a whole number from 1 to 1024'),
        ("TIERED_COMPACTOR__DAEMON__THREADS", "1\ny = 2", '{} = "1\\ny = 2": allowed is a whole number from 1 to 1024'),
    ],
)
def test_what_the_environment_must_not_say(tmp_path: Path, variable: str, value: str, message: str) -> None:
    assert refusal(tmp_path, "", {variable: value}) == message.format(variable)


@pytest.mark.parametrize(
    "name", ["SERVICE_HOST", "PORT", "PORT_8080_TCP_ADDR", "AGENT_SERVICE_HOST", "DAEMON_SERVICE_PORT_HTTP", "TIER_PORT_9000_TCP", "DEBUG"]
)
def test_what_the_environment_says_of_something_else(name: str) -> None:
    """Kubernetes tells a pod of every service; one may be called tiered-compactor-agent."""
    assert load_settings(None, {f"TIERED_COMPACTOR_{name}": "1", "TIERED_COMPACTOR__TIER__URL": "file:///t"}).tier.url == "file:///t"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no configuration file .*nowhere"):
        load_settings(str(tmp_path / "nowhere"), {})
    with pytest.raises(UsageError, match="there is no configuration file .*nowhere"):
        load_settings(None, {"TIERED_COMPACTOR_CONFIG": str(tmp_path / "nowhere")})
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_settings(str(tmp_path), {})
    (tmp_path / "latin").write_bytes(b"[tier]\nurl = '\xe4'")
    with pytest.raises(UsageError, match="is not valid TOML: .*utf-8"):
        load_settings(str(tmp_path / "latin"), {})


def test_the_first_topic_table_that_matches_the_whole_name_wins(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        "[cleaner]\nbloom = false\n"
        '[topics."orders"]\ndelete_retention_ms = 1\n'
        '[topics."orders.*"]\ndelete_retention_ms = 2\nbloom = true\n',
    )
    assert [settings.cleaner_settings_for_topic(topic).delete_retention_ms for topic in ("orders", "orders-eu", "my-orders")] == [
        1,
        2,
        86_400_000,
    ]
    assert [settings.cleaner_settings_for_topic(topic).bloom for topic in ("orders", "orders-eu", "my-orders")] == [False, True, False]
    assert settings.overridden_setting_names("orders.*") == ["delete_retention_ms", "bloom"]
    assert settings.source_of_setting('topics."orders.*".bloom').endswith("some where.toml")


def test_tier_and_control_urls(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tier is configured"):
        _ = Settings().tier_url
    assert control_url(loaded(tmp_path, '[tier]\nurl = "file:///a b"')) == "file:///a b/.tiered-compactor/"
    assert control_url(loaded(tmp_path, '[tier]\nurl = "s3://b/p/"')) == "s3://b/p/.tiered-compactor/"
    assert control_url(loaded(tmp_path, '[tier]\nurl = "s3://b/p"\ncontrol_url = "s3://other/c"')) == "s3://other/c"


def test_settings_travel(tmp_path: Path) -> None:
    """Executors get settings, not clients."""
    settings = loaded(tmp_path, '[cleaner]\nbloom = false\n[topics."a"]\nsegment_bytes = 99\n')
    assert Settings.model_validate_json(settings.model_dump_json()).model_dump() == settings.model_dump()
    assert pickle.loads(pickle.dumps(settings)).source_of_setting("cleaner.bloom") == settings.source_of_setting("cleaner.bloom")


def test_policy_is_the_part_that_decides_bytes(tmp_path: Path) -> None:
    policy = loaded(tmp_path, '[topics."a"]\nsegment_bytes = 99\n').cleaner_settings_for_topic("a").cleaner_policy()
    assert policy == CleanerPolicy(segment_bytes=99, keyless_records="refuse")
    assert Settings().cleaner.cleaner_policy() == CleanerPolicy(keyless_records="refuse")


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_environment_makes_it_fail_otherwise(name: str, value: str) -> None:
    with pytest.raises(UsageError, match="TIERED_COMPACTOR__"):
        load_settings("/dev/null", {f"TIERED_COMPACTOR__{name}": value})


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ('[publish]\ngrace_ms = "10m"', "grace_ms", 600_000),
        ('[publish]\ngrace_ms = "90 s"', "grace_ms", 90_000),
        ('[cleaner]\nmap_budget_bytes = "64 MiB"', "map_budget_bytes", 64 << 20),
        ('[limits]\nmax_read_bytes_per_s = "5MB"', "max_read_bytes_per_s", 5_000_000),
    ],
)
def test_settings_accept_durations_and_sizes_with_a_unit(tmp_path: Path, text: str, key: str, value: int) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    section = text[1 : text.index("]")]
    assert getattr(load_settings(str(file), {}).settings_of_section(section), key) == value


def test_environment_variables_accept_durations_with_a_unit() -> None:
    assert load_settings(None, {"TIERED_COMPACTOR__PUBLISH__GRACE_MS": "1d"}).publish.grace_ms == 86_400_000


def test_a_unit_that_does_not_fit_the_setting_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[publish]\ngrace_ms = "10 MiB"')
    with pytest.raises(UsageError, match='or a text such as "10m"'):
        load_settings(str(file), {})
