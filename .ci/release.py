"""Build what a release consists of, from the commit that is checked out. Two runs give the same bytes.

  tiered_compactor-VERSION.tar.gz, .whl    sdist and wheel; `tiered-compactor --version` names the commit
  tiered-compactor-chart-VERSION.tgz       the Helm chart
  tiered-compactor-image-VERSION.tar.gz    what an image is built of: podman build -f conf/container/Containerfile DIR
  RELEASE-NOTES.md, SHA256SUMS             version, commit and the changelog's section; digests of all files

Usage: python .ci/release.py [--out DIR]. Refuses a checkout with uncommitted changes, because the commit would not say what was built, and
one without the record of a nightly run (docs/evidence/nightly.json) in which nothing failed and whose commit is at most 14 days older.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE_FILES = (".ci/constraints.txt", "pyproject.toml", "README.md", "LICENSE", "bloom", "checkpoint", "compactor", "conf/container")
"""What the Containerfile copies."""


def git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def pack(target: Path, root: Path, files: list[Path], top: str, epoch: int) -> None:
    """Write a tar.gz whose bytes depend only on the names, contents and execute bits of the files."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(files):
            entry = tarfile.TarInfo(f"{top}/{path.relative_to(root)}")
            data = path.read_bytes()
            entry.size, entry.mtime, entry.mode = len(data), epoch, 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(data))
    with target.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, epoch) as packed:
        packed.write(plain.getvalue())


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def repack_sdist(path: Path, epoch: int) -> None:
    """Write an sdist again without the times and owners of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
        [top] = Path(folder).iterdir()
        pack(path, top, files_below(top), top.name, epoch)


def changelog_section(text: str, version: str) -> str:
    """Return the section of the changes that are not released yet, or if there are none, that of the version."""
    sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    return found.get("Unreleased", "").strip() or found[version].strip()


def nightly_problem(record: str | None, recent: set[str]) -> str:
    """Return why the record of the last nightly run does not do. Empty: it does.

    recent: the commits, up to the one that is released, of its last 14 days.
    """
    if record is None:
        return "no nightly run is recorded"
    found = json.loads(record)
    if found["violations"]:
        return f"in the last nightly run failed: {', '.join(found['violations'])}"
    if found["commit"] not in recent:
        return f"the last nightly run was of commit {found['commit']}, which is not one of the last 14 days"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a release of the commit that is checked out.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="emptied first (default: dist)")
    out = parser.parse_args().out.resolve()
    if git("status", "--porcelain", "--untracked-files=no"):
        print("release: there are uncommitted changes; commit them first", file=sys.stderr)
        return 2
    commit, epoch = git("rev-parse", "HEAD"), int(git("log", "-1", "--format=%ct"))
    record = ROOT / "docs" / "evidence" / "nightly.json"
    recent = git("log", f"--since={epoch - 14 * 86_400}", "--format=%H").split()
    if problem := nightly_problem(record.read_text(encoding="utf-8") if record.exists() else None, set(recent)):
        print(f"release: {problem}; run `make nightly` and commit its record", file=sys.stderr)
        return 2
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        archive = subprocess.run(("git", "archive", commit), cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(tree, filter="data")
        about = tree / "compactor" / "__init__.py"
        text = about.read_text(encoding="utf-8").replace('__commit__ = ""', f'__commit__ = "{commit}"')
        about.write_text(text, encoding="utf-8")
        version = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]  # type: ignore[index]
        everything = files_below(tree)
        chart = tree / "conf" / "helm" / "tiered-compactor"
        with (chart / "Chart.yaml").open("a", encoding="utf-8") as file:
            file.write(f'annotations:\n  commit: "{commit}"\n')
        pack(out / f"tiered-compactor-chart-{version}.tgz", chart, files_below(chart), "tiered-compactor", epoch)
        image = [path for path in everything if str(path.relative_to(tree)).startswith(IMAGE_FILES)]
        pack(out / f"tiered-compactor-image-{version}.tar.gz", tree, image, f"tiered-compactor-image-{version}", epoch)
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PIP_CONSTRAINT": str(ROOT / ".ci" / "constraints.txt")}
        environment.pop("PYTHONPATH", None)
        build = (sys.executable, "-m", "build", "--outdir", str(out), str(tree))
        subprocess.run(build, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        repack_sdist(next(out.glob("tiered_compactor-*.tar.gz")), epoch)
        section = changelog_section((tree / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    (out / "RELEASE-NOTES.md").write_text(f"# tiered-compactor {version}\n\nCommit {commit}\n\n{section}\n", encoding="utf-8")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    print("".join(sums), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
