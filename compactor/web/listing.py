"""The list of partitions on a page: filters, order and page number from the URL's query string. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar
from urllib.parse import parse_qs, urlencode

from compactor.daemon.scheduling import PartitionCondition
from compactor.web.documents import PartitionListPage, RowT

PER_PAGE = 50
MOST_PER_PAGE = 1_000


class ListedPartitionEntry(Protocol):
    """Partition with the values by which the list of partitions is sorted and filtered."""

    @property
    def name(self) -> str: ...
    @property
    def condition(self) -> PartitionCondition: ...


ItemT = TypeVar("ItemT", bound=ListedPartitionEntry)
SortKey = Callable[[ItemT], tuple[object, ...]]


@dataclass(frozen=True)
class PartitionListQuery:
    """Search, filter, order and page of a list, from a query string such as ``?q=orders&state=due&sort=dirty&dir=desc&page=2&per_page=50``.

    Values that are not valid are ignored. An empty ``search``, ``condition`` or ``sort``, or None for ``descending``, stands for the
    default.
    """

    search: str = ""
    condition: str = ""
    sort: str = ""
    descending: bool | None = None
    page: int = 1
    per_page: int = PER_PAGE

    def query_string_with_changes(self, **changes: object) -> str:
        """Return the query string of this query with some fields changed. It begins with a question mark.

        Any change of a field other than ``page`` leads to the first page.
        """
        new = replace(self, **({"page": 1} | changes))  # type: ignore[arg-type]  # templates name the fields
        pairs = [
            ("q", new.search),
            ("state", new.condition),
            ("sort", new.sort),
            ("dir", "" if new.descending is None else "desc" if new.descending else "asc"),
            ("page", new.page if new.page > 1 else ""),
            ("per_page", new.per_page if new.per_page != PER_PAGE else ""),
        ]
        return "?" + urlencode([(name, value) for name, value in pairs if value != ""])


def parse_partition_list_query(query: str) -> PartitionListQuery:
    """Parse the query string of a URL into a list query. Unknown parameters and invalid values are ignored."""
    values = {name: found[-1] for name, found in parse_qs(query, max_num_fields=50).items()}
    return PartitionListQuery(
        search=values.get("q", "").strip()[:300],
        condition=values.get("state", ""),
        sort=values.get("sort", ""),
        descending={"asc": False, "desc": True}.get(values.get("dir", "")),
        page=_parse_positive_number(values.get("page", ""), 1),
        per_page=min(MOST_PER_PAGE, _parse_positive_number(values.get("per_page", ""), PER_PAGE)),
    )


def _parse_positive_number(text: str, default: int) -> int:
    """Return the positive whole number that a text consists of; the default if it is anything else, or has ten digits or more."""
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0 else default


@dataclass(frozen=True)
class PartitionListColumn(Generic[ItemT]):
    """A column by which the list can be sorted.

    key: returns the sort key of an item.
    descending: whether the order is descending unless the query says otherwise.
    """

    key: SortKey[ItemT]
    descending: bool = False


def list_partitions_page(
    items: Sequence[ItemT], query: PartitionListQuery, columns: Mapping[str, PartitionListColumn[ItemT]], make_row: Callable[[ItemT], RowT]
) -> PartitionListPage[RowT]:
    """Return the page of the list that the query asks for, or the last page if the list has fewer pages.

    :param items: all partitions, from which the query selects.
    :param columns: sortable columns by name. The first one is the default.
    :param make_row: makes a row of the document from an item.
    """
    sort = query.sort if query.sort in columns else next(iter(columns))
    condition = query.condition if query.condition in set(PartitionCondition) else ""
    wanted = query.search.lower()
    named = [item for item in items if wanted in item.name.lower()]
    counts = Counter(item.condition for item in named)
    found = [item for item in named if condition in ("", item.condition)]
    descending = columns[sort].descending if query.descending is None else query.descending
    found.sort(key=columns[sort].key, reverse=descending)
    pages = max(1, -(-len(found) // query.per_page))
    page = min(query.page, pages)
    return PartitionListPage[RowT](
        search=query.search,
        condition=condition,
        sort=sort,
        descending=descending,
        page=page,
        pages=pages,
        per_page=query.per_page,
        matching=len(found),
        conditions={each.value: counts[each] for each in PartitionCondition},
        rows=tuple(map(make_row, found[(page - 1) * query.per_page : page * query.per_page])),
    )
