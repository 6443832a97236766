"""What is imported is declared in pyproject.toml, what is declared is imported, and the extras are left alone by those who do without."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import files, packages_distributions
from pathlib import Path
from typing import Any

from compactor import extras
from compactor.records import codecs

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"bloom", "checkpoint", "compactor", "tests", "benchmarks"}
DISTRIBUTIONS = packages_distributions()
EXTRA_OF = {module: extra for extra, modules in extras.MODULES.items() for module in modules}


def canonical(requirement: str) -> str:
    named = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert named, requirement
    return re.sub(r"[-_.]+", "-", named[0]).lower()


def declared(*names: str) -> set[str]:
    """The distributions of these extras; ``""`` is what everybody installs."""
    lists = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return {canonical(requirement) for name in names for requirement in lists[name]}


def imported(*folders: str) -> Iterator[tuple[str, str]]:
    """(file, top-level module) of every import of something that is neither Python's nor ours."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module]
                for name in names:
                    root = name.partition(".")[0]
                    if root not in sys.stdlib_module_names and root not in OWN:
                        yield str(path.relative_to(ROOT)), shortest(name)


def shortest(module: str) -> str:
    """The part of its name that the extras know, else the top-level module. Several distributions share the name google."""
    return next((known for known in EXTRA_OF if f"{module}.".startswith(f"{known}.")), module.partition(".")[0])


def distributions(module: str) -> set[str]:
    if "." not in module:
        return {canonical(name) for name in DISTRIBUTIONS.get(module, (module,))}  # by its own name where it is not installed
    shared = DISTRIBUTIONS.get(module.partition(".")[0], ())
    place = module.replace(".", "/") + "/__init__.py"
    return {canonical(name) for name in shared if any(str(file) == place for file in files(name) or ())}


def test_every_import_is_declared() -> None:
    everybody = declared("")
    lost = set()
    for file, module in imported("bloom", "checkpoint", "compactor"):
        allowed = declared(EXTRA_OF[module]) if module in EXTRA_OF else everybody
        if not distributions(module) & allowed:
            lost.add((file, module))
    assert not lost


def test_what_tests_and_benchmarks_import_is_declared() -> None:
    allowed = declared("", *extras.MODULES, "dev")
    lost = {(file, module) for file, module in imported("tests", "benchmarks") if not distributions(module) & allowed}
    assert not lost


def test_what_everybody_installs_is_imported() -> None:
    used = {name for _, module in imported("bloom", "checkpoint", "compactor") for name in distributions(module)}
    assert declared("") <= used


def test_spark_is_imported_by_its_own_room_only() -> None:
    """Arrow alone may be asked for elsewhere: by consumers that want it, and only then."""
    strangers = {(file, module) for file, module in imported("compactor") if EXTRA_OF.get(module) == "spark"}
    outside = {(file, module) for file, module in strangers if not file.startswith(("compactor/spark/", "compactor/features/spark/"))}
    assert outside <= {(f"compactor/read/{name}.py", "pyarrow") for name in ("columns", "ranges")}


def test_an_extra_s_modules_come_with_it() -> None:
    for extra, modules in extras.MODULES.items():
        found = {name for module in modules for name in distributions(module)}
        assert found == declared(extra), extra


def test_all_is_every_extra_that_needs_no_compiler() -> None:
    ready = [extra for extra in extras.MODULES if extra != "kerberos"]
    assert PROJECT["optional-dependencies"]["all"] == [f"{PROJECT['name']}[{','.join(ready)}]"]


def test_every_codec_of_a_plan_is_pinned() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line) for line in lines if line and not line.startswith("#")}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    assert pinned == {"cramjam", "lz4", "zlib-ng", "zstandard"}
    assert len(pinned) == len(codecs.codec_library_versions().split())
