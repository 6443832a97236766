"""The rules of the way in, each dropped in turn: what lives of brokers' directories must notice.

``python -m tests.simulation --way-in --drop all`` shows which seeds notice what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from compactor.control import importing, incarnations
from compactor.errors import CompactorError
from compactor.features.agent import plan, plan as leadership
from compactor.features.agent.plan import LeadershipAtDeletionRename
from compactor.features.consumer import sources, sources as feed
from compactor.features.imports import (
    from_tier,
    import_,
    log_directory as broker_cleaning,
    log_identity,
    seam,
    staged_files as intake,
    staged_files as staged_file_rules,
)
from compactor.features.imports.import_ import _DirectoryImport
from compactor.features.imports.seam import Divergence
from compactor.features.imports.staged_files import BrokerLiveLog, SegmentStagedForDeletion
from tests.simulation.mutations import Mutation, noticed, together
from tests.simulation.way_in import run_way_in


def content_not_compared() -> AbstractContextManager[Any]:
    """Every directory is said to have been compared."""
    return together(
        lambda: patch.object(import_, "count_equal_last_records", lambda *_, **__: 1),
        lambda: patch.object(import_, "has_equal_tail_batches", lambda *_, **__: True),
    )()


def topic_id_not_compared() -> AbstractContextManager[Any]:
    """Neither the directory's topic id nor that of a record is compared with the tier's."""
    return together(
        lambda: patch.object(log_identity, "read_topic_id", lambda log_dir: ""),
        lambda: patch.object(incarnations, "topic_id_mismatch_problem", lambda state, topic_id: ""),
    )()


@contextmanager
def gaps_accepted() -> Iterator[None]:
    """A gap between the tier and the directory is in order, whatever the options say."""
    joined = _DirectoryImport._file_parts_without_gap

    def careless(self: _DirectoryImport, *arguments: Any) -> Any:
        options, self.options = self.options, replace(self.options, gaps=True)
        try:
            return joined(self, *arguments)
        finally:
            self.options = options

    with patch.object(_DirectoryImport, "_file_parts_without_gap", careless):
        yield


@contextmanager
def listed_once() -> Iterator[None]:
    """What is at the seam is listed before a truncation, and not again after it."""
    run, seam = _DirectoryImport.import_new_segments, _DirectoryImport._first_offset_to_read

    def first(self: _DirectoryImport, state: Any) -> int:
        known: int = self.__dict__.setdefault("first_seam", seam(self, state))
        return max(known, seam(self, state))

    def remembering(self: _DirectoryImport) -> Any:
        first(self, self.log.refresh_and_check_gaps())
        return run(self)

    with patch.object(_DirectoryImport, "_first_offset_to_read", first), patch.object(_DirectoryImport, "import_new_segments", remembering):
        yield


@contextmanager
def closed_imports_count() -> Iterator[None]:
    """An import that was complete once is complete, though its segments were cut since."""
    closed = importing.find_closed_import

    def believed(state: Any, import_id: str) -> Any:
        found = closed(state, import_id)
        return found and found.model_copy(update={"tiered_end": -1})

    with patch.object(intake, "find_closed_import", believed):
        yield


@contextmanager
def cut_before_checks() -> Iterator[None]:
    """The tier is cut first; what takes the place of its end is read and checked by the import that follows."""
    with patch.object(_DirectoryImport, "_check_branch", lambda self, branch, state, offset: []):
        yield


def cleaned_logs_accepted() -> AbstractContextManager[Any]:
    """A log may continue the tier, however far it was compacted."""
    return together(
        lambda: patch.object(import_, "require_not_compacted_beyond", lambda *_, **__: None),
        lambda: patch.object(from_tier, "require_not_compacted_beyond", lambda *_, **__: None),
        lambda: patch.object(broker_cleaning, "require_not_compacted_beyond", lambda *_, **__: None),
        lambda: patch.object(import_, "find_cleaning_signs", lambda sources: []),
    )()


def divergence_not_noticed() -> AbstractContextManager[Any]:
    """A consumer goes on at its offset, whatever became of the log."""
    return together(
        lambda: patch.object(feed, "find_log_mismatch", lambda *_: None),
        lambda: patch.object(sources, "topic_ids_differ", lambda *_: False),
    )()


def leadership_not_compared() -> AbstractContextManager[Any]:
    """An agent takes every staged file that the other rules let in."""
    return together(
        lambda: patch.object(plan, "leadership_at_deletion_rename", lambda *_: LeadershipAtDeletionRename.SAME_EPOCH),
        lambda: patch.object(leadership, "leadership_at_deletion_rename", lambda *_: LeadershipAtDeletionRename.SAME_EPOCH),
    )()


def in_order(segments: Sequence[SegmentStagedForDeletion], live: BrokerLiveLog) -> tuple[SegmentStagedForDeletion, ...]:
    """Staged segments as they come, whether or not one ends where the next one begins."""
    return tuple(sorted(segments, key=lambda segment: segment.base))


def without_rules(*rules: str) -> Mutation:
    """Staged files are chosen without these rules of transfer/staged_file_rules.py."""
    return together(
        *(partial(patch.object, staged_file_rules, rule, in_order if rule == "longest_chain" else lambda *_: "") for rule in rules)
    )


WAY_IN_MUTATIONS: Mapping[str, Mutation] = {
    "content and topic id are not compared": together(content_not_compared, topic_id_not_compared),
    "content is not compared": content_not_compared,
    "topic id is not compared": topic_id_not_compared,
    "gaps are accepted": gaps_accepted,
    "the seam is not found again after a truncation": listed_once,
    "closed imports count": closed_imports_count,
    "the tier is cut before checks": cut_before_checks,
    "a cut is made where the directory begins in an unknown epoch": lambda: patch.object(
        Divergence, "require_equal_records", lambda *_, **__: []
    ),
    "epochs that begin in a gap are compared": lambda: patch.object(seam, "first_stored_offset", lambda state, offset, stored: offset),
    "cleaned logs are accepted": cleaned_logs_accepted,
    "signs of a cleaner are not noticed": lambda: patch.object(import_, "find_cleaning_signs", lambda sources: []),
    "divergence is not noticed": divergence_not_noticed,
    "staged files are not taken": lambda: patch.object(import_, "listing_with_staged_files", lambda found, *_: found),
    "staged files need not lead to the live log": without_rules("longest_chain"),
    "staged files need not lie below the live log": without_rules("longest_chain", "not_below_problem", "replaced_problem"),
    "staged files need not continue the tier": without_rules("gap_problem"),
    "staged files may have any leader epoch": without_rules("epochs_problem"),
    "staged files go with a cleaned log": without_rules("cleaned_log_problem"),
    "staged files need no leadership": leadership_not_compared,
    "staged files need neither leadership nor epochs": together(leadership_not_compared, without_rules("epochs_problem")),
    "staged files need nothing": together(
        leadership_not_compared,
        without_rules(
            "longest_chain",
            "not_below_problem",
            "epochs_problem",
            "gap_problem",
        ),
    ),
}


def way_in_bites(mutation: Callable[[], AbstractContextManager[Any]], seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    """(seed, first violation) of each life that notices."""
    for seed in seeds:
        with mutation():
            try:
                outcome = run_way_in(seed)
            except (CompactorError, AssertionError) as error:
                yield seed, f"{type(error).__name__}: {error}"
                continue
        if outcome.violations:
            yield seed, noticed(outcome.violations[0])
