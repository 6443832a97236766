"""What lies beside imported logs: where it is damaged, it is refused by name or made anew, and readers never see a difference."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.builders import GZIP, NONE, LogBuilder
from tests.support.depth import examples
from tests.support.tier_cli import TierCli, visible

KINDS = ["a bit", "cut", "written over", "appended", "a line", "another's"]
NOISE = [
    *(number.to_bytes(8, "big", signed=True) for number in (0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63))),
    *(b"0\n", b"-1\n", b"7 7\n", b"0 5\n", b"a b\n", b"\n", b"0 0 0\n", b"99999999999999999999\n", b"\xff\xfe"),
    *(bytes(1), bytes(12), bytes(34)),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a broker writes it: indexes, snapshots, leader epochs, aborted transactions, some of them across segments."""
    folder = tmp_path_factory.mktemp("sound")
    log = LogBuilder()
    for number in range(4):
        if number:
            log.roll()
        log.leader_epoch = number // 2
        log.add("1t: a=1 b=2; 2t: a=2 c=2; 1 aborts")
        log.put("d=1", "e=" + "x" * 6_000, codec=(NONE, GZIP)[number % 2])
        log.end(2, commit=number % 2 == 0)
        log.put("a=3", pid=1, txn=True)
    log.abort(1)
    cli = TierCli(folder / "tier")
    cli.bring(log.write(folder / "log"))
    return cli.export(folder / "sound")


@given(st.integers(0, 99), st.sampled_from(KINDS), st.integers(0, 1 << 16), st.sampled_from(NOISE))
@examples(100)
@pytest.mark.slow
def test_a_damaged_one_is_refused_or_made_anew(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, which: int, kind: str, at: int, noise: bytes
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    try:
        log_dir = Path(shutil.copytree(sound, folder / "log"))
        beside = sorted(path for path in log_dir.iterdir() if path.suffix != ".log")
        victim = beside[which % len(beside)]
        other = beside[at % len(beside)].read_bytes()
        victim.write_bytes(other if kind == "another's" else damaged(victim.read_bytes(), kind, at, noise))
        cli = TierCli(folder / "tier")
        answer = cli.ask("import", log_dir, "--topic", "orders", "--partition", 0)
        assert answer.code in (0, 3), answer
        if answer.code == 3:
            assert victim.name in answer.stderr
            assert len(answer.remarks) == 1
            assert not list(cli.tier.rglob("*.log"))
            return
        assert visible(cli.export(folder / "out"), by_index=True) == visible(sound)
        assert cli.do("verify") == {"ok": True, "problems": []}
        assert cli.run()["status"] == "cleaned"
    finally:
        shutil.rmtree(folder)


def damaged(data: bytes, kind: str, at: int, noise: bytes) -> bytes:
    where = at % (len(data) + 1)
    match kind:
        case "a bit":
            return data[:where] + bytes(byte ^ 1 << at % 8 for byte in data[where : where + 1]) + data[where + 1 :]
        case "cut":
            return data[:where]
        case "written over":
            field = where // 8 * 8
            return data[:field] + noise + data[field + len(noise) :]
        case "appended":
            return data + noise
    lines = data.splitlines(keepends=True)
    line = at % (len(lines) + 1)
    return b"".join([*lines[:line], noise, *lines[line + 1 :]])
