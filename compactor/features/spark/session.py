"""Start of a Spark session, its options, and the reasons why it cannot start."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from compactor.errors import UsageError
from compactor.extras import require_pip_extra

if TYPE_CHECKING:
    from pyspark import SparkContext

    from compactor.config.settings import Settings, SparkSettings
    from compactor.features.spark.jobs import SparkCluster


OLDEST_JAVA = 17
OLDEST_PYSPARK = (4, 1)
NEXT_PYSPARK = (5, 0)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def require_supported_java() -> None:
    """Raise UsageError if Java is missing or older than OLDEST_JAVA."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    hint = "Install a JRE (Debian, Ubuntu: apt install default-jre-headless) or set JAVA_HOME"
    if not java or not os.access(java, os.X_OK):
        where = f"JAVA_HOME={home} has no bin/java" if home else "there is no java on the PATH"
        raise UsageError(f"Spark needs Java {OLDEST_JAVA} or newer, and {where}", hint=hint)
    try:
        message = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{java} does not run: {error}", hint=hint) from error
    found = _VERSION.search(message)
    if not found:
        lines = message.strip().splitlines() or ["nothing"]
        raise UsageError(f"`{java} -version` does not name a Java version, but: {lines[0]}", hint=hint)
    if int(found[1]) < OLDEST_JAVA:
        raise UsageError(f"Spark needs Java {OLDEST_JAVA} or newer, and {java} is Java {found[1]}", hint=hint)


def require_supported_pyspark() -> None:
    supported = f"{OLDEST_PYSPARK[0]}.{OLDEST_PYSPARK[1]} to {NEXT_PYSPARK[0] - 1}.x"
    require_pip_extra("spark", "Spark")
    import pyspark

    numbers = re.match(r"(\d+)\.(\d+)", pyspark.__version__)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not OLDEST_PYSPARK <= version < NEXT_PYSPARK:
        raise UsageError(f"PySpark {pyspark.__version__} is not supported", hint=f"Supported are PySpark {supported}")


_LOCAL = re.compile(r"local\[(\d+|\*)\]")
_MISSING = re.compile(r"No module named '([\w.]+)'")
OWN_PACKAGES: Final = ("compactor", "bloom", "checkpoint")
DISTRIBUTION_NAMES: Final = {"pydantic_core": "pydantic", "pybloom_live": "pybloom-live"}
"""Import names of packages that are installed under another name."""

DAEMON_MODULE: Final = "compactor.features.spark.daemon"
LOCAL_TASK_ATTEMPTS: Final = 4
SUBMIT_VARIABLE: Final = "PYSPARK_GATEWAY_PORT"
"""Environment variable that spark-submit sets, because it has started the JVM already."""

CLASS_ARCHIVE: Final = "spark-classes"
"""Beginning of the name of a file in the folder ``spark`` of the state directory; its size in bytes follows."""

MAX_SOCKET_DIR_BYTES: Final = 60
"""Longest directory path, in bytes, that Spark accepts for its Unix sockets."""

TaskNumberAndVersion = tuple[int, str]
INSTALL_HINT: Final = 'Install the same tiered-compactor on all of them, or send it along (docs/spark.md, "On a cluster")'


@dataclass(frozen=True)
class StartedCluster:
    """seconds: until executors were ready. ui: URL of Spark's web pages; empty if none."""

    cluster: SparkCluster
    master: str
    seconds: float
    ui: str


@contextmanager
def start_cluster(
    settings: Settings, app_name: str = "tiered-compactor", new_class_archive: Path | None = None
) -> Iterator[StartedCluster]:
    """The existing session (spark-submit, a notebook), else a new one on ``[spark] master``, stopped at the end of the block.

    :param new_class_archive: where the JVM writes the classes that it has loaded when it ends; None if it uses the archive that there is.
    :raises UsageError: if Java is missing or too old, PySpark is not supported, the master cannot be reached, or executors run another
        version.
    """
    require_supported_pyspark()
    from pyspark import SparkConf, SparkContext

    begin = time.monotonic()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    given = SparkContext._active_spark_context is not None
    folder = Path(settings.tier.state_dir) / "spark"
    if given or SUBMIT_VARIABLE in os.environ:
        # A context is enough: a session would have the JVM load all of Spark SQL.
        context = SparkContext.getOrCreate(SparkConf().setAppName(app_name))
    else:
        require_supported_java()
        context = _start_context(settings.spark, app_name, folder, new_class_archive)
    try:
        yield _check_executors(context, begin)
    finally:
        if not given:
            context.stop()
            shutil.rmtree(_local_directory_of_driver(folder, os.getpid()), ignore_errors=True)


