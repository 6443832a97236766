"""Brokers with tiered storage under load and faults while two daemons compact; every read is judged.

    python -m tests.broker_soak --minutes 60 --seed 1

Three brokers and a controller of a stock Kafka tier their topics. Producers write plain and transactional records, tombstones and keys
whose number grows. Brokers are killed, stopped, frozen, cut off and replaced by empty ones; leaders move, also uncleanly; records and
topics are deleted; daemons are killed and frozen; the S3 server that holds the control logs refuses, is slow and loses answers. Four
consumers (librdkafka and Kafka's own, both isolation levels) read all partitions from the first offset to the end, all the time.
``tests.read_checker`` judges each pass.

First a control run with the same seed and without daemons shows which kinds of errors brokers and consumers have anyway. A kind that only
the run with daemons shows is a violation. At the end faults cease, all brokers restart and replay the metadata topic, everything is read
once more, and ``verify --deep`` checks the tier.

Ends with exit code 1 and a line for each violation. ``--record`` writes the run as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kafka.errors import KafkaError

from tests.broker_soak.cluster import Compactor, SoakCluster, aiven_settings, compactors, put_down
from tests.broker_soak.faults import Faults, heal
from tests.broker_soak.metadata_judge import newest_segment_violations
from tests.broker_soak.network import Network
from tests.broker_soak.readers import EPOCHS_LOST, NEEDED_NEW_CONSUMER, TOLERATED, Findings, all_readers, pause, read_and_judge, read_until
from tests.broker_soak.sabotage import SABOTAGE
from tests.broker_soak.topics import SoakTopics
from tests.broker_soak.traffic import joined
from tests.evidence import write_record
from tests.soak.stage import s3_server
from tests.support.deployment import Deployment
from tests.support.fault_proxy import FaultProxy
from tests.support.kafka_admin import ClusterAdmin, NotYet, wait_until
from tests.support.kafka_broker import BrokerFailed, prepare
from tests.support.kafka_jars import VERSIONS, BrokerUnavailable

LOCAL, AIVEN = "local", "aiven"
AIVEN_NEWEST = "4.3.1"
KNOWN_PROBLEMS = {"txnindex", "unread"}
"""What verify finds in tiers that nobody compacts: transaction indexes of replicas lack entries, elections leave unread segments."""
ELECTION_ERRORS = {
    "NOT_LEADER_FOR_PARTITION", "OFFSET_NOT_AVAILABLE", "LEADER_NOT_AVAILABLE", "_TRANSPORT", "_TIMED_OUT", "_ALL_BROKERS_DOWN",
    "REPLICA_NOT_AVAILABLE", "UNKNOWN_LEADER_EPOCH", "FENCED_LEADER_EPOCH", "REQUEST_TIMED_OUT", "TimeoutException",
    "_DESTROY_BROKER", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_OR_PART", NEEDED_NEW_CONSUMER,
}  # fmt: skip
"""Kinds of errors with which a client asks again while a leader changes or a topic is created: which one comes up is mere chance."""
STORE_ERRORS = {"UNKNOWN", "UnknownServerException"}
"""What a broker answers where its plug-in has asked the S3 server in vain; with Aiven's plug-in the soak lets that happen."""
REST_S = 600.0
"""Longest time that daemons may take after the last fault to clean what is due and to delete what was replaced."""
TRANSIENT_CAUSES = (
    "java.io.IOException: Connection to",
    "java.io.IOException: Client was shutdown",
    "java.net.SocketTimeoutException: Failed to connect",
    "Remote log metadata cache is not initialized",
    "This instance is in invalid state, initialized: false",
    "as the previous remote log segment metadata was not found",
    "No topic id registered for topic partition",
    "StorageBackendException: Failed to upload",
    "ConnectionClosedException: Premature end of Content-Length",
    "errors.TimeoutException: Expiring",
)
"""Causes of ERROR lines that come and go with any broker: broken connections, KAFKA-19599 after a start, a follower that has not read the
newest metadata yet, partitions without a leader, requests of Aiven's plug-in that the S3 server fails on purpose. A follower that never
finds its segment is not in sync at the end, which is a violation.
"""
_LOGGED = re.compile(r"$|\d\d:\d\d:\d\d")
"""How a line begins that is no part of the one before it."""
_LATE_RECORD = "Dropping the event"
"""Brokers say so of the record of a compactor that was replaced; it is documented and changes nothing."""


