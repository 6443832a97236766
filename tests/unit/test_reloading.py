"""A configuration that is read again while a daemon runs on the old one."""

from __future__ import annotations

from pathlib import Path

from compactor.config.settings import Settings, load_settings
from compactor.service import settings_after_reload


def written(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "settings.toml"
    file.write_text(f'[tier]\nurl = "file:///tier"\n{text}')
    return load_settings(str(file), {})


def test_nothing_changed(tmp_path: Path) -> None:
    one = written(tmp_path, '[topics."orders-.*"]\nbloom = false\n')
    found = settings_after_reload(one, written(tmp_path, '[topics."orders-.*"]\nbloom = false\n'))
    assert (found.changed, found.waiting) == ((), ())
    assert found.settings == one


def test_what_a_job_asks_anew_holds_at_once(tmp_path: Path) -> None:
    old = written(tmp_path, "[cleaner]\nbloom = true\n[publish]\ngrace_ms = 5\n")
    new = written(tmp_path, "[cleaner]\nbloom = false\n[publish]\ngrace_ms = 7\n[lease]\nttl_ms = 900\n[daemon]\nthreads = 5\n")
    found = settings_after_reload(old, new)
    assert found.changed == (
        "cleaner.bloom: true -> false",
        "publish.grace_ms: 5 -> 7",
        "lease.ttl_ms: 30000 -> 900",
        "daemon.threads: 2 -> 5",
    )
    assert found.waiting == ()
    assert found.settings == new


def test_what_is_open_waits_for_the_next_start(tmp_path: Path) -> None:
    old = written(tmp_path, "")
    new = written(
        tmp_path,
        'state_dir = "/elsewhere"\n[cleaner]\nmap_engine = "memory"\n[limits]\nmax_requests_per_s = 3\n[daemon]\ninterval_ms = 100\n'
        '[kafka]\nproperties = {"sasl.password" = "hush"}\n',
    )
    found = settings_after_reload(old, new)
    assert found.settings.model_dump() == old.model_dump()
    assert found.changed == ()
    assert found.waiting == (
        "tier.state_dir: /var/lib/tiered-compactor -> /elsewhere",
        "kafka.properties",
        "cleaner.map_engine: auto -> memory",
        "limits.max_requests_per_s: 0 -> 3",
        "daemon.interval_ms: 15000 -> 100",
    )
    assert settings_after_reload(found.settings, new).waiting == found.waiting


def test_overrides_of_topics_come_and_go(tmp_path: Path) -> None:
    plain = written(tmp_path, "")
    special = written(tmp_path, '[topics."orders-.*"]\nbloom = false\nmap_engine = "spark"\n')
    came = settings_after_reload(plain, special)
    assert came.changed == ('topics."orders-.*".bloom: not set -> false',)
    assert came.waiting == ('topics."orders-.*".map_engine: not set -> spark',)
    assert came.settings.cleaner_settings_for_topic("orders-eu").bloom is False
    assert came.settings.cleaner_settings_for_topic("orders-eu").map_engine == "auto"
    went = settings_after_reload(came.settings, plain)
    assert 'topics."orders-.*".bloom: false -> not set' in went.changed
    assert went.settings.cleaner_settings_for_topic("orders-eu").bloom is True
