"""Every pair of operations: what becomes of one that comes while another is at its decisive moment, and of that other.

The decisive moment is just before the request that makes the first one count (its record), or that a reader reads from.
``ALIVE`` and ``STOPPED`` are what is promised; test_pairs.py plays each pair with the real code over the simulated store, and compares
docs/reference/control-records.md.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from compactor.control import records
from compactor.control.leadership import RecordRefused
from compactor.control.publication import delete_partition, undo_round
from compactor.control.records import PartitionRecord
from compactor.errors import BadData, Fenced, Leased, NotFound, UsageError
from tests.simulation.actors import LEASE
from tests.simulation.play import Actor, Play, playing
from tests.simulation.symbolic import NAME
from tests.simulation.world import GRACE_MS, TTL_MS, UNDO_WINDOW_MS
from tests.support.keys import object_key

GOES_ON = "goes on"
WAITS = "waits"
"""For the lease, up to one ttl; then exit code 4, and nothing was changed."""
AGAIN = "tries again"
"""By itself, from a fresh fold. Of readers whose objects are gone."""
REFUSES = "refuses"
"""Says why (exit code 2, 3 or 4); nothing was changed since."""

OPERATIONS = ("import", "agent", "run", "recompact", "retire", "undo", "delete", "export", "read")
MOMENTS = {
    "import": "segments_tiered",
    "agent": "segments_tiered",
    "run": "round_published",
    "recompact": "round_published",
    "retire": "retire_begun",
    "undo": "round_undone",
    "delete": "partition_deleted",
}
LOG = f"partitions/{NAME}/log/"
SEED = 5


def prepared(play: Play) -> None:
    """A round that can be undone and retired, something new that is not clean, and something that is not imported."""
    play.importing(3)
    play.process("setup").run()
    play.importing(1)
    play.pass_time(GRACE_MS + UNDO_WINDOW_MS + 1)


def perform(play: Play, operation: str, actor: Actor) -> str:
    """One operation, with what its command would catch. Says how it ended."""
    try:
        return _act(play, operation, actor)
    except Leased:
        return WAITS
    except (Fenced, UsageError, BadData, RecordRefused):
        return REFUSES


def _act(play: Play, operation: str, actor: Actor) -> str:
    if operation in ("import", "agent"):
        if operation == "agent" and actor.state().deleted_slot:
            raise UsageError("it was deleted, and is not filled again by itself")
        play.actors.importer(actor.ports, actor.log)
    elif operation in ("run", "recompact"):
        status = actor.run().status
        return REFUSES if status == "undone" else GOES_ON
    elif operation == "retire":
        actor.retire()
    elif operation == "undo":
        undo_round(actor.ports, actor.log, LEASE, next(run.run_id for run in actor.state().runs if run.published_slot))
    elif operation == "delete":
        delete_partition(actor.ports, actor.log, LEASE)
    else:
        return _read(actor)
    return GOES_ON


def _read(actor: Actor) -> str:
    """Folds, then reads; a missing object means a fresh fold."""
    outcome = GOES_ON
    while True:
        with suppress(NotFound):
            for segment in actor.state().live:
                actor.ports.data.get(object_key(NAME, segment))
            return outcome
        outcome = AGAIN


def moment(operation: str) -> tuple[str, int]:
    """(request, how many of its kind come before it) at which the operation is decisive, found by doing it in a world of its own."""
    if operation not in MOMENTS:
        return f"get {NAME}/", 1
    with playing(8, SEED) as play:
        prepared(play)
        before = play.oracle.state.slot
        perform(play, operation, play.process("first"))
        for key, data in sorted(play.world.control.objects.items()):
            if key.startswith(LOG) and int(key[len(LOG) :][:20]) > before:
                record = records.decode_checksummed_json(PartitionRecord, data.data, key)
                if record.body.type == MOMENTS[operation]:
                    return f"create {key}", 0
    raise AssertionError(f"{operation} wrote no {MOMENTS[operation]}")


def meet(first: str, second: str, *, stopped: bool) -> tuple[str, str]:
    """(outcome of the second, outcome of the first). ``stopped``: the first one slept so long that its lease counts as given up."""
    request, skip = moment(first)
    outcomes: list[str] = []
    with playing(8, SEED) as play:
        prepared(play)
        one, two = play.process("first"), play.process("second")

        def beating(seconds: float) -> None:
            """The first one is alive: it beats while the second waits."""
            play.pass_time(seconds * 1000)
            leader = play.oracle.state.leader
            if leader is not None and not leader.released and leader.holder == "first":
                key = f"partitions/{NAME}/heartbeat/{leader.epoch:020d}.json"
                play.world.control.put(key, b"{}")

        if not stopped:
            two = replace(two, ports=replace(two.ports, sleep=beating))

        def meanwhile() -> None:
            if stopped:
                play.pass_time(TTL_MS * 2)
            outcomes.append(perform(play, second, two))

        play.before(request, meanwhile, skip)
        outcome = perform(play, first, one)
    return outcomes[0], outcome


def told(second: str, first: str) -> str:
    """Both outcomes as the table has them."""
    return "both go on" if (second, first) == (GOES_ON, GOES_ON) else f"{second}; first {first}"


OUTCOMES = {
    ".": "both go on",
    "W": "waits; first goes on",
    "F": "goes on; first refuses",
    "X": "refuses; first refuses",
}


def _table(grid: str) -> dict[str, dict[str, str]]:
    """``{first: {second: outcome}}`` of a grid: a row is the first one, a column the second."""
    columns, *rows = (line.split() for line in grid.strip().splitlines())
    return {first: dict(zip(columns, (OUTCOMES[letter] for letter in letters), strict=True)) for first, *letters in rows}


ALIVE = _table("""
                 import     agent       run recompact    retire      undo    delete    export      read
    import            F         F         .         .         .         .         F         .         .
    agent             F         F         .         .         .         .         F         .         .
    run               .         .         W         W         W         W         W         .         .
    recompact         .         .         W         W         W         W         W         .         .
    retire            .         .         W         W         W         W         W         .         .
    undo              .         .         W         W         W         W         W         .         .
    delete            .         .         W         W         W         W         W         .         .
    export            .         .         .         .         .         .         .         .         .
    read              .         .         .         .         .         .         .         .         .
""")
"""The first one is at work, and its lease is alive."""
STOPPED = _table("""
                 import     agent       run recompact    retire      undo    delete    export      read
    import            F         F         .         .         .         .         F         .         .
    agent             F         F         .         .         .         .         F         .         .
    run               .         .         F         F         F         X         F         .         .
    recompact         .         .         F         F         F         X         F         .         .
    retire            .         .         F         F         F         F         F         .         .
    undo              .         .         F         F         F         .         F         .         .
    delete            .         .         F         F         F         F         .         .         .
    export            .         .         .         .         .         .         .         .         .
    read              .         .         .         .         .         .         .         .         .
""")
"""The first one was stopped for so long that its lease counts as given up; the second takes over, then the first goes on."""
