"""Damaged segments: the right output, or the error that says where. Never a crash, a hang, too much memory, a wrong result.

    python -m tests.fuzz_segments --count 100000 --seed 1        in four processes: run it with four seeds
    python -m tests.fuzz_segments --seed 1 --only 4711           one case again, told in words

Every case is drawn from (seed, number) alone. The naive cleaner judges: where it takes a log, so must we, with the same result,
or refuse it by name (we may check more than has to be read); where it refuses, we must refuse. In every tenth case it is the cleaner's
output that is damaged, behind its back: the equivalence gate must refuse it, or it says the same in other bytes.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import resource
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compactor.cleaner.gate.batch_checks import GateFailed
from compactor.records.codecs import compress_body
from compactor.records.encode import NO_PRODUCER, ProducerFields, RecordToEncode, encode_batch, encode_varint, prepend_batch_header
from tests.against_naive import Outcome, compare_with_naive
from tests.builders import GZIP, LZ4, NONE, SNAPPY, ZSTD, LogBuilder, entry, snapshot, wrapper
from tests.chunking import SIZES, chunks_of
from tests.plain_format import Unreadable, decompress, fix_crc, read_batches
from tests.support.damage import Round

LIMIT = 1 << 20
"""Bytes that a batch may inflate to here; bombs hold 32 times as much."""
MEMORY = 3 << 30
"""Address space beyond what the process has after its first case."""
HANG_SECONDS = 120

Segments = list[tuple[int, list[bytes]]]
Dice = random.Random

INTERESTING = (0, 1, -1, 2, 7, 127, 128, 255, 2**15, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**40, 2**63 - 1, -(2**63))


# ---- sound logs to begin with -----------------------------------------------------------------------------------------------


def sound_log(dice: Dice) -> LogBuilder:
    log = LogBuilder(next_offset=dice.choice([0, 0, 3, 2**33]))
    codecs = dice.choice([(NONE,), (NONE, GZIP, SNAPPY, LZ4, ZSTD), (dice.choice([GZIP, SNAPPY, LZ4, ZSTD]),)])
    for _ in range(dice.randrange(1, 14)):
        what = dice.randrange(12)
        texts = [dice.choice(["a=1", "b=2", "c", "d=" + "long " * 40, "=x", "@=1", "e="]) for _ in range(dice.randrange(1, 6))]
        if what < 5:
            headers = [(b"name", b"value")] if dice.random() < 0.3 else []
            log.put(*texts, codec=dice.choice(codecs), headers=headers)
        elif what < 8:
            log.put(*texts, pid=dice.randrange(3), txn=dice.random() < 0.7, codec=dice.choice(codecs))
        elif what == 8:
            log.end(dice.randrange(3), commit=dice.random() < 0.5)
        elif what == 9:
            _legacy(dice, log, texts)
        elif what == 10:
            log.skip(dice.randrange(5))
        elif log.segments[-1][1]:
            log.roll()
    return log


def _legacy(dice: Dice, log: LogBuilder, texts: list[str]) -> None:
    magic, codec, base = dice.randrange(2), dice.choice([NONE, GZIP, SNAPPY, LZ4]), log.next_offset
    if codec == NONE or (base == 0 and magic):
        for text in texts:
            log.raw(entry(magic, log.next_offset, text, timestamp=5), log.next_offset)
    else:
        inner = [entry(magic, n if magic else base + n, text, timestamp=5) for n, text in enumerate(texts)]
        log.raw(wrapper(magic, base + len(texts) - 1, inner, codec, timestamp=5), base + len(texts) - 1)


# ---- damage -----------------------------------------------------------------------------------------------------------------


def flip_bits(dice: Dice, segments: Segments) -> None:
    """Anywhere, checksum as it was."""
    batches, at = _pick(dice, segments)
    batches[at] = _flipped(dice, batches[at], 0)


def flip_bits_under_a_right_crc(dice: Dice, segments: Segments) -> None:
    batches, at = _pick(dice, segments)
    raw = _flipped(dice, batches[at], dice.choice([0, 12, 21, 61]))
    batches[at] = fix_crc(raw) if len(raw) > 21 else raw


def cut(dice: Dice, segments: Segments) -> None:
    batches, at = _pick(dice, segments)
    batches[at] = batches[at][: dice.randrange(len(batches[at]))]
    if dice.random() < 0.6:
        del batches[at + 1 :]


def garbage(dice: Dice, segments: Segments) -> None:
    batches, at = _pick(dice, segments)
    batches.insert(at, dice.randbytes(dice.choice([1, 16, 17, 61, 200])))


def reorder(dice: Dice, segments: Segments) -> None:
    """Batches twice, exchanged, lost, in another segment."""
    batches, at = _pick(dice, segments)
    others, to = _pick(dice, segments)
    match dice.randrange(4):
        case 0:
            others.insert(to, batches[at])
        case 1:
            batches[at], others[to] = others[to], batches[at]
        case 2:
            del batches[at]
        case 3:
            others.insert(to, batches.pop(at))


def absurd_header(dice: Dice, segments: Segments) -> None:
    """One field of the batch header says something else."""
    batches, at = _pick(dice, segments)
    raw = bytearray(batches[at])
    fields = {2: [(0, "q"), (8, "i"), (12, "i"), (21, "h"), (23, "i"), (27, "q"), (35, "q"), (43, "q"), (51, "h"), (53, "i"), (57, "i")]}
    if len(raw) <= 21:
        return
    where, kind = dice.choice(fields.get(raw[16], [(0, "q"), (8, "i"), (17, "b"), (18, "i"), (18, "q"), (26, "i"), (30, "i")]))
    size = struct.calcsize(kind)
    if where + size > len(raw):
        return
    old = int.from_bytes(raw[where : where + size], "big", signed=True)
    value = dice.choice([*INTERESTING, old + 1, old - 1, old * 2, dice.randrange(-300, 300)])
    raw[where : where + size] = (value % (1 << 8 * size)).to_bytes(size, "big")
    batches[at] = fix_crc(bytes(raw)) if dice.random() < 0.9 else bytes(raw)


def body_surgery(dice: Dice, segments: Segments) -> None:
    """Under a right checksum and the right codec: bytes, varints and lengths of the records are not what they should be."""
    batches, at = _pick(dice, segments)
    raw = batches[at]
    if len(raw) <= 61 or raw[16] != 2:
        return
    codec = raw[22] & 7
    try:
        body = bytearray(decompress(codec, raw[61:]))
    except Unreadable:
        return
    for _ in range(dice.choice([1, 1, 2, 5])):
        where = dice.randrange(len(body) + 1)
        match dice.randrange(4):
            case 0:
                body[where : where + 1] = dice.randbytes(1)
            case 1:
                body[where : where + 1] = encode_varint(_wrapped(dice.choice(INTERESTING)))
            case 2:
                body[where:where] = dice.choice([b"\xff" * 5, b"\xff" * 10, b"\x80\x80\x00", b"\x01", b"\xff\xff\xff\xff\x0f"])
            case 3:
                del body[where : where + dice.randrange(1, 4)]
    packed = compress_body(codec, bytes(body)) if codec else bytes(body)
    batches[at] = _resized(raw[:61] + packed)


def damaged_stream(dice: Dice, segments: Segments) -> None:
    """The compressed stream itself: flipped, cut, twice, with something behind it."""
    batches, at = _pick(dice, segments)
    raw = batches[at]
    if len(raw) <= 62 or raw[16] != 2 or not raw[22] & 7:
        return
    body = bytearray(raw[61:])
    match dice.randrange(5):
        case 0:
            body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)
        case 1:
            del body[dice.randrange(len(body)) :]
        case 2:
            body += bytes(body)
        case 3:
            body += dice.randbytes(3)
        case 4:
            body[: dice.randrange(12)] = b""
    batches[at] = _resized(raw[:61] + bytes(body))


def other_codec(dice: Dice, segments: Segments) -> None:
    batches, at = _pick(dice, segments)
    raw = bytearray(batches[at])
    if len(raw) <= 22:
        return
    where = 22 if raw[16] == 2 else 17
    raw[where] = raw[where] & ~7 | dice.randrange(8)
    batches[at] = fix_crc(bytes(raw))


def bomb(dice: Dice, segments: Segments) -> None:
    """A small batch that inflates to far more than is allowed."""
    batches, at = _pick(dice, segments)
    codec = dice.choice([GZIP, SNAPPY, LZ4, ZSTD])
    zeros = bytes(32 * LIMIT)
    base = int.from_bytes(batches[at][:8], "big", signed=True)
    if dice.random() < 0.3 and codec != ZSTD:
        batches[at] = wrapper(1, base, [zeros], codec, timestamp=1)
    else:
        rows = [RecordToEncode(base, 1, b"a", zeros)]
        body = compress_body(codec, encode_batch(rows)[61:] if dice.random() < 0.5 else zeros)
        batches[at] = prepend_batch_header(base, 0, 0, codec, 1, 1, NO_PRODUCER, dice.choice([1, 2**31 - 1]), body)


def nested(dice: Dice, segments: Segments) -> None:
    """Wrappers in wrappers, of mixed magic, of magic 2, empty, without a value."""
    batches, at = _pick(dice, segments)
    base = int.from_bytes(batches[at][:8], "big", signed=True)
    inner: list[bytes] = [entry(dice.randrange(2), n, f"k{n}=v", timestamp=1) for n in range(dice.randrange(4))]
    made = b""
    for _ in range(dice.randrange(1, 4)):
        made = wrapper(dice.randrange(2), dice.choice([base, base + len(inner), 0]), inner, dice.choice([GZIP, SNAPPY, LZ4]), timestamp=1)
        inner = dice.choice(
            [[made], [made, *inner], [encode_batch([RecordToEncode(0, 1, b"a", b"1")])], [made[: dice.randrange(len(made))]]]
        )
    batches[at] = dice.choice(
        [made, entry(1, base, "a", attributes=dice.randrange(8)), entry(0, base, "=x", attributes=dice.randrange(16))]
    )


def odd_control(dice: Dice, segments: Segments) -> None:
    """Control batches with odd keys, no record, several records, compressed."""
    batches, at = _pick(dice, segments)
    base = int.from_bytes(batches[at][:8], "big", signed=True)
    keys = [b"", None, b"\x00", b"\x00\x00\x00", b"\x00\x00\x00\x01", b"\xff\xff\x00\x01", b"\x00\x00\x00\x00\x00", b"\x00\x00\x7f\xff"]
    rows = [RecordToEncode(base + n, 1, dice.choice(keys), dice.choice([b"", b"\x00" * 6])) for n in range(dice.randrange(3))]
    producer = ProducerFields(dice.randrange(3) if rows else 1, 0, -1, True)
    made = encode_batch(rows, base_offset=base, last_offset=base, producer=producer)
    raw = bytearray(made)
    raw[22] |= 0x20
    batches[at] = fix_crc(bytes(raw))


DAMAGE: tuple[Callable[[Dice, Segments], None], ...] = (
    flip_bits,
    flip_bits_under_a_right_crc,
    flip_bits_under_a_right_crc,
    cut,
    garbage,
    reorder,
    absurd_header,
    absurd_header,
    body_surgery,
    body_surgery,
    damaged_stream,
    other_codec,
    nested,
    odd_control,
)


def _pick(dice: Dice, segments: Segments) -> tuple[list[bytes], int]:
    batches = dice.choice([batches for _, batches in segments if batches])
    return batches, dice.randrange(len(batches))


def _flipped(dice: Dice, raw: bytes, first: int) -> bytes:
    changed = bytearray(raw)
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        changed[dice.randrange(min(first, len(raw) - 1), len(raw))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _resized(raw: bytes) -> bytes:
    return fix_crc(raw[:8] + struct.pack(">i", len(raw) - 12) + raw[12:])


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


# ---- running ----------------------------------------------------------------------------------------------------------------


def draw_case(seed: int, number: int) -> tuple[Segments, dict[str, Any], list[str], Dice]:
    dice = random.Random(f"{seed}/{number}")
    log = sound_log(dice)
    while not any(batches for _, batches in log.segments):
        log = sound_log(dice)
    segments = [(base, list(batches)) for base, batches in log.segments]
    done = []
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        damage = bomb if dice.random() < 0.004 else dice.choice(DAMAGE)
        if any(batch for _, batches in segments for batch in batches):
            segments = [(base, [raw for raw in batches if raw]) for base, batches in segments]
            damage(dice, segments)
            done.append(damage.__name__)
    request: dict[str, Any] = {"now_ms": dice.choice([5_000, 10**12]), "max_decompressed_batch_bytes": LIMIT}
    if dice.random() < 0.3:
        request["map_entries"] = dice.randrange(1, 5)
    if dice.random() < 0.3:
        request["segment_bytes"] = 1
    return segments, request, done, dice


def run_case(seed: int, number: int) -> tuple[Outcome, list[str]]:
    segments, request, done, dice = draw_case(seed, number)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name) / "log"
        folder.mkdir()
        for base, batches in segments:
            (folder / f"{base:020}.log").write_bytes(b"".join(batches))
        _write_companions(dice, folder, segments)
        with chunks_of(dice.choice(SIZES)):
            threads, gate = dice.choice([1, 1, 2]), dice.choice([1, 300, 1 << 20])
            return compare_with_naive(folder, Path(name) / "out", request, threads=threads, gate=gate), done


def run_gate_case(seed: int, number: int) -> tuple[str, list[str]]:
    """(what is wrong, damage): a sound log is cleaned, and its output damaged."""
    dice = random.Random(f"{seed}/{number}")
    log = sound_log(dice)
    request: dict[str, Any] = {"now_ms": dice.choice([5_000, 10**12]), "max_decompressed_batch_bytes": LIMIT}
    if dice.random() < 0.3:
        request["first_dirty_offset"] = dice.choice([base for base, _ in log.segments])
    if dice.random() < 0.3:
        request["segment_bytes"] = 1
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = log.write(Path(name) / "log")
        cleaned = Round.of(folder, Path(name) / "out", request)
        before = cleaned.outputs()
        segments = [(base, [each.raw for each in batches]) for base, batches in before.items()]
        if not any(batches for _, batches in segments):
            return "", []
        damage = dice.choice(DAMAGE)
        damage(dice, segments)
        for base, batches in segments:
            (cleaned.out_dir / f"{base:020}.log").write_bytes(b"".join(batches))
        try:
            cleaned.judged(budget_bytes=1 << 20)
        except GateFailed:
            return "", [damage.__name__]
        after = cleaned.outputs()
        same = {base: [each.content() for each in batches] for base, batches in before.items()} == {
            base: [each.content() for each in batches] for base, batches in after.items()
        }
        return "" if same else "the gate takes it", [damage.__name__]


def _write_companions(dice: Dice, folder: Path, segments: Segments) -> None:
    """Snapshots and indexes, sound or not: a cleaner that is given nonsense there goes by the log."""
    base = segments[-1][0]
    if dice.random() < 0.2:
        snapshot(folder, base, [(1, 0, -1)])
        if dice.random() < 0.5:
            path = folder / f"{base:020}.snapshot"
            path.write_bytes(_flipped(dice, path.read_bytes(), 0))
    for suffix in (".index", ".timeindex", ".txnindex"):
        if dice.random() < 0.05:
            (folder / f"{base:020}{suffix}").write_bytes(dice.randbytes(dice.choice([0, 8, 12, 33, 34, 68])))


def problem(outcome: Outcome) -> str:
    """Empty when the outcome is one that may be."""
    if outcome.difference:
        return f"another result: {outcome.difference}"
    if outcome.naive and not outcome.ours:
        return f"taken, though: {outcome.naive}"
    error = outcome.error
    if error is None or (error.segment.endswith(".txnindex") and error.cause):
        return ""
    if not error.segment.endswith(".log") or error.position < 0 or not error.cause:
        return f"an error that does not say where: {error!r}"
    return ""


def tell(seed: int, number: int) -> None:
    segments, request, done, _ = draw_case(seed, number)
    print(f"damage: {', '.join(done)}; {request}")
    for base, batches in segments:
        print(f"segment {base}: {b''.join(batches).hex()}")
        try:
            for each in read_batches(b"".join(batches), limit=LIMIT):
                print(f"  {each.position}: {each.content()}"[:400])
        except Unreadable as error:
            print(f"  unreadable: {error}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz_segments", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="one case, told in words")
    parser.add_argument("--most-finds", type=int, default=10)
    asked = parser.parse_args(arguments)
    faulthandler.enable()
    numbers = range(asked.first, asked.first + asked.count)
    if asked.only is not None:
        tell(asked.seed, asked.only)
        numbers = range(asked.only, asked.only + 1)
    return _run(asked.seed, numbers, asked.most_finds, verbose=asked.only is not None)


def _run(seed: int, numbers: range, most_finds: int, *, verbose: bool) -> int:
    counts: Counter[str] = Counter()
    finds = 0
    limited = False
    for number in numbers:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            if number % 10 == 9:
                words, done = run_gate_case(seed, number)
                outcome = Outcome()
            else:
                outcome, done = run_case(seed, number)
                words = problem(outcome)
        except Exception:  # noqa: BLE001 - this is what is looked for
            outcome, done, words = Outcome(), ["?"], f"a crash:\n{traceback.format_exc(limit=-6)}"
        faulthandler.cancel_dump_traceback_later()
        if not limited:  # kernels are compiled and libraries loaded by now
            limited = True
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if Path("/proc/self/statm").exists() else 0
            if used:
                resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        counts[
            "outputs for the gate"
            if number % 10 == 9
            else "refused by both"
            if outcome.ours and outcome.naive
            else "refused by us alone"
            if outcome.ours
            else "cleaned alike"
        ] += not words
        if verbose:
            print(f"ours: {outcome.ours or 'cleaned'}\nnaive: {outcome.naive or 'cleaned'}")
        if words:
            finds += 1
            print(f"--seed {seed} --only {number} ({', '.join(done)}): {words}", flush=True)
            if finds >= most_finds:
                break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{sum(counts.values()) + finds} cases: {finds} finds; "
        + ", ".join(f"{k} {v}" for k, v in counts.most_common())
        + f"; peak {peak} MB"
    )
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
