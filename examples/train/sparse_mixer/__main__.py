"""``python -m nestforge.examples.train.sparse_mixer``: trains the masked-token models and prints how good they are."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ....tools.console import print_table, working
from ..command import one_line_errors, output_option
from ..stages import Record
from .recipe import MODELS, RECIPE, SPARSE_MIXER
from .runs import Trainer
from .training import Training

TRAINER = Trainer(RECIPE, SPARSE_MIXER.max_position_embeddings)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@output_option("demo/mixer", "the models, held-out rows")
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True, help="Trainings of the Sparse Mixer.")
def main(output: Path, seeds: int) -> None:
    """Train masked-token models of the bytes of Python's own sources: a Sparse Mixer whose experts choose, the same
    whose tokens choose, and a BERT of the same depth and width.

    No network, no GPU. Each run takes one core, as many side by side as there are. An interrupted training goes on
    with the runs that it had not finished.
    """
    with one_line_errors(output), working() as progress:
        records = Training(output, MODELS, TRAINER, seeds, os.cpu_count() or 1, progress).run()
    _print_records(records)
    click.echo(f"\nModels, held-out rows and training.json lie in {output.resolve()}")


def _print_records(records: Record) -> None:
    data = records["data"]
    click.echo(f"{data['held_out_rows']} test rows; the commonest byte: {data['commonest']:.1%}\n")
    runs = {name: record for name, record in records.items() if name != "data"}
    for name, record in runs.items():
        click.echo(f"{name}: {record['parameters']:,} parameters, trained in {record['seconds']:.0f} s of one core")
    click.echo()
    print_table(
        ["model", "capacity", "accuracy", "loss (nats)", "tokens dropped"],
        [_row(name, found["budget"], found["test"]) for name, run in runs.items() for found in run["quality"]],
    )


def _row(name: str, budget: str, found: Record) -> list[str]:
    dropped = ", ".join(f"layer {layer} {share:.1%}" for layer, share in found["dropped"].items())
    return [name, budget, f"{found['accuracy']:.1%}", f"{found['loss']:.3f}", dropped or "-"]


if __name__ == "__main__":
    main()
