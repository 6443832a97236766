"""Every pair of operations meets as the table says, nothing that must never happen does, and the documentation shows the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.control.publication import delete_partition
from tests.simulation.actors import LEASE
from tests.simulation.pairs import AGAIN, ALIVE, GOES_ON, OPERATIONS, REFUSES, STOPPED, WAITS, meet, perform, prepared, told
from tests.simulation.play import playing
from tests.simulation.world import GRACE_MS, TTL_MS, UNDO_WINDOW_MS

DOCUMENT = (Path(__file__).parents[2] / "docs/reference/control-records.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("first", OPERATIONS)
@pytest.mark.parametrize("second", OPERATIONS)
def test_a_pair_meets(first: str, second: str) -> None:
    assert told(*meet(first, second, stopped=False)) == ALIVE[first][second]


@pytest.mark.parametrize("first", OPERATIONS)
@pytest.mark.parametrize("second", OPERATIONS)
def test_a_pair_meets_after_a_long_sleep(first: str, second: str) -> None:
    assert told(*meet(first, second, stopped=True)) == STOPPED[first][second]


def test_a_reader_that_finds_an_object_gone_folds_anew() -> None:
    """So slow that a round was published and its sources were retired meanwhile."""
    with playing(8, 5) as play:
        prepared(play)

        def meanwhile() -> None:
            play.process("a").run()
            play.pass_time(GRACE_MS + UNDO_WINDOW_MS + TTL_MS)
            play.process("b").retire()

        play.before("get t-0/", meanwhile, 1)
        assert perform(play, "read", play.process("reader")) == AGAIN


def test_an_agent_does_not_refill_what_was_deleted() -> None:
    with playing(8, 5) as play:
        prepared(play)
        actor = play.process("a")
        delete_partition(actor.ports, actor.log, LEASE)
        assert perform(play, "agent", play.process("agent")) == REFUSES
        assert perform(play, "import", play.process("by hand")) == GOES_ON


IN_WORDS = {
    "both": f"both {GOES_ON.replace('goes', 'go')}",
    "first refuses": f"{GOES_ON}; first {REFUSES}",
    "both refuse": f"{REFUSES}; first {REFUSES}",
    "waits": f"{WAITS}; first {GOES_ON}",
}
"""Cells of the page's tables -> how a pair ends."""


@pytest.mark.parametrize(("title", "table"), [("The first is alive", ALIVE), ("The first was stopped", STOPPED)])
def test_the_documentation_shows_the_pairs(title: str, table: dict[str, dict[str, str]]) -> None:
    """The page joins operations that end alike in one row or column."""
    lines = next(part for part in DOCUMENT.split(f"### {title}")[1].split("\n\n") if part.startswith("|")).splitlines()
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    shown = {
        first: {second: IN_WORDS[cell] for names, cell in zip(head[1:], row[1:], strict=True) for second in names.split(", ")}
        for row in rows
        for first in row[0].split(", ")
    }
    assert shown == table
