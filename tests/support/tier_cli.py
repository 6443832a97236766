"""The command line on a tier in a directory, as a user types it, in this process; and what a consumer reads in a log directory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.cli.main import entry
from compactor.cli.output import SCHEMA_VERSION
from compactor.config.settings import load_settings
from compactor.storage.schemes import STORE_KINDS
from tests.builders import LogBuilder, log_of
from tests.plain_format import Batch, read_batches, segment_paths
from tests.plain_log import control_type, transaction_index
from tests.support.waiting import wait_for


class Answer(NamedTuple):
    """``document``: without its version; None where the command failed before it had a result. ``error``: what it said then."""

    code: int
    document: Any
    stderr: str
    error: Any = None

    @property
    def remarks(self) -> list[str]:
        """Lines on stderr without those that only a busy machine shows: progress, and waits for kernels and other processes."""
        busy = re.compile(r'{"progress"|compiling kernels|.* try \d+ in |.*waiting for')
        return [line for line in self.stderr.splitlines() if not busy.match(line)]


SECTIONS = [kind.section for kind in STORE_KINDS if kind.section]

MADE: list[Callable[[], Answer]] = []
"""``verify`` of each tier that this process was given a configuration for, for the fixture that asks it when a test is over."""


def typed(config: Path, *arguments: object, output: str = "json") -> Answer:
    """One command, as a user types it. ``document`` is None where it printed none."""
    words = [*map(str, arguments)]
    end_of_options = words.index("--") if "--" in words else len(words)
    words[end_of_options:end_of_options] = ["--config", str(config), "--output", output]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = entry(words)
    text = out.getvalue()
    if not text or output != "json":
        return Answer(code, text or None, err.getvalue())
    document = json.loads(text)
    if isinstance(document, dict):  # a stream of lines may be another thing
        version = document.pop("schema_version", SCHEMA_VERSION)
        assert version == SCHEMA_VERSION
        if document.keys() == {"error"}:
            assert document["error"]["exit_code"] == code
            assert document["error"]["message"] in err.getvalue()
            return Answer(code, None, err.getvalue(), document["error"])
    return Answer(code, document, err.getvalue())


@dataclass
class TierCli:
    """One configuration file; ``settings`` are sections of it, besides [tier]."""

    folder: Path
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    named: str = "orders-0"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config = self.folder / "tiered-compactor.toml"
        self.tier = self.folder / "tier"
        self.set()
        MADE.append(self.verified)

    def set(self, **sections: dict[str, Any]) -> None:
        """Changes settings."""
        for name, values in sections.items():
            self.settings[name] = self.settings.get(name, {}) | values
        self.write(self.config, self.settings)

    def write(self, config: Path, settings: dict[str, dict[str, Any]]) -> None:
        tier = {"url": self.tier.as_uri(), "state_dir": str(self.folder / "state")} | settings.get("tier", {})
        lines = []
        for section, values in (settings | {"tier": tier}).items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        config.write_text("\n".join(lines) + "\n")

    def ask(self, *arguments: object, output: str = "json") -> Answer:
        return typed(self.config, *arguments, output=output)

    def verified(self) -> Answer:
        """What `verify` says of the tier that the configuration names now: from a machine that knows nothing, with no limits in its way."""
        config = self.folder / "verify.toml"
        where = {name: values for name, values in self.settings.items() if name.startswith(("tier", "kafka", *SECTIONS))}
        self.write(config, where | {"tier": where.get("tier", {}) | {"state_dir": str(self.folder / "state of verify")}})
        return typed(config, "verify")

    def do(self, *arguments: object) -> Any:
        """One command that must succeed; its document."""
        answer = self.ask(*arguments)
        assert answer.code == 0, answer
        return answer.document

    def refused(self, *arguments: object, code: int = 3, says: str | Sequence[str] = ()) -> Answer:
        """One command that must fail with this exit code, and with these words on stderr."""
        answer = self.ask(*arguments)
        assert answer.code == code, answer
        for word in [says] if isinstance(says, str) else says:
            assert word in answer.stderr
        return answer

    def open(self) -> Tier:
        """The tier that the configuration names now."""
        return open_tier(load_settings(str(self.config), {}))

    def bring(self, log_dir: Path) -> Any:
        topic, _, partition = self.named.rpartition("-")
        return self.do("import", log_dir, "--topic", topic, "--partition", partition)

    def run(self, *arguments: object) -> Any:
        """The row of a `run --force` over one partition that must succeed."""
        (row,) = self.do("run", "--force", *arguments)["partitions"]
        return row

    def retire_everything(self) -> list[str]:
        """Retire until ``verify`` has nothing to report, and return the keys of the deleted objects. For tiers without grace.

        One ``retire`` may not be enough: the date in a server's answers has whole seconds and can be a second older than the times that the
        server gives to objects, so that a round of just now is not due yet.
        """
        deleted: list[str] = []

        def is_nothing_left() -> bool:
            deleted.extend(self.do("retire")["deleted"])
            return bool(self.do("verify") == {"ok": True, "problems": []})

        wait_for(is_nothing_left)
        return deleted

    def export(self, target: Path) -> Path:
        self.do("export", self.named, target)
        return target

    def digest(self) -> dict[str, str]:
        """Every object of the tier with what is in it, but the audit; a tier that was not made yet is empty."""
        files = (path for path in sorted(self.tier.rglob("*")) if path.is_file() and path.parent.name != "audit")
        return {str(path.relative_to(self.tier)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- what a consumer reads --------------------------------------------------------------------------------------------------


def batches_of(folder: Path) -> Iterator[Batch]:
    for path in segment_paths(folder).values():
        yield from read_batches(path.read_bytes())


def contents(folder: Path) -> list[dict[str, object]]:
    """All batches with records, field by field; what the cleaner keeps of empty ones is not compared."""
    return [batch.content() for batch in batches_of(folder) if batch.records]


def visible(
    folder: Path, *, by_index: bool = False
) -> list[tuple[int, int, bytes | None, bytes | None, tuple[tuple[bytes, bytes | None], ...]]]:
    """What a read_committed consumer gets: records without those of transactions that the abort markers or the index name.

    ``by_index``: the index only, as a broker does it.
    """
    found = list(batches_of(folder))
    aborted: dict[int, list[tuple[int, int]]] = {}
    opened: dict[int, int] = {}
    for batch in found:
        if batch.transactional and not batch.control:
            opened.setdefault(batch.producer_id, batch.base_offset)
        elif batch.control and batch.records:
            first = opened.pop(batch.producer_id, None)
            if control_type(batch) == 0 and first is not None and not by_index:
                aborted.setdefault(batch.producer_id, []).append((first, batch.base_offset))
    for entry_bytes in transaction_index(folder).values():
        producer, first, last = (int.from_bytes(entry_bytes[at : at + 8], "big") for at in (2, 10, 18))
        aborted.setdefault(producer, []).append((first, last))
    undecided = min(opened.values(), default=2**63)
    return [
        (r.offset, r.timestamp, r.key, r.value, r.headers)
        for b in found
        if not b.control and b.last_offset < undecided
        if not (b.transactional and any(first <= b.base_offset <= last for first, last in aborted.get(b.producer_id, ())))
        for r in b.records
    ]


def latest(folder: Path) -> dict[bytes, bytes]:
    """Key -> value, deletes left out."""
    view: dict[bytes, bytes] = {}
    for _, _, key, value, _ in visible(folder):
        if key is not None and value is not None:
            view[key] = value
        elif key is not None:
            view.pop(key, None)
    return view


def tier_of_two_segments(folder: Path) -> TierCli:
    """A tier below ``folder`` that holds orders-0: a sealed segment with keys a and b, and one that replaces a."""
    made = TierCli(folder / "cli")
    log = log_of("a=1 b=1; /; a=2")
    made.bring(log.write(folder / "orders-0"))
    return made


class GrowingTier:
    """A log, and a tier below ``folder`` that gets what is added to it."""

    def __init__(self, folder: Path, settings: dict[str, dict[str, Any]]) -> None:
        self.folder = folder
        self.log = LogBuilder()
        self.cli = TierCli(folder / "own", settings)

    def segment(self, *records: str) -> None:
        self.log.put_segment(*records)

    def bring(self) -> None:
        self.cli.bring(self.log.write(self.folder / "log", indexes=True, index_interval_bytes=100))
