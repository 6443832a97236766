"""The jars of a Kafka broker: Maven fetches the pinned ones once, afterwards no network is needed. Or those of a distribution on disk."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POMS = Path(__file__).parents[1] / "broker"
VERSIONS = ("4.4.0", "3.9.2")
TOOLS = "tools"
DISTRIBUTION = "BROKER_KIT_KAFKA"
"""Environment variable with the folder of a distribution, which fixtures start in place of each version (tests/broker_kit.py)."""
JAR_FOLDERS = ("libs", "share/java/kafka")
"""Where Apache Kafka and Confluent Platform have the broker's jars."""
LOGGERS = ("log4j-slf4j", "slf4j-reload4j", "slf4j-log4j", "logback-classic")
"""Beginnings of jars by which a distribution logs: tests read a broker's log as slf4j-simple writes it."""


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
    """Return the jars of one of VERSIONS, of a version between them, of a distribution's folder, or of TOOLS. Raises BrokerUnavailable."""
    if os.sep in version:
        return _jars_of_distribution(Path(version))
    pom = POMS / ("tools.xml" if version == TOOLS else "pom.xml")
    return maven_jars(f"broker-{version}", pom, *_version_goals(version))


def distribution_jars(folder: Path) -> list[Path]:
    """Raises BrokerUnavailable if this is no folder of a distribution."""
    for name in JAR_FOLDERS:
        if found := sorted((folder / name).glob("*.jar")):
            return found
    raise BrokerUnavailable(f"{folder} is no Kafka distribution: it has no jars in {' or '.join(JAR_FOLDERS)}")


def distribution_version(folder: Path) -> str:
    """Version of Apache Kafka. Confluent Platform counts from 7.0 (3.0) and 8.0 (4.0) on. Raises BrokerUnavailable."""
    names = [path.name for path in distribution_jars(folder)]
    found = next((match for name in names if (match := re.fullmatch(r"kafka-server-common-(\d+)\.(\d+)(\S*)\.jar", name))), None)
    if found is None:
        raise BrokerUnavailable(f"{folder} is no distribution of Kafka 3 or newer: it has no kafka-server-common-VERSION.jar")
    major = int(found[1]) - 4 * found[3].endswith(("-ccs", "-ce"))
    return f"{major}.{found[2]}{found[3]}"


def distribution_class_path(folder: Path, ours: Sequence[Path]) -> list[Path]:
    """Class path: our logger, the distribution without its own, and Kafka's LocalTieredStorage, which no distribution has. ours: jars of a
    release from Maven.
    """
    logger = [path for path in ours if path.name.startswith("slf4j-")]
    fixtures = [path for path in ours if re.match(r"kafka-storage-.*-test", path.name)]
    return [*logger, *(path for path in distribution_jars(folder) if not path.name.startswith(LOGGERS)), *fixtures]


def _jars_of_distribution(folder: Path) -> BrokerJars:
    version = distribution_version(folder)
    release = next((each for each in VERSIONS if each[0] == version[0]), VERSIONS[0])
    class_path = distribution_class_path(folder, [Path(jar) for jar in broker_jars(release).class_path.split(os.pathsep)])
    listed = "".join(f"{path}{path.stat().st_size}{path.stat().st_mtime_ns}" for path in class_path)
    home = _cache() / f"distribution-{version}-{hashlib.sha256(listed.encode()).hexdigest()[:16]}"
    home.mkdir(parents=True, exist_ok=True)
    return BrokerJars(version, os.pathsep.join(map(str, class_path)), home)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered-compactor"


def maven_jars(name: str, pom: Path, *goals: str) -> BrokerJars:
    """Return the jars that a pom.xml names. name: of what they make, with its version; goals: more of Maven's. Raises BrokerUnavailable."""
    for tool, package in (("java", "Java 17"), ("mvn", "Maven 3.8")):
        if not shutil.which(tool):
            raise BrokerUnavailable(f"'{tool}' is not installed: tests with {name} need {package} (Debian: apt install maven)")
    digest = hashlib.sha256(pom.read_bytes()).hexdigest()[:16]
    home = _cache() / f"{name}-{digest}"
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