@dataclass
class Phase:
    """One run: with daemons, or the control run without.

    broker_errors: ERROR lines of brokers by logger and wording, numbers and ids left out.
    """

    findings: Findings = field(default_factory=Findings)
    happened: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    broker_errors: Counter[str] = field(default_factory=Counter)
    verify_problems: Counter[str] = field(default_factory=Counter)
    verify_examples: dict[str, str] = field(default_factory=dict)
    verified: str = ""
    metadata: list[str] = field(default_factory=list)
    requests_damaged: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tolerated: dict[str, int] = field(default_factory=dict)
    excused: int = 0


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def play(arguments: argparse.Namespace, folder: Path, minutes: float, *, compacts: bool) -> Phase:
    """One run over a cluster of its own."""
    phase = Phase()
    with ExitStack() as stack:
        server = stack.enter_context(s3_server(stack, folder / "s3"))
        os.environ.update(server.environment())
        bucket = server.make_bucket()
        proxy = stack.enter_context(FaultProxy(server.endpoint, arguments.seed).running())
        network = Network()
        stack.callback(network.close)
        segments = server.make_bucket()
        remote = aiven_settings(arguments.plugin, segments.behind(proxy.url)) if arguments.flavour == AIVEN else {}
        cluster = stack.enter_context(SoakCluster(arguments.kafka, folder / "cluster", network, remote))
        dice = random.Random(arguments.seed)
        topics = SoakTopics(cluster, random.Random(dice.random()), retention_ms=arguments.retention_ms, happened=phase.happened)
        with ClusterAdmin(cluster) as admin:
            topics.create(admin)
        tier = {"layout": "kafka-local", "url": f"file://{cluster.tier.parent}"}
        if arguments.flavour == AIVEN:
            tier = {"layout": "aiven", "url": f"s3://{segments.name}"}
        sabotage = SABOTAGE[arguments.sabotage] if arguments.sabotage else ""
        daemons, beside = compactors(folder, cluster, topics.names(), bucket, proxy, tier, sabotage)
        put_down(stack, daemons)
        for daemon in daemons if compacts else []:
            daemon.start()
        faults = Faults(
            cluster, topics, proxy, daemons if compacts else [], random.Random(dice.random()), threading.Event(), frozenset(arguments.only)
        )
        try:
            _load(phase, topics, faults, cluster, random.Random(dice.random()), minutes)
            _finish(phase, topics, faults, cluster, daemons if compacts else [], beside)
        finally:
            topics.stop()
            phase.findings.judge_out_of_range(phase.metadata)
            phase.faults, phase.skipped = faults.happened, faults.skipped
            phase.problems += faults.problems
            phase.broker_errors = Counter(_kind_of(line) for line in errors_of(cluster))
            phase.requests_damaged = proxy.seen.faults
            phase.excused = sum(written.history.excused for written in topics.partitions())
            if arguments.keep:
                _keep(arguments.keep / ("compacted" if compacts else "control"), cluster, daemons, phase, faults)
    return phase


def _load(phase: Phase, topics: SoakTopics, faults: Faults, cluster: SoakCluster, dice: random.Random, minutes: float) -> None:
    """Everything at once for so many minutes."""
    end_readers, began = threading.Event(), time.monotonic()
    threads = []

    def start(name: str, work: Callable[..., object], *words: Any) -> None:
        def guarded() -> None:
            try:
                work(*words)
            except Exception:  # noqa: BLE001 - reported with everything else
                phase.problems.append(f"{name}: {traceback.format_exc()}")

        threads.append(threading.Thread(target=guarded, name=name))
        threads[-1].start()

    start("watcher", topics.watch_tier, end_readers)
    readers = all_readers(cluster)
    try:
        for reader in readers:
            own = random.Random(dice.random())

            def choose(own: random.Random = own) -> Any:
                return own.choice(topics.partitions())

            start(reader.name, read_until, end_readers, reader, choose, phase.findings, topics, pause(own, 0.5, 2.0))
        start("faults", faults.run)
        told = began
        while time.monotonic() - began < minutes * 60 and not phase.findings.violations and not phase.problems:
            time.sleep(1)
            if time.monotonic() - told > 60:
                told = time.monotonic()
                tell(f"  {sum(faults.happened.values())} faults, {sum(phase.findings.passes.values())} passes judged")
        for line in (*phase.findings.violations, *phase.problems):
            tell(f"  {line[:400]}")
    finally:
        faults.over.set()
        phase.seconds = time.monotonic() - began
        late = joined([thread for thread in threads if thread.name == "faults"], 400)
        end_readers.set()
        late += joined([thread for thread in threads if thread.name != "faults"], 200)
        phase.problems += [f"{name} did not end" for name in late]
        for reader in readers:
            reader.close()


