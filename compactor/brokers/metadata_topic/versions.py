"""Versions of Apache Kafka's brokers. A broker reports the levels of its features (ApiVersions, KIP-584), which tell its minor version.

Settings cannot tell it: one that a later minor adds has an unknown name.
"""

from __future__ import annotations

from collections.abc import Mapping

METADATA_VERSION_FEATURE = "metadata.version"
REMOTE_METADATA_FEATURE = "remote.log.metadata.version"
"""Feature of KIP-1266. From level 1 on, the metadata topic is keyed and compacted."""
TESTED_MINORS: Mapping[str, int] = {"3.8": 20, "3.9": 21, "4.0": 25, "4.1": 27, "4.2": 29, "4.3": 30, "4.4": 33}
"""Minor versions under which rounds were tested (tests/broker/test_other_brokers.py) -> the highest level of ``metadata.version`` that
their releases support (``MetadataVersion.LATEST_PRODUCTION``), ascending. Patch releases have the level of their minor.
"""
OLDEST_TESTED, *_, NEWEST_TESTED = TESTED_MINORS
OLDER = "3.7"
"""Stands for every version before OLDEST_TESTED."""


def minor_version(level: int) -> str:
    """Return the minor version whose releases support this level of ``metadata.version`` at most.

    Levels of versions before 3.8 become OLDER. Those after the newest tested version become NEWEST_TESTED, and ``is_newer_than_tested``
    tells them apart.
    """
    if level < TESTED_MINORS[OLDEST_TESTED]:
        return OLDER
    return next((minor for minor, highest in TESTED_MINORS.items() if level <= highest), NEWEST_TESTED)


def is_newer_than_tested(level: int) -> bool:
    """Return whether a broker that supports this level of ``metadata.version`` is later than all tested minor versions."""
    return level > TESTED_MINORS[NEWEST_TESTED]
