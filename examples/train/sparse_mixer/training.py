"""The training read top to bottom: data, every run, the models and their held-out rows as files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ....tools.console import Progress
from ..stages import Record, Stages, replace_file
from ..train_missing import Stage, train_missing
from .masked_bytes import MaskedRows
from .recipe import Subject
from .runs import Run, Trainer

# Inputs of the model alone, for what compiling ranks and compares.
VALIDATION_NAME = "validation.npz"
# The same of other rows, and what is hidden in them: ``positions`` and ``targets`` [N, K].
TEST_NAME = "test.npz"


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