def _finish(phase: Phase, topics: SoakTopics, faults: Faults, cluster: SoakCluster, daemons: list[Compactor], beside: Deployment) -> None:
    """Faults have ceased: everything must come to rest, survive a restart of all brokers, and be whole."""
    if phase.problems:
        return
    try:
        heal(faults)
        phase.problems += [f"{name} did not end" for name in topics.stop()]
        topics.write_more(200)
        if daemons and not phase.findings.violations:
            _wait_for_rest(phase, beside)
        for daemon in daemons:
            _end_daemon(phase, daemon)
        for node in cluster.node_ids:
            cluster.restart(node)
        wait_until(faults.is_in_sync, "all replicas to be in sync after the restart", seconds=180)
        with ClusterAdmin(cluster) as admin:
            phase.metadata = admin.metadata_events()
        phase.happened["records of the metadata topic, replayed by Kafka's formatter"] = len(phase.metadata)
        phase.findings.violations += newest_segment_violations(phase.metadata)[:5]
        phase.findings.judge_out_of_range(phase.metadata)
        before, phase.findings.tolerated = phase.findings.tolerated, {}
        phase.tolerated = {TOLERATED[kind]: sum(map(len, found.values())) for kind, found in before.items()}
        for reader in all_readers(cluster):
            for written in topics.partitions():
                until, lost = time.monotonic() + 180, phase.findings.passes[EPOCHS_LOST]
                while not read_and_judge(reader, written, phase.findings, topics) and time.monotonic() < until:
                    if phase.findings.judge_out_of_range(phase.metadata) or phase.findings.passes[EPOCHS_LOST] > lost:
                        break  # the brokers' own hole, at which this client ends each time
                    time.sleep(1)
                if time.monotonic() > until:
                    phase.problems.append(f"{reader.name} of {written} never came to the end of a pass after the restart")
            reader.close()
    except (NotYet, BrokerFailed, KafkaError) as error:
        phase.problems.append(f"at the end: {type(error).__name__}: {error}")
        return
    if daemons:
        done = beside.process("verify", "--deep", timeout=600)
        phase.verified = done.out
        if '"problems"' not in done.out:
            phase.problems.append(f"verify --deep ended with {done.code}: {done.out[-1000:]} {done.err[-2000:]}")
            return
        for problem in done.document["problems"]:
            phase.verify_problems[problem["kind"]] += 1
            where = f"{problem['topic']}-{problem['partition']}, {problem['object']}"
            phase.verify_examples.setdefault(problem["kind"], f"{where}: {problem['detail']}")
            if problem["severity"] == "error" and problem["kind"] not in KNOWN_PROBLEMS:
                phase.findings.violations.append(f"verify --deep: {problem}")
        phase.findings.violations += _tolerated_in_compacted(phase, beside)


def _wait_for_rest(phase: Phase, beside: Deployment) -> None:
    """Wait until nothing waits for its deletion, and look a few times more, because a round may be at work. Too late is a violation."""
    began, looks_at_rest = time.monotonic(), 0
    while looks_at_rest < 4:
        asked = beside.process("status")
        waiting = asked.document["totals"]["waiting_partitions"] if '"totals"' in asked.out else -1  # exit code 3: some need attention
        looks_at_rest = 0 if waiting else looks_at_rest + 1
        if time.monotonic() - began > REST_S:
            text = (
                f"{REST_S:.0f} s after the last fault {waiting} partitions have replaced segments that are not deleted {asked.err[-500:]}"
            )
            phase.findings.violations.append(text)
            return
        time.sleep(5)
    phase.happened["seconds until nothing waited for deletion"] = round(time.monotonic() - began)


def _tolerated_in_compacted(phase: Phase, beside: Deployment) -> list[str]:
    """Return what brokers may hand out from uncompacted segments only, and did from where rounds have been, after all had come to rest."""
    rows = beside.process("checkpoints", "list").document["partitions"]
    clean = {f"{row['topic']}-{row['partition']}": row["cleaner_offsets"][-1]["offset"] for row in rows if row["cleaner_offsets"]}
    return [
        f"consumers got a record of {name} that was {TOLERATED[kind]}, at offset {offset}, and rounds have been up to {clean[name]}"
        for kind, found in phase.findings.tolerated.items()
        for name, offsets in found.items()
        for offset in sorted(offsets)
        if offset < clean.get(name, 0)
    ]


