"""What holds of every integration test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tests.support.s3_server import S3Server
from tests.support.tier_cli import MADE


@pytest.fixture(autouse=True)
def sound_tiers(request: pytest.FixtureRequest) -> Iterator[None]:
    """`verify` finds nothing wrong with the tiers that a test has made, when it is over. A test that damages one is marked ``damages``.

    It is asked after everything that a test has patched, started or put in between is gone. A configuration that nothing was ever
    imported with makes no tier.
    """
    MADE.clear()  # of tests of other suites in this process
    yield
    asked, MADE[:] = list(MADE), []
    if request.node.get_closest_marker("damages"):
        return
    with patch.dict(os.environ, S3Server("").environment()):
        for verified in asked:
            answer = verified()
            if "there is no tier at" not in answer.stderr:
                assert answer.code == 0, answer
