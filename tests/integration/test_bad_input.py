"""What `import` and `clean` refuse: one line that says what, where and what to do; the right exit code; the tier as it was."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builders import GZIP, LZ4, NONE, SNAPPY, ZSTD, LogBuilder
from tests.plain_format import fix_crc, segment_paths
from tests.support.tier_cli import Answer, TierCli, latest

END = 36
"""The tier holds [0, 36) of orders-0; what is brought goes on from there: segments 36, 48 and 60 of four batches each."""

Change = Callable[[Path], object]


def write_log(folder: Path, start: int, codec: int = NONE, segments: int = 3) -> Path:
    log = LogBuilder(start)
    for number in range(segments):
        if number:
            log.roll()
        for _ in range(4):
            log.put("a=1", "b=2", "c", codec=codec)
    return log.write(folder, indexes=True)


@pytest.fixture
def cli(tmp_path: Path) -> TierCli:
    cli = TierCli(tmp_path / "a tier")
    cli.bring(write_log(tmp_path / "good", 0))
    return cli


def bring(cli: TierCli, folder: Path) -> Answer:
    return cli.ask("import", folder, "--topic", "orders", "--partition", 0)


def refused(answer: Answer, code: int, *words: str) -> None:
    """One line on stderr, no document, nothing that looks like a bug."""
    lines = answer.remarks
    assert (answer.code, answer.document, len(lines)) == (code, None, 1), answer
    assert lines[0].startswith("error: ")
    assert "a bug" not in lines[0]
    for word in words:
        assert word in lines[0]
    assert len(lines[0].partition(". ")[2]) > 20, "it says what to do next"


# ---- damaged segments -------------------------------------------------------------------------------------------------------


def segment(folder: Path, number: int) -> Path:
    return list(segment_paths(folder).values())[number]


def edited(number: int, edit: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        path = segment(folder, number)
        path.write_bytes(edit(path.read_bytes()))

    return change


def first_batch(data: bytes) -> tuple[bytes, bytes]:
    size = 12 + struct.unpack_from(">i", data, 8)[0]
    return data[:size], data[size:]


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def claiming(more: int) -> Callable[[bytes], bytes]:
    """The first batch says that it has ``more`` records than it has; its CRC is right."""

    def edit(data: bytes) -> bytes:
        batch, rest = first_batch(data)
        count = struct.unpack_from(">i", batch, 57)[0] + more
        return fix_crc(batch[:57] + struct.pack(">i", count) + batch[61:]) + rest

    return edit


def codec_seven(data: bytes) -> bytes:
    batch, rest = first_batch(data)
    return fix_crc(batch[:22] + b"\x07" + batch[23:]) + rest


def twice_the_same(folder: Path) -> None:
    segment(folder, 2).write_bytes(segment(folder, 1).read_bytes())


def renamed(number: int, name: str) -> Change:
    return lambda folder: segment(folder, number).rename(folder / name)


DAMAGED: dict[str, tuple[Change, int, str, str]] = {
    "truncated in a body": (edited(1, lambda data: data[:-5]), NONE, "00000000000000000048.log, position 261, offset 57", "truncated"),
    "truncated in a header": (edited(1, lambda data: data[:270]), NONE, "00000000000000000048.log, position 261", "header"),
    "bytes behind the last batch": (
        edited(2, lambda data: data + bytes(100)),
        NONE,
        "00000000000000000060.log, position 348",
        "fewer bytes",
    ),
    "a bit of a value": (edited(1, flipped(345)), NONE, "00000000000000000048.log, position 261, offset 57", "CRC"),
    "a bit of a compressed body": (edited(1, flipped(80)), ZSTD, "00000000000000000048.log, position 0, offset 48", "CRC"),
    "a bit of the CRC": (edited(1, flipped(18)), NONE, "00000000000000000048.log, position 0, offset 48", "CRC"),
    "an unknown magic": (
        edited(1, lambda data: data[:16] + b"\x03" + data[17:]),
        NONE,
        "00000000000000000048.log, position 0",
        "magic byte 3",
    ),
    "an unknown codec": (edited(1, codec_seven), NONE, "00000000000000000048.log, position 0", "codec"),
    "more records than it has": (
        edited(1, claiming(1)),
        NONE,
        "00000000000000000048.log, position 0, offset 48",
        "more records than it has",
    ),
    "more records, gzip": (edited(1, claiming(1)), GZIP, "00000000000000000048.log, position 0, offset 48", "more records than it has"),
    "more records, snappy": (edited(1, claiming(1)), SNAPPY, "00000000000000000048.log, position 0, offset 48", "more records than it has"),
    "more records, lz4": (edited(1, claiming(1)), LZ4, "00000000000000000048.log, position 0, offset 48", "more records than it has"),
    "many more records": (edited(1, claiming(2**30)), ZSTD, "00000000000000000048.log, position 0, offset 48", "more records than it has"),
    "fewer records than it has": (edited(1, claiming(-1)), NONE, "00000000000000000048.log, position 0, offset 48", "bytes are left"),
    "offsets that go back": (
        edited(1, lambda data: first_batch(data)[0] + data),
        NONE,
        "00000000000000000048.log, position 87",
        "not above",
    ),
    "the same segment twice": (twice_the_same, NONE, "00000000000000000060.log, position 0, offset 48", "not above"),
    "a name without twenty digits": (renamed(1, "48.log"), NONE, "48.log", "name"),
    "a name above its offsets": (renamed(1, f"{50:020}.log"), NONE, "00000000000000000050.log, position 0, offset 48", "not above"),
    "a name inside its neighbour": (renamed(2, f"{55:020}.log"), NONE, "00000000000000000048.log, position 261", "overlap"),
    "a half-cleaned segment": (renamed(1, f"{48:020}.log.cleaned"), NONE, "00000000000000000048.log.cleaned", "name"),
    "half a transaction index": (
        lambda folder: (folder / f"{48:020}.txnindex").write_bytes(bytes(20)),
        NONE,
        ".txnindex",
        "20 bytes",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_directories_are_refused(name: str, cli: TierCli, tmp_path: Path) -> None:
    change, codec, where, what = DAMAGED[name]
    folder = write_log(tmp_path / "bad", END, codec)
    before = cli.digest()
    change(folder)
    refused(bring(cli, folder), 3, where, what)
    assert cli.digest() == before
    cleaned = cli.ask("clean", folder, tmp_path / "out")
    refused(cleaned, 3, where, what)
    assert not list(tmp_path.glob("out*"))


def test_a_transaction_index_of_another_log_is_no_index_of_this_one(cli: TierCli, tmp_path: Path) -> None:
    """Readers would hide what was committed. `clean` takes it, as Kafka's cleaner does: outcomes come from the control records."""
    folder = write_log(tmp_path / "bad", END)
    before = cli.digest()
    (folder / f"{48:020}.txnindex").write_bytes(struct.pack(">hqqqq", 0, 7, 48, 50, 51))
    refused(bring(cli, folder), 3, "00000000000000000048.txnindex", "no abort marker")
    assert cli.digest() == before
    assert cli.ask("clean", folder, tmp_path / "out").code == 0


