"""What a partition's control log comes to: the value that everything decides from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import Field

from checkpoint.offsets import CleanerOffset, clean_up_to
from compactor.control.records import LookedAt, ScratchObject, TailBatch
from compactor.model.balance import Balance, Sum, total
from compactor.model.base import Value
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata

HISTORY = 100
"""How many past runs, fenced appends, epochs and closed imports a state remembers; the rest is gone with its slots."""


class LogState(Value):
    """What every folded control log has: the last slot that is in it (0: empty)."""

    slot: int = 0


class Leader(Value):
    """The last leadership that was acquired. It counts until it is released or a higher epoch is acquired; time ends nothing.

    ``since_ms``: the store's time of ``slot``, None while the slot stands.
    """

    epoch: int
    incarnation: str
    holder: str
    slot: int
    at_ms: int
    ttl_ms: int
    released: bool = False
    since_ms: int | None = None


class EpochHistory(Value):
    """One compactor epoch, for the viewer. ``ended`` is released, replaced or empty while it lasts."""

    epoch: int
    holder: str
    incarnation: str
    slot: int
    at_ms: int
    ended: str = ""
    ended_ms: int = -1


class Intent(Value):
    """The open intent: a plan that was announced and neither published nor undone.

    ``begun_slot``: of *publish begun*; 0 as long as the round can be undone.
    """

    plan: CompactionPlan
    slot: int
    at_ms: int
    receipts: tuple[CompactionReceipt, ...] = ()
    survivors: tuple[ScratchObject, ...] = ()
    begun_slot: int = 0

    @property
    def pending(self) -> tuple[CompactionTask, ...]:
        """Tasks without a receipt: what a resumed run still has to do."""
        done = {receipt.group for receipt in self.receipts}
        return tuple(task for task in self.plan.tasks if task.group not in done)


class Registration(Value):
    """An open import. ``ids`` are those not tiered yet; ``since_ms`` is the store's time of ``slot``, None while the slot stands."""

    import_id: str
    ids: tuple[str, ...]
    holder: str
    slot: int
    since_ms: int | None = None
    tiered_end: int = -1


class ClosedImport(Value):
    """An import that is complete (``voided`` empty) or void (``voided`` says why); ``tiered_end`` is inclusive, -1 for nothing."""

    import_id: str
    slot: int
    tiered_end: int
    voided: str = ""


class Waiting(Value):
    """Segments that left the view and whose objects wait for grace: a round's sources, or the outputs of an undone one.

    ``why`` is empty for those two; else it says what took the segments out (the broker's truncation, the partition's deletion), and
    ``undone`` is true: nobody can go back to them.

    ``slot`` is the publishing or undoing slot, ``since_ms`` the store's modification time of it once a snapshot has recorded
    it (None: ask the store, the slot is still there). ``replaced_by`` maps source id -> new id, empty for an undone round.
    """

    slot: int
    since_ms: int | None = None
    run_id: str
    leader_epoch: int
    undone: bool = False
    segments: tuple[RemoteLogSegmentMetadata, ...]
    replaced_by: dict[str, str] = Field(default_factory=dict)
    vector_before: tuple[CleanerOffset, ...]
    vector: tuple[CleanerOffset, ...]
    why: str = ""
    grace_ms: int | None = None
    undo_window_ms: int | None = None
    """As recorded by who took the segments out of the view; None where the record did not say."""


class Run(Value):
    """Run history. ``status``: running, published, undone (the intent), reverted or reverted_in_part (``undo``), or what RunEnded said.

    ``balance``, ``content``: as recorded with the publication.
    """

    run_id: str
    leader_epoch: int
    holder: str
    slot: int
    started_ms: int
    ended_ms: int = -1
    status: str = "running"
    reason: str = ""
    segment: str = ""
    published_slot: int = 0
    first_dirty_offset: int = -1
    next_dirty_offset: int = -1
    vector_before: tuple[CleanerOffset, ...] = ()
    vector: tuple[CleanerOffset, ...] = ()
    sources: int = 0
    outputs: int = 0
    stats: dict[str, int | float | str] = Field(default_factory=dict)
    balance: Balance | None = Field(default=None, exclude_if=lambda value: value is None)
    content: Sum | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def stands(self) -> bool:
        """Whether it was published, and not taken back since, not even in part."""
        return bool(self.published_slot) and not self.status.startswith("reverted")


class Quarantine(Value):
    """Why this partition is left alone, and how often in a row it has failed."""

    reason: str
    segment: str
    failures: int
    slot: int
    at_ms: int


class FencedAppend(Value):
    """A record that is in the log and does not count. ``offset`` is the cleaner offset that it claimed, -1 for none."""

    slot: int
    type: str
    leader_epoch: int
    offset: int
    by: str
    reason: str
    at_ms: int


