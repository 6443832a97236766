"""Later incarnations of a topic have prefixes of their own, which this version neither opens nor sweeps nor takes for free."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.model.ids import Incarnation, TopicPartition
from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli

ORDERS = TopicPartition("orders", 0)


class TestNames:
    def test_the_first_incarnation_has_the_partitions_name(self) -> None:
        assert str(Incarnation(ORDERS)) == "orders-0"
        assert Incarnation.parse("orders-0") == Incarnation(ORDERS)

    def test_a_later_incarnation_reads_back(self) -> None:
        assert str(Incarnation(ORDERS, 12)) == "orders-0~12"
        assert Incarnation.parse("orders-0~12") == Incarnation(ORDERS, 12)

    @pytest.mark.parametrize("text", ["orders-0~", "orders-0~0", "orders-0~1", "orders-0~02", "orders-0~x", "orders~2", "orders-0~2~3"])
    def test_an_incarnation_has_one_spelling(self, text: str) -> None:
        with pytest.raises(UsageError):
            Incarnation.parse(text)

    def test_no_topic_name_is_an_incarnation(self) -> None:
        with pytest.raises(UsageError, match="not a topic name"):
            TopicPartition.of("orders-0~2", 0)

    def test_a_later_incarnation_is_refused_as_a_partition(self) -> None:
        with pytest.raises(UsageError, match="orders-0~2 is a later incarnation of orders-0") as error:
            TopicPartition.parse("orders-0~2")
        assert "upgrade" in error.value.hint

    def test_a_catalog_lists_first_incarnations(self) -> None:
        assert CatalogState(partitions={"orders-0~2": 5, "orders-0": 1, "b-1": 2}).names == [TopicPartition("b", 1), ORDERS]


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    """A tier with a second incarnation beside the first."""
    cli = TierCli(tmp_path / "cli", {"publish": {"grace_ms": 0}})
    log = LogBuilder()
    log.put("a=1", "b=1")
    cli.bring(log.write(tmp_path / "log"))
    for prefix in (cli.tier, cli.tier / ".tiered-compactor" / "partitions"):
        shutil.copytree(prefix / "orders-0", prefix / "orders-0~2")
    return cli


def later(cli: TierCli) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(cli.tier.rglob("*")) if "~2" in str(path) and path.is_file()}


def test_listings_leave_later_incarnations_alone(cli: TierCli) -> None:
    before = later(cli)
    assert before
    assert [row["topic"] for row in cli.do("topics")["partitions"]] == ["orders"]
    assert cli.do("verify") == {"ok": True, "problems": []}
    swept = cli.do("retire", "--now", 4_000_000_000_000, "--force-now")
    assert (swept["deleted"], swept["swept"]) == ([], [])
    cli.do("topics", "delete", "orders-0")
    cli.do("retire", "--now", 4_000_000_000_000, "--force-now")
    assert later(cli) == before


def test_a_command_names_what_it_does_not_open(cli: TierCli) -> None:
    answer = cli.ask("run", "orders-0~2")
    assert answer.code == 2
    assert "later incarnation of orders-0" in answer.stderr


@pytest.mark.damages
def test_no_tier_is_made_over_segments_of_a_later_incarnation(cli: TierCli, tmp_path: Path) -> None:
    (cli.tier / "tier-id.json").unlink()
    shutil.rmtree(cli.tier / "orders-0")
    other = TierCli(tmp_path / "other")
    other.set(tier={"url": cli.tier.as_uri(), "control_url": (tmp_path / "control").as_uri()})
    log = LogBuilder()
    log.put("a=1")
    answer = other.ask("import", log.write(tmp_path / "more"), "--topic", "orders", "--partition", 0)
    assert answer.code == 2
    assert "orders-0~2" in answer.stderr
