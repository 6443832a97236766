"""What brokers write is not taken for a tier of ours, whoever asks, and nothing is written into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import log_of
from tests.support.tier_cli import TierCli

TOPIC_ID = "Cw1Xo_0TTbyOq8tnF0nqTA"
STEM = "00000000000000000000-0Ob2IDtJQpe6_gk8H2hCQA"


@pytest.mark.parametrize(
    ("key", "what", "hint"),
    [
        (f"kafka-tiered-storage/orders-0-{TOPIC_ID}/{STEM}.log", "LocalTieredStorage", 'layout = "kafka-local"'),
        (f"orders-0-{TOPIC_ID}/{STEM}.leader_epoch_checkpoint", "LocalTieredStorage", 'layout = "kafka-local"'),
        (f"some/prefix-orders-{TOPIC_ID}/0/{STEM}.rsm-manifest", "Aiven's plugin", 'layout = "aiven"'),
        ("orders-0/00000000000000000042.timeindex", "a broker's log directory", "`import`"),
    ],
)
def test_a_place_of_brokers_is_named_as_such(tmp_path: Path, key: str, what: str, hint: str) -> None:
    cli = TierCli(tmp_path / "cli")
    root = cli.tier
    file = root / key
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    log = log_of("a=1")
    taken = cli.ask("import", log.write(tmp_path / "orders-0"), "--topic", "orders", "--partition", 0)
    for answer in (cli.ask("topics"), taken):
        assert (answer.code, what in answer.stderr, hint in answer.stderr) == (2, True, True), answer.stderr
    assert what in str(cli.ask("config", "check").document)
    assert [path for path in root.rglob("*") if path.is_file()] == [file]
