"""PySpark's daemon (``spark.python.daemon.module``) with our tasks and their kernels loaded: its workers are forks, which share them."""

from __future__ import annotations

import gc
import os
from contextlib import suppress

from pyspark.daemon import manager

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process that forks must not have threads, and no task multiplies matrices
    with suppress(ImportError):  # a worker meets the same error in a task, which reports it to the driver
        from compactor.features.spark.jobs import load_tasks

        load_tasks()
    gc.freeze()  # else the first collection of each worker would copy the pages that it shares
    manager()
