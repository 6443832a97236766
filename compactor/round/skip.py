"""Which clean segments a round must read, and why; what filters have brought so far. Pure decisions over sidecars and run history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from bloom import sizing
from bloom.sidecar import Sidecar, estimate_together
from bloom.sizing import TRIAL, FilterDesign, still_pays
from compactor.config import Cleaner
from compactor.control.state import PartitionState, Run
from compactor.control.summary import SegmentFacts
from compactor.model.plan import CompactionPlan
from compactor.tier.sidecars import Head

RECENT = 5
"""Rounds whose numbers of keys tell how many the next ones will bring."""

DEFAULT_KEYS = 100_000
"""What filters are made for before a round has told more."""

KEY_BYTES = 20
"""What a key takes in memory, at most."""

WRAPPED_BYTES = 50
"""What a message takes in a compressed wrapper, about."""

WORTH_ASKING = 0.5
"""A filter that would be wrong more often than this, for so many keys, is not fetched."""


@dataclass(frozen=True)
class FilterRecord:
    """What filters have done on a partition, by its run history. Segments and bytes; ``useless``: read for a wrong answer alone."""

    asked: int = 0
    skipped: int = 0
    useless: int = 0
    bytes_read: int = 0
    bytes_saved: int = 0

    @property
    def pays(self) -> bool:
        return still_pays(self.asked, self.bytes_read, self.bytes_saved)

    @property
    def skip_rate(self) -> float:
        """Share of the clean segments that meet no dirty key."""
        return (self.skipped + self.useless) / self.asked if self.asked >= TRIAL else sizing.SKIP_RATE

    @property
    def useless_rate(self) -> float:
        """Of the segments that met no dirty key, those that were read all the same."""
        idle = self.skipped + self.useless
        return self.useless / idle if idle else 0.0

    def text(self) -> str:
        return (
            f"of {self.asked} filters asked, {self.skipped} spared a read and {self.useless} were wrong ({100 * self.useless_rate:.2g} %); "
            f"{self.bytes_read} bytes of filters were read, {self.bytes_saved} bytes of segments were not"
        )


def filter_record(runs: Iterable[Run]) -> FilterRecord:
    """Of the rounds that are remembered; forgotten ones give filters another chance."""
    records = [record_of(run.stats) for run in runs]
    return FilterRecord(**{name: sum(getattr(each, name) for each in records) for name in FilterRecord.__dataclass_fields__})


def record_of(stats: Mapping[str, int | float | str]) -> FilterRecord:
    """Of one round's figures in run history."""
    counts = {name: int(stats.get(f"filter_{name}", 0)) for name in ("asked", "skipped", "useless")}
    read = int(stats.get("filter_bytes_read", 0)) + int(stats.get("filter_bytes_written", 0))
    return FilterRecord(**counts, bytes_read=read, bytes_saved=int(stats.get("bytes_skipped", 0)))


def keys_to_come(cleaner: Cleaner, runs: Sequence[Run], now: int) -> int:
    """Keys that a round of this partition is expected to bring: as set, else the most of this one (``now``) and the last ones.

    Too many cost little: a filter grows with the logarithm of the keys that it is asked about.
    """
    if cleaner.bloom_design_keys:
        return cleaner.bloom_design_keys
    brought = [int(run.stats["map_entries"]) for run in runs if run.stats.get("map_entries")][-RECENT:]
    return max([now, *brought]) or DEFAULT_KEYS


def filter_for(cleaner: Cleaner, record: FilterRecord, probes: int, records: int, segment_bytes: int) -> FilterDesign | None:
    """The filter of a new segment, or None where none pays. ``records``: of the segment, as after cleaning hardly a key comes twice."""
    if not cleaner.bloom or not record.pays:
        return None
    return sizing.design(records, probes, segment_bytes, max(record.skip_rate, 0.01))


def engine_for(setting: str, keys: int, map_budget_bytes: int) -> str:
    """``map_engine`` for so many keys: as it is set, or by what the map budget holds."""
    if setting != "auto":
        return setting
    return "memory" if keys * KEY_BYTES <= map_budget_bytes else "partitioned"


def records_about(segment: SegmentFacts) -> int:
    """Compressed wrappers of v0 and v1 do not say how many messages they hold: a segment of nothing else counts by its bytes."""
    return segment.records or segment.size_bytes // WRAPPED_BYTES


