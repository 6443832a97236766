"""Two daemons over one tier on S3 for an hour, while everything around them fails; what is read is compared all the time.

    python -m tests.soak --minutes 60 --out build/soak

An S3 server stands behind a proxy that injects faults (503, resets, slow and truncated answers, lost ones, damaged bodies). Importers
keep appending, and are killed now and then. Two daemons, each with a small disk, share the tier; they are stopped for longer than
their leases, their disks are full for a while, and one of them is killed again and again (the other is not: what it uses is watched
for the whole time). Now and then everything that is read of one partition's logs is damaged, until a round has found it. Checked all
the time: what an export and what a consumer reads against a naive model; the balance of each round; `verify --deep`. At the end faults
cease, every quarantine must heal, and the tier must hold what is live and nothing else.

Writes soak.json and soak.svg. Ends with exit code 1 and a line for each thing that is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired
from typing import Any

from compactor.consumer import open_consumer
from tests.evidence import write_record
from tests.kill_test import Ordeal
from tests.soak.plot import drawn
from tests.soak.stage import SETTINGS, Stage, set_up
from tests.soak.story import Story
from tests.soak.trouble import Trouble
from tests.soak.watch import Samples, not_level, processor_seconds
from tests.support.deployment import GrowingLog

PARTITIONS = 4
GROW_S, CHECK_S, SAMPLE_S, DEEP_S = 6.0, 8.0, 5.0, 240.0
HEAL_S = 600.0
MIB = 1 << 20


def tell(text: str) -> None:
    """Past what a command that runs in this process has made of stdout."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.__stdout__, flush=True)


