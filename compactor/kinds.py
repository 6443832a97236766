"""The kinds of tiers, one row each. What only one of them needs is imported by that one: every command begins here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compactor.config import Settings
from compactor.errors import UsageError
from compactor.storage.port import ObjectStore
from compactor.tier.layouts.native import NativeLayout
from compactor.tier.names import TopicIdOf
from compactor.tier.ports import SegmentLayout, SegmentPublisher
from compactor.tier.publishers.nobody import NobodyPublisher
from compactor.tier.publishers.object_log import ObjectLogPublisher

if TYPE_CHECKING:
    from compactor.tier.layouts.pinterest.keys import PartitionKeys


@dataclass(frozen=True)
class KindOfTier:
    """How the ports of one kind and layout are made from settings and the store that holds the segments. Makes no request."""

    layout: Callable[[Settings, ObjectStore, TopicIdOf], SegmentLayout]
    publisher: Callable[[Settings, ObjectStore], SegmentPublisher]
    ours: bool = False
    """Nobody but this program writes into the data root: whose it is stands in it (control.identity)."""


def _pinterest(settings: Settings, store: ObjectStore, topic_id: TopicIdOf) -> SegmentLayout:
    from compactor.tier.layouts.pinterest.layout import PinterestLayout

    return PinterestLayout(store, pinterest_keys(settings))


def _kafka_local(settings: Settings, store: ObjectStore, topic_id: TopicIdOf) -> SegmentLayout:
    from compactor.tier.layouts.kafka_local import KafkaLocalLayout

    return KafkaLocalLayout(store, topic_id)


def _aiven(settings: Settings, store: ObjectStore, topic_id: TopicIdOf) -> SegmentLayout:
    from compactor.tier.layouts.aiven.layout import AivenLayout

    return AivenLayout(store, topic_id, settings.tier.aiven)


KINDS: Mapping[tuple[str, str], KindOfTier] = {
    ("object-log", "native"): KindOfTier(lambda _, store, __: NativeLayout(store), lambda *_: ObjectLogPublisher(), ours=True),
    ("object-log", "pinterest"): KindOfTier(_pinterest, lambda *_: NobodyPublisher()),
    ("kafka", "kafka-local"): KindOfTier(_kafka_local, lambda *_: NobodyPublisher()),
    ("kafka", "aiven"): KindOfTier(_aiven, lambda *_: NobodyPublisher()),
}
"""By ``tier.kind`` and ``tier.layout``. A new kind of tier is one row here. Names of brokers' objects hold the ids of topics."""


def pinterest_keys(settings: Settings) -> PartitionKeys:
    """How [tier.pinterest] says that objects are named. Raises UsageError where no cluster is set."""
    from compactor.tier.layouts.pinterest.keys import PartitionKeys

    pinterest = settings.tier.pinterest
    return PartitionKeys(pinterest.cluster, pinterest.entropy_bits)


def kind_of(settings: Settings) -> KindOfTier:
    """Raises UsageError for a kind and a layout that do not go together."""
    tier = settings.tier
    try:
        return KINDS[tier.kind, tier.layout]
    except KeyError:
        raise UsageError(
            f"a tier of kind {tier.kind} cannot have the layout {tier.layout}",
            hint="Possible are " + ", ".join(f"{kind} with {layout}" for kind, layout in KINDS),
        ) from None