def keys_expected(heads: Sequence[Head], records: Sequence[int]) -> int:
    """Distinct keys of several segments: by their sidecars where they have some, else as many as they have records."""
    known = [head.sidecar for head in heads if head.sidecar is not None]
    rest = sum(count for head, count in zip(heads, records, strict=True) if head.sidecar is None)
    # The estimate's standard error is 1.6 %: three of them more, and never more keys than records.
    return min(sum(records), int(estimate_together(known) * 1.05) + rest)


@dataclass(frozen=True)
class SidecarLook:
    """What a clean segment's sidecar says before its filter is asked.

    One of: ``must`` (why it is read), ``may`` (why it is skipped), neither.

    ``askable``: its filter may know that it has none of the keys.
    ``for_keys``: ``must`` for want of a filter alone; who knows its keys otherwise may say that it need not be read.
    """

    sidecar: Sidecar | None = field(repr=False)
    must: str = ""
    may: str = ""
    askable: bool = False
    for_keys: bool = False


def horizon_passed(segment: SegmentFacts, now_ms: int) -> str:
    """Why it must be read, or nothing."""
    return "a delete horizon has passed" if 0 <= segment.due_ms <= now_ms else ""


def look_at(head: Head, due: str, *, keys: int, record: FilterRecord, now_ms: int) -> SidecarLook:
    """
    :param due: why it must be read whatever its sidecar says.
    :param keys: of the dirty range, or a bound on their number.
    :param record: what filters have brought on this partition.
    """
    sidecar = head.sidecar
    if sidecar is None:
        return SidecarLook(None, must=due or head.problem)
    must = due or sidecar.due.reason(now_ms)
    askable = sidecar.made_for is not None and sidecar.useless_rate(keys) <= WORTH_ASKING
    if must or keys == 0 or sidecar.distinct_keys == 0:
        return SidecarLook(sidecar, must, "" if must else "it has no key" if keys else "nothing is due in it", askable and keys > 0)
    if sidecar.made_for is None:
        return SidecarLook(sidecar, must="no filter pays for it", for_keys=True)
    if not record.pays:
        return SidecarLook(sidecar, must=f"filters do not pay on this partition and are off: {record.text()}", for_keys=True)
    if not askable:
        must = f"its filter is made for {sidecar.made_for.probes} keys, and this round brings up to {keys}"
        return SidecarLook(sidecar, must=must, for_keys=True)
    return SidecarLook(sidecar, askable=True)


@dataclass(frozen=True)
class CleanVerdicts:
    """What pass 1 says of clean segments, id -> why: those to be read, those that need not be, and in which the transaction fold finds
    something to do (``due``). ``asked``: those whose filter alone decided; ``sidecar_bytes``: fetched for it.
    ``settled``: the gate was shown what is to be read, and can be shown no more: nothing else may be rewritten.
    ``in_part``: those of ``read`` of which a part is enough.
    """

    read: Mapping[str, str] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    due: Mapping[str, str] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    sidecar_bytes: int = 0
    settled: bool = False
    in_part: frozenset[str] = frozenset()


def clean_verdicts(
    looks: Mapping[str, SidecarLook],
    met: Mapping[str, str],
    due: Mapping[str, str],
    *,
    asked: Iterable[str],
    keys: int,
    sidecar_bytes: int,
    settled: bool = False,
    in_part: Iterable[str] = (),
) -> CleanVerdicts:
    """By segment id. ``met``: why filters that were asked do not let a segment be skipped; ``keys``: how many they were asked about."""
    read = {name: look.must or met[name] for name, look in looks.items() if look.must or name in met}
    skip = {name: look.may or f"its filter meets none of {keys} keys" for name, look in looks.items() if name not in read}
    return CleanVerdicts(read, skip, due, frozenset(asked), sidecar_bytes, settled, frozenset(in_part))


def filter_stats(
    found: CleanVerdicts, plan: CompactionPlan, state: PartitionState, superseded: AbstractSet[str]
) -> dict[str, int | float | str]:
    """What filters did in a round, once all of its groups are written: for run history, and so for ``filter_record``.

    ``superseded``: ids of segments in which the dirty range superseded a record.
    """
    skipped = {segment.id for segment in plan.skipped} & found.asked
    return {
        "filter_asked": len(found.asked),
        "filter_skipped": len(skipped),
        # Nothing of it was superseded: only a wrong answer of its filter has made the round read it.
        "filter_useless": len((found.asked & found.read.keys()) - superseded),
        "filter_bytes_read": found.sidecar_bytes,
        "bytes_skipped": sum(segment.size_bytes for segment in state.live if segment.id in skipped),
    }
