"""The kit for new brokers: its list of rules is that of the page, its tests exist, and it starts what it is given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.broker_kit import OURS, TESTS, page
from tests.support.kafka_jars import BrokerUnavailable, distribution_class_path, distribution_version

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "broker-protocol.md"


def test_each_rule_of_the_page_is_shown_by_a_test_or_is_none_of_the_brokers() -> None:
    table = PAGE.read_text().partition("## The rules")[2].partition("\n## ")[0]
    rules = {found[1] for line in table.splitlines() if (found := re.match(r"\| ([\w ]+) \|", line))} - {"rule"}
    shown = {rule for one in TESTS for rule in one.rules.split(", ")} - {"the map", "the cluster"}
    assert shown | OURS.keys() == rules
    assert not shown & OURS.keys()


@pytest.mark.parametrize("one", TESTS, ids=lambda one: one.name)
def test_each_test_of_the_kit_exists(one: object) -> None:
    file, _, name = one.name.partition("::")  # type: ignore[attr-defined]
    name, _, parameter = name.rstrip("]").partition("[")
    source = (ROOT / "tests" / "broker" / file).read_text()
    defined = source.partition(f"def {name}(")
    assert defined[1]
    decorators = defined[0].rpartition("\n\n\n")[2]
    assert ("parametrize" in decorators) == bool(parameter)


def distribution(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("jar", "version"),
    [
        ("libs/kafka-server-common-4.5.0.jar", "4.5.0"),
        ("libs/kafka-server-common-4.5.0-SNAPSHOT.jar", "4.5.0-SNAPSHOT"),
        ("share/java/kafka/kafka-server-common-7.9.1-ccs.jar", "3.9.1-ccs"),
        ("share/java/kafka/kafka-server-common-8.1.0-ce.jar", "4.1.0-ce"),
    ],
)
def test_the_version_is_that_of_apache_kafka(tmp_path: Path, jar: str, version: str) -> None:
    assert distribution_version(distribution(tmp_path, jar)) == version


@pytest.mark.parametrize("names", [(), ("lib/kafka-server-common-4.5.0.jar",), ("libs/kafka-clients-4.5.0.jar",)])
def test_a_folder_that_is_no_distribution_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(BrokerUnavailable, match="is no"):
        distribution_version(distribution(tmp_path, *names))


def test_a_distribution_gets_our_logger_in_place_of_its_own_and_the_storage_of_kafkas_tests(tmp_path: Path) -> None:
    libs = ("log4j-core-2.25.jar", "log4j-slf4j-impl-2.25.jar", "kafka-storage-4.5.0.jar", "slf4j-api-1.7.36.jar")
    folder = distribution(tmp_path, *(f"libs/{name}" for name in libs))
    ours = [Path("/m2") / name for name in ("kafka-storage-4.4.0.jar", "kafka-storage-4.4.0-test-fixtures.jar", "slf4j-simple-1.7.36.jar")]
    found = [str(path).removeprefix(str(tmp_path)) for path in distribution_class_path(folder, ours)]
    assert found == [
        "/m2/slf4j-simple-1.7.36.jar",
        "/libs/kafka-storage-4.5.0.jar",
        "/libs/log4j-core-2.25.jar",
        "/libs/slf4j-api-1.7.36.jar",
        "/m2/kafka-storage-4.4.0-test-fixtures.jar",
    ]


def test_a_test_that_did_not_run_holds_nothing() -> None:
    first, second = TESTS[:2]
    text, well = page(["head"], [first, second], {first.name: ("holds", 61.0)})
    assert not well
    assert "1 of 2 hold" in text
    assert f"tests/broker/{second.name}" in text
    assert page([], [first], {first.name: ("holds", 61.0)})[1]
