"""What is written, and what any reader of the tier must find: the last committed value of each key, told by a naive model."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from compactor.access.tier import Tier
from compactor.consumer import Place, TieredConsumer
from compactor.control.state import PartitionState, sum_batch_digests
from compactor.errors import CompactorError
from compactor.upkeep.export import export_partition
from tests.builders import read
from tests.support.deployment import Deployment, GrowingLog
from tests.support.tier_cli import latest

REPEATABLE = (4, 5)
"""Exit codes of an import that faults explain: its registration was voided meanwhile, or the store would not answer."""


@dataclass
class Story:
    """``acknowledged``: partition -> end offset (exclusive) of what an import has confirmed. ``lock``: held to write or read the model."""

    logs: list[GrowingLog]
    pending: dict[str, Path] = field(default_factory=dict)
    acknowledged: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    seen_rounds: set[str] = field(default_factory=set)

    # ---- writing ------------------------------------------------------------------------------------------------------------

    def command(self, log: GrowingLog) -> tuple[object, ...]:
        """The import of the part that is not confirmed yet, or of a new one."""
        with self.lock:
            if log.name not in self.pending:
                self.pending[log.name] = log.write_part(segments=2, batches=12, keys=300)
                log.log.segments = [(base, []) for base, _ in log.log.segments]  # they are on disk
        return ("import", self.pending[log.name], "--topic", log.topic, "--partition", log.partition)

    def grow(self, importer: Deployment, log: GrowingLog) -> bool:
        """One import; whether it is confirmed."""
        command = self.command(log)
        done = importer.ask(*command)
        if done.code == 0:
            self.confirm(log)
        elif done.code in REPEATABLE:
            self.happened[f"imports that ended with {done.code} and were repeated"] += 1
        else:
            self.wrong.append(f"import into {log.name}: exit code {done.code}: {done.stderr.strip()[-500:]}")
        return done.code == 0

    def confirm(self, log: GrowingLog) -> None:
        folder = self.pending.pop(log.name)
        self.acknowledged[log.name] = log.log.next_offset
        self.happened["imports"] += 1
        self.happened["bytes imported"] += sum(path.stat().st_size for path in folder.glob("*.log"))
        shutil.rmtree(folder)

    # ---- reading ------------------------------------------------------------------------------------------------------------

    def expected(self, log: GrowingLog, end: int) -> dict[bytes, bytes]:
        """Key -> value of everything committed below ``end``, deletes left out."""
        view: dict[bytes, bytes] = {}
        with self.lock:
            for offset, key, value in log.committed:
                if offset >= end:
                    break
                if value is None:
                    view.pop(key, None)
                else:
                    view[key] = value
        return view

    def compare(self, log: GrowingLog, who: str, found: dict[bytes, bytes], end: int, confirmed: int) -> None:
        expected = self.expected(log, end)
        if end < confirmed:
            self.wrong.append(f"{who} of {log.name} ends at {end}, and {confirmed} was confirmed")
        differ = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        for key in differ[:3]:
            self.wrong.append(f"{who} of {log.name} up to {end}: {key!r} is {_short(found.get(key))}, not {_short(expected.get(key))}")
        self.happened[f"views of {who} compared"] += 1

    def check_export(self, opened: Tier, log: GrowingLog, folder: Path) -> None:
        """The whole view, through the plain reader of the tests."""
        confirmed = self.acknowledged[log.name]
        report = export_partition(opened, opened.list_partitions([log.name])[0], folder)
        found = [record for batches in read(folder).values() for batch in batches if not batch.control for record in batch.records]
        with self.lock:
            strange = [record.offset for record in found if log.records.get(record.offset) != (record.key, record.value)]
        self.wrong += [f"an export of {log.name}: offset {offset} was never written so" for offset in strange[:3]]
        if [record.offset for record in found] != sorted({record.offset for record in found}):
            self.wrong.append(f"an export of {log.name}: offsets do not ascend")
        self.compare(log, "an export", latest(folder), report.end_offset + 1, confirmed)
        shutil.rmtree(folder)

    def check_consumer(self, consumer: TieredConsumer, log: GrowingLog) -> None:
        """The last values, as an application restores its state; through whatever stands between it and the store."""
        confirmed = self.acknowledged[log.name]
        try:
            values = consumer.latest(Place(log.topic, log.partition))
            found = {message.key() or b"": message.value() or b"" for block in values for message in block.messages()}
        except CompactorError as error:
            self.happened[f"reads of a consumer that failed and said so ({type(error).__name__})"] += 1
            return
        self.compare(log, "a consumer", found, values.next_offset, confirmed)

    def check_balance(self, state: PartitionState) -> None:
        """Each round that was published, once: that its sums add up, and that what it left is what the segments record."""
        for run in state.runs:
            if not run.published_slot or run.run_id in self.seen_rounds:
                continue
            self.seen_rounds.add(run.run_id)
            self.happened["rounds"] += 1
            self.happened["bytes read by rounds"] += int(run.stats.get("bytes_read", 0))
            self.happened["bytes written by rounds"] += int(run.stats.get("bytes_written", 0))
            if run.balance is None or run.content is None:
                self.wrong.append(f"round {run.run_id} of {state.topic_partition} has no balance")
            elif found := run.balance.imbalance_problem():
                self.wrong.append(f"round {run.run_id} of {state.topic_partition}: {found}")
        if state.live and sum_batch_digests(state.live) is None:
            self.wrong.append(f"{state.topic_partition}: a live segment has no digest")


def _short(value: bytes | None) -> str:
    return "not there" if value is None else f"{value[:12]!r}... ({len(value)} bytes)"
