"""The kernels that every log needs, with the types of their arguments, so that they can be compiled, or looked for, without a log.

``IN_STEP`` and ``BESIDE`` take about as long as each other: a machine with two processors has two processes compile them. A kernel that
is missing here, or stands here with the wrong types, is compiled when it is called; tests/unit/test_kernels_ahead.py says what is to be
written.

One line a kernel: module, name, types as numpy abbreviates them, with a colon for each dimension of an array and ``!`` for one that is
only read. ``3*i8:``: three of the kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numba.core import types

from bloom.jit import is_cached

IN_STEP = """
compactor.records.batches _count_batches u1:!
compactor.records.batches _fill u1:! i8 7*i8: i1: i2: i4: i2: 2*i4: i1: i4:
compactor.records.indexes _entries i8 3*i8: i8
compactor.records.producers _replay i8: i1: i2: i4: i2: i4: 3*i8: i4: b1: i2: i4: i8: i4: i8: i4: i8:
compactor.cleaner.passes.outcomes fold_outcomes i1: b1: 2*i8:
compactor.cleaner.passes.transactions _fold i1: 2*b1: 6*i8:
compactor.cleaner.passes.retention _decide i1: i2: i8: 2*b1: i8
compactor.records.batches _first_wrong_crc u1:! 2*i8: i1:
compactor.records.rows _parse_v2 u1:! 7*i8: i2: i8 7*i8: 2*i4: u1:
compactor.cleaner.keys.survivors _keyed i8: i4: 2*i8
compactor.cleaner.keys.survivors _hash_keyed u1:! 2*i8: i4: 2*i8 2*u8 b1 u8:: i8:
compactor.cleaner.keys.keysets put_all u4: i8: u8:: i8 b1:
compactor.cleaner.keys.keysets longest_cluster u4: i8
compactor.cleaner.keys.keysets stretch u4: 2*i8 u4:
compactor.cleaner.keys.survivors _summary i8: b1: i4: b1: i4: b1:
compactor.records.bulk _unlz4 i8 u1:! i2: 2*i8: b1: i8 u1: 3*i8 i8:
compactor.cleaner.passes.retention _filter i1: i2: i8: i8 2*i8: 2*i4: 2*b1: 3*i8 b1 u1: b1: i8:
compactor.cleaner.keys.survivors _unpack u1: 2*i8: b1:
compactor.cleaner.keys.survivors _below i8: i4: i8
compactor.cleaner.keys.survivors _hash_rows u1:! 2*i8: i4: 2*u8
compactor.cleaner.keys.keysets holds_all u4: i8: u8:: b1:
"""
BESIDE = """
compactor.cleaner.gate.batches resolve 4*i8:
compactor.cleaner.gate.reading _walk_batches u1:! i8 i8::
compactor.cleaner.gate.reading _entries u1:! 2*i8::
compactor.cleaner.gate.reading _walk_records u1:! 2*i8:: i8: 2*u8 2*i8: u8:: u8: u1: 2*i8:
compactor.cleaner.gate.table _pack u8:: i8: u8: u8::
compactor.cleaner.gate.table _put u8: i8: u8:: 2*i8
compactor.records.encode _loose_rows u1: i8: u1: b1:
compactor.records.encode _encode 2*u1:! 4*i8: i4: i2: 3*i8: i2: i4: i8 u1: i8: b1 8*i8: 2*i4: u1: b1: u1: 2*i8:
compactor.records.encode _assemble u1:! i8: u1: i8: u1: i8: u1: i8: u1:
compactor.records.encode _seal u1: u1:! u1: i8:
compactor.records.balance _account 2*u1:! i8: 2*i1: b1: u1: b1: 4*i8: 2*i4: 2*b1: 2*u8 u8::
compactor.records.balance _walk u1:! 2*u8 u8:
compactor.cleaner.gate.table _latest u8: i8: u8:: i8:
compactor.cleaner.gate.reading _sum_up 2*i8: u8: b1: u8::
compactor.cleaner.gate.reading _wrong_crc u1:! i8::
compactor.cleaner.gate.balance _add_records i8: b1: u1:! 4*i8: 2*u8 u8:
compactor.cleaner.gate.table _left u8: i8 i8: u8::
compactor.cleaner.gate.balance _add_batches u1:! 2*i8: b1: 2*u8 2*u8:
compactor.cleaner.gate.spool _take u8:: 4*i8 u8:: i8
compactor.cleaner.gate.spool _scatter u8:: 4*i8 u8::
compactor.cleaner.gate.table _left_below u8: i8: u8:: 2*i8 i8: u8::
"""


def compile_kernels(lines: str) -> None:
    """Those that are in the cache are loaded."""
    for kernel, signature in _kernels(lines):
        kernel.compile(signature)


def all_cached(lines: str) -> bool:
    return all(is_cached(kernel, signature) for kernel, signature in _kernels(lines))


def line_of(kernel: Any, signature: Iterable[Any]) -> str:
    """As it stands above."""
    written: list[tuple[int, str]] = []
    for each in map(_abbreviated, signature):
        count = written.pop()[0] if written and written[-1][1] == each else 0
        written.append((count + 1, each))
    kinds = (each if count == 1 else f"{count}*{each}" for count, each in written)
    return " ".join([kernel.py_func.__module__, kernel.py_func.__qualname__, *kinds])


def _kernels(lines: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    for line in lines.split("\n"):
        module, name, *kinds = line.split() or ("", "")
        if module:
            counted = (each.rpartition("*")[::2] for each in kinds)
            yield (
                getattr(importlib.import_module(module), name),
                tuple(_type(kind) for count, kind in counted for _ in range(int(count or 1))),
            )


@cache
def _type(written: str) -> Any:
    scalar = getattr(types, np.dtype(written.rstrip("!:")).name)
    return types.Array(scalar, written.count(":"), "C", readonly=written.endswith("!")) if ":" in written else scalar


def _abbreviated(kind: Any) -> str:
    if not isinstance(kind, types.Array):
        return np.dtype(str(kind)).str[1:]
    return np.dtype(str(kind.dtype)).str[1:] + ":" * kind.ndim + "!" * (not kind.mutable)
