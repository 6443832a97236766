"""The judge is judged: the naive cleaner gives what Kafka's cleaner gave, on every golden case."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import naive_cleaner
from tests.compare import segments_differ
from tests.golden_cases import Round, cleaner_round, client_rounds, names
from tests.plain_format import Unreadable, read_batches, segment_paths
from tests.plain_log import indexes_of


@pytest.mark.parametrize("name", names("cleaner"))
def test_naive_cleaner_agrees_with_kafka(name: str, cleaner_cases: Path, tmp_path: Path) -> None:
    agrees(cleaner_round(cleaner_cases / name, tmp_path))


@pytest.mark.parametrize("parameters", ["keep", "drop"])
@pytest.mark.parametrize("name", names("clients"))
def test_naive_cleaner_agrees_with_kafka_on_clients(name: str, parameters: str, client_cases: Path, tmp_path: Path) -> None:
    for each in client_rounds(client_cases / name, parameters, tmp_path):
        agrees(each)


def agrees(case: Round) -> None:
    request = naive_cleaner.Request(**case.request())
    if case.refused:
        with pytest.raises(Unreadable):
            naive_cleaner.clean(case.log_dir, request)
        return
    result = naive_cleaner.clean(case.log_dir, request)
    expected = {base: list(read_batches(path.read_bytes())) for base, path in segment_paths(case.expected_dir).items()}
    assert result.next_dirty_offset == case.expected["next_dirty_offset"]
    assert segments_differ(expected, result.segments) == ""
    for base, batches in expected.items():
        log = case.expected_dir / f"{base:020}.log"
        txn_index = log.with_suffix(".txnindex")
        assert b"".join(result.txn_index[base]) == (txn_index.read_bytes() if txn_index.exists() else b"")
        index = (log.with_suffix(".index").read_bytes(), log.with_suffix(".timeindex").read_bytes())
        assert indexes_of(batches, base, request.index_interval_bytes) == index
