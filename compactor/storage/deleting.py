"""Deleting many objects of one store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from compactor.storage.port import ObjectStore

DELETE_BATCH: Final = 1000


def delete_keys(store: ObjectStore, keys: Sequence[str]) -> None:
    """In batches that every store takes. Raises StoreError; what was deleted until then is gone."""
    for start in range(0, len(keys), DELETE_BATCH):
        store.delete(keys[start : start + DELETE_BATCH])
