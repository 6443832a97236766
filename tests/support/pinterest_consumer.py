"""Pinterest's own consumer library (tests/pinterest) on an S3 server: jars are fetched once, and the program is compiled once."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.s3_server import Bucket

PROJECT = Path(__file__).parents[1] / "pinterest"
PROGRAM = "ReadPartition"
JARS = ("ts-consumer-1.0.1.jar", "ts-segment-uploader-1.0.1.jar")

Record = tuple[int, bytes | None, bytes | None]


class ConsumerUnavailable(Exception):
    """Java, Maven or the jars are missing; says which."""


@dataclass(frozen=True)
class ReadFrom:
    """What one run of the consumer came to. ``stalled``: it had polled again and again without a record before the end."""

    position: int
    records: list[Record]
    stalled: bool


def class_path() -> str:
    """Of the compiled program. Raises ConsumerUnavailable."""
    for tool in ("java", "javac", "mvn"):
        if not shutil.which(tool):
            raise ConsumerUnavailable(f"'{tool}' is not installed: Pinterest's consumer needs a JDK 17 and Maven 3.8")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PROJECT.iterdir()))).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered-compactor"
    home = cache / f"pinterest-{digest}"
    ready = home / "class-path.txt"
    if not ready.exists() or not all(Path(part).exists() for part in ready.read_text().split(os.pathsep)):
        home.mkdir(parents=True, exist_ok=True)
        path = _made(home)
        partial = home / f"class-path.{os.getpid()}"
        partial.write_text(path)
        partial.replace(ready)
    return ready.read_text()


def _made(home: Path) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(PROJECT / "pom.xml", scratch)
        _maven(scratch, "dependency:copy", f"-DoutputDirectory={home}")
        _maven(scratch, "dependency:build-classpath", "-Dmdep.outputFile=jars.txt")
        # The newer SDK stands before the one in the shaded jar.
        path = os.pathsep.join([(Path(scratch) / "jars.txt").read_text().strip(), *(str(home / jar) for jar in JARS)])
    compiled = ["javac", "-nowarn", "-cp", path, "-d", str(home / "classes"), str(PROJECT / f"{PROGRAM}.java")]
    done = subprocess.run(compiled, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return os.pathsep.join([path, str(home / "classes")])


def _maven(directory: str, *arguments: str) -> None:
    """What was fetched before must do; the network is for the first time."""
    done = subprocess.run(["mvn", "-q", "-B", "-o", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        done = subprocess.run(["mvn", "-q", "-B", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConsumerUnavailable(f"Maven could not fetch Pinterest's jars: {done.stdout[-500:]}")


def read_partition(
    bucket: Bucket,
    prefix: str,
    partition: str,
    positions: Sequence[int],
    end: int,
    *,
    cluster: str = "prod",
    bits: int = 0,
    seconds: int = 120,
) -> list[ReadFrom]:
    """Reads from each position up to ``end``. ``prefix``: the base prefix, or a pointer's key. Raises TimeoutExpired."""
    topic, _, number = partition.rpartition("-")
    arguments = [bucket.name, prefix, cluster, str(bits), topic, number, str(end), *map(str, positions)]
    command = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", class_path(), PROGRAM, *arguments]
    environment = {**os.environ, **bucket.server.environment(), "AWS_ENDPOINT_URL_S3": bucket.server.endpoint, "AWS_REGION": "us-east-1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=seconds)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: list[ReadFrom] = []
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word == "from":
            found.append(ReadFrom(int(rest), [], stalled=False))
        elif word == "stalled":
            found[-1] = ReadFrom(found[-1].position, found[-1].records, stalled=True)
        elif word.isdigit():
            key, value = (None if text == "-" else base64.b64decode(text[1:]) for text in rest.split(" "))
            found[-1].records.append((int(word), key, value))
    return found
