"""A directory that appears among a broker's log directories, and the lines that come before it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compactor.errors import BadData, UsageError
from compactor.model.ids import TopicPartition
from compactor.upkeep.log_root import CheckpointLine, publish_directory, unfinished_directory

STARTS, CLEANED = "log-start-offset-checkpoint", "cleaner-offset-checkpoint"


def lines(number: int, offset: int) -> list[CheckpointLine]:
    name = TopicPartition("orders", number)
    return [CheckpointLine(STARTS, name, offset, "consequence"), CheckpointLine(CLEANED, name, offset + 1, "consequence")]


def export(folder: Path, suffix: str, offset: int) -> None:
    with unfinished_directory(folder, suffix) as partial:
        (partial / "a.log").write_bytes(b"log")
        publish_directory(partial, folder, lines(int(folder.name.rpartition("-")[2]), offset))


def test_other_partitions_keep_their_lines_and_an_older_line_is_replaced(tmp_path: Path) -> None:
    (tmp_path / STARTS).write_text("0\n2\norders 0 999\nother 1 7\n")
    export(tmp_path / "orders-0", "x", 5)
    assert (tmp_path / STARTS).read_text() == "0\n2\norders 0 5\nother 1 7\n"
    assert (tmp_path / CLEANED).read_text() == "0\n1\norders 0 6\n"
    assert {path.name for path in tmp_path.iterdir()} == {"orders-0", STARTS, CLEANED}
    assert [path.name for path in (tmp_path / "orders-0").iterdir()] == ["a.log"]


def test_a_checkpoint_file_keeps_the_mode_with_which_its_broker_reads_it(tmp_path: Path) -> None:
    (tmp_path / STARTS).write_text("0\n0\n")
    (tmp_path / STARTS).chmod(0o640)
    export(tmp_path / "orders-0", "x", 5)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in (STARTS, CLEANED)] == [0o640, 0o644]


def test_exports_into_one_parent_at_the_same_time_lose_no_line(tmp_path: Path) -> None:
    count = 12
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait()
        export(tmp_path / f"orders-{number}", str(number), 10 * number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted(f"orders {number} {10 * number}" for number in range(count))
    assert sorted((tmp_path / STARTS).read_text().splitlines()[2:]) == expected
    assert len(list(tmp_path.glob("orders-*"))) == count


KILLS = {
    "while the log is written": "def publish(*_): os._exit(9)\nlog_root.publish_directory = publish",
    "before the lines": "def set_line(*_): os._exit(9)\nlog_root._set_line = set_line",
    "between the lines": (
        "real = log_root._set_line\ndef set_line(root, line):\n  real(root, line) if 'start' in line.file_name else os._exit(9)\n"
        "log_root._set_line = set_line"
    ),
    "before the directory": "def rename(*_): os._exit(9)\nPath.rename = rename",
}


@pytest.mark.parametrize("step", KILLS)
def test_after_a_kill_no_directory_lacks_its_lines_and_a_second_export_completes(step: str, tmp_path: Path) -> None:
    (tmp_path / STARTS).write_text("0\n1\nother 1 7\n")
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom compactor.upkeep import log_root\nfrom tests.unit import test_log_root as test\n"
        f"{KILLS[step]}\ntest.publish_directory = log_root.publish_directory\ntest.export(Path(sys.argv[1]), 'killed', 5)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "orders-0")], cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == 9
    assert not (tmp_path / "orders-0").exists()
    assert (tmp_path / "orders-0.unfinished-killed-delete").exists()
    export(tmp_path / "orders-0", "second", 5)
    assert {path.name for path in tmp_path.iterdir()} == {"orders-0", STARTS, CLEANED}
    assert (tmp_path / STARTS).read_text() == "0\n2\norders 0 5\nother 1 7\n"


def test_the_lines_are_there_when_the_directory_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    rename = Path.rename

    def noting(path: Path, target: Path) -> Path:
        seen.append((tmp_path / STARTS).read_text())
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noting)
    export(tmp_path / "orders-0", "x", 5)
    assert seen == ["0\n1\norders 0 5\n"]


def test_a_running_export_is_not_swept_and_the_first_to_finish_wins(tmp_path: Path) -> None:
    with unfinished_directory(tmp_path / "orders-0", "slow") as slow:
        export(tmp_path / "orders-0", "fast", 5)
        assert slow.exists()
        with pytest.raises(UsageError, match="exists already"):
            publish_directory(slow, tmp_path / "orders-0", lines(0, 99))
    assert (tmp_path / STARTS).read_text() == "0\n1\norders 0 5\n"
    assert {path.name for path in tmp_path.iterdir()} == {"orders-0", STARTS, CLEANED}


def test_what_the_broker_deletes_itself_is_left_to_it(tmp_path: Path) -> None:
    of_broker = tmp_path / "orders-0.0123456789abcdef0123456789abcdef-delete"
    of_broker.mkdir()
    export(tmp_path / "orders-0", "x", 5)
    assert of_broker.exists()


def test_an_empty_directory_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with unfinished_directory(tmp_path / "orders-0", "x") as partial:
        (tmp_path / "orders-0").mkdir()
        with pytest.raises(UsageError, match="exists already"):
            publish_directory(partial, tmp_path / "orders-0", lines(0, 5))
    assert [path.name for path in tmp_path.iterdir()] == ["orders-0"]


def test_a_file_that_is_no_checkpoint_prevents_the_directory(tmp_path: Path) -> None:
    (tmp_path / STARTS).write_text("of somebody else\n")
    with pytest.raises(BadData, match="is not a number"):
        export(tmp_path / "orders-0", "x", 5)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {STARTS: "of somebody else\n"}


def test_everything_is_on_the_disk_before_the_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    before: list[list[str]] = []
    flush, rename = os.fsync, Path.rename

    def noting_flush(file: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        flush(file)

    def noting_rename(path: Path, target: Path) -> Path:
        before.append(flushed.copy())
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noting_flush)
    monkeypatch.setattr(Path, "rename", noting_rename)
    export(tmp_path / "orders-0", "x", 5)
    (names,) = before
    assert names[:2] == ["a.log", "orders-0.unfinished-x-delete"]
    assert [name.split(".")[0] for name in names[2:4]] == [STARTS, CLEANED]
    assert names[4] == tmp_path.name
