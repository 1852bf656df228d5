"""Training of one model for each attention: recipe, steps, and how good it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch.nn import functional

from ...exporters.checkpoints.own_folder import save_model
from ...exporters.families.mhe.config import AttentionKind, MheConfig, MheDecoderConfig, MheEncoderConfig
from ...exporters.families.mhe.model import made
from ..byte_windows import MaskedBytes, MaskedRows, PythonBytes, Rows, read_masked_bytes, read_python_bytes
from ..python_text import byte_tokenizer
from ..training import Record, decay_groups, descend, one_thread, parameters_of, quality_of, replace_folder, seconds_of

KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
_BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class Recipe:
    """``steps`` steps of AdamW over ``batch`` rows of ``window`` bytes, with ``decoder_rate`` or ``encoder_rate``;
    of encoders ``share`` of a row's bytes is hidden. ``held_out`` rows judge."""

    steps: int
    batch: int
    window: int
    decoder_rate: float
    encoder_rate: float
    decay: float
    share: float
    held_out: int


# Encoders, whose norms come last, learn nothing beyond the commonest byte in these steps at 2e-3 (11.6 % right), and do
# at 5e-4 (17.2 %, 17.4 %: mhe_mul, mha).
RECIPE = Recipe(
    steps=300, batch=8, window=128, decoder_rate=2e-3, encoder_rate=5e-4, decay=0.05, share=0.15, held_out=256
)


def models(window: int, **shape: Any) -> Mapping[str, MheConfig]:
    """``encoder-KIND`` and ``decoder-KIND`` of every kind of attention, of bytes, for rows of ``window``. ``shape``
    replaces fields of their configuration."""
    common = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 512,
        "max_position_embeddings": 2 * window,
        "elastic_heads": False,  # nothing here is cut
        **shape,
    }
    found: dict[str, MheConfig] = {}
    for kind in KINDS:
        own = {**common, "attention": kind, "factors": "e" if kind == "mhe_mul" else None}
        found[f"encoder-{kind}"] = MheEncoderConfig(**own, vocab_size=257, head="masked_lm")  # bytes and the mask
        found[f"decoder-{kind}"] = MheDecoderConfig(**own, vocab_size=256)
    return found


MODELS = models(RECIPE.window)


def fit(
    model: torch.nn.Module,
    batches: Iterable[MaskedRows | Rows],
    recipe: Recipe,
    rate: float,
    on_step: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Trains ``model`` in place, one step a batch with ``rate``, on the mean cross-entropy of what it is asked for."""
    groups = decay_groups(model.named_parameters(), rate, recipe.decay)
    losses = (partial(_loss, model, batch) for batch in batches)
    descend(groups, _BETAS, losses, recipe.steps, on_step)


def _loss(model: torch.nn.Module, batch: MaskedRows | Rows) -> torch.Tensor:
    return functional.cross_entropy(answers(model, batch).flatten(0, 1), batch.targets.flatten())


def answers(model: torch.nn.Module, rows: MaskedRows | Rows) -> torch.Tensor:
    """Logits ``[N, K, V]`` for the targets of ``rows``: of hidden bytes, or of every next one."""
    has_mask = isinstance(rows, MaskedRows)
    return rows.asked(model(rows.inputs, torch.ones_like(rows.inputs)) if has_mask else model(rows.inputs))


def quality(model: torch.nn.Module, parts: Iterable[MaskedRows | Rows]) -> Record:
    """``accuracy`` and ``loss`` (nats a byte) of what ``parts`` ask for."""
    return quality_of((answers(model, part), part.targets) for part in parts)


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
            model = made(run.config)
            batches = data.batches(recipe.batch, recipe.steps, 0)
            seconds = seconds_of(model, lambda: fit(model, batches, recipe, rate))
            special = ["[MASK]"] if isinstance(run.config, MheEncoderConfig) else []
            files = {"tokenizer.json": byte_tokenizer(special).to_str()}
            replace_folder(run.folder, lambda beside: save_model(model, run.config, beside, files))
            found = quality(model, data.test.parts(recipe.batch))
        known = {"commonest": data.commonest} if isinstance(data, MaskedBytes) else {}
        return {"parameters": parameters_of(model), "seconds": seconds, **found, **known}
