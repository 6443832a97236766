"""What all tests share: markers by folder, and hypothesis without deadlines (the first example may compile a kernel).

Property tests try the same examples each time, so that a run says something of the change and not of its luck. To look for new ones:
``pytest --hypothesis-profile search tests/property``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.servers", "tests.support.bucket_cli", "tests.support.broker_fixtures", "tests.simulation.play"]

TESTS = Path(__file__).parent
NO_SLOW_TEST_AFTER = "NO_SLOW_TEST_AFTER"
"""Environment variable: Unix time in seconds after which slow tests are skipped, so that CI ends within its limit on a slow machine."""

UNBLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())

_SLOW = [HealthCheck.too_slow]  # a busy machine is no fault of the test
settings.register_profile("search", deadline=None, print_blob=True, suppress_health_check=_SLOW)
settings.register_profile("same", deadline=None, print_blob=True, suppress_health_check=_SLOW, derandomize=True)
settings.load_profile("same")


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests about bytes, not about power cuts: on some disks half of their time would be fsync."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test in tests/contract is marked ``contract``: ``pytest -m "contract and not slow"``."""
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A daemon that was tried in this process leaves signals blocked, and processes that are started from here would inherit that."""
    if "slow" in item.keywords and time.time() > float(os.environ.get(NO_SLOW_TEST_AFTER, "inf")):
        pytest.skip("no time was left for it: `make slow-tests` runs all")
    signal.pthread_sigmask(signal.SIG_SETMASK, UNBLOCKED)
