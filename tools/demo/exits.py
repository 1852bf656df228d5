"""``make demo-exits``: train a multi-exit model, slender and unpruned, compile both, calibrate, compare.

Every step is a command that is printed before it runs, so that it can be repeated by hand. Training takes minutes and
is done once; so is each compile.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from ...compiler.report import markdown
from ...compiler.write_bundle import source_entries
from ...errors import NestforgeError
from ...exporters.source import open_source
from ...runtime.bundle import open_bundle
from ..console import print_table
from .exit_report import exit_report, read_texts, whole_engine_ms

FOLDER = Path("demo/exits")
MODELS = {"slender": "slenderised", "whole": "unpruned"}
BUCKETS = ("1x32", "1x64", "8x64")
# Of the whole engine's mean latency.
SHARE = 0.6


def main() -> int:
    try:
        _run(sys.executable, "-m", "nestforge.tools.train.exits", "--output", str(FOLDER))
        for model in MODELS:
            _compile_and_calibrate(FOLDER / model, FOLDER / f"{model}.bundle")
        report = FOLDER / "report.md"
        report.write_text(_compared())
    except NestforgeError as failure:
        print(f"demo: error: {failure}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failure:
        return failure.returncode
    print(f"\nThe same as a page: {report.resolve()}")
    return 0


def _compile_and_calibrate(model: Path, bundle: Path) -> None:
    nestforge = str(Path(sys.executable).with_name("nestforge"))
    if bundle.exists() and not is_made_from(bundle, model):
        print(f"\n{bundle} was made from another training and is made anew")
        shutil.rmtree(bundle)
    if bundle.exists():
        print(f"\n{bundle} exists and is used again; remove it (rm -r {bundle}) to compile anew")
    else:
        buckets = [part for bucket in BUCKETS for part in ("--bucket", bucket)]
        _run(nestforge, "compile", str(model), "--profile", "host-cpu", *buckets, "--output", str(bundle))
    calibration = FOLDER / "calibration.jsonl"
    plot = bundle.with_suffix(".svg")
    plot.unlink(missing_ok=True)
    budget = f"mean_latency_ms<={SHARE * whole_engine_ms(bundle, read_texts(calibration)):.3g}"
    asked = ["--data", str(calibration), "--truncate", "--budget", budget, "--name", "demo", "--plot", str(plot)]
    _run(nestforge, "calibrate", str(bundle), *asked)


def is_made_from(bundle: Path, model: Path) -> bool:
    """Whether the files of ``model`` are those that ``bundle`` was compiled from."""
    return open_bundle(bundle).manifest.provenance.source == source_entries(open_source(model))


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


def _run(*command: str) -> None:
    shown = [Path(command[0]).name, *command[1:]]
    print(f"\n$ {shlex.join(shown)}", flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
