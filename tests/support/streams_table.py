"""A Kafka Streams application with a GlobalKTable, in a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final, Self

import pytest

from tests.support.kafka_jars import BrokerUnavailable, maven_jars

FOLDER: Final = Path(__file__).parents[1] / "features" / "serve" / "streams"
VERSION: Final = "4.4.0"


class GlobalTable:
    """The table of a topic. It is restored when the constructor returns.

    cluster: bootstrap servers of the application. records: those of its global consumer.
    """

    def __init__(self, folder: Path, topic: str, *, cluster: str, records: str, committed: bool) -> None:
        try:
            jars = maven_jars(f"streams-{VERSION}", FOLDER / "pom.xml")
        except BrokerUnavailable as error:
            pytest.skip(str(error))
        command = [
            "java",
            "-Xmx96m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            jars.class_path,
            str(FOLDER / "GlobalTable.java"),
        ]
        settings = {
            "bootstrap.servers": cluster,
            "global.consumer.bootstrap.servers": records,
            "processing.guarantee": "exactly_once_v2" if committed else "at_least_once",  # the global consumer's isolation follows it
        }
        self._log = folder.with_suffix(".log").open("wb")
        self._process = subprocess.Popen(
            [*command, topic, str(folder), *(f"{name}={value}" for name, value in settings.items())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        try:
            assert self._line() == "running", folder.with_suffix(".log").read_text()[-2000:]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def entries(self) -> dict[bytes, bytes]:
        """Return the table as it is now."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[bytes, bytes] = {}
        while (words := self._line().split(" "))[0] == "entry":
            found[bytes.fromhex(words[1])] = bytes.fromhex(words[2])
        assert words == ["end", "RUNNING"]
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip("\n")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
