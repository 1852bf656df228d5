"""``make demo-exits``: train a multi-exit model, slender and unpruned, compile both, calibrate, compare.

Training takes minutes and is done once; so is each compile.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ...compiler.publish.report import markdown
from ...tools.console import print_table
from ..commands import compile_once, demonstrate, nestforge, run
from .report import exit_report, read_texts

FOLDER = Path("demo/exits")
MODELS = {"slender": "slenderised", "whole": "unpruned"}
BUCKETS = ("1x32", "1x64", "8x64")
BUDGET = "mean_latency_ms<=60%"  # of the whole engine's


def steps() -> None:
    run(sys.executable, "-m", "nestforge.examples.cost_eff.train", "--output", str(FOLDER))
    for model in MODELS:
        _compile_and_calibrate(FOLDER / model, FOLDER / f"{model}.bundle")
    report = FOLDER / "report.md"
    report.write_text(_compared())
    print(f"\nThe same as a page: {report.resolve()}")


def _compile_and_calibrate(model: Path, bundle: Path) -> None:
    buckets = [part for bucket in BUCKETS for part in ("--bucket", bucket)]
    compile_once(model, bundle, "--profile", "host-cpu", *buckets)
    calibration = FOLDER / "calibration.jsonl"
    plot = bundle.with_suffix(".svg")
    plot.unlink(missing_ok=True)
    asked = ["--data", str(calibration), "--truncate", "--budget", BUDGET, "--name", "demo", "--plot", str(plot)]
    nestforge("calibrate", str(bundle), *asked)


def _compared() -> str:
    """Prints the tables of both models on texts that neither training nor calibration saw; the same as Markdown."""
    texts = read_texts(FOLDER / "test.jsonl")
    sections = [f"# Early exits on {len(texts.texts)} texts that nothing was trained or calibrated on"]
    for model, what in MODELS.items():
        for heading, table in exit_report(FOLDER / f"{model}.bundle", texts):
            print(f"\n{what} model: {heading}\n", flush=True)
            print_table(table.columns, table.rows)
            sections += [f"## {what.capitalize()} model: {heading}", markdown(table)]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
