"""A tier with its configuration, as a user has it: commands as processes or in this one, and a growing log whose truth is known."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from tests.builders import LZ4, NONE, LogBuilder, pair, read
from tests.support.tier_cli import TierCli

ROOT = Path(__file__).parents[2]


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Running(subprocess.Popen[str]):
    """A process whose stderr goes to a file, as nobody empties a pipe."""

    def __init__(self, command: list[str], stderr: Path) -> None:
        self.file = stderr
        with stderr.open("w", encoding="utf-8") as file:
            super().__init__(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file, text=True)

    def said(self) -> str:
        """What it has written to stderr so far."""
        return self.file.read_text(encoding="utf-8")

    def put_down(self) -> None:
        """Whatever it is doing."""
        if self.poll() is None:
            self.kill()
            self.wait()


class Deployment(TierCli):
    """The command line on a tier (``ask``, ``do``), and its commands as processes of their own."""

    def process(self, *arguments: object, timeout: float = 120) -> Result:
        """A command as a process, with JSON on stdout; waits for its end."""
        words = [*self._command(arguments), "--output", "json"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
        return Result(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: object, before: str = "") -> Running:
        """A command as a process that is left to itself. ``before``: Python that runs in that process first."""
        return Running(self._command(arguments, before), self.folder / f"stderr-{random.randrange(1 << 48):012x}")

    def opened(self) -> Tier:
        return open_tier(load_settings(str(self.config)))

    def _command(self, arguments: tuple[object, ...], before: str = "") -> list[str]:
        start = ["-c", f"{before}\nfrom compactor.cli.main import entry\nimport sys\nsys.exit(entry(sys.argv[1:]))"]
        return [sys.executable, *(start if before else ["-m", "compactor"]), *map(str, arguments), "--config", str(self.config)]


@dataclass
class GrowingLog:
    """A partition's log that is written part by part, and what a reader must find of it.

    ``truth``: key -> (offset, value) of the last committed record; ``records``: offset -> (key, value) of every one ever written;
    ``committed``: offset, key and value of the committed ones, ascending.
    """

    topic: str
    partition: int
    folder: Path
    dice: random.Random
    log: LogBuilder = field(default_factory=lambda: LogBuilder(time=1_700_000_000_000))
    parts: int = 0
    truth: dict[bytes, tuple[int, bytes | None]] = field(default_factory=dict)
    records: dict[int, tuple[bytes, bytes | None]] = field(default_factory=dict)
    committed: list[tuple[int, bytes, bytes | None]] = field(default_factory=list)
    value_bytes: int = 80

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"

    def write_part(self, segments: int = 3, batches: int = 20, keys: int = 60) -> Path:
        """The next sealed segments as a directory of their own: plain and compressed batches, tombstones, transactions of both ends."""
        for _ in range(segments):
            for _ in range(batches):
                self._batch(keys)
            self.log.roll()
        self.log.segments.pop()  # it has nothing yet
        self.parts += 1
        return self.log.write(self.folder / f"{self.name}-part-{self.parts}")

    def _batch(self, keys: int) -> None:
        dice = self.dice
        pairs = []
        for _ in range(dice.randint(1, 8)):
            key = f"key-{dice.randrange(keys)}"
            pairs.append(key if dice.random() < 0.1 else f"{key}={'x' * dice.randint(0, self.value_bytes)}{self.log.next_offset}")
        producer = dice.choice((-1, -1, 7, 8))
        base = self.log.put(*pairs, codec=dice.choice((NONE, LZ4)), pid=producer, txn=producer >= 0)
        committed = producer < 0 or dice.random() < 0.7
        if producer >= 0:
            self.log.end(producer, commit=committed)
        for number, (name, value) in enumerate(pair(text) for text in pairs):
            assert name is not None
            self.records[base + number] = (name, value)
            if committed:
                self.truth[name] = (base + number, value)
                self.committed.append((base + number, name, value))

    def wrong_in(self, exported: Path, *, clean: bool, start: int = 0) -> list[str]:
        """What is wrong with an exported view; ``clean``: everything was cleaned, so that nothing superseded may be left.

        ``start``: the log start, below which values may have expired.
        """
        found = [
            (record.offset, record.key or b"", record.value)
            for batches in read(exported).values()
            for batch in batches
            if not batch.control
            for record in batch.records
        ]
        wrong = [f"offset {offset}: no such record was written" for offset, key, value in found if self.records.get(offset) != (key, value)]
        wrong += [f"offset {after[0]} behind {before[0]}" for before, after in pairwise(found) if after[0] <= before[0]]
        offsets = {offset for offset, _, _ in found}
        for key, (offset, value) in self.truth.items():
            if value is not None and offset >= start and offset not in offsets:
                wrong.append(f"{key!r}: its last value, at offset {offset}, is lost")
        if clean:
            latest = {offset for offset, _ in self.truth.values()}
            wrong += [
                f"offset {offset}, {key!r}: superseded or aborted, and still there" for offset, key, _ in found if offset not in latest
            ]
        return wrong
