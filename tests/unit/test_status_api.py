"""docs/reference/status-api.md says what /api gives: every document, every field, one example each.

``python -m tests.unit.test_status_api`` rewrites what is below its first heading of a document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from compactor.model.ids import TopicPartition
from compactor.web.console import RequestRouter, ServicePages
from compactor.web.documents import (
    DOCUMENT_SCHEMA_VERSION,
    AgentTotals,
    DaemonPartitionPageDocument,
    DaemonPartitionRow,
    DaemonTotals,
    PartitionUploadDocument,
    PartitionUploadRow,
    ServiceStatusDocument,
    TopicsDocument,
)
from compactor.web.pages import AgentPages, DaemonPages
from tests.support import console_samples

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "status-api.md"
BEGIN = "## `/api/status` of a daemon\n"
DOCUMENTS: dict[str, type[BaseModel]] = {
    "`/api/status` of a daemon": ServiceStatusDocument[DaemonTotals, DaemonPartitionRow],
    "`/api/topics` of a daemon": TopicsDocument,
    "`/api/partitions/T-P` of a daemon": DaemonPartitionPageDocument,
    "`/api/status` of an agent": ServiceStatusDocument[AgentTotals, PartitionUploadRow],
    "`/api/partitions/T-P` of an agent": PartitionUploadDocument,
}


def examples() -> dict[str, Any]:
    status, agent = console_samples.daemon_status(3, trouble=False), console_samples.agent_status(4)
    daemon = DaemonPages(lambda: status, lambda name: console_samples.picture(), "/etc/tiered-compactor.toml")
    pages: dict[str, tuple[ServicePages, str]] = {
        "`/api/status` of a daemon": (daemon, "/api/status?per_page=1"),
        "`/api/topics` of a daemon": (daemon, "/api/topics"),
        "`/api/partitions/T-P` of a daemon": (daemon, "/api/partitions/orders-17"),
        "`/api/status` of an agent": (AgentPages(lambda: agent), "/api/status?per_page=1"),
        "`/api/partitions/T-P` of an agent": (AgentPages(lambda: agent), "/api/partitions/payments_settled-0"),
    }
    return {
        title: shortened(json.loads(RequestRouter(face, lambda: 0, 1000).respond_to_request(target).body))
        for title, (face, target) in pages.items()
    }


def shortened(value: Any) -> Any:
    """Of each list the first two."""
    if isinstance(value, dict):
        return {name: shortened(part) for name, part in value.items()}
    return [shortened(part) for part in value[:2]] if isinstance(value, list) else value


def models(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """It, and those of its fields, each once."""
    seen: list[type[BaseModel]] = []

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
            seen.append(annotation)
            for field in annotation.model_fields.values():
                visit(field.annotation)
        for part in get_args(annotation):
            visit(part)

    visit(kind)
    return iter(seen)


def plain(kind: type[BaseModel]) -> str:
    return kind.__name__.partition("[")[0]


def typed(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return plain(annotation)
    if annotation is type(None):
        return "null"
    text = str(annotation)
    if text.startswith("typing.Literal"):
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    parts = [typed(part) for part in get_args(annotation) if part is not Ellipsis]
    if text.startswith("tuple"):
        return f"[{', '.join(parts)}]" if "..." not in text else f"list of {parts[0]}"
    if text.startswith("dict"):
        return f"object of {parts[1]}"
    return " or ".join(parts) if parts else {"int": "number", "float": "number", "str": "text", "bool": "bool"}[annotation.__name__]


def described() -> str:
    lines: list[str] = []
    told: set[str] = set()
    for title, kind in DOCUMENTS.items():
        lines += [f"## {title}", ""]
        for model in models(kind):
            if plain(model) in told and model is not kind:
                continue
            told.add(plain(model))
            base = next(base for base in model.__mro__ if base.__name__ == plain(model))
            words = " ".join((base.__doc__ or "").replace("``", "`").split())
            lines += [f"### {plain(model)}", "", words, ""] if model is not kind else [words, ""]
            lines += ["| field | |", "|---|---|"]
            lines += [f"| `{name}` | {typed(field.annotation)} |" for name, field in model.model_fields.items()]
            lines.append("")
        lines += ["```json", json.dumps(examples()[title], indent=1), "```", ""]
    return "\n".join(lines)


def test_the_page_describes_what_is_given() -> None:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    assert BEGIN + rest == described(), "run python -m tests.unit.test_status_api"
    assert f"`schema_version` {DOCUMENT_SCHEMA_VERSION}" in head


def test_examples_of_the_page_are_whole_documents() -> None:
    blocks = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    kinds = list(DOCUMENTS.values())
    assert len(blocks) == len(kinds)
    for block, kind in zip(blocks, kinds, strict=True):
        assert kind.model_validate_json(block).model_dump(mode="json")["schema_version"] == DOCUMENT_SCHEMA_VERSION


def test_a_partition_that_is_not_there_is_not_found() -> None:
    pages = RequestRouter(DaemonPages(lambda: console_samples.daemon_status(3), lambda name: None), lambda: 0, 1000)
    for path in ("orders-99", "no partition", "orders-x", "..%2f..", str(TopicPartition("orders", 1))):
        assert pages.respond_to_request(f"/api/partitions/{path}").code == 404
        assert pages.respond_to_request(f"/partitions/{path}").code == 404


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(BEGIN)[0] + described())
