"""TLC at a stated size: every state that the specification can reach, or the shortest way to one that breaks a promise."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
PROMISES = ("Covered", "Readable", "NothingOldAfterNew", "CanBeFinished")
EXPIRY_PROMISES = ("Covered", "NoDeletedKeyReturns", "NoneCutOff", "CanBeFinished")


class Unavailable(Exception):
    """Java, Maven or the checker's jar is missing; says which and how to get it."""


@dataclass(frozen=True)
class Size:
    """``dropped``: rules left out; ``epochs``: compactors that lead one after another; ``broker_acts``: it deletes records by itself;
    ``undoes``: the second round takes the first one back; ``expires``: brokers expire segments (Expiry.tla, of one compactor)."""

    dropped: frozenset[str] = frozenset()
    epochs: int = 2
    broker_acts: bool = False
    undoes: bool = False
    expires: bool = False


@dataclass(frozen=True)
class Checked:
    """``broken``: the promise that does not hold, or nothing; ``steps``: of the shortest way there; ``states``: distinct ones seen."""

    broken: str
    steps: int
    states: int
    told: str


@cache
def jar() -> str:
    """The checker's class path; through Maven, once, no network afterwards. Raises Unavailable."""
    for tool, package in (("java", "a Java 17"), ("mvn", "Maven 3.8")):
        if not shutil.which(tool):
            raise Unavailable(f"'{tool}' is not installed: the model is checked with {package}")
    with tempfile.TemporaryDirectory(prefix="model-") as name:
        answer = Path(name) / "jars.txt"
        goals = ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "dependency:build-classpath", f"-Dmdep.outputFile={answer}"]
        for online in (["-o"], []):
            done = subprocess.run([*goals, *online], cwd=name, capture_output=True, text=True, check=False)
            if done.returncode == 0 and answer.exists():
                return answer.read_text().strip()
    raise Unavailable("Maven could not fetch the checker (is there a network, this first time?)")


def check(size: Size, memory: str = "2g") -> Checked:
    """Explores everything that can be reached at this size. Raises Unavailable; RuntimeError where the checker itself fails."""
    with tempfile.TemporaryDirectory(prefix="model-") as name:
        folder = Path(name)
        module = "Expiry" if size.expires else "Replacement"
        shutil.copy(HERE / f"{module}.tla", folder)
        dropped = ", ".join(f'"{rule}"' for rule in sorted(size.dropped))
        constants = f"Drop = {{{dropped}}}"
        if not size.expires:
            flags = f"BrokerActs = {str(size.broker_acts).upper()}\n  Undoes = {str(size.undoes).upper()}"
            constants += f"\n  Epochs = {size.epochs}\n  {flags}"
        promises = " ".join(EXPIRY_PROMISES if size.expires else PROMISES)
        (folder / f"{module}.cfg").write_text(
            f"SPECIFICATION Spec\nCONSTANTS\n  {constants}\nINVARIANTS {promises}\nCHECK_DEADLOCK FALSE\n"
        )
        done = subprocess.run(
            ["java", f"-Xmx{memory}", "-XX:+UseParallelGC", "-cp", jar(), "tlc2.TLC", "-workers", "2", "-metadir", name, module],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
    states = re.search(r"([\d,]+) distinct states found, ", done.stdout)
    broken = re.search(r"Invariant (\w+) is violated", done.stdout)
    if states is None or (broken is None and "No error has been found" not in done.stdout):
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-1000:])
    steps = [int(number) for number in re.findall(r"^State (\d+):", done.stdout, re.MULTILINE)]
    return Checked(broken[1] if broken else "", max(steps, default=0), int(states[1].replace(",", "")), done.stdout)
