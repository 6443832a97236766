"""Which partitions a page lists, in which order: the query of its URL, and what it leaves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar
from urllib.parse import parse_qs, urlencode

PER_PAGE = 50
MOST_PER_PAGE = 1_000

ItemT = TypeVar("ItemT")
SortKey = Callable[[ItemT], tuple[object, ...]]


@dataclass(frozen=True)
class ListQuery:
    """As in a URL: ``?q=orders&state=due&sort=dirty&dir=desc&page=2&per_page=50``; what is not understood is as if it were not there."""

    search: str = ""
    condition: str = ""
    sort: str = ""
    descending: bool | None = None
    page: int = 1
    per_page: int = PER_PAGE

    def url(self, **changes: object) -> str:
        """The query string with these changes, from its question mark on; of a changed list the first page."""
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


def parsed(query: str) -> ListQuery:
    values = {name: found[-1] for name, found in parse_qs(query, max_num_fields=50).items()}
    return ListQuery(
        search=values.get("q", "").strip()[:300],
        condition=values.get("state", ""),
        sort=values.get("sort", ""),
        descending={"asc": False, "desc": True}.get(values.get("dir", "")),
        page=_whole(values.get("page", ""), 1),
        per_page=min(MOST_PER_PAGE, _whole(values.get("per_page", ""), PER_PAGE)),
    )


def _whole(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0 else default


@dataclass(frozen=True)
class Column(Generic[ItemT]):
    """``key``: what it is sorted by; ``descending``: which way round first."""

    key: SortKey[ItemT]
    descending: bool = False


@dataclass(frozen=True)
class Listed(Generic[ItemT]):
    """The items of one page, and what the page tells around them."""

    query: ListQuery
    descending: bool
    pages: int
    matching: int
    items: Sequence[ItemT]


def listed(
    items: Iterable[ItemT],
    query: ListQuery,
    columns: Mapping[str, Column[ItemT]],
    name: Callable[[ItemT], str],
    conditions: Mapping[str, Callable[[ItemT], bool]],
) -> Listed[ItemT]:
    """``columns``: the first one is the default order. ``conditions``: what each chip lets through."""
    sort = query.sort if query.sort in columns else next(iter(columns))
    chosen = query.condition if query.condition in conditions else ""
    wanted = query.search.lower()
    found = [item for item in items if wanted in name(item).lower()] if wanted else list(items)
    if chosen:
        found = [item for item in found if conditions[chosen](item)]
    column = columns[sort]
    descending = column.descending if query.descending is None else query.descending
    found.sort(key=column.key, reverse=descending)
    pages = max(1, -(-len(found) // query.per_page))
    page = min(query.page, pages)
    shown = found[(page - 1) * query.per_page : page * query.per_page]
    return Listed(replace(query, condition=chosen, sort=sort, page=page), descending, pages, len(found), shown)
