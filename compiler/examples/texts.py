"""Texts as batches, and their vectors in PyTorch, by which submodels are compared before any is compiled.

Batches are cut to a length, neighbours of like length together, in an order that the seed decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from ...bundle.entries.tensor_spec import Role, TensorSpec
from ...bundle.roles import Interface, compared_outputs
from ...elastic import Submodel
from ...errors import CheckpointError
from ...exporters.signature import Signature
from ...exporters.source import ModelSource
from ...exporters.universal import UniversalModel
from ...runtime.consistency.samples import keyed_texts
from ...runtime.inputs.arrays import InputChecker
from ...runtime.inputs.text import TextEncoder
from ..work.clock import Clock
from .corpus import split_parts

# Tokens of a text that training uses; longer texts cost time quadratically and teach little more.
LONGEST = 64
# Batches whose texts are sorted together: enough to pad little, few enough to mix the texts.
_BATCHES_SORTED_TOGETHER = 16
# Texts embedded at once.
_EMBEDDED = 25
# Texts of a batch whose loss is taken, and tokens of each: long texts cost time quadratically and tell two submodels
# apart no better.
_LOSS_BATCH, _LOSS_TOKENS = 16, 128


def training_texts(path: Path) -> list[str]:
    """Every text of the file ``path`` that no command holds out, shortest first. Raises CheckpointError."""
    texts, _ = split_parts(keyed_texts(path, CheckpointError))
    return sorted(texts, key=lambda text: (len(text), text))


@dataclass(frozen=True)
class Batch:
    """``inputs`` in the signature's order; ``weights`` float32 ``[B, S]`` is 1 where a token is real."""

    inputs: tuple[torch.Tensor, ...]
    weights: torch.Tensor


