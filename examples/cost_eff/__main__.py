"""``make demo-exits``: train a multi-exit model, slender and unpruned, compile both, calibrate, compare.

Training takes minutes and is done once; so is each compile.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..commands import compile_once, demonstrate, nestforge, run, show
from .report import exit_report
from .texts import read_jsonl

FOLDER = Path("demo/exits")
MODELS = {"slender": "slenderised", "whole": "unpruned"}
BUCKETS = ("1x32", "1x64", "8x64")
BUDGET = "mean_latency_ms<=60%"  # of the whole engine's


def steps() -> None:
    run(sys.executable, "-m", "nestforge.examples.cost_eff.train", "--output", str(FOLDER))
    for model in MODELS:
        _compile_and_calibrate(FOLDER / model, FOLDER / f"{model}.bundle")
    texts = read_jsonl(FOLDER / "test.jsonl")
    tables = {
        f"{what.capitalize()} model: {heading}": table
        for model, what in MODELS.items()
        for heading, table in exit_report(FOLDER / f"{model}.bundle", texts)
    }
    show(FOLDER, f"Early exits on {len(texts)} texts that nothing was trained or calibrated on", tables)


def _compile_and_calibrate(model: Path, bundle: Path) -> None:
    buckets = [part for bucket in BUCKETS for part in ("--bucket", bucket)]
    compile_once(model, bundle, "--profile", "host-cpu", *buckets)
    calibration = FOLDER / "calibration.jsonl"
    asked = ["--data", str(calibration), "--truncate", "--budget", BUDGET, "--name", "demo"]
    nestforge("calibrate", str(bundle), *asked)


if __name__ == "__main__":
    sys.exit(demonstrate(steps))
