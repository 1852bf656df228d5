"""Outcomes of hostile inputs, and a report of how often each came."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Acceptable, each with what it means.
GOOD = {
    "refused": "one error of ours, one printable line",
    "same": "answered as without the damage",
    "found by full": "answers differ, and check='full' or verify refuses the files",
    "answered": "the content was forged throughout, so its own answer is right",
    "skipped": "the damage changed nothing",
}
# Defects.
BAD = {
    "wrong": "answers differ, and no check notices",
    "escaped": "an exception that is no NestforgeError",
    "unprintable": "a message or output of several lines, too long, or with characters that no terminal should get",
    "crashed": "the process died",
    "hung": "no answer within the limit",
    "memory": "more memory than the limit",
    "leaked": "threads, files or memory that stay when everything is closed",
}


@dataclass(frozen=True)
class Result:
    """The outcome of the input of ``seed``; ``what`` names the subject, ``how`` says what was done to it. An input may
    be ``count`` requests."""

    seed: int
    outcome: str
    what: str
    how: str = ""
    message: str = ""
    count: int = 1

    @property
    def is_bad(self) -> bool:
        return self.outcome not in GOOD


@dataclass
class Report:
    """Counts by subject and outcome, and every finding with the seed that makes it again."""

    driver: str
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, result: Result) -> None:
        self.counts.setdefault(result.what, Counter())[result.outcome] += result.count
        if result.is_bad:
            self.findings.append(result)

    @property
    def total(self) -> int:
        return sum(map(Counter.total, self.counts.values()))

    def to_dict(self) -> dict[str, Any]:
        return {
            "driver": self.driver,
            "inputs": self.total,
            "seconds": round(self.seconds, 1),
            "counts": {what: dict(sorted(counts.items())) for what, counts in sorted(self.counts.items())},
            "findings": [asdict(finding) for finding in self.findings],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def named(self) -> Report:
        """The same, each subject under the driver's name."""
        counts = {f"{self.driver}: {what}": found for what, found in self.counts.items()}
        return Report(self.driver, counts, self.findings, self.seconds)

    def table(self) -> str:
        """Markdown: a row for each subject, a column for each outcome that came up, the bad ones always."""
        seen = [o for o in (*GOOD, *BAD) if o in BAD or any(counts[o] for counts in self.counts.values())]
        seen += sorted({o for counts in self.counts.values() for o in counts} - {*GOOD, *BAD})
        lines = [_row(["subject", "inputs", *seen]), _row(["---"] * (len(seen) + 2))]
        for what, counts in sorted(self.counts.items()):
            lines.append(_row([what, f"{counts.total():,}", *(f"{counts[o]:,}" for o in seen)]))
        if len(self.counts) > 1:
            totals = (sum(counts[o] for counts in self.counts.values()) for o in seen)
            lines.append(_row(["all", f"{self.total:,}", *(f"{total:,}" for total in totals)]))
        return "\n".join(lines)


def merged(driver: str, reports: Sequence[Report]) -> Report:
    """All of ``reports``, which ran at the same time, as one; findings by seed."""
    whole = Report(driver, seconds=max(report.seconds for report in reports))
    for report in reports:
        for what, counts in report.counts.items():
            whole.counts.setdefault(what, Counter()).update(counts)
        whole.findings += report.findings
    whole.findings.sort(key=lambda finding: finding.seed)
    return whole


def described(findings: Iterable[Result], driver: str, most: int = 20) -> str:
    """Findings for a reader, each with the command that makes it again."""
    shown = list(findings)
    lines = [
        f"{f.what}: {f.outcome}: {f.how}\n  {f.message}\n  again: python -m hostile {driver} --seed {f.seed} --count 1"
        for f in shown[:most]
    ]
    return "\n".join([*lines, *([f"and {len(shown) - most} more"] if len(shown) > most else [])])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
