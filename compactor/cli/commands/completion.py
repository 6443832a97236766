"""Command ``completion bash|zsh|tcsh``: prints a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

from compactor.cli import frame
from compactor.cli.output import Output

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: frame.Parser) -> None:
    parser.set_command(
        print_completion,
        frame.argument(
            "shell", choices=SHELLS, help="for bash: `tiered-compactor completion bash > /etc/bash_completion.d/tiered-compactor`"
        ),
    )


def print_completion(args: argparse.Namespace, out: Output) -> None:
    import shtab

    from compactor.cli.main import COMMANDS, build_parser

    parser = build_parser({command.name for command in COMMANDS})
    out.write_chunks([shtab.complete(parser, args.shell).encode(), b"\n"])
