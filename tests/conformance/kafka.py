"""Real Kafka at the other end of a pipe: the Java program of this folder, built once and kept running."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
SOURCES = [HERE / "pom.xml", *sorted((HERE / "src").rglob("*.java"))]


class Unavailable(Exception):
    """Java, Maven or the jars are missing; says which and how to get it."""


class KafkaFailed(Exception):
    """The question could not be put to Kafka: not a verdict on anybody's cleaner."""


class Kafka:
    """A running server. ``with Kafka() as kafka: kafka.clean(...)``"""

    def __init__(self) -> None:
        class_path = build()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._server = subprocess.Popen(
            ["java", "-XX:+UseSerialGC", "-Xmx1g", "-cp", class_path, "conformance.Server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._server.stdin and self._server.stdout:
            self._server.stdin.close()
            self._server.wait(timeout=30)
            self._server.stdout.close()
        self._errors.close()

    def generate(self, seed: int, profile: str, target: Path, *, parts: int = 1) -> dict[str, Any]:
        """Writes a random log; returns ``request`` (the fields of OfflineCleanOptions) and ``parts`` (end and last stable offset)."""
        return self._ask({"do": "generate", "seed": seed, "profile": profile, "parts": parts, "dir": str(target)})

    def clean(self, log_dir: Path, out_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
        """One round of Kafka's cleaner; ``{"refused": why}`` where it throws."""
        return self._ask({"do": "clean", "log_dir": str(log_dir), "out_dir": str(out_dir), "request": request})

    def read(self, log_dir: Path, *, recover: bool = False) -> dict[str, Any]:
        """The log as a broker opens it and consumers of both isolation levels read it. Raises KafkaFailed where it would not.

        ``recover``: as after a crash; Kafka then checks every batch and rebuilds every index.
        """
        return self._ask({"do": "read", "dir": str(log_dir), "recover": recover})

    def fold(self, events: list[bytes], question: dict[str, Any]) -> dict[str, Any]:
        """One user partition's values of ``__remote_log_metadata`` through Kafka's RemoteLogMetadataCache; what to look up is asked
        by ``epochs``, ``first``, ``last``, ``lineages``, ``log_end``."""
        return self._ask({"do": "fold", "events": [base64.b64encode(event).decode() for event in events], **question})

    def metadata_partition(self, topic_id: str, partition: int, partitions: int) -> int:
        """What Kafka's RemoteLogMetadataTopicPartitioner says."""
        answer = self._ask({"do": "partition", "topic_id": topic_id, "partition": partition, "partitions": partitions})
        return int(answer["partition"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        server = self._server
        if not server.stdin or not server.stdout:
            raise KafkaFailed("the Java program is gone")
        server.stdin.write(json.dumps(question) + "\n")
        server.stdin.flush()
        line = server.stdout.readline()
        if not line:
            raise KafkaFailed(f"the Java program stopped: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise KafkaFailed(f"{answer['failed']}\n{self._last_words()}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 20_000))
        traces = self._errors.read().decode(errors="replace").split("\n\n")
        return "\n".join(traces[-1].splitlines()[:12])


def missing() -> str:
    """Empty when Kafka can be asked, else what is missing, in one line."""
    try:
        build()
    except Unavailable as error:
        return str(error)
    return ""


def build() -> str:
    """The class path of the compiled program. The jars come through Maven, once; afterwards no network is needed.

    Raises Unavailable.
    """
    for tool, package in (("java", "a JDK 17"), ("javac", "a JDK 17"), ("mvn", "Maven 3.8")):
        if not shutil.which(tool):
            raise Unavailable(f"'{tool}' is not installed: the conformance tests need {package} to run Kafka's own cleaner")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered-compactor" / f"conformance-{digest}"
    ready = home / "class-path.txt"
    if not ready.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
            _compile(Path(scratch) / "project", home)
    return ready.read_text()


def _compile(project: Path, home: Path) -> None:
    shutil.copytree(HERE / "src", project / "src")
    shutil.copy(HERE / "pom.xml", project)
    goals = ["compile", "dependency:build-classpath", "-Dmdep.outputFile=jars.txt", "-Dmdep.includeScope=runtime"]
    # What was resolved before must do; the network is for the first time.
    done = _maven(project, "-o", *goals)
    if done.returncode:
        done = _maven(project, *goals)
    if done.returncode:
        words = [line for line in done.stdout.splitlines() if line.startswith("[ERROR]")][:3]
        raise Unavailable(f"Maven could not build {HERE} (is there a network, this first time?): {' '.join(words)}")
    made = project / "target" / "classes"
    jars = (project / "jars.txt").read_text().strip()
    (project / "class-path.txt").write_text(f"{home / made.relative_to(project)}{os.pathsep}{jars}")
    try:
        project.rename(home)
    except OSError:
        if not (home / "class-path.txt").exists():  # else another process was faster
            raise


def _maven(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mvn", "-q", "-B", *arguments], cwd=project, capture_output=True, text=True, check=False)
