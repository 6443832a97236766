"""What holds of every integration test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.tier_cli import TierCli


@pytest.fixture
def sound_tiers(request: pytest.FixtureRequest) -> Iterator[None]:
    """`verify` finds nothing wrong with the tiers that a test has made, when it is over. A test that damages one is marked ``damages``."""
    TierCli.made.clear()
    yield
    tiers, TierCli.made[:] = list(TierCli.made), []
    if request.node.get_closest_marker("damages"):
        return
    for cli in tiers:
        if (cli.tier / ".tiered-compactor" / "catalog").exists():
            answer = cli.ask("verify")
            assert answer.code == 0, answer