def _check_executors(context: SparkContext, start_s: float) -> StartedCluster:
    """Run a first job, after which executors have loaded the kernels and are known to run the driver's version."""
    from compactor.features.spark.jobs import SparkCluster, name_started_stages

    context.setJobDescription("first job: are the executors ready?")
    try:
        wanted = max(2, context.defaultParallelism)
        # With a shuffle, as the JVM loads what that needs when it is first asked.
        with name_started_stages(context, "are the executors ready?"):
            answers = context.parallelize(range(wanted), wanted).map(_load_kernels).groupByKey(wanted).map(_first_reported_version)
            differing = set(answers.collect()) - {_code_version()}
    except _spark_error_types() as error:
        raise executors_not_ready_error(error) from None
    finally:
        context.setJobDescription(None)  # type: ignore[arg-type]
    if differing:
        raise UsageError(f"the executors run {min(differing)}, the driver {_code_version()}", hint=INSTALL_HINT)
    return StartedCluster(SparkCluster(context), str(context.master), time.monotonic() - start_s, context.uiWebUrl or "")


def executors_not_ready_error(error: Exception) -> UsageError:
    """Names the Python package that executors lack if that is the cause."""
    missing = _MISSING.search(str(error))
    if missing is None:
        return UsageError(f"Spark's executors do not run our tasks: {spark_error_line(error)}", hint=INSTALL_HINT)
    package = missing[1].partition(".")[0]
    if package in OWN_PACKAGES:
        return UsageError(f"the executors' Python has no tiered-compactor: it finds no {package}", hint=INSTALL_HINT)
    distribution = DISTRIBUTION_NAMES.get(package, package)
    hint = f"Install it for the Python that executors use (PYSPARK_PYTHON, spark.pyspark.python): pip install {distribution}"
    return UsageError(f"the executors' Python lacks the package {package}", hint=hint)


def _load_kernels(task_number: int) -> TaskNumberAndVersion:
    from compactor.features.spark.jobs import load_tasks

    load_tasks()
    # Spark collects garbage after each task: a twentieth of a second, if it has to look at everything that was imported.
    gc.collect()
    gc.freeze()
    return task_number, _code_version()


def _first_reported_version(gathered: tuple[int, Iterable[str]]) -> str:
    return next(iter(gathered[1]))


def _code_version() -> str:
    from compactor.round.pass_two import versions_fingerprint

    return versions_fingerprint()


