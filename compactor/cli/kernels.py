"""Compilation of kernels: half a minute, the first time on a machine."""

from __future__ import annotations

from compactor.cli.output import Output


def compile_numba_kernels(out: Output, *, load_into_process: bool = False) -> None:
    from compactor.kernels.jit import COMPLETE, kernel_cache_folder

    folder = kernel_cache_folder()
    compiled = folder is None or (folder / COMPLETE).exists()
    if not compiled:
        out.print_note("compiling kernels: up to half a minute, the first time only ...")
    if load_into_process or not compiled:
        from compactor.cleaner.precompile import KERNELS, precompile_kernels

        with out.show_progress("compiling kernels", KERNELS, "kernels") as progress:
            precompile_kernels(lambda name, done: progress.begin_part(f"compiling {name.strip('_')}", done))
