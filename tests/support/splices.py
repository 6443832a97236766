"""Rounds that read segments in part, on logs small enough for a test; and the same round on a copy of the tier, with everything read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compactor.round import partial as splice
from compactor.round.partial import SegmentPartToRead, WholeSegmentReadNeededError
from tests.support.tier_cli import TierCli


@contextmanager
def small_copies(least: int = 300, *, most_read: int = 1) -> Iterator[pytest.MonkeyPatch]:
    """Ranges of so many bytes are worth a copy, and every segment is worth a directory. ``most_read``: 1: even if all of it is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splice, "LEAST_COPY", least)
        patch.setattr(splice, "LEAST_COPIES", 1)
        patch.setattr(splice, "MOST_READ", most_read)
        patch.setattr(splice, "MOST_SHARE", 0)
        patch.setattr(splice, "FEWER_KEYS", 0.001)
        yield patch


def _not_today(part: SegmentPartToRead) -> None:
    raise WholeSegmentReadNeededError("the test says so")


def run_whole_on_copy(tier: TierCli, folder: Path, *arguments: object) -> tuple[TierCli, dict[str, Any]]:
    """The same round over a copy of the tier: it plans parts, and then reads everything. The copy, and what `run` says."""
    shutil.copytree(tier.tier, folder / "tier", copy_function=shutil.copy2)
    twin = TierCli(folder, tier.settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentPartToRead, "require_matching_batches", _not_today)
        return twin, twin.run(*arguments)


def live_ids(tier: TierCli) -> set[str]:
    listed = tier.do("segments", "list", tier.named)["segments"]
    live = {segment["id"] for segment in listed if segment["replaced_by"] is None}
    assert live
    return live


def live_objects(tier: TierCli) -> dict[tuple[int, str], bytes]:
    """(base offset, kind) -> bytes, of what is live."""
    found, live = {}, live_ids(tier)
    for path in (tier.tier / tier.named).iterdir():
        match = re.fullmatch(r"(\d{20})-([A-Za-z0-9_-]{22})\.(.+)", path.name)
        if match and match[2] in live:
            found[int(match[1]), match[3]] = path.read_bytes()
    return found
