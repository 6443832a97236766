"""Capabilities of a tier of each kind and layout. Code asks for a capability, never for the name of a kind or layout. Modules of layouts
are imported on use, because every command imports this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from importlib import import_module
from typing import Protocol

from compactor.config.settings import CleanerSettings, Settings
from compactor.errors import UsageError
from compactor.storage.port import ObjectStore
from compactor.tier.contents import TopicIdOfPartition
from compactor.tier.ports import ListedTier, SegmentLayout


class MetadataSource(Enum):
    """Source of a tier's partitions and live segments."""

    CONTROL_LOG = "control log"
    """In our control logs alone: only this program writes the tier."""
    METADATA_TOPIC = "metadata topic"
    """In ``__remote_log_metadata``: brokers write and read the tier as well."""
    LISTING = "listing"
    """Nowhere but in the names of the objects: another program uploads them."""


class LayoutModule(Protocol):
    """Module of a layout. Functions make no request."""

    def open_layout(self, settings: Settings, store: ObjectStore, topic_id: TopicIdOfPartition) -> SegmentLayout:
        """Raises UsageError if the tier's settings are incomplete."""

    def open_listing(self, settings: Settings, store: ObjectStore) -> ListedTier:
        """Only for layouts whose metadata source is LISTING."""


@dataclass(frozen=True)
class TierKind:
    """Capabilities of one kind of tier.
    owns_root: whether only this program writes below tier.url. Then unknown objects are orphans that `retire` sweeps, segments can be
    imported, and outputs can be made of the tier.
    compacts: whether rounds run. If not, the tier has no control store.
    describes_segments: whether end offset, leader epochs and open transactions are recorded.
    brokers_expire: then settings for retention are refused.
    undo_copies: whether `undo` uploads copies under new ids, because readers never take up a deleted id again.
    storage_class: in S3; empty for the bucket's default.
    """

    layout_module: str
    metadata: MetadataSource
    owns_root: bool = False
    compacts: bool = True
    describes_segments: bool = True
    undo_copies: bool = False
    brokers_expire: bool = False
    key_prefix: Callable[[Settings], str] = lambda settings: ""
    storage_class: Callable[[Settings], str] = lambda settings: ""

    def layout(self, settings: Settings, store: ObjectStore, topic_id: TopicIdOfPartition) -> SegmentLayout:
        """Makes no request. Raises UsageError if the tier's settings are incomplete."""
        return self._layout_module().open_layout(settings, store, topic_id)

    def listing(self, settings: Settings, store: ObjectStore) -> ListedTier | None:
        """Only if the metadata source is LISTING. Makes no request."""
        return self._layout_module().open_listing(settings, store) if self.metadata is MetadataSource.LISTING else None

    def _layout_module(self) -> LayoutModule:
        module: LayoutModule = import_module(self.layout_module)
        return module

    @property
    def is_broker_managed(self) -> bool:
        return self.metadata is MetadataSource.METADATA_TOPIC

    @property
    def is_compactor_managed(self) -> bool:
        """True if control logs alone determine the contents: a cached state is valid until its log grows."""
        return self.metadata is MetadataSource.CONTROL_LOG


COMPACTOR_MANAGED = TierKind(
    "compactor.tier.plain",
    MetadataSource.CONTROL_LOG,
    owns_root=True,
    storage_class=lambda settings: settings.s3.storage_class,
)
BROKER_MANAGED = TierKind("compactor.adapters.brokers.kafka_local", MetadataSource.METADATA_TOPIC, undo_copies=True, brokers_expire=True)

KINDS: Mapping[tuple[str, str], TierKind] = {
    ("object-log", "native"): COMPACTOR_MANAGED,
    ("object-log", "pinterest"): TierKind(
        "compactor.features.pinterest.layout", MetadataSource.LISTING, compacts=False, describes_segments=False
    ),
    ("kafka", "kafka-local"): BROKER_MANAGED,
    ("kafka", "aiven"): replace(
        BROKER_MANAGED,
        layout_module="compactor.adapters.brokers.aiven.layout",
        key_prefix=lambda settings: settings.tier.aiven.key_prefix,
        storage_class=lambda settings: settings.tier.aiven.storage_class,
    ),
}
"""By ``tier.kind`` and ``tier.layout``. A new kind of tier is one row here."""


