"""One run: a model from its first weights to its figures at every budget, on rows that nothing was trained on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ....exporters.families.sparse_mixer.folder import save_model
from ....exporters.families.sparse_mixer.model.encoder import SparseMixer
from ....exporters.families.sparse_mixer.model.moe import MoE
from ..byte_tokenizer import byte_tokenizer
from ..optimiser import parameters_of
from ..side_by_side import one_thread
from ..stages import Record, replace_folder
from .fit import fit, quality
from .masked_bytes import MaskedBytes, read_masked_bytes
from .recipe import Recipe, Subject
from .start import draw_start


@dataclass(frozen=True)
class Run:
    """``model`` names the subject; ``folder`` is where the model is published, if it is."""

    model: str
    subject: Subject
    seed: int
    folder: Path | None = None

    @property
    def name(self) -> str:
        return self.model if not self.seed else f"{self.model} seed {self.seed}"


@dataclass(frozen=True)
class Trainer:
    """Trains any run on the data that the ``recipe`` names; ``stdlib`` is where that is read, if not in this Python."""

    recipe: Recipe
    window: int
    stdlib: Path | None = None

    def data(self) -> MaskedBytes:
        """The same on every call."""
        return read_masked_bytes(self.window, self.recipe.share, self.recipe.held_out, self.stdlib)

    def __call__(self, run: Run) -> Record:
        """Trains and measures. The record has the ``parameters``, the ``seconds`` of a core that training alone took,
        and the ``quality`` of every budget on the validation and the test rows."""
        with one_thread():
            data = self.data()
            torch.manual_seed(run.seed)
            config = run.subject.config
            model = SparseMixer(config)
            draw_start(model)
            started = time.process_time()
            batches = data.batches(self.recipe.batch, self.recipe.steps, run.seed)
            fit(model.train(), batches, self.recipe, run.subject.rate)
            seconds = round(time.process_time() - started, 1)
            model.eval().requires_grad_(False)
            if run.folder is not None:
                files = {"tokenizer.json": byte_tokenizer(["[MASK]"]).to_str()}
                replace_folder(run.folder, lambda beside: save_model(model, config, beside, files))
            parts = {"validation": data.validation, "test": data.test}
            figures = [
                {"budget": budget} | {part: quality(model, rows, self.recipe.batch) for part, rows in parts.items()}
                for budget in budgets(model)
            ]
        return {"parameters": parameters_of(model), "seconds": seconds, "quality": figures}


def budgets(model: SparseMixer) -> Iterator[str]:
    """Sets ``model`` to one budget after the other and gives its name: every capacity offered in the trained group,
    then every smaller group at the trained capacity. A model without experts has one."""
    config = model.config
    if not config.moe_layers:
        yield "whole"
        return
    offered = config.choices
    capacities = offered.get("moe.capacity_factor", (config.trained_capacity,))
    groups = offered.get("moe.group_size", (config.group_size,))
    pairs = [(percent, config.group_size) for percent in reversed(capacities)]
    pairs += [(config.trained_capacity, group) for group in reversed(groups[:-1])]
    for percent, group in pairs:
        for part in model.modules():
            if isinstance(part, MoE):
                part.percent, part.group_size = percent, group
        yield f"{percent} % of {group} tokens"
