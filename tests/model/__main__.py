"""Checks the replacement protocol at full size, and each rule's counterexample.

python -m tests.model                   everything, as a table
python -m tests.model --drop R3b        the shortest way to what goes wrong without a rule, state by state
"""

from __future__ import annotations

import argparse
import sys

from tests.model.checker import Checked, Unavailable, check
from tests.model.rules import RULES, WHOLE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drop", choices=sorted(RULES), help="one rule")
    chosen = parser.parse_args().drop
    try:
        if chosen:
            print(check(RULES[chosen].size).told)
            return 0
        rows = [_row("-", check(size), "") for size in WHOLE]
        rows += [_row(name, check(rule.size), rule.breaks) for name, rule in RULES.items()]
        return 0 if all(rows) else 1
    except Unavailable as missing:
        print(missing, file=sys.stderr)
        return 2


def _row(dropped: str, found: Checked, expected: str) -> bool:
    print(f"dropped {dropped:14} {found.states:>9,} states  {found.broken or 'all promises hold':20} in {found.steps} steps", flush=True)
    return found.broken == expected


if __name__ == "__main__":
    sys.exit(main())
