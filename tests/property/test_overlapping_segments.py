"""Segments that overlap after changes of leader, by replicas that tier as brokers do: read as a naive broker reads them, as one chain."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest

from checkpoint.lineage import EpochEntry, first_divergent_offset
from compactor.adapters.brokers import chain as chaining
from compactor.adapters.brokers.cache import RemoteLogMetadataCache
from compactor.adapters.brokers.chain import chained_read_ranges, lineage_from_segments, segment_read_ranges
from compactor.constants import LeaderEpoch, Offset
from compactor.model.remote_log import SegmentReadRange
from tests.metadata_events import PARTITION, finished
from tests.plain_metadata_cache import PlainCache
from tests.support.replicas import Record, Replicas

HISTORIES = 400


def history(seed: int) -> Replicas:
    rng = random.Random(seed)
    often = {"unclean": rng.choice((0.0, 0.6)), "zombies": rng.choice((0.0, 0.5)), "follows": rng.choice((0.2, 0.8))}
    replicas = Replicas(rng, PARTITION, **often)
    replicas.play(rng.randint(5, 40))
    replicas.settle()
    return replicas


def naively(replicas: Replicas, end: int) -> list[Record | None]:
    """What a consumer is given for each offset: by the leader's epoch for it, the floor in that epoch's map, nothing else."""
    plain = PlainCache()
    for event in replicas.events:
        plain.apply(event)
    found: list[Record | None] = []
    for offset in range(end + 1):
        epoch = replicas.leader.log[offset][1]
        state = plain.epochs.get(epoch)
        starts = [start for start in state.offset_to_id if start <= offset] if state else []
        metadata = plain.metadata[state.offset_to_id[max(starts)]] if state and starts else None
        inside = metadata is not None and offset <= plain.end_in(metadata, epoch)
        found.append(replicas.contents[metadata.segment_id][offset - metadata.start_offset] if metadata and inside else None)
    return found


def by_chain(replicas: Replicas, links: list[SegmentReadRange], end: int) -> list[Record | None]:
    found: list[Record | None] = [None] * (end + 1)
    for link in links:
        for offset in range(link.first, min(link.last, end) + 1):
            found[offset] = replicas.contents[link.segment.segment_id][offset - link.segment.start_offset]
    return found


def verdict(replicas: Replicas) -> str:
    """``same``, ``hole`` where brokers leave one and so do we, ``refused`` where the newest checkpoint disagrees; raises otherwise."""
    told = lineage_from_segments(replicas.cache)
    links = chained_read_ranges(segment_read_ranges(replicas.cache, told), told)
    end = links[-1].last
    if first_divergent_offset(told, end + 1, newest_lineage(replicas, links), end + 1) is not None:
        return "refused"
    truth = naively(replicas, end)
    given = by_chain(replicas, links, end)
    whole = all(two.first == one.last + 1 and two.first == two.segment.start_offset for one, two in pairwise(links))
    assert len({link.segment.segment_id for link in links}) == len(links) or not whole
    if None in truth:
        assert not whole or links[0].first > 0, "brokers leave a hole, and the chain has none"
        assert [one for one, two in zip(truth, given, strict=True) if one is not None and one != two] == []
        return "hole"
    assert whole, links
    assert given == truth
    assert truth == replicas.leader.log[: end + 1]
    return "same"


def newest_lineage(replicas: Replicas, links: list[SegmentReadRange]) -> tuple[EpochEntry, ...]:
    """The leader-epoch-checkpoint among its objects."""
    return replicas.lineages[links[-1].segment.segment_id]


def verdicts(seeds: range) -> dict[str, int]:
    found: dict[str, int] = {}
    for seed in seeds:
        try:
            said = verdict(history(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        found[said] = found.get(said, 0) + 1
    return found


def test_readers_of_overlapping_segments_get_what_brokers_serve() -> None:
    found = verdicts(range(HISTORIES))
    assert found["same"] > 0.8 * HISTORIES


def every_lower_epoch(patch: pytest.MonkeyPatch) -> None:
    """An epoch that was discarded is taken for a part of the log."""
    patch.setattr(chaining, "_preceding_epochs", lambda cache: {})


def segments_twice(patch: pytest.MonkeyPatch) -> None:
    """A segment that brokers come back to is in the chain twice, or begins behind its start."""
    patch.setattr(sys.modules[__name__], "chained_read_ranges", lambda links, lineage: links)


@pytest.mark.parametrize("drop", [every_lower_epoch, segments_twice])
def test_what_is_left_out_is_noticed(drop: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    drop(monkeypatch)
    noticed = 0
    for seed in range(HISTORIES):
        try:
            noticed += verdict(history(seed)) == "refused"
        except AssertionError:
            noticed += 1
    assert noticed, drop.__doc__


def test_where_metadata_does_not_say_whose_log_it_is_the_checkpoint_does() -> None:
    """Epoch 1 was tiered and discarded; its offsets came again in epoch 0, and no segment reaches across the beginning of epoch 2."""
    events = [*finished(1, 0, 99), *finished(2, 100, 149, {1: 100}), *finished(3, 90, 149), *finished(4, 150, 199, {2: 150})]
    cache = RemoteLogMetadataCache(PARTITION)
    for offset, event in enumerate(events):
        cache.apply_record(event, offset)
    told = lineage_from_segments(cache)
    assert [entry.epoch for entry in told] == [0, 1, 2]
    known = (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(2), Offset(150)))
    assert first_divergent_offset(told, 200, known, 200) == 100
