"""Checks for supported versions of Java and PySpark, made before Spark is started so that the error is one clear line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from compactor.errors import UsageError
from compactor.extras import require_pip_extra

OLDEST_JAVA = 17
OLDEST_PYSPARK = (4, 1)
NEXT_PYSPARK = (5, 0)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def require_supported_java() -> None:
    """Raise UsageError if no Java is found or if it is older than OLDEST_JAVA."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    hint = "Install a JRE (Debian, Ubuntu: apt install default-jre-headless) or set JAVA_HOME"
    if not java or not os.access(java, os.X_OK):
        where = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on the PATH"
        raise UsageError(f"Spark needs Java {OLDEST_JAVA} or newer, and {where}", hint=hint)
    try:
        message = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{java} does not run: {error}", hint=hint) from error
    found = _VERSION.search(message)
    if not found:
        lines = message.strip().splitlines() or ["nothing"]
        raise UsageError(f"`{java} -version` does not name a Java version, but: {lines[0]}", hint=hint)
    if int(found[1]) < OLDEST_JAVA:
        raise UsageError(f"Spark needs Java {OLDEST_JAVA} or newer, and {java} is Java {found[1]}", hint=hint)


def require_supported_pyspark() -> None:
    """Raise UsageError if PySpark is not installed or its version is not supported."""
    supported = f"{OLDEST_PYSPARK[0]}.{OLDEST_PYSPARK[1]} to {NEXT_PYSPARK[0] - 1}.x"
    require_pip_extra("spark", "Spark")
    import pyspark

    numbers = re.match(r"(\d+)\.(\d+)", pyspark.__version__)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not OLDEST_PYSPARK <= version < NEXT_PYSPARK:
        raise UsageError(f"PySpark {pyspark.__version__} is not supported", hint=f"Supported are PySpark {supported}")
