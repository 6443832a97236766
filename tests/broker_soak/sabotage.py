"""Daemons that are broken on purpose, to show that the soak finds it. Each is Python that runs in a daemon's process first."""

from __future__ import annotations

_SOURCES_FIRST = """
from tests.simulation.kafka_schedule import KAFKA_MUTATIONS
import contextlib
broken = contextlib.ExitStack()
broken.enter_context(KAFKA_MUTATIONS["R3"]())
"""

_DROPPED_RECORDS = """
import os
os.environ["TIERED_COMPACTOR__CLEANER__VERIFY_BEFORE_PUBLISH"] = "false"
from compactor.cleaner import retention
plain = retention.decide_by_records
def dropped(table, chunk, rows, first_row, superseded, *more):
    return plain(table, chunk, rows, first_row, superseded | (rows.offset % 97 == 0), *more)
retention.decide_by_records = dropped
from compactor.control import publication
publication.receipt_balance_problem = lambda state, intent: ""
"""

SABOTAGE: dict[str, str] = {"sources-first": _SOURCES_FIRST, "dropped-records": _DROPPED_RECORDS}
"""sources-first: a publisher that takes replaced segments away before their replacement is readable (rule R3 of docs/broker-protocol.md).
dropped-records: a cleaner that takes each 97th offset for superseded, without the gate that checks its output, and without the balance that
keeps a round with a lost record from being published."""
