"""``python -m compactor`` is ``tiered-compactor``."""

import sys

from compactor.cli.main import entry

sys.exit(entry())