def test_the_undamaged_directory_is_taken(cli: TierCli, tmp_path: Path) -> None:
    """The control: what is refused above is refused for its damage."""
    assert cli.bring(write_log(tmp_path / "fine", END)) == {"segments": 3, "bytes": 1044, "start_offset": 36, "end_offset": 71}


@pytest.mark.parametrize("kind", ["index", "timeindex", "snapshot"])
def test_what_can_be_rebuilt_may_be_damaged(kind: str, cli: TierCli, tmp_path: Path) -> None:
    folder = write_log(tmp_path / "fine", END)
    (folder / f"{48:020}.{kind}").write_bytes(b"nonsense that is none of it")
    cli.bring(folder)
    assert cli.do("verify")["ok"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("0\n2\n0 0\n3 48\n", "gives offset 48 to leader epoch 3, and the batch there was written in epoch 0"),
        ("0\n1\n1 0\n", "gives offset 36 to leader epoch 1"),
        ("0\n1\n0 x\n", "is not a number"),
    ],
)
def test_a_leader_epoch_checkpoint_of_another_log(text: str, word: str, cli: TierCli, tmp_path: Path) -> None:
    folder = write_log(tmp_path / "bad", END)
    (folder / "leader-epoch-checkpoint").write_text(text)
    before = cli.digest()
    refused(bring(cli, folder), 3, str(folder / "leader-epoch-checkpoint"), word)
    assert cli.digest() == before
    (folder / "leader-epoch-checkpoint").write_text("0\n2\n0 40\n3 72\n")  # the first epoch's start was cut; the last one is to come
    assert cli.bring(folder)["end_offset"] == 71