def _end_daemon(phase: Phase, daemon: Compactor) -> None:
    code = daemon.stop()
    if code:
        phase.problems.append(f"{daemon.name} ended with {code}: {daemon.log_text()[-2000:]}")
    text = daemon.log_text()
    if not re.search(r"\b(cleaned|resumed), ", text):
        phase.problems.append(f"{daemon.name} made no round: {text[-1000:]}")
    for word in ("cleaned", "resumed", "quarantined", "fenced"):
        phase.rounds[word] += len(re.findall(rf"\b{word}\b", text))
    for line in text.splitlines():
        if line.startswith("Traceback"):
            phase.problems.append(f"{daemon.name}: {text[max(0, text.find(line) - 200) : text.find(line) + 3000]}")
            break


def errors_of(cluster: SoakCluster) -> list[str]:
    """Return the ERROR lines of all brokers, each with its cause, if the next line has one.

    Lines whose cause is a connection that broke or a broker that has just started are left out.
    """
    found = []
    for node in cluster.nodes.values():
        lines = node.text().splitlines()
        found += [
            line if _LOGGED.match(cause) else f"{line[:170]}: {cause}"
            for line, cause in pairwise([*lines, ""])
            if "] ERROR " in line and not any(transient in cause for transient in TRANSIENT_CAUSES)
        ]
    return found


def _kind_of(line: str) -> str:
    """An ERROR line without what differs from one occurrence to the next."""
    text = line.partition(" ERROR ")[2] or line
    text = re.sub(r"[A-Za-z0-9_-]{22}(?![A-Za-z0-9_-])", "ID", text)
    text = re.sub(r"\b(orders|trimmed|reborn|risky|aging)\b", "TOPIC", text)
    return re.sub(r"\d+", "N", text)[:300]


def unlike_control(control: Phase | None, compacted: Phase, passing: set[str]) -> list[str]:
    """Return the kinds of errors that only the run with daemons shows, without those that are in ``passing``.

    Without a control run each kind that is not in ``passing`` counts.
    """
    known = control or Phase()
    found = [
        f"consumers fail as they do not without daemons: {kind} ({count} times): {compacted.findings.error_texts[kind]}"
        for kind, count in compacted.findings.errors.items()
        if kind not in known.findings.errors and kind.partition(": ")[2] not in passing
    ]
    loggers = {kind.partition(" - ")[0] for kind in known.broker_errors}
    found += [
        f"brokers log an error that they do not log without daemons ({count} times): {kind}"
        for kind, count in compacted.broker_errors.items()
        if control and "remote" in kind.lower() and kind.partition(" - ")[0] not in loggers and _LATE_RECORD not in kind
    ]
    return found


def _keep(folder: Path, cluster: SoakCluster, daemons: list[Compactor], phase: Phase, faults: Faults) -> None:
    """Write what brokers, daemons and ``verify`` said, errors of clients, times of faults, and the metadata topic."""
    folder.mkdir(parents=True, exist_ok=True)
    for node, process in cluster.nodes.items():
        (folder / f"broker-{node}.log").write_text(process.text())
    for daemon in daemons:
        (folder / f"{daemon.name}.log").write_text(daemon.log_text())
    (folder / "verify.json").write_text(phase.verified)
    (folder / "errors.txt").write_text("\n".join(phase.findings.error_log))
    (folder / "faults.txt").write_text("\n".join(faults.diary))
    if not phase.metadata:
        with suppress(KafkaError, subprocess.SubprocessError, OSError), ClusterAdmin(cluster) as admin:
            phase.metadata = admin.metadata_events()
    (folder / "metadata.txt").write_text("\n".join(phase.metadata))


def record_of(arguments: argparse.Namespace, control: Phase | None, compacted: Phase, violations: list[str]) -> dict[str, Any]:
    """The run as docs/reliability.md is made from."""
    return {
        "kafka": arguments.kafka,
        "flavour": arguments.flavour,
        "plugin": sorted(path.name for path in arguments.plugin.glob("*core*.jar")) if arguments.plugin else [],
        "sabotage": arguments.sabotage or "",
        "seed": arguments.seed,
        "minutes": round(compacted.seconds / 60, 1),
        "control_minutes": round(control.seconds / 60, 1) if control else 0,
        "faults": dict(sorted(compacted.faults.items())),
        "s3_requests_damaged": dict(sorted(compacted.requests_damaged.items())),
        "skipped": dict(sorted(compacted.skipped.items())),
        "passes": dict(sorted(compacted.findings.passes.items())),
        "records_read": sum(compacted.findings.records.values()),
        "longest_pass_s": round(compacted.findings.longest_pass_s, 1),
        "traffic": dict(sorted(compacted.happened.items())),
        "daemon_lines": dict(sorted(compacted.rounds.items())),
        "consumer_errors": dict(sorted(compacted.findings.errors.items())),
        "consumer_error_examples": dict(sorted(compacted.findings.error_texts.items())),
        "consumer_errors_control": dict(sorted(control.findings.errors.items())) if control else {},
        "verify_deep": dict(sorted(compacted.verify_problems.items())),
        "verify_deep_examples": dict(sorted(compacted.verify_examples.items())),
        "read_from_uncompacted_segments": compacted.tolerated,
        "excused_by_unclean_elections": compacted.excused,
        "passes_that_met_holes_made_by_brokers": dict(sorted(compacted.findings.holes.items())),
        "passes_that_met_holes_made_by_brokers_control": dict(sorted(control.findings.holes.items())) if control else {},
        "violations": violations,
    }


