"""Words that the code must not use: docs/glossary.md and the rules for docstrings in CONTRIBUTING.md. Checks words, never taste."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(file for package in ("bloom", "checkpoint", "compactor") for file in (ROOT / package).rglob("*.py"))
BAD_STARTS = frozenset(
    ("As", "How", "It", "Likewise", "Of", "So", "Such", "That", "Those", "What", "When", "Where", "Whether", "Which", "Who", "Whoever")
)
"""A docstring that begins so says neither what a function does nor what a class is."""
OPEN = {
    "compactor/storage": 12,
}
"""Docstrings with a bad start that are still to be rewritten, by folder. The numbers only go down."""


def folder(file: Path) -> str:
    parts = file.relative_to(ROOT).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def starts_badly(docstring: str) -> bool:
    return docstring.startswith(("``", "The same")) or docstring.split(maxsplit=1)[0].strip(".,:`") in BAD_STARTS


def test_docstrings_begin_with_what_a_thing_does_or_is() -> None:
    found: Counter[str] = Counter()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and starts_badly(ast.get_docstring(node) or "x"):
                found[folder(file)] += 1
    assert {name: count for name, count in found.items() if count > OPEN.get(name, 0)} == {}


RETIRED = frozenset(("Glimpse", "Hearing", "Heard", "Sight", "Sitting", "Spending", "Standing", "Story", "Turns", "Watching"))
"""Words in class names that docs/glossary.md replaces by terms of the field."""


def test_no_class_has_a_name_that_the_glossary_retires() -> None:
    found = {
        node.name: str(file.relative_to(ROOT))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and RETIRED.intersection(re.findall(r"[A-Z][a-z]*", node.name))
    }
    assert found == {}


def module_level_names(tree: ast.Module) -> Iterator[str]:
    """Names of classes, constants and type aliases that are not private. Type variables are local in meaning and may repeat."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "TypeVar":
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_one_class_constant_or_alias_name_stands_in_one_module_only() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for file in FILES:
        for name in module_level_names(ast.parse(file.read_text(encoding="utf-8"))):
            if not name.startswith("_"):
                places[name].add(str(file.relative_to(ROOT)))
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}


def test_every_identifier_of_the_glossary_is_in_the_code() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in FILES)
    words = frozenset(re.findall(r"\w+", code))
    rows = [line.split("|") for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = [identifier for row in rows if len(row) > 3 for identifier in re.findall(r"`([\w.]+)`", row[3])]
    assert len(named) > 60
    assert [identifier for identifier in named if not words.issuperset(identifier.split("."))] == []