# ---- segments that do not fit together --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "word"),
    [
        (30, "other content under known offsets"),
        (34, "from 34 to 36 lies across offset 36"),
        (37, "ends at 35 in the tier: it leaves a gap"),
        (1000, "begins at 36"),
    ],
)
def test_a_directory_that_does_not_continue_the_tier(start: int, word: str, cli: TierCli, tmp_path: Path) -> None:
    before = cli.digest()
    refused(bring(cli, write_log(tmp_path / "other", start, segments=4)), 3, f"{start:020}.log", word)
    assert cli.digest() == before


def test_a_missing_segment(cli: TierCli, tmp_path: Path) -> None:
    folder = write_log(tmp_path / "bad", END)
    before = cli.digest()
    segment(folder, 1).unlink()
    refused(bring(cli, folder), 3, "00000000000000000048.index", "without its segment")
    for path in folder.glob(f"{48:020}.*"):
        path.unlink()
    refused(bring(cli, folder), 3, "00000000000000000036.log", "offsets 48 to 59 are missing", "--allow-gaps")
    assert cli.digest() == before
    taken = cli.do("import", folder, "--topic", "orders", "--partition", 0, "--allow-gaps")
    assert (taken["segments"], taken["end_offset"]) == (2, 71)


def test_gaps_of_a_log_that_was_compacted_are_no_gaps(cli: TierCli, tmp_path: Path) -> None:
    log = LogBuilder(END)
    log.put("a=1", "b=1", offsets=(36, 38), last_offset=39)  # 37 is gone: a cleaner was here
    log.roll(base=60)
    log.put("c=1")
    folder = log.write(tmp_path / "compacted")
    refused(bring(cli, folder), 3, f"{END:020}.log", "36 to 39 lacks records", "offsets 40 to 59 are missing", "`topics delete orders-0`")
    assert cli.do("import", folder, "--topic", "orders", "--partition", 7)["end_offset"] == 60  # an empty partition has nothing to lose


@pytest.mark.parametrize(
    ("files", "code", "word"), [((), 2, "no segments"), (("notes.txt",), 2, "no segments"), ((f"{36:020}.log",), 3, "empty")]
)
def test_nothing_to_import(files: tuple[str, ...], code: int, word: str, cli: TierCli, tmp_path: Path) -> None:
    folder = tmp_path / "almost nothing"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    before = cli.digest()
    refused(bring(cli, folder), code, str(folder), word)
    refused(bring(cli, tmp_path / "not there"), 2, "not there")
    assert cli.digest() == before


def test_a_directory_where_a_segment_should_be(cli: TierCli, tmp_path: Path) -> None:
    folder = write_log(tmp_path / "log", END)
    (folder / f"{72:020}.log").mkdir()
    before = cli.digest()
    refused(bring(cli, folder), 2, f"{72:020}.log", "Is a directory")
    assert cli.digest() == before


@pytest.mark.parametrize("topic", ["a/b", "..", "", "x" * 250])
def test_a_topic_that_kafka_would_not_have(topic: str, cli: TierCli, tmp_path: Path) -> None:
    refused(cli.ask("import", write_log(tmp_path / "log", 0), "--topic", topic, "--partition", 0), 2, "topic name")


# ---- a full disk, a place that cannot be written ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a small file system; test_a_disk_that_fills_up needs no mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def write_large(folder: Path, start: int, megabytes: int) -> Path:
    log = LogBuilder(start)
    for number in range(4 * megabytes):
        log.roll()
        log.put(f"key{number}=" + "x" * (1 << 18))
    return log.write(folder)


