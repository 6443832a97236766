"""`make release`: what it builds from a commit, twice."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from compactor import __version__

ROOT = Path(__file__).parents[2]
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
NOTHING_FAILED = {"commit": "b" * 40, "violations": []}


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (NOTHING_FAILED, ""),
        (None, "no nightly run is recorded"),
        ({**NOTHING_FAILED, "violations": ["model (exit code 1)"]}, "in the last nightly run failed: model (exit code 1)"),
        ({**NOTHING_FAILED, "commit": "c" * 40}, f"the last nightly run was of commit {'c' * 40}, which is not one of the last 14 days"),
    ],
)
def test_a_release_wants_a_recent_nightly_run_in_which_nothing_failed(record: dict[str, object] | None, problem: str) -> None:
    text = None if record is None else json.dumps(record)
    assert RELEASE["nightly_problem"](text, {"a" * 40, "b" * 40}) == problem


@pytest.mark.slow
def test_a_release_names_its_commit_and_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    tree, outs = tmp_path / "tree", (tmp_path / "first", tmp_path / "second")
    subprocess.run(["git", "clone", "-q", "--depth", "1", ROOT.as_uri(), tree], check=True, timeout=60)

    def git(*words: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
        return subprocess.run(["git", *identity, *words], cwd=tree, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    record = tree / "docs" / "evidence" / "nightly.json"
    record.write_text(json.dumps({**NOTHING_FAILED, "kind": "nightly", "commit": git("rev-parse", "HEAD")}), encoding="utf-8")
    git("add", str(record))
    git("commit", "-qm", "the record of a nightly run")
    commit = git("rev-parse", "HEAD")
    for out in outs:
        subprocess.run([sys.executable, ".ci/release.py", "--out", out], cwd=tree, check=True, capture_output=True, timeout=300)
    sums, again = ((out / "SHA256SUMS").read_text(encoding="utf-8") for out in outs)
    assert sums == again
    names = {line.split()[1] for line in sums.splitlines()}
    assert names == {
        "RELEASE-NOTES.md",
        f"tiered-compactor-chart-{__version__}.tgz",
        f"tiered-compactor-image-{__version__}.tar.gz",
        f"tiered_compactor-{__version__}-py3-none-any.whl",
        f"tiered_compactor-{__version__}.tar.gz",
    }
    about = f'__commit__ = "{commit}"'
    with zipfile.ZipFile(outs[0] / f"tiered_compactor-{__version__}-py3-none-any.whl") as wheel:
        assert about in wheel.read("compactor/__init__.py").decode()
    for name in (f"tiered_compactor-{__version__}", f"tiered-compactor-image-{__version__}"):
        with tarfile.open(outs[0] / f"{name}.tar.gz") as archive:
            packed = archive.extractfile(f"{name}/compactor/__init__.py")
            assert packed is not None
            assert about in packed.read().decode()
    notes = (outs[0] / "RELEASE-NOTES.md").read_text(encoding="utf-8")
    newest = (tree / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1].partition("\n")[2].strip()
    assert notes == f"# tiered-compactor {__version__}\n\nCommit {commit}\n\n{newest}\n"
    (tree / "README.md").write_text("changed", encoding="utf-8")
    refused = subprocess.run([sys.executable, ".ci/release.py"], cwd=tree, check=False, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stderr) == (2, "release: there are uncommitted changes; commit them first\n")
