"""The document that a service's first page shows: the same for every service, whatever it watches. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol, TypeVar

from compactor import __version__
from compactor.model.ids import TopicPartition
from compactor.service.outlook import Condition
from compactor.service.pages.documents import LookInfo, NeedsAttention, PartitionList, RowT, StatusDocument, TotalsT, WorkItem
from compactor.service.pages.listing import Column, ListQuery, listed
from compactor.service.pages.verdicts import verdict
from compactor.service.service_status import ServiceStatus

MOST_SHOWN = 20
"""Partitions in *needs attention*; the list below has them all."""
ORDER = {condition: place for place, condition in enumerate(Condition)}
"""In which people want to see them."""


class Listable(Protocol):
    """A partition as the list sorts it."""

    @property
    def name(self) -> str: ...
    @property
    def condition(self) -> Condition: ...


SeenT = TypeVar("SeenT", bound=Listable)


def status_document(
    shape: type[StatusDocument[TotalsT, RowT]],
    kind: Literal["daemon", "agent"],
    status: ServiceStatus,
    seen: Sequence[SeenT],
    columns: Mapping[str, Column[SeenT]],
    query: ListQuery,
    row: Callable[[SeenT], RowT],
    *,
    totals: TotalsT,
    needs_attention: Sequence[NeedsAttention],
    at_work: Sequence[WorkItem],
    due: int,
) -> StatusDocument[TotalsT, RowT]:
    """:param needs_attention: of all of ``totals.attention_partitions`` those that are shown first.
    :param due: how many partitions wait for work."""
    chips = {chip.value: partial(_is, chip) for chip in Condition}
    page = listed(seen, query, columns, lambda each: each.name, chips)
    counts = Counter(each.condition for each in seen)
    return shape(
        kind=kind,
        version=__version__,
        holder=status.holder,
        tier=status.tier,
        now_ms=status.now_ms,
        started_ms=status.started_ms,
        ready=status.ready,
        verdict=verdict(
            ready=status.ready,
            stopping=status.stopping,
            problem=status.problem,
            looked=status.scans > 0,
            bad=totals.attention_partitions,
            at_work=len(at_work),
            due=due,
        ),
        looks=LookInfo(count=status.scans, last_ms=status.scan_ms or None, interval_ms=status.interval_ms),
        totals=totals,
        needs_attention=tuple(needs_attention),
        at_work=tuple(at_work),
        conditions={chip.value: counts[chip] for chip in Condition},
        partitions=PartitionList[RowT](
            search=page.query.search,
            condition=page.query.condition,
            sort=page.query.sort,
            descending=page.descending,
            page=page.query.page,
            pages=page.pages,
            per_page=page.query.per_page,
            matching=page.matching,
            rows=tuple(map(row, page.items)),
        ),
    )


def command(verb: str, name: TopicPartition, config: str) -> str:
    """To be copied. ``config``: the configuration that the service was started with."""
    return f"tiered-compactor {verb} {name}" + (f" --config {shlex.quote(config)}" if config else "")


def _is(chip: Condition, seen: Listable) -> bool:
    return seen.condition is chip