def test_import_into_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "tier", {"tier": {"url": (small_disk / "tier").as_uri()}})
    cli.tier = small_disk / "tier"
    cli.bring(write_log(tmp_path / "good", 0))
    before = cli.digest()
    refused(bring(cli, write_large(tmp_path / "large", END, 4)), 6, "needs", "bytes", str(small_disk))
    assert cli.digest() == before


def test_export_and_run_onto_a_full_disk(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # a round waits a minute for room
    cli = TierCli(tmp_path / "tier")
    cli.bring(write_large(tmp_path / "large", 0, 4))
    before = cli.digest()
    refused(cli.ask("export", cli.named, small_disk / "out"), 6, str(small_disk / "out"), "No space left")
    assert list(small_disk.iterdir()) == []
    assert cli.digest() == before

    cli.set(tier={"state_dir": str(small_disk / "state")})
    view = cli.do("segments", "list", cli.named)
    cli.refused("run", "--force", code=6, says="space")
    assert [s["id"] for s in cli.do("segments", "list", cli.named)["segments"] if s["state"] == "COPY_SEGMENT_FINISHED"] == [
        s["id"] for s in view["segments"]
    ]
    cli.set(tier={"state_dir": str(tmp_path / "state")})
    (row,) = cli.do("run", "--force")["partitions"]
    assert row["status"] in ("resumed", "cleaned")
    assert latest(cli.export(tmp_path / "out")) == latest(tmp_path / "large")


@pytest.mark.parametrize("moment", range(0, 40, 3))
def test_a_disk_that_fills_up(moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full from some write on: readers see the tier as it was, and the same import goes on when there is room."""
    cli = TierCli(tmp_path / "tier")
    cli.bring(write_log(tmp_path / "good", 0))
    listed = cli.do("topics")
    folder = write_log(tmp_path / "more", END)
    left = [moment]

    def sync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", sync)
        refused(bring(cli, folder), 6, "No space left")
    assert cli.do("topics") == listed
    assert cli.do("verify")["ok"]
    assert cli.bring(folder)["end_offset"] == 71
    assert latest(cli.export(tmp_path / "out")) == latest(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else(cli: TierCli, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    refused(cli.ask("export", cli.named, closed / "out"), 2, str(closed), "Permission denied")
    cli.set(tier={"state_dir": str(closed / "state")})
    refused(cli.ask("run", "--force"), 2, "state_dir", str(closed))


def test_a_file_where_a_directory_should_be(cli: TierCli, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refused(cli.ask("export", cli.named, file / "out"), 2, str(file), "File exists")
    before = cli.digest()
    cli.set(tier={"state_dir": str(file / "state")})
    refused(cli.ask("run", "--force"), 2, "state_dir", str(file))
    assert cli.digest() == before


def test_export_overwrites_nothing(cli: TierCli, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("mine")
    refused(cli.ask("export", cli.named, target), 2, str(target), "exists")
    assert (target / "file").read_text() == "mine"


# ---- configuration ----------------------------------------------------------------------------------------------------------


def test_an_unknown_key(cli: TierCli) -> None:
    before = cli.digest()
    cli.set(cleaner={"delete_retention": 5})
    for command in (["run"], ["topics"], ["config", "show"], ["import", "x", "--topic", "t", "--partition", "0"]):
        refused(cli.ask(*command), 2, "unknown key delete_retention in [cleaner]", "delete_retention_ms", str(cli.config))
    assert cli.digest() == before


def test_no_tier_yet(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "new")
    for command in (["run"], ["topics"], ["plan"], ["verify"], ["retire"], ["export", "orders-0", tmp_path / "out"]):
        refused(cli.ask(*command), 2, "no tier", "import")
    assert cli.digest() == {}


def test_a_partition_named_twice_is_one(cli: TierCli) -> None:
    for command in ("plan", "run"):
        assert len(cli.do(command, "orders-0", "orders-0")["partitions"]) == 1


def test_a_partition_that_is_not_there(cli: TierCli, tmp_path: Path) -> None:
    for command in (["run", "orders-1"], ["plan", "orders-1"], ["verify", "orders-1"], ["export", "orders-1", tmp_path / "out"]):
        refused(cli.ask(*command), 2, "orders-1", "Did you mean orders-0?")
    refused(cli.ask("run", "payments"), 2, "payments", "topics")
