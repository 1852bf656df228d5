"""The long run: ``python -m hostile damage --seconds 3600 --json damage.json`` with ``tests`` on the path.

Prints each finding as it comes and a table of outcomes at the end; exits 1 if there was a finding.
"""

import argparse
import sys
from itertools import count
from pathlib import Path

from .drive import drive
from .outcomes import Result, described


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hostile", description=__doc__)
    parser.add_argument("driver", help="a module of this package, such as damage")
    parser.add_argument("--seed", type=int, default=0, help="of the first input; the next ones follow")
    parser.add_argument("--count", type=int, help="how many inputs; default: as many as there is time for")
    parser.add_argument("--seconds", type=float, help="time for all; default: until the count is reached")
    parser.add_argument("--json", type=Path, help="write counts and findings here")
    asked = parser.parse_args()
    if asked.count is None and asked.seconds is None:
        parser.error("expected --count or --seconds")

    def show(result: Result) -> None:
        if result.is_bad or asked.count == 1:
            print(described([result], asked.driver), flush=True)

    seeds = count(asked.seed) if asked.count is None else range(asked.seed, asked.seed + asked.count)
    report = drive(asked.driver, seeds, asked.seconds, show)
    if asked.json is not None:
        asked.json.write_text(report.to_json() + "\n")
    rate = report.total / report.seconds if report.seconds else 0.0
    print(
        f"\n{report.total:,} inputs in {report.seconds:.0f} s ({rate:.0f} a second), {len(report.findings)} findings\n"
    )
    print(report.table())
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