@dataclass
class Soak:
    stage: Stage
    story: Story
    trouble: Trouble
    dice: random.Random
    over: threading.Event
    began: float = field(default_factory=time.monotonic)
    samples: Samples = field(default_factory=Samples)
    quarantined: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Partition -> its quarantines: when each was first and last seen."""
    figures: dict[str, Any] = field(default_factory=dict)

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    # ---- what goes on at the same time --------------------------------------------------------------------------------------

    def grow(self, seconds: float) -> None:
        """Imports, one now and then killed, and from time to time a look at everything."""
        deep = self.elapsed() + DEEP_S / 2
        while self.elapsed() < seconds and not self.story.wrong:
            log = self.dice.choice(self.story.logs)
            if self.dice.random() < 0.06:
                self.kill_import(log)
            else:
                self.story.grow(self.stage.importer, log)
            if self.elapsed() > deep:
                deep = self.elapsed() + DEEP_S
                self.look_deeply()
            self.over.wait(self.dice.uniform(0.3, 1.7) * GROW_S)

    def kill_import(self, log: GrowingLog) -> None:
        process = self.stage.importer.start(*self.story.command(log))
        try:
            if process.wait(self.dice.uniform(0.8, 4)) == 0:
                self.story.confirm(log)
        except TimeoutExpired:
            process.put_down()
            self.trouble.note("imports killed")

    def look_deeply(self) -> None:
        answer = self.stage.beside.ask("verify", "--deep")
        self.story.happened["verify --deep"] += 1
        if answer.code:
            self.story.wrong.append(f"verify --deep: exit code {answer.code}: {answer.stderr.strip()[-1500:]}")

    def check(self) -> None:
        opened = self.stage.beside.opened()
        consumer = open_consumer(str(self.stage.importer.config))
        folder = self.stage.beside.folder / "exported"
        while not self.over.wait(CHECK_S):
            log = self.dice.choice(self.story.logs)
            if not self.story.acknowledged[log.name]:
                continue
            self.story.check_export(opened, log, folder)
            self.story.check_balance(opened.open_partition_log(opened.list_partitions([log.name])[0]).refresh())
            self.story.check_consumer(consumer, log)
        consumer.close()

    def watch(self) -> None:
        opened = self.stage.beside.opened()
        used: dict[int, float] = {}
        ill: set[str] = set()
        before = 0
        while not self.over.wait(SAMPLE_S):
            states = [opened.open_partition_log(name).refresh() for name in opened.list_partitions()]
            for state in states:
                self.note_quarantine(
                    str(state.topic_partition), ill=state.quarantine is not None, was_ill=str(state.topic_partition) in ill
                )
            ill = {str(state.topic_partition) for state in states if state.quarantine is not None}
            requests = sum(self.stage.proxy.seen.requests.values())
            more = {
                "MB that readers see": sum(state.bytes for state in states) / MIB,
                "MB imported": self.story.happened["bytes imported"] / MIB,
                "quarantined partitions": float(sum(state.quarantine is not None for state in states)),
                "requests per second": (requests - before) / SAMPLE_S,
            }
            before = requests
            self.samples.add(self.elapsed(), {machine.name: machine.daemon.pid for machine in self.stage.machines}, more)
            for machine in self.stage.machines:
                if machine.ended_by_itself():
                    self.story.wrong.append(f"{machine.name} ended by itself: {machine.daemon.said()[-1500:]}")
                pid = machine.daemon.pid
                used[pid] = max(used.get(pid, 0.0), processor_seconds(pid))
            self.figures["processor seconds of daemons"] = round(sum(used.values()), 1)
            if self.story.wrong:
                tell(self.story.wrong[-1])

    def note_quarantine(self, name: str, *, ill: bool, was_ill: bool) -> None:
        """Rounds that are tried in vain meanwhile make it longer, not another one."""
        seen = self.quarantined.setdefault(name, [])
        if ill:
            since = seen.pop()[0] if was_ill else self.elapsed()
            seen.append((since, self.elapsed()))

    # ---- the end ------------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Without faults every quarantine ends and everything gets clean, by the daemons alone."""
        for log in self.story.logs:
            while not self.story.grow(self.stage.importer, log):
                time.sleep(1)
        names = [log.name for log in self.story.logs]
        self.stage.importer.do("wake", *names)
        opened, until = self.stage.beside.opened(), time.monotonic() + HEAL_S
        while True:
            states = [opened.open_partition_log(name).refresh() for name in opened.list_partitions()]
            left = [
                f"{state.topic_partition}: {state.quarantine.reason if state.quarantine else 'is not clean'}"
                for state in states
                if state.quarantine is not None or state.first_dirty_offset <= state.end_offset
            ]
            if not left:
                return
            if time.monotonic() > until:
                self.story.wrong += [f"not healed in {HEAL_S:.0f} s: {each}" for each in left]
                return
            time.sleep(2)

    def end_daemons(self) -> None:
        for machine in self.stage.machines:
            machine.daemon.send_signal(signal.SIGTERM)
            try:
                code = machine.daemon.wait(60)
            except TimeoutExpired:
                code = -9
            if code:
                self.story.wrong.append(f"{machine.name} ended with {code}: {machine.daemon.said()[-1500:]}")

    def finish(self) -> None:
        """The rest of the work by commands, then a look at every object."""
        ordeal = Ordeal(self.stage.beside, self.dice, tell, self.story.logs)
        self.story.wrong += ordeal.finish()
        opened = self.stage.beside.opened()
        for log in self.story.logs:
            self.story.check_balance(opened.open_partition_log(opened.list_partitions([log.name])[0]).refresh())

    def guarded(self, what: Callable[[], None]) -> threading.Thread:
        """A thread that ends early is wrong, too."""

        def work() -> None:
            try:
                what()
            except Exception:  # noqa: BLE001 - told with everything else
                self.story.wrong.append(f"{what.__name__}: {traceback.format_exc()}")

        thread = threading.Thread(target=work, name=what.__name__)
        thread.start()
        return thread


def run(soak: Soak, minutes: float) -> None:
    for log in soak.story.logs:
        soak.story.grow(soak.stage.importer, log)
    troubles_over = soak.trouble.over
    trouble = soak.guarded(soak.trouble.run)
    threads = [soak.guarded(soak.check), soak.guarded(soak.watch)]
    try:
        soak.grow(minutes * 60)
        troubles_over.set()
        trouble.join()
        if not soak.story.wrong:
            soak.heal()
    finally:
        troubles_over.set()
        soak.over.set()
        for thread in (trouble, *threads):
            thread.join()
    soak.figures["minutes"] = round(soak.elapsed() / 60, 1)
    soak.end_daemons()
    if not soak.story.wrong:
        soak.finish()


