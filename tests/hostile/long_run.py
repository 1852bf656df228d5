"""``make hostile``: every driver for its share of the time, one table. ``python -m hostile.long_run --minutes 60``.

Seeds begin at ``--seed`` and are dealt to as many worker processes as there are cores; the findings, each with the
seed that makes it again, are the same however many there are. Exits 1 if there was a finding.
"""

import argparse
import json
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, takewhile
from pathlib import Path
from time import monotonic

from .drive import drive
from .outcomes import Report, Result, described, merged

# Shares of the time, in the order in which they run; what one leaves, since it is done, the next ones have. A driver is
# done when it has tried so many inputs as it has a limit, or nothing but inputs without effect for a while.
SHARES = {"threads": 0.2, "kill": 0.3, "damage": 0.5}
MOST = {"damage": 1_000_000}
_WITHOUT_EFFECT = 500


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hostile.long_run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all drivers together; default: 60")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--json", type=Path, help="write counts and findings here")
    asked = parser.parse_args(arguments)
    ends, shares, reports = monotonic() + 60 * asked.minutes, sum(SHARES.values()), []
    for driver, share in SHARES.items():
        seconds = max(0.0, ends - monotonic()) * share / shares
        shares -= share
        report = long_run(driver, asked.seed, seconds, os.cpu_count() or 1)
        rate = report.total / max(report.seconds, 1e-9)
        print(f"{driver}: {report.total:,} inputs in {report.seconds:.0f} s ({rate:.0f} a second)", flush=True)
        if report.findings:
            print(described(report.findings, driver), flush=True)
        reports.append(report)
    print(f"\n{merged('all', [report.named() for report in reports]).table()}")
    if asked.json is not None:
        host = {"platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
        data = {"host": host, "seed": asked.seed, "drivers": [report.to_dict() for report in reports]}
        asked.json.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if any(report.findings for report in reports) else 0


def long_run(driver: str, first: int, seconds: float, workers: int) -> Report:
    """Outcomes of the seeds from ``first`` on that begin within ``seconds``, in ``workers`` processes at once."""
    most = MOST.get(driver, sys.maxsize)

    def deal(number: int) -> Report:
        skipped = 0

        def note(result: Result) -> None:
            nonlocal skipped
            skipped = skipped + 1 if result.outcome == "skipped" else 0

        mine = islice(count(first + number, workers), -(-(most - number) // workers))
        return drive(driver, takewhile(lambda _: skipped < _WITHOUT_EFFECT, mine), seconds, note)

    with ThreadPoolExecutor(workers) as pool:
        return merged(driver, list(pool.map(deal, range(workers))))


if __name__ == "__main__":
    sys.exit(main())
