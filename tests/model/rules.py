"""The rules that Replacement.tla and Expiry.tla can leave out, the size at which each is missed, and the promise that breaks without it."""

from __future__ import annotations

from typing import NamedTuple

from tests.model.checker import Size

WHOLE = (
    Size(epochs=1, broker_acts=True),
    Size(epochs=1, undoes=True),
    Size(epochs=1, expires=True),
    Size(epochs=2),
    Size(epochs=2, broker_acts=True),
)
"""With every rule kept, from the smallest to the largest."""


class Rule(NamedTuple):
    size: Size
    breaks: str


def _without(name: str, breaks: str, *, epochs: int = 1, broker_acts: bool = False, undoes: bool = False, expires: bool = False) -> Rule:
    return Rule(Size(frozenset({name}), epochs, broker_acts, undoes, expires), breaks)


RULES = {
    "R3": _without("R3", "Covered"),
    "R3b": _without("R3b", "Covered"),
    "R8": _without("R8", "Covered"),
    "ascending": _without("ascending", "NothingOldAfterNew"),
    "descending": _without("descending", "NothingOldAfterNew", undoes=True),
    "publish begun": _without("publish begun", "Covered"),
    "look": _without("look", "Covered", broker_acts=True),
    "behind": _without("behind", "NothingOldAfterNew", broker_acts=True),
    "grace": _without("grace", "Readable"),
    "cut off": _without("cut off", "CanBeFinished", epochs=2),
    "deleted too": _without("deleted too", "NoDeletedKeyReturns", expires=True),
    "topic first": _without("topic first", "NoneCutOff", expires=True),
    "wait": _without("wait", "Covered", epochs=2),
}
