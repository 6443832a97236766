"""Entry point of ``python -m compactor``."""

import sys

from compactor.cli.main import entry

sys.exit(entry())
