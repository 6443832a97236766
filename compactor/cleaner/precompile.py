"""Compilation, or loading from the cache, of the kernels that nearly every log needs."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np

from bloom.filter import hash_keys, siphash_key_halves
from bloom.sidecar import SidecarKeyHashCollector
from bloom.sizing import FilterDesign
from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from compactor.kernels.jit import COMPLETE, export_compiled_kernels, forget_compiled_kernels, kernel_cache_folder
from compactor.records.batches import cut_off_batch, read_only_view
from compactor.records.codecs import LZ4
from compactor.records.encode import ProducerFields, RecordToEncode, encode_batch, encode_txn_marker

ReportKernel = Callable[[str, int], None]
KERNELS: Final = 44
"""Kernels that the small log needs."""


def precompile_kernels(report: ReportKernel | None = None) -> None:
    """Clean a small log. Of several processes, one compiles and the others wait.
    :param report: called before each kernel that is compiled, with its name and the number compiled so far.
    """
    folder = kernel_cache_folder()
    if folder is None or (folder / COMPLETE).exists():
        _clean_small_log()
        return
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            with _report_compilations(report) if report else nullcontext():
                _compile_kernels_into_folder(folder)
            return
    _clean_small_log()


def _report_compilations(report: ReportKernel) -> AbstractContextManager[Any]:
    """Reports kernels that are called from Python; kernels called by kernels are compiled as a part of them."""
    from numba.core import event

    class Compilations(event.Listener):  # type: ignore[misc]
        depth = done = 0

        def on_start(self, event: event.Event) -> None:
            if self.depth == 0:
                report(event.data["dispatcher"].py_func.__name__, self.done)
            self.depth += 1

        def on_end(self, event: event.Event) -> None:
            self.depth -= 1
            self.done += self.depth == 0

    listening: AbstractContextManager[Any] = event.install_listener("numba:compile", Compilations())
    return listening


def _compile_kernels_into_folder(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():  # left by a process, or a machine, that was stopped: perhaps torn
            shutil.rmtree(path)
    forget_compiled_kernels()
    collecting = gc.isenabled()
    gc.disable()  # a compiler makes many objects and little garbage: an eighth of its time
    try:
        _clean_small_log()
    finally:
        if collecting:
            gc.enable()
    export_compiled_kernels(folder)
    for path in folder.glob("*/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    (folder / COMPLETE).touch()


def _clean_small_log() -> None:
    with tempfile.TemporaryDirectory(prefix="compactor-") as scratch:
        log_dir = Path(scratch) / "log"
        log_dir.mkdir()
        (log_dir / f"{0:020d}.log").write_bytes(b"".join(_small_log_batches()))
        # With memory for all keys of the gate, and for a part of them.
        for number, (first_dirty, budget) in enumerate([(3, 1 << 20), (3, 1 << 12)]):
            request = OfflineCleanOptions(now_ms=1, first_dirty_offset=first_dirty, gate_budget_bytes=budget)
            clean_log_directory(log_dir, Path(scratch) / f"out{number}", request)
    # What a round does beside cleaning: sidecars, and the end of a log.
    key, hashes = read_only_view(np.zeros(8, np.uint8)), np.empty((1, 2), np.uint64)
    hash_keys(key, np.zeros(1, np.int64), np.ones(1, np.int32), *siphash_key_halves(bytes(16)), hashes)
    SidecarKeyHashCollector(FilterDesign(keys=1, probes=1, rate=0.01, bytes=8)).add_record_key_hashes(hashes)
    cut_off_batch(key)


def _small_log_batches() -> list[bytes]:
    found = []
    for offset, codec in ((2, 0), (5, LZ4), (8, 0)):
        headers = ((b"\xff", b"not UTF-8"),)
        rows = [
            RecordToEncode(offset, 1, b"key", b"value", headers),
            RecordToEncode(offset + 1, 1, b"key", None),
            RecordToEncode(offset + 2, 2, b"another", b"", headers),
        ]
        found.append(encode_batch(rows, codec=codec))
    found.append(encode_batch([RecordToEncode(11, 1, b"key", b"value")], producer=ProducerFields(1, 0, 0, True)))
    found.append(encode_txn_marker(12, 1, 1, 0, is_commit=False))
    # More keys than the smallest table holds.
    found.append(encode_batch([RecordToEncode(offset, 1, str(offset).encode(), b"") for offset in range(13, 413)]))
    return found
