"""Entry point of ``python -m compactor``, the same as ``tiered-compactor``."""

import sys

from compactor.cli.main import entry

sys.exit(entry())
