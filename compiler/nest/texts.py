"""Texts as batches, and the embeddings of texts, by which it is measured how much of the original a level keeps.

Batches are cut to a length, neighbours of like length together, in an order that the seed decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ...elastic import Submodel
from ...errors import CheckpointError
from ...exporters.signature import Signature
from ...exporters.source import ModelSource
from ...exporters.universal import UniversalModel
from ...runtime.consistency.samples import keyed_texts
from ...runtime.inputs.arrays import InputChecker
from ...runtime.inputs.text import TextEncoder
from ..examples.corpus import split_parts
from ..work.clock import Clock

# Tokens of a text that are used; longer texts cost time quadratically and teach little more.
LONGEST = 64
# Batches whose texts are sorted together: enough to pad little, few enough to mix the texts.
_BATCHES_SORTED_TOGETHER = 16
# Texts embedded at once.
_EMBEDDED = 25


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
    """Batches of ``texts``, which are in order of length."""

    texts: tuple[str, ...]
    encoder: TextEncoder
    signature: Signature

    @classmethod
    def of(cls, source: ModelSource, texts: Sequence[str]) -> TextBatches:
        """``texts`` for the model in ``source``, by its own tokenizer, shortest first.

        Raises InputError if an input does not come from text.
        """
        signature = source.signature
        assert signature.text is not None
        file = source.checkpoint.folder / signature.text.file
        encoder = TextEncoder(file, signature.text, signature.inputs, source.tokenizer)
        return cls(tuple(sorted(texts, key=lambda text: (len(text), text))), encoder, signature)

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
        longest = min(LONGEST, self.signature.max_sequence or LONGEST)
        encoded = self.encoder.encode(texts, longest, truncate=True)
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
        cosines.append(float(torch.nn.functional.cosine_similarity(found, reference, dim=-1).mean()))
    return cosines


@torch.no_grad()
def embeddings(source: ModelSource, module: torch.nn.Module, texts: TextBatches) -> torch.Tensor:
    """One vector a text ``[texts, H]`` in float64, of the same output that compile's quality compares.

    That is the text embedding; without one the first output per token, averaged over real tokens; without that the last
    output with features.
    """
    place = _compared(source.signature)
    of_tokens = "sequence" in source.signature.outputs[place].dims
    rows = []
    for batch in texts.once(_EMBEDDED):
        output = module(*batch.inputs)[place].double()
        if of_tokens:
            weights = batch.weights[:, :, None]  # [B, S, 1]
            output = (output * weights).sum(1) / weights.sum(1).clamp(min=1)
        rows.append(output)
    return torch.cat(rows)


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


def _compared(signature: Signature) -> int:
    embedding = signature.text.embedding if signature.text else None
    names = [spec.name for spec in signature.outputs]
    if embedding is not None:
        return names.index(embedding)
    features = [number for number, spec in enumerate(signature.outputs) if len(spec.dims) > 1]
    return next((n for n in features if "sequence" in signature.outputs[n].dims), features[-1])
