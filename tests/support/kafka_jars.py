"""The jars of a Kafka broker: Maven fetches the pinned ones once, afterwards no network is needed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POMS = Path(__file__).parents[1] / "broker"
VERSIONS = ("4.4.0", "3.9.2")
TOOLS = "tools"


class BrokerUnavailable(Exception):
    """Java, Maven or the jars are missing; says which and how to get it."""


@dataclass(frozen=True)
class BrokerJars:
    """What it takes to start one version of Kafka, or its tools."""

    version: str
    class_path: str
    home: Path  # a directory of this version and this pom.xml, for what is made once

    def command(self, main: str, *flags: str, heap_mb: int = 128) -> list[str]:
        """A JVM that starts fast and stays small; the program's own arguments follow."""
        return [
            "java", f"-Xmx{heap_mb}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS", *flags, "-cp", self.class_path, main,
        ]  # fmt: skip


def broker_jars(version: str) -> BrokerJars:
    """Return the jars of one of VERSIONS, of a version between them, or of TOOLS. Raises BrokerUnavailable."""
    pom = POMS / ("tools.xml" if version == TOOLS else "pom.xml")
    return maven_jars(f"broker-{version}", pom, *_version_goals(version))


def maven_jars(name: str, pom: Path, *goals: str) -> BrokerJars:
    """Return the jars that a pom.xml names. name: of what they make, with its version; goals: more of Maven's. Raises BrokerUnavailable."""
    for tool, package in (("java", "Java 17"), ("mvn", "Maven 3.8")):
        if not shutil.which(tool):
            raise BrokerUnavailable(f"'{tool}' is not installed: tests with {name} need {package} (Debian: apt install maven)")
    digest = hashlib.sha256(pom.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered-compactor"
    home = cache / f"{name}-{digest}"
    ready = home / "class-path.txt"
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes, and each of them may be the first
        if not ready.exists() or not all(Path(jar).exists() for jar in ready.read_text().split(os.pathsep)):
            ready.write_text(_resolve(name, pom, goals))
    return BrokerJars(name.rpartition("-")[2], ready.read_text(), home)


def _resolve(name: str, pom: Path, goals: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(pom, Path(scratch) / "pom.xml")
        goals = [*goals, "dependency:build-classpath", "-Dmdep.outputFile=jars.txt", "-Dmdep.includeScope=runtime"]
        # What was resolved before must do; the network is for the first time.
        done = _maven(scratch, "-o", *goals)
        if done.returncode:
            done = _maven(scratch, *goals)
        if done.returncode:
            words = [line for line in done.stdout.splitlines() if line.startswith("[ERROR]")][:3]
            raise BrokerUnavailable(f"Maven could not fetch {name} (is there a network, this first time?): {' '.join(words)}")
        return (Path(scratch) / "jars.txt").read_text().strip()


def _version_goals(version: str) -> list[str]:
    """Return what names the version to Maven. Versions without a profile of their own are between those that have one."""
    if version == TOOLS:
        return []
    if version in VERSIONS:
        return ["-P", version]
    return [f"-Dkafka.version={version}", f"-Dkafka.tools.api.version={version}", "-Dfixtures=test"]


def _maven(directory: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mvn", "-q", "-B", *arguments], cwd=directory, capture_output=True, text=True, check=False)