def _start_context(settings: SparkSettings, app_name: str, folder: Path, new_class_archive: Path | None) -> SparkContext:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    master = settings.master
    folder.mkdir(parents=True, exist_ok=True)
    _delete_stale_directories(folder)
    conf = SparkConf().setAppName(app_name)
    conf.set("spark.ui.showConsoleProgress", "false")
    conf.set("spark.ui.port", "0")
    local_dir = _local_directory_of_driver(folder, os.getpid())
    conf.set("spark.local.dir", str(local_dir))
    # Between two TCP sockets on one machine a task waits 40 ms for an acknowledgement that is sent late.
    conf.set("spark.python.unix.domain.socket.enabled", "true")
    local = _LOCAL.fullmatch(master)
    # Locally Spark tries a task once; a killed Python worker deserves what a killed executor gets.
    conf.setMaster(f"local[{local[1]},{LOCAL_TASK_ATTEMPTS}]" if local else master)
    if master.startswith("local"):
        if os.environ["PYSPARK_PYTHON"] == sys.executable:  # another Python may lack the module, and would start no worker
            conf.set("spark.python.daemon.module", DAEMON_MODULE)
        # Nothing has to reach this machine from outside, Spark's web pages included.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        archive = _find_class_archive(folder)
        classes = f'"-XX:SharedArchiveFile={archive}"' if archive else ""
        if new_class_archive is not None:
            classes = f'"-XX:ArchiveClassesAtExit={new_class_archive}"'
        # The JVM hands out tasks and little else: an optimizer and a parallel collector take more from the tasks than they give.
        conf.set("spark.driver.defaultJavaOptions", f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {classes}".rstrip())
        local_dir.mkdir(parents=True, exist_ok=True)
        short = [place for place in (str(local_dir), tempfile.gettempdir()) if len(os.fsencode(place)) <= MAX_SOCKET_DIR_BYTES]
        conf.set("spark.python.unix.domain.socket.enabled", str(bool(short)).lower())
        if short:
            conf.set("spark.python.unix.domain.socket.dir", short[0])
    for name, value in settings.properties.items():
        conf.set(name, str(value).lower() if isinstance(value, bool) else str(value))
    log = folder / "driver.log"
    try:
        with log.open("ab") as file:
            gateway = SparkContext._gateway or launch_gateway(conf, {"stdout": file, "stderr": file})  # type: ignore[no-untyped-call]
        return SparkContext(conf=conf, gateway=gateway)
    except _spark_error_types() as error:
        raise UsageError(
            f"Spark did not start on {master}: {spark_error_line(error)}", hint=f"Check [spark] master; {log} says more"
        ) from None


def _find_class_archive(folder: Path) -> Path | None:
    """Return the archive if it has the size in its name: Java 17 crashes on one that is cut off."""
    return next((path for path in folder.glob(f"{CLASS_ARCHIVE}-*") if path.stem.endswith(f"-{path.stat().st_size}")), None)


def make_class_archive(settings: Settings) -> Path:
    """Start Spark on this machine, let it run a first job, and have the JVM write the classes that it has loaded (JEP 350). Later JVMs map
    the file, and ignore it if Java or Spark are others by then.
    :raises UsageError: if Spark does not start, this process has a JVM already, the master is a cluster, or the JVM has written nothing.
    """
    require_supported_pyspark()
    from pyspark import SparkContext

    if SparkContext._gateway is not None or SUBMIT_VARIABLE in os.environ or not settings.spark.master.startswith("local"):
        raise UsageError("the archive is for a Spark that this program starts on this machine", hint='Set [spark] master to "local[*]"')
    folder = Path(settings.tier.state_dir) / "spark"
    made = folder / f"{CLASS_ARCHIVE}.{os.getpid()}"
    try:
        with start_cluster(settings, "tiered-compactor class archive", made):
            gateway: Any = SparkContext._gateway
        SparkContext._gateway = SparkContext._jvm = None
        gateway.shutdown()
        gateway.proc.stdin.close()  # the JVM ends with it
        gateway.proc.wait()
        if not made.exists():
            raise UsageError("Java has written no archive of classes", hint=f"{folder / 'driver.log'} says more")
        for earlier in folder.glob(f"{CLASS_ARCHIVE}-*"):
            earlier.unlink()
        return made.rename(folder / f"{CLASS_ARCHIVE}-{made.stat().st_size}.jsa")
    finally:
        made.unlink(missing_ok=True)


def _spark_error_types() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError, OSError, RuntimeError, ValueError


def spark_error_line(error: BaseException) -> str:
    """Without stack traces."""
    lines = [line.strip() for line in str(getattr(error, "desc", None) or error).splitlines() if line.strip()]
    reported = [line for line in lines if not line.startswith(("at ", "File ", "Traceback", ":", "An error occurred while calling"))]
    return (reported or lines or [type(error).__name__])[0][:400]


def _local_directory_of_driver(parent_folder: Path, pid: int) -> Path:
    return parent_folder / f"local-{pid}"


def _delete_stale_directories(folder: Path) -> None:
    for left in folder.glob("local-*"):
        pid = left.name.removeprefix("local-")
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
