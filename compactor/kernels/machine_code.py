"""Machine code of kernels that is called without numba, whose import and registries take half of a small command's CPU time.

1. ``export_routines`` takes the LLVM code that numba has made for a kernel (``Dispatcher.inspect_llvm``), and adds an entry point that
   reads the arguments from 64-bit words: numba's function takes the addresses of result and exception, then all arguments, an array as
   owner, parent, number and size of elements, address, shape and strides. The code of all kernels becomes one object file.
2. ``load_routines`` links that file into the process.
3. ``Routine.pack_arguments`` compares types, dimensions and layout of the arguments with those that were compiled.

A kernel is left out, and called by numba as before, if it returns an array, calls anything but C's memory functions (it would if it
allocated an array), or if its LLVM function takes other arguments than numba's calling convention implies.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

FILE_NAME: Final = "machine-code"
_ALLOWED_SETTINGS: Final = {"NUMBA_CACHE_DIR", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_NUM_THREADS"}
_C_FUNCTIONS: Final = {"memcpy", "memmove", "memset"}
_FREE_NOTHING: Final = "define void @NRT_MemInfo_call_dtor(ptr %owner) {\nret void\n}"
_WORD: Final = (1 << 64) - 1
_RETURNED_NONE: Final = -2  # numba's status of a function that returns None
_log = logging.getLogger(__name__)
_linked: list[Any] = []
"""LLVM's engines. Their machine code exists as long as they do."""

ScalarKind = Literal["int64", "uint64", "bool"]
ArgumentKind = Any
"""A scalar kind, an ``ArrayKind``, or a tuple of kinds."""


@dataclass(frozen=True, slots=True)
class ArrayKind:
    """A contiguous array."""

    dtype: np.dtype[Any]
    dimensions: int
    is_written: bool


@dataclass(frozen=True, slots=True)
class Routine:
    """Machine code of a kernel for one kind of arguments. result: kinds of its parts; None if it returns None."""

    name: str
    arguments: tuple[ArgumentKind, ...]
    result: tuple[ScalarKind, ...] | None
    is_result_tuple: bool
    entry: Any

    def pack_arguments(self, arguments: tuple[Any, ...]) -> array[int] | None:
        """Return the words for ``call``: space for the result and the exception, then the arguments. None if their kinds differ. The
        caller keeps the arguments, whose memory the words refer to.
        """
        words = array("Q", bytes(8 * (len(self.result or ()) + 2)))
        return words if _append_words(self.arguments, arguments, words) else None

    def call(self, words: array[int]) -> Any:
        """Raises RuntimeError if the kernel raised an exception."""
        status = self.entry(words.buffer_info()[0])
        if status == _RETURNED_NONE or (status == 0 and self.result is None):
            return None
        if status != 0 or self.result is None:
            raise RuntimeError(f"the kernel {self.name} failed with status {status}")
        values = [_result_value(kind, word) for kind, word in zip(self.result, words, strict=False)]
        return tuple(values) if self.is_result_tuple else values[0]


def _append_words(kinds: Sequence[ArgumentKind], values: tuple[Any, ...], words: array[int]) -> bool:
    if len(kinds) != tuple.__len__(values):  # a named tuple may count rows
        return False
    for kind, value in zip(kinds, values, strict=True):
        if kind.__class__ is ArrayKind:
            if not isinstance(value, np.ndarray) or value.dtype != kind.dtype or value.ndim != kind.dimensions:
                return False
            flags = value.flags
            if not (flags.carray if kind.is_written else flags.c_contiguous and flags.aligned):
                return False
            words.extend((0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides))
        elif kind.__class__ is tuple:
            if not isinstance(value, tuple) or not _append_words(kind, value, words):
                return False
        elif kind == "int64" and isinstance(value, (int, np.int64)) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            words.append(int(value) & _WORD)
        elif (kind == "uint64" and isinstance(value, np.uint64)) or (kind == "bool" and isinstance(value, (bool, np.bool_))):
            words.append(int(value))
        else:
            return False
    return True


def _result_value(kind: ScalarKind, word: int) -> int | bool:
    if kind == "bool":
        return bool(word & 1)
    return word - (1 << 64) if kind == "int64" and word >> 63 else word