def report(record: dict[str, Any]) -> int:
    for name, value in record.items():
        if name != "violations":
            print(f"{name}: {json.dumps(value) if isinstance(value, dict) else value}")
    for hole, passes in record["passes_that_met_holes_made_by_brokers"].items():
        print(f"EXCUSED {passes} passes were out of range in a hole that brokers made: {hole}")
    for line in record["violations"][:60]:
        print(f"VIOLATION {line}")
    print("nothing is violated" if not record["violations"] else f"{len(record['violations'])} violations")
    return 1 if record["violations"] else 0


def options() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.broker_soak", description=__doc__, formatter_class=shape)
    parser.add_argument("--minutes", type=float, default=60, help="of the run with daemons")
    parser.add_argument("--control-minutes", type=float, help="of the control run without daemons (default: a third of --minutes)")
    parser.add_argument("--seed", type=int, default=1)
    flavour = "local: Kafka's LocalTieredStorage; aiven: Aiven's plug-in on an S3 server"
    parser.add_argument("--flavour", choices=(LOCAL, AIVEN), default=LOCAL, help=flavour)
    parser.add_argument("--plugin", type=Path, help="folder with the jars of a release of Aiven's plug-in, core and s3 (--flavour aiven)")
    parser.add_argument(
        "--kafka", default=VERSIONS[0], help=f"version of the brokers; Aiven's plug-in 1.0.0 starts with {AIVEN_NEWEST} at most"
    )
    parser.add_argument("--retention-ms", type=int, default=0, help="adds a topic with this retention.ms")
    parser.add_argument("--no-control", action="store_true", help="without the control run, kinds of errors are shown and not judged")
    text = "take the consumers' errors of the control run from this record of the same seed; the brokers' are not judged then"
    parser.add_argument("--control-record", type=Path, help=text)
    parser.add_argument("--only", nargs="*", default=[], metavar="FAULT", help="inject these kinds of faults only")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGE), help="break the daemons on purpose: the run must find it")
    parser.add_argument("--record", type=Path, help="write the run here, as JSON")
    parser.add_argument("--keep", type=Path, help="write the logs of brokers and daemons into this folder")
    return parser


def main() -> int:
    arguments = options().parse_args()
    if arguments.flavour == AIVEN and not (arguments.plugin and list(arguments.plugin.glob("*.jar"))):
        print("--flavour aiven needs --plugin: a folder with the plug-in's jars", file=sys.stderr)
        return 2
    try:
        prepare(arguments.kafka)
    except BrokerUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    # Otherwise the daemons do it first, and on a busy machine a short run is over by then.
    subprocess.run([sys.executable, "-c", "from compactor.cleaner.precompile import precompile_kernels; precompile_kernels()"], check=True)
    with tempfile.TemporaryDirectory(prefix="broker-soak-") as scratch:
        control = None
        violations: list[str] = []
        if not (arguments.no_control or arguments.control_record):
            tell("control run, without daemons")
            minutes = arguments.control_minutes or arguments.minutes / 3
            control = play(arguments, Path(scratch) / "control", minutes, compacts=False)
            violations += [f"in the control run: {text}" for text in (*control.problems, *control.findings.violations)]
        if not violations:
            tell("the run with daemons")
            compacted = play(arguments, Path(scratch) / "compacted", arguments.minutes, compacts=True)
            violations += [*compacted.problems, *compacted.findings.violations]
            passing = ELECTION_ERRORS | (STORE_ERRORS if arguments.flavour == AIVEN else set())
            if arguments.control_record:
                passing |= {kind.partition(": ")[2] for kind in json.loads(arguments.control_record.read_text())["consumer_errors_control"]}
            violations += unlike_control(control, compacted, passing)
        else:
            compacted = control or Phase()
    record = record_of(arguments, control, compacted, violations)
    write_record(arguments.record, "broker-soak", record)
    return report(record)


if __name__ == "__main__":
    sys.exit(main())
