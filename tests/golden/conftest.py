"""One unpacked copy of the golden data for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden_cases import unpack


@pytest.fixture(scope="session")
def cleaner_cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("cleaner", tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="session")
def client_cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("clients", tmp_path_factory.mktemp("golden"))
