"""Real processes, killed at random moments over a tier that keeps growing; then the work is finished and everything is checked.

    python -m tests.kill_test --kills 200                            `run` (and `retire` and `import`), by SIGKILL
    python -m tests.kill_test --daemons 2 --minutes 5                daemons that share the tier
    python -m tests.kill_test --kills 200 --s3                       the same on a local S3 server
    python -m tests.kill_test --kills 200 --retention                segments expire, and topics are created again
    python -m tests.kill_test --kills 200 --url s3://bucket/prefix --endpoint http://127.0.0.1:9000

Ends with exit code 1 and a line for each thing that is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compactor.model.ids import partition_of_incarnation
from tests.builders import TOPIC_ID
from tests.evidence import write_record
from tests.plain_format import read_batches
from tests.support.deployment import Deployment, GrowingLog, Result, Running
from tests.support.endpoint import Client, Listener
from tests.support.keys import object_key
from tests.support.s3_server import free_port, running_moto, wait_for
from tests.support.tier_cli import Answer

Tell = Callable[[str], None]
TOPIC_IDS = (TOPIC_ID, "Zm9ydHktdHdvLXJlY29yZA")

SETTINGS: dict[str, dict[str, Any]] = {
    "cleaner": {"segment_bytes": 16_384, "min_cleanable_dirty_ratio": 0.0, "delete_retention_ms": 0},
    "publish": {"grace_ms": 300, "orphan_age_ms": 3_000},
    "lease": {"ttl_ms": 500},
    "daemon": {"interval_ms": 300, "listen": "127.0.0.1:0"},
    "serve": {"pages_listen": "127.0.0.1:0", "disk_cache_bytes": 100_000},
}
"""Several groups a round, hence several receipts; everything that takes minutes in earnest takes less than a second."""

PARTS = 12
"""A log grows by a part before every kill until it has so many, then more slowly."""

PATIENCE_S = 60.0

RETENTION = {"cleanup_policy": "compact,delete", "retention_bytes": 12_000}
"""What was cleaned before expires soon after the next part has come."""


@dataclass
class Ordeal:
    """One tier, its growing logs, and what has been seen to be wrong."""

    deployment: Deployment
    dice: random.Random
    tell: Tell
    logs: list[GrowingLog] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    pending: dict[str, Path] = field(default_factory=dict)
    expires: bool = False
    former: list[GrowingLog] = field(default_factory=list)
    """Logs of topics that were deleted and created again since."""

    @staticmethod
    def over(
        folder: Path, seed: int, tell: Tell, *, partitions: int = 3, sections: Mapping[str, Any] = {}, retention: bool = False
    ) -> Ordeal:
        """sections: of the settings, besides SETTINGS: where the tier lies. retention: segments expire, and topics are created again."""
        dice = random.Random(seed)
        cleaner = {"cleaner": {**SETTINGS["cleaner"], **RETENTION}} if retention else {}
        ordeal = Ordeal(Deployment(folder, {**SETTINGS, **sections, **cleaner}), dice, tell, expires=retention)
        ordeal.logs = [ordeal.new_log(number, 1) for number in range(partitions)]
        return ordeal

    def new_log(self, partition: int, incarnation: int) -> GrowingLog:
        """The log of a topic from its creation on."""
        folder = self.deployment.folder / f"incarnation-{incarnation}"
        folder.mkdir(parents=True, exist_ok=True)
        made = GrowingLog("orders", partition, folder, self.dice)
        if self.expires:
            made.log.topic_id = TOPIC_IDS[incarnation - 1]
        return made

    def create_again(self) -> None:
        """The topic is deleted and created again: all of its partitions begin at offset 0, under another id."""
        for log in self.logs:
            if log.name in self.pending:
                self.grow(log)
        self.former, self.logs = self.logs, [self.new_log(log.partition, 2) for log in self.logs]
        self.ends["created again"] += 1

    # --- growing ---

    def part(self, log: GrowingLog) -> tuple[object, ...]:
        """The import command for the part that is not in the tier yet; a killed import is tried again with the same directory."""
        folder = self.pending.get(log.name) or log.write_part()
        self.pending[log.name] = folder
        options = ("--new-incarnation",) if log.log.topic_id == TOPIC_IDS[1] else ()
        return ("import", folder, "--topic", log.topic, "--partition", log.partition, *options)

    def grow(self, log: GrowingLog) -> None:
        """One more part, for certain."""
        command = self.part(log)
        done = self.deployment.ask(*command)
        if done.code == 4:  # it was killed before, and its registration is so old that it was voided meanwhile
            done = self.deployment.ask(*command)
        if done.code == 0:
            del self.pending[log.name]
        else:
            self.fail(f"import into {log.name}", done)

    def fail(self, what: str, done: Result | Answer) -> None:
        self.wrong.append(f"{what}: exit code {done.code}: {done[-1].strip()}")

    # --- killing ---

    def kill_once(self, span_s: float) -> bool:
        """Starts a command and kills it after a random part of ``span_s``, unless it has ended by then. Whether it was killed."""
        log = self.dice.choice(self.logs)
        choice = self.dice.random()
        command = ("run",) if choice < 0.7 else ("retire",) if choice < 0.85 else self.part(log)
        process = self.deployment.start(*command)
        try:
            process.wait(self.dice.uniform(0.3, 1.0) * span_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.ends[f"{command[0]} killed"] += 1
            self._note_what_is_left()
            return True
        self.ends[f"{command[0]} ended with {process.returncode}"] += 1
        if command[0] == "import" and process.returncode == 0:
            del self.pending[log.name]
        elif process.returncode not in (0, 4):  # 4: the process killed last still holds its lease
            self.wrong.append(f"{command[0]}: exit code {process.returncode}: {process.said().strip()}")
        return False

    def kill_endpoint(self) -> None:
        """Kill an endpoint that is being read: another one in its place goes on with what the first one would have sent."""
        log = self.dice.choice(self.logs)
        sent = {True: b"", False: b""}
        for is_first in sent:
            port = free_port()
            process = self.deployment.start("serve", "--listen", f"127.0.0.1:{port}")
            try:
                wait_for(f"127.0.0.1:{port}", process, seconds=int(PATIENCE_S))
                with Client(Listener(f"127.0.0.1:{port}")) as client:
                    end = client.offset(log.topic, -1, partition=log.partition).offset
                    offset = client.offset(log.topic, -2, partition=log.partition).offset
                    stop = self.dice.randint(offset, end) if is_first else end
                    while offset < stop:
                        row = client.fetch(log.topic, offset, partition=log.partition, max_bytes=1000)
                        batches = list(read_batches(bytes(row.records or b"")))
                        if row.error_code or not batches:
                            break
                        sent[is_first] += bytes(row.records)
                        offset = batches[-1].last_offset + 1
            finally:
                process.put_down()
            self.ends["serve killed"] += 1
        if not sent[False].startswith(sent[True]) or not sent[False]:
            self.wrong.append(f"{log.name}: another endpoint does not send what the one before it did")

    def _note_what_is_left(self) -> None:
        """That the kills hit something: rounds and imports that were begun, leases that were not given back."""
        tier = self.deployment.opened()
        for name in tier.list_partitions():
            state = tier.open_partition_log(name).refresh()
            self.ends["left an open round"] += state.intent is not None
            self.ends["left some groups done"] += state.intent is not None and bool(state.intent.receipts)
            self.ends["left an open import"] += bool(state.registrations)
            self.ends["left half-done retiring"] += bool(state.retiring)

    def kill(self, kills: int) -> None:
        """Until ``kills`` processes were killed, with an import now and then and a look whether the tier is sound."""
        span = 0.0
        for _ in range(2):  # the first one may have to compile
            for log in self.logs:
                self.grow(log)
            begun = time.monotonic()
            done = self.deployment.process("run")
            span = time.monotonic() - begun
            if done.code:
                self.fail("a run that nobody killed", done)
        killed = 0
        while killed < kills and not self.wrong:
            if self.expires and killed == kills // 2 and not self.former:
                self.create_again()
            log = self.dice.choice(self.logs)
            if log.parts < PARTS or self.dice.random() < 0.2:
                self.grow(log)
            if self.kill_once(span * 1.1):
                killed += 1
                if killed % 10 == 0:
                    self.tell(f"{killed} killed; {dict(sorted(self.ends.items()))}")
                    self.check_sound()
                    self.kill_endpoint()

    def share(self, daemons: int, seconds: float) -> None:
        """Daemons over one tier, with imports, and a kill every few seconds."""
        for log in self.logs:
            self.grow(log)
        processes = [self.deployment.start("daemon") for _ in range(daemons)]
        rounds: Counter[int] = Counter()
        until = time.monotonic() + seconds
        kill_at = time.monotonic() + seconds / 6

        def all_take_part() -> bool:
            return all(_rounds(process) for process in processes)

        try:
            # On a busy machine a daemon needs long to start. One that is told to end before its first round ends with 143.
            while not self.wrong and (time.monotonic() < until or (time.monotonic() < until + PATIENCE_S and not all_take_part())):
                self.grow(self.dice.choice(self.logs))
                time.sleep(self.dice.uniform(0.2, 0.6))
                if kill_at <= time.monotonic() < until:
                    which = self.dice.randrange(daemons)
                    processes[which].put_down()
                    rounds[which] += _rounds(processes[which])
                    self.ends["daemon killed"] += 1
                    processes[which] = self.deployment.start("daemon")
                    kill_at = time.monotonic() + max(4.0, seconds / 6)
            for which, process in enumerate(processes):
                self.end_daemon(process)
                rounds[which] += _rounds(process)
        finally:
            for process in processes:
                process.put_down()
        self.tell(f"rounds by daemon: {dict(sorted(rounds.items()))}; {dict(self.ends)}")
        self.wrong += [f"daemon {which} did nothing" for which in range(daemons) if not rounds[which]]

    def end_daemon(self, process: Running) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != 0:
            self.wrong.append(f"a daemon ended with {code}: {process.said()[-2000:]}")

    # --- checking ---

    def check_sound(self) -> list[str]:
        """What `verify` remarks that is no problem."""
        verified, checked = self.deployment.ask("verify"), self.deployment.ask("checkpoints", "verify")
        if verified.code:
            self.fail("verify", verified)
        if checked.code:
            self.fail("checkpoints verify", checked)
        problems = verified.document["problems"] if verified.document else []
        return [f"{problem['kind']} {problem['object']}" for problem in problems]

    def finish(self) -> list[str]:
        """Imports, cleans and deletes what is left, without anybody being killed; then checks everything. What is wrong."""
        for log in self.logs:
            if log.name in self.pending:
                self.grow(log)
        if self.wrong:
            return self.wrong
        time.sleep(1)  # the leases of those that were killed
        for _ in range(6):
            done = self.deployment.ask("run", "--force")
            if done.code == 0 and all(row["status"] == "nothing_to_do" for row in done.document["partitions"]):
                break
        else:
            self.wrong.append(f"runs do not come to an end: {self.deployment.ask('run', '--force')}")
        orphan_age_ms = self.deployment.settings["publish"]["orphan_age_ms"]
        time.sleep(orphan_age_ms / 1000 + 0.5)
        self._retire_until_nothing_waits()
        self.wrong += [f"left over: {remark}" for remark in self.check_sound()]
        self._check_objects()
        starts = []
        for number, log in self._incarnations():
            target = self.deployment.folder / f"exported-{log.name}-{number}"
            starts.append(
                self.deployment.opened().open_partition_log(partition_of_incarnation(log.topic, log.partition, number)).refresh().log_start
            )
            done = self.deployment.ask("export", log.name, target, *(("--topic-id", log.log.topic_id) if self.expires else ()))
            if done.code:
                self.fail("export", done)
            else:
                self.wrong += [f"{log.name}~{number}: {problem}" for problem in log.wrong_in(target, clean=True, start=starts[-1])]
        if self.expires and not any(starts):
            self.wrong.append("nothing has expired")
        self.tell(f"finished: {sum(len(log.truth) for log in self.logs)} keys in {sum(log.parts for log in self.logs)} imports")
        return self.wrong

    def _retire_until_nothing_waits(self) -> None:
        """More than once where a server's clock, which has whole seconds, is behind the times that it gives to objects."""
        until = time.monotonic() + PATIENCE_S
        while (done := self.deployment.ask("retire")).code == 0 and done.document["waiting"] and time.monotonic() < until:
            time.sleep(0.2)
        if done.code or done.document["waiting"]:
            self.fail("retire", done)

    def _incarnations(self) -> list[tuple[int, GrowingLog]]:
        """All logs that the tier has, each with the number of its incarnation."""
        present = [(1 + bool(self.former), log) for log in self.logs if log.parts]
        return [(1, log) for log in self.former] + present

    def _check_objects(self) -> None:
        """Exactly the objects of live segments are in the store."""
        tier = self.deployment.opened()
        for number, log in self._incarnations():
            name = partition_of_incarnation(log.topic, log.partition, number)
            expected = {
                object_key(name, segment, kind) for segment in tier.open_partition_log(name).refresh().live for kind in segment.files
            }
            listed = {info.key for info in tier.ports.data.list(f"{name}/")}
            self.wrong += [f"{key} is an orphan" for key in sorted(listed - expected)]
            self.wrong += [f"{key} is missing" for key in sorted(expected - listed)]


