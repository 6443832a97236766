"""The engines give one answer: a set in memory, rows on disk, one that goes over in the middle, in several parts. The same bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from compactor.cleaner import disk_map as row_spool, keys as key_set
from compactor.cleaner.disk_map import DiskOffsetMap, KeyScanSpillingToDisk
from compactor.cleaner.keys import MIN_MAP_BYTES, KeyHashSet, KeyScanParameters, SurvivorLookup, find_survivors_backwards
from compactor.cleaner.offline import open_log_directory
from compactor.cleaner.retention import CleanedChunkCache, RetentionRules, transaction_verdicts_by_source
from compactor.cleaner.rewrite import GroupRewriter, GroupSourceOpener
from compactor.cleaner.source import open_source_segment, segment_of_batch_range
from compactor.cleaner.worker_threads import WorkerThreads
from compactor.errors import BadData
from compactor.records.producers import ProducerStates
from tests.builders import GZIP, LZ4, NONE, LogBuilder, log_of
from tests.support.depth import examples

LIMIT = 1 << 20


class NoLimit:
    def __init__(self) -> None:
        self.used = 0

    def reserve_bytes_on_disk(self, nbytes: int) -> None:
        self.used += nbytes

    def release_bytes_on_disk(self, nbytes: int) -> None:
        self.used -= nbytes


class Log:
    """An opened log directory and what it takes to clean it by any engine."""

    def __init__(self, folder: Path, first_dirty: int, threads: int) -> None:
        self.folder = folder
        self.sources = open_log_directory(folder / "log", 4096, LIMIT)
        self.first_dirty = first_dirty
        self.workers = WorkerThreads(threads)
        self.disk = NoLimit()
        self.rounds = 0
        self.one = KeyScanParameters(
            self.sources,
            transaction_verdicts_by_source(self.sources),
            first_dirty,
            self.sources[-1].end,
            bytes(range(16)),
            LIMIT,
            CleanedChunkCache(0),
            self.rules(),
        )

    def rules(self) -> RetentionRules:
        end = self.sources[-1].end
        return RetentionRules(1_000_000, 0, 0, end, end - 1, ProducerStates.empty_producer_states())

    def in_memory(self) -> SurvivorLookup:
        return find_survivors_backwards(self.one, KeyHashSet(1 << 20), self.workers)

    def spilling(self, keys: KeyHashSet | None, *, parts: int = 1, skip: frozenset[int] = frozenset()) -> KeyScanSpillingToDisk:
        """``skip``: segments below the dirty range that nobody looks up."""

        def open_disk_map(part: int, parts: int) -> DiskOffsetMap:
            return DiskOffsetMap(
                self.folder / "disk_map",
                self.disk,
                map_budget_bytes=MIN_MAP_BYTES,
                expected_row_count=200,
                key_part_number=part,
                key_part_count=parts,
            )

        found = KeyScanSpillingToDisk(self.one, keys, open_disk_map, parts)
        try:
            for _ in range(parts):
                for source, wanted in reversed(self.one.dirty_segments()):
                    found.scan_dirty_segment_keys(source, wanted, self.workers)
                for source in self.sources:
                    if source.base < self.first_dirty and source.ordinal not in skip:
                        found.scan_clean_segment_keys(source, self.one.flag_clean_batches(source), self.workers)
                found.end_key_part()
        finally:
            found.close()
        assert self.disk.used == 0
        return found

    def output(self, survivors: SurvivorLookup) -> list[bytes]:
        """What pass 2 makes of it, each segment by itself."""
        written = []
        for source in self.sources:
            self.rounds += 1
            folder = self.folder / f"out-{self.rounds}"
            folder.mkdir()
            rewriting = GroupRewriter(survivors, self.rules(), 4096, LIMIT, CleanedChunkCache(0))
            member = GroupSourceOpener(source, self.one.verdicts[source.ordinal])
            cleaned = rewriting.rewrite_group(source.base, [member], folder, self.workers)
            written.append(cleaned.paths["log"].read_bytes())
        return written


@st.composite
def logs(draw: st.DrawFn) -> tuple[LogBuilder, int]:
    log = LogBuilder()
    for number in range(draw(st.integers(1, 5))):
        if number:
            log.roll()
        for _ in range(draw(st.integers(1, 5))):
            some = draw(st.lists(st.integers(0, 400), min_size=1, max_size=120))
            transactional = draw(st.sampled_from([False, False, True]))
            texts = [f"k{key}" + ("" if key % 7 == 0 else f"={key}") if key % 11 else f"={key}" for key in some]
            log.put(*texts, codec=draw(st.sampled_from([NONE, LZ4, GZIP])), pid=1 if transactional else -1, txn=transactional)
            if transactional:
                log.end(1, commit=draw(st.booleans()))
    bases = [base for base, _ in log.segments]
    return log, draw(st.sampled_from([*bases, draw(st.integers(0, log.next_offset - 1))]))


@examples(60)
@given(logs(), st.integers(1, 3), st.sampled_from([1, 3]), st.sampled_from([1, 7, 1 << 20]))
def test_all_engines_make_the_same_bytes(made: tuple[LogBuilder, int], parts: int, threads: int, block: int) -> None:
    builder, first_dirty = made
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_spool, "BLOCK_BYTES", 16 * block)
        patch.setattr(key_set, "SMALLEST", 16)
        builder.write(Path(scratch) / "log")
        log = Log(Path(scratch), first_dirty, threads)
        with log.workers:
            memory = log.in_memory()
            want = log.output(memory)
            on_disk = log.spilling(None, parts=parts)
            assert log.output(on_disk) == want
            assert on_disk.key_count == memory.key_count
            tiny = log.spilling(KeyHashSet((16 + key_set.SPACE) * key_set.ENTRY_BYTES))
            assert log.output(tiny) == want
            assert tiny.has_spilled == (memory.key_count > 12), "0.8 of 16"
            roomy = log.spilling(KeyHashSet(1 << 20))
            assert log.output(roomy) == want
            assert not roomy.has_spilled


def test_what_nobody_had_a_reason_to_look_up_is_not_superseded(tmp_path: Path) -> None:
    """A segment whose filter met no key is read for another reason: without its rows on disk the answer is the same."""
    builder = LogBuilder()
    builder.put(*(f"a{n}=1" for n in range(50)))
    builder.roll()
    builder.put(*(f"b{n}=1" for n in range(50)))
    builder.write(tmp_path / "log")
    log = Log(tmp_path, 50, 1)
    with log.workers:
        want = log.output(log.in_memory())
        assert log.output(log.spilling(None, skip=frozenset({0}))) == want
        assert log.output(log.spilling(None, parts=3, skip=frozenset({0}))) == want


def test_the_keys_that_filters_are_asked_about(tmp_path: Path) -> None:
    builder = LogBuilder()
    builder.put(*(f"a{n % 300}=1" for n in range(900)))
    builder.write(tmp_path / "log")
    log = Log(tmp_path, 0, 1)

    def asked(found: KeyScanSpillingToDisk) -> set[tuple[int, int]]:
        for source, wanted in reversed(log.one.dirty_segments()):
            found.scan_dirty_segment_keys(source, wanted, log.workers)
        keys = {(int(h0) & 0xFFFFFFFF, int(h1)) for chunk in found.iterate_dirty_key_hashes() for h0, h1 in chunk}
        found.close()
        return keys

    def open_disk_map(part: int, parts: int) -> DiskOffsetMap:
        return DiskOffsetMap(
            tmp_path / "disk_map",
            log.disk,
            map_budget_bytes=MIN_MAP_BYTES,
            expected_row_count=900,
            key_part_number=part,
            key_part_count=parts,
        )

    in_memory = asked(KeyScanSpillingToDisk(log.one, KeyHashSet(1 << 20), open_disk_map))
    assert len(in_memory) == 300
    assert asked(KeyScanSpillingToDisk(log.one, None, open_disk_map)) == in_memory
    assert asked(KeyScanSpillingToDisk(log.one, KeyHashSet(MIN_MAP_BYTES), open_disk_map)) == in_memory
    assert not (tmp_path / "disk_map").exists()
    assert log.disk.used == 0


def test_bad_data_gives_the_disk_back(tmp_path: Path) -> None:
    builder = LogBuilder()
    builder.put(*(f"a{n}=1" for n in range(50)))
    builder.write(tmp_path / "log")
    path = next((tmp_path / "log").glob("*.log"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    log = Log(tmp_path, 0, 1)
    with pytest.raises(BadData):
        log.spilling(None)
    assert log.disk.used == 0
    assert not (tmp_path / "disk_map").exists()


def test_a_filler_behind_a_source_without_a_batch_is_of_the_epoch_at_the_end(tmp_path: Path) -> None:
    """Brokers have tiered again what follows, and the source that is cut there has no batch left before the cut."""
    log = log_of("a=1; /; b=1")
    log.write(tmp_path / "log")
    opened = Log(tmp_path, 0, 1)
    cut = segment_of_batch_range(opened.sources[1], 0, 0, 1, 2)
    verdicts = transaction_verdicts_by_source([opened.sources[0], cut])
    out = tmp_path / "out"
    out.mkdir()
    rewriting = GroupRewriter(opened.in_memory(), opened.rules(), 4096, LIMIT, CleanedChunkCache(0))
    members = [GroupSourceOpener(source, verdict) for source, verdict in zip((opened.sources[0], cut), verdicts, strict=True)]
    cleaned = rewriting.rewrite_group(0, members, out, opened.workers, end_offset=5, filler_epoch=7)
    table = open_source_segment(0, cleaned.paths["log"], 0, 6, 0, -1, LIMIT).table
    assert (table.last_offset.tolist(), table.leader_epoch.tolist()[-1]) == ([0, 5], 7)
