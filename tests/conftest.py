"""What all tests share: hypothesis without deadlines (the first example may compile a kernel), and no signal blocked.

Property tests try the same examples each time, so that a run says something of the change and not of its luck. To look for new ones:
``pytest --hypothesis-profile search tests/property``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

from tests.support.leftovers import guard

pytest_plugins = [
    "tests.support.selection",
    "tests.support.servers",
    "tests.support.bucket_cli",
    "tests.support.broker_fixtures",
    "tests.simulation.play",
]

guard()  # before xdist starts its workers
UNBLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())

_SLOW = [HealthCheck.too_slow]  # a busy machine is no fault of the test
settings.register_profile("search", deadline=None, print_blob=True, suppress_health_check=_SLOW)
settings.register_profile("same", deadline=None, print_blob=True, suppress_health_check=_SLOW, derandomize=True)
settings.register_profile("quick", settings.get_profile("same"), max_examples=25)  # for those that say no number
settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Replace fsync in this process: on some disks half of the time would be spent there. Processes that tests kill keep theirs."""
    with patch.object(os, "fsync", lambda descriptor: None):
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A daemon that was tried in this process leaves signals blocked, and processes that are started from here would inherit that."""
    signal.pthread_sigmask(signal.SIG_SETMASK, UNBLOCKED)
