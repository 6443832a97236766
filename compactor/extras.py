"""What not everybody installs: the extras of the distribution, and the one line for whoever lacks one."""

from __future__ import annotations

import importlib.util
from typing import Final

from compactor.errors import UsageError

MODULES: Final = {
    "spark": ("pyspark", "pyarrow", "py4j"),
    "kafka": ("confluent_kafka",),
    "agent": ("watchdog",),
    "aiven": ("cryptography", "Crypto"),
}
"""Extra -> the top-level modules that come with it."""


def need(extra: str, what: str) -> None:
    """Raises UsageError where the extra is not installed. ``what`` needs it: ``recompact``, ``map_engine = "spark"``."""
    for module in MODULES[extra]:
        if not _is_there(module):
            raise _lacking(extra, f"{what} needs {module}")


def missing(module: str) -> UsageError | None:
    """The error for a module that could not be imported, where it belongs to an extra."""
    root = module.partition(".")[0]
    for extra, modules in MODULES.items():
        if root in modules:
            return _lacking(extra, f"this needs {root}")
    return None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _lacking(extra: str, what: str) -> UsageError:
    return UsageError(f"{what}, which is not installed", hint=f"It comes with an extra: pip install 'tiered-compactor[{extra}]'")
