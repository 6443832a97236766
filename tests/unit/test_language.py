"""Words that the code must not use: docs/glossary.md and the rules for docstrings in CONTRIBUTING.md. Checks words, never taste."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(file for package in ("bloom", "checkpoint", "compactor") for file in (ROOT / package).rglob("*.py"))
BAD_STARTS = frozenset(
    (
        "As",
        "How",
        "It",
        "Likewise",
        "None",
        "Of",
        "So",
        "Such",
        "That",
        "Those",
        "What",
        "Whatever",
        "When",
        "Where",
        "Whether",
        "Which",
        "Who",
        "Whoever",
        "Whose",
    )
)
"""A docstring that begins so says neither what a function does nor what a class is."""


def starts_badly(docstring: str) -> bool:
    return docstring.startswith(("``", "The same")) or docstring.split(maxsplit=1)[0].strip(".,:`") in BAD_STARTS


def test_docstrings_begin_with_what_a_thing_does_or_is() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and starts_badly(ast.get_docstring(node) or "x")
    ]
    assert found == []


EVERYDAY_WORDS = frozenset(
    (
        "glimpses",
        "grants",
        "heard",
        "lane",
        "looked",
        "misfit",
        "nobody",
        "patiently",
        "portraits",
        "said",
        "sights",
        "standings",
        "told",
        "whoever",
    )
)
"""Everyday words for which the field has a term, beside those that the glossary lists, and plurals of the latter."""
OTHER_MEANINGS = frozenset(("index", "kept", "place", "splice"))
"""Words that the glossary retires for one concept and that name something else, too: Kafka's indexes, a setting, a position of a log."""
STORED_NAMES = frozenset(("looks",))
"""Names of stored fields, which stay."""


def glossary_rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return [row for row in rows if len(row) == 3 and row[0] != "term"]


def retired_words() -> frozenset[str]:
    """The single words of the glossary's last column, and EVERYDAY_WORDS."""
    listed = (term.strip() for row in glossary_rows() for term in row[2].split(","))
    return EVERYDAY_WORDS | {term for term in listed if term.isalpha()} - OTHER_MEANINGS


def words_of(identifier: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Names of classes, functions, parameters, variables and fields that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_no_identifier_has_a_word_that_the_glossary_retires() -> None:
    retired = retired_words()
    assert {"sight", "hearing", "turns", "told"} <= retired
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in FILES
        for name in identifiers(ast.parse(file.read_text(encoding="utf-8")))
        if retired & words_of(name) and name not in STORED_NAMES
    }
    assert sorted(found) == []


def module_level_names(tree: ast.Module) -> Iterator[str]:
    """Names of classes, constants and type aliases that are not private. Type variables are local in meaning and may repeat."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "TypeVar":
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        yield from (
            name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        )


def test_docstrings_describe_parameters_that_exist() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                known = _parameter_names(node)
                described = re.findall(r":param ([\w, ]+):", ast.get_docstring(node) or "")
                wrong += [f"{path}:{node.lineno} {name}" for names in described for name in names.split(", ") if name not in known]
    assert wrong == []


def _parameter_names(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Return the names of a function's parameters. A class has those of ``__init__``, or the fields in its body."""
    functions = [node] if isinstance(node, ast.FunctionDef) else []
    if isinstance(node, ast.ClassDef):
        functions = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    arguments = [one.args for one in functions]
    named = {each.arg for one in arguments for each in (*one.posonlyargs, *one.args, *one.kwonlyargs, one.vararg, one.kwarg) if each}
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    return named | (fields if isinstance(node, ast.ClassDef) else set())


def test_one_class_constant_or_alias_name_stands_in_one_module_only() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for file in FILES:
        for name in module_level_names(ast.parse(file.read_text(encoding="utf-8"))):
            if not name.startswith("_"):
                places[name].add(str(file.relative_to(ROOT)))
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}
