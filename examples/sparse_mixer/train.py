"""``python -m nestforge.examples.sparse_mixer.train``: trains the masked-token models and prints how good they are."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch

from ...progress import Progress
from ...tools.console import print_table
from ..byte_windows import MaskedRows
from ..commands import output_option, training
from ..training import Record, Stage, Stages, replace_file, train_missing
from .fit import MODELS, RECIPE, SPARSE_MIXER, Run, Subject, Trainer

TRAINER = Trainer(RECIPE, SPARSE_MIXER.max_position_embeddings)
# Inputs of the model alone, for what compiling ranks and compares.
VALIDATION_NAME = "validation.npz"
# The same of other rows, and what is hidden in them: ``positions`` and ``targets`` [N, K].
TEST_NAME = "test.npz"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@output_option("demo/mixer", "the models, held-out rows")
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True, help="Trainings of the Sparse Mixer.")
def main(output: Path, seeds: int) -> None:
    """Train masked-token models of the bytes of Python's own sources: a Sparse Mixer whose experts choose, the same
    whose tokens choose, and a BERT of the same depth and width.

    No network, no GPU. Each run takes one core, as many side by side as there are. An interrupted training goes on
    with the runs that it had not finished.
    """
    with training(output) as progress:
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


@dataclass(frozen=True)
class Training:
    """Trains ``models`` (folder name to subject) into ``output``, each once, and the first of them for ``seeds``
    seeds, ``jobs`` runs at a time."""

    output: Path
    models: Mapping[str, Subject]
    trainer: Trainer
    seeds: int
    jobs: int
    progress: Progress

    def run(self) -> Record:
        """Does what is not done, and returns the records of this training by stage: ``data``, then each run's name."""
        self.output.mkdir(parents=True, exist_ok=True)
        made_from = self._data()
        self._train_all(made_from)
        records = self.stages.records()
        return {name: records[name] for name in ("data", *(run.name for run in self.runs))}

    @property
    def stages(self) -> Stages:
        return Stages(self.output, self.progress)

    @property
    def runs(self) -> list[Run]:
        """The published models, then further seeds of the first."""
        published = [Run(name, subject, 0, self.output / name) for name, subject in self.models.items()]
        return published + [Run(published[0].model, published[0].subject, seed) for seed in range(1, self.seeds)]

    def _data(self) -> Record:
        data = self.trainer.data()
        files = [self.output / VALIDATION_NAME, self.output / TEST_NAME]

        def write() -> Record:
            hidden = {"positions": data.test.positions, "targets": data.test.targets}
            replace_file(files[0], _npz(_inputs(data.validation)))
            replace_file(files[1], _npz({**_inputs(data.test), **hidden}))
            return {**data.facts, "commonest": data.commonest}

        self.stages.run("data", data.facts, files, 0, write)
        return {"recipe": self.trainer.recipe, "data": data.facts}

    def _train_all(self, made_from: Record) -> None:
        keys = {
            run: {**made_from, "config": run.subject.config.to_json(), "rate": run.subject.rate, "seed": run.seed}
            for run in self.runs
        }
        missing = {run: Stage(run.name, key, _files(run)) for run, key in keys.items()}
        train_missing(self.stages, self.trainer, missing, self.jobs)


def _inputs(rows: MaskedRows) -> dict[str, torch.Tensor]:
    return {"input_ids": rows.inputs, "token_type_ids": torch.zeros_like(rows.inputs)}


def _npz(arrays: Mapping[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{name: array.numpy() for name, array in arrays.items()})
    return file.getvalue()


def _files(run: Run) -> list[Path]:
    return [] if run.folder is None else [run.folder]


if __name__ == "__main__":
    main()
