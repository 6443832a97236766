"""``make kafka-demo``: a broker of its own, a topic that it tiers, and the compaction of what is tiered under the running broker.

python -m tests.support.kafka_demo [--version 4.4.0|3.9.2] [--chapters N] [--wait] [-- COMMAND ...]

COMMAND: a command of this program with its options, run on that tier while the broker is there; without one some that show it are run.
``--wait``: until Ctrl-C, to look at it with other programs. Everything is gone when it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from compactor.cli.output import Table, table_lines
from compactor.config.units import format_size
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster, exit_code_or_failure, prepare
from tests.support.kafka_jars import VERSIONS, BrokerUnavailable
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import READ_COMMITTED, WrittenPartition, consume

TOPIC = "orders"
SHOWN = (
    ["topics"], ["plan", "--sample", "1000000000"], ["verify"], ["cat", f"{TOPIC}-0", "--from", "0", "--to", "3"],
    ["run"], ["retire"], ["segments", "list", f"{TOPIC}-0"],
)  # fmt: skip
"""What is run where no command is given: what there is, what compaction would save, whether it is sound, its first records; compaction."""
ROOT = Path(__file__).parents[2]


def settings_for(cluster: KafkaCluster, state: Path) -> dict[str, str]:
    """The environment in which commands find that cluster's tier; what they keep goes into ``state``."""
    return {
        "TIERED_COMPACTOR__TIER__KIND": "kafka",
        "TIERED_COMPACTOR__TIER__LAYOUT": "kafka-local",
        "TIERED_COMPACTOR__TIER__URL": cluster.tier.parent.as_uri(),
        "TIERED_COMPACTOR__TIER__CONTROL_URL": (state / "control").as_uri(),
        "TIERED_COMPACTOR__TIER__STATE_DIR": str(state / "state"),
        "TIERED_COMPACTOR__KAFKA__BOOTSTRAP_SERVERS": cluster.bootstrap,
        "TIERED_COMPACTOR__KAFKA__TOPICS": f'["{TOPIC}"]',
        "TIERED_COMPACTOR__PUBLISH__GRACE_MS": "0",
    }


class Amounts(NamedTuple):
    """What consumers read and what the tier holds at one time: records, keys with a value, logs of segments and their bytes."""

    records: int
    keys: int
    segments: int
    size: int


def measure(cluster: KafkaCluster, records: int, keys: int) -> Amounts:
    sizes = [path.stat().st_size for path in cluster.tier.rglob("*.log")]
    return Amounts(records, keys, len(sizes), sum(sizes))


def comparison_table(before: Amounts, after: Amounts) -> Table:
    """The closing table, as `demo` prints it."""
    rows = [
        ("records read", before.records, after.records, f"{100 * after.records / before.records:.1f} %"),
        ("size in the tier", format_size(before.size), format_size(after.size), f"{100 * after.size / before.size:.1f} %"),
        ("segments", before.segments, after.segments, ""),
        ("keys with a value", before.keys, after.keys, ""),
    ]
    return Table("", ("", "before", "after", ""), rows)


def read_again(cluster: KafkaCluster, model: WrittenPartition, before: Amounts) -> bool:
    """Compares what consumers get after compaction: of each key its last value. Ends with a table of both times."""
    found = consume(cluster, TOPIC, isolation=READ_COMMITTED)
    last = {record.key: record for record in found if record.key is not None}
    values = {key: record for key, record in last.items() if record.value is not None}
    same = values == model.latest()
    print(f"\nconsumers: {'get' if same else 'DO NOT get'} the last value of each key")
    print("\n".join(table_lines(comparison_table(before, measure(cluster, len(found), len(values))))))
    return same


def show(cluster: KafkaCluster, chapters: int) -> WrittenPartition | None:
    """Writes the topic and compares what consumers get with what was written; None where it is not the same."""
    with ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, TOPIC).create().tell(chapters)
        offsets = story.tiered()[0]
        model = story.partitions[0]
        logs = [path for path in admin.tier_files(TOPIC) if path.suffix == ".log"]
        size = sum(path.stat().st_size for path in logs)
        print(f"topic:     {TOPIC}-0, {len(model.records)} records of {story.keys} keys, leader epochs {sorted(story.epochs)}")
        print(
            f"tiered:    offsets 0 to {offsets.latest_tiered} in {len(logs)} segments, {format_size(size)}; the broker keeps what follows"
        )
        same = consume(cluster, TOPIC) == model.uncommitted() and consume(cluster, TOPIC, isolation=READ_COMMITTED) == model.committed()
        print(f"consumers: {'get' if same else 'DO NOT get'} what was written, {len(model.committed())} records read_committed")
        print(f"keys:      {len(model.latest())} have a value at the end, so many records would be left", flush=True)
        return model if same else None


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", choices=VERSIONS, default=VERSIONS[0])
    parser.add_argument("--chapters", type=int, default=2)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args()
    try:
        prepare(arguments.version)
    except BrokerUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="kafka-demo-") as directory,
        KafkaCluster(arguments.version, Path(directory) / "cluster") as cluster,
    ):
        print(f"broker:    Kafka {cluster.version} at {cluster.bootstrap}, up in {time.monotonic() - began:.1f} s")
        print(f"tier:      {cluster.tier.parent.as_uri()}", flush=True)
        model = show(cluster, arguments.chapters)
        status = 0 if model is not None else 1
        before = measure(cluster, len(model.committed()), len(model.latest())) if model is not None else None
        settings = settings_for(cluster, Path(directory))
        for command in [arguments.command] if arguments.command else SHOWN:
            print(f"\n$ tiered-compactor {' '.join(command)}", flush=True)
            done = subprocess.run([sys.executable, "-m", "compactor", *command], cwd=ROOT, env={**os.environ, **settings}, check=False)
            status = status or done.returncode
        if model is not None and before is not None and not read_again(cluster, model, before):
            status = 1
        if arguments.wait:
            print("\n".join(f"export {name}='{value}'" for name, value in settings.items()))
            print("It goes on until Ctrl-C.", flush=True)
            try:
                signal.pause()
            except KeyboardInterrupt:
                print("ended", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(exit_code_or_failure(main))
