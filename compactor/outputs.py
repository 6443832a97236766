"""The port of outputs: a partition's compacted view for other readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from compactor.access.tier import Tier
from compactor.config.settings import Settings
from compactor.constants import NEVER_MS
from compactor.errors import UsageError
from compactor.extras import require_pip_extra
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.storage.port import ObjectStore


@dataclass(frozen=True)
class PartitionOutputExtent:
    """Part of a partition that its output shows.

    end_offset: exclusive.
    snapshots: number of readable versions.
    waits_for: why the output shows no more offsets; may be empty.
    undecoded: number of rows that could not be decoded into typed columns.
    """

    end_offset: int
    files: int
    snapshots: int
    waits_for: str = ""
    undecoded: int = 0


@dataclass(frozen=True)
class OutputReport:
    """Result of one update of an output.

    status: written, appended, up_to_date, empty, removed, superseded, or behind (a round must complete first).
    written_slot: position in the control log of the state that the output copies.
    next_deletion_ms: when an old version may be deleted, by the store's clock; NEVER_MS if none waits.
    summary: empty if nothing was written or deleted.
    """

    status: str
    written_slot: int
    next_deletion_ms: int = NEVER_MS
    summary: str = ""
    content: PartitionOutputExtent | None = None


class OutputWriter(Protocol):
    def update_output(self, tier: Tier, partition: TopicPartition, disk: DiskBudget) -> OutputReport:
        """Bring an output up to its published view, and delete old versions whose time is over.

        :raises BadData: if an object is missing or damaged.
        :raises OutOfBudget: if a segment does not fit the disk budget.
        :raises Leased: if another process writes this output now.
        """


class OutputModule(Protocol):
    def open_output(self, tier: Tier, wrap_store: Callable[[ObjectStore], ObjectStore]) -> OutputWriter: ...


@dataclass(frozen=True)
class OutputKind:
    """One kind of output. setting: the settings that ask for it, for messages. module: imported on use."""

    is_configured: Callable[[Settings], bool]
    setting: str
    module: str
    extra: str = ""


OUTPUTS = (
    OutputKind(lambda settings: bool(settings.outputs.iceberg.topics), "[outputs.iceberg]", "compactor.features.iceberg.output", "iceberg"),
    OutputKind(lambda settings: bool(settings.tier.pinterest.target), "[tier.pinterest] target", "compactor.features.pinterest.output"),
)
"""A new kind of output is one row here."""


def configured_output_writer(tier: Tier, wrap_store: Callable[[ObjectStore], ObjectStore]) -> OutputWriter | None:
    """Makes no request. Raises UsageError if the output's settings are invalid."""
    found = [kind for kind in OUTPUTS if kind.is_configured(tier.settings)]
    if len(found) > 1:
        raise UsageError("two outputs are configured", hint="Remove [tier.pinterest] target, or the topics of [outputs.iceberg]")
    if not found:
        return None
    if found[0].extra:
        require_pip_extra(found[0].extra, found[0].setting)
    module: OutputModule = import_module(found[0].module)
    return module.open_output(tier, wrap_store)
