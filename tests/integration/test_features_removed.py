"""A feature is taken away: its folder, its rows in the tables, what only it needs. The rest imports, and does the main job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from compactor.records.encode import RecordToEncode, encode_batch

ROOT = Path(__file__).parents[2]
WITHOUT = """
import importlib, pkgutil, sys

class Missing:
    def find_spec(self, name, path, target=None):
        if any(name == gone or name.startswith(gone + ".") for gone in GONE):
            raise ModuleNotFoundError(f"{name} was deleted")

sys.meta_path.insert(0, Missing())
from compactor import outputs
from compactor.cli import arguments
from compactor.tier import kinds

def stays(module):
    return not any(module == gone or module.startswith(gone + ".") for gone in GONE)

def module_of(command):
    return "compactor.cli.commands." + (command.function or command.subcommands[0].function).partition(".")[0]

arguments.COMMANDS = tuple(command for command in arguments.COMMANDS if stays(module_of(command)))
kinds.KINDS = {key: kind for key, kind in kinds.KINDS.items() if stays(kind.layout_module)}
outputs.OUTPUTS = tuple(kind for kind in outputs.OUTPUTS if stays(kind.module))
"""
IMPORT_ALL = """
import bloom, checkpoint, compactor
for package in (bloom, checkpoint, compactor):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        if found.name not in ("compactor.__main__", "compactor.spark.recompact") and stays(found.name):
            importlib.import_module(found.name)
"""
FEATURES = {
    "erasure": ("compactor.cli.commands.erasure",),
    "iceberg": ("compactor.features.spark.table_files",),  # where Spark writes the tables' files
    "pinterest": ("compactor.cli.commands.generations",),
    "spark": ("compactor.cli.commands.recompact", "compactor.spark"),
}
"""Modules beside its folder that only the feature needs."""


class Product(NamedTuple):
    """A product without some modules."""

    gone: tuple[str, ...]

    def python(self, program: str) -> str:
        code = f"GONE = {self.gone!r}\n{WITHOUT}\n{program}"
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def command(self, *words: str) -> str:
        return self.python(f"from compactor.cli.main import entry\nraise SystemExit(entry({list(words)!r}))")


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_can_be_deleted(name: str, tmp_path: Path) -> None:
    product = Product((f"compactor.features.{name}", *FEATURES[name]))
    product.python(IMPORT_ALL)

    log, config = tmp_path / "orders-0", tmp_path / "tier.toml"
    log.mkdir()
    for base in (0, 100):
        rows = [RecordToEncode(base + i, 1, b"key-%d" % (i % 7), b"value") for i in range(100)]
        (log / f"{base:020d}.log").write_bytes(encode_batch(rows))
    config.write_text(f'[tier]\nurl = "{(tmp_path / "tier").as_uri()}"\nstate_dir = "{tmp_path / "state"}"\n')
    for words in (["import", str(log)], ["run", "--force"], ["verify"], ["status"]):
        product.command(*words, "--config", str(config))
    assert len(product.command("cat", "orders-0", "--config", str(config)).splitlines()) == 7


def test_what_is_missing_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"compactor\.round was deleted"):
        Product(("compactor.round",)).python(IMPORT_ALL)
