"""Programs that tests of the pages and of the metrics need and that no Python package brings: .ci/run installs them."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str) -> str:
    """Its path. Without it the test is skipped; with CI=true in the environment that is a failure."""
    found = shutil.which(name)
    if found is not None:
        return found
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI has to run the tests with {name}", pytrace=False)
    pytest.skip(f"there is no {name} (Debian, Ubuntu: apt install {'prometheus' if name == 'promtool' else name})")
