"""One run: a model from its first weights to its figures on rows that nothing was trained on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ....exporters.families.mhe.architecture.config import MheConfig, MheDecoderConfig, MheEncoderConfig
from ....exporters.families.mhe.folder import save_model
from ....exporters.families.mhe.model.decoder import MheDecoder
from ....exporters.families.mhe.model.encoder import MheEncoder
from ..byte_tokenizer import byte_tokenizer
from ..matformer.data import Rows
from ..matformer.python_bytes import PythonBytes, read_python_bytes
from ..optimiser import parameters_of
from ..side_by_side import one_thread
from ..sparse_mixer.masked_bytes import MaskedBytes, MaskedRows, read_masked_bytes
from ..stages import Record, replace_folder
from .fit import fit, quality
from .recipe import Recipe


@dataclass(frozen=True)
class Run:
    """A model to train, by ``name``, published in ``folder``."""

    name: str
    config: MheConfig
    folder: Path


@dataclass(frozen=True)
class Trainer:
    """Trains any run by the ``recipe``; ``stdlib`` is where its text is read, if not in this Python."""

    recipe: Recipe
    stdlib: Path | None = None

    def data(self, config: MheConfig) -> MaskedBytes | PythonBytes:
        """The same on every call, for all encoders and for all decoders."""
        recipe = self.recipe
        if isinstance(config, MheDecoderConfig):
            return read_python_bytes(recipe.window, recipe.held_out, self.stdlib)
        return read_masked_bytes(recipe.window, recipe.share, recipe.held_out, self.stdlib)

    def __call__(self, run: Run) -> Record:
        """Trains and measures. The record has the ``parameters``, the ``seconds`` of a core that training alone took,
        and ``accuracy`` and ``loss`` on the test rows; of encoders also the accuracy of the ``commonest`` byte."""
        with one_thread():
            recipe, data = self.recipe, self.data(run.config)
            rate = recipe.decoder_rate if isinstance(run.config, MheDecoderConfig) else recipe.encoder_rate
            torch.manual_seed(0)
            model = _drawn(run.config)
            started = time.process_time()
            fit(model.train(), data.batches(recipe.batch, recipe.steps, 0), recipe, rate)
            seconds = round(time.process_time() - started, 1)
            model.eval().requires_grad_(False)
            special = ["[MASK]"] if isinstance(run.config, MheEncoderConfig) else []
            files = {"tokenizer.json": byte_tokenizer(special).to_str()}
            replace_folder(run.folder, lambda beside: save_model(model, run.config, beside, files))
            found = quality(model, _batches(data.test, recipe.batch))
        known = {"commonest": data.commonest} if isinstance(data, MaskedBytes) else {}
        return {"parameters": parameters_of(model), "seconds": seconds, **found, **known}


def _drawn(config: MheConfig) -> torch.nn.Module:
    if isinstance(config, MheDecoderConfig):
        return MheDecoder(config)
    assert isinstance(config, MheEncoderConfig)
    return MheEncoder(config)


def _batches(rows: MaskedRows | Rows, size: int) -> Iterator[MaskedRows | Rows]:
    for at in range(0, len(rows.inputs), size):
        if isinstance(rows, MaskedRows):
            yield rows.part(at, at + size)
        else:
            yield Rows(rows.inputs[at : at + size], rows.targets[at : at + size])
