"""Reading a tier that brokers write needs the right to get and to list, and no other: neither is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.broker_metadata import broker_cli
from tests.support.broker_tiers import BrokerTier, aiven_tier, local_tier
from tests.support.cloud_servers import AnyBucket
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.servers import ON_SERVERS
from tests.support.tier_cli import TierCli

CHANGES = ("put", "delete", "multipart", "other")


@pytest.fixture(params=[("kafka-local", "4.4.0"), ("aiven", "all")], ids=lambda param: param[0])
def cli(request: pytest.FixtureRequest, proxied_bucket: tuple[FaultProxy, AnyBucket], tmp_path: Path) -> TierCli:
    """The command line with credentials that may get and list the brokers' bucket."""
    layout, case = request.param
    tier: BrokerTier = local_tier(case, tmp_path) if layout == "kafka-local" else aiven_tier(case, tmp_path)
    proxy, bucket = proxied_bucket
    store = bucket.open()
    for path in sorted(tier.objects.rglob("*")):
        if path.is_file():
            store.create_from_file(path.relative_to(tier.objects).as_posix(), path)
    made = broker_cli(tmp_path / "cli", tier, layout, url=bucket.url)
    made.set(**{name: section for name, section in bucket.sections().items() if name != "tier"})
    if layout == "aiven":
        pairs = ", ".join(f'{name} = "{path}"' for name, path in tier.settings().key_pairs.items())
        prefix, active = tier.settings().key_prefix, tier.settings().active_key_pair
        section = f'[tier.aiven]\nkey_prefix = "{prefix}"\nkey_pairs = {{{pairs}}}\nactive_key_pair = "{active}"\n'
        made.config.write_text(made.config.read_text() + section)
    proxy.seen.requests.clear()
    proxy.faults.append(Fault("denied", CHANGES))
    return made


@ON_SERVERS
@pytest.mark.damages  # asked above: the way to the bucket is gone when it is over
def test_whatever_reads_needs_no_other_right(cli: TierCli, proxied_bucket: tuple[FaultProxy, AnyBucket], tmp_path: Path) -> None:
    proxy, _ = proxied_bucket
    [partition] = cli.do("topics")["partitions"]
    segments = cli.do("segments", "list", "orders-0")["segments"]
    cli.do("segments", "dump", "orders-0", segments[0]["id"])
    cli.do("plan", "--sample", "100000")
    cli.do("explain", "orders-0")
    cli.do("verify", "--fast")
    cli.do("verify")
    cli.do("orphans", "find", "--to", tmp_path / "orphans.json")
    assert cli.ask("cat", "orders-0", output="table").code == 0
    assert cli.do("export", "orders-0", tmp_path / "out")["end_offset"] == partition["end_offset"]
    assert set(proxy.seen.requests) <= {"get", "head", "list", "other"}
    assert proxy.seen.faults["denied"] <= proxy.seen.requests["other"]  # the one that asks for unfinished uploads