def report(soak: Soak, minutes: float, seed: int, out: Path) -> int:
    seen, story = soak.stage.proxy.seen, soak.story
    first = soak.stage.machines[0].name
    story.wrong += not_level(soak.samples, first)
    lasted = [last - first for spells in soak.quarantined.values() for first, last in spells]
    imported = story.happened["bytes imported"]
    requests = sum(seen.requests.values())
    document = {
        "command": f"python -m tests.soak --minutes {minutes:g} --seed {seed}",
        "date": time.strftime("%Y-%m-%d"),
        "wrong": story.wrong,
        **soak.figures,
        "processor seconds of this process": round(time.process_time(), 1),
        "happened": dict(sorted(story.happened.items())),
        "trouble": dict(sorted(soak.trouble.happened.items())),
        "faults": dict(sorted(seen.faults.items())),
        "quarantines": len(lasted),
        "seconds in quarantine, median and longest": [round(median(lasted)), round(max(lasted))] if lasted else None,
        "requests": dict(sorted(seen.requests.items())),
        "requests per MiB imported": round(requests / (imported / MIB), 1) if imported else None,
        "bytes read per byte imported": round(seen.bytes_read / imported, 2) if imported else None,
        "bytes written per byte imported": round(seen.bytes_written / imported, 2) if imported else None,
        "level": {
            what: dict(zip(("second quarter", "last quarter"), soak.samples.growth(f"{first} {what}"), strict=True))
            for what in ("MB", "handles", "threads")
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "soak.json").write_text(json.dumps({**document, "samples": soak.samples.rows, "when": soak.trouble.when}, indent=1) + "\n")
    fields = {
        "seed": seed,
        "minutes": soak.figures["minutes"],
        "faults": sum(seen.faults.values()),
        "rounds": story.happened["rounds"],
        "views": sum(count for what, count in story.happened.items() if what.startswith("views of ")),
        "violations": story.wrong,
    }
    write_record(out / "record.json", "soak", fields)
    names = [machine.name for machine in soak.stage.machines]
    panels = [
        ("Resident memory, MB", [f"{name} MB" for name in names]),
        ("Open handles", [f"{name} handles" for name in names]),
        ("MB in the tier", ["MB imported", "MB that readers see"]),
        ("Requests per second, all processes", ["requests per second"]),
        ("Partitions in quarantine", ["quarantined partitions"]),
    ]
    title = f"{soak.figures['minutes']:.0f} minutes of faults; each tick is one trouble"
    (out / "soak.svg").write_text(drawn(soak.samples, panels, soak.trouble.when, title))
    print(json.dumps(document, indent=1))
    print("\n".join(f"WRONG: {each}" for each in story.wrong[:40]) or "nothing is wrong")
    return 1 if story.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="of data and trouble (default: another one each time)")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="where soak.json and soak.svg are written")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(1 << 31)
    tell(f"seed {seed}, {SETTINGS}")
    # A folder that cannot be removed is no finding: a daemon's file may still lie on a disk that was unmounted.
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name, set_up(Path(name), seed) as stage:
        os.environ["PYTHONUNBUFFERED"] = "1"
        dice = random.Random(seed)
        logs = [GrowingLog("orders", number, Path(name) / "logs", dice, value_bytes=16_000) for number in range(PARTITIONS)]
        over = threading.Event()
        trouble = Trouble(stage, random.Random(seed + 1), threading.Event(), PARTITIONS)
        soak = Soak(stage, Story(logs), trouble, random.Random(seed + 2), over)
        trouble.clock = soak.elapsed
        run(soak, args.minutes)
        return report(soak, args.minutes, seed, args.out)


if __name__ == "__main__":
    sys.exit(main())
