"""Import, rounds, verify and export where segments lie as brokers' plug-ins lay them: nothing above the layout may notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from Crypto.PublicKey import RSA

from compactor.constants import TopicId
from compactor.tier import kinds
from compactor.tier.contents import TopicIdLookup
from compactor.tier.kinds import COMPACTOR_MANAGED, KINDS, TierKind
from tests.golden.test_import_tiers import as_log_directory
from tests.golden_cases import unpack
from tests.support.tier_cli import TierCli, latest, visible

TOPIC_ID = "R0AHqObxTZmsN-zsxr_0TQ"


@pytest.fixture
def cli(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TierCli:
    layout: str = request.param[0]
    open_with = TierKind.layout
    aiven: Mapping[str, Any] = request.param[1]
    made = KINDS["kafka", layout]
    kind = replace(COMPACTOR_MANAGED, layout_module=made.layout_module)
    monkeypatch.setattr(
        TierKind, "layout", lambda kind, settings, store, _: open_with(kind, settings, store, TopicIdLookup({"orders": TopicId(TOPIC_ID)}))
    )
    # As long as a tier of brokers needs brokers, one without them stands in for it.
    monkeypatch.setattr(kinds, "KINDS", {("object-log", "native"): kind})
    settings = {f"TIERED_COMPACTOR__TIER__AIVEN__{key.upper()}": str(value) for key, value in aiven.items()}
    if "active_key_pair" in aiven:
        (tmp_path / "key.pem").write_bytes(RSA.generate(2048).export_key("PEM", pkcs=8))
        settings["TIERED_COMPACTOR__TIER__AIVEN__KEY_PAIRS"] = f'{{key1 = "{tmp_path}/key.pem"}}'
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return TierCli(tmp_path / "cli", {"publish": {"grace_ms": 0}, "cleaner": {"segment_bytes": 200_000}})


LAYOUTS = {
    "kafka-local": ("kafka-local", {}),
    "aiven": ("aiven", {"chunk_size": 10_000, "key_prefix": "some/prefix-", "custom_metadata_fields": '["REMOTE_SIZE", "OBJECT_KEY"]'}),
    "aiven, packed": (
        "aiven",
        {"chunk_size": 10_000, "compression": "zstd", "active_key_pair": "key1", "custom_metadata_fields": '["REMOTE_SIZE"]'},
    ),
}


@pytest.mark.damages  # nobody finds its segments without the stand-in; `verify` is asked in between
@pytest.mark.parametrize("cli", LAYOUTS.values(), ids=LAYOUTS, indirect=True)
def test_a_log_is_compacted_where_it_lies(cli: TierCli, tmp_path: Path) -> None:
    case = unpack("tiered", tmp_path) / "4.4.0"
    log_dir = as_log_directory(next((case / "tier").iterdir()), tmp_path / "log")
    cli.bring(log_dir)
    exported = cli.export(tmp_path / "exported")
    assert visible(exported) == visible(log_dir)
    row = cli.run()
    assert (row["status"], row["records_kept"] < row["records_read"]) == ("cleaned", True)
    assert cli.do("verify")["ok"]
    after = cli.export(tmp_path / "after")
    assert latest(after) == latest(exported)
    cli.do("retire")
    assert cli.do("verify")["ok"]
    names = {path.name.partition(".")[0] for path in cli.tier.rglob("*") if TOPIC_ID in str(path) and path.is_file()}
    assert len(names) == cli.do("topics")["partitions"][0]["segments"] < row["segments_in"]