def _rounds(daemon: Running) -> int:
    return sum(f": {status}, " in line for line in daemon.said().splitlines() for status in ("cleaned", "resumed"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kill_test", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="how many processes to kill")
    parser.add_argument("--daemons", type=int, default=0, metavar="N", help="daemons that share the tier instead")
    parser.add_argument("--minutes", type=float, default=1, help="for how long (with --daemons)")
    parser.add_argument("--seed", type=int, default=None, help="of data and moments (default: another one each time)")
    parser.add_argument("--url", default="", help="the tier (default: a new directory)")
    parser.add_argument("--endpoint", default="", help="of the S3 server")
    parser.add_argument("--s3", action="store_true", help="on a local S3 server that is started for it (moto)")
    parser.add_argument("--retention", action="store_true", help="segments expire, and topics are created again")
    parser.add_argument("--record", type=Path, help="write what happened here, as JSON")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(1 << 31)
    print(f"seed {seed}", flush=True)
    with ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="kill-test-")))
        sections: dict[str, Any] = {"tier": {"url": args.url}, "s3": {"endpoint_url": args.endpoint}} if args.url else {}
        if args.s3:
            bucket = at_end.enter_context(running_moto()).make_bucket()
            os.environ.update(bucket.server.environment())
            sections = bucket.sections()
        ordeal = Ordeal.over(folder, seed, lambda text: print(text, flush=True), sections=sections, retention=args.retention)
        if args.daemons:
            ordeal.share(args.daemons, args.minutes * 60)
        else:
            ordeal.kill(args.kills or 20)
        wrong = ordeal.finish()
    for problem in wrong[:40]:
        print(f"WRONG: {problem}")
    write_record(args.record, "kill-test", {"seed": seed, "s3": bool(sections), "ends": dict(ordeal.ends), "violations": wrong})
    print(f"{len(wrong)} things are wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