def tier_kind(settings: Settings) -> TierKind:
    """Raises UsageError if kind, layout and settings of retention or on_topic_deletion cannot be combined."""
    tier = settings.tier
    found = KINDS.get((tier.kind, tier.layout))
    if found is None:
        raise UsageError(
            f"a tier of kind {tier.kind} cannot have the layout {tier.layout}",
            hint="Possible are " + ", ".join(f"{kind} with {layout}" for kind, layout in KINDS),
        )
    if not found.owns_root:
        _refuse_foreign_settings(settings)
    if found.brokers_expire:
        _refuse_retention_settings(settings)
    if tier.on_topic_deletion != "keep" and not found.owns_root:
        source = settings.source_of_setting("tier.on_topic_deletion")
        what = f'{source}: on_topic_deletion is "{tier.on_topic_deletion}", and this tier has another owner'
        hint = 'Set it to "keep" under [tier]: brokers delete the segments of a deleted topic themselves, and a listed tier is only read'
        raise UsageError(what, hint=hint)
    return found


def _refuse_foreign_settings(settings: Settings) -> None:
    """Settings that apply only to compactor-managed tiers raise UsageError."""
    for key, value in (("tier.key_entropy_bits", settings.tier.key_entropy_bits), ("s3.storage_class", settings.s3.storage_class)):
        if value:
            section, _, name = key.partition(".")
            source = settings.source_of_setting(key)
            what = f"{source}: [{section}] {name} is set, and another program names and writes the objects of this tier"
            raise UsageError(what, hint="Remove it; [tier.aiven] has a storage_class, and [tier.pinterest] has entropy_bits")


def _refuse_retention_settings(settings: Settings) -> None:
    cleaners = {"cleaner": settings.cleaner, **{f"topics.{json.dumps(pattern)}": one for pattern, one in settings.topics.items()}}
    for section, cleaner in cleaners.items():
        for key in ("retention_ms", "retention_bytes"):
            if getattr(cleaner, key) != CleanerSettings.model_fields[key].default:
                source = settings.source_of_setting(f"{section}.{key}")
                what = f"{source}: [{section}] {key} is set, and brokers expire the segments of this tier"
                raise UsageError(what, hint="Remove it, and set retention.ms of the topic in Kafka")
        if cleaner.cleanup_policy == "delete":
            source = settings.source_of_setting(f"{section}.cleanup_policy")
            what = f'{source}: [{section}] cleanup_policy is "delete", and brokers expire the segments of this tier'
            raise UsageError(what, hint="Take the topic out of topics under [kafka]: there is nothing to compact in it")


def compactor_managed_hint() -> str:
    """Hint with the settings of a compactor-managed tier."""
    kind, layout = next(names for names, row in KINDS.items() if row.owns_root)
    return f'kind = "{kind}" and layout = "{layout}"'


def control_url(settings: Settings) -> str:
    """URL of the control store. Empty if the tier is only read, or broker-managed without a control store. Raises UsageError if no tier is
    set, or if the control store lies among the brokers' objects.
    """
    root, kind = settings.tier_url.rstrip("/"), tier_kind(settings)
    if not kind.compacts:
        return ""
    if kind.owns_root:
        return settings.tier.control_url or f"{root}/.tiered-compactor/"
    data = f"{root}/{kind.key_prefix(settings)}"
    if f"{settings.tier.control_url.rstrip('/')}/".startswith(data):
        raise UsageError(
            f"control_url under [tier] is within {data}, where brokers keep their segments",
            hint="Name another bucket or prefix, or another directory",
        )
    return settings.tier.control_url


def read_only_tier_error(settings: Settings) -> UsageError:
    return UsageError(
        f"a tier of layout {settings.tier.layout} is only read", hint="`import --from-tier` copies it into a compactor-managed tier"
    )
