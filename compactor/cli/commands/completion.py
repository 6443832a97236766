"""Command ``completion``: prints a completion script for a shell."""

from __future__ import annotations

import argparse

import shtab

from compactor.cli.arguments import COMMANDS
from compactor.cli.main import build_parser
from compactor.cli.output import Output


def completion_command(args: argparse.Namespace, out: Output) -> None:
    parser = build_parser({command.name for command in COMMANDS})
    out.write_chunks([shtab.complete(parser, args.shell).encode(), b"\n"])
