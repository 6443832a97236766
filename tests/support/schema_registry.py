"""A schema registry for tests: Apicurio, which serves the API of Confluent's registry. Maven fetches it once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.kafka_jars import BrokerUnavailable
from tests.support.s3_server import free_port, running, wait_for

VERSION = "2.6.13.Final"
NAME = "apicurio-registry-app"


def registry_home() -> Path:
    """Return the directory with the registry's jars. Raises BrokerUnavailable if Java or Maven is missing or nothing can be fetched."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered-compactor"
    home = cache / f"{NAME}-{VERSION}"
    if home.exists():
        return home
    if not (shutil.which("java") and shutil.which("mvn")):
        raise BrokerUnavailable("java or mvn is not installed: tests with a schema registry need Java 17 and Maven 3.8")
    partial = cache / f"{NAME}-{VERSION}.{os.getpid()}"
    partial.mkdir(parents=True)
    artifact = f"-Dartifact=io.apicurio:{NAME}:{VERSION}:tar.gz:all"
    command = ["mvn", "-q", "-B", "dependency:copy", artifact, f"-DoutputDirectory={partial}"]
    done = subprocess.run(command, cwd=partial, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BrokerUnavailable(f"Maven could not fetch the schema registry {VERSION}: {done.stdout[-300:]}")
    (archive,) = partial.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(partial, filter="data")
    archive.unlink()
    partial.rename(home)
    return home


class TestRegistry:
    """A registry that runs. url: where Confluent's API is."""

    __test__ = False

    def __init__(self, url: str) -> None:
        self.url = url

    def register(self, subject: str, schema: object, kind: str = "AVRO", references: Sequence[dict[str, Any]] = ()) -> int:
        """Register a version of a subject and return the id of its schema."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        body = json.dumps({"schema": text, "schemaType": kind, "references": list(references)}).encode()
        headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        request = urllib.request.Request(f"{self.url}/subjects/{subject}/versions", body, headers)
        with urllib.request.urlopen(request) as answer:
            return int(json.loads(answer.read())["id"])


@contextmanager
def running_registry() -> Iterator[TestRegistry]:
    """Run a registry that keeps everything in memory. Raises BrokerUnavailable."""
    home = registry_home()
    address = f"127.0.0.1:{free_port()}"
    flags = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dquarkus.http.host=127.0.0.1"]
    flags += [f"-Dquarkus.http.port={address.partition(':')[2]}", "-Dquarkus.log.level=ERROR", "-Dquarkus.log.console.enable=false"]
    with running(["java", *flags, "-jar", str(home / f"{NAME}-{VERSION}-runner.jar")], stdout=subprocess.DEVNULL) as process:
        wait_for(address, process, seconds=120)  # a JVM on a busy machine
        yield TestRegistry(f"http://{address}/apis/ccompat/v7")
