"""The package as others get it: built as sdist and wheel, installed without this checkout, used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("package")
NO_CODE = (".pyc", ".orig", ".so")


def run(*command: str | Path, cwd: Path) -> str:
    """Nothing of this checkout is on the path of modules."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    ran = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel is made of the sdist, so that both are whole; of a copy, since setuptools writes into the tree that it builds."""
    tree = tmp_path_factory.mktemp("tree") / "checkout"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "target"))
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, tree, cwd=folder)
    return folder


def files_of_packages() -> set[str]:
    files = (file for package in ("bloom", "checkpoint", "compactor") for file in (ROOT / package).rglob("*") if file.is_file())
    return {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts and file.suffix not in NO_CODE}


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files_of_packages()


def test_the_sdist_has_what_a_packager_needs(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", *files_of_packages()} <= names


@pytest.mark.slow
def test_it_works_in_a_bare_environment(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    venv = tmp_path / "an environment"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    run(venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / ".ci" / "constraints.txt", wheel, cwd=tmp_path)
    program = (venv / "bin" / "python", "-m", "compactor")
    assert run(*program, "--version", cwd=tmp_path).startswith("tiered-compactor ")
    assert "keys with a value" in run(*program, "demo", cwd=tmp_path)
