"""Optional dependencies: the extras of the distribution."""

from __future__ import annotations

import importlib.util
from typing import Final

from compactor.errors import UsageError

MODULES: Final = {
    "spark": ("pyspark", "pyarrow", "py4j"),
    "kafka": ("confluent_kafka", "kafka"),
    "agent": ("watchdog",),
    "aiven": ("cryptography", "Crypto"),
    "avro": ("fastavro",),
    "gcs": ("google.cloud.storage", "google.auth", "google.api_core", "requests"),
    "azure": ("azure.storage.blob", "azure.identity", "azure.core", "requests"),
    "hdfs": ("requests",),
    "kerberos": ("gssapi",),
    "iceberg": ("pyiceberg", "pyarrow", "sqlalchemy"),
}
"""Extra -> the modules that come with it, by the shortest name that only one distribution has."""


def require_pip_extra(extra: str, feature: str) -> None:
    """Raise UsageError if a module of an extra is not installed. feature: what needs it, such as ``recompact``."""
    for module in MODULES[extra]:
        if not _is_installed(module):
            raise _missing_error(extra, f"{feature} needs {module}")


def missing_extra_error(module: str) -> UsageError | None:
    """Error for a module that could not be imported, if it belongs to an extra."""
    for extra, modules in MODULES.items():
        for one in modules:
            if f"{module}.".startswith(f"{one}.") or one.startswith(f"{module}."):
                return _missing_error(extra, f"this needs {one}")
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _missing_error(extra: str, feature: str) -> UsageError:
    return UsageError(f"{feature}, which is not installed", hint=f"It comes with an extra: pip install 'tiered-compactor[{extra}]'")
