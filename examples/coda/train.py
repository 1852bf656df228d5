"""``python -m nestforge.examples.coda.train``: a dense ViT made conditional and trained for two tasks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from ...progress import Progress
from ...tools.console import print_table
from ..commands import output_option, training
from ..matformer.tasks import read_digits
from ..training import Record, Stage, Stages, train_missing
from .fit import DENSE, KEYS, RECIPE, REDUCTIONS, TASKS, Run, Trainer, conversion

TRAINER = Trainer(RECIPE)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@output_option("demo/coda", "the models")
def main(output: Path) -> None:
    """Train a dense ViT on scikit-learn's digits, make it conditional, and train adapters, routers and scales of norms
    for two tasks on it: digits upright, and upside down.

    No network, no GPU. The dense model first, then the tasks, each on one core, as many side by side as there are. An
    interrupted training goes on with what it had not finished.
    """
    with training(output) as progress:
        records = train_all(output, progress)
    rows = []
    for name, record in records.items():
        if "reductions" in record:
            by_reduction = [f"{one['accuracy']:.1%}" for one in record["reductions"]]
            rows.append([name, f"{record['trained']:,}", f"{record['seconds']:.0f}", *by_reduction])
    print_table(["task, keys of", "trained numbers", "seconds of a core", *(f"r = {r}" for r in REDUCTIONS)], rows)
    dense = records["dense"]
    shown = ", ".join(f"{task} {value:.1%}" for task, value in dense["accuracy"].items())
    click.echo(f"\nThe dense model, trained on upright digits: {shown}; the commonest digit: {dense['commonest']:.1%}")
    click.echo(f"Models and training.json lie in {output.resolve()}")


def train_all(output: Path, progress: Progress) -> Record:
    """Trains what is not there, and returns all records by name."""
    stages = Stages(output, progress)
    key = {"recipe": TRAINER.recipe, "shape": dict(DENSE), "data": read_digits().facts}
    dense = output / "dense"
    progress("dense model", 0, 1)
    stages.run("dense", key, [dense], 0, lambda: TRAINER.dense(dict(DENSE), dense))
    runs = []
    for keys_of in KEYS:
        base, made_from = output / f"base-{keys_of}", {**key, "conversion": conversion(TRAINER.recipe, keys_of)}
        if not stages.kept(base.name, made_from, [base]):
            shutil.rmtree(base, ignore_errors=True)
            stages.store(base.name, made_from, TRAINER.convert(dense, keys_of, base))
        runs += [Run(task, keys_of, base, output / f"{task}-{keys_of}") for task in TASKS]
    keys = {run: {**key, "conversion": conversion(TRAINER.recipe, run.keys_of), "task": run.task} for run in runs}
    missing = {run: Stage(run.name, key, [run.folder, run.alone]) for run, key in keys.items()}
    train_missing(stages, TRAINER, missing, os.cpu_count() or 1, "tasks")
    records = stages.records()
    return {name: records[name] for name in ("dense", *(run.name for run in runs))}


if __name__ == "__main__":
    main()
