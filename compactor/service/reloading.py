"""A configuration that was read anew, beside the one in force: what changes at once, and what waits for the next start. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compactor.config import SECTIONS, Cleaner, Settings, keys_of, topic_key

LIVE = frozenset({"cleaner", "topics", "publish", "lease", "agent"})
"""Sections that every job asks anew. The others are in stores, sockets and sessions that are open."""
LIVE_KEYS = frozenset({"daemon.threads"})
BOUND_KEYS = frozenset({"agent.listen"})
"""Of the sections in LIVE: a socket is open."""
FIXED = ("disk_budget_bytes", "map_engine")
"""Of [cleaner] and its overrides: one pool of disk, one Spark, for as long as the process lives."""


@dataclass(frozen=True)
class Reread:
    """``settings``: those in force from now on. ``changed``, ``waiting``: lines for people, ``cleaner.bloom: true -> false``."""

    settings: Settings
    changed: tuple[str, ...]
    waiting: tuple[str, ...]


def reread(old: Settings, new: Settings) -> Reread:
    """``new`` as far as a running process can follow it."""
    before, after = _flat(old), _flat(new)
    changed: list[str] = []
    waiting: list[str] = []
    for key in [*before, *(key for key in after if key not in before)]:
        was, becomes = before.get(key), after.get(key)
        if was != becomes:
            # Properties of a client may hold secrets.
            line = key if isinstance(becomes, dict) else f"{key}: {_text(was)} -> {_text(becomes)}"
            (changed if _is_live(key) else waiting).append(line)
    topics = {pattern: _fixed(cleaner, old.topics.get(pattern, old.cleaner)) for pattern, cleaner in new.topics.items()}
    opened = {section: getattr(old, section) for section in SECTIONS if "." not in section and section not in LIVE}
    daemon = old.daemon.model_copy(update={"threads": new.daemon.threads})
    agent = new.agent.model_copy(update={"listen": old.agent.listen})
    settings = new.model_copy(
        update=opened | {"daemon": daemon, "agent": agent, "cleaner": _fixed(new.cleaner, old.cleaner), "topics": topics}
    )
    return Reread(settings, tuple(changed), tuple(waiting))


def _fixed(new: Cleaner, old: Cleaner) -> Cleaner:
    return new.model_copy(update={name: getattr(old, name) for name in FIXED})


def _is_live(key: str) -> bool:
    section, _, rest = key.partition(".")
    if key in BOUND_KEYS:
        return False
    return key in LIVE_KEYS or (section in LIVE and rest.rpartition(".")[2] not in FIXED)


def _flat(settings: Settings) -> dict[str, Any]:
    """Dotted key -> value; of [topics] what the tables set."""
    found = {
        f"{section}.{key}": value
        for section, kind in SECTIONS.items()
        for key, value in settings.section(section).model_dump(mode="json", include=set(keys_of(kind))).items()
    }
    for pattern, cleaner in settings.topics.items():
        values = cleaner.model_dump(mode="json")
        found |= {topic_key(pattern, name): values[name] for name in settings.overridden(pattern)}
    return found


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
