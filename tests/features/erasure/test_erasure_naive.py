"""What `erasure` names is what a naive scan finds: every object of the tier is read with the plain reader of the tests, whatever it is."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import event, given, strategies as st

from tests.builders import LZ4, NONE, LogBuilder
from tests.plain_format import read_batches
from tests.support.depth import examples
from tests.support.tier_cli import TierCli

pytestmark = pytest.mark.quick

KEYS = tuple(f"key-{number}" for number in range(6))
GRACE = 3_600_000

BATCH = st.tuples(
    st.just("put"),
    st.lists(st.tuples(st.sampled_from(KEYS), st.booleans()), min_size=1, max_size=4),
    st.sampled_from((NONE, LZ4)),
    st.sampled_from((-1, -1, 7)),
)
STEP = st.one_of(
    BATCH, BATCH, st.tuples(st.just("end"), st.booleans()), st.just(("bring",)), st.just(("round",)), st.just(("retire",)),
    st.just(("undo",)), st.just(("orphan",)),
)  # fmt: skip


def play(cli: TierCli, folder: Path, steps: list[tuple[object, ...]]) -> None:
    log, hours, parts = LogBuilder(), 10, 0
    log.put(f"{KEYS[0]}=first")
    for step in [*steps, ("bring",)]:
        what = step[0]
        if what == "put":
            _, pairs, codec, pid = step
            texts = [f"{key}=value" if valued else key for key, valued in pairs]  # type: ignore[attr-defined]
            log.put(*texts, codec=int(str(codec)), pid=int(str(pid)), txn=pid == 7)
        elif what == "end":
            log.end(7, commit=bool(step[1]))
        elif what == "bring" and (log.written < len(log.segments) and log.segments[-1][1]):
            parts += 1
            cli.bring(log.write(folder / f"part-{parts}"))
        elif parts and what == "round":
            hours += 1
            cli.run("--now", hours * 3_600_000)
        elif parts and what == "retire":
            cli.do("retire", "--force-now", "--now", 2**42)
        elif parts and what == "undo":
            runs = [run["run_id"] for run in cli.do("runs", "list")["runs"] if run["undoable"]]
            if runs:
                cli.do("undo", runs[-1])
        elif parts and what == "orphan":
            some = min((cli.tier / "orders-0").glob("*.log"))
            stray = some.with_name(f"{some.name[:21]}{parts:022d}.log")
            if not stray.exists():
                stray.write_bytes(some.read_bytes())


def naive(cli: TierCli, key: bytes) -> set[str]:
    """Objects with a record of the key; control batches have keys of their own."""
    found = set()
    for path in cli.tier.rglob("*"):
        if path.suffix == ".log" and any(
            record.key == key for batch in read_batches(path.read_bytes()) if not batch.control for record in batch.records
        ):
            found.add(str(path.relative_to(cli.tier)))
    return found


@examples(12)
@given(st.lists(STEP, min_size=4, max_size=24))
def test_holders_are_what_all_bytes_say(steps: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cli = TierCli(folder / "cli", {"cleaner": {"delete_retention_ms": 3_600_000, "bloom": False}, "publish": {"grace_ms": GRACE}})
        play(cli, folder, steps)
        words = [word for key in KEYS for word in ("--key", key)]
        answer = cli.ask("erasure", "orders", *words)
        by_key = {entry["digest"]: key for entry, key in zip(answer.document["keys"], KEYS, strict=True)}
        told = {(holder["object"], by_key[holder["key"]]) for holder in answer.document["holders"]}
        assert told == {(where, key) for key in KEYS for where in naive(cli, key.encode())}
        assert [entry["erased"] for entry in answer.document["keys"]] == [not naive(cli, key.encode()) for key in KEYS]
        assert answer.code == (3 if told else 0)
        event(f"states: {sorted({holder['state'] for holder in answer.document['holders']})}")
