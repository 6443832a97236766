"""Checks the replacement protocol at full size, and each rule's counterexample.

python -m tests.model                   everything, as a table
python -m tests.model --drop R3b        the shortest way to what goes wrong without a rule, state by state
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.evidence import write_record
from tests.model.checker import Checked, Unavailable, check
from tests.model.rules import RULES, WHOLE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drop", choices=sorted(RULES), help="one rule")
    parser.add_argument("--record", type=Path, help="write the table here, as JSON")
    arguments = parser.parse_args()
    chosen = arguments.drop
    try:
        if chosen:
            print(check(RULES[chosen].size).told)
            return 0
        rows = [_row("", check(size), "") for size in WHOLE]
        rows += [_row(name, check(rule.size), rule.breaks) for name, rule in RULES.items()]
    except Unavailable as missing:
        print(missing, file=sys.stderr)
        return 2
    unexpected = sum(row["broken"] != row["expected"] for row in rows)
    write_record(arguments.record, "model", {"rows": rows, "violations": unexpected})
    return 1 if unexpected else 0


def _row(dropped: str, found: Checked, expected: str) -> dict[str, Any]:
    print(
        f"dropped {dropped or '-':14} {found.states:>9,} states  {found.broken or 'all promises hold':20} in {found.steps} steps",
        flush=True,
    )
    return {"dropped": dropped, "states": found.states, "broken": found.broken, "expected": expected, "steps": found.steps}


if __name__ == "__main__":
    sys.exit(main())
