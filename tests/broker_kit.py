"""The rules of docs/broker-protocol.md on any Kafka distribution, as one page: whether rounds may run under a release that is new.

    make broker-kit KAFKA=/opt/kafka_2.13-4.4.0

KAFKA is the folder of an unpacked distribution: its jars are in ``libs`` (Apache Kafka) or ``share/java/kafka`` (Confluent Platform).
Brokers of these jars tier into a directory by Kafka's LocalTieredStorage, which Maven fetches with a logger, because no distribution
has them. Each rule is shown by tests of tests/broker, about 20 minutes on two cores. Exit code 1: a rule does not hold.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.kafka_jars import DISTRIBUTION, BrokerUnavailable, broker_jars, distribution_version

ROOT = Path(__file__).parents[1]
VERSION = "4.4.0"
"""In the names of tests that run with several versions: these are left aside, and the distribution is started in their place."""


@dataclass(frozen=True)
class KitTest:
    """rules: names in docs/broker-protocol.md. name: a test of tests/broker. shows: what of a broker it shows."""

    name: str
    rules: str
    shows: str


TESTS = (
    KitTest(
        f"test_fold_agrees.py::test_the_fold_and_the_brokers_agree[{VERSION}]", "the map", "offsets and times lead where our fold says"
    ),
    KitTest("test_compaction.py::test_a_tier_is_compacted_under_a_running_broker", "R1, R3, R3b, R4, R5, R9", "a round, read meanwhile"),
    KitTest(
        "test_compaction.py::test_over_leader_epochs_and_restarts_and_again_in_bigger_groups", "R2, R8, ascending", "restarts replay rounds"
    ),
    KitTest(
        "test_compaction.py::test_killed_before_each_record_the_next_run_goes_on",
        "publish begun, cut off, look, found",
        "a compactor killed before each of its records",
    ),
    KitTest(
        f"test_compaction_ordeals.py::test_late_records_of_zombies_are_dropped_by_brokers_and_change_nothing[{VERSION}]",
        "wait, grace",
        "records that come too late",
    ),
    KitTest("test_undo_compacts.py::test_a_round_is_taken_back_under_a_running_broker_killed_in_between", "behind", "undo"),
    KitTest("test_compaction.py::test_a_round_goes_on_without_the_group_whose_records_were_deleted", "topic first", "DeleteRecords"),
    KitTest(
        f"test_expiry_under_compaction.py::test_segments_that_expire_in_mid_round_hold_up_nothing[{VERSION}]",
        "expired",
        "retention in a round",
    ),
    KitTest("test_elections.py::test_a_leader_that_rolls_elsewhere_tiers_the_same_offsets_again", "R8, found", "segments that overlap"),
    KitTest("test_elections.py::test_a_leader_that_tiers_again_what_was_compacted", "in flight", "late copies of a later leader"),
    KitTest("test_elections.py::test_what_an_unclean_election_discards_is_not_read_and_not_compacted", "the map", "unclean elections"),
    KitTest(
        "test_holes_and_policies.py::test_a_rewritten_segment_leads_lookups_by_time_past_records_below_the_log_start",
        "R7",
        "lookups by time",
    ),
    KitTest("test_holes_and_policies.py::test_segments_of_which_brokers_kept_nothing_are_no_damage", "R6", "segments without records"),
    KitTest(
        "test_replica_from_remote.py::test_a_replica_built_from_compacted_segments_equals_one_built_from_the_brokers_own[newest]",
        "R8",
        "a replica built from compacted segments",
    ),
    KitTest(
        "test_compaction.py::test_a_topics_own_settings_are_the_policy_and_wrong_ones_are_refused", "R10", "settings, as they are told"
    ),
    KitTest(
        "test_other_brokers.py::test_nothing_is_written_or_deleted_once_a_broker_keeps_its_metadata_elsewhere",
        "the cluster",
        "another metadata manager",
    ),
)
OURS = {"R11": "how this program reads transactions", "R12": "how many rounds this program makes"}
"""Rules about which brokers decide nothing."""


def version_lines(folder: Path, scratch: Path) -> list[str]:
    """What brokers say of themselves, and what that means for the list of tested versions."""
    from compactor.adapters.brokers.admin import METADATA_VERSION_FEATURE, REMOTE_METADATA_FEATURE, TESTED_MINORS, query_broker_features
    from compactor.adapters.kafka_client import KafkaConnection
    from tests.support.kafka_broker import HOST, KafkaCluster, prepare

    prepare(str(folder))
    with KafkaCluster(str(folder), scratch / "first") as cluster:
        port = int(cluster.bootstrap.rpartition(":")[2])
        features = query_broker_features(KafkaConnection(cluster.bootstrap), HOST, port)
    level = features.supported.get(METADATA_VERSION_FEATURE, -1)
    listed = next((minor for minor, highest in TESTED_MINORS.items() if highest == level), "")
    keyed, in_force = features.supported.get(REMOTE_METADATA_FEATURE), features.finalized.get(REMOTE_METADATA_FEATURE, 0)
    return [
        f"Kafka {distribution_version(folder)} in {folder}",
        f"metadata.version {level}: "
        + (f"tested as {listed}" if listed else f"not in the list ({', '.join(f'{name}: {top}' for name, top in TESTED_MINORS.items())})"),
        f"remote.log.metadata.version: {'unknown to it' if keyed is None else f'{in_force}, {keyed} at most'}"
        + (": rounds are refused (KIP-1266)" if in_force else ""),
    ]


def run_tests(folder: Path, chosen: Sequence[KitTest], report: Path, log: Path) -> Mapping[str, tuple[str, float]]:
    """Result and seconds of each test that ran, by its name."""
    # The expression names slow_broker, or those tests are left out (tests/support/selection.py).
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow_broker or not slow_broker",
        f"--junitxml={report}",
    ]
    command += [f"tests/broker/{one.name}" for one in chosen]
    with log.open("w") as file:
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, DISTRIBUTION: str(folder), "CI": "true"},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    found = {}
    for case in ET.parse(report).getroot().iter("testcase") if report.exists() else ():
        bad = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "")
        found[f"{case.attrib['classname'].rpartition('.')[2]}.py::{case.attrib['name']}"] = (bad or "holds", float(case.attrib["time"]))
    return found


def page(head: Sequence[str], chosen: Sequence[KitTest], results: Mapping[str, tuple[str, float]]) -> tuple[str, bool]:
    """The page, and whether every rule holds."""
    rows = [(one, *results.get(one.name, ("did not run", 0.0))) for one in chosen]
    lines = [f"{result:12}{seconds:5.0f} s  {one.rules:36} {one.shows}" for one, result, seconds in rows]
    broken = [one.name for one, result, _ in rows if result != "holds"]
    end = f"{len(rows) - len(broken)} of {len(rows)} hold, {sum(seconds for _, _, seconds in rows) / 60:.0f} minutes"
    lines += ["", end, *(f"  tests/broker/{name}" for name in broken)]
    return "\n".join([*head, "", *lines]), not broken


def main() -> int:
    parser: Any = argparse.ArgumentParser(
        prog="python -m tests.broker_kit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kafka", type=Path, help="folder of the distribution")
    parser.add_argument("--only", default="", help="tests whose names contain this")
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "broker-kit.log", help="what the tests say")
    arguments = parser.parse_args()
    folder, chosen = arguments.kafka.resolve(), [one for one in TESTS if arguments.only in one.name]
    try:
        broker_jars(str(folder))
    except BrokerUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    began = time.strftime("%Y-%m-%d %H:%M")
    with tempfile.TemporaryDirectory(prefix="broker-kit-") as scratch:
        head = [f"Broker kit, {began}; details in {arguments.log}", *version_lines(folder, Path(scratch))]
        results = run_tests(folder, chosen, Path(scratch) / "results.xml", arguments.log)
    text, well = page(head, chosen, results)
    print(text)
    if well and not arguments.only and "not in the list" in head[2]:
        print("All rules hold: add this level to TESTED_MINORS (compactor/adapters/brokers/admin.py) and to docs/broker-protocol.md")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
