"""conf/*.toml and docs/reference/settings.md say what the code does.

``python -m tests.unit.test_config_reference`` rewrites the page's table.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from compactor.config import settings as config
from compactor.config.settings import Settings, describe_allowed_values, load_settings

ROOT = Path(__file__).parents[2]
DEFAULTS = ROOT / "conf" / "default.toml"
PAGE = ROOT / "docs" / "reference" / "settings.md"


def described() -> dict[str, str]:
    """Return the comment above each key of conf/default.toml, its lines joined."""
    found, section, comment = {}, "", ""
    for line in DEFAULTS.read_text().splitlines():
        if opened := re.fullmatch(r"\[([\w.]+)\]", line):
            section = opened[1]
        elif assigned := re.match(r"(\w+) = ", line):
            found[f"{section}.{assigned[1]}"] = comment
        comment = f"{comment} {line.removeprefix('# ')}".strip() if line.startswith("# ") else ""
    return found


def table() -> str:
    meanings = described()
    lines = ["| setting | default | allowed | what for |", "|---|---|---|---|"]
    for section, kind in config.SECTION_TYPES.items():
        for key, default in kind().model_dump(mode="json", include=set(config.setting_keys(kind))).items():
            # 9223372036854775807 and 1152921504606846976 say less than what they are.
            range_ = describe_allowed_values(kind, key).replace(str(2**63 - 1), "2^63-1").replace(str(2**60), "2^60")
            if built := config.BUILT.get(f"{section}.{key}"):
                range_ += f"; so far {' or '.join(json.dumps(value) for value in built)}"
            shown = json.dumps(default).replace(str(2**63 - 1), "2^63-1")
            lines.append(f"| `{section}.{key}` | `{shown}` | {range_} | {meanings[f'{section}.{key}']} |")
    return "\n".join(lines) + "\n"


def test_default_toml_is_the_defaults() -> None:
    written = tomllib.loads(DEFAULTS.read_text())
    defaults = Settings().model_dump(mode="json")
    assert defaults.pop("topics") == {}
    assert written == defaults
    assert [list(section) for section in written.values()] == [list(section) for section in defaults.values()]


def test_default_toml_says_what_each_key_is_for() -> None:
    assert [key for key, comment in described().items() if len(comment) < 20] == []


def test_the_settings_page_is_up_to_date() -> None:
    assert table() in PAGE.read_text(), "run python -m tests.unit.test_config_reference"


@pytest.mark.parametrize("file", sorted((ROOT / "conf").glob("*.toml")), ids=lambda file: file.name)
def test_deployments_load_and_hold_only_differences(file: Path) -> None:
    settings = load_settings(str(file), {})
    if file != DEFAULTS:
        assert settings.tier_url
        for section, table in tomllib.loads(file.read_text()).items():
            for key, value in table.items() if section != "topics" else ():
                if f"{section}.{key}" not in config.SECTION_TYPES:
                    assert value != getattr(config.SECTION_TYPES[section](), key), f"{section}.{key} is the default"


if __name__ == "__main__":
    page = PAGE.read_text()
    start = page.index("| setting |")
    rest = page[start:].partition("\n\n")
    PAGE.write_text(page[:start] + table() + rest[1][1:] + rest[2])
