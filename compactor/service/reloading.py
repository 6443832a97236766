"""Comparison of a reread configuration with the one in force: which changes take effect at once, and which wait for the next start.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compactor.config.settings import SECTION_TYPES, CleanerSettings, Settings, setting_keys, topic_override_key

LIVE = frozenset({"cleaner", "topics", "publish", "lease", "agent"})
"""Sections that take effect with the next job. Stores, sockets and sessions that are open depend on the others."""
LIVE_KEYS = frozenset({"daemon.threads"})
BOUND_KEYS = frozenset({"agent.listen", "agent.host_names"})
"""Keys of live sections that take effect at the next start because an open socket depends on them."""
FIXED = ("disk_budget_bytes", "map_engine")
"""Keys of [cleaner] and its overrides that take effect at the next start: the process has one disk budget and one Spark session."""


@dataclass(frozen=True)
class ReloadedSettings:
    """Result of rereading a configuration.

    settings: the settings that apply from now on. changed: changes that take effect now. waiting: changes that wait for the next start.
    Changes are lines such as ``cleaner.bloom: true -> false``.
    """

    settings: Settings
    changed: tuple[str, ...]
    waiting: tuple[str, ...]


def settings_after_reload(current: Settings, reread: Settings) -> ReloadedSettings:
    """Compare the settings in force with a reread configuration. Return the settings that the running process can adopt now, a list of the
    changes that take effect, and a list of the changes that wait for the next start.
    """
    before, after = _flatten_settings(current), _flatten_settings(reread)
    changed: list[str] = []
    waiting: list[str] = []
    for key in [*before, *(key for key in after if key not in before)]:
        was, becomes = before.get(key), after.get(key)
        if was != becomes:
            # Properties of a client may hold secrets.
            line = key if isinstance(becomes, dict) else f"{key}: {_format_setting_value(was)} -> {_format_setting_value(becomes)}"
            (changed if _takes_effect_without_restart(key) else waiting).append(line)
    topics = {
        pattern: _keep_old_values_fixed_until_restart(cleaner, current.topics.get(pattern, current.cleaner))
        for pattern, cleaner in reread.topics.items()
    }
    fixed_sections = {section: getattr(current, section) for section in SECTION_TYPES if "." not in section and section not in LIVE}
    daemon = current.daemon.model_copy(update={"threads": reread.daemon.threads})
    agent = reread.agent.model_copy(update={"listen": current.agent.listen, "host_names": current.agent.host_names})
    settings = reread.model_copy(
        update=fixed_sections
        | {
            "daemon": daemon,
            "agent": agent,
            "cleaner": _keep_old_values_fixed_until_restart(reread.cleaner, current.cleaner),
            "topics": topics,
        }
    )
    return ReloadedSettings(settings, tuple(changed), tuple(waiting))


def _keep_old_values_fixed_until_restart(new: CleanerSettings, old: CleanerSettings) -> CleanerSettings:
    """Return the new cleaner settings, except that settings which take effect only at the next start (FIXED) keep their old values."""
    return new.model_copy(update={name: getattr(old, name) for name in FIXED})


def _takes_effect_without_restart(key: str) -> bool:
    """Return whether a change of this dotted key takes effect without a restart."""
    section, _, rest = key.partition(".")
    if key in BOUND_KEYS:
        return False
    return key in LIVE_KEYS or (section in LIVE and rest.rpartition(".")[2] not in FIXED)


def _flatten_settings(settings: Settings) -> dict[str, Any]:
    """Return all settings by dotted key, such as ``cleaner.bloom``. A [topics] table contributes only the values that it sets."""
    found = {
        f"{section}.{key}": value
        for section, kind in SECTION_TYPES.items()
        for key, value in settings.settings_of_section(section).model_dump(mode="json", include=set(setting_keys(kind))).items()
    }
    for pattern, cleaner in settings.topics.items():
        values = cleaner.model_dump(mode="json")
        found |= {topic_override_key(pattern, name): values[name] for name in settings.overridden_setting_names(pattern)}
    return found


def _format_setting_value(value: Any) -> str:
    """Return a setting's value as text for log lines."""
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
