"""What the system tells the agent of new segments, and what it says where there is nothing to be had."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from compactor.features.agent.agent import watch_log_dirs
from tests.support.told import Told

pytestmark = pytest.mark.quick


def test_new_segments_are_told_also_in_new_directories_and_writes_are_not(tmp_path: Path) -> None:
    woken, told = threading.Event(), Told()
    (tmp_path / "orders-0").mkdir()
    with watch_log_dirs([str(tmp_path)], woken.set, told):
        (tmp_path / "orders-0" / f"{0:020}.index").touch()
        (tmp_path / "orders-0" / f"{0:020}.log").touch()
        assert woken.wait(30)
        woken.clear()
        (tmp_path / "orders-0" / f"{0:020}.log").write_bytes(b"a batch")
        assert not woken.wait(0.5)
        (tmp_path / "orders-1").mkdir()
        (tmp_path / "orders-1" / f"{0:020}.log").touch()
        assert woken.wait(30)
    assert told == []


def test_files_staged_for_deletion_are_told_and_other_renamed_files_are_not(tmp_path: Path) -> None:
    woken, told = threading.Event(), Told()
    path = tmp_path / "orders-0" / f"{0:020}.log"
    path.parent.mkdir()
    path.touch()
    path.with_suffix(".index").touch()
    with watch_log_dirs([str(tmp_path)], woken.set, told):
        path.with_suffix(".index").rename(path.with_suffix(".index.deleted"))
        assert not woken.wait(1)
        path.rename(path.with_suffix(".log.deleted"))
        assert woken.wait(30)
    assert told == []


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    told = Told()
    with watch_log_dirs([str(tmp_path / "nowhere")], lambda: None, told):
        pass
    assert len(told) == 1
    assert "scanned every agent.interval_ms" in told[0]
