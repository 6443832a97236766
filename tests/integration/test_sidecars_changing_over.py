"""The engine on disk must not take keys that it has not counted for none: then every clean segment would be skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compactor.round import roles
from tests.builders import GZIP, entry, wrapper
from tests.integration.test_sidecars import NOW, Growing


def _old_value_is_gone(it: Growing, row: dict[str, Any], engine: str) -> None:
    assert (row["status"], row["map_engine"], row["segments_skipped"]) == ("cleaned", engine, 3)
    assert "its filter matches a dirty key" in {s["why"] for s in row["segments"] if s["action"] == "rewritten"}
    records, _ = it.view("out")
    assert len([1 for record in records if record[2] == b"s2-k5"]) == 1


def test_clean_segments_are_asked_after_a_change_over_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Growing(tmp_path, 4, bloom_design_keys=10_000)
    it.tier.run("--now", NOW)
    it.tail("s2-k5", *[f"another-{key}=1" for key in range(1_000)])
    it.tier.set(cleaner={"map_budget_bytes": 8192})
    monkeypatch.setattr(roles, "estimate_distinct_keys", lambda heads, records: 10)
    _old_value_is_gone(it, it.tier.run("--now", NOW), "partitioned")


@pytest.mark.parametrize("engine", ["memory", "partitioned"])
def test_clean_segments_are_asked_about_keys_in_compressed_legacy_wrappers(tmp_path: Path, engine: str) -> None:
    it = Growing(tmp_path, 4, bloom_design_keys=10_000, map_engine=engine)
    it.tier.run("--now", NOW)
    it.log.roll()
    first = it.log.next_offset
    entries = [entry(1, first + n, f"s2-k5={n}", timestamp=1_000) for n in range(10)]
    it.log.raw(wrapper(1, first + 9, entries, GZIP, timestamp=1_000), first + 9)
    it.bring()
    assert it.live()[-1]["records"] == 0, "nobody has counted them"
    _old_value_is_gone(it, it.tier.run("--now", NOW), engine)


def test_rebuild_makes_no_filter_where_compressed_legacy_wrappers_hide_how_many_keys_there_are(tmp_path: Path) -> None:
    it = Growing(tmp_path, 1, bloom_design_keys=10)
    it.log.roll()
    for _ in range(3):
        first = it.log.next_offset
        entries = [entry(1, first + n, f"m{first + n}=1", timestamp=1_000) for n in range(300)]
        it.log.raw(wrapper(1, first + 299, entries, GZIP, timestamp=1_000), first + 299)
    it.log.put(*[f"y{n}=" + 200 * "y" for n in range(10)])
    it.bring()
    assert [s["records"] for s in it.live()] == [60, 10]
    assert len(it.tier.do("bloom", "rebuild", "orders-0")["written"]) == 2
    shown = [s["sidecar"] for s in it.tier.do("bloom", "show", "orders-0")["segments"]]
    assert [s["filter_bytes"] > 0 for s in shown] == [True, False]
    assert it.tier.run("--now", NOW)["status"] == "cleaned"