class PartitionState(LogState):
    """The fold of a partition's control log up to and including ``slot`` (0: empty)."""

    topic: str
    partition: int
    live: tuple[RemoteLogSegmentMetadata, ...] = ()
    """What readers read: ascending, each beginning where the one before ends + 1."""
    published_by: dict[str, int] = Field(default_factory=dict)
    """Live and waiting segments that a round wrote -> the leader epoch that published them."""
    vector: tuple[CleanerOffset, ...] = ()
    leader: Leader | None = None
    intent: Intent | None = None
    registrations: dict[str, Registration] = Field(default_factory=dict)
    closed_imports: tuple[ClosedImport, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    retiring: tuple[RemoteLogSegmentMetadata, ...] = ()
    """Retire begun and not yet recorded as retired: their objects may be gone."""
    lineage: tuple[EpochEntry, ...] = ()
    """The broker's leader-epoch lineage of the partition, as last imported or recorded."""
    lineage_end: int = -1
    """The log end (exclusive) that was known with it."""
    tail: tuple[TailBatch, ...] = ()
    """The last batches that were imported, as the broker wrote them; empty where the import was an earlier program's."""
    voided: tuple[str, ...] = ()
    """The last ids that became unusable for ever: what still appears under them may go at once."""
    deleted_slot: int = 0
    """Where the partition was deleted, 0 once something was imported under its name again."""
    mirrored: bool = False
    """Whether brokers say what is live: the newest segment is then theirs, and is left alone."""
    quarantine: Quarantine | None = None
    runs: tuple[Run, ...] = ()
    published: tuple[str, ...] = ()
    """Ids of the rounds that readers have now, oldest first: only the last one can be undone."""
    epochs: tuple[EpochHistory, ...] = ()
    fenced: tuple[FencedAppend, ...] = ()

    @property
    def name(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def start_offset(self) -> int:
        """First offset of the view; 0 for an empty partition."""
        return self.live[0].start_offset if self.live else 0

    @property
    def end_offset(self) -> int:
        """Last offset of the view, inclusive; -1 for an empty partition."""
        return self.live[-1].end_offset if self.live else -1

    @property
    def first_dirty_offset(self) -> int:
        """First offset that is not clean: the vector's, but never before the view."""
        return max(clean_up_to(self.vector), self.start_offset)

    @property
    def last_epoch(self) -> int:
        """The highest compactor epoch that was acquired; -1 before the first."""
        return self.leader.epoch if self.leader else -1

    @property
    def last_take_over(self) -> EpochHistory | None:
        """The last epoch that was acquired while the one before had not been released: its holder may not know that it is over."""
        pairs = list(zip(self.epochs, self.epochs[1:], strict=False))
        return next((later for earlier, later in reversed(pairs) if earlier.ended == "replaced"), None)

    def live_by_id(self) -> dict[str, RemoteLogSegmentMetadata]:
        """Live segments by id; built anew at each call."""
        return {segment.id: segment for segment in self.live}

    @property
    def bytes(self) -> int:
        """Size of the live .log objects."""
        return sum(segment.size_bytes for segment in self.live)

    @property
    def content(self) -> Sum | None:
        """All batches that readers have; None where some segment's are not known."""
        return content_of(self.live)

    def run(self, run_id: str) -> Run | None:
        return next((run for run in reversed(self.runs) if run.run_id == run_id), None)


def content_of(segments: Iterable[RemoteLogSegmentMetadata]) -> Sum | None:
    """The batches of these segments as recorded when they were written; None where that is not known of each, or not all of it is read."""
    known = [None if segment.is_cut else segment.content for segment in segments]
    return None if None in known else total(content for content in known if content)


class Pause(Value):
    """Why no round is begun, and since when by the clock of who said so."""

    by: str
    reason: str
    at_ms: int


class WantedRound(NamedTuple):
    slot: int
    at_ms: int


def _nothing(value: object) -> bool:
    """What is empty is not written: programs that do not know of it read the rest."""
    return not value


class CatalogState(LogState):
    """The tier-wide log: who the tier is, which partitions it has, and at which slot each was last said to have changed."""

    tier_id: str = ""
    hash_key: str = ""
    kind: str = ""
    layout: str = ""
    url: str = ""
    cluster_id: str = ""
    """Of a broker's tier: where it lay and whose it was when this control store was made; empty for a native one."""
    partitions: dict[str, int] = Field(default_factory=dict)
    """``topic-partition`` -> slot of the latest hint about it."""
    reached: dict[str, int] = Field(default_factory=dict)
    """``topic-partition`` -> a slot that its own log has had: the lower bound of where it may end now."""
    looks: dict[str, LookedAt] = Field(default_factory=dict, exclude_if=_nothing)
    """The same -> the last look of `retire`; it counts for as long as ``reached`` is not beyond it."""
    paused: dict[str, Pause] = Field(default_factory=dict, exclude_if=_nothing)
    """By pattern (control.pauses)."""
    wanted: dict[str, WantedRound] = Field(default_factory=dict, exclude_if=_nothing)
    """``topic-partition`` -> when a round was asked for, the last ones."""

    @property
    def names(self) -> list[TopicPartition]:
        """All partitions, by topic and number."""
        return sorted(TopicPartition.parse(text) for text in self.partitions)
