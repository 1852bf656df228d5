"""How much of the original a level keeps: mean cosine of its answers on texts that no stage has trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...elastic import Submodel
from ...exporters.signature import Signature
from ...exporters.source import ModelSource
from ...exporters.universal import UniversalModel
from ..work.clock import Clock
from .texts import TextBatches

_BATCH = 25


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
    for batch in texts.once(_BATCH):
        output = module(*batch.inputs)[place].double()
        if of_tokens:
            weights = batch.weights[:, :, None]  # [B, S, 1]
            output = (output * weights).sum(1) / weights.sum(1).clamp(min=1)
        rows.append(output)
    return torch.cat(rows)


def _compared(signature: Signature) -> int:
    embedding = signature.text.embedding if signature.text else None
    names = [spec.name for spec in signature.outputs]
    if embedding is not None:
        return names.index(embedding)
    features = [number for number, spec in enumerate(signature.outputs) if len(spec.dims) > 1]
    return next((n for n in features if "sequence" in signature.outputs[n].dims), features[-1])
