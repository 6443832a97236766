"""What each room of the product costs in statements, which formatting cannot change: ``python -m tests.support.feature_costs``.

A statement is one of Python's, docstrings aside. Each feature and adapter is counted by itself.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("bloom", "checkpoint", "compactor")
BY_PART = ("features", "adapters")


def statements(module: Path) -> int:
    nodes = ast.walk(ast.parse(module.read_text("utf-8")))
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def room_of(module: Path) -> str:
    parts = module.relative_to(ROOT).with_suffix("").parts
    return "/".join(parts[:3] if len(parts) > 2 and parts[1] in BY_PART else parts[:2] if parts[0] == "compactor" else parts[:1])


def costs() -> Iterator[tuple[str, int, int]]:
    """Yield (room, modules, statements), the dearest first."""
    modules, sizes = Counter[str](), Counter[str]()
    for package in PACKAGES:
        for module in (ROOT / package).rglob("*.py"):
            modules[room_of(module)] += 1
            sizes[room_of(module)] += statements(module)
    yield from ((room, modules[room], size) for room, size in sizes.most_common() if size)


def main() -> None:
    found = list(costs())
    for room, modules, size in found:
        print(f"{room:36}{modules:5} modules{size:8,} statements")
    print(f"{'all':36}{sum(row[1] for row in found):5} modules{sum(row[2] for row in found):8,} statements")


if __name__ == "__main__":
    main()
