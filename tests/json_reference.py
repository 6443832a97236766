"""docs/reference/json.md: one example of each command's JSON document, from a small tier, and how real ones are held against them.

``python -m tests.json_reference`` writes the page anew.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from compactor.cli.output import SCHEMA_VERSION, Output
from compactor.cli.tiers import DOCTOR_FIELDS, print_check_findings
from compactor.model.ids import TopicPartition
from compactor.upkeep.broker_doctor import FirstUntieredRecord, PartitionHealthFacts, partition_health_findings
from compactor.views.forecast import NO_PRICES
from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "json.md"
HEAD = f"""# JSON documents

With `--output json` a command prints one document on stdout; remarks, progress and errors go to stderr. `schema_version`
({SCHEMA_VERSION}) rises when a field changes its meaning or is removed; new fields may be added at any time. A command that fails before
it has a result prints `error`; a command that failed on some partitions only prints its document, and the exit code is that of the
gravest failure. Times ending in `_ms` are milliseconds since 1970, UTC; sizes are bytes; null means not known or not applicable.

What the daemon and the agent serve is described in [status-api.md](status-api.md). `cat` prints [a line per record](../commands/cat.md);
the documents of `demo`, `orphans`, `topics takeover` and `topics snapshot` are on [the pages of these commands](../commands). Below,
lists are cut after their first element. `python -m tests.json_reference` writes this page; tests compare it with what the commands print.
"""


class Example(NamedTuple):
    """``words``: the command line without the common options."""

    words: tuple[str, ...]
    document: dict[str, Any]

    @property
    def title(self) -> str:
        return shlex.join(self.words)


def examples(folder: Path) -> Iterator[Example]:
    """One partition, from its import to its deletion."""
    log = LogBuilder()
    for number in range(4):
        log.put(f"customer-{number % 2}=name {number}", "customer-7")
        log.roll()
    log.put("customer-1=the newest")
    log_root = folder / "kafka"
    log.write(log_root / "orders-0")
    target = (folder / "generations").as_uri()
    cli = TierCli(
        folder / "a tier",
        {"publish": {"grace_ms": 0, "undo_window_ms": 86_400_000}, "tier.pinterest": {"cluster": "prod", "target": target}},
    )

    def does(*words: object, code: int = 0) -> Example:
        answer = cli.ask(*words)
        assert answer.code == code, answer
        told = answer.document if answer.document is not None else {"error": answer.error}
        return Example(tuple(str(word).replace(str(folder) + "/", "") for word in words), told)

    def run_id() -> str:
        return str(cli.do("runs", "list")["runs"][-1]["run_id"])

    yield does("topics", "orders-9", code=2)
    yield does("import", log_root / "orders-0")
    yield does("import", log_root, "--topics", "orders")
    yield does("topics")
    yield does("status")
    yield does("config", "check")
    yield does("config", "show")
    yield does("plan")
    yield does("explain", "orders-0")
    yield does("run", "--force")
    yield does("runs", "list")
    yield does("runs", "show", run_id())
    yield does("segments", "list", "orders-0")
    yield does("segments", "dump", "orders-0", cli.do("segments", "list", "orders-0")["segments"][0]["id"], "--whole")
    yield does("bloom", "show", "orders-0")
    yield does("bloom", "rebuild", "orders-0")
    yield does("checkpoints", "list")
    yield does("checkpoints", "show", "orders-0")
    yield does("checkpoints", "lineage", "orders-0")
    yield does("checkpoints", "diff", "orders-0", run_id())
    yield does("checkpoints", "verify")
    yield does("recompact", "--dry-run")
    yield does("explain", "orders-0", "--key", "customer-1")
    yield does("erasure", "orders", "--key", "customer-0", code=3)
    yield does("generations", "write", "orders-0")
    yield does("generations", "list")
    yield does("generations", "retire")
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
    tables = {"outputs.iceberg": {"warehouse": (folder / "warehouse").as_uri()}, "outputs.iceberg.catalog": catalog}
    cli.set(**tables, **{"outputs.iceberg.topics.orders": {}, "tier.pinterest": {"target": ""}})
    yield does("outputs", "write", "orders-0")
    yield does("outputs", "list")
    yield does("verify")
    yield does("export", "orders-0", folder / "exported")
    live = next(each["id"] for each in cli.do("segments", "list", "orders-0")["segments"] if not each["replaced_by"])
    next(cli.tier.glob(f"orders-0/*{live}.index")).unlink()
    yield does("repair", "orders-0", "--from", folder / "exported")
    yield does("retire", "--dry-run")
    yield does("undo", run_id())
    yield does("pause", "orders", "--reason", "a migration")
    yield does("resume", "orders")
    yield does("wake", "orders-0")
    yield does("clean", log_root / "orders-0", folder / "cleaned", "--profile")
    yield does("topics", "adopt", "orders", "--topic-id", "Zm9yLXRoZS1kb2N1bWVudA")
    yield does("topics", "delete-records", "orders-0", "--before", 4)
    yield does("topics", "delete", "orders-0")
    yield does("audit", "list")
    yield doctor_example()


def doctor_example() -> Example:
    """What `doctor` prints of a partition whose brokers do not tier a closed segment. The facts are made up, as the tier has no brokers."""
    hour_ms, now_ms, printed = 3_600_000, 1_800_000_000_000, StringIO()
    facts = PartitionHealthFacts(TopicPartition("orders", 0), (), {}, FirstUntieredRecord(42, now_ms - 5 * hour_ms, now_ms - 3 * hour_ms))
    print_check_findings(partition_health_findings(facts, now_ms, NO_PRICES), Output("json", printed, StringIO()), fields=DOCTOR_FIELDS)
    return Example(("doctor", "orders-0"), json.loads(printed.getvalue()))


def short(document: Any) -> Any:
    """The first element of each list."""
    if isinstance(document, dict):
        return {key: short(value) for key, value in document.items()}
    return [short(document[0])] if isinstance(document, list) and document else document


def page(folder: Path) -> str:
    parts = [HEAD]
    for example in examples(folder):
        text = json.dumps({"schema_version": SCHEMA_VERSION, **short(example.document)}, indent=2, ensure_ascii=False)
        text = text.replace(str(folder), "/srv")
        parts.append(f"## `{example.title}`\n\n```json\n{text}\n```\n")
    return "\n".join(parts)


def written() -> dict[str, Any]:
    """The examples of the page, by command."""
    found = re.findall(r"^## `(.+?)`\n\n```json\n(.+?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return {without_ids(title): json.loads(text) for title, text in found}


def without_ids(title: str) -> str:
    """Ids differ each time."""
    return re.sub(r"(?<!\S)[A-Za-z0-9_-]{22}(?!\S)", "ID", title)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        PAGE.write_text(page(Path(made)))
