"""Rules of the repository that a linter does not know."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from compactor.cli.arguments import COMMANDS
from compactor.cli.command_parser import Command

ROOT = Path(__file__).parents[2]
PACKAGES = ("bloom", "checkpoint", "compactor")
PYTHON = sorted(file for folder in (*PACKAGES, "tests", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
TEXTS = [
    *PYTHON,
    *(
        file
        for pattern in ("*.md", "*.toml", "Makefile", ".ci/*", "conf/**/*", "docs/**/*.md", "findings/*")
        for file in sorted(ROOT.glob(pattern))
        if file.is_file()
    ),
]
MAX_MODULE_STATEMENTS = 600
MAX_PUBLIC_NAMES = 45
"""Of the functions and classes of a module. Tables of rules and of record kinds have most."""
MAX_FUNCTION_LINES = 90


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines(file: Path) -> Iterator[tuple[int, str]]:
    return enumerate(file.read_text(encoding="utf-8").splitlines(), 1)


PRODUCT = [file for file in PYTHON if file.relative_to(ROOT).parts[0] in PACKAGES]


def test_modules_hold_one_subject() -> None:
    """Statements and public names are counted, and lines are not: a cap on lines cuts modules where no subject ends."""
    statements = {name(file): sum(isinstance(node, ast.stmt) for node in ast.walk(tree(file))) for file in PRODUCT}
    assert {file: count for file, count in statements.items() if count > MAX_MODULE_STATEMENTS} == {}
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = {
        name(file): sum(isinstance(node, definitions) and not node.name.startswith("_") for node in tree(file).body) for file in PRODUCT
    }
    assert {file: count for file, count in public.items() if count > MAX_PUBLIC_NAMES} == {}


def test_functions_are_short() -> None:
    long = {
        f"{name(file)}:{node.lineno} {node.name}": node.end_lineno - node.lineno
        for file in PYTHON
        for node in functions(file)
        if node.end_lineno is not None and node.end_lineno - node.lineno > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_modules_say_what_they_are_for() -> None:
    silent = [
        name(file) for file in PYTHON if not ast.get_docstring(tree(file)) and not (file.name == "__init__.py" and not file.read_text())
    ]
    assert silent == []


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "NotImplemented" + "Error")) + r")\b")
    assert [f"{name(file)}:{number}" for file in TEXTS for number, line in lines(file) if words.search(line)] == []


def test_no_path_of_one_machine() -> None:
    # tests/unit/test_tidy.py itself spells them apart.
    paths = re.compile(r"/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "ho" + "me", "tm" + "p/w", "Us" + "ers")) + r")/[A-Za-z._-]+")
    assert [f"{name(file)}:{number} {found[0]}" for file in TEXTS for number, line in lines(file) if (found := paths.search(line))] == []


def test_only_layouts_make_keys_of_segments() -> None:
    """A number of 20 digits begins a segment's name in every layout; elsewhere it is that of a local file, or of a control object."""
    cleaning = ("cleaner/precompile", "cleaner/offline", "cleaner/rewrite", "round/sources", "demo")
    local = (*cleaning, "upkeep/export", "upkeep/repair", "features/imports/log_directory")
    control = ("adapters/brokers/view", "control/control_log", "control/leadership", "features/pinterest/generations", "upkeep/verify")
    allowed = {f"compactor/{module}.py" for module in (*local, *control, "features/pinterest/layout")}
    padded = {name(file) for file in (ROOT / "compactor").rglob("*.py") if re.search(r"20d\}|zfill\(20|rjust\(20", file.read_text("utf-8"))}
    assert {file for file in padded if not file.startswith("compactor/tier/")} == allowed


def test_nothing_beside_the_layouts_asks_the_store_of_segments() -> None:
    """``EnvironmentPorts.data`` may be wrapped, probed, and asked whose it is; what is among a tier's segments, its layout knows."""
    asked = re.compile(r"\bports\.data\.(?!url\b)\w+|\bdata\.(?:get|head|create|create_from_file|compose|download|list|delete)\(")
    found = [
        f"{name(file)}:{number} {match[0]}"
        for file in sorted((ROOT / "compactor").rglob("*.py"))
        if name(file) not in ("compactor/control/identity.py", "compactor/control/identity.py")
        for number, line in lines(file)
        if (match := asked.search(line))
    ]
    assert found == []


def test_tests_assert_something() -> None:
    empty = [
        f"{name(file)}:{node.lineno} {node.name}"
        for file in PYTHON
        if file.is_relative_to(ROOT / "tests")
        for node in functions(file)
        if node.name.startswith("test_") and not any(isinstance(part, ast.Assert | ast.With | ast.Call) for part in ast.walk(node))
    ]
    assert empty == []


def test_names_of_test_files_are_unique() -> None:
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_page(command: Command) -> None:
    page = ROOT / "docs" / "commands" / f"{command.name}.md"
    assert f"tiered-compactor {command.name}" in page.read_text()


def test_links_in_pages_lead_somewhere() -> None:
    broken = [
        f"{name(page)}: {target}"
        for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("findings/*.md"))
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("script", sorted(ROOT.glob("findings/*.sh")), ids=lambda script: str(script.stem))
def test_findings_have_their_form(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert re.findall(r"^# (Input|Expected|Seen):", text, re.MULTILINE) == ["Input", "Expected", "Seen"]
    assert [needed for needed in ("set -euo pipefail", "mktemp -d", "exit 1") if needed not in text] == []
    assert re.search(r"[\w-](==|@)\d", text), "no pinned version"
    assert not re.search(r"\b(compactor|tests)\b", text), "findings run without this program"
    assert f"]({script.name})" in (script.parent / "README.md").read_text(encoding="utf-8")
    assert os.access(script, os.X_OK)
