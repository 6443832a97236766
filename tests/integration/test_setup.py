"""The scripts behind `make`: what they say when something is missing, and that they do nothing when nothing has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with spaces that has the scripts and nothing else."""
    folder = tmp_path / "a b"
    (folder / ".ci").mkdir(parents=True)
    (folder / "bin").mkdir()
    for file in (".ci/setup", ".ci/java", ".ci/constraints.txt", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, folder / file)
    return folder


def program(project: Path, name: str, text: str) -> None:
    """Puts a shell script before everything else on the PATH."""
    file = project / "bin" / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def run(project: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "JAVA_HOME", "MAKEFLAGS", "MAKELEVEL")}
    environ = {**inherited, "PATH": f"{project / 'bin'}:{os.environ['PATH']}", **env}
    return subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=60, check=False)


def without_python(project: Path) -> None:
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        program(project, name, "exit 1")


def ready(project: Path) -> None:
    """What an earlier `make` left: a Python that works, and the mark that it is up to date."""
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "python").symlink_to(project / "bin" / "venv-python")
    program(project, "venv-python", 'case "$*" in *pip*install*) echo ERROR: no network; exit 1;; *) echo "ran $*";; esac')


@pytest.mark.parametrize("command", [("sh", ".ci/setup"), ("make", "test"), ("make", "demo")])
def test_without_python_one_line_says_how_to_get_it(project: Path, command: tuple[str, ...]) -> None:
    without_python(project)
    ran = run(project, *command)
    assert ran.returncode != 0
    assert ran.stderr.startswith("Missing: Python 3.11 or newer with venv. Debian, Ubuntu: apt install python3-venv;")
    assert not (project / ".venv").exists()


def test_a_python_that_was_asked_for_and_does_not_do(project: Path) -> None:
    program(project, "old-python", "exit 1")
    ran = run(project, "make", "setup", "PYTHON=old-python")
    assert ran.returncode != 0
    assert ran.stderr.startswith("PYTHON=old-python is not a Python 3.11 or newer with the venv module")


def test_a_failed_installation_says_so_and_is_tried_again(project: Path) -> None:
    ready(project)
    for _ in range(2):
        ran = run(project, "sh", ".ci/setup")
        assert ran.returncode == 1
        assert "ERROR: no network\nInstalling failed" in ran.stderr


def test_where_uv_fails_pip_installs(project: Path) -> None:
    ready(project)
    program(project, "venv-python", 'case "$*" in "-m uv pip install"*) echo no network; exit 2;; *) echo "ran $*";; esac')
    ran = run(project, "sh", ".ci/setup", "demo")
    assert ran.returncode == 0
    assert "no network\nuv could not install this; trying pip ...\nran -m pip install" in ran.stderr


def test_only_who_asks_for_kerberos_hears_of_it(project: Path) -> None:
    ready(project)
    program(project, "venv-python", 'case "$*" in *gssapi*) echo "krb5-config: not found"; exit 1;; *) echo "ran $*";; esac')
    assert "Kerberos" not in run(project, "make", "setup").stderr
    ran = run(project, "make", "setup-kerberos")
    assert ran.returncode != 0
    assert "Kerberos for HDFS cannot be built here. Debian, Ubuntu: apt install gcc libkrb5-dev python3-dev" in ran.stderr
    program(project, "venv-python", 'echo "ran $*"')
    assert run(project, "make", "setup-kerberos").returncode == 0


def test_what_is_installed_for_the_tests_does_for_the_demo_and_not_the_other_way_round(project: Path) -> None:
    ready(project)
    program(project, "venv-python", 'echo "ran $*"')
    small = run(project, "make", "setup-demo").stderr
    assert "what the demo needs" in small
    assert "[all,dev]" not in small
    large = run(project, "make", "setup").stderr
    assert ".[all,dev]" in large
    assert [run(project, "make", target).stderr for target in ("setup", "setup-demo")] == ["", ""]


def test_up_to_date_means_the_same_content_in_the_same_place(project: Path) -> None:
    ready(project)
    program(project, "venv-python", 'echo "ran $*"')  # installs
    assert "Installing into .venv" in run(project, "sh", ".ci/setup").stderr
    os.utime(project / "pyproject.toml")  # as after a checkout
    program(project, "venv-python", 'case "$*" in *pip*install*) echo ERROR: no network; exit 1;; *) echo "ran $*";; esac')
    again = run(project, "make", "demo")
    assert (again.returncode, again.stdout, again.stderr) == (0, "ran -m compactor demo\n", "")
    settings = project / "pyproject.toml"
    settings.write_text(settings.read_text() + "# a linter's setting\n")
    assert run(project, "make", "demo").returncode == 0
    settings.write_text("# a dependency\n" + settings.read_text())
    assert "Installing failed" in run(project, "make", "demo").stderr


@pytest.mark.parametrize(
    ("version", "found"),
    [('openjdk version "17.0.15" 2025-04-15', True), ('java version "21" 2023-09-19', True), ('java version "1.8.0_402"', False)],
)
def test_which_java_will_do(project: Path, version: str, found: bool) -> None:
    program(project, "java", f"echo 'Picked up JAVA_TOOL_OPTIONS' >&2; echo '{version}' >&2")
    ran = run(project, "sh", ".ci/java")
    assert ran.returncode == (0 if found else 1)
    assert ran.stderr == "" if found else ran.stderr.startswith("Missing: Java 17 or newer for Spark (java is Java 1)")


def test_java_home_comes_first(project: Path) -> None:
    program(project, "java", "echo 'version \"21\"' >&2")
    ran = run(project, "sh", ".ci/java", JAVA_HOME="/no where")
    assert ran.stderr.startswith("Missing: Java 17 or newer for Spark (/no where/bin/java was not found). Debian, Ubuntu: apt install")


def test_make_alone_shows_the_targets(project: Path) -> None:
    ran = run(project, "make")
    assert [line for line in ran.stdout.splitlines() if line.startswith("  make demo ")]
    assert not (project / ".venv").exists()