@dataclass(frozen=True)
class TextBatches:
    """Batches of ``texts``, which are in order of length, cut to the ``longest`` number of tokens."""

    texts: tuple[str, ...]
    encoder: TextEncoder
    signature: Signature
    longest: int

    @classmethod
    def of(cls, source: ModelSource, texts: Sequence[str], longest: int = LONGEST) -> TextBatches:
        """``texts`` for the model in ``source``, by its own tokenizer, shortest first.

        Raises CheckpointError for a model without one, InputError if an input does not come from text.
        """
        encoder, signature = source.encoder, source.signature
        if encoder is None:
            raise CheckpointError(f"{source.checkpoint.folder}: no tokenizer.json, so this model reads no texts")
        ordered = tuple(sorted(texts, key=lambda text: (len(text), text)))
        return cls(ordered, encoder, signature, min(longest, signature.max_sequence or longest))

    def once(self, size: int) -> Iterator[Batch]:
        """Every text once, in order."""
        for start in range(0, len(self.texts), size):
            yield self._batch(self.texts[start : start + size])

    def at(self, step: int, size: int, seed: int) -> Batch:
        """The batch of one step; any step can be requested, so that an interrupted training knows where it was."""
        batches = -(-len(self.texts) // size)
        rows = _epoch(len(self.texts), size, seed, step // batches)[step % batches]
        return self._batch([self.texts[row] for row in rows])

    def _batch(self, texts: Sequence[str]) -> Batch:
        encoded = self.encoder.encode(texts, self.longest, truncate=True)
        InputChecker(self.signature.inputs).shape_of(encoded.feeds)
        inputs = tuple(torch.from_numpy(encoded.feeds[spec.name]) for spec in self.signature.inputs)
        lengths = torch.tensor(encoded.lengths)
        real = torch.arange(inputs[0].shape[1]) < lengths[:, None]  # [B, S]
        return Batch(inputs, real.float())


def mean_cosines(
    model: UniversalModel,
    submodels: Sequence[Submodel],
    texts: TextBatches,
    reference: torch.Tensor,
    clock: Clock,
) -> list[float]:
    """Mean cosine of every submodel's vectors to ``reference`` ``[texts, H]``, which ``embeddings`` made."""
    cosines = []
    for submodel in clock.each(submodels):
        found = embeddings(model.source, model.narrow(submodel), texts)
        cosines.append(float(functional.cosine_similarity(found, reference, dim=-1).mean()))
    return cosines


@torch.no_grad()
def embeddings(source: ModelSource, module: torch.nn.Module, texts: TextBatches) -> torch.Tensor:
    """One vector a text ``[texts, H]`` in float64, of the output that compile's quality compares first, averaged over
    real tokens where it has something of each; of a model with no such output, of its last one."""
    spec = compared_first(source)[1]
    place = source.signature.outputs.index(spec)
    rows = []
    for batch in texts.once(_EMBEDDED):
        output = module(*batch.inputs)[place].double()
        if "sequence" in spec.dims:
            weights = batch.weights[:, :, None]  # [B, S, 1]
            output = (output * weights).sum(1) / weights.sum(1).clamp(min=1)
        rows.append(output)
    return torch.cat(rows)


def compared_first(source: ModelSource) -> tuple[Role | None, TensorSpec]:
    """The output of ``source`` by which submodels are compared (bundle/roles.py) and its role, None of the last output
    where none can be."""
    signature = source.signature
    compared = compared_outputs(Interface(signature.inputs, signature.outputs, signature.text))
    return next(iter(compared.items()), (None, signature.outputs[-1]))


class HeldOutLoss:
    """The loss of submodels of ``model`` on ``texts``; lower is better.

    For a model that predicts the next token: nats per token. For every other model: 1 - mean cosine of its compared
    output (bundle/roles.py) to the universal model's, averaged over the tokens of a text.
    """

    def __init__(self, model: UniversalModel, texts: Sequence[str]) -> None:
        """Raises CheckpointError for a model without a tokenizer, or without an output to compare."""
        self._model, self._texts = model, TextBatches.of(model.source, texts, _LOSS_TOKENS)
        self._role, self._output = compared_first(model.source)
        if self._role is None:
            raise CheckpointError(f"{model.source.checkpoint.folder}: no output by which submodels could be compared")
        self._reference = None if self._of_tokens else embeddings(model.source, model.module, self._texts)

    @property
    def unit(self) -> str:
        """Name of the number."""
        return "nats per token" if self._of_tokens else f"1 - cosine of {self._output.name} to the universal model's"

    def __call__(self, submodel: Submodel) -> float:
        module = self._model.narrow(submodel)
        if self._reference is None:
            return self._nats(module)
        found = embeddings(self._model.source, module, self._texts)
        return float((1 - functional.cosine_similarity(found, self._reference)).clamp(min=0).mean())

    @property
    def _of_tokens(self) -> bool:
        return self._role == "next_tokens"

    @torch.no_grad()
    def _nats(self, module: torch.nn.Module) -> float:
        """Mean loss over the tokens of every text but its first."""
        signature = self._model.source.signature
        assert signature.text is not None
        ids = [spec.name for spec in signature.inputs].index(signature.text.continued)
        place, total, count = signature.outputs.index(self._output), 0.0, 0.0
        for batch in self._texts.once(_LOSS_BATCH):
            logits, counted = module(*batch.inputs)[place][:, :-1], batch.weights[:, 1:]  # [B, S - 1, V], [B, S - 1]
            each = functional.cross_entropy(logits.transpose(1, 2), batch.inputs[ids][:, 1:], reduction="none")
            total, count = total + float((each * counted).sum()), count + float(counted.sum())
        return total / max(1.0, count)


@lru_cache(maxsize=1)
def _epoch(texts: int, size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The batches of one pass over the texts, each an array of rows; every row is in one of them."""
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(texts)
    together = size * _BATCHES_SORTED_TOGETHER
    batches: list[np.ndarray] = []
    for start in range(0, texts, together):
        rows = np.sort(order[start : start + together])
        batches += [rows[place : place + size] for place in range(0, len(rows), size)]
    return [batches[place] for place in generator.permutation(len(batches))]
