"""``python -m nestforge.examples.mhe.train``: trains a model of every attention and prints how good it is."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ...progress import Progress
from ...tools.console import print_table
from ..commands import output_option, training
from ..training import Record, Stage, Stages, train_missing
from .fit import MODELS, RECIPE, Run, Trainer

TRAINER = Trainer(RECIPE)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@output_option("demo/mhe", "the models")
def main(output: Path) -> None:
    """Train encoders and decoders of the bytes of Python's own sources, one with each attention that the MHE paper
    compares, all by the same steps.

    No network, no GPU. Each run takes one core, as many side by side as there are. An interrupted training goes on
    with the runs that it had not finished.
    """
    with training(output) as progress:
        records = train_all(output, progress)
    rows = [
        [
            name,
            f"{record['parameters']:,}",
            f"{record['seconds']:.0f}",
            f"{record['accuracy']:.1%}",
            f"{record['loss']:.3f}",
        ]
        for name, record in records.items()
    ]
    print_table(["model", "parameters", "seconds of a core", "accuracy", "loss (nats a byte)"], rows)
    click.echo(f"\nModels and training.json lie in {output.resolve()}")


def train_all(output: Path, progress: Progress) -> Record:
    """Trains what is not there, and returns the records of all models by name."""
    stages, runs = Stages(output, progress), [Run(name, config, output / name) for name, config in MODELS.items()]
    keys: dict[Run, Record] = {
        run: {"recipe": TRAINER.recipe, "config": run.config.to_json(), "data": TRAINER.data(run.config).facts}
        for run in runs
    }
    missing = {run: Stage(run.name, key, [run.folder]) for run, key in keys.items()}
    train_missing(stages, TRAINER, missing, os.cpu_count() or 1)
    records = stages.records()
    return {run.name: records[run.name] for run in runs}


if __name__ == "__main__":
    main()