# ---- loading -------------------------------------------------------------------------------------------------------------------


def load_routines(folder: Path | None, digest: str) -> Mapping[str, list[Routine]]:
    """Return the routines of each kernel, by its name; nothing if there is no file, a file of another ``digest``, a damaged one, or if
    a setting of numba asks for other code.
    """
    if folder is None or not _is_default_code():
        return {}
    try:
        head, _, code = (folder / FILE_NAME).read_bytes().partition(b"\n")
        about = json.loads(head)
        if about["digest"] != digest or about["sha256"] != hashlib.sha256(code).hexdigest():
            _log.debug("numba loads the kernels, because their machine code is damaged, or of another version")
            return {}
        address_of = _link(code)
        found: dict[str, list[Routine]] = {}
        for entry in about["routines"]:
            call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address_of(entry["entry"]))
            result = entry["result"]
            routine = Routine(
                entry["kernel"], _decode_kinds(entry["arguments"]), result if result is None else tuple(result), entry["is_tuple"], call
            )
            found.setdefault(routine.name, []).append(routine)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        _log.debug("numba loads the kernels, because their machine code cannot be used: %s", error)
        return {}
    return found


def _is_default_code() -> bool:
    """Return whether numba would make the code on disk: no setting asks for checks, debugging or the interpreter."""
    others = [name for name in os.environ if name.startswith("NUMBA_") and name not in _ALLOWED_SETTINGS]
    return sys.byteorder == "little" and not others and not os.path.exists(".numba_config.yaml")


def _link(code: bytes) -> Any:
    """Return the function that gives the address of a symbol."""
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _linked.append(engine)
    return engine.get_function_address


def _target_machine() -> Any:
    from llvmlite import binding

    from compactor.kernels.jit import processor_name_and_features

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    name, features = processor_name_and_features()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=name, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True)


def _decode_kinds(stored: Any) -> tuple[ArgumentKind, ...]:
    def decode(kind: Any) -> ArgumentKind:
        if isinstance(kind, dict):
            return ArrayKind(np.dtype(kind["dtype"]), kind["dimensions"], kind["is_written"])
        return _decode_kinds(kind) if isinstance(kind, list) else kind

    return tuple(map(decode, stored))


# ---- making --------------------------------------------------------------------------------------------------------------------


def export_routines(folder: Path, digest: str, dispatchers: Mapping[str, Any]) -> None:
    """Write the machine code of the kernels that numba has compiled in this process.
    :param dispatchers: numba's, by the kernel's name.
    """

    whole: Any = None
    entries: list[dict[str, Any]] = []
    for name, dispatcher in dispatchers.items():
        for signature in dispatcher.nopython_signatures:
            kinds = _kinds_of_types(signature.args)
            result = _result_kinds(signature.return_type)
            entry = f"kernel_{len(entries)}"
            if kinds is None or result is None or not dispatcher.stats.cache_misses.get(signature.args):
                continue  # of what numba has loaded, it does not show the code
            module = _module_with_entry(dispatcher.inspect_llvm(signature.args), entry, kinds, len(result))
            if module is None:
                continue
            is_tuple = hasattr(signature.return_type, "types")
            kinds_and_result = {"arguments": _encode_kinds(kinds), "result": result or None, "is_tuple": is_tuple}
            entries.append({"kernel": name, "entry": entry, **kinds_and_result})
            if whole is None:
                whole = module
            else:
                whole.link_in(module)
    if whole is None:
        return
    code = _target_machine().emit_object(whole)
    about = {"digest": digest, "sha256": hashlib.sha256(code).hexdigest(), "routines": entries}
    partial = folder / f"{FILE_NAME}.partial"
    with partial.open("wb") as file:
        file.write(json.dumps(about).encode() + b"\n" + code)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / FILE_NAME)


