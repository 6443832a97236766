"""Rounds on a Spark cluster, driven by a child process: for ``map_engine = "auto"``.

A stopped Spark session's JVM ends only with the process that started it, hence the child. It leads, publishes and is fenced like any other
compactor: if it is killed, the next round resumes what it began.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, NamedTuple

from compactor.access.rounds import create_round
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import Settings, SparkSettings
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError, Fenced, Leased, Unavailable, bug_reason
from compactor.model.ids import TopicPartition
from compactor.round.compaction import RoundReport
from compactor.round.plan import assess_round, spark_reason

if TYPE_CHECKING:
    from compactor.features.spark.jobs import SparkCluster

START_S = 300.0
"""How long Spark may take to start. A cluster without a free executor would be waited for without end."""
RETRY_START_S = 600.0
"""How long rounds stay in this process after Spark could not be started."""
POLL_S = 0.2

_log = logging.getLogger(__name__)


class _RoundRequest(NamedTuple):
    """Request to run one round.

    settings: the parent's present ones, which may be newer than the child.
    """

    settings: Settings
    partition: TopicPartition
    now_ms: int
    force: bool


class _SparkChildProcess(NamedTuple):
    process: BaseProcess
    pipe: Connection
    spark: SparkSettings

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class SparkChildRoundRunner:
    """Runs one round at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _SparkChildProcess | None = None
        self._failed_at: float | None = None
        self._problem = ""

    def run_round_remotely(
        self, tier: Tier, state: PartitionState, now_ms: int, *, force: bool, check_stop: Callable[[], None]
    ) -> RoundReport | str:
        cleaner = tier.cleaner_settings_for_topic(state.topic)
        why = spark_reason(cleaner, tier.settings.spark, assess_round(state, cleaner, now_ms, force=force))
        if not why:
            return ""
        if self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_START_S:
            return self._problem
        if not self._lock.acquire(blocking=False):
            raise Leased(f"{state.topic_partition} waits for Spark, which works on another partition")
        try:
            child = self._start_child_if_needed(tier.settings, check_stop)
            if child is None:
                return self._problem
            _log.info("%s goes to Spark on %s: %s", state.topic_partition, tier.settings.spark.master, why)
            return self._run_in_child(child, _RoundRequest(tier.settings, state.topic_partition, now_ms, force), check_stop)
        finally:
            self._lock.release()

    def _start_child_if_needed(self, settings: Settings, check_stop: Callable[[], None]) -> _SparkChildProcess | None:
        if self._child is not None and (not self._child.process.is_alive() or self._child.spark != settings.spark):
            self._stop_spark_child_process()
        if self._child is not None:
            return self._child
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve_requests, args=(settings, theirs), daemon=True, name="tiered-compactor-spark")
        process.start()
        theirs.close()
        child = self._child = _SparkChildProcess(process, pipe, settings.spark)
        problem = self._receive_answer(child, check_stop, START_S)
        if problem is None:
            self._failed_at = None
            return child
        self._stop_spark_child_process()
        self._failed_at = time.monotonic()
        self._problem = f"cleaned by this process, because Spark did not start: {problem}"
        _log.warning("large partitions are %s", self._problem)
        return None

    def _run_in_child(self, child: _SparkChildProcess, request: _RoundRequest, check_stop: Callable[[], None]) -> RoundReport:
        try:
            child.pipe.send(request)
        except OSError as error:
            answer: object = Unavailable(f"Spark's process has ended: {error}", hint="The next try starts another")
        else:
            answer = self._receive_answer(child, check_stop)
        if isinstance(answer, RoundReport):
            return answer
        if not isinstance(answer, Leased | Fenced | BadData):
            self._stop_spark_child_process()  # the next round begins with a new Spark
        raise answer if isinstance(answer, CompactorError) else CompactorError(f"Spark's process answered {answer!r}")

    def _receive_answer(self, child: _SparkChildProcess, check_stop: Callable[[], None], timeout_s: float | None = None) -> object:
        """Next answer, or (not raised) Unavailable if the child has ended or has not answered in time. An exception of ``check_stop`` ends
        the child.
        """
        begin = time.monotonic()
        try:
            while not child.pipe.poll(POLL_S):
                check_stop()
                if timeout_s is not None and time.monotonic() - begin > timeout_s:
                    return Unavailable(f"no answer from {child.spark.master} within {timeout_s:.0f} s")
            return child.pipe.recv()
        except (EOFError, OSError):
            child.process.join(POLL_S)
            return Unavailable(f"Spark's process ended with code {child.process.exitcode}", hint="The next try starts another")
        except BaseException:
            self._stop_spark_child_process()
            raise

    def _stop_spark_child_process(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None


def _serve_requests(settings: Settings, pipe: Connection) -> None:
    """Send None or the error of Spark's start, then answers, until no request came for ``[spark] idle_ms``."""
    from compactor.features.spark.session import start_cluster

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted parent ends this process itself
    try:
        with start_cluster(settings) as started:
            pipe.send(None)
            while pipe.poll(settings.spark.idle_ms / 1000):
                pipe.send(_run_requested_round(pipe.recv(), started.cluster))
    except CompactorError as error:
        pipe.send(error)
    except EOFError:
        return  # the parent has ended


def _run_requested_round(request: _RoundRequest, cluster: SparkCluster) -> RoundReport | CompactorError:
    from compactor.features.spark.worker import SparkRunner

    try:
        tier = open_tier(request.settings)
        if tier.kind.is_broker_managed:
            tier.identity.read_or_create_catalog()
        cleaner = tier.cleaner_settings_for_topic(request.partition.topic)
        runner = SparkRunner(lambda: cluster, tier, cleaner)
        return create_round(tier, request.partition, request.now_ms, force=request.force, runner=runner).run(
            tier.open_partition_log(request.partition, caller_runs_round=True)
        )
    except CompactorError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a bug in one round must not end Spark for the others (I9)
        return CompactorError(bug_reason(error))
