"""Selection of the output that the settings configure."""

from __future__ import annotations

from collections.abc import Callable

from compactor.access.tier import Tier
from compactor.outputs.port import OutputWriter
from compactor.storage.port import ObjectStore


def configured_output(opened: Tier, wrapped: Callable[[ObjectStore], ObjectStore]) -> OutputWriter | None:
    """Return the configured output, or None if there is none. Makes no request. Raises UsageError if its settings are invalid.

    :param wrapped: wraps the output's store, for example so that requests can be interrupted.
    """
    if not opened.settings.tier.pinterest.target:
        return None
    from compactor.outputs.upkeep import PinterestOutput

    return PinterestOutput.from_settings(opened, wrapped)
