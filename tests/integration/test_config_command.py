"""``config show`` and ``config check`` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compactor.cli.main import entry
from compactor.config.settings import SECTION_TYPES, setting_keys
from compactor.storage.probe import MARKER
from tests.builders import log_of
from tests.support.tier_cli import TierCli


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "settings of test.toml"
    file.write_text(
        f'[tier]\nurl = "file://{tmp_path}/the tier"\nstate_dir = "{tmp_path}/state"\n'
        '[kafka]\nproperties = {"sasl.password" = "hunter2", "security.protocol" = "SSL"}\n'
        '[topics."a.*"]\nbloom = false\n'
        '[outputs.iceberg.topics.a.catalog]\ntype = "rest"\ncredential = "client:hunter2"\n'
        '[outputs.iceberg.topics.b.catalog]\ntype = "sql"\nuri = "postgresql://user:hunter2@db/catalog"\n'
    )
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = entry([*arguments, "--output", "json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document.pop("schema_version") == 1
    return code, document


def test_show_names_every_setting_and_its_source(
    settings: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_COMPACTOR__DAEMON__THREADS", "3")
    code, document = run(capsys, "config", "show", "--config", str(settings))
    shown = {row["key"]: (row["value"], row["source"]) for row in document["settings"]}
    assert (code, document["ok"], document["problems"]) == (0, True, [])
    assert {f"{section}.{key}" for section, kind in SECTION_TYPES.items() for key in setting_keys(kind)} < set(shown)
    assert shown["tier.state_dir"] == (f"{settings.parent}/state", str(settings))
    assert shown["daemon.threads"] == (3, "TIERED_COMPACTOR__DAEMON__THREADS")
    assert shown["cleaner.bloom"] == (True, "default")
    assert shown['topics."a.*".bloom'] == (False, str(settings))


def test_show_keeps_secrets(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("json", "table"):
        assert entry(["config", "show", "--config", str(settings), "--output", mode]) == 0
        printed = capsys.readouterr().out
        assert "hunter2" not in printed
        assert "SSL" in printed
        assert "postgresql" not in printed
        assert "rest" in printed


def test_check_of_a_new_tier_leaves_only_the_result_of_the_race(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run(capsys, "config", "check", "--config", str(settings)) == (0, {"ok": True, "problems": [], "topics": []})
    left = [
        str(file.relative_to(settings.parent))
        for file in settings.parent.rglob("*")
        if file.is_file() and ".object-store" not in file.parts
    ]
    assert left == [settings.name, f"the tier/.tiered-compactor/probe/{MARKER}"]


def test_check_tries_everything_and_names_what_fails(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("state", "the tier", "control"):
        (settings.parent / name).write_text("a file in the way")
    with_control = settings.read_text().replace("[tier]", f'[tier]\ncontrol_url = "file://{settings.parent}/control"')
    settings.write_text(with_control)
    code, document = run(capsys, "config", "check", "--config", str(settings))
    assert (code, document["ok"]) == (5, False)
    assert {problem["object"].rpartition("/")[2] for problem in document["problems"]} == {"state", "the tier", "control"}
    assert {key for problem in document["problems"] for key in problem} == {"severity", "kind", "object", "detail", "hint"}
    assert entry(["config", "check", "--config", str(settings)]) == 5
    assert "cannot be used like this" in capsys.readouterr().out


def test_check_without_a_tier_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert entry(["config", "check", "--config", str(tmp_path / "empty.toml")]) == 2
    assert capsys.readouterr().err.startswith("error: no tier is configured. Set url under [tier]")


def test_a_pattern_that_no_topic_matches_is_told(tmp_path: Path) -> None:
    log = log_of("a=1")
    log.write(tmp_path / "orders-0")
    overrides = {'topics."order*"': {"bloom": False}, 'topics."ord.*"': {"bloom": True}}
    cli = TierCli(tmp_path / "a tier", overrides)
    assert cli.do("config", "check")["problems"] == []
    cli.do("import", tmp_path / "orders-0")
    (problem,) = cli.do("config", "check")["problems"]
    assert (problem["severity"], problem["object"]) == ("warning", '[topics."order*"]')
    assert problem["hint"].endswith('for names that begin so write "order.*"')
