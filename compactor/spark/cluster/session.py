"""A Spark session for our own jobs: quiet, with everything that they need set, and with clear words where it cannot be had."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from compactor.errors import UsageError
from compactor.spark.cluster.versions import check_java, check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from compactor.config import Settings, Spark
    from compactor.spark.cluster.jobs import Cluster

_LOCAL = re.compile(r"local\[(\d+|\*)\]")
_MISSING = re.compile(r"No module named '([\w.]+)'")
OURS: Final = ("compactor", "bloom", "checkpoint")
PACKAGES: Final = {"pydantic_core": "pydantic", "pybloom_live": "pybloom-live"}
"""What is called otherwise where it is installed."""

LOCAL_TRIES: Final = 4
SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit, which has started the JVM already."""

SOCKET_DIR: Final = 60
"""The longest directory that Spark takes for its Unix sockets."""

INSTALL: Final = 'Install the same tiered-compactor on all of them, or send it along (docs/spark.md, "On a cluster")'


@dataclass(frozen=True)
class Started:
    """``seconds``: from nothing to a session that runs tasks, shown apart from the work. ``ui``: Spark's web pages, if it has any."""

    cluster: Cluster
    master: str
    seconds: float
    ui: str


@contextmanager
def cluster(settings: Settings, app_name: str = "tiered-compactor") -> Iterator[Started]:
    """A cluster for jobs: the session that there is (spark-submit, a notebook), else one on ``[spark] master``, which ends with the block.

    Raises UsageError: no Java or an old one, a PySpark that is not supported, a master that cannot be reached.
    """
    check_pyspark()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    begin = time.monotonic()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    given = SparkContext._active_spark_context is not None
    folder = Path(settings.tier.state_dir) / "spark"
    if given or SUBMITTED in os.environ:
        session: SparkSession = SparkSession.builder.appName(app_name).getOrCreate()
    else:
        check_java()
        session = _own_session(settings.spark, app_name, folder)
    try:
        yield _warmed_up(session, begin)
    finally:
        if not given:
            session.stop()
            shutil.rmtree(_local_dir(folder, os.getpid()), ignore_errors=True)


def _warmed_up(session: SparkSession, begin: float) -> Started:
    """After a first job: executors have registered and can import what they will run."""
    from compactor.spark.cluster.jobs import Cluster, stages_called

    context = session.sparkContext
    context.setJobDescription("first job: are the executors ready?")
    try:
        wanted = max(2, context.defaultParallelism)
        # With a shuffle, as the JVM loads what that needs when it is first asked.
        with stages_called(context, "are the executors ready?"):
            answers = context.parallelize(range(wanted), wanted).map(_warm).groupByKey(wanted).map(_version)
            differing = set(answers.collect()) - {_ready()}
    except _errors() as error:
        raise not_ready(error) from None
    finally:
        context.setJobDescription(None)  # type: ignore[arg-type]
    if differing:
        raise UsageError(f"the executors run {min(differing)}, the driver {_ready()}", hint=INSTALL)
    return Started(Cluster(session), str(context.master), time.monotonic() - begin, context.uiWebUrl or "")


def not_ready(error: Exception) -> UsageError:
    """What the first job says of executors that cannot run the others: which package they lack, if it is that."""
    missing = _MISSING.search(str(error))
    if missing is None:
        return UsageError(f"Spark's executors do not run our tasks: {first_line(error)}", hint=INSTALL)
    package = missing[1].partition(".")[0]
    if package in OURS:
        return UsageError(f"the executors' Python has no tiered-compactor: it finds no {package}", hint=INSTALL)
    hint = (
        f"Install it for the Python that executors use (PYSPARK_PYTHON, spark.pyspark.python): pip install {PACKAGES.get(package, package)}"
    )
    return UsageError(f"the executors' Python lacks the package {package}", hint=hint)


def _warm(place: int) -> tuple[int, str]:
    """On an executor: kernels are loaded before anybody looks at the clock, as `run` does it."""
    from compactor.cleaner.warm import warm_up
    from compactor.spark.round.mapping import warm_up as warm_up_map

    warm_up()
    warm_up_map()
    # Spark collects garbage after each task: a twentieth of a second, if it has to look at everything that was imported.
    gc.collect()
    gc.freeze()
    return place, _ready()


def _version(gathered: tuple[int, Iterable[str]]) -> str:
    return next(iter(gathered[1]))


def _ready() -> str:
    from compactor.round.rewrite import fingerprint

    return fingerprint()


def _own_session(settings: Spark, app_name: str, folder: Path) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    master = settings.master
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    conf = SparkConf().setAppName(app_name)
    conf.set("spark.ui.showConsoleProgress", "false")
    conf.set("spark.ui.port", "0")
    local_dir = _local_dir(folder, os.getpid())
    conf.set("spark.local.dir", str(local_dir))
    # Between two TCP sockets on one machine a task waits 40 ms for an acknowledgement that is sent late.
    conf.set("spark.python.unix.domain.socket.enabled", "true")
    local = _LOCAL.fullmatch(master)
    # Locally Spark tries a task once; a killed Python worker deserves what a killed executor gets.
    conf.setMaster(f"local[{local[1]},{LOCAL_TRIES}]" if local else master)
    if master.startswith("local"):
        # Nothing has to reach this machine from outside, Spark's web pages included.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # The JVM hands out tasks and little else: an optimizer and a parallel collector take more from the tasks than they give.
        conf.set("spark.driver.defaultJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        local_dir.mkdir(parents=True, exist_ok=True)
        short = [place for place in (str(local_dir), tempfile.gettempdir()) if len(os.fsencode(place)) <= SOCKET_DIR]
        conf.set("spark.python.unix.domain.socket.enabled", str(bool(short)).lower())
        if short:
            conf.set("spark.python.unix.domain.socket.dir", short[0])
    for name, value in settings.properties.items():
        conf.set(name, str(value).lower() if isinstance(value, bool) else str(value))
    log = folder / "driver.log"
    try:
        with log.open("ab") as file:
            gateway = SparkContext._gateway or launch_gateway(conf, {"stdout": file, "stderr": file})  # type: ignore[no-untyped-call]
        SparkContext(conf=conf, gateway=gateway)
        return SparkSession.builder.getOrCreate()
    except _errors() as error:
        raise UsageError(f"Spark did not start on {master}: {first_line(error)}", hint=f"Check [spark] master; {log} says more") from None


def _errors() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError, OSError, RuntimeError, ValueError


def first_line(error: BaseException) -> str:
    """What Spark says, without its stack traces."""
    lines = [line.strip() for line in str(getattr(error, "desc", None) or error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("at ", "File ", "Traceback", ":", "An error occurred while calling"))]
    return (told or lines or [type(error).__name__])[0][:400]


def _local_dir(folder: Path, pid: int) -> Path:
    return folder / f"local-{pid}"


def _sweep(folder: Path) -> None:
    """What drivers left that were killed."""
    for left in folder.glob("local-*"):
        pid = left.name.removeprefix("local-")
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