def _kinds_of_types(types: Sequence[Any]) -> tuple[ArgumentKind, ...] | None:
    """Return None if an argument is neither of an allowed scalar kind, nor a contiguous array, nor a tuple of such."""
    from numba import types as numba_types

    found: list[ArgumentKind] = []
    for each in types:
        if isinstance(each, numba_types.Array) and each.layout == "C" and each.aligned:
            found.append(ArrayKind(np.dtype(str(each.dtype)), each.ndim, each.mutable))
        elif isinstance(each, numba_types.BaseTuple):
            kinds = _kinds_of_types(tuple(each))
            if kinds is None:
                return None
            found.append(kinds)
        elif str(each) in ("int64", "uint64", "bool"):
            found.append(str(each))
        else:
            return None
    return tuple(found)


def _result_kinds(result: Any) -> tuple[ScalarKind, ...] | None:
    """Empty for a kernel that returns None. None if a part of the result does not take one 64-bit word: only the last may be a bool."""
    parts = tuple(result.types) if hasattr(result, "types") else (result,)
    names = [str(part) for part in parts]
    if names == ["none"]:
        return ()
    is_plain = all(name in ("int64", "uint64") for name in names[:-1]) and names[-1] in ("int64", "uint64", "bool")
    return tuple(names) if is_plain and not hasattr(result, "instance_class") else None  # type: ignore[arg-type]


def _encode_kinds(kinds: Sequence[ArgumentKind]) -> list[Any]:
    def encode(kind: ArgumentKind) -> Any:
        if isinstance(kind, ArrayKind):
            return {"dtype": kind.dtype.str, "dimensions": kind.dimensions, "is_written": kind.is_written}
        return _encode_kinds(kind) if isinstance(kind, tuple) else kind

    return [encode(kind) for kind in kinds]


def _llvm_types(kinds: Sequence[ArgumentKind]) -> list[str]:
    """Types of the arguments by numba's calling convention."""
    found = []
    for kind in kinds:
        if isinstance(kind, ArrayKind):
            found += ["ptr", "ptr", "i64", "i64", "ptr"] + ["i64"] * (2 * kind.dimensions)
        elif isinstance(kind, tuple):
            found += _llvm_types(kind)
        else:
            found.append("i8" if kind == "bool" else "i64")
    return found


def _module_with_entry(llvm_code: str, entry: str, kinds: Sequence[ArgumentKind], result_words: int) -> Any:
    """Return the LLVM module with the kernel behind an entry point; None if numba has to call it."""
    from llvmlite import binding

    expected = _llvm_types(kinds)
    defined = {function.name: function for function in binding.parse_assembly(llvm_code).functions if not function.is_declaration}
    names = [name for name in defined if name.startswith("_ZN") and "_ZN7cpython" + name[3:] in defined]  # what Python calls calls it
    if len(names) != 1 or [str(argument.type) for argument in defined[names[0]].arguments] != ["ptr", "ptr", *expected]:
        return None
    first = max(result_words, 1)
    loads, values = [], []
    for number, kind in enumerate(expected):
        loads.append(
            f"%p{number} = getelementptr i64, ptr %words, i64 {result_words + 2 + number}\n%a{number} = load {kind}, ptr %p{number}"
        )
        values.append(f"{kind} %a{number}")
    body = "\n".join([f"%problem = getelementptr i64, ptr %words, i64 {first}", *loads])
    call = f'%status = call i32 @"{names[0]}"({", ".join(["ptr %words", "ptr %problem", *values])})'
    # numba counts owners of arrays. Here an array has none, and the kernel allocates none, so that nothing is ever freed.
    llvm_code = re.sub(r"^declare .*@NRT_MemInfo_call_dtor\(.*$", _FREE_NOTHING, llvm_code, flags=re.MULTILINE)
    module = binding.parse_assembly(f"{llvm_code}\ndefine i32 @{entry}(ptr %words) {{\n{body}\n{call}\nret i32 %status\n}}\n")
    for function in module.functions:
        if not function.is_declaration and function.name != entry:
            function.linkage = "internal"
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    tuning = binding.create_pipeline_tuning_options()
    passes.run(module, binding.create_pass_builder(_target_machine(), tuning))
    called = {function.name for function in module.functions if function.is_declaration and not function.name.startswith("llvm.")}
    return None if called - _C_FUNCTIONS else module
